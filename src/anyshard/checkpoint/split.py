"""A GGUF model in several files, `name-00001-of-00003.gguf` and so on, read as one.

The first part holds the metadata, each its own tensors and `split.no`, `split.count` and
`split.tensors.count`. Knows nothing of models.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from anyshard.checkpoint.gguf import GgufFile, GgufTensor, read_gguf
from anyshard.errors import CheckpointError

__all__ = ["read_whole_gguf"]

_PART: Final = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def read_whole_gguf(path: Path) -> GgufFile:
    """The file, or all parts of which it is one, whichever part was named.

    Raises: CheckpointError naming the part that is missing or does not belong.
    Held by: test_split.py.
    """
    file = read_gguf(path)
    count = _number(file, "split.count", default=1)
    if count <= 1:
        return file
    name = _PART.fullmatch(path.name)
    if name is None or int(name["count"]) != count:
        raise CheckpointError(
            f"{path}: is one of {count} parts by its split.count, but is not called "
            f"NAME-00001-of-{count:05}.gguf, so the others cannot be found"
        )
    paths = [
        path.with_name(f"{name['stem']}-{index + 1:05}-of-{count:05}.gguf")
        for index in range(count)
    ]
    for index, part in enumerate(paths):  # all before any is opened
        if not part.exists():
            raise CheckpointError(f"{part}: part {index + 1} of {count} does not exist")
    return _joined([file if part == path else read_gguf(part) for part in paths])


def _joined(parts: list[GgufFile]) -> GgufFile:
    tensors: dict[str, GgufTensor] = {}
    for index, part in enumerate(parts):
        for key, wanted in (("split.no", index), ("split.count", len(parts))):
            found = _number(part, key, default=-1)
            if found != wanted:
                raise CheckpointError(
                    f"{part.path}: {key} is {found}, but its name says {wanted}; it was renamed, "
                    "or belongs to another model"
                )
        twice = next((name for name in part.tensors if name in tensors), None)
        if twice is not None:
            raise CheckpointError(f"{part.path}: tensor {twice!r} is in an earlier part, too")
        tensors |= part.tensors
    first = parts[0]
    total = _number(first, "split.tensors.count", default=len(tensors))
    if total != len(tensors):
        raise CheckpointError(
            f"{first.path}: split.tensors.count is {total}, but the {len(parts)} parts hold "
            f"{len(tensors)} tensors"
        )
    return GgufFile(
        path=first.path, version=first.version, metadata=first.metadata, tensors=tensors
    )


def _number(file: GgufFile, key: str, *, default: int) -> int:
    value = file.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 100_000:
        raise CheckpointError(f"{file.path}: {key} is {value!r:.40}; a small number is needed")
    return value
