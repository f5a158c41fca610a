"""Quantised models that are damaged or made up: refused in one sentence, or exactly right."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import TINY
from models import write_hf_model
from quantized import parts_of, quantized, spoilt, write_parts

from anyshard.checkpoint import Checkpoint, build_image, open_checkpoint
from anyshard.checkpoint.quantized import places
from anyshard.errors import CheckpointError

BLOCK_BYTES, Q_BYTES = 544, 512
Change = Callable[[dict[str, Any]], None]
SIZE = sum(place.bytes for place in places(TINY).values())


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return quantized(write_hf_model(tmp_path / "m", TINY, seed=3), tmp_path / "out", threads=1)


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def loaded(folder: Path) -> Checkpoint:
    checkpoint = open_checkpoint(str(folder))
    build_image(checkpoint, threads=2, arithmetic="int8").close()
    return checkpoint


def refused(folder: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        loaded(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def entry(name: str, **fields: Any) -> Change:
    return lambda header: header[name].update(fields)


def swapped(header: dict[str, Any]) -> None:
    """Two tensors of one shape change places: right sizes, wrong weights."""
    one, other = header["layers.0.gate"], header["layers.0.up"]
    one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]


def renamed(header: dict[str, Any]) -> None:
    header["layers.0.spare"] = header.pop("layers.0.gate")


def shortened(header: dict[str, Any]) -> None:
    header.pop("norm")


HEADERS: dict[str, tuple[Change, str]] = {
    "another version": (
        lambda header: header["__metadata__"].update(format="anyshard-int8-2"),
        "its format is 'anyshard-int8-2'",
    ),
    "two tensors in each other's place": (swapped, "starts at byte .* its place is"),
    "a name that is none": (renamed, "'layers.0.spare' has no place"),
    "a matrix as floats": (entry("layers.0.gate", dtype="F32"), "needs .* bytes, but spans"),
    "bytes that are no I8": (entry("layers.0.gate", dtype="U8"), "dtype 'U8', which cannot be"),
    "a type of HF": (entry("norm", dtype="F16"), "dtype 'F16', which cannot be read; F32 and I8"),
    "another shape of as many bytes": (
        entry("layers.0.gate", shape=[2, 6, BLOCK_BYTES]),
        r"is I8 of shape \(2, 6, 544\); the configuration needs I8 of \(6, 2, 544\)",
    ),
    "a vector as blocks": (
        entry("norm", dtype="I8", shape=[64 * 4]), "is I8 of shape .* needs F32 of"
    ),
    "a hole": (
        lambda header: header.pop("layers.0.gate") and None, "neither overlap nor leave holes"
    ),
    "more than the file holds": (
        entry("norm", shape=[65], data_offsets=[SIZE - 256, SIZE + 4]),
        "the file is cut short|neither overlap nor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies_is_refused(name: str, out: Path) -> None:
    change, words = HEADERS[name]
    loaded(out)
    spoilt(weights(out), change)
    refused(out, words)


def test_a_missing_vector_at_the_end_is_refused(out: Path) -> None:
    header, data = parts_of(weights(out))
    shortened(header)
    write_parts(weights(out), header, data[: SIZE - 256])
    refused(out, "tensor 'norm' is missing")


def test_data_that_is_not_at_a_page_is_refused(out: Path) -> None:
    spoilt(weights(out), lambda header: None, alignment=8)
    refused(out, "the data begins at byte .*; a multiple of 4096 is needed")


def test_a_file_that_ends_anywhere_is_refused(out: Path) -> None:
    content = weights(out).read_bytes()
    for size in (0, 7, 8, 100, 4095, 4096, 5000, len(content) - 1):
        weights(out).write_bytes(content[:size])
        refused(out, "empty|cut short")
    weights(out).write_bytes(content + b"\0")
    refused(out, "bytes are left over")


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"quantization_config": None}, "quantization_config is None"),
    ({"quantization_config": {"quant_method": "gptq"}}, "the weights are anyshard-int8-1"),
    ({"num_hidden_layers": 1 << 27}, "134217728 layers, but the file holds"),
    ({"hidden_size": 128}, "the configuration needs I8"),
    ({"num_key_value_heads": 1}, "the configuration needs"),
    ({"tie_word_embeddings": True}, "'head' has no place"),
    ({"hidden_size": -1}, "field hidden_size is -1"),
]
OWN: list[tuple[dict[str, Any], str]] = [
    ({"o_bias": 1}, "quantization_config.o_bias is 1; true or false"),
    ({"qkv_bias": False}, "has no place in this model"),
    ({"rope_divisors": [1.0]}, "8 finite numbers above 0"),
    ({"rope_divisors": [1.0] * 7 + [0.0]}, "8 finite numbers above 0"),
    ({"rope_divisors": [1.0] * 7 + [float("nan")]}, "8 finite numbers above 0"),
    ({"rope_divisors": "x"}, "8 finite numbers above 0"),
    ({"more": 1}, "which needs an object of"),
]


@pytest.mark.parametrize(("change", "words"), [*CONFIGS, *OWN])
def test_a_configuration_that_does_not_fit_is_refused(
    change: dict[str, Any], words: str, out: Path
) -> None:
    raw = json.loads((out / "config.json").read_text())
    inner = any(change is own for own, _ in OWN)
    (raw["quantization_config"] if inner else raw).update(change)
    (out / "config.json").write_text(json.dumps(raw))
    refused(out, words)


def test_a_directory_without_its_configuration_is_refused(out: Path) -> None:
    (out / "config.json").unlink()
    refused(out, "has no config.json")


def test_a_directory_without_its_weights_is_refused(out: Path) -> None:
    weights(out).unlink()
    refused(out, "has no model.safetensors")


def at(name: str, byte: int) -> int:
    """Where byte `byte` of a tensor is among the data."""
    return places(TINY)[name].start + byte


@pytest.mark.parametrize(
    ("name", "byte", "value", "words"),
    [
        ("head", 3 * BLOCK_BYTES + 17, b"\x80", "a weight of -128"),
        ("layers.0.o", 0, b"\x80", "a weight of -128"),
        ("layers.0.down", BLOCK_BYTES - 1, b"\x7c", "a scale that is a NaN or an infinity"),
        ("embed", Q_BYTES, b"\x01\xfe", "a scale that is a NaN or an infinity"),
        ("layers.0.q_bias", 8, b"\0\0\x80\xff", "a NaN or an infinity"),
        ("norm", 252, b"\1\0\x80\x7f", "a NaN or an infinity"),
    ],
)
def test_blocks_that_no_weight_becomes_are_refused(
    name: str, byte: int, value: bytes, words: str, out: Path
) -> None:
    header, data = parts_of(weights(out))
    place = at(name, byte)
    write_parts(weights(out), header, data[:place] + value + data[place + len(value) :])
    refused(out, f"tensor '{name}' holds {words}")


def test_a_scale_may_end_in_the_byte_of_minus_128(out: Path) -> None:
    header, data = parts_of(weights(out))
    place = at("head", Q_BYTES)
    write_parts(weights(out), header, data[:place] + b"\x80\x80" + data[place + 2 :])
    loaded(out)


@pytest.mark.parametrize("how", ["replaced", "cut", "gone"])
def test_a_file_that_changes_before_it_is_mapped_is_refused(how: str, out: Path) -> None:
    checkpoint = open_checkpoint(str(out))
    if how == "cut":
        os.truncate(weights(out), 4096)
    else:
        content = weights(out).read_bytes()
        weights(out).unlink()
        if how == "replaced":
            weights(out).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"changed while|cannot be read"):
        build_image(checkpoint, threads=1, arithmetic="int8")


def mutated(rng: random.Random, header: dict[str, Any]) -> bytes:
    """The text of a header with one thing in it made up, or one byte another."""
    name = rng.choice(list(header))
    numbers = [0, 1, -1, 31, 544, 1 << 31, 1 << 62, 1 << 64, 1.5, True, None, "x", [], {}]
    match rng.randrange(6):
        case 0:
            header.pop(name)
        case 1:
            header[rng.choice([*header, "x", ""])] = header.pop(name)
        case 2:
            field = rng.choice(list(header[name]))
            header[name][field] = rng.choice(numbers)
        case 3 if name != "__metadata__":
            numbers_of = header[name][rng.choice(["shape", "data_offsets"])]
            numbers_of[rng.randrange(len(numbers_of))] = rng.choice(numbers)
        case 4:
            header[name] = rng.choice([*numbers, header[rng.choice(list(header))]])
        case _:
            text = bytearray(json.dumps(header).encode())
            for _ in range(rng.randint(1, 3)):
                text[rng.randrange(len(text))] = rng.randrange(256)
            return bytes(text)
    return json.dumps(header).encode()


def test_any_header_is_read_truly_or_refused(out: Path) -> None:
    """Whatever is taken has every tensor where it was written."""
    path, rng, taken = weights(out), random.Random(11), 0
    header, data = parts_of(path)
    kept = loaded(out)
    wanted = {name: source.read() for name, source in kept.sources.items()}
    for _ in range(500):
        text = mutated(rng, json.loads(json.dumps(header)))
        end = max(4096, -(-(8 + len(text)) // 4096) * 4096)
        path.write_bytes((end - 8).to_bytes(8, "little") + text.ljust(end - 8) + data)
        try:
            checkpoint = loaded(out)
        except CheckpointError as error:
            assert "\n" not in str(error) and str(out) in str(error)
            continue
        taken += 1
        assert all(np.array_equal(checkpoint.read(n), wanted[n]) for n in wanted)
    assert taken > 3, "metadata may be changed: the test does take what is right"
