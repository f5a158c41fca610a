"""The orders of ordinary engines: the same mathematics, in an order that a split can change.

A *naive order* computes what the engine computes, in the order that an ordinary engine would
choose on one axis of a split. The share of logits that differ between two layouts under it is the
axis's *witness*: were it zero, equal digests would say nothing.

Every class here is a `Worker`. `rank_body` makes of one what a rank runs; a rank that runs
`rank_of_any_order` takes the order that its epoch names, so that one launcher serves them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np

from anyshard.binder import Binder
from anyshard.config import Arithmetic
from anyshard.launcher import Seat
from anyshard.model import Program
from anyshard.op import Op, Sum
from anyshard.ops.coefficients import KV_BLOCK
from anyshard.ops.exact import F32, I32
from anyshard.ops.kv_pages import Pages, widened_row
from anyshard.worker import RankPlan, Served, Worker, rank_main

__all__ = [
    "ORDERS",
    "AlteredOps",
    "Bf16Hop",
    "NaiveChunk",
    "NaivePp",
    "NaiveTp",
    "NaiveTpOfFour",
    "Order",
    "OrderedPlan",
    "SplitByRows",
    "SplitByThread",
    "rank_body",
    "rank_of_any_order",
]

#: "written" is docs/numerics.md; the others are named after the axis that they would show on.
Order = Literal["written", "tp", "pp", "chunk", "threads", "batch"]
Run = Callable[[int], None]
ROW_PARALLEL = ("o_proj", "down_proj")
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


def naive_sum(leaf_lengths: Sequence[int], parts: int, arithmetic: Arithmetic = "f32") -> Sum:
    """K in `parts` equal shares, each summed from left to right; the partials the same way.

    In float32 a share is one chain, equal up to a block of 32, which no chain may cut where weights
    are held as Q8_0. In int8 a block has its own scale: shares are of the leaves there are.
    """
    if arithmetic == "int8":
        count = len(leaf_lengths)
        starts = {count * part // parts for part in range(parts)}
        merges = [0 if leaf in starts else 1 for leaf in range(count)]
        for last in sorted(start - 1 for start in (*starts, count) if start > 0)[1:]:
            merges[last] += 1  # a share but the first joins what is left of it
        return Sum(tuple(leaf_lengths), tuple(merges))
    num_k = sum(leaf_lengths)
    unit = 32 if num_k >= 32 * parts else 1
    bounds = [num_k * part // parts // unit * unit for part in range(parts)] + [num_k]
    lengths = tuple(high - low for low, high in pairwise(bounds) if high > low)
    return Sum(lengths, (0, *[1] * (len(lengths) - 1)) if lengths else ())


def naive_program(program: Program, *, parts: int) -> Program:
    """One partial a rank and row-parallel sum, added in rank order.

    parts: shares of a rank's K, so that two ranks also make more than two partials.
    """
    arithmetic = program.profile.arithmetic
    return replace(program, ops=tuple(_naive_op(op, parts, arithmetic) for op in program.ops))


def _naive_op(op: Op, parts: int, arithmetic: Arithmetic) -> Op:
    if op.kind in SUMS:
        shares = parts if op.kind in ROW_PARALLEL else 1
        return replace(op, sum=naive_sum(op.sum.leaf_lengths, shares, arithmetic))
    if op.kind == "merge_states":  # in rank order
        straight = (0,) + (1,) * (len(op.sum.merges) - 1)
        return replace(op, sum=replace(op.sum, merges=straight))
    if not op.sum.nodes_per_rank or op.kind == "gather_states":
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
        """With other sums."""
        whole = super().build_program(served, rank)
        narrow = whole.layout.tp == 2 and all(stop > start for start, stop in whole.layout.heads)
        return naive_program(whole, parts=self.parts_of_narrow if narrow else 1)


class NaiveTpOfFour(NaiveTp):
    """The same where two ranks would add only two partials: each rank adds two chains first.

    Not where one of them holds everything: there nothing is split. Held by: test_check.py.
    """

    parts_of_narrow = 2


class Bf16Hop(Binder):
    """The residual rounded to bfloat16 before it leaves a stage; of an int8 wire to int8, but
    nowhere inside a stage."""

    def _round_wire(self, op: Op) -> Run:
        return super()._round_wire(op) if op.wire_bytes else lambda rows: None

    def _send(self, op: Op) -> Run:
        send, x_RD = super()._send(op), self.w.x_RD
        if self.w.program.profile.wire == "int8":
            return send

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
    """Rounded at every cut, and only there: see Bf16Hop."""

    binder_type = Bf16Hop


class SplitByThread(Worker):
    """K of every sum split into as many chains as there are threads."""

    def build_program(self, served: Served, rank: int) -> Program:
        """With other sums."""
        whole = super().build_program(served, rank)
        shares, arithmetic = self.plan.threads, whole.profile.arithmetic
        ops = tuple(
            replace(op, sum=naive_sum(op.sum.leaf_lengths, shares, arithmetic))
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
        lengths, arithmetic = op.sum.leaf_lengths, self.w.program.profile.arithmetic
        one, two, four = (
            super(SplitByRowsBinder, self).bind(
                replace(op, sum=naive_sum(lengths, parts, arithmetic))
            )
            for parts in (1, 2, 4)
        )

        def run(rows: int) -> None:
            (one if rows == 1 else two if rows <= 16 else four)(rows)

        return run


class SplitByRows(Worker):
    """See SplitByRowsBinder."""

    binder_type = SplitByRowsBinder

    def build_program(self, served: Served, rank: int) -> Program:
        """With other sums."""
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
        k_cache: Pages,
        v_cache: Pages,
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
            pages = self.page_table[slot, : last // KV_BLOCK + 1]
            count = last + 1
            k_HdJ, v_HJd = (
                np.ascontiguousarray(
                    np.stack(
                        [
                            widened_row(cache, pages[j // KV_BLOCK], j % KV_BLOCK, keys=keys)
                            for j in range(count)
                        ]
                    )[:, self.kv_head_of].transpose(order)
                )
                for cache, keys, order in (
                    (self.k_cache, True, (1, 2, 0)),
                    (self.v_cache, False, (1, 0, 2)),
                )
            )
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


ORDERS: dict[str, type[Worker]] = {
    "written": Worker,
    "tp": NaiveTpOfFour,
    "pp": NaivePp,
    "chunk": NaiveChunk,
    "threads": SplitByThread,
    "batch": SplitByRows,
}


class OrderedPlan(RankPlan, frozen=True, kw_only=True):
    """A plan that also names the order of its sums."""

    order: Order = "written"


def rank_of_any_order(seat: Seat) -> None:
    """A rank whose epoch says by which order it sums; a plain RankPlan means the written one."""
    order = msgspec.msgpack.decode(seat.start.payload, type=OrderedPlan).order
    rank_main(seat, worker_type=ORDERS[order])
