"""Weights held as stored (f16, bf16, Q8_0 blocks): the bits of their float32 twins, in every op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
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
    panels,
    pool,
    quantised,
)

from anyshard.ops import reference
from anyshard.ops.storage import pack_lanes, pack_q8_0, unpack

Stored = npt.NDArray[Any]

STORAGES = ("bf16", "f16", "q8_0")
ROWS = (*range(1, 10), 23, 24, 31, 32, 33, 63, 67)


def stored(storage: str, rng: np.random.Generator, num_rows: int, num_columns: int) -> Stored:
    """Panels of random weights: every sign, zeros of both signs, subnormals, the extremes."""
    shape = (num_rows, num_columns)
    if storage == "q8_0":
        q = rng.integers(-128, 128, shape).astype(np.int8)
        scale = (0.01 * rng.standard_normal((num_rows, num_columns // 32))).astype(np.float16)
        special = np.array([0.0, -0.0, 2**-24, -(2**-24), 2**-15, 65504.0, -65504.0], np.float16)
        where = rng.random(scale.shape) < 0.2
        scale[where] = rng.choice(special, int(where.sum()))
        return pack_q8_0(q, scale)
    patterns = rng.integers(0, 1 << 16, shape).astype(np.uint16)
    exponent = np.uint16(0x7C00 if storage == "f16" else 0x7F80)
    patterns[(patterns & exponent) == exponent] = 0x8000  # -0 where it would not be finite
    weights = patterns if storage == "bf16" else patterns.view(np.float16)
    return pack_lanes(weights)


def twin(weights: Stored, num_rows: int) -> F32:
    """The same weights as float32 panels."""
    return panels(unpack(weights, num_rows))


def moderate(storage: str, rng: np.random.Generator, num_rows: int, num_columns: int) -> Stored:
    """Panels of weights near 1, for ops whose norms and exponentials need it."""
    if storage == "q8_0":
        q = rng.integers(-128, 128, (num_rows, num_columns)).astype(np.int8)
        scale = rng.uniform(-0.02, 0.02, (num_rows, num_columns // 32)).astype(np.float16)
        return pack_q8_0(q, scale)
    weight = floats(rng, num_rows, num_columns)
    if storage == "f32":
        return pack_lanes(weight)
    if storage == "f16":
        return pack_lanes(weight.astype(np.float16))
    return pack_lanes((weight.view(np.uint32) >> np.uint32(16)).astype(np.uint16))


def nodes(op_pool: Any, x: F32, weights: Stored, n: int, lengths: I32, merges: I32) -> F32:
    out = np.full((len(lengths) - int(merges.sum())) * len(x) * n + 8, 7, np.float32)
    native.RowLinear(op_pool, x, weights, n, lengths, merges, out).run(len(x))
    assert (out[-8:] == 7).all(), "written past the nodes"
    return out[:-8]


@needs_native
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 32), (37, 160), (203, 96), (88, 416)])
def test_every_tile_has_the_bits_of_float32_panels(
    body: str, storage: str, num_outputs: int, num_inputs: int
) -> None:
    rng = np.random.default_rng(num_outputs)
    weights = stored(storage, rng, num_outputs, num_inputs)
    wide = twin(weights, num_outputs)
    x = floats(rng, max(ROWS), num_inputs)
    if storage == "bf16":
        x *= np.float32(2**-30)  # products of the largest bf16 weights stay finite
    program = leaves(num_inputs)
    for rows in ROWS:
        x_here = np.ascontiguousarray(x[-rows:])
        expected = nodes(pool(body), x_here, wide, num_outputs, *program)
        assert np.isfinite(expected).all()
        for threads in (1, 2, 3):
            got = nodes(pool(body, threads), x_here, weights, num_outputs, *program)
            assert differing(got, expected) == 0, (rows, threads)


@needs_native
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("rows", [1, 2, 4, 40])
def test_cuts_of_inputs_and_outputs_are_views(body: str, storage: str, rows: int) -> None:
    rng = np.random.default_rng(5)
    weights, wide = stored(storage, rng, 88, 448), None
    wide = twin(weights, 88)
    x = floats(rng, rows, 448) * np.float32(2**-30)
    unit = 32 if storage == "q8_0" else 1
    outputs = 16 if storage == "q8_0" else 8
    for start, stop in ((0, 128), (64, 448), (320, 384)):
        for first, last in ((0, 88), (16, 48), (48, 85)):
            part = weights[first // outputs : -(-last // outputs), start // unit : stop // unit]
            wide_part = wide[first // 8 : -(-last // 8), start:stop]
            x_here = np.ascontiguousarray(x[:, start:stop])
            program = leaves(stop - start)
            expected = nodes(pool(body), x_here, wide_part, last - first, *program)
            got = nodes(pool(body, 2), x_here, part, last - first, *program)
            assert differing(got, expected) == 0, (start, stop, first, last)


@needs_native
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("storage", ["bf16", "f16"])
def test_leaves_of_any_length(body: str, storage: str) -> None:
    rng = np.random.default_rng(6)
    weights = moderate(storage, rng, 24, 3 * 81)
    program = ints(64, 17, 64, 17, 64, 17), ints(0, 1, 0, 2, 0, 2)
    for rows in (1, 2, 4, 40):
        x = floats(rng, rows, 3 * 81)
        expected = nodes(pool(body), x, twin(weights, 24), 24, *program)
        assert differing(nodes(pool(body), x, weights, 24, *program), expected) == 0


@needs_native
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("storage", ["bf16", "f16"])
def test_every_finite_pattern_is_widened_exactly(body: str, storage: str) -> None:
    """Through a linear with one input: 1 * w from +0 is w, or +0 for -0."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    exponent = 0x7C00 if storage == "f16" else 0x7F80
    patterns = patterns[(patterns & exponent) != exponent]
    weights = patterns if storage == "bf16" else patterns.view(np.float16)
    packed = pack_lanes(weights[:, None])
    expected = unpack(packed, len(patterns))[:, 0]
    if storage == "f16":
        assert differing(expected, patterns.view(np.float16).astype(np.float32)) == 0
    for rows in (1, 5):
        x = np.ones((rows, 1), np.float32)
        got = nodes(pool(body, 2), x, packed, len(patterns), *leaves(1)).reshape(rows, -1)
        assert differing(got, np.broadcast_to(expected + np.float32(0), got.shape).copy()) == 0
    tokens = np.arange(len(patterns), dtype=np.int32)
    rows_out = np.full((len(patterns), 1), 7, np.float32)
    native.Embed(pool(body), packed, len(patterns), tokens, rows_out).run(len(tokens))
    assert differing(rows_out[:, 0], expected) == 0


