"""Images kept on disk: the bits of a build whatever happened to the file, and no run that fails.

By the functions; `test_stored_image.py` damages files, `test_cache_command.py` runs the command.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cached import SLOW_TYPES, SMALL, key_of, loaded, mapping_of, only_file, packing_is_forbidden
from gguf_files import write_tiny_gguf
from gguf_models import write_gguf_model

from anyshard.checkpoint import Checkpoint, build_image, cache, open_checkpoint, stored_image
from anyshard.checkpoint.cache import (
    CACHE_BYTES,
    ImageCache,
    clear_abandoned,
    load_image,
    not_worth_caching,
    stored_images,
)
from anyshard.checkpoint.image import WeightImage, image_directory
from anyshard.checkpoint.stored_image import FORMAT_VERSION
from anyshard.checkpoint.widen import BLOCK, TensorType
from anyshard.errors import CheckpointError


@pytest.mark.parametrize("kind", SLOW_TYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_hit_is_the_image_that_a_build_gives_and_packs_nothing(
    kind: str, threads: int, tmp_path: Path, images: Path
) -> None:
    write_gguf_model(tmp_path / "m.gguf", SMALL, kind=kind, seed=1)
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
    built = build_image(checkpoint, threads=2)
    kept = ImageCache(folder=images)
    first, _ = load_image(checkpoint, threads=threads, cache=kept)
    with packing_is_forbidden():
        again, said = load_image(checkpoint, threads=threads, cache=kept)
    assert first.sha256() == again.sha256() == built.sha256()
    assert again.to_json() == built.to_json() and again.bytes == built.bytes and not said
    assert not again.panels("embed").flags.writeable
    assert mapping_of(again)[0] == "r--p"


def test_the_folder_and_the_file_are_the_users_own(q4k: Checkpoint, images: Path) -> None:
    loaded(q4k, images)
    assert stat.S_IMODE(images.stat().st_mode) == 0o700
    assert stat.S_IMODE(only_file(images).stat().st_mode) == 0o600
    count, num_bytes = stored_images(ImageCache(folder=images))
    directory, region = image_directory(SMALL, q4k.sources)
    assert count == 1 and num_bytes == stored_image.stored_bytes_of(directory, region)


@pytest.mark.parametrize("kind", sorted(BLOCK))
def test_only_what_packs_slower_than_it_reads_is_cached(kind: TensorType, tmp_path: Path) -> None:
    write_gguf_model(tmp_path / "m.gguf", SMALL, kind=kind, seed=1)
    sources = open_checkpoint(str(tmp_path / "m.gguf")).sources
    reason = not_worth_caching(sources, body="avx2", image_bytes=1000)
    assert (reason is None) == (kind in SLOW_TYPES)
    assert not_worth_caching(sources, body="reference", image_bytes=1000) is None
    half = CACHE_BYTES // 2
    assert not_worth_caching(sources, body="reference", image_bytes=half) is None
    over = not_worth_caching(sources, body="reference", image_bytes=half + 1)
    assert over == "it takes 10.0 GB, more than half of the 20.0 GB kept"


def test_a_model_that_packs_fast_leaves_no_folder(tmp_path: Path, images: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    checkpoint = open_checkpoint(str(tmp_path / "tiny.gguf"))
    assert "Q4_0" not in {source.type for source in checkpoint.sources.values()}
    loaded(checkpoint, images)
    assert images.exists() == (cache.choose_body("auto") == "reference")


def test_the_key_is_the_content(
    q4k: Checkpoint, q4k_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = key_of(q4k)
    copy = tmp_path / "renamed.gguf"
    copy.write_bytes(q4k_path.read_bytes())
    os.utime(copy, (1, 1))
    assert key_of(open_checkpoint(str(copy))) == key
    monkeypatch.setattr(cache, "_HASHED_BYTES", 4096)
    pieces = key_of(q4k)
    assert pieces == key_of(open_checkpoint(str(copy)))
    monkeypatch.undo()
    for name, source in q4k.sources.items():
        changed = source.raw.copy()
        for place in (0, len(changed) // 2, len(changed) - 1):
            changed[place] ^= 1
            sources = {**q4k.sources, name: replace(source, raw=changed)}
            assert key_of(replace(q4k, sources=sources)) != key, (name, place)
            changed[place] ^= 1
    monkeypatch.setattr(cache, "FORMAT_VERSION", FORMAT_VERSION + 1)
    assert key_of(q4k) != key


def test_other_rows_names_and_types_have_other_keys(q4k: Checkpoint) -> None:
    q = q4k.sources["layers.0.q"]
    assert q.row_map is not None
    reversed_rows = np.ascontiguousarray(q.row_map[::-1])
    q4, q5 = q4k.sources["layers.0.gate"], q4k.sources["layers.0.up"]
    others = [
        {"layers.0.q": replace(q, row_map=reversed_rows)},
        {"layers.0.q": replace(q, row_map=None)},
        {"layers.0.gate": replace(q4, raw=q5.raw), "layers.0.up": replace(q5, raw=q4.raw)},
        {"layers.0.gate": replace(q4, type="Q5_K")},
    ]
    keys = [key_of(replace(q4k, sources={**q4k.sources, **other})) for other in others]
    assert len({*keys, key_of(q4k)}) == 5


def test_an_edited_model_is_not_served_from_the_old_file(
    q4k_path: Path, tmp_path: Path, images: Path
) -> None:
    path = tmp_path / "edited.gguf"
    path.write_bytes(q4k_path.read_bytes())
    before = loaded(open_checkpoint(str(path)), images).sha256()
    content = bytearray(path.read_bytes())
    content[-40] ^= 1  # a norm weight or a code: finite either way
    path.unlink()
    path.write_bytes(content)
    edited = open_checkpoint(str(path))
    after = loaded(edited, images).sha256()
    assert after != before and after == build_image(edited, threads=1).sha256()
    assert len(list(images.iterdir())) == 2


# FORMAT_VERSION, and what the regions of SMALL in each type then hold. If packing changes on
# purpose, the version grows and this is written anew: old files must not be taken for new ones.
PACKED = (1, "d9fab84b8fd207141f7eeddb6b52f91af5c9c762103e5bace74c03f91205b9aa")


def test_other_packing_needs_another_version(tmp_path: Path) -> None:
    digest = hashlib.sha256()
    for kind in SLOW_TYPES:
        write_gguf_model(tmp_path / f"{kind}.gguf", SMALL, kind=kind, seed=5)
        image = build_image(open_checkpoint(str(tmp_path / f"{kind}.gguf")), threads=1)
        digest.update(image.region)
    assert (FORMAT_VERSION, digest.hexdigest()) == PACKED


def test_memory_that_will_not_suffice_is_refused_also_from_the_cache(
    q4k: Checkpoint, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(q4k, images)
    monkeypatch.setattr("anyshard.checkpoint.image.free_memory", lambda: 1000)
    with packing_is_forbidden(), pytest.raises(CheckpointError, match=r"but 1\.0 kB are free"):
        loaded(q4k, images)
    assert only_file(images).suffix == ".image"


FAULTS = [
    ("pwrite", 0, errno.ENOSPC, "no space left in"),
    ("pwrite", 7, errno.EDQUOT, "no space left in"),
    ("pwrite", 30, errno.EIO, "cannot be used (Input/output error)"),
    ("fsync", 0, errno.EIO, "cannot be used (Input/output error)"),
    ("rename", 0, errno.EROFS, "is read-only"),
    ("open", 1, errno.EACCES, "no permission to write in"),  # 0 looks for the image
    ("mkdir", 0, errno.EROFS, "is read-only"),
]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("call", "number", "code", "words"), FAULTS)
def test_a_write_that_fails_anywhere_leaves_nothing(
    call: str, number: int, code: int, words: str, q4k: Checkpoint, q4k_sha256: str, images: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, call, number, OSError(code, os.strerror(code)))
        image = loaded(q4k, images, note=words)
    assert image.sha256() == q4k_sha256
    assert not images.exists() or not list(images.iterdir())
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, call, number, OSError(code, os.strerror(code)))
        _, said = load_image(q4k, threads=2, cache=ImageCache(folder=images))
    assert said.startswith("the weight image was not cached: ")
    assert said.endswith("; --no-cache stops trying") and "\n" not in said
    assert loaded(q4k, images).sha256() == q4k_sha256 and only_file(images)


def fail_at(patch: pytest.MonkeyPatch, call: str, number: int, error: BaseException) -> None:
    """Call `number` of os.`call` below these files raises (mkdir and open count there only)."""
    real = getattr(os, call)
    count = iter(range(1 << 20))

    def failing(*arguments: Any, **options: Any) -> Any:
        from_here = sys._getframe(1).f_code.co_filename
        if "checkpoint" not in from_here and call != "mkdir":
            return real(*arguments, **options)
        counts = call not in ("open", "mkdir") or "image" in str(arguments[0])
        if counts and next(count) == number:
            raise error
        return real(*arguments, **options)

    patch.setattr(os, call, failing)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_an_end_in_the_middle_of_a_write_leaves_nothing(
    end: type[BaseException], q4k: Checkpoint, q4k_sha256: str, images: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(end):
        fail_at(patch, "fsync", 0, end())
        loaded(q4k, images)
    assert not list(images.iterdir())
    assert loaded(q4k, images).sha256() == q4k_sha256


def test_a_model_that_changes_while_it_is_read_is_not_kept(
    q4k_path: Path, tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "changing.gguf"
    path.write_bytes(q4k_path.read_bytes())

    def build(*arguments: Any, **options: Any) -> WeightImage:
        with path.open("r+b") as file:
            file.seek(-40, os.SEEK_END)
            file.write(b"\1")
        return build_image(*arguments, **options)

    monkeypatch.setattr(cache, "build_image", build)
    loaded(open_checkpoint(str(path)), images, note="changed while it was read")
    assert not list(images.iterdir())


def test_the_bound_is_held_and_what_was_used_last_stays(tmp_path: Path, images: Path) -> None:
    models = []
    for seed in range(4):
        write_gguf_model(tmp_path / f"{seed}.gguf", SMALL, kind="Q4_K", seed=seed)
        models.append(open_checkpoint(str(tmp_path / f"{seed}.gguf")))
    paths = [images / f"{key_of(each)}.image" for each in models]
    loaded(models[0], images)
    bound = int(2.5 * paths[0].stat().st_size)
    loaded(models[1], images, most_bytes=bound)
    for age, path in enumerate(paths[:2]):
        os.utime(path, ns=(0, 1000 + age))
    loaded(models[0], images, most_bytes=bound)  # a hit: now 1 is the older
    loaded(models[2], images, most_bytes=bound)
    assert [path.exists() for path in paths] == [True, False, True, False]
    (images / "notes.txt").write_text("not ours to remove")
    os.utime(paths[2], ns=(0, 1000))
    loaded(models[3], images, most_bytes=bound)
    assert [path.exists() for path in paths] == [True, False, False, True]
    assert (images / "notes.txt").exists()
    loaded(models[1], images, most_bytes=int(1.9 * paths[0].stat().st_size))  # over half: no
    assert not paths[1].exists()


def test_an_image_over_half_of_the_free_disk_is_not_kept(
    q4k: Checkpoint, q4k_sha256: str, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(q4k, images)
    size = only_file(images).stat().st_size
    only_file(images).unlink()
    monkeypatch.setattr(cache, "_free_bytes", lambda place: 2 * size - 1)
    assert loaded(q4k, images, note="no space left in").sha256() == q4k_sha256
    assert not list(images.iterdir())
    monkeypatch.setattr(cache, "_free_bytes", lambda place: 2 * size)
    loaded(q4k, images)
    assert only_file(images).stat().st_size == size


def test_progress_never_falls_and_says_what_is_done(q4k: Checkpoint, images: Path) -> None:
    for words in (["", "saving packed weights"], ["reading cached weights"]):
        heard: list[tuple[int, int, str]] = []
        load_image(
            q4k, threads=2, cache=ImageCache(folder=images),
            progress=lambda done, total, doing, into=heard: into.append((done, total, doing)),
        )  # fmt: skip
        shares = [done / total for done, total, _ in heard]
        assert shares == sorted(shares) and shares[-1] == 1 and 1 not in shares[:-1]
        assert list(dict.fromkeys(doing for _, _, doing in heard)) == words


WRITER = """
import os, sys, time
from pathlib import Path
from anyshard.checkpoint import open_checkpoint, stored_image
from anyshard.checkpoint.cache import ImageCache, load_image
folder, model, hangs = sys.argv[1:]
if hangs == "hang":
    real = os.fsync
    os.fsync = lambda fd: (print("writing", flush=True), time.sleep(600))
