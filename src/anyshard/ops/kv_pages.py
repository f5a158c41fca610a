"""How keys and values lie in a page of 32 tokens, and what a kernel makes of them.

float32: K [d, 32], so that a lane of the score is a key; V [32, d]. int8: the same shapes of int8,
then float16 scales [d / 32 rounded up, 32 keys], as rows of 32 bytes: either is one array
[d + 2 * groups, 32]. A scale belongs to one key or value, KV head and 32 dims, and never spans
tokens: scale = float16(amax / 127), q = rint(x / scale) clamped to +-127, both 0 if the scale is 0.
An infinity or NaN, or a scale beyond float16, makes the scale NaN and q 0, so that the next score
or output shows it.

Shapes: P pages, G KV heads, d head dim, g scale groups of a head.
Source: docs/numerics.md, KV int8. Held by: test_kv_int8.py, and the golden vectors.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from anyshard.config import KvType
from anyshard.ops.coefficients import KV_BLOCK
from anyshard.ops.exact import F32, fma32

__all__ = [
    "KV_GROUP",
    "Pages",
    "blank_row",
    "is_quantized",
    "packed_row",
    "page_bytes",
    "page_shape",
    "quantize_groups",
    "scores",
    "split_page",
    "store_row",
    "unpack_row",
    "widened_row",
]

Pages = npt.NDArray[Any]  # float32 or int8
I8 = npt.NDArray[np.int8]
KV_GROUP: Final = 32
MOST: Final = 127


def num_groups(head_dim: int) -> int:
    """Scales of a key of one head."""
    return -(-head_dim // KV_GROUP)


def page_shape(kv: KvType, head_dim: int, *, keys: bool) -> tuple[int, int]:
    """Of a page of one KV head."""
    if kv == "int8":
        return head_dim + 2 * num_groups(head_dim), KV_BLOCK
    return (head_dim, KV_BLOCK) if keys else (KV_BLOCK, head_dim)


def page_bytes(kv: KvType, head_dim: int) -> int:
    """Of a page of K, or of V, of one KV head."""
    rows, columns = page_shape(kv, head_dim, keys=True)
    return rows * columns * (1 if kv == "int8" else 4)


def is_quantized(pages: Pages) -> bool:
    """Whether they are of int8."""
    return bool(pages.dtype == np.int8)


def quantize_groups(x_Nd: F32) -> tuple[I8, F32]:
    """q [N, d] and the scales [N, g] of rows, each a key or value of one KV head."""
    num_rows, dims = x_Nd.shape
    groups = num_groups(dims)
    padded = np.zeros((num_rows, groups * KV_GROUP), np.float32)
    padded[:, :dims] = x_Nd
    x_Ngk = padded.reshape(num_rows, groups, KV_GROUP)
    amax = np.abs(x_Ngk).max(axis=2)
    with np.errstate(all="ignore"):
        scale = (amax / np.float32(MOST)).astype(np.float16).astype(np.float32)
        q = np.rint(x_Ngk / scale[:, :, None])
    scale[~np.isfinite(scale)] = np.nan
    usable = (scale > 0)[:, :, None]
    clamped = np.where(usable, np.clip(np.where(usable, q, 0), -MOST, MOST), 0).astype(np.int8)
    return clamped.reshape(num_rows, -1)[:, :dims], scale


def _scales_of(page: Pages, head_dim: int) -> npt.NDArray[np.float16]:
    """[.., g, 32]: a view of those of int8 pages [.., rows, 32]."""
    return page[..., head_dim:, :].view(np.float16).reshape(*page.shape[:-2], -1, KV_BLOCK)


def _head_dim(pages: Pages, *, keys: bool) -> int:
    rows = pages.shape[-2]
    if is_quantized(pages):
        return next(d for d in range(8, rows, 8) if d + 2 * num_groups(d) == rows)
    return int(rows if keys else pages.shape[-1])


def store_row(pages: Pages, page: int, lane: int, x_Gd: F32, *, keys: bool) -> None:
    """Write the key or value of one token, all KV heads, into its page."""
    if not is_quantized(pages):
        if keys:
            pages[page, :, :, lane] = x_Gd
        else:
            pages[page, :, lane, :] = x_Gd
        return
    head_dim = x_Gd.shape[1]
    q_Gd, scale_Gg = quantize_groups(x_Gd)
    for head, q_d in enumerate(q_Gd):
        values = pages[page, head, :head_dim]
        if keys:
            values[:, lane] = q_d
        else:
            values.reshape(KV_BLOCK, head_dim)[lane] = q_d
        with np.errstate(invalid="ignore"):
            _scales_of(pages[page, head], head_dim)[:, lane] = scale_Gg[head]


def split_page(pages: Pages, page: int, heads: Any, *, keys: bool) -> tuple[F32, F32 | None]:
    """Of a page and KV heads [H]: K [H, d, 32] or V [H, 32, d] as float32, and scales [H, g, 32].

    In int8 the first are q; in float32 there are no scales.
    """
    chosen = pages[page][heads]
    if not is_quantized(pages):
        return chosen, None
    head_dim = _head_dim(pages, keys=keys)
    q = chosen[:, :head_dim].astype(np.float32)
    if not keys:
        q = q.reshape(len(chosen), KV_BLOCK, head_dim)
    return q, _scales_of(np.ascontiguousarray(chosen), head_dim).astype(np.float32)


def blank_row(pages: Pages, *, keys: bool) -> Pages:
    """What `packed_row` gives of a page of zeros."""
    head_dim = _head_dim(pages, keys=keys)
    width = head_dim + (2 * num_groups(head_dim) if is_quantized(pages) else 0)
    return np.zeros((pages.shape[1], width), pages.dtype)


def packed_row(pages: Pages, page: int, lane: int, *, keys: bool) -> Pages:
    """What is stored of one token, all KV heads: [G, d], in int8 with the scales' bytes behind."""
    head_dim, of_page = _head_dim(pages, keys=keys), pages[page]
    if not is_quantized(pages):
        return np.ascontiguousarray(of_page[:, :, lane] if keys else of_page[:, lane, :])
    q = of_page[:, :head_dim]
    q = q[:, :, lane] if keys else q.reshape(len(of_page), KV_BLOCK, head_dim)[:, lane]
    scales = np.ascontiguousarray(_scales_of(of_page, head_dim)[:, :, lane])
    return np.concatenate([q, scales.view(np.int8)], axis=1)


