"""Bugs of int8 arithmetic: what a row becomes, what a product wraps to, how scales are applied.

Shapes: M rows, N outputs, K inputs here, B blocks of them, k inputs of a block.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from grid import Loaded, shape_of

from anyshard.binder import Binder
from anyshard.launcher import RankMain
from anyshard.model import Program
from anyshard.op import Op
from anyshard.ops import reference
from anyshard.ops.coefficients import INT8_MOST
from anyshard.ops.exact import F32, merge_nodes
from anyshard.ops.quant import split_blocks
from anyshard.worker import Served, Worker
from mutants.subjects import subject
from mutants.weights import Change, weights_of, with_weights

Run = Callable[[int], None]
WRAPS = -128  # its magnitude is no int8


class QuantisedNodes(reference.Nodes):
    """Nodes of rows that are finite, step by step; as written, until a bug overrides a step."""

    def scales(self, x_MBk: F32) -> F32:
        """Of the blocks of every row: [M, B]."""
        return np.asarray(np.abs(x_MBk).max(axis=2) / np.float32(INT8_MOST))

    def rounded(self, quotient: F32) -> F32:
        """To whole numbers."""
        return np.rint(quotient)

    def dots(self, x_BMk: F32, w_BkN: F32) -> F32:
        """Of whole numbers, exact: [B, M, N]."""
        return np.matmul(x_BMk, w_BkN)

    def leaf(self, dot_MN: F32, weight_1N: F32, row_M1: F32) -> F32:
        """A dot times both scales."""
        return np.asarray(dot_MN * (weight_1N * row_M1))

    def __call__(self, x_MK: F32) -> F32:
        """[nodes, M, N]."""
        x_MBk = split_blocks(x_MK, self.leaf_lengths)
        scale_MB = self.scales(x_MBk)
        with np.errstate(all="ignore"):
            quotient = np.where(scale_MB[:, :, None] > 0, x_MBk / scale_MB[:, :, None], 0)
        whole = np.clip(self.rounded(quotient), -INT8_MOST, INT8_MOST)
        weight = self.q_NBk.astype(np.float32)
        dots = self.dots(whole.transpose(1, 0, 2), weight.transpose(1, 2, 0))
        scale_NB = self.scale_NB.astype(np.float32)
        leaves = [
            self.leaf(dot, scale_NB[None, :, block], scale_MB[:, block, None])
            for block, dot in enumerate(dots)
        ]
        return np.stack(merge_nodes(leaves, self.merges))


class QuantisedBinder(Binder):
    """o_proj and down_proj make the nodes of their worker's type."""

    def _row_linear(self, op: Op, a: F32) -> Run:
        worker, out = self.w, self.nodes.send_buffer(self.parity)
        assert isinstance(worker, Quantised)
        panels = self._matrix(op.weights[0])
        nodes_of = worker.nodes_type(panels, worker.config.hidden, *self._leaves(op))

        def run(rows: int) -> None:
            nodes = nodes_of(a[:rows])
            out[: nodes.size] = nodes.reshape(-1)

        return run


class Quantised(Worker):
    """See QuantisedBinder; no bug of its own."""

    binder_type = QuantisedBinder
    nodes_type = QuantisedNodes


class OneScaleNodes(QuantisedNodes):
    """A row has one scale over all the columns that a rank has."""

    def scales(self, x_MBk: F32) -> F32:
        """Of what was sharded before it was quantised."""
        scale_MB = super().scales(x_MBk)
        return np.broadcast_to(scale_MB.max(axis=1, keepdims=True), scale_MB.shape)


class OneScale(Quantised):
    """See OneScaleNodes."""

    nodes_type = OneScaleNodes


class HalfAwayNodes(QuantisedNodes):
    """Halves are rounded away from zero."""

    def rounded(self, quotient: F32) -> F32:
        """As C's roundf."""
        whole = np.trunc(quotient)
        away = np.abs(quotient - whole) >= np.float32(0.5)
        return np.where(away, whole + np.copysign(np.float32(1), quotient), whole)


class HalfAway(Quantised):
    """See HalfAwayNodes."""

    nodes_type = HalfAwayNodes


class ScaleAfterScaleNodes(QuantisedNodes):
    """A dot is multiplied by one scale, then by the other."""

    def leaf(self, dot_MN: F32, weight_1N: F32, row_M1: F32) -> F32:
        """Rounded in between."""
        return np.asarray((dot_MN * weight_1N) * row_M1)


class ScaleAfterScale(Quantised):
    """See ScaleAfterScaleNodes."""

    nodes_type = ScaleAfterScaleNodes


class WrappedNodes(QuantisedNodes):
    """Products as |x| times the weight with the sign of x, in 8 bits: -(-128) is -128."""

    def dots(self, x_BMk: F32, w_BkN: F32) -> F32:
        """What `_mm256_sign_epi8` and `_mm256_maddubs_epi16` give on every CPU that has them."""
        wraps = w_BkN == WRAPS
        plain = np.matmul(x_BMk, np.where(wraps, np.float32(0), w_BkN))
        return plain + np.matmul(np.abs(x_BMk), np.where(wraps, np.float32(WRAPS), np.float32(0)))


class Wrapped(Quantised):
    """See WrappedNodes. Nothing wraps unless a block holds -128."""

    nodes_type = WrappedNodes


def kept_as_stored(model: Loaded) -> RankMain:
    """Rank 1 has blocks of o_proj and down_proj as Q8_0 has them, also those that hold -128."""
    stored = subject(shape_of(model.name)).served.image

    def put(name: str) -> Change:
        def change(panels: np.ndarray) -> None:
            panels[:] = stored.panels(name).view(np.int8)

        return change

    def changes_of(served: Served, here: Program) -> dict[str, Change]:
        mine = [name for name in weights_of(here) if name.endswith((".o", ".down"))]
        held = [name for name in mine if stored.storage[name] == "q8_0"]
        return {name: put(name) for name in held} if here.rank == 1 else {}

    return with_weights(changes_of, Wrapped)
