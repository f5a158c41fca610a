"""Ranks as threads of this process, with the same face as the forked ones; for wide grids.

A thread cannot be killed: ending the epoch aborts every wait, and rank_main is expected to
leave through EpochAborted.
"""

from __future__ import annotations

import threading
import traceback

from anyshard.comm.base import EpochAborted
from anyshard.comm.control import FrontControl
from anyshard.comm.region import EpochRegion
from anyshard.errors import AnyshardError, PeerLost
from anyshard.launcher.channel import RankLost
from anyshard.launcher.handle import raise_lost
from anyshard.launcher.seat import Load, Progress, RankMain, Seat, Start, failure_text

__all__ = ["ThreadGroup"]


class ThreadGroup:
    """A RankGroup in threads; see anyshard.launcher.handle.RankGroup."""

    def __init__(self, load: Load, rank_main: RankMain) -> None:
        self.pids: list[int] = []
        self._load = load
        self._rank_main = rank_main
        self._state: object = None
        self._threads: list[threading.Thread] = []
        self._region: EpochRegion | None = None
        self._start: Start | None = None
        self._last_epoch = -1
        self._losses: list[RankLost] = []

    def wait_loaded(
        self, progress: Progress | None = None, *, deadline_s: float | None = None
    ) -> bytes:
        """Run `load` here and now."""
        self._state, payload = self._load(progress or (lambda done, total, doing="": None))
        return payload

    def start(self, start: Start) -> FrontControl:
        """See RankGroup.start."""
        self.end()
        if start.epoch <= self._last_epoch:
            raise AnyshardError(f"epoch {start.epoch} after epoch {self._last_epoch}")
        self._last_epoch = start.epoch
        region = EpochRegion.create(start.sizes, start.epoch, shared=False)
        self._region, self._start, self._losses = region, start, []
        self._threads = [
            threading.Thread(
                target=self._sit, args=(start, rank, region), name=f"rank{rank}", daemon=True
            )
            for rank in range(start.world)
        ]
        for thread in self._threads:
            thread.start()
        return FrontControl(region, poll=self.poll, deadline_s=start.deadline_s)

    def _sit(self, start: Start, rank: int, region: EpochRegion) -> None:
        try:
            seat = Seat.of(start, rank=rank, state=self._state, region=region, kind="threads")
            self._rank_main(seat)
        except EpochAborted:
            return
        except BaseException as error:  # noqa: BLE001  poll() raises it in the front
            text, blamed, exit_code = failure_text(error, rank=rank)
            reason = text
            if blamed == rank and exit_code == PeerLost.exit_code:
                reason = f"rank {rank} failed: {text}"
            tail = traceback.format_exception(error)[-1].splitlines()
            self._losses.append(RankLost(start.epoch, blamed, reason, exit_code, tail))
            region.signals(region.front).abort()
            return
        if not region.stopping:
            reason = f"rank {rank} left without being asked to"
            self._losses.append(RankLost(start.epoch, rank, reason, PeerLost.exit_code, []))
            region.signals(region.front).abort()

    def poll(self) -> None:
        """See RankGroup.poll."""
        if self._losses:
            raise_lost(self._losses[0])

    def end(self) -> None:
        """Abort every wait and join the threads. Raises: PeerLost if one does not leave."""
        region, start = self._region, self._start
        if region is None or start is None:
            return
        region.signals(region.front).abort()
        for rank, thread in enumerate(self._threads):
            thread.join(start.deadline_s)
            if thread.is_alive():
                raise PeerLost(
                    f"rank {rank} has not left {start.deadline_s:g} s after it was asked",
                    rank=rank,
                )
        self._region, self._start, self._threads = None, None, []
        region.close_descriptors()

    def close(self, *, exit_code: int = 0) -> None:
        """See RankGroup.close."""
        self.end()
