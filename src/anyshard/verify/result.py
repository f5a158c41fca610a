"""What a cell came to beside the unsplit run, as one row; and how two arrays of logits differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from anyshard.ops.exact import F32
from anyshard.verify.cells import Axis

__all__ = ["CellResult", "Difference", "Unlike", "Verdict", "max_ulp", "unlike"]

Verdict = Literal["equal", "vacuous", "differs", "lost"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first logit or token that differs.

    what "logit": that of `token_id` after `position`, as hex floats. "token": all logits up to
    `position` are equal, and from the last of them another token was drawn; both as ids, and
    `token_id` is the cell's. "pair": another token was chosen after `position` where nobody asked
    for logits, so that ranks exchanged (value, id) pairs.
    """

    what: Literal["logit", "token", "pair"]
    position: int
    token_id: int
    unsplit: str
    cell: str


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """One row of the table.

    positions: logit rows compared, each `vocab` wide. max_ulp: the largest distance of two
    differing logits, counted in floats between them; None if nothing is there to compare. witness:
    by axis, the share of logits that would change, 0..1; empty for a cell that only places work.
    where: op, rank and place where the run parts, or why they are not known; None until that was
    looked for. neighbours: other requests of the batch whose logits or tokens are not those that
    they have alone and unsplit: how many, of how many, and which is the first; empty if none.
    neighbour: its index in `cells.neighbours`. lost: why ranks were lost, with the end of their
    log; what was not compared then is None, empty or 0.
    Bytes are lists by rank; wire_bytes_per_token is the sum over ranks. tokens_per_s: decoding.
    """

    cell: str
    profile_hash: str
    positions: int
    vocab: int
    digest: str
    elements_differing: int | None
    max_ulp: int | None
    tokens_equal: bool | None
    verdict: Verdict
    witness: dict[Axis, float]
    first_divergence: Difference | None
    where: str | None
    neighbours: str
    neighbour: int | None
    fault: str | None
    lost: str | None
    wire_bytes_per_token: float
    weight_bytes: list[int]
    kv_bytes: list[int]
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    speed_ratio: float
    seconds: float

    @property
    def only_neighbours_differ(self) -> bool:
        """Whether the request itself is as it should be, and another of its batch is not."""
        return bool(self.neighbours) and not self.elements_differing and bool(self.tokens_equal)

    @property
    def silent_axes(self) -> tuple[Axis, ...]:
        """Along which no order could have shown, where along others one could."""
        silent = tuple(axis for axis, share in self.witness.items() if not share)
        return silent if self.verdict == "equal" else ()

    @property
    def ranks(self) -> int:
        """Processes or threads that ran it."""
        return len(self.weight_bytes)


def max_ulp(a: F32, b: F32) -> int:
    """The largest distance of two floats in the order of all floats; 0 where both are empty.

    -0 and +0 are one apart, though not equal in bits; a NaN counts as beyond infinity.
    Held by: test_verify.py::test_max_ulp_counts_floats.
    """
    first, second = (_ordinal(x) for x in (a, b))
    return int(np.abs(first - second).max(initial=0))


def _ordinal(x: F32) -> np.ndarray:
    bits = np.ascontiguousarray(x).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)


@dataclass(frozen=True)
class Unlike:
    """How many values of two arrays [n, V] differ, by how much, and where first (row, column)."""

    count: int
    ulp: int
    first: tuple[int, int] | None


def unlike(a: F32, b: F32) -> Unlike:
    """Compare two arrays of one shape, bit by bit, in the memory of a few rows.

    Held by: test_check.py.
    """
    count, ulp, first = 0, 0, None
    for row, (mine, other) in enumerate(zip(a, b, strict=True)):
        differs = mine.view(np.uint32) != other.view(np.uint32)
        here = int(np.count_nonzero(differs))
        if here:
            first = first or (row, int(differs.argmax()))
            ulp = max(ulp, max_ulp(mine[differs], other[differs]))
        count += here
    return Unlike(count, ulp, first)
