"""The constants of the polynomials, once: hex floats, each exact in float32.

CMake writes the C++ header from this file, so native and reference bodies read one source; the
profile hash covers it. Bounds are of the polynomial in exact arithmetic, before the float32
Horner steps round; they were taken over the whole reduced range with 60 digits.
"""

from __future__ import annotations

import hashlib
import json

__all__ = [
    "EXP2_COEFFICIENTS",
    "LN2_HI",
    "LN2_LO",
    "LOG2E_HI",
    "LOG2E_LO",
    "LOG_COEFFICIENTS",
    "constants_sha256",
]


def _floats(*texts: str) -> tuple[float, ...]:
    return tuple(float.fromhex(text) for text in texts)


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


def constants_sha256() -> str:
    """Hash of every constant above, hex; part of the profile."""
    values = [*EXP2_COEFFICIENTS, *LOG_COEFFICIENTS, LOG2E_HI, LOG2E_LO, LN2_HI, LN2_LO]
    return hashlib.sha256(json.dumps([value.hex() for value in values]).encode()).hexdigest()
