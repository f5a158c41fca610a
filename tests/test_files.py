"""A file is written whole or not at all, where a file may stand, and as the umask has it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anyshard.files import check_place, replace_file, whole_folder


@pytest.fixture
def umask_027() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask_027")
def test_a_new_file_follows_the_umask_and_a_replaced_one_keeps_its_permissions(
    tmp_path: Path,
) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_bytes(b"before, and longer")
    old.chmod(0o604)
    for path in (new, old):
        replace_file(path, b"after")
        assert path.read_bytes() == b"after"
    assert (mode(new), mode(old)) == (0o640, 0o604)
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_stays_and_what_it_names_is_replaced(tmp_path: Path, is_there: bool) -> None:
    """Beside what it names is also the one place from which a rename cannot leave a file system."""
    far, here = tmp_path / "far", tmp_path / "here"
    far.mkdir()
    here.mkdir()
    if is_there:
        (far / "file").write_bytes(b"before")
    (here / "link").symlink_to("../far/file")
    replace_file(here / "link", b"after")
    assert os.readlink(here / "link") == "../far/file"
    assert (far / "file").read_bytes() == b"after"
    assert os.listdir(here) == ["link"] and os.listdir(far) == ["file"]


def device(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root makes devices")
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))


def loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Path.mkdir, "it is a folder"),
        (os.mkfifo, "no regular file"),
        (device, "no regular file"),
        (loop, "no regular file"),
    ],
)
@pytest.mark.parametrize("behind_a_link", [False, True])
def test_what_is_no_regular_file_is_refused_and_stays(
    tmp_path: Path, make: Callable[[Path], object], said: str, behind_a_link: bool
) -> None:
    place = tmp_path / "place"
    make(place)
    before = os.lstat(place)
    path = place
    if behind_a_link:
        path = tmp_path / "link"
        path.symlink_to("place")
    names = sorted(os.listdir(tmp_path))
    for attempt in (check_place, lambda path: replace_file(path, b"x")):
        with pytest.raises(OSError, match=said):
            attempt(path)
    after = os.lstat(place)
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)
    assert sorted(os.listdir(tmp_path)) == names


@pytest.mark.parametrize("call", ["fsync", "replace", "fchmod"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_whatever_fails_the_old_file_is_whole_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(type(error)):
        replace_file(path, b"after")
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["file"]


def test_a_disk_that_takes_no_more_leaves_nothing(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no device that is always full")

    def to_full(path: object, *arguments: object) -> int:
        os.close(opened(path, *arguments))  # type: ignore[arg-type]
        return opened(full, os.O_WRONLY)

    opened = os.open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", to_full)
        with pytest.raises(OSError, match="No space left"):
            replace_file(tmp_path / "file", b"x" * 100_000)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["n" * 255, "\u00e9" * 127, "\u20ac" * 85, "\U0001f600" * 63, "x\U0001f600" * 51]
)
def test_the_longest_names_that_a_file_can_have_are_written(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert 252 <= len(os.fsencode(name)) <= 255
    check_place(path)
    replace_file(path, b"before")
    replace_file(path, b"after")
    assert path.read_bytes() == b"after" and os.listdir(tmp_path) == [name]
    too_long = tmp_path / (name + "n" * 4)
    for attempt in (check_place, lambda path: replace_file(path, b"x")):
        with pytest.raises(OSError, match="name too long"):
            attempt(too_long)


def test_a_folder_that_takes_no_files_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"the folder /proc takes no files \(No such file"):
        check_place(Path("/proc/file"))
    check_place(tmp_path / "file")
    assert os.listdir(tmp_path) == [], "what it tried is gone"


def test_a_name_that_is_no_utf_8_is_written(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff\xfe" * 100)
    replace_file(path, b"x")
    assert os.listdir(tmp_path) == [path.name]


def test_a_folder_takes_its_name_when_it_is_whole(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "new") as part:
        (part / "file").write_bytes(b"x")
        assert part.parent == tmp_path and not (tmp_path / "new").exists()
    assert os.listdir(tmp_path) == ["new"] and os.listdir(tmp_path / "new") == ["file"]
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "other") as part:
        (part / "file").write_bytes(b"x")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["new"]


def test_a_folder_that_came_in_between_stays(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not empty"), whole_folder(tmp_path / "new"):
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "theirs").write_bytes(b"x")
    assert os.listdir(tmp_path) == ["new"] and os.listdir(tmp_path / "new") == ["theirs"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Path.touch, "it is no folder"),
        (os.mkfifo, "it is no folder"),
        (loop, "it is no folder"),
        (lambda path: (path / "sub").mkdir(parents=True), "is not empty"),
        (lambda path: path.symlink_to("absent/new"), "does not exist; make it first"),
    ],
)
def test_a_folder_takes_nobody_s_place(
    tmp_path: Path, make: Callable[[Path], object], said: str
) -> None:
    make(tmp_path / "place")
    with pytest.raises(OSError, match=said), whole_folder(tmp_path / "place"):
        raise AssertionError("entered")
    assert os.listdir(tmp_path) == ["place"]
