"""How a rank waits for another beyond the first slice: until it is reached, or somebody is lost."""

from __future__ import annotations

from collections.abc import Sequence

from anyshard.comm.base import EpochAborted, late_peer
from anyshard.comm.liveness import Liveness, Vigil
from anyshard.comm.signals import ABORTED, LATE, REACHED, Waiter

__all__ = ["outwait"]


def outwait(
    liveness: Liveness,
    waiter: Waiter,
    *,
    value: int,
    status: int,
    senders: Sequence[int],
    rank: int,
    deadline_s: float,
    slice_us: int,
    what: str,
) -> None:
    """Go on with a wait of `rank` whose first slice ended with `status`, until `value` is reached.

    Raises: PeerLost naming the rank that holds it up, EpochAborted.
    """
    vigil = Vigil(liveness, deadline_s)
    try:
        while status != REACHED:
            if status == ABORTED:
                raise EpochAborted(f"rank {rank}: the epoch ended while waiting in {what}")
            peer = senders[status - LATE]
            liveness.set_waiting(rank, peer)
            late = vigil.lost(peer)
            if late is not None:
                raise late_peer(waiting=rank, late=late, deadline_s=deadline_s, what=what)
            status = waiter.wait(value, slice_us)
    finally:
        liveness.set_waiting(rank, None)
