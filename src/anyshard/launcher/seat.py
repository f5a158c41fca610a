"""What starts an epoch, and what a rank finds when it wakes up in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from anyshard.comm.base import HERE, Comm, CommKind, Place
from anyshard.comm.control import RankControl
from anyshard.comm.region import EpochRegion, EpochSizes
from anyshard.comm.shm import Shm
from anyshard.comm.solo import Solo
from anyshard.errors import AnyshardError, PeerLost, UserError

__all__ = [
    "REFUSALS",
    "EpochSizes",
    "Load",
    "Progress",
    "RankMain",
    "Seat",
    "Start",
    "error_text",
    "failure_text",
]

REFUSALS = (OSError, MemoryError)  #: of the system; what was refused says all, no stack is needed


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Begin an epoch: `payload` is for rank_main alone, everything else sizes the group.

    `epoch` must be larger than any before. `deadline_s` bounds a rank's wait for one peer and
    the time a rank may stay stopped. `place`: of this host, where there are several; its ranks are
    those that `sizes` says.
    """

    epoch: int
    payload: bytes
    sizes: EpochSizes
    deadline_s: float = 10.0
    place: Place = HERE

    @property
    def world(self) -> int:
        """Ranks to start."""
        return self.sizes.wires.world


class Progress(Protocol):
    """Hears that `done` of `total` units of loading are over, and, if not empty, what is doing."""

    def __call__(self, done: int, total: int, doing: str = "") -> None:
        """`done` grows until all is done; it starts anew where other work turns out to be needed
        (a cached image that is damaged is packed again)."""
        ...


#: Runs once in the launcher: (state that every rank inherits, payload for the front).
Load = Callable[[Progress], tuple[object, bytes]]


@dataclass(frozen=True)
class Seat:
    """One rank's place in an epoch; `state` is what `load` returned."""

    start: Start
    rank: int
    state: object
    control: RankControl
    region: EpochRegion
    kind: CommKind

    @classmethod
    def of(
        cls, start: Start, *, rank: int, state: object, region: EpochRegion, kind: CommKind
    ) -> Seat:
        """Take the seat of `rank` in `region`."""
        return cls(start, rank, state, RankControl(region, rank=rank), region, kind)

    def comm(self, kind: CommKind = "shm") -> Comm:
        """The wire asked for; the one place that chooses.

        "shm" and "threads" are one body over this epoch's mapping, and Solo in a world of one;
        "torch" imports torch here. So does "shm" for hops to other hosts, and where a stage is on
        several it is "torch". Raises: ValueError for "solo" with more ranks, or "torch"
        among threads.
        """
        wires, deadline_s = self.start.sizes.wires, self.start.deadline_s
        if kind == "torch" or wires.has_wide_stage:
            from anyshard.comm.torch import Torch

            return Torch(self.region, rank=self.rank)
        if kind == "solo" or self.start.world == 1:
            return Solo(wires)
        if self._meets_others():
            from anyshard.comm.torch import Across

            return Across(self.region, rank=self.rank, deadline_s=deadline_s)
        return Shm(self.region, rank=self.rank, deadline_s=deadline_s, kind=self.kind)

    def _meets_others(self) -> bool:
        """Whether hops go to another host, or come from one; the sampler serves the store that such
        ranks find each other by."""
        wires, rank = self.start.sizes.wires, self.rank
        if not wires.hosts:
            return False
        beside = [each for each in (rank - wires.tp, rank + wires.tp) if 0 <= each < wires.world]
        is_beside = any(wires.host_of(each) != self.start.place.host for each in beside)
        return is_beside or rank == self.region.sampler


#: Serves frames until next_frame() returns None; an exception loses the rank.
RankMain = Callable[[Seat], None]


def error_text(error: BaseException) -> str:
    """What to say of an exception that nobody has handled."""
    if isinstance(error, AnyshardError):
        return str(error)
    if isinstance(error, REFUSALS):
        return f"the system refused: {str(error) or 'no memory is left'}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def failure_text(error: BaseException, *, rank: int) -> tuple[str, int, int]:
    """(one line, blamed rank, exit code) for an exception that ended `rank`.

    A user's mistake keeps its exit code; everything else is a lost peer (5).
    """
    exit_code = error.exit_code if isinstance(error, UserError) else PeerLost.exit_code
    blamed = rank
    if isinstance(error, PeerLost) and error.rank is not None:
        blamed = error.rank
    return error_text(error).partition("\n")[0], blamed, exit_code
