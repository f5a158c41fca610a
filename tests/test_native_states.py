"""Native ops of ranks that split the sequence: the bits of the reference, and of one rank's ops."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from native_cases import (
    BODIES,
    F32,
    I32,
    differing,
    floats,
    ints,
    leaves,
    native,
    needs_native,
    pool,
)
from state_cases import CODE, NUM_BLOCKS, Case, known, scattered, span_states
from test_int8 import blocks
from test_native_ops import OUTPUTS, qkv, run

from anyshard.config import KvType
from anyshard.layout import Span
from anyshard.ops import reference
from anyshard.ops.digest import digest_keys
from anyshard.ops.exact import EMPTY_MAX
from anyshard.ops.kv_pages import Pages, store_row
from anyshard.stripes import STRIPES, stripe_of

pytestmark = needs_native
of_each_kv = pytest.mark.parametrize("kv", ["f32", "int8"])

NINE, SEVEN = np.repeat(np.arange(3), 3).astype(np.int32), ints(0, 0, 1, 1, 1, 1, 2)
CASES = [
    (64, NINE, (5, 4)),
    (16, NINE, (3, 3, 3)),
    (16, NINE, (3, 3, 3, 0)),
    (24, SEVEN, (2, 1, 2, 1, 1)),
    (80, ints(0, 0, 0), (2, 1)),
    (72, ints(0, 0, 1), (1, 2)),
    (8, NINE, (2, 2, 1, 1, 1, 1, 1)),
    (8, NINE, (2, 1, 1, 1, 1, 1, 1, 1)),
    (16, np.zeros(40, np.int32), (7, 33)),  # more query heads than pairs of one unit
]


@of_each_kv
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(("head_dim", "kv_head_of", "heads"), CASES)
def test_states_and_their_merge_equal_the_reference_and_one_ranks_attention(
    body: str, head_dim: int, kv_head_of: I32, heads: tuple[int, ...], kv: KvType
) -> None:
    case = scattered(head_dim, kv_head_of, *heads, kv=kv)
    want, _ = case.whole(reference, None)
    ranks = range(len(heads))
    for rows in (len(case.positions), 1, 5):
        right = [case.sent(reference, None, rank, rows) for rank in ranks]
        for threads in (1, 2, 3):
            op_pool = pool(body, threads)
            sent = [case.sent(native, op_pool, rank, rows) for rank in ranks]
            for sender in ranks:
                for receiver in ranks:
                    a, b = (
                        case.states(each[sender], sender, receiver, rows) for each in (sent, right)
                    )
                    assert differing(known(a), known(b)) == 0, (rows, threads, sender, receiver)
                used = sum(high - low for low, high in case.heads) * case.nodes[sender]
                touched = np.count_nonzero(sent[sender] != 7)
                assert touched <= rows * used * (head_dim + 2), "padding was written"
            for rank, (low, high) in enumerate(case.heads):
                expected = want[:rows, low * head_dim : high * head_dim]
                for module, from_pool in ((native, op_pool), (reference, None)):
                    got, faults = case.merged(module, from_pool, sent, rank, rows)
                    assert (
                        differing(np.ascontiguousarray(got[:rows]), np.ascontiguousarray(expected))
                        == 0
                    )
                    assert (got[rows:] == 7).all() and not faults.any()


ROWS: dict[str, tuple[I32, Callable[[I32], I32]]] = {
    # 31, 32, 33, 255, 256 and 257 keys, and a stripe's third block; none goes with its neighbour
    "alone": (ints(256, 30, 255, 31, 600, 32, 254), lambda rows: np.arange(len(rows)) % 2),
    "chunk": (np.arange(249, 261), np.zeros_like),
}


@pytest.mark.parametrize("rows_are", ROWS)
@pytest.mark.parametrize(
    ("head_dim", "kv"),
    [(16, "f32"), (80, "f32"), (16, "int8"), (64, "int8"), (72, "int8"), (80, "int8")],
)
def test_states_of_every_span_of_stripes_equal_the_reference(
    head_dim: int, rows_are: str, kv: KvType
) -> None:
    """1 to 8 stripes from each on; what a slot has past its rows is NaN."""
    positions, slots_of = ROWS[rows_are]
    slots = slots_of(positions).astype(np.int32)
    case = Case(head_dim, ints(0, 0, 1), (3,), positions.astype(np.int32), slots, kv=kv)
    pools = [(body, threads, pool(body, threads)) for body in BODIES for threads in (1, 2, 3)]
    for stripes in combinations(range(STRIPES + 1), 2):
        want = known(span_states(reference, None, case, stripes, len(positions)))
        assert not np.isnan(want[..., 1:]).any()
        for rows in (1, 3, len(positions)):
            for body, threads, op_pool in pools:
                got = known(span_states(native, op_pool, case, stripes, rows))
                assert differing(got, want[:rows]) == 0, (stripes, rows, body, threads)


@of_each_kv
@pytest.mark.parametrize("body", BODIES)
def test_rows_of_different_sequences_go_stripe_by_stripe_over_all_heads(
    body: str, kv: KvType
) -> None:
    """As in decoding; up to 20 blocks, threads share stripes."""
    positions = ints(0, 40, 100, 230, 288, 511, 512, 639)
    slots = np.arange(len(positions), dtype=np.int32)
    case = Case(24, NINE, (4, 5), positions, slots, num_slots=len(positions), kv=kv)
    want, _ = case.whole(reference, None)
    for threads in (1, 2, 3, 7):
        op_pool = pool(body, threads)
        for rows in (1, 2, 3, len(positions)):
            sent = [case.sent(native, op_pool, rank, rows) for rank in (0, 1)]
            for rank, (low, high) in enumerate(case.heads):
                got, _ = case.merged(native, op_pool, sent, rank, rows)
                expected = np.ascontiguousarray(want[:rows, low * 24 : high * 24])
                assert differing(np.ascontiguousarray(got[:rows]), expected) == 0, (threads, rows)


@pytest.mark.parametrize("module", ["native", "reference"])
def test_an_empty_state_is_merged_and_its_values_are_never_read(module: str) -> None:
    """NaN in all that an empty state does not set, and in the padding; -0 of its partner is +0."""
    case = Case(16, NINE, (3, 3, 3, 0), ints(0, 31, 40, 70), ints(0, 1, 0, 1))
    case.v_cache[:] = np.float32(-1e-45)
    rows, ops = 4, native if module == "native" else reference
    op_pool = pool(BODIES[0], 2) if module == "native" else None
    want, _ = case.whole(reference, None)
    sent = [case.sent(ops, op_pool, rank, rows) for rank in range(4)]
    empty = 0
    for sender in range(4):
        buffer = np.full_like(sent[sender], np.nan)
        for receiver in range(3):
            states = case.states(sent[sender], sender, receiver, rows).copy()
            is_empty = states[..., 0].view(np.int32) == EMPTY_MAX
            states[is_empty, 2:] = np.nan
            empty += int(is_empty.sum())
            case.states(buffer, sender, receiver, rows)[:] = states
        sent[sender] = buffer
    assert empty > 0
    for rank, (low, high) in enumerate(case.heads[:3]):
        got, faults = case.merged(ops, op_pool, sent, rank, rows)
        expected = np.ascontiguousarray(want[:, low * 16 : high * 16])
        assert differing(got, expected) == 0 and not faults.any()


@pytest.mark.parametrize("bug", ["read", "skipped", "none"])
def test_an_empty_state_that_is_read_or_skipped_would_show(
    bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of a few units of 2 ** -149: products that underflow leave -0, which +0 makes +0. Of
    eight ranks each sends one stripe: a node of two has been merged with an empty one before.
    """
    case = Case(16, NINE, (2, 1, 1, 1, 1, 1, 1, 1), ints(*range(1, 96, 3)), ints(*[0] * 32))
    rng = np.random.default_rng(1)
    few = rng.integers(1, 3, case.v_cache.shape).astype(np.uint32)
    sign = rng.integers(0, 2, case.v_cache.shape).astype(np.uint32) << 31
    case.v_cache = (few | sign).view(np.float32)
    rows, merge = len(case.positions), reference._merge
    want, _ = case.whole(native, pool(BODIES[0]))
    sent = [case.sent(native, pool(BODIES[0]), rank, rows) for rank in range(8)]

    def skipping(a: Any, b: Any) -> Any:
        is_empty, right = b[0] == EMPTY_MAX, merge(a, b)
        o_Nd = np.where(is_empty[:, None], a[2], right[2])
        return right[0], right[1], o_Nd

    def as_it_came(part_N: F32) -> Any:
        high = np.ascontiguousarray(part_N[:, 0]).view(np.int32)
        return (
            high,
            part_N[:, 1].copy(),
            np.where((high == EMPTY_MAX)[:, None], np.nan, part_N[:, 2:]),
        )

    if bug == "skipped":
        monkeypatch.setattr(reference, "_merge", skipping)
    if bug == "read":
        monkeypatch.setattr(reference.MergeStates, "received", staticmethod(as_it_came))
    unlike = 0
    for rank, (low, high) in enumerate(case.heads):
        got, _ = case.merged(reference, None, sent, rank, rows)
        expected = np.ascontiguousarray(want[:, low * 16 : high * 16])
        unlike += differing(np.asarray(got, np.float32), expected)
    assert (unlike > 0) == (bug != "none"), unlike


