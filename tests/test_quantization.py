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
from models import ADVERSARIAL_9_3, write_hf_model

from anyshard.cli import main
from anyshard.engine import f32_profile, int8_profile

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
