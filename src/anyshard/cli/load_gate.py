"""What holds loading up until the front knows that it is worth its while.

A launcher is forked early, and what it is to load is refused late: when the prompts are read, or
two vocabularies compared.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from anyshard.errors import AnyshardError

if TYPE_CHECKING:
    from anyshard.launcher import Load, Progress

__all__ = ["LoadGate", "at_once"]


def at_once(load: Load) -> Load:
    """`load`, behind no gate."""
    return load


class LoadGate:
    """What forked launchers wait at until the front lets them load."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._waiting = 0

    def open(self) -> None:
        """Let them pass."""
        os.write(self._write, b"!" * self._waiting)

    def close(self) -> None:
        """In each process once."""
        os.close(self._read)
        os.close(self._write)

    def before(self, load: Load) -> Load:
        """`load`, to be run in a launcher, behind the gate."""
        self._waiting += 1

        def wait(progress: Progress) -> tuple[object, bytes]:
            os.close(self._write)  # the front's alone: with the front gone, nothing is read
            is_open = os.read(self._read, 1)
            os.close(self._read)
            if not is_open:
                raise AnyshardError("the front has gone")
            return load(progress)

        return wait
