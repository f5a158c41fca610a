"""What speculation gains over hops of any delay, as a picture, from figures of `speculation.py`.

    python benchmarks/speculation_picture.py FILE.json [FILE.json ..] --out FILE.svg

Times plain decoding of the same split: the best fixed number of drafts one frame at a time
(dashed), and the best of frames behind each other (drawn through), which nobody knows beforehand;
and the gate that `--speculate` has by default, with frames behind each other (circles). By the
medians of each cell, over the rounds of all files.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import median
from typing import Final

WIDTH: Final = 720
HEIGHT: Final = 420
LEFT, RIGHT, TOP, BOTTOM = 60, 150, 40, 60
COLOURS: Final = ("#8c6bb1", "#238b45", "#d94801", "#08519c")

#: by drafts right and hop: rounds, windows, gated
Points = dict[float, dict[float, tuple[float, float, float]]]


def points_of(files: list[Path]) -> Points:
    """The gains of all cells."""
    cells: dict[tuple[float, float], dict[str, list[float]]] = {}
    for file in files:
        for cell in json.loads(file.read_text("utf-8")):
            arms = cells.setdefault((cell["right"], cell["hop_ms"]), {})
            for name, ms in cell["arms"].items():
                arms.setdefault(name, []).extend(ms)
    found: Points = {}
    for (right, hop_ms), arms in cells.items():
        plain, gated = median(arms["plain"]), median(arms["windows gated"])
        found.setdefault(right, {})[hop_ms] = (
            plain / best(arms, "rounds"),
            plain / best(arms, "windows"),
            plain / gated,
        )
    return found


def best(arms: dict[str, list[float]], name: str) -> float:
    """ms a token of the best fixed number of drafts."""
    fixed = [each for each in arms if each.startswith(name) and not each.endswith("gated")]
    return min(median(arms[each]) for each in fixed)


def drawn(points: Points, stages: int) -> str:
    """The picture, SVG."""
    hops = sorted({hop for each in points.values() for hop in each})
    most = math.ceil(max(max(pair) for each in points.values() for pair in each.values()))
    low, high = math.log10(hops[0]), math.log10(hops[-1])

    def x(hop: float) -> float:
        return LEFT + (math.log10(hop) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(gain: float) -> float:
        return HEIGHT - BOTTOM - gain / most * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        "<title>What speculation gains over hops of any delay</title>",
        f'<text x="{LEFT - 40}" y="22">times plain decoding (one request, {stages} stages, '
        "EMULATED hops)</text>",
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">'
        "delay of a hop, one way</text>",
        f'<text x="{LEFT + 6}" y="{y(1) + 15:.1f}" fill="#888">plain</text>',
        f'<text x="{WIDTH - RIGHT + 8}" y="{HEIGHT - BOTTOM - 26}" fill="#666">numbers: how</text>',
        f'<text x="{WIDTH - RIGHT + 8}" y="{HEIGHT - BOTTOM - 12}" fill="#666">many drafts</text>',
        f'<text x="{WIDTH - RIGHT + 8}" y="{HEIGHT - BOTTOM + 2}" fill="#666">are right</text>',
    ]
    for gain in range(most + 1):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(gain):.1f}" y2="{y(gain):.1f}" '
            f'stroke="{"#888" if gain == 1 else "#ddd"}"/>'
            f'<text x="{LEFT - 10}" y="{y(gain) + 4:.1f}" text-anchor="end">{gain}</text>'
        )
    for hop in hops:
        parts.append(
            f'<text x="{x(hop):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">'
            f"{hop:g} ms</text>"
        )
    for colour, right in zip(COLOURS, sorted(points), strict=False):
        for place, dashes in enumerate(("6 5", "")):
            line = " ".join(
                f"{x(hop):.1f},{y(points[right][hop][place]):.1f}" for hop in sorted(points[right])
            )
            parts.append(
                f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" '
                f'stroke-dasharray="{dashes}"/>'
            )
        parts += [
            f'<circle cx="{x(hop):.1f}" cy="{y(gains[2]):.1f}" r="4" fill="#fff" '
            f'stroke="{colour}" stroke-width="2"/>'
            for hop, gains in sorted(points[right].items())
        ]
        last = points[right][max(points[right])][1]
        parts.append(
            f'<text x="{WIDTH - RIGHT + 8}" y="{y(last) + 4:.1f}" fill="{colour}">{right:g}</text>'
        )
    left = WIDTH - RIGHT + 45
    for place, lines in enumerate(
        (("frames behind", "each other,", "best number"), ("one at a time,", "best number"))
    ):
        height = TOP + 30 + 60 * place
        parts.append(
            f'<line x1="{left}" x2="{left + 30}" y1="{height}" y2="{height}" stroke="#444" '
            f'stroke-width="2" stroke-dasharray="{("", "6 5")[place]}"/>'
        )
        parts += legend(lines, left, height)
    height = TOP + 136
    parts.append(f'<circle cx="{left + 6}" cy="{height}" r="4" fill="#fff" stroke="#444"/>')
    parts += legend(("by the gate,", "behind each", "other"), left, height)
    return "\n".join([*parts, "</svg>", ""])


def legend(lines: tuple[str, ...], left: int, height: int) -> list[str]:
    """Text below a sign."""
    return [
        f'<text x="{left}" y="{height + 16 + 14 * number}">{line}</text>'
        for number, line in enumerate(lines)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    asked.out.write_text(drawn(points_of(asked.files), asked.stages), "utf-8")


if __name__ == "__main__":
    main()
