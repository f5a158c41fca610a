"""Which kernel bodies the installed package has, and whether they can be built here.

    python scripts/native_body.py          prints the bodies, or what to install to get them
    python scripts/native_body.py --build  prints 1 if a compiler and Python's headers are here

`make` asks for the second before it builds: 1 makes an error in the C++ stop the build, 0 lets
the package install as pure Python.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

MISSING = """\
anyshard is installed WITHOUT native kernels: {lacking} not found when it was built.
It computes the same bits with the reference bodies, many times slower.
To build them: apt-get install g++ python3-dev (or your system's names), `make clean`, again."""


def lacking() -> list[str]:
    """What the build needs and this machine does not have."""
    compilers = (os.environ.get("CXX", "c++").split()[0], "c++", "g++", "clang++")
    needs = {
        "a C++ compiler": any(shutil.which(name) for name in compilers),
        "Python.h": Path(sysconfig.get_path("include"), "Python.h").exists(),
    }
    return [name for name, found in needs.items() if not found]


def main() -> int:
    if "--build" in sys.argv[1:]:
        print(0 if lacking() else 1)
        return 0
    try:
        # Not `import anyshard._native`: where it was not built, that finds the folder of sources.
        from anyshard._native import available_bodies
    except ImportError:
        print(MISSING.format(lacking=" and ".join(lacking() or ["a compiler"])), file=sys.stderr)
        return 0
    print("native kernels:", ", ".join(available_bodies()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
