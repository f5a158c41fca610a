"""--quantization from the command line: what auto takes, what is printed, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cached import SMALL
from gguf_models import write_gguf_model
from models import ADVERSARIAL_9_3, ADVERSARIAL_HEAD_80, write_hf_model

from anyshard.checkpoint import Checkpoint, build_image, open_checkpoint
from anyshard.checkpoint.cache import ImageCache, load_image
from anyshard.cli import main
from anyshard.config import Arithmetic
from anyshard.layout import plan
from anyshard.loading import f32_profile, int8_profile
from anyshard.model import program
from anyshard.ops.storage import unpack_blocks

TWO_LAYERS = replace(SMALL, num_layers=2)
Capture = pytest.CaptureFixture[str]
SHORT = ("--max-tokens", "4", "--ignore-eos", "--json", "--threads", "1", "--comm", "threads")


def generate(capfd: Capture, *flags: str) -> dict[str, Any]:
    """What the demo model says, whose file is Q4_1."""
    assert main(["generate", "--prompt", "abc", *SHORT, *flags]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def verify(capfd: Capture, model: Path, *flags: str) -> dict[str, Any]:
    short = ("--in-process", "--json", "--prompt-tokens", "33", "--tokens", "3")
    assert main(["verify", str(model), *short, *flags]) == 0
    report: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert report["equal"]
    return report


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def quantised_file(folder: Path) -> Path:
    write_gguf_model(folder / "q4.gguf", TWO_LAYERS, kind="Q4_0", seed=2)
    return folder / "q4.gguf"


def test_auto_is_int8_for_a_file_that_is_quantised(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ANYSHARD_QUANTIZATION")
    found = generate(capfd)
    assert (found["profile"], found["profile_hash"]) == ("int8", int8_profile().sha256())
    split = generate(capfd, "-tp", "3", "-pp", "2", "--chunk", "2")
    assert split["logits_sha256"] == found["logits_sha256"]
    assert split["profile_hash"] == found["profile_hash"]
    wide = generate(capfd, "--quantization", "none")
    assert (wide["profile"], wide["profile_hash"]) == ("f32", f32_profile().sha256())
    assert wide["logits_sha256"] != found["logits_sha256"]
    assert wide["weight_bytes"][0] > 3 * found["weight_bytes"][0]


def test_auto_is_float32_for_a_file_of_floats(
    folder: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ANYSHARD_QUANTIZATION")
    write_gguf_model(folder / "f16.gguf", SMALL, kind="F16", seed=2)
    flags = ("--layouts", "tp2")
    assert verify(capfd, folder / "f16.gguf", *flags)["profile"] == "f32"
    asked = verify(capfd, folder / "f16.gguf", *flags, "--quantization", "int8")
    assert asked["profile"] == "int8"
    assert main(["doctor", str(folder / "f16.gguf"), "--quantization", "int8", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["profile"]["name"] == "int8"


def test_weights_beyond_int8_are_refused_by_name(folder: Path, capfd: Capture) -> None:
    def grow(weights: dict[str, np.ndarray[Any, Any]]) -> None:
        weights["layers.1.up"][3, 5] = 9e6

    model = write_hf_model(folder / "huge", ADVERSARIAL_9_3, seed=3, change=grow)
    flags = ["--prompt", "abc", "--max-tokens", "2", "--quantization", "int8"]
    assert main(["verify", str(model), "--layouts", "tp2", "--quantization", "int8"]) == 2
    said = capfd.readouterr().err
    assert "(layers.1.up)" in said and "take --quantization none" in said
    assert main(["generate", str(model), *flags]) == 2
    assert "Traceback" not in capfd.readouterr().err


def test_a_grid_of_int8_cells_is_equal(quantised_file: Path, capfd: Capture) -> None:
    report = verify(
        capfd, quantised_file, "--quantization", "int8", "--layouts", "tp2,tp4,heads3+1,tp3pp2",
        "--chunk", "7,all", "--threads", "1,2",
    )  # fmt: skip
    assert report["profile"] == "int8" and len(report["cells"]) >= 16
    assert not report["vacuous"]


def test_an_unknown_word_is_refused(capfd: Capture) -> None:
    assert main(["generate", "--prompt", "a", "--quantization", "int4"]) == 2
    said = capfd.readouterr().err
    assert '"auto", "none", "int8"' in said


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q6_K"])
def test_native_and_numpy_build_the_same_int8_image(kind: str, tmp_path: Path) -> None:
    """Random blocks of Q8_0 hold -128 in one of eight; heads of 48 are cut by those of 32."""
    config = replace(SMALL, num_heads=16, num_kv_heads=4, head_dim=48) if kind[0] == "Q" else SMALL
    write_gguf_model(tmp_path / "m.gguf", config, kind=kind, seed=4)
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
    numpy = build_image(checkpoint, threads=1, kernels="reference", arithmetic="int8")
    assert build_image(checkpoint, threads=2, arithmetic="int8").sha256() == numpy.sha256()
    stays = sum(
        int((unpack_blocks(numpy.panels(name), np.arange(place.shape[0]))[0] == -128).sum())
        for name, place in numpy.directory.items()
        if place.kind == "matrix"
    )
    assert stays == 0
    if kind == "Q8_0":
        raw = np.concatenate(
            [each.raw for each in checkpoint.sources.values() if each.type == kind]
        )
        assert (raw.reshape(-1, 34)[:, 2:] == 0x80).any(axis=1).mean() > 0.05, "no block to show it"


def test_the_cache_keeps_int8_and_float32_apart(q4k: Checkpoint, tmp_path: Path) -> None:
    kept = ImageCache(folder=tmp_path)
    both: tuple[Arithmetic, ...] = ("int8", "f32")
    for arithmetic in (*both, *both):  # built, then read
        built = build_image(q4k, threads=1, arithmetic=arithmetic)
        image, said = load_image(q4k, threads=2, cache=kept, arithmetic=arithmetic)
        assert (image.sha256(), image.to_json(), said) == (built.sha256(), built.to_json(), "")
    assert len(list(tmp_path.iterdir())) == 2


def test_the_ledger_counts_what_pads_a_block() -> None:
    """Heads of 80: three blocks each in o_proj, where 2.5 would do."""
    profile = int8_profile()
    layout = plan(ADVERSARIAL_HEAD_80, tp=3, leaf=profile.leaf)
    for rank in range(3):
        here = program(ADVERSARIAL_HEAD_80, profile, layout, rank)
        o_proj = next(op for op in here.ops if op.kind == "o_proj")
        heads = here.heads[1] - here.heads[0]
        assert o_proj.weight_bytes == ADVERSARIAL_HEAD_80.hidden * 3 * heads * (32 + 2)
