"""Block int8: what is rounded and how, in every body, at every edge; packing; the whole ops."""

from __future__ import annotations

from fractions import Fraction
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
    pool,
    quantised,
)

from anyshard.ops import reference
from anyshard.ops.quant import quantize_rows, quantize_weights, split_blocks
from anyshard.ops.storage import pack_q8_0, panel_cut, panel_shape, unpack_blocks

I8 = npt.NDArray[np.int8]
ROWS = (*range(1, 10), 31, 32, 33, 67)
SUBNORMAL = np.float32(2.0**-149)


def lengths_of(num_inputs: int, group: int = 0) -> list[int]:
    """Of the blocks of a row."""
    width = group or num_inputs
    return [min(32, width - at) for at in range(0, width, 32)] * (num_inputs // width)


def blocks(weight_NK: F32, group: int = 0) -> I8:
    """Weights as int8 panels, by the reference."""
    lengths = lengths_of(weight_NK.shape[1], group)
    q, scale = quantize_weights(split_blocks(weight_NK, lengths))
    return pack_q8_0(q.reshape(len(q), -1), scale).view(np.int8)


def nodes(module: Any, op_pool: Any, x: F32, weights: I8, n: int, lengths: I32, merges: I32) -> F32:
    out = np.full((len(lengths) - int(merges.sum())) * len(x) * n + 8, 7, np.float32)
    module.RowLinear(op_pool, x, weights, n, lengths, merges, out).run(len(x))
    assert (out[-8:] == 7).all(), "written past the nodes"
    return out[:-8]


def hostile_rows(rng: np.random.Generator, num_rows: int, num_inputs: int) -> F32:
    """Each row of one kind: plain, zeros, subnormals, halves to round, huge, NaN, infinities."""
    x = floats(rng, num_rows, num_inputs)
    for row in range(num_rows):
        match row % 8:
            case 1:
                x[row] = 0
                x[row, ::2] = -0.0
            case 2:
                x[row] *= SUBNORMAL * np.float32(200)
            case 3:
                x[row] = rng.integers(-254, 255, num_inputs).astype(np.float32) / 2
                x[row, ::32] = 127
            case 4:
                x[row] *= np.float32(2e37)
            case 5:
                x[row, rng.integers(num_inputs)] = np.nan
            case 6:
                x[row, rng.integers(num_inputs)] = -np.inf
            case 7:
                x[row] = SUBNORMAL
    return x


def test_a_weight_is_rounded_to_the_nearest_even_step_of_a_float16_scale() -> None:
    """Against exact fractions."""
    weight = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -127.0, 3e-5]], np.float32)
    q, scale = quantize_weights(split_blocks(weight, [9]))
    assert scale[0, 0] == 1
    assert q[0, 0, :9].tolist() == [127, 0, 2, 2, 0, -2, 126, -127, 0]
    rng = np.random.default_rng(1)
    weight = floats(rng, 40, 32) * np.float32(2.0) ** rng.integers(-30, 20, (40, 1)).astype(
        np.float32
    )
    q, scale = quantize_weights(split_blocks(weight, [32]))
    for row in range(40):
        step = Fraction(float(scale[row, 0]))
        amax = max(abs(Fraction(float(w))) for w in weight[row])
        drift = 127 * abs(amax / 127 - step)
        for value, found in zip(weight[row], q[row, 0], strict=True):
            assert abs(Fraction(float(value)) - int(found) * step) <= step / 2 + drift


