"""The model as a program: what one rank of one layout does for a step, as data.

`program(config, profile, layout, rank)` is pure; nothing here computes. A worker binds the ops
to buffers, a ledger sums them, the reference interprets them. One decoder for all families:
flags of the config, not copies, decide what the program holds.

Letters: R rows of a step, D hidden, H query heads here, G KV heads here, d head dim, F ffn
columns here, V vocabulary rows here. Layer numbers are global on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anyshard.config import ModelConfig, Profile
from anyshard.layout import (
    STRIPE_TREE,
    Layout,
    Span,
    Tree,
    ffn_tree,
    head_tree,
    hidden_tree,
    wire_boundaries,
)
from anyshard.op import (
    DIGESTED,
    LAYER_POINTS,
    STATE_HEADER,
    DigestPoint,
    Op,
    OpKind,
    Sum,
    Weight,
)
from anyshard.ops.kv_pages import page_bytes
from anyshard.ops.storage import Storage
from anyshard.ops.wire import wire_row_bytes
from anyshard.replicas import Replica, replicas_of
from anyshard.stripes import STRIPES

__all__ = ["Program", "program"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """All ops of one rank, in order, with the sizes that its buffers need."""

    config: ModelConfig
    profile: Profile
    layout: Layout
    rank: int
    ops: tuple[Op, ...]

    @property
    def stage(self) -> int:
        """Stage of this rank."""
        return self.layout.coordinates(self.rank)[0]

    @property
    def tp_index(self) -> int:
        """TP index of this rank."""
        return self.layout.coordinates(self.rank)[1]

    @property
    def heads(self) -> Span:
        """Query heads here."""
        return self.layout.heads[self.tp_index]

    @property
    def kv_heads(self) -> Span:
        """KV heads here."""
        return self.layout.kv_heads(self.tp_index, self.config.q_per_kv)

    @property
    def owned_kv_heads(self) -> Span:
        """KV heads here that no rank before this one holds."""
        return self.layout.owned_kv_heads(self.tp_index, self.config.q_per_kv)

    @property
    def ffn(self) -> Span:
        """Ffn columns here."""
        return self.layout.ffn[self.tp_index]

    @property
    def vocab(self) -> Span:
        """Vocabulary rows here."""
        return self.layout.vocab[self.tp_index]

    @property
    def layers(self) -> Span:
        """Layers here."""
        return self.layout.layers[self.stage]

    @property
    def exchange_nodes(self) -> int:
        """The most nodes that a rank sends in one gather; sizes the exchange buffers."""
        reduces = [op for op in self.ops if op.kind in ("reduce_o", "reduce_down")]
        return max((max(op.sum.nodes_per_rank) for op in reduces), default=1)

    @property
    def stripes(self) -> Span:
        """Stripes of the keys and values here."""
        return self.layout.stripes(self.tp_index)

    def row_wire(self, kind: OpKind) -> int:
        """Floats that an op of that kind puts on the wire for a row and receiver; 0 without one."""
        return max((op.wire_floats for op in self.ops if op.kind == kind), default=0)

    @property
    def hop_row_bytes(self) -> int:
        """Bytes of a row that a hop from or to this rank moves in another form than the residual's;
        0 without."""
        is_other = self.profile.wire == "int8" and self.layout.pp > 1
        return wire_row_bytes(self.profile.wire, self.config.hidden) if is_other else 0

    @property
    def digest_columns(self) -> int:
        """Digests of a row here: embed, those of each layer here, logits. Not ours are 0."""
        return len(LAYER_POINTS) * (self.layers[1] - self.layers[0]) + 2

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """What this rank hashes besides, of what other ranks hold too."""
        return replicas_of(self.config, self.layout, self.rank)

    @property
    def record_columns(self) -> int:
        """Words that a rank posts of a row of a recorded run: its digests, those of its replicas,
        then its fault code."""
        return self.digest_columns + len(self.replicas) + 1

    def replica_column(self, replica: Replica) -> int:
        """Where the digest of a replica stands in a row."""
        return self.digest_columns + self.replicas.index(replica)

    def digest_column(self, layer: int, point: DigestPoint) -> int:
        """Where the digest of a point stands in a row."""
        if point in ("embed", "logits"):
            return 0 if point == "embed" else self.digest_columns - 1
        return 1 + len(LAYER_POINTS) * (layer - self.layers[0]) + LAYER_POINTS.index(point)

    @property
    def weight_bytes(self) -> int:
        """Weight bytes of this rank's share (embedding rows are looked up in the image)."""
        seen = {weight for op in self.ops if op.kind != "embed" for weight in op.weights}
        return sum(weight.bytes for weight in seen)


