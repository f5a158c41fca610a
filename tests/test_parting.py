"""A difference is told, whatever becomes of the search for its place."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mutants
import numpy as np
import pytest
from grid import the_model
from models import MODELS, write_hf_model
from test_verify import SHORT, Ran

from anyshard.cli import parting
from anyshard.comm.control import Frame
from anyshard.verify import check, naive
from anyshard.verify.cells import Cell, Outcome, run_cell
from anyshard.verify.scratch import scratch_folder
from anyshard.worker import Worker

LAYOUTS = ("--layouts", "tp2,pp2", "--json")


class FailsInReplay(mutants.MissingNode):
    """Also fails as soon as anybody looks."""

    def _take(self, frame: Frame) -> None:
        assert self.plan.capture is None, "a planted failure"
        super()._take(frame)


class OnlyWhatIsReturned(Worker):
    """Two ranks hold the right logits, and give others to the front: nothing that is copied."""

    def _sample(self, flags: list[int]) -> Any:
        logits = super()._sample(flags)
        return logits if self.program.layout.tp != 2 else [row + np.float32(1) for row in logits]


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


@pytest.mark.parametrize(
    "profile",
    [
        ("--quantization", "int8"),
        ("--kv-cache-dtype", "int8"),
        ("--quantization", "int8", "--kv-cache-dtype", "int8"),
    ],
)
def test_a_place_is_looked_for_in_the_profile_that_was_run(
    tiny: str,
    profile: tuple[str, ...],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(naive.ORDERS, "written", mutants.MissingNode)
    where = where_of(Ran(capfd, tiny, *SHORT, *LAYOUTS, *profile))
    assert where.startswith("layers.0.reduce_o on rank 0 (tp 0, stage 0)"), where


def test_a_replay_that_the_system_refuses_is_a_note(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(naive.ORDERS, "written", mutants.MissingNode)
    monkeypatch.setattr("anyshard.verify.divergence.scratch_folder", full_disk)
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


def test_weights_that_are_packed_are_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parting, "_need", lambda *_: SimpleNamespace(total=100, weights=40))
    model, cell = the_model("adversarial-9-3"), Cell(axis="tp", tp=2, prompt_tokens=30)
    opened: Any = None
    first, again = (
        parting.replay_bytes(opened, model, cell, packed=packed) for packed in (False, True)
    )
    assert first - again == 40


def test_what_a_killed_run_has_left_is_swept_and_nothing_else(
    tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os, signal\nfrom anyshard.verify.scratch import scratch_folder\n"
        "with scratch_folder() as folder:\n"
        "    (folder / '0.1.npz').write_bytes(b'x')\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    killed = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    (tmp_path / "anyshard-capture-new").mkdir()
    (tmp_path / "anyshard-captured").write_bytes(b"x")
    (tmp_path / "anyshard-capture-file").write_bytes(b"x")
    (tmp_path / "anyshard-capture-link").symlink_to(tmp_path)
    with scratch_folder() as mine:
        (mine / "0.1.npz").write_bytes(b"x")
        kept = {path for path in tmp_path.iterdir() if path != left}
        assert Ran(capfd, tiny, *SHORT, "--layouts", "pp2").code == 0
        assert set(tmp_path.iterdir()) == kept and list(mine.iterdir())
    assert not mine.exists()
