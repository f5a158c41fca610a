"""A quantised model: the bits of the model it came from, mapped, in the layout that is documented.

The layout is read back here by the safetensors library and by the words of docs/quantize.md.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from cached import mapping_of
from gguf_files import write_tiny_gguf
from gguf_models import write_gguf_model
from models import ADVERSARIAL_9_3, ADVERSARIAL_HEAD_80, MODELS, QWEN3_SHAPED, write_hf_model
from quantized import QUANTIZED, no_packing, pair, parts_of, quantized
from safetensors import safe_open
from test_checkpoint_gguf import needs_demo

from anyshard import __version__
from anyshard.accuracy.measure import weights64
from anyshard.checkpoint import build_image, image_directory, open_checkpoint, weights_bytes
from anyshard.checkpoint.cache import CACHE_BYTES, ImageCache, cache_problem, load_image
from anyshard.checkpoint.quantized import config_fields, config_of_fields, places
from anyshard.cli import main
from anyshard.config import Llama3Scaling, ModelConfig, RopeDivisors
from anyshard.errors import CheckpointError
from anyshard.fidelity import weights_sha256
from anyshard.ops import available_bodies
from anyshard.verify.driver import Driver, served

BLOCK_BYTES = 544
LLAMA3 = Llama3Scaling(
    factor=32.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=8192
)
DIVISORS = tuple(float(np.float32(1 + i / 7)) for i in range(8))
CONFIGS: dict[str, ModelConfig] = MODELS | {
    "qwen3": QWEN3_SHAPED,
    "llama 3": replace(ADVERSARIAL_9_3, rope_scaling=LLAMA3, rope_theta=5e5),
    "divisors": replace(ADVERSARIAL_9_3, rope_scaling=RopeDivisors(divisors=DIVISORS)),
    "biases of a GGUF": replace(ADVERSARIAL_9_3, o_bias=False, mlp_bias=False),
    "qwen2 with more": replace(MODELS["qwen2"], o_bias=True, mlp_bias=True, head_dim=32),
    "float32 epsilon": replace(ADVERSARIAL_9_3, norm_eps=float(np.float32(1e-5))),
}


@pytest.fixture(autouse=True)
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """--quantization is what a user has who gives none."""
    monkeypatch.delenv("ANYSHARD_QUANTIZATION")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_comes_back(name: str) -> None:
    fields = json.loads(json.dumps(config_fields(CONFIGS[name])))
    assert config_of_fields(fields) == CONFIGS[name]


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_file_is_the_image_that_is_built(name: str, tmp_path: Path) -> None:
    """Every block and vector, the hash of the weights, and the sizes told before."""
    model, out = pair(name, tmp_path)
    built = build_image(open_checkpoint(str(model)), threads=2, arithmetic="int8")
    checkpoint = open_checkpoint(str(out))
    assert checkpoint.config == QUANTIZED[name]
    with no_packing():
        mapped = build_image(checkpoint, threads=2, arithmetic="int8")
    assert list(mapped.directory) == list(built.directory)
    for tensor, place in built.directory.items():
        assert replace(mapped.directory[tensor], offset=0) == replace(place, offset=0)
        if place.kind == "matrix":
            assert (mapped.panels(tensor) == built.panels(tensor)).all(), tensor
            widened = checkpoint.read(tensor)
            assert (widened == built.matrix(tensor)).all() and widened.shape == place.shape
            some = checkpoint.sources[tensor].read_rows(5, place.shape[0] - 3)
            assert (some == widened[5:-3]).all()
        else:
            assert (mapped.vector(tensor) == built.vector(tensor)).all(), tensor
    hashes = {weights_sha256(mapped, threads=2, kernels=body) for body in available_bodies()}
    assert hashes == {weights_sha256(built, threads=1)}
    assert (out / "model.safetensors").stat().st_size == weights_bytes(open_checkpoint(str(model)))


def test_the_image_is_the_file(tmp_path: Path) -> None:
    """By device and inode, read-only, in its whole length; a part of the names is mapped, too."""
    _, out = pair("adversarial-9-3", tmp_path)
    checkpoint = open_checkpoint(str(out))
    assert checkpoint.arithmetic("auto") == checkpoint.arithmetic("int8") == "int8"
    with no_packing():
        image = build_image(checkpoint, threads=1, arithmetic="int8")
        part = build_image(checkpoint, names=["layers.1.o"], threads=1, arithmetic="int8")
    file = os.stat(out / "model.safetensors")
    assert mapping_of(image)[:2] == ("r--s", str(out / "model.safetensors"))
    assert image.bytes == file.st_size
    assert image_directory(checkpoint.config, checkpoint.sources, "int8")[1] == file.st_size
    assert not image.panels("embed").flags.writeable
    assert (part.panels("layers.1.o") == image.panels("layers.1.o")).all()
    kept = ImageCache(folder=tmp_path / "images", most_bytes=CACHE_BYTES)
    with no_packing():
        load_image(checkpoint, threads=1, cache=kept, arithmetic="int8")
    assert not (tmp_path / "images").exists()
    reason = cache_problem(kept, checkpoint, body="scalar", arithmetic="int8")
    assert reason is not None and "mapped" in reason


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_layout_is_as_documented(name: str, tmp_path: Path) -> None:
    """By the safetensors library, and from the configuration by hand."""
    _, out = pair(name, tmp_path)
    config, path = QUANTIZED[name], out / "model.safetensors"
    header, data = parts_of(path)
    about = header.pop("__metadata__")
    assert about == {
        "format": "anyshard-int8-1",
        "source": "model",
        "version": __version__,
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    start, end = path.stat().st_size - len(data), 0
    assert start % 4096 == 0
    shapes = config.tensor_shapes()
    order = [n for n in shapes if len(shapes[n]) == 2] + [n for n in shapes if len(shapes[n]) == 1]
    assert list(header) == list(places(config)) == order
    with safe_open(path, "np") as file:
        assert set(file.keys()) == set(order)
        for tensor in order:
            found, shape = file.get_tensor(tensor), shapes[tensor]
            assert header[tensor]["data_offsets"][0] == end
            end += found.nbytes
            if len(shape) == 1:
                assert found.dtype == np.float32 and found.shape == shape
                continue
            width = config.head_dim if tensor.endswith(".o") else shape[1]
            blocks = shape[1] // width * -(-width // 32)
            assert found.dtype == np.int8
            assert found.shape == (-(-shape[0] // 16), blocks, BLOCK_BYTES)
            assert (start + header[tensor]["data_offsets"][0]) % 32 == 0


def test_the_code_of_the_documentation_reads_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_hf_model(tmp_path / "model", ADVERSARIAL_9_3, seed=5)
    out = quantized(model, tmp_path / "OUT")
    text = (Path(__file__).parent.parent / "docs" / "quantize.md").read_text("utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {"safetensors": safetensors}
    exec(code, found)
    wanted = open_checkpoint(str(out)).read("layers.0.gate")
    assert wanted.any() and (found["rows"][:424, :144] == wanted).all()


@pytest.mark.parametrize("name", ["adversarial-9-3", "adversarial-head-80"])
@pytest.mark.parametrize("cut", [{}, {"tp": 3}, {"pp": 2}, {"tp": 2}])
def test_logits_have_the_bits_of_the_model(name: str, cut: dict[str, int], tmp_path: Path) -> None:
    model, out = pair(name, tmp_path)
    tokens = [3, 700, 41, 5, 998, 77, 3, 12]
    found = []
    for path in (model, out):
        with Driver(served(open_checkpoint(str(path)), arithmetic="int8"), **cut) as driver:
            found.append(driver.logits(tokens))
    assert np.isfinite(found[0]).all() and found[0].tobytes() == found[1].tobytes()


def test_from_gguf_in_every_order_of_rows(tmp_path: Path) -> None:
    """llama's converter swaps rows of q and k; blocks of Q8_0 are taken as they are."""
    config = replace(ADVERSARIAL_HEAD_80, hidden=256, num_heads=4, num_kv_heads=2, head_dim=64,
                     ffn=512)  # fmt: skip
    write_gguf_model(tmp_path / "m.gguf", config, kind="Q8_0", seed=2)
    out = quantized(tmp_path / "m.gguf", tmp_path / "out")
    built = build_image(open_checkpoint(str(tmp_path / "m.gguf")), threads=2, arithmetic="int8")
    mapped = build_image(open_checkpoint(str(out)), threads=2, arithmetic="int8")
    assert all(
        (mapped.panels(n) == built.panels(n)).all()
        for n, place in built.directory.items()
        if place.kind == "matrix"
    )


