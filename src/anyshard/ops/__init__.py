"""The ops of the program: the only room that reduces floats.

`load_kernels` picks the bodies once, when a worker is built: native (AVX2, with VNNI or
without, or scalar) or the NumPy reference. All have the same names, arguments and bits.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Literal

from anyshard.errors import AnyshardError, OptionError

__all__ = [
    "Body",
    "KernelChoice",
    "Kernels",
    "available_bodies",
    "choose_body",
    "load_kernels",
    "native_module",
]

Body = Literal["vnni", "avx2", "scalar", "reference"]
KernelChoice = Literal["auto", "vnni", "avx2", "scalar", "reference"]


def native_module() -> ModuleType | None:
    """The compiled module, or None where the package was built without a compiler."""
    try:
        module = importlib.import_module("anyshard._native")
    except ImportError:
        return None
    # without the extension, the folder of its sources imports as an empty namespace
    return module if hasattr(module, "Pool") else None


def available_bodies() -> list[Body]:
    """Bodies that run here, best first; the reference always does."""
    native = native_module()
    found: list[Body] = list(native.available_bodies()) if native is not None else []
    return [*found, "reference"]


class Kernels:
    """One body: the op classes of its module, and the pool that they share.

    Raises: AnyshardError if the system refuses the pool its threads.
    """

    def __init__(self, body: Body, *, threads: int, spin: bool) -> None:
        native = native_module()
        if body != "reference" and native is not None:
            self.module: Any = native
            try:
                self.pool: Any = native.Pool(threads, body, spin)
            except RuntimeError:  # EAGAIN of a limit on threads or memory
                raise AnyshardError(
                    f"{threads} threads could not be started; lower --threads"
                ) from None
        else:
            self.module = importlib.import_module("anyshard.ops.reference")
            self.pool = self.module.Pool()
        self.body = body


def choose_body(choice: KernelChoice) -> Body:
    """The body that a choice means here.

    Raises: OptionError naming the bodies that exist, if the one asked for does not.
    """
    bodies = available_bodies()
    if choice == "auto":
        return bodies[0]
    if choice not in bodies:
        raise OptionError(
            f"--kernels {choice} is not available here; {', '.join(bodies)} are"
            + ("" if len(bodies) > 1 else " (the package was built without a C++ compiler)")
        )
    return choice


def load_kernels(choice: KernelChoice, *, threads: int, spin: bool) -> Kernels:
    """Kernels for a choice, with a pool of `threads` threads (a reference body has one)."""
    return Kernels(choose_body(choice), threads=threads, spin=spin)