def program(
    config: ModelConfig,
    profile: Profile,
    layout: Layout,
    rank: int,
    *,
    storage: Mapping[str, Storage] | None = None,
    record: bool = False,
) -> Program:
    """The ops of one rank for one step of any number of rows.

    `storage`: how the image holds tensors, by name; float32 where it says nothing, and int8 in that
    arithmetic. It decides byte counts only. `record` adds ops that hash what the others write; it
    changes none of them.

    Held by: test_model.py (every weight element is owned once per stage; layouts tile).
    """
    stage, _ = layout.coordinates(rank)
    builder = _Builder(config, profile, layout, rank, storage or {})
    first, last = stage == 0, stage == layout.pp - 1
    ops: list[Op] = [builder.embed()] if first else builder.receive()
    if record:
        ops += builder.digest("digest_embed" if first else "digest_hop", -1)
    for layer in range(*layout.layers[stage]):
        ops += builder.attention_block(layer)
        ops += builder.digest("digest_attention", layer) if record else []
        ops += builder.mlp_block(layer)
        ops += builder.round_wire(layer)
        ops += builder.digest("digest_mlp", layer) if record else []
    ops += builder.head(record=record) if last else [builder.send()]
    return Program(config=config, profile=profile, layout=layout, rank=rank, ops=tuple(ops))


