"""A folder for what ranks copy while a difference is located; one that nobody holds is swept.

A context manager removes its folder, unless the process is killed. So each holds a lock, which ends
with its process, and the next run takes away what is ours and is not locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["clear_abandoned", "scratch_folder"]

_PREFIX: Final = "anyshard-capture-"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder under $TMPDIR that ranks may write into; gone at the end.

    Held by: test_parting.py.
    """
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # where a file system has no locks, none can be taken to sweep either
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        os.close(fd)
        shutil.rmtree(folder, ignore_errors=True)


def clear_abandoned() -> None:
    """Remove the folders under $TMPDIR that are this user's and whose processes were killed.

    An empty one is left: it may have been made this very moment, and not be locked yet.
    Held by: test_parting.py.
    """
    with contextlib.suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                _clear(folder)


def _clear(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid != os.geteuid() or not os.listdir(fd):
            return
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(fd)
