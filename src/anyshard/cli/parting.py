"""What cells of `verify` take of this host, and where a cell that differs parts.

The replay of `anyshard.verify.divergence` needs the weights once more, in this process. Whatever
keeps it from running is a sentence of the cell's row: the difference itself is found by then, and
must be told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from anyshard.cli.memory import memory_need
from anyshard.errors import LayoutError
from anyshard.host import read_memory, size_text

if TYPE_CHECKING:
    from anyshard.cli.memory import MemoryNeed
    from anyshard.cli.running import Opened
    from anyshard.launcher import RankGroup
    from anyshard.verify.cells import Cell, Model
    from anyshard.verify.check import RequestShape
    from anyshard.verify.result import CellResult
    from anyshard.worker import Served

__all__ = ["Parting", "admit_cells", "replay_bytes"]

_UNKNOWN: Final = "where it parts could not be found"


def _need(opened: Opened, model: Model, cell: Cell) -> MemoryNeed:
    """Of a cell as it is run, besides the logits that the front keeps."""
    from anyshard.model import program

    layout = cell.layout(model)
    return memory_need(
        opened.checkpoint,
        tuple(program(model.config, model.profile, layout, rank) for rank in range(layout.world)),
        tokens=cell.tokens_max,
        num_seqs=cell.batch,
        chunk=cell.chunk,
        comm=cell.comm,
        prompt_logits=cell.prompt_logits,
    )


def admit_cells(opened: Opened, model: Model, request: RequestShape, cells: list[Cell]) -> None:
    """Raises: LayoutError for the first cell that this host has too little memory for.

    The logits of every unsplit run stay, a cell's are held twice while they are gathered.
    Held by: test_verify.py.
    """
    if opened.free is None:
        return
    row_bytes, known = 4 * model.config.vocab, set()
    asked = [request.of(cell, model.config.vocab) for cell in cells]
    kept = row_bytes * sum(each.rows_compared for each in {each.unsplit() for each in asked})
    for cell in asked:
        if (cell.split, cell.batch, cell.chunk, cell.rows_compared) in known:
            continue
        known.add((cell.split, cell.batch, cell.chunk, cell.rows_compared))
        need = _need(opened, model, cell).total + kept + 2 * row_bytes * cell.rows_compared
        if need > opened.free:
            raise LayoutError(
                f"cell {cell.name}: {size_text(need)} of memory are needed and "
                f"{size_text(opened.free)} are free; choose other cells with --layouts and "
                "--batch, lower --prompt-tokens, or end other programs"
            )


def replay_bytes(opened: Opened, model: Model, cell: Cell, *, packed: bool) -> int:
    """What the replay of a cell as it is run takes besides what is loaded already.

    That is the weights once more unless they are `packed`, the ranks of one run, and every residual
    and logit that both runs copy: in a file (which may be in memory too) and read from it.
    """
    config, layout, need = model.config, cell.layout(model), _need(opened, model, cell)
    positions = cell.prompt_tokens + cell.num_tokens
    residuals = layout.tp * (config.num_layers + layout.pp) + config.num_layers + 1
    copied = 4 * positions * residuals * config.hidden
    copied += 4 * cell.rows_compared * config.vocab * 4  # shards and all, of both
    return need.total - (need.weights if packed else 0) + 2 * copied


class Parting:
    """Answers where cells part, with one image in this process, packed for the first of them.

    epochs: numbers that are left for runs of `group`.
    """

    def __init__(
        self, opened: Opened, group: RankGroup, model: Model, *, epochs: Iterator[int]
    ) -> None:
        self._opened, self._group, self._model, self._epochs = opened, group, model, epochs
        self._served: Served | None = None

    def where(self, cell: Cell, result: CellResult) -> str:
        """Op, rank, place and both values; or why they are not known. Never raises an Exception.

        Of a cell that differs: of its request, or where that is equal, of the first neighbour that
        is not; where only tokens differ that pairs decide, of the prefix that shows it.

        Held by: test_parting.py, test_verify.py.
        """
        from anyshard.verify.check import why

        try:
            short = self._short_of(cell)
            return f"{_UNKNOWN}: {short}" if short else self._find(cell, result)
        except Exception as error:  # noqa: BLE001  a difference is told, whatever fails here
            return f"{_UNKNOWN}: {why(error).splitlines()[0]}"

    def _short_of(self, cell: Cell) -> str:
        """What is short of memory, or nothing."""
        memory = read_memory()
        need = replay_bytes(self._opened, self._model, cell, packed=self._served is not None)
        if memory is None or need <= memory[1]:
            return ""
        return (
            f"{size_text(need)} of memory are needed for it and {size_text(memory[1])} are free; "
            f"run --layouts {cell.split} alone, with a lower --prompt-tokens"
        )

    def _find(self, cell: Cell, result: CellResult) -> str:
        from anyshard.verify.divergence import cell_divergence
        from anyshard.verify.driver import served

        if self._served is None:
            profile = self._opened.profile
            self._served = served(
                self._opened.checkpoint,
                arithmetic=profile.arithmetic,
                kv=profile.kv,
                wire=profile.wire,
            )
        first = result.first_divergence
        is_pair = first is not None and first.what == "pair"
        if first is not None and is_pair:  # the wrong token must be fed back, to be seen
            length = first.position + 1
            cell = replace(cell, batch=1, prompt_tokens=length, num_tokens=2, prompt_logits=0)
        parted = cell_divergence(
            self._served,
            self._group,
            self._model,
            cell,
            epochs=self._epochs,
            neighbour=result.neighbour if result.only_neighbours_differ else None,
            want_logits=not is_pair,
            deadline_s=self._opened.flags.deadline,
        )
        return parted.sentence()
