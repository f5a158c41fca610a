"""Speculation over slow hops: what drafts are worth, beside the formula and beside one process.

    python benchmarks/speculation.py [--stages 2] [--hops 1,10,50] [--right 0.3,0.6,0.8,0.9]

SmolLM2-135M with int8 weights, one request, stages of one thread with EMULATED hops; four stages
share the cores of two. Drafts are an oracle's: the known answer, each token right with the
probability in the first column, so that the schedule is measured and no drafter flatters it. A
round runs every arm once, in turning order, after one to warm up; a ratio is taken within a round.
All arms must give the same tokens. `rounds k`: frames of k drafts, one at a time; `windows m`:
frames of m rows behind each other (`--draft-windows 16`).

The formula for drafts of which each is right with probability a, in frames of m rows, is
`speculate.predicted_s`. R_m, what a frame takes, is measured here by an oracle that is always
wrong, by itself for rounds and with frames behind it for windows, which share cores with it; tau_m,
between frames under way together, by one that is always right; a is as many as were right. Exits 4
where a ratio is below the least that is asked of it, the formula is over 10 % off in the median or
20 % at worst, or the tokens differ.

A line of 5 rounds takes about 2 minutes at 10 ms and 4 at 50 ms; before the first one of a delay
R_m and tau_m are measured, which takes as long.

--ghosts: ranks that compute nothing, wait as long as a stage of so many ms would, and give the
known tokens, so that eight stages need no eight cores. All of that is EMULATED.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Final, Literal

import hf

from anyshard.checkpoint import open_checkpoint
from anyshard.comm.control import Frame
from anyshard.comm.link import LinkSpec
from anyshard.engine import Engine
from anyshard.epoch import EngineOptions
from anyshard.launcher import RankGroup, fork_launcher
from anyshard.layout import plan
from anyshard.loading import loader, profile_of
from anyshard.request import Request
from anyshard.speculate import (
    FixedGate,
    Gate,
    OracleDrafter,
    Speculator,
    SurvivalGate,
    predicted_s,
)
from anyshard.tokenizer import open_tokenizer
from anyshard.worker import Worker, rank_main

NEW: Final = 64  # tokens of an answer
PROMPT: Final = 64
DRAFTS: Final = (1, 2, 3, 4, 6, 8)
ROWS: Final = (1, 2, 3, 4, 6)
MOST: Final = 8
WINDOWS: Final = 16
LAYERS: Final = {1: (30,), 2: (19, 11), 4: (10, 9, 8, 3)}  # with the head about even
#: by stages, ms of a hop and drafts right: least times plain of rounds, and of windows
ASKED: Final = {(2, 10.0, 0.8): (2.2, 3.0), (2, 50.0, 0.8): (0.0, 3.5)}

Mode = Literal["plain", "rounds", "windows"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to run. rows: of a frame, with drafts; None: those that the gate takes."""

    stages: int
    hop_ms: float
    right: float
    mode: Mode
    rows: int | None = 1
    threads: int = 1
    ms: list[float] = field(default_factory=list)  # a token
    length: list[float] = field(default_factory=list)  # tokens a round
    wasted: list[int] = field(default_factory=list)  # rows
    known: list[tuple[int, int]] = field(default_factory=list)  # drafts right, and wrong

    @property
    def drafts_right(self) -> float:
        """As many as were, of those that anybody knows about."""
        right, wrong = (sum(each) for each in zip(*self.known, strict=True))
        return right / max(1, right + wrong)

    @property
    def name(self) -> str:
        """For a row."""
        if self.mode == "plain":
            return "plain"
        if self.rows is None:
            return f"{self.mode} gated"
        return f"rounds {self.rows - 1}" if self.mode == "rounds" else f"windows {self.rows}"

    @property
    def windows(self) -> int:
        """Frames under way."""
        return WINDOWS if self.mode == "windows" else 1

    def gate(self) -> Gate:
        """What chooses drafts."""
        return SurvivalGate(self.windows) if self.rows is None else FixedGate(self.rows - 1)


class Ghost(Worker):
    """Waits instead of computing, `first_ms` for a row and `more_ms` for each more; the last one
    knows what comes next. `answer`: tokens by position."""

    def __init__(
        self, *args: Any, first_ms: float, more_ms: float, answer: dict[int, int], **named: Any
    ) -> None:
        super().__init__(*args, **named)
        self._first_s, self._more_s, self._answer = first_ms * 1e-3, more_ms * 1e-3, answer

    def step(self, frame: Frame) -> None:
        """A frame's time."""
        rows, layout = len(frame.rows), self.plan.layout
        self._take(frame)
        self.comm.tag.frame = frame.sequence
        if self.voids is not None:
            self.voids.begin(frame.sequence)
        self.body[0](rows)  # receive, and hear whether it is void
        until = time.monotonic() + self._first_s + self._more_s * (rows - 1)
        while (left := until - time.monotonic()) > 0:
            if self.voids is not None and self.voids.is_void:
                break
            time.sleep(min(left, 5e-4))
        if self.program.stage + 1 < layout.pp:
            self.body[-1](rows)
            return
        for row, position in enumerate(frame.rows["position"].tolist()):
            self.drawn[row] = self._answer.get(position + 1, 0)
        is_void = self.voids is not None and self.voids.is_void
        self.control.post_result(
            frame.sequence, self.drawn[:rows], self.row_fault[:rows], (), is_void=is_void
        )


