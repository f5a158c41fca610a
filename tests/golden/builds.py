"""One build against the golden vectors, and against another build on the wider set.

`compute` gives everything that a build computes, by names `golden/OP/VECTOR` and `wide/OP/VECTOR`;
`against_golden` and `against` count what differs, element by element, in bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from golden import make, wide
from golden.playback import Player, Recorder, read_answers, write_calls
from numpy.typing import NDArray

__all__ = ["Tally", "against", "against_golden", "compute", "play", "record", "same_answers"]

Found = dict[str, NDArray[Any]]
Sets = Mapping[str, Callable[..., Mapping[str, NDArray[Any]]]]

OF_A_BODY = ("sampling", "functions")  # sets of functions that take the body's name themselves


@dataclass(frozen=True)
class Tally:
    """How much was compared, and where the first difference is ('' where there is none)."""

    ops: int
    vectors: int
    elements: int
    differing: int
    first: str

    def __str__(self) -> str:
        at = f", first in {self.first}" if self.first else ""
        return (
            f"{self.ops:2} ops {self.vectors:4} vectors {self.elements:7} elements "
            f"{self.differing:5} differ{at}"
        )


def compute(module: Any, pool: Any, body: str) -> Found:
    """All golden and wide arrays. body: what the functions are asked for, '' if they take none."""
    found: Found = {}
    groups: tuple[tuple[str, Sets], ...] = (("golden", make.OPS), ("wide", wide.SETS))
    for group, sets in groups:
        for op, build in sets.items():
            named = {"body": body} if body and op in OF_A_BODY else {}
            made = build(module, pool, **named)
            found |= {f"{group}/{op}/{name}": array.copy() for name, array in made.items()}
    return found


def record(path: Path) -> list[bytes]:
    """Write the calls of `compute` for tests/standalone/driver.cpp; returns them."""
    recorder = Recorder()
    compute(recorder, None, "")
    write_calls(path, recorder.calls)
    return recorder.calls


def play(calls: list[bytes], answers: Path) -> Found:
    """What `compute` finds where the driver's answers are given."""
    return compute(Player(calls, read_answers(answers, len(calls))), None, "")


def same_answers(one: bytes, other: bytes) -> bool:
    """Whether two files of answers are equal byte for byte, a NaN being any NaN.

    A row that went out of range is marked, and holds NaN; x86 and Arm make it of other signs.
    """
    if len(one) != len(other):
        return False
    if one == other:
        return True
    words = [np.frombuffer(file, np.uint8) for file in (one, other)]
    places = np.nonzero(words[0] != words[1])[0]
    return all(_is_sign_of_nan(one, other, int(place)) for place in places)


def _is_sign_of_nan(one: bytes, other: bytes, place: int) -> bool:
    first = [int.from_bytes(file[place - 3 : place + 1], "little") for file in (one, other)]
    return sorted(first) == [0x7FC00000, 0xFFC00000]


def against_golden(found: Found) -> Tally:
    """The golden part of what a build computed, and the files beside this one."""
    stored = [(op, make.stored(op)) for op in make.OPS]
    rows = []
    for op, vectors in stored:
        here = {
            key.removeprefix(f"golden/{op}/"): array
            for key, array in found.items()
            if key.startswith(f"golden/{op}/")
        }
        made = make.texts(here)
        assert made.keys() == vectors.keys()
        for name, wanted in vectors.items():
            pairs = zip(made[name], wanted, strict=True)
            rows.append((op, name, len(wanted), sum(one != other for one, other in pairs)))
    return tally(rows)


def against(found: Found, other: Found, group: str = "wide") -> Tally:
    """The same group of two builds."""
    keys = [key for key in found if key.startswith(f"{group}/")]
    assert keys == [key for key in other if key.startswith(f"{group}/")]
    rows = []
    for key in keys:
        one, two = found[key], other[key]
        assert one.shape == two.shape and one.dtype == two.dtype
        word = np.dtype(f"u{one.itemsize}")
        unequal = int((one.view(word) != two.view(word)).sum())
        _, op, name = key.split("/", 2)
        rows.append((op, name, one.size, unequal))
    return tally(rows)


def tally(rows: Iterable[tuple[str, str, int, int]]) -> Tally:
    """Sum up (op, vector, elements, differing)."""
    rows = list(rows)
    wrong = [f"{op} {name!r}" for op, name, _, differing in rows if differing]
    return Tally(
        ops=len({op for op, *_ in rows}),
        vectors=len(rows),
        elements=sum(elements for *_, elements, _ in rows),
        differing=sum(differing for *_, differing in rows),
        first=wrong[0] if wrong else "",
    )
