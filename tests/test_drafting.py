"""What flags of speculation come to, and what holds loading up until it is worth its while."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from gguf_files import TINY
from models import ADVERSARIAL_9_3
from test_gate import Known

from anyshard.cli.drafting import draft_figures, speculation_json, speculator_of
from anyshard.cli.flags import SpeculationFlags
from anyshard.cli.load_gate import LoadGate
from anyshard.epoch import schedule_of
from anyshard.errors import AnyshardError, OptionError
from anyshard.launcher import fork_launcher
from anyshard.layout import plan
from anyshard.speculate import FixedGate, NgramDrafter, OpenGate, Speculator, SurvivalGate
from anyshard.worker import rank_main


def speculator(**flags: Any) -> Speculator | None:
    return speculator_of(
        SpeculationFlags(**flags), TINY, None, windows=7, tokens=100, num_seqs=2, pages=None
    )


def test_drafts_gate_and_windows_are_those_that_were_asked_for() -> None:
    assert speculator(gate="none") is None
    for gate, kind in (("entropy", SurvivalGate), ("fixed:3", FixedGate), ("none", OpenGate)):
        found = speculator(speculate="ngram", gate=gate, draft_max=5)
        assert found is not None and type(found.gate) is kind
        assert (found.most, found.windows) == (5, 7)
        assert isinstance(found.drafter, NgramDrafter) and draft_figures(found) is None
        if isinstance(found.gate, SurvivalGate):
            assert found.gate.windows == 7
        if isinstance(found.gate, FixedGate):
            assert found.gate.most == 3


def test_frames_follow_each_other_where_there_are_stages_and_as_many_as_asked_for() -> None:
    def windows(*, pp: int, micro_batches: int | None = None, **flags: Any) -> int:
        schedule = schedule_of(
            "continuous", plan(ADVERSARIAL_9_3, pp=pp, leaf=32), micro_batches=micro_batches
        )
        return SpeculationFlags(**({"speculate": "ngram"} | flags)).windows(schedule)

    assert (windows(pp=1), windows(pp=2), windows(pp=2, speculate="off")) == (1, 16, 1)
    assert [windows(pp=2, draft_windows=number) for number in (1, 4, 20)] == [1, 4, 20]
    assert windows(pp=1, draft_windows=3) == 3
    few = windows(pp=2, micro_batches=20)
    assert 1 < few < 16 and windows(pp=2, micro_batches=20, draft_windows=few) == few
    with pytest.raises(OptionError, match=f"beside {32 - few} frames of the schedule {few} are"):
        windows(pp=2, micro_batches=20, draft_windows=few + 1)


def test_bytes_of_a_token_are_those_of_all_ranks_over_all_tokens() -> None:
    found = Speculator(Known(), OpenGate(), most=4)
    found.begin(1, [])
    found.fill({1: 20}, rows=4, now_s=0.0)
    found.came_out(1, [0, 1, 2, 9], now_s=0.0, is_over=False)
    found.came_out(1, [5], now_s=0.0, is_over=False)
    ranks = [{"hop": 30, "sum": 10}, {"hop": 20}]
    views = [SimpleNamespace(wire_bytes=each) for each in ranks]
    engine: Any = SimpleNamespace(speculator=found, control=SimpleNamespace(statuses=lambda: views))
    nothing: Any = SimpleNamespace(speculator=None)
    told = speculation_json(engine)["speculation"]
    assert told["wire_bytes_per_token"] == 60 // 5 and "draft_model" not in told
    assert speculation_json(nothing) == {}


# --- loading -------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_launchers_load_once_the_gate_is_open_and_not_when_the_front_has_gone() -> None:
    for opens in (True, False):
        gate = LoadGate()
        groups = [
            fork_launcher(gate.before(lambda progress: (None, b"loaded")), rank_main)
            for _ in range(2)
        ]
        try:
            if opens:
                gate.open()
                assert [group.wait_loaded() for group in groups] == [b"loaded"] * 2
            gate.close()
            for group in groups if not opens else ():
                with pytest.raises(AnyshardError, match="the front has gone"):
                    group.wait_loaded()
        finally:
            for group in groups:
                group.close()
