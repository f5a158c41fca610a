"""Bugs in sums over K: nodes, merges, their exchange, and orders that rows or a batch choose."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from anyshard.binder import Binder
from anyshard.comm.control import Frame
from anyshard.model import Program
from anyshard.op import Op, Sum
from anyshard.ops.exact import F32
from anyshard.verify.naive import naive_sum
from anyshard.worker import Served, Worker

Run = Callable[[int], None]
REDUCES = ("reduce_o", "reduce_down")
COLUMN_PARALLEL = ("qkv", "gate_up", "head")
READER_WAITS_S = 0.05  # so that the owner has written again before its peers read


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


class NotReducedBinder(Binder):
    """TP index 1 goes on with its own nodes of o_proj: to it, the others' are zero."""

    def _reduce_o(self, op: Op) -> Run:
        exchange, mine = self.nodes, self.w.program.tp_index
        if mine != 1:
            return super()._reduce_o(op)

        class Alone:
            """Sources of the exchange as this rank sees them."""

            def sources(self, parity: int) -> list[F32]:
                every = exchange.sources(parity)
                return [
                    source if rank == mine else np.zeros_like(source)
                    for rank, source in enumerate(every)
                ]

        self.nodes = Alone()  # type: ignore[assignment]  # a reduce asks for sources only
        try:
            return super()._reduce_o(op)
        finally:
            self.nodes = exchange


class NotReduced(Worker):
    """See NotReducedBinder."""

    binder_type = NotReducedBinder


class DoubledBinder(Binder):
    """A sum that is complete is reduced again: every rank adds the first node twice."""

    def _reduce_down(self, op: Op) -> Run:
        first, x_RD = self.nodes.sources(self.parity)[0], self.w.x_RD
        reduce, width = super()._reduce_down(op), self.w.config.hidden
        if self.w.comm.tp == 1:
            return reduce

        def run(rows: int) -> None:
            reduce(rows)
            x_RD[:rows] += first[: rows * width].reshape(rows, width)

        return run


class Doubled(Worker):
    """See DoubledBinder."""

    binder_type = DoubledBinder


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


class Overwritten(Binder):
    """TP index 1 writes into its nodes of layer 0 again, after its gather, while others read."""

    when = "after"

    def _gather_o(self, op: Op) -> Run:
        gather, nodes, mine = super()._gather(op), self.nodes, self.w.program.tp_index == 1
        buffer, before = nodes.send_buffer(self.parity), self.when == "before"
        if op.layer:
            return gather

        def run(rows: int) -> None:
            if mine and before:
                buffer[:8] += 1
            gather(rows)
            if mine and not before:
                buffer[:8] += 1
            elif not before:
                time.sleep(READER_WAITS_S)

        return run


class OverwrittenAfter(Worker):
    """See Overwritten."""

    binder_type: type[Binder] = Overwritten


class OverwrittenBefore(Worker):
    """The same before the gather: the send had not ended."""

    binder_type: type[Binder] = type("Before", (Overwritten,), {"when": "before"})


class DroppedLeafBinder(Binder):
    """In a split, the last leaf of down_proj is left out by the rank that has it."""

    def _down_proj(self, op: Op) -> Run:
        linear, f_RF, here = super()._down_proj(op), self.w.f_RF, self.w.program
        if here.ffn[1] != self.w.config.ffn or self.w.comm.tp == 1:
            return linear
        first = f_RF.shape[1] - op.sum.leaf_lengths[-1]

        def run(rows: int) -> None:
            f_RF[:rows, first:] = 0
            linear(rows)

        return run


class DroppedLeaf(Worker):
    """See DroppedLeafBinder."""

    binder_type = DroppedLeafBinder


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


class TwoChainsBinder(Binder):
    """Sums of column-parallel linears have two bodies; the other one cuts K into two chains."""

    def bind(self, op: Op) -> Run:
        written = super().bind(op)
        if op.kind not in COLUMN_PARALLEL:
            return written
        worker, lengths = self.w, op.sum.leaf_lengths
        two = naive_sum(lengths, 2, worker.program.profile.arithmetic)
        chains = super().bind(replace(op, sum=two))
        assert isinstance(worker, TwoChains)

        def run(rows: int) -> None:
            (chains if worker.other else written)(rows)

        return run


class TwoChains(Worker):
    """See TwoChainsBinder; `wants_other` says which frames take the other body."""

    binder_type = TwoChainsBinder
    other = False

    def wants_other(self, frame: Frame) -> bool:
        """Whether this frame is summed in two chains."""
        raise NotImplementedError

    def _take(self, frame: Frame) -> None:
        super()._take(frame)
        self.other = self.wants_other(frame)


class OrderByBatch(TwoChains):
    """Frames that hold rows of several sequences."""

    def wants_other(self, frame: Frame) -> bool:
        return len(np.unique(frame.rows["slot"])) > 1


class OneRowPath(TwoChains):
    """Frames of one row."""

    def wants_other(self, frame: Frame) -> bool:
        return len(frame.rows) == 1
