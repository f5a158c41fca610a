"""The entry point: imports the command line under a guard, so that Ctrl-C is always one line.

Once the exit code is known, no signal changes it any more.
"""

from __future__ import annotations

import signal
import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        from anyshard.cli import main as run

        code = run()
        _settle()
    except KeyboardInterrupt:
        _settle()
        return _say("interrupted", 130)
    except SystemExit:  # SIGTERM
        _settle()
        raise
    except ImportError as error:
        _settle()
        return _say(f"a module could not be loaded: {_last_line(error)}", 1)
    except MemoryError as error:
        _settle()
        text = f"memory ran out: {_last_line(error)}".removesuffix(": ")
        return _say(f"{text}; end other programs, or ask for less", 1)
    return code


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _settle() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _say(text: str, code: int) -> int:
    sys.stderr.write(f"anyshard: {text}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
