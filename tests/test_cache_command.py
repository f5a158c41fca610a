"""The image cache by the command: flags, disks that are full or read-only, signals, doctor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cached import changed_at, is_root, loaded, only_file
from gguf_files import write_tiny_gguf
from test_checkpoint_gguf import locked

from anyshard.checkpoint import Checkpoint, build_image, cache, open_checkpoint
from anyshard.checkpoint.cache import (
    ImageCache,
    cache_problem,
    load_image,
)
from anyshard.cli.doctor import examine
from anyshard.cli.flags import SplitFlags
from anyshard.cli.machine import read_machine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, one tensor of which is slow to widen."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_gguf(path, types={"layers.0.gate": "Q4_0"})
    return path


def command(model: Path, *flags: str) -> list[str]:
    asked = ["--prompt", "abc", "--max-tokens", "2", "--json", "--ignore-eos"]
    return [sys.executable, "-m", "anyshard.cli", "generate", str(model), *asked, *flags]


def generate(
    model: Path, base: Path | None, *flags: str, **environment: str
) -> tuple[str, list[str]]:
    """(digest, lines on stderr) of a run that must end well; `base` is XDG_CACHE_HOME."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("XDG_CACHE_HOME", "HOME")}
    given = {} if base is None else {"XDG_CACHE_HOME": str(base)}
    done = subprocess.run(
        command(model, *flags), capture_output=True, text=True, timeout=100,
        env=inherited | given | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stderr.splitlines() if "take turns" not in line]
    return json.loads(done.stdout)["logits_sha256"], notes


def test_the_command_caches_where_xdg_says_and_hits(tiny: Path, tmp_path: Path) -> None:
    first = generate(tiny, tmp_path)
    path = only_file(tmp_path / "anyshard" / "images")
    os.utime(path, ns=(0, 1000))
    assert generate(tiny, tmp_path, "-tp", "2") == first == (first[0], [])
    assert path.stat().st_mtime_ns > 1000  # it was used
    os.utime(path, ns=(0, 1000))
    assert generate(tiny, tmp_path, "--comm", "threads") == first
    assert path.stat().st_mtime_ns > 1000
    assert generate(tiny, None, HOME=str(tmp_path / "home")) == first
    assert only_file(tmp_path / "home" / ".cache" / "anyshard" / "images").name == path.name


@pytest.mark.parametrize("how", [("--no-cache",), ()], ids=["flag", "environment"])
def test_no_cache_reads_and_writes_nothing(
    how: tuple[str, ...], tiny: Path, tmp_path: Path
) -> None:
    environment = {} if how else {"ANYSHARD_CACHE": "false"}
    digest, notes = generate(tiny, tmp_path / "none", *how, **environment)
    assert not (tmp_path / "none").exists() and not notes
    assert generate(tiny, tmp_path) == (digest, [])
    images = tmp_path / "anyshard" / "images"
    path = only_file(images)
    changed_at(100)(path)  # a run that looked would replace it
    (images / "1-a.part").write_bytes(b"half")
    before = {each: (each.stat().st_mtime_ns, each.read_bytes()) for each in images.iterdir()}
    assert generate(tiny, tmp_path, *how, **environment) == (digest, [])
    after = {each: (each.stat().st_mtime_ns, each.read_bytes()) for each in images.iterdir()}
    assert after == before


def noted(reason: str) -> list[str]:
    return [f"note: the weight image was not cached: {reason}; --no-cache stops trying"]


def test_a_run_without_a_home_goes_on(tiny: Path) -> None:
    _, notes = generate(tiny, None)
    assert notes == noted("neither XDG_CACHE_HOME nor HOME names a folder")
    assert generate(tiny, None, "--no-cache")[1] == []


