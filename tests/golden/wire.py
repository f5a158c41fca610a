"""Golden vectors of int8 wires: what rows become, and their bytes, on inputs made of integers.

    python tests/golden/wire.py            compare with wire_int8.json beside this file
    python tests/golden/wire.py --write    write it again, from the reference bodies

The rules are those of `make.py`, which has no room for more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
from golden.make import HERE, PROFILE_KEY, Vectors, hashed, texts
from numpy.typing import NDArray

from anyshard.config import Profile
from anyshard.ops import reference
from anyshard.ops.coefficients import constants_sha256
from anyshard.ops.wire import wire_row_bytes

Found = dict[str, NDArray[Any]]
PATH = HERE / "wire_int8.json"
WIDTHS = (31, 33, 72)


def profile_sha256() -> str:
    """The profile that the vectors are of."""
    return Profile(constants_sha256=constants_sha256(), wire="int8").sha256()


def wires(module: Any, pool: Any, widths: Iterable[int] = WIDTHS, rows: int = 3) -> Found:
    """Rows before, after and on the wire, and what comes out of it."""
    found: Found = {}
    for width in widths:
        x = hashed(width, rows, width, binades=4)
        x[1::2] *= np.float32(2.0**-22)  # scales that are subnormal in float16
        found[f"x_{width}"] = x.copy()
        wire = np.zeros((rows, wire_row_bytes("int8", width)), np.uint8)
        module.RoundWire(pool, x, wire).run(rows)
        out = np.zeros_like(x)
        module.DecodeWire(pool, wire, out).run(rows)
        found |= {f"rounded_{width}": x, f"wire_{width}": wire, f"decoded_{width}": out}
    return found


def vectors(module: Any, pool: Any) -> Vectors:
    """The same as the file has it."""
    return texts(wires(module, pool))


def stored() -> Vectors:
    """The vectors of the file. Raises: ValueError if it is of another profile."""
    loaded: dict[str, Any] = json.loads(PATH.read_text("utf-8"))
    if loaded.pop(PROFILE_KEY) != profile_sha256():
        raise ValueError("wire_int8.json is of another profile than the code computes")
    return loaded


def main() -> int:
    """Compare, or write."""
    made = vectors(reference, reference.Pool())
    if "--write" not in sys.argv[1:]:
        return 0 if made == stored() else 4
    rows = {PROFILE_KEY: profile_sha256(), **made}
    lines = [f" {json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items()]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