@needs_native
@pytest.mark.parametrize("body", BODIES)
def test_every_q8_value_times_every_kind_of_scale(body: str) -> None:
    """All 256 q with scales of both signs: zero, the smallest, subnormal, 1, the largest."""
    magnitudes = np.array([0.0, 2**-24, 3 * 2**-24, 1023 * 2**-24, 2**-14, 1, 65504], np.float16)
    scale = np.repeat(np.concatenate([magnitudes, -magnitudes])[:, None], 8, axis=1)
    q = np.tile(np.arange(-128, 128).astype(np.int8), (len(scale), 1))
    packed = pack_q8_0(q, scale)
    expected = np.repeat(scale.astype(np.float32), 32, axis=1) * q.astype(np.float32)
    assert differing(unpack(packed, len(q)), expected) == 0
    out = np.full((len(q), 256), 7, np.float32)
    native.Embed(pool(body), packed, len(q), np.arange(len(q), dtype=np.int32), out).run(len(q))
    assert differing(out, expected) == 0
    for rows in (1, 4, 256):  # row k sees input k alone
        x = np.eye(256, dtype=np.float32)[:rows]
        got = nodes(pool(body), np.ascontiguousarray(x), packed, len(q), *leaves(256))
        assert differing(got.reshape(rows, -1), expected.T[:rows] + np.float32(0)) == 0


Arguments = dict[str, Any]


def qkv(storages: tuple[str, str, str], rows: int) -> Arguments:
    rng = np.random.default_rng(rows)
    lengths, merges = leaves(96)
    return {
        "x": floats(rng, rows, 96),
        "norm_weight": floats(rng, 96),
        "eps": 1e-5,
        "q_panels": moderate(storages[0], rng, 5 * 24, 96),
        "k_panels": moderate(storages[1], rng, 2 * 24, 96),
        "v_panels": moderate(storages[2], rng, 2 * 24, 96),
        "q_bias": floats(rng, 5 * 24),
        "k_bias": None,
        "v_bias": None,
        "q_norm": None,
        "k_norm": None,
        "leaf_lengths": lengths,
        "merges": merges,
        "head_dim": 24,
        "q_scale": 0.18,
        "cos": floats(rng, 96, 12),
        "sin": floats(rng, 96, 12),
        "positions": np.arange(rows, dtype=np.int32),
        "q_out": floats(rng, rows, 5 * 24),
        "k_cache": floats(rng, 3, 2, 24, 32),
        "v_cache": floats(rng, 3, 2, 32, 24),
        "page_table": ints(2, 0, 1)[None],
        "row_slot": np.zeros(rows, np.int32),
        "row_fault": np.zeros(rows, np.int32),
        "fault_code": 5,
    }


