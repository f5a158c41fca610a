"""Frames that nobody waits for any more: their rows follow a draft that was wrong.

The front says so of a frame, in shared memory, as soon as it has read the token that the draft
should have been. A rank looks before each of its ops, leaves those out that are left, and hands on
a header without rows; so frames, results and their order are what they would have been, and no
buffer is held back or given out twice. What a void frame has stored is written over by the rows
that come in its place. Being late, or lost, such a word costs time and no bit.

Ranks of one stage must leave out the same ops, or one would wait for another's exchange for ever:
tp rank 0 looks once, before the first, and the others follow it. Where they are on several hosts
they follow only a stage before them. Held by: test_windows.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from anyshard.comm.liveness import SLICE_S, Liveness
from anyshard.comm.region import CHANNEL_VERDICT, EpochRegion
from anyshard.comm.signals import REACHED, WRAP, Waiter
from anyshard.comm.waiting import outwait

__all__ = ["Voids", "publish_void"]


def publish_void(region: EpochRegion, sequence: int) -> None:
    """Tell the ranks of this host that nobody waits for frame `sequence`."""
    region.voids()[sequence % region.sizes.control.frame_slots] = sequence % WRAP


class Voids:
    """What one rank knows of it.

    words: uint32[frame_slots], in a frame's slot its number once it is void; now: uint32[2], the
    number of the frame that runs and its slot. A native walk looks at both.
    """

    def __init__(self, region: EpochRegion, *, rank: int, deadline_s: float) -> None:
        wires = region.sizes.wires
        self.now: NDArray[np.uint32] = np.zeros(2, np.uint32)
        self._now, self._rank, self._deadline_s = self.now.data, rank, deadline_s
        told = region.voids()
        self.words: NDArray[np.uint32] = told
        self._told, self._seen = told.data, self.words.data
        self._waiter: Waiter | None = None
        first = rank - rank % wires.tp
        self._mates = [each for each in range(first, first + wires.tp) if each != rank]
        if not self._mates:
            return
        self.words = np.zeros_like(told)  # this rank's own: it changes between frames only
        self._seen = self.words.data
        if {wires.host_of(each) for each in (rank, *self._mates)} != {region.place.host}:
            return
        self._agreed = region.voids(rank // wires.tp).data
        self._first, self._liveness = first, Liveness(region)
        self._slice_us = round(min(SLICE_S, deadline_s) * 1e6)
        leads = rank == first
        self._waiter = region.signals(rank).waiter(
            CHANNEL_VERDICT,
            receivers=self._mates if leads else (),
            senders=() if leads else [first],
            spin_us=region.sizes.spin_us,
        )

    def begin(self, sequence: int) -> None:
        """A frame begins."""
        self._now[0], self._now[1] = sequence % WRAP, sequence % len(self._seen)

    @property
    def is_void(self) -> bool:
        """Whether the frame that runs is; it stays so."""
        return self._seen[self._now[1]] == self._now[0]

    def settle(self, *, is_handed_on: bool) -> None:
        """Before the first op, the same on all ranks of a stage. is_handed_on: the stage before has
        sent no rows. Raises: PeerLost, EpochAborted."""
        now, slot = self._now[0], self._now[1]
        if is_handed_on:
            self._seen[slot] = now
        elif self._waiter is not None:
            if self._rank == self._first:
                self._agreed[slot] = self._told[slot]
                self._waiter.run(now, 0)
            elif (status := self._waiter.wait(now, self._slice_us)) != REACHED:
                outwait(
                    self._liveness,
                    self._waiter,
                    value=now,
                    status=status,
                    senders=(self._first,),
                    rank=self._rank,
                    deadline_s=self._deadline_s,
                    slice_us=self._slice_us,
                    what="a word on whether a frame is void",
                )
            self._seen[slot] = self._agreed[slot]
