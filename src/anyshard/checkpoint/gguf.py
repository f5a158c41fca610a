"""A bounded reader of GGUF version 2 and 3: header, metadata, where the tensors lie.

The file is mapped and never trusted: each count, length and offset is checked against the
length of the file in Python integers before it is used. Knows nothing of models; names and
shapes become a `Checkpoint` in `names.py` beside this file.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from anyshard.checkpoint.widen import BLOCK, TensorType
from anyshard.errors import CheckpointError

__all__ = ["GgufFile", "GgufTensor", "map_file", "read_gguf"]

_MAGIC: Final = b"GGUF"
_MAX_ENTRIES: Final = 1 << 20  # metadata keys, tensors; real files hold some hundred
_MAX_ELEMENTS: Final = 1 << 22  # of one metadata array; the largest vocabularies have 2^18
_MAX_NAME: Final = 64  # bytes; the format's own limit for tensor names
_MAX_DEPTH: Final = 4  # arrays of arrays
_MIN_ENTRY: Final = 8 + 1 + 4 + 1  # key length, key, type, one byte of value
_MIN_TENSOR: Final = 8 + 1 + 4 + 8 + 4 + 8  # name length, name, rank, one dim, type, offset
_STRING, _ARRAY, _BOOL = 8, 9, 7

_SCALARS: Final = {
    0: ("UINT8", struct.Struct("<B")),
    1: ("INT8", struct.Struct("<b")),
    2: ("UINT16", struct.Struct("<H")),
    3: ("INT16", struct.Struct("<h")),
    4: ("UINT32", struct.Struct("<I")),
    5: ("INT32", struct.Struct("<i")),
    6: ("FLOAT32", struct.Struct("<f")),
    7: ("BOOL", struct.Struct("<B")),
    10: ("UINT64", struct.Struct("<Q")),
    11: ("INT64", struct.Struct("<q")),
    12: ("FLOAT64", struct.Struct("<d")),
}

# Numbers of the format; only those of BLOCK can be read, the others are refused by name.
# fmt: off
_TENSOR_TYPES: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}
# fmt: on
_READABLE: Final[dict[str, TensorType]] = {kind: kind for kind in BLOCK}


@dataclass(frozen=True, kw_only=True, eq=False)
class GgufTensor:
    """Where one tensor lies. `shape` is outermost first: [N, K] for a matrix."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    raw: NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, eq=False)