class Bench:
    """A loaded group and the answer that all arms give. ghost_ms: of a stage of ghosts."""

    def __init__(self, *, ghost_ms: tuple[float, float] | None = None) -> None:
        checkpoint = open_checkpoint(None)
        self.config, self.profile = checkpoint.config, profile_of("int8")
        text = open_tokenizer(checkpoint).encode(hf.TEXT.read_text("utf-8"), add_special=True)
        self.prompt, self.answer = tuple(text[:PROMPT]), tuple(text[PROMPT : PROMPT + NEW])
        body = rank_main
        if ghost_ms is not None:
            known = dict(enumerate(self.answer, PROMPT))
            made = partial(Ghost, first_ms=ghost_ms[0], more_ms=ghost_ms[1], answer=known)
            body = partial(rank_main, worker_type=made)  # type: ignore[assignment]
        load = loader(checkpoint, threads=os.cpu_count() or 1, arithmetic="int8")
        self.group: RankGroup = fork_launcher(load, body)
        self.group.wait_loaded()
        self.epoch = 0
        self.body = "none, ghosts" if ghost_ms else ""
        if ghost_ms is None:
            alone = Arm(stages=1, hop_ms=0.0, right=0.0, mode="plain", threads=2)
            self.answer = self.run(alone)[1]

    def run(self, arm: Arm, *, seed: int = 0) -> tuple[float, tuple[int, ...], Speculator | None]:
        """ms a token after the first, the tokens, and who drafted."""
        self.epoch += 1
        layers = LAYERS.get(arm.stages)
        links = ()
        if arm.stages > 1:
            links = (LinkSpec(delay_s=arm.hop_ms * 1e-3),) * arm.stages
        speculator = None
        if arm.mode != "plain":
            vocab = self.config.vocab
            drafter = OracleDrafter(
                {self.prompt: self.answer}, right=arm.right, vocab=vocab, seed=seed
            )
            speculator = Speculator(drafter, arm.gate(), most=MOST, windows=arm.windows)
        engine = Engine(
            self.group,
            self.config,
            self.profile,
            plan(self.config, pp=arm.stages, layers=layers, leaf=self.profile.leaf),
            EngineOptions(
                threads=arm.threads,
                chunk=PROMPT,
                max_num_seqs=1,
                max_model_len=PROMPT + NEW,
                links=links,
                drafts=0 if speculator is None else MOST,
                windows=arm.windows,
            ),
            cores=len(os.sched_getaffinity(0)),
            epoch=self.epoch,
            speculator=speculator,
        )
        self.body = self.body or engine.body
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
                arm.known.append((sum(speculator.figures.accepted), speculator.figures.rollbacks))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return wrong


