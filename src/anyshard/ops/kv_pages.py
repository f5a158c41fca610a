"""How keys and values lie in a page of 32 tokens, and what a kernel makes of them.

float32: K [d, 32], so that a lane of the score is a key; V [32, d]. int8: K [d / 2, 32, 2] and V
[16, d, 2], pairs of dims and of keys side by side, then float16 scales [d / 32 rounded up, 32
keys], as rows of 32 bytes: either is one array [d + 2 * groups, 32]. A scale belongs to one key or
value, KV head and 32 dims, and never spans tokens: scale = float16(amax / 127), q = rint(x / scale)
clamped to +-127, both 0 if the scale is 0. An infinity or NaN, or a scale beyond float16, makes the
scale NaN and q 0, so that the next score or output shows it.

Shapes: P pages, G KV heads, d head dim, g scale groups of a head.
Source: docs/numerics.md, Attention over int8 keys and values.
Held by: test_kv_int8.py, and the golden vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from anyshard.config import KvType
from anyshard.ops.coefficients import INT8_MOST, KV_BLOCK, KV_GROUP, KV_LEAST_WEIGHT, KV_WHOLE
from anyshard.ops.exact import F32, fma32

__all__ = [
    "KV_GROUP",
    "Pages",
    "add_values",
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
        scale = (amax / np.float32(INT8_MOST)).astype(np.float16).astype(np.float32)
        q = np.rint(x_Ngk / scale[:, :, None])
    scale[~np.isfinite(scale)] = np.nan
    usable = (scale > 0)[:, :, None]
    clamped = np.where(usable, np.clip(np.where(usable, q, 0), -INT8_MOST, INT8_MOST), 0).astype(
        np.int8
    )
    return clamped.reshape(num_rows, -1)[:, :dims], scale


def _scales_of(page: Pages, head_dim: int) -> npt.NDArray[np.float16]:
    """[.., g, 32]: a view of those of int8 pages [.., rows, 32]."""
    return page[..., head_dim:, :].view(np.float16).reshape(*page.shape[:-2], -1, KV_BLOCK)


def _head_dim(pages: Pages, *, keys: bool) -> int:
    rows = pages.shape[-2]
    if is_quantized(pages):
        return next(d for d in range(8, rows, 8) if d + 2 * num_groups(d) == rows)
    return int(rows if keys else pages.shape[-1])


def _whole_row(values: I8, lane: int, *, keys: bool) -> I8:
    """[d]: a view of what a page [d, 32] of one KV head holds of a key or value."""
    head_dim = len(values)
    if keys:
        return values.reshape(head_dim // 2, KV_BLOCK, 2)[:, lane]
    return values.reshape(KV_BLOCK // 2, head_dim, 2)[lane // 2, :, lane % 2]


def _place(values: I8, lane: int, q_d: I8, *, keys: bool) -> None:
    row = _whole_row(values, lane, keys=keys)
    row[...] = q_d.reshape(row.shape)


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
        _place(pages[page, head, :head_dim], lane, q_d, keys=keys)
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
    q, count = chosen[:, :head_dim].astype(np.float32), len(chosen)
    if keys:
        q = q.reshape(count, head_dim // 2, KV_BLOCK, 2).transpose(0, 1, 3, 2)
        q = q.reshape(count, head_dim, KV_BLOCK)
    else:
        q = q.reshape(count, KV_BLOCK // 2, head_dim, 2).transpose(0, 1, 3, 2)
        q = q.reshape(count, KV_BLOCK, head_dim)
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
    rows = [_whole_row(head[:head_dim], lane, keys=keys).reshape(-1) for head in of_page]
    q = np.array(rows, np.int8).reshape(len(of_page), head_dim)
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
        _place(pages[page, head, :head_dim], lane, q, keys=keys)
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
    """[H, J]: a chain over d. In int8 queries become whole numbers too, and each group of dims is
    an exact sum of products times both scales; those are added up in order."""
    dims, visible = k_HdJ.shape[1:]
    total = np.zeros((len(q_Hd), visible), np.float32)
    if scale_HgJ is None:
        for d in range(dims):
            total = fma32(q_Hd[:, d, None], k_HdJ[:, d], total)
        return total
    whole_Hd, worth_Hg = whole_query(q_Hd)
    for group, start in enumerate(range(0, dims, KV_GROUP)):
        part = slice(start, start + KV_GROUP)
        dots = np.einsum("hd,hdj->hj", whole_Hd[:, part], k_HdJ[:, part].astype(np.float64))
        scale_HJ = worth_Hg[:, group, None] * scale_HgJ[:, group, :visible]
        total = fma32(dots.astype(np.float32), scale_HJ, total)
    return total


def whole_query(q_Hd: F32) -> tuple[npt.NDArray[np.float64], F32]:
    """Whole numbers up to 32767 [H, d], and what one of them is worth [H, g]."""
    num_heads, dims = q_Hd.shape
    padded = np.zeros((num_heads, num_groups(dims) * KV_GROUP), np.float32)
    padded[:, :dims] = q_Hd
    q_Hgk = padded.reshape(num_heads, -1, KV_GROUP)
    most_Hg = np.abs(q_Hgk).max(axis=2)
    worth_Hg = np.where(np.isfinite(most_Hg), most_Hg / np.float32(KV_WHOLE), np.float32(np.nan))
    usable = (worth_Hg > 0)[:, :, None]
    with np.errstate(all="ignore"):
        whole = np.clip(np.rint(q_Hgk / worth_Hg[:, :, None]), -KV_WHOLE, KV_WHOLE)
    whole = np.where(usable, whole, 0).astype(np.float64)
    return whole.reshape(num_heads, -1)[:, :dims], worth_Hg


def add_values(o_Hd: F32, p_HJ: F32, v_HJd: F32, scale_HgJ: F32 | None) -> F32:
    """o plus the values of a page, J keys of it seen: a chain over keys. In int8 probabilities
    times scales become whole numbers, of a head and group of dims the largest 32767; a group adds
    their exact sum of products times what one of them is worth."""
    visible, dims = p_HJ.shape[1], v_HJd.shape[2]
    if scale_HgJ is None:
        for j in range(visible):
            o_Hd = fma32(p_HJ[:, j, None], v_HJd[:, j], o_Hd)
        return o_Hd
    out = o_Hd.copy()
    for group, start in enumerate(range(0, dims, KV_GROUP)):
        part = slice(start, start + KV_GROUP)
        with np.errstate(all="ignore"):
            w_HJ = p_HJ * scale_HgJ[:, group, :visible]
            most_H = np.abs(w_HJ).max(axis=1)  # NaN where one is
            factor_H = np.float32(KV_WHOLE) / most_H
            used_H = np.isfinite(most_H) & (most_H > np.float32(KV_LEAST_WEIGHT))
            whole_HJ = np.where(used_H[:, None], np.rint(w_HJ * factor_H[:, None]), 0)
            worth_H = np.where(used_H, most_H / np.float32(KV_WHOLE), np.float32(0))
        worth_H = np.where(np.isfinite(most_H), worth_H, np.float32(np.nan))
        values = v_HJd[:, :visible, part].astype(np.float64)
        dots = np.einsum("hj,hjd->hd", whole_HJ.astype(np.float64), values).astype(np.float32)
        out[:, part] = fma32(dots, worth_H[:, None], out[:, part])
    return out
