"""SmolLM2-135M beside llama.cpp and HF transformers: decode and prefill on 1 and 2 threads.

    python benchmarks/peers.py [--rounds 7] [--json FILE] [--quick]

The peers have an environment of their own, which `make peers` fills; the first run builds
llama.cpp there (`llama.py`). A round runs every arm once, one at a time, in an order that turns
from round to round; a ratio is taken within a round, so that a slow minute of the machine hits
both sides. Ours and HF are processes that stay warm (`hf.py`), llama.cpp is its own llama-bench.

decode: tokens 2 to 128 after a prompt of 16, batch of one. prefill: a prompt of 256. Ours f32 and
HF compute with the float32 values of the demo's blocks, as F32 of llama.cpp does; ours int8 is
made of the demo's own file, Q8_0 of llama.cpp of those values, Q4_1 is the file itself.

Exits 4 where a ratio is below the least that is asked of it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol

import hf
import llama

from anyshard.checkpoint import open_checkpoint
from anyshard.tokenizer import open_tokenizer

OURS: Final = {"none": "anyshard f32", "int8": "anyshard int8"}  # by --quantization
HF: Final = "HF f32"
LLAMA: Final = {kind: f"llama.cpp {kind}" for kind in ("F32", "Q8_0", "Q4_1")}
ARMS: Final = (*OURS.values(), *LLAMA.values(), HF)  # in the order of the table
THREADS: Final = (1, 2)
QUIET: Final = 0.5  # load average; at 10 a smoke run gave llama.cpp F32 0.5 tok/s on 2 threads


@dataclass(frozen=True)
class Pair:
    """Ours beside theirs in a task, the fastest of each by its median; the least to be shown."""

    task: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    least: float | None = None
    aim: float | None = None


PAIRS: Final = (
    Pair("decode", (OURS["none"],), (LLAMA["F32"],), least=1.25, aim=1.5),
    Pair("decode", (OURS["int8"],), (LLAMA["Q8_0"],), least=1.3, aim=1.7),
    Pair("decode", (OURS["int8"],), (LLAMA["Q4_1"],), least=1.0),  # int8 is what `auto` takes
    Pair("decode", (OURS["none"],), (HF,), least=3.0),
    Pair("prefill", tuple(OURS.values()), (*LLAMA.values(), HF), least=1.2, aim=1.5),
    Pair("prefill", (OURS["none"],), (LLAMA["F32"],)),
    Pair("prefill", (OURS["int8"],), (LLAMA["Q8_0"],)),
    Pair("prefill", (OURS["none"],), (HF,)),
)

Rates = dict[str, list[float]]  # tokens/s by arm, one per round
Measured = dict[tuple[str, int], Rates]  # by task and threads


class Arm(Protocol):
    """One way to run, on so many threads."""

    name: str
    threads: int

    def rate(self, task: hf.Task) -> float:
        """Run the task once; tokens/s."""


@dataclass
class WarmArm:
    """Ours or HF: a process that waits for commands."""

    name: str
    threads: int
    arm: hf.Arm
    tokens: list[int]

    def rate(self, task: hf.Task) -> float:
        """Run the task once; tokens/s."""
        return task.rate(self.arm.ask(self.tokens[: task.prompt], task.new))


@dataclass
class LlamaArm:
    """llama-bench on one model file; `record` is what it said last, without the samples."""

    name: str
    threads: int
    llama: llama.Llama
    file: Path
    record: dict[str, Any]

    def rate(self, task: hf.Task) -> float:
        """Run the task once; tokens/s."""
        found = self.llama.bench(self.file, task, self.threads)
        self.record = {key: value for key, value in found.items() if key in SETTINGS}
        return float(found["avg_ts"])


SETTINGS: Final = (
    "model_type",
    "n_batch",
    "n_ubatch",
    "type_k",
    "type_v",
    "flash_attn",
    "load_mode",
)


def warm_arms(weights: Path, environment: Path, tokens: list[int]) -> list[WarmArm]:
    """Ours, a process for each arithmetic and thread count, and HF, one process for all."""
    arms = []
    for quantization in OURS:
        for threads in THREADS:
            flags = ("1", str(threads), "--quantization", quantization)
            process = hf.start([sys.executable, str(hf.HERE / "arm_anyshard.py"), *flags])
            arm = hf.Arm(f"{OURS[quantization]}, {threads}", process, threads)
            arm.ready = arm.read()["ready"]
            arms.append(WarmArm(OURS[quantization], threads, arm, tokens))
        check_digests([arm for arm in arms if arm.name == OURS[quantization]])
    python = hf.peer_environment(environment)
    process = hf.start([str(python), str(hf.HERE / "arm_hf.py"), str(weights)])
    ready = hf.Arm(HF, process, 1).read()["ready"]
    for threads in THREADS:
        arms.append(WarmArm(HF, threads, hf.Arm(HF, process, threads, ready), tokens))
    return arms


def check_digests(arms: list[WarmArm]) -> None:
    """Thread counts give equal logits; what is fast is what is promised."""
    digests = {arm.arm.ask(arm.tokens[:64], 8)["logits_sha256"] for arm in arms}
    if len(digests) > 1:
        sys.exit(f"{arms[0].name}: the digests of {THREADS} threads differ")


def measure(arms: list[Arm], tasks: list[hf.Task], rounds: int) -> Measured:
    """Every arm in every round; the first round warms up and is dropped."""
    rates: Measured = {
        (task.name, threads): {arm.name: [] for arm in arms}
        for task in tasks
        for threads in THREADS
    }
    for round_ in range(rounds + 1):
        turn = round_ % len(arms)
        for task in tasks:
            for arm in arms[turn:] + arms[:turn]:
                time.sleep(hf.PAUSE_S)
                rate = arm.rate(task)
                if round_:
                    rates[task.name, arm.threads][arm.name].append(rate)
        llama.say(f"round {round_} of {rounds}")
    return rates


def fastest(rates: Rates, names: tuple[str, ...]) -> str | None:
    """Of those measured, the one with the greatest median; None if none was."""
    return max(
        (name for name in names if name in rates), key=lambda n: median(rates[n]), default=None
    )


def compared(measured: Measured, pair: Pair) -> list[dict[str, Any]]:
    """A row for each thread count; the ratio is the median of those within a round."""
    rows = []
    for (task, threads), rates in measured.items():
        ours, theirs = fastest(rates, pair.ours), fastest(rates, pair.theirs)
        if task == pair.task and ours and theirs:
            ratios = [a / b for a, b in zip(rates[ours], rates[theirs], strict=True)]
            rows.append(
                {
                    "task": task,
                    "threads": threads,
                    "ours": ours,
                    "theirs": theirs,
                    "best": len(pair.theirs) > 1,
                    "ratio": hf.spread(ratios),
                    "least": pair.least,
                    "aim": pair.aim,
                }
            )
    return rows


def below(rows: list[dict[str, Any]]) -> list[str]:
    """What was asked and this run did not show, by medians."""
    return [
        f"{on_threads(row['task'], row['threads'])}: {row['ours']} is "
        f"{row['ratio']['median']:.2f}x {row['theirs']}, {row['least']:g}x is asked"
        for row in rows
        if row["least"] and row["ratio"]["median"] < row["least"]
    ]


def on_threads(task: str, threads: int) -> str:
    return f"{task}, {threads} thread{'s' if threads > 1 else ''}"


def speeds(measured: Measured) -> list[str]:
    """Markdown: a row for each task and thread count, a column for each arm."""
    names = [name for name in ARMS if any(name in rates for rates in measured.values())]
    lines = [
        f"| SmolLM2-135M, batch 1, tok/s | {' | '.join(names)} |",
        "| --- " * len(names) + "| --- |",
    ]
    for (task, threads), rates in measured.items():
        cells = (hf.shown(hf.spread(rates[name]), ".1f") for name in names)
        lines.append(f"| {on_threads(task, threads)} | {' | '.join(cells)} |")
    return lines


def ratios(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown: a row for each comparison, with what was asked of it."""
    lines = ["| ours / theirs, within a round | ratio | asked |", "| --- | --- | --- |"]
    for row in rows:
        best = "best of each: " if row["best"] else ""
        name = f"{on_threads(row['task'], row['threads'])}, {best}{row['ours']} / {row['theirs']}"
        asked = f"{row['least']:g}" if row["least"] else ""
        aimed = f", aim {row['aim']:g}" if row["aim"] else ""
        lines.append(f"| {name} | {hf.shown(row['ratio'], '.2f')} | {asked}{aimed} |")
    return lines


