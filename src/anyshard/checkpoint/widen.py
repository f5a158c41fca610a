"""Stored types of GGUF and safetensors, widened to float32 bit for bit as `gguf` does it.

Multiply, then add (or subtract), each rounded; never fused (docs/numerics.md, Widening). A block
is a run of elements that share scales. Knows how a block lies; knows nothing of files or models.

Shapes: B blocks. Raw bytes are [B, bytes of a block], the result is flat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK", "StoredType", "TensorType", "widen"]

TensorType = Literal[
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"
]
StoredType = TensorType | Literal["INT8"]  # blocks of int8 arithmetic, which `quantize` writes

# type -> (elements in a block, bytes of a block)
BLOCK: Final[dict[TensorType, tuple[int, int]]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}

_U8 = NDArray[np.uint8]
_F32 = NDArray[np.float32]


def widen(raw: _U8, kind: TensorType) -> _F32:
    """Float32 values of whole stored blocks, flat, in a new array.

    Held by: test_widen.py (every type against the `gguf` package, random and extreme blocks).
    """
    blocks = np.ascontiguousarray(raw).reshape(-1, BLOCK[kind][1])
    if kind == "F32":
        return blocks.view("<f4").reshape(-1).astype(np.float32)
    if kind == "F16":
        return blocks.view("<f2").reshape(-1).astype(np.float32)
    if kind == "BF16":
        return (blocks.view("<u2").reshape(-1).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # a NaN or Inf is refused by its finder
        return _BODIES[kind](blocks).reshape(-1)


def _half(blocks: _U8, start: int) -> _F32:
    """The fp16 at that byte of each block, [B, 1]."""
    return blocks[:, start : start + 2].copy().view("<f2").astype(np.float32)


def _scaled(codes: NDArray[np.uint8 | np.int8], scale: _F32) -> _F32:
    """float(code) * scale, one rounding."""
    wide = np.empty(codes.shape, np.float32)
    np.multiply(codes, scale, out=wide, casting="unsafe")
    return wide


def _nibbles(pairs_B16: _U8) -> _U8:
    """[B, 32]: the low halves of 16 bytes, then the high ones."""
    codes = np.empty((len(pairs_B16), 32), np.uint8)
    np.bitwise_and(pairs_B16, 15, out=codes[:, :16])
    np.right_shift(pairs_B16, 4, out=codes[:, 16:])
    return codes


def _five_bits(blocks: _U8, start: int) -> _U8:
    """[B, 32] codes: 4 bytes of fifth bits at `start`, then 16 bytes of pairs."""
    fifth = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
    codes: _U8 = _nibbles(blocks[:, start + 4 :]) | (fifth << np.uint8(4))
    return codes


def _centred(codes: _U8, offset: int) -> NDArray[np.int8]:
    return codes.view(np.int8) - np.int8(offset)


def _q4_0(blocks: _U8) -> _F32:
    return _scaled(_centred(_nibbles(blocks[:, 2:]), 8), _half(blocks, 0))


def _q4_1(blocks: _U8) -> _F32:
    wide = _scaled(_nibbles(blocks[:, 4:]), _half(blocks, 0))
    wide += _half(blocks, 2)
    return wide


def _q5_0(blocks: _U8) -> _F32:
    return _scaled(_centred(_five_bits(blocks, 2), 16), _half(blocks, 0))


def _q5_1(blocks: _U8) -> _F32:
    wide = _scaled(_five_bits(blocks, 4), _half(blocks, 0))
    wide += _half(blocks, 2)
    return wide


def _q8_0(blocks: _U8) -> _F32:
    return _scaled(blocks[:, 2:].view(np.int8), _half(blocks, 0))


def _k_scales(blocks: _U8) -> tuple[_F32, _F32]:
    """Scale and minimum of the eight groups of 32, each [B, 8, 1].

    Twelve bytes hold 16 numbers of six bits: bytes 0-3 and 4-7 the low four scales and minima,
    their top two bits the top of the high four, whose low bits are the nibbles of bytes 8-11.
    """
    low_scale, low_minimum, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([low_scale & 63, (high & 15) | ((low_scale >> 2) & 48)], axis=1)
    minimum = np.concatenate([low_minimum & 63, (high >> 4) | ((low_minimum >> 2) & 48)], axis=1)
    scales, minima = _scaled(scale, _half(blocks, 0)), _scaled(minimum, _half(blocks, 2))
    return scales[:, :, None], minima[:, :, None]


def _k_nibbles(pairs_B128: _U8) -> _U8:
    """[B, 8, 32]: of each 32 bytes the low halves, then the high ones."""
    codes = np.empty((len(pairs_B128), 4, 2, 32), np.uint8)
    pairs = pairs_B128.reshape(-1, 4, 32)
    np.bitwise_and(pairs, 15, out=codes[:, :, 0])
    np.right_shift(pairs, 4, out=codes[:, :, 1])
    return codes.reshape(-1, 8, 32)


def _q4_k(blocks: _U8) -> _F32:
    scale, minimum = _k_scales(blocks)
    wide = _scaled(_k_nibbles(blocks[:, 16:]), scale)
    wide -= minimum
    return wide


def _q5_k(blocks: _U8) -> _F32:
    scale, minimum = _k_scales(blocks)
    codes = _k_nibbles(blocks[:, 48:])
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]
    codes |= (fifth & np.uint8(1)) << np.uint8(4)
    wide = _scaled(codes, scale)
    wide -= minimum
    return wide


def _q6_k(blocks: _U8) -> _F32:
    pairs = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = (pairs >> np.array([[0], [4]], np.uint8)) & np.uint8(15)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)
    codes = low.reshape(-1, 16, 16) | ((high & np.uint8(3)) << np.uint8(4)).reshape(-1, 16, 16)
    scale = _scaled(blocks[:, 192:208].view(np.int8), _half(blocks, 208))
    return _scaled(_centred(codes, 32), scale[:, :, None])


_BODIES: Final[dict[str, Callable[[_U8], _F32]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
