"""A frame whose result has come: which rows count, and what is told and timed of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Several
from dataclasses import replace as replace_result
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from anyshard.batch import Batch, Row, Sequence, Tick
from anyshard.comm.control import Result
from anyshard.engine import Engine, Timings
from anyshard.errors import PeerLost
from anyshard.flight import Flight, Outcome, outcome
from anyshard.ops.spread import Spread
from anyshard.pages import PagePool
from anyshard.request import Request, Sampling
from anyshard.speculate import Costs, Draft, FixedGate, Speculator

#: Of five tokens all but the last are stored; 16 and 17 have rows under way.
TEXT = Sequence(
    request_id=7,
    request=Request(prompt=(11, 12, 13), max_tokens=20),
    slot=1,
    pages=(0,),
    tokens=(11, 12, 13, 14, 15),
    computed=5,
    drafted=(16, 17),
    generation=2,
)
#: Of a prompt of four tokens one is stored.
PROMPT = Sequence(
    request_id=8,
    request=Request(prompt=(21, 22, 23, 24), max_tokens=20),
    slot=0,
    pages=(1,),
    tokens=(21, 22, 23, 24),
    computed=4,
)
CERTAIN = Row(1, 4, 15, True)
DRAFTS = (Row(1, 5, 16, True, is_draft=True), Row(1, 6, 17, True, is_draft=True))
READ = tuple(Row(0, at, 21 + at, at == 3) for at in (1, 2, 3))
RUNNING = {1: TEXT, 0: PROMPT}


def flight_of(*rows: Row, slot: int = 0, sent_s: float = 9.8, drafted_s: float = 0.0) -> Flight:
    return Flight(5, slot, Tick(rows, ()), RUNNING, sent_s, drafted_s)


def result_of(*tokens: int, is_void: bool = False) -> Result:
    spreads = [Spread(float(at), 0.5, 3) for at in range(len(tokens))]
    return Result(5, list(tokens), [0] * len(tokens), None, is_void, spreads)


def test_drafts_count_up_to_the_first_that_did_not_come_out() -> None:
    flight = flight_of(CERTAIN, *DRAFTS)
    for tokens, drawn in (
        ((16, 17, 18), [16, 17, 18]),
        ((16, 99, 18), [16, 99]),
        ((99, 17, 18), [99]),
    ):
        found = outcome(flight, result_of(*tokens), RUNNING)
        assert found.drawn == {1: drawn} and found.drafts_right == len(drawn) - 1
        assert [each.entropy for each in found.spreads[1]] == [*range(len(drawn))]
        assert [each.token for each in found.said] == drawn


@pytest.mark.parametrize(
    "row",
    [Row(1, 5, 99, True, is_draft=True), Row(1, 6, 16, True, is_draft=True)],
    ids=["another token", "another position"],
)
def test_a_draft_counts_by_its_token_and_by_its_position(row: Row) -> None:
    found = outcome(flight_of(CERTAIN, row), result_of(16, 17), RUNNING)
    assert found.drawn == {1: [16]} and found.drafts_right == 0


@pytest.mark.parametrize("other", [{"request_id": 9}, {"generation": 3}], ids=str)
def test_rows_of_another_request_or_of_before_a_wrong_draft_are_passed_over(
    other: dict[str, int],
) -> None:
    flight, running = flight_of(CERTAIN, *DRAFTS), {1: replace(TEXT, **other)}
    assert flight.awaited(CERTAIN, RUNNING) and not flight.awaited(CERTAIN, running)
    found = outcome(flight, result_of(16, 17, 18), running)
    assert not found.said and not found.drawn and not found.drafts_right
    assert not outcome(flight, result_of(0, 0, 0, is_void=True), {}).said


def test_a_right_draft_whose_row_failed_runs_again_and_is_no_fault_yet() -> None:
    flight, faulty = flight_of(CERTAIN, *DRAFTS), result_of(16, 17, 18)
    for faults, drawn, again, fault in (
        ([0, 7, 7], [16], {1}, []),
        ([0, 0, 7], [16, 17], {1}, []),
        ([7, 0, 0], None, set(), [0]),  # what is certain has failed
    ):
        result = replace_result(faulty, faults=faults)
        found = outcome(flight, result, RUNNING)
        assert (found.drawn.get(1), found.again) == (drawn, again)
        assert [each.fault for each in found.said if each.fault is not None] == fault
        assert found.drafts_right == len(drawn or [0]) - 1
    wrong = replace_result(result_of(99, 17, 18), faults=[0, 7, 7])
    assert not outcome(flight, wrong, RUNNING).again, "nobody waits for it"


def test_rows_are_of_prompts_certain_or_drafts() -> None:
    flight = flight_of(CERTAIN, *DRAFTS, *READ)
    assert (flight.certain_rows, flight.prompt_rows) == (4, 3)
    after = Row(0, 4, 25, True)  # the first token of an answer is no prompt's
    assert flight_of(READ[2], after).prompt_rows == 1


# --- what an engine makes of it ------------------------------------------------------------------


class Guesses:
    """Proposes 16, 17, ... behind whatever there is."""

    sources: tuple[str, ...] = ("guess",)
    takes_time: bool = False

    def __init__(self) -> None:
        self.ended: list[int] = []

    def begin(
        self, request_id: int, prompt: Several[int], *, sampling: Sampling | None = None
    ) -> None: ...
    def extend(self, request_id: int, tokens: Several[int]) -> None: ...

    def end(self, request_id: int) -> None:
        self.ended.append(request_id)

    def propose(self, request_id: int, most: int, *, after: Several[int] = ()) -> list[Draft]:
        return [Draft(16 + len(after) + n, 0.2, 4, "guess") for n in range(most)]


class Steps(Costs):
    """Keeps what it is told."""

    told: dict[str, Any]

    def step(self, **named: Any) -> None:
        self.told = named


class Heard(Speculator):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(Guesses(), FixedGate(2), most=2, windows=4)
        self.costs: Steps = Steps()
        self.heard: list[dict[str, Any]] = []
        self.begin(7, ())
        self.begin(8, ())
        self.fill({7: 9}, rows=2, now_s=9.8)

    def came_out(self, request_id: int, *arguments: Any, **named: Any) -> None:
        self.heard.append({"request_id": request_id, **named})
        super().came_out(request_id, *arguments, **named)


def engine_at(
    *,
    spent_s: float = 0.2,
    run_s: float = 9.7,
    drafted_s: float = 0.0,
    behind: Several[Flight] = (),
) -> tuple[Engine, Heard]:
    """One that has read a result at 10 s, `spent_s` after the one before, and that of the last
    frame that was not void at `run_s`."""
    engine, speculator = Engine.__new__(Engine), Heard()
    engine.timings, engine.speculator, engine._in_flight = Timings(), speculator, deque(behind)
    engine._result_at, engine._spent_s, engine._run_at = 10.0, spent_s, run_s
    engine._drafted_s = drafted_s
    return engine, speculator


def tell(engine: Engine, flight: Flight, result: Result) -> Outcome:
    found = outcome(flight, result, {} if result.is_void else RUNNING)
    engine._tell_speculator(flight, RUNNING, found, is_void=result.is_void)
    return found


def test_a_frame_by_itself_tells_its_time_and_one_behind_another_the_time_between() -> None:
    for flight, run_s, latency_s, spacing_s in (
        (flight_of(CERTAIN, *DRAFTS), 9.7, 0.2, None),
        (flight_of(CERTAIN, *DRAFTS), 9.9, 0.2, 0.1),
        (flight_of(CERTAIN, *DRAFTS, slot=-1), 9.9, None, 0.1),
        (flight_of(CERTAIN, *DRAFTS, slot=-1), 9.7, None, None),
    ):
        engine, speculator = engine_at(run_s=run_s, spent_s=0.05)
        tell(engine, flight, result_of(16, 99, 18))
        told = speculator.costs.told
        assert (told["rows"], told["tokens"], told["seconds"]) == (3, 2, 0.05)
        for name, want in (("latency_s", latency_s), ("spacing_s", spacing_s)):
            assert told[name] == (want if want is None else pytest.approx(want)), name


def test_void_frames_tell_no_cost_of_rows_and_are_none_to_measure_from() -> None:
    engine, speculator = engine_at(run_s=9.9)
    tell(engine, flight_of(*DRAFTS, slot=-1), result_of(0, 0, is_void=True))
    assert (speculator.costs.told["rows"], speculator.costs.told["tokens"]) == (0, 0)
    assert speculator.figures.void_rows == 2 and engine._run_at == 9.9
    tell(engine, flight_of(CERTAIN), result_of(16))
    assert speculator.costs.told["rows"] == 1 and engine._run_at == 10.0
    assert speculator.figures.void_rows == 2


@pytest.mark.parametrize(("drafted_s", "rows"), [(0.51, 3), (0.53, 0)])
def test_a_result_that_lay_unread_while_drafts_were_made_tells_no_cost_of_rows(
    drafted_s: float, rows: int
) -> None:
    """0.5 s of drafting were over when the frame was sent; it took 0.2 s."""
    engine, speculator = engine_at(drafted_s=drafted_s)
    tell(engine, flight_of(CERTAIN, *DRAFTS, drafted_s=0.5), result_of(16, 17, 18))
    assert speculator.costs.told["rows"] == rows


def test_frames_with_rows_of_prompts_tell_no_times() -> None:
    engine, speculator = engine_at()
    tell(engine, flight_of(CERTAIN, *READ), result_of(16, -1, -1, 25))
    assert not hasattr(speculator.costs, "told")


def test_a_speculator_hears_of_each_request_what_came_when_and_whether_it_is_over() -> None:
    behind = flight_of(*DRAFTS, slot=-1)
    engine, speculator = engine_at(behind=[behind, behind])
    flight = Flight(5, 0, Tick((CERTAIN, *DRAFTS, *READ), ()), RUNNING, 9.8)
    short = replace(PROMPT, request=Request(prompt=PROMPT.request.prompt, max_tokens=1))
    ends = {**RUNNING, 0: short}
    found = outcome(flight, result_of(16, 99, 18, -1, -1, 25), ends)
    engine._tell_speculator(flight, ends, found, is_void=False)
    assert speculator.heard == [
        {"request_id": 7, "now_s": 10.0, "is_over": False, "is_ahead": False},
        {"request_id": 8, "now_s": 10.0, "is_over": True, "is_ahead": False},
    ]
    drafter: Any = speculator.drafter
    assert drafter.ended == [8], "and is not followed any more"
    assert speculator.figures.rows_in_flight == 6 + 2 + 2


def test_frames_of_drafts_alone_begin_no_round() -> None:
    engine, speculator = engine_at()
    speculator.came_out(7, [15], now_s=9.9, is_over=False)
    speculator.heard.clear()
    tell(engine, flight_of(CERTAIN, slot=-1), result_of(16))
    assert speculator.heard[0]["is_ahead"] and speculator.figures.rounds == 1


def test_time_and_tokens_are_of_prompts_and_answers_by_rows_that_are_certain() -> None:
    engine, _ = engine_at()
    flight = flight_of(CERTAIN, *DRAFTS, *READ)
    engine._account(flight, 0.4)
    tell(engine, flight, result_of(16, 99, 18, -1, -1, 25))
    timings = engine.timings
    assert (timings.prefill_s, timings.decode_s) == (pytest.approx(0.3), pytest.approx(0.1))
    assert (timings.prefill_tokens, timings.decode_tokens) == (3, 1 + 1), "a draft that was right"
    engine._account(flight_of(*DRAFTS, slot=-1), 0.7)
    assert timings.decode_s == pytest.approx(0.8) and timings.prefill_s == pytest.approx(0.3)
    assert timings.decode_tokens == 2


# --- what an engine sends ------------------------------------------------------------------------


def ready_engine(*in_flight: Flight) -> tuple[Any, Heard]:
    """Of two stages and three frames of drafts, with drafts of four rows; of 8 the prompt runs."""
    found, speculator = engine_at(behind=in_flight)
    engine: Any = found
    engine.options, engine.layout = SimpleNamespace(windows=3), SimpleNamespace(pp=2)
    engine.limits, engine._drafting_s = SimpleNamespace(drafts=4), 0.0
    engine.batch = Batch(
        waiting=(), running=(PROMPT, TEXT), free_slots=(), pool=PagePool.of(range(4))
    )
    return engine, speculator


def test_drafts_follow_while_there_is_a_place_and_a_stage_would_idle() -> None:
    certain, drafts = flight_of(CERTAIN), flight_of(*DRAFTS, slot=-1)
    for in_flight, follows in (
        ([], False),
        ([certain], True),
        ([certain, drafts], True),
        ([certain, drafts, drafts], False),
        ([certain, certain], False),
        ([drafts], True),
    ):
        engine, _ = ready_engine(*in_flight)
        tick = engine._ahead_tick()
        assert (tick is not None) == follows, in_flight
        if tick is not None:
            assert [(row.slot, row.position, row.token) for row in tick.rows] == [
                (1, 7, 18),
                (1, 8, 19),
                (1, 9, 20),
            ]
            assert engine.batch.running[1].drafted == (16, 17, 18, 19, 20)


def test_drafts_are_asked_for_up_to_the_last_whose_row_draws_a_token() -> None:
    asked: list[tuple[dict[int, int], dict[str, Any]]] = []

    def fill(room: dict[int, int], **named: Any) -> dict[int, tuple[int, ...]]:
        asked.append((room, named))
        time.sleep(0.01)
        return {7: (18,)}

    engine, speculator = ready_engine()
    speculator.fill = fill  # type: ignore[method-assign]
    assert engine._drafts((TEXT,)) == {1: (18,)}
    room, named = asked[0]
    assert room == {7: 20 - 2 - 2 - 1}, "of 20 tokens 2 are there, 2 drafted, 1 is certain"
    assert named["rows"] == 4 and not named["are_ahead"]
    engine._drafts((TEXT,), are_ahead=True)
    assert asked[1][1]["are_ahead"] and engine._drafted_s == engine._drafting_s >= 0.02


def test_a_frame_that_none_is_before_takes_the_time_of_its_drafts_too() -> None:
    engine, _ = ready_engine()
    engine._log = engine.steps = engine._uncollected = None
    engine.control = SimpleNamespace(send_frame=lambda *_: 6)
    engine._frame = lambda *_: ()
    engine._drafting_s, engine._drafted_s = 0.5, 3.0
    engine._send(Tick((CERTAIN,), ()), slot=0)
    assert 0.5 <= time.monotonic() - engine._result_at < 5.5 and engine._drafting_s == 0
    (flight,) = engine._in_flight
    assert (flight.frame, flight.is_ahead, flight.drafted_s) == (6, False, 3.0)
    engine._result_at = 10.0
    engine._send(Tick(DRAFTS, ()), slot=-1)
    assert engine._result_at == 10.0 and engine._in_flight[1].is_ahead


def test_ranks_hear_once_of_a_frame_that_nobody_waits_for() -> None:
    heard: list[int] = []

    def void(frame: int) -> None:
        heard.append(frame)
        raise PeerLost("it is gone", rank=1)  # found out by whoever waits for a result

    wrong = replace(TEXT, generation=3)
    behind = Flight(6, 0, Tick((Row(1, 5, 99, True),), ()), {1: wrong}, 9.9)
    engine, _ = ready_engine(flight_of(CERTAIN, *DRAFTS))
    engine.control, engine._void = SimpleNamespace(void=void), set()
    engine._void_frames()
    assert not heard
    engine.batch = replace(engine.batch, running=(wrong,))
    engine._in_flight.append(behind)
    for _ in range(2):
        engine._void_frames()
    assert heard == [5] and engine._void == {5}