@of_each_kv
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("score", [np.nan, np.inf, -1.1 * 2**20])
@pytest.mark.parametrize("threads", [1, 2])
@np.errstate(invalid="ignore", over="ignore")
def test_a_score_out_of_range_faults_its_row_where_its_head_is(
    body: str, score: float, threads: int, kv: KvType
) -> None:
    """The rank that sees the key marks nothing: the state tells."""
    case = scattered(16, ints(0, 0, 1), 1, 2, kv=kv)
    row = int(np.flatnonzero((case.positions == 257) & (case.row_slot == 0))[0])
    case.q[row, 16:32] = 0
    case.q[row, 16] = 1
    key = np.full((2, 16), 0.5, np.float32)
    key[0, 0] = score
    store_row(case.k_cache, case.page_table[0, 1], 8, key, keys=True)  # the second rank's stripe 4
    want, right = case.whole(reference, None)
    assert right[row] == CODE and np.isnan(want[row, 16:32]).all()
    op_pool, rows = pool(body, threads), len(case.positions)
    sent = [case.sent(native, op_pool, rank, rows) for rank in (0, 1)]
    assert not np.isnan(case.states(sent[0], 0, 1, rows)[row, 0, :, 1]).any()
    assert np.isnan(case.states(sent[1], 1, 1, rows)[row, 0, :, 1]).all()
    marked = np.zeros(rows, np.int32)
    for rank, (low, high) in enumerate(case.heads):
        for module, from_pool in ((native, op_pool), (reference, None)):
            got, faults = case.merged(module, from_pool, sent, rank, rows)
            expected = np.ascontiguousarray(want[:, low * 16 : high * 16])
            assert differing(got, expected) == 0
        marked |= faults
    assert marked.tolist() == right.tolist()