def test_none_takes_the_blocks_as_float32(tmp_path: Path) -> None:
    """q times scale, exact in float32, which float64 is measured against, too."""
    _, out = pair("adversarial-head-80", tmp_path)
    checkpoint = open_checkpoint(str(out))
    assert checkpoint.arithmetic("none") == "f32"
    mapped = build_image(checkpoint, threads=2, arithmetic="int8")
    wide = build_image(checkpoint, threads=2, arithmetic="f32")
    wanted = weights64(checkpoint)
    for name in QUANTIZED["adversarial-head-80"].tensor_shapes():
        if mapped.directory[name].kind == "matrix":
            assert wide.directory[name].storage == "float32"
            assert (wide.matrix(name) == mapped.matrix(name)).all()
            assert (wanted[name] == mapped.matrix(name)).all()


def test_a_quantised_model_is_not_quantised_again(tmp_path: Path) -> None:
    _, out = pair("tied", tmp_path)
    with pytest.raises(CheckpointError, match="is quantised already"):
        quantized(out, tmp_path / "again")
    assert os.listdir(tmp_path / "again") == []


def test_weights_beyond_a_float16_scale_are_refused(tmp_path: Path) -> None:
    def huge(weights: dict[str, np.ndarray]) -> None:
        weights["layers.1.up"][3, 5] = 1e7

    model = write_hf_model(tmp_path / "model", ADVERSARIAL_9_3, seed=1, change=huge)
    with pytest.raises(CheckpointError, match=r"layers\.1\.up.*beyond what int8"):
        quantized(model, tmp_path / "out")