def gate_up(storages: tuple[str, str, str], rows: int) -> Arguments:
    rng = np.random.default_rng(rows)
    lengths, merges = leaves(160)
    return {
        "x": floats(rng, rows, 160),
        "norm_weight": floats(rng, 160),
        "eps": 1e-5,
        "gate_panels": moderate(storages[0], rng, 203, 160),
        "up_panels": moderate(storages[1], rng, 203, 160),
        "num_outputs": 203,
        "gate_bias": floats(rng, 203),
        "up_bias": None,
        "leaf_lengths": lengths,
        "merges": merges,
        "out": floats(rng, rows, 203),
        "row_fault": np.zeros(rows, np.int32),
        "fault_code": 6,
    }


def head(storages: tuple[str, str, str], rows: int) -> Arguments:
    rng = np.random.default_rng(rows)
    lengths, merges = leaves(96)
    return {
        "x": floats(rng, rows, 96),
        "sample_rows": rng.integers(0, rows, rows).astype(np.int32),
        "norm_weight": floats(rng, 96),
        "eps": 1e-5,
        "panels": moderate(storages[0], rng, 331, 96),
        "num_outputs": 331,
        "bias": None,
        "leaf_lengths": lengths,
        "merges": merges,
        "out": floats(rng, rows, 331),
        "row_fault": np.zeros(rows, np.int32),
        "fault_code": 8,
    }


def embed(storages: tuple[str, str, str], rows: int) -> Arguments:
    rng = np.random.default_rng(rows)
    return {
        "panels": moderate(storages[0], rng, 43, 96),
        "vocab": 43,
        "tokens": rng.integers(0, 43, rows).astype(np.int32),
        "out": floats(rng, rows, 96),
    }


OUTPUTS = ("out", "q_out", "k_cache", "v_cache", "row_fault")
BUILDERS: dict[str, Callable[[tuple[str, str, str], int], Arguments]] = {
    "Qkv": qkv,
    "GateUp": gate_up,
    "Head": head,
    "Embed": embed,
}
MIXES = [(s, s, s) for s in STORAGES] + [("q8_0", "f32", "bf16"), ("f16", "q8_0", "q8_0")]
WIDTHS = {"q_panels": 120, "k_panels": 48, "v_panels": 48, "gate_panels": 203, "up_panels": 203}


def run(module: Any, name: str, op_pool: Any, arguments: Arguments, rows: int) -> Arguments:
    mine = {k: v.copy() if k in OUTPUTS else v for k, v in arguments.items()}
    getattr(module, name)(op_pool, **mine).run(rows)
    return {key: mine[key] for key in OUTPUTS if key in mine}


@needs_native
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("storages", MIXES, ids="-".join)
def test_every_op_has_the_bits_of_float32_panels(
    body: str, name: str, storages: tuple[str, str, str]
) -> None:
    for rows in (1, 3, 33):
        arguments = BUILDERS[name](storages, rows)
        wide = dict(arguments)
        for key in arguments:
            if key.endswith("panels"):
                default = 331 if name == "Head" else 43
                wide[key] = twin(arguments[key], WIDTHS.get(key, default))
        expected = run(native, name, pool(body), wide, rows)
        for threads in (1, 3):
            got = run(native, name, pool(body, threads), arguments, rows)
            for key, value in expected.items():
                assert differing(got[key], value) == 0, (rows, threads, key)
        if rows == 3:
            twins = run(reference, name, None, arguments, rows)
            for key, value in expected.items():
                assert differing(twins[key], value) == 0, ("reference", key)


