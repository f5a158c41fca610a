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
from anyshard.comm.signals import ABORTED, REACHED, WRAP
from anyshard.errors import AnyshardError
from anyshard.trace import EVENT

__all__ = ["HeadMirror", "MemberMirror", "RankSighting", "Sighting"]

_SIGN_SEED = 0x51


class RankSighting(msgspec.Struct, frozen=True, array_like=True):
    """Of one rank: STATUS, a number that changes while it lives, the uint64 that it has to say of
    the last frame, and its events since the last sighting, of which the first has number
    `first_event`."""

    status: bytes
    sign: int
    digests: bytes = b""
    first_event: int = 0
    events: bytes = b""


class Sighting(msgspec.Struct, frozen=True, tag="sighting"):
    """Of the ranks of a host, in their order: all ask for frame `asked`, and `rows` rows had the
    one before."""

    epoch: int
    asked: int
    rows: int
    ranks: tuple[RankSighting, ...]


class MemberMirror:
    """The mapping of a host that is not the head's, looked at by one thread."""

    def __init__(self, region: EpochRegion) -> None:
        self._region = region
        self._ranks = region.ranks_here
        self._liveness = Liveness(region)
        self._waiter = region.signals(region.front).waiter(
            CHANNEL_READY, receivers=(), senders=self._ranks, spin_us=0
        )
        self._asked = 0
        self._events = dict.fromkeys(self._ranks, 0)

    def look(self, timeout_us: int) -> Sighting | None:
        """Wait until all ranks ask for one frame more, but so long at most. None: it has ended."""
        status = self._waiter.wait((self._asked + 1) % WRAP, timeout_us)
        if status == ABORTED:
            return None
        is_next = status == REACHED
        self._asked += is_next
        rows = self._rows(self._asked - 1) if is_next and self._asked > 1 else 0
        ranks = tuple(self._of(rank, rows, is_next=is_next) for rank in self._ranks)
        return Sighting(self._region.epoch, self._asked, rows, ranks)

    def _rows(self, sequence: int) -> int:
        """Of a frame, which its slot still holds."""
        layout, sizes = self._region.layout, self._region.sizes.control
        at = layout.frame_offset + (sequence % sizes.frame_slots) * layout.frame_bytes
        return int(FRAME_HEADER.unpack_from(self._region.memory, at)[4])

    def _of(self, rank: int, rows: int, *, is_next: bool) -> RankSighting:
        region, digests = self._region, b""
        if rows and region.sizes.control.digest_columns:
            slot = (self._asked - 1) % region.sizes.control.frame_slots
            digests = region.digests(slot, rank)[:rows].tobytes()
        sign = repr(self._liveness.sign(rank)).encode()
        first, events = self._news(rank) if is_next else (0, b"")
        return RankSighting(
            region.status(rank).tobytes(), zlib.crc32(sign, _SIGN_SEED), digests, first, events
        )

    def _news(self, rank: int) -> tuple[int, bytes]:
        """Events of a rank that are new; their times are the head's."""
        if not self._region.sizes.control.trace_events:
            return 0, b""
        count, ring = self._region.event_ring(rank)
        written = int(count[0])
        first = max(self._events[rank], written - len(ring))
        self._events[rank] = written
        found = ring[np.arange(first, written) % len(ring)]
        clock_ns = self._region.place.clock_ns
        found["start"] = found["start"].astype(np.int64) + clock_ns
        found["stop"] = found["stop"].astype(np.int64) + clock_ns
        return first, found.tobytes()


class HeadMirror:
    """The head's mapping, as far as ranks of other hosts would have written it."""

    def __init__(self, region: EpochRegion) -> None:
        self.epoch = region.epoch
        self._region = region
        self._asked: dict[int, int] = {}  # by host

    def put(self, host: int, sighting: Sighting) -> None:
        """Write what a host tells of its ranks, and wake the front if that waits for it.

        Raises: AnyshardError for one whose sizes are not those of the epoch.
        """
        region = self._region
        ranks, most = region.sizes.wires.ranks_of(host), region.sizes.control.rows_max
        if len(sighting.ranks) != len(ranks) or sighting.rows > most:
            raise AnyshardError(
                f"host {host} tells of {len(sighting.ranks)} ranks and {sighting.rows} rows; it has"
                f" {len(ranks)}, and a frame {most} rows at most"
            )
        for rank, seen in zip(ranks, sighting.ranks, strict=True):
            _put_rank(region, host, rank, seen, sighting)
        if sighting.asked == self._asked.get(host):
            return
        self._asked[host] = sighting.asked
        for rank in ranks:
            region.signals(rank).publish(CHANNEL_READY, sighting.asked % WRAP, (region.front,))


def _put_rank(
    region: EpochRegion, host: int, rank: int, seen: RankSighting, sighting: Sighting
) -> None:
    control = region.sizes.control
    columns = control.digest_columns
    if (
        len(seen.status) != STATUS.itemsize
        or len(seen.digests) not in (0, sighting.rows * columns * 8)
        or len(seen.events) % EVENT.itemsize
    ):
        raise AnyshardError(
            f"host {host} tells {len(seen.status)}, {len(seen.digests)} and {len(seen.events)}"
            f" bytes of rank {rank}; {STATUS.itemsize}, {sighting.rows * columns * 8} and whole"
            " events are expected"
        )
    status: NDArray[Any] = np.frombuffer(seen.status, STATUS).copy()
    status["relayed"] = seen.sign
    region.status(rank)[:] = status
    if seen.digests:
        slot = (sighting.asked - 1) % control.frame_slots
        into = region.digests(slot, rank)
        into[: sighting.rows] = np.frombuffer(seen.digests, np.uint64).reshape(-1, columns)
    if seen.events and control.trace_events:
        count, ring = region.event_ring(rank)
        events: NDArray[Any] = np.frombuffer(seen.events, EVENT)
        numbers = np.arange(seen.first_event, seen.first_event + len(events))
        ring[numbers % len(ring)] = events
        count[0] = seen.first_event + len(events)
