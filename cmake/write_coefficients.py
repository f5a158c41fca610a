"""Write coefficients.h from ops/coefficients.py: `write_coefficients.py SOURCE TARGET`.

Run by CMake, so that the constants stand in one file only. Refuses a value that float32 cannot
hold exactly.
"""

from __future__ import annotations

import runpy
import struct
import sys
from collections.abc import Sequence
from pathlib import Path


def literal(value: float) -> str:
    """A C++ float literal with the same bits."""
    (stored,) = struct.unpack("<f", struct.pack("<f", value))
    if stored != value:
        raise SystemExit(f"{value.hex()} is not a float32")
    return f"{value.hex()}f"


def array(name: str, values: Sequence[float]) -> str:
    """One constexpr array."""
    return f"constexpr float {name}[] = {{{', '.join(map(literal, values))}}};"


def header(source: str) -> str:
    """The text of coefficients.h."""
    constants = runpy.run_path(source)
    exp2, log = constants["EXP2_COEFFICIENTS"], constants["LOG_COEFFICIENTS"]
    if len(exp2) != 8:
        raise SystemExit(f"EXP2_COEFFICIENTS has {len(exp2)} values; the kernel takes 8")
    scalars = {
        "kLog2eHigh": "LOG2E_HI",
        "kLog2eLow": "LOG2E_LO",
        "kLn2High": "LN2_HI",
        "kLn2Low": "LN2_LO",
        "kScoreLimit": "SCORE_LIMIT",
        "kKvLeastWeight": "KV_LEAST_WEIGHT",
    }
    counts = {
        "kBlock": "KV_BLOCK",
        "kStripes": "STRIPES",
        "kNormLanes": "NORM_LANES",
        "kInt8Most": "INT8_MOST",
        "kKvGroup": "KV_GROUP",
        "kKvWhole": "KV_WHOLE",
    }
    lines = [
        "// Written by write_coefficients.py from ops/coefficients.py.",
        "#pragma once",
        "namespace anyshard {",
        "namespace coefficients {",
        array("kExp2", exp2),
        array("kLog", log),
        f"constexpr int kNumLog = {len(log)};",
        *(f"constexpr float {name} = {literal(constants[key])};" for name, key in scalars.items()),
        *(f"constexpr int {name} = {constants[key]};" for name, key in counts.items()),
        "}  // namespace coefficients",
        "}  // namespace anyshard",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(header(sys.argv[1]))