def test_edges_of_a_weight_scale() -> None:
    """Zero blocks, scales that float16 rounds to 0 or holds as subnormals, and its largest."""
    most = np.float32(65504.0) * np.float32(127)
    weight = np.zeros((5, 32), np.float32)
    weight[1] = SUBNORMAL
    weight[2, 3] = 2.0**-24 * 127  # the smallest subnormal scale
    weight[3] = 2.0**-24 * 127 * 1.4  # rounds down: quotients beyond 127 are clamped
    weight[4, 0] = -most
    q, scale = quantize_weights(split_blocks(weight, [32]))
    assert scale[:, 0].tolist() == [0, 0, 2.0**-24, 2.0**-24, 65504]
    assert not q[:2].any() and q[2, 0, 3] == 127 and (q[3] == 127).all() and q[4, 0, 0] == -127
    weight[4, 0] = np.float32(65520.0) * np.float32(127)
    with pytest.raises(OverflowError, match="beyond float16"):
        quantize_weights(split_blocks(weight, [32]))


def test_a_row_that_is_not_finite_says_so() -> None:
    """In its own block only; a scale that rounds to 0 makes zeros."""
    x = np.ones((4, 70), np.float32)
    x[1, 40], x[2, 69], x[3] = np.nan, np.inf, SUBNORMAL
    q, scale = quantize_rows(x, [32, 32, 6])
    assert np.isnan(scale).tolist() == [
        [False] * 3,
        [False, True, False],
        [False, False, True],
        [False] * 3,
    ]
    assert not q[1, 1].any() and not q[2, 2].any() and q[1, 0].all()
    assert not scale[3].any() and not q[3].any()
    assert not q[0, 2, 6:].any(), "what pads a block is 0"


