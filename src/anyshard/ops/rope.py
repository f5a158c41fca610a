"""The RoPE table: cos and sin by absolute position, the same float32 bits on every host.

inv_freq comes from 60-digit decimals; the angle is a double-double; reduction and polynomials
use float64 +, - and * only, so no libm decides a bit. Knows nothing of models.
"""

from __future__ import annotations

from decimal import Context, Decimal, localcontext

import numpy as np
import numpy.typing as npt

from anyshard.config import Llama3Scaling, RopeDivisors
from anyshard.ops.coefficients import (
    ROPE_COS,
    ROPE_DIGITS,
    ROPE_HALF_PI,
    ROPE_SIN,
    ROPE_TWO_OVER_PI,
)
from anyshard.ops.exact import F32

__all__ = ["rope_table"]

F64 = npt.NDArray[np.float64]

_SPLIT = float((1 << 27) + 1)  # halves of a product; any such split gives the same bits


Scaling = Llama3Scaling | RopeDivisors | None


def inverse_frequencies(head_dim: int, theta: float, scaling: Scaling = None) -> tuple[F64, F64]:
    """theta^(-2i/head_dim) for i < head_dim/2, scaled, as high and low float64.

    Held by: test_rope.py::test_the_power_of_a_frequency_is_a_power_of_theta and those after it.
    """
    high = np.empty(head_dim // 2)
    low = np.empty(head_dim // 2)
    with localcontext(Context(prec=ROPE_DIGITS)):
        log_theta = Decimal(theta).ln()
        for i in range(head_dim // 2):
            value = (log_theta * Decimal(-2 * i) / Decimal(head_dim)).exp()
            if isinstance(scaling, RopeDivisors):
                value /= Decimal(scaling.divisors[i])
            elif scaling is not None:
                value = _slowed(value, scaling)
            high[i] = float(value)
            low[i] = float(value - Decimal(float(high[i])))
    return high, low


def _slowed(frequency: Decimal, scaling: Llama3Scaling) -> Decimal:
    """Llama 3.1's rule for one inverse frequency, to the digits of the context.

    A wave is 2 pi / frequency long; `waves` of it fit into the original context.
    """
    two_pi = 4 * sum(map(Decimal, ROPE_HALF_PI), Decimal(0))  # to 49 digits
    waves = Decimal(scaling.original_context) * frequency / two_pi
    low, high = Decimal(scaling.low_frequency_factor), Decimal(scaling.high_frequency_factor)
    if waves > high:
        return frequency
    slow = frequency / Decimal(scaling.factor)
    if waves < low:
        return slow
    ramp = (waves - low) / (high - low)
    return (1 - ramp) * slow + ramp * frequency


def _two_product(a: F64, b: F64 | float) -> tuple[F64, F64]:
    product = a * b
    scaled_a, scaled_b = a * _SPLIT, b * _SPLIT
    a_high = scaled_a - (scaled_a - a)
    b_high = scaled_b - (scaled_b - b)
    a_low, b_low = a - a_high, b - b_high
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, error


def _two_sum(a: F64, b: F64) -> tuple[F64, F64]:
    total = a + b
    virtual = total - a
    return total, (a - (total - virtual)) + (b - virtual)


def _reduced(position: F64, high: F64, low: F64) -> tuple[npt.NDArray[np.int64], F64, F64]:
    """Quadrant, and the angle modulo pi/2 as a double-double in about [-pi/4, pi/4]."""
    angle, angle_error = _two_product(high, position)
    angle, angle_error = _two_sum(angle, angle_error + low * position)
    turns = np.rint(angle * ROPE_TWO_OVER_PI)
    rest, rest_error = angle, angle_error
    for part in ROPE_HALF_PI:
        product, error = _two_product(turns, part)
        rest, carry = _two_sum(rest, -product)
        rest_error = rest_error + carry - error
    rest, rest_error = _two_sum(rest, rest_error)
    return turns.astype(np.int64) & 3, rest, rest_error


def _polynomial(coefficients: tuple[float, ...], x: F64) -> F64:
    result = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + coefficient
    return result


def rope_table(
    positions: int, head_dim: int, theta: float, scaling: Scaling = None
) -> tuple[F32, F32]:
    """(cos, sin) of positions 0..positions-1, each [positions, head_dim/2] float32.

    The float32 is the correctly rounded one, except where the true value lies within 2^-50 of a
    tie. Source: docs/numerics.md, RoPE. Held by: test_rope.py (against 80 digits).
    """
    cos, sin = cos_sin(np.arange(positions, dtype=np.float64), head_dim, theta, scaling)
    return cos.astype(np.float32), sin.astype(np.float32)


def cos_sin(
    position_P: F64, head_dim: int, theta: float, scaling: Scaling = None
) -> tuple[F64, F64]:
    """(cos, sin) [P, head_dim/2] before the rounding to float32; relative error below 2^-50.

    Positions are whole numbers below 2^24. Held by: test_rope.py.
    """
    high, low = inverse_frequencies(head_dim, theta, scaling)
    quadrant, r, r_low = _reduced(position_P[:, None], high[None, :], low[None, :])
    square = r * r
    sin = (r * square) * _polynomial(ROPE_SIN, square) + r_low + r
    cos = (square * square) * _polynomial(ROPE_COS, square) - (0.5 * square + r * r_low) + 1.0
    swap = (quadrant & 1) == 1
    cos_sign = np.where((quadrant == 1) | (quadrant == 2), -1.0, 1.0)
    sin_sign = np.where(quadrant >= 2, -1.0, 1.0)
    return np.where(swap, sin, cos) * cos_sign, np.where(swap, cos, sin) * sin_sign
