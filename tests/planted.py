"""Ranks that are wrong on purpose: planted bugs, and the orders that ordinary engines use.

A *planted bug* is one mistake that a real engine has made; a test that does not turn red under
it proves nothing. A *naive order* computes the same mathematics as the engine, in the order that
an ordinary engine would choose on one axis of a split; the share of logits that then differ is
the axis's witness (tests/grid.py): were it zero, equal digests would say nothing.

Every class here is a `Worker`, for `rank_main(seat, worker_type=...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from anyshard.binder import Binder
from anyshard.comm.control import Frame
from anyshard.launcher import Seat
from anyshard.model import Op, Program, Sum
from anyshard.ops import reference as reference_ops
from anyshard.ops.exact import F32, I32, fma32
from anyshard.worker import Served, Worker, rank_main

Run = Callable[[int], None]
ROW_PARALLEL = ("o_proj", "down_proj")
REDUCES = ("reduce_o", "reduce_down")
SUMS = (*ROW_PARALLEL, "qkv", "gate_up", "head")


def rank_body(worker_type: type[Worker]) -> Callable[[Seat], None]:
    """What a rank runs when its worker is `worker_type`."""
    return partial(rank_main, worker_type=worker_type)


class AlteredOps:
    """A kernel module, some of whose op classes are others."""

    def __init__(self, module: Any, **classes: Any) -> None:
        self._module, self._classes = module, classes

    def __getattr__(self, name: str) -> Any:
        return self._classes.get(name) or getattr(self._module, name)


# --- naive orders -------------------------------------------------------------------------------


def naive_sum(num_k: int, parts: int) -> Sum:
    """K in `parts` equal shares, each one running chain; the partials added left to right.

    Equal up to a block of 32, which no chain may cut where weights are held as Q8_0.
    """
    unit = 32 if num_k >= 32 * parts else 1
    bounds = [num_k * part // parts // unit * unit for part in range(parts)] + [num_k]
    lengths = tuple(high - low for low, high in pairwise(bounds) if high > low)
    return Sum(lengths, (0, *[1] * (len(lengths) - 1)) if lengths else ())


def naive_program(program: Program, *, parts: int) -> Program:
    """One partial a rank and row-parallel sum, added in rank order.

    parts: shares of a rank's K, so that two ranks also make more than two partials.
    """
    return replace(program, ops=tuple(_naive_op(op, parts) for op in program.ops))


def _naive_op(op: Op, parts: int) -> Op:
    here = sum(op.sum.leaf_lengths)
    if op.kind in ROW_PARALLEL:
        return replace(op, sum=naive_sum(here, parts))
    if op.kind in SUMS:
        return replace(op, sum=naive_sum(here, 1))
    if not op.sum.nodes_per_rank:
        return op
    nodes = tuple(min(1, count) for count in op.sum.nodes_per_rank)
    total = sum(nodes)
    merges = (0,) + (1,) * (total - 1) if op.sum.merges else ()
    wire = op.wire_floats // max(op.sum.nodes_per_rank)
    return replace(op, sum=Sum(merges=merges, nodes_per_rank=nodes), wire_floats=wire)


class NaiveTp(Worker):
    """One running chain per rank, partials summed in rank order."""

    parts_of_narrow = 1

    def build_program(self, served: Served, rank: int) -> Program:
        whole = super().build_program(served, rank)
        narrow = whole.layout.tp == 2
        return naive_program(whole, parts=self.parts_of_narrow if narrow else 1)


class NaiveTpOfFour(NaiveTp):
    """The same where two ranks would add only two partials: each rank adds two chains first."""

    parts_of_narrow = 2


class Bf16Hop(Binder):
    """The residual rounded to bfloat16 before it leaves a stage."""

    def _send(self, op: Op) -> Run:
        send, x_RD = super()._send(op), self.w.x_RD

        def run(rows: int) -> None:
            x_RD[:rows] = to_bf16(x_RD[:rows])
            send(rows)

        return run


def to_bf16(x: F32) -> F32:
    """Nearest bfloat16, ties to even, as float32."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return (rounded << np.uint32(16)).view(np.float32)


class NaivePp(Worker):
    """Bf16Hop at every cut."""

    binder_type = Bf16Hop


class NaiveTpPp(NaiveTpOfFour):
    """Both of them."""

    binder_type = Bf16Hop


