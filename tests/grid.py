"""The invariance grid of the tests: cells, their models, their witnesses and planted bugs.

    model = the_model("adversarial-9-3")
    outcome = run_cell(model, Cell(axis="tp", tp=3))
    assert outcome.digest == baseline(model).digest
    assert witness(model, cell) > 0

What a cell and a witness are: `anyshard.verify.cells`. Cells that only place work have no order
to be naive in: they carry a planted bug, which must change the digest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import cast

import models
import msgspec
import mutants
import numpy as np
from numpy.typing import NDArray

from anyshard.checkpoint import WeightImage, open_checkpoint
from anyshard.config import Arithmetic, KvType, ModelConfig, WireType
from anyshard.launcher import RankMain, Seat
from anyshard.loading import profile_of
from anyshard.model import Program, program
from anyshard.op import Weight
from anyshard.ops.storage import Panels, panel_cut
from anyshard.request import Sampling
from anyshard.tokenizer import open_tokenizer
from anyshard.verify import cells, naive
from anyshard.verify.cells import BATCH, PROMPT_TOKENS, Axis, Cell, Model, Outcome
from anyshard.verify.driver import open_group, served
from anyshard.verify.naive import Bf16Hop, NaiveTpOfFour
from anyshard.verify.prompt import hashed_tokens, text_tokens
from anyshard.worker import RankPlan, Served, Worker, rank_main

F32 = NDArray[np.float32]
SEEDED = Sampling(temperature=0.8, seed=20_240_229)


class NaiveTpPp(NaiveTpOfFour):
    """What `verify` shows one axis at a time, both at once."""

    binder_type = Bf16Hop


#: By axis of a cell; an axis that is not here only places work.
ORDERS: dict[str, type[Worker]] = {**naive.ORDERS, "mixed": NaiveTpPp}


@dataclass(frozen=True)
class Loaded(Model):
    """A model whose weights are in this process."""

    served: Served

    @classmethod
    def of(cls, name: str, served: Served, prompt: tuple[int, ...]) -> Loaded:
        """Every cell runs `prompt`."""
        return cls(name, served.config, served.profile, prompt, served)

    @property
    def is_demo(self) -> bool:
        """The real one, whose cells take seconds."""
        return shape_of(self.name) == "demo"


INT8 = " int8"  # at the end of a model's name: in that arithmetic
KV8 = " kv8"  # after that: with keys and values in int8
W8 = " w8"  # and after that: with an int8 wire


def shape_of(name: str) -> str:
    """The name without its profile."""
    return name.removesuffix(W8).removesuffix(KV8).removesuffix(INT8)


def arithmetic_of(name: str) -> Arithmetic:
    """That of a model's name."""
    return "int8" if name.removesuffix(W8).removesuffix(KV8).endswith(INT8) else "f32"


def kv_of(name: str) -> KvType:
    """The type of keys and values that a model's name says."""
    return "int8" if name.removesuffix(W8).endswith(KV8) else "f32"


def wire_of(name: str) -> WireType:
    """The wire that a model's name says."""
    return "int8" if name.endswith(W8) else "none"


@cache
def demo(arithmetic: Arithmetic = "f32", kv: KvType = "f32", wire: WireType = "none") -> Served:
    """The demo model, packed once in a test process."""
    if kv != "f32" or wire != "none":
        packed = demo(arithmetic)
        return replace(packed, profile=profile_of(arithmetic, kv, wire))
    return served(open_checkpoint(None), arithmetic=arithmetic)


@cache
def the_model(name: str) -> Loaded:
    """`demo`, or one of tests/models.py, loaded once in a process."""
    shape, arithmetic, kv, wire = shape_of(name), arithmetic_of(name), kv_of(name), wire_of(name)
    if shape == "demo":
        tokens = text_tokens(open_tokenizer(open_checkpoint(None)), PROMPT_TOKENS)
        return Loaded.of(name, demo(arithmetic, kv, wire), tokens)
    config = models.DEEP_10 if shape == "deep-10" else models.MODELS[shape]
    adversarial = shape.startswith(("adversarial", "deep"))
    with tempfile.TemporaryDirectory() as folder:
        path = models.write_hf_model(Path(folder) / shape, config, seed=7, adversarial=adversarial)
        checkpoint = open_checkpoint(str(path))
        loaded = served(checkpoint, arithmetic=arithmetic, kv=kv, wire=wire)
    return Loaded.of(name, loaded, hashed_tokens(PROMPT_TOKENS, config.vocab, seed=0))


