"""--kv-cache-dtype from the command line: its profile, its bytes, one digest for every split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from models import ADVERSARIAL_9_3, write_hf_model

from anyshard.cli import main
from anyshard.engine import profile_of

Capture = pytest.CaptureFixture[str]
RUN = ("--prompt", "One, two, three,", "--max-tokens", "5", "--json", "--comm", "threads")


def generate(capfd: Capture, *flags: str) -> dict[str, Any]:
    """What the demo model says."""
    assert main(["generate", *RUN, *flags]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_model(tmp_path_factory.mktemp("m") / "m", ADVERSARIAL_9_3, seed=3)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_int8_is_a_profile_of_its_own_and_a_quarter_of_the_bytes(
    capfd: Capture, quantization: str
) -> None:
    arithmetic: Any = "int8" if quantization == "int8" else "f32"
    flags = ("--quantization", quantization)
    wide = generate(capfd, *flags)
    assert generate(capfd, *flags, "--kv-cache-dtype", "f32") | TIMES == wide | TIMES
    found = generate(capfd, *flags, "--kv-cache-dtype", "int8")
    assert found["profile"] == f"{arithmetic}+kv8"
    assert found["profile_hash"] == profile_of(arithmetic, "int8").sha256()
    assert found["profile_hash"] != wide["profile_hash"]
    assert found["logits_sha256"] != wide["logits_sha256"]
    assert found["kv_bytes"][0] * 64 == wide["kv_bytes"][0] * 17  # (64 + 4) / 256
    for split in (("-tp", "2"), ("-tp", "5", "-pp", "2", "--chunk", "1")):
        same = generate(capfd, *flags, "--kv-cache-dtype", "int8", *split)
        assert same["logits_sha256"] == found["logits_sha256"]


TIMES = {"timings": None}


def test_the_variable_says_it_too(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYSHARD_KV_CACHE_DTYPE", "int8")
    assert generate(capfd)["profile"].endswith("+kv8")


def test_verify_and_doctor_know_it(model: Path, capfd: Capture) -> None:
    flags = ["--kv-cache-dtype", "int8", "--json"]
    short = ["--in-process", "--prompt-tokens", "40", "--tokens", "3", "--batch", "1,17"]
    layouts = ["--layouts", "tp3,tp9pp3", "--chunk", "1,33,all"]
    assert main(["verify", str(model), *flags, *short, *layouts]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["equal"] and report["profile"] == "f32+kv8" and not report["vacuous"]
    assert main(["doctor", str(model), *flags]) == 0
    narrow = json.loads(capfd.readouterr().out)
    assert main(["doctor", str(model), "--json"]) == 0
    wide = json.loads(capfd.readouterr().out)
    assert narrow["profile"]["name"] == "f32+kv8"
    # heads of 16: two bytes of scale beside 16
    assert narrow["memory"]["kv"] * 64 == wide["memory"]["kv"] * 18


def test_against_float64_it_is_reported_and_not_judged(capfd: Capture, model: Path) -> None:
    from anyshard.accuracy import measure

    report = measure(str(model), tokens=[1, 2, 3, 4, 5] * 8, lengths=[40], kv="int8")
    assert report.manifest.profile == "f32+kv8" and report.passed is None
    found = {each.point: each.relative_error or 0 for each in report.ops}
    assert found["v"] > 1e-3, "int8 was not in it"
    assert found["attention"] < 1e-5, "attention over what is stored is exact"


def test_an_unknown_type_is_refused(capfd: Capture) -> None:
    assert main(["generate", "--prompt", "a", "--kv-cache-dtype", "fp8"]) == 2
    assert '"auto", "f32", "int8"' in capfd.readouterr().err
