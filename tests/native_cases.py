"""Shared by the tests of the native core: bodies, sums, panels, caches, comparison of bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from anyshard.ops import native_module

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

native: Any = native_module()
BODIES: list[str] = native.available_bodies() if native is not None else []
needs_native = pytest.mark.skipif(native is None, reason="built without the native core")


def floats(rng: np.random.Generator, *shape: int) -> F32:
    return rng.standard_normal(shape, dtype=np.float32)


def ints(*values: int) -> I32:
    return np.array(values, np.int32)


def leaves(num_inputs: int, leaf: int = 64) -> tuple[I32, I32]:
    """The canonical sum over one row: leaves of `leaf`, the tree that splits at the upper half."""
    lengths = [min(leaf, num_inputs - start) for start in range(0, num_inputs, leaf)]
    merges = [0] * len(lengths)

    def visit(low: int, high: int) -> None:
        if high - low > 1:
            middle = low + (high - low + 1) // 2
            visit(low, middle)
            visit(middle, high)
            merges[high - 1] += 1

    visit(0, len(lengths))
    return ints(*lengths), ints(*merges)


def panels(weight_NK: F32) -> F32:
    """[N, K] as [ceil(N/8), K, 8], padding lanes zero."""
    n, k = weight_NK.shape
    padded = np.zeros((-(-n // 8) * 8, k), np.float32)
    padded[:n] = weight_NK
    return np.ascontiguousarray(padded.reshape(-1, 8, k).transpose(0, 2, 1))


def differing(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Elements whose bits differ."""
    assert a.shape == b.shape and a.dtype == b.dtype
    return int((a.view(np.uint32) != b.view(np.uint32)).sum())


def pool(body: str, threads: int = 1, *, spin: bool = False) -> Any:
    return native.Pool(threads, body, spin)


def quantised(kind: str, rng: np.random.Generator, rows: int, columns: int) -> tuple[Any, F32]:
    """Raw rows as a checkpoint holds them, and their values as `gguf` widens them."""
    gguf = pytest.importorskip("gguf")
    weight = (0.02 * rng.standard_normal((rows, columns))).astype(np.float32)
    if kind == "F16":
        return weight.astype(np.float16).view(np.uint8), weight.astype(np.float16).astype("f4")
    type_ = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(weight, type_)
    return raw, gguf.quants.dequantize(raw, type_)
