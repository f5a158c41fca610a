"""Distances: what is left when the true numbers are taken away.

Reduces floats outside `ops`, which few may (REDUCERS of tests/test_tidy.py). Nothing of it enters
a logit: its sums are of errors, in float64, in the library's order. Knows nothing of models,
engines or files.

Letters: P positions, V vocabulary, N any width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from anyshard.accuracy.report import Flip, LogitFigures, OpFigures
from anyshard.ops.float64 import F64

__all__ = [
    "Distance",
    "PositionFigures",
    "TrueRows",
    "kl_divergence",
    "log_softmax",
    "over_layers",
]

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float32] | F64

TOP = 5  # candidates compared as a set


class Distance:
    """Running distance of arrays from their true values; no array is kept."""

    def __init__(self) -> None:
        self._error_squares = self._true_squares = self._max_error = 0.0
        self._count = 0

    def add(self, mine: Numbers, true: F64) -> None:
        """Take in arrays of one shape."""
        error = _error(mine, true)
        self._error_squares += float(np.sum(np.square(error)))
        self._true_squares += float(np.sum(np.square(true)))
        self._max_error = max(self._max_error, float(np.abs(error).max(initial=0.0)))
        self._count += error.size

    def figures(self, point: str, layer: int | None) -> OpFigures:
        """All that was added, as a row of the report."""
        count = max(1, self._count)
        return OpFigures(
            point=point,
            layer=layer,
            rms_error=float(np.sqrt(self._error_squares / count)),
            max_error=self._max_error,
            relative_error=_ratio(self._error_squares, self._true_squares),
            magnitude=float(np.sqrt(self._true_squares / count)),
        )


class TrueRows:
    """Logits of the reference for some positions, with what every comparison needs of them.

    targets [P]: the id that the text goes on with, -1 where it ends.
    """

    def __init__(self, true_PV: F64, targets: Sequence[int]) -> None:
        self.logits = true_PV
        self.log_p = log_softmax(true_PV)
        self.top = _top(true_PV)
        self.targets = np.asarray(targets, np.int64)

    def compare(self, mine_PV: Numbers, *, first: int = 0) -> PositionFigures:
        """Figures of each position of an engine's logits, which begin at row `first` of these."""
        here = slice(first, first + len(mine_PV))
        true_PV, log_p, targets = self.logits[here], self.log_p[here], self.targets[here]
        error, log_q = _error(mine_PV, true_PV), log_softmax(mine_PV.astype(np.float64))
        top, true_top = _top(mine_PV), self.top[here]
        shared = (top[:, :, None] == true_top[:, None, :]).any(axis=2)
        chosen, best, rows = top[:, 0], true_top[:, 0], np.arange(len(error))
        return PositionFigures(
            error_squares=np.sum(np.square(error), axis=1),
            true_squares=np.sum(np.square(true_PV), axis=1),
            max_error=np.abs(error).max(axis=1),
            kl=kl_divergence(log_p, log_q, error),
            same_top1=chosen == best,
            shared_top5=np.mean(shared, axis=1, dtype=np.float64),
            margin=true_PV[rows, best] - true_PV[rows, chosen],
            nats=_surprise(log_q, targets),
            true_nats=_surprise(log_p, targets),
        )


