"""Runs the bugs of the catalogue: is each caught, and is it named where it was planted?

    for mutant in MUTANTS:
        for exhibit in mutant.exhibits:
            print(score(mutant, exhibit))

Caught: the digest (where no logits are asked for, the tokens) is not that of an unsplit run of
right ranks, or the run faults. Named: by `verify.divergence.first_divergence`, beside right ranks
too. Seen: `verify` says that the cell differs, though its unsplit run is that of ranks which have
the bug as well.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from grid import Loaded

from anyshard.capture import Capture
from anyshard.launcher import RankMain
from anyshard.ops import reference
from anyshard.ops.exact import F32
from anyshard.verify import cells
from anyshard.verify.cells import Cell, Outcome
from anyshard.verify.check import Checker, RequestShape
from anyshard.verify.divergence import Divergence, Run, cell_run, first_divergence
from anyshard.verify.driver import Driver, open_group
from anyshard.verify.naive import AlteredOps, rank_body
from anyshard.worker import Worker, rank_main
from mutants.exhibits import Exhibit, Mutant
from mutants.subjects import subject

Verdict = Literal["right", "hidden", "MISSED", "MISNAMED", "NOT HIDDEN", "NOT SEEN", "SEEN"]


@dataclass(frozen=True, kw_only=True)
class Score:
    """One row. op, rank: what was named, None where nothing was; sentence: in full.

    truth: the digest that was compared with, "" where it was not a request of the engine. seen: by
    `verify`; unseen: why it is not.
    """

    bug: str
    model: str
    cell: str
    caught: bool
    op: str | None
    rank: int | None
    verdict: Verdict
    seen: bool
    unseen: str
    hidden: str
    sentence: str
    truth: str
    seconds: float

    @property
    def as_expected(self) -> bool:
        """Whether the row is as the catalogue says."""
        return self.verdict in ("right", "hidden")


def score(mutant: Mutant, exhibit: Exhibit) -> Score:
    """Plant the bug, run the cell, ask where it parts from the unsplit run."""
    start, model, truth = time.monotonic(), subject(exhibit.model), ""
    body = mutant.plant(model, exhibit)
    if mutant.scenario == "rerun":
        caught, found = rerun(model, exhibit.cell, body)
    else:
        right = rank_body(ReferenceSampling) if mutant.scenario == "build" else rank_main
        truth = unsplit(model.name, exhibit.cell.unsplit(), right).digest
        want_logits = mutant.scenario != "pairs"
        caught, found = _through_engine(
            model, exhibit.cell, body, right=right, want_logits=want_logits
        )
    seen = mutant.scenario != "rerun" and seen_by_verify(model, exhibit.cell, body)
    named = None if found is None else (found.op, found.rank)
    verdict: Verdict
    if exhibit.hidden:
        verdict = "NOT HIDDEN" if caught or found or seen else "hidden"
    elif not caught:
        verdict = "MISSED"
    elif named != (exhibit.op, exhibit.rank):
        verdict = "MISNAMED"
    elif seen == bool(exhibit.unseen):
        verdict = "SEEN" if seen else "NOT SEEN"
    else:
        verdict = "right"
    return Score(
        bug=mutant.name,
        model=exhibit.model,
        cell=cell_words(mutant, exhibit),
        caught=caught,
        op=None if found is None else found.op,
        rank=None if found is None else found.rank,
        verdict=verdict,
        seen=seen,
        unseen=exhibit.unseen,
        hidden=exhibit.hidden,
        sentence="" if found is None else found.sentence(),
        truth=truth,
        seconds=time.monotonic() - start,
    )


class Unwitnessed(Checker):
    """Whether a cell differs does not depend on its witnesses, and they take long."""

    def _measure(self, part: Cell) -> float:
        return 1.0


def seen_by_verify(model: Loaded, cell: Cell, body: RankMain) -> bool:
    """Whether `verify` says that the cell differs, or that there is nothing to compare with."""
    request = RequestShape(prompt_tokens=cell.prompt_tokens, decode_tokens=cell.num_tokens - 1)
    group = open_group(model.served, body, forked=False)
    try:
        return Unwitnessed(group, model, request).check(cell).verdict in ("differs", "lost")
    finally:
        group.close()


def cell_words(mutant: Mutant, exhibit: Exhibit) -> str:
    """The cell as in a table."""
    more = {"pairs": ", tokens only", "rerun": ", run again shorter"}
    return exhibit.cell.name + more.get(mutant.scenario, "")


class ReferenceSampling(Worker):
    """Right where a build is wrong that differs in its sampling only: that comes from NumPy."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.kernels.module = AlteredOps(self.kernels.module, gumbel_argmax=reference.gumbel_argmax)


@cache
def unsplit(name: str, cell: Cell, body: RankMain = rank_main) -> Outcome:
    """The unsplit run of a model's request, without the bug."""
    model = subject(name)
    group = open_group(model.served, body, forked=False)
    try:
        right = cells.run_cell(group, model, cell)
    finally:
        group.close()
    assert right.fault is None, right.fault
    return right


def _through_engine(
    model: Loaded, cell: Cell, body: RankMain, *, right: RankMain, want_logits: bool
) -> tuple[bool, Divergence | None]:
    whole = unsplit(model.name, cell.unsplit(), right)
    suspects = open_group(model.served, body, forked=False)
    truths = open_group(model.served, right, forked=False)
    epochs = itertools.count(1)
    try:
        got = cells.run_cell(suspects, model, cell, epoch=next(epochs), want_logits=want_logits)
        caught = got.fault is not None or got.tokens != whole.tokens
        caught |= want_logits and got.digest != whole.digest
        suspect = cell_run(suspects, model, cell, epochs=epochs, want_logits=want_logits)
        truth = cell_run(truths, model, cell.unsplit(), epochs=epochs)
        return caught, first_divergence(model.served, suspect, truth)
    finally:
        suspects.close()
        truths.close()


def rerun(model: Loaded, cell: Cell, body: RankMain) -> tuple[bool, Divergence | None]:
    """Twelve tokens, then others from position 4 on, nine in all; then one more.

    Whether the logits differ from those of ten tokens run once, and where.
    """
    longer, shorter = model.prompt[:12], model.prompt[20:26]
    size = {"max_model_len": 64, "rows_max": 16}
    logits: dict[str, F32] = {}

    def suspect(capture: Capture | None) -> None:
        split = {"tp": cell.tp, "pp": cell.pp}
        with Driver(model.served, rank_body=body, capture=capture, **split, **size) as driver:
            driver.logits(longer)
            parts = [driver.logits(shorter[:5], start=4), driver.logits(shorter[5:], start=9)]
            driver.statuses()
        logits["suspect"] = np.concatenate(parts)

    def truth(capture: Capture | None) -> None:
        with Driver(model.served, capture=capture, **size) as driver:
            logits["truth"] = driver.logits([*longer[:4], *shorter])[4:]
            driver.statuses()

    suspect(None)
    truth(None)
    caught = logits["suspect"].tobytes() != logits["truth"].tobytes()
    runs = (Run(cell.layout(model), 0, suspect), Run(cell.unsplit().layout(model), 0, truth))
    return caught, first_divergence(model.served, *runs)
