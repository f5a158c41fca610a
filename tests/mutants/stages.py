"""Bugs between stages: hops, what a stage holds, and which layer it thinks it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from anyshard.binder import Binder
from anyshard.model import Program
from anyshard.op import Op, Weight
from anyshard.ops.kv_pages import KV_GROUP
from anyshard.worker import Served, Worker
from mutants.attention import AlteredOpsBinder

Run = Callable[[int], None]


class TiedHeadMissingBinder(AlteredOpsBinder):
    """A stage without the embedding has no head where the two are tied: it is left at zero."""

    def _head(self, op: Op) -> Run:
        module = self.module

        def head(*arguments: Any) -> Any:
            return module.Head(*arguments[:5], np.zeros_like(arguments[5]), *arguments[6:])

        if not (self.w.config.tied and self.w.program.stage):
            return super()._head(op)
        return self.altered(super()._head, op, Head=head)


class TiedHeadMissing(Worker):
    """See TiedHeadMissingBinder."""

    binder_type = TiedHeadMissingBinder


class LocalLayerIndex(Worker):
    """A stage takes the weights of the layers that it would have, were it the first."""

    def build_program(self, served: Served, rank: int) -> Program:
        here = super().build_program(served, rank)
        first = here.layers[0]

        def local(layer: int, weight: Weight) -> Weight:
            name = weight.name.replace(f"layers.{layer}.", f"layers.{layer - first}.")
            return replace(weight, name=name)

        ops = (
            replace(op, weights=tuple(local(op.layer, weight) for weight in op.weights))
            for op in here.ops
        )
        return replace(here, ops=tuple(ops))


class ReusedHopBufferBinder(Binder):
    """The buffer of a hop is written again before its send has ended: its last row comes early."""

    def _send(self, op: Op) -> Run:
        comm, x_RD, staged = self.w.comm, self.w.x_RD, np.zeros_like(self.w.x_RD)

        def run(rows: int) -> None:
            staged[:rows] = x_RD[:rows]
            staged[0] = x_RD[rows - 1]
            comm.send(staged[:rows])

        return run


class ReusedHopBuffer(Worker):
    """See ReusedHopBufferBinder."""

    binder_type = ReusedHopBufferBinder


class TransposedHopBinder(Binder):
    """A view that is not contiguous is sent as its memory lies."""

    def _send(self, op: Op) -> Run:
        comm, x_RD = self.w.comm, self.w.x_RD

        def run(rows: int) -> None:
            memory = np.ascontiguousarray(x_RD[:rows].T)
            comm.send(memory.reshape(rows, -1))

        return run


class TransposedHop(Worker):
    """See TransposedHopBinder."""

    binder_type = TransposedHopBinder


class PreviousChunkBinder(Binder):
    """From the second frame on, a stage goes on with the hop before."""

    def _receive(self, op: Op) -> Run:
        receive, x_RD = super()._receive(op), self.w.x_RD
        before: list[Any] = []

        def run(rows: int) -> None:
            receive(rows)
            before.append(x_RD[:rows].copy())
            if len(before) > 1:
                old = before.pop(0)[:rows]
                x_RD[: len(old)] = old

        return run


class PreviousChunk(Worker):
    """See PreviousChunkBinder."""

    binder_type = PreviousChunkBinder


class RoundsOnlyAtCutsBinder(Binder):
    """An int8 wire rounds what leaves a stage, and nothing where no stage ends."""

    def _round_wire(self, op: Op) -> Run:
        return super()._round_wire(op) if op.wire_bytes else lambda rows: None


class RoundsOnlyAtCuts(Worker):
    """See RoundsOnlyAtCutsBinder."""

    binder_type = RoundsOnlyAtCutsBinder


class ScaleOfTwoBlocksBinder(Binder):
    """What leaves a stage has one scale for two blocks of 32, that of the larger."""

    def _round_wire(self, op: Op) -> Run:
        if not op.wire_bytes:
            return super()._round_wire(op)
        x_RD, wire_RB = self.w.x_RD, self.w.wire_RB
        width = x_RD.shape[1]

        def run(rows: int) -> None:
            x_MD = x_RD[:rows]
            for first in range(0, width, 2 * KV_GROUP):
                pair = slice(first, min(first + 2 * KV_GROUP, width))
                scale_M = (np.abs(x_MD[:, pair]).max(axis=1) / np.float32(127)).astype(np.float16)
                wide_M1 = scale_M.astype(np.float32)[:, None]
                divisor_M1 = np.where(wide_M1 > 0, wide_M1, np.float32(1))
                q = np.clip(np.rint(x_MD[:, pair] / divisor_M1), -127, 127).astype(np.int8)
                wire_RB[:rows, pair] = q.view(np.uint8)
                for block in range(first // KV_GROUP, -(-pair.stop // KV_GROUP)):
                    place = width + 2 * block
                    wire_RB[:rows, place : place + 2] = scale_M[:, None].view(np.uint8)
                x_MD[:, pair] = q * wide_M1

        return run


class ScaleOfTwoBlocks(Worker):
    """See ScaleOfTwoBlocksBinder."""

    binder_type = ScaleOfTwoBlocksBinder
