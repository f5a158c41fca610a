"""An op of a program, as data: what one bound call of a step computes, reads and sends.

Knows nothing of how a program is built (`model.py`) or bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from anyshard.layout import Span
from anyshard.ops.storage import Q8_INPUTS, Storage, stored_bytes
from anyshard.replicas import Replica

__all__ = [
    "DIGESTED",
    "LAYER_POINTS",
    "STATE_HEADER",
    "DigestPoint",
    "Op",
    "OpKind",
    "Sum",
    "Weight",
]

STATE_HEADER = 2  # floats of a softmax state on the wire, before o[d]: M as int bits, and l

DigestPoint = Literal[
    "embed", "q", "k", "v", "attention", "reduce_o", "ffn", "reduce_down", "logits"
]
#: What is hashed of every token in every layer, in the order in which a step writes it.
LAYER_POINTS: tuple[DigestPoint, ...] = (
    "q",
    "k",
    "v",
    "attention",
    "reduce_o",
    "ffn",
    "reduce_down",
)

OpKind = Literal[
    "embed",
    "receive",
    "decode_wire",
    "qkv",
    "gather_q",
    "attention",
    "gather_states",
    "merge_states",
    "o_proj",
    "gather_o",
    "reduce_o",
    "gate_up",
    "down_proj",
    "gather_down",
    "reduce_down",
    "round_wire",
    "send",
    "head",
    "gather_logits",
    "digest_embed",
    "digest_hop",
    "digest_attention",
    "digest_mlp",
    "digest_logits",
]


DIGESTED: dict[OpKind, tuple[DigestPoint, ...]] = {
    "digest_embed": ("embed",),
    "digest_hop": (),  # on file is what the stage before has sent
    "digest_attention": ("q", "k", "v", "attention", "reduce_o"),
    "digest_mlp": ("ffn", "reduce_down"),
    "digest_logits": ("logits",),
}


@dataclass(frozen=True)
class Weight:
    """A cut of one tensor of the image: rows of its output, columns of its input (None: vector).

    blocks: those that hold the columns, where the storage is int8.
    """

    name: str
    rows: Span
    columns: Span | None = None
    storage: Storage = "float32"
    blocks: Span | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the cut as it is held."""
        columns = 1 if self.columns is None else self.columns[1] - self.columns[0]
        if self.blocks is not None:
            columns = (self.blocks[1] - self.blocks[0]) * Q8_INPUTS
        return stored_bytes(self.storage, (self.rows[1] - self.rows[0]) * columns)


@dataclass(frozen=True)
class Sum:
    """The part of a canonical sum that an op evaluates, or (with node counts) completes.

    leaf_lengths, merges: of the leaves here. For a reduce: merges over the nodes of all ranks,
    and how many of them each rank sends. For a merge of softmax states the same, of the tree over
    stripes.
    """

    leaf_lengths: tuple[int, ...] = ()
    merges: tuple[int, ...] = ()
    nodes_per_rank: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Op:
    """One bound call of a step.

    outputs: floats a row writes. flop: per row; an attention row adds flop_per_key, and reads
    kv_bytes_per_key, for every key it sees. wire_floats: what a row (for logits: a sampled row)
    puts on the wire, per receiver, padding included; wire_bytes: the same of what is no float; of
    round_wire, what it hands to the send behind it. points: what a digest op hashes here, outputs
    of the ops before it; replicas: and of what other ranks hold too. A name is `layers.3.o_proj`,
    or `head`.
    """

    kind: OpKind
    layer: int
    outputs: int = 0
    weights: tuple[Weight, ...] = ()
    sum: Sum = Sum()
    flop: int = 0
    flop_per_key: int = 0
    kv_bytes_per_key: int = 0
    wire_floats: int = 0
    wire_bytes: int = 0
    receivers: int = 0
    points: tuple[DigestPoint, ...] = ()
    replicas: tuple[Replica, ...] = ()

    @property
    def name(self) -> str:
        """Unique within a program."""
        return self.kind if self.layer < 0 else f"layers.{self.layer}.{self.kind}"

    @property
    def weight_bytes(self) -> int:
        """Weight bytes that the op reads in a step."""
        return sum(weight.bytes for weight in self.weights)
