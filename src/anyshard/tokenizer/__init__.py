"""Text to token ids and back, without torch or transformers.

`Tokenizer` wraps the `tokenizers` library. What a user writes never becomes a control token:
only the scaffold of a chat template may.
"""

from __future__ import annotations

from anyshard.checkpoint.source import Checkpoint
from anyshard.errors import CheckpointError
from anyshard.tokenizer.build import tokenizer_from_gguf, tokenizer_from_hf
from anyshard.tokenizer.same import vocabulary_difference
from anyshard.tokenizer.save import write_tokenizer
from anyshard.tokenizer.template import ChatTemplate
from anyshard.tokenizer.tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "ChatTemplate",
    "StreamDecoder",
    "Tokenizer",
    "open_tokenizer",
    "vocabulary_difference",
    "write_tokenizer",
]


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that came with a checkpoint.

    Raises: CheckpointError when there is none, or when it is of a kind that cannot be read.
    """
    material = checkpoint.tokenizer_material
    if material is None:
        raise CheckpointError(
            f"{checkpoint.path}: comes without a tokenizer (tokenizer.json); text cannot be "
            "turned into tokens"
        )
    vocab = checkpoint.config.vocab
    if material.metadata is not None:
        return tokenizer_from_gguf(material.metadata, label=material.label, vocab=vocab)
    assert material.directory is not None
    return tokenizer_from_hf(material.directory, vocab=vocab)
