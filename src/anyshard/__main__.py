"""The entry point: imports the command line under a guard, so that Ctrl-C is always one line."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        from anyshard.cli import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("anyshard: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
