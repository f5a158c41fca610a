"""A bounded reader of safetensors files: mapped, zero-copy, every offset checked.

Our own because a view of the mapped bytes is what the packer wants, and because the library
accepts a header that names one tensor twice. Knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from anyshard.checkpoint.gguf import map_file
from anyshard.checkpoint.widen import StoredType
from anyshard.errors import CheckpointError

__all__ = [
    "SafeFile",
    "SafeTensor",
    "parse_json_object",
    "read_json_object",
    "read_safetensors",
    "read_whole",
]

_MAX_HEADER: Final = 100_000_000  # bytes; the library's own limit
_MAX_JSON: Final = 64 << 20  # bytes of a configuration file
_MAX_RANK: Final = 8
_TYPES: Final[dict[str, StoredType]] = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
_BLOCK_TYPES: Final[dict[str, StoredType]] = {"F32": "F32", "I8": "INT8"}
_Parsed = TypeVar("_Parsed")
_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2, "INT8": 1}


@dataclass(frozen=True, kw_only=True, eq=False)
class SafeTensor:
    """Where one tensor lies; `raw` may start at any byte, aligned or not."""

    name: str
    type: StoredType
    shape: tuple[int, ...]
    raw: NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, eq=False)
class SafeFile:
    """A whole file: its tensors, what the header says of itself, where the data begins.

    `offsets`: first byte of each tensor in the file.
    """

    tensors: dict[str, SafeTensor]
    metadata: dict[str, Any]
    data_start: int
    offsets: dict[str, int]


def parse_json_object(path: Path, parse: Callable[[Mapping[str, Any]], _Parsed]) -> _Parsed:
    """What `parse` makes of the JSON object in a small text file.

    Raises: CheckpointError that names the file, also where `parse` names only the field.
    """
    try:
        return parse(read_json_object(path))
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small text file.

    Raises: CheckpointError when the file is missing, too large, no JSON or no object.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: the file does not exist")
    try:
        if path.stat().st_size > _MAX_JSON:
            raise CheckpointError(f"{path}: has more than {_MAX_JSON} bytes")
        return _parse_object(path.read_bytes(), label=str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


def _parse_object(text: bytes, *, label: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        parsed = dict(pairs)
        if len(parsed) < len(pairs):
            raise CheckpointError(f"{label}: a JSON object names one key twice")
        return parsed

    try:
        parsed = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label}: is not valid JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{label}: is JSON, but not an object")
    return parsed


def read_safetensors(path: Path) -> dict[str, SafeTensor]:
    """The tensors of a file of F32, F16 and BF16; see `read_whole`."""
    return read_whole(path).tensors


def read_whole(path: Path, *, blocks: bool = False) -> SafeFile:
    """Parse the header; no tensor is touched. blocks: F32 and I8 are read, not the other types.

    Raises: CheckpointError naming the file and the tensor that is wrong.
    Held by: test_checkpoint_hf.py (truncation, overlaps, holes, duplicate names).
    """
    mapped = map_file(path)
    size = len(mapped)
    header_bytes = int.from_bytes(mapped[:8], "little")
    if size < 8 or header_bytes > size - 8:
        raise CheckpointError(
            f"{path}: the header needs {8 + header_bytes} bytes, but the file has {size}; "
            "it is cut short, or no safetensors file"
        )
    if header_bytes > _MAX_HEADER:
        raise CheckpointError(f"{path}: the header has {header_bytes} bytes; too many")
    header = _parse_object(mapped[8 : 8 + header_bytes], label=f"{path}: the header")
    metadata = header.pop("__metadata__", None)
    region = np.frombuffer(mapped, np.uint8)[8 + header_bytes :]
    types = _BLOCK_TYPES if blocks else _TYPES
    spans = {name: _span(path, name, entry, types) for name, entry in header.items()}
    end = 0
    for name, (_, _, start, stop) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if start != end:
            raise CheckpointError(
                f"{path}: tensor {name!r:.80} starts at byte {start}, but the one before it ends "
                f"at {end}; tensors must neither overlap nor leave holes"
            )
        end = stop
    if end != len(region):
        problem = "the file is cut short" if end > len(region) else "bytes are left over"
        raise CheckpointError(
            f"{path}: the tensors need {end} bytes, but the file holds {len(region)}; {problem}"
        )
    return SafeFile(
        tensors={
            name: SafeTensor(name=name, type=kind, shape=shape, raw=region[start:stop])
            for name, (kind, shape, start, stop) in spans.items()
        },
        metadata=metadata if isinstance(metadata, dict) else {},
        data_start=8 + header_bytes,
        offsets={name: 8 + header_bytes + start for name, (_, _, start, _) in spans.items()},
    )


def _is_natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _span(
    path: Path, name: str, entry: Any, types: Mapping[str, StoredType]
) -> tuple[StoredType, tuple[int, ...], int, int]:
    """(type, shape, first byte, byte after the last) of one header entry."""
    field = f"{path}: tensor {name!r:.80}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{field} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in types:
        *most, last = types
        raise CheckpointError(
            f"{field} has dtype {dtype!r:.80}, which cannot be read; {', '.join(most)} and {last} "
            "can"
        )
    if not (isinstance(shape, list) and len(shape) <= _MAX_RANK and all(map(_is_natural, shape))):
        raise CheckpointError(
            f"{field} has the shape {shape!r:.80}; up to {_MAX_RANK} whole numbers are needed"
        )
    pair = isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_natural, offsets))
    if not pair:
        raise CheckpointError(
            f"{field} has data_offsets {offsets!r:.80}; two whole numbers are needed"
        )
    start, stop = offsets
    kind = types[dtype]
    num_bytes = prod(shape) * _BYTES[kind]
    if stop - start != num_bytes:
        raise CheckpointError(
            f"{field} of shape {shape} needs {num_bytes} bytes, but spans {start} to {stop}"
        )
    return kind, tuple(shape), start, stop
