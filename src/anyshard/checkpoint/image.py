"""The weight image: a host's weights, packed once, mapped read-only by every local rank.

The region is private memory that is sealed after the build and that ranks inherit, or the file that
`quantize` wrote; `directory` says where each tensor lies. Any cut is an offset and a stride, so no
layout ever packs again. Knows how panels lie; knows nothing of layouts, ranks or file formats.

For float32 arithmetic, weights in bf16, f16 and Q8_0 stay as the checkpoint stores them and are
widened in registers; all other types are widened to float32 here. For int8 arithmetic every matrix
is quantised here, whatever it was, so that no cut decides a scale; blocks of Q8_0 are taken as they
are where they can be. Shapes of panels: `ops/storage.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from anyshard.checkpoint.blocks import check_blocks
from anyshard.checkpoint.source import BlockFile, Checkpoint, TensorSource
from anyshard.checkpoint.widen import StoredType
from anyshard.config import Arithmetic, ModelConfig
from anyshard.errors import CheckpointError
from anyshard.host import free_memory, size_text
from anyshard.ops import KernelChoice, load_kernels
from anyshard.ops.quant import quantize_weights, split_blocks
from anyshard.ops.storage import (
    LANES,
    Q8_INPUTS,
    Q8_OUTPUTS,
    Panels,
    Storage,
    numpy_dtype,
    pack_lanes,
    pack_q8_0,
    panel_shape,
    unpack,
    without_padding,
)

__all__ = [
    "NATIVE_TYPES",
    "ImageTensor",
    "WeightImage",
    "build_image",
    "image_directory",
    "is_mapped",
    "sealed_image",
]

_MATRIX_ALIGNMENT: Final = 4096
_VECTOR_ALIGNMENT: Final = 64
_CHUNK_BYTES: Final = (
    1 << 20
)  # float32 bytes that NumPy widens at a time; four times as many are slower
NATIVE_TYPES: Final = frozenset({"F32", "F16", "BF16", "Q8_0", "Q4_1"})  # of pack_panels
_KEPT: Final[Mapping[StoredType, Storage]] = {
    "F16": "float16",
    "BF16": "bfloat16",
    "Q8_0": "q8_0",
}
_Packer = Callable[[Panels, TensorSource, int], bool]  # the int: ImageTensor.group


@dataclass(frozen=True, kw_only=True)
class ImageTensor:
    """Where one tensor lies in the region; `shape` is the logical one, [N, K] or [N].

    group: columns after which blocks of int8 begin anew, a head of o_proj; 0 elsewhere.
    """

    name: str
    kind: Literal["matrix", "vector"]
    shape: tuple[int, ...]
    offset: int
    storage: Storage = "float32"
    group: int = 0

    @property
    def array_shape(self) -> tuple[int, ...]:
        """Of the panels of a matrix (`ops/storage.py`), [N] for a vector."""
        if self.kind == "vector":
            return self.shape
        return panel_shape(self.storage, self.shape[0], self.shape[1], self.group)

    @property
    def stored_columns(self) -> int:
        """Inputs of a matrix as it is held, those that pad a block included."""
        blocks = self.array_shape[1] * Q8_INPUTS
        return blocks if self.storage == "int8" else self.shape[1]

    @property
    def bytes(self) -> int:
        """Bytes that the tensor takes in the region, padding lanes included."""
        return prod(self.array_shape) * numpy_dtype(self.storage).itemsize


class WeightImage:
    """Read-only packed weights, which a fork inherits without a copy.

    `region`: its bytes, mapped. Attributes: directory (name to place), bytes (size of the region).
    """

    def __init__(self, region: mmap.mmap, directory: Mapping[str, ImageTensor]) -> None:
        self.directory = dict(directory)
        self.bytes = len(region)
        self._region = np.frombuffer(memoryview(region).toreadonly(), np.uint8)
        self._sha256: str | None = None

    @classmethod
    def of_file(cls, fd: int, directory: Mapping[str, ImageTensor], num_bytes: int) -> WeightImage:
        """The first bytes of a file, mapped; the caller may close its descriptor."""
        region = mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        _advise_huge(region)
        return cls(region, directory)

    def to_json(self) -> str:
        """The directory as text."""
        return json.dumps([asdict(tensor) for tensor in self.directory.values()])

    @property
    def region(self) -> memoryview:
        """All bytes, read-only."""
        return self._region.data

    @property
    def storage(self) -> dict[str, Storage]:
        """How each tensor is held."""
        return {name: place.storage for name, place in self.directory.items()}

    def _view(self, name: str, kind: str) -> NDArray[Any]:
        place = self.directory[name]
        assert place.kind == kind, f"{name} is a {place.kind}"
        flat = self._region[place.offset : place.offset + place.bytes]
        return flat.view(numpy_dtype(place.storage)).reshape(place.array_shape)

    def panels(self, name: str) -> Panels:
        """The matrix of that name as a read-only view of its panels."""
        return self._view(name, "matrix")

    def vector(self, name: str) -> NDArray[np.float32]:
        """The vector of that name as a read-only view [N]."""
        return self._view(name, "vector")

    def matrix(self, name: str) -> NDArray[np.float32]:
        """The matrix of that name widened into a new array [N, K], for reference bodies."""
        place = self.directory[name]
        wide = unpack(self.panels(name), place.shape[0])
        if place.storage != "int8":
            return wide
        return without_padding(wide, place.shape[1], place.group)

    def sha256(self) -> str:
        """Hash of directory and region, hex; computed at the first call (0.5 s a GB)."""
        if self._sha256 is None:
            digest = hashlib.sha256(self.to_json().encode())
            digest.update(self._region.data)
            self._sha256 = digest.hexdigest()
        return self._sha256

    def close(self) -> None:
        """Let go of the region; it goes with the last view that is still held."""
        self._region = np.empty(0, np.uint8)


def build_image(
    checkpoint: Checkpoint,
    *,
    names: Iterable[str] | None = None,
    threads: int,
    progress: Callable[[int, int], None] | None = None,
    kernels: KernelChoice = "auto",
    free_bytes: int | None = None,
    arithmetic: Arithmetic = "f32",
) -> WeightImage:
    """Widen (or quantise) and pack the tensors of `names` (all if None) into a new image.

    `progress(bytes done, bytes in all)` is called after each tensor. Every body of `kernels`
    packs the same bytes; "reference" is the NumPy one, on one thread. `free_bytes` is the memory
    that the image may take, what the system calls available if None. For int8 arithmetic a file
    that `quantize` wrote is mapped as it is, checked but not packed.

    Raises: CheckpointError where the memory will not suffice, before any is taken, or naming the
    tensor that holds a NaN or an infinity; KeyError for a name that the model does not have.
    Held by: test_image.py::test_native_and_numpy_pack_the_same_bytes.
    """
    if threads < 1:
        raise ValueError(f"threads is {threads}; at least 1 is needed")
    wanted = checkpoint.sources if names is None else {n: checkpoint.sources[n] for n in names}
    directory, num_bytes = image_directory(checkpoint.config, wanted, arithmetic)
    if checkpoint.blocks is not None and is_mapped(checkpoint, arithmetic):
        return _mapped(checkpoint.blocks, directory, num_bytes, threads, progress)
    pack = _packer(kernels, threads)

    def fill(region: NDArray[np.uint8]) -> None:
        _fill(region, wanted, directory, checkpoint.path, pack, progress)

    return sealed_image(directory, num_bytes, fill, label=checkpoint.path, free_bytes=free_bytes)


def is_mapped(checkpoint: Checkpoint, arithmetic: Arithmetic) -> bool:
    """Whether the image is the file itself."""
    return checkpoint.blocks is not None and arithmetic == "int8"


def _mapped(
    file: BlockFile,
    directory: Mapping[str, ImageTensor],
    num_bytes: int,
    threads: int,
    progress: Callable[[int, int], None] | None,
) -> WeightImage:
    """The file as an image, after a look at every block. Raises: CheckpointError."""
    fd = file.open()
    try:
        image = WeightImage.of_file(fd, directory, num_bytes)
    finally:
        os.close(fd)
    check_blocks(
        {
            name: image.panels(name) if place.kind == "matrix" else image.vector(name)
            for name, place in directory.items()
        },
        label=str(file.path),
        threads=threads,
        progress=progress,
    )
    return image


def sealed_image(
    directory: Mapping[str, ImageTensor],
    num_bytes: int,
    fill: Callable[[NDArray[np.uint8]], None],
    *,
    label: Path,
    free_bytes: int | None = None,
) -> WeightImage:
    """A new image whose zeroed region of `num_bytes` was filled by `fill`, then sealed.

    Private memory that is never written again, and so never copied by a fork; a memfd would be held
    in small pages where the system keeps huge ones from shared memory, as most do (EXPERIMENTS.md).

    Raises: CheckpointError naming `label` where the memory will not suffice, before any is taken;
    what `fill` raises, and then nothing is left of the region.
    """
    free = free_memory() if free_bytes is None else free_bytes
    if free is not None and num_bytes > free:
        raise CheckpointError(
            f"{label}: the weights need {size_text(num_bytes)} of memory, but "
            f"{size_text(free)} are free; end other programs or take a smaller model"
        )
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise_huge(region)
    fill(np.frombuffer(region, np.uint8))
    _seal(region)
    return WeightImage(region, directory)


def _seal(region: mmap.mmap) -> None:
    """Whoever writes there from now on dies of it."""
    address = np.frombuffer(region, np.uint8).ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(region)), mmap.PROT_READ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def image_directory(
    config: ModelConfig,
    sources: Mapping[str, TensorSource],
    arithmetic: Arithmetic = "f32",
) -> tuple[dict[str, ImageTensor], int]:
    """Where each tensor will lie, in order, and the bytes of the region (whole pages).

    For int8 arithmetic, tensors of a file that `quantize` wrote are where they are in the file.
    """
    directory: dict[str, ImageTensor] = {}
    end = 0
    for name, source in sources.items():
        is_matrix = len(source.shape) == 2
        alignment = _MATRIX_ALIGNMENT if is_matrix else _VECTOR_ALIGNMENT
        offset = source.offset if arithmetic == "int8" else None
        directory[name] = ImageTensor(
            name=name,
            kind="matrix" if is_matrix else "vector",
            shape=source.shape,
            offset=-(-end // alignment) * alignment if offset is None else offset,
            storage=_storage(config, source, arithmetic) if is_matrix else "float32",
            group=config.head_dim if arithmetic == "int8" and _is_of_heads(name) else 0,
        )
        end = max(end, directory[name].offset + directory[name].bytes)
    if arithmetic == "int8" and any(source.offset is not None for source in sources.values()):
        return directory, end  # the file's bytes: nothing may be mapped past its end
    return directory, max(1, -(-end // mmap.PAGESIZE)) * mmap.PAGESIZE


def _is_of_heads(name: str) -> bool:
    """Whether the inputs of a tensor are made of heads."""
    return name.rsplit(".", 1)[-1] == "o"


def _storage(config: ModelConfig, source: TensorSource, arithmetic: Arithmetic) -> Storage:
    """As stored, where the kernels read it; blocks are also widened where a head would cut one."""
    if arithmetic == "int8":
        return "int8"
    kept = _KEPT.get(source.type, "float32")
    cut = {"q": Q8_OUTPUTS, "k": Q8_OUTPUTS, "v": Q8_OUTPUTS, "o": Q8_INPUTS}
    unit = cut.get(source.name.rsplit(".", 1)[-1], 1)
    return "float32" if kept == "q8_0" and config.head_dim % unit else kept


def _fill(
    region: NDArray[np.uint8],
    sources: Mapping[str, TensorSource],
    directory: Mapping[str, ImageTensor],
    path: Path,
    pack: _Packer,
    progress: Callable[[int, int], None] | None,
) -> None:
    total = sum(place.bytes for place in directory.values())
    done = 0
    for name, source in sources.items():
        place = directory[name]
        flat = region[place.offset : place.offset + place.bytes]
        target = flat.view(numpy_dtype(place.storage)).reshape(place.array_shape)
        if place.kind == "vector":
            target[:] = source.read()
            finite = bool(np.isfinite(target).all())
        else:
            try:
                finite = pack(target, source, place.group)
            except OverflowError:
                raise CheckpointError(
                    f"{path}: tensor {source.file_name!r} ({name}) has weights beyond what int8 "
                    "blocks with float16 scales can hold, 8.3 million; take --quantization none"
                ) from None
        source.release()
        if not finite:
            raise CheckpointError(
                f"{path}: tensor {source.file_name!r} ({name}) holds a NaN or an "
                "infinity; the file is damaged, or the model overflowed when it was converted"
            )
        done += place.bytes
        if progress is not None:
            progress(done, total)


def _packer(choice: KernelChoice, threads: int) -> _Packer:
    """The native body on `threads` threads, or the NumPy body where there is none."""
    kernels = load_kernels(choice, threads=threads, spin=False)
    if kernels.body == "reference":
        return _pack_numpy

    def pack_raw(
        target: Panels,
        raw: NDArray[np.uint8],
        kind: str,
        shape: tuple[int, ...],
        row_map: NDArray[np.int32] | None,
        group: int,
    ) -> bool:
        finite: bool = kernels.module.pack_panels(
            kernels.pool, target, raw, kind, *shape, row_map, group
        )
        return finite

    def pack(target: Panels, source: TensorSource, group: int) -> bool:
        if source.type in NATIVE_TYPES:
            return pack_raw(target, source.raw, source.type, source.shape, source.row_map, group)
        finite, lanes = True, _lanes(target)
        for start, rows in _widened(source, threads):
            raw = rows.view(np.uint8).reshape(-1)
            part = target[start // lanes : -(-(start + len(rows)) // lanes)]
            finite = pack_raw(part, raw, "F32", rows.shape, None, group) and finite
        return finite

    return pack


def _widened(source: TensorSource, threads: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """(first row, rows widened by NumPy) in order; at most `threads` pieces exist at a time.

    Pieces are whole panels, of blocks too.
    """
    num_rows, num_columns = source.shape
    step = max(1, _CHUNK_BYTES // (num_columns * 4 * Q8_OUTPUTS)) * Q8_OUTPUTS
    starts = range(0, num_rows, step)
    with ThreadPoolExecutor(threads) as pool:  # NumPy's loops run without the GIL
        for first in range(0, len(starts), threads):
            batch = starts[first : first + threads]
            pieces = pool.map(lambda n: source.read_rows(n, min(n + step, num_rows)), batch)
            yield from zip(batch, pieces, strict=True)


def _lanes(target: Panels) -> int:
    """Outputs of a panel, or of a block."""
    return Q8_OUTPUTS if target.dtype in (np.uint8, np.int8) else LANES


def _pack_numpy(target: Panels, source: TensorSource, group: int) -> bool:
    """Pack into `target`; True if every weight is finite."""
    num_rows, num_columns = source.shape
    outputs = _lanes(target)
    step = max(1, _CHUNK_BYTES // (num_columns * 4 * outputs))
    finite = True
    for panel in range(0, len(target), step):
        start, stop = panel * outputs, min((panel + step) * outputs, num_rows)
        packed, all_finite = _packed_rows(source, start, stop, target.dtype, group)
        target[panel : panel + len(packed)] = packed
        finite = finite and all_finite
    return finite


def _packed_rows(
    source: TensorSource, start: int, stop: int, dtype: np.dtype[Any], group: int
) -> tuple[NDArray[Any], bool]:
    """Rows start:stop as panels of `dtype`, and whether every weight in them is finite."""
    if dtype == np.int8:
        return _quantized_rows(source, start, stop, group)
    if dtype == np.float32:
        rows = source.read_rows(start, stop)
        return pack_lanes(rows), bool(np.isfinite(rows).all())
    stored = source.stored_rows(start, stop)
    if dtype == np.uint8:
        q, scales = _stored_blocks(stored)
        return pack_q8_0(q.reshape(stop - start, -1), scales), bool(np.isfinite(scales).all())
    halves = np.ascontiguousarray(stored).view("<u2")
    exponent = 0x7C00 if dtype == np.float16 else 0x7F80
    return pack_lanes(halves.view(dtype)), bool((halves & exponent != exponent).all())


def _stored_blocks(stored: NDArray[np.uint8]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """q [rows, B, 32] and scales [rows, B] of Q8_0 rows as stored."""
    blocks = stored.reshape(len(stored), -1, Q8_INPUTS + 2)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0]
    return np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8), scales


def _quantized_rows(
    source: TensorSource, start: int, stop: int, group: int
) -> tuple[NDArray[np.int8], bool]:
    """The same for int8: a block of Q8_0 stays, unless it holds -128 or a head would cut it."""
    rows = source.read_rows(start, stop)
    if not np.isfinite(rows).all():
        return np.zeros((-(-len(rows) // Q8_OUTPUTS), 0, 0), np.int8), False
    width = group or rows.shape[1]
    heads = rows.reshape(-1, width)
    lengths = [min(Q8_INPUTS, width - at) for at in range(0, width, Q8_INPUTS)]
    q, scales = quantize_weights(split_blocks(heads, lengths))
    q, scales = q.reshape(len(rows), -1, Q8_INPUTS), scales.reshape(len(rows), -1)
    if source.type == "Q8_0" and width % Q8_INPUTS == 0:
        stored_q, stored_scales = _stored_blocks(source.stored_rows(start, stop))
        stays = (stored_q != -128).all(axis=2)
        q = np.where(stays[:, :, None], stored_q, q)
        scales = np.where(stays, stored_scales, scales)
    return pack_q8_0(q.reshape(len(rows), -1), scales).view(np.int8), True


def _advise_huge(mapped: mmap.mmap) -> None:
    # Not allowed everywhere, and only a matter of speed: faults of 2 MiB instead of 4 KiB.
    with contextlib.suppress(OSError, AttributeError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
