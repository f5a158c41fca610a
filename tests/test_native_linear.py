"""Native linears: the bits of libm's fmaf chains, in every tile, cut and thread count."""

from __future__ import annotations

import ctypes
import ctypes.util
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
    panels,
    pool,
)

from anyshard.ops.exact import linear_nodes, merge_nodes

pytestmark = needs_native

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 32, 33, 67)
SHAPES = ((1, 1), (8, 64), (37, 131), (203, 97), (96, 331))  # N, K


def run_nodes(
    op_pool: Any, x: F32, weight_panels: F32, num_outputs: int, lengths: I32, merges: I32
) -> F32:
    num_nodes = len(lengths) - int(merges.sum())
    out = np.full(num_nodes * x.shape[0] * num_outputs + 8, 7, np.float32)
    op = native.RowLinear(op_pool, x, weight_panels, num_outputs, lengths, merges, out)
    op.run(x.shape[0])
    assert (out[-8:] == 7).all(), "written past the nodes"
    return out[:-8].reshape(num_nodes, x.shape[0], num_outputs)


@pytest.mark.parametrize("body", BODIES)
def test_linear_equals_chains_of_libm_fmaf(body: str) -> None:
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    rng = np.random.default_rng(1)
    x, w = floats(rng, 5, 200), floats(rng, 11, 200)
    lengths, merges = leaves(200)
    expected = np.empty((5, 11), np.float32)
    for m in range(5):
        for n in range(11):
            nodes, start = [], 0
            for length in lengths:
                acc = 0.0
                for k in range(start, start + length):
                    acc = fmaf(x[m, k], w[n, k], acc)
                nodes.append(np.float32(acc))
                start += length
            # four leaves: ((0, 1), (2, 3))
            expected[m, n] = (nodes[0] + nodes[1]) + (nodes[2] + nodes[3])
    (got,) = run_nodes(pool(body), x, panels(w), 11, lengths, merges)
    assert differing(got, expected) == 0


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    body: str, num_outputs: int, num_inputs: int
) -> None:
    rng = np.random.default_rng(2)
    x, w = floats(rng, max(ROWS), num_inputs), floats(rng, num_outputs, num_inputs)
    lengths, merges = leaves(num_inputs)
    (expected,) = linear_nodes(x, w, lengths.tolist(), merges.tolist())
    packed = panels(w)
    for threads in (1, 2):
        op_pool = pool(body, threads)
        for rows in ROWS:
            for start in {0, max(ROWS) - rows}:
                rows_here = np.ascontiguousarray(x[start : start + rows])
                (got,) = run_nodes(op_pool, rows_here, packed, num_outputs, lengths, merges)
                assert differing(got, expected[start : start + rows]) == 0, (threads, rows, start)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("rows", [1, 4, 300])
def test_any_number_of_threads_gives_the_same_bits(body: str, rows: int) -> None:
    rng = np.random.default_rng(3)
    x, packed = floats(rng, rows, 70), panels(floats(rng, 99, 70))
    program = leaves(70)
    one = run_nodes(pool(body), x, packed, 99, *program)
    for threads in range(2, 8):
        assert differing(run_nodes(pool(body, threads), x, packed, 99, *program), one) == 0


def cover(lengths: I32, start: int, stop: int) -> tuple[I32, I32]:
    """Merges that stay inside leaves [start, stop): the maximal nodes of the span are left."""
    inside = [0] * (stop - start)

    def visit(low: int, high: int) -> None:
        if high - low <= 1 or high <= start or low >= stop:
            return
        middle = low + (high - low + 1) // 2
        visit(low, middle)
        visit(middle, high)
        if start <= low and high <= stop:
            inside[high - 1 - start] += 1

    visit(0, len(lengths))
    return lengths[start:stop].copy(), ints(*inside)


