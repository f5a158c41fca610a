"""Speculation by n-grams on real text, its kinds kept apart: what the gate saves, and costs.

    python benchmarks/speculation_text.py [--rounds 5] [--stages 1] [--hop 10]

SmolLM2-135M with int8 weights, one request at a time, kinds in turn, so that a gate meets each of
them again; prose and code that are new are drawn at temperature 0.8, the rest greedily. Arms:
plain, the first K drafts for several K, all drafts, and the gate; each arm is an engine of its own
that runs all prompts, `--stages` of one thread with EMULATED hops of `--hop` ms, or one process
with two threads. A round runs every arm once, in turning order, after one to warm up. Beside each
kind stands the share of four tokens in a row that the answer has had before: a small model repeats
itself, and that flatters n-grams. `--json` keeps the answers, and what frames took by their rows,
for `gate_playback.py`. Exits 4 where the gate is not at least 5 % faster than the best K on all
kinds together, wastes over three quarters of its rows, or is over 2 % slower than plain on new
text; or where tokens differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import hf

from anyshard.checkpoint import open_checkpoint
from anyshard.comm.link import LinkSpec
from anyshard.engine import Engine
from anyshard.epoch import EngineOptions
from anyshard.launcher import RankGroup, fork_launcher
from anyshard.layout import plan
from anyshard.loading import loader, profile_of
from anyshard.ops.spread import Spread
from anyshard.request import Request, Sampling
from anyshard.speculate import (
    FixedGate,
    Gate,
    NgramDrafter,
    OpenGate,
    Speculator,
    SurvivalGate,
)
from anyshard.tokenizer import open_tokenizer
from anyshard.worker import rank_main

NEW: Final = 96
MOST: Final = 8
WINDOWS: Final = 16
FIXED: Final = (1, 2, 4, 6, 8)
LAYERS: Final = {1: (30,), 2: (19, 11), 4: (10, 9, 8, 3)}
NOVEL: Final = ("novel prose", "novel code")
PROSE: Final = hf.TEXT.read_text("utf-8").split("\n\n")
CODE: Final = (hf.TEXT.parent / "code.txt").read_text("utf-8").split("\n\n\n")

Kind = str
Messages = list[dict[str, str]]


def asked(text: str) -> Messages:
    """One question."""
    return [{"role": "user", "content": text}]


def agent(name: str) -> Messages:
    """Turns of a tool that reports in the same form again and again."""
    report = "Step {}: checked {name}. Status: ok. Errors: none. Next: run the following check."
    turns: Messages = []
    for number in range(1, 5):
        turns.append({"role": "user", "content": f"Run check {number} of {name} and report."})
        turns.append({"role": "assistant", "content": report.format(number, name=name)})
    return [*turns, {"role": "user", "content": f"Run check 5 of {name} and report."}]


KINDS: Final[dict[Kind, list[Messages]]] = {
    "novel prose": [
        asked("Write a short story about a clockmaker who cannot sleep."),
        asked("Describe a market in a harbour town at dawn."),
        asked("Write a letter from a gardener to her brother."),
    ],
    "novel code": [
        asked("Write a Python class for a queue of jobs with priorities."),
        asked("Write a C function that parses an IPv4 address."),
        asked("Write a SQL schema for a library that lends books."),
    ],
    "copy-edit": [
        asked(f"Repeat this text word for word, with the spelling put right:\n\n{PROSE[0]}"),
        asked(f"Repeat this code, with `Posting` renamed to `Entry`:\n\n{CODE[2]}"),
        asked(f"Repeat this text word for word:\n\n{PROSE[1]}"),
    ],
    "repeated turns": [agent("the mail server"), agent("disk 4"), agent("the nightly backup")],
    "quotation": [
        asked(f"{PROSE[2]}\n\nQuote the first two sentences of this passage."),
        asked(f"{PROSE[0]}\n\nWhich sentence is about the bakers? Quote it."),
        asked(f"{PROSE[3]}\n\nQuote the passage from its beginning."),
    ],
}


class Listener(Speculator):
    """Keeps what the model said of its tokens: entropies by request."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.entropies: dict[int, list[float]] = {}

    def came_out(
        self, request_id: int, tokens: Sequence[int], spreads: Sequence[Spread] = (), **named: Any
    ) -> None:
        """See Speculator."""
        self.entropies.setdefault(request_id, []).extend(each.entropy for each in spreads)
        super().came_out(request_id, tokens, spreads, **named)


