"""Kernels of keys and values where planted bugs had gone unseen: many KV heads, threads that share
stripes, the reference's marks, and the edges of what rounds."""

from __future__ import annotations

import numpy as np
import pytest
from native_cases import BODIES, differing, ints, native, needs_native, pool
from state_cases import Case, scattered
from test_kv_int8 import attended, looking, projected

from anyshard.config import KvType
from anyshard.ops import reference
from anyshard.ops.kv_pages import packed_row


@needs_native
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kv", ["f32", "int8"])
@pytest.mark.parametrize(
    "per_kv_head", [(1,) * 5, (1,) * 9, (2, 1, 3, 1, 1, 2), (1, 11, 12, 12)], ids=str
)
def test_more_or_wider_kv_heads_than_are_swept_side_by_side(
    body: str, kv: KvType, per_kv_head: tuple[int, ...]
) -> None:
    """A row alone goes through four KV heads at a time; the others come after them."""
    kv_head_of = np.repeat(np.arange(len(per_kv_head), dtype=np.int32), per_kv_head)
    positions, slots = ints(600, 0, 40, 100, 230), np.arange(5, dtype=np.int32)
    heads = (2, len(kv_head_of) - 2)
    case = Case(16, kv_head_of, heads, positions, slots, num_slots=5, kv=kv)
    want, _ = case.whole(reference, None)
    for threads in (1, 2, 7):
        op_pool = pool(body, threads)
        for rows in (1, 2, 5):
            sent = [case.sent(native, op_pool, rank, rows) for rank in (0, 1)]
            for rank, (low, high) in enumerate(case.heads):
                got, _ = case.merged(native, op_pool, sent, rank, rows)
                expected = np.ascontiguousarray(want[:rows, low * 16 : high * 16])
                assert differing(np.ascontiguousarray(got[:rows]), expected) == 0, (threads, rows)


@needs_native
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kv_heads", [2, 5])
def test_threads_share_the_stripes_of_all_heads_over_int8_pages(body: str, kv_heads: int) -> None:
    """Few rows, as in decoding: an item is a stripe of all KV heads, each with its own queries."""
    kv_head_of = np.repeat(np.arange(kv_heads, dtype=np.int32), 2)
    case = looking(40, kv_head_of, ints(600, 257), ints(0, 1), seed=12)
    expected, _ = attended(reference, None, case, 2)
    for threads in (1, 2, 5):
        for rows in (1, 2):
            got, _ = attended(native, pool(body, threads), case, rows)
            assert differing(got, expected[:rows]) == 0, (threads, rows)


@needs_native
@pytest.mark.parametrize("score", [np.nan, np.inf, -1.1 * 2**20])
@np.errstate(invalid="ignore")
def test_the_reference_sends_what_native_bodies_send_of_a_score_out_of_range(score: float) -> None:
    case = scattered(16, ints(0, 0, 1), 1, 2)
    row = int(np.flatnonzero((case.positions == 257) & (case.row_slot == 0))[0])
    case.q[row, 16:32] = 0
    case.q[row, 16] = 1
    case.k_cache[case.page_table[0, 1], 0, 0, 8] = score
    rows = len(case.positions)
    modules = ((reference, None), (native, pool(BODIES[0])))
    for rank in (0, 1):
        sent = [case.sent(module, op_pool, rank, rows) for module, op_pool in modules]
        for receiver in (0, 1):
            ours, theirs = (case.states(each, rank, receiver, rows)[..., 1] for each in sent)
            assert np.array_equal(np.isnan(ours), np.isnan(theirs))
        assert np.isnan(ours).any() == (rank == 1)


@needs_native
@pytest.mark.parametrize("body", ["reference", *BODIES])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_scale_that_was_rounded_down_by_much_clamps_at_127(body: str, sign: int) -> None:
    """Of a subnormal scale: 1.4 * 2^-24 is stored as 2^-24, of which the largest would be 178."""
    module = reference if body == "reference" else native
    op_pool = reference.Pool() if body == "reference" else pool(body)
    value = np.full(40, 2.0**-20, np.float32)
    value[5], value[6] = sign * 127 * 1.4 * 2.0**-24, sign * 127.6 * 2.0**-24
    rng = np.random.default_rng(0)
    arguments = projected(rng, rows=1, heads=1, kv_heads=1, head_dim=40)
    for name in ("k", "v"):
        arguments[f"{name}_panels"][:] = 0
        arguments[f"{name}_bias"] = value
    arguments |= {"positions": ints(0), "cos": np.ones((64, 20), np.float32)}
    arguments |= {"sin": np.zeros((64, 20), np.float32)}
    module.Qkv(op_pool, **arguments).run(1)
    page = int(arguments["page_table"][0, 0])
    for name, keys in (("k_cache", True), ("v_cache", False)):
        packed = packed_row(arguments[name], page, 0, keys=keys)
        assert packed[0, 5] == packed[0, 6] == sign * 127
