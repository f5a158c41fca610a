"""The float32 primitives against exact rational arithmetic and 60-digit functions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyshard.ops.exact import (
    exp,
    exp2,
    fma32,
    halving_tree,
    linear_nodes,
    log,
    merge_nodes,
    pow2,
    silu,
)

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def rounded(exact: Fraction) -> float:
    """The float32 nearest to a rational, ties to even, by comparing candidates exactly."""
    guess = np.float32(float(exact))
    best = [
        np.nextafter(guess, np.float32(-np.inf)),
        guess,
        np.nextafter(guess, np.float32(np.inf)),
    ]
    finite = [c for c in best if np.isfinite(c)]

    def distance(candidate: np.float32) -> tuple[Fraction, int]:
        odd = int(candidate.view(np.int32)) & 1
        return abs(Fraction(float(candidate)) - exact), odd

    return float(min(finite, key=distance))


def test_the_numerics_witness_that_float64_then_cast_is_not_an_fma() -> None:
    a = np.float32(2.0**-12 * (1 + 2.0**-18))
    b = np.float32(2.0**-12 * (1 - 2.0**-18))
    c = np.float32(1 + 2.0**-23)
    naive = np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    assert float(fma32(a, b, c)).hex() == "0x1.0000020000000p+0"
    assert float(naive).hex() != "0x1.0000020000000p+0"


@given(floats, floats, floats)
def test_fma_rounds_the_exact_result_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if abs(exact) < Fraction(2) ** 127:
        assert float(fma32(a, b, c)) == rounded(exact)


@given(st.floats(-20, 20, width=32), st.floats(-20, 20, width=32), st.integers(-3, 3))
def test_fma_is_exact_near_cancellation(a: float, b: float, ulps: int) -> None:
    c = -np.float32(a) * np.float32(b)
    for _ in range(abs(ulps)):
        c = np.nextafter(c, np.float32(np.inf if ulps > 0 else -np.inf))
    exact = Fraction(a) * Fraction(b) + Fraction(float(c))
    assert float(fma32(a, b, c)) == rounded(exact)


def test_exp2_error_and_edges() -> None:
    t = -np.concatenate([np.linspace(0, 126, 20011), np.arange(0.0, 127.0)]).astype(np.float32)
    exact = np.exp2(t.astype(np.float64))
    assert np.max(np.abs(exp2(t) / exact - 1)) < 1.1 * 2.0**-24
    whole = np.arange(0, -127, -1).astype(np.float32)
    assert np.array_equal(exp2(whole), np.exp2(whole.astype(np.float64)).astype(np.float32))
    tiny = exp2(np.array([-126.5, -127, -150, -1e30, -np.inf], np.float32))
    assert np.array_equal(tiny, np.zeros(5, np.float32)) and not np.signbit(tiny).any()


def test_exp_log_and_silu_errors() -> None:
    x = -np.linspace(0, 87, 30011).astype(np.float32)
    assert np.max(np.abs(exp(x) / np.exp(x.astype(np.float64)) - 1)) < 1.2 * 2.0**-24
    u = np.linspace(2.0**-24, 1 - 2.0**-24, 30011).astype(np.float32)
    u = u[u < 1]
    assert np.max(np.abs(log(u) / np.log(u.astype(np.float64)) - 1)) < 1.5 * 2.0**-24
    s = np.linspace(-60, 60, 30011).astype(np.float32)
    s = s[s != 0]
    want = s / (1 + np.exp(-s.astype(np.float64)))
    assert np.max(np.abs(silu(s) / want - 1)) < 4 * 2.0**-24
    assert silu(np.array([-1e30], np.float32))[0] == 0


def test_pow2_is_exact_and_flushes_below_the_normal_range() -> None:
    d = np.array([0, -1, -126, -127, -(1 << 30)], np.int32)
    assert np.array_equal(pow2(d), np.array([1, 0.5, 2.0**-126, 0, 0], np.float32))


def test_halving_tree_adds_the_upper_half_to_the_lower() -> None:
    lanes = np.array([1, 2.0**-24, 2.0**-24, 2.0**-24], np.float32)
    # (l0 + l2) + (l1 + l3) = 1 + 2^-23; left to right would stay at 1
    assert halving_tree(lanes) == np.float32(1 + 2.0**-23)


@pytest.mark.parametrize("num_columns", [1, 63, 64, 65, 127, 130, 200])
def test_linear_nodes_are_the_written_chains_and_tree(num_columns: int) -> None:
    generator = np.random.default_rng(num_columns)
    x = generator.normal(size=(3, num_columns)).astype(np.float32)
    w = generator.normal(size=(5, num_columns)).astype(np.float32)
    lengths = [min(64, num_columns - s) for s in range(0, num_columns, 64)]
    merges = {1: [0], 2: [0, 1], 3: [0, 1, 1], 4: [0, 1, 0, 2]}[len(lengths)]
    got = linear_nodes(x, w, lengths, merges)[0]
    for m in range(3):
        for n in range(5):
            leaves, start = [], 0
            for length in lengths:
                acc = np.float32(0)
                for k in range(start, start + length):
                    acc = np.float32(fma32(x[m, k], w[n, k], acc))
                leaves.append(acc)
                start += length
            (want,) = merge_nodes(leaves, merges)
            assert got[m, n] == want


def test_a_short_leaf_keeps_its_negative_zero() -> None:
    tiny = np.float32(2.0**-149)
    x = np.array([[0] * 64 + [tiny]], np.float32)
    w = np.array([[0] * 64 + [np.float32(-0.25)]], np.float32)
    nodes = linear_nodes(x, w, [64, 1], [0, 0])
    assert nodes[1, 0, 0] == 0 and math.copysign(1, nodes[1, 0, 0]) == -1
