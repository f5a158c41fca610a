"""Pipelines of two stages: schedules against each other, against threads, and over a slow link.

    python benchmarks/pipelines.py [--rounds 5] [--json FILE] [--chunk 64]

SmolLM2-135M with int8 weights, two stages of one thread each on two cores, `--layers` cut for what
is measured (the head weighs eight layers in decoding and nothing in a prompt). One rank group is
loaded once for each wire; an arm is an epoch of it. A round runs every arm once, in turning order,
after one to warm up; a ratio is taken within a round. Tokens are equal in all arms of a wire.

The single process stands beside every split: with 2 threads it reads each weight once for all
sequences, where a pipeline reads its half once for each micro-batch.

Exits 4 where a ratio is below the least that is asked of it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any, Final

import hf

from anyshard.checkpoint import open_checkpoint
from anyshard.comm.link import LinkSpec
from anyshard.config import WireType
from anyshard.engine import Engine
from anyshard.epoch import EngineOptions
from anyshard.launcher import RankGroup, fork_launcher
from anyshard.layout import plan
from anyshard.loading import loader, profile_of
from anyshard.request import Request
from anyshard.schedule import ScheduleKind, bubble_ratio
from anyshard.tokenizer import open_tokenizer
from anyshard.trace import bubble
from anyshard.worker import rank_main

NEW: Final = 48  # tokens of an answer
PROMPT: Final = 16  # before it
WIRES: Final[tuple[WireType, ...]] = ("none", "int8")
LONG: Final = 512  # tokens of a prompt that is only read
FAR: Final = LinkSpec(delay_s=0.01)
THIN: Final = LinkSpec(delay_s=0.0, rate_bytes_s=5e5)  # 4 Mbit/s


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to run; layers: of each stage. sequences are answered at once, or one by one."""

    name: str
    layers: tuple[int, ...] | None = None
    threads: int = 1
    schedule: ScheduleKind = "continuous"
    micro_batches: int | None = None
    chunk: int = 256
    sequences: int = 8
    one_by_one: bool = False
    prompt: int = PROMPT
    link: LinkSpec | None = None
    wire: WireType = "none"
    rates: list[float] = field(default_factory=list)  # tokens/s


def arms(chunk: int) -> dict[str, list[Arm]]:
    """By what is measured."""
    decode, read = (19, 11), (15, 15)
    return {
        "decode of 8 sequences": [
            Arm(name="2 stages, continuous, 2 micro-batches", layers=decode, micro_batches=2),
            Arm(
                name="2 stages, fill-drain, 2 micro-batches",
                layers=decode,
                micro_batches=2,
                schedule="fill-drain",
            ),
            Arm(name="2 stages, 1 micro-batch in flight", layers=decode, micro_batches=1),
            Arm(name="1 process, 2 threads", threads=2),
            Arm(name="1 process, 1 thread"),
        ],
        "prefill of 512": [
            Arm(name="2 stages, 1 thread each", layers=read, chunk=chunk, sequences=1, prompt=LONG),
            Arm(name="1 process, 2 threads", threads=2, sequences=1, prompt=LONG),
            Arm(name="1 process, 1 thread", sequences=1, prompt=LONG),
        ],
        "decode of 8 sequences, EMULATED hops of 10 ms": [
            *(
                Arm(
                    name=f"2 stages, continuous, {count} micro-batches",
                    layers=decode,
                    micro_batches=count,
                    link=FAR,
                )
                for count in (2, 3, 4)
            ),
            Arm(name="2 stages, one after the other", layers=decode, link=FAR, one_by_one=True),
            Arm(name="1 process, 2 threads", threads=2),
        ],
        "prefill of 512, EMULATED hops of 4 Mbit/s": [
            Arm(
                name=f"2 stages, wire {wire}",
                layers=read,
                chunk=chunk,
                sequences=1,
                prompt=LONG,
                link=THIN,
                wire=wire,
            )
            for wire in WIRES
        ],
    }