class GgufFile:
    """A parsed file. Metadata values are int, float, bool, str or tuples of them."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def map_file(path: Path) -> mmap.mmap:
    """Map a regular file read-only.

    Raises: CheckpointError when it is missing, unreadable, empty or no regular file.
    """
    if not path.is_file():
        problem = "is not a regular file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path}: the file {problem}")
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path}: the file is empty") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


def read_gguf(path: Path) -> GgufFile:
    """Parse header, metadata and tensor table; no tensor is touched.

    Raises: CheckpointError naming the file and the field that is wrong.
    Held by: test_checkpoint_gguf.py (truncation at every byte, bit flips, hostile files).
    """
    cursor = _Cursor(path, map_file(path))
    version, num_tensors, num_entries = _read_header(cursor)
    metadata: dict[str, Any] = {}
    for index in range(num_entries):
        key = cursor.string(f"key {index} of the metadata", limit=(1 << 16) - 1)
        field = f"metadata key {key!r:.80}"
        if key in metadata:
            cursor.fail(field, "occurs twice")
        kind = cursor.scalar(4, f"type of {field}")
        if key == "general.alignment" and kind != 4:
            cursor.fail("general.alignment", "is not of type UINT32")
        metadata[key] = _read_value(cursor, kind, field, depth=0)
    tensors = _read_tensors(cursor, num_tensors, metadata.get("general.alignment", 32))
    return GgufFile(path=path, version=version, metadata=metadata, tensors=tensors)


class _Cursor:
    """A position in the mapped file; every step is checked against its end."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self.mapped = mapped
        self.size = len(mapped)
        self.position = 0

    def fail(self, field: str, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {field} {problem}")

    def need(self, num_bytes: int, field: str) -> int:
        """The position, moved past `num_bytes` that are known to exist."""
        start = self.position
        if num_bytes > self.size - start:
            self.fail(
                field,
                f"needs {num_bytes} bytes at byte {start}, but the file ends at byte "
                f"{self.size}; it is cut short or damaged",
            )
        self.position = start + num_bytes
        return start

    def scalar(self, kind: int, field: str) -> Any:
        layout = _SCALARS[kind][1]
        (value,) = layout.unpack_from(self.mapped, self.need(layout.size, field))
        if kind == _BOOL:
            if value > 1:
                self.fail(field, f"is the boolean {value}; 0 and 1 are allowed")
            return bool(value)
        return value

    def string(self, field: str, *, limit: int | None = None) -> str:
        num_bytes = self.scalar(10, f"length of {field}")
        if limit is not None and not 1 <= num_bytes <= limit:
            self.fail(field, f"has {num_bytes} bytes; 1 to {limit} are allowed")
        start = self.need(num_bytes, field)
        try:
            return str(self.mapped[start : self.position], "utf-8")
        except UnicodeDecodeError:
            self.fail(field, "is not UTF-8 text")

    def count(self, field: str, *, item_bytes: int, limit: int) -> int:
        """A u64 count of items of at least `item_bytes` each, which must fit in the file."""
        count: int = self.scalar(10, field)
        room = (self.size - self.position) // item_bytes
        if count > room:
            self.fail(field, f"is {count}, but the rest of the file has room for {room}")
        if count > limit:
            self.fail(field, f"is {count}; at most {limit} are accepted")
        return count


def _read_header(cursor: _Cursor) -> tuple[int, int, int]:
    magic = cursor.mapped[:4]
    if magic != _MAGIC[: len(magic)]:
        cursor.fail("the file", f"is not GGUF: it starts with {magic!r}, not {_MAGIC!r}")
    cursor.need(4, "the magic number")
    version = cursor.scalar(4, "the version")
    if version not in (2, 3):
        if version & 0xFFFF == 0 and version:
            cursor.fail("the file", "is big-endian; only little-endian GGUF can be read")
        cursor.fail("the version", f"is {version}; 2 and 3 can be read")
    # Room is checked at the position of the count; entries before it only make it smaller.
    num_tensors = cursor.count("the tensor count", item_bytes=_MIN_TENSOR, limit=_MAX_ENTRIES)
    num_entries = cursor.count("the metadata count", item_bytes=_MIN_ENTRY, limit=_MAX_ENTRIES)
    return version, num_tensors, num_entries


def _read_value(cursor: _Cursor, kind: int, field: str, *, depth: int) -> Any:
    if kind == _STRING:
        return cursor.string(field)
    if kind in _SCALARS:
        return cursor.scalar(kind, field)
    if kind != _ARRAY:
        cursor.fail(field, f"has the unknown value type {kind}")
    if depth == _MAX_DEPTH:
        cursor.fail(field, f"nests arrays more than {_MAX_DEPTH} deep")
    item_kind = cursor.scalar(4, f"item type of {field}")
    length = f"length of {field}"
    if item_kind == _STRING:
        count = cursor.count(length, item_bytes=8, limit=_MAX_ELEMENTS)
        return _read_strings(cursor, count, field)
    if item_kind == _ARRAY:
        count = cursor.count(length, item_bytes=12, limit=_MAX_ELEMENTS)
        return tuple(_read_value(cursor, _ARRAY, field, depth=depth + 1) for _ in range(count))
    if item_kind not in _SCALARS:
        cursor.fail(field, f"is an array of the unknown value type {item_kind}")
    layout = _SCALARS[item_kind][1]
    count = cursor.count(length, item_bytes=layout.size, limit=_MAX_ELEMENTS)
    start = cursor.need(count * layout.size, field)
    flat = struct.unpack_from(f"<{count}{layout.format[-1]}", cursor.mapped, start)
    if item_kind == _BOOL:
        if max(flat, default=0) > 1:
            cursor.fail(field, "holds a boolean that is neither 0 nor 1")
        return tuple(bool(value) for value in flat)
    return flat


def _read_strings(cursor: _Cursor, count: int, field: str) -> tuple[str, ...]:
    """The hot loop of opening: two arrays of 49,000 strings in the demo model, 60 ms."""
    mapped, size, position = cursor.mapped, cursor.size, cursor.position
    length_at: Callable[[mmap.mmap, int], tuple[int]] = struct.Struct("<Q").unpack_from
    strings: list[str] = []
    for index in range(count):
        start = position + 8
        if start > size:
            cursor.position = position
            cursor.need(8, f"item {index} of {field}")
        position = start + length_at(mapped, start - 8)[0]
        if position > size:
            cursor.position = start
            cursor.need(position - start, f"item {index} of {field}")
        try:
            strings.append(str(mapped[start:position], "utf-8"))
        except UnicodeDecodeError:
            cursor.fail(f"item {index} of {field}", "is not UTF-8 text")
    cursor.position = position
    return tuple(strings)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A line of the tensor table; `offset` counts from the start of the tensor region."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def _read_entry(cursor: _Cursor, index: int, alignment: int) -> _Entry:
    name = cursor.string(f"name of tensor {index}", limit=_MAX_NAME)
    field = f"tensor {name!r}"
    rank = cursor.scalar(4, f"rank of {field}")
    if not 1 <= rank <= 4:
        cursor.fail(field, f"has {rank} dimensions; 1 to 4 are allowed")
    dims = tuple(cursor.scalar(10, f"dimension {axis} of {field}") for axis in range(rank))
    if 0 in dims:
        cursor.fail(field, f"has a zero among its dimensions {dims}")
    number = cursor.scalar(4, f"type of {field}")
    stored = _TENSOR_TYPES.get(number, f"type number {number}")
    offset = cursor.scalar(10, f"offset of {field}")
    kind = _READABLE.get(stored)
    if kind is None:
        cursor.fail(field, f"is stored as {stored}; {', '.join(BLOCK)} can be read")
    elements, block_bytes = BLOCK[kind]
    if dims[0] % elements:
        cursor.fail(field, f"has rows of {dims[0]}, not a multiple of the {kind} block {elements}")
    if offset % alignment:
        cursor.fail(field, f"lies at offset {offset}, not a multiple of {alignment}")
    num_bytes = prod(dims) // elements * block_bytes
    return _Entry(name=name, type=kind, shape=dims[::-1], offset=offset, num_bytes=num_bytes)


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    if not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        cursor.fail("general.alignment", f"is {alignment}; a power of two from 8 to 2^20 is needed")
    entries: dict[str, _Entry] = {}
    for index in range(count):
        entry = _read_entry(cursor, index, alignment)
        if entry.name in entries:
            cursor.fail(f"tensor {entry.name!r}", "occurs twice")
        entries[entry.name] = entry
    base = -(-cursor.position // alignment) * alignment
    end, before = base, ""
    for entry in sorted(entries.values(), key=lambda entry: entry.offset):
        if base + entry.offset < end:
            cursor.fail(f"tensor {entry.name!r}", f"overlaps tensor {before!r}")
        end, before = base + entry.offset + entry.num_bytes, entry.name
        if end > cursor.size:
            cursor.fail(
                f"tensor {entry.name!r}",
                f"ends at byte {end}, but the file ends at byte {cursor.size}; "
                "it is cut short or damaged",
            )
    region = np.frombuffer(cursor.mapped, np.uint8)
    tensors: dict[str, GgufTensor] = {}
    for entry in entries.values():
        start = base + entry.offset
        raw = region[start : start + entry.num_bytes]
        tensors[entry.name] = GgufTensor(
            name=entry.name, type=entry.type, shape=entry.shape, raw=raw
        )
    return tensors
