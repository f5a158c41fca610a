"""Digests of float32 bits that shards add up to: definition, key table, and the reference bodies.

    digest = sum over i of mix(b_i + i * 0x9E3779B9) * key_i   modulo 2^64

b_i: the 32 bits of the element at absolute index i; mix: the 32-bit finaliser of murmur3, a
bijection; key_i = mix(i ^ 0x85EBCA6B) | 1. One changed element always changes the digest: the
difference of two mixed words, times an odd key, is no multiple of 2^64. Why this one:
docs/numerics.md, Digests.

Shapes: R rows_max, M rows of this call, N width of a source, P columns of `out` (digest points of
a rank), G KV heads here, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from anyshard.ops.coefficients import KV_BLOCK
from anyshard.ops.exact import F32, I32
from anyshard.ops.kv_pages import Pages, widened_row
from anyshard.ops.storage import Panels, unpack
from anyshard.stripes import STRIPES, stripe_of

__all__ = ["KEY_PADDING", "U64", "Digest", "DigestKv", "digest_keys", "digest_of", "digest_panels"]

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

STEP: Final = np.uint32(0x9E3779B9)
KEY_SEED: Final = np.uint32(0x85EBCA6B)
KEY_PADDING: Final = 8  # entries that a vector may read past the last key


def mix(words: U32) -> U32:
    """The 32-bit finaliser of murmur3."""
    h = words ^ (words >> np.uint32(16))
    h = h * np.uint32(0x85EBCA6B)
    h = h ^ (h >> np.uint32(13))
    h = h * np.uint32(0xC2B2AE35)
    mixed: U32 = h ^ (h >> np.uint32(16))
    return mixed


def digest_keys(count: int) -> I32:
    """Keys of indices 0..count-1 as int32 bits; a kernel wants KEY_PADDING more than it uses."""
    index: U32 = np.arange(count).astype(np.uint32)
    return (mix(index ^ KEY_SEED) | np.uint32(1)).view(np.int32)


def digest_of(x: F32, *, first: int = 0) -> U64:
    """Digests over the last axis of x, whose first element is at absolute index `first`.

    Held by: test_digest.py.
    """
    width = x.shape[-1]
    index: U32 = np.arange(first, first + width).astype(np.uint32)
    words: U32 = np.ascontiguousarray(x, np.float32).view(np.uint32)
    keys = (mix(index ^ KEY_SEED) | np.uint32(1)).astype(np.uint64)
    total: U64 = (mix(words + index * STEP).astype(np.uint64) * keys).sum(axis=-1, dtype=np.uint64)
    return total


class Digest:
    """out[row, columns[i]] = digest of sources[i][row], whose first float is at firsts[i]."""

    def __init__(
        self,
        pool: object,
        sources: Sequence[F32],
        firsts: Sequence[int],
        columns: Sequence[int],
        keys: I32,
        out: U64,
    ) -> None:
        self.parts, self.out = list(zip(sources, firsts, columns, strict=True)), out

    def run(self, rows: int) -> None:
        """Fill the columns of out[:rows]."""
        for source, first, column in self.parts:
            self.out[:rows, column] = digest_of(source[:rows], first=first)


class DigestKv:
    """Digests of the stored k and v of heads first_head:stop_head, into column and column + 1.

    first: absolute index of the first of these heads' first dim. A row whose block is not of
    stripes first_stripe:stop_stripe is another rank's: 0.
    """

    def __init__(
        self,
        pool: object,
        k_cache: Pages,
        v_cache: Pages,
        page_table: I32,
        row_slot: I32,
        positions: I32,
        first_head: int,
        stop_head: int,
        first: int,
        column: int,
        keys: I32,
        out: U64,
        first_stripe: int = 0,
        stop_stripe: int = STRIPES,
    ) -> None:
        self.stripes = range(first_stripe, stop_stripe)
        self.k_cache, self.v_cache = k_cache, v_cache
        self.page_table, self.row_slot, self.positions = page_table, row_slot, positions
        self.heads, self.first = slice(first_head, stop_head), first
        self.column, self.out = column, out

    def run(self, rows: int) -> None:
        """Fill both columns of out[:rows]."""
        for row in range(rows):
            block, lane = divmod(int(self.positions[row]), KV_BLOCK)
            if stripe_of(block) not in self.stripes:
                self.out[row, self.column : self.column + 2] = 0
                continue
            page = self.page_table[self.row_slot[row], block]
            k_Gd = widened_row(self.k_cache, page, lane, keys=True)[self.heads]
            v_Gd = widened_row(self.v_cache, page, lane, keys=False)[self.heads]
            for at, x_Gd in enumerate((k_Gd, v_Gd)):
                self.out[row, self.column + at] = digest_of(x_Gd.reshape(-1), first=self.first)


def digest_panels(pool: object, panels: Panels, keys: I32, num_inputs: int, out: U64) -> None:
    """out[n] = digest of the widened inputs of output n, index 0 on."""
    step = max(1, (1 << 22) // max(1, num_inputs))
    for start in range(0, len(out), step):
        rows = np.arange(start, min(start + step, len(out)))
        out[rows] = digest_of(unpack(panels, rows))
