"""Hugging Face directories: weights as the safetensors library reads them, and refusals."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import (
    ADVERSARIAL_9_3,
    ADVERSARIAL_HEAD_80,
    MAX_BINADES,
    MODELS,
    NUM_TWIN_ROWS,
    read_hf_weights,
    write_hf_model,
)
from safetensors.numpy import load_file, save_file

from anyshard.checkpoint import build_image, open_checkpoint
from anyshard.checkpoint.names import hf_name
from anyshard.checkpoint.safetensors import read_safetensors
from anyshard.checkpoint.widen import TensorType
from anyshard.errors import CheckpointError
from anyshard.tokenizer import open_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_hf_model(tmp_path / "model", ADVERSARIAL_HEAD_80, seed=1, adversarial=True)


def rewrite(directory: Path, **changes: np.ndarray | None) -> None:
    """Replace, add or (None) drop tensors by their HF name, dots written as __."""
    tensors: dict[str, Any] = load_file(directory / "model.safetensors")
    for name, value in changes.items():
        tensors[name.replace("__", ".")] = value
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, directory / "model.safetensors")


def configure(directory: Path, **changes: object) -> None:
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | changes))


@pytest.mark.parametrize("name", MODELS)
def test_model_reads_as_the_safetensors_library_reads_it(name: str, tmp_path: Path) -> None:
    config = MODELS[name]
    directory = write_hf_model(tmp_path, config, seed=3, adversarial=name != "qwen2")
    checkpoint = open_checkpoint(str(directory))
    assert checkpoint.config == config
    expected = read_hf_weights(directory, config)
    assert list(checkpoint.tensors()) == list(expected)
    for tensor_name, wanted in expected.items():
        found = checkpoint.read(tensor_name)
        assert found.dtype == np.float32
        assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))
        assert not checkpoint.tensors()[tensor_name].raw.flags.writeable


def test_equal_seeds_write_equal_models_that_are_as_adversarial_as_said(tmp_path: Path) -> None:
    one = write_hf_model(tmp_path / "one", ADVERSARIAL_9_3, seed=5, adversarial=True)
    two = write_hf_model(tmp_path / "two", ADVERSARIAL_9_3, seed=5, adversarial=True)
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    weights = read_hf_weights(one, ADVERSARIAL_9_3)
    head = weights["head"]
    assert np.array_equal(head[:NUM_TWIN_ROWS], head[-NUM_TWIN_ROWS:])
    exponents = np.frexp(weights["layers.1.down"])[1]
    assert exponents.max() - exponents.min() >= 2 * MAX_BINADES - 8
    norms = [tuple(w) for n, w in weights.items() if n.endswith("norm")]
    assert len(set(norms)) == len(norms)


def test_sharded_model_reads_like_the_whole_one(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    whole = {n: open_checkpoint(str(model)).read(n) for n in ADVERSARIAL_HEAD_80.tensor_shapes()}
    names = sorted(tensors)
    (model / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for part in range(2):
        file_name = f"model-0000{part + 1}-of-00002.safetensors"
        save_file({n: tensors[n] for n in names[part::2]}, model / file_name)
        weight_map |= dict.fromkeys(names[part::2], file_name)
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    checkpoint = open_checkpoint(str(model))
    for name, wanted in whole.items():
        assert np.array_equal(checkpoint.read(name), wanted)

    swapped = weight_map | {names[0]: weight_map[names[1]]}
    index.write_text(json.dumps({"weight_map": swapped}))
    with pytest.raises(CheckpointError, match=r"00001-of.*holds tensor .* places in 'model-00002"):
        open_checkpoint(str(model))
    index.write_text(json.dumps({"weight_map": weight_map | {"gone": weight_map[names[0]]}}))
    with pytest.raises(CheckpointError, match="tensor 'gone' is missing"):
        open_checkpoint(str(model))
    for outside in ("../model.safetensors", "/etc/passwd", "x/../y.safetensors"):
        index.write_text(json.dumps({"weight_map": weight_map | {names[0]: outside}}))
        with pytest.raises(CheckpointError, match="in the same directory"):
            open_checkpoint(str(model))
    index.write_text(json.dumps({"weight_map": weight_map}))
    (model / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002.*: the file does"):
        open_checkpoint(str(model))


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_width_models_widen_exactly(model: Path, kind: TensorType) -> None:
    wide = load_file(model / "model.safetensors")
    stored = {name: narrowed(weight, kind) for name, weight in wide.items()}
    (model / "model.safetensors").write_bytes(safetensors_bytes(stored, kind))
    checkpoint = open_checkpoint(str(model))
    reference = build_image(checkpoint, threads=1, kernels="reference")
    for name in ADVERSARIAL_HEAD_80.tensor_shapes():
        source = checkpoint.tensors()[name]
        assert source.type == kind
        halves = stored[hf_name(name)]
        expected = (
            halves.view(np.float16).astype(np.float32)
            if kind == "F16"
            else (halves.astype(np.uint32) << 16).view(np.float32)
        )
        assert np.array_equal(source.read().view(np.uint32), expected.view(np.uint32))
    assert build_image(checkpoint, threads=2).sha256() == reference.sha256()


def narrowed(weight: np.ndarray, kind: TensorType) -> np.ndarray:
    if kind == "F16":
        return weight.astype(np.float16).view(np.uint16)
    return (weight.view(np.uint32) >> 16).astype(np.uint16)


def safetensors_bytes(stored: Mapping[str, np.ndarray], kind: TensorType) -> bytes:
    """A file of 16-bit tensors, whose numbers NumPy has no name for."""
    header: dict[str, Any] = {}
    end = 0
    for name, halves in stored.items():
        span = [end, end + halves.nbytes]
        header[name] = {"dtype": kind, "shape": list(halves.shape), "data_offsets": span}
        end = span[1]
    text = json.dumps(header).encode()
    return b"".join(
        [len(text).to_bytes(8, "little"), text, *(h.tobytes() for h in stored.values())]
    )


def test_missing_files_are_named(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_checkpoint(str(model))
    (model / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json$"):
        open_checkpoint(str(model))
    (model / "m.gguf").touch()
    with pytest.raises(CheckpointError, match=r"has no config\.json; name the file itself: .*gguf"):
        open_checkpoint(str(model))


def test_missing_tensor_and_wrong_shape_are_named(model: Path) -> None:
    name = "model__layers__1__mlp__up_proj__weight"
    rewrite(model, **{name: None})
    with pytest.raises(CheckpointError, match=r"1\.mlp\.up_proj\.weight' is missing.*\(328, 240\)"):
        open_checkpoint(str(model))
    rewrite(model, **{name: np.ones((240, 328), np.float32)})
    with pytest.raises(CheckpointError, match=r"shape \(240, 328\).*needs \(328, 240\)"):
        open_checkpoint(str(model))


def test_leftover_tensors_are_refused_unless_they_change_nothing(model: Path) -> None:
    rewrite(model, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(40, np.float32))
    open_checkpoint(str(model))
    rewrite(model, model__layers__0__self_attn__q_norm__weight=np.ones(80, np.float32))
    with pytest.raises(CheckpointError, match=r"q_norm\.weight' has no place in this model"):
        open_checkpoint(str(model))


def test_tied_head_must_equal_the_embedding(model: Path) -> None:
    embed = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    configure(model, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' differs"):
        open_checkpoint(str(model))
    rewrite(model, lm_head__weight=embed)
    assert "head" not in open_checkpoint(str(model)).tensors()
    rewrite(model, lm_head__weight=None)
    assert open_checkpoint(str(model)).config.tied


def test_more_layers_than_tensors_are_refused_before_anything_is_sized(model: Path) -> None:
    configure(model, num_hidden_layers=1 << 27)
    with pytest.raises(CheckpointError, match="134217728 layers, but the file holds 35 tensors"):
        open_checkpoint(str(model))


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"a": 1, "a": 2}', "\xff"])
def test_config_that_is_no_object_is_refused(model: Path, text: str) -> None:
    (model / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        open_checkpoint(str(model))


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3", "F64", "bf16", ""])
def test_other_dtypes_are_refused_by_name(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(CheckpointError, match=f"tensor 't' has dtype '{dtype}'.* read; F32"):
        read_safetensors(written(tmp_path, {"t": entry(0, 8, dtype=dtype)}, 8))


def entry(start: int, stop: int, *, dtype: str = "F32", shape: list[Any] | None = None) -> Any:
    shape = [(stop - start) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def written(folder: Path, header: object, payload: int, *, claimed: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "hostile.safetensors"
    length = len(text) if claimed is None else claimed
    path.write_bytes(length.to_bytes(8, "little") + text + bytes(payload))
    return path


HOSTILE: dict[str, tuple[Any, int, str]] = {
    "hole": ({"t": entry(4, 8)}, 8, "starts at byte 4, but the one before it ends at 0"),
    "overlap": ({"t": entry(0, 8), "u": entry(4, 12)}, 12, "'u' starts at byte 4"),
    "cut": ({"t": entry(0, 8)}, 4, "need 8 bytes, but the file holds 4; the file is cut"),
    "half an fp16": ({"t": entry(0, 7, dtype="F16", shape=[4])}, 7, "needs 8 bytes, but spans"),
    "types of one width taken for another": (
        {"t": entry(0, 8, dtype="BF16", shape=[2])},
        8,
        "needs 4 bytes, but spans 0 to 8",
    ),
    "left over": ({"t": entry(0, 8)}, 12, "bytes are left over"),
    "span and shape disagree": ({"t": entry(0, 8, shape=[3])}, 8, "needs 12 bytes, but spans"),
    "overflow": ({"t": entry(0, 8, shape=[1 << 62, 1 << 62])}, 8, "needs 8507059173023461586"),
    "negative": ({"t": entry(0, 8, shape=[-2])}, 8, "up to 8 whole numbers"),
    "fraction": ({"t": entry(0, 8, shape=[2.0])}, 8, "up to 8 whole numbers"),
    "truth value": ({"t": entry(0, 4, shape=[True])}, 4, "up to 8 whole numbers"),
    "rank": ({"t": entry(0, 4, shape=[1] * 9)}, 4, "up to 8 whole numbers"),
    "offsets": ({"t": entry(0, 4) | {"data_offsets": [0]}}, 4, "two whole numbers"),
    "backwards": ({"t": entry(8, 0, shape=[2])}, 8, "spans 8 to 0"),
    "no entry": ({"t": 1}, 0, "needs exactly dtype, shape and data_offsets"),
    "name twice": (
        b'{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"t":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        8,
        "names one key twice",
    ),
    "no JSON": (b"{]", 0, "not valid JSON"),
    "deep": (b'{"a":' * 200_000, 0, "not valid JSON"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_by_name(case: str, tmp_path: Path) -> None:
    header, payload, message = HOSTILE[case]
    path = written(tmp_path, header, payload)
    with pytest.raises(CheckpointError) as caught:
        read_safetensors(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    for claimed in (3, 1 << 40, (1 << 64) - 1):
        with pytest.raises(CheckpointError, match=r"the header needs|not valid JSON"):
            read_safetensors(written(tmp_path, {}, 0, claimed=claimed))
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="the file has 3"):
        read_safetensors(tmp_path / "short")


def test_cut_or_flipped_files_are_refused_or_read(model: Path) -> None:
    path = model / "model.safetensors"
    content = path.read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    for length in reversed([*range(0, header_end, 7), *range(header_end, len(content), 99_991)]):
        os.truncate(path, length)
        with pytest.raises(CheckpointError):
            open_checkpoint(str(model))
    rng = random.Random(0)
    for _ in range(300):
        damaged = bytearray(content[: header_end + 1])
        damaged[rng.randrange(header_end)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        os.truncate(path, len(content))
        try:
            open_checkpoint(str(model))
        except CheckpointError as error:
            assert "\n" not in str(error)


def test_model_without_tokenizer_opens_and_says_so_when_text_comes(model: Path) -> None:
    checkpoint = open_checkpoint(str(model))
    assert checkpoint.tokenizer_material is None
    with pytest.raises(CheckpointError, match=r"without a tokenizer \(tokenizer\.json\)"):
        open_tokenizer(checkpoint)


def test_names_follow_hf() -> None:
    assert hf_name("layers.12.q_bias") == "model.layers.12.self_attn.q_proj.bias"
    assert hf_name("head") == "lm_head.weight"
