"""Bugs of ranks that split the sequence: whose stripe, in which order, which head, what of a state.

Not imported by the package, as `quantised` is not: what shows them needs models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from anyshard.config import Profile
from anyshard.model import Program
from anyshard.op import Op
from anyshard.ops import reference as reference_ops
from anyshard.ops.exact import F32, I32
from anyshard.worker import Served, Worker
from mutants.attention import AlteredOpsBinder
from mutants.exhibits import bug, shows
from mutants.subjects import A9, A14, DEMO

Run = Callable[[int], None]
OURS = ("", "")  # no public bug; by name in the issue
LONG = {"prompt_tokens": 200, "kv_shard": "sequence"}  # seven blocks


class NextStripe(reference_ops.AttentionStates):
    """A rank's stripes are counted from one too many, round its own."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        first, *rest = self.stripes
        self.stripes = [*rest, first]  # type: ignore[assignment]


class KeptAsItCame(reference_ops.MergeStates):
    """Values of an empty state are multiplied by zero like those of any other."""

    @staticmethod
    def received(part_N: F32) -> tuple[I32, F32, F32]:
        high = np.ascontiguousarray(part_N[:, 0]).view(np.int32)
        return high, part_N[:, 1].copy(), part_N[:, 2:].copy()


class FirstLayerBinder(AlteredOpsBinder):
    """Layer 0 has other classes; a NumPy body in every layer would take long."""

    states: type[reference_ops.AttentionStates] | None = None
    merge: type[reference_ops.MergeStates] | None = None

    def _attention_states(self, op: Op) -> Run:
        right = super()._attention_states
        if op.layer or self.states is None:
            return right(op)
        return self.altered(right, op, AttentionStates=self.states)

    def _merge_states(self, op: Op) -> Run:
        right = super()._merge_states
        if op.layer or self.merge is None:
            return right(op)
        return self.altered(right, op, MergeStates=self.merge)


class StripeOffByOne(Worker):
    """See NextStripe."""

    binder_type = type("NextStripeBinder", (FirstLayerBinder,), {"states": NextStripe})


class EmptyStateRead(Worker):
    """See KeptAsItCame; what an empty state does not set is NaN, as memory may be."""

    binder_type = type("KeptBinder", (FirstLayerBinder,), {"merge": KeptAsItCame})

    def _allocate(self, profile: Profile) -> None:
        super()._allocate(profile)
        if self.program.layout.splits_sequence:
            self.comm.exchange("states").send_buffer(0).fill(np.nan)


class MergedInRankOrder(Worker):
    """States are merged from left to right, as they came."""

    def build_program(self, served: Served, rank: int) -> Program:
        here = super().build_program(served, rank)

        def straight(op: Op) -> Op:
            merges = (0, *[1] * (len(op.sum.merges) - 1))
            return replace(op, sum=replace(op.sum, merges=merges))

        ops = (straight(op) if op.kind == "merge_states" else op for op in here.ops)
        return replace(here, ops=tuple(ops))


class GroupOfTheRankBinder(AlteredOpsBinder):
    """The KV head of a query head from its number on the rank that has it."""

    def _attention_states(self, op: Op) -> Run:
        module, config, spans = self.module, self.w.config, self.w.program.layout.heads

        def states(*arguments: Any) -> Any:
            local = [head - low for low, high in spans for head in range(low, high)]
            wrong = np.array(local, np.int32) // config.q_per_kv
            ascending = np.maximum.accumulate(wrong)
            return module.AttentionStates(*arguments[:8], ascending, *arguments[9:])

        return self.altered(super()._attention_states, op, AttentionStates=states)


class GroupOfTheRank(Worker):
    """See GroupOfTheRankBinder."""

    binder_type = GroupOfTheRankBinder


class PartialGatherBinder(AlteredOpsBinder):
    """The last head of rank 1's queries is still to come when the others go on."""

    def _gather_q(self, op: Op) -> Run:
        gather, here, dim = super()._gather_q(op), self.w.program, self.w.config.head_dim
        if op.layer or here.tp_index != 1:
            return gather

        def run(rows: int) -> None:
            self.w.q_RN[:rows, -dim:] = 0
            gather(rows)

        return run


class PartialGather(Worker):
    """See PartialGatherBinder."""

    binder_type = PartialGatherBinder


class ForgottenNodeBinder(AlteredOpsBinder):
    """Of a rank that sends two states only the first one is gathered: the other is empty."""

    def _gather_states(self, op: Op) -> Run:
        gather, here, states = super()._gather_states(op), self.w.program, self.w.comm
        count = op.sum.nodes_per_rank[here.tp_index]
        buffer, size = states.exchange("states").send_buffer(0), self.w.config.head_dim + 2
        if op.layer or count < 2:
            return gather

        def run(rows: int) -> None:
            for receiver, (low, high) in enumerate(here.layout.heads):
                floats = rows * (high - low) * count * size
                start = receiver * rows * op.wire_floats
                part = buffer[start : start + floats].reshape(-1, count, size)
                part[:, 1:, 0] = np.int32(-(1 << 30)).view(np.float32)
                part[:, 1:, 1:] = 0
            gather(rows)

        return run


class ForgottenNode(Worker):
    """See ForgottenNodeBinder."""

    binder_type = ForgottenNodeBinder


SEQUENCE = [
    bug(
        "stripe off by one",
        "a rank takes the stripes after its own for its own, the first one last",
        OURS,
        StripeOffByOne,
        shows(A9, "layers.0.attention", tp=2, **LONG),
        shows(DEMO, "layers.0.attention", tp=2, **LONG),
    ),
    bug(
        "states merged in rank order",
        "what ranks' blocks have given is merged from left to right",
        OURS,
        MergedInRankOrder,
        shows(A9, "layers.0.merge_states", 1, tp=4, **LONG),
        shows(DEMO, "layers.0.merge_states", tp=4, **LONG),
    ),
    bug(
        "KV head of the rank",
        "of a head of another rank the KV head comes from its number there",
        OURS,
        GroupOfTheRank,
        shows(A9, "layers.0.attention", tp=3, kv_shard="sequence"),
        shows(A14, "layers.0.attention", tp=2, kv_shard="sequence"),
        shows(DEMO, "layers.0.attention", tp=3, kv_shard="sequence"),
    ),
    bug(
        "empty state read",
        "what a state without a key does not set is multiplied by zero, and may be NaN",
        OURS,
        EmptyStateRead,
        shows(A9, "layers.0.merge_states", tp=4, kv_shard="sequence"),
        shows(DEMO, "layers.0.merge_states", tp=4, kv_shard="sequence"),
    ),
    bug(
        "partial gather of queries",
        "the last head of rank 1 is zero when the others read it",
        OURS,
        PartialGather,
        shows(A9, "layers.0.gather_q", 1, tp=2, kv_shard="sequence"),
        shows(DEMO, "layers.0.gather_q", 1, tp=2, kv_shard="sequence"),
    ),
    bug(
        "partial gather of states",
        "of a rank with two states the second one is never sent",
        OURS,
        ForgottenNode,
        shows(A9, "layers.0.gather_states", 1, tp=3, **LONG),
        shows(DEMO, "layers.0.gather_states", 1, tp=3, **LONG),
    ),
]