#: what is measured, the arm, over which, least
ASKED: Final = (
    ("decode of 8 sequences", 0, 1, 1.15),
    ("decode of 8 sequences", 0, 2, 1.4),
    ("decode of 8 sequences, EMULATED hops of 10 ms", 2, 3, 3.0),
    ("prefill of 512, EMULATED hops of 4 Mbit/s", 1, 0, 2.0),
)
BUBBLE: Final = (4, 64)  # chunks of a prompt, rows of each
OF_THE_SLOTS: Final = 0.05
OF_THE_GAIN: Final = 0.9  # of the gain of two threads over one, in prefill


class Bench:
    """A loaded rank group, of one profile."""

    def __init__(self, wire: WireType) -> None:
        checkpoint = open_checkpoint(None)
        self.config, self.profile = checkpoint.config, profile_of("int8", wire=wire)
        load = loader(checkpoint, threads=os.cpu_count() or 1, arithmetic="int8", wire=wire)
        self.group: RankGroup = fork_launcher(load, rank_main)
        self.group.wait_loaded()
        tokens = open_tokenizer(checkpoint).encode(hf.TEXT.read_text("utf-8"), add_special=True)
        self.tokens = tokens * (1 + 2 * LONG // len(tokens))
        self.epoch = 0
        self.body = ""

    def run(self, arm: Arm) -> tuple[float, list[list[int]]]:
        """Tokens/s: of the prompt up to the first token, or of all answers after their first."""
        self.epoch += 1
        stages = len(arm.layers or (1,))
        layout = plan(self.config, layers=arm.layers, wire=arm.wire, leaf=self.profile.leaf)
        is_read = arm.prompt == LONG
        new = 1 if is_read else NEW
        engine = Engine(
            self.group,
            self.config,
            self.profile,
            layout,
            EngineOptions(
                threads=arm.threads,
                chunk=arm.chunk,
                max_num_seqs=arm.sequences,
                max_model_len=arm.prompt + NEW,
                schedule=arm.schedule,
                micro_batches=arm.micro_batches,
                links=() if arm.link is None else (arm.link,) * stages,
            ),
            cores=len(os.sched_getaffinity(0)),
            epoch=self.epoch,
        )
        self.body = engine.body
        engine.control.wait_ready()
        answers: dict[int, list[int]] = {}
        rate = 0.0
        if is_read:
            start = time.perf_counter()
            self._submit(engine, arm, 0, new, answers)
            self._drain(engine, answers)
            rate = arm.prompt / (time.perf_counter() - start)
        elif arm.one_by_one:
            spent = 0.0
            for index in range(arm.sequences):
                self._submit(engine, arm, index, new, answers)
                spent += self._drain(engine, answers)
            rate = arm.sequences * (new - 1) / spent
        else:
            for index in range(arm.sequences):
                self._submit(engine, arm, index, new, answers)
            rate = arm.sequences * (new - 1) / self._drain(engine, answers)
        engine.close()
        return rate, [answers[key] for key in sorted(answers)]

    def bubble(self) -> float:
        """Measured share of idle time of fill-drain, 2 stages and 4 chunks of a prompt."""
        self.epoch += 1
        many, rows = BUBBLE
        engine = Engine(
            self.group,
            self.config,
            self.profile,
            plan(self.config, layers=(15, 15), leaf=self.profile.leaf),
            EngineOptions(
                threads=1,
                chunk=rows,
                max_num_seqs=1,
                max_model_len=many * rows + 1,
                schedule="fill-drain",
                micro_batches=many,
                trace_events=1 << 10,
            ),
            cores=len(os.sched_getaffinity(0)),
            epoch=self.epoch,
        )
        for _ in range(2):  # the first one touches memory that is new
            engine.submit(Request(prompt=tuple(self.tokens[: many * rows]), max_tokens=1))
            assert all(event.token is not None for event in engine.run())
        run = engine.traced("fill-drain")
        engine.close()
        ranks = tuple(
            replace(rank, events=rank.events[rank.events["frame"] > many]) for rank in run.ranks
        )
        return bubble(replace(run, ranks=ranks))

    def _submit(
        self, engine: Engine, arm: Arm, index: int, new: int, answers: dict[int, list[int]]
    ) -> None:
        prompt = tuple(self.tokens[index * 7 : index * 7 + arm.prompt])
        answers[engine.submit(Request(prompt=prompt, max_tokens=new))] = []

    def _drain(self, engine: Engine, answers: dict[int, list[int]]) -> float:
        """Seconds from when all have their first token to the end."""
        start = time.perf_counter()
        waiting = [key for key, tokens in answers.items() if not tokens]
        for event in engine.run():
            assert event.token is not None
            answers[event.request_id].append(event.token)
            if waiting and all(answers[key] for key in waiting):
                start, waiting = time.perf_counter(), []
        return time.perf_counter() - start


def main() -> None:
    parser: argparse.ArgumentParser = hf.flags(__doc__, rounds=5)
    parser.add_argument("--chunk", type=int, default=64, help="rows of the prompt in a step")
    asked = parser.parse_args()
    load, benches = os.getloadavg()[0], {wire: Bench(wire) for wire in WIRES}
    tasks, bubbles = arms(asked.chunk), list[float]()
    try:
        for number in range(asked.rounds + 1):
            for task, each in tasks.items():
                turn = number % len(each)
                found: dict[WireType, list[list[int]]] = {}
                for arm in each[turn:] + each[:turn]:
                    rate, tokens = benches[arm.wire].run(arm)
                    same = found.setdefault(arm.wire, tokens) == tokens
                    assert same, f"{task}: {arm.name} differs"
                    if number:
                        arm.rates.append(rate)
            bubbles += [benches["none"].bubble()] if number else []
            print(f"round {number} of {asked.rounds}", file=sys.stderr)
    finally:
        for bench in benches.values():
            bench.group.close()
    report(tasks, bubbles, asked, load, benches["none"].body)


def ratio(one: Arm, other: Arm) -> dict[str, float]:
    """Within a round."""
    return hf.spread([a / b for a, b in zip(one.rates, other.rates, strict=True)])


def report(
    tasks: dict[str, list[Arm]],
    bubbles: list[float],
    asked: argparse.Namespace,
    load: float,
    body: str,
) -> None:
    """The tables, and exit 4 for what is missed."""
    lines = ["| SmolLM2-135M, int8 weights | | tok/s |", "| --- | --- | --- |"]
    for task, each in tasks.items():
        lines += [f"| {task} | {a.name} | {hf.shown(hf.spread(a.rates), '.1f')} |" for a in each]
    lines += ["", "| within a round | ratio | asked |", "| --- | --- | --- |"]
    missed: list[str] = []
    rows: list[dict[str, Any]] = []
    for task, one, other, least in ASKED:
        name = f"{task}: {tasks[task][one].name} / {tasks[task][other].name}"
        rows.append({"name": name, "asked": least} | ratio(tasks[task][one], tasks[task][other]))
    split, two, single = tasks["prefill of 512"]
    pairs = zip(split.rates, two.rates, single.rates, strict=True)
    gains = [(a / c) / (b / c) for a, b, c in pairs]
    name = "prefill of 512: gain of 2 stages over 1 thread / gain of 2 threads"
    rows.append({"name": name, "asked": OF_THE_GAIN} | hf.spread(gains))
    for row in rows:
        lines.append(f"| {row['name']} | {hf.shown(row, '.2f')} | {row['asked']:g} |")
        missed += [row["name"]] if row["median"] < row["asked"] else []
    counted = float(bubble_ratio(2, BUBBLE[0]))
    shown = hf.shown(hf.spread([100 * each for each in bubbles]), ".1f")
    lines += ["", f"fill-drain of 2 stages and {BUBBLE[0]} chunks idles {shown} % by the trace, "]
    lines[-1] += f"{100 * counted:.1f} % by its slots; at most {100 * OF_THE_SLOTS:g} points apart"
    if abs(hf.spread(bubbles)["median"] - counted) > OF_THE_SLOTS:
        missed.append("the bubble")
    where = hf.machine([], load) | {"body": body}
    command = "python benchmarks/pipelines.py"
    print("\n".join(lines))
    print("\n" + hf.measured(where, rounds=asked.rounds, command=command))
    if asked.json:
        rates = {task: {arm.name: arm.rates for arm in each} for task, each in tasks.items()}
        asked.json.write_text(json.dumps({"machine": where, "rows": rows, "rates": rates}) + "\n")
    for name in missed:
        print(f"{name}: less than is asked", file=sys.stderr)
    sys.exit(hf.CLAIM_BROKEN if missed else 0)


if __name__ == "__main__":
    main()
