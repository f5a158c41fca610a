"""What a speculator asks of drafter and gate, what it tells them, and what it counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from test_gate import Known

from anyshard.speculate import Costs, Draft, FixedGate, OpenGate, Speculator, predicted_s


class Halves(OpenGate):
    """Each draft is right with chance one half; keeps what it is asked and told."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, float]] = []
        self.certain: list[int] = []
        self.gains: list[tuple[str, float]] = []
        self.tokens: list[int] = []

    def survival(
        self, drafts: Sequence[Draft], *, depth: int, before: float, **named: Any
    ) -> list[float]:
        self.asked.append((depth, before))
        return [before / 2 ** (1 + place) for place in range(len(drafts))]

    def count(self, chances: Sequence[float], costs: Costs, *, certain: int) -> int:
        self.certain.append(certain)
        return len(chances)

    def round_over(self, source: str, gain: float) -> None:
        self.gains.append((source, round(gain, 6)))

    def passed(self, tokens: int) -> None:
        self.tokens.append(tokens)


AHEAD: Any = {"rows": 2, "now_s": 0.0, "are_ahead": True}


def test_drafts_are_asked_for_behind_those_that_are_under_way_and_their_chance() -> None:
    gate = Halves()
    speculator = Speculator(Known(), gate, most=2, windows=4)
    speculator.begin(1, [])
    speculator.fill({1: 20, 5: 20}, rows=2, now_s=0.0)
    assert gate.certain == [2], "5, which has not begun, has its row as well"
    speculator.fill({1: 18}, **AHEAD)
    speculator.fill({1: 16}, **AHEAD)
    speculator.came_out(1, [0], now_s=0.0, is_over=False)
    assert speculator.fill({1: 15}, **AHEAD) == {1: (6, 7)}
    assert gate.asked == [(0, 1.0), (2, 1 / 4), (4, 1 / 16), (5, 1 / 32)]
    speculator.came_out(1, [*range(1, 8), 8], now_s=0.0, is_over=False, is_ahead=True)
    assert speculator.figures.accepted == (1,) * 8, "by their place behind the certain row"
    speculator.fill({1: 7}, rows=2, now_s=0.0)
    assert gate.asked[-1] == (0, 1.0) and gate.certain == [2, 0, 0, 0, 1]


def test_a_round_is_told_with_how_many_times_sooner_its_tokens_came() -> None:
    class Turns(Known):
        def propose(self, *arguments: Any, **named: Any) -> list[Draft]:
            drafts = super().propose(*arguments, **named)
            return [Draft(d.token, 0.2, 4, f"source {self.asked}") for d in drafts]

    gate = Halves()
    speculator = Speculator(Turns(), gate, most=2, windows=4)
    speculator.costs.latency.add(1, 0.010)
    speculator.costs.latency.add(3, 0.016)
    speculator.begin(1, [])
    speculator.fill({1: 20}, rows=2, now_s=1.0)
    speculator.came_out(1, [0, 1, 2], now_s=1.020, is_over=False)
    speculator.fill({1: 20}, rows=2, now_s=1.025)  # its round begins here
    speculator.fill({1: 20}, **AHEAD)
    speculator.came_out(1, [0, 1, 2], now_s=1.030, is_over=False)
    assert len(gate.gains) == 1, "it goes on"
    speculator.came_out(1, [9], now_s=1.045, is_over=False, is_ahead=True)
    speculator.fill({1: 0}, rows=2, now_s=1.05)
    speculator.came_out(1, [7], now_s=1.06, is_over=False)
    assert len(gate.gains) == 2, "a round without drafts is nobody's"
    speculator.fill({1: 20}, rows=2, now_s=1.06)
    speculator.came_out(1, [0, 1, 2], now_s=1.2, is_over=True)  # before all was waited for
    assert gate.gains == [("source 1", 1.5), ("source 2", 2.0)], "of its first drafts"
    assert gate.tokens == [3, 3, 1, 1, 3]