def spread(values: list[float], digits: int = 1) -> str:
    """`12.3 (11.9–12.8)`."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def best_of(arms: list[Arm]) -> Arm:
    """The fastest, by the median."""
    return min(arms, key=lambda arm: median(arm.ms))


class Formula:
    """R_m and tau_m of a split, measured; ms a token by `predicted_s`."""

    def __init__(self, bench: Bench, *, stages: int, hop_ms: float, rounds: int) -> None:
        shape: dict[str, Any] = {"stages": stages, "hop_ms": hop_ms}
        rounds_wrong = [Arm(right=0.0, mode="rounds", rows=k + 1, **shape) for k in DRAFTS]
        wrong, right = (
            [Arm(right=each, mode="windows", rows=m, **shape) for m in ROWS] for each in (0.0, 1.0)
        )
        self.failed = measure(bench, [*rounds_wrong, *wrong, *right], rounds) > 0
        self.frame_ms = {
            "rounds": {arm.rows or 0: median(arm.ms) for arm in rounds_wrong},
            "windows": {arm.rows or 0: median(arm.ms) for arm in wrong},
        }
        self.between_ms = {m: m * median(arm.ms) for m, arm in zip(ROWS, right, strict=True)}

    def ms(self, arm: Arm) -> float:
        """A token of an arm that has run, with as many drafts right as were."""
        assert arm.rows is not None
        frame = self.frame_ms[arm.mode][arm.rows]
        between = self.between_ms[arm.rows] if arm.mode == "windows" else frame
        return predicted_s(arm.drafts_right, arm.rows, latency_s=frame, interval_s=between)


def cell(
    bench: Bench, formula: Formula, *, stages: int, hop_ms: float, right: float, rounds: int
) -> tuple[dict[str, Any], bool]:
    """A row of the table, printed; its numbers, and whether something was wrong or too slow."""
    shape: dict[str, Any] = {"stages": stages, "hop_ms": hop_ms, "right": right}
    one: dict[str, Any] = {"stages": 1, "hop_ms": 0.0, "right": right, "threads": 2}
    plain = Arm(mode="plain", **shape)
    fixed = [Arm(mode="rounds", rows=k + 1, **shape) for k in DRAFTS]
    windows = [Arm(mode="windows", rows=m, **shape) for m in ROWS]
    gated = [Arm(mode=mode, rows=None, **shape) for mode in ("rounds", "windows")]
    alone = [Arm(mode="plain", **one), Arm(mode="rounds", rows=None, **one)]
    alone = alone if bench.body != "none, ghosts" else []
    failed = measure(bench, [plain, *fixed, *windows, *gated, *alone], rounds) > 0
    best_k, best_m = best_of(fixed), best_of(windows)
    gains = [
        [a / b for a, b in zip(plain.ms, arm.ms, strict=True)] for arm in (best_k, best_m, gated[1])
    ]
    ratio = [a / b for a, b in zip(best_k.ms, best_m.ms, strict=True)]
    says = formula.ms(best_k) / formula.ms(best_m)
    print(
        f"| {right:g} | {hop_ms:g} ms | {spread(plain.ms)} | {best_k.name}: "
        f"{spread(best_k.ms)}, {spread(gains[0], 2)} times plain | {best_m.name}: "
        f"{spread(best_m.ms)}, {spread(gains[1], 2)} times plain, {spread(ratio, 2)} times rounds "
        f"(formula {says:.2f}) | {spread(gated[0].ms)} and {spread(gated[1].ms)}; wasted rows "
        f"{median(gated[0].wasted):.0f} of {median(best_k.wasted):.0f}, "
        f"{median(gated[1].wasted):.0f} of {median(best_m.wasted):.0f} | "
        f"{', '.join(spread(arm.ms) for arm in alone)} |",
        flush=True,
    )
    least = ASKED.get((stages, hop_ms, right), (0.0, 0.0))
    for name, gain, asked in zip(("rounds", "windows"), gains, least, strict=False):
        if median(gain) < asked:
            failed = True
            print(
                f"NOT MET: {name}, hops of {hop_ms:g} ms, {right:g} right: {median(gain):.2f} "
                f"times plain, asked {asked}"
            )
    arms = [plain, *fixed, *windows, *gated]
    off = {arm.name: formula.ms(arm) / median(arm.ms) - 1 for arm in (*fixed, *windows)}
    found = {
        "stages": stages,
        "hop_ms": hop_ms,
        "right": right,
        "arms": {arm.name: arm.ms for arm in arms},
        "wasted": {arm.name: arm.wasted for arm in arms},
        "alone": [arm.ms for arm in alone],
        "off": off,
        "ratio": ratio,
        "formula_ratio": says,
    }
    return found, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--hops", default="1,10,50", help="ms, such as 0.1,1,10,50")
    parser.add_argument("--right", default="0.3,0.6,0.8,0.9")
    parser.add_argument("--ghosts", help="ms of a stage's row and of one more, such as 5,1.5")
    parser.add_argument("--json")
    asked = parser.parse_args()
    hops = [float(each) for each in asked.hops.split(",")]
    rights = [float(each) for each in asked.right.split(",")]
    ghost_ms = None
    if asked.ghosts:
        first, more = (float(each) for each in asked.ghosts.split(","))
        ghost_ms = first, more
    bench = Bench(ghost_ms=ghost_ms)
    failed = False
    report: list[dict[str, Any]] = []
    print(
        "| drafts right | hops, EMULATED | plain, ms a token | rounds | windows | gated | alone |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for hop in hops:
        formula = Formula(bench, stages=asked.stages, hop_ms=hop, rounds=min(3, asked.rounds))
        failed |= formula.failed
        for right in rights:
            found, is_bad = cell(
                bench, formula, stages=asked.stages, hop_ms=hop, right=right, rounds=asked.rounds
            )
            found |= {"frame_ms": formula.frame_ms, "between_ms": formula.between_ms}
            failed |= is_bad
            report.append(found)
    off = [abs(each) for found in report for each in found["off"].values()]
    failed |= median(off) > 0.1 or max(off) > 0.2
    print(
        f"\n{asked.stages} stages; alone: one process, 2 threads, plain and gated. Formula "
        f"against measured: {median(off):.0%} off in the median, {max(off):.0%} at worst; "
        f"kernels {bench.body}, {NEW} tokens, {asked.rounds} rounds"
    )
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(report, file)
    bench.group.close()
    return 4 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
