"""`anyshard quantize` writes all of OUT or nothing, whatever comes between, and says why."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_tiny_gguf
from models import ADVERSARIAL_9_3, write_hf_model

import anyshard.checkpoint.quantize as quantize_module
from anyshard.cli import main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    write_tiny_gguf(tmp_path / "in" / "tiny.gguf")
    return tmp_path / "in" / "tiny.gguf"


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["quantize", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    return said.err


def test_an_empty_folder_is_filled_and_a_link_is_followed(model: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert main(["quantize", str(model), f"{tmp_path / 'link'}/"]) == 0
    assert (tmp_path / "link").is_symlink()
    assert "model.safetensors" in os.listdir(tmp_path / "real")
    assert sorted(os.listdir(tmp_path)) == ["in", "link", "real"]


def test_what_the_json_says_is_so(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(model), str(tmp_path / "out"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["files"] == {
        file.name: file.stat().st_size for file in (tmp_path / "out").iterdir()
    }
    weights = facts["weights"]
    assert weights["bytes"] == facts["files"]["model.safetensors"]
    header = (tmp_path / "out" / "model.safetensors").read_bytes()[: weights["data_start"]]
    assert f'"sha256":"{weights["data_sha256"]}"'.encode() in header


def test_a_folder_with_something_in_it_stays(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    assert "is not empty" in refused([str(model), str(tmp_path / "out")], capsys)
    assert "OUT is missing" in refused([str(tmp_path / "out")], capsys)
    assert os.listdir(tmp_path / "out") == ["mine"]


def test_a_disk_that_fills_up_leaves_nothing(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whichever write it is that fails, the flush at the end too."""
    real, calls = os.fsync, 0

    def full(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd)

    monkeypatch.setattr(os, "fsync", full)
    for failing in range(1, 7):
        calls = 0
        said = refused([str(model), str(tmp_path / "out")], capsys)
        assert "cannot be written: No space left on device" in said
        assert os.listdir(tmp_path) == ["in"], failing


def test_room_is_looked_for_first(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = os.statvfs

    def little(path: Any) -> Any:
        found = list(real(path))
        found[1], found[4] = 512, 1  # f_frsize, f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", little)
    monkeypatch.setattr(quantize_module, "build_image", None)
    said = refused([str(model), str(tmp_path / "out")], capsys)
    assert "0.5 kB are free there" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """While the weights are written."""
    (tmp_path / "in").mkdir()
    model = write_hf_model(tmp_path / "in" / "model", ADVERSARIAL_9_3, seed=1)
    slow = (
        "import sys, time\n"
        "import anyshard.checkpoint.quantize as q\n"
        "from anyshard.cli import main\n"
        "real = q.build_image\n"
        "def build(*a, **k):\n"
        "    print('building', file=sys.stderr, flush=True)\n"
        "    time.sleep(0.2)\n"
        "    return real(*a, **k)\n"
        "q.build_image = build\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow, "quantize", str(model), str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "building\n"
    assert len(os.listdir(tmp_path)) == 2, "a folder beside OUT"
    time.sleep(0.3)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and out == "" and "Traceback" not in err
    assert os.listdir(tmp_path) == ["in"]
