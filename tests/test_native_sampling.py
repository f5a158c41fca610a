"""Native argmax, Gumbel sampling and weight packing."""

from __future__ import annotations

import numpy as np
import pytest
from native_cases import BODIES, differing, floats, ints, native, needs_native, panels, pool

from anyshard.ops import reference

pytestmark = needs_native

SIZES = (1, 2, 7, 8, 9, 31, 32, 33, 257, 5003)


@pytest.mark.parametrize("body", BODIES)
def test_the_lowest_id_wins_a_tie(body: str) -> None:
    rng = np.random.default_rng(0)
    for size in SIZES:
        logits = np.round(2 * floats(rng, size))  # many ties
        assert native.argmax(logits, body=body) == reference.argmax(logits)
    assert native.argmax(np.array([-0.0, 0.0], np.float32), body=body)[0] == 0


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_maximum_that_is_not_finite_has_no_id(body: str, bad: float) -> None:
    for size in SIZES:
        for place in {0, size // 2, size - 1}:
            logits = floats(np.random.default_rng(1), size)
            logits[place] = bad
            assert native.argmax(logits, body=body)[0] == -1
    assert native.argmax(np.full(9, -np.inf, np.float32), body=body)[0] == -1


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 5.0])
def test_gumbel_sampling_equals_the_reference(body: str, temperature: float) -> None:
    rng = np.random.default_rng(2)
    for size in SIZES:
        logits = floats(rng, size)
        mask = (rng.random(size) < 0.4).astype(np.uint8)
        mask[rng.integers(size)] = 1
        for allowed in (None, mask):
            for draw in range(8):
                where = (0x9E3779B97F4A7C15 + draw, 2**32 - 1 - draw, draw % 3, draw % 2)
                got = native.gumbel_argmax(logits, temperature, *where, allowed, body=body)
                assert got == reference.gumbel_argmax(logits, temperature, *where, allowed)
                assert allowed is None or allowed[got]


@pytest.mark.parametrize("body", BODIES)
def test_sampling_frequencies_are_the_softmax(body: str) -> None:
    """Chi-squared over 4000 draws: 3 degrees of freedom, 16.3 is passed once in 1000."""
    weights = np.array([0.1, 0.2, 0.3, 0.4])
    logits = np.log(weights).astype(np.float32)
    draws = [
        native.gumbel_argmax(logits, 1.0, 7, position, 0, 0, body=body) for position in range(4000)
    ]
    counts = np.bincount(draws, minlength=4)
    assert float((((counts - 4000 * weights) ** 2) / (4000 * weights)).sum()) < 16.3


@pytest.mark.parametrize("body", BODIES)
def test_no_id_where_nothing_can_be_drawn(body: str) -> None:
    logits = np.zeros(5, np.float32)
    none = np.zeros(5, np.uint8)
    assert native.gumbel_argmax(logits, 1.0, 1, 2, 3, 4, none, body=body) == -1
    logits[2] = np.nan
    assert native.gumbel_argmax(logits, 1.0, 1, 2, 3, 4, body=body) == -1


def test_bad_sampling_arguments_are_refused() -> None:
    logits = np.zeros(5, np.float32)
    with pytest.raises(ValueError, match="logits is empty"):
        native.argmax(logits[:0])
    with pytest.raises(ValueError, match="logits must be of float32"):
        native.argmax(np.zeros(5))
    with pytest.raises(ValueError, match="mask has shape"):
        native.gumbel_argmax(logits, 1.0, 1, 2, 3, 4, np.ones(4, np.uint8))
    with pytest.raises(ValueError, match="body 'neon' is not available here"):
        native.argmax(logits, body="neon")


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("threads", [1, 3])
def test_packing_widens_as_gguf_does(kind: str, threads: int) -> None:
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(3)
    weight = (0.02 * rng.standard_normal((37, 96))).astype(np.float32)
    if kind == "F32":
        raw, wide = weight.view(np.uint8), weight
    elif kind == "F16":
        raw, wide = weight.astype(np.float16).view(np.uint8), weight.astype(np.float16)
    else:
        type_ = gguf.GGMLQuantizationType[kind]
        raw = gguf.quants.quantize(weight, type_)
        wide = gguf.quants.dequantize(raw, type_)
    source = np.ascontiguousarray(raw).reshape(-1)
    row_map = rng.permutation(37).astype(np.int32)
    for rows in (None, row_map):
        got = np.full((5, 96, 8), np.nan, np.float32)
        assert native.pack_panels(pool(BODIES[0], threads), got, source, kind, 37, 96, rows)
        expected = wide.astype(np.float32)[slice(None) if rows is None else rows]
        assert differing(got, panels(expected)) == 0


def test_every_half_is_widened_exactly() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    got = np.zeros((1 << 13, 1, 8), np.float32)
    finite = native.pack_panels(pool(BODIES[0]), got, halves.view(np.uint8), "F16", 1 << 16, 1)
    assert not finite  # NaN and infinities are among them
    with np.errstate(invalid="ignore"):
        expected = halves.view(np.float16).astype(np.float32)
    assert differing(got.reshape(-1), expected) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_packing_reports_a_value_that_is_not_finite(bad: float) -> None:
    for place in (0, 39, 40 * 9 - 1):
        weight = np.zeros(40 * 9, np.float32)
        weight[place] = bad
        target = np.zeros((2, 40, 8), np.float32)
        assert not native.pack_panels(pool(BODIES[0]), target, weight.view(np.uint8), "F32", 9, 40)


@pytest.mark.parametrize(
    ("kind", "num_bytes", "columns", "row_map", "message"),
    [
        ("Q4_K", 64, 8, None, "type 'Q4_K' cannot be packed"),
        ("F32", 63, 8, None, "source has 63 bytes; rows are of 32"),
        ("F32", 96, 8, None, "source has 96 bytes"),
        ("Q8_0", 64, 8, None, "not whole blocks of 32"),
        ("F32", 64, 8, ints(0, 2), r"row_map\[1\] is 2; the source has 2 rows"),
        ("F32", 64, 8, ints(0), "row_map has shape"),
        ("F32", 64, 9, None, "panels has shape"),
    ],
)
def test_bad_packing_is_refused(
    kind: str, num_bytes: int, columns: int, row_map: np.ndarray | None, message: str
) -> None:
    target, raw = np.zeros((1, 8, 8), np.float32), np.zeros(num_bytes, np.uint8)
    with pytest.raises(ValueError, match=message):
        native.pack_panels(pool(BODIES[0]), target, raw, kind, 2, columns, row_map)
