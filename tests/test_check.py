"""The judge of `verify`: what counts as a difference, and what becomes of a cell that is lost.

Ranks are planted bugs among the tiny models; the command line is test_verify.py's.
"""

from __future__ import annotations

import os
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from grid import the_model

from anyshard.comm.control import Frame
from anyshard.engine import Event
from anyshard.launcher import RankGroup
from anyshard.verify import cells, check, naive
from anyshard.verify.cells import Cell, Outcome, Place, run_cell
from anyshard.verify.check import Checker, RequestShape, unlike
from anyshard.verify.driver import open_group
from anyshard.verify.naive import rank_of_any_order
from anyshard.verify.report import divergence_text
from anyshard.worker import Worker

SHAPE = RequestShape(prompt_tokens=30, decode_tokens=3)
MODEL = "adversarial-9-3"


class FailsAtTwo(Worker):
    """A rank of two has a bug that is no wrong number."""

    def _take(self, frame: Frame) -> None:
        assert self.program.layout.tp != 2, "a planted failure"
        super()._take(frame)


class KilledAtTwo(Worker):
    """A rank of two is killed by the system."""

    def _take(self, frame: Frame) -> None:
        if self.program.layout.tp == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._take(frame)


class StoppedAtTwo(Worker):
    """A rank of two stops, as by a debugger."""

    def _take(self, frame: Frame) -> None:
        if self.program.layout.tp == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        super()._take(frame)


class NeighbourMoved(Worker):
    """Two ranks read the first request of a batch one position too far."""

    def _take(self, frame: Frame) -> None:
        super()._take(frame)
        rows = len(frame.rows)
        if self.program.layout.tp == 2:
            self.positions[:rows][self.row_slot[:rows] == 0] += 1


@pytest.fixture
def checker() -> Iterator[Checker]:
    """Ranks are threads."""
    yield from _checker(forked=False)


@pytest.fixture
def forked() -> Iterator[Checker]:
    """Ranks are processes; plant before."""
    yield from _checker(forked=True)


def _checker(*, forked: bool) -> Iterator[Checker]:
    model = the_model(MODEL)
    group: RankGroup = open_group(model.served, rank_of_any_order, forked=forked)
    try:
        yield Checker(group, model, SHAPE)
    finally:
        group.close()


