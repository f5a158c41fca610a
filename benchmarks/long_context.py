"""Decode after 8,000 tokens and prefill of 2,000: int8 KV beside float32 KV and llama.cpp.

    python benchmarks/long_context.py [--rounds 3] [--json FILE] [--threads 1,2]

SmolLM2-135M with int8 weights (llama.cpp: Q8_0), batch of one. Ours is a warm process for each type
of KV that keeps the long prompt from round to round; llama.cpp is its llama-bench with flash
attention and KV in q8_0, and with its defaults. A round runs every arm once, in turning order; a
ratio is taken within a round, over the faster of its two. A round takes four minutes on two
threads, eight on one, most of them for llama.cpp to read 8,000 tokens. The share of memory is what
a token reads by the ledger, over what `bench` measures of memory in the same round.

Exits 4 where a ratio is below the least that is asked of it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any, Final

import hf
import llama

from anyshard.bench.bandwidth import open_probe
from anyshard.checkpoint import open_checkpoint
from anyshard.layout import plan
from anyshard.ledger import step_kv_bytes, step_weight_bytes
from anyshard.loading import profile_of
from anyshard.model import program
from anyshard.tokenizer import open_tokenizer

DEEP: Final = hf.Task("decode", 8064, 65)
LONG: Final = hf.Task("prefill", 2048, 1)
OURS: Final = {"f32": "anyshard int8, KV f32", "int8": "anyshard int8, KV int8"}
Q8_KV: Final = ("-fa", "1", "-ctk", "q8_0", "-ctv", "q8_0")
LLAMA: Final = {"llama.cpp Q8_0, KV q8_0": Q8_KV, "llama.cpp Q8_0": ()}
#: task, ours, theirs, least
PAIRS: Final = (
    ("decode", (OURS["int8"],), (OURS["f32"],), 1.5),
    ("decode", (OURS["int8"],), tuple(LLAMA), 1.2),
    ("prefill", tuple(OURS.values()), tuple(LLAMA), 1.2),
)
LEAST_SHARE: Final = 0.6

Rates = dict[str, dict[str, list[float]]]  # tokens/s by task and arm


def long_prompt(count: int) -> list[int]:
    """The text of the benchmarks, as often as it takes."""
    tokenizer = open_tokenizer(open_checkpoint(None))
    tokens = tokenizer.encode(hf.TEXT.read_text("utf-8"), add_special=True)
    return (tokens * (count // len(tokens) + 1))[:count]


def token_bytes(kv: Any) -> int:
    """What a token reads in the middle of DEEP, by the ledger."""
    checkpoint, profile = open_checkpoint(None), profile_of("int8", kv)
    layout = plan(checkpoint.config, leaf=profile.leaf)
    whole = program(checkpoint.config, profile, layout, 0)
    keys = DEEP.prompt + DEEP.new // 2
    return step_weight_bytes(whole) + step_kv_bytes(whole, keys=keys)


def start_arm(kv: str, threads: int) -> hf.Arm:
    """Ours, with room for both tasks."""
    flags = ("1", str(threads), "--quantization", "int8", "--kv", kv, "--context", "8192")
    process = hf.start([sys.executable, str(hf.HERE / "arm_anyshard.py"), *flags, "--rows", "2"])
    arm = hf.Arm(OURS[kv], process, threads)
    arm.ready = arm.read()["ready"]
    return arm


def measure(
    threads: int, rounds: int, built: llama.Llama, model: Path, load: float
) -> tuple[Rates, dict[str, list[float]], dict[str, Any]]:
    """Tokens/s; bytes a second of memory beside each round; where."""
    arms = {kv: start_arm(kv, threads) for kv in OURS}
    where = hf.machine(list(arms.values()), load)
    prompt, probe = long_prompt(DEEP.prompt), open_probe()
    rates: Rates = {task.name: {} for task in (DEEP, LONG)}
    memory: dict[str, list[float]] = {"memory": []}
    for arm in arms.values():  # the long prompt is read once; llama-bench warms itself up
        arm.ask(prompt, 2, logits=False, session=0)
        arm.ask(prompt[: LONG.prompt], LONG.new, logits=False)

    def ours(kv: str, task: hf.Task) -> float:
        session = {"session": 0} if task is DEEP else {}
        return task.rate(arms[kv].ask(prompt[: task.prompt], task.new, logits=False, **session))

    def theirs(flags: tuple[str, ...], task: hf.Task) -> float:
        return float(built.bench(model, task, threads, flags)["avg_ts"])

    calls: list[tuple[str, hf.Task, Any]] = [
        (name, task, lambda kv=kv, task=task: ours(kv, task))
        for task in (DEEP, LONG)
        for kv, name in OURS.items()
    ]
    calls += [
        (name, task, lambda flags=flags, task=task: theirs(flags, task))
        for name, flags in LLAMA.items()
        for task in (DEEP, LONG)
    ]
    for number in range(rounds):
        turn = number % len(calls)
        for name, task, call in calls[turn:] + calls[:turn]:
            rates[task.name].setdefault(name, []).append(call())
        if probe is not None:
            memory["memory"].append(probe.rate(threads))
        llama.say(f"{threads} threads, round {number + 1} of {rounds}")
    for arm in arms.values():
        arm.process.communicate()
    if probe is not None:
        probe.close()
    return rates, memory, where


def best(rates: dict[str, list[float]], names: tuple[str, ...]) -> str:
    """The fastest of them, by its median."""
    return max((name for name in names if name in rates), key=lambda name: median(rates[name]))


def compare(threads: int, rates: Rates, memory: list[float]) -> list[dict[str, Any]]:
    """Ratios within a round, and the share of memory."""
    rows = []
    for task, ours, theirs, least in PAIRS:
        a, b = best(rates[task], ours), best(rates[task], theirs)
        ratios = [x / y for x, y in zip(rates[task][a], rates[task][b], strict=True)]
        rows.append({"name": f"{task}: {a} / {b}", "least": least, "ratio": hf.spread(ratios)})
    for kv, name in OURS.items() if memory else ():
        pairs = zip(rates["decode"][name], memory, strict=True)
        shares = [rate * token_bytes(kv) / all_ for rate, all_ in pairs]
        least = LEAST_SHARE if kv == "int8" else None
        rows.append(
            {"name": f"decode: {name} / memory", "least": least, "ratio": hf.spread(shares)}
        )
    return [row | {"threads": threads} for row in rows]


def main() -> None:
    parser = hf.flags(__doc__, rounds=3)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--environment", type=Path, default=hf.ROOT / ".venv-bench")
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    built = llama.build(asked.environment, ("speed",))
    model = llama.model_files(built, asked.environment)["Q8_0"]
    rows, lines, found = [], [], []
    for threads in map(int, asked.threads.split(",")):
        rates, memory, where = measure(threads, asked.rounds, built, model, load)
        rows += compare(threads, rates, memory["memory"])
        for task in (DEEP, LONG):
            size = f"{task.name} at {task.prompt} tokens" if task is DEEP else "prefill of 2048"
            for name, each in rates[task.name].items():
                shown = hf.shown(hf.spread(each), ".1f")
                lines.append(
                    f"| {size}, {threads} thread{'s' * (threads > 1)} | {name} | {shown} |"
                )
        found.append({"threads": threads, "tokens_s": rates, "memory_bytes_s": memory["memory"]})
    print("| SmolLM2-135M, batch 1 | | tok/s |\n| --- | --- | --- |")
    print("\n".join(lines))
    print("\n| within a round | ratio | asked |\n| --- | --- | --- |")
    for row in rows:
        asked_for = f"{row['least']:g}" if row["least"] else ""
        ratio = hf.shown(row["ratio"], ".2f")
        print(f"| {row['name']}, {row['threads']} threads | {ratio} | {asked_for} |")
    command = "python benchmarks/long_context.py"
    print("\n" + hf.measured(where, rounds=asked.rounds, command=command))
    print(f"llama.cpp {built.commit[:7]}")
    if asked.json:
        asked.json.write_text(json.dumps({"machine": where, "rows": rows, "rates": found}) + "\n")
    missed = [row for row in rows if row["least"] and row["ratio"]["median"] < row["least"]]
    for row in missed:
        llama.say(f"{row['name']}, {row['threads']} threads: {row['least']:g} is asked")
    sys.exit(hf.CLAIM_BROKEN if missed else 0)


if __name__ == "__main__":
    main()
