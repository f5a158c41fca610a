"""The KV cache of one rank: its layers' and KV heads' pages, allocated once.

A page holds 32 tokens of one sequence. Keys are stored [page][head][d][32], so that a lane of
the score is a key; values [page][head][32][d]. Which page belongs to whom is the front's
business (`pages.py`), told by the page table.
"""

from __future__ import annotations

import mmap

import numpy as np

from anyshard.config import ModelConfig, Profile
from anyshard.layout import Span
from anyshard.ops.exact import F32, I32
from anyshard.stripes import blocks_of, page_stripe

__all__ = ["KvCache", "local_pages", "num_local_pages"]

MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.13 on


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


class KvCache:
    """Keys and values of `layers` x `kv_heads`, `num_pages` pages each.

    The memory is touched page by page as tokens arrive, so a generous `num_pages` costs address
    space only. `poison` fills it with NaN: what a page holds past a length must not matter.
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
        page_floats = num_heads * profile.kv_block * config.head_dim
        self.bytes = 2 * num_layers * num_pages * page_floats * 4
        self.layers = layers
        k_shape = (num_layers, num_pages, num_heads, config.head_dim, profile.kv_block)
        v_shape = (num_layers, num_pages, num_heads, profile.kv_block, config.head_dim)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._memory = mmap.mmap(-1, max(self.bytes, mmap.PAGESIZE), flags=flags)
        floats: F32 = np.frombuffer(self._memory, np.float32)
        half = self.bytes // 8
        self._k = floats[:half].reshape(k_shape)
        self._v = floats[half : 2 * half].reshape(v_shape)
        if poison:
            floats.fill(np.nan)

    def keys(self, layer: int) -> F32:
        """[pages, G, d, 32] of a global layer number."""
        keys: F32 = self._k[layer - self.layers[0]]
        return keys

    def values(self, layer: int) -> F32:
        """[pages, G, 32, d] of a global layer number."""
        values: F32 = self._v[layer - self.layers[0]]
        return values