def remaining(num_leaves: int, cuts: list[int]) -> I32:
    """Merges over the covers' nodes of all spans, in order."""
    owner = [sum(leaf >= cut for cut in cuts) for leaf in range(num_leaves)]
    merges: list[int] = []

    def visit(low: int, high: int) -> None:
        if owner[low] == owner[high - 1]:
            merges.append(0)
            return
        middle = low + (high - low + 1) // 2
        visit(low, middle)
        visit(middle, high)
        merges[-1] += 1

    visit(0, num_leaves)
    return ints(*merges)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    "cuts", [[5], [7], [5, 7], [1], [3, 4], [2, 2, 9], [1, 2, 3, 4, 5, 6, 7, 8]]
)
def test_spans_of_leaves_merge_to_the_unsplit_bits(body: str, cuts: list[int]) -> None:
    rng = np.random.default_rng(4)
    rows, num_outputs, num_inputs = 5, 37, 9 * 64 - 23
    x, w = floats(rng, rows, num_inputs), floats(rng, num_outputs, num_inputs)
    residual, bias = floats(rng, rows, num_outputs), floats(rng, num_outputs)
    lengths, merges = leaves(num_inputs)
    packed, op_pool = panels(w), pool(body, 2)
    (whole,) = run_nodes(op_pool, x, packed, num_outputs, lengths, merges)
    sources, counts = [], []
    for start, stop in zip([0, *cuts], [*cuts, len(lengths)], strict=True):
        k0, k1 = start * 64, min(stop * 64, num_inputs)
        nodes = run_nodes(
            op_pool,
            np.ascontiguousarray(x[:, k0:k1]),
            packed[:, k0:k1],  # a view: the panel stride stays
            num_outputs,
            *cover(lengths, start, stop),
        )
        sources.append(nodes.reshape(-1).copy())
        counts.append(len(nodes))
    got = residual.copy()
    op = native.Reduce(
        op_pool, sources, counts, remaining(len(lengths), cuts), bias, got, num_outputs
    )
    op.run(rows)
    assert differing(got, residual + (whole + bias)) == 0


@pytest.mark.parametrize("body", BODIES)
def test_chains_start_at_plus_zero(body: str) -> None:
    """Only products of -0: a chain that began with a product would end at -0."""
    x, w = -np.ones((9, 70), np.float32), np.zeros((40, 70), np.float32)
    for rows in range(1, 10):
        got = run_nodes(pool(body), x[:rows].copy(), panels(w), 40, *leaves(70))
        assert not got.view(np.uint32).any()


@pytest.mark.parametrize("body", BODIES)
def test_heads_with_short_last_leaves(body: str) -> None:
    rng = np.random.default_rng(5)
    x, w = floats(rng, 6, 3 * 80), floats(rng, 24, 3 * 80)
    lengths, merges = ints(64, 16, 64, 16, 64, 16), ints(0, 1, 0, 2, 0, 2)
    expected = linear_nodes(x, w, lengths.tolist(), merges.tolist())
    assert differing(run_nodes(pool(body), x, panels(w), 24, lengths, merges), expected) == 0


@pytest.mark.parametrize("body", BODIES)
def test_reduce_merges_bias_and_residual_in_order(body: str) -> None:
    rng = np.random.default_rng(6)
    for rows, num_outputs in ((1, 5), (3, 41), (40, 576)):
        counts = [2, 0, 3]
        sources = [floats(rng, max(1, count * rows * num_outputs)) for count in counts]
        x, bias = floats(rng, rows, num_outputs), floats(rng, num_outputs)
        merges = ints(0, 1, 0, 1, 2)
        nodes = [
            source[j * rows * num_outputs : (j + 1) * rows * num_outputs].reshape(rows, -1)
            for source, count in zip(sources, counts, strict=True)
            for j in range(count)
        ]
        (merged,) = merge_nodes(nodes, merges.tolist())
        for use_bias in (bias, None):
            got = x.copy()
            op = native.Reduce(pool(body, 3), sources, counts, merges, use_bias, got, num_outputs)
            op.run(rows)
            total = merged if use_bias is None else merged + use_bias
            assert differing(got, x + total) == 0


def test_reduce_of_fewer_rows_than_there_is_room_for() -> None:
    """Nodes lie as far apart as the rows that are exchanged."""
    rng = np.random.default_rng(7)
    x, source = floats(rng, 5, 41), floats(rng, 2 * 5 * 41)
    got = x.copy()
    native.Reduce(pool(BODIES[0], 2), [source], [2], ints(0, 1), None, got, 41).run(3)
    one, two = source[: 2 * 3 * 41].reshape(2, 3, 41)
    assert differing(got[:3], x[:3] + (one + two)) == 0
    assert differing(got[3:], x[3:]) == 0


