"""float32 arithmetic in NumPy with one rounding a step: what kernels must equal, bit for bit.

NumPy has no float32 fma, and float64-then-cast is not one: the sum in float64 rounds, and the
cast rounds again. `fma32` rounds the float64 sum to odd, so that the cast is the only rounding.
Everything here is element-wise, or a reduction in a written order; no library sum is used.

Knows nothing of models or layouts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from anyshard.ops.coefficients import (
    EXP2_COEFFICIENTS,
    LN2_HI,
    LN2_LO,
    LOG2E_HI,
    LOG2E_LO,
    LOG_COEFFICIENTS,
)

__all__ = [
    "EMPTY_MAX",
    "F32",
    "FLOAT_BYTES",
    "I32",
    "exp",
    "exp2",
    "fma32",
    "halving_tree",
    "linear_nodes",
    "log",
    "merge_nodes",
    "pow2",
    "silu",
]

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

FLOAT_BYTES = 4
EMPTY_MAX = -(1 << 30)  # the integer maximum of an attention state that has seen no key
EXP2_FLOOR = np.float32(-200.0)  # far below 2^-126: the result is +0 whatever the polynomial says
CHUNK_ELEMENTS = 1 << 15  # accumulators of one inner loop: six float64 temporaries stay in cache


def fma32(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> F32:
    """a*b + c for float32 arrays, rounded once to nearest even; shapes broadcast.

    The product of two float32 is exact in float64; TwoSum gives the error of adding c; the sum
    is rounded to odd, which keeps the bit that decides the final rounding.
    Source: Boldo and Melquiond, Emulation of FMA and correctly rounded sums. Held by:
    test_exact.py (against the exact rational result, and the witness in docs/numerics.md).
    """
    product = np.multiply(a, b, dtype=np.float64)
    addend = np.asarray(c, dtype=np.float64)
    total = np.asarray(product + addend)
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(np.int64)
    even = (bits & 1) == 0
    # one step of the bit pattern away from zero when the error has the sign of the sum
    step = np.where((error > 0) == (total > 0), 1, -1)
    inexact = (error > 0) | (error < 0)
    odd = bits + np.where(even & inexact, step, 0)
    return np.asarray(odd.view(np.float64).astype(np.float32))


def _horner(coefficients: Sequence[float], x: F32) -> F32:
    result = np.full_like(x, np.float32(coefficients[-1]))
    for coefficient in reversed(coefficients[:-1]):
        result = fma32(result, x, np.float32(coefficient))
    return result


def _scaled(fraction: F32, exponent: F32) -> F32:
    """2^fraction * 2^exponent by adding integers; +0 below 2^-126."""
    bits = _horner(EXP2_COEFFICIENTS, fraction).view(np.int32)
    shifted = bits + (exponent.astype(np.int32) << 23)
    normal = (bits >> 23) + exponent.astype(np.int32) >= 1
    return np.where(normal, shifted, 0).astype(np.int32).view(np.float32)


def exp2(t: F32) -> F32:
    """2^t for t <= 0. Held by: test_exact.py (error against 60 digits, twin of the kernel)."""
    t = np.asarray(t, np.float32)
    held = np.maximum(t, EXP2_FLOOR)
    n = np.rint(held)
    return np.where(t < EXP2_FLOOR, np.float32(0), _scaled(held - n, n))


def exp(x: F32) -> F32:
    """e^x for x <= 0: exp2 of x*log2(e), the product kept in two parts."""
    x = np.asarray(x, np.float32)
    held = np.maximum(x, np.float32(-130.0))
    high = held * np.float32(LOG2E_HI)
    low = fma32(held, np.float32(LOG2E_HI), -high)
    low = fma32(held, np.float32(LOG2E_LO), low)
    n = np.rint(high)
    return np.where(x < np.float32(-130.0), np.float32(0), _scaled((high - n) + low, n))


def log(x: F32) -> F32:
    """Natural logarithm of normal x > 0."""
    bits = np.ascontiguousarray(x, np.float32).view(np.int32)
    exponent = (bits - 0x3F3504F3) >> 23
    f = (bits - (exponent << 23)).view(np.float32) - np.float32(1)
    e = exponent.astype(np.float32)
    square = f * f
    y = (f * square) * _horner(LOG_COEFFICIENTS, f)
    y = fma32(np.float32(-0.5), square, y)
    t = fma32(e, np.float32(LN2_LO), y)
    return fma32(e, np.float32(LN2_HI), f + t)


def silu(x: F32) -> F32:
    """x / (1 + e^-x), by the form that never overflows on either side of 0."""
    e = exp(-np.abs(x))
    top = np.where(x >= 0, x, x * e)
    return np.asarray(top / (np.float32(1) + e), np.float32)


def pow2(difference: I32) -> F32:
    """2^difference for integers <= 0; +0 below 2^-126."""
    biased = np.maximum(np.asarray(difference, np.int64) + 127, 0)
    return (biased << 23).astype(np.int32).view(np.float32)


def halving_tree(lanes: F32) -> F32:
    """Sum over the last dim, a power of two: lane i takes lane i + half, then again, to one."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def merge_nodes(nodes: Sequence[F32], merges: Sequence[int]) -> list[F32]:
    """Run the post-order stack: after node i, `merges[i]` times left + right; what is left."""
    stack: list[F32] = []
    for node, count in zip(nodes, merges, strict=True):
        stack.append(node)
        for _ in range(count):
            right = stack.pop()
            stack.append(stack.pop() + right)
    return stack


