"""The control word of a thread: how the CPU rounds, and whether it flushes subnormals to zero.

A native kernel sets it at its entry and restores it (`_native/pool.h`). What is computed outside
them, in NumPy or Python floats (reference bodies, RoPE tables, widening, filters of sampling),
rounds as its thread does. A library may have changed that when it was loaded, as one that was
linked with -ffast-math does, so a process of ours sets it once, after its imports.
"""

from __future__ import annotations

import ctypes

__all__ = ["set_control_word"]

DEFAULT_ENVIRONMENT = -1  # FE_DFL_ENV of glibc and musl: nearest even, nothing flushed


def set_control_word() -> None:
    """Round to nearest even and keep subnormals, on the calling thread from here on.

    Held by: test_builds.py::test_a_library_that_flushes_subnormals_changes_no_logit.
    """
    library = ctypes.CDLL(None)  # the interpreter itself needs the C library's mathematics
    failed = library.fesetenv(ctypes.c_void_p(DEFAULT_ENVIRONMENT))
    assert failed == 0, "the C library refused its own default float environment"
