"""Modules of benchmarks/, which is no package, for the tests of what they make of figures."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@contextmanager
def benchmark(name: str) -> Iterator[ModuleType]:
    """That module; afterwards it is not there, nor what it set in the environment."""
    environment = dict(os.environ)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))
        for path in BENCHMARKS.glob("*.py"):
            sys.modules.pop(path.stem, None)
        for added in set(os.environ) - set(environment):
            del os.environ[added]
        os.environ.update(environment)
