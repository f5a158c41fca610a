"""Ranks that are wrong on purpose: planted bugs.

A *planted bug* is one mistake that a real engine has made; a test that does not turn red under
it proves nothing. Every class here is a `Worker`, for `rank_main(seat, worker_type=...)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from anyshard.binder import Binder
from anyshard.comm.control import Frame
from anyshard.model import Op, Program, Sum
from anyshard.ops import reference as reference_ops
from anyshard.ops.exact import F32, I32, fma32
from anyshard.verify.naive import AlteredOps
from anyshard.worker import Served, Worker

Run = Callable[[int], None]
REDUCES = ("reduce_o", "reduce_down")


class BiasPerRankBinder(Binder):
    """Every rank adds the bias of a row-parallel linear to its own partial."""

    def _row_linear(self, op: Op, a: F32) -> Run:
        linear, name = super()._row_linear(op, a), f"{op.weights[0].name}_bias"
        if name not in self.w.image.directory:
            return linear
        bias, buffer = self.w.image.vector(name), self.nodes.send_buffer(self.parity)

        def run(rows: int) -> None:
            linear(rows)
            buffer[: rows * len(bias)].reshape(rows, -1)[:] += bias

        return run

    def _reduce(self, op: Op) -> Run:
        return super()._reduce(replace(op, weights=()))

    _reduce_o = _reduce
    _reduce_down = _reduce


class BiasPerRank(Worker):
    """See BiasPerRankBinder."""

    binder_type = BiasPerRankBinder


class MissingNode(Worker):
    """The sum of a reduce leaves out the last node of the last rank that has more than none."""

    def build_program(self, served: Served, rank: int) -> Program:
        whole = super().build_program(served, rank)
        ops = tuple(_without_last_node(op) if op.kind in REDUCES else op for op in whole.ops)
        return replace(whole, ops=ops)


def _without_last_node(op: Op) -> Op:
    nodes = list(op.sum.nodes_per_rank)
    if sum(nodes) < 2:
        return op
    last = max(rank for rank, count in enumerate(nodes) if count)
    nodes[last] -= 1
    merges = list(op.sum.merges[:-1])
    merges[-1] = len(merges) - 1 - sum(merges[:-1])
    return replace(op, sum=Sum(merges=tuple(merges), nodes_per_rank=tuple(nodes)))


class SwappedMerge(Worker):
    """One addition of a reduce is made at another place: the right bracket opens earlier."""

    def build_program(self, served: Served, rank: int) -> Program:
        whole = super().build_program(served, rank)
        ops = tuple(_with_swapped_merge(op) if op.kind in REDUCES else op for op in whole.ops)
        return replace(whole, ops=ops)


def _with_swapped_merge(op: Op) -> Op:
    """Move one merge a node later; unchanged if there are only two nodes, hence one order."""
    merges = list(op.sum.merges)
    for index in range(len(merges) - 1):
        if merges[index]:
            merges[index] -= 1
            merges[index + 1] += 1
            break
    else:
        if len(merges) > 2:  # ((...)) all at the end: bring one forward
            merges[1] += 1
            merges[-1] -= 1
    return replace(op, sum=Sum(merges=tuple(merges), nodes_per_rank=op.sum.nodes_per_rank))


class WrongKvHeadBinder(Binder):
    """The KV head of a query head from its number on this rank, not in the model."""

    def _attention(self, op: Op) -> Run:
        module, config = self.module, self.w.config

        def attention(*arguments: Any) -> Any:
            right = arguments[8]
            local = np.arange(len(right), dtype=np.int32) // config.q_per_kv
            wrong = np.minimum(local, right.max(initial=0)).astype(np.int32)
            return module.Attention(*arguments[:8], wrong, *arguments[9:])

        self.module = AlteredOps(module, Attention=attention)
        try:
            return super()._attention(op)
        finally:
            self.module = module


class WrongKvHead(Worker):
    """See WrongKvHeadBinder."""

    binder_type = WrongKvHeadBinder


class PositionReset(Worker):
    """Stages after the first count positions from the first row of the step."""

    def _take(self, frame: Frame) -> None:
        super()._take(frame)
        if self.program.stage:
            rows = len(frame.rows)
            for slot in np.unique(self.row_slot[:rows]):
                mine = np.flatnonzero(self.row_slot[:rows] == slot)
                self.positions[mine] -= self.positions[mine].min()


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


class TiedHeadMissingBinder(Binder):
    """A stage without the embedding has no head where the two are tied: it is left at zero."""

    def _head(self, op: Op) -> Run:
        module = self.module

        def head(*arguments: Any) -> Any:
            return module.Head(*arguments[:5], np.zeros_like(arguments[5]), *arguments[6:])

        if self.w.config.tied and self.w.program.stage:
            self.module = AlteredOps(module, Head=head)
        try:
            return super()._head(op)
        finally:
            self.module = module


class TiedHeadMissing(Worker):
    """See TiedHeadMissingBinder."""

    binder_type = TiedHeadMissingBinder


class UnmaskedAttention(reference_ops.Attention):
    """Masked keys have weight zero and still enter the sum: harmless until a page holds NaN."""

    def _visit(
        self, q_Hd: F32, page: int, visible: int, state: tuple[I32, F32, F32], bad_H: Any
    ) -> tuple[I32, F32, F32]:
        high, total, out = super()._visit(q_Hd, page, visible, state, bad_H)
        v_HJd = self.v_cache[page, self.kv_head_of]
        for j in range(visible, 32):
            out = fma32(np.float32(0), v_HJd[:, j], out)
        return high, total, out


class UnmaskedBinder(Binder):
    """Binds UnmaskedAttention."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.module = AlteredOps(self.module, Attention=UnmaskedAttention)


class Unmasked(Worker):
    """See UnmaskedAttention."""

    binder_type: type[Binder] = UnmaskedBinder


class StaleExchangeBinder(Binder):
    """A reduce reads what the exchange before left.

    Shared memory has two buffers: the other one. Gloo has one: down_proj's exchange is left out.
    """

    def _reduce(self, op: Op) -> Run:
        self.parity ^= 1
        run = super()._reduce(op)
        self.parity ^= 1
        return run

    _reduce_o = _reduce
    _reduce_down = _reduce

    def _gather_down(self, op: Op) -> Run:
        if self.w.comm.kind == "torch":
            return lambda rows: None
        return super()._gather_down(op)


class StaleExchange(Worker):
    """See StaleExchangeBinder."""

    binder_type = StaleExchangeBinder


class LostLaneBinder(Binder):
    """The last output of gate and up is never written, as by a tail that is masked out."""

    def _gate_up(self, op: Op) -> Run:
        gate_up, out = super()._gate_up(op), self.w.f_RF

        def run(rows: int) -> None:
            gate_up(rows)
            out[:rows, -1] = 0

        return run


class LostLane(Worker):
    """See LostLaneBinder."""

    binder_type = LostLaneBinder


class PageReadTwice(Worker):
    """Once a sequence is past its first step, its first block is read from another page."""

    def _take(self, frame: Frame) -> None:
        super()._take(frame)
        if len(frame.rows) and frame.rows["position"].min() > 0:
            slots = np.unique(frame.rows["slot"])
            self.page_table[slots, 0] = self.page_table[slots, 1]