@dataclass
class Arm:
    """One way to draft. gate None: no drafts. row_ms: of frames of so many rows, each round."""

    name: str
    gate: type[Gate] | int | None
    seconds: dict[Kind, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    wasted: dict[Kind, list[int]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    row_ms: list[list[float]] = field(default_factory=list)

    def speculator(self, vocab: int, windows: int) -> Listener | None:
        """Who drafts."""
        if self.gate is None:
            return None
        gate: Gate
        if isinstance(self.gate, int):
            gate = FixedGate(self.gate)
        else:
            gate = SurvivalGate(windows) if self.gate is SurvivalGate else OpenGate()
        return Listener(NgramDrafter(vocab), gate, most=MOST, windows=windows)

    def total(self, kinds: Sequence[Kind]) -> list[float]:
        """Seconds of each round."""
        return [sum(each) for each in zip(*(self.seconds[kind] for kind in kinds), strict=True)]

    def rows(self, kinds: Sequence[Kind]) -> float:
        """Wasted, by the median."""
        return sum(median(self.wasted[kind]) for kind in kinds)


def repeated(tokens: Sequence[int]) -> tuple[int, int]:
    """Of four tokens in a row, how many have come before, and how many there are."""
    seen: set[tuple[int, ...]] = set()
    again = 0
    fours = [tuple(tokens[at : at + 4]) for at in range(len(tokens) - 3)]
    for four in fours:
        again += four in seen
        seen.add(four)
    return again, len(fours)


class Bench:
    """A loaded group, and every kind's prompts."""

    def __init__(self, *, stages: int, hop_ms: float) -> None:
        checkpoint = open_checkpoint(None)
        self.config, self.profile = checkpoint.config, profile_of("int8")
        load = loader(checkpoint, threads=os.cpu_count() or 1, arithmetic="int8")
        self.group: RankGroup = fork_launcher(load, rank_main)
        self.group.wait_loaded()
        tokenizer = open_tokenizer(checkpoint)
        self.prompts = {
            kind: [tuple(tokenizer.encode_chat(each)) for each in messages]
            for kind, messages in KINDS.items()
        }
        self.longest = max(len(each) for group in self.prompts.values() for each in group)
        self.stages, self.epoch = stages, 0
        self.entropies: dict[int, list[float]] = {}
        self.links = (LinkSpec(delay_s=hop_ms * 1e-3),) * stages if stages > 1 else ()

    def run(self, arm: Arm, *, is_kept: bool) -> dict[Kind, list[tuple[int, ...]]]:
        """All prompts, and their answers."""
        self.epoch += 1
        windows = 1 if self.stages == 1 or arm.gate is None else WINDOWS
        speculator = arm.speculator(self.config.vocab, windows)
        engine = Engine(
            self.group,
            self.config,
            self.profile,
            plan(self.config, layers=LAYERS[self.stages], leaf=self.profile.leaf),
            EngineOptions(
                threads=2 if self.stages == 1 else 1,
                max_num_seqs=1,
                max_model_len=self.longest + NEW,
                links=self.links,
                drafts=0 if speculator is None else MOST,
                windows=windows,
            ),
            cores=len(os.sched_getaffinity(0)),
            epoch=self.epoch,
            speculator=speculator,
        )
        answers: dict[Kind, list[tuple[int, ...]]] = {kind: [] for kind in KINDS}
        seconds, wasted = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0)
        for number in range(3):
            for kind in KINDS:
                sampling = Sampling(temperature=0.8 if kind in NOVEL else 0.0, seed=number)
                before = wasted_by(speculator)
                engine.submit(
                    Request(prompt=self.prompts[kind][number], max_tokens=NEW, sampling=sampling)
                )
                tokens: list[int] = []
                start = 0.0
                for event in engine.run():
                    assert event.token is not None
                    if not tokens:
                        start = time.perf_counter()
                    tokens.append(event.token)
                seconds[kind] += time.perf_counter() - start
                wasted[kind] += (
                    0 if speculator is None else speculator.figures.wasted_rows
                ) - before
                answers[kind].append(tuple(tokens))
        engine.close()
        if speculator is not None:
            self.entropies = speculator.entropies
        if is_kept:
            if speculator is not None:
                sizes = range(1, MOST + 2)
                arm.row_ms.append([1e3 * speculator.costs.latency.of(rows) for rows in sizes])
            for kind in KINDS:
                arm.seconds[kind].append(seconds[kind])
                arm.wasted[kind].append(wasted[kind])
        return answers

    def texts(self, answers: dict[Kind, list[tuple[int, ...]]]) -> list[dict[str, Any]]:
        """What has come out, in the order in which it did."""
        order = [(kind, number) for number in range(3) for kind in KINDS]
        return [
            {
                "kind": kind,
                "prompt": self.prompts[kind][number],
                "tokens": answers[kind][number],
                "entropy": entropy,
            }
            for (kind, number), (_, entropy) in zip(
                order, sorted(self.entropies.items()), strict=True
            )
        ]


def wasted_by(speculator: Speculator | None) -> int:
    """Rows so far."""
    return 0 if speculator is None else speculator.figures.wasted_rows


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Of each round, the median and its ends."""
    each = [a / b for a, b in zip(theirs, ours, strict=True)]
    return f"{median(each):.3f} ({min(each):.3f}–{max(each):.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=int, default=1, choices=sorted(LAYERS))
    parser.add_argument("--hop", type=float, default=10.0, help="ms")
    parser.add_argument("--json")
    flags = parser.parse_args()
    bench = Bench(stages=flags.stages, hop_ms=flags.hop)
    plain, gated = Arm("plain", None), Arm("gate", SurvivalGate)
    fixed = [*(Arm(f"first {k}", k) for k in FIXED), Arm("all", OpenGate)]
    arms = [plain, *fixed, gated]
    known: dict[Kind, list[tuple[int, ...]]] = {}
    wrong = 0
    for number in range(-1, flags.rounds):
        for at in range(len(arms)):
            answers = bench.run(arms[(at + number) % len(arms)], is_kept=number >= 0)
            known = known or answers
            wrong += answers != known
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    everything = list(KINDS)
    best = min(fixed, key=lambda arm: median(arm.total(everything)))
    print(
        f"| text | repeats itself | plain, ms a token | best K: {best.name} | gate | wasted rows |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for kind in [*KINDS, "all"]:
        kinds = everything if kind == "all" else [kind]
        counts = [repeated(answer) for each in kinds for answer in known[each]]
        share = sum(again for again, _ in counts) / sum(count for _, count in counts)
        tokens = sum(len(answer) - 1 for each in kinds for answer in known[each])
        own = min(fixed, key=lambda arm: median(arm.total(kinds)))
        print(
            f"| {kind} | {share:.0%} | {1e3 * median(plain.total(kinds)) / tokens:.2f} "
            f"| {ratio(best.total(kinds), plain.total(kinds))} times plain (here {own.name}: "
            f"{ratio(own.total(kinds), plain.total(kinds))}) "
            f"| {ratio(gated.total(kinds), plain.total(kinds))} times plain, "
            f"{ratio(gated.total(kinds), best.total(kinds))} times best K "
            f"| {gated.rows(kinds):.0f} of {best.rows(kinds):.0f} |"
        )
    over = [a / b for a, b in zip(best.total(everything), gated.total(everything), strict=True)]
    new = [a / b for a, b in zip(gated.total(NOVEL), plain.total(NOVEL), strict=True)]
    failed = wrong > 0
    for is_met, what in (
        (median(over) >= 1.05, f"the gate is {median(over):.3f} times the best K; asked 1.05"),
        (
            gated.rows(everything) <= 0.75 * best.rows(everything),
            f"{gated.rows(everything):.0f} rows wasted of {best.rows(everything):.0f}; asked 75 %",
        ),
        (median(new) <= 1.02, f"on new text the gate takes {median(new):.3f} of plain; asked 1.02"),
    ):
        failed |= not is_met
        print(f"{'met' if is_met else 'NOT MET'}: {what}")
    if flags.json:
        with open(flags.json, "w", encoding="utf-8") as file:
            json.dump(
                {
                    "arms": {arm.name: [arm.seconds, arm.wasted] for arm in arms},
                    "row_ms": [median(each) for each in zip(*fixed[-1].row_ms, strict=True)],
                    "vocab": bench.config.vocab,
                    "texts": bench.texts(known),
                },
                file,
            )
    bench.group.close()
    return 4 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
