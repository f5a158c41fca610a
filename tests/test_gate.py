"""What drafts are worth: their chance as it has turned out, what rows cost, and who goes first."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyshard.ops.spread import UNKNOWN, Spread
from anyshard.request import Sampling
from anyshard.speculate import (
    Calibrator,
    Costs,
    Draft,
    FixedGate,
    OpenGate,
    RowCost,
    Speculator,
    SurvivalGate,
    predicted_s,
)


def drafts_of(count: int, source: str = "text") -> list[Draft]:
    return [Draft(number, 0.2, 4, source) for number in range(count)]


def teach(gate: SurvivalGate, *, hits: int, of: int, source: str = "text") -> None:
    """The first so many of a round's drafts were right, the next one was not."""
    for depth, draft in enumerate(drafts_of(min(hits + 1, of), source)):
        gate.turned_out(draft, depth, is_hit=depth < hits)


def costs_of(
    seconds: dict[int, float], spacing: dict[int, float] | None = None, *, token_s: float = 0.01
) -> Costs:
    found = Costs()
    for rows, each in seconds.items():
        found.latency.add(rows, each)
    for rows, each in (spacing or {}).items():
        found.spacing.add(rows, each)
    found.step(rows=0, tokens=100, seconds=100 * token_s, latency_s=None, spacing_s=None)
    return found


def test_a_calibrator_learns_by_depth_and_leans_on_what_is_alike() -> None:
    calibrator = Calibrator()
    draft = drafts_of(1)[0]
    assert calibrator.chance(draft, 0) == pytest.approx(0.5)
    for number in range(400):
        calibrator.learn(draft, 0, is_hit=number % 10 != 0)
        calibrator.learn(draft, 3, is_hit=number % 2 == 0)
    assert calibrator.chance(draft, 0) == pytest.approx(0.9, abs=0.03)
    assert calibrator.chance(draft, 3) == pytest.approx(0.5, abs=0.05)
    alike = Draft(9, 0.25, 7, "text")  # never seen itself
    assert calibrator.chance(alike, 0) == pytest.approx(0.7, abs=0.03), "as sure as the others"
    assert calibrator.chance(Draft(9, 2.0, 4, "text"), 0) == pytest.approx(0.5)
    told = Draft(9, 0.2, 4, "store", chance=0.8)
    assert calibrator.chance(told, 0) == pytest.approx(0.8), "what its source says, at first"
    assert 0.1 < calibrator.error < 0.25


