"""A difference is told, whatever becomes of the search for its place."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any

import mutants
import numpy as np
import pytest
from models import MODELS, write_hf_model
from test_verify import SHORT, Ran

from anyshard.cli import parting
from anyshard.comm.control import Frame
from anyshard.verify import check, naive
from anyshard.verify.cells import Cell, Outcome, run_cell
from anyshard.worker import Worker

LAYOUTS = ("--layouts", "tp2,pp2", "--json")


class FailsInReplay(mutants.MissingNode):
    """Also fails as soon as anybody looks."""

    def _take(self, frame: Frame) -> None:
        assert self.plan.capture is None, "a planted failure"
        super()._take(frame)


class OnlyWhatIsReturned(Worker):
    """Two ranks hold the right logits, and give others to the front: nothing that is copied."""

    def _sample(self, sampled: Any, flags: Any, tokens: Any) -> Any:
        logits = super()._sample(sampled, flags, tokens)
        return logits if logits is None or self.program.layout.tp != 2 else logits + np.float32(1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """9 query heads, 3 KV heads, 3 layers."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return str(write_hf_model(folder, MODELS["adversarial-9-3"], seed=7, adversarial=True))


def where_of(ran: Ran) -> str:
    """Of the first cell, which differs; the second is equal all the same."""
    assert ran.code == 4
    wide, deep = ran.record["cells"]
    assert (wide["verdict"], deep["verdict"]) == ("differs", "equal")
    where = wide["where"]
    assert isinstance(where, str)
    return where


def test_a_replay_that_has_no_room_is_left_out(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(naive.ORDERS, "written", mutants.MissingNode)
    monkeypatch.setattr(parting, "read_memory", lambda: (1 << 40, 10**6))
    assert "where it parts could not be found: " in where_of(Ran(capfd, tiny, *SHORT, *LAYOUTS))
    shown = Ran(capfd, tiny, *SHORT, "--layouts", "tp2")
    assert "MB of memory are needed for it and 1.0 MB are free; run --layouts tp2" in shown.out


def test_a_replay_that_the_system_refuses_is_a_note(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(naive.ORDERS, "written", mutants.MissingNode)
    monkeypatch.setattr("anyshard.verify.divergence.tempfile.TemporaryDirectory", full_disk)
    where = where_of(Ran(capfd, tiny, *SHORT, *LAYOUTS))
    assert where.startswith("where it parts could not be found: the system refused: ")


def test_a_difference_that_repeats_and_has_no_place_is_not_said_to_be_gone(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(naive.ORDERS, "written", OnlyWhatIsReturned)
    where = where_of(Ran(capfd, tiny, *SHORT, *LAYOUTS))
    assert where.startswith("it differs again, but everything that was looked at"), where


def test_a_difference_that_is_gone_did_not_repeat(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(group: Any, model: Any, cell: Cell, **rest: Any) -> Outcome:
        outcome = run_cell(group, model, cell, **rest)
        return replace(outcome, logits=outcome.logits + (cell.tp == 2))

    monkeypatch.setattr(check, "run_cell", run)
    assert where_of(Ran(capfd, tiny, *SHORT, *LAYOUTS)) == "it did not repeat"


def test_ranks_that_are_lost_in_a_replay_are_a_note(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(naive.ORDERS, "written", FailsInReplay)
    where = where_of(Ran(capfd, tiny, *SHORT, *LAYOUTS))
    assert where.startswith("where it parts could not be found: rank ")
    assert where.endswith("a planted failure"), where
