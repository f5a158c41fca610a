"""A run on file: a manifest to cite, and a digest of every (position, layer, point).

    magic | version | manifest bytes | manifest (JSON) | arrays | sha256 of all before it

Integers are little-endian. The manifest says how many positions, layers and tokens there are, and
so how long every array is, which is checked against the file before any is read. Layout, machine
and date are in it to be cited; `compare.py` says which fields two comparable runs share.

Shapes: P positions that ran, L layers, T prompt tokens, E tokens emitted; P = T + E - 1 if any was,
else P < T.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from anyshard.errors import UserError
from anyshard.fidelity.agreement import Disagreement
from anyshard.fidelity.log import RunDigests
from anyshard.files import replace_file
from anyshard.op import LAYER_POINTS
from anyshard.ops.digest import U64
from anyshard.request import Sampling

__all__ = [
    "RECORD_VERSION",
    "Manifest",
    "Record",
    "RecordError",
    "printable",
    "read_record",
    "tokens_sha256",
    "write_record",
]

I32 = npt.NDArray[np.int32]

MAGIC: Final = b"ANYSHARD"
RECORD_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sII")  # magic, version, bytes of the manifest
_SHA_BYTES: Final = 32
_MANIFEST_BYTES: Final = 1 << 20
_MOST: Final = 1 << 28  # of anything that is counted
_SHOWN: Final = 80  # characters of a text


class RecordError(UserError):
    """A file is no record, is damaged, or is of a version that cannot be read."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a record says of its run.

    weights_sha256: of values, not of a file (`fidelity/weights.py`). model: its configuration.
    tokens_sha256: of the prompt's token ids, int32 little-endian. layout, machine: to be cited.
    finish: why it ended. fault: the op in which position `positions` left the range of float32;
    that row is not recorded, nor what follows it. disagreement: the first place at which ranks
    held different bits of what they should hold alike; nothing is written where they did not.
    """

    anyshard: str
    date: str
    weights_sha256: str
    model: dict[str, Any]
    profile: str
    profile_sha256: str
    tokens_sha256: str
    sampling: Sampling
    max_tokens: int
    finish: str
    fault: str | None
    logits_sha256: str
    layout: dict[str, Any]
    machine: dict[str, Any]
    positions: int
    layers: int
    prompt_tokens: int
    emitted_tokens: int
    points: tuple[str, ...] = LAYER_POINTS
    disagreement: Disagreement | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True)
class Record:
    """A run: manifest, prompt int32 [T], tokens int32 [E], and its digests."""

    manifest: Manifest
    prompt: I32
    tokens: I32
    digests: RunDigests


def _sizes(manifest: Manifest) -> list[tuple[str, tuple[int, ...]]]:
    """Element type and shape of every array, in file order."""
    positions, tokens = manifest.positions, manifest.emitted_tokens
    return [
        ("<i4", (manifest.prompt_tokens,)),
        ("<i4", (tokens,)),
        ("<u8", (positions,)),
        ("<u8", (positions, manifest.layers, len(manifest.points))),
        ("<u8", (tokens,)),
    ]


def write_record(record: Record, path: Path) -> None:
    """Write all of it or nothing, in place of a regular file or of none (`files.py`).

    Raises: RecordError if that is refused, with the reason. Held by: test_record.py.
    """
    manifest = msgspec.json.encode(record.manifest)
    assert len(manifest) <= _MANIFEST_BYTES
    arrays: tuple[npt.NDArray[Any], ...] = (
        record.prompt,
        record.tokens,
        record.digests.embed,
        record.digests.layers,
        record.digests.logits,
    )
    parts = [_HEADER.pack(MAGIC, RECORD_VERSION, len(manifest)), manifest]
    for (dtype, shape), array in zip(_sizes(record.manifest), arrays, strict=True):
        assert array.shape == shape, f"{array.shape} is not {shape}"
        parts.append(np.ascontiguousarray(array, dtype).tobytes())
    whole = b"".join(parts)
    try:
        replace_file(path, whole + hashlib.sha256(whole).digest())
    except OSError as error:
        raise RecordError(f"{path}: cannot be written ({error.strerror})") from None


def read_record(path: Path) -> Record:
    """Read and check a record.

    Raises: RecordError in one sentence: not there, no record, newer, cut short, damaged.
    Held by: test_record.py.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise RecordError(f"{path}: is not a file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            manifest, header = _head(path, file.read(_HEADER.size + _MANIFEST_BYTES))
            expected = header + _array_bytes(manifest) + _SHA_BYTES
            if size != expected:
                found = "cut short" if size < expected else "damaged: bytes are left over"
                raise RecordError(
                    f"{path}: needs {expected} bytes by its manifest, but the file has {size}; it "
                    f"is {found}"
                )
            file.seek(0)
            content = file.read(expected)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from None
    if hashlib.sha256(content[:-_SHA_BYTES]).digest() != content[-_SHA_BYTES:]:
        raise RecordError(f"{path}: its sha256 does not hold; the file is damaged")
    return _arrays(path, manifest, content, header)


def _head(path: Path, begin: bytes) -> tuple[Manifest, int]:
    """The manifest and the bytes before the arrays."""
    if len(begin) < _HEADER.size or not begin.startswith(MAGIC):
        raise RecordError(f"{path}: is no record; generate --record FILE writes one")
    _, version, num_bytes = _HEADER.unpack_from(begin)
    if version != RECORD_VERSION:
        newer = "; a newer anyshard wrote it" if version > RECORD_VERSION else ""
        raise RecordError(
            f"{path}: is a record of version {version}, and {RECORD_VERSION} can be read{newer}"
        )
    text = begin[_HEADER.size : _HEADER.size + num_bytes]
    if len(text) < num_bytes:
        raise RecordError(
            f"{path}: its manifest needs {num_bytes} bytes, but {len(text)} are there; it is cut "
            "short or damaged"
        )
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, UserError, RecursionError):
        raise RecordError(f"{path}: its manifest cannot be read; the file is damaged") from None
    _check(path, manifest)
    return manifest, _HEADER.size + num_bytes


