"""What an opened checkpoint is: named tensors that still lie in the mapped file.

Knows nothing of file formats or stored types: `gguf.py` and `safetensors.py` build the records,
`widen.py` makes float32 of them, `image.py` packs them.

Shapes: a matrix is [N, K] (N outputs, K inputs), a vector [N]; raw bytes are one row after
another, as stored.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyshard.checkpoint.widen import BLOCK, StoredType, widen
from anyshard.config import Arithmetic, ModelConfig, Quantization
from anyshard.errors import CheckpointError
from anyshard.ops.storage import panel_shape, unpack_rows, without_padding

__all__ = [
    "BlockFile",
    "Checkpoint",
    "TensorSource",
    "TokenizerMaterial",
    "check_depth",
    "check_tensors",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorSource:
    """One tensor as it lies in the file; nothing has been read yet.

    `raw` is a read-only uint8 view of the mapped file. Row n of the tensor is stored row
    `row_map[n]`, or row n where `row_map` is None.

    Of a model that `quantize` wrote (matrices of type INT8, blocks as `ops/storage.py` has them;
    `group` as in ImageTensor), `offset` is the place in the file, which serves as the image.
    """

    name: str
    file_name: str
    shape: tuple[int, ...]
    type: StoredType
    raw: NDArray[np.uint8]
    row_map: NDArray[np.int32] | None = None
    group: int = 0
    offset: int | None = None

    def read(self) -> NDArray[np.float32]:
        """A new float32 array of `shape`, rows in the order of the tensor.

        Held by: test_checkpoint_gguf.py::test_every_tensor_widens_to_the_bits_of_gguf.
        """
        return self.read_rows(0, self.shape[0])

    def read_rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start:stop (elements, for a vector), widened."""
        if self.type == "INT8":
            num_rows, num_columns = self.shape
            blocks = self.raw.reshape(panel_shape("int8", num_rows, num_columns, self.group))
            return without_padding(unpack_rows(blocks, start, stop), num_columns, self.group)
        if len(self.shape) == 1 and BLOCK[self.type][0] > 1:
            wide = widen(self.raw, self.type)  # blocks run across the rows of a vector
            return wide if self.row_map is None else wide[self.row_map][start:stop]
        return widen(self.stored_rows(start, stop), self.type).reshape(
            stop - start, *self.shape[1:]
        )

    def stored_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows start:stop as stored: [rows, bytes of a row]; not of INT8, which mixes rows."""
        assert self.type != "INT8", self.name
        stored = self.raw.reshape(self.shape[0], -1)
        return stored[start:stop] if self.row_map is None else stored[self.row_map[start:stop]]

    def release(self) -> None:
        """Give the memory of the stored bytes back to the file; a later read fetches them again."""
        owner: Any = self.raw
        while isinstance(owner, np.ndarray):
            whole, owner = owner, owner.base
        mapped = owner.obj if isinstance(owner, memoryview) else owner
        if not isinstance(mapped, mmap.mmap):
            return
        start = self.raw.ctypes.data - whole.ctypes.data
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (start + self.raw.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            with contextlib.suppress(OSError, AttributeError):  # only a matter of memory
                mapped.madvise(mmap.MADV_DONTNEED, first, length)


@dataclass(frozen=True, kw_only=True)
class TokenizerMaterial:
    """Where the tokenizer comes from: GGUF metadata, or the directory of a tokenizer.json."""

    label: str
    metadata: Mapping[str, Any] | None = None
    directory: Path | None = None


@dataclass(frozen=True, kw_only=True)
class BlockFile:
    """The weight file that `quantize` wrote, as it was when its header was read."""

    path: Path
    identity: tuple[int, int, int, int]

    @staticmethod
    def of(path: Path) -> BlockFile:
        """As it is now. Raises: OSError."""
        return BlockFile(path=path, identity=_identity(os.stat(path)))

    def open(self) -> int:
        """A descriptor of that very file. Raises: CheckpointError."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror})") from None
        if _identity(os.fstat(fd)) != self.identity:
            os.close(fd)
            raise CheckpointError(f"{self.path}: changed while it was opened; try again")
        return fd


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """An opened model: what it is, and where each of its tensors lies.

    All tensors that `config` asks for are present with the right shape.
    `tokenizer_material` is None where the model comes without a tokenizer.
    `blocks`: the file that is mapped for int8 arithmetic, None where an image is to be packed.
    """

    path: Path
    config: ModelConfig
    sources: Mapping[str, TensorSource]
    tokenizer_material: TokenizerMaterial | None
    blocks: BlockFile | None = None

    def arithmetic(self, quantization: Quantization) -> Arithmetic:
        """What is asked for; of `auto`, int8 if any matrix is stored in blocks with scales."""
        if quantization == "auto":
            matrices = [source for source in self.sources.values() if len(source.shape) == 2]
            in_blocks = any(
                source.type == "INT8" or BLOCK[source.type][0] > 1 for source in matrices
            )
            return "int8" if in_blocks else "f32"
        return "int8" if quantization == "int8" else "f32"

    def tensors(self) -> Mapping[str, TensorSource]:
        """Canonical name to source, in the order of `config.tensor_shapes()`."""
        return self.sources

    def read(self, name: str) -> NDArray[np.float32]:
        """The tensor of that canonical name, widened to a new float32 array."""
        return self.sources[name].read()


def check_depth(config: ModelConfig, num_tensors: int, *, label: str) -> None:
    """Refuse a number of layers that the file cannot hold, before anything is sized by it.

    Raises: CheckpointError with both numbers.
    """
    if config.num_layers > num_tensors:
        raise CheckpointError(
            f"{label}: the configuration says {config.num_layers} layers, but the file holds "
            f"{num_tensors} tensors in all"
        )


def check_tensors(
    config: ModelConfig,
    found: Mapping[str, TensorSource],
    file_names: Mapping[str, str],
    *,
    label: str,
) -> dict[str, TensorSource]:
    """Sources in canonical order; every tensor of `config` is there with its shape.

    `file_names` maps canonical names to those in the file, for the messages.

    Raises: CheckpointError that names the tensor, the shape expected and the one found.
    """
    ordered: dict[str, TensorSource] = {}
    for name, shape in config.tensor_shapes().items():
        source = found.get(name)
        if source is None:
            raise CheckpointError(
                f"{label}: tensor {file_names[name]!r} is missing; its shape would be {shape}"
            )
        if source.shape != shape:
            raise CheckpointError(
                f"{label}: tensor {source.file_name!r} has shape {source.shape}; "
                f"the configuration needs {shape}"
            )
        ordered[name] = source
    return ordered
