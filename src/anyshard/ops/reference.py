"""The reference bodies: every op of the program in NumPy, in the written order.

Each class has the name, the arguments and the bits of its native twin in `_native`, so a worker
binds one module or the other. Slow by design (a token of a 135M model takes seconds): they
define the result, they replay a difference, and they run where no compiler was.

Shapes: R rows_max, M rows of this call, D hidden, H query heads here, G KV heads here, d head
dim, F ffn here, V vocab here, P pages, S slots, B blocks of a slot. Panels: `ops.storage`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from anyshard.layout import STRIPE_TREE
from anyshard.ops.coefficients import KV_BLOCK, NORM_LANES, SCORE_LIMIT
from anyshard.ops.digest import Digest, DigestKv, digest_panels
from anyshard.ops.draw import argmax, exp_into, gumbel_argmax, philox_words, spread
from anyshard.ops.exact import (
    EMPTY_MAX,
    F32,
    I32,
    exp2,
    fma32,
    halving_tree,
    linear_nodes,
    merge_nodes,
    pow2,
    silu,
)
from anyshard.ops.kv_pages import Pages, add_values, scores, split_page, store_row
from anyshard.ops.quant import int8_nodes
from anyshard.ops.storage import Panels, unpack, unpack_blocks
from anyshard.ops.wire import DecodeWire, RoundWire
from anyshard.stripes import STRIPES, stripe_of

__all__ = [
    "Attention",
    "AttentionStates",
    "DecodeWire",
    "Digest",
    "DigestKv",
    "Embed",
    "GateUp",
    "Head",
    "MergeStates",
    "Pool",
    "Qkv",
    "Reduce",
    "RoundWire",
    "RowLinear",
    "argmax",
    "digest_panels",
    "exp_into",
    "gumbel_argmax",
    "philox_words",
    "rms_norm",
    "spread",
]


class Pool:
    """Stands where the native thread pool stands; the reference has one thread."""

    def __init__(self, threads: int = 1, body: str = "reference", spin: bool = False) -> None:
        self.threads = 1
        self.body = "reference"

    def close(self) -> None:
        """Nothing to end."""


def rms_norm(x_MD: F32, weight_D: F32, eps: float, faults_M: I32, fault_code: int) -> F32:
    """x / sqrt(mean(x^2) + eps) * weight, each row on 32 lanes; marks rows whose sum is not finite.

    Source: docs/numerics.md, RMSNorm.
    """
    num_rows, width = x_MD.shape
    lanes = np.zeros((num_rows, NORM_LANES), np.float32)
    for start in range(0, width, NORM_LANES):
        piece = x_MD[:, start : start + NORM_LANES]
        count = piece.shape[1]
        lanes[:, :count] = fma32(piece, piece, lanes[:, :count])
    squares = halving_tree(lanes)
    mark(faults_M, ~np.isfinite(squares), fault_code)
    root = np.sqrt(squares / np.float32(width) + np.float32(eps))
    inverse = np.float32(1) / root
    return np.asarray((x_MD * inverse[:, None]) * weight_D)


def mark(faults_M: I32, bad_M: npt.NDArray[np.bool_], fault_code: int) -> None:
    """Note the first fault of a row; later ones do not overwrite it."""
    faults_M[bad_M & (faults_M == 0)] = fault_code


class Nodes:
    """The nodes of a linear over the leaves given, in the arithmetic of its panels."""

    def __init__(self, panels: Panels, num_outputs: int, leaf_lengths: I32, merges: I32) -> None:
        self.leaf_lengths = [int(n) for n in leaf_lengths]
        self.merges = [int(n) for n in merges]
        self.is_int8 = panels.dtype == np.int8
        if self.is_int8:
            self.q_NBk, self.scale_NB = unpack_blocks(panels, np.arange(num_outputs))
        else:
            self.weight_NK = unpack(panels, num_outputs)

    def __call__(self, x_MK: F32) -> F32:
        if self.is_int8:
            return int8_nodes(x_MK, self.q_NBk, self.scale_NB, self.leaf_lengths, self.merges)
        return linear_nodes(x_MK, self.weight_NK, self.leaf_lengths, self.merges)


class Linear:
    """A column-parallel linear inside another op: whole sums, bias after the tree."""

    def __init__(
        self,
        panels: Panels | None,
        num_outputs: int,
        bias: F32 | None,
        leaf_lengths: I32,
        merges: I32,
    ) -> None:
        self.nodes = None if panels is None else Nodes(panels, num_outputs, leaf_lengths, merges)
        self.bias = bias

    def __call__(self, x_MK: F32) -> F32:
        if self.nodes is None:
            return np.zeros((x_MK.shape[0], 0), np.float32)
        y_MN: F32 = self.nodes(x_MK)[0]
        return y_MN if self.bias is None else y_MN + self.bias


class Embed:
    """out[row] = embedding row of tokens[row], read from the packed panels."""

    def __init__(self, pool: Pool, panels: Panels, vocab: int, tokens: I32, out: F32) -> None:
        self.panels, self.vocab, self.tokens, self.out = panels, vocab, tokens, out

    def run(self, rows: int) -> None:
        """Fill out[:rows]."""
        tokens = self.tokens[:rows]
        if rows and not (tokens.min() >= 0 and tokens.max() < self.vocab):
            raise ValueError(f"a token id is outside 0..{self.vocab - 1}")
        self.out[:rows] = unpack(self.panels, tokens)[:, : self.out.shape[1]]


class Qkv:
    """Norm, q/k/v projections with bias, RoPE, q scaled once, k and v written to their pages.

    With `q_norm` and `k_norm` [d] each head of q and k passes an RMSNorm before RoPE. Of a row
    whose block is not of stripes first_stripe:stop_stripe only q is computed; another rank has the
    rest.
    """

    def __init__(
        self,
        pool: Pool,
        x: F32,
        norm_weight: F32,
        eps: float,
        q_panels: Panels | None,
        k_panels: Panels | None,
        v_panels: Panels | None,
        q_bias: F32 | None,
        k_bias: F32 | None,
        v_bias: F32 | None,
        q_norm: F32 | None,
        k_norm: F32 | None,
        leaf_lengths: I32,
        merges: I32,
        head_dim: int,
        q_scale: float,
        cos: F32,
        sin: F32,
        positions: I32,
        q_out: F32,
        k_cache: Pages,
        v_cache: Pages,
        page_table: I32,
        row_slot: I32,
        row_fault: I32,
        fault_code: int,
        first_stripe: int = 0,
        stop_stripe: int = STRIPES,
    ) -> None:
        self.stripes = range(first_stripe, stop_stripe)
        width = 0 if q_panels is None else q_out.shape[1]
        kv_width = k_cache.shape[1] * head_dim
        self.x, self.norm_weight, self.eps = x, norm_weight, eps
        self.q = Linear(q_panels, width, q_bias, leaf_lengths, merges)
        self.k = Linear(k_panels, kv_width, k_bias, leaf_lengths, merges)
        self.v = Linear(v_panels, kv_width, v_bias, leaf_lengths, merges)
        self.q_norm, self.k_norm = q_norm, k_norm
        self.head_dim, self.q_scale = head_dim, np.float32(q_scale)
        self.cos, self.sin, self.positions = cos, sin, positions
        self.q_out, self.k_cache, self.v_cache = q_out, k_cache, v_cache
        self.page_table, self.row_slot = page_table, row_slot
        self.row_fault, self.fault_code = row_fault, fault_code

    def run(self, rows: int) -> None:
        """Rows of this step; their k and v are in the cache when it returns."""
        has_q, whole = self.q_out.shape[1] > 0, np.arange(rows)
        blocks = self.positions[:rows] // KV_BLOCK
        owned = np.flatnonzero([stripe_of(int(block)) in self.stripes for block in blocks])
        h_MD = self._normed(whole if has_q else owned)
        if has_q:
            self.q_out[:rows] = self._rotated(self.q(h_MD), self.q_norm, whole) * self.q_scale
            h_MD = h_MD[owned]
        if self.k_cache.shape[1] == 0 or len(owned) == 0:
            return
        k_MN = self._rotated(self.k(h_MD), self.k_norm, owned)
        k_MGd = k_MN.reshape(len(owned), -1, self.head_dim)
        self.store(owned, k_MGd, self.v(h_MD).reshape(len(owned), -1, self.head_dim))

    def store(self, rows: npt.NDArray[np.intp], k_MGd: F32, v_MGd: F32) -> None:
        """Put these rows of a step into their pages."""
        for index, row in enumerate(rows):
            block, lane = divmod(int(self.positions[row]), KV_BLOCK)
            page = int(self.page_table[self.row_slot[row], block])
            store_row(self.k_cache, page, lane, k_MGd[index], keys=True)
            store_row(self.v_cache, page, lane, v_MGd[index], keys=False)

    def _normed(self, rows: npt.NDArray[np.intp]) -> F32:
        faults = self.row_fault[rows]
        h_MD = rms_norm(self.x[rows], self.norm_weight, self.eps, faults, self.fault_code)
        self.row_fault[rows] = faults
        return h_MD

    def _rotated(self, y_MN: F32, norm_d: F32 | None, rows: npt.NDArray[np.intp]) -> F32:
        half, count = self.head_dim // 2, len(rows)
        if norm_d is not None:
            heads = y_MN.reshape(-1, self.head_dim)
            faults = np.zeros(len(heads), np.int32)
            y_MN = rms_norm(heads, norm_d, self.eps, faults, self.fault_code)
            bad_M = np.asarray(faults.reshape(count, -1).any(axis=1))
            marked = self.row_fault[rows]
            mark(marked, bad_M, self.fault_code)
            self.row_fault[rows] = marked
        y_MHd = y_MN.reshape(count, -1, self.head_dim)
        x0, x1 = y_MHd[..., :half], y_MHd[..., half:]
        c = self.cos[self.positions[rows], None, :]
        s = self.sin[self.positions[rows], None, :]
        rotated = np.concatenate([fma32(x0, c, -(x1 * s)), fma32(x1, c, x0 * s)], axis=-1)
        return rotated.reshape(count, -1)


class _OverPages:
    """What both attention ops make their results of: states of stripes of cached blocks."""

    def __init__(
        self,
        k_cache: Pages,
        v_cache: Pages,
        page_table: I32,
        row_slot: I32,
        positions: I32,
        head_dim: int,
        kv_head_of: I32,
    ) -> None:
        self.k_cache, self.v_cache, self.page_table = k_cache, v_cache, page_table
        self.row_slot, self.positions = row_slot, positions
        self.head_dim, self.kv_head_of = head_dim, kv_head_of

    def stripe_state(
        self, q_Hd: F32, row: int, stripe: int, bad_H: npt.NDArray[np.bool_]
    ) -> tuple[I32, F32, F32]:
        """(M [H], l [H], o [H, d]) of the blocks of one stripe; marks heads out of range."""
        last = int(self.positions[row])
        table = self.page_table[self.row_slot[row]]
        state = (
            np.full(len(q_Hd), EMPTY_MAX, np.int32),
            np.zeros(len(q_Hd), np.float32),
            np.zeros(q_Hd.shape, np.float32),
        )
        # bits back to front and again: the first block of a stripe is as the stripe of that block
        for block in range(stripe_of(stripe), last // KV_BLOCK + 1, STRIPES):
            visible = min(KV_BLOCK, last + 1 - block * KV_BLOCK)
            state = self._visit(q_Hd, int(table[block]), visible, state, bad_H)
        return state

    def _visit(
        self,
        q_Hd: F32,
        page: int,
        visible: int,
        state: tuple[I32, F32, F32],
        bad_H: npt.NDArray[np.bool_],
    ) -> tuple[I32, F32, F32]:
        high, total, out = state
        k_HdJ, k_scale_HgJ = split_page(self.k_cache, page, self.kv_head_of, keys=True)
        v_HJd, v_scale_HgJ = split_page(self.v_cache, page, self.kv_head_of, keys=False)
        score = scores(q_Hd, k_HdJ[:, :, :visible], k_scale_HgJ)
        bad_H |= ~(np.abs(score) <= np.float32(SCORE_LIMIT)).all(axis=1)
        score[bad_H] = 0
        new_high = np.maximum(high, np.ceil(score.max(axis=1)).astype(np.int32))
        p = np.zeros((len(q_Hd), KV_BLOCK), np.float32)
        p[:, :visible] = exp2(score - new_high.astype(np.float32)[:, None])
        factor = pow2(high - new_high)
        total = (total * factor) + halving_tree(p)
        out = add_values(out * factor[:, None], p[:, :visible], v_HJd, v_scale_HgJ)
        return new_high, total, out


class Attention(_OverPages):
    """Each row attends to keys 0..position of its slot: 8 stripes of blocks, merged in a tree."""

    def __init__(
        self,
        pool: Pool,
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
        super().__init__(k_cache, v_cache, page_table, row_slot, positions, head_dim, kv_head_of)
        self.q, self.out = q, out
        self.row_fault, self.fault_code = row_fault, fault_code

    def run(self, rows: int) -> None:
        """Fill out[:rows]; a row whose scores leave +-2^20 gets NaN and a fault."""
        if len(self.kv_head_of) == 0:
            return
        for row in range(rows):
            q_Hd = self.q[row].reshape(-1, self.head_dim)
            out_Hd, bad_H = self._attend(q_Hd, row)
            out_Hd[bad_H] = np.nan
            self.out[row] = out_Hd.reshape(-1)
            if bad_H.any():
                mark(self.row_fault[row : row + 1], np.array([True]), self.fault_code)

    def _attend(self, q_Hd: F32, row: int) -> tuple[F32, npt.NDArray[np.bool_]]:
        bad_H = np.zeros(len(q_Hd), np.bool_)
        states = [self.stripe_state(q_Hd, row, stripe, bad_H) for stripe in range(STRIPES)]
        while len(states) > 1:
            states = [_merge(a, b) for a, b in zip(states[::2], states[1::2], strict=True)]
        _, total_H, out_Hd = states[0]
        with np.errstate(invalid="ignore"):
            return np.asarray(out_Hd / total_H[:, None]), bad_H


def _merge(a: tuple[I32, F32, F32], b: tuple[I32, F32, F32]) -> tuple[I32, F32, F32]:
    high = np.maximum(a[0], b[0])
    fa, fb = pow2(a[0] - high), pow2(b[0] - high)
    return high, (a[1] * fa) + (b[1] * fb), (a[2] * fa[:, None]) + (b[2] * fb[:, None])


class AttentionStates(_OverPages):
    """What the blocks of stripes first_stripe:stop_stripe give each row, of the heads of all ranks.

    The states of the nodes that cover these stripes go to the rank that has the head: in `out`,
    for each rank, [rows][its heads][nodes][d + 2] of (M as int bits, l, o), part_floats a row with
    the padding. l is NaN where a score was out of range. Of an empty state (M is -2^30) o is not
    set.
    """

    def __init__(
        self,
        pool: Pool,
        queries: Sequence[F32],
        k_cache: Pages,
        v_cache: Pages,
        page_table: I32,
        row_slot: I32,
        positions: I32,
        head_dim: int,
        kv_head_of: I32,
        first_stripe: int,
        stop_stripe: int,
        part_floats: int,
        out: F32,
    ) -> None:
        super().__init__(k_cache, v_cache, page_table, row_slot, positions, head_dim, kv_head_of)
        self.queries, self.part_floats, self.out = list(queries), part_floats, out
        self.stripes = range(first_stripe, stop_stripe)
        self.merges = STRIPE_TREE.merges((first_stripe, stop_stripe))

    def run(self, rows: int) -> None:
        """Fill the parts of `out` for so many rows."""
        for row in range(rows):
            q_Hd = np.concatenate([q[row] for q in self.queries]).reshape(-1, self.head_dim)
            states = []
            for stripe, merges in zip(self.stripes, self.merges, strict=True):
                bad_H = np.zeros(len(q_Hd), np.bool_)
                high, total, o_Hd = self.stripe_state(q_Hd, row, stripe, bad_H)
                total[bad_H] = np.nan
                states.append((high, total, o_Hd))
                for _ in range(merges):
                    states[-2:] = [_merge(*states[-2:])]
            self._write(rows, row, states)

    def _write(self, rows: int, row: int, states: Sequence[tuple[I32, F32, F32]]) -> None:
        size, head = self.head_dim + 2, 0
        for rank, q in enumerate(self.queries):
            count = q.shape[1] // self.head_dim
            floats = count * len(states) * size
            start = rank * rows * self.part_floats + row * floats
            part = self.out[start : start + floats].reshape(count, len(states), size)
            for node, (high, total, o_Hd) in enumerate(states):
                mine = slice(head, head + count)
                part[:, node, 0] = high[mine].view(np.float32)
                part[:, node, 1] = total[mine]
                part[:, node, 2:] = o_Hd[mine]
            head += count


class MergeStates:
    """out = the merge of what all ranks' blocks have given the heads of rank `mine`, o / l.

    sources: as `AttentionStates` writes them, one a rank; merges: over the nodes of all of them.
    """

    def __init__(
        self,
        pool: Pool,
        sources: Sequence[F32],
        nodes_per_source: Sequence[int],
        merges: I32,
        mine: int,
        part_floats: int,
        head_dim: int,
        out: F32,
        row_fault: I32,
        fault_code: int,
    ) -> None:
        self.sources, self.nodes_per_source = list(sources), list(nodes_per_source)
        self.merges, self.mine, self.part_floats = [int(n) for n in merges], mine, part_floats
        self.head_dim, self.out = head_dim, out
        self.row_fault, self.fault_code = row_fault, fault_code

    def run(self, rows: int) -> None:
        """Fill out[:rows]; a row whose scores left +-2^20 gets NaN and a fault."""
        size, count = self.head_dim + 2, self.out.shape[1] // self.head_dim
        start = self.mine * rows * self.part_floats
        nodes = []
        for source, number in zip(self.sources, self.nodes_per_source, strict=True):
            floats = rows * count * number * size
            part = source[start : start + floats].reshape(rows * count, number, size)
            nodes += [self.received(part[:, node]) for node in range(number)]
        stack: list[tuple[I32, F32, F32]] = []
        bad = np.zeros(rows * count, np.bool_)
        for (high, total, o_Nd), merges in zip(nodes, self.merges, strict=True):
            bad |= np.isnan(total)
            stack.append((high, total, o_Nd))
            for _ in range(merges):
                stack[-2:] = [_merge(*stack[-2:])]
        ((_, total, o_Nd),) = stack
        with np.errstate(invalid="ignore"):
            out = np.asarray(o_Nd / total[:, None])
        out[bad] = np.nan
        self.out[:rows] = out.reshape(rows, -1)
        bad_M = np.asarray(bad.reshape(rows, -1).any(axis=1))
        mark(self.row_fault[:rows], bad_M, self.fault_code)

    @staticmethod
    def received(part_N: F32) -> tuple[I32, F32, F32]:
        """A state of every (row, head) as it came [N, d + 2]; o of an empty one is +0, whatever it
        holds."""
        high = np.ascontiguousarray(part_N[:, 0]).view(np.int32)
        o_Nd = np.where((high == EMPTY_MAX)[:, None], np.float32(0), part_N[:, 2:])
        return high, part_N[:, 1].copy(), o_Nd


class RowLinear:
    """The nodes that this rank's columns contribute to a row-parallel linear."""

    def __init__(
        self,
        pool: Pool,
        a: F32,
        panels: Panels,
        num_outputs: int,
        leaf_lengths: I32,
        merges: I32,
        out: F32,
    ) -> None:
        self.a, self.out = a, out
        self.nodes = Nodes(panels, num_outputs, leaf_lengths, merges)

    def run(self, rows: int) -> None:
        """Write [nodes][rows][N], packed, to the front of out."""
        nodes = self.nodes(self.a[:rows])
        self.out[: nodes.size] = nodes.reshape(-1)