@needs_native
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(1, 32), (37, 150), (203, 97), (88, 416), (5, 7)]
)
def test_every_tile_has_the_bits_of_the_reference(
    body: str, num_outputs: int, num_inputs: int
) -> None:
    rng = np.random.default_rng(num_outputs)
    weight = floats(rng, num_outputs, num_inputs)
    weight[: num_outputs // 4] *= np.float32(1e-6)
    weight[-1] = 0
    weights = blocks(weight)
    x = hostile_rows(rng, max(ROWS), num_inputs)
    program = leaves(num_inputs, 32)
    for rows in ROWS:
        x_here = np.ascontiguousarray(x[-rows:])
        expected = nodes(reference, None, x_here, weights, num_outputs, *program)
        plain = ~np.isnan(expected)
        assert plain.any() and (rows < 8 or not plain.all())
        for threads in (1, 2, 3, 7):
            got = nodes(native, pool(body, threads), x_here, weights, num_outputs, *program)
            assert (np.isnan(got) == ~plain).all(), (rows, threads)
            assert differing(got[plain], expected[plain]) == 0, (rows, threads)


@needs_native
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("num_leaves", [16, 17, 47])
def test_a_long_row_alone_is_quantised_whole_by_every_thread(body: str, num_leaves: int) -> None:
    """It has several pieces, which threads share where there are more rows."""
    rng = np.random.default_rng(num_leaves)
    num_outputs, num_inputs = 331, 32 * num_leaves
    weights, x = blocks(floats(rng, num_outputs, num_inputs)), floats(rng, 2, num_inputs)
    program = leaves(num_inputs, 32)
    for rows in (1, 2):
        expected = nodes(reference, None, x[:rows], weights, num_outputs, *program)
        for threads in (1, 2, 5):
            op_pool = pool(body, threads)
            for _ in range(5):
                got = nodes(native, op_pool, x[:rows], weights, num_outputs, *program)
                assert differing(got, expected) == 0, (rows, threads)


@needs_native
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(5, 80), (7, 8), (9, 64), (3, 24)])
def test_cuts_between_heads_and_outputs_are_views(body: str, num_heads: int, head_dim: int) -> None:
    """Of o_proj: blocks begin anew at every head, and nodes of spans meet in the whole tree."""
    rng = np.random.default_rng(num_heads)
    weight = floats(rng, 72, num_heads * head_dim)
    weights = blocks(weight, head_dim)
    x = floats(rng, 3, num_heads * head_dim)
    a_head = -(-head_dim // 32)
    for low, high in ((0, num_heads), (1, 3), (num_heads - 1, num_heads)):
        lengths = lengths_of((high - low) * head_dim, head_dim)
        program = ints(*lengths), ints(*[0] * len(lengths))  # every leaf a node
        x_here = np.ascontiguousarray(x[:, low * head_dim : high * head_dim])
        for first, last in ((0, 72), (16, 48), (24, 61), (8, 9)):
            part = panel_cut(weights, (first, last), (low * a_head, high * a_head))
            whole = nodes(
                reference,
                None,
                x_here,
                panel_cut(weights, (0, 72), (low * a_head, high * a_head)),
                72,
                *program,
            )
            expected = whole.reshape(-1, 3, 72)[:, :, first:last]
            assert (np.shares_memory(part, weights)) == (first % 16 == 0)
            got = nodes(native, pool(body, 2), x_here, part, last - first, *program)
            assert differing(got.reshape(expected.shape), np.ascontiguousarray(expected)) == 0


@needs_native
@pytest.mark.parametrize("body", BODIES)
def test_a_dot_at_its_limit_is_exact(body: str) -> None:
    """All +-127: pairs of products are 32,258, the sum of a block 516,128."""
    weight = np.ones((48, 64), np.float32)
    weight[::3] = -1
    x = np.ones((6, 64), np.float32)
    x[1::2] = -1
    weights, program = blocks(weight), leaves(64, 32)
    got = nodes(native, pool(body), x, weights, 48, *program)
    assert differing(got, nodes(reference, None, x, weights, 48, *program)) == 0
    scale = np.float32(np.float16(np.float32(1) / np.float32(127))) * (
        np.float32(1) / np.float32(127)
    )
    assert set(np.abs(got).tolist()) == {float(np.float32(516128.0) * scale * np.float32(2))}


@needs_native
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("group", [0, 32, 48, 96])
def test_native_and_numpy_quantise_alike(kind: str, group: int) -> None:
    """Q8_0 stays as it is, except in blocks that hold -128 or are cut by a head."""
    rng = np.random.default_rng(group)
    if kind == "F32":
        wide = floats(rng, 37, 96)
        raw = wide.view(np.uint8).copy()
    else:
        raw, wide = quantised(kind, rng, 37, 96)
    if kind == "Q8_0":
        flat = np.ascontiguousarray(raw).reshape(-1, 34)
        flat[:, 2:][flat[:, 2:] == 0x80] = 0x81
        flat[5, 20] = 0x80
        raw = flat
        scales = np.ascontiguousarray(flat[:, :2]).view(np.float16).astype(np.float32)
        wide = (scales * flat[:, 2:].view(np.int8).astype(np.float32)).reshape(37, 96)
    row_map = rng.permutation(37).astype(np.int32)
    expected = blocks(wide[row_map], group)
    target = np.full(panel_shape("int8", 37, 96, group), 3, np.int8)
    source = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
    assert native.pack_panels(pool(BODIES[0], 3), target, source, kind, 37, 96, row_map, group)
    if kind != "Q8_0" or group == 48:
        assert (target == expected).all()
        return
    q, scale = unpack_blocks(target, np.arange(37))
    stored = flat[:, 2:].view(np.int8).reshape(37, 3, 32)[row_map]
    same = (q == stored).all(axis=2)
    assert same.sum() == 37 * 3 - 1, "all but the block with -128"
    assert (scale[same] == scales.reshape(37, 3)[row_map][same].astype(np.float16)).all()
    ((row, block),) = np.argwhere(~same)
    q_new, scale_new = unpack_blocks(expected, np.arange(37))
    assert (q[row, block] == q_new[row, block]).all() and scale[row, block] == scale_new[row, block]


@needs_native
def test_every_float16_scale_is_rounded_as_numpy_does() -> None:
    """A weight a block, so that its scale is float16(w / 127): ties, subnormals, zeros."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = np.concatenate([halves, (halves[1:] + halves[:-1]) / 2])  # ties, exact in float32
    weight = np.zeros((len(between), 32), np.float32)
    weight[:, 0] = between * np.float32(127)
    weight[:, 1] = np.nextafter(weight[:, 0], np.float32(0))
    target = np.zeros(panel_shape("int8", len(weight), 32), np.int8)
    source = weight.view(np.uint8).reshape(-1)
    assert native.pack_panels(pool(BODIES[0], 2), target, source, "F32", *weight.shape)
    assert (target == blocks(weight)).all()


@needs_native
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_int8_cannot_hold_are_reported(bad: float) -> None:
    weight = np.ones((21, 70), np.float32)
    target = np.zeros(panel_shape("int8", 21, 70), np.int8)
    weight[20, 69] = 65519.0 * 127
    source = weight.view(np.uint8).reshape(-1)
    assert native.pack_panels(pool(BODIES[0]), target, source, "F32", 21, 70)
    weight[20, 69] = 65520.0 * 127
    with pytest.raises(OverflowError, match="beyond float16"):
        native.pack_panels(pool(BODIES[0]), target, source, "F32", 21, 70)
    weight[20, 69] = bad
    assert not native.pack_panels(pool(BODIES[0]), target, source, "F32", 21, 70)


@needs_native
def test_what_does_not_fit_is_refused() -> None:
    x, out = np.zeros((1, 64), np.float32), np.zeros(16, np.float32)
    args = (pool(BODIES[0]), x)
    with pytest.raises(ValueError, match="a leaf is longer"):
        native.RowLinear(*args, np.zeros((1, 1, 544), np.int8), 8, ints(64), ints(0), out)
    with pytest.raises(ValueError, match="panels has shape"):
        native.RowLinear(*args, np.zeros((1, 3, 544), np.int8), 8, ints(32, 32), ints(0, 1), out)
    with pytest.raises(ValueError, match="cannot be mixed"):
        native.GateUp(
            pool(BODIES[0]), x, np.ones(64, np.float32), 1e-5, np.zeros((1, 2, 544), np.int8),
            np.zeros((1, 64, 8), np.float32), 8, None, None, ints(32, 32), ints(0, 1),
            np.zeros((1, 8), np.float32), ints(0), 1,
        )  # fmt: skip
    with pytest.raises(ValueError, match="0 or a divisor of num_columns"):
        native.pack_panels(
            args[0], np.zeros((1, 2, 544), np.int8), np.zeros(256, np.uint8), "F32", 1, 64, None, 48
        )


@needs_native
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_whole_ops_have_the_bits_of_the_reference(body: str, threads: int, rows: int) -> None:
    """Embed, gate_up and head over a hidden size that blocks do not divide."""
    hidden, width, vocab = 100, 61, 203
    found: list[list[F32]] = []
    for module, op_pool in ((reference, None), (native, pool(body, threads))):
        rng = np.random.default_rng(7)
        table, gate, up = (blocks(floats(rng, n, hidden)) for n in (vocab, width, width))
        tokens, x = np.arange(rows, dtype=np.int32) * 5, np.zeros((rows, hidden), np.float32)
        module.Embed(op_pool, table, vocab, tokens, x).run(rows)
        norm, program, marked = floats(rng, hidden), leaves(hidden, 32), np.zeros(rows, np.int32)
        out, logits = np.zeros((rows, width), np.float32), np.zeros((rows, vocab), np.float32)
        module.GateUp(
            op_pool,
            x,
            norm,
            1e-5,
            gate,
            up,
            width,
            floats(rng, width),
            None,
            *program,
            out,
            marked,
            1,
        ).run(rows)
        chosen = np.arange(rows, dtype=np.int32)[::-1].copy()
        module.Head(
            op_pool, x, chosen, norm, 1e-5, table, vocab, None, *program, logits, marked, 2
        ).run(rows)
        assert not marked.any()
        found.append([x, out, logits])
    for ours, expected in zip(*found, strict=True):
        assert differing(ours, expected) == 0