@of_each_kv
@pytest.mark.parametrize("body", BODIES)
def test_pages_of_other_stripes_are_never_looked_at(body: str, kv: KvType) -> None:
    case = scattered(16, NINE, 3, 3, 3, kv=kv)
    before = [case.sent(native, pool(body, 2), rank, len(case.positions)) for rank in range(3)]
    for rank, (first, stop) in enumerate(case.spans):
        spoilt = scattered(16, NINE, 3, 3, 3, kv=kv)
        for slot in (0, 1):
            for block in range(NUM_BLOCKS):
                if not first <= stripe_of(block) < stop:
                    page = spoilt.page_table[slot, block]
                    spoilt.k_cache[page] = spoilt.v_cache[page] = np.nan if kv == "f32" else -1
        after = spoilt.sent(native, pool(body, 2), rank, len(case.positions))
        for receiver in range(3):
            a, b = (
                case.states(each, rank, receiver, len(case.positions))
                for each in (before[rank], after)
            )
            assert differing(known(a), known(b)) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_stripe": 3, "stop_stripe": 3}, "stripes 3 to 3; 0 to 8 is possible"),
        ({"stop_stripe": 9}, "stripes 0 to 9; 0 to 8 is possible"),
        ({"part_floats": 89}, "part_floats is 89; 90 are needed"),
        ({"part_floats": -1}, "part_floats is -1; 90 are needed"),
        ({"part_floats": 91}, "out holds 5760 floats; 5824 are needed"),
        # times 2 ranks and 32 rows: nothing, of 64 bits
        ({"part_floats": 2**58}, "out holds 5760 floats; 2.63 or more are needed"),
        ({"part_floats": 2**59}, "out holds 5760 floats; 2.63 or more are needed"),
        ({"part_floats": 2**62}, "out holds 5760 floats; 2.63 or more are needed"),
        ({"head_dim": -1}, "head_dim is -1; a multiple of 8"),
        ({"out": np.zeros(9, np.float32)}, "out holds 9 floats; "),
        ({"kv_head_of": ints(0, 0)}, "different numbers of heads"),
        ({"queries": []}, "there are no queries"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    case = Case(16, NINE, (5, 4), ints(*range(32)), ints(*[0] * 32))
    arguments = {
        "queries": case.queries(),
        "k_cache": case.k_cache,
        "v_cache": case.v_cache,
        "page_table": case.page_table,
        "row_slot": case.row_slot,
        "positions": case.positions,
        "head_dim": 16,
        "kv_head_of": NINE,
        "first_stripe": 0,
        "stop_stripe": 4,
        "part_floats": 90,
        "out": np.zeros(2 * len(case.positions) * 90, np.float32),
    }
    native.AttentionStates(pool(BODIES[0]), **arguments)
    with pytest.raises(ValueError, match=message):
        native.AttentionStates(pool(BODIES[0]), **arguments | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mine": 2}, "no such source as mine"),
        ({"merges": ints(0, 0)}, "merges does not leave one node"),
        ({"merges": ints(0)}, "merges has shape"),
        ({"nodes_per_source": [1]}, "2 sources, but 1 node counts"),
        ({"nodes_per_source": [5, 4], "merges": ints(*[0] * 9)}, "part_floats is 90"),
        ({"part_floats": 91}, "source 0 holds 2880 floats; 2912 are needed"),
        # times 2 parts and 16 rows: nothing, of 64 bits
        ({"part_floats": 2**59}, "source 0 holds 2880 floats; 2.63 or more are needed"),
        ({"part_floats": 2**62}, "source 0 holds 2880 floats; 2.63 or more are needed"),
        ({"fault_code": 0}, "fault_code is 0"),
        ({"head_dim": 12}, "head_dim is 12; a multiple of 8"),
    ],
)
def test_bad_arguments_of_a_merge_are_refused(change: dict[str, Any], message: str) -> None:
    arguments = {
        "sources": [np.zeros(2 * 16 * 90, np.float32) for _ in range(2)],
        "nodes_per_source": [1, 1],
        "merges": ints(0, 1),
        "mine": 1,
        "part_floats": 90,
        "head_dim": 16,
        "out": np.zeros((16, 80), np.float32),
        "row_fault": np.zeros(16, np.int32),
        "fault_code": CODE,
    }
    native.MergeStates(pool(BODIES[0]), **arguments)
    with pytest.raises(ValueError, match=message):
        native.MergeStates(pool(BODIES[0]), **arguments | change)


