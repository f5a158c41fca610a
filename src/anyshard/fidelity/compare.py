"""Compares two records: equal, not comparable and why, or the first op that differs.

First is the earliest position, then what a step writes first: embed, the layers in order and in
each its points in order, logits, the token drawn. Everything else at that position and later comes
after it, and may only have inherited the difference. No tolerance: bits are equal or they are not.
A run whose ranks disagree differs from every run, itself included: one of them is wrong.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from anyshard.config import ModelConfig
from anyshard.fidelity.agreement import Disagreement, order_in_step
from anyshard.fidelity.record import Manifest, Record, printable
from anyshard.op import LAYER_POINTS

__all__ = ["Comparison", "Divergence", "compare_records"]

_SHOWN = 12  # digits of a hash
_WITHOUT_EFFECT = {"context"}  # the longest run possible
_EMBED, _LOGITS, _TOKEN = "embed", "logits", "token"


@dataclass(frozen=True)
class Divergence:
    """A place in a run; `layer` is None for embed, logits, token (the one drawn there), and for
    fault: a row that left the range of float32 in one run only, or in another op.

    position: None for gather_logits, of which a record has one hash for all tokens. rank: who holds
    other bits than rank `other` of the same run, the first (0) or second (1) that is compared; what
    is on file is equal there. None where it is what differs.
    """

    position: int | None
    layer: int | None
    point: str
    rank: int | None = None
    other: int | None = None
    run: int | None = None

    @property
    def op(self) -> str:
        """`layers.3.attention`, `embed`, `logits`, `gather_logits`, `token` or `fault`."""
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
    first = (
        _earliest(steps, drawn, (a.manifest, b.manifest), positions)
        or _failed(a.manifest, b.manifest)
        or _gathered(a.manifest, b.manifest)
    )
    if first is None and positions == 0:
        have = f"they have {a.manifest.positions} and {b.manifest.positions}"
        return Comparison(incomparable=(f"no position ran in both; {have}",))
    return Comparison(
        first=first,
        positions=positions,
        digests=positions * (1 + a.manifest.layers * len(LAYER_POINTS)) + tokens,
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


def _earliest(
    steps: npt.NDArray[np.bool_],
    drawn: npt.NDArray[np.bool_],
    manifests: tuple[Manifest, Manifest],
    positions: int,
) -> Divergence | None:
    """Of digests, tokens, and ranks that disagree; at one place, of digests."""
    prompt, layers = manifests[0].prompt_tokens, manifests[0].layers
    found = [_first_in_step(steps), _first_drawn(drawn, prompt)]
    for run, manifest in enumerate(manifests):
        at = manifest.disagreement
        if isinstance(at, Disagreement) and at.position < positions:
            place = (at.position, at.layer, at.point)
            found.append(Divergence(*place, rank=at.rank, other=at.other, run=run))

    def order(each: Divergence) -> tuple[int, int, int]:
        assert each.position is not None
        if each.point in (_LOGITS, _TOKEN):
            return (each.position, layers, 0)
        return (each.position, *order_in_step(each.layer, each.point))

    return min((each for each in found if each is not None), key=order, default=None)


def _first_in_step(steps: npt.NDArray[np.bool_]) -> Divergence | None:
    rows = np.flatnonzero(steps.any(axis=1))
    if not len(rows):
        return None
    position, column = int(rows[0]), int(steps[rows[0]].argmax())
    if column == 0:
        return Divergence(position, None, _EMBED)
    layer, point = divmod(column - 1, len(LAYER_POINTS))
    return Divergence(position, layer, LAYER_POINTS[point])


def _first_drawn(drawn: npt.NDArray[np.bool_], prompt_tokens: int) -> Divergence | None:
    rows = np.flatnonzero(drawn.any(axis=1))
    if not len(rows):
        return None
    position = prompt_tokens - 1 + int(rows[0])  # what stands there drew the token
    return Divergence(position, None, (_LOGITS, _TOKEN)[int(drawn[rows[0]].argmax())])


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


def _gathered(a: Manifest, b: Manifest) -> Divergence | None:
    """Where ranks have hashed the same shards of logits, and the front was given others."""
    as_long = a.emitted_tokens == b.emitted_tokens and not (a.fault or b.fault)
    if as_long and a.logits_sha256 != b.logits_sha256:
        return Divergence(None, None, "gather_logits")
    return None


def _reasons(a: Manifest, b: Manifest) -> tuple[str, ...]:
    """Why two runs should not be equal, a sentence each."""
    found = []
    defaults = _defaults()
    for name in sorted((set(a.model) | set(b.model)) - _WITHOUT_EFFECT):
        one, two = (of.model.get(name, defaults.get(name)) for of in (a, b))
        if one != two:
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
            shown = f"{what}: sha256 {printable(one[:_SHOWN])} and {printable(two[:_SHOWN])}"
            if what == "other profiles" and a.profile != b.profile:
                shown = f"{what}: {printable(a.profile)} and {printable(b.profile)}"
            found.append(shown)
    if a.sampling != b.sampling and not (a.sampling.greedy and b.sampling.greedy):
        for name in a.sampling.__struct_fields__:
            one, two = getattr(a.sampling, name), getattr(b.sampling, name)
            if one != two:
                found.append(f"other sampling: {name} is {one} and {two}")
    return tuple(found)


def _defaults() -> dict[str, Any]:
    """Of fields of a model's configuration that a record of an earlier build may not have."""
    return {each.name: each.default for each in fields(ModelConfig) if each.default is not MISSING}