def empty_panels(kind: str, rows: int, columns: int) -> Stored:
    if kind == "Q8_0":
        return np.full((-(-rows // 16), columns // 32, 544), 0xFF, np.uint8)
    dtype = np.float16 if kind == "F16" else np.uint16
    return np.full((-(-rows // 8), columns, 8), np.nan if kind == "F16" else 0xFFFF, dtype)


@needs_native
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("threads", [1, 3])
def test_packing_keeps_what_the_checkpoint_holds(kind: str, threads: int) -> None:
    rng = np.random.default_rng(3)
    raw, wide = quantised(kind, rng, 37, 96)
    source = np.ascontiguousarray(raw).reshape(-1)
    row_map = rng.permutation(37).astype(np.int32)
    for rows in (None, row_map):
        target = empty_panels(kind, 37, 96)
        assert native.pack_panels(pool(BODIES[0], threads), target, source, kind, 37, 96, rows)
        expected = wide[slice(None) if rows is None else rows]
        assert differing(unpack(target, 37), expected) == 0
        lanes = target.shape[0] * (16 if kind == "Q8_0" else 8)
        assert not unpack(target, lanes)[37:].view(np.uint32).any(), "padding lanes are +0"


@needs_native
def test_native_and_numpy_pack_the_same_blocks() -> None:
    rng = np.random.default_rng(4)
    raw, _ = quantised("Q8_0", rng, 21, 64)
    blocks = np.ascontiguousarray(raw).reshape(21, 2, 34)
    scale = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0]
    q = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(21, 64)
    target = empty_panels("Q8_0", 21, 64)
    native.pack_panels(pool(BODIES[0]), target, raw.reshape(-1), "Q8_0", 21, 64)
    assert (target == pack_q8_0(q, scale)).all()


@needs_native
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 20, 41])
def test_what_is_not_finite_is_reported(bad: float, place: int) -> None:
    halves = np.zeros((21, 64), np.float16)
    target = empty_panels("F16", 21, 64)
    args = (pool(BODIES[0]), target, halves.reshape(-1).view(np.uint8), "F16", 21, 64)
    assert native.pack_panels(*args)
    halves.reshape(-1)[place * 32 + 7] = bad
    assert not native.pack_panels(*args)
    floats_ = np.zeros(21 * 64, np.float32)
    floats_[place * 32 + 7] = bad
    bfloats = (floats_.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    target = empty_panels("BF16", 21, 64)
    assert not native.pack_panels(pool(BODIES[0]), target, bfloats, "BF16", 21, 64)
    blocks = np.zeros((42, 34), np.uint8)
    blocks[place, :2] = np.array([bad], np.float16).view(np.uint8)
    target = empty_panels("Q8_0", 21, 64)
    assert not native.pack_panels(pool(BODIES[0]), target, blocks.reshape(-1), "Q8_0", 21, 64)


@needs_native
@pytest.mark.parametrize(
    ("weights", "num_inputs", "lengths", "message"),
    [
        (np.zeros((1, 64, 8)), 64, [64], "panels must be of float32, float16, uint16"),
        (np.zeros((1, 64, 8), np.int16), 64, [64], "its format is 'h'"),
        (np.zeros((1, 2, 544), np.uint8), 70, [64, 6], "70 inputs are not whole blocks"),
        (np.zeros((1, 2, 544), np.uint8), 64, [48, 16], "a leaf is not made of them"),
        (np.zeros((1, 64, 8), np.uint8), 64, [64], r"panels has shape \[1, 64, 8\]; \[1, 2, 544\]"),
        (np.zeros((2, 2, 544), np.uint8), 64, [64], "panels has shape"),
        (np.zeros((1, 2, 1088), np.uint8)[:, :, ::2], 64, [64], "strides"),
        (np.zeros((1, 64, 16), np.uint16)[:, :, :8], 64, [64], r"strides \(any, 16, 2\) bytes"),
    ],
)
def test_panels_that_do_not_fit_are_refused(
    weights: Stored, num_inputs: int, lengths: list[int], message: str
) -> None:
    x, out = np.zeros((1, num_inputs), np.float32), np.zeros(16, np.float32)
    merges = ints(*([0] * (len(lengths) - 1)), len(lengths) - 1)
    with pytest.raises(ValueError, match=message):
        native.RowLinear(pool(BODIES[0]), x, weights, 8, ints(*lengths), merges, out)


@needs_native
@pytest.mark.parametrize("columns", [0, -1, 2**62, 2**63 - 1])
def test_rows_of_no_columns_are_refused(columns: int) -> None:
    for target in (np.zeros((0, 0, 8), np.float32), np.zeros((0, 0, 544), np.int8)):
        with pytest.raises(ValueError, match=f"num_columns is {columns}; 1 to"):
            native.pack_panels(
                pool(BODIES[0]), target, np.zeros(0, np.uint8), "F32", 0, columns, None, 0
            )


@needs_native
@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("F32", np.zeros((1, 32, 8), np.float16)),
        ("F16", np.zeros((1, 32, 8), np.uint16)),
        ("BF16", np.zeros((1, 32, 8), np.float16)),
        ("Q4_1", np.zeros((1, 1, 544), np.uint8)),
        ("F16", np.zeros((1, 1, 544), np.uint8)),
    ],
)
def test_packing_never_rounds(kind: str, target: Stored) -> None:
    with pytest.raises(ValueError, match=f"panels must be float32, .* keeps the bits of {kind}"):
        native.pack_panels(pool(BODIES[0]), target, np.zeros(1024, np.uint8), kind, 8, 32)