image, note = load_image(
    open_checkpoint(model), threads=2, cache=ImageCache(folder=Path(folder))
)
assert not note, note
print(image.sha256())
"""


def writer(images: Path, q4k_path: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(images), str(q4k_path), how]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_a_killed_writer_leaves_no_image_and_the_next_run_clears_up(
    q4k: Checkpoint, q4k_path: Path, q4k_sha256: str, images: Path
) -> None:
    process = writer(images, q4k_path, "hang")
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    part = only_file(images)
    assert part.suffix == ".part" and part.stat().st_size > 1 << 20
    clear_abandoned(images)  # it lives: its file stays
    assert part.exists()
    process.kill()
    process.communicate()
    assert only_file(images) == part
    assert loaded(q4k, images).sha256() == q4k_sha256
    assert not part.exists() and only_file(images).suffix == ".image"


def test_two_writers_at_once_both_end_well(
    q4k: Checkpoint, q4k_path: Path, q4k_sha256: str, images: Path
) -> None:
    hanging = writer(images, q4k_path, "hang")  # still at it when the others have ended
    assert hanging.stdout is not None and hanging.stdout.readline() == "writing\n"
    writers = [writer(images, q4k_path, "write") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in writers]
    assert outputs == [f"{q4k_sha256}\n"] * 2
    assert sorted(path.suffix for path in images.iterdir()) == [".image", ".part"]
    hanging.kill()
    hanging.communicate()
    with packing_is_forbidden():
        assert loaded(q4k, images).sha256() == q4k_sha256
    assert only_file(images).suffix == ".image"


def test_without_locks_a_part_is_abandoned_after_a_day(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    images.mkdir()
    young, old = images / "1-a.part", images / "2-b.part"
    for path in (young, old):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 86500,) * 2)
    clear_abandoned(images)
    assert young.exists() and not old.exists()