def footer(found: dict[str, Any]) -> str:
    """Where, when and how."""
    return (
        "Median (least–most) of {rounds} interleaved rounds, prefill of {prefill} tokens; {cpu}, "
        "{cores} cores, Linux {kernel}; kernels {body}; llama.cpp {commit} ({package}), torch "
        "{torch}, transformers {transformers}; load {load_before} before; {date}; `{command}`."
    ).format(**found, **found["machine"], **found["llama"])


def main() -> None:
    parser = hf.flags(__doc__, rounds=7)
    parser.add_argument("--quick", action="store_true", help="one short round: does it run?")
    parser.add_argument("--environment", type=Path, default=hf.ROOT / ".venv-bench")
    asked = parser.parse_args()
    rounds = 1 if asked.quick else asked.rounds
    new, prompt = (8, 64) if asked.quick else (128, 256)
    tasks = [hf.Task("decode", 16, new), hf.Task("prefill", prompt, 1)]
    built = llama.build(asked.environment, ("speed",))
    files = llama.model_files(built, asked.environment)
    load = os.getloadavg()[0]
    if load > QUIET:
        llama.say(
            f"load {load:.1f}: too busy; a peer that spins at its barriers loses 10 to 50 fold"
        )
    checkpoint = open_checkpoint(None)
    tokens = open_tokenizer(checkpoint).encode(hf.TEXT.read_text("utf-8"), add_special=True)
    with tempfile.TemporaryDirectory() as weights:
        hf.write_weights(checkpoint, Path(weights))
        warm = warm_arms(Path(weights), asked.environment, tokens)
        theirs = [
            LlamaArm(LLAMA[kind], threads, built, file, {})
            for kind, file in files.items()
            for threads in THREADS
        ]
        where = hf.machine([arm.arm for arm in warm], load)
        measured = measure([*warm, *theirs], tasks, rounds)
        for process in {arm.arm.process for arm in warm}:
            process.communicate()  # closes its stdin; it leaves
    rows = [row for pair in PAIRS for row in compared(measured, pair)]
    found = {
        "machine": where,
        "command": f"python benchmarks/peers.py{' --quick' * asked.quick}",
        "rounds": rounds,
        "prefill": prompt,
        "llama": {
            "commit": built.commit[:7],
            "package": f"{llama.PACKAGE} {llama.VERSION}",
            "flags": llama.FLAGS,
            "settings": {arm.name: arm.record for arm in theirs},
        },
        "rows": rows,
        "rates": [
            {"task": task, "threads": threads, "tokens_s": rates}
            for (task, threads), rates in measured.items()
        ],
    }
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join([*speeds(measured), "", *ratios(rows), "", footer(found)]))
    missed = below(rows)
    llama.say("\n".join(missed) or "every ratio that is asked was shown")
    sys.exit(hf.CLAIM_BROKEN if missed else 0)


if __name__ == "__main__":
    main()
