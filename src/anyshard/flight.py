"""A frame between its sending and its result: what was sent, and what its rows were.

Pure. Knows nothing of ranks, clocks or who waits for tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from anyshard.batch import Row, Sequence, Tick
from anyshard.comm.base import FloatArray
from anyshard.comm.control import Result
from anyshard.fidelity.log import RecordedRow
from anyshard.ops.spread import Spread

__all__ = ["FinishReason", "Flight", "Outcome", "Said", "finish_reason", "outcome"]

FinishReason = Literal["stop", "length", "fault"]


@dataclass(frozen=True)
class Flight:
    """A frame whose result is yet to be read: of slot number `slot` of the schedule's first stage,
    -1 if all its rows are drafts, which the schedule does not count.

    `sequences`, by their slot, as they were when it was sent, at `sent_s` of time.monotonic, when
    drafts had taken `drafted_s` in all.
    """

    frame: int
    slot: int
    tick: Tick
    sequences: dict[int, Sequence]
    sent_s: float
    drafted_s: float = 0.0

    @property
    def is_ahead(self) -> bool:
        """Whether all rows are drafts that follow those of an earlier frame."""
        return self.slot < 0

    def awaited(self, row: Row, running: Mapping[int, Sequence]) -> bool:
        """Whether somebody waits for a row of it: its request runs, by slot, and no draft before it
        has been wrong."""
        sent, now = self.sequences[row.slot], running.get(row.slot)
        return (
            now is not None
            and now.request_id == sent.request_id
            and now.generation == sent.generation
        )

    @property
    def prompt_rows(self) -> int:
        """How many rows are of prompts."""
        prompts = {slot: len(s.request.prompt) for slot, s in self.sequences.items()}
        return sum(row.position < prompts[row.slot] for row in self.tick.rows)

    @property
    def certain_rows(self) -> int:
        """How many rows are no drafts."""
        return sum(not row.is_draft for row in self.tick.rows)

    def recorded_rows(self, result: Result, running: frozenset[int]) -> list[RecordedRow]:
        """The rows as the log wants them; of requests that no longer ran when the result came
        nothing is kept."""
        rows, by_slot = self.tick.rows, self.sequences
        failed: dict[int, int] = {}  # slot to its first position that failed
        for row, fault in zip(rows, result.faults, strict=True):
            if fault:
                failed[row.slot] = min(row.position, failed.get(row.slot, row.position))
        return [
            RecordedRow(
                by_slot[row.slot].request_id,
                row.position,
                row.through_head,
                by_slot[row.slot].emitted if row.sample and ran else None,
                is_kept=ran and row.position < failed.get(row.slot, row.position + 1),
            )
            for row in rows
            for ran in (by_slot[row.slot].request_id in running,)
        ]


def finish_reason(sequence: Sequence, token: int, *, emitted: int) -> FinishReason | None:
    """Why its answer ends with a token; None if it goes on. emitted: tokens of it before that."""
    if token in sequence.request.stop_ids:
        return "stop"
    if emitted + 1 >= sequence.request.max_tokens:
        return "length"
    return None


@dataclass(frozen=True)
class Said:
    """What a row has to say of its sequence: a token (with logits, if they were asked for) and
    perhaps the end; logits alone; or that row number `fault` of the frame has failed."""

    sequence: Sequence
    token: int | None = None
    logits: FloatArray | None = None
    finish: FinishReason | None = None
    fault: int | None = None


@dataclass(frozen=True)
class Outcome:
    """Of a frame: tokens that came out, their spreads if these are known, and slots that ended, by
    slot; in order, what is to be told; how many of the rows that counted were drafts; slots of
    which a draft was right and its row has failed, so that it is to run again as what is certain,
    and say by itself where."""

    drawn: dict[int, list[int]]
    spreads: dict[int, list[Spread]]
    finished: frozenset[int]
    said: list[Said]
    drafts_right: int
    again: frozenset[int]


def outcome(flight: Flight, result: Result, running: Mapping[int, Sequence]) -> Outcome:
    """What a result means for the sequences that run, by slot.

    Rows that nobody waits for any more are passed over: of a request that has ended, or behind a
    draft that was wrong. A draft counts if it is the token that has come out just before.
    """
    drawn: dict[int, list[int]] = {}
    spreads: dict[int, list[Spread]] = {}
    finished: set[int] = set()
    again: set[int] = set()
    said: list[Said] = []
    right = logits_index = 0
    for index, row in enumerate(flight.tick.rows):
        logits = None
        if row.logits and result.logits is not None:
            logits = result.logits[logits_index]
            logits_index += 1
        if row.slot in finished | again or not flight.awaited(row, running):
            continue
        sequence = running[row.slot]
        mine = drawn.get(row.slot, [])
        if row.is_draft:
            text = len(sequence.tokens) + len(mine)
            last = mine[-1] if mine else sequence.tokens[-1]
            if (row.position, row.token) != (text - 1, last):
                continue
            if result.faults[index]:
                again.add(row.slot)
                continue
            right += 1
        assert not result.is_void, "somebody waits for a frame that was void"
        if result.faults[index]:
            finished.add(row.slot)
            said.append(Said(sequence, fault=index))
        elif row.sample:
            token = result.tokens[index]
            finish = finish_reason(sequence, token, emitted=sequence.emitted + len(mine))
            drawn.setdefault(row.slot, mine).append(token)
            if result.spreads is not None:
                spreads.setdefault(row.slot, []).append(result.spreads[index])
            if finish is not None:
                finished.add(row.slot)
            said.append(Said(sequence, token, logits, finish))
        elif row.logits:
            said.append(Said(sequence, logits=logits))
    return Outcome(drawn, spreads, frozenset(finished), said, right, frozenset(again))
