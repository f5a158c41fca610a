"""The constants: what they approximate, how well, and that the profile hash covers each."""

from __future__ import annotations

import hashlib
import math
import re
import runpy
from collections.abc import Iterator, Sequence
from decimal import Context, Decimal, localcontext
from pathlib import Path

import numpy as np
import pytest

from anyshard.config import Arithmetic, KvType
from anyshard.loading import profile_of
from anyshard.ops import coefficients, kv_pages, quant

ROOT = Path(__file__).resolve().parent.parent
GRID = 5000
FLOAT64 = ("LOG2_E", "ROPE_")  # the others are exact in float32


@pytest.fixture(autouse=True)
def digits() -> Iterator[None]:
    with localcontext(Context(prec=60)):
        yield


def polynomial(values: Sequence[float], x: Decimal) -> Decimal:
    """In the exact arithmetic of 60 digits."""
    result = Decimal(0)
    for value in reversed(values):
        result = result * x + Decimal(value)
    return result


def grid(low: Decimal, high: Decimal) -> list[Decimal]:
    """Both ends and what lies between."""
    return [low + (high - low) * j / GRID for j in range(GRID + 1)]


def constants() -> dict[str, object]:
    return {name: getattr(coefficients, name) for name in coefficients.__all__ if name.isupper()}


def test_the_exp2_polynomial_is_within_2_to_minus_32() -> None:
    log2 = Decimal(2).ln()
    assert all(
        abs(polynomial(coefficients.EXP2_COEFFICIENTS, f) / (f * log2).exp() - 1)
        < Decimal(2) ** -32
        for f in grid(Decimal("-0.5"), Decimal("0.5"))
    )


def test_the_log_polynomial_is_within_2_to_minus_30() -> None:
    root = Decimal(2).sqrt()
    for f in grid(1 / root - 1, root - 1):
        if f:
            got = f - f * f / 2 + f**3 * polynomial(coefficients.LOG_COEFFICIENTS, f)
            assert abs(got / (1 + f).ln() - 1) < Decimal(2) ** -30


def test_constants_in_parts_add_up_to_what_they_stand_for() -> None:
    log2 = Decimal(2).ln()
    high, low = Decimal(coefficients.LOG2E_HI), Decimal(coefficients.LOG2E_LO)
    assert abs((high + low) * log2 - 1) < Decimal(2) ** -50
    high, low = Decimal(coefficients.LN2_HI), Decimal(coefficients.LN2_LO)
    assert abs((high + low) / log2 - 1) < Decimal(2) ** -43
    assert abs(Decimal(coefficients.LOG2_E) * log2 - 1) < Decimal(2) ** -53
    for exponent in range(-150, 129):  # its product with an exponent is exact
        product = exponent * coefficients.LN2_HI
        assert float(np.float32(product)) == product


def test_taylor_coefficients_are_inverse_factorials() -> None:
    for index, value in enumerate(coefficients.ROPE_SIN, start=1):
        assert value == (-1) ** index / math.factorial(2 * index + 1)
    for index, value in enumerate(coefficients.ROPE_COS, start=2):
        assert value == (-1) ** index / math.factorial(2 * index)


@pytest.mark.parametrize("name", [n for n in constants() if not n.startswith(FLOAT64)])
def test_what_a_kernel_reads_is_exact_in_float32(name: str) -> None:
    value = constants()[name]
    for each in value if isinstance(value, tuple) else (value,):
        assert float(np.float32(each)) == each


PROFILES: list[tuple[Arithmetic, KvType]] = [
    ("f32", "f32"),
    ("f32", "int8"),
    ("int8", "f32"),
    ("int8", "int8"),
]


@pytest.mark.parametrize("name", constants())
def test_every_profile_changes_with_every_constant(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the last bit, and of the last element."""
    before = [profile_of(*each).sha256() for each in PROFILES]
    value = constants()[name]
    changed: object
    if isinstance(value, tuple):
        changed = (*value[:-1], math.nextafter(value[-1], 9.0))
    elif isinstance(value, float):
        changed = math.nextafter(value, 9.0)
    else:
        assert isinstance(value, int)
        changed = value + 1
    monkeypatch.setattr(coefficients, name, changed)
    after = [profile_of(*each).sha256() for each in PROFILES]
    assert all(a != b for a, b in zip(before, after, strict=True))


def test_every_constant_of_the_file_is_in_the_hash() -> None:
    assert len(coefficients.constants_sha256()) == len(hashlib.sha256().hexdigest())
    assert set(constants()) == {name for name in vars(coefficients) if name.isupper()}


# Where C++ has the constants that reference bodies read by name; polynomials stand in arrays.
WRITTEN = {
    "SCORE_LIMIT": "float kScoreLimit = 0x1.0000000000000p+20f;",
    "KV_LEAST_WEIGHT": "float kKvLeastWeight = 0x1.0000000000000p-100f;",
    "KV_BLOCK": "int kBlock = 32;",
    "STRIPES": "int kStripes = 8;",
    "NORM_LANES": "int kNormLanes = 32;",
    "INT8_MOST": "int kInt8Most = 127;",
    "KV_GROUP": "int kKvGroup = 32;",
    "KV_WHOLE": "int kKvWhole = 32767;",
}


def test_constants_of_attention_and_int8_are_written_for_cpp_and_copied_nowhere() -> None:
    write = runpy.run_path(str(ROOT / "cmake" / "write_coefficients.py"))
    text = write["header"](coefficients.__file__)
    for name, line in WRITTEN.items():
        assert f"constexpr {line}" in text, name
    names = "|".join(line.split()[1] for line in WRITTEN.values())
    copy = re.compile(rf"constexpr \w+ ({names}|kWhole) |\b127\.0f|\b32767|0x1p-100f|0x1p20f")
    sources = sorted((ROOT / "src" / "anyshard" / "_native").glob("*.[hc]*"))
    assert len(sources) > 30
    for path in sources:
        for line in path.read_text("utf-8").splitlines():
            assert not copy.search(line.split("//")[0]), f"{path.name}: {line}"
    for module in (kv_pages, quant):
        own = {name for name in vars(module) if name.isupper() and len(name) > 3}
        assert own <= {*constants(), "Q8_INPUTS"}, own
