"""Who is alive: the one rule by which a rank, or the launcher, counts as lost.

A rank is lost when it is dead, or when for `deadline_s` it has given no sign of life although it
waits for no other rank. A sign of life is a finished op (`operations` in its status) or
processor time: one op may last longer than the deadline, and starting up finishes none. Wanting
a processor counts as well: with 7 busy processes on 2 cores, 10 ms of it took up to 0.24 s.

A rank that waits for another says for whom (`waiting_for` in its status). Then its own processor
time is no sign, since waiting may spin; whoever waits for it follows these words to the rank that
holds up everybody, and judges that one. So the deadline does not grow with the length of a chain,
and the rank that is named is the one that hangs.

Who looks: every rank that waits over `Shm`, and the front, with a second of grace (also for
ranks over Gloo, whose own waits know only of broken connections). The launcher sees deaths at
once, and names a rank that has been stopped for the deadline; a stopped rank gives no sign either.
Silence is added up look by look, so a freeze of the whole machine is nobody's silence.

Where ranks are on several hosts, each host tells the head of the signs of life of its own
(comm/mirror.py), and only the head judges ranks of others.

What no deadline can tell apart: an endless loop in an op, and a very long op. Both are alive.
Held by: test_liveness.py.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from anyshard.comm.region import EpochRegion

__all__ = ["SLICE_S", "STARTUP_S", "Liveness", "Patience", "Vigil", "beat_of", "processor_sign"]

SLICE_S = 0.05  # a wait looks for signs of life this often; one that ends sooner costs nothing
STARTUP_S = 60.0  # silence allowed before a rank's first frame: imports may wait for a slow disk
_LOOK_MAX_S = 0.5  # time between two looks counts as silence up to this


def processor_sign(pid: int, thread: int | None = None) -> tuple[int, float]:
    """Changes while a process (or one thread of it) runs or could run; (0, 0) once it is gone."""
    place = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    try:
        with open(place, "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0.0
    ticks = int(fields[11]) + int(fields[12])  # of 10 ms
    return ticks, time.monotonic() if fields[0] == b"R" else 0.0


def beat_of(region: EpochRegion, rank: int) -> Callable[[], None]:
    """A sign of life to be given by a rank that neither computes nor waits for another one."""
    operations = region.status(rank)["operations"].data

    def beat() -> None:
        operations[0] += 1

    return beat


class Patience:
    """The clock of one wait: how long a sign of life has stayed the same."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._sign: Hashable = None
        self._silent_s = 0.0
        self._looked = time.monotonic()

    def is_over(self, sign: Hashable) -> bool:
        """Look: True once `sign` has not changed for the deadline."""
        now = time.monotonic()
        passed_s, self._looked = now - self._looked, now
        if sign != self._sign:
            self._sign, self._silent_s = sign, 0.0
        else:
            self._silent_s += min(passed_s, _LOOK_MAX_S)
        return self._silent_s >= self._deadline_s


class Liveness:
    """The status words of all ranks of an epoch that tell of life."""

    def __init__(self, region: EpochRegion) -> None:
        self._records = [region.status(rank) for rank in range(region.sizes.wires.world)]
        self._waiting = [record["waiting_for"].data for record in self._records]
        self._pid = os.getpid()
        here, wires = region.place.host, region.sizes.wires
        self._is_here = [wires.host_of(rank) == here for rank in range(wires.world)]
        self._is_head = here == 0

    def introduce(self, rank: int) -> None:
        """Say which process and thread `rank` is; by the rank itself."""
        self._records[rank]["pid"] = os.getpid()
        self._records[rank]["thread"] = threading.get_native_id()

    def set_waiting(self, rank: int, peer: int | None) -> None:
        """Say that `rank` waits for `peer`, or for nobody; by the rank itself."""
        self._waiting[rank][0] = 0 if peer is None else peer + 1

    def waiting_for(self, rank: int) -> int | None:
        """The rank that `rank` waits for, if any."""
        peer = self._waiting[rank][0] - 1
        return None if peer < 0 else peer

    def culprit(self, rank: int) -> int:
        """The rank that holds `rank` up: `rank` itself if it waits for nobody.

        In a circle of ranks that wait for each other, one of them.
        """
        for _ in self._records:
            peer = self.waiting_for(rank)
            if peer is None:
                break
            rank = peer
        return rank

    def sign(self, rank: int) -> tuple[object, ...]:
        """Changes as long as `rank` is alive."""
        record = self._records[rank]
        operations = int(record["operations"][0])
        if not self._is_here[rank]:
            return rank, operations, int(record["relayed"][0])
        if self.waiting_for(rank) is not None:
            return rank, operations
        pid, thread = int(record["pid"][0]), int(record["thread"][0])
        is_thread = pid == self._pid
        return rank, operations, *processor_sign(pid, thread if is_thread else None)

    def is_seen(self, rank: int) -> bool:
        """Whether this host hears of a rank's signs of life: the head does of all ranks', the
        others of their own."""
        return self._is_head or self._is_here[rank]


class Vigil:
    """One wait for ranks."""

    def __init__(self, liveness: Liveness, deadline_s: float) -> None:
        self._liveness = liveness
        self._patience = Patience(deadline_s)

    def lost(self, peer: int) -> int | None:
        """Look at whoever holds up `peer`: the rank that is lost, if the deadline has passed."""
        culprit = self._liveness.culprit(peer)
        if not self._liveness.is_seen(culprit):
            return None
        return culprit if self._patience.is_over(self._liveness.sign(culprit)) else None
