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
from anyshard.ops.exact import F32

__all__ = ["KvCache"]

MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.13 on


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
