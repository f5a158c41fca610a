"""Bugs in where a row stands: positions, lengths, pages, and rows that an earlier run left."""

from __future__ import annotations

from typing import Any

import numpy as np

from anyshard.binder import Binder
from anyshard.comm.control import Frame
from anyshard.ops.exact import I32
from anyshard.verify.naive import AlteredOps
from anyshard.worker import Worker


class PositionReset(Worker):
    """Stages after the first count positions from the first row of the step."""

    def _take(self, frame: Frame) -> None:
        super()._take(frame)
        if self.program.stage:
            rows = len(frame.rows)
            for slot in np.unique(self.row_slot[:rows]):
                mine = np.flatnonzero(self.row_slot[:rows] == slot)
                self.positions[mine] -= self.positions[mine].min()


class ChunkPositions(Worker):
    """Every chunk of a prompt counts its positions from 0; a single row is none."""

    def _take(self, frame: Frame) -> None:
        super()._take(frame)
        rows = len(frame.rows)
        if rows > 1:
            self.positions[:rows] -= self.positions[0]


class ChunkEdgeBinder(Binder):
    """Attention looks at its own copy of the positions."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        assert isinstance(worker, ChunkEdge)
        worker.seen = np.zeros_like(worker.positions)
        module = self.module

        def attention(*arguments: Any) -> Any:
            return module.Attention(*arguments[:6], worker.seen, *arguments[7:])

        self.module = AlteredOps(module, Attention=attention)


class ChunkEdge(Worker):
    """The first row of every chunk but the first does not see its own key."""

    binder_type: type[Binder] = ChunkEdgeBinder
    seen: I32

    def _take(self, frame: Frame) -> None:
        super()._take(frame)
        rows = len(frame.rows)
        self.seen[:rows] = self.positions[:rows]
        if rows > 1 and self.seen[0] > 0:
            self.seen[0] -= 1


class LongerThanItIs(ChunkEdge):
    """Attention reads up to the longest length that the slot ever had."""

    longest = 0

    def _take(self, frame: Frame) -> None:
        super()._take(frame)
        rows = len(frame.rows)
        self.seen[:rows] = np.maximum(self.positions[:rows], self.longest)
        self.longest = max(self.longest, int(self.positions[:rows].max()))


class StaleRow(Worker):
    """After the second frame TP index 1 has the first one's value row of position 5 in layer 1."""

    frames = 0

    def step(self, frame: Frame) -> None:
        values = self.kv.values(1) if self.kv.layers[0] <= 1 < self.kv.layers[1] else None
        mine = values is not None and self.program.tp_index == 1 and self.frames == 1
        old = values[0, :, 5].copy() if values is not None and mine else None
        super().step(frame)
        if values is not None and old is not None:
            values[0, :, 5] = old
        self.frames += 1


class PageReadTwice(Worker):
    """Once a sequence is past its first step, its first block is read from another page."""

    def _take(self, frame: Frame) -> None:
        super()._take(frame)
        if len(frame.rows) and frame.rows["position"].min() > 0:
            slots = np.unique(frame.rows["slot"])
            self.page_table[slots, 0] = self.page_table[slots, 1]


class BlockBoundary(Worker):
    """A step that begins where a block begins goes on in the page of the block before."""

    def _take(self, frame: Frame) -> None:
        super()._take(frame)
        first = int(self.positions[0])
        block, lane = divmod(first, self.program.profile.kv_block)
        if block and not lane:
            pages = self.page_table[self.row_slot[0]]
            pages[block] = pages[block - 1]