@contextmanager
def mounted(place: Path, options: str) -> Iterator[Path]:
    """A tmpfs at `place`; skips where mounting is not allowed."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mount is not allowed: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@is_root
def test_a_full_disk_costs_one_sentence(tiny: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=64k") as base:
        digest, notes = generate(tiny, base)
        images = base / "anyshard" / "images"
        assert len(notes) == 1 and notes[0].startswith(noted(f"no space left in {images}")[0][:60])
        assert "--no-cache stops trying" in notes[0] and not list(images.iterdir())
        assert generate(tiny, base, "--no-cache") == (digest, [])
    assert generate(tiny, tmp_path) == (digest, [])


@is_root
def test_a_disk_that_fills_in_the_middle_costs_one_sentence(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(str(tiny))
    monkeypatch.setattr(cache, "_free_bytes", lambda place: 1 << 40)
    with mounted(tmp_path / "small", "size=64k") as base:
        image = loaded(checkpoint, base / "images", note=f"no space left in {base / 'images'};")
        assert image.sha256() == build_image(checkpoint, threads=1).sha256()
        assert not list((base / "images").iterdir())


@is_root
def test_a_disk_without_room_for_a_name_costs_one_sentence(tiny: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "names", "size=64m,nr_inodes=3") as base:
        _, notes = generate(tiny, base)
        assert notes == noted(f"no space left in {base / 'anyshard' / 'images'}")


@is_root
def test_a_read_only_disk_costs_one_sentence_and_still_serves(tiny: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64m") as base:
        images = base / "anyshard" / "images"
        remount = ["mount", "-o", "remount,ro", str(base)]
        subprocess.run(remount, check=True)
        digest, notes = generate(tiny, base)
        assert notes == noted(f"{images} is read-only")
        subprocess.run([*remount[:2], "remount,rw", str(base)], check=True)
        assert generate(tiny, base) == (digest, [])
        subprocess.run(remount, check=True)
        assert generate(tiny, base) == (digest, [])  # a hit


def test_a_folder_without_permission_costs_one_sentence(
    q4k: Checkpoint, q4k_sha256: str, tmp_path: Path
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    with locked(closed):
        image = loaded(q4k, closed / "images", note="there is no permission to write in")
    assert image.sha256() == q4k_sha256 and not list(closed.iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_a_folder_in_which_others_may_write_is_not_used(
    mode: int, q4k: Checkpoint, q4k_sha256: str, images: Path
) -> None:
    loaded(q4k, images)
    images.chmod(mode)
    before = only_file(images).stat().st_mtime_ns
    assert loaded(q4k, images, note=f"others may write in {images}").sha256() == q4k_sha256
    assert only_file(images).stat().st_mtime_ns == before


@is_root
def test_a_folder_of_another_user_is_not_used(
    q4k: Checkpoint, q4k_sha256: str, images: Path
) -> None:
    images.mkdir(mode=0o700)
    os.chown(images, 65534, -1)
    image = loaded(q4k, images, note=f"{images} belongs to another user")
    assert image.sha256() == q4k_sha256 and not list(images.iterdir())


HANGING = """
import os, sys, time
from anyshard.cli import main
real = os.fsync
def fsync(fd):
    if ".part" in os.readlink(f"/proc/self/fd/{fd}"):
        os.write(2, b"writing\\n")
        time.sleep(600)
    real(fd)
os.fsync = fsync
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.ranks
@pytest.mark.parametrize("comm", ["shm", "threads"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_while_it_saves_leaves_nothing(
    number: signal.Signals, comm: str, tiny: Path, tmp_path: Path
) -> None:
    arguments = [*command(tiny, "--comm", comm)[3:]]
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, *arguments], stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    images = tmp_path / "anyshard" / "images"
    assert process.stderr is not None
    assert process.stderr.readline() == "writing\n"
    assert only_file(images).suffix == ".part"
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert "Traceback" not in said
    if number == signal.SIGKILL:  # nobody is left to clear up; the next run does
        assert process.returncode == -number
        generate(tiny, tmp_path)
        assert only_file(images).suffix == ".image"
    else:
        assert process.returncode == 128 + number
        assert not list(images.iterdir())


def test_doctor_says_where_what_and_why_not(
    q4k_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(split: SplitFlags | None = None) -> dict[str, Any]:
        facts = examine(str(q4k_path), split or SplitFlags(), read_machine())["cache"]
        assert isinstance(facts, dict)
        return facts

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    images = tmp_path / "anyshard" / "images"
    empty = {"folder": str(images), "images": 0, "bytes": 0, "not_kept": None}
    assert said() == empty
    assert not images.exists()
    loaded(open_checkpoint(str(q4k_path)), images)
    assert said() == empty | {"images": 1, "bytes": only_file(images).stat().st_size}
    assert said(SplitFlags(cache=False))["not_kept"] == "--no-cache was given"
    monkeypatch.setattr(cache, "_free_bytes", lambda place: 65536)
    assert "no space left in" in said()["not_kept"]
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.delenv("HOME")
    assert said()["not_kept"] == "neither XDG_CACHE_HOME nor HOME names a folder"


def test_what_doctor_says_of_a_folder_is_what_a_run_meets(q4k: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for images in (None, tmp_path / "file" / "images", tmp_path / "open", tmp_path / "new" / "a"):
        kept = ImageCache(folder=images)
        problem = cache_problem(kept, q4k, body="avx2")
        _, said = load_image(q4k, threads=1, cache=kept)
        assert said == (f"{noted(problem)[0].removeprefix('note: ')}" if problem else "")


def test_the_suite_leaves_the_users_own_cache_alone() -> None:
    base = os.environ["XDG_CACHE_HOME"]
    assert "pytest" in base and not base.startswith(str(Path.home() / ".cache"))
