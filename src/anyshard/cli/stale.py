"""Whether the native module was built from the sources that stand beside the package.

In a checkout installed in editable form, a change in C++ runs only after `make setup`. An ordinary
installation has no sources, and nothing to be older than.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import anyshard
from anyshard.ops import native_module

__all__ = ["native_is_stale", "sources_sha256"]


def native_is_stale() -> bool:
    """True where the compiled module says it comes from other sources than are here.

    Held by: test_doctor.py::test_a_module_of_other_sources_is_told.
    """
    native, folder = native_module(), Path(anyshard.__file__).parent / "_native"
    if native is None or not (folder / "bindings.cpp").is_file():
        return False
    return bool(getattr(native, "sources_sha256", "") != sources_sha256(folder))


def sources_sha256(folder: Path) -> str:
    """Of names and contents, as cmake/sources_hash.cmake computes it; one ms."""
    files = sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])
    lines = [f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
