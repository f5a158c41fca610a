"""Bugs in the weights that a rank has mapped: another byte, another block, another rank's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np

from anyshard.checkpoint import WeightImage
from anyshard.launcher import RankMain, Seat
from anyshard.layout import Span
from anyshard.model import Program, program
from anyshard.op import Weight
from anyshard.ops.storage import Q8_INPUTS, Q8_OUTPUTS, Panels, pack_lanes, unpack
from anyshard.worker import RankPlan, Served, Worker, rank_main

Change = Callable[[Any], None]  # of the panels or the vector, in place
HIGH_BIT = {
    "float32": 22,
    "bfloat16": 6,
    "float16": 9,
    "q8_0": 6,
    "int8": 6,
}  # of the mantissa, of the code


class AlteredImage:
    """The image of one rank that has mapped other bytes of some tensors."""

    def __init__(self, image: WeightImage, changes: Mapping[str, Change]) -> None:
        self._image, self.directory, self.storage = image, image.directory, image.storage
        self._changes = changes

    def _altered(self, name: str, values: Any) -> Any:
        if name in self._changes:
            values = values.copy()
            self._changes[name](values)
        return values

    def panels(self, name: str) -> Panels:
        return cast(Panels, self._altered(name, self._image.panels(name)))

    def vector(self, name: str) -> Any:
        return self._altered(name, self._image.vector(name))


def with_weights(
    changes_of: Callable[[Served, Program], Mapping[str, Change]],
    worker_type: type[Worker] = Worker,
) -> RankMain:
    """A rank body in which a rank has other weights, as `changes_of` says for its program."""

    def body(seat: Seat) -> None:
        state, plan = seat.state, msgspec.msgpack.decode(seat.start.payload, type=RankPlan)
        assert isinstance(state, Served)
        changes = changes_of(state, program(state.config, state.profile, plan.layout, seat.rank))
        if changes:
            image = cast(WeightImage, AlteredImage(state.image, changes))
            seat = replace(seat, state=replace(state, image=image))
        rank_main(seat, worker_type=worker_type)

    return body


def altered(name: str, change: Change, *, rank: int) -> RankMain:
    """A rank body in which `rank` has another tensor."""
    return with_weights(lambda _, here: {name: change} if here.rank == rank else {})


def flip(row: int, column: int, bit: int) -> Change:
    """Flip a bit of weight [row, column]; of blocks, of its code. int8 counts padded columns."""

    def change(panels: Any) -> None:
        if panels.dtype in (np.uint8, np.int8):
            place = (column % 32 // 4) * 64 + row % 16 * 4 + column % 4
            panels[row // 16, column // 32, place] ^= panels.dtype.type(1 << min(bit, 6))
            return
        bits = panels.view(f"u{panels.itemsize}")
        bits[row // 8, column, row % 8] ^= bits.dtype.type(1 << bit)

    return change


def weights_of(here: Program) -> dict[str, Weight]:
    """The cuts that a rank maps, by name of the tensor; of a tied embedding, the head's."""
    return {weight.name: weight for op in here.ops for weight in op.weights}


def largest_in(served: Served, weight: Weight) -> tuple[int, int]:
    """Row and column of the cut's largest weight.

    Of int8 the largest that is positive, as the lowest bit would make -128 of -127, a code that
    nothing has; and its column as blocks are padded.
    """
    rows, columns = (
        unpack(served.image.panels(weight.name), np.arange(*weight.rows)),
        weight.columns,
    )
    if weight.blocks is not None:
        columns = (weight.blocks[0] * Q8_INPUTS, weight.blocks[1] * Q8_INPUTS)
    else:
        rows = np.abs(rows)
    assert columns is not None
    cut = rows[:, slice(*columns)]
    row, column = np.unravel_index(int(cut.argmax()), cut.shape)
    return weight.rows[0] + int(row), columns[0] + int(column)


def fused_cut(served: Served, here: Program, names: Sequence[str]) -> dict[str, Change]:
    """Tensors that were stored as one, cut contiguously: what each then has in its own rows."""
    mine = weights_of(here)
    spans = [mine[name].rows for name in names]
    matrices = [served.image.matrix(name) for name in names]
    fused, start = np.concatenate(matrices), sum(low for low, _ in spans)
    changes: dict[str, Change] = {}
    for name, matrix, (low, high) in zip(names, matrices, spans, strict=True):
        matrix[low:high] = fused[start : start + high - low]
        start += high - low
        changes[name] = _put(matrix)
    return changes


def _put(matrix: Any) -> Change:
    def change(panels: Any) -> None:
        panels[:] = pack_lanes(matrix)

    return change


def fused_gate_up(served: Served, here: Program) -> dict[str, Change]:
    """gate above up in layer 0."""
    return fused_cut(served, here, ("layers.0.gate", "layers.0.up")) if _in_first(here) else {}


def fused_qkv(served: Served, here: Program) -> dict[str, Change]:
    """q above k above v in layer 0."""
    names = ("layers.0.q", "layers.0.k", "layers.0.v")
    return fused_cut(served, here, names) if _in_first(here) else {}


def _in_first(here: Program) -> bool:
    return here.layers[0] == 0 and here.layout.tp > 1


def neighbours_scale(served: Served, here: Program) -> dict[str, Change]:
    """The first block of a rank's columns of o_proj has the scales of the block before."""
    weight = weights_of(here).get("layers.0.o")
    if weight is None or weight.columns is None or not weight.columns[0]:
        return {}
    first = weight.blocks[0] if weight.blocks else weight.columns[0] // Q8_INPUTS

    def change(panels: Any) -> None:
        if panels.dtype in (np.uint8, np.int8):
            scales = panels[..., Q8_OUTPUTS * Q8_INPUTS :]
            scales[:, first] = scales[:, first - 1]

    return {"layers.0.o": change}


class NeighboursSlice(Worker):
    """TP index 1 maps as much of every matrix as it should, from where TP index 0 begins."""

    def build_program(self, served: Served, rank: int) -> Program:
        here = super().build_program(served, rank)
        if here.tp_index != 1:
            return here
        ops = (replace(op, weights=tuple(map(_from_zero, op.weights))) for op in here.ops)
        return replace(here, ops=tuple(ops))


def _from_zero(weight: Weight) -> Weight:
    def moved(span: Span) -> Span:
        return (0, span[1] - span[0])

    if weight.columns is None:
        return weight
    return replace(weight, rows=moved(weight.rows), columns=moved(weight.columns))
