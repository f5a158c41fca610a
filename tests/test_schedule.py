"""Schedules: what is counted from slots is what the formulas say, and an order that can run."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyshard.schedule import (
    Schedule,
    Slot,
    bubble_ratio,
    continuous,
    fill_drain,
    idle_share,
    interleaved,
    simulate,
)

COUNTS = st.integers(1, 8)
TIMES = st.lists(st.integers(1, 20), min_size=1, max_size=8)


def every(stages: int, micro_batches: int) -> list[Schedule]:
    return [
        fill_drain(stages, micro_batches),
        continuous(stages, micro_batches),
        interleaved(stages, micro_batches * stages, 3),
    ]


@given(COUNTS, COUNTS, st.integers(1, 4))
def test_bubble_is_counted_slots(stages: int, micro_batches: int, parts: int) -> None:
    assert idle_share(fill_drain(stages, micro_batches)) == bubble_ratio(stages, micro_batches)
    many = stages * micro_batches
    counted = idle_share(interleaved(stages, many, parts))
    assert counted == bubble_ratio(stages, many, parts=parts)
    idle = 1 - Fraction(min(stages, micro_batches), stages)
    assert idle_share(continuous(stages, micro_batches)) == idle


def test_bubbles_that_others_quote() -> None:
    assert [
        round(100 * float(idle_share(fill_drain(stages, many))), 1)
        for stages, many in ((2, 4), (4, 4), (8, 8), (4, 16))
    ] == [20.0, 42.9, 46.7, 15.8]


@given(COUNTS, COUNTS)
def test_a_stage_runs_one_slot_a_tick_and_all_of_them_in_the_order_in_which_they_come(
    stages: int, micro_batches: int
) -> None:
    for schedule in every(stages, micro_batches):
        slots = list(schedule.slots(3))
        assert len({(slot.tick, slot.stage) for slot in slots}) == len(slots)
        assert slots == sorted(slots, key=lambda slot: (slot.tick, slot.stage))
        ran: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        for slot in slots:
            ran.setdefault((slot.round, slot.micro_batch, slot.part), []).append(
                (slot.tick, slot.stage)
            )
        whole = [ran[key] for key in ran if len(ran[key]) == stages]
        for places in whole:
            assert [stage for _, stage in places] == list(range(stages))
            assert all(b[0] == a[0] + 1 for a, b in pairwise(places))
        assert {key[:2] for key in ran if len(ran[key]) == stages} >= {
            (round_, index) for round_ in range(3) for index in range(schedule.micro_batches)
        }


@given(COUNTS, COUNTS)
def test_a_token_comes_out_before_its_next_one_goes_in(stages: int, micro_batches: int) -> None:
    schedule = continuous(stages, micro_batches)
    ticks = {(s.round, s.micro_batch, s.stage): s.tick for s in schedule.slots(4)}
    for index in range(micro_batches):
        for round_ in range(1, 4):
            assert ticks[round_, index, 0] > ticks[round_ - 1, index, stages - 1]


@given(COUNTS, TIMES)
def test_unequal_stages_take_what_the_formula_says(micro_batches: int, times: list[int]) -> None:
    stages = len(times)
    run = simulate(fill_drain(stages, micro_batches), times)
    total = sum(times) + (micro_batches - 1) * max(times)
    assert max(timed.stop for timed in run) == total
    busy = sum(timed.stop - timed.start for timed in run)
    assert busy == micro_batches * sum(times)
    if len(set(times)) == 1:
        assert 1 - Fraction(int(busy), stages * total) == bubble_ratio(stages, micro_batches)


@given(COUNTS, TIMES)
def test_a_round_that_never_drains_takes_the_slowest_stage_or_one_trip(
    micro_batches: int, times: list[int]
) -> None:
    """The throughput of a closed ring: C / max(sum t, C max t)."""
    periods = 9
    run = simulate(continuous(len(times), micro_batches), times, periods=periods)
    out = [t.stop for t in run if t.slot.stage == len(times) - 1 and t.slot.micro_batch == 0]
    spacing = max(sum(times), micro_batches * max(times))
    assert out[-1] - out[-2] == spacing


def test_a_hop_that_takes_time_is_paid_once_a_fill_and_once_a_token() -> None:
    filled = simulate(fill_drain(3, 4), [2, 2, 2], hop_time=5)
    assert max(timed.stop for timed in filled) == 3 * 2 + 3 * 2 + 2 * 5
    one = simulate(continuous(2, 1), [3, 3], periods=3, hop_time=10, return_time=10)
    starts = [timed.start for timed in one if timed.slot.stage == 0]
    assert starts[1] - starts[0] == 3 + 10 + 3 + 10


@given(COUNTS, COUNTS)
def test_no_slot_waits_for_one_that_the_ticks_put_later(stages: int, micro_batches: int) -> None:
    for schedule in (fill_drain(stages, micro_batches), continuous(stages, micro_batches)):
        slots = list(schedule.slots(4))
        entries = [slot for slot in slots if slot.stage == 0]
        assert tuple(slot.micro_batch for slot in entries[:micro_batches]) == schedule.entries
        for number, slot in enumerate(entries):
            out = sum(s.stage == stages - 1 and s.tick < slot.tick for s in slots)
            assert schedule.may_enter(number, range(out, number))


def test_a_round_begins_when_the_one_before_has_drained_and_else_a_place_is_free() -> None:
    drains, never = fill_drain(2, 3), continuous(2, 3)
    assert drains.in_flight == 3 and never.in_flight == 4
    assert drains.may_enter(5, [3, 4]) and not drains.may_enter(6, [5])
    assert drains.may_enter(6, []) and drains.may_enter(0, [])
    assert never.may_enter(6, [3, 4, 5]) and not never.may_enter(6, [2, 3, 4, 5])
    assert continuous(1, 1).in_flight == 1


def test_what_cannot_be_is_refused() -> None:
    for call in (lambda: fill_drain(0, 1), lambda: continuous(1, 0), lambda: bubble_ratio(2, 0)):
        with pytest.raises(ValueError, match="start at 1"):
            call()
    with pytest.raises(ValueError, match="3 micro-batches are no multiple of 2 stages"):
        interleaved(2, 3, 2)
    with pytest.raises(ValueError, match="1 times for 2 stages"):
        simulate(fill_drain(2, 1), [1.0])


def test_a_slot_is_a_place_in_a_table() -> None:
    assert fill_drain(2, 2, rows_max=7).period == (
        Slot(0, 0, 0, rows_max=7),
        Slot(1, 0, 1, rows_max=7),
        Slot(1, 1, 0, rows_max=7),
        Slot(2, 1, 1, rows_max=7),
    )
    schedule = continuous(3, 2)
    assert schedule.prologue == (Slot(0, 0, 0), Slot(1, 0, 1), Slot(1, 1, 0))
    assert [(s.tick, s.stage, s.micro_batch, s.round) for s in schedule.period] == [
        (2, 1, 1, 0),
        (2, 2, 0, 0),
        (3, 0, 0, 1),
        (3, 2, 1, 0),
        (4, 0, 1, 1),
        (4, 1, 0, 1),
    ]
