"""The verbs, and the only prints: stdout holds the answer or the JSON, stderr all the rest.

Turns exceptions into one sentence and an exit code: 0 fine, 1 internal, 2 usage or bad input,
4 a difference, 5 a lost peer, 130 Ctrl-C, 143 SIGTERM; 141 where the reader of stdout left before
`verify` or `compare` had a verdict. Almost every flag is also `ANYSHARD_*`. What is heavy is
imported only after the command line is known to be right.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from cyclopts import App
from cyclopts.exceptions import CycloptsError

from anyshard import __version__
from anyshard.cli.bench import bench
from anyshard.cli.bench_blocks import blocks
from anyshard.cli.bench_wire import wire
from anyshard.cli.chat import chat
from anyshard.cli.compare import compare
from anyshard.cli.doctor import doctor
from anyshard.cli.generate import generate
from anyshard.cli.quantize import quantize
from anyshard.cli.screen import abandon_stdout
from anyshard.cli.trace import trace
from anyshard.cli.variables import PREFIX, FlagVariables, check_variables
from anyshard.cli.verify import verify
from anyshard.errors import AnyshardError

__all__ = ["app", "main"]

app = App(
    name="anyshard",
    help="Split an LLM any way. Get the same bits.",
    version=__version__,
    suppress_keyboard_interrupt=False,
)
VERBS = (generate, chat, verify, bench, trace, compare, doctor, quantize)
LONG_WORD = re.compile(r"\S{200,}")  # in what is said of a flag
VERDICTS = (["verify"], ["compare"])  # a script takes their 0 for an answer
for verb in VERBS:
    app.command(verb)
app["bench"].command(blocks)
app["bench"].command(wire)
app.config = (partial(check_variables, app), FlagVariables(PREFIX, command=False))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code.

    Held by: test_cli.py.
    """
    _fill_standard_descriptors()
    signal.signal(signal.SIGTERM, _terminated)
    # before NumPy is imported: its BLAS would start threads that a fork does not survive
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # text that the terminal's encoding lacks shows as ?, and ends nothing
            stream.reconfigure(errors="replace")
    given = list(sys.argv[1:] if arguments is None else arguments)[:1]
    try:
        code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        return code if isinstance(code, int) else 0
    except CycloptsError as error:
        page = "".join(f" {verb.__name__}" for verb in VERBS if [verb.__name__] == given)
        said = LONG_WORD.sub(lambda word: f"{word[0][:40]}…", str(error).rstrip(".?"))
        return _say(f"{said}; see anyshard{page} --help", 2)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if sys.stdout is not None and sys.stdout.isatty():
            print()  # the answer stopped in mid-line
        return _say("interrupted; all ranks are ended", 130)
    except BrokenPipeError:
        abandon_stdout()  # its reader left; nothing more can be said there
        return 128 + signal.SIGPIPE if given in VERDICTS else 0
    except AnyshardError as error:
        return _say("\n".join([str(error), *getattr(error, "__notes__", [])]), error.exit_code)
    except OSError as error:
        abandon_stdout()
        return _say(f"the system refused: {error}", 1)


def _fill_standard_descriptors() -> None:
    """Those that the shell has closed go nowhere; a socket of ours must not get the number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one


def _say(text: str, code: int) -> int:
    print(f"anyshard: {text}", file=sys.stderr)
    return code


def _terminated(signum: int, frame: object) -> NoReturn:
    raise SystemExit(128 + signum)
