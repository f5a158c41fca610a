"""What speculation gains over hops of any delay, as a picture, from figures of `speculation.py`.

    python benchmarks/speculation_picture.py FILE.json [FILE.json ..] --out FILE.svg

Times plain decoding of the same split: the best fixed number of drafts one frame at a time
(dashed), and the best of frames behind each other (drawn through), by the medians of each cell.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import median
from typing import Any, Final

WIDTH: Final = 720
HEIGHT: Final = 420
LEFT, RIGHT, TOP, BOTTOM = 60, 150, 40, 50
COLOURS: Final = ("#8c6bb1", "#238b45", "#d94801", "#08519c")

Points = dict[float, dict[float, tuple[float, float]]]  # by drafts right and hop: rounds, windows


def points_of(files: list[Path]) -> Points:
    """The gains of all cells."""
    found: Points = {}
    for file in files:
        cells: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))
        for cell in cells:
            arms = cell["arms"]
            plain = median(arms["plain"])

            def best(name: str, arms: dict[str, list[float]] = arms) -> float:
                fixed = [n for n in arms if n.startswith(name) and not n.endswith("gated")]
                return min(median(arms[each]) for each in fixed)

            gains = plain / best("rounds"), plain / best("windows")
            found.setdefault(cell["right"], {})[cell["hop_ms"]] = gains
    return found


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
        f'<text x="{LEFT}" y="22">times plain decoding, one request, {stages} stages, EMULATED '
        "hops; drafts right with probability</text>",
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
        last = points[right][max(points[right])][1]
        parts.append(
            f'<text x="{WIDTH - RIGHT + 8}" y="{y(last) + 4:.1f}" fill="{colour}">{right:g}</text>'
        )
    for place, (dashes, what) in enumerate((("", "frames behind"), ("6 5", "one frame"))):
        height = TOP + 30 + 40 * place
        parts.append(
            f'<line x1="{WIDTH - RIGHT + 45}" x2="{WIDTH - RIGHT + 75}" y1="{height}" '
            f'y2="{height}" stroke="#444" stroke-width="2" stroke-dasharray="{dashes}"/>'
            f'<text x="{WIDTH - RIGHT + 45}" y="{height + 16}">{what}</text>'
            f'<text x="{WIDTH - RIGHT + 45}" y="{height + 30}">'
            f"{'each other' if not place else 'at a time'}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    asked.out.write_text(drawn(points_of(asked.files), asked.stages), "utf-8")


if __name__ == "__main__":
    main()
