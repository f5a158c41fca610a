"""What two hosts of an epoch tell each other of its mapping: each has one of its own.

Frames go from the head to a member (`comm.control.publish_frame`). Back comes a `Sighting`: how far
the member's ranks are, what they say of themselves, and their signs of life. The head puts it where
these ranks would have written it, so that the front sees ranks of all hosts alike. Results need no
way back: the sampler is on the head. Knows nothing of sockets.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from anyshard.comm.liveness import Liveness
from anyshard.comm.region import CHANNEL_READY, FRAME_HEADER, STATUS, EpochRegion
from anyshard.comm.signals import ABORTED, REACHED, WRAP, Waiter
from anyshard.errors import AnyshardError
from anyshard.trace import EVENT

__all__ = ["HeadMirror", "MemberMirror", "RankSighting", "Sighting"]

_SIGN_SEED = 0x51


class RankSighting(msgspec.Struct, frozen=True, array_like=True):
    """Of one rank: it asks for frame `asked`; STATUS; a number that changes while it lives; if
    `asked` is new, how many rows the frame before it had and the uint64 that it has to say of them,
    and its events since, of which the first has number `first_event`."""

    asked: int
    status: bytes
    sign: int
    rows: int = 0
    digests: bytes = b""
    first_event: int = 0
    events: bytes = b""


class Sighting(msgspec.Struct, frozen=True, tag="sighting"):
    """Of the ranks of a host, in their order."""

    epoch: int
    ranks: tuple[RankSighting, ...]

    @property
    def asked(self) -> list[int]:
        """By rank."""
        return [rank.asked for rank in self.ranks]


class MemberMirror:
    """The mapping of a host that is not the head's, looked at by one thread."""

    def __init__(self, region: EpochRegion) -> None:
        self._region = region
        self._ranks = region.ranks_here
        self._liveness = Liveness(region)
        self._waiters = {rank: self._waiter([rank]) for rank in self._ranks}
        self._all = self._waiter(self._ranks)
        self._asked = dict.fromkeys(self._ranks, 0)
        self._events = dict.fromkeys(self._ranks, 0)

    def _waiter(self, ranks: list[int]) -> Waiter:
        signals = self._region.signals(self._region.front)
        return signals.waiter(CHANNEL_READY, receivers=(), senders=ranks, spin_us=0)

    def look(self, timeout_us: int) -> Sighting | None:
        """Wait until all ranks ask for one frame more than the last of them did, but so long at
        most; none is seen to go on by more than one frame. None: the epoch has ended."""
        target = min(self._asked.values()) + 1
        if self._all.wait(target % WRAP, timeout_us) == ABORTED:
            return None
        return Sighting(self._region.epoch, tuple(self._of(rank) for rank in self._ranks))

    def _of(self, rank: int) -> RankSighting:
        region, asked = self._region, self._asked[rank] + 1
        sign = zlib.crc32(repr(self._liveness.sign(rank)).encode(), _SIGN_SEED)
        if self._waiters[rank].wait(asked % WRAP, 0) != REACHED:
            return RankSighting(asked - 1, region.status(rank).tobytes(), sign)
        self._asked[rank] = asked
        rows = self._rows(asked - 1) if asked > 1 else 0
        digests = b""
        if rows and region.sizes.control.digest_columns:
            slot = (asked - 1) % region.sizes.control.frame_slots
            digests = region.digests(slot, rank)[:rows].tobytes()
        return RankSighting(
            asked, region.status(rank).tobytes(), sign, rows, digests, *self._news(rank)
        )

    def _rows(self, sequence: int) -> int:
        """Of a frame, which its slot still holds: no later one is sent before all have run it."""
        layout, sizes = self._region.layout, self._region.sizes.control
        at = layout.frame_offset + (sequence % sizes.frame_slots) * layout.frame_bytes
        return int(FRAME_HEADER.unpack_from(self._region.memory, at)[4])

    def _news(self, rank: int) -> tuple[int, bytes]:
        """The number of the first event of a rank that is new, and all; times are the head's."""
        if not self._region.sizes.control.trace_events:
            return 0, b""
        count, ring = self._region.event_ring(rank)
        written = int(count[0])
        first = max(self._events[rank], written - len(ring))
        self._events[rank] = written
        found = ring[np.arange(first, written) % len(ring)]
        for name in ("start", "stop"):
            found[name] = found[name].astype(np.int64) + self._region.place.clock_ns
        return first, found.tobytes()


class HeadMirror:
    """The head's mapping, as far as ranks of other hosts would have written it."""

    def __init__(self, region: EpochRegion) -> None:
        self.epoch = region.epoch
        self._region = region
        self._asked = dict.fromkeys(range(region.sizes.wires.world), 0)

    def put(self, host: int, sighting: Sighting) -> None:
        """Write what a host tells of its ranks, and wake the front if that waits for it.

        Raises: AnyshardError for one whose sizes are not those of the epoch.
        """
        region = self._region
        ranks = region.sizes.wires.ranks_of(host)
        if len(sighting.ranks) != len(ranks):
            raise AnyshardError(
                f"host {host} tells of {len(sighting.ranks)} ranks; it has {len(ranks)}"
            )
        for rank, seen in zip(ranks, sighting.ranks, strict=True):
            _put_rank(region, host, rank, seen)
        for rank, seen in zip(ranks, sighting.ranks, strict=True):
            if seen.asked != self._asked[rank]:
                self._asked[rank] = seen.asked
                region.signals(rank).publish(CHANNEL_READY, seen.asked % WRAP, (region.front,))


def _put_rank(region: EpochRegion, host: int, rank: int, seen: RankSighting) -> None:
    control = region.sizes.control
    columns = control.digest_columns
    if (
        seen.rows > control.rows_max
        or len(seen.status) != STATUS.itemsize
        or len(seen.digests) not in (0, seen.rows * columns * 8)
        or len(seen.events) % EVENT.itemsize
    ):
        raise AnyshardError(
            f"host {host} tells {len(seen.status)}, {len(seen.digests)} and {len(seen.events)}"
            f" bytes of rank {rank} and {seen.rows} rows; {STATUS.itemsize},"
            f" {seen.rows * columns * 8} and whole events of {control.rows_max} rows at most are"
            " expected"
        )
    status: NDArray[Any] = np.frombuffer(seen.status, STATUS).copy()
    status["relayed"] = seen.sign
    region.status(rank)[:] = status
    if seen.digests:
        into = region.digests((seen.asked - 1) % control.frame_slots, rank)
        into[: seen.rows] = np.frombuffer(seen.digests, np.uint64).reshape(-1, columns)
    if seen.events and control.trace_events:
        count, ring = region.event_ring(rank)
        events: NDArray[Any] = np.frombuffer(seen.events, EVENT)
        numbers = np.arange(seen.first_event, seen.first_event + len(events))
        ring[numbers % len(ring)] = events
        count[0] = seen.first_event + len(events)
