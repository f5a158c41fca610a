"""A frame between its sending and its result: what was sent, and what its rows were.

Pure. Knows nothing of ranks, clocks or who waits for tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from anyshard.batch import Sequence, Tick
from anyshard.comm.control import Result
from anyshard.fidelity.log import RecordedRow

__all__ = ["FinishReason", "Flight", "finish_reason"]

FinishReason = Literal["stop", "length", "fault"]


@dataclass(frozen=True)
class Flight:
    """A frame whose result is yet to be read: of slot number `slot` of the schedule's first stage.

    `sequences`, by their slot, as they were when it was sent.
    """

    frame: int
    slot: int
    tick: Tick
    sequences: dict[int, Sequence]

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
