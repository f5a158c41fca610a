"""The judge of `verify`: what counts as a difference, and what becomes of a cell that is lost.

Ranks are planted bugs among the tiny models; the command line is test_verify.py's.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mutants
import numpy as np
import pytest
from grid import the_model

from anyshard.comm.control import Frame
from anyshard.engine import Event
from anyshard.errors import PeerLost
from anyshard.launcher import RankGroup
from anyshard.verify import cells, check, naive
from anyshard.verify.cells import Cell, Outcome, Place, first_tokens, run_cell
from anyshard.verify.check import Checker, RequestShape
from anyshard.verify.driver import open_group
from anyshard.verify.grid import Lists, cells_of, full, parse_layouts
from anyshard.verify.naive import rank_of_any_order
from anyshard.verify.report import columns, divergence_text
from anyshard.verify.result import unlike
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


class FirstTurnedBack(Worker):
    """In a frame of several sequences the first request stands one position too early."""

    def _take(self, frame: Frame) -> None:
        super()._take(frame)
        rows = len(frame.rows)
        if len(np.unique(self.row_slot[:rows])) > 1:
            mine = np.flatnonzero(self.row_slot[:rows] == 0)
            self.positions[mine] = np.maximum(self.positions[mine] - 1, 0)


class NeighbourMoved(Worker):
    """Two ranks read the first request of a batch one position too far."""

    def _take(self, frame: Frame) -> None:
        super()._take(frame)
        slots = self.row_slot[: len(frame.rows)]
        if self.program.layout.tp == 2 and len(np.unique(slots)) > 1:
            self.positions[: len(slots)][slots == 0] += 1


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
    assert found.where == "sample on rank 0, from the same logits"
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
    assert pair.neighbours == (
        "1 of 2 neighbours differ from what each gives alone and unsplit; "
        "the first is neighbour 1, of 11 prompt tokens"
    )
    assert pair.neighbour == 1 and divergence_text(pair) == pair.neighbours


def test_a_neighbour_that_is_wrong_in_every_batch_is_held_against_itself_alone(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cell that runs it is right; the request that is compared is the last, so it is equal."""
    monkeypatch.setitem(naive.ORDERS, "written", FirstTurnedBack)
    for tp in (1, 2):
        found = checker.check(Cell(axis="batch", tp=tp, batch=3))
        assert found.verdict == "differs" and found.only_neighbours_differ
        assert found.neighbour == 1 and found.neighbours.startswith("1 of 2 neighbours differ")
    assert checker.check(Cell(axis="tp", tp=2)).verdict == "equal"


