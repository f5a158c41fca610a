"""What a person sees while waiting, and types: bars on stderr, lines from a terminal or a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from anyshard.errors import AnyshardError

__all__ = ["Bar", "Lines", "abandon_stdout", "tell"]


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

    @property
    def shown(self) -> bool:
        """Whether a person sees it, so that nothing else may be printed until it is gone."""
        return self._bar is not None

    def update(self, done: int, total: int, doing: str = "") -> None:
        """`done` of `total` steps are over, now `doing` that; at the end the bar goes."""
        if self._bar is not None:
            label = doing or self._label
            self._bar.update(self._task, completed=done, total=total, description=label)
            if done >= total:
                self._bar.stop()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def tell(text: str, *, end: str = "\n") -> None:
    """On stdout, at once.

    Raises: BrokenPipeError if its reader has left; AnyshardError naming it if it takes no more.
    Held by: test_cli.py.
    """
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        abandon_stdout()
        raise AnyshardError(f"stdout cannot be written: {error.strerror}") from None


def abandon_stdout() -> None:
    """Whatever is still buffered goes nowhere, so that the exit does not fail again."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Lines:
    """Lines of stdin: with a prompt, editing and recall on a terminal, plain from a pipe.

    Bytes that are no UTF-8 come as lone surrogates, which the tokenizer refuses by name.
    """

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self.is_terminal = sys.stdin is not None and sys.stdin.isatty()
        self._edits = self.is_terminal and sys.stdout is not None and sys.stdout.isatty()
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        if self._edits:
            with contextlib.suppress(ImportError):  # not built into every Python
                import readline  # noqa: F401  input() edits and recalls lines once it is imported

    def read(self) -> str | None:
        """The next line without its end; None when there is no more."""
        if self._edits:
            try:
                return input(self._prompt)
            except EOFError:
                print()
                return None
        if self.is_terminal:  # stdout goes elsewhere, and holds only answers
            print(self._prompt, end="", flush=True, file=sys.stderr)
        line = sys.stdin.readline() if sys.stdin is not None else ""
        return line.removesuffix("\n").removesuffix("\r") if line else None
