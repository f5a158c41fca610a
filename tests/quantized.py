"""Quantised models for tests, written by the package, then spoilt; and what is refused of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf_files import TINY, write_tiny_gguf
from models import (
    ADVERSARIAL_9_3,
    ADVERSARIAL_14_2,
    ADVERSARIAL_HEAD_80,
    QWEN3_SHAPED,
    write_hf_model,
)

from anyshard.checkpoint import image, open_checkpoint, write_config, write_weights
from anyshard.config import ModelConfig
from anyshard.tokenizer import write_tokenizer

QUANTIZED: dict[str, ModelConfig] = {
    "adversarial-9-3": ADVERSARIAL_9_3,
    "adversarial-14-2": ADVERSARIAL_14_2,
    "adversarial-head-80": ADVERSARIAL_HEAD_80,
    "qwen3": QWEN3_SHAPED,
    "tied": replace(ADVERSARIAL_9_3, num_layers=1, tied=True, o_bias=False, qkv_bias=False),
}


def quantized(model: Path, folder: Path, *, threads: int = 2) -> Path:
    """All of a quantised `model` in a new `folder`."""
    checkpoint = open_checkpoint(str(model))
    folder.mkdir()
    write_weights(checkpoint, folder, threads=threads)
    write_config(checkpoint, folder, write_tokenizer(checkpoint, folder))
    return folder


def pair(name: str, folder: Path) -> tuple[Path, Path]:
    """A model, and what `quantize` makes of it."""
    model = write_hf_model(folder / "model", QUANTIZED[name], seed=5, adversarial=True)
    return model, quantized(model, folder / "out")


@contextmanager
def no_packing() -> Iterator[None]:
    """Whoever packs a weight, or takes memory for an image, fails."""

    def refuse(*arguments: object, **options: object) -> Any:
        raise AssertionError("packed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image, "_packer", refuse)
        patch.setattr(image, "sealed_image", refuse)
        yield


def parts_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header and the data."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def write_parts(path: Path, header: dict[str, Any], data: bytes, *, alignment: int = 4096) -> None:
    text = json.dumps(header).encode()
    end = -(-(8 + len(text)) // alignment) * alignment
    path.write_bytes((end - 8).to_bytes(8, "little") + text.ljust(end - 8) + data)


def spoilt(path: Path, change: Callable[[dict[str, Any]], None], *, alignment: int = 4096) -> None:
    """The header changed, all lengths right again."""
    header, data = parts_of(path)
    change(header)
    write_parts(path, header, data, alignment=alignment)


Build = Callable[[Path], list[str]]


def _generate(spoil: Callable[[Path], object]) -> Build:
    """A sound quantised model, then spoilt."""

    def build(folder: Path) -> list[str]:
        write_tiny_gguf(folder / "tiny.gguf")
        spoil(quantized(folder / "tiny.gguf", folder / "out"))
        return [str(folder / "out"), "--prompt", "x", "--quantization", "int8"]

    return build


def _header(change: Callable[[dict[str, Any]], None]) -> Build:
    return _generate(lambda out: spoilt(out / "model.safetensors", change))


def _data(place: int, value: bytes) -> Build:
    def spoil(out: Path) -> None:
        header, data = parts_of(out / "model.safetensors")
        changed = data[:place] + value + data[place + len(value) :]
        write_parts(out / "model.safetensors", header, changed)

    return _generate(spoil)


def _quantize(
    *more: str, before: Callable[[Path], object] = lambda folder: None, largest: float = 1.0
) -> Build:
    """Of a sound model with one weight so large; DIR in `more` is the folder."""

    def plant(weights: dict[str, Any]) -> None:
        weights["layers.0.up"][3, 5] = largest

    def build(folder: Path) -> list[str]:
        write_hf_model(folder / "m", TINY, seed=3, change=plant)
        before(folder)
        return ["quantize", *(argument.replace("DIR", str(folder)) for argument in more)]

    return build


def _swap(header: dict[str, Any]) -> None:
    one, other = header["layers.0.gate"], header["layers.0.up"]
    one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]


def _without_method(out: Path) -> None:
    raw = json.loads((out / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "gptq"}
    (out / "config.json").write_text(json.dumps(raw))


# What is wrong -> how it is made, and words of what is said; for test_refusals.py.
REFUSED: dict[str, tuple[Build, str]] = {
    "OUT is not empty": (
        _quantize("DIR/m", "DIR/out", before=lambda d: (d / "out" / "x").mkdir(parents=True)),
        "it exists and is not empty",
    ),
    "OUT is a file": (
        _quantize("DIR/m", "DIR/out", before=lambda d: (d / "out").touch()), "it is no folder",
    ),
    "OUT in a folder that is not there": (
        _quantize("DIR/m", "DIR/no/out"), "does not exist; make it first"
    ),
    "no OUT": (_quantize("DIR/m"), "OUT is missing"),
    "MODEL is quantised already": (
        _quantize("DIR/q", "DIR/out", before=lambda d: quantized(d / "m", d / "q")),
        "is quantised already",
    ),
    "a weight that blocks cannot hold": (
        _quantize("DIR/m", "DIR/out", largest=1e7), "beyond what int8 blocks",
    ),
    "a weight that is infinite": (
        _quantize("DIR/m", "DIR/out", largest=float("inf")), "holds a NaN or an infinity",
    ),
    "blocks of a later version": (
        _header(lambda header: header["__metadata__"].update(format="anyshard-int8-2")),
        "another version of anyshard",
    ),
    "a tensor in another's place": (_header(_swap), "; its place is"),
    "a matrix that is not in blocks": (
        _header(lambda header: header["head"].update(shape=[1, 6, 544])), "needs I8 of (3, 2, 544)",
    ),
    "a weight of -128": (_data(17, b"\x80"), "a weight of -128"),
    "a scale that is infinite": (_data(512, b"\x00\x7c"), "a scale that is a NaN"),
    "a configuration of other blocks": (
        _generate(_without_method), "the weights are anyshard-int8-1"
    ),
    "weights that are gone": (
        _generate(lambda out: (out / "model.safetensors").unlink()), "has no model.safetensors"
    ),
}  # fmt: skip
