"""Weights in panels, as they are stored: float32, float16, bfloat16 and Q8_0 blocks.

The dtype of a panel array names its storage: float32 and float16 say it themselves, uint16 holds
bfloat16, uint8 holds Q8_0 blocks. Each value is widened to float32 exactly, so a matrix gives the
same bits in arithmetic however it is held.

Shapes: N outputs, K inputs; panels [ceil(N/8), K, 8], element (n, k) at [n // 8, k, n % 8]. Q8_0:
[ceil(N/16), K/32, 544], a block is int8 q[8][16][4] then float16 scale[16]; element (n, k) is
q[k % 32 // 4, n % 16, k % 4] * scale[n % 16]. Lanes past N are zero.
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
    "numpy_dtype",
    "pack_lanes",
    "pack_q8_0",
    "panel_cut",
    "panel_shape",
    "stored_bytes",
    "unpack",
]

LANES: Final = 8
Q8_OUTPUTS: Final = 16
Q8_INPUTS: Final = 32
Q8_BYTES: Final = Q8_OUTPUTS * Q8_INPUTS + 2 * Q8_OUTPUTS

F32 = npt.NDArray[np.float32]
Panels = npt.NDArray[np.float32 | np.float16 | np.uint16 | np.uint8]
Storage = Literal["float32", "float16", "bfloat16", "q8_0"]
_NUMPY: Final[dict[Storage, np.dtype[Any]]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "q8_0": np.dtype(np.uint8),
}


def numpy_dtype(storage: Storage) -> np.dtype[Any]:
    """The dtype of a panel array that holds `storage`."""
    return _NUMPY[storage]


def panel_shape(storage: Storage, num_rows: int, num_columns: int) -> tuple[int, int, int]:
    """Shape of the panels of a matrix [num_rows, num_columns]."""
    if storage == "q8_0":
        return (-(-num_rows // Q8_OUTPUTS), num_columns // Q8_INPUTS, Q8_BYTES)
    return (-(-num_rows // LANES), num_columns, LANES)


def panel_cut(panels: Panels, rows: tuple[int, int], columns: tuple[int, int]) -> Panels:
    """The panels of rows and columns (start, stop), as a view: whole panels, a stride of columns.

    Q8_0 cuts at multiples of 16 rows and 32 columns, all else at 8 rows and any column; the end
    of a matrix may be anywhere.
    """
    outputs, inputs = (Q8_OUTPUTS, Q8_INPUTS) if panels.dtype == np.uint8 else (LANES, 1)
    assert rows[0] % outputs == 0, f"a cut at row {rows[0]}"
    assert columns[0] % inputs == columns[1] % inputs == 0, f"a cut at columns {columns}"
    return panels[
        rows[0] // outputs : -(-rows[1] // outputs), columns[0] // inputs : columns[1] // inputs
    ]


def stored_bytes(storage: Storage, num_elements: int) -> int:
    """Bytes of so many weights, without padding lanes."""
    if storage == "q8_0":
        return num_elements // Q8_INPUTS * (Q8_INPUTS + 2)
    return num_elements * _NUMPY[storage].itemsize


def unpack(panels: Panels, rows: int | npt.NDArray[np.integer[Any]]) -> F32:
    """The first `rows` outputs of panels, or those of that list, widened: [rows, K].

    Held by: test_native_storage.py.
    """
    index = np.arange(rows) if isinstance(rows, int) else rows
    if panels.dtype == np.uint8:
        return _unpack_q8_0(panels.view(np.uint8), index)
    values = panels[index // LANES, :, index % LANES]
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.ascontiguousarray(values, np.float32)


def _unpack_q8_0(panels: npt.NDArray[np.uint8], index: npt.NDArray[np.integer[Any]]) -> F32:
    blocks = panels[index // Q8_OUTPUTS]  # [rows, K/32, 544]
    row, lane = np.arange(len(index)), index % Q8_OUTPUTS
    num_blocks = blocks.shape[1]
    values = np.ascontiguousarray(blocks[:, :, : Q8_OUTPUTS * Q8_INPUTS]).view(np.int8)
    scales = np.ascontiguousarray(blocks[:, :, Q8_OUTPUTS * Q8_INPUTS :]).view(np.float16)
    q = values.reshape(len(index), num_blocks, LANES, Q8_OUTPUTS, 4)[row, :, :, lane]
    scale = scales.reshape(len(index), num_blocks, Q8_OUTPUTS)[row, :, lane].astype(np.float32)
    wide = scale[:, :, None] * q.reshape(len(index), num_blocks, Q8_INPUTS).astype(np.float32)
    return wide.reshape(len(index), -1)


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
    num_pairs, num_blocks = -(-num_rows // Q8_OUTPUTS), num_columns // Q8_INPUTS
    q = np.zeros((num_pairs * Q8_OUTPUTS, num_columns), np.int8)
    scale = np.zeros((num_pairs * Q8_OUTPUTS, num_blocks), np.float16)
    q[:num_rows], scale[:num_rows] = q_NK, scale_NB
    packed = np.empty((num_pairs, num_blocks, Q8_BYTES), np.uint8)
    groups = q.reshape(num_pairs, Q8_OUTPUTS, num_blocks, LANES, 4).transpose(0, 2, 3, 1, 4)
    packed[:, :, : Q8_OUTPUTS * Q8_INPUTS] = groups.reshape(num_pairs, num_blocks, -1).view(
        np.uint8
    )
    lanes = scale.reshape(num_pairs, Q8_OUTPUTS, num_blocks).transpose(0, 2, 1)
    packed[:, :, Q8_OUTPUTS * Q8_INPUTS :] = np.ascontiguousarray(lanes).view(np.uint8)
    return packed
