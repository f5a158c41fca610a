"""Hub ids: found in a cache made by hand; what is not there is one sentence. No network."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from gguf_files import write_tiny_gguf
from gguf_models import write_gguf_model
from huggingface_hub import constants, errors
from models import ADVERSARIAL_9_3, read_hf_weights, write_hf_model

from anyshard.checkpoint import open_checkpoint
from anyshard.checkpoint.hub import HubId, parse_hub_id
from anyshard.cli import main
from anyshard.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    yield folder


def cached(cache: Path, repository: str, files: Path) -> Path:
    """Put the files of a folder into the cache as the library lays them: links to blobs."""
    base = cache / f"models--{repository.replace('/', '--')}"
    snapshot = base / "snapshots" / COMMIT
    for folder in (snapshot, base / "blobs", base / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (base / "refs" / "main").write_text(COMMIT)
    for file in sorted(files.rglob("*")):
        if file.is_dir():
            continue
        place = file.relative_to(files)
        blob = base / "blobs" / f"{len(list((base / 'blobs').iterdir())):040x}"
        shutil.copy(file, blob)
        link = snapshot / place
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def refusal(model: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_cached_model_opens_by_its_id(cache: Path, tmp_path: Path) -> None:
    files = write_hf_model(tmp_path / "files", ADVERSARIAL_9_3, seed=1)
    snapshot = cached(cache, "some-org/Model-9.3B_x", files)
    checkpoint = open_checkpoint("some-org/Model-9.3B_x")
    assert checkpoint.path == snapshot
    for name, weight in read_hf_weights(files, ADVERSARIAL_9_3).items():
        assert np.array_equal(checkpoint.read(name), weight)


def test_a_cached_gguf_file_opens_by_its_id_also_in_parts(cache: Path, tmp_path: Path) -> None:
    files = tmp_path / "files"
    (files / "q8").mkdir(parents=True)
    whole = write_gguf_model(files / "q8" / "m.gguf", ADVERSARIAL_9_3, seed=1)
    write_gguf_model(files / "s.gguf", ADVERSARIAL_9_3, seed=1, split_tensors=20)
    cached(cache, "org/name", files)
    for name in ("q8/m.gguf", "s-00001-of-00003.gguf", "s-00002-of-00003.gguf"):
        checkpoint = open_checkpoint(f"org/name:{name}")
        assert np.array_equal(checkpoint.read("head"), whole["head"])
    assert "'org/name:other.gguf'" in refusal("org/name:other.gguf")
    (cache / "models--org--name" / "snapshots" / COMMIT / "s-00003-of-00003.gguf").unlink()
    assert "not whole) in the cache" in refusal("org/name:s-00001-of-00003.gguf")
    assert "has no config.json" in refusal("org/name")
    assert "org/name:FILE.gguf" in refusal("org/name")


def test_offline_and_not_cached_is_one_sentence(cache: Path) -> None:
    message = refusal("org/absent")
    assert message.startswith("MODEL 'org/absent' is neither a directory nor a file here, ")
    assert str(cache) in message
    assert "HF_HUB_OFFLINE forbids to fetch it; unset it, or name a local model" in message


def test_the_environment_of_the_hub_is_honoured(tmp_path: Path) -> None:
    files = write_hf_model(tmp_path / "files", ADVERSARIAL_9_3, seed=1)
    cached(tmp_path / "home" / "hub", "org/name", files)
    code = (
        "from anyshard.checkpoint import open_checkpoint\n"
        "from anyshard.errors import CheckpointError\n"
        "print(open_checkpoint('org/name').path)\n"
        "try: open_checkpoint('org/absent')\n"
        "except CheckpointError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "1",
        },
        check=True,
        capture_output=True,
        text=True,
    )
    first, second = done.stdout.splitlines()
    assert first.endswith(f"models--org--name/snapshots/{COMMIT}")
    assert f"cache {tmp_path / 'home' / 'hub'}, and HF_HUB_OFFLINE forbids" in second


def test_a_directory_that_exists_is_no_hub_id(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hf_model(tmp_path / "org" / "name", ADVERSARIAL_9_3, seed=1)
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("org/name").path == Path("org/name")


def test_only_files_that_are_read_are_asked_for(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def download(repository: str, **options: Any) -> str:
        asked.update(options)
        return str(write_hf_model(tmp_path / "files", ADVERSARIAL_9_3, seed=1))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    open_checkpoint("org/name")
    wanted = ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"]
    wanted += ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    unwanted = ["pytorch_model.bin", "consolidated.safetensors", "onnx/config.json", "x.gguf"]
    unwanted += ["original/params.json", "README.md", "model.py", "tokenizer.model"]
    kept = huggingface_hub.utils.filter_repo_objects(wanted + unwanted, **asked)
    assert list(kept) == wanted


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), r"cannot be stored .*No space left"),
        (PermissionError(errno.EACCES, "Permission denied"), r"cannot be stored .*Permission"),
        (errors.LocalEntryNotFoundError("x\ny"), "not whole"),
        (errors.EntryNotFoundError("x\ny"), "holds no file None"),
        (errors.HFValidationError("bad\nid"), r"cannot be fetched \(bad\)"),
    ],
)
def test_a_failed_download_is_one_sentence(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(repository: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint("org/name")
    assert "\n" not in str(caught.value)


@pytest.mark.ranks
def test_a_run_fetches_a_hub_id_once_and_in_a_process_of_its_own(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not in the front: threads of a download would be in the way of its fork."""
    (tmp_path / "files").mkdir()
    write_tiny_gguf(tmp_path / "files" / "tiny.gguf")
    calls = tmp_path / "calls"

    def fetch(repository: str, name: str) -> str:
        with calls.open("a") as file:
            file.write(f"{os.getpid()} {repository} {name}\n")
        return str(tmp_path / "files" / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = main(
            ["generate", "org/name:tiny.gguf", "--prompt", "a", "--max-tokens", "2", "--json"]
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code == 0, capsys.readouterr().err
    (call,) = calls.read_text().splitlines()
    pid, *asked = call.split()
    assert asked == ["org/name", "tiny.gguf"] and int(pid) != os.getpid()


@pytest.mark.ranks
def test_a_failed_fetch_of_a_run_is_one_sentence(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = main(["generate", "org/absent", "--prompt", "a"])
    finally:
        signal.signal(signal.SIGTERM, before)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "HF_HUB_OFFLINE forbids to fetch it" in err


@pytest.mark.ranks
def test_an_interrupted_fetch_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C, as a terminal sends it, while the Hub does not answer."""
    code = (
        "import sys, time, huggingface_hub\n"
        "def fetch(*a, **o):\n"
        "    print('fetching', flush=True)\n"
        "    time.sleep(60)\n"
        "huggingface_hub.snapshot_download = fetch\n"
        "from anyshard.cli import main\n"
        "sys.exit(main(['generate', 'org/name', '--prompt', 'x']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd=tmp_path,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "fetching\n"  # a launcher's stdout is stderr
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and errors.startswith("anyshard: interrupted")
    assert not Path(f"/proc/{child}").exists()


def test_what_a_hub_id_looks_like() -> None:
    assert parse_hub_id("org/name") == HubId(repository="org/name")
    assert parse_hub_id("o/n:a/b.gguf") == HubId(repository="o/n", file="a/b.gguf")
    for no in ("name", "a/b/c", "/a", "a/", "./a", "a/b:", "a/b:x.bin", "a/b:../x.gguf", "a b/c"):
        assert parse_hub_id(no) is None
    assert parse_hub_id("x" * 300 + "/y") is None
