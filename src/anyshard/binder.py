"""Binding: each op of a program becomes a call on fixed buffers, once, before the first frame.

Knows which buffer an op reads and writes, and which cut of which weight it takes; the order of
the ops is the program's. A step then passes row counts only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from anyshard.checkpoint.image import WeightImage
from anyshard.comm.base import Comm
from anyshard.config import ModelConfig
from anyshard.kv import KvCache
from anyshard.layout import Span
from anyshard.model import Program
from anyshard.op import DigestPoint, Op, Weight
from anyshard.ops import Kernels
from anyshard.ops.coefficients import LOG2_E
from anyshard.ops.digest import U64
from anyshard.ops.exact import F32, I32
from anyshard.ops.storage import Panels, panel_cut
from anyshard.ops.wire import U8
from anyshard.walk import Gathering, Several

__all__ = ["Binder", "FaultCode", "Workspace"]


class Workspace(Protocol):
    """What a rank holds for binding: its program and model, and every buffer of the token loop.

    x residual, q queries, a attention output, f ffn, shard its logits; the row table beside them.
    wire [R, B]: rows as int8 hops carry them, where there are any.
    digests [R, record_columns of the program] and their keys: empty unless the run is recorded.
    """

    config: ModelConfig
    program: Program
    kernels: Kernels
    image: WeightImage
    comm: Comm
    kv: KvCache
    x_RD: F32
    wire_RB: U8
    q_RN: F32
    a_RN: F32
    f_RF: F32
    shard_RV: F32
    cos: F32
    sin: F32
    tokens: I32
    positions: I32
    row_slot: I32
    row_fault: I32
    sample_rows: I32
    page_table: I32
    digests: U64
    digest_keys: I32

    def query_sources(self) -> list[F32]:
        """[R, H*d here] of each TP rank, once they are gathered."""
        ...


class FaultCode:
    """Numbers that a kernel writes into row_fault: 1 + 3 * layer + place; the head comes last."""

    PLACES = ("qkv", "attention", "gate_up")

    @classmethod
    def of(cls, layer: int, place: str) -> int:
        """The code of an op of a layer."""
        return 1 + len(cls.PLACES) * layer + cls.PLACES.index(place)

    @classmethod
    def head(cls, num_layers: int) -> int:
        """The code of the final norm and head."""
        return 1 + len(cls.PLACES) * num_layers

    @classmethod
    def name(cls, code: int, num_layers: int) -> str:
        """`layers.3.attention` or `head`."""
        if code >= cls.head(num_layers):
            return "head"
        layer, place = divmod(code - 1, len(cls.PLACES))
        return f"layers.{layer}.{cls.PLACES[place]}"


class Binder:
    """Turns the ops of a program into calls on fixed buffers; used once, at start."""

    def __init__(self, workspace: Workspace) -> None:
        self.w = workspace
        self.module: Any = workspace.kernels.module
        self.pool: Any = workspace.kernels.pool
        self.nodes = workspace.comm.exchange("nodes")
        self.parity = self.nodes.parity

    def bind(self, op: Op) -> Callable[[int], None]:
        """The call for one op."""
        bound: Callable[[Op], Callable[[int], None]] = getattr(self, f"_{op.kind}")
        return bound(op)

    def _matrix(self, weight: Weight) -> Panels:
        assert weight.columns is not None
        panels = self.w.image.panels(weight.name)
        assert (panels.dtype == np.int8) == (weight.blocks is not None), weight.name
        return panel_cut(panels, weight.rows, weight.blocks or weight.columns)

    def _vector(self, weight: Weight) -> F32:
        return self.w.image.vector(weight.name)[weight.rows[0] : weight.rows[1]]

    def _named(self, op: Op) -> dict[str, Any]:
        """Weights of an op by their last name: matrices as panels, vectors as slices."""
        return {
            weight.name.rsplit(".", 1)[-1]: (
                self._vector(weight) if weight.columns is None else self._matrix(weight)
            )
            for weight in op.weights
        }

    def _leaves(self, op: Op) -> tuple[I32, I32]:
        return np.array(op.sum.leaf_lengths, np.int32), np.array(op.sum.merges, np.int32)

    def _embed(self, op: Op) -> Callable[[int], None]:
        w, table = self.w, self._matrix(op.weights[0])
        run: Callable[[int], None] = self.module.Embed(
            self.pool, table, w.config.vocab, w.tokens, w.x_RD
        ).run
        return run

    def _hop_rows(self) -> F32 | U8:
        """What a hop moves: residual rows, or their bytes."""
        return self.w.wire_RB if self.w.program.profile.wire == "int8" else self.w.x_RD

    def _receive(self, op: Op) -> Callable[[int], None]:
        comm, moved = self.w.comm, self._hop_rows()
        return lambda rows: comm.receive(moved[:rows])

    def _send(self, op: Op) -> Callable[[int], None]:
        comm, moved = self.w.comm, self._hop_rows()
        return lambda rows: comm.send(moved[:rows])

    def _round_wire(self, op: Op) -> Callable[[int], None]:
        wire = self.w.wire_RB if op.wire_bytes else None
        run: Callable[[int], None] = self.module.RoundWire(self.pool, self.w.x_RD, wire).run
        return run

    def _decode_wire(self, op: Op) -> Callable[[int], None]:
        w = self.w
        run: Callable[[int], None] = self.module.DecodeWire(self.pool, w.wire_RB, w.x_RD).run
        return run

    def _qkv(self, op: Op) -> Callable[[int], None]:
        w, d, named = self.w, self.w.config.head_dim, self._named(op)
        run: Callable[[int], None] = self.module.Qkv(
            self.pool,
            w.x_RD,
            named["attn_norm"],
            w.config.norm_eps,
            named.get("q"),
            named["k"],
            named["v"],
            named.get("q_bias"),
            named.get("k_bias"),
            named.get("v_bias"),
            named.get("q_norm"),
            named.get("k_norm"),
            *self._leaves(op),
            d,
            float(np.float32(LOG2_E / math.sqrt(d))),
            w.cos,
            w.sin,
            w.positions,
            w.q_RN,
            w.kv.keys(op.layer),
            w.kv.values(op.layer),
            w.page_table,
            w.row_slot,
            w.row_fault,
            FaultCode.of(op.layer, "qkv"),
            *w.program.stripes,
        ).run
        return run

    def _gather_q(self, op: Op) -> Callable[[int], None]:
        first, stop = self.w.program.heads
        mine = (stop - first) * self.w.config.head_dim
        return Gathering(self.w.comm.exchange("queries"), row_floats=mine, row_wire=op.wire_floats)

    def _attention(self, op: Op) -> Callable[[int], None]:
        if self.w.program.layout.splits_sequence:
            return self._attention_states(op)
        w, here = self.w, self.w.program
        kv_head_of = np.array(
            [head // w.config.q_per_kv - here.kv_heads[0] for head in range(*here.heads)],
            np.int32,
        )
        run: Callable[[int], None] = self.module.Attention(
            self.pool,
            w.q_RN,
            w.kv.keys(op.layer),
            w.kv.values(op.layer),
            w.page_table,
            w.row_slot,
            w.positions,
            w.config.head_dim,
            kv_head_of,
            w.a_RN,
            w.row_fault,
            FaultCode.of(op.layer, "attention"),
        ).run
        return run

    def _attention_states(self, op: Op) -> Callable[[int], None]:
        w, heads = self.w, range(self.w.config.num_heads)
        run: Callable[[int], None] = self.module.AttentionStates(
            self.pool,
            w.query_sources(),
            w.kv.keys(op.layer),
            w.kv.values(op.layer),
            w.page_table,
            w.row_slot,
            w.positions,
            w.config.head_dim,
            np.array([head // w.config.q_per_kv for head in heads], np.int32),
            *w.program.stripes,
            w.program.row_wire("gather_states"),
            w.comm.exchange("states").send_buffer(0),
        ).run
        return run

    def _gather_states(self, op: Op) -> Callable[[int], None]:
        return Gathering(
            self.w.comm.exchange("states"), row_floats=op.wire_floats, row_wire=op.wire_floats
        )

    def _merge_states(self, op: Op) -> Callable[[int], None]:
        w = self.w
        run: Callable[[int], None] = self.module.MergeStates(
            self.pool,
            w.comm.exchange("states").sources(0),
            list(op.sum.nodes_per_rank),
            np.array(op.sum.merges, np.int32),
            w.program.tp_index,
            w.program.row_wire("gather_states"),
            w.config.head_dim,
            w.a_RN,
            w.row_fault,
            FaultCode.of(op.layer, "attention"),
        ).run
        return run

    def _row_linear(self, op: Op, a: F32) -> Callable[[int], None]:
        run: Callable[[int], None] = self.module.RowLinear(
            self.pool,
            a,
            self._matrix(op.weights[0]),
            self.w.config.hidden,
            *self._leaves(op),
            self.nodes.send_buffer(self.parity),
        ).run
        return run

    def _o_proj(self, op: Op) -> Callable[[int], None]:
        return self._row_linear(op, self.w.a_RN)

    def _down_proj(self, op: Op) -> Callable[[int], None]:
        return self._row_linear(op, self.w.f_RF)

    def _gather(self, op: Op) -> Callable[[int], None]:
        exchange, width = self.nodes, self.w.config.hidden
        mine = op.sum.nodes_per_rank[self.w.program.tp_index] * width
        return Gathering(exchange, row_floats=mine, row_wire=op.wire_floats)

    _gather_o = _gather
    _gather_down = _gather

    def _reduce(self, op: Op) -> Callable[[int], None]:
        sources = self.nodes.sources(self.parity)
        # each layer gathers twice, so that a step always begins with the same buffer
        self.parity ^= 1
        bias = self._vector(op.weights[0]) if op.weights else None
        run: Callable[[int], None] = self.module.Reduce(
            self.pool,
            sources,
            list(op.sum.nodes_per_rank),
            np.array(op.sum.merges, np.int32),
            bias,
            self.w.x_RD,
            self.w.config.hidden,
        ).run
        return run

    _reduce_o = _reduce
    _reduce_down = _reduce

    def _gate_up(self, op: Op) -> Callable[[int], None]:
        w, named = self.w, self._named(op)
        run: Callable[[int], None] = self.module.GateUp(
            self.pool,
            w.x_RD,
            named["mlp_norm"],
            w.config.norm_eps,
            named["gate"],
            named["up"],
            w.f_RF.shape[1],
            named.get("gate_bias"),
            named.get("up_bias"),
            *self._leaves(op),
            w.f_RF,
            w.row_fault,
            FaultCode.of(op.layer, "gate_up"),
        ).run
        return run

    def _head(self, op: Op) -> Callable[[int], None]:
        w = self.w
        out = w.shard_RV
        run: Callable[[int], None] = self.module.Head(
            self.pool,
            w.x_RD,
            w.sample_rows,
            self._vector(op.weights[0]),
            w.config.norm_eps,
            self._matrix(op.weights[1]),
            out.shape[1],
            None,
            *self._leaves(op),
            out,
            w.row_fault,
            FaultCode.head(w.config.num_layers),
        ).run
        return run

    def _digest(self, op: Op) -> Callable[[int], None]:
        """One call over what the ops before it have written, and one for each part of K and V."""
        w, here, dim = self.w, self.w.program, self.w.config.head_dim
        places: dict[DigestPoint, tuple[F32, int]] = {
            "embed": (w.x_RD, 0),
            "q": (w.q_RN, here.heads[0] * dim),
            "attention": (w.a_RN, here.heads[0] * dim),
            "reduce_o": (w.x_RD, 0),
            "ffn": (w.f_RF, here.ffn[0]),
            "reduce_down": (w.x_RD, 0),
            "logits": (w.shard_RV, here.vocab[0]),
        }
        hashed = [
            (*places[point], here.digest_column(op.layer, point))
            for point in op.points
            if point in places
        ]
        hashed += [(w.x_RD, 0, here.replica_column(r)) for r in op.replicas if r.head < 0]
        sources, firsts, columns = (list(each) for each in zip(*hashed, strict=True))
        digest = self.module.Digest(self.pool, sources, firsts, columns, w.digest_keys, w.digests)
        runs: list[Callable[[int], None]] = [digest.run]
        if "k" in op.points:
            column = here.digest_column(op.layer, "k")
            runs.append(self._digest_kv(op, here.owned_kv_heads, column))
        for replica in (each for each in op.replicas if each.point == "k"):
            heads = (replica.head, replica.head + 1)
            runs.append(self._digest_kv(op, heads, here.replica_column(replica)))
        return Several(runs)

    def _digest_kv(self, op: Op, heads: Span, column: int) -> Callable[[int], None]:
        """Of stored k and v of global KV heads, into a column and the next."""
        w, first_here = self.w, self.w.program.kv_heads[0]
        run: Callable[[int], None] = self.module.DigestKv(
            self.pool,
            w.kv.keys(op.layer),
            w.kv.values(op.layer),
            w.page_table,
            w.row_slot,
            w.positions,
            heads[0] - first_here,
            heads[1] - first_here,
            heads[0] * w.config.head_dim,
            column,
            w.digest_keys,
            w.digests,
            *w.program.stripes,
        ).run
        return run

    _digest_embed = _digest
    _digest_hop = _digest
    _digest_attention = _digest
    _digest_mlp = _digest
    _digest_logits = _digest
