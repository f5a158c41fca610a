"""Whether ranks hold the same bits of what several of them hold: residuals, KV heads, hops.

Every rank hashes its own (`replicas.py`), and here each is held against that of the rank whose
digest goes on file, a hop against what the stage before has hashed last. Equal, as they should be,
they leave no trace; the first that is not is kept beside the digests of its run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from anyshard.model import Program
from anyshard.op import LAYER_POINTS
from anyshard.ops.digest import U64
from anyshard.replicas import Replica, ReplicaPoint

__all__ = ["Agreement", "Disagreement", "order_in_step"]


class Disagreement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rank `rank` holds other bits at a place of a run than rank `other`, whose digest is on file
    or, of a hop, who has sent them. layer: None for embed; for hop, the one that it enters."""

    position: int
    layer: int | None
    point: ReplicaPoint
    rank: int
    other: int


@dataclass(frozen=True)
class _Pair:
    """A replica of a rank and what it must equal: columns of the ranks' digests side by side."""

    replica: Replica
    rank: int
    other: int
    column: int
    other_column: int

    @property
    def layer(self) -> int | None:
        """None for embed."""
        return None if self.replica.layer < 0 else self.replica.layer

    def at(self, position: int) -> Disagreement:
        """Of a row in which they differ."""
        point = self.replica.point
        return Disagreement(
            position=position, layer=self.layer, point=point, rank=self.rank, other=self.other
        )


def order_in_step(layer: int | None, point: str) -> tuple[int, int]:
    """Grows in the order in which a step writes embed, and hop and LAYER_POINTS of its layers."""
    if layer is None:
        return (-1, 0)
    return (layer, 0 if point == "hop" else 1 + LAYER_POINTS.index(point))


class Agreement:
    """Compares what the ranks of `programs` have hashed of a step. Held by: test_replicas.py."""

    def __init__(self, programs: Sequence[Program]) -> None:
        widths = [each.record_columns for each in programs]
        self._widths = widths
        starts = [sum(widths[:rank]) for rank in range(len(widths))]
        pairs = _pairs(programs, starts)
        pairs.sort(key=lambda pair: (order_in_step(pair.layer, pair.replica.point), pair.rank))
        self._pairs = pairs
        self._columns = np.array([pair.column for pair in pairs], np.intp)
        self._others = np.array([pair.other_column for pair in pairs], np.intp)

    def disagreements(
        self, positions: Sequence[int], parts: Sequence[U64]
    ) -> dict[int, Disagreement]:
        """By row: of each in which ranks disagree the first place; none as a rule.

        positions: of the rows. parts: of each rank uint64[rows, record_columns of its program].
        """
        if not self._pairs:
            return {}
        cut = [part[:, :width] for part, width in zip(parts, self._widths, strict=True)]
        whole = np.concatenate(cut, axis=1)
        differs = whole.take(self._columns, axis=1) != whole.take(self._others, axis=1)
        if not differs.any():
            return {}
        rows: list[int] = np.flatnonzero(differs.any(axis=1)).tolist()
        firsts = {row: self._pairs[int(differs[row].argmax())] for row in rows}
        return {row: pair.at(positions[row]) for row, pair in firsts.items()}


def _pairs(programs: Sequence[Program], starts: Sequence[int]) -> list[_Pair]:
    columns = {
        (rank, replica): starts[rank] + each.digest_columns + index
        for rank, each in enumerate(programs)
        for index, replica in enumerate(each.replicas)
    }
    tp = programs[0].layout.tp

    def residual(rank: int, layer: int, point: ReplicaPoint) -> int:
        """Its column: on file where the rank is the first of its stage."""
        if rank % tp:
            return columns[rank, Replica(layer, point)]
        assert point in ("embed", "reduce_o", "reduce_down")
        return starts[rank] + programs[rank].digest_column(layer, point)

    pairs = []
    for (rank, replica), column in columns.items():
        first = rank - rank % tp  # of its stage
        if replica.head >= 0:
            other = min(each for each in range(first, first + tp) if (each, replica) in columns)
            other_column = columns[other, replica]
        elif replica.point == "hop":
            other = rank - tp
            other_column = residual(other, replica.layer - 1, "reduce_down")
        else:
            other, other_column = first, residual(first, replica.layer, replica.point)
        if other != rank:  # not the owner of a KV head itself
            pairs.append(_Pair(replica, rank, other, column, other_column))
    return pairs