def unpack_row(pages: Pages, page: int, lane: int, packed: Pages, *, keys: bool) -> None:
    """Store what `packed_row` has given."""
    if not is_quantized(pages):
        store_row(pages, page, lane, packed, keys=keys)
        return
    head_dim = _head_dim(pages, keys=keys)
    scales = np.ascontiguousarray(packed[:, head_dim:]).view(np.float16)
    for head, q in enumerate(packed[:, :head_dim]):
        values = pages[page, head, :head_dim]
        if keys:
            values[:, lane] = q
        else:
            values.reshape(KV_BLOCK, head_dim)[lane] = q
        _scales_of(pages[page, head], head_dim)[:, lane] = scales[head]


def widened_row(pages: Pages, page: int, lane: int, *, keys: bool) -> F32:
    """[G, d]: the key or value of one token as float32, exact."""
    packed = packed_row(pages, page, lane, keys=keys)
    if not is_quantized(pages):
        return packed
    head_dim = _head_dim(pages, keys=keys)
    scales = np.ascontiguousarray(packed[:, head_dim:]).view(np.float16).astype(np.float32)
    widened: F32 = packed[:, :head_dim] * np.repeat(scales, KV_GROUP, axis=1)[:, :head_dim]
    return widened


def scores(q_Hd: F32, k_HdJ: F32, scale_HgJ: F32 | None) -> F32:
    """[H, J]: a chain over d; in int8 one over each group of dims, times its scale, added up."""
    dims, visible = k_HdJ.shape[1:]
    zero = np.zeros((len(q_Hd), visible), np.float32)
    group = dims if scale_HgJ is None else KV_GROUP
    total = zero
    for start in range(0, dims, group):
        chain = zero
        for d in range(start, min(start + group, dims)):
            chain = fma32(q_Hd[:, d, None], k_HdJ[:, d], chain)
        if scale_HgJ is None:
            return chain
        total = fma32(chain, scale_HgJ[:, start // group, :visible], total)
    return total
