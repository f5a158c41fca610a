"""What a planted bug is, and where it is shown: the words of `catalogue`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from grid import Loaded

from anyshard.launcher import RankMain
from anyshard.verify.cells import Cell
from anyshard.verify.naive import rank_body
from anyshard.worker import Worker

Scenario = Literal["cell", "pairs", "rerun", "build"]


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """A bug on one model: the cell, and the op and rank to be named, or why the model hides it.

    unseen: why `verify` shows nothing of it in this cell though it is there: its unsplit run is
    that of the same ranks.
    """

    model: str
    cell: Cell
    op: str = ""
    rank: int = 0
    hidden: str = ""
    unseen: str = ""


Plant = Callable[[Loaded, Exhibit], RankMain]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One planted bug.

    source: the public bug, as text and below github.com; or "" and "". scenario: "cell" runs the
    exhibit's cell through the engine; "pairs" too, but asks for tokens only; "rerun" runs twelve
    tokens by hand, then others from position 4 on; "build" is a process that has loaded a native
    module that was compiled wrongly.
    """

    name: str
    says: str
    source: tuple[str, str]
    plant: Plant
    exhibits: tuple[Exhibit, ...]
    scenario: Scenario = "cell"


def cut(**split: Any) -> Cell:
    """A request of 40 tokens, which is two blocks of keys, and 3 more; all logits are compared."""
    cell = Cell(axis="mixed", **{"prompt_tokens": 40, "num_tokens": 3, **split})
    return cell if "prompt_logits" in split else replace(cell, prompt_logits=cell.prompt_tokens - 1)


def shows(model: str, op: str, rank: int = 0, **split: Any) -> Exhibit:
    """The cell shows it, there."""
    return Exhibit(model=model, cell=cut(**split), op=op, rank=rank)


def unseen(reason: str, *exhibits: Exhibit) -> tuple[Exhibit, ...]:
    """Exhibits of which `verify` shows nothing, for that reason."""
    return tuple(replace(each, unseen=reason) for each in exhibits)


def hides(model: str, reason: str, **split: Any) -> Exhibit:
    """The model hides it."""
    return Exhibit(model=model, cell=cut(**split), hidden=reason)


def by(worker_type: type[Worker]) -> Plant:
    """Every rank is such a worker."""
    return lambda model, exhibit: rank_body(worker_type)


def bug(
    name: str,
    says: str,
    source: tuple[str, str],
    plant: Plant | type[Worker],
    *exhibits: Exhibit,
    scenario: Scenario = "cell",
) -> Mutant:
    """A Mutant; every rank is `plant`, if that is a worker."""
    body = by(plant) if isinstance(plant, type) else plant
    return Mutant(
        name=name, says=says, source=source, plant=body, exhibits=exhibits, scenario=scenario
    )