class _Builder:
    """Turns config and layout into ops for one rank; holds only what several ops need."""

    def __init__(
        self,
        config: ModelConfig,
        profile: Profile,
        layout: Layout,
        rank: int,
        storage: Mapping[str, Storage],
    ) -> None:
        self.config = config
        self.is_int8 = profile.arithmetic == "int8"
        self.kv_bytes = 2 * page_bytes(profile.kv, config.head_dim) // profile.kv_block
        self.storage = storage
        self.wire = profile.wire
        self.row_bytes = wire_row_bytes(profile.wire, config.hidden)
        self.layout = layout
        self.tp_index = tp_index = layout.coordinates(rank)[1]
        self.replicas = replicas_of(config, layout, rank)
        self.heads = layout.heads[tp_index]
        self.stripes = layout.stripes(tp_index)
        self.kv_heads = layout.kv_heads(tp_index, config.q_per_kv)
        self.owned_kv = layout.owned_kv_heads(tp_index, config.q_per_kv)
        self.ffn = layout.ffn[tp_index]
        self.vocab = layout.vocab[tp_index]
        self.hidden_tree = hidden_tree(config, profile.leaf)
        self.head_tree = head_tree(config, profile.leaf)
        self.ffn_tree = ffn_tree(config, profile.leaf)
        self.whole_hidden = Sum(
            self.hidden_tree.leaf_lengths,
            self.hidden_tree.merges((0, self.hidden_tree.num_leaves)),
        )

    def embed(self) -> Op:
        config = self.config
        table = self._weight("embed", (0, config.vocab))
        return Op(kind="embed", layer=-1, outputs=config.hidden, weights=(table,))

    def send(self) -> Op:
        if self.wire == "int8":  # what round_wire has written
            return Op(kind="send", layer=-1, wire_bytes=self.row_bytes, receivers=1)
        return Op(kind="send", layer=-1, wire_floats=self.config.hidden, receivers=1)

    def receive(self) -> list[Op]:
        width = self.config.hidden
        if self.wire == "int8":
            kinds: tuple[OpKind, ...] = ("receive", "decode_wire")
            return [Op(kind=k, layer=-1, outputs=width * (k != "receive")) for k in kinds]
        return [Op(kind="receive", layer=-1, outputs=width)]

    def round_wire(self, layer: int) -> list[Op]:
        """After a layer behind which a stage may end; behind the last one here a hop follows."""
        if layer + 1 not in wire_boundaries(self.wire, self.config.num_layers):
            return []
        is_sent = any(stop == layer + 1 for _, stop in self.layout.layers)
        return [
            Op(
                kind="round_wire",
                layer=layer,
                outputs=self.config.hidden,
                wire_bytes=self.row_bytes if is_sent else 0,
            )
        ]

    def _weight(
        self, name: str, rows: Span, columns: Span | None = None, blocks: Span | None = None
    ) -> Weight:
        """Of all hidden inputs if `columns` is None; `blocks`: the leaves that hold them."""
        if columns is None:
            columns, blocks = (0, self.config.hidden), (0, self.hidden_tree.num_leaves)
        if self.is_int8:
            return Weight(name, rows, columns, "int8", blocks)
        return Weight(name, rows, columns, self.storage.get(name, "float32"))

    def _matrix(self, layer: int, name: str, rows: Span, *, bias: bool) -> tuple[Weight, ...]:
        matrix = self._weight(f"layers.{layer}.{name}", rows)
        return (matrix, Weight(f"layers.{layer}.{name}_bias", rows)) if bias else (matrix,)

    def _head_norms(self, layer: int) -> tuple[Weight, ...]:
        names = ("q_norm", "k_norm") if self.config.qk_norm else ()
        return tuple(Weight(f"layers.{layer}.{name}", (0, self.config.head_dim)) for name in names)

    def attention_block(self, layer: int) -> list[Op]:
        ops: list[Op] = []
        config, d = self.config, self.config.head_dim
        num_heads = self.heads[1] - self.heads[0]
        num_kv_heads = self.kv_heads[1] - self.kv_heads[0]
        if num_heads or self.layout.splits_sequence:
            ops.append(self._qkv(layer, num_heads, num_kv_heads))
        if self.layout.splits_sequence:
            ops += self._sequence_attention(layer, num_heads)
        elif num_heads:
            ops.append(
                Op(
                    kind="attention",
                    layer=layer,
                    outputs=num_heads * d,
                    flop_per_key=4 * num_heads * d,
                    kv_bytes_per_key=self.kv_bytes * num_kv_heads,
                )
            )
        ops += self._row_parallel(
            layer,
            tree=self.head_tree,
            spans=[(low * d, high * d) for low, high in self.layout.heads],
            kinds=("o_proj", "gather_o", "reduce_o"),
            weight="o",
            bias=config.o_bias,
        )
        return ops

    def _qkv(self, layer: int, num_heads: int, num_kv_heads: int) -> Op:
        """Of a row whose keys another rank keeps, only q."""
        config, d = self.config, self.config.head_dim
        q = (self.heads[0] * d, self.heads[1] * d)
        kv = (self.kv_heads[0] * d, self.kv_heads[1] * d)
        share = self.stripes[1] - self.stripes[0]
        return Op(
            kind="qkv",
            layer=layer,
            outputs=(num_heads + 2 * num_kv_heads) * d,
            weights=(
                Weight(f"layers.{layer}.attn_norm", (0, config.hidden)),
                *(self._matrix(layer, "q", q, bias=config.qkv_bias) if num_heads else ()),
                *self._matrix(layer, "k", kv, bias=config.qkv_bias),
                *self._matrix(layer, "v", kv, bias=config.qkv_bias),
                *self._head_norms(layer),
            ),
            sum=self.whole_hidden,
            flop=2 * config.hidden * (num_heads * d + 2 * num_kv_heads * d * share // STRIPES),
        )

    def _sequence_attention(self, layer: int, num_heads: int) -> list[Op]:
        """Every rank computes the states of its stripes for all heads; each head's are merged by
        the rank that has the head."""
        config, d, layout = self.config, self.config.head_dim, self.layout
        spans = [layout.stripes(index) for index in range(layout.tp)]
        nodes_per_rank = tuple(len(STRIPE_TREE.cover(span)) for span in spans)
        most_heads = max(stop - start for start, stop in layout.heads)
        share, state = self.stripes[1] - self.stripes[0], d + STATE_HEADER
        mine = nodes_per_rank[self.tp_index]
        ops = [
            Op(
                kind="gather_q",
                layer=layer,
                wire_floats=most_heads * d,
                receivers=layout.tp - 1,
            ),
            Op(
                kind="attention",
                layer=layer,
                outputs=mine * config.num_heads * state,
                flop_per_key=4 * config.num_heads * d * share // STRIPES,
                kv_bytes_per_key=self.kv_bytes * config.num_kv_heads * share // STRIPES,
            ),
            Op(
                kind="gather_states",
                layer=layer,
                sum=Sum(nodes_per_rank=nodes_per_rank),
                wire_floats=most_heads * max(nodes_per_rank) * state,
                receivers=layout.tp - 1,
            ),
        ]
        if num_heads:
            merges = STRIPE_TREE.node_merges(spans)
            ops.append(
                Op(
                    kind="merge_states",
                    layer=layer,
                    outputs=num_heads * d,
                    sum=Sum(merges=merges, nodes_per_rank=nodes_per_rank),
                    flop=num_heads * (3 * sum(merges) * (d + 1) + d),
                )
            )
        return ops

    def mlp_block(self, layer: int) -> list[Op]:
        ops: list[Op] = []
        config = self.config
        whole = (0, config.hidden)
        columns = self.ffn[1] - self.ffn[0]
        if columns:
            ops.append(
                Op(
                    kind="gate_up",
                    layer=layer,
                    outputs=columns,
                    weights=(
                        Weight(f"layers.{layer}.mlp_norm", whole),
                        *self._matrix(layer, "gate", self.ffn, bias=config.mlp_bias),
                        *self._matrix(layer, "up", self.ffn, bias=config.mlp_bias),
                    ),
                    sum=self.whole_hidden,
                    flop=4 * config.hidden * columns,
                )
            )
        ops += self._row_parallel(
            layer,
            tree=self.ffn_tree,
            spans=list(self.layout.ffn),
            kinds=("down_proj", "gather_down", "reduce_down"),
            weight="down",
            bias=config.mlp_bias,
        )
        return ops

    def _row_parallel(
        self,
        layer: int,
        *,
        tree: Tree,
        spans: list[Span],
        kinds: tuple[OpKind, OpKind, OpKind],
        weight: str,
        bias: bool,
    ) -> list[Op]:
        """This rank's nodes, the gather of all ranks' nodes, and the rest of the tree."""
        leaf_spans = [(tree.leaf_of(low), tree.leaf_of(high)) for low, high in spans]
        nodes_per_rank = tuple(len(tree.cover(span)) for span in leaf_spans)
        mine, here = spans[self.tp_index], leaf_spans[self.tp_index]
        hidden = (0, self.config.hidden)
        width = self.config.hidden
        linear, gather, reduce = kinds
        ops: list[Op] = []
        if mine[1] > mine[0]:
            ops.append(
                Op(
                    kind=linear,
                    layer=layer,
                    outputs=nodes_per_rank[self.tp_index] * width,
                    weights=(self._weight(f"layers.{layer}.{weight}", hidden, mine, here),),
                    sum=Sum(tree.leaf_lengths[slice(*here)], tree.merges(here)),
                    flop=2 * (mine[1] - mine[0]) * width,
                )
            )
        tp = self.layout.tp
        if tp > 1:
            ops.append(
                Op(
                    kind=gather,
                    layer=layer,
                    sum=Sum(nodes_per_rank=nodes_per_rank),
                    wire_floats=max(nodes_per_rank) * width,
                    receivers=tp - 1,
                )
            )
        merges = tree.node_merges(leaf_spans)
        ops.append(
            Op(
                kind=reduce,
                layer=layer,
                outputs=width,
                weights=(Weight(f"layers.{layer}.{weight}_bias", hidden),) if bias else (),
                sum=Sum(merges=merges, nodes_per_rank=nodes_per_rank),
                flop=sum(merges) * width + width,
            )
        )
        return ops

    def digest(self, kind: OpKind, layer: int) -> list[Op]:
        """What this rank hashes there: for the file what it owns, or is the first to hold; and of
        its own what other ranks hold too."""
        mine: dict[DigestPoint, bool] = {
            "embed": self.tp_index == 0,
            "q": self.heads[1] > self.heads[0],
            "k": self.owned_kv[1] > self.owned_kv[0],
            "v": self.owned_kv[1] > self.owned_kv[0],
            "attention": self.heads[1] > self.heads[0],
            "reduce_o": self.tp_index == 0,
            "ffn": self.ffn[1] > self.ffn[0],
            "reduce_down": self.tp_index == 0,
            "logits": self.vocab[1] > self.vocab[0],
        }
        points = tuple(point for point in DIGESTED[kind] if mine[point])
        replicas = tuple(
            each
            for each in self.replicas
            if each.point in (DIGESTED[kind] or ("hop",)) and layer in (-1, each.layer)
        )
        if not points and not replicas:
            return []
        return [Op(kind=kind, layer=layer, points=points, replicas=replicas)]

    def head(self, *, record: bool) -> list[Op]:
        config = self.config
        columns = (0, config.hidden)
        table = "embed" if config.tied else "head"
        rows = self.vocab[1] - self.vocab[0]
        ops: list[Op] = []
        if rows:
            ops.append(
                Op(
                    kind="head",
                    layer=-1,
                    outputs=rows,
                    weights=(Weight("norm", columns), self._weight(table, self.vocab)),
                    sum=self.whole_hidden,
                    flop=2 * config.hidden * rows,
                )
            )
        if record:
            ops += self.digest("digest_logits", -1)
        if self.layout.tp > 1:
            ops.append(
                Op(
                    kind="gather_logits",
                    layer=-1,
                    wire_floats=rows if self.tp_index else 0,
                    receivers=1 if self.tp_index else 0,
                )
            )
        return ops
