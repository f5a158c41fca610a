"""Weights in panels, as they are stored: float32, float16, bfloat16, Q8_0 and int8 blocks.

The dtype of a panel array names its storage: float32 and float16 say it themselves, uint16 holds
bfloat16, uint8 holds Q8_0 blocks. Each value of these is widened to float32 exactly, so a matrix
gives the same bits in arithmetic however it is held. int8 holds the blocks of int8 arithmetic,
which linears multiply as integers (`quant.py`): there storage and arithmetic are one.

Shapes: N outputs, K inputs; panels [ceil(N/8), K, 8], element (n, k) at [n // 8, k, n % 8]. Blocks:
[ceil(N/16), B, 544], each int8 q[8][16][4] then float16 scale[16]; element k of block b of output
n is q[k // 4, n % 16, k % 4] * scale[n % 16]. Q8_0: block b holds inputs 32 b on. int8: a block is
a leaf, so blocks begin anew at every head of o_proj, and what pads a short one is zero. Lanes past
N are zero.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

__all__ = [
    "LANES",
    "Q8_INPUTS",
    "Q8_OUTPUTS",
    "Panels",
    "Storage",
    "num_blocks",
    "numpy_dtype",
    "pack_lanes",
    "pack_q8_0",
    "panel_cut",
    "panel_shape",
    "stored_bytes",
    "unpack",
    "unpack_blocks",
    "unpack_rows",
    "without_padding",
]

LANES: Final = 8
Q8_OUTPUTS: Final = 16
Q8_INPUTS: Final = 32
Q8_BYTES: Final = Q8_OUTPUTS * Q8_INPUTS + 2 * Q8_OUTPUTS

F32 = npt.NDArray[np.float32]
Panels = npt.NDArray[np.float32 | np.float16 | np.uint16 | np.uint8 | np.int8]
Storage = Literal["float32", "float16", "bfloat16", "q8_0", "int8"]
_NUMPY: Final[dict[Storage, np.dtype[Any]]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "q8_0": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
}


def numpy_dtype(storage: Storage) -> np.dtype[Any]:
    """The dtype of a panel array that holds `storage`."""
    return _NUMPY[storage]


def num_blocks(num_columns: int, group: int = 0) -> int:
    """Blocks of int8 in a row whose blocks begin anew after every `group` columns (0: never)."""
    width = group or num_columns
    return num_columns // width * -(-width // Q8_INPUTS)


def panel_shape(
    storage: Storage, num_rows: int, num_columns: int, group: int = 0
) -> tuple[int, int, int]:
    """Shape of the panels of a matrix [num_rows, num_columns]; `group`: see `num_blocks`."""
    if storage == "q8_0":
        return (-(-num_rows // Q8_OUTPUTS), num_columns // Q8_INPUTS, Q8_BYTES)
    if storage == "int8":
        return (-(-num_rows // Q8_OUTPUTS), num_blocks(num_columns, group), Q8_BYTES)
    return (-(-num_rows // LANES), num_columns, LANES)


def panel_cut(panels: Panels, rows: tuple[int, int], columns: tuple[int, int]) -> Panels:
    """The panels of rows and columns (start, stop), as a view: whole panels, a stride of columns.

    Q8_0 cuts at multiples of 16 rows and 32 columns, all else at 8 rows and any column; the end
    of a matrix may be anywhere. Columns of int8 are blocks; rows that begin inside a block (a head
    of 8 dims) are copied.
    """
    if panels.dtype == np.int8:
        blocks = panels[:, columns[0] : columns[1]]
        if rows[0] % Q8_OUTPUTS:
            return _shifted(blocks, rows)
        return blocks[rows[0] // Q8_OUTPUTS : -(-rows[1] // Q8_OUTPUTS)]
    outputs, inputs = (Q8_OUTPUTS, Q8_INPUTS) if panels.dtype == np.uint8 else (LANES, 1)
    assert rows[0] % outputs == 0, f"a cut at row {rows[0]}"
    assert columns[0] % inputs == columns[1] % inputs == 0, f"a cut at columns {columns}"
    return panels[
        rows[0] // outputs : -(-rows[1] // outputs), columns[0] // inputs : columns[1] // inputs
    ]


def _shifted(blocks: npt.NDArray[Any], rows: tuple[int, int]) -> npt.NDArray[np.int8]:
    """New blocks of rows that begin anywhere."""
    q, scale = unpack_blocks(blocks, np.arange(*rows))
    return pack_q8_0(q.reshape(len(q), -1), scale).view(np.int8)


def stored_bytes(storage: Storage, num_elements: int) -> int:
    """Bytes of so many weights, without padding lanes; int8: of those that blocks hold."""
    if storage in ("q8_0", "int8"):
        return num_elements // Q8_INPUTS * (Q8_INPUTS + 2)
    return num_elements * _NUMPY[storage].itemsize


def unpack(panels: Panels, rows: int | npt.NDArray[np.integer[Any]]) -> F32:
    """The first `rows` outputs of panels, or those of that list, widened: [rows, K].

    Of int8 blocks K counts what pads them: [rows, 32 B].
    Held by: test_native_storage.py.
    """
    index = np.arange(rows) if isinstance(rows, int) else rows
    if panels.dtype in (np.uint8, np.int8):
        q, scale = unpack_blocks(panels, index)
        wide = scale.astype(np.float32)[:, :, None] * q.astype(np.float32)
        return wide.reshape(len(index), -1)
    values = panels[index // LANES, :, index % LANES]
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.ascontiguousarray(values, np.float32)


def unpack_blocks(
    panels: npt.NDArray[Any], index: npt.NDArray[np.integer[Any]]
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """q [rows, B, 32] and scales [rows, B] of the outputs of that list, from blocks."""
    blocks = panels[index // Q8_OUTPUTS]  # [rows, B, 544]
    row, lane = np.arange(len(index)), index % Q8_OUTPUTS
    count = blocks.shape[1]
    values = np.ascontiguousarray(blocks[:, :, : Q8_OUTPUTS * Q8_INPUTS]).view(np.int8)
    scales = np.ascontiguousarray(blocks[:, :, Q8_OUTPUTS * Q8_INPUTS :]).view(np.float16)
    q = values.reshape(len(index), count, LANES, Q8_OUTPUTS, 4)[row, :, :, lane]
    scale = scales.reshape(len(index), count, Q8_OUTPUTS)[row, :, lane]
    return q.reshape(len(index), count, Q8_INPUTS), scale


def unpack_rows(blocks: npt.NDArray[Any], start: int, stop: int) -> F32:
    """Outputs start:stop of blocks, widened: [stop - start, 32 B]; the bits of `unpack`."""
    first = start // Q8_OUTPUTS
    part = blocks[first : -(-stop // Q8_OUTPUTS)]
    pairs, count = part.shape[:2]
    values = np.ascontiguousarray(part[:, :, : Q8_OUTPUTS * Q8_INPUTS]).view(np.int8)
    scales = np.ascontiguousarray(part[:, :, Q8_OUTPUTS * Q8_INPUTS :]).view(np.float16)
    q = values.reshape(pairs, count, LANES, Q8_OUTPUTS, 4).transpose(0, 3, 1, 2, 4)
    scale = scales.reshape(pairs, count, Q8_OUTPUTS).transpose(0, 2, 1).astype(np.float32)
    wide = q.astype(np.float32) * scale[:, :, :, None, None]
    rows = wide.reshape(pairs * Q8_OUTPUTS, count * Q8_INPUTS)
    return rows[start - first * Q8_OUTPUTS : stop - first * Q8_OUTPUTS]


def without_padding(wide: F32, num_columns: int, group: int = 0) -> F32:
    """Unpacked int8 [rows, 32 B] without what pads its short blocks: [rows, num_columns]."""
    width = group or num_columns
    padded = wide.reshape(len(wide), num_columns // width, -1)
    return np.ascontiguousarray(padded[:, :, :width]).reshape(len(wide), num_columns)


def pack_lanes(weight_NK: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[N, K] of any dtype as [ceil(N/8), K, 8]; the values are not touched."""
    num_rows, num_columns = weight_NK.shape
    padded = np.zeros((-(-num_rows // LANES) * LANES, num_columns), weight_NK.dtype)
    padded[:num_rows] = weight_NK
    return np.ascontiguousarray(padded.reshape(-1, LANES, num_columns).transpose(0, 2, 1))


def pack_q8_0(
    q_NK: npt.NDArray[np.int8], scale_NB: npt.NDArray[np.float16]
) -> npt.NDArray[np.uint8]:
    """q [N, K] and scale [N, K/32] as blocks [ceil(N/16), K/32, 544]."""
    num_rows, num_columns = q_NK.shape
    num_pairs, count = -(-num_rows // Q8_OUTPUTS), num_columns // Q8_INPUTS
    q = np.zeros((num_pairs * Q8_OUTPUTS, num_columns), np.int8)
    scale = np.zeros((num_pairs * Q8_OUTPUTS, count), np.float16)
    q[:num_rows], scale[:num_rows] = q_NK, scale_NB
    packed = np.empty((num_pairs, count, Q8_BYTES), np.uint8)
    groups = q.reshape(num_pairs, Q8_OUTPUTS, count, LANES, 4).transpose(0, 2, 3, 1, 4)
    packed[:, :, : Q8_OUTPUTS * Q8_INPUTS] = groups.reshape(num_pairs, count, -1).view(np.uint8)
    lanes = scale.reshape(num_pairs, Q8_OUTPUTS, count).transpose(0, 2, 1)
    packed[:, :, Q8_OUTPUTS * Q8_INPUTS :] = np.ascontiguousarray(lanes).view(np.uint8)
    return packed
