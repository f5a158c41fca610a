"""Int8 keys and values: their written definition, and native bodies with its bits at every edge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import MODELS
from native_cases import BODIES, F32, differing, floats, ints, native, needs_native, panels, pool
from native_cases import leaves as sum_of

from anyshard.kv import KvCache
from anyshard.loading import profile_of
from anyshard.ops import reference
from anyshard.ops.digest import digest_keys, digest_of
from anyshard.ops.kv_pages import (
    KV_GROUP,
    packed_row,
    page_bytes,
    page_shape,
    quantize_groups,
    store_row,
    unpack_row,
    whole_query,
    widened_row,
)

HEAD_DIMS = (8, 16, 32, 40, 64, 80, 128, 256)
PAIRS = (ints(0, 0, 0, 1, 1, 1, 2, 2, 2), ints(0), ints(0, 1), np.zeros(14, np.int32))


def empty(pages: int, heads: int, head_dim: int, *, keys: bool) -> np.ndarray:
    """Pages that hold NaN wherever nothing was stored."""
    shape = (pages, heads, *page_shape("int8", head_dim, keys=keys))
    return np.full(shape, -1, np.int8)


def filled(rng: np.random.Generator, pages: int, heads: int, head_dim: int, *, keys: bool) -> Any:
    cache = empty(pages, heads, head_dim, keys=keys)
    for page in range(pages):
        for lane in range(32):
            store_row(cache, page, lane, floats(rng, heads, head_dim), keys=keys)
    return cache


# --- the definition -----------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_stored_row_is_within_half_a_step_of_the_row(head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    x_Gd = floats(rng, 3, head_dim) * np.float32(7)
    for keys in (True, False):
        cache = empty(2, 3, head_dim, keys=keys)
        store_row(cache, 1, 9, x_Gd, keys=keys)
        got = widened_row(cache, 1, 9, keys=keys)
        groups = np.arange(head_dim) // KV_GROUP
        for group in np.unique(groups):
            part = groups == group
            amax = np.abs(x_Gd[:, part]).max(axis=1, keepdims=True)
            step = amax / 127 * (1 + 2**-11)
            assert (np.abs(got[:, part] - x_Gd[:, part]) <= step / 2 + amax * 2**-11).all()


def test_bytes_are_a_quarter_and_a_scale() -> None:
    assert page_bytes("int8", 64) == 32 * (64 + 4)
    assert page_bytes("int8", 64) <= 0.27 * page_bytes("f32", 64)
    assert page_bytes("int8", 40) == 32 * (40 + 4)


def test_ties_go_to_even_and_the_ends_are_127() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :6] = [127, 0.5, 1.5, 2.5, -0.5, -127]
    q, scale = quantize_groups(x)
    assert scale.tolist() == [[1.0]]
    assert q[0, :6].tolist() == [127, 0, 2, 2, 0, -127]


@pytest.mark.parametrize(
    ("largest", "scale"),
    [
        (0.0, 0.0),
        (127 * 2.0**-24, 2.0**-24),  # the smallest scale there is
        (127 * 2.0**-26, 0.0),  # rounds to no scale at all
        (127 * 65504.0, 65504.0),
        (127 * 65536.0, np.nan),
        (np.inf, np.nan),
        (np.nan, np.nan),
    ],
)
@pytest.mark.parametrize("body", ["reference", *BODIES])
def test_scales_at_the_ends_of_float16(body: str, largest: float, scale: float) -> None:
    """Through `Qkv`: a key whose projection is the bias alone, not rotated at position 0."""
    module = reference if body == "reference" else native
    op_pool = reference.Pool() if body == "reference" else pool(body)
    value = np.full(40, 1.0, np.float32)
    value[:32] = 0
    value[5] = largest
    arguments = projected(np.random.default_rng(0), rows=1, heads=1, kv_heads=1, head_dim=40)
    for name in ("k", "v"):
        arguments[f"{name}_panels"][:] = 0
        arguments[f"{name}_bias"] = value
    arguments |= {"positions": ints(0), "cos": np.ones((64, 20), np.float32)}
    arguments |= {"sin": np.zeros((64, 20), np.float32)}
    with np.errstate(all="ignore"):
        module.Qkv(op_pool, **arguments).run(1)
    page = int(arguments["page_table"][0, 0])
    for name, keys in (("k_cache", True), ("v_cache", False)):
        packed = packed_row(arguments[name], page, 0, keys=keys)
        scales = np.ascontiguousarray(packed[:, 40:]).view(np.float16).astype(np.float32)
        np.testing.assert_array_equal(scales[0], [np.float32(scale), np.float16(1 / 127)])
        usable = np.isfinite(scale) and scale > 0
        assert packed[0, 5] == (127 if usable else 0)
        assert packed[0, 39] == 127, "the other group is untouched"


def test_a_scale_never_spans_tokens_or_heads() -> None:
    rng = np.random.default_rng(2)
    for keys in (True, False):
        cache = empty(1, 2, 64, keys=keys)
        row = floats(rng, 2, 64)
        store_row(cache, 0, 4, row, keys=keys)
        before = packed_row(cache, 0, 4, keys=keys)
        store_row(cache, 0, 5, row * np.float32(1000), keys=keys)
        store_row(cache, 0, 3, np.full_like(row, np.nan), keys=keys)
        np.testing.assert_array_equal(packed_row(cache, 0, 4, keys=keys), before)
        louder = row.copy()
        louder[1] *= np.float32(50)
        louder[0, 32:] *= np.float32(50)
        store_row(cache, 0, 4, louder, keys=keys)
        after = packed_row(cache, 0, 4, keys=keys)
        np.testing.assert_array_equal(after[0, :32], before[0, :32])
        np.testing.assert_array_equal(after[0, 64:66], before[0, 64:66])


def test_a_packed_row_is_stored_again_as_it_was() -> None:
    rng = np.random.default_rng(3)
    for keys in (True, False):
        cache = filled(rng, 2, 3, 80, keys=keys)
        tiny = floats(rng, 3, 80) * np.float32(2.0**-20)  # scales that are subnormal
        store_row(cache, 0, 7, tiny, keys=keys)
        other = empty(2, 3, 80, keys=keys)
        for lane in range(32):
            unpack_row(other, 0, lane, packed_row(cache, 0, lane, keys=keys), keys=keys)
        np.testing.assert_array_equal(other[0], cache[0])


# --- native bodies ------------------------------------------------------------------------------


def projected(
    rng: np.random.Generator, *, rows: int, heads: int, kv_heads: int, head_dim: int
) -> dict[str, Any]:
    """Arguments of `Qkv` over int8 pages: rows at random places of three slots."""
    hidden, slots, blocks = 70, 3, 2
    lengths, merges = sum_of(hidden)
    places = rng.permutation(slots * blocks * 32)[:rows].astype(np.int32)
    return {
        "x": floats(rng, rows, hidden),
        "norm_weight": floats(rng, hidden),
        "eps": 1e-5,
        "q_panels": panels(floats(rng, heads * head_dim, hidden)),
        "k_panels": panels(floats(rng, kv_heads * head_dim, hidden)),
        "v_panels": panels(floats(rng, kv_heads * head_dim, hidden)),
        "q_bias": None,
        "k_bias": floats(rng, kv_heads * head_dim),
        "v_bias": floats(rng, kv_heads * head_dim),
        "q_norm": None,
        "k_norm": None,
        "leaf_lengths": lengths,
        "merges": merges,
        "head_dim": head_dim,
        "q_scale": 0.18,
        "cos": floats(rng, blocks * 32, head_dim // 2),
        "sin": floats(rng, blocks * 32, head_dim // 2),
        "positions": places // slots,
        "q_out": floats(rng, rows, heads * head_dim),
        "k_cache": empty(slots * blocks, kv_heads, head_dim, keys=True),
        "v_cache": empty(slots * blocks, kv_heads, head_dim, keys=False),
        "page_table": rng.permutation(slots * blocks).astype(np.int32).reshape(slots, blocks),
        "row_slot": places % slots,
        "row_fault": np.zeros(rows, np.int32),
        "fault_code": 5,
    }


@needs_native
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rows_are_stored_as_the_reference_stores_them(body: str, head_dim: int) -> None:
    for rows in (1, 2, 31, 33):
        arguments = projected(
            np.random.default_rng(rows), rows=rows, heads=4, kv_heads=2, head_dim=head_dim
        )
        found = []
        for module, op_pool in ((reference, reference.Pool()), (native, pool(body, 3))):
            mine = arguments | {
                name: arguments[name].copy() for name in ("k_cache", "v_cache", "q_out")
            }
            module.Qkv(op_pool, **mine).run(rows)
            found.append(mine)
        for name in ("k_cache", "v_cache"):
            np.testing.assert_array_equal(found[0][name], found[1][name])


def attended(module: Any, op_pool: Any, case: dict[str, Any], rows: int) -> tuple[F32, np.ndarray]:
    out, faults = np.full_like(case["q"], 7), np.zeros(len(case["q"]), np.int32)
    module.Attention(op_pool, **case, out=out, row_fault=faults, fault_code=9).run(rows)
    return out[:rows], faults[:rows]


def looking(
    head_dim: int, kv_head_of: np.ndarray, positions: np.ndarray, row_slot: np.ndarray, seed: int
) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    slots, blocks = int(row_slot.max()) + 1, 20
    pages, kv_heads = slots * blocks + 3, int(kv_head_of.max()) + 1
    q = floats(rng, len(positions), len(kv_head_of) * head_dim)
    table = rng.permutation(pages)[: slots * blocks].astype(np.int32).reshape(slots, blocks)
    keys = empty(pages, kv_heads, head_dim, keys=True)
    values = empty(pages, kv_heads, head_dim, keys=False)
    for slot in range(slots):  # as far as the slot's last row sees, NaN past it
        for position in range(int(positions[row_slot == slot].max()) + 1):
            page, lane = table[slot, position // 32], position % 32
            store_row(keys, page, lane, floats(rng, kv_heads, head_dim), keys=True)
            store_row(values, page, lane, floats(rng, kv_heads, head_dim), keys=False)
    return {
        "q": q * np.float32(2 / head_dim**0.5),
        "k_cache": keys,
        "v_cache": values,
        "page_table": table,
        "row_slot": row_slot,
        "positions": positions,
        "head_dim": head_dim,
        "kv_head_of": kv_head_of,
    }


@needs_native
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention_over_int8_equals_the_reference(body: str, head_dim: int) -> None:
    positions = ints(0, 1, 31, 32, 33, 255, 256, 257, 600)
    for number, kv_head_of in enumerate(PAIRS):
        if head_dim > 80 and number % 2:
            continue
        for slots in (np.zeros(9, np.int32), np.arange(9, dtype=np.int32)):  # chunks, and alone
            case = looking(head_dim, kv_head_of, positions, slots, seed=number)
            expected, _ = attended(reference, None, case, len(positions))
            assert np.isfinite(expected).all()
            for threads in (1, 2, 5):
                for rows in (1, len(positions)):
                    got, faults = attended(native, pool(body, threads), case, rows)
                    assert differing(got, expected[:rows]) == 0, (threads, rows)
                    assert not faults.any()


@needs_native
@pytest.mark.parametrize("body", BODIES)
def test_rows_of_one_block_see_different_keys(body: str) -> None:
    positions = np.arange(225, 294, dtype=np.int32)
    case = looking(24, ints(0, 0, 1, 1, 1), positions, np.zeros(69, np.int32), seed=4)
    expected, _ = attended(reference, None, case, 69)
    for threads in (1, 3):
        got, _ = attended(native, pool(body, threads), case, 69)
        assert differing(got, expected) == 0


@needs_native
@pytest.mark.parametrize("body", BODIES)
def test_one_wrong_scale_would_be_seen(body: str) -> None:
    case = looking(64, ints(0, 0, 0), ints(70), ints(0), seed=5)
    expected, _ = attended(native, pool(body), case, 1)
    for name, keys in (("k_cache", True), ("v_cache", False)):
        cache = case[name].copy()
        page = int(case["page_table"][0, 1])
        row = packed_row(cache, page, 3, keys=keys)
        row[0, 64:66], row[0, 66:68] = row[0, 66:68].copy(), row[0, 64:66].copy()
        unpack_row(cache, page, 3, row, keys=keys)  # the scales of the two groups exchanged
        got, _ = attended(native, pool(body), case | {name: cache}, 1)
        assert differing(got, expected) > 0


@needs_native
@pytest.mark.parametrize("body", ["reference", *BODIES])
@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
def test_a_row_that_is_not_finite_spoils_only_those_that_see_it(body: str, which: str) -> None:
    module = reference if body == "reference" else native
    op_pool = None if body == "reference" else pool(body, 2)
    case = looking(32, ints(0, 0), ints(20, 40, 90), ints(0, 0, 1), seed=6)
    clean, _ = attended(module, op_pool, case, 3)
    bad = np.full((1, 32), np.inf, np.float32)
    keys = which == "k_cache"
    store_row(case[which], int(case["page_table"][0, 1]), 2, bad, keys=keys)  # position 34
    with np.errstate(all="ignore"):
        got, faults = attended(module, op_pool, case, 3)
    assert np.isnan(got[1]).all()
    assert faults.tolist() == ([0, 9, 0] if keys else [0, 0, 0])  # of a value the next norm tells
    assert differing(got[[0, 2]], clean[[0, 2]]) == 0


@needs_native
@pytest.mark.parametrize("body", BODIES)
def test_queries_at_the_ends_of_float32(body: str) -> None:
    """Zero, subnormal (whose coarse unit would make 35742 of the largest), small, not finite."""
    case = looking(40, ints(0, 0, 0, 0, 0), ints(70), ints(0), seed=8)
    q_Hd = case["q"].reshape(5, 40)
    q_Hd[0] = 0
    q_Hd[1] *= np.float32(1.0908 * 2.0**-132) / np.abs(q_Hd[1]).max()
    q_Hd[2] *= np.float32(2.0**-20)
    q_Hd[3, 33] = np.nan
    q_Hd[4, 2] = -np.inf
    with np.errstate(all="ignore"):
        expected, marked = attended(reference, None, case, 1)
    got, faults = attended(native, pool(body), case, 1)
    assert differing(got[:, :120], expected[:, :120]) == 0
    assert np.isfinite(got[:, :120]).all()
    assert np.isnan(got[:, 120:]).all() and np.isnan(expected[:, 120:]).all()
    assert faults.tolist() == marked.tolist() == [9]
    assert np.abs(whole_query(q_Hd[1:2])[0]).max() == 32767


@needs_native
@pytest.mark.parametrize("body", ["reference", *BODIES])
@pytest.mark.parametrize(
    ("below", "is_nothing"), [(60, False), (75, False), (76, True), (90, True)]
)
def test_weights_of_a_page_that_are_too_small_are_nothing(
    body: str, below: int, is_nothing: bool
) -> None:
    """Block 8, of the stripe of block 0, whose one key is 2^below as likely as these."""
    module, op_pool = (reference, None) if body == "reference" else (native, pool(body))
    case = looking(32, ints(0), ints(8 * 32), ints(0), seed=9)
    case["q"][:] = 0
    case["q"][0, 0] = 1
    zero, one = np.zeros((1, 32), np.float32), np.zeros((1, 32), np.float32)
    one[0, 0] = below
    for position in range(8 * 32 + 1):
        page, lane = int(case["page_table"][0, position // 32]), position % 32
        store_row(case["k_cache"], page, lane, one if position == 0 else zero, keys=True)
        value = np.full((1, 32), 127 * 2.0**-24 if position == 8 * 32 else 0, np.float32)
        store_row(case["v_cache"], page, lane, value, keys=False)
    got, faults = attended(module, op_pool, case, 1)
    # 2^-24 a unit: weights are 2^-84 and 2^-114, where 2^-100 is the least
    assert (got == 0).all() == is_nothing and not faults.any()
    expected, _ = attended(reference, None, case, 1)
    assert differing(got, expected) == 0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="not Linux")
@pytest.mark.parametrize(("pages", "asks"), [(200, False), (500, True)])
def test_a_large_cache_asks_for_huge_pages(pages: int, asks: bool) -> None:
    config, profile = MODELS["qwen2"], profile_of("f32", "int8")
    kv = KvCache(config, profile, layers=(0, 2), kv_heads=(0, 2), num_pages=pages)
    address = f"{kv.keys(0).ctypes.data:x}-"
    lines = Path("/proc/self/smaps").read_text("ascii").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(address))
    flags = next(line for line in lines[first:] if line.startswith("VmFlags:"))
    assert (" hg" in flags) == asks and (kv.bytes >= 1 << 23) == asks


@pytest.mark.parametrize("kind", ["f32", "int8"])
def test_poison_is_nan_wherever_nothing_was_stored(kind: Any) -> None:
    kv = KvCache(
        MODELS["qwen2"],
        profile_of("f32", kind),
        layers=(0, 1),
        kv_heads=(0, 2),
        num_pages=2,
        poison=True,
    )
    for pages, keys in ((kv.keys(0), True), (kv.values(0), False)):
        assert np.isnan(widened_row(pages, 1, 31, keys=keys)).all()


@needs_native
def test_pages_of_two_kinds_are_refused() -> None:
    case = looking(32, ints(0), ints(3), ints(0), seed=7)
    wide = np.zeros((*case["v_cache"].shape[:2], 32, 32), np.float32)
    with pytest.raises(ValueError, match="k_cache and v_cache differ in type"):
        attended(native, pool(BODIES[0]), case | {"v_cache": wide}, 1)
    with pytest.raises(ValueError, match=r"k_cache has shape \[23, 1, 33, 32\]"):
        short = np.zeros((23, 1, 33, 32), np.int8)
        attended(native, pool(BODIES[0]), case | {"k_cache": short}, 1)


@needs_native
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("head_dim", [16, 40, 80])
def test_digests_are_of_the_values_that_are_stored(body: str, head_dim: int) -> None:
    rng = np.random.default_rng(8)
    keys_of = {keys: filled(rng, 4, 3, head_dim, keys=keys) for keys in (True, False)}
    table = np.array([[2, 0], [3, 1]], np.int32)
    slots, positions = ints(0, 1, 1), ints(40, 0, 31)
    table_of_keys = digest_keys(3 * head_dim + 8)
    found = []
    for module, op_pool in ((reference, None), (native, pool(body, 2))):
        out = np.zeros((3, 4), np.uint64)
        module.DigestKv(
            op_pool, keys_of[True], keys_of[False], table, slots, positions, 1, 3, head_dim, 1,
            table_of_keys, out,
        ).run(3)  # fmt: skip
        found.append(out)
    np.testing.assert_array_equal(*found)
    for keys in (True, False):
        row = widened_row(keys_of[keys], 3, 31, keys=keys)[1:].reshape(-1)
        want = digest_of(row, first=head_dim)
        assert found[0][2, 1 if keys else 2] == want
