"""What a person sees while waiting: progress bars on stderr, on a terminal only."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["Bar"]


class Bar:
    """A progress bar, gone when it is done; silent where stderr is not a terminal."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: Any = None

    def __enter__(self) -> Bar:
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._label, total=None)
            self._bar.start()
        return self

    def update(self, done: int, total: int) -> None:
        """`done` of `total` steps are over; at the end the bar goes."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
            if done >= total:
                self._bar.stop()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
