"""The RoPE table against 80 digits: cos and sin by a Taylor series of our own, in `decimal`."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from anyshard.config import Llama3Scaling, RopeDivisors
from anyshard.ops.rope import cos_sin, inverse_frequencies, rope_table

DIGITS = Context(prec=80)
SPARSE = (0, 1, 2, 3, 31, 32, 33, 63, 64, 127, 257, 1000, 2047, 4095, 8191, 8192, 32767, 131071)
DENSE = tuple(range(0, 512, 3)) + tuple(range(7, 131072, 1511))
NEAR = Decimal(2) ** -50

CASES = [
    (head_dim, theta, SPARSE)
    for head_dim in (16, 64, 80, 128, 256)
    for theta in (1e4, 1e5, 5e5, 1e6)
] + [(64, 1e5, DENSE), (64, 1e6, DENSE)]


@pytest.fixture(autouse=True)
def digits() -> Iterator[None]:
    with localcontext(DIGITS):
        yield


@cache
def half_pi() -> Decimal:
    """Machin: pi/4 = 4 atan(1/5) - atan(1/239)."""

    def arctangent_of_inverse(n: int) -> Decimal:
        term, total, k = Decimal(1) / n, Decimal(0), 0
        while abs(term) > Decimal(10) ** -90:
            total += term / (2 * k + 1) * (-1) ** k
            term, k = term / (n * n), k + 1
        return total

    return 2 * (4 * arctangent_of_inverse(5) - arctangent_of_inverse(239))


def series(x: Decimal, first: Decimal, step: int) -> Decimal:
    """first - first x^2/((step+1)(step+2)) + ..., until terms no longer count."""
    term, total, square = first, first, x * x
    while abs(term) > Decimal(10) ** -85:
        term *= -square / ((step + 1) * (step + 2))
        total, step = total + term, step + 2
    return total


def exact(angle: Decimal) -> tuple[Decimal, Decimal]:
    """(cos, sin) of an angle >= 0."""
    turns = (angle / half_pi()).to_integral_value()
    rest = angle - turns * half_pi()
    cos, sin = series(rest, Decimal(1), 0), series(rest, rest, 1)
    for _ in range(int(turns) % 4):
        cos, sin = -sin, cos
    return cos, sin


def is_nearest(got: np.float32, value: Decimal) -> bool:
    """Whether no neighbour of `got` is nearer to `value`."""
    here = abs(Decimal(float(got)) - value)
    return all(
        here <= abs(Decimal(float(np.nextafter(got, np.float32(side)))) - value)
        for side in (-np.inf, np.inf)
    )


@pytest.mark.parametrize(("head_dim", "theta", "positions"), CASES)
def test_the_table_is_correctly_rounded_and_its_float64_within_2_to_minus_50(
    head_dim: int, theta: float, positions: tuple[int, ...]
) -> None:
    """No entry here lies near enough to a tie to be an exception; more would be a finding."""
    cos, sin = cos_sin(np.array(positions, np.float64), head_dim, theta)
    worst, wrong = Decimal(0), 0
    for i in range(head_dim // 2):
        frequency = Decimal(theta) ** (Decimal(-2 * i) / head_dim)
        for index, position in enumerate(positions):
            for got, value in zip(
                (cos[index, i], sin[index, i]), exact(position * frequency), strict=True
            ):
                wrong += not is_nearest(np.float32(got), value)
                if value:
                    worst = max(worst, abs(Decimal(float(got)) / value - 1))
                else:
                    assert got == 0
    assert worst < NEAR, float(worst)
    assert wrong == 0


def test_the_table_holds_these_values_rounded_once() -> None:
    cos, sin = rope_table(200, 80, 1e4)
    wide_cos, wide_sin = cos_sin(np.arange(200.0), 80, 1e4)
    assert cos.dtype == sin.dtype == np.float32 and cos.shape == (200, 40)
    assert np.array_equal(cos, wide_cos.astype(np.float32))
    assert np.array_equal(sin, wide_sin.astype(np.float32))


def test_a_row_does_not_depend_on_the_length_of_the_table() -> None:
    """Vector lanes and remainders of NumPy give one result."""
    long = rope_table(700, 16, 1e5)
    for positions in (1, 2, 3, 31, 257):
        short = rope_table(positions, 16, 1e5)
        assert all(np.array_equal(a, b[:positions]) for a, b in zip(short, long, strict=True))


# of Llama 3.1, 3.2 and one whose ramp begins and ends inside
LLAMA3 = [
    (128, 5e5, Llama3Scaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0,
                             original_context=8192)),
    (64, 5e5, Llama3Scaling(factor=32.0, low_frequency_factor=1.0, high_frequency_factor=4.0,
                            original_context=8192)),
    (16, 1e4, Llama3Scaling(factor=3.7, low_frequency_factor=0.3, high_frequency_factor=9.5,
                            original_context=777)),
]  # fmt: skip


@pytest.mark.parametrize(("head_dim", "theta", "scaling"), LLAMA3)
def test_waves_are_slowed_by_the_rule_of_llama_3(
    head_dim: int, theta: float, scaling: Llama3Scaling
) -> None:
    """Against 80 digits, by wave lengths, as the published rule has it."""
    high, low = inverse_frequencies(head_dim, theta, scaling)
    plain_high, plain_low = inverse_frequencies(head_dim, theta)
    bounds = scaling.low_frequency_factor, scaling.high_frequency_factor
    kinds = set()
    for i in range(head_dim // 2):
        plain = Decimal(theta) ** (Decimal(-2 * i) / head_dim)
        length = 4 * half_pi() / plain
        longest, shortest = (scaling.original_context / Decimal(bound) for bound in bounds)
        wanted = plain
        if length > longest:
            wanted = plain / Decimal(scaling.factor)
        elif length >= shortest:
            first, last = map(Decimal, bounds)
            smooth = (scaling.original_context / length - first) / (last - first)
            wanted = (1 - smooth) * plain / Decimal(scaling.factor) + smooth * plain
        kinds.add((length > longest, length < shortest))
        got = Decimal(float(high[i])) + Decimal(float(low[i]))
        assert abs(got / wanted - 1) < Decimal(2) ** -104
        if length < shortest:
            assert (high[i], low[i]) == (plain_high[i], plain_low[i])
    assert len(kinds) == 3


def test_divisors_divide_the_frequencies() -> None:
    divisors = tuple(float(np.float32(1 + i / 3)) for i in range(8))
    high, low = inverse_frequencies(16, 1e4, RopeDivisors(divisors=divisors))
    for i, divisor in enumerate(divisors):
        wanted = Decimal(10000) ** (Decimal(-2 * i) / 16) / Decimal(divisor)
        got = Decimal(float(high[i])) + Decimal(float(low[i]))
        assert abs(got / wanted - 1) < Decimal(2) ** -104
    table = rope_table(40, 16, 1e4, RopeDivisors(divisors=divisors))
    plain = rope_table(40, 16, 1e4)
    assert np.array_equal(table[0][:, 0], plain[0][:, 0])  # divided by 1
    assert not np.array_equal(table[0][1:, 1:], plain[0][1:, 1:])


@pytest.mark.parametrize(("head_dim", "theta", "scaling"), LLAMA3)
def test_the_scaled_table_is_correctly_rounded(
    head_dim: int, theta: float, scaling: Llama3Scaling
) -> None:
    cos, sin = rope_table(4096, head_dim, theta, scaling)
    high, low = inverse_frequencies(head_dim, theta, scaling)
    for position in (1, 33, 1000, 4095):
        for i in range(0, head_dim // 2, 5):
            angle = position * (Decimal(float(high[i])) + Decimal(float(low[i])))
            c, s = exact(angle)
            assert is_nearest(cos[position, i], c) and is_nearest(sin[position, i], s)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_the_power_of_a_frequency_is_a_power_of_theta(head_dim: int, theta: float) -> None:
    """f^head_dim * theta^2i = 1, in whole numbers: needs neither logarithm nor exponential."""
    high, low = inverse_frequencies(head_dim, theta)
    for i in range(head_dim // 2):
        frequency = Fraction(float(high[i])) + Fraction(float(low[i]))
        product = frequency**head_dim * Fraction(theta) ** (2 * i)
        assert abs(product - 1) < Fraction(head_dim, 1 << 105)
