"""What a program costs: FLOP, bytes read, and bytes and messages on the wire, by addition.

The same numbers that ranks count while they run; a test holds them equal. Knows nothing of
seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from anyshard.comm.hops import HOP_HEADER_BYTES
from anyshard.model import Program
from anyshard.op import OpKind
from anyshard.ops.exact import FLOAT_BYTES

__all__ = [
    "StepShape",
    "WireCost",
    "step_flop",
    "step_kv_bytes",
    "step_weight_bytes",
    "wire_cost",
]

PAIR_FLOATS = 2  # (value, id) of a rank's best token
_KINDS: dict[OpKind, str] = {"send": "hop", "gather_q": "queries", "gather_states": "states"}


@dataclass(frozen=True)
class StepShape:
    """A step as the ledger sees it: rows, rows sampled, and whether whole logits are gathered."""

    rows: int
    sampled: int
    gather_logits: bool


@dataclass(frozen=True)
class WireCost:
    """What one rank sends, by kind. Logits that are gathered for a digest stand apart."""

    reduce_bytes: int = 0
    hop_bytes: int = 0
    logits_bytes: int = 0
    pairs_bytes: int = 0
    queries_bytes: int = 0
    states_bytes: int = 0
    reduce_messages: int = 0
    hop_messages: int = 0
    logits_messages: int = 0
    pairs_messages: int = 0
    queries_messages: int = 0
    states_messages: int = 0

    @property
    def bytes(self) -> int:
        """All but the logits gathered for a digest, a filter or noise."""
        sequence = self.queries_bytes + self.states_bytes
        return self.reduce_bytes + self.hop_bytes + self.pairs_bytes + sequence

    @property
    def messages(self) -> int:
        """All but those of gathered logits."""
        sequence = self.queries_messages + self.states_messages
        return self.reduce_messages + self.hop_messages + self.pairs_messages + sequence


def wire_cost(program: Program, steps: Iterable[StepShape]) -> WireCost:
    """Bytes and messages that this rank sends over all `steps`.

    Held by: test_ledger.py::test_counted_wire_bytes_equal_the_ledger.
    """
    totals = dict.fromkeys(WireCost.__dataclass_fields__, 0)
    for step in steps:
        for op in program.ops:
            if op.kind == "gather_logits":
                if not step.sampled or not op.receivers:
                    continue
                kind = "logits" if step.gather_logits else "pairs"
                floats = op.wire_floats if step.gather_logits else PAIR_FLOATS
                totals[f"{kind}_bytes"] += floats * step.sampled * FLOAT_BYTES
                totals[f"{kind}_messages"] += 1
            elif op.receivers:
                kind = _KINDS.get(op.kind, "reduce")
                sent = (op.wire_floats * FLOAT_BYTES + op.wire_bytes) * step.rows
                sent += HOP_HEADER_BYTES if op.kind == "send" else 0
                totals[f"{kind}_bytes"] += sent * op.receivers
                totals[f"{kind}_messages"] += op.receivers
    return WireCost(**totals)


def step_flop(program: Program, *, rows: int, sampled: int, keys: int) -> int:
    """Floating-point operations of a step; `keys` = keys seen, summed over its rows."""
    return sum(
        op.flop * (sampled if op.kind == "head" else rows) + op.flop_per_key * keys
        for op in program.ops
    )


def step_weight_bytes(program: Program) -> int:
    """Weight bytes that a step with any rows reads once (embedding rows left out)."""
    return sum(op.weight_bytes for op in program.ops if op.kind != "embed")


def step_kv_bytes(program: Program, *, keys: int) -> int:
    """KV bytes that attention reads in a step; `keys` = keys seen, summed over its rows."""
    return keys * sum(op.kv_bytes_per_key for op in program.ops)
