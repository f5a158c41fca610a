"""SmolLM2 as it comes (Q4_1 and Q8_0 in GGUF), and the same widened: one digest.

The copies are half a gigabyte each and are written under tmp_path.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cached import mapping_of
from gguf_models import write_gguf_model
from grid import Loaded, run_cell
from safetensors.numpy import save_file
from test_checkpoint_gguf import needs_demo

from anyshard.accuracy.hf_fields import hf_config
from anyshard.checkpoint import Checkpoint, build_image, open_checkpoint
from anyshard.checkpoint.names import hf_name
from anyshard.verify.cells import Cell
from anyshard.verify.driver import served
from anyshard.verify.prompt import hashed_tokens

pytestmark = [needs_demo, pytest.mark.slow, pytest.mark.timeout(600)]


def write_safetensors(folder: Path, checkpoint: Checkpoint) -> str:
    folder.mkdir()
    config = checkpoint.config
    (folder / "config.json").write_text(json.dumps(hf_config(config)))
    weights = {hf_name(name): checkpoint.read(name) for name in config.tensor_shapes()}
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def write_gguf(path: Path, checkpoint: Checkpoint) -> str:
    weights = {name: checkpoint.read(name) for name in checkpoint.config.tensor_shapes()}
    write_gguf_model(path, checkpoint.config, weights=weights)
    return str(path)


@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
def test_a_stored_type_has_the_digest_of_its_float32_copy(kind: str, tmp_path: Path) -> None:
    demo = open_checkpoint(None)
    weights = {name: demo.read(name) for name in demo.config.tensor_shapes()}
    wide = write_gguf_model(tmp_path / "m.gguf", demo.config, weights=weights, kind=kind)
    write_gguf_model(tmp_path / "f32.gguf", demo.config, weights=wide)
    narrow, copy = (open_checkpoint(str(tmp_path / f"{name}.gguf")) for name in ("m", "f32"))
    file_bytes = (tmp_path / "m.gguf").stat().st_size
    before = digest(narrow)
    image = build_image(narrow, threads=2)
    assert set(image.storage.values()) == {"float32", "q8_0" if kind == "Q8_0" else "bfloat16"}
    assert image.bytes <= mapping_of(image)[2] <= 1.1 * file_bytes
    image.close()
    (tmp_path / "m.gguf").unlink()
    assert digest(copy) == before


def digest(checkpoint: Checkpoint) -> str:
    model = Loaded.of(
        "copy", served(checkpoint), hashed_tokens(40, checkpoint.config.vocab, seed=1)
    )
    return run_cell(model, Cell(axis="mixed", tp=2, pp=2, prompt_tokens=40, num_tokens=4)).digest


def test_the_demo_and_its_float32_copies_have_one_digest(tmp_path: Path) -> None:
    demo = open_checkpoint(None)
    assert {source.type for source in demo.tensors().values()} == {"F32", "Q8_0", "Q4_1"}
    wanted = digest(demo)
    safetensors = open_checkpoint(write_safetensors(tmp_path / "hf", demo))
    assert safetensors.config == demo.config
    assert digest(safetensors) == wanted
    (tmp_path / "hf" / "model.safetensors").unlink()
    gguf = open_checkpoint(write_gguf(tmp_path / "f32.gguf", demo))
    assert {source.type for source in gguf.tensors().values()} == {"F32"}
    assert digest(gguf) == wanted
