"""Which cells are run: the named grids, and the products that a user writes.

Pure; a cell that a model cannot take is refused (or, in a named grid, never made) before a rank
exists. What cannot run on this machine is set apart with the reason.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Literal

from anyshard.config import ModelConfig, WireType
from anyshard.errors import LayoutError, OptionError
from anyshard.layout import KvShard, wire_boundaries
from anyshard.ops import KernelChoice, available_bodies
from anyshard.request import Sampling
from anyshard.stripes import STRIPES
from anyshard.verify.cells import BATCH, WHOLE, Axis, Cell, Model

__all__ = [
    "GridName",
    "Lists",
    "Split",
    "cells_of",
    "check_layouts",
    "full",
    "parse_layouts",
    "quick",
    "runnable",
    "sharded",
    "telling",
]

GridName = Literal["quick", "full"]
MOST_CELLS = 1000
SEEDED = Sampling(temperature=0.8, seed=20_240_229)
SLOW_BODY_TOKENS = (6, 2)  # prompt and tokens of a reference body
SPLIT = re.compile(
    r"(?=.)(?:tp(?P<tp>[0-9]{1,5})|heads(?P<heads>[0-9]{1,5}(?:\+[0-9]{1,5})*))?"
    r"(?:pp(?P<pp>[0-9]{1,5})|layers(?P<layers>[0-9]{1,5}(?:\+[0-9]{1,5})*))?"
    r"(?P<seq>(?<=[0-9])seq)?"
)
SWAPPED = re.compile(r"((?:pp|layers)[0-9+]+)((?:tp|heads)[0-9+]+)")


@dataclass(frozen=True, kw_only=True)
class Split:
    """How one cell cuts the model; heads and layers stand for tp and pp where they are given."""

    tp: int = 1
    pp: int = 1
    heads: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None
    kv_shard: KvShard = "heads"


def parse_layouts(text: str) -> tuple[Split, ...]:
    """`tp2,pp3,tp3pp2,heads7+2,layers22+8` as splits; `tp1` is the unsplit model again, and of
    `tp3pp2seq` the ranks of a stage split the sequence.

    Raises: OptionError naming the part that is none.
    """
    return tuple(_parse_split(part.strip()) for part in text.split(","))


def _parse_split(text: str) -> Split:
    found = SPLIT.fullmatch(text)
    if found is None:
        turned = SWAPPED.sub(r"\2\1", text)
        if turned != text and SPLIT.fullmatch(turned):
            raise OptionError(f"--layouts has {text[:40]!r}; tp or heads come first: {turned[:40]}")
        raise OptionError(
            f"--layouts has {text[:40]!r}; a layout is tp2, pp3, tp3pp2, or a cut of your own as "
            "heads7+2, layers22+8, heads7+2pp3; seq at its end splits keys by the sequence; commas "
            "stand between layouts"
        )
    tp, pp = int(found["tp"] or 1), int(found["pp"] or 1)
    if not (tp and pp):
        raise OptionError(f"--layouts has {text[:40]!r}; counts begin at 1")
    return Split(
        tp=tp,
        pp=pp,
        heads=_counts(found["heads"]),
        layers=_counts(found["layers"]),
        kv_shard="sequence" if found["seq"] else "heads",
    )


def sharded(splits: Iterable[Split], kv_shard: str | None) -> tuple[Split, ...]:
    """The same as --kv-shard has them: `sequence` is all by the sequence; where there is one rank,
    nothing is split.

    Raises: OptionError for `heads` beside a layout that says otherwise.
    """
    if kv_shard == "sequence":
        return tuple(replace(split, kv_shard="sequence") for split in splits)
    found = tuple(splits)
    if kv_shard == "heads" and any(split.kv_shard == "sequence" for split in found):
        raise OptionError("--kv-shard heads contradicts a layout that ends in seq; drop one")
    return found


def _counts(text: str | None) -> tuple[int, ...] | None:
    return None if text is None else tuple(int(part) for part in text.split("+"))


@dataclass(frozen=True, kw_only=True)
class Lists:
    """What a user asks to be crossed. chunks: None is the whole prompt in one."""

    splits: tuple[Split, ...] = (Split(),)
    batches: tuple[int, ...] = (1,)
    chunks: tuple[int | None, ...] = (None,)
    threads: tuple[int, ...] = (1,)
    kernels: tuple[KernelChoice, ...] = ("auto",)


def cells_of(lists: Lists) -> list[Cell]:
    """Every combination. Raises: OptionError if they are more than a thousand."""
    axes = (lists.splits, lists.kernels, lists.threads, lists.chunks, lists.batches)
    num_cells = prod(len(axis) for axis in axes)
    if num_cells > MOST_CELLS:
        raise OptionError(
            f"these lists make {num_cells} cells; at most {MOST_CELLS} are run at once: shorten one"
        )
    return [
        _cell(split, kernels=kernels, threads=threads, chunk=chunk or WHOLE, batch=batch)
        for split, kernels, threads, chunk, batch in product(
            lists.splits, lists.kernels, lists.threads, lists.chunks, lists.batches
        )
    ]


def _cell(split: Split, **rest: object) -> Cell:
    cell = Cell(
        axis="base",
        tp=split.tp,
        pp=split.pp,
        heads=split.heads,
        layers=split.layers,
        kv_shard=split.kv_shard,
        **rest,  # type: ignore[arg-type]
    )
    return replace(cell, axis=_main_axis(cell))


def _main_axis(cell: Cell) -> Axis:
    """What the cell is chiefly there for."""
    wide, deep = cell.tp > 1 or cell.heads is not None, cell.pp > 1 or cell.layers is not None
    if wide and deep:
        return "mixed"
    axes: dict[Axis, bool] = {
        "tp": wide,
        "pp": deep,
        "chunk": cell.chunk != WHOLE,
        "batch": cell.batch > 1,
        "threads": cell.threads > 1,
        "pages": cell.shuffled or cell.poison,
        "body": cell.kernels != "auto",
    }
    return next((axis for axis, there in axes.items() if there), "base")


def _cuts(config: ModelConfig, wire: WireType) -> tuple[int, ...]:
    """Layers behind which a stage may end."""
    return (
        tuple(range(1, config.num_layers))
        if wire == "none"
        else wire_boundaries(wire, config.num_layers)
    )


def quick(config: ModelConfig, wire: WireType = "none") -> list[Cell]:
    """Widths to 4, depths to 3, and one or two cells of every other axis."""
    heads, deep = config.num_heads, 1 + len(_cuts(config, wire))
    splits = [Split(tp=tp) for tp in (2, 3, 4) if tp <= heads]
    splits += [Split(heads=(heads - 2, 2))] if heads > 4 else []
    splits += [Split(pp=pp) for pp in (2, 3) if pp <= deep]
    splits += [Split(tp=2, pp=2)] if heads > 1 and deep > 1 else []
    splits += [Split(tp=tp, kv_shard="sequence") for tp in (2, 3) if tp <= heads]
    return [
        *(_cell(split) for split in splits),
        *(_cell(Split(), chunk=chunk) for chunk in (7, 32)),
        _cell(Split(), threads=2),
        _cell(Split(), batch=BATCH),
        *([_cell(Split(tp=2), chunk=32, batch=BATCH)] if heads > 1 else []),
        _cell(Split(), shuffled=True, poison=True),
        _cell(Split(), kernels="scalar", prompt_tokens=32, num_tokens=3, is_short=True),
    ]


def full(config: ModelConfig, wire: WireType = "none") -> list[Cell]:
    """At least sixty cells where the model has the heads and layers: every axis, and crossings.

    No cell twice, however small the model is. Held by: test_verify.py.
    """
    heads, layers, cuts = config.num_heads, config.num_layers, _cuts(config, wire)
    deep = 1 + len(cuts)
    widths = [tp for tp in sorted({2, 3, 4, 5, 8, heads}) if 1 < tp <= min(heads, 16)]
    depths = [pp for pp in (2, 3, 7) if pp <= deep]
    mixed = [(tp, pp) for tp, pp in ((2, 2), (3, 2), (2, 3)) if tp <= heads and pp <= deep]
    splits = [Split(tp=tp) for tp in widths]
    splits += [Split(heads=cut) for cut in ((heads - 2, 2), (1, heads - 1)) if heads > 4]
    splits += [Split(pp=pp) for pp in depths]
    ends = (cuts[-1], cuts[0]) if deep > 2 else ()
    splits += [Split(layers=(cut, layers - cut)) for cut in ends]
    splits += [Split(tp=tp, pp=pp) for tp, pp in mixed]
    sequence = [
        Split(tp=tp, pp=pp, kv_shard="sequence")
        for tp, pp in (*((tp, 1) for tp in widths if tp <= STRIPES), *mixed)
    ]
    crossed = [split for split in splits if split in (Split(tp=2), Split(tp=3), Split(pp=2))]
    crossed += [Split(tp=2, pp=2)] if (2, 2) in mixed else []
    slow_prompt, slow_tokens = SLOW_BODY_TOKENS
    single = Split()
    pairs = (single, Split(tp=2)) if heads > 1 else (single,)
    seeded = [*crossed, *(Split(tp=tp) for tp in widths[-1:] if Split(tp=tp) not in crossed)]
    return [
        *(_cell(split) for split in (*splits, *sequence)),
        *(_cell(split, chunk=32, batch=BATCH) for split in sequence[:2]),
        *(_cell(single, chunk=chunk) for chunk in (1, 7, 32, 100, 256)),
        *(_cell(single, threads=threads) for threads in (2, 3)),
        _cell(single, batch=2),
        *(_cell(single, batch=BATCH, place=place) for place in ("first", "middle", "last")),
        *(_cell(split, chunk=chunk) for split in crossed for chunk in (7, 32)),
        *(_cell(split, batch=BATCH) for split in crossed),
        *(_cell(split, threads=2) for split in crossed),
        *(_cell(split, threads=2, chunk=32, batch=BATCH) for split in crossed),
        *(_cell(split, shuffled=True, poison=True) for split in (single, *crossed, *sequence[:1])),
        *(_cell(split, sampling=SEEDED) for split in seeded),
        _cell(single, chunk=32, sampling=SEEDED),
        _cell(single, batch=BATCH, sampling=SEEDED),
        *(_cell(split, comm="torch") for split in (*crossed, *sequence[:1])),
        *(
            _cell(split, kernels=body, prompt_tokens=64, num_tokens=3, is_short=True)
            for split in pairs
            for body in ("scalar", "avx2", "vnni")
        ),
        *(
            _cell(
                split,
                kernels="reference",
                prompt_tokens=slow_prompt,
                num_tokens=slow_tokens,
                is_short=True,
            )
            for split in pairs
        ),
    ]


def check_layouts(cells: Iterable[Cell], model: Model) -> None:
    """Raises: LayoutError if the model cannot take a cut: what was asked, and what is possible."""
    for cell in cells:
        try:
            cell.layout(model)
        except LayoutError as error:
            raise LayoutError(f"layout {cell.split[:40]}: {error}") from None


def runnable(
    cells: Iterable[Cell], *, forked: bool
) -> tuple[list[Cell], tuple[tuple[str, str], ...]]:
    """Cells of a named grid that run on this machine; names of the others, each with the reason."""
    have = available_bodies()
    reasons = [(cell, _cannot_run(cell, have, forked=forked)) for cell in cells]
    return (
        [cell for cell, reason in reasons if reason is None],
        tuple((cell.name, reason) for cell, reason in reasons if reason is not None),
    )


def telling(cells: Iterable[Cell]) -> tuple[list[Cell], tuple[tuple[str, str], ...]]:
    """Cells of lists without those that only name the body that the unsplit run has anyway."""
    have = available_bodies()
    kept, left_out = list[Cell](), list[tuple[str, str]]()
    for cell in cells:
        is_twin = cell.kernels == have[0] and replace(cell, kernels="auto") == Cell(axis=cell.axis)
        if is_twin:
            reason = f"{cell.kernels} is what auto takes here, so it is the unsplit run itself"
            left_out.append((cell.name, reason))
        else:
            kept.append(cell)
    return kept, tuple(left_out)


def _cannot_run(cell: Cell, have: Sequence[str], *, forked: bool) -> str | None:
    if cell.comm == "torch":
        if not forked:
            return "torch joins processes, and --in-process has none"
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed"
    if cell.kernels != "auto" and cell.kernels not in have:
        return f"no {cell.kernels} body here"
    if cell.kernels == have[0]:
        return f"{cell.kernels} is what auto takes here"
    return None