class SplitByThread(Worker):
    """K of every sum split into as many chains as there are threads."""

    def build_program(self, served: Served, rank: int) -> Program:
        whole = super().build_program(served, rank)
        ops = tuple(
            replace(op, sum=naive_sum(sum(op.sum.leaf_lengths), self.plan.threads))
            if op.kind in SUMS
            else op
            for op in naive_program(whole, parts=1).ops
        )
        return replace(whole, ops=ops)


class SplitByRowsBinder(Binder):
    """K of every sum split by the row count: one chain for a row, two up to 16 rows, else four."""

    def bind(self, op: Op) -> Run:
        if op.kind not in SUMS:
            return super().bind(op)
        num_k = sum(op.sum.leaf_lengths)
        one, two, four = (
            super(SplitByRowsBinder, self).bind(replace(op, sum=naive_sum(num_k, parts)))
            for parts in (1, 2, 4)
        )

        def run(rows: int) -> None:
            (one if rows == 1 else two if rows <= 16 else four)(rows)

        return run


class SplitByRows(Worker):
    """See SplitByRowsBinder."""

    binder_type = SplitByRowsBinder

    def build_program(self, served: Served, rank: int) -> Program:
        return naive_program(super().build_program(served, rank), parts=1)


class RestartedSoftmax:
    """Attention in two states, keys before the chunk and keys of the chunk, merged at the end.

    Takes the arguments of `ops.Attention`. A state has a float maximum; sums run key by key. The
    chunk of a row begins at the first position that its slot has in the step.
    """

    def __init__(
        self,
        pool: Any,
        q: F32,
        k_cache: F32,
        v_cache: F32,
        page_table: I32,
        row_slot: I32,
        positions: I32,
        head_dim: int,
        kv_head_of: I32,
        out: F32,
        row_fault: I32,
        fault_code: int,
    ) -> None:
        self.q, self.k_cache, self.v_cache = q, k_cache, v_cache
        self.page_table, self.row_slot, self.positions = page_table, row_slot, positions
        self.head_dim, self.kv_head_of, self.out = head_dim, kv_head_of, out

    def run(self, rows: int) -> None:
        if not len(self.kv_head_of):
            return
        for slot in np.unique(self.row_slot[:rows]):
            mine = np.flatnonzero(self.row_slot[:rows] == slot)
            first, last = self.positions[mine].min(), self.positions[mine].max()
            pages = self.page_table[slot, : last // 32 + 1]
            k_HdJ = self.k_cache[pages].transpose(1, 2, 0, 3)
            k_HdJ = k_HdJ.reshape(*k_HdJ.shape[:2], -1)[self.kv_head_of]
            v_HJd = self.v_cache[pages].transpose(1, 0, 2, 3)
            v_HJd = v_HJd.reshape(len(v_HJd), -1, self.head_dim)[self.kv_head_of]
            for row in mine:
                end = self.positions[row] + 1
                q_Hd = self.q[row].reshape(-1, self.head_dim)
                spans = [(0, first), (first, end)] if first else [(0, end)]
                states = [
                    _state(q_Hd, k_HdJ[:, :, low:high], v_HJd[:, low:high]) for low, high in spans
                ]
                self.out[row] = _merged(states).reshape(-1)


def _exp2(x: F32) -> F32:
    """Through float64, so that no lane of a vector library differs from another."""
    return np.exp2(x.astype(np.float64)).astype(np.float32)


def _state(q_Hd: F32, k_HdJ: F32, v_HJd: F32) -> tuple[F32, F32]:
    score = np.add.reduce(q_Hd[:, :, None] * k_HdJ, axis=1)  # key lanes, d in order
    high = score.max(axis=1)
    p_HJ = _exp2(score - high[:, None])
    with_ones = np.concatenate([v_HJd, np.ones_like(v_HJd[..., :1])], axis=2)
    return high, np.add.reduce(p_HJ[:, :, None] * with_ones, axis=1)  # keys in order


def _merged(states: Sequence[tuple[F32, F32]]) -> F32:
    high, total = states[0]
    for other_high, other in states[1:]:
        top = np.maximum(high, other_high)
        total = total * _exp2(high - top)[:, None] + other * _exp2(other_high - top)[:, None]
        high = top
    return np.asarray(total[:, :-1] / total[:, -1:])


class RestartedSoftmaxBinder(Binder):
    """Binds RestartedSoftmax."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.module = AlteredOps(self.module, Attention=RestartedSoftmax)


class NaiveChunk(Worker):
    """Softmax restarted at the edge of a chunk."""

    binder_type: type[Binder] = RestartedSoftmaxBinder


# --- planted bugs -------------------------------------------------------------------------------


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
