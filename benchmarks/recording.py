"""What recording costs: the same runs with and without it, interleaved.

    python benchmarks/recording.py [--rounds 9] [--json FILE]

Arms are warm processes in turning order, as in hf.py: two threads, and two ranks, each plain and
recorded. A recorded run hashes every op of every token in the ranks, and the front adds them up and
keeps them; writing the file comes after a run and is not in it. Tokens and logits of all arms must
be equal.

Exits 4 where recording costs more than 3 % of decode speed by the median, or a bit differs.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Final

import hf

from anyshard.checkpoint import open_checkpoint
from anyshard.tokenizer import open_tokenizer

MOST: Final = 0.03
TASKS: Final = [hf.Task("decode", 16, 128), hf.Task("prefill", 256, 1)]
WAYS: Final = {"2 threads": (1, 2), "-tp 2": (2, 1)}


def start_arm(name: str, *, record: bool) -> hf.Arm:
    tp, threads = WAYS[name]
    arm = [sys.executable, str(hf.HERE / "arm_anyshard.py"), str(tp), str(threads)]
    process = hf.start([*arm, "--record"] if record else arm)
    kind = "recorded" if record else "plain"
    started = hf.Arm(f"anyshard, {name}, {kind}", process, threads)
    started.ready = started.read()["ready"]
    return started


def row(rates: dict[str, dict[str, list[float]]], task: str, name: str) -> dict[str, Any]:
    """Both speeds, and the share that recording costs: medians of what a round has."""
    plain, recorded = (rates[task][f"anyshard, {name}, {kind}"] for kind in ("plain", "recorded"))
    costs = [1 - b / a for a, b in zip(plain, recorded, strict=True)]
    return {
        "task": task,
        "arm": name,
        "plain": hf.spread(plain),
        "recorded": hf.spread(recorded),
        "cost": hf.spread(costs),
    }


def table(found: dict[str, Any]) -> str:
    """Markdown, with the machine and the date below."""
    lines = [
        "| SmolLM2-135M, f32, batch 1 | tok/s | recorded, tok/s | cost |",
        "| --- | --- | --- | --- |",
    ]
    for each in found["rows"]:
        speeds = (hf.shown(each["plain"], ".1f"), hf.shown(each["recorded"], ".1f"))
        cost = hf.shown(each["cost"], ".1%")
        lines.append(f"| {each['task']}, {each['arm']} | {' | '.join(speeds)} | {cost} |")
    lines += [
        "",
        hf.measured(
            found["machine"],
            rounds=found["rounds"],
            command="python benchmarks/recording.py",
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = hf.flags(__doc__, rounds=9)
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    tokens = open_tokenizer(open_checkpoint(None)).encode(
        hf.TEXT.read_text("utf-8"), add_special=True
    )
    arms = [start_arm(name, record=record) for name in WAYS for record in (False, True)]
    where = hf.machine(arms, load)
    digests = {arm.ask(tokens[:64], 8)["logits_sha256"] for arm in arms}
    rates = hf.measure(arms, TASKS, tokens, asked.rounds)
    for arm in arms:
        arm.process.communicate()
    rows = [row(rates, task.name, name) for task in TASKS for name in WAYS]
    found = {"machine": where, "rounds": asked.rounds, "rows": rows}
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    dear = [each for each in rows if each["task"] == "decode" and each["cost"]["median"] > MOST]
    print("one digest" if len(digests) == 1 else "DIGESTS DIFFER", file=sys.stderr)
    sys.exit(hf.CLAIM_BROKEN if dear or len(digests) > 1 else 0)


if __name__ == "__main__":
    main()
