"""The reference bodies of what draws a token: argmax, and noise keyed by position and token id; and
of what is told of the row beside.

Re-exported by `ops.reference`, which has the module's rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from anyshard.ops.exact import F32, exp, log

__all__ = ["argmax", "exp_into", "gumbel_argmax", "philox_words", "spread"]


def argmax(logits_V: F32) -> tuple[int, float]:
    """(id, value) of the largest logit, the lowest id on ties; id -1 if it is not finite."""
    best = int(np.argmax(logits_V))  # NumPy returns a NaN's place if there is one
    value = float(logits_V[best])
    return (best if np.isfinite(value) else -1), value


def exp_into(x: F32, out: F32) -> None:
    """out = e^x for x <= 0, element by element; out may be x."""
    out[:] = exp(x)


def gumbel_argmax(
    logits_V: F32,
    temperature: float,
    key: int,
    position: int,
    choice: int,
    stream: int,
    mask: npt.NDArray[np.uint8] | None,
) -> int:
    """argmax over allowed ids of logit + T * G, with G keyed by (seed, position, id).

    Source: docs/numerics.md, Sampling; Salmon et al., Parallel random numbers, 2011 (Philox).
    """
    words = philox_words(len(logits_V), key, position, choice, stream)
    u = ((words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    gumbel = -log(-log(u))
    score = logits_V + np.float32(temperature) * gumbel
    if mask is not None:
        score = np.where(mask != 0, score, np.float32(-np.inf))
    return int(np.argmax(score))


def spread(logits_V: F32) -> tuple[float, float, int, int]:
    """Of softmax(logits): its entropy in nats, by how much the chance of its best token exceeds
    that of its second best, and the ids of both, the lowest on ties.

    NaN and -1 if a logit is not finite, or two are farther apart than float32 reaches; -1 for the
    second of one. The native body is at most 2^-17 (1 + entropy) and 2^-17 from exact: sums of 256
    terms by lanes of float32, exp and log of a few ulp. Held by: test_native_spread.py.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        x = logits_V - logits_V.max()
    if not np.isfinite(x).all():
        return float("nan"), float("nan"), -1, -1
    chances = np.exp(x.astype(np.float64))
    mass = float(chances.sum())
    entropy = float(np.log(mass) - (chances * x).sum() / mass)
    first = int(np.argmax(x))
    if len(x) == 1:
        return entropy, 1.0, first, -1
    others = x.copy()
    others[first] = -np.inf
    second = int(np.argmax(others))
    return entropy, float((1.0 - chances[second]) / mass), first, second


def philox_words(
    count: int, key: int, position: int, choice: int, stream: int
) -> npt.NDArray[np.uint32]:
    """The random word of each id 0..count-1: word id & 3 of counter (.., id >> 2, .., ..)."""
    groups = np.arange(-(-count // 4), dtype=np.uint64)
    counter = [np.full_like(groups, word) for word in (position, 0, choice, stream)]
    counter[1] = groups
    return _philox(counter, key).reshape(-1)[:count]


def _philox(counter: Sequence[npt.NDArray[np.uint64]], key: int) -> npt.NDArray[np.uint32]:
    """Philox4x32-10 of four counter words: [n, 4]."""
    low32 = np.uint64(0xFFFFFFFF)
    x0, x1, x2, x3 = counter
    key0, key1 = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    for _ in range(10):
        product0 = x0 * np.uint64(0xD2511F53)
        product1 = x2 * np.uint64(0xCD9E8D57)
        x0, x1, x2, x3 = (
            (product1 >> np.uint64(32)) ^ x1 ^ np.uint64(key0),
            product1 & low32,
            (product0 >> np.uint64(32)) ^ x3 ^ np.uint64(key1),
            product0 & low32,
        )
        key0 = (key0 + 0x9E3779B9) & 0xFFFFFFFF
        key1 = (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([x0, x1, x2, x3], axis=1).astype(np.uint32)