def test_tokens_of_a_neighbour_are_compared(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one is fed to no step: no logit shows it."""

    def draw(outcome: Outcome) -> Outcome:
        other = outcome.others[0]
        drawn = replace(other, tokens=(*other.tokens[:-1], other.tokens[-1] + 1))
        return replace(outcome, others=outcome.others | {0: drawn})

    altered(monkeypatch, draw)
    found = checker.check(Cell(axis="batch", tp=2, batch=2))
    assert found.verdict == "differs" and found.neighbour == 0


def test_a_neighbour_that_is_lost_when_it_runs_alone_loses_the_cell(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(group: Any, model: Any, cell: Cell, **rest: Any) -> Outcome:
        if cell.prompt_tokens == 11:
            raise PeerLost("a planted loss")
        return run_cell(group, model, cell, **rest)

    monkeypatch.setattr(check, "run_cell", run)
    found = checker.check(Cell(axis="batch", batch=4))
    assert found.verdict == "lost" and found.elements_differing == 0
    assert found.lost is not None and found.lost.startswith("in the run of neighbour 1 alone: ")


@pytest.mark.parametrize("tp", [2, 3])
def test_tokens_are_compared_where_nobody_asks_for_logits(
    tp: int, checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `chat`: no logit shows a wrong id. It is run once for every cut of the vocabulary."""
    runs: list[list[int]] = []

    def counted(group: Any, model: Any, cell: Cell, lengths: list[int], **rest: Any) -> Any:
        runs.append(lengths)
        return first_tokens(group, model, cell, lengths, **rest)

    monkeypatch.setattr(check, "first_tokens", counted)
    wide = Cell(axis="tp", tp=tp)
    assert {checker.check(replace(wide, pp=pp)).verdict for pp in (1, 2)} == {"equal"}
    assert [len(lengths) for lengths in runs] == [tp], "a prefix for every rank, and only once"
    checker._paired.clear()
    monkeypatch.setitem(naive.ORDERS, "written", mutants.LocalIds)
    found = checker.check(wide)
    assert found.verdict == "differs" and found.elements_differing == 0
    assert found.tokens_equal is False and found.neighbours == ""
    place = found.first_divergence
    assert place is not None and place.what == "pair" and place.position + 1 in runs[1]
    assert "where nobody asks for logits" in divergence_text(found)


@pytest.mark.parametrize(("prompt_tokens", "decode_tokens"), [(400, 60), (9, 2)])
def test_every_cell_runs_all_of_the_request(prompt_tokens: int, decode_tokens: int) -> None:
    """And one that runs less of it says so in its name."""
    shape = RequestShape(prompt_tokens=prompt_tokens, decode_tokens=decode_tokens)
    config = the_model(MODEL).config
    for each in (Cell(axis="base"), *cells_of(Lists(batches=(1, 3), chunks=(7, None)))):
        asked = shape.of(each, config.vocab)
        assert (asked.prompt_tokens, asked.num_tokens) == (prompt_tokens, decode_tokens + 1)
    for each in full(config):
        asked = shape.of(each, config.vocab)
        runs = (asked.prompt_tokens, asked.num_tokens - 1)
        assert (
            runs == (prompt_tokens, decode_tokens) or "({}+{} tokens)".format(*runs) in asked.name
        )


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_neighbour_with_the_same_prompt_is_another_request(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a vocabulary of one token; its answer is shorter, so its digest is another."""
    model = the_model(MODEL)
    monkeypatch.setattr(cells, "neighbour_prompt", lambda model, index: model.prompt[:30])
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


def test_a_cell_that_gave_fewer_rows_differs(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered(monkeypatch, lambda outcome: replace(outcome, logits=outcome.logits[:-1]))
    found = checker.check(Cell(axis="tp", tp=2))
    assert found.verdict == "differs" and found.max_ulp is None
    assert found.elements_differing == found.positions * found.vocab


def test_the_digest_is_of_every_row_that_is_compared(checker: Checker) -> None:
    whole = checker.unsplit(checker.asked(Cell(axis="base")))
    assert len(whole.logits) == 29 + 4
    assert whole.digest == hashlib.sha256(whole.logits.astype("<f4").tobytes()).hexdigest()


def test_the_ratio_is_the_speed_of_the_cell_over_the_unsplit_run(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(group: Any, model: Any, cell: Cell, **rest: Any) -> Outcome:
        outcome = run_cell(group, model, cell, **rest)
        speeds = {"decode_tokens_per_s": 30.0 if cell.tp == 2 else 10.0}
        return replace(outcome, prefill_tokens_per_s=7.0 * cell.tp, **speeds)

    monkeypatch.setattr(check, "run_cell", run)
    assert checker.baseline().speed_ratio == 1.0
    assert checker.check(Cell(axis="tp", tp=2)).speed_ratio == 3.0


def test_a_row_shows_the_numbers_of_its_cell(checker: Checker) -> None:
    row, table = checker.baseline(), columns(["tp2"], width=1 << 16)

    def shown(**changes: Any) -> dict[str, str]:
        cell = replace(row, cell="tp2", **changes)
        return {column.name: column.text(cell) for column in table}

    for count, text in ((1, "1"), (999_999, "999,999"), (1_234_567, "1.2e+06"), (None, "-")):
        assert shown(elements_differing=count)["differ"] == text
        assert shown(max_ulp=count)["ulp"] == text
    assert shown(decode_tokens_per_s=12.5)["tok/s"] == "12.5"
    assert shown(speed_ratio=1.25)["ratio"] == "1.25"


def test_a_layout_of_which_one_rank_holds_everything_has_nothing_to_show(checker: Checker) -> None:
    found = [
        checker.check(cell) for cell in cells_of(Lists(splits=parse_layouts("heads0+9,heads1+8")))
    ]
    assert [cell.verdict for cell in found] == ["vacuous", "equal"]
    assert found[0].witness == {"tp": 0.0} and found[1].witness["tp"] > 0.5


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


def test_the_ulp_is_the_largest_of_all_rows() -> None:
    a = np.zeros((3, 4), np.float32)
    b = a.copy()
    b.view(np.uint32)[1, 2], b.view(np.uint32)[2, 0] = 5, 1
    assert (unlike(a, b).ulp, unlike(a, b).first) == (5, (1, 2))
    with pytest.raises(ValueError, match="shorter"):
        unlike(a, b[:2])
