"""Compares two records: equal, not comparable and why, or the first op that differs.

First is the earliest position, then what a step writes first: embed, the layers in order and in
each its points in order, logits, the token drawn. Everything else at that position and later comes
after it, and may only have inherited the difference. No tolerance: bits are equal or they are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from anyshard.fidelity.record import Manifest, Record
from anyshard.model import LAYER_POINTS

__all__ = ["Comparison", "Divergence", "compare_records"]

_SHOWN = 12  # digits of a hash
_WITHOUT_EFFECT = {"context"}  # the longest run possible
_EMBED, _LOGITS, _TOKEN = "embed", "logits", "token"


@dataclass(frozen=True)
class Divergence:
    """A place in a run; `layer` is None for embed, logits, token (the one drawn there), and for
    fault: a row that left the range of float32 in one run only, or in another op."""

    position: int
    layer: int | None
    point: str

    @property
    def op(self) -> str:
        """`layers.3.attention`, `embed`, `logits`, `token` or `fault`."""
        return self.point if self.layer is None else f"layers.{self.layer}.{self.point}"


@dataclass(frozen=True)
class Comparison:
    """What came of it. Counts are of digests and tokens that both runs have.

    incomparable: one sentence a reason, and then nothing else is said. only_in: positions that
    the first or the second run has beyond the other.
    """

    incomparable: tuple[str, ...] = ()
    first: Divergence | None = None
    positions: int = 0
    digests: int = 0
    digests_differing: int = 0
    tokens: int = 0
    tokens_differing: int = 0
    only_in: tuple[int, int] = (0, 0)

    @property
    def equal(self) -> bool:
        """No bit differs in what both runs have."""
        return not self.incomparable and self.first is None


def compare_records(a: Record, b: Record) -> Comparison:
    """Compare what two runs of one request have in common.

    Held by: test_record.py.
    """
    reasons = _reasons(a.manifest, b.manifest)
    if reasons:
        return Comparison(incomparable=reasons)
    positions = min(a.manifest.positions, b.manifest.positions)
    tokens = min(a.manifest.emitted_tokens, b.manifest.emitted_tokens)
    grid = _grid(a, b, positions, tokens)
    drawn = a.tokens[:tokens] != b.tokens[:tokens]
    num_digests = positions * (1 + a.manifest.layers * len(LAYER_POINTS)) + tokens
    return Comparison(
        first=_first(grid, a.manifest.layers) or _failed(a.manifest, b.manifest),
        positions=positions,
        digests=num_digests,
        digests_differing=int(np.count_nonzero(grid[:, :-1])),
        tokens=tokens,
        tokens_differing=int(np.count_nonzero(drawn)),
        only_in=(a.manifest.positions - positions, b.manifest.positions - positions),
    )


def _grid(a: Record, b: Record, positions: int, tokens: int) -> npt.NDArray[np.bool_]:
    """What differs: [positions, points of a step in the order in which they are written]."""

    def differ(x: npt.NDArray[Any], y: npt.NDArray[Any], count: int) -> npt.NDArray[np.bool_]:
        return np.asarray(x[:count] != y[:count])

    first = a.manifest.prompt_tokens - 1  # what stands there drew the first token emitted
    columns = a.manifest.layers * len(LAYER_POINTS)
    grid = np.zeros((max(positions, first + tokens), 1 + columns + 2), np.bool_)
    grid[:positions, 0] = differ(a.digests.embed, b.digests.embed, positions)
    layers = differ(a.digests.layers, b.digests.layers, positions)
    grid[:positions, 1:-2] = layers.reshape(positions, columns)
    grid[first : first + tokens, -2] = differ(a.digests.logits, b.digests.logits, tokens)
    grid[first : first + tokens, -1] = differ(a.tokens, b.tokens, tokens)
    return grid


def _first(grid: npt.NDArray[np.bool_], num_layers: int) -> Divergence | None:
    places = np.flatnonzero(grid)
    if not len(places):
        return None
    position, column = divmod(int(places[0]), grid.shape[1])
    if column == 0:
        return Divergence(position, None, _EMBED)
    if column >= grid.shape[1] - 2:
        return Divergence(position, None, _LOGITS if column == grid.shape[1] - 2 else _TOKEN)
    layer, point = divmod(column - 1, len(LAYER_POINTS))
    assert layer < num_layers
    return Divergence(position, layer, LAYER_POINTS[point])


def _failed(a: Manifest, b: Manifest) -> Divergence | None:
    """Where one run left the range of float32 and the other did not, or did in another op.

    A run that ended before that position says nothing of it.
    """
    for one, other in ((a, b), (b, a)):
        if one.fault and other.positions > one.positions:
            return Divergence(one.positions, None, "fault")
    if a.fault and b.fault and a.fault != b.fault:
        return Divergence(a.positions, None, "fault")
    return None


def _reasons(a: Manifest, b: Manifest) -> tuple[str, ...]:
    """Why two runs should not be equal, a sentence each."""
    found = []
    for name in sorted((set(a.model) | set(b.model)) - _WITHOUT_EFFECT):
        if a.model.get(name) != b.model.get(name):
            found.append(f"other models: {name} is {a.model.get(name)} and {b.model.get(name)}")
            break
    for what, one, two in (
        ("other weights", a.weights_sha256, b.weights_sha256),
        ("other profiles", a.profile_sha256, b.profile_sha256),
        ("other prompt tokens", a.tokens_sha256, b.tokens_sha256),
    ):
        if one != two:
            found.append(f"{what}: sha256 {one[:_SHOWN]} and {two[:_SHOWN]}")
    if a.sampling != b.sampling and not (a.sampling.greedy and b.sampling.greedy):
        for name in a.sampling.__struct_fields__:
            one, two = getattr(a.sampling, name), getattr(b.sampling, name)
            if one != two:
                found.append(f"other sampling: {name} is {one} and {two}")
    return tuple(found)