def _check(path: Path, manifest: Manifest) -> None:
    counts = (  # a prompt and a model have one at least; a row that fails first leaves no position
        ("positions", manifest.positions, 0),
        ("layers", manifest.layers, 1),
        ("prompt_tokens", manifest.prompt_tokens, 1),
        ("emitted_tokens", manifest.emitted_tokens, 0),
    )
    for name, count, least in counts:
        if not least <= count <= _MOST:
            raise RecordError(f"{path}: {name} is {count}; the file is damaged")
    of_model = manifest.model.get("num_layers")
    if type(of_model) is not int or of_model != manifest.layers:
        raise RecordError(
            f"{path}: layers is {manifest.layers}, but num_layers of its model is "
            f"{printable(of_model)}; the file is damaged"
        )
    _check_disagreement(path, manifest)
    if manifest.points != LAYER_POINTS:
        raise RecordError(f"{path}: its digest points are not those of this version")
    last = manifest.prompt_tokens + manifest.emitted_tokens - 1
    if manifest.positions > last:
        raise RecordError(f"{path}: has more positions than tokens; the file is damaged")
    if manifest.emitted_tokens and manifest.positions != last:
        raise RecordError(f"{path}: has tokens that no position drew; the file is damaged")


def _check_disagreement(path: Path, manifest: Manifest) -> None:
    found = manifest.disagreement
    if found is msgspec.UNSET:
        return
    is_layer = found.layer is not None and 0 <= found.layer < manifest.layers
    if (
        not 0 <= found.position < manifest.positions
        or not (found.layer is None if found.point == "embed" else is_layer)
        or not all(0 <= rank < _MOST for rank in (found.rank, found.other))
    ):
        raise RecordError(f"{path}: ranks disagree where nothing ran; the file is damaged")


def printable(value: object, most: int = _SHOWN) -> str:
    """What a record says, for one line of a terminal: no control characters, at most `most` long.

    Held by: test_compare.py.
    """
    text = value[: most + 1] if isinstance(value, str) else str(value)
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(each if each.isprintable() else "?" for each in cut)


def _array_bytes(manifest: Manifest) -> int:
    return sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in _sizes(manifest))


def _arrays(path: Path, manifest: Manifest, content: bytes, at: int) -> Record:
    found: list[npt.NDArray[Any]] = []
    for dtype, shape in _sizes(manifest):
        found.append(np.frombuffer(content, dtype, math.prod(shape), at).reshape(shape))
        at += found[-1].nbytes
    prompt, tokens, embed, layers, logits = found
    if tokens_sha256(prompt) != manifest.tokens_sha256:
        raise RecordError(f"{path}: its prompt has another hash than its manifest says")
    digests = RunDigests(_words(embed), _words(layers), _words(logits))
    return Record(manifest, prompt.astype(np.int32), tokens.astype(np.int32), digests)


def _words(array: npt.NDArray[Any]) -> U64:
    return array.astype(np.uint64)


def tokens_sha256(tokens: npt.NDArray[Any]) -> str:
    """sha256, hex, of token ids as int32 little-endian."""
    return hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest()
