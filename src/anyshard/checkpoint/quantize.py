"""Weights into int8 blocks on disk: the two files of a model that `quantized.py` opens again.

One tensor at a time, so that memory holds the largest, not the model. Knows nothing of command
lines, tokenizers, or how the folder becomes whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from anyshard import __version__
from anyshard.checkpoint.image import WeightImage, build_image
from anyshard.checkpoint.quantized import (
    DATA_ALIGNMENT,
    FORMAT,
    WEIGHTS,
    Place,
    config_fields,
    config_of_fields,
    places,
)
from anyshard.checkpoint.source import Checkpoint
from anyshard.errors import CheckpointError
from anyshard.ops import KernelChoice

__all__ = ["Written", "header", "weights_bytes", "write_config", "write_weights"]

_WRITE_BYTES: Final = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Written:
    """The weight file: its bytes, where its data begins, and the hash of the data."""

    bytes: int
    data_start: int
    data_sha256: str


def header(checkpoint: Checkpoint, data_sha256: str = "0" * 64) -> bytes:
    """All that stands before the data; as long for every hash."""
    entries: dict[str, object] = {
        "__metadata__": {
            "format": FORMAT,
            "source": checkpoint.path.name.encode("utf-8", "replace").decode(),
            "version": __version__,
            "sha256": data_sha256,
        }
    }
    for name, place in places(checkpoint.config).items():
        entries[name] = {
            "dtype": "I8" if place.is_matrix else "F32",
            "shape": list(place.stored_shape),
            "data_offsets": [place.start, place.start + place.bytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    end = -(-(8 + len(text)) // DATA_ALIGNMENT) * DATA_ALIGNMENT
    return (end - 8).to_bytes(8, "little") + text.ljust(end - 8)


def weights_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the weight file. Pure."""
    return len(header(checkpoint)) + sum(
        place.bytes for place in places(checkpoint.config).values()
    )


def write_weights(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    threads: int,
    progress: Callable[[int, int], None] | None = None,
    kernels: KernelChoice = "auto",
) -> Written:
    """Quantise every matrix of `checkpoint` into `folder`/model.safetensors, and sync it to disk.

    `progress(bytes done, bytes in all)` is called after each tensor. The blocks are those of
    `build_image`, the same from every body of `kernels`.

    Raises: CheckpointError as `build_image` does; OSError, and then the file is of no use.
    Held by: test_quantized.py::test_the_file_is_the_image_that_is_built.
    """
    if checkpoint.blocks is not None:
        raise CheckpointError(
            f"{checkpoint.path}: is quantised already ({FORMAT}); run it as it is, or quantise "
            "the model that it came from"
        )
    start, digest, done = len(header(checkpoint)), hashlib.sha256(), 0
    total = weights_bytes(checkpoint) - start
    with (folder / WEIGHTS).open("xb") as file:
        file.seek(start)
        for place in places(checkpoint.config).values():
            image = build_image(
                checkpoint,
                names=[place.name],
                threads=threads,
                kernels=kernels,
                arithmetic="int8",
            )
            with closing(image):
                content = _stored(image, place)
                for at in range(0, len(content), _WRITE_BYTES):
                    piece = content[at : at + _WRITE_BYTES].data
                    digest.update(piece)
                    file.write(piece)
            done += place.bytes
            if progress is not None:
                progress(done, total)
        file.seek(0)
        file.write(header(checkpoint, digest.hexdigest()))
        file.flush()
        os.fsync(file.fileno())
    return Written(bytes=start + total, data_start=start, data_sha256=digest.hexdigest())


def _stored(image: WeightImage, place: Place) -> NDArray[np.uint8]:
    tensor = image.panels(place.name) if place.is_matrix else image.vector(place.name)
    return tensor.reshape(-1).view(np.uint8)


def write_config(checkpoint: Checkpoint, folder: Path, ids: dict[str, object]) -> None:
    """config.json, with the token ids given, such as eos_token_id.

    Raises: OSError.
    """
    fields = config_fields(checkpoint.config)
    assert config_of_fields(fields) == checkpoint.config
    text = json.dumps(fields | ids, indent=2) + "\n"
    (folder / "config.json").write_text(text, "utf-8")