def linear_nodes(x_MK: F32, w_NK: F32, leaf_lengths: Sequence[int], merges: Sequence[int]) -> F32:
    """Nodes of x @ w.T over the span of leaves given: shape [nodes, M, N].

    Each leaf is an fma chain over its k in order, from +0; leaves run side by side, so a chain
    costs 64 steps, not K. Source: docs/numerics.md, Linear. Held by: test_exact.py.
    """
    num_rows, num_outputs = x_MK.shape[0], w_NK.shape[0]
    num_nodes = len(leaf_lengths) - sum(merges)
    result = np.empty((num_nodes, num_rows, num_outputs), np.float32)
    if not leaf_lengths:
        return result
    x_MLk = _split_leaves(x_MK, leaf_lengths)
    chunk = max(1, CHUNK_ELEMENTS // (num_rows * len(leaf_lengths)))
    for start in range(0, num_outputs, chunk):
        span = slice(start, start + chunk)
        w_NLk = _split_leaves(np.ascontiguousarray(w_NK[span]), leaf_lengths)
        leaves = _chains(x_MLk, w_NLk, np.asarray(leaf_lengths))
        nodes = merge_nodes([leaves[:, :, i] for i in range(len(leaf_lengths))], merges)
        for index, node in enumerate(nodes):
            result[index, :, span] = node
    return result


def _split_leaves(a_RK: F32, leaf_lengths: Sequence[int]) -> F32:
    out = np.zeros((a_RK.shape[0], len(leaf_lengths), max(leaf_lengths)), np.float32)
    start = 0
    for index, length in enumerate(leaf_lengths):
        out[:, index, :length] = a_RK[:, start : start + length]
        start += length
    return out


def _chains(x_MLk: F32, w_NLk: F32, lengths: npt.NDArray[np.int64]) -> F32:
    acc = np.zeros((x_MLk.shape[0], w_NLk.shape[0], len(lengths)), np.float32)
    for k in range(x_MLk.shape[2]):
        step = fma32(x_MLk[:, None, :, k], w_NLk[None, :, :, k], acc)
        # a leaf that is over takes no step: even + 0*0 would turn -0 into +0
        acc = step if k < lengths.min() else np.where(k < lengths, step, acc)
    return acc