class ShareImage:
    """The weight image of a rank that was given nothing but its own share: NaN everywhere else.

    Also in the lanes that pad its last panel: what they hold must not matter.
    """

    def __init__(self, image: WeightImage, program: Program) -> None:
        self._image, self.directory, self.storage = image, image.directory, image.storage
        self._weights = {weight for op in program.ops for weight in op.weights}

    def panels(self, name: str) -> Panels:
        """Panels of the tensor, filled where the program says."""
        whole = self._image.panels(name)
        if self.storage[name] in ("q8_0", "int8"):
            return self._blocks(name, whole)
        share = np.empty_like(whole)
        share.view(np.uint8)[:] = 0xFF  # a NaN in every float type
        row_of = np.arange(len(whole) * 8).reshape(-1, 1, 8)
        for weight in self._mine(name):
            assert weight.columns is not None
            columns = slice(*weight.columns)
            mine = (row_of >= weight.rows[0]) & (row_of < weight.rows[1])
            share[:, columns] = np.where(mine, whole[:, columns], share[:, columns])
        return share

    def _blocks(self, name: str, whole: Panels) -> Panels:
        """Whole blocks of 16 rows: what cuts them falls between blocks, and the end is padding."""
        share = np.full_like(whole, -1 if whole.dtype == np.int8 else 0xFF)  # scales are NaN
        for weight in self._mine(name):
            columns = weight.blocks or weight.columns
            assert columns is not None
            panel_cut(share, weight.rows, columns)[:] = panel_cut(whole, weight.rows, columns)
        return share

    def vector(self, name: str) -> F32:
        """The vector, filled where the program says."""
        whole = self._image.vector(name)
        share: F32 = np.full_like(whole, np.nan)
        for weight in self._mine(name):
            share[slice(*weight.rows)] = whole[slice(*weight.rows)]
        return share

    def _mine(self, name: str) -> list[Weight]:
        return [weight for weight in self._weights if weight.name == name]


def share_only(seat: Seat, *, of_rank: Callable[[int], int] = lambda rank: rank) -> None:
    """A rank body over a ShareImage; of_rank: whose share a rank is given, its own by default."""
    state, rank_plan = seat.state, msgspec.msgpack.decode(seat.start.payload, type=RankPlan)
    assert isinstance(state, Served)
    mine = program(state.config, state.profile, rank_plan.layout, of_rank(seat.rank))
    image = cast(WeightImage, ShareImage(state.image, mine))
    rank_main(replace(seat, state=replace(state, image=image)))


def run_cell(
    model: Loaded, cell: Cell, *, rank_body: RankMain = rank_main, want_logits: bool = True
) -> Outcome:
    """`cells.run_cell` in a rank group of its own; rank_body: what its ranks run."""
    group = open_group(model.served, rank_body, forked=cell.comm in ("shm", "torch"))
    try:
        return cells.run_cell(group, model, cell, want_logits=want_logits)
    finally:
        group.close()


def weight_bytes(model: Loaded, cell: Cell) -> list[int]:
    """Of each rank of the cell, as the ledger counts them."""
    layout = cell.layout(model)
    return [
        program(
            model.config, model.profile, layout, rank, storage=model.served.image.storage
        ).weight_bytes
        for rank in range(layout.world)
    ]


@lru_cache(maxsize=8)
def _baseline(name: str, cell: Cell) -> Outcome:
    return run_cell(the_model(name), cell)


def baseline(model: Loaded, cell: Cell | None = None) -> Outcome:
    """The unsplit run of a cell's request; computed once."""
    return _baseline(model.name, (cell or Cell(axis="base")).unsplit())


# --- witnesses ----------------------------------------------------------------------------------


PLANTED: dict[Axis, type[Worker]] = {
    "comm": mutants.StaleExchange,
    "body": mutants.LostLane,
    "pages": mutants.PageReadTwice,
}


def forced_logits(
    model: Loaded, cell: Cell, tokens: Sequence[int], *, worker_type: type[Worker]
) -> F32:
    """`cells.forced_logits` in ranks of the given worker, as threads."""
    group = open_group(model.served, naive.rank_body(worker_type), forked=False)
    try:
        return cells.forced_logits(group, model, cell, tokens)
    finally:
        group.close()


@lru_cache(maxsize=8)
def _naive_unsplit(name: str, axis: Axis, cell: Cell, num_tokens: int) -> F32:
    model = the_model(name)
    if axis == "pp" and wire_of(name) == "none":  # nothing is rounded where nothing is cut
        return baseline(model, cell).logits[:num_tokens]
    tokens = baseline(model, cell).tokens[:num_tokens]
    return forced_logits(model, cell, tokens, worker_type=ORDERS[axis])