@dataclass(frozen=True)
class PositionFigures:
    """One number a position [P]; any span of positions can be summed up.

    margin: the reference's logit of its own choice less that of ours. nats, true_nats: of the
    token that the text goes on with, NaN where there is none.
    """

    error_squares: F64
    true_squares: F64
    max_error: F64
    kl: F64
    same_top1: npt.NDArray[np.bool_]
    shared_top5: F64
    margin: F64
    nats: F64
    true_nats: F64

    @classmethod
    def joined(cls, parts: Sequence[PositionFigures]) -> PositionFigures:
        """Consecutive spans as one."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def part(self, start: int, stop: int) -> PositionFigures:
        """Rows start:stop of these."""
        return PositionFigures(*(getattr(self, field.name)[start:stop] for field in fields(self)))

    def summary(self, *, start: int, vocab: int) -> LogitFigures:
        """Figures over all of these positions, the first of which is `start` in the text."""
        count = len(self.kl) * vocab
        squares, true = float(np.sum(self.error_squares)), float(np.sum(self.true_squares))
        flips = np.flatnonzero(~self.same_top1)
        told = ~np.isnan(self.nats)
        return LogitFigures(
            rms_error=float(np.sqrt(squares / count)),
            max_error=float(self.max_error.max()),
            relative_error=_ratio(squares, true),
            magnitude=float(np.sqrt(true / count)),
            kl_mean=float(np.mean(self.kl)),
            # an observed value: at most one position in a thousand lies above it
            kl_p999=float(np.quantile(self.kl, 0.999, method="inverted_cdf")),
            kl_max=float(self.kl.max()),
            top1_agreement=float(np.mean(self.same_top1)),
            top5_agreement=float(np.mean(self.shared_top5)),
            num_flips=len(flips),
            first_flip=_flip(flips[0], start, self.margin) if len(flips) else None,
            largest_flip_margin=float(self.margin[flips].max()) if len(flips) else None,
            perplexity=_perplexity(self.nats[told]),
            true_perplexity=_perplexity(self.true_nats[told]),
        )


def log_softmax(logits_PV: F64) -> F64:
    """Natural logarithm of softmax along the last axis, in float64."""
    shifted = logits_PV - logits_PV.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True)))


def kl_divergence(log_p_PV: F64, log_q_PV: F64, error_PV: F64) -> F64:
    """KL(p || q) [P] in nats; `error_PV` is q's logits less p's.

    Sum of p (log p - log q) cancels to 1e-15, which is more than the divergence of a float32
    model of small logits. With d the errors less their mean under p it is log(sum of p e^d), and
    sum of p (e^d - 1 - d) has no cancellation between positions: it is taken where no d exceeds 1.

    Held by: test_accuracy_figures.py::test_kl_is_that_of_a_naive_computation_in_many_digits.
    """
    p_PV = np.exp(log_p_PV)
    d_PV = error_PV - np.sum(p_PV * error_PV, axis=1, keepdims=True)
    near = np.abs(d_PV).max(axis=1, initial=0.0) <= 1
    small_PV = np.where(near[:, None], d_PV, 0.0)
    exact = np.log1p(np.sum(p_PV * (np.expm1(small_PV) - small_PV), axis=1))
    if near.all():
        return np.asarray(exact)
    naive = np.sum(p_PV * (log_p_PV - log_q_PV), axis=1)
    return np.asarray(np.where(near, exact, naive))


def _error(mine: Numbers, true: F64) -> F64:
    assert mine.shape == true.shape, (mine.shape, true.shape)
    return np.asarray(mine.astype(np.float64) - true)


def _top(logits_PV: Numbers) -> Ints:
    """Ids of the TOP largest [P, min(TOP, V)], largest first; ties go to the lowest id."""
    rest_PV = np.array(logits_PV, np.float64)
    rows = np.arange(len(rest_PV))
    found = []
    for _ in range(min(TOP, rest_PV.shape[1])):
        found.append(rest_PV.argmax(axis=1))
        rest_PV[rows, found[-1]] = -np.inf
    return np.stack(found, axis=1)


def _surprise(log_p_PV: F64, targets: Ints) -> F64:
    nats = -log_p_PV[np.arange(len(targets)), np.maximum(targets, 0)]
    return np.asarray(np.where(targets >= 0, nats, np.nan))


def _flip(index: np.intp, start: int, margin: F64) -> Flip:
    return Flip(position=start + int(index), margin=float(margin[index]))


def _perplexity(nats: F64) -> float | None:
    return float(np.exp(np.mean(nats))) if len(nats) else None


def _ratio(error_squares: float, true_squares: float) -> float | None:
    """Of Frobenius norms; 0 for no error, None where the true tensor is zero and ours is not."""
    if error_squares == 0:
        return 0.0
    return float(np.sqrt(error_squares / true_squares)) if true_squares else None


def over_layers(ops: Sequence[OpFigures]) -> dict[str, tuple[OpFigures, OpFigures]]:
    """By point, in order: its figures over all layers together, and those of its worst layer.

    The worst has the largest relative error. All layers of a point have one shape.
    """
    points: dict[str, list[OpFigures]] = {}
    for op in ops:
        points.setdefault(op.point, []).append(op)
    return {point: (_together(layers), _worst(layers)) for point, layers in points.items()}


def _together(layers: Sequence[OpFigures]) -> OpFigures:
    error = float(np.mean(np.square([op.rms_error for op in layers])))
    true = float(np.mean(np.square([op.magnitude for op in layers])))
    return OpFigures(
        point=layers[0].point,
        layer=None,
        rms_error=float(np.sqrt(error)),
        max_error=max(op.max_error for op in layers),
        relative_error=_ratio(error, true),
        magnitude=float(np.sqrt(true)),
    )


def _worst(layers: Sequence[OpFigures]) -> OpFigures:
    return max(layers, key=lambda op: np.inf if op.relative_error is None else op.relative_error)
