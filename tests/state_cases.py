"""Attention of ranks that split the sequence, as tests set it up: caches, rows, ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from golden.make import in_int8
from native_cases import F32, I32, floats, ints

from anyshard.config import KvType
from anyshard.layout import STRIPE_TREE, Span, even_spans
from anyshard.ops.exact import EMPTY_MAX
from anyshard.ops.kv_pages import Pages, store_row
from anyshard.stripes import STRIPES, stripe_of

POSITIONS = (0, 1, 30, 31, 32, 33, 63, 64, 127, 128, 254, 255, 256, 257, 600)
NUM_BLOCKS = 20
CODE = 9


@dataclass
class Case:
    """One cache, rows that look into it, and ranks with so many query heads each."""

    head_dim: int
    kv_head_of: I32
    heads_per_rank: tuple[int, ...]
    positions: I32
    row_slot: I32
    num_slots: int = 2
    kv: KvType = "f32"
    q: F32 = field(init=False)
    k_cache: Pages = field(init=False)
    v_cache: Pages = field(init=False)
    page_table: I32 = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(5)
        pages, kv_heads = self.num_slots * NUM_BLOCKS, int(self.kv_head_of.max()) + 1
        assert sum(self.heads_per_rank) == len(self.kv_head_of)
        self.q = floats(rng, len(self.positions), len(self.kv_head_of) * self.head_dim)
        self.q *= np.float32(2 / self.head_dim**0.5)
        self.k_cache = floats(rng, pages, kv_heads, self.head_dim, 32)
        self.v_cache = floats(rng, pages, kv_heads, 32, self.head_dim)
        if self.kv == "int8":
            self.k_cache = in_int8(self.k_cache, keys=True)
            self.v_cache = in_int8(self.v_cache, keys=False)
        order = rng.permutation(pages)
        self.page_table = order.astype(np.int32).reshape(self.num_slots, NUM_BLOCKS)
        for slot in np.unique(self.row_slot):  # nothing, past what the slot's last row sees
            self.spoil(int(slot), int(self.positions[self.row_slot == slot].max()) + 1)

    def spoil(self, slot: int, start: int) -> None:
        """NaN for keys and values of a slot from a position on."""
        nothing = np.full((self.k_cache.shape[1], self.head_dim), np.nan, np.float32)
        for position in range(start, NUM_BLOCKS * 32):
            page, lane = int(self.page_table[slot, position // 32]), position % 32
            store_row(self.k_cache, page, lane, nothing, keys=True)
            store_row(self.v_cache, page, lane, nothing, keys=False)

    @property
    def heads(self) -> list[Span]:
        return list(pairwise([0, *accumulate(self.heads_per_rank)]))

    @property
    def spans(self) -> list[Span]:
        return list(even_spans(STRIPES, len(self.heads_per_rank)))

    @property
    def nodes(self) -> list[int]:
        return [len(STRIPE_TREE.cover(span)) for span in self.spans]

    @property
    def part_floats(self) -> int:
        return max(self.heads_per_rank) * max(self.nodes) * (self.head_dim + 2)

    def queries(self) -> list[F32]:
        d = self.head_dim
        return [np.ascontiguousarray(self.q[:, low * d : high * d]) for low, high in self.heads]

    def own_cache(self, rank: int) -> tuple[Pages, Pages, I32]:
        """The cache of a rank that keeps its stripes only: the others' pages are not in it."""
        first, stop = self.spans[rank]
        own = np.array([first <= stripe_of(block) < stop for block in range(NUM_BLOCKS)])
        pages = self.page_table[:, own].reshape(-1)
        table = np.full_like(self.page_table, -1)
        table[:, own] = np.arange(len(pages), dtype=np.int32).reshape(self.num_slots, -1)
        return self.k_cache[pages].copy(), self.v_cache[pages].copy(), table

    def sent(self, module: Any, op_pool: Any, rank: int, rows: int) -> F32:
        """The buffer of a rank."""
        keys, values, table = self.own_cache(rank)
        size = len(self.heads_per_rank) * len(self.positions) * self.part_floats
        out = np.full(size, 7, np.float32)
        module.AttentionStates(
            op_pool,
            self.queries(),
            keys,
            values,
            table,
            self.row_slot,
            self.positions,
            self.head_dim,
            self.kv_head_of,
            *self.spans[rank],
            self.part_floats,
            out,
        ).run(rows)
        return out

    def states(self, buffer: F32, sender: int, receiver: int, rows: int) -> F32:
        """[rows, heads, nodes, d + 2] that one rank sends another."""
        low, high = self.heads[receiver]
        shape = (rows, high - low, self.nodes[sender], self.head_dim + 2)
        first = receiver * rows * self.part_floats
        return buffer[first : first + int(np.prod(shape))].reshape(shape)

    def merged(
        self, module: Any, op_pool: Any, sources: Sequence[F32], rank: int, rows: int
    ) -> tuple[F32, I32]:
        """What a rank makes of all buffers."""
        low, high = self.heads[rank]
        out = np.full((len(self.positions), (high - low) * self.head_dim), 7, np.float32)
        faults = np.zeros(len(self.positions), np.int32)
        module.MergeStates(
            op_pool,
            sources,
            self.nodes,
            np.array(STRIPE_TREE.node_merges(self.spans), np.int32),
            rank,
            self.part_floats,
            self.head_dim,
            out,
            faults,
            CODE,
        ).run(rows)
        return out, faults

    def whole(self, module: Any, op_pool: Any) -> tuple[F32, I32]:
        """The same by one rank that keeps everything."""
        out, faults = np.full_like(self.q, 7), np.zeros(len(self.positions), np.int32)
        module.Attention(
            op_pool,
            self.q,
            self.k_cache,
            self.v_cache,
            self.page_table,
            self.row_slot,
            self.positions,
            self.head_dim,
            self.kv_head_of,
            out,
            faults,
            CODE,
        ).run(len(self.positions))
        return out, faults


def scattered(head_dim: int, kv_head_of: I32, *heads_per_rank: int, kv: KvType = "f32") -> Case:
    """Rows of two slots in no order, so that units are of one row and of several."""
    positions = ints(*POSITIONS, *POSITIONS, *range(64, 96))
    slots = ints(*([0] * len(POSITIONS)), *([1] * len(POSITIONS)), *([0] * 32))
    mixed = np.random.default_rng(3).permutation(2 * len(POSITIONS))
    positions[: len(mixed)], slots[: len(mixed)] = positions[mixed], slots[mixed]
    return Case(head_dim, kv_head_of, heads_per_rank, positions, slots, kv=kv)


def span_states(module: Any, op_pool: Any, case: Case, stripes: Span, rows: int) -> F32:
    """[rows, heads, nodes, d + 2] of all heads, by a rank that keeps everything."""
    heads, nodes = len(case.kv_head_of), len(STRIPE_TREE.cover(stripes))
    shape = (rows, heads, nodes, case.head_dim + 2)
    part_floats = int(np.prod(shape[1:]))
    out = np.full(len(case.positions) * part_floats, 7, np.float32)
    module.AttentionStates(
        op_pool, [case.q], case.k_cache, case.v_cache, case.page_table, case.row_slot,
        case.positions, case.head_dim, case.kv_head_of, *stripes, part_floats, out,
    ).run(rows)  # fmt: skip
    return out[: rows * part_floats].reshape(shape)


def known(states: F32) -> F32:
    """With nothing in place of what an empty state does not set."""
    found = states.copy()
    found[found[..., 0].view(np.int32) == EMPTY_MAX, 2:] = 0
    return found
