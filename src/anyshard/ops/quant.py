"""Block INT8: how weights and rows become integers, and what a linear makes of them.

A block is 32 consecutive inputs, one leaf of the tree: short at the end of a row, and of each head
where K is made of heads; what pads it is zero. Weights have a float16 scale a block, rows a
float32 one. With w' = q * scale: |w - w'| <= scale / 2 + 127 |amax / 127 - scale|, the second term
from rounding the scale to float16 (at most 2^-11 of amax, 2^-25 * 127 where it is subnormal).

Shapes: M rows, N outputs, K inputs, B blocks; q [.., B, 32], scale [.., B].
Source: docs/numerics.md, int8. Held by: test_int8.py, and the golden vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from anyshard.ops.coefficients import INT8_MOST
from anyshard.ops.exact import F32, merge_nodes
from anyshard.ops.storage import Q8_INPUTS

__all__ = ["int8_nodes", "quantize_rows", "quantize_weights", "split_blocks"]

I8 = npt.NDArray[np.int8]
F16 = npt.NDArray[np.float16]


def split_blocks(a_RK: F32, lengths: Sequence[int]) -> F32:
    """Rows in blocks of the lengths given, zero padded: [R, B, 32]."""
    out = np.zeros((a_RK.shape[0], len(lengths), Q8_INPUTS), np.float32)
    start = 0
    for index, length in enumerate(lengths):
        out[:, index, :length] = a_RK[:, start : start + length]
        start += length
    return out


def _rounded(a_RBk: F32, scale_RB: F32) -> I8:
    with np.errstate(all="ignore"):
        q = np.rint(a_RBk / scale_RB[:, :, None])
    usable = (scale_RB != 0) & np.isfinite(scale_RB)
    clamped: F32 = np.clip(q, -INT8_MOST, INT8_MOST)
    return np.where(usable[:, :, None], clamped, 0).astype(np.int8)


def quantize_weights(w_NBk: F32) -> tuple[I8, F16]:
    """q and scales of finite weights in blocks: scale = float16(amax / 127).

    Raises: OverflowError if a scale leaves float16.
    """
    amax = np.abs(w_NBk).max(axis=2)
    with np.errstate(over="ignore"):
        scale = (amax / np.float32(INT8_MOST)).astype(np.float16)
    if np.isinf(scale).any():
        raise OverflowError("a block's largest weight / 127 is beyond float16")
    return _rounded(w_NBk, scale.astype(np.float32)), scale


def quantize_rows(x_MK: F32, lengths: Sequence[int]) -> tuple[I8, F32]:
    """q and scales of rows: scale = amax / 127.

    A block that holds an infinity or NaN becomes q = 0 with the scale NaN.
    """
    blocks = split_blocks(x_MK, lengths)
    amax = np.abs(blocks).max(axis=2)
    scale = np.where(np.isfinite(amax), amax / np.float32(INT8_MOST), np.float32(np.nan))
    return _rounded(blocks, scale), scale


def int8_nodes(
    x_MK: F32, q_NBk: I8, scale_NB: F16, lengths: Sequence[int], merges: Sequence[int]
) -> F32:
    """Nodes of x @ w.T over the span of blocks given: [nodes, M, N].

    A leaf is float32(exact dot) * (weight scale * row scale). A dot is below 2^24, so float32
    products and sums are exact in any order, the library's too.
    """
    x_MBk, s_MB = quantize_rows(x_MK, lengths)
    dots = np.matmul(
        x_MBk.transpose(1, 0, 2).astype(np.float32), q_NBk.transpose(1, 2, 0).astype(np.float32)
    )  # [B, M, N]
    scale_BN = scale_NB.astype(np.float32).T
    with np.errstate(invalid="ignore", over="ignore"):
        leaves = [
            dots[block] * (scale_BN[block][None, :] * s_MB[:, block, None])
            for block in range(len(lengths))
        ]
        nodes = merge_nodes(leaves, merges)
    num_nodes = len(lengths) - sum(merges)
    if not num_nodes:
        return np.empty((0, x_MK.shape[0], q_NBk.shape[0]), np.float32)
    return np.stack(nodes)
