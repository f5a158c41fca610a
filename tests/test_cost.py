"""What rows cost, as it is measured: what is old, void or out of order counts for nothing."""

from __future__ import annotations

import pytest

from anyshard.speculate import Costs, RowCost


def cost_of(seconds: dict[int, float]) -> RowCost:
    cost = RowCost()
    for rows, each in seconds.items():
        cost.add(rows, each)
    return cost


def test_what_was_measured_long_ago_is_forgotten_however_much_it_was() -> None:
    cost, costs = RowCost(), Costs()
    for seconds, times in ((0.010, 500), (0.014, 60)):
        for _ in range(times):
            cost.add(4, seconds)
    assert cost.of(4) == pytest.approx(0.014, rel=0.01)
    for seconds, times in ((0.010, 500), (0.014, 300)):
        for _ in range(times):
            costs.step(rows=0, tokens=1, seconds=seconds, latency_s=None, spacing_s=None)
    assert costs.token_s == pytest.approx(0.014, rel=0.01)


def test_no_more_rows_ever_cost_less() -> None:
    """Of measurements that say so, the fewer rows are believed."""
    cost = cost_of({4: 0.030, 8: 0.020})
    assert cost.of(6) == 0.030, "between"
    assert cost.of(2) == 0.030, "below, where nothing says that fewer cost less"
    assert cost.of(12) == 0.020, "behind"


def test_frames_that_came_back_void_tell_time_and_tokens_and_no_cost_of_rows() -> None:
    costs = Costs()
    costs.step(rows=0, tokens=2, seconds=0.004, latency_s=0.004, spacing_s=None)
    costs.step(rows=0, tokens=0, seconds=0.001, latency_s=None, spacing_s=0.001)
    assert not costs.latency.is_known and not costs.spacing.is_known
    assert costs.token_s == pytest.approx(0.005 / 2, rel=0.02)


def test_what_came_behind_another_frame_says_nothing_of_a_frame_by_itself() -> None:
    costs = Costs()
    costs.step(rows=3, tokens=1, seconds=0.004, latency_s=0.050, spacing_s=0.004)
    assert costs.spacing.of(3) == 0.004 and not costs.latency.is_known
    assert costs.queued.of(3) == 0.050 and costs.is_full
    assert (costs.round(3), costs.frame(3)) == (0.050, 0.004)


def test_before_frames_followed_each_other_they_are_taken_to_come_sooner_than_one_by_itself() -> (
    None
):
    costs = Costs()
    costs.latency.add(3, 0.040)
    assert costs.interval(3) == pytest.approx(0.010)
    costs.spacing.add(2, 0.030)
    assert costs.interval(2) == 0.030