def two_states(*, entropy_tells: bool, drafts: int, seed: int = 0) -> tuple[float, float]:
    """Brier's errors of a calibrator that hears the model's entropy and of one that does not.

    Of text that is easy for a while, then hard: drafts are right 0.97 and 0.35 of the time.
    """
    draw = random.Random(seed)
    hears, deaf, easy = Calibrator(), Calibrator(), True
    for _ in range(drafts):
        easy ^= draw.random() < 0.05
        tells = easy if draw.random() < 0.85 else not easy
        if not entropy_tells:
            tells = draw.random() < 0.5
        entropy = draw.uniform(0.5, 1.5) * (0.1 if tells else 1.6)
        kind = draw.randrange(8)
        draft = Draft(0, 0.05 + 0.3 * (kind % 4), 2 + kind // 4, "text")
        is_hit = draw.random() < (0.97 if easy else 0.35)
        hears.learn(draft, 0, is_hit=is_hit, target_entropy=entropy)
        deaf.learn(draft, 0, is_hit=is_hit)
    return hears.error, deaf.error


@pytest.mark.parametrize("drafts", [500, 4000])
def test_the_entropy_of_the_model_makes_chances_truer_where_it_tells_something(
    drafts: int,
) -> None:
    for seed in range(5):
        hears, deaf = two_states(entropy_tells=True, drafts=drafts, seed=seed)
        assert hears < deaf - 0.01
        hears, deaf = two_states(entropy_tells=False, drafts=drafts, seed=seed)
        assert hears < deaf + 0.005, "it does not hurt where it tells nothing"


def test_an_entropy_that_is_unknown_is_a_kind_of_its_own() -> None:
    calibrator, draft = Calibrator(), drafts_of(1)[0]
    for _ in range(200):
        calibrator.learn(draft, 0, is_hit=True, target_entropy=0.05)
        calibrator.learn(draft, 0, is_hit=False, target_entropy=math.nan)
    assert calibrator.chance(draft, 0, target_entropy=0.02) > 0.9
    assert calibrator.chance(draft, 0) < 0.1
    assert calibrator.chance(draft, 0, target_entropy=1.0) == pytest.approx(0.5, abs=0.05)


def test_what_drafts_were_long_ago_counts_for_little() -> None:
    calibrator, draft = Calibrator(), drafts_of(1)[0]
    for number in range(2400):
        calibrator.learn(draft, 0, is_hit=number < 2000, target_entropy=0.2)
    assert calibrator.chance(draft, 0, target_entropy=0.2) < 0.2


def test_a_gate_goes_by_the_depth_and_the_entropy_that_it_is_told() -> None:
    draft, gate, sure = drafts_of(1)[0], SurvivalGate(), SurvivalGate()
    for _ in range(200):
        gate.turned_out(draft, 0, is_hit=True)
        gate.turned_out(draft, 3, is_hit=False)
        sure.turned_out(draft, 0, is_hit=True, target_entropy=0.05)
        sure.turned_out(draft, 0, is_hit=False, target_entropy=2.0)
    assert gate.survival([draft], depth=0, before=1.0)[0] > 0.9
    assert gate.survival([draft], depth=3, before=1.0)[0] < 0.2
    assert sure.survival([draft], depth=0, before=1.0, target_entropy=0.05)[0] > 0.9
    assert sure.survival([draft], depth=0, before=1.0, target_entropy=2.0)[0] < 0.1


# --- costs ---------------------------------------------------------------------------------------


def test_what_rows_cost_is_told_by_their_number_and_between() -> None:
    cost = RowCost()
    assert not cost.is_known
    cost.add(1, 0.010)
    assert cost.of(1) == 0.010 < cost.of(2) < cost.of(9) < 0.015, "little, until it is known"
    for rows, seconds in ((4, 0.012), (8, 0.030)):
        cost.add(rows, seconds)
    assert [cost.of(rows) for rows in (1, 4, 8)] == [0.010, 0.012, 0.030]
    assert cost.of(6) == pytest.approx(0.021)
    assert cost.of(15) == pytest.approx(0.030 + 7 * 0.020 / 7)
    for _ in range(40):
        cost.add(4, 0.020)
    assert cost.of(4) == pytest.approx(0.020, rel=0.05), "the last ones count"
    cost.add(4, 9.0)
    assert cost.of(4) < 0.0215, "one that was held up does not"


@given(st.dictionaries(st.integers(1, 20), st.floats(1e-4, 1.0), min_size=1), st.integers(1, 40))
def test_no_number_of_rows_costs_nothing(seconds: dict[int, float], rows: int) -> None:
    cost = RowCost()
    for number, each in seconds.items():
        cost.add(number, each)
    assert cost.of(rows) > 0


def test_time_of_a_frame_and_time_between_frames_are_told_apart() -> None:
    costs = Costs()
    costs.step(rows=3, tokens=1, seconds=0.050, latency_s=0.050, spacing_s=None)
    costs.step(rows=3, tokens=3, seconds=0.004, latency_s=None, spacing_s=0.004)
    costs.step(rows=2, tokens=0, seconds=0.020, latency_s=None, spacing_s=None)
    costs.step(rows=0, tokens=0, seconds=0.001, latency_s=None, spacing_s=0.001)  # void
    assert (costs.latency.of(3), costs.interval(3)) == (0.050, 0.004)
    assert costs.token_s == pytest.approx(0.075 / 4, rel=0.1)


def test_where_stages_are_busy_with_others_a_frame_costs_the_slowest_ones_time() -> None:
    costs, gate = Costs(), SurvivalGate(windows=4)
    assert not costs.is_known and gate.count([0.9], costs, certain=1) == 0
    for rows in range(1, 5):  # every frame follows another's
        costs.step(rows=rows, tokens=1, seconds=0.01, latency_s=0.02, spacing_s=0.01)
    assert costs.is_full and costs.is_known and not costs.latency.is_known
    assert (costs.frame(2), costs.round(2)) == (0.01, 0.02)
    assert gate.count([0.9, 0.8, 0.7], costs, certain=1) == 3
    assert gate.theta(costs) == 0.0 and not gate.may_follow(costs, under_way=0)
    costs.step(rows=2, tokens=1, seconds=0.05, latency_s=0.05, spacing_s=None)
    assert not costs.is_full and costs.frame(2) == costs.round(2) == 0.05, "by itself again"


@pytest.mark.parametrize("right", [0.0, 0.3, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_formula_is_what_adding_up_rounds_gives(right: float, rows: int) -> None:
    """Episodes of frames of `rows` rows: over at the first draft that is wrong."""
    latency, interval = 0.060, 0.007
    time = tokens = 0.0
    chance = 1.0  # that a frame is needed
    for frame in range(3000):
        time += chance * (latency if frame == 0 else interval)
        tokens += chance * sum(right**place for place in range(rows))
        chance *= right**rows
    found = predicted_s(right, rows, latency_s=latency, interval_s=interval)
    assert found == pytest.approx(time / tokens, rel=0.02)


# --- gates ---------------------------------------------------------------------------------------


def test_rows_are_run_while_they_bring_tokens_sooner() -> None:
    gate = SurvivalGate()
    for number in range(400):  # four in a row are right, and one time in eight all are
        teach(gate, hits=6 if number % 8 == 0 else 4, of=6)
    chances = gate.survival(drafts_of(8), depth=0, before=1.0)
    assert gate.count(chances, Costs(), certain=1) == 0, "a plain step comes first"
    dear = costs_of({rows: 0.008 + 0.002 * rows for rows in range(1, 10)})
    cheap = costs_of({rows: 0.1 + 1e-5 * rows for rows in range(1, 10)})
    assert 3 <= gate.count(chances, dear, certain=1) <= 5
    assert gate.count(chances, cheap, certain=1) == 5, "none that is right one time in twenty"
    assert gate.count([0.99] * 8, cheap, certain=1) >= 7
    fours = costs_of({rows: 0.010 + 0.008 * ((rows - 1) // 4) for rows in range(1, 10)})
    assert gate.count(chances, fours, certain=1) == 3, "a fifth row takes a pass more"
    steep = costs_of({rows: 0.010 * rows for rows in range(1, 10)})
    assert gate.count(chances, steep, certain=1) == 0


def test_with_windows_frames_are_as_long_as_the_formula_says() -> None:
    gate = SurvivalGate(windows=8)
    for _ in range(300):
        teach(gate, hits=4, of=8)
    slow = costs_of(
        {rows: 0.025 + 0.002 * rows for rows in range(1, 10)},
        {rows: 0.003 + 0.001 * rows for rows in range(1, 10)},
    )
    chances = gate.survival(drafts_of(8), depth=0, before=1.0)
    first = gate.count(chances, slow, certain=1)
    assert 1 <= first <= 5
    assert gate.count(chances, slow, certain=0) in (first, first + 1)
    hopeless = [1e-9] * 8
    assert gate.count(hopeless, slow, certain=0) == 0
    assert 3 <= gate.count(chances, slow, certain=3) <= 4, "of several requests: all that pay"


def test_frames_follow_each_other_where_hops_are_slow_or_drafts_right() -> None:
    near = (
        {rows: 0.006 + 0.0004 * rows for rows in range(1, 10)},
        dict.fromkeys(range(1, 10), 0.004),
    )
    far = {rows: 0.026 + 0.001 * rows for rows in range(1, 10)}, near[1]
    for right, costs, follow in ((12, near, False), (19, near, True), (12, far, True)):
        gate = SurvivalGate(windows=8)
        for _ in range(40):  # right: of 20
            for number in range(20):
                gate.turned_out(drafts_of(1)[0], 0, is_hit=number < right)
        chances = gate.survival(drafts_of(8), depth=0, before=1.0)
        gate.count(chances, costs_of(*costs), certain=1)
        behind = gate.count(chances, costs_of(*costs), certain=0)
        assert (behind > 0) == follow == gate.may_follow(costs_of(*costs), under_way=2)
        assert not gate.may_follow(costs_of(*costs), under_way=99)
        gate.count(chances, costs_of(*costs), certain=2)
        assert not gate.may_follow(costs_of(*costs), under_way=0), "of several requests, none"


def steep(spacing: float = 0.001) -> Costs:
    """Over hops: a frame takes 25 ms and more, the next one follows in 3 ms and `spacing` a row."""
    return costs_of(
        {rows: 0.025 + 0.002 * rows for rows in range(1, 10)},
        {rows: 0.003 + spacing * rows for rows in range(1, 10)},
    )


def taught_for_windows() -> SurvivalGate:
    gate = SurvivalGate(windows=8)
    for _ in range(300):
        teach(gate, hits=4, of=8)
    return gate


def test_theta_is_what_one_row_more_takes_over_what_a_token_takes() -> None:
    gate = SurvivalGate()
    assert gate.theta(Costs()) == 0.25, "before anything is measured"
    assert gate.theta(steep()) == pytest.approx(0.001 / 0.01)
    assert gate.theta(steep(0.05)) == 1.0


def test_frames_of_drafts_have_a_row_more_and_what_a_tenth_of_theta_allows() -> None:
    gate = taught_for_windows()
    first = gate.count([0.9] * 8, steep(), certain=1)
    assert 1 <= first < 7 and gate.count([0.9] * 8, steep(), certain=0) == first + 1
    assert gate.count([0.011] * 8, steep(), certain=0) == first + 1, "a tenth of theta is 0.01"
    assert gate.count([0.011, 0.009], steep(), certain=0) == 1
    assert gate.count([0.9], steep(), certain=1) == 1, "one that is proposed has its row"


def test_as_many_rows_may_be_under_way_as_leave_before_the_first_token_is_back() -> None:
    gate, costs = taught_for_windows(), steep()
    rows = gate.count([0.9] * 8, costs, certain=1) + 1
    frames = math.ceil(costs.latency.of(rows) / costs.interval(rows))
    assert rows > 1 and frames > 2
    assert gate.may_follow(costs, under_way=rows * frames - 1)
    assert not gate.may_follow(costs, under_way=rows * frames)


def test_tokens_of_all_certain_rows_are_what_a_draft_is_compared_with() -> None:
    dear = costs_of({rows: 0.010 * rows for rows in range(1, 10)})
    assert SurvivalGate().count([0.5] * 4, dear, certain=4) == 0


def test_a_source_that_does_not_pay_is_silent_for_a_while() -> None:
    gate = SurvivalGate()
    for _ in range(64):
        assert gate.survival(drafts_of(2), depth=0, before=1.0)
        gate.round_over("text", 1.0)
    assert gate.survival(drafts_of(2), depth=0, before=1.0) == []
    assert gate.is_silent(("text",)) and gate.is_silent(("text", "store")), "that never drafted"
    gate.round_over("store", 1.2)
    assert not gate.is_silent(("text", "store"))
    gate.passed(255)
    assert gate.is_silent(("text",))
    gate.passed(1)
    assert not gate.is_silent(("text",))


def silenced(gate: SurvivalGate, gain: float) -> tuple[int, int]:
    """After how many rounds of a gain a source is silent, and for how many tokens."""
    rounds = tokens = 0
    while not gate.is_silent(("text",)):
        gate.round_over("text", gain)
        rounds += 1
    while gate.is_silent(("text",)):
        gate.passed(1)
        tokens += 1
    return rounds, tokens


def test_a_source_that_clearly_loses_is_silent_sooner_and_each_time_for_twice_as_long() -> None:
    gate = SurvivalGate()
    found = [silenced(gate, 0.5) for _ in range(7)]
    assert found == [(16, 256 << min(number, 5)) for number in range(7)]
    assert silenced(SurvivalGate(), 0.95)[0] == 64, "not clear enough"
    for _ in range(64):
        gate.round_over("text", 1.2)
    for _ in range(64):
        gate.round_over("text", 0.5)
        if gate.is_silent(("text",)):
            break
    gate.passed(256)
    assert not gate.is_silent(("text",)), "it has paid meanwhile"


def test_a_source_is_judged_by_its_last_rounds_and_anew_after_a_silence() -> None:
    gate = SurvivalGate()

    def rounds(gain: float, times: int) -> bool:
        for _ in range(times):
            gate.round_over("text", gain)
        return gate.is_silent(("text",))

    assert not rounds(1.6, 2000) and rounds(0.9, 56), "what was is over"
    gate.passed(1000)
    assert not gate.is_silent(("text",)), "with more tokens than it was silent for"
    assert gate.survival(drafts_of(1), depth=0, before=1.0)
    assert not rounds(0.7, 21) and rounds(0.7, 1)
    gate.passed(512)
    assert not rounds(1.03, 300) and rounds(1.0, 100), "it has to bring something"


def test_a_source_that_pays_is_never_silent() -> None:
    gate = SurvivalGate()
    for _ in range(500):
        gate.round_over("text", 1.1)
    assert not gate.is_silent(("text",))


# --- speculators ---------------------------------------------------------------------------------


class Known:
    """Proposes 0, 1, 2, ... behind what is there, each request from a source of its own."""

    sources: tuple[str, ...] = ("source 1", "source 2", "source 3", "source 7")

    def __init__(self, *, takes_time: bool = False) -> None:
        self.asked, self.takes_time = 0, takes_time

    def begin(
        self, request_id: int, prompt: Sequence[int], *, sampling: Sampling | None = None
    ) -> None: ...
    def extend(self, request_id: int, tokens: Sequence[int]) -> None: ...
    def end(self, request_id: int) -> None: ...

    def propose(self, request_id: int, most: int, *, after: Sequence[int] = ()) -> list[Draft]:
        self.asked += 1
        first = after[-1] + 1 if after else 0
        return [Draft(first + n, 0.2, 4, f"source {request_id}") for n in range(6)][:most]


def test_drafts_of_the_best_survival_are_run_first_and_no_more_than_there_is_room() -> None:
    gate = SurvivalGate()
    for _ in range(300):
        teach(gate, hits=5, of=6, source="source 1")
        teach(gate, hits=0, of=1, source="source 2")
        teach(gate, hits=2, of=6, source="source 3")
    for requests, room, rows, want in (
        ([1, 2, 3], 9, 6, None),
        ([1], 2, 6, {1: (0, 1)}),
        ([1], 0, 6, {}),
        ([7], 9, 0, {}),
    ):
        speculator = Speculator(Known(), gate, most=6)
        speculator.costs.latency.add(1, 0.01)
        for request in requests:
            speculator.begin(request, [])
        filled = speculator.fill(dict.fromkeys(requests, room), rows=rows, now_s=0.0)
        assert sum(map(len, filled.values())) <= rows
        if want is None:
            assert len(filled[1]) > len(filled[3]) >= 1 and 2 not in filled
        else:
            assert filled == want
    assert Speculator(Known(), gate, most=6).fill({1: 5}, rows=6, now_s=0.0) == {}, "not begun"


def test_a_muted_speculator_asks_nobody() -> None:
    gate, drafter = SurvivalGate(), Known()
    speculator = Speculator(drafter, gate, most=4)
    speculator.begin(1, [])
    for source in Known.sources * 64:
        gate.round_over(source, 0.5)
    assert speculator.fill({1: 9}, rows=4, now_s=0.0) == {} and drafter.asked == 0


@pytest.mark.parametrize("takes_time", [False, True])
def test_a_source_that_takes_time_and_is_asked_for_nothing_falls_silent(takes_time: bool) -> None:
    gate, drafter = SurvivalGate(), Known(takes_time=takes_time)
    speculator = Speculator(drafter, gate, most=4)
    for rows in range(1, 6):
        speculator.costs.latency.add(rows, 0.01 * rows)  # no draft is worth its row
    speculator.begin(1, [])
    for number in range(100):
        filled = speculator.fill({1: 9}, rows=4, now_s=number * 0.02)
        assert filled == {}
        speculator.came_out(1, [0], now_s=number * 0.02 + 0.015, is_over=False)  # a half for drafts
    assert drafter.asked == (100 if not takes_time else 20)
    assert speculator.figures.drafted_rounds == 0


def test_figures_tell_what_was_run_what_was_right_and_what_was_rolled_back() -> None:
    speculator = Speculator(Known(), FixedGate(2), most=3, windows=3)
    speculator.begin(1, [])
    assert speculator.fill({1: 20}, rows=3, now_s=1.0) == {1: (0, 1)}
    assert speculator.fill({1: 18}, rows=3, now_s=1.0, are_ahead=True) == {1: (2, 3, 4)}
    assert speculator.fill({1: 15}, rows=3, now_s=1.0, are_ahead=True) == {1: (5, 6, 7)}
    speculator.came_out(1, [0, 1, 2], now_s=2.0, is_over=False)  # rows: certain, 0, 1
    speculator.came_out(1, [3, 9], now_s=2.1, is_over=False, is_ahead=True)  # 2, 3; not 4
    figures = speculator.figures
    assert figures.proposed == (1,) * 8 + (0,)
    assert figures.accepted == (1, 1, 1, 1) + (0,) * 5
    assert (figures.rounds, figures.drafted_rounds, figures.rollbacks) == (1, 1, 1)
    assert figures.rollback_rows == 4 and figures.wasted_rows == 4
    assert figures.acceptance_length == 5.0
    assert speculator.fill({1: 12}, rows=3, now_s=3.0) == {1: (0, 1)}, "a new round"
    speculator.came_out(1, [0, 1], now_s=3.5, is_over=True)  # the answer ends with a draft
    assert speculator.figures.accepted[:3] == (2, 1, 1), "its row was not waited for"


def test_a_draft_that_an_answer_ended_before_is_neither_right_nor_wrong() -> None:
    told: list[tuple[int, bool]] = []

    class Told(OpenGate):
        def turned_out(self, draft: Draft, depth: int, *, is_hit: bool, **named: float) -> None:
            told.append((depth, is_hit))

    speculator = Speculator(Known(), Told(), most=3)
    speculator.begin(1, [])
    speculator.fill({1: 20}, rows=3, now_s=0.0)
    speculator.came_out(1, [0, 8], now_s=0.0, is_over=False)
    assert told == [(0, True), (1, False)], "the third was not looked at"
    told.clear()
    speculator.fill({1: 20}, rows=3, now_s=0.0)
    speculator.came_out(1, [0, 8], now_s=0.0, is_over=True)
    assert told == [(0, True)]


def test_a_draft_is_judged_by_the_entropy_that_it_was_proposed_behind() -> None:
    asked: list[float] = []
    told: list[float] = []

    class Told(OpenGate):
        def survival(
            self, drafts: Sequence[Draft], *, target_entropy: float = 0.0, **named: Any
        ) -> list[float]:
            asked.append(target_entropy)
            return super().survival(drafts, **named)

        def turned_out(
            self, draft: Draft, depth: int, *, is_hit: bool, target_entropy: float = 0.0
        ) -> None:
            told.append(target_entropy)

    speculator = Speculator(Known(), Told(), most=2, windows=2)
    speculator.begin(1, [])
    ahead: Any = {"rows": 2, "now_s": 0.0, "are_ahead": True}
    came: Any = {"now_s": 0.0, "is_over": False}
    row = [Spread(entropy / 10, 0.5, 7) for entropy in range(10)]
    assert speculator.fill({1: 20}, rows=2, now_s=0.0) == {1: (0, 1)}
    assert speculator.fill({1: 20}, **ahead) == {1: (2, 3)}
    speculator.came_out(1, [0, 1, 2], row[1:4], **came)  # rows: certain, 0, 1
    assert speculator.fill({1: 20}, **ahead) == {1: (4, 5)}
    speculator.came_out(1, [3, 4], row[4:6], is_ahead=True, **came)  # 2, 3
    speculator.came_out(1, [9], row[6:7], is_ahead=True, **came)  # 4
    speculator.fill({1: 20}, rows=2, now_s=0.0)
    assert str(asked) == "[nan, nan, 0.3, 0.6]"
    assert str(told) == "[nan, nan, nan, nan, 0.3, 0.3]"
    speculator.came_out(1, [9], **came)
    speculator.fill({1: 20}, rows=2, now_s=0.0)
    assert math.isnan(asked[-1]), "nobody has told"


def test_misses_that_the_second_best_would_have_saved_are_counted() -> None:
    class Two(Known):
        """Its second choice is ten more."""

        def propose(self, *arguments: Any, **named: Any) -> list[Draft]:
            drafts = super().propose(*arguments, **named)
            return [Draft(d.token, 0.2, 4, d.source, d.token + 10) for d in drafts]

    figures = []
    for drafter in (Two(), Known()):
        speculator = Speculator(drafter, OpenGate(), most=2)
        speculator.begin(1, [])
        for token, spread, is_over in (
            (5, Spread(1.0, 0.2, 0), False),  # the draft 0 was the model's runner-up
            (10, Spread(2.0, 0.4, 3), False),  # its source would have said 10 next
            (5, UNKNOWN, False),
            (10, Spread(0.0, 1.0, 0), True),  # the answer is over: nobody knows
        ):
            speculator.fill({1: 9}, rows=2, now_s=0.0)
            speculator.came_out(1, [token], [spread], now_s=0.0, is_over=is_over)
        speculator.begin(2, [])
        speculator.fill({2: 9}, rows=2, now_s=0.0)
        rows = [Spread(4.0, 0.0, 8), Spread(3.0, 0.1, 1)]  # 0 was right, 1 the runner-up
        speculator.came_out(2, [0, 11], rows, now_s=0.0, is_over=False)
        figures.append(speculator.figures)
    both, one = figures
    assert (both.rollbacks, both.runner_ups, both.near_misses) == (4, 3, 2)
    assert (both.second_choices, both.rescued) == (4, 2)
    assert (one.runner_ups, one.near_misses, one.second_choices, one.rescued) == (3, 2, 0, 0)
    assert (both.target_entropy, both.target_margin) == (2.0, 0.34)
    assert {"near_misses", "rescued", "target_entropy", "target_margin"} <= both.as_json().keys()
    nothing = Speculator(Known(), OpenGate(), most=2).figures
    assert nothing.target_entropy is nothing.target_margin is None
