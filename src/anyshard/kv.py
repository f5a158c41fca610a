"""The KV cache of one rank: its layers' and KV heads' pages, allocated once.

A page holds 32 tokens of one sequence, as `ops/kv_pages.py` lays it out, in the type that the
profile names. Which page belongs to whom is the front's business (`pages.py`), told by the page
table.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from anyshard.config import ModelConfig, Profile
from anyshard.layout import Span
from anyshard.ops.exact import I32
from anyshard.ops.kv_pages import Pages, page_bytes, page_shape
from anyshard.stripes import blocks_of, page_stripe

__all__ = ["KvCache", "local_pages", "num_local_pages", "rank_page_bytes"]

MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.13 on
HUGE = 1 << 23  # bytes from which on huge pages are asked for: of less, they would be a large part


def num_local_pages(stripes: Span, *, num_pages: int, sequence_blocks: int) -> int:
    """How many of the front's pages a rank keeps that has those stripes."""
    whole, rest = divmod(num_pages, sequence_blocks)
    return whole * blocks_of(stripes, sequence_blocks) + blocks_of(stripes, rest)


def local_pages(stripes: Span, *, num_pages: int, sequence_blocks: int) -> I32:
    """[num_pages]: of each of the front's pages the number that it has on a rank that keeps those
    stripes, -1 where another rank keeps it. Held by: test_stripes.py."""
    first, stop = stripes
    kept = [first <= page_stripe(page, sequence_blocks) < stop for page in range(sequence_blocks)]
    mine = np.flatnonzero(np.resize(np.array(kept), num_pages))
    numbers: I32 = np.full(num_pages, -1, np.int32)
    numbers[mine] = np.arange(len(mine))
    return numbers


def rank_page_bytes(config: ModelConfig, profile: Profile, *, layers: Span, kv_heads: Span) -> int:
    """Bytes of a page on a rank: K and V of 32 tokens, over its layers and KV heads."""
    num_parts = 2 * (layers[1] - layers[0]) * (kv_heads[1] - kv_heads[0])
    return num_parts * page_bytes(profile.kv, config.head_dim)


class KvCache:
    """Keys and values of `layers` x `kv_heads`, `num_pages` pages each.

    The memory is touched page by page as tokens arrive, so a generous `num_pages` costs address
    space only. `poison` fills it with NaN (int8: NaN scales): what a page holds past a length must
    not matter.
    """

    def __init__(
        self,
        config: ModelConfig,
        profile: Profile,
        *,
        layers: Span,
        kv_heads: Span,
        num_pages: int,
        poison: bool = False,
    ) -> None:
        num_heads = kv_heads[1] - kv_heads[0]
        num_layers = layers[1] - layers[0]
        of_page = rank_page_bytes(config, profile, layers=layers, kv_heads=kv_heads)
        self.bytes = num_pages * of_page
        self.layers = layers
        shape = (num_layers, num_pages, num_heads)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._memory = mmap.mmap(-1, max(self.bytes, mmap.PAGESIZE), flags=flags)
        if self.bytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._memory, np.int8 if profile.kv == "int8" else np.float32)
        half = self.bytes // 2 // whole.itemsize
        self._k, self._v = (
            whole[start : start + half].reshape(
                *shape, *page_shape(profile.kv, config.head_dim, keys=keys)
            )
            for start, keys in ((0, True), (half, False))
        )
        if poison:
            whole.fill(np.nan if whole.itemsize > 1 else -1)  # 0xffff is a NaN of float16

    def keys(self, layer: int) -> Pages:
        """[pages, G, ..] of a global layer number."""
        keys: Pages = self._k[layer - self.layers[0]]
        return keys

    def values(self, layer: int) -> Pages:
        """[pages, G, ..] of a global layer number."""
        values: Pages = self._v[layer - self.layers[0]]
        return values