@pytest.mark.parametrize("windows", [1, 3])
def test_figures_are_of_what_was_measured(windows: int) -> None:
    speculator = Speculator(Known(), FixedGate(2), most=3, windows=windows)
    speculator.begin(1, [])
    for rows in (1, 3):
        speculator.costs.latency.add(rows, 0.010 + 0.001 * rows)
        speculator.costs.spacing.add(rows, 0.002 + 0.001 * rows)
    speculator.costs.step(rows=0, tokens=4, seconds=0.02, latency_s=None, spacing_s=None)
    speculator.fill({1: 20}, rows=3, now_s=0.0)
    speculator.came_out(1, [0, 1, 2], now_s=0.0, is_over=False)  # both right
    speculator.came_out(1, [5], now_s=0.0, is_over=False)  # a round without drafts
    speculator.fill({1: 20}, rows=3, now_s=0.0)
    speculator.came_out(1, [9], now_s=0.0, is_over=False)
    for rows in (6, 9):
        speculator.saw(rows)
        speculator.voided(rows - 4)
    figures = speculator.figures
    assert (sum(figures.proposed), sum(figures.accepted), figures.rounds) == (4, 2, 3)
    assert (figures.rows_in_flight, figures.void_rows) == (7.5, 7)
    assert figures.useful_rows_in_flight == pytest.approx(7.5 * 5 / 7, abs=1e-4)
    assert figures.text() == (
        "speculation: 1.67 tokens a round · 2 of 4 drafts right, in 2 of 3 rounds"
    )
    assert figures.as_json()["acceptance_length"] == 1.6667 and figures.token_ms == 5.0
    assert figures.as_json()["acceptance_rate"] == 0.5
    assert Speculator(Known(), OpenGate(), most=2).figures.acceptance_rate is None
    tau = 0.013 if windows == 1 else 0.005
    want = 1e3 * predicted_s(2 / 3, 3, latency_s=0.013, interval_s=tau)
    assert figures.predicted_token_ms == pytest.approx(want, abs=1e-4)


def test_drafters_are_asked_for_no_frame_that_may_not_follow() -> None:
    class Never(Halves):
        def may_follow(self, costs: Costs, *, under_way: int) -> bool:
            self.asked.append((under_way, 0.0))
            return False

    gate, drafter = Never(), Known()
    speculator = Speculator(drafter, gate, most=2, windows=4)
    for request_id in (1, 2):
        speculator.begin(request_id, [])
    assert speculator.fill({1: 20}, rows=2, now_s=0.0) == {1: (0, 1)}
    assert speculator.fill({2: 20}, rows=1, now_s=0.0) == {2: (0,)}
    gate.asked.clear()
    assert speculator.fill({1: 18, 2: 18}, **AHEAD) == {} and drafter.asked == 2
    assert gate.asked == [(3, 0.0)], "rows that are under way"


def test_a_drafter_hears_of_all_tokens_and_once_of_the_end() -> None:
    told: list[tuple[int, tuple[int, ...] | None]] = []

    class Told(Known):
        def extend(self, request_id: int, tokens: Sequence[int]) -> None:
            told.append((request_id, tuple(tokens)))

        def end(self, request_id: int) -> None:
            told.append((request_id, None))

    speculator = Speculator(Told(), OpenGate(), most=2)
    speculator.begin(1, [])
    speculator.fill({1: 20}, rows=2, now_s=0.0)
    speculator.came_out(1, [0, 9], now_s=0.0, is_over=False)
    speculator.came_out(2, [3], now_s=0.0, is_over=False)  # has not begun
    speculator.came_out(1, [4], now_s=0.0, is_over=True)
    for request_id in (1, 1, 2):
        speculator.end(request_id)
    assert told == [(1, (0, 9)), (1, (4,)), (1, None)]


def test_drafts_that_are_dropped_are_neither_right_nor_wrong_and_a_new_round_begins() -> None:
    speculator = Speculator(Known(), OpenGate(), most=3)
    speculator.begin(1, [])
    speculator.fill({1: 20}, rows=3, now_s=0.0)
    speculator.came_out(1, [0], now_s=0.0, is_over=False)
    speculator.drop(1)
    speculator.drop(2)  # has not begun
    assert speculator.fill({1: 19}, rows=3, now_s=0.0) == {1: (0, 1, 2)}
    figures = speculator.figures
    assert (figures.accepted, figures.rollbacks, figures.rollback_rows) == ((1, 0, 0), 0, 2)


def test_where_stages_are_full_the_prediction_is_of_what_a_frame_puts_off() -> None:
    speculator = Speculator(Known(), OpenGate(), most=2, windows=4)
    speculator.begin(1, [])
    for spacing_s, rows in ((None, 3), (0.004, 3), (0.001, 1)):
        speculator.costs.step(
            rows=rows, tokens=1, seconds=0.01, latency_s=0.050, spacing_s=spacing_s
        )
    speculator.fill({1: 20}, rows=2, now_s=0.0)
    speculator.came_out(1, [0, 9], now_s=0.0, is_over=False)
    want = 1e3 * predicted_s(1 / 2, 3, latency_s=0.004, interval_s=0.004)
    assert speculator.costs.is_full
    assert speculator.figures.predicted_token_ms == pytest.approx(want, abs=1e-4)
