"""A file, or a folder, that is whole or not there: written beside its place, synced, renamed.

Knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["check_folder_place", "check_place", "replace_file", "whole_folder"]


def check_place(path: Path) -> None:
    """Make sure that `path` is free or a regular file, or a link to such a place.

    A device, a pipe or a folder would be lost to a rename, or refuse it late. Some folders take no
    file, whatever their permissions say (/proc), so one is made beside the place, and removed.

    Raises: OSError whose strerror says what is there. Held by: test_files.py.
    """
    target = _target(path)
    _status(target)
    part = target.parent / _part_name(target.name)
    try:
        os.close(_new_file(part))
    except OSError as error:
        what = f"the folder {target.parent} takes no files ({error.strerror})"
        raise OSError(error.errno, what) from None
    with contextlib.suppress(OSError):
        os.unlink(part)


def replace_file(path: Path, content: bytes) -> None:
    """Write all of `content`, or leave what was there and nothing beside it.

    A link stays, and the file that it names is replaced. A file that is replaced keeps its
    permissions; a new one has those that the umask leaves.

    Raises: OSError, also for what `check_place` refuses. Held by: test_files.py.
    """
    target = _target(path)
    before = _status(target)
    part = target.parent / _part_name(target.name)
    fd = _new_file(part)
    try:
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            if before is not None:
                os.fchmod(fd, stat.S_IMODE(before.st_mode))
            os.fsync(fd)
        os.replace(part, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    _sync_folder(target.parent)


def _new_file(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def check_folder_place(path: Path) -> Path:
    """Where a new folder called `path` will be: links followed; nothing is there, or no file in it.

    Raises: OSError whose strerror says what is in the way. Held by: test_files.py.
    """
    target = _target(path)
    try:
        status = os.lstat(target)
    except FileNotFoundError:
        if not target.parent.is_dir():
            text = f"the folder {target.parent} does not exist; make it first"
            raise FileNotFoundError(errno.ENOENT, text, str(path)) from None
        return target
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is no folder; name another", str(path))
    if any(target.iterdir()):
        raise OSError(errno.ENOTEMPTY, "it exists and is not empty; name another", str(path))
    return target


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, beside `path`; it takes that name at the end, or is gone if that fails.

    Raises: OSError, also for what `check_folder_place` refuses. Held by: test_files.py.
    """
    target = check_folder_place(path)
    part = target.parent / _part_name(target.name)
    try:
        part.mkdir()
        yield part
        for file in part.iterdir():
            _sync(file, os.O_RDONLY)
        _sync_folder(part)
        os.rename(part, target)  # over an empty folder, too, and no other
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    _sync_folder(target.parent)


def _part_name(name: str) -> str:
    """Of at most 74 bytes: file systems count those, and a character may take four of them."""
    begin = os.fsencode(name)[:64].decode("utf-8", "ignore")
    return f".{begin}.{secrets.token_hex(4)}"


def _target(path: Path) -> Path:
    """Where links lead: beside it, a rename stays within one file system."""
    return Path(os.path.realpath(path))


def _status(target: Path) -> os.stat_result | None:
    """Of the regular file there, None if there is nothing. Raises: OSError."""
    try:
        status = os.lstat(target)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(target))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "what is there is no regular file", str(target))
    return status


def _sync_folder(folder: Path) -> None:
    # Not every file system can. The file is whole either way; only a crash may undo its name.
    with contextlib.suppress(OSError):
        _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
