"""Replay: one row through one layer in the reference bodies, every leaf of its sums kept.

From the row's residual and the keys and values before it, the pristine image and nothing else.
The arguments of the ops are the binder's, the arithmetic is `ops/reference.py`. Also names the
nodes of a row-parallel sum, and says how a wrong sum may have come about.

Letters: D hidden, H query heads, G KV heads, d head dim, F ffn columns, V vocabulary rows,
J earlier keys, N leaves of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from anyshard.binder import Binder
from anyshard.capture import legible_states
from anyshard.comm.base import Comm, ExchangeSpec, WireSizes
from anyshard.comm.solo import Solo
from anyshard.kv import KvCache
from anyshard.layout import STRIPE_TREE, Layout, Span, Tree, ffn_tree, head_tree, plan
from anyshard.model import program
from anyshard.op import STATE_HEADER, Op, Sum
from anyshard.ops import Kernels, reference
from anyshard.ops.exact import F32, merge_nodes
from anyshard.ops.kv_pages import Pages, packed_row, unpack_row
from anyshard.ops.rope import rope_table
from anyshard.pages import pages_for
from anyshard.worker import Served

__all__ = [
    "LayerReplay",
    "RowSum",
    "explain_attention",
    "replay_head",
    "replay_layer",
    "replay_states",
    "unsplit_layout",
]


def unsplit_layout(served: Served) -> Layout:
    """One rank."""
    return plan(served.config, wire=served.profile.wire, leaf=served.profile.leaf)


@dataclass(frozen=True)
class RowSum:
    """A row-parallel sum of one row: its tree and the value of every leaf [N, D].

    bias [D] or None, residual [D]: what is added to the sum, in that order.
    """

    tree: Tree
    leaves_ND: F32
    bias_D: F32 | None
    residual_D: F32

    def nodes(self, span: Span) -> F32:
        """[n, D]: the values of the nodes that cover the leaves of `span`."""
        leaves = list(self.leaves_ND[slice(*span)])
        nodes = merge_nodes(leaves, self.tree.merges(span))
        return np.array(nodes, np.float32).reshape(-1, self.leaves_ND.shape[1])

    def result(self, nodes: Sequence[F32], merges: Sequence[int]) -> F32 | None:
        """The residual after adding these nodes in this order; None where it is no sum."""
        try:
            left = merge_nodes(nodes, merges)
        except (IndexError, ValueError):
            return None
        if len(left) != 1:
            return None
        total = left[0] if self.bias_D is None else left[0] + self.bias_D
        return np.asarray(self.residual_D + total)

    def explain(self, found_D: F32, spans: Sequence[Span]) -> str:
        """How a rank that holds the right nodes of `spans` may have come to `found_D`, or ''.

        Tried: a node left out, no bias, another order. A guess is told only if all its bits agree.
        """
        cover = [node for span in spans for node in self.tree.cover(span)]
        nodes = [value for span in spans for value in self.nodes(span)]
        merges = self.tree.node_merges(spans)
        straight = (0, *[1] * (len(nodes) - 1))
        guesses: list[tuple[str, F32 | None]] = []
        for index, (low, high) in enumerate(cover):
            rest, fewer = nodes[:index] + nodes[index + 1 :], cover[:index] + cover[index + 1 :]
            for order in (_completed(merges, index), straight[:-1]):
                text = f"equal to the sum without node [{low},{high})"
                guesses.append((text, self.result(rest, order) if fewer else self.residual_D))
        guesses.append(("equal to the nodes added left to right", self.result(nodes, straight)))
        for index in range(len(merges)):
            for other in (index - 1, index + 1):
                if merges[index] and 0 <= other < len(merges):
                    moved = list(merges)
                    moved[index] -= 1
                    moved[other] += 1
                    low, high = cover[index]
                    text = f"equal to the sum with a merge of node [{low},{high}) at another place"
                    guesses.append((text, self.result(nodes, moved)))
        if self.bias_D is not None:
            bare = replace(self, bias_D=None)
            guesses.append(("equal to the sum without the bias", bare.result(nodes, merges)))
        for text, value in guesses:
            if value is not None and value.tobytes() == found_D.tobytes():
                return text
        return ""


def _completed(merges: Sequence[int], index: int) -> tuple[int, ...]:
    """Merge counts for the same nodes without one; what is left over is merged at the end."""
    fewer = [*merges[:index], *merges[index + 1 :]]
    if not fewer:
        return ()
    stack = 0
    for place in range(len(fewer)):
        stack += 1
        fewer[place] = min(fewer[place], stack - 1)
        stack -= fewer[place]
    fewer[-1] += stack - 1
    return tuple(fewer)


@dataclass(frozen=True)
class LayerReplay:
    """One row of one layer: what every op of an unsplit run must give.

    q as it is used (rotated and scaled) [H*d], key and value of the row as they are stored (G
    rows of `packed_row`), attention [H*d],
    o and down with all leaves, x_o and x_down the residual after them [D], ffn [F]; x_round: what
    the wire makes of x_down, None where it does not round.
    """

    x_in: F32
    q: F32
    key_Gd: Pages
    value_Gd: Pages
    attention: F32
    o: RowSum
    x_o: F32
    ffn: F32
    down: RowSum
    x_down: F32
    x_round: F32 | None


class _Bench:
    """A workspace of one row and one layer, for the binder."""

    def __init__(self, served: Served, *, layer: int, position: int, vocab: Span = (0, 0)) -> None:
        config, profile = served.config, served.profile
        self.config, self.image = config, served.image
        whole = program(config, profile, unsplit_layout(served), 0)
        self.program = whole
        self.kernels = Kernels("reference", threads=1, spin=False)
        leaves = max(len(tree(config, profile.leaf).leaf_lengths) for tree in (head_tree, ffn_tree))
        spec = ExchangeSpec(name="nodes", kind="reduce", capacity_floats=leaves * config.hidden)
        self.comm: Comm = Solo(WireSizes(tp=1, pp=1, exchanges=(spec,)))
        blocks = pages_for(position + 1, block=profile.kv_block)
        self.kv = KvCache(
            config,
            profile,
            layers=(layer, layer + 1),
            kv_heads=(0, config.num_kv_heads),
            num_pages=blocks,
        )
        self.x_RD = np.zeros((1, config.hidden), np.float32)
        self.wire_RB = np.zeros((1, whole.hop_row_bytes), np.uint8)
        self.q_RN = np.zeros((1, config.num_heads * config.head_dim), np.float32)
        self.a_RN = np.zeros_like(self.q_RN)
        self.f_RF = np.zeros((1, config.ffn), np.float32)
        self.shard_RV = np.zeros((1, vocab[1] - vocab[0]), np.float32)
        self.cos, self.sin = rope_table(
            position + 1, config.head_dim, config.rope_theta, config.rope_scaling
        )
        self.tokens, self.row_slot, self.row_fault, self.sample_rows = (
            np.zeros(1, np.int32) for _ in range(4)
        )
        self.positions = np.full(1, position, np.int32)
        self.digests, self.digest_keys = np.zeros((1, 0), np.uint64), np.zeros(0, np.int32)
        self.page_table = np.arange(blocks, dtype=np.int32).reshape(1, -1)

    def query_sources(self) -> list[F32]:
        """See Workspace; one rank has all heads."""
        return [self.q_RN]

    def run(self, op: Op) -> None:
        """One op, bound and called for the row."""
        Binder(self).bind(op)(1)

    def store(self, layer: int, keys_JGd: Pages, values_JGd: Pages) -> None:
        """The history of the row, in pages that follow each other."""
        block = self.program.profile.kv_block
        for position, (key, value) in enumerate(zip(keys_JGd, values_JGd, strict=True)):
            page, lane = divmod(position, block)
            unpack_row(self.kv.keys(layer), page, lane, key, keys=True)
            unpack_row(self.kv.values(layer), page, lane, value, keys=False)

    def row_sum(self, linear: Op, reduce: Op, tree: Tree) -> RowSum:
        """Run both ops of a row-parallel sum, one leaf a node."""
        leaves = tree.num_leaves
        each = Sum(tree.leaf_lengths, (0,) * leaves)
        self.run(replace(linear, sum=each))
        width = self.config.hidden
        residual = self.x_RD[0].copy()
        buffer = self.comm.exchange("nodes").send_buffer(0)[: leaves * width]
        merges = tree.merges((0, leaves))
        self.run(replace(reduce, sum=Sum(merges=merges, nodes_per_rank=(leaves,))))
        bias = self.image.vector(reduce.weights[0].name) if reduce.weights else None
        return RowSum(tree, buffer.reshape(leaves, width).copy(), bias, residual)


def replay_layer(
    served: Served, layer: int, *, x_in_D: F32, keys_JGd: Pages, values_JGd: Pages
) -> LayerReplay:
    """Position J of a sequence whose first J keys and values at this layer are given, as stored.

    Held by: test_divergence.py (equal to what a healthy rank of every body holds, bit for bit).
    """
    config, leaf = served.config, served.profile.leaf
    bench = _Bench(served, layer=layer, position=len(keys_JGd))
    ops = {op.kind: op for op in bench.program.ops if op.layer == layer}
    bench.store(layer, keys_JGd, values_JGd)
    bench.x_RD[0] = x_in_D
    bench.run(ops["qkv"])
    bench.run(ops["attention"])
    page, lane = divmod(len(keys_JGd), served.profile.kv_block)
    o = bench.row_sum(ops["o_proj"], ops["reduce_o"], head_tree(config, leaf))
    x_o = bench.x_RD[0].copy()
    bench.run(ops["gate_up"])
    down = bench.row_sum(ops["down_proj"], ops["reduce_down"], ffn_tree(config, leaf))
    x_down = bench.x_RD[0].copy()
    if "round_wire" in ops:
        bench.run(ops["round_wire"])
    return LayerReplay(
        x_in=np.array(x_in_D, np.float32),
        q=bench.q_RN[0].copy(),
        key_Gd=packed_row(bench.kv.keys(layer), page, lane, keys=True),
        value_Gd=packed_row(bench.kv.values(layer), page, lane, keys=False),
        attention=bench.a_RN[0].copy(),
        o=o,
        x_o=x_o,
        ffn=bench.f_RF[0].copy(),
        down=down,
        x_down=x_down,
        x_round=bench.x_RD[0].copy() if "round_wire" in ops else None,
    )


def explain_attention(
    served: Served, q_N: F32, keys_JGd: Pages, values_JGd: Pages, *, head: int, found_d: F32
) -> str:
    """How one head of a row may have come to `found_d` from the right q, keys and values, or ''.

    keys and values: with the row's own. Tried: another KV head, fewer keys.
    """
    position, config = len(keys_JGd) - 1, served.config
    right = head // config.q_per_kv
    guesses = [(f"KV head {other}", other, position) for other in range(config.num_kv_heads)]
    guesses += [("all keys but its own", right, position - 1)] if position else []
    for text, kv_head, last in guesses:
        bench = _Bench(served, layer=0, position=position)
        bench.store(0, keys_JGd, values_JGd)
        out = np.zeros((1, config.head_dim), np.float32)
        q = q_N.reshape(config.num_heads, -1)[head : head + 1]
        reference.Attention(
            reference.Pool(),
            q,
            bench.kv.keys(0),
            bench.kv.values(0),
            bench.page_table,
            bench.row_slot,
            np.full(1, last, np.int32),
            config.head_dim,
            np.full(1, kv_head, np.int32),
            out,
            bench.row_fault,
            1,
        ).run(1)
        if out[0].tobytes() == found_d.tobytes():
            return f"equal to its output over {text}"
    return ""


def replay_states(served: Served, q_N: F32, keys_JGd: F32, values_JGd: F32, stripes: Span) -> F32:
    """[H, nodes, d + 2]: the softmax states that the blocks of a span of stripes give a row, as
    `legible_states` makes them. keys and values: with the row's own."""
    position, config = len(keys_JGd) - 1, served.config
    bench = _Bench(served, layer=0, position=position)
    bench.store(0, keys_JGd, values_JGd)
    num_nodes, size = len(STRIPE_TREE.cover(stripes)), config.head_dim + STATE_HEADER
    states = np.zeros((config.num_heads, num_nodes, size), np.float32)
    reference.AttentionStates(
        reference.Pool(),
        [q_N.reshape(1, -1)],
        bench.kv.keys(0),
        bench.kv.values(0),
        bench.page_table,
        bench.row_slot,
        bench.positions,
        config.head_dim,
        np.arange(config.num_heads, dtype=np.int32) // config.q_per_kv,
        *stripes,
        states.size,
        states.reshape(-1),
    ).run(1)
    return legible_states(states)


def replay_head(served: Served, x_D: F32, rows: Span) -> F32:
    """The logits [V] of vocabulary rows `rows`, which begin at a multiple of 16."""
    bench = _Bench(served, layer=0, position=0, vocab=rows)
    (op,) = (op for op in bench.program.ops if op.kind == "head")
    norm, table = op.weights
    bench.x_RD[0] = x_D
    bench.run(replace(op, weights=(norm, replace(table, rows=rows))))
    return np.array(bench.shard_RV[0], np.float32)