def test_a_page_that_should_be_here_and_is_not_is_refused() -> None:
    case = scattered(8, ints(0, 0), 1, 1)
    keys, values, table = case.own_cache(0)
    out = np.zeros(2 * len(case.positions) * case.part_floats, np.float32)
    op = native.AttentionStates(
        pool(BODIES[0]), case.queries(), keys, values, table, case.row_slot, case.positions, 8,
        ints(0, 0), 4, 8, case.part_floats, out,
    )  # fmt: skip
    with pytest.raises(ValueError, match="has page -1; 0 to"):
        op.run(len(case.positions))


# --- keys and values of the rows that a rank keeps ----------------------------------------------


QKV = [
    ("9/3 heads", {"hidden": 96, "heads": 9, "kv_heads": 3, "head_dim": 16}),
    ("normed heads", {"hidden": 96, "heads": 5, "kv_heads": 2, "head_dim": 24, "head_norm": True}),
    ("no query heads", {"hidden": 131, "heads": 0, "kv_heads": 2, "head_dim": 24}),
]


def in_int8(arguments: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    """The same with weights of int8 linears, whose rows are quantised."""
    rng, width = np.random.default_rng(8), shape["hidden"]
    counts = {"q": shape["heads"], "k": shape["kv_heads"], "v": shape["kv_heads"]}
    weights = {
        f"{name}_panels": blocks(floats(rng, count * shape["head_dim"], width)) if count else None
        for name, count in counts.items()
    }
    lengths, merges = leaves(width, 32)
    return arguments | weights | {"leaf_lengths": lengths, "merges": merges}


@pytest.mark.parametrize("is_int8", [False, True], ids=["f32", "int8"])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(("case", "shape"), QKV, ids=[name for name, _ in QKV])
@pytest.mark.parametrize("stripes", [(0, 4), (4, 8), (3, 6), (7, 8), (0, 8)])
def test_k_and_v_are_computed_of_the_rows_that_are_kept_and_no_others(
    body: str, case: str, shape: dict[str, Any], stripes: Span, is_int8: bool
) -> None:
    for rows in (1, 2, 5, 33):
        arguments = qkv(rows, **shape)
        arguments = in_int8(arguments, shape) if is_int8 else arguments
        whole = run(reference, "Qkv", None, arguments, rows)
        mine = arguments | {"first_stripe": stripes[0], "stop_stripe": stripes[1]}
        expected = run(reference, "Qkv", None, mine, rows)
        at_block = arguments["positions"] // 32
        kept = [stripes[0] <= stripe_of(int(block)) < stripes[1] for block in at_block]
        for row in range(rows):
            page = arguments["page_table"][arguments["row_slot"][row], at_block[row]]
            lane = arguments["positions"][row] % 32
            source = whole if kept[row] else arguments
            for name, at in (
                ("k_cache", np.s_[page, :, :, lane]),
                ("v_cache", np.s_[page, :, lane]),
            ):
                assert np.array_equal(expected[name][at], source[name][at])
        assert differing(expected["q_out"], whole["q_out"]) == 0
        for threads in (1, 2, 3):
            got = run(native, "Qkv", pool(body, threads), mine, rows)
            for key in OUTPUTS:
                if key in expected:
                    assert differing(got[key], expected[key]) == 0, (rows, threads, key)


@pytest.mark.parametrize("threads", [1, 3])
def test_foreign_rows_need_no_page_and_mark_no_fault_without_query_heads(threads: int) -> None:
    arguments = qkv(33, hidden=96, heads=0, kv_heads=2, head_dim=16)
    at_block = arguments["positions"] // 32
    kept = np.array([stripe_of(int(block)) < 4 for block in at_block])
    table = arguments["page_table"].copy()
    for block in range(table.shape[1]):
        if stripe_of(block) >= 4:
            table[:, block] = -1
    arguments["x"][:, 0] = np.nan
    arguments |= {"page_table": table, "first_stripe": 0, "stop_stripe": 4}
    for module, op_pool in ((native, pool(BODIES[0], threads)), (reference, None)):
        got = run(module, "Qkv", op_pool, arguments, 33)
        assert np.array_equal(got["row_fault"] != 0, kept)


@of_each_kv
@pytest.mark.parametrize("body", BODIES)
def test_stored_rows_are_hashed_where_they_are_kept(body: str, kv: KvType) -> None:
    """And add up to what one rank that keeps everything says."""
    case = scattered(16, NINE, 5, 4, kv=kv)
    rows, keys_table = len(case.positions), digest_keys(3 * 16 + 8)

    def hashed(module: Any, op_pool: Any, cache: tuple[Pages, Pages, I32], stripes: Span) -> Any:
        out = np.full((rows, 2), 9, np.uint64)
        module.DigestKv(
            op_pool, *cache, case.row_slot, case.positions, 0, 3, 0, 0, keys_table, out, *stripes
        ).run(rows)
        return out

    whole = hashed(native, pool(body), (case.k_cache, case.v_cache, case.page_table), (0, 8))
    parts = []
    for rank in (0, 1):
        cache, stripes = case.own_cache(rank), case.spans[rank]
        parts.append(hashed(native, pool(body, 2), cache, stripes))
        assert np.array_equal(parts[-1], hashed(reference, None, cache, stripes))
        assert (parts[-1] == 0).any() and (parts[-1] != 0).any()
    assert np.array_equal(parts[0] + parts[1], whole)
