"""Bugs in heads and attention: whose KV head, whose norm, whose bias, which keys, which base."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from anyshard.binder import Binder
from anyshard.model import Program
from anyshard.op import Op, Weight
from anyshard.ops import reference as reference_ops
from anyshard.ops.coefficients import KV_BLOCK, LOG2_E
from anyshard.ops.exact import F32, I32, fma32
from anyshard.ops.kv_pages import KV_GROUP, quantize_groups, unpack_row
from anyshard.verify.naive import AlteredOps
from anyshard.worker import Served, Worker

Run = Callable[[int], None]


class AlteredOpsBinder(Binder):
    """Can bind an op with another class in the place of its own."""

    def altered(self, bind: Callable[[Op], Run], op: Op, **classes: Any) -> Run:
        """`bind(op)` with `classes` of the kernel module replaced."""
        module = self.module
        self.module = AlteredOps(module, **classes)
        try:
            return bind(op)
        finally:
            self.module = module


class WrongKvHeadBinder(AlteredOpsBinder):
    """The KV head of a query head from its number on this rank, not in the model."""

    def _attention(self, op: Op) -> Run:
        module, config = self.module, self.w.config

        def attention(*arguments: Any) -> Any:
            right = arguments[8]
            local = np.arange(len(right), dtype=np.int32) // config.q_per_kv
            wrong = np.minimum(local, right.max(initial=0)).astype(np.int32)
            return module.Attention(*arguments[:8], wrong, *arguments[9:])

        return self.altered(super()._attention, op, Attention=attention)


class WrongKvHead(Worker):
    """See WrongKvHeadBinder."""

    binder_type = WrongKvHeadBinder


class DistinctKvHeads(Worker):
    """KV heads that two ranks hold are counted twice, so later ranks begin too far on."""

    def build_program(self, served: Served, rank: int) -> Program:
        here = super().build_program(served, rank)
        config, layout = served.config, here.layout
        earlier = [layout.kv_heads(index, config.q_per_kv) for index in range(here.tp_index)]
        start, count = sum(high - low for low, high in earlier), here.kv_heads[1] - here.kv_heads[0]
        first = min(start % config.num_kv_heads, config.num_kv_heads - count)
        rows = (first * config.head_dim, (first + count) * config.head_dim)

        def moved(weight: Weight) -> Weight:
            part = weight.name.rsplit(".", 1)[-1]
            return replace(weight, rows=rows) if part in ("k", "v") else weight

        ops = (replace(op, weights=tuple(moved(each) for each in op.weights)) for op in here.ops)
        return replace(here, ops=tuple(ops))


class NormTogetherQkv(reference_ops.Qkv):
    """q_norm and k_norm over all heads of the rank at once."""

    def _rotated(self, y_MN: F32, norm_d: F32 | None, rows: Any) -> F32:
        if norm_d is not None:
            weight = np.tile(norm_d, y_MN.shape[1] // len(norm_d))
            fault = self.row_fault[rows]
            y_MN = reference_ops.rms_norm(y_MN, weight, self.eps, fault, self.fault_code)
            self.row_fault[rows] = fault
        return super()._rotated(y_MN, None, rows)


class NormTogetherBinder(AlteredOpsBinder):
    """Binds NormTogetherQkv in a split whose model has such norms."""

    def _qkv(self, op: Op) -> Run:
        if self.w.comm.tp == 1 or not self.w.config.qk_norm:
            return super()._qkv(op)
        return self.altered(super()._qkv, op, Qkv=NormTogetherQkv)


class NormTogether(Worker):
    """See NormTogetherQkv."""

    binder_type = NormTogetherBinder


class LocalConstantsBinder(Binder):
    """What belongs to a query head is looked up by the head's number on this rank."""

    def _vector(self, weight: Weight) -> F32:
        if not weight.name.endswith(".q_bias"):
            return super()._vector(weight)
        return self.w.image.vector(weight.name)[: weight.rows[1] - weight.rows[0]]


class LocalConstants(Worker):
    """See LocalConstantsBinder."""

    binder_type = LocalConstantsBinder


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


class BaseEAttention(reference_ops.Attention):
    """The maximum of a state is taken for a power of e when states are merged."""

    def _visit(
        self, q_Hd: F32, page: int, visible: int, state: tuple[I32, F32, F32], bad_H: Any
    ) -> tuple[I32, F32, F32]:
        high, total, out = super()._visit(q_Hd, page, visible, state, bad_H)
        return np.rint(high * LOG2_E).astype(np.int32), total, out


class ScaleOverTokensQkv(reference_ops.Qkv):
    """Values of all rows of a step have one scale for 32 dims: the largest of theirs."""

    def store(self, rows: npt.NDArray[np.intp], k_MGd: F32, v_MGd: F32) -> None:
        super().store(rows, k_MGd, v_MGd)
        most_MGd = np.broadcast_to(np.abs(v_MGd).max(axis=0), v_MGd.shape)
        for row, v_Gd, most_Gd in zip(rows, v_MGd, most_MGd, strict=True):
            block, lane = divmod(int(self.positions[row]), KV_BLOCK)
            page = int(self.page_table[self.row_slot[row], block])
            _, scale_Gg = quantize_groups(most_Gd)
            wide_Gd = np.repeat(scale_Gg, KV_GROUP, axis=1)[:, : self.head_dim]
            q_Gd = np.clip(np.rint(v_Gd / np.where(wide_Gd > 0, wide_Gd, 1)), -127, 127)
            scales = scale_Gg.astype(np.float16).view(np.int8)
            packed = np.concatenate([q_Gd.astype(np.int8), scales], axis=1)
            unpack_row(self.v_cache, page, lane, packed, keys=False)


class ScaleOverTokensBinder(AlteredOpsBinder):
    """Binds ScaleOverTokensQkv in layer 0."""

    def _qkv(self, op: Op) -> Run:
        if op.layer:
            return super()._qkv(op)
        return self.altered(super()._qkv, op, Qkv=ScaleOverTokensQkv)


class ScaleOverTokens(Worker):
    """See ScaleOverTokensQkv."""

    binder_type: type[Binder] = ScaleOverTokensBinder


class FirstLayerBinder(AlteredOpsBinder):
    """Layer 0 attends by another class; a NumPy body in every layer would take long."""

    attention: type[reference_ops.Attention]

    def _attention(self, op: Op) -> Run:
        if op.layer:
            return super()._attention(op)
        return self.altered(super()._attention, op, Attention=self.attention)


class Unmasked(Worker):
    """See UnmaskedAttention."""

    binder_type: type[Binder] = type(
        "UnmaskedBinder", (FirstLayerBinder,), {"attention": UnmaskedAttention}
    )


class BaseE(Worker):
    """See BaseEAttention."""

    binder_type: type[Binder] = type(
        "BaseEBinder", (FirstLayerBinder,), {"attention": BaseEAttention}
    )
