"""A look at blocks that somebody else may have written: what arithmetic takes for granted.

int8 kernels need |q| <= 127 (a product of pairs would leave 16 bits) and scales that are finite;
norms and biases must be finite, too. Padding lanes are looked at with the rest. One pass over
memory, 0.2 s a GB on one thread. What q and scales mean, nothing here can tell.

Shapes: blocks [ceil(N/16), B, 544] of int8, as `ops/storage.py` has them; vectors [N] of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from anyshard.errors import CheckpointError
from anyshard.ops.coefficients import INT8_MOST
from anyshard.ops.storage import Q8_INPUTS, Q8_OUTPUTS

__all__ = ["check_blocks"]

_Q_BYTES: Final = Q8_OUTPUTS * Q8_INPUTS
_PIECE_BYTES: Final = 8 << 20
_FLOAT16_EXPONENT: Final = 0x7C00  # all its bits: an infinity or a NaN

_Piece = tuple[str, NDArray[Any]]


def check_blocks(
    tensors: Mapping[str, NDArray[Any]],
    *,
    label: str,
    threads: int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Refuse matrices (int8 blocks) and vectors that arithmetic would not survive.

    `progress(bytes done, bytes in all)` is called after each piece of some MB. The threads that it
    starts have ended when it returns.

    Raises: CheckpointError naming `label` and the tensor.
    Held by: test_quantized_damage.py::test_blocks_that_no_weight_becomes_are_refused.
    """
    done, total = 0, sum(tensor.nbytes for tensor in tensors.values())
    pool = ThreadPoolExecutor(threads)  # NumPy's loops run without the GIL
    try:
        pieces = list(_pieces(tensors))
        problems = pool.map(_problem, [part for _, part in pieces])
        for (name, part), problem in zip(pieces, problems, strict=True):
            if problem:
                raise CheckpointError(
                    f"{label}: tensor {name!r} holds {problem}; the file is damaged, or "
                    "something else than anyshard quantize wrote it"
                )
            done += part.nbytes
            if progress is not None:
                progress(done, total)
    finally:
        pool.shutdown(cancel_futures=True)


def _pieces(tensors: Mapping[str, NDArray[Any]]) -> Iterator[_Piece]:
    for name, tensor in tensors.items():
        step = max(1, len(tensor) * _PIECE_BYTES // max(1, tensor.nbytes))
        yield from ((name, tensor[start : start + step]) for start in range(0, len(tensor), step))


def _problem(part: NDArray[Any]) -> str:
    """What is wrong, or ""."""
    if part.dtype == np.float32:
        return "" if np.isfinite(part).all() else "a NaN or an infinity"
    if part[:, :, :_Q_BYTES].min() < -INT8_MOST:
        return f"a weight of -128, and blocks go from -{INT8_MOST} to {INT8_MOST}"
    exponents = part[:, :, _Q_BYTES:].view(np.uint16) & np.uint16(_FLOAT16_EXPONENT)
    return "a scale that is a NaN or an infinity" if exponents.max() == _FLOAT16_EXPONENT else ""
