"""Draft models that cannot draft, and what is said of them; for test_refusals.py."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from gguf_files import TINY, write_tiny_gguf
from models import ADVERSARIAL_9_3, write_hf_model

Build = Callable[[Path], list[str]]


def tiny(folder: Path, *arguments: str) -> list[str]:
    """A sound little model, and what is asked of it."""
    write_tiny_gguf(folder / "tiny.gguf")
    asked = [each.replace("DIR", str(folder)) for each in arguments]
    return [str(folder / "tiny.gguf"), "--prompt", "abc", *asked]


def other_tiny(old: bytes, new: bytes) -> Build:
    """Drafts of the same model, but for some bytes of its file."""

    def build(folder: Path) -> list[str]:
        found = tiny(folder, "--speculate", "model:DIR/other.gguf")
        content = (folder / "tiny.gguf").read_bytes()
        assert content.count(old) == 1
        (folder / "other.gguf").write_bytes(content.replace(old, new))
        return found

    return build


def hf_model(*, vocab: int) -> Build:
    """Drafts of a model without a tokenizer."""

    def build(folder: Path) -> list[str]:
        config = TINY if vocab == TINY.vocab else ADVERSARIAL_9_3
        write_hf_model(folder / "other", config, seed=1)
        return tiny(folder, "--speculate", "model:DIR/other")

    return build


def eos(token: int) -> bytes:
    """As GGUF stores which token ends an answer."""
    return b"tokenizer.ggml.eos_token_id" + struct.pack("<II", 4, token)


def bos(token: int) -> bytes:
    """As GGUF stores which token begins a text."""
    return b"tokenizer.ggml.bos_token_id" + struct.pack("<II", 4, token)


# What is wrong -> how it is made, and words of what is said.
REFUSED: dict[str, tuple[Build, str]] = {
    "a source of drafts that is none": (
        lambda folder: tiny(folder, "--speculate", "magic"), "off, auto, ngram, or model:PATH"
    ),
    "no draft model is named": (
        lambda folder: tiny(folder, "--speculate", "model:"), "--speculate model: names no model"
    ),
    "a draft model without model:": (
        lambda folder: tiny(folder, "--speculate", "models/small.gguf"),
        "for a draft model write model: before it",
    ),
    "the draft model is no Hub id, offline": (
        lambda folder: tiny(folder, "--speculate", "model:org/absent-model"),
        "--speculate: MODEL 'org/absent-model' is neither",
    ),
    "the draft model is not there": (
        lambda folder: tiny(folder, "--speculate", "model:DIR/no.gguf"), "no.gguf' is neither"
    ),
    "another number of tokens": (
        hf_model(vocab=ADVERSARIAL_9_3.vocab), "has 1009 tokens, that of MODEL 35;"
    ),
    "another token": (
        other_tiny(b"<think>", b"<thank>"), "its token 7 is '<thank>', that of MODEL '<think>'"
    ),
    "another beginning of texts": (
        other_tiny(bos(0), bos(7)), "begin with token 7, those of MODEL with token 0"
    ),
    "another end of answers": (
        other_tiny(eos(0), eos(7)), "end with tokens 0, 7, those of MODEL with token 0"
    ),
    "a draft model without a tokenizer": (hf_model(vocab=TINY.vocab), "comes without a tokenizer"),
    "no thread for drafts": (
        lambda folder: tiny(folder, "--draft-threads", "0"), "--draft-threads is 0"
    ),
}  # fmt: skip
