"""Speculation over slow hops: what drafts are worth, beside the formula and beside one process.

    python benchmarks/speculation.py [--rounds 5] [--hops 1,10,50] [--right 0.3,0.6,0.8,0.9]

SmolLM2-135M with int8 weights, one request, two stages of one thread (`--layers 19,11`) with
EMULATED hops. Drafts are an oracle's: the known answer, each token right with the probability in
the first column, so that the schedule is measured and no drafter flatters it. A round runs every
arm once, in turning order, after one to warm up; a ratio is taken within a round. All arms must
give the same tokens.

The formula for k drafts, of which each is right with probability a: T = R_m (1 - a) / (1 - a^m) ms
a token with m = k + 1 rows; R_m is what a step of m rows takes, measured here by an oracle that is
always wrong. Exits 4 where a ratio is below the least that is asked of it, or the tokens differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
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
from anyshard.request import Request
from anyshard.speculate import FixedGate, Gate, OracleDrafter, Speculator, SurvivalGate
from anyshard.tokenizer import open_tokenizer
from anyshard.worker import rank_main

NEW: Final = 64  # tokens of an answer
PROMPT: Final = 64
DRAFTS: Final = (1, 2, 3, 4, 6, 8)
MOST: Final = 8
LAYERS: Final = (19, 11)
#: hops of so many ms, right with this probability: least times plain
ASKED: Final = {(10.0, 0.8): 2.2}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to run. hop_ms None: one process with two threads. drafts None: those that the gate
    takes; 0: none."""

    hop_ms: float | None
    right: float
    drafts: int | None
    ms: list[float] = field(default_factory=list)  # a token
    length: list[float] = field(default_factory=list)  # tokens a step
    wasted: list[int] = field(default_factory=list)  # rows

    @property
    def name(self) -> str:
        """For a row."""
        return "plain" if self.drafts == 0 else f"k={self.drafts}" if self.drafts else "gated"


class Bench:
    """A loaded group and the answer that all arms give."""

    def __init__(self) -> None:
        checkpoint = open_checkpoint(None)
        self.config, self.profile = checkpoint.config, profile_of("int8")
        load = loader(checkpoint, threads=os.cpu_count() or 1, arithmetic="int8")
        self.group: RankGroup = fork_launcher(load, rank_main)
        self.group.wait_loaded()
        text = open_tokenizer(checkpoint).encode(hf.TEXT.read_text("utf-8"), add_special=True)
        self.prompt = tuple(text[:PROMPT])
        self.epoch = 0
        self.body = ""
        self.answer: tuple[int, ...] = ()
        self.answer = self.run(Arm(hop_ms=None, right=0.0, drafts=0))[1]

    def run(self, arm: Arm, *, seed: int = 0) -> tuple[float, tuple[int, ...], Speculator | None]:
        """ms a token after the first, the tokens, and who drafted."""
        self.epoch += 1
        layers = None if arm.hop_ms is None else LAYERS
        links = () if arm.hop_ms is None else (LinkSpec(delay_s=arm.hop_ms * 1e-3),) * len(LAYERS)
        speculator = None
        if arm.drafts != 0:
            vocab = self.config.vocab
            drafter = OracleDrafter(
                {self.prompt: self.answer}, right=arm.right, vocab=vocab, seed=seed
            )
            gate: Gate = SurvivalGate() if arm.drafts is None else FixedGate(arm.drafts)
            speculator = Speculator(drafter, gate, most=MOST)
        engine = Engine(
            self.group,
            self.config,
            self.profile,
            plan(self.config, layers=layers, leaf=self.profile.leaf),
            EngineOptions(
                threads=2 if layers is None else 1,
                max_num_seqs=1,
                max_model_len=PROMPT + NEW,
                links=links,
                drafts=0 if speculator is None else MOST,
            ),
            cores=len(os.sched_getaffinity(0)),
            epoch=self.epoch,
            speculator=speculator,
        )
        self.body = engine.body
        engine.submit(Request(prompt=self.prompt, max_tokens=NEW))
        tokens: list[int] = []
        start = 0.0
        for event in engine.run():
            assert event.token is not None
            if not tokens:
                start = time.perf_counter()
            tokens.append(event.token)
        spent = time.perf_counter() - start
        engine.close()
        return 1e3 * spent / (NEW - 1), tuple(tokens), speculator