@pytest.mark.parametrize(
    ("floats_of", "counts", "merges", "message"),
    [
        ((80, 39), [2, 1], ints(0, 1, 1), "source 1 holds 39 floats; 40 are needed"),
        ((80, 40), [2], ints(0, 1), "there are 2 sources, but 1 node counts"),
        ((80, 40), [2, 1], ints(0, 1, 0), "the sum is incomplete"),
        ((80, 40), [2, -1], ints(0), "a node count is out of range"),
    ],
)
def test_sources_that_do_not_fit_are_refused(
    floats_of: tuple[int, ...], counts: list[int], merges: I32, message: str
) -> None:
    sources, x = [np.zeros(n, np.float32) for n in floats_of], np.zeros((5, 8), np.float32)
    with pytest.raises(ValueError, match=message):
        native.Reduce(pool(BODIES[0]), sources, counts, merges, None, x, 8)


@pytest.mark.parametrize("num_outputs", [-1, 2**62])
def test_a_number_of_outputs_that_no_sum_has_is_refused(num_outputs: int) -> None:
    """-1 stands for any size where a shape is wanted."""
    x, source = np.zeros((5, 8), np.float32), np.zeros(40, np.float32)
    with pytest.raises(ValueError, match=r"num_outputs is -1; 0 to |x has shape"):
        native.Reduce(pool(BODIES[0]), [source], [1], ints(0), None, x, num_outputs)


def test_empty_spans_write_nothing() -> None:
    out, empty = np.full(4, 7, np.float32), np.zeros((3, 0), np.float32)
    nothing = np.zeros(0, np.int32)
    weight = np.zeros((1, 0, 8), np.float32)
    native.RowLinear(pool(BODIES[0]), empty, weight, 8, nothing, nothing, out).run(3)
    x = np.ones((3, 64), np.float32)
    op = native.RowLinear(pool(BODIES[0], 2), x, None, 0, ints(64), ints(0), out)
    op.run(3)
    op.run(0)
    assert (out == 7).all()


GOOD: dict[str, Any] = {
    "a": np.zeros((2, 70), np.float32),
    "panels": np.zeros((2, 70, 8), np.float32),
    "num_outputs": 13,
    "leaf_lengths": ints(64, 6),
    "merges": ints(0, 1),
    "out": np.zeros(26, np.float32),
}
READ_ONLY = np.zeros(26, np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("a", np.zeros((2, 70)), "a must be of float32"),
        ("a", np.zeros(70, np.float32), r"a has shape \[70\]; \[any, any\] is needed"),
        ("a", np.zeros((70, 2), np.float32).T, "a must be C-contiguous"),
        ("a", "text", "a must be an array of float32"),
        ("panels", np.zeros((2, 70, 4), np.float32), "panels has shape"),
        ("panels", np.zeros((3, 70, 8), np.float32), "panels has shape"),
        ("panels", np.zeros((2, 8, 70), np.float32).transpose(0, 2, 1), "panels with strides"),
        ("panels", None, "panels is None, but 13 outputs"),
        ("num_outputs", 17, "panels has shape"),
        ("num_outputs", -1, "below 0"),
        ("num_outputs", 2**63 - 1, "panels has shape"),
        ("leaf_lengths", ints(70, 0), "a leaf length is 0"),
        ("leaf_lengths", ints(64, 5), "sum to 69"),
        ("leaf_lengths", np.array([64, 6]), "leaf_lengths must be of int32"),
        ("merges", ints(0), "merges has shape"),
        ("merges", ints(0, 2), "2 nodes are on the stack"),
        ("merges", ints(-1, 1), r"merges\[0\] is -1"),
        ("out", np.zeros(25, np.float32), "out holds 25 floats; 26 are needed"),
        ("out", READ_ONLY, "writable"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        native.RowLinear(pool(BODIES[0]), **{**GOOD, name: value})
    assert "\n" not in str(refusal.value)


def test_row_counts_outside_the_bound_arrays_are_refused() -> None:
    op = native.RowLinear(pool(BODIES[0]), **GOOD)
    for rows in (-1, 3):
        with pytest.raises(ValueError, match=f"rows is {rows}; 0 to 2 is possible"):
            op.run(rows)


def test_too_deep_a_stack_is_refused() -> None:
    lengths, merges = np.ones(40, np.int32), np.zeros(40, np.int32)
    merges[-1] = 39
    with pytest.raises(ValueError, match="40 nodes open at once"):
        native.RowLinear(
            pool(BODIES[0]),
            np.zeros((1, 40), np.float32),
            np.zeros((1, 40, 8), np.float32),
            8,
            lengths,
            merges,
            np.zeros(8, np.float32),
        )
