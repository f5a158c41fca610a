"""Pipeline schedules as data: which micro-batch each stage runs in which tick.

A schedule is a prologue and a period that repeats, tuples of `Slot`, fixed before start. Executor,
simulator, timeline and bubble read the same tuples. A tick is as long as the slowest stage takes
over one slot. Knows nothing of rows, tokens, models or clocks.

fill-drain   GPipe's: all micro-batches of a round go in one after the other, and the next round
             begins when the last stage has run them all
continuous   never drained: a micro-batch goes in again as soon as it has come out
interleaved  each stage holds several parts of the layers, `parts` of them, and a micro-batch passes
             all stages once for each; for simulator and bubble, no executor runs it
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import Final, Literal

__all__ = [
    "MOST_FRAMES",
    "MOST_MICRO_BATCHES",
    "SCHEDULES",
    "Schedule",
    "ScheduleKind",
    "Slot",
    "TimedSlot",
    "bubble_ratio",
    "continuous",
    "fill_drain",
    "idle_share",
    "interleaved",
    "simulate",
]

MOST_MICRO_BATCHES: Final = 30  #: in a schedule that is run
#: that have a place: one more than micro-batches may be under way, and one is yet to be looked at
MOST_FRAMES: Final = MOST_MICRO_BATCHES + 2
ScheduleKind = Literal["continuous", "fill-drain"]  # those that an executor runs


@dataclass(frozen=True, order=True)
class Slot:
    """In `tick`, `stage` runs micro-batch `micro_batch` of a round, at most `rows_max` rows.

    part: which of the parts of the layers that the stage holds, 0 but where they are interleaved.
    """

    tick: int
    stage: int
    micro_batch: int
    round: int = 0
    part: int = 0
    rows_max: int = 0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Slots of a prologue, then of a period of `period_ticks` ticks that repeats.

    Ticks of `prologue` and of the first `period` count from the start; a repetition adds
    `period_ticks` to each tick and one to each round.
    """

    drains: bool
    stages: int
    micro_batches: int
    parts: int = 1
    prologue: tuple[Slot, ...] = ()
    period: tuple[Slot, ...]
    period_ticks: int

    def slots(self, periods: int) -> Iterator[Slot]:
        """The prologue and so many periods, in order of their ticks."""
        yield from self.prologue
        for number in range(periods):
            for slot in self.period:
                yield Slot(
                    slot.tick + number * self.period_ticks,
                    slot.stage,
                    slot.micro_batch,
                    slot.round + number,
                    slot.part,
                    slot.rows_max,
                )

    @cached_property
    def entries(self) -> tuple[int, ...]:
        """Micro-batches in the order in which they enter the first stage in a round."""
        first = (s for s in chain(self.prologue, self.period) if s.stage == s.part == s.round == 0)
        return tuple(slot.micro_batch for slot in sorted(first))

    @property
    def in_flight(self) -> int:
        """Most micro-batches that have gone in and not come out.

        Without draining one more than take turns, where there is a second stage: rows that wait for
        no token, a prompt's, can lie before the first stage by the time that it is free.
        """
        return self.micro_batches + (not self.drains and self.stages > 1)

    def may_enter(self, slot: int, under_way: Collection[int]) -> bool:
        """Whether slot number `slot` of the first stage, from 0, can begin while those of
        `under_way` have not come out of the last: where rounds drain, only beside its own round's.

        It is no matter of ticks: what waits for a token waits besides until that has come out.
        """
        if self.drains:
            round_ = slot // self.micro_batches
            return all(other // self.micro_batches == round_ for other in under_way)
        return len(under_way) < self.in_flight


def fill_drain(stages: int, micro_batches: int, *, rows_max: int = 0) -> Schedule:
    """Micro-batch m reaches stage s in tick m + s of a round of micro_batches + stages - 1 ticks.

    Raises: ValueError if either is < 1.
    Source: GPipe, arXiv 1811.06965. Held by: test_schedule.py.
    """
    _check(stages, micro_batches)
    slots = (
        Slot(index + stage, stage, index, rows_max=rows_max)
        for index in range(micro_batches)
        for stage in range(stages)
    )
    return Schedule(
        drains=True,
        stages=stages,
        micro_batches=micro_batches,
        period=tuple(sorted(slots)),
        period_ticks=micro_batches + stages - 1,
    )


def continuous(stages: int, micro_batches: int, *, rows_max: int = 0) -> Schedule:
    """Round after round without a gap: a period has as many ticks as there are micro-batches, or
    stages if those are more, since a token comes out before the next one goes in.

    Raises: ValueError if either is < 1. Held by: test_schedule.py.
    """
    _check(stages, micro_batches)
    ticks = max(stages, micro_batches)
    full = stages - 1  # the first tick in which every stage may have work
    prologue: list[Slot] = []
    period: list[Slot] = []
    for index in range(micro_batches):
        for stage in range(stages):
            tick, round_ = index + stage, 0
            if tick < full:
                prologue.append(Slot(tick, stage, index, rows_max=rows_max))
                tick, round_ = tick + ticks, 1
            period.append(Slot(tick, stage, index, round_, rows_max=rows_max))
    return Schedule(
        drains=False,
        stages=stages,
        micro_batches=micro_batches,
        prologue=tuple(sorted(prologue)),
        period=tuple(sorted(period)),
        period_ticks=ticks,
    )


def interleaved(stages: int, micro_batches: int, parts: int, *, rows_max: int = 0) -> Schedule:
    """Fill-drain over stages that hold `parts` parts each: a slot is 1 / parts as long.

    Micro-batches go in groups of as many as there are stages, each group through all parts.

    Raises: ValueError if one is < 1, or the micro-batches are no whole number of groups.
    Source: Megatron-LM, arXiv 2104.04473, its forward half. Held by: test_schedule.py.
    """
    _check(stages, micro_batches, parts)
    if micro_batches % stages:
        raise ValueError(f"{micro_batches} micro-batches are no multiple of {stages} stages")
    slots = (
        Slot(
            stage + (group * parts + part) * stages + index,
            stage,
            group * stages + index,
            part=part,
            rows_max=rows_max,
        )
        for group in range(micro_batches // stages)
        for part in range(parts)
        for index in range(stages)
        for stage in range(stages)
    )
    return Schedule(
        drains=True,
        stages=stages,
        micro_batches=micro_batches,
        parts=parts,
        period=tuple(sorted(slots)),
        period_ticks=micro_batches * parts + stages - 1,
    )


#: How a pipeline can be run: `continuous` by default, which is never slower where tokens are due.
SCHEDULES: Final[dict[ScheduleKind, Callable[..., Schedule]]] = {
    "continuous": continuous,
    "fill-drain": fill_drain,
}


def _check(*counts: int) -> None:
    if min(counts) < 1:
        raise ValueError(f"stages, micro-batches and parts start at 1; got {counts}")


def idle_share(schedule: Schedule) -> Fraction:
    """Share of the slots of a period, of all stages, in which nothing runs; counted."""
    places = schedule.stages * schedule.period_ticks
    return 1 - Fraction(len(schedule.period), places)


def bubble_ratio(stages: int, micro_batches: int, *, parts: int = 1) -> Fraction:
    """Idle share of fill-drain by the formula, all slots equally long.

    (stages - 1) / (stages - 1 + parts * micro_batches); 2 stages and 4 micro-batches give 1/5.

    Raises: ValueError if one is < 1.
    Source: GPipe, arXiv 1811.06965; for parts arXiv 2104.04473.
    Held by: test_schedule.py::test_bubble_is_counted_slots.
    """
    _check(stages, micro_batches, parts)
    return Fraction(stages - 1, stages - 1 + parts * micro_batches)


@dataclass(frozen=True)
class TimedSlot:
    """A slot from `start` to `stop`, in the unit that the stages' times have."""

    slot: Slot
    start: float
    stop: float


def simulate(
    schedule: Schedule,
    stage_times: Sequence[float],
    *,
    periods: int = 1,
    hop_time: float = 0.0,
    return_time: float = 0.0,
) -> tuple[TimedSlot, ...]:
    """When each slot runs if it starts as soon as its stage is free and its input is there.

    stage_times: of one slot, by stage. hop_time: of a message to the next stage; return_time: of a
    token from the last stage to the first. A stage runs its slots in the order of the schedule.
    For fill-drain the end is sum(t) + (micro_batches - 1) * max(t), with hops added once.

    Raises: ValueError if there are not as many times as stages. Held by: test_schedule.py.
    """
    if len(stage_times) != schedule.stages:
        raise ValueError(f"{len(stage_times)} times for {schedule.stages} stages")
    last = (schedule.stages - 1, schedule.parts - 1)
    free = [0.0] * schedule.stages
    ends: dict[tuple[int, int, int, int], float] = {}  # round, micro-batch, part, stage
    drained: dict[int, float] = {}  # by round
    found: list[TimedSlot] = []
    for slot in schedule.slots(periods):
        stage, round_, index, part = slot.stage, slot.round, slot.micro_batch, slot.part
        ready = 0.0
        if stage:
            ready = ends[round_, index, part, stage - 1] + hop_time
        elif part:
            ready = ends[round_, index, part - 1, last[0]] + hop_time
        elif round_:
            own = ends[round_ - 1, index, last[1], last[0]]
            ready = (drained[round_ - 1] if schedule.drains else own) + return_time
        start = max(ready, free[stage])
        free[stage] = stop = start + stage_times[stage] / schedule.parts
        ends[round_, index, part, stage] = stop
        if (stage, part) == last:
            drained[round_] = max(stop, drained.get(round_, 0.0))
        found.append(TimedSlot(slot, start, stop))
    return tuple(found)
