"""Native attention: the bits of the reference, whatever the tile, thread, page or neighbour."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from native_cases import BODIES, F32, I32, differing, floats, ints, native, needs_native, pool

from anyshard.ops import reference

pytestmark = needs_native

POSITIONS = (0, 1, 31, 32, 33, 255, 256, 257, 600)
NUM_BLOCKS = 20


@dataclass
class Case:
    """One cache and the rows that look into it; every array as `Attention` takes it."""

    head_dim: int
    kv_head_of: I32
    positions: I32
    row_slot: I32
    seed: int = 0
    num_slots: int = 2
    q: F32 = field(init=False)
    k_cache: F32 = field(init=False)
    v_cache: F32 = field(init=False)
    page_table: I32 = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        pages, kv_heads = self.num_slots * NUM_BLOCKS + 3, int(self.kv_head_of.max()) + 1
        self.q = floats(rng, len(self.positions), len(self.kv_head_of) * self.head_dim)
        self.q *= np.float32(2 / self.head_dim**0.5)
        self.k_cache = floats(rng, pages, kv_heads, self.head_dim, 32)
        self.v_cache = floats(rng, pages, kv_heads, 32, self.head_dim)
        order = rng.permutation(pages)[: self.num_slots * NUM_BLOCKS]
        self.page_table = order.astype(np.int32).reshape(self.num_slots, NUM_BLOCKS)

    def run(self, module: Any, op_pool: Any, rows: int | None = None) -> tuple[F32, I32]:
        out = np.full_like(self.q, 7)
        faults = np.zeros(len(self.positions), np.int32)
        op = module.Attention(
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
            9,
        )
        op.run(len(self.positions) if rows is None else rows)
        return out, faults

    def expected(self) -> tuple[F32, I32]:
        return self.run(reference, None)


def scattered(head_dim: int, kv_head_of: I32) -> Case:
    positions = ints(*POSITIONS, *POSITIONS)
    return Case(head_dim, kv_head_of, positions, ints(*([0] * 9), *([1] * 9)))


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("head_dim", "kv_head_of"),
    [
        (64, ints(0, 0, 0, 1, 1, 1, 2, 2, 2)),
        (80, ints(0, 0, 1, 1, 1, 1, 2)),
        (8, ints(0)),
        (40, ints(0, 1, 2)),
        (256, ints(1, 1, 1, 1)),
        (16, np.zeros(40, np.int32)),  # more query heads than pairs of one unit
    ],
)
def test_attention_equals_the_reference(body: str, head_dim: int, kv_head_of: I32) -> None:
    case = scattered(head_dim, kv_head_of)
    expected, _ = case.expected()
    for threads in (1, 2, 5):
        got, faults = case.run(native, pool(body, threads))
        assert differing(got, expected) == 0, threads
        assert not faults.any()


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("tiny", [False, True])
def test_rows_that_are_alone_sweep_all_heads(body: str, tiny: bool) -> None:
    """Rows of different sequences, as in decoding; 1 to 9 blocks, so that stripes are empty.

    Products of tiny values are -0 or subnormal: an empty stripe makes +0 of -0.
    """
    heads = np.repeat(np.arange(6, dtype=np.int32), [2, 1, 3, 3, 1, 2])  # more than one sweep's
    positions = ints(0, 31, 40, 64, 100, 129, 161, 200, 230, 255, 288)
    slots = np.arange(len(positions), dtype=np.int32)
    case = Case(24, heads, positions, slots, num_slots=len(positions))
    if tiny:
        rng = np.random.default_rng(1)
        few = rng.integers(1, 3, case.v_cache.shape).astype(np.uint32)  # units of 2 ** -149
        sign = rng.integers(0, 2, case.v_cache.shape).astype(np.uint32) << 31
        case.v_cache = (few | sign).view(np.float32)
    expected, _ = case.expected()
    if tiny:
        zeros = expected.view(np.uint32)[expected == 0]
        assert {0, 1 << 31} == set(zeros.tolist()), "no zero whose sign could be lost"
    for threads in (1, 2, 3, 7):
        for rows in (1, 2, len(positions)):
            got, _ = case.run(native, pool(body, threads), rows)
            assert differing(got[:rows], expected[:rows]) == 0, (threads, rows)


@pytest.mark.parametrize("body", BODIES)
def test_rows_that_are_alone_go_round_the_stripes_more_than_twice(body: str) -> None:
    heads = np.repeat(np.arange(5, dtype=np.int32), [2, 1, 2, 1, 1])
    positions = ints(511, 512, 575, 639)
    case = Case(24, heads, positions, np.arange(4, dtype=np.int32), num_slots=4)
    expected, _ = case.expected()
    for threads in (1, 2, 7):
        for rows in (1, 2, 4):
            got, _ = case.run(native, pool(body, threads), rows)
            assert differing(got[:rows], expected[:rows]) == 0, (threads, rows)


@pytest.mark.parametrize("body", BODIES)
def test_a_sweep_has_room_for_the_widest_heads(body: str) -> None:
    heads = np.repeat(np.arange(4, dtype=np.int32), [1, 11, 12, 12])
    case = Case(8, heads, ints(*range(7, 95, 8)), ints(*range(11)), num_slots=11)
    expected, _ = case.expected()
    for threads in (1, 2, 5):
        op_pool = pool(body, threads)
        for _ in range(3):
            got, _ = case.run(native, op_pool)
            assert differing(got, expected) == 0, threads


@pytest.mark.parametrize("body", BODIES)
def test_a_row_alone_equals_the_row_in_a_chunk(body: str) -> None:
    """Rows of one block share tiles; alone they are split by stripe over the threads."""
    chunk = np.arange(225, 294, dtype=np.int32)
    case = Case(24, ints(0, 0, 1, 1, 1), chunk, np.zeros(len(chunk), np.int32), num_slots=1)
    expected, _ = case.expected()
    together, _ = case.run(native, pool(body, 1))
    assert differing(together, expected) == 0
    queries = case.q
    for row in (0, 30, 31, 63, 68):
        case.q, case.positions = queries[row : row + 1], chunk[row : row + 1]
        case.row_slot = ints(0)
        for threads in (1, 2, 3, 7):
            got, _ = case.run(native, pool(body, threads))
            assert differing(got, expected[row : row + 1]) == 0, (row, threads)


@pytest.mark.parametrize("body", BODIES)
def test_pages_may_lie_anywhere(body: str) -> None:
    case = scattered(64, ints(0, 0, 1))
    before, _ = case.run(native, pool(body, 2))
    moved = np.random.default_rng(8).permutation(len(case.k_cache))
    case.k_cache, case.v_cache = case.k_cache[moved], case.v_cache[moved]
    case.page_table = np.argsort(moved).astype(np.int32)[case.page_table]
    after, _ = case.run(native, pool(body, 1))
    assert differing(before, after) == 0


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 3e38])
def test_keys_past_the_length_never_enter(body: str, garbage: float) -> None:
    case = scattered(64, ints(0, 0, 0, 1))
    case.row_slot[:] = np.arange(len(case.positions)) % 2  # one longest row for each slot
    expected, _ = case.expected()
    for slot in (0, 1):
        last = int(case.positions[case.row_slot == slot].max())
        page = case.page_table[slot, last // 32]
        case.k_cache[page, :, :, last % 32 + 1 :] = garbage
        case.v_cache[page, :, last % 32 + 1 :, :] = garbage
        for unused in case.page_table[slot, last // 32 + 1 :]:
            case.k_cache[unused], case.v_cache[unused] = garbage, garbage
    got, faults = case.run(native, pool(body, 2))
    assert differing(got, expected) == 0
    assert not faults.any()


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("score", [np.nan, np.inf, -np.inf, 1.1 * 2**20, -1.1 * 2**20])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_score_out_of_range_faults_its_row_only(body: str, score: float, threads: int) -> None:
    case = scattered(16, ints(0, 0, 1))
    expected, _ = case.expected()
    row = 7
    # head 1 of row 7 (position 257): its query is one unit vector, key 40 holds the score
    case.q[row, 16:32] = 0
    case.q[row, 16] = 1
    clean, _ = case.expected()
    page = case.page_table[0, 1]
    kept = case.k_cache[page, 0, 0, 8]
    case.k_cache[page, 0, 0, 8] = score
    got, faults = case.run(native, pool(body, threads))
    assert np.isnan(got[row, 16:32]).all()
    assert faults[row] == 9
    # rows that see the key with other queries may fault too; rows that do not see it may not
    blind = [r for r in range(len(case.positions)) if case.row_slot[r] or case.positions[r] < 40]
    assert differing(got[blind], expected[blind]) == 0
    assert not faults[blind].any()
    case.k_cache[page, 0, 0, 8] = kept
    after, faults = case.run(native, pool(body, threads))
    assert differing(after, clean) == 0
    assert not faults.any()


@pytest.mark.parametrize("body", BODIES)
def test_scores_at_the_limit_and_far_apart_are_fine(body: str) -> None:
    case = Case(8, ints(0), ints(300, 511), ints(0, 1))
    case.q[:] = 0
    case.q[:, 0] = 1
    case.k_cache[:, 0, 0, :] = np.linspace(-(2**20), 2**20, 32, dtype=np.float32)
    expected, _ = case.expected()
    got, faults = case.run(native, pool(body, 2))
    assert differing(got, expected) == 0
    assert np.isfinite(got).all()
    assert not faults.any()


def test_an_earlier_fault_is_kept() -> None:
    case = scattered(16, ints(0))
    case.q[:] = np.nan
    out, faults = np.zeros_like(case.q), np.zeros(len(case.q), np.int32)
    faults[3] = 4
    arguments = (case.q, case.k_cache, case.v_cache, case.page_table, case.row_slot)
    op = native.Attention(
        pool(BODIES[0], 2), *arguments, case.positions, 16, ints(0), out, faults, 9
    )
    op.run(len(case.q))
    assert faults[3] == 4
    assert (np.delete(faults, 3) == 9).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: case.positions.__setitem__(4, -1), "row 4 has position -1"),
        (lambda case: case.positions.__setitem__(4, 640), "row 4 has position 640; 0 to 639"),
        (lambda case: case.row_slot.__setitem__(2, 2), "row 2 has slot 2; 0 to 1"),
        (lambda case: case.row_slot.__setitem__(2, -1), "row 2 has slot -1"),
        (lambda case: case.page_table.__setitem__((0, 3), 43), "has page 43; 0 to 42"),
        (lambda case: case.page_table.__setitem__((1, 0), -1), "row 9 has page -1"),
    ],
)
def test_indices_that_lead_outside_are_refused_before_computing(change: Any, message: str) -> None:
    case = scattered(8, ints(0))
    change(case)
    with pytest.raises(ValueError, match=message):
        case.run(native, pool(BODIES[0]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 24}, "k_cache has shape"),
        ({"head_dim": 12}, "head_dim is 12; a multiple of 8"),
        ({"head_dim": -1}, "head_dim is -1; a multiple of 8"),  # stands for any in a wanted shape
        ({"kv_head_of": ints(1, 0)}, "must not decrease"),
        ({"kv_head_of": ints(0, 2)}, "KV heads of the cache"),
        ({"row_slot": ints(0)}, "row_slot has shape"),
        ({"v_cache": np.zeros((43, 2, 16, 32), np.float32)}, "v_cache has shape"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    case = scattered(16, ints(0, 1))
    for name, value in change.items():
        setattr(case, name, value)
    with pytest.raises(ValueError, match=message):
        case.run(native, pool(BODIES[0]))


@pytest.mark.parametrize("head_dim", [12, 264])
def test_head_dims_that_do_not_fit_the_vectors_are_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim is {head_dim}; a multiple of 8 up to 256"):
        Case(head_dim, ints(0), ints(3), ints(0)).run(native, pool(BODIES[0]))
