"""The files of a tokenizer beside weights that are written anew.

Those of an HF directory are copied byte by byte. Of GGUF metadata a `tokenizer.json` is made, and
read back: it is the same tokenizer, or none is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from anyshard.checkpoint.safetensors import read_json_object
from anyshard.checkpoint.source import Checkpoint
from anyshard.errors import CheckpointError
from anyshard.tokenizer.build import tokenizer_from_gguf, tokenizer_from_hf

__all__ = ["write_tokenizer"]

_COPIED: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
)
_IDS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_tokenizer(checkpoint: Checkpoint, folder: Path) -> dict[str, Any]:
    """Write the tokenizer of `checkpoint` into `folder`; returns the ids that config.json names.

    Of a model that comes without one, only what else is there of those files.

    Raises: CheckpointError for metadata that a tokenizer.json cannot hold; OSError.
    Held by: test_tokenizer_files.py.
    """
    material = checkpoint.tokenizer_material
    if material is not None and material.metadata is not None:
        return _made(checkpoint, material.label, folder)
    if not checkpoint.path.is_dir():
        return {}
    for name in _COPIED:
        source = checkpoint.path / name
        if source.is_file():
            try:
                content = source.read_bytes()
            except OSError as error:
                raise CheckpointError(f"{source}: cannot be read ({error.strerror})") from None
            (folder / name).write_bytes(content)
    config = read_json_object(checkpoint.path / "config.json")
    return {name: config[name] for name in _IDS if config.get(name) is not None}


def _made(checkpoint: Checkpoint, label: str, folder: Path) -> dict[str, Any]:
    material, vocab = checkpoint.tokenizer_material, checkpoint.config.vocab
    assert material is not None and material.metadata is not None
    tokenizer = tokenizer_from_gguf(material.metadata, label=label, vocab=vocab)
    files = tokenizer.files()
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8", newline="")
    again = tokenizer_from_hf(folder, vocab=vocab)
    if again.files() != files or again.add_bos != tokenizer.add_bos:
        raise CheckpointError(
            f"{label}: its tokenizer cannot be written as tokenizer.json with the same tokens; "
            "run the model itself with --quantization int8"
        )
    return tokenizer.special_ids()
