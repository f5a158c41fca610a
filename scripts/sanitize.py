"""The tests of the native core under the address and undefined-behaviour sanitizers.

    python scripts/sanitize.py [PYTEST ARGUMENTS]     from the environment of `make setup`

Builds the module in build/sanitize (the installed one stays) and runs pytest in a process that
preloads the sanitizer's library, which has to come first. There this file is a plugin: it puts
the module where `import anyshard._native` finds it. Leaks are not looked for: Python keeps much.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from native import compile_beside, load

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "sanitize"
MARK = "ANYSHARD_SANITIZED"  # set in the process that this file is a plugin of
TESTS = (*sorted((ROOT / "tests").glob("test_native_*.py")), ROOT / "tests" / "test_golden.py")
NOT_OF_THIS_BUILD = "not sums_in_registers"  # reads the disassembly of the optimised module


def library(name: str) -> str:
    """Path of a library of the compiler."""
    compiler = os.environ.get("CXX", "g++")
    done = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def main() -> int:
    compile_beside(FOLDER, {"ANYSHARD_SANITIZE": "ON"})
    environment = os.environ | {
        MARK: "1",
        # the C++ runtime beside it, or the first exception thrown is not seen
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    pytest = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, "-k", NOT_OF_THIS_BUILD]
    asked = sys.argv[1:] or ["-q"]
    return subprocess.run([*pytest, *asked, *map(str, TESTS)], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
elif MARK in os.environ:
    load(FOLDER)
