"""Compares two records: equal, not comparable and why, or the first op that differs.

First is the earliest position, then what a step writes first: embed, the layers in order and in
each its points in order, logits, the token drawn. Everything else at that position and later comes
after it, and may only have inherited the difference. No tolerance: bits are equal or they are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from anyshard.fidelity.record import Manifest, Record, printable
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
    steps = _steps(a, b, positions)
    drawn = _drawn(a, b, tokens)
    num_digests = positions * (1 + a.manifest.layers * len(LAYER_POINTS)) + tokens
    return Comparison(
        first=_first(steps, drawn, a.manifest) or _failed(a.manifest, b.manifest),
        positions=positions,
        digests=num_digests,
        digests_differing=int(np.count_nonzero(steps)) + int(np.count_nonzero(drawn[:, 0])),
        tokens=tokens,
        tokens_differing=int(np.count_nonzero(drawn[:, 1])),
        only_in=(a.manifest.positions - positions, b.manifest.positions - positions),
    )


def _steps(a: Record, b: Record, positions: int) -> npt.NDArray[np.bool_]:
    """What differs before the head: [positions, points in the order in which a step writes them].

    No larger than the digests on file, whatever a manifest says of layers.
    """
    embed = a.digests.embed[:positions] != b.digests.embed[:positions]
    layers = a.digests.layers[:positions] != b.digests.layers[:positions]
    columns = a.manifest.layers * len(LAYER_POINTS)
    return np.concatenate([embed[:, None], layers.reshape(positions, columns)], axis=1)


def _drawn(a: Record, b: Record, tokens: int) -> npt.NDArray[np.bool_]:
    """What differs in the tokens drawn: [tokens, (logits, token)]."""
    logits = a.digests.logits[:tokens] != b.digests.logits[:tokens]
    return np.stack([logits, a.tokens[:tokens] != b.tokens[:tokens]], axis=1)


def _first(
    steps: npt.NDArray[np.bool_], drawn: npt.NDArray[np.bool_], manifest: Manifest
) -> Divergence | None:
    found = []
    for grid in (steps, drawn):
        rows = np.flatnonzero(grid.any(axis=1))
        found.append((int(rows[0]), int(grid[rows[0]].argmax())) if len(rows) else None)
    in_step, at_draw = found
    if at_draw is not None:
        index, column = at_draw
        position = manifest.prompt_tokens - 1 + index  # what stands there drew the token
        if in_step is None or position < in_step[0]:
            return Divergence(position, None, (_LOGITS, _TOKEN)[column])
    if in_step is None:
        return None
    position, column = in_step
    if column == 0:
        return Divergence(position, None, _EMBED)
    layer, point = divmod(column - 1, len(LAYER_POINTS))
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
            one, two = a.model.get(name), b.model.get(name)
            found.append(
                f"other models: {printable(name)} is {printable(one)} and {printable(two)}"
            )
            break
    for what, one, two in (
        ("other weights", a.weights_sha256, b.weights_sha256),
        ("other profiles", a.profile_sha256, b.profile_sha256),
        ("other prompt tokens", a.tokens_sha256, b.tokens_sha256),
    ):
        if one != two:
            found.append(f"{what}: sha256 {printable(one[:_SHOWN])} and {printable(two[:_SHOWN])}")
    if a.sampling != b.sampling and not (a.sampling.greedy and b.sampling.greedy):
        for name in a.sampling.__struct_fields__:
            one, two = getattr(a.sampling, name), getattr(b.sampling, name)
            if one != two:
                found.append(f"other sampling: {name} is {one} and {two}")
    return tuple(found)