def json_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


SAME = ("prompt_tokens", "tokens", "logits_sha256", "profile", "profile_hash", "weight_bytes")


@pytest.mark.parametrize("split", [[], ["-tp", "3"]])
def test_the_verb_writes_what_generate_runs_with_the_same_digest(
    split: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "tiny.gguf", tmp_path / "out"
    write_tiny_gguf(model, types={"embed": "Q8_0"})
    told = json_of(["quantize", str(model), str(out)], capsys)
    assert sorted(os.listdir(out)) == sorted(told["files"])  # type: ignore[call-overload]
    assert sorted(os.listdir(tmp_path)) == ["out", "tiny.gguf"]
    run = ["--prompt", "abc <think>ab", "--max-tokens", "9", "--comm", "threads", *split]
    first = json_of(["generate", str(model), "--quantization", "int8", *run], capsys)
    with no_packing():
        second = json_of(["generate", str(out), *run], capsys)
        third = json_of(["generate", str(out), "--quantization", "int8", *run], capsys)
    for field in SAME:
        assert first[field] == second[field] == third[field], field
    assert first["profile"] == told["profile"] == "int8"
    wide = json_of(["generate", str(out), "--quantization", "none", *run], capsys)
    assert wide["profile"] == "f32" and wide["prompt_tokens"] == first["prompt_tokens"]


@needs_demo
def test_the_demo_model_tokenizes_and_answers_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "smollm2"
    json_of(["quantize", str(out)], capsys)
    run = ["--prompt", "def f(x):\n    return é", "--chat", "--max-tokens", "3", "-tp", "2"]
    first = json_of(["generate", "--quantization", "int8", *run], capsys)
    second = json_of(["generate", str(out), *run], capsys)
    assert {field: first[field] for field in SAME} == {field: second[field] for field in SAME}


def test_every_rank_maps_one_file_and_doctor_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    json_of(["quantize", str(tmp_path / "tiny.gguf"), str(tmp_path / "out")], capsys)
    facts = json_of(["doctor", str(tmp_path / "out")], capsys)
    assert facts["cache"]["not_kept"] == "its file is mapped as it is"  # type: ignore[index]
    assert facts["profile"]["name"] == "int8"  # type: ignore[index]
    assert "INT8" in facts["model"]["types"]  # type: ignore[index]
