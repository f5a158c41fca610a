"""Calls of a step that follow each other, made by one native call where they can be.

A bound call of Python costs a microsecond or two beside its work, and a step has hundreds. A call
that is not native (a hop, Gloo, a reference body, whatever a test has put there) is made as before,
between two walks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from anyshard.comm.base import Exchange
from anyshard.comm.voids import Voids
from anyshard.ops import native_module
from anyshard.ops.digest import U64

__all__ = ["Gathering", "Run", "Several", "walks"]

Run = Callable[[int], None]

VOID = -3  # of a native walk: what its rows are for, nobody waits for any more


class Gathering:
    """An exchange in which each row brings `row_floats`, and `row_wire` with the padding."""

    def __init__(self, exchange: Exchange, *, row_floats: int, row_wire: int) -> None:
        self.exchange, self.row_floats, self.row_wire = exchange, row_floats, row_wire

    def __call__(self, rows: int) -> None:
        """Exchange those of so many rows."""
        self.exchange.run(rows * self.row_floats, rows * self.row_wire)

    def end(self, status: int, rows: int) -> None:
        """The rest of one whose native part ended with `status`."""
        self.exchange.end(status, rows * self.row_floats, rows * self.row_wire)


class Several:
    """Calls for one op, in order."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)

    def __call__(self, rows: int) -> None:
        """All of them."""
        for run in self.runs:
            run(rows)


class _Walk:
    """Native calls one after the other."""

    def __init__(
        self, runs: Sequence[Run], natives: Sequence[Any], operations: U64, voids: Voids | None
    ) -> None:
        native: Any = native_module()
        self._runs, self._count = tuple(runs), len(runs)
        self._native = native.Walk(tuple(natives), operations)
        if voids is not None:
            self._native.heed(voids.words, voids.now)

    def __call__(self, rows: int) -> None:
        """All of them; a wait that takes long is ended by its exchange, in Python. Those of a void
        frame that are left are left out."""
        done: int = self._native.run(rows, 0)
        while done < self._count and self._native.status != VOID:
            gathering = self._runs[done]
            assert isinstance(gathering, Gathering)
            gathering.end(self._native.status, rows)
            done = self._native.run(rows, done + 1)


class _Heeding:
    """A call that is left out for void frames."""

    def __init__(self, run: Run, voids: Voids) -> None:
        self._run, self._voids = run, voids

    def __call__(self, rows: int) -> None:
        if not self._voids.is_void:
            self._run(rows)


def walks(runs: Iterable[Run], operations: U64, voids: Voids | None = None) -> list[Run]:
    """The same calls in the same order, fewer of them Python's.

    operations [1] counts those made within a walk; a call that stays is not counted. voids: frames
    for which none is made, from the moment on that they are void.
    Held by: test_walk.py.
    """
    pairs = [(run, _native(run)) for run in _flat(runs)]
    found: list[Run] = []
    for is_native, group in groupby(pairs, lambda pair: pair[1] is not None):
        calls, natives = zip(*group, strict=True)
        if is_native:
            found.append(_Walk(calls, natives, operations, voids))
        else:
            found += calls if voids is None else [_Heeding(call, voids) for call in calls]
    return found


def _flat(runs: Iterable[Run]) -> Iterator[Run]:
    for run in runs:
        if isinstance(run, Several):
            yield from _flat(run.runs)
        else:
            yield run


def _native(run: Run) -> Any:
    """What a native walk makes of a call, or None."""
    native: Any = native_module()
    if native is None:
        return None
    if isinstance(run, Gathering):
        return run.exchange.native(run.row_floats, run.row_wire)
    owner = getattr(run, "__self__", None)  # of a bound `run`
    return owner if isinstance(owner, native.Op) else None