def witness(model: Loaded, cell: Cell, *, num_tokens: int | None = None) -> float:
    """Share of logits that differ between the naive cell and the naive unsplit run, 0..1.

    num_tokens: how many of the emitted rows are compared (default: all).
    """
    count = num_tokens or cell.num_tokens
    tokens = baseline(model, cell).tokens[:count]
    split = forced_logits(model, cell, tokens, worker_type=ORDERS[cell.axis])
    whole = _naive_unsplit(model.name, cell.axis, cell.unsplit(), count)
    assert split.shape == whole.shape
    return float(np.mean(split.view(np.uint32) != whole.view(np.uint32)))


def planted_is_caught(model: Loaded, cell: Cell) -> bool:
    """Whether the planted bug of a cell that only places work changes the digest.

    A request of a few tokens over three blocks is enough for that.
    """
    short = replace(
        cell, prompt_tokens=min(70, cell.prompt_tokens), num_tokens=min(3, cell.num_tokens)
    )
    bugged = run_cell(model, short, rank_body=naive.rank_body(PLANTED[cell.axis]))
    return bugged.digest != baseline(model, short).digest


# --- the cells ----------------------------------------------------------------------------------


def demo_cells(wire: WireType = "none") -> list[Cell]:
    """Item 2 of the issue, on the demo model: 9 heads, 3 KV heads, 30 layers."""
    cut = (22, 8) if wire == "none" else (23, 7)
    return [
        *(Cell(axis="tp", tp=tp) for tp in (2, 3, 4, 5, 8)),
        Cell(axis="tp", heads=(7, 2)),
        *(Cell(axis="pp", pp=pp) for pp in (2, 3, 7)),
        Cell(axis="pp", layers=cut),
        Cell(axis="mixed", tp=2, pp=2),
        *(Cell(axis="chunk", chunk=chunk) for chunk in (1, 7, 32, 300)),
        Cell(axis="threads", threads=2),
        Cell(axis="batch", batch=BATCH, place="first"),
        Cell(axis="batch", batch=BATCH, place="last"),
        Cell(axis="pages", shuffled=True, poison=True),
        Cell(axis="comm", tp=2, comm="shm"),
        Cell(axis="comm", tp=2, pp=2, comm="shm"),
        Cell(axis="comm", tp=2, comm="torch"),
        Cell(axis="comm", tp=2, pp=2, comm="torch"),
        Cell(axis="body", kernels="scalar"),
        Cell(axis="body", kernels="reference", prompt_tokens=6, num_tokens=2),
    ]


def random_cells(config: ModelConfig) -> list[Cell]:
    """Item 3: the same on a model with random weights, in the widths and depths that it has."""
    heads, deep = config.num_heads, config.num_layers
    widths = sorted({2, 3, 4, 5, 8, heads} & set(range(2, heads + 1)))
    return [
        *(Cell(axis="tp", tp=tp) for tp in widths),
        Cell(axis="tp", heads=(heads - 2, 2)),
        *(Cell(axis="pp", pp=pp) for pp in range(2, deep + 1)),
        *([Cell(axis="pp", layers=(1, deep - 1))] if deep > 2 else []),
        Cell(axis="mixed", tp=2, pp=2),
        Cell(axis="mixed", tp=3, pp=deep),
        *(Cell(axis="chunk", chunk=chunk) for chunk in (1, 7, 32, 300)),
        *(Cell(axis="threads", threads=threads) for threads in (2, 3)),
        Cell(axis="batch", batch=BATCH, place="first"),
        Cell(axis="batch", batch=BATCH, place="last"),
        Cell(axis="batch", batch=BATCH, place="middle", tp=3, chunk=7),
        Cell(axis="pages", shuffled=True, poison=True),
        Cell(axis="comm", tp=2, comm="shm"),
        Cell(axis="comm", tp=2, pp=2, comm="shm"),
        Cell(axis="comm", heads=(2, heads - 2), comm="shm"),
        Cell(axis="comm", tp=3, comm="threads"),
        Cell(axis="comm", tp=2, pp=2, comm="torch"),
        Cell(axis="comm", heads=(2, heads - 2), comm="torch"),
        Cell(axis="body", kernels="scalar", prompt_tokens=70),
        Cell(axis="body", kernels="reference", prompt_tokens=6, num_tokens=2),
    ]


def seeded(cells: Iterable[Cell]) -> list[Cell]:
    """The same cells at temperature 0.8."""
    return [replace(cell, sampling=SEEDED) for cell in cells]