def formula(step_ms: float, right: float, drafts: int) -> float:
    """ms a token of synchronous rounds with so many drafts."""
    rows = drafts + 1
    if right >= 1:
        return step_ms / rows
    return step_ms * (1 - right) / (1 - right**rows)


def measure(bench: Bench, arms: list[Arm], rounds: int) -> int:
    """Run all arms in turning order; how many gave other tokens."""
    wrong = 0
    for number in range(-1, rounds):
        for at in range(len(arms)):
            arm = arms[(at + number) % len(arms)]
            ms, tokens, speculator = bench.run(arm, seed=number)
            wrong += tokens != bench.answer
            if number < 0:
                continue
            arm.ms.append(ms)
            if speculator is not None:
                arm.length.append(speculator.figures.acceptance_length)
                arm.wasted.append(speculator.figures.wasted_rows)
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return wrong


def spread(values: list[float], digits: int = 1) -> str:
    """`12.3 (11.9–12.8)`."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hops", default="1,10,50", help="ms, such as 1,10,50")
    parser.add_argument("--right", default="0.3,0.6,0.8,0.9")
    parser.add_argument("--json")
    asked = parser.parse_args()
    hops = [float(each) for each in asked.hops.split(",")]
    rights = [float(each) for each in asked.right.split(",")]
    bench = Bench()
    failed = False
    report: list[dict[str, Any]] = []
    print("| drafts right | hops, EMULATED | plain | best k | gated | 1 process, 2 threads |")
    print("| --- | --- | --- | --- | --- | --- |")
    off: list[float] = []
    for hop in hops:
        steps = [Arm(hop_ms=hop, right=0.0, drafts=k) for k in DRAFTS]
        failed |= measure(bench, steps, 1) > 0
        for right in rights:
            plain = Arm(hop_ms=hop, right=right, drafts=0)
            fixed = [Arm(hop_ms=hop, right=right, drafts=k) for k in DRAFTS]
            gated = Arm(hop_ms=hop, right=right, drafts=None)
            alone = Arm(hop_ms=None, right=right, drafts=0)
            arms = [plain, *fixed, gated, alone]
            wrong = measure(bench, arms, asked.rounds)
            failed |= wrong > 0
            best = min(fixed, key=lambda arm: median(arm.ms))
            predicted = [formula(median(step.ms), right, step.drafts or 0) for step in steps]
            errors = [abs(predicted[n] / median(arm.ms) - 1) for n, arm in enumerate(fixed)]
            off += errors
            gain = [a / b for a, b in zip(plain.ms, best.ms, strict=True)]
            print(
                f"| {right:g} | {hop:g} ms | {spread(plain.ms)} ms a token "
                f"| {best.name}: {spread(best.ms)}, {spread(gain, 2)} times plain, formula "
                f"{predicted[fixed.index(best)]:.1f} | {spread(gated.ms)}, wasted rows "
                f"{median(gated.wasted):.0f} of {median(best.wasted):.0f} | {spread(alone.ms)} |",
                flush=True,
            )
            least = ASKED.get((hop, right))
            if least is not None and median(gain) < least:
                failed = True
                print(f"hops of {hop:g} ms, {right:g} right: asked {least} times plain")
            report.append(
                {
                    "hop_ms": hop,
                    "right": right,
                    "arms": {
                        **{arm.name: arm.ms for arm in (plain, *fixed, gated)},
                        "alone": alone.ms,
                        "steps": {f"k={arm.drafts}": arm.ms for arm in steps},
                    },
                    "formula_ms": predicted,
                    "wrong": wrong,
                }
            )
    print(
        f"\nformula against measured: {median(off):.0%} off in the median, {max(off):.0%} at "
        f"worst; kernels {bench.body}, {NEW} tokens, {asked.rounds} rounds"
    )
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(report, file)
    bench.group.close()
    return 4 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
