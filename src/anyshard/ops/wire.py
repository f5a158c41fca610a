"""Residual rows as int8 wires carry them, and what the wire makes of a row.

A row of D floats is D int8, then a float16 scale for every 32 of them (the last block may be
short): scale = float16(amax / 127), q = rint(x / scale) clamped to +-127, as for keys and values
(`ops/kv_pages.py`). A block with an infinity or NaN, or too large for such a scale, comes out as
NaN, so that the next norm sees it. Rounding a row and sending it are one function, so a boundary
inside a stage and one between stages give the same bits.

Shapes: M rows, D hidden, B bytes of a row on the wire.
Source: docs/numerics.md, Wire int8. Held by: test_wire_int8.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from anyshard.config import WireType
from anyshard.ops.exact import F32, FLOAT_BYTES
from anyshard.ops.kv_pages import KV_GROUP, quantize_groups

__all__ = ["U8", "DecodeWire", "RoundWire", "decode_rows", "encode_rows", "wire_row_bytes"]

U8 = npt.NDArray[np.uint8]


def wire_row_bytes(wire: WireType, hidden: int) -> int:
    """Of a row of `hidden` floats between stages: 2304 for 576, in int8 612."""
    return hidden + 2 * -(-hidden // KV_GROUP) if wire == "int8" else FLOAT_BYTES * hidden


def encode_rows(x_MD: F32) -> U8:
    """[M, B]: rows as int8 wires carry them."""
    q_MD, scale_MG = quantize_groups(x_MD)
    scales = scale_MG.astype("<f2").view(np.uint8)
    return np.concatenate([q_MD.view(np.uint8), scales], axis=1)


def decode_rows(rows_MB: npt.NDArray[Any], hidden: int) -> F32:
    """[M, D]: what comes out; q times scale, which is exact."""
    q_MD = np.ascontiguousarray(rows_MB[:, :hidden]).view(np.int8)
    scales = np.ascontiguousarray(rows_MB[:, hidden:]).view("<f2").astype(np.float32)
    decoded: F32 = q_MD * np.repeat(scales, KV_GROUP, axis=1)[:, :hidden]
    return decoded


class RoundWire:
    """Rows of x become what the wire makes of them; where one is given, they are written to it."""

    def __init__(self, pool: Any, x: F32, wire: U8 | None = None) -> None:
        self.x, self.wire = x, wire

    def run(self, rows: int) -> None:
        """Round x[:rows]."""
        encoded = encode_rows(self.x[:rows])
        self.x[:rows] = decode_rows(encoded, self.x.shape[1])
        if self.wire is not None:
            self.wire[:rows] = encoded


class DecodeWire:
    """Rows of x from what the wire has brought."""

    def __init__(self, pool: Any, wire: U8, x: F32) -> None:
        self.wire, self.x = wire, x

    def run(self, rows: int) -> None:
        """Fill x[:rows]."""
        self.x[:rows] = decode_rows(self.wire[:rows], self.x.shape[1])
