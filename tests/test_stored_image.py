"""The file of an image: whatever happens to it, the next run has the right bits."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cached import (
    PIECE_BYTES,
    SMALL,
    changed_at,
    is_root,
    key_of,
    loaded,
    only_file,
    packing_is_forbidden,
)
from gguf_models import write_gguf_model

from anyshard.checkpoint import Checkpoint, open_checkpoint, stored_image
from anyshard.checkpoint.image import image_directory


def cut_to(share: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        os.truncate(path, int(path.stat().st_size * share))

    return damage


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.rename(path.parent / "aside")
        make(path)

    return damage


def header_of_a_larger_region(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[16:24] = (1 << 62).to_bytes(8, "little")
    path.write_bytes(content)


# 8 magic, 4 version, 4 + 8 + 4 + 4 sizes, 32 key, directory
FIELDS = {"magic": 0, "version": 8, "directory bytes": 12, "region bytes": 16, "piece bytes": 24,
          "pieces": 28, "key": 32, "directory": 80}  # fmt: skip
DAMAGES: dict[str, Callable[[Path], None]] = {
    **{name: changed_at(place) for name, place in FIELDS.items()},
    **{f"cut to {share:.2f}": cut_to(share) for share in (0, 1e-5, 1e-4, 0.001, 0.01, 0.3, 0.99)},
    "one byte less": shorter,
    "one byte more": longer,
    "a size of 4 EB": header_of_a_larger_region,
    "empty": lambda path: path.write_bytes(b"") and None,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,
    "a directory": replaced(Path.mkdir),
    "a pipe": replaced(os.mkfifo),
    "a link to itself": replaced(lambda path: path.symlink_to(path.name)),
    "a link to the good file": replaced(lambda path: path.symlink_to(path.parent / "aside")),
    "a link to an endless one": replaced(lambda path: path.symlink_to("/dev/zero")),
}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_rebuilt_with_the_right_bits(
    name: str, q4k: Checkpoint, q4k_sha256: str, images: Path
) -> None:
    loaded(q4k, images)
    path = only_file(images)
    good = path.read_bytes()
    DAMAGES[name](path)
    before = len(os.listdir("/proc/self/fd"))
    image = loaded(q4k, images)
    assert image.sha256() == q4k_sha256
    image.close()
    del image
    assert len(os.listdir("/proc/self/fd")) == before
    assert path.read_bytes() == good and stat.S_ISREG(path.lstat().st_mode)
    with packing_is_forbidden():
        assert loaded(q4k, images).sha256() == q4k_sha256


@pytest.mark.usefixtures("small_pieces")
def test_one_wrong_byte_in_any_part_of_the_file_is_seen(
    q4k: Checkpoint, q4k_sha256: str, images: Path
) -> None:
    loaded(q4k, images)
    path = only_file(images)
    good = path.read_bytes()
    _, num_bytes = image_directory(SMALL, q4k.sources)
    start = len(good) - num_bytes
    places = [*range(0, start, 97), start - 1]  # fields, directory, hashes, zeros
    places += [
        *range(start, len(good), PIECE_BYTES),
        *range(start + PIECE_BYTES - 1, len(good), PIECE_BYTES),
    ]
    places.append(len(good) - 1)
    directory, region = image_directory(SMALL, q4k.sources)
    for place in places:
        changed_at(place)(path)
        read = stored_image.read_stored(
            path, path.stem, directory, region, label=path, threads=2
        )  # fmt: skip
        assert read is None and not path.exists(), place
        path.write_bytes(good)
    with packing_is_forbidden():
        assert loaded(q4k, images).sha256() == q4k_sha256


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("mmap.mmap", errno.ENOMEM),
        ("os.open", errno.EMFILE),
        ("os.open", errno.ENFILE),
    ],
)
def test_a_sound_file_outlives_what_the_system_refuses_the_reader(
    call: str, code: int, q4k: Checkpoint, q4k_sha256: str, images: Path
) -> None:
    loaded(q4k, images)
    path = only_file(images)
    good = path.read_bytes()
    directory, region = image_directory(SMALL, q4k.sources)

    def fail(*arguments: object, **options: object) -> int:
        raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, fail)
        with pytest.raises(OSError, match=re.escape(os.strerror(code))):
            stored_image.read_stored(path, path.stem, directory, region, label=path, threads=2)
    assert path.read_bytes() == good
    with packing_is_forbidden():
        assert loaded(q4k, images).sha256() == q4k_sha256


def test_where_there_is_no_region_for_the_file_it_is_packed(
    q4k: Checkpoint, q4k_sha256: str, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(q4k, images)
    path = only_file(images)

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(stored_image, "sealed_image", fail)
    assert loaded(q4k, images, note="Cannot allocate memory").sha256() == q4k_sha256
    assert path.exists()


def test_a_disk_that_cannot_read_the_file_costs_the_file(
    q4k: Checkpoint, q4k_sha256: str, images: Path
) -> None:
    loaded(q4k, images)
    before, calls, read = only_file(images).stat().st_mtime_ns, [], os.preadv

    def fail_once(fd: int, *arguments: Any) -> int:
        calls.append(fd)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", fail_once)
        assert loaded(q4k, images).sha256() == q4k_sha256
    assert only_file(images).stat().st_mtime_ns > before
    with packing_is_forbidden():
        assert loaded(q4k, images).sha256() == q4k_sha256


def test_a_file_of_another_model_under_this_name_is_a_miss(
    q4k: Checkpoint, q4k_sha256: str, tmp_path: Path, images: Path
) -> None:
    write_gguf_model(tmp_path / "other.gguf", SMALL, kind="Q4_K", seed=4)  # the same directory
    loaded(open_checkpoint(str(tmp_path / "other.gguf")), images)
    only_file(images).rename(images / f"{key_of(q4k)}.image")
    assert loaded(q4k, images).sha256() == q4k_sha256


@is_root
def test_a_file_of_another_user_is_a_miss(q4k: Checkpoint, q4k_sha256: str, images: Path) -> None:
    loaded(q4k, images)
    path = only_file(images)
    os.chown(path, 65534, -1)
    assert loaded(q4k, images).sha256() == q4k_sha256
    assert path.stat().st_uid == os.geteuid()


def test_a_file_that_may_not_be_read_is_replaced(
    q4k: Checkpoint, q4k_sha256: str, tmp_path: Path
) -> None:
    images = tmp_path / "of_user" / "images"
    images.parent.mkdir()
    user = 65534 if os.geteuid() == 0 else os.geteuid()
    os.chown(images.parent, user, -1)
    with as_user(user, tmp_path):
        loaded(q4k, images)
        path = only_file(images)
        path.chmod(0)
        assert loaded(q4k, images).sha256() == q4k_sha256
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@contextmanager
def as_user(user: int, below: Path) -> Iterator[None]:
    """Act as `user`, who may enter the folders above `below` for so long."""
    mine, modes = os.geteuid(), []
    if user != mine:
        for place in (below, *below.parents):
            mode = stat.S_IMODE(place.stat().st_mode)
            if mode & 0o011 != 0o011:
                modes.append((place, mode))
                place.chmod(mode | 0o011)
        os.seteuid(user)
    try:
        yield
    finally:
        if user != mine:
            os.seteuid(mine)
        for place, mode in modes:
            place.chmod(mode)