class Reduce:
    """Merge all ranks' nodes in tree order, add the bias once, add to the residual."""

    def __init__(
        self,
        pool: Pool,
        sources: Sequence[F32],
        nodes_per_source: Sequence[int],
        merges: I32,
        bias: F32 | None,
        x: F32,
        num_outputs: int,
    ) -> None:
        self.sources, self.nodes_per_source = list(sources), list(nodes_per_source)
        self.merges, self.bias, self.x = [int(n) for n in merges], bias, x
        self.num_outputs = num_outputs

    def run(self, rows: int) -> None:
        """x[:rows] += merged (+ bias)."""
        size = rows * self.num_outputs
        nodes = [
            source[index * size : (index + 1) * size].reshape(rows, self.num_outputs)
            for source, count in zip(self.sources, self.nodes_per_source, strict=True)
            for index in range(count)
        ]
        (total_MD,) = merge_nodes(nodes, self.merges)
        if self.bias is not None:
            total_MD = total_MD + self.bias
        self.x[:rows] = self.x[:rows] + total_MD


class GateUp:
    """Norm, gate and up projections, SiLU(gate) * up."""

    def __init__(
        self,
        pool: Pool,
        x: F32,
        norm_weight: F32,
        eps: float,
        gate_panels: Panels | None,
        up_panels: Panels | None,
        num_outputs: int,
        gate_bias: F32 | None,
        up_bias: F32 | None,
        leaf_lengths: I32,
        merges: I32,
        out: F32,
        row_fault: I32,
        fault_code: int,
    ) -> None:
        self.x, self.norm_weight, self.eps, self.out = x, norm_weight, eps, out
        self.gate = Linear(gate_panels, num_outputs, gate_bias, leaf_lengths, merges)
        self.up = Linear(up_panels, num_outputs, up_bias, leaf_lengths, merges)
        self.row_fault, self.fault_code = row_fault, fault_code

    def run(self, rows: int) -> None:
        """Fill out[:rows]."""
        h_MD = rms_norm(
            self.x[:rows], self.norm_weight, self.eps, self.row_fault[:rows], self.fault_code
        )
        self.out[:rows] = silu(self.gate(h_MD)) * self.up(h_MD)


class Head:
    """Final norm and vocabulary projection of the rows that are sampled."""

    def __init__(
        self,
        pool: Pool,
        x: F32,
        sample_rows: I32,
        norm_weight: F32,
        eps: float,
        panels: Panels | None,
        num_outputs: int,
        bias: None,
        leaf_lengths: I32,
        merges: I32,
        out: F32,
        row_fault: I32,
        fault_code: int,
    ) -> None:
        self.x, self.sample_rows, self.norm_weight, self.eps = x, sample_rows, norm_weight, eps
        self.linear = Linear(panels, num_outputs, None, leaf_lengths, merges)
        self.out, self.row_fault, self.fault_code = out, row_fault, fault_code

    def run(self, num_sampled: int) -> None:
        """Fill out[:num_sampled] with the logits of rows sample_rows[:num_sampled]."""
        rows = self.sample_rows[:num_sampled]
        faults = self.row_fault[rows]
        h_MD = rms_norm(self.x[rows], self.norm_weight, self.eps, faults, self.fault_code)
        self.row_fault[rows] = faults
        self.out[:num_sampled] = self.linear(h_MD)
