"""Modules of benchmarks/, which is no package, for the tests of what they make of figures."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS, SCRIPTS = ROOT / "benchmarks", ROOT / "scripts"


@contextmanager
def benchmark(name: str) -> Iterator[ModuleType]:
    """That module; afterwards it is not there, nor what it set in the environment."""
    environment, places, known = dict(os.environ), list(sys.path), set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path[:] = places
        for path in (*BENCHMARKS.glob("*.py"), *SCRIPTS.glob("*.py")):
            if path.stem not in known:
                sys.modules.pop(path.stem, None)
        for added in set(os.environ) - set(environment):
            del os.environ[added]
        os.environ.update(environment)
