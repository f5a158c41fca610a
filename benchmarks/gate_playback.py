"""What a gate gains on known answers, without a model: `speculation_text.py --json` played back.

    python benchmarks/gate_playback.py FILE.json [--draft-max 8] [--row-ms 5.3,5.7,..]

One request at a time, one frame at a time: drafts of n-grams are run as each gate has them, and a
frame takes what frames of so many rows took there (`--row-ms`: takes so much, for 1, 2, .. rows).
Beside the gate and the best fixed number stands one that knows which drafts are right, so what is
left to gain. The gate learns over all answers in turn, as it does there. A time here has no noise,
so a change of a gate shows; nothing is measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from anyshard.ops.spread import Spread
from anyshard.speculate import FixedGate, Gate, NgramDrafter, Speculator, SurvivalGate

Text = dict[str, Any]


def played(
    texts: list[Text], gate: Gate, *, vocab: int, most: int, row_ms: list[float]
) -> tuple[float, int]:
    """ms of all answers with a gate, and the rows that it wastes."""
    speculator = Speculator(NgramDrafter(vocab), gate, most=most)
    now_s = 0.0
    for number, text in enumerate(texts):
        spreads = [Spread(entropy, 0.0, -1) for entropy in text["entropy"]]
        tokens, at = text["tokens"], 1
        speculator.begin(number, text["prompt"])
        speculator.came_out(number, tokens[:1], spreads[:1], now_s=now_s, is_over=False)
        while at < len(tokens):
            room = min(most, len(tokens) - at - 1)
            drafts = speculator.fill({number: room}, rows=most, now_s=now_s).get(number, ())
            right = common(drafts, tokens[at:])
            took_s = 1e-3 * row_ms[len(drafts)]
            now_s += took_s
            new = slice(at, at + right + 1)
            at = new.stop
            speculator.costs.step(
                rows=1 + len(drafts),
                tokens=right + 1,
                seconds=took_s,
                latency_s=took_s,
                spacing_s=None,
            )
            speculator.came_out(
                number, tokens[new], spreads[new], now_s=now_s, is_over=at == len(tokens)
            )
        speculator.end(number)
    return 1e3 * now_s, speculator.figures.wasted_rows


def knowing(texts: list[Text], *, vocab: int, most: int, row_ms: list[float]) -> float:
    """ms where of the drafts that are right as many are run as bring tokens fastest."""
    drafter, total = NgramDrafter(vocab), 0.0
    for number, text in enumerate(texts):
        tokens, at = text["tokens"], 1
        drafter.begin(number, text["prompt"])
        drafter.extend(number, tokens[:1])
        while at < len(tokens):
            drafts = drafter.propose(number, min(most, len(tokens) - at - 1))
            right = common([each.token for each in drafts], tokens[at:])
            run = max(range(right + 1), key=lambda rows: (rows + 1) / row_ms[rows])
            total += row_ms[run]
            drafter.extend(number, tokens[at : at + run + 1])
            at += run + 1
        drafter.end(number)
    return total


def common(drafts: tuple[int, ...] | list[int], tokens: list[int]) -> int:
    """How many are the same from the beginning."""
    right = 0
    for draft, token in zip(drafts, tokens, strict=False):
        if draft != token:
            break
        right += 1
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--draft-max", type=int, default=8)
    parser.add_argument("--row-ms", help="of frames of 1, 2, .. rows, such as 5.3,5.7,6.5")
    asked = parser.parse_args()
    found = json.loads(asked.file.read_text("utf-8"))
    row_ms: list[float] = found["row_ms"]
    if asked.row_ms:
        row_ms = [float(each) for each in asked.row_ms.split(",")]
    if len(row_ms) <= asked.draft_max:
        parser.error(f"--draft-max {asked.draft_max} takes times of {asked.draft_max + 1} rows")
    shape: dict[str, Any] = {"vocab": found["vocab"], "most": asked.draft_max, "row_ms": row_ms}
    print("| text | best K | gate | one that knows | gate over best K | wasted rows |")
    print("| --- | --- | --- | --- | --- | --- |")
    texts: list[Text] = found["texts"]
    fixed = {k: played(texts, FixedGate(k), **shape) for k in range(1, asked.draft_max + 1)}
    best = min(fixed, key=lambda k: fixed[k])
    plain = row_ms[0] * sum(len(text["tokens"]) - 1 for text in texts)
    (best_ms, best_waste), (ms, waste) = fixed[best], played(texts, SurvivalGate(), **shape)
    print(
        f"| {len(texts)} answers | {best}: {plain / best_ms:.3f} times plain | {plain / ms:.3f} | "
        f"{plain / knowing(texts, **shape):.3f} | {best_ms / ms:.3f} | {waste} of {best_waste} |"
    )


if __name__ == "__main__":
    main()