def test_a_lost_cell_is_a_row_and_the_next_one_runs(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(naive.ORDERS, "written", FailsAtTwo)
    lost, equal = checker.check(Cell(axis="tp", tp=2)), checker.check(Cell(axis="tp", tp=3))
    assert (lost.verdict, equal.verdict) == ("lost", "equal")
    assert lost.lost is not None and "a planted failure" in lost.lost
    assert lost.elements_differing is None and lost.tokens_equal is None and not lost.digest
    assert divergence_text(lost).startswith("ranks were lost: rank ")
    assert equal.lost is None and divergence_text(equal) == ""


@pytest.mark.ranks
def test_a_killed_rank_is_named_and_the_next_cell_runs(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setitem(naive.ORDERS, "written", KilledAtTwo)
    checker: Checker = request.getfixturevalue("forked")
    lost, equal = checker.check(Cell(axis="tp", tp=2)), checker.check(Cell(axis="tp", tp=3))
    assert (lost.verdict, equal.verdict) == ("lost", "equal")
    assert lost.lost is not None and "was killed by signal 9 (SIGKILL)" in lost.lost


@pytest.mark.ranks
def test_a_stopped_rank_is_lost_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(naive.ORDERS, "written", StoppedAtTwo)
    model = the_model(MODEL)
    group = open_group(model.served, rank_of_any_order, forked=True, deadline_s=1.0)
    try:
        checker = Checker(group, model, SHAPE, deadline_s=1.0)
        checker.baseline()
        start = time.monotonic()
        lost = checker.check(Cell(axis="tp", tp=2))
        waited_s = time.monotonic() - start
        equal = checker.check(Cell(axis="tp", tp=3))
    finally:
        group.close()
    assert (lost.verdict, equal.verdict) == ("lost", "equal"), lost.lost
    assert waited_s < 15, "the default is 30"


@pytest.mark.ranks
def test_once_the_launcher_is_gone_every_cell_says_so(forked: Checker) -> None:
    assert forked.check(Cell(axis="tp", tp=3)).verdict == "equal"
    pid = getattr(forked.group, "pid")  # noqa: B009  a forked group has one
    os.kill(pid, signal.SIGKILL)
    for tp in (2, 4):
        lost = forked.check(Cell(axis="tp", tp=tp))
        assert lost.verdict == "lost" and "launcher was killed by signal 9" in str(lost.lost)


def test_a_witness_that_is_lost_leaves_what_was_compared(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(naive.ORDERS, "tp", FailsAtTwo)
    found = checker.check(Cell(axis="mixed", tp=2, pp=2))
    assert found.verdict == "lost" and found.elements_differing == 0 and found.tokens_equal
    assert found.lost is not None and found.lost.startswith("in its witness along tp: rank ")
    assert set(found.witness) == {"pp"} and found.digest == checker.baseline().digest


Change = Callable[[Outcome], Outcome]


def altered(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """What cells of two ranks come to is changed on its way to the judge."""

    def run(group: Any, model: Any, cell: Cell, **rest: Any) -> Outcome:
        outcome = run_cell(group, model, cell, **rest)
        return change(outcome) if cell.tp == 2 else outcome

    monkeypatch.setattr(check, "run_cell", run)


@pytest.mark.parametrize("index", [1, 3])
def test_another_token_of_equal_logits_has_a_place(
    index: int, checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token is fed to no step: no logit shows it."""

    def draw(outcome: Outcome) -> Outcome:
        tokens = list(outcome.tokens)
        tokens[index] += 1
        return replace(outcome, tokens=tuple(tokens))

    altered(monkeypatch, draw)
    found = checker.check(Cell(axis="tp", tp=2))
    assert found.verdict == "differs" and found.elements_differing == 0
    place = found.first_divergence
    assert place is not None and place.what == "token" and place.position == 29 + index
    assert int(place.cell) == place.token_id == int(place.unsplit) + 1
    assert place.where == "sample on rank 0, from the same logits"
    assert f"position {29 + index}: token {place.unsplit} became {place.cell}" in divergence_text(
        found
    )


def test_a_logit_that_differs_before_the_token_comes_first(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(outcome: Outcome) -> Outcome:
        logits = outcome.logits.copy()
        logits[29 + 2, 5] += 1
        tokens = (*outcome.tokens[:2], outcome.tokens[2] + 1, outcome.tokens[3])
        return replace(outcome, tokens=tokens, logits=logits)

    altered(monkeypatch, draw)
    place = checker.check(Cell(axis="tp", tp=2)).first_divergence
    assert place is not None
    assert (place.what, place.position, place.token_id) == ("logit", 31, 5)


def test_neighbours_are_compared_too(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(naive.ORDERS, "written", NeighbourMoved)
    single, pair, triple = (checker.check(Cell(axis="batch", tp=tp, batch=3)) for tp in (1, 2, 3))
    assert (single.verdict, triple.verdict) == ("equal", "equal") and not triple.neighbours
    assert pair.verdict == "differs" and pair.elements_differing == 0 and pair.tokens_equal
    assert pair.neighbours == "1 of 2 neighbours differ from those of tp1 last of 3"
    assert divergence_text(pair) == pair.neighbours


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_neighbour_with_the_same_prompt_is_another_request(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a vocabulary of one token; its answer is shorter, so its digest is another."""
    model = the_model(MODEL)
    monkeypatch.setattr(
        cells, "neighbours", lambda model, count: [model.prompt[:30], model.prompt[:30]][:count]
    )
    group = open_group(model.served, rank_of_any_order, forked=False)
    try:
        checker = Checker(group, model, SHAPE)
        found = checker.check(Cell(axis="batch", batch=3, place=place))
        outcome = run_cell(group, model, checker.asked(Cell(axis="batch", batch=3)), epoch=99)
    finally:
        group.close()
    assert found.verdict == "equal" and found.elements_differing == 0, divergence_text(found)
    assert found.digest == checker.baseline().digest
    assert len(outcome.others) == 2 and len(set(outcome.others.values())) == 2


def test_rows_of_neighbours_are_not_kept(checker: Checker) -> None:
    kept: list[int] = []

    class Counted(cells._Collected):
        def add(self, event: Event) -> None:
            super().add(event)
            if self.logits:
                kept.append(id(self))

    cell = checker.asked(Cell(axis="batch", batch=5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "_Collected", Counted)
        outcome = run_cell(checker.group, checker.model, cell, epoch=next(checker.epochs))
    assert len(outcome.others) == 4 and len(outcome.logits) == 33
    assert len(set(kept)) == 1, "only the rows that are compared"


def test_unlike_counts_in_little_memory() -> None:
    a = np.random.default_rng(3).standard_normal((64, 20_000), np.float32)
    b = np.nextafter(a, np.float32(9), dtype=np.float32)
    tracemalloc.start()
    try:
        found = unlike(a, b)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found.count, found.ulp, found.first) == (a.size, 1, (0, 0))
    assert peak < a.nbytes / 4, f"{peak} of {a.nbytes}"


def test_unlike_finds_what_is_there() -> None:
    a = np.zeros((3, 4), np.float32)
    assert (unlike(a, a).count, unlike(a, a).first) == (0, None)
    b = a.copy()
    b[1, 2], b[2, 0] = -0.0, np.nextafter(np.float32(0), np.float32(1))
    found = unlike(a, b)
    assert (found.count, found.first, found.ulp) == (2, (1, 2), 1)
