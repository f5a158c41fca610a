"""Every constant that decides a bit, once: hex floats and whole numbers.

The profile hash covers all of them. CMake writes the C++ header from this file, so native and
reference bodies read one source; it must import nothing of the package. Bounds are of a polynomial
in exact arithmetic, before its float steps round, over the whole reduced range.

Held by: test_coefficients.py (the bounds against 60 digits; that the hash covers each).
"""

from __future__ import annotations

import hashlib
import json

__all__ = [
    "EXP2_COEFFICIENTS",
    "INT8_MOST",
    "KV_BLOCK",
    "KV_GROUP",
    "KV_LEAST_WEIGHT",
    "KV_WHOLE",
    "LN2_HI",
    "LN2_LO",
    "LOG2E_HI",
    "LOG2E_LO",
    "LOG2_E",
    "LOG_COEFFICIENTS",
    "NORM_LANES",
    "ROPE_COS",
    "ROPE_DIGITS",
    "ROPE_HALF_PI",
    "ROPE_SIN",
    "ROPE_TWO_OVER_PI",
    "SCORE_LIMIT",
    "STRIPES",
    "constants_sha256",
]


def _floats(*texts: str) -> tuple[float, ...]:
    return tuple(float.fromhex(text) for text in texts)


# --- float32 ------------------------------------------------------------------------------------

# 2^f on [-1/2, 1/2], c0 + c1 f + ... + c7 f^7; relative error below 2^-32.
EXP2_COEFFICIENTS = _floats(
    "0x1.0p+0",
    "0x1.62e430p-1",
    "0x1.ebfbe0p-3",
    "0x1.c6b072p-5",
    "0x1.3b2a4ap-7",
    "0x1.5da0f4p-10",
    "0x1.44227cp-13",
    "0x1.e5ba06p-17",
)

# log(1+f) = f - f^2/2 + f^3 P(f) on [sqrt(1/2)-1, sqrt(2)-1]; relative error below 2^-30.
LOG_COEFFICIENTS = _floats(
    "0x1.555546p-2",
    "-0x1.00000ap-2",
    "0x1.99a546p-3",
    "-0x1.555ae4p-3",
    "0x1.232cfap-3",
    "-0x1.fc4da0p-4",
    "0x1.e7a54ep-4",
    "-0x1.dd6510p-4",
    "0x1.11c874p-4",
)

# log2(e) as the sum of two float32.
LOG2E_HI, LOG2E_LO = _floats("0x1.715476p+0", "0x1.4ae0c0p-26")

# log(2) as a float32 of 15 bits, so that its product with an exponent is exact, and the rest.
LN2_HI, LN2_LO = _floats("0x1.62e4p-1", "0x1.7f7d1cp-20")

# A score beyond it, to either side, is a fault of its row.
SCORE_LIMIT = float.fromhex("0x1.0p+20")

# Over int8 values: a page and group whose weights are no larger add nothing.
KV_LEAST_WEIGHT = float.fromhex("0x1.0p-100")

# --- float64: taken once, at bind ---------------------------------------------------------------

# q is scaled by float32(LOG2_E / sqrt(head_dim)).
LOG2_E = float.fromhex("0x1.71547652b82fep+0")

# Decimal digits in which inverse frequencies are computed.
ROPE_DIGITS = 60
ROPE_TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")
# pi/2 in three parts
ROPE_HALF_PI = _floats("0x1.921fb54442d18p+0", "0x1.1a62633145c07p-54", "-0x1.f1976b7ed8fbcp-110")
# Taylor on [-pi/4, pi/4], x^3, x^5, ... and x^4, x^6, ...; left out: below 2^-57 of the result.
ROPE_SIN = _floats(
    "-0x1.5555555555555p-3",
    "0x1.1111111111111p-7",
    "-0x1.a01a01a01a01ap-13",
    "0x1.71de3a556c734p-19",
    "-0x1.ae64567f544e4p-26",
    "0x1.6124613a86d09p-33",
    "-0x1.ae7f3e733b81fp-41",
    "0x1.952c77030ad4ap-49",
)
ROPE_COS = _floats(
    "0x1.5555555555555p-5",
    "-0x1.6c16c16c16c17p-10",
    "0x1.a01a01a01a01ap-16",
    "-0x1.27e4fb7789f5cp-22",
    "0x1.1eed8eff8d898p-29",
    "-0x1.93974a8c07c9dp-37",
    "0x1.ae7f3e733b81fp-45",
    "-0x1.6827863b97d97p-53",
)

# --- counts -------------------------------------------------------------------------------------

KV_BLOCK = 32  # tokens of a block of keys and values
STRIPES = 8  # independent softmax states of a row and head, merged in a tree
NORM_LANES = 32  # chains of a sum of squares
INT8_MOST = 127  # largest magnitude of q in int8: weights, rows, keys and values
KV_GROUP = 32  # dims of a head that share a scale in an int8 page
KV_WHOLE = 32767  # largest query, or weight, as a whole number over int8 keys and values


def constants_sha256() -> str:
    """Hash of every constant that `__all__` names, hex; part of the profile."""
    named = {name: globals()[name] for name in __all__ if name.isupper()}
    return hashlib.sha256(json.dumps(_exact(named), sort_keys=True).encode()).hexdigest()


def _exact(value: object) -> object:
    """The same with floats as their hex texts."""
    if isinstance(value, dict):
        return {name: _exact(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return [_exact(each) for each in value]
    return value.hex() if isinstance(value, float) else value
