"""`anyshard trace FILE`: what each rank of a run waited for; and the file that runs write it to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from anyshard.cli.inputs import spare_model, spare_streams
from anyshard.cli.screen import tell
from anyshard.errors import OptionError

if TYPE_CHECKING:
    from anyshard.engine import Engine
    from anyshard.trace import Run

__all__ = ["TRACE_EVENTS", "TraceFile", "trace"]

TRACE_EVENTS = 1 << 16  # kept of each rank: some ten thousand steps, 3 MB


def trace(
    file: Annotated[str, Parameter(show_env_var=False)],
    /,
    *,
    html: str | None = None,
    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Show what each rank of a traced run waited for, and which stage sets the pace.

    generate, bench and verify write the file with --trace. It is Chrome's format, which Perfetto
    opens, too.

    Parameters
    ----------
    file
        A file that --trace has written.
    html
        Also write a page with the lanes of all ranks, to zoom into.
    json_output
        Print one JSON object.
    """
    from anyshard.bench.timeline import page, run_record, run_text
    from anyshard.trace import read_trace

    if not file:
        raise OptionError("the name of a trace is empty; give a file that --trace has written")
    place = None if html is None else _free_place("--html", html)
    runs = read_trace(Path(file))
    if place is not None:
        _write("--html", place, page(runs).encode())
    if json_output:
        tell(json.dumps({"runs": [run_record(run) for run in runs]}))
    else:
        tell("\n\n".join(run_text(run) for run in runs))
    return 0


class TraceFile:
    """The file of --trace, known to be writable before anything is loaded.

    Raises: OptionError naming what is wrong with the place.
    """

    def __init__(self, path: str) -> None:
        self._path = _free_place("--trace", path)
        spare_streams("--trace", [self._path])
        self._runs: list[Run] = []

    def spare(self, model: Path, *others: str | None) -> None:
        """Raises: OptionError where the place is the model's, or of another file of the command."""
        spare_model("--trace", [self._path], model)
        for other in others:
            if other is not None and self._path.resolve() == Path(other).resolve():
                raise OptionError(f"--trace {self._path} is another file of this command; name one")

    def add(self, engine: Engine, name: str) -> None:
        """What an engine's ranks did so far."""
        self.add_run(engine.traced(name))

    def add_run(self, run: Run) -> None:
        """What the ranks of a run did."""
        self._runs.append(run)

    def write(self) -> None:
        """All that was added. Raises: OptionError where the system refuses."""
        from anyshard.trace import trace_bytes

        _write("--trace", self._path, trace_bytes(self._runs))


def _free_place(flag: str, path: str) -> Path:
    from anyshard.files import check_place

    if not path:
        raise OptionError(f"{flag} is empty; give the name of a file")
    try:
        check_place(Path(path))
    except OSError as error:
        raise OptionError(f"{flag} {path} cannot be written: {error.strerror}") from None
    return Path(path)


def _write(flag: str, path: Path, content: bytes) -> None:
    from anyshard.files import replace_file

    try:
        replace_file(path, content)
    except OSError as error:
        raise OptionError(f"{flag} {path} could not be written: {error.strerror}") from None
