"""What an engine asks for drafts, and tells what became of them.

Knows nothing of ticks or ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from anyshard.speculate.drafter import Draft, Drafter
from anyshard.speculate.gate import Gate, SurvivalGate

__all__ = ["SpeculationFigures", "Speculator"]


class SpeculationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of a run. rounds: steps of a request after which a token was drawn; proposed and accepted:
    drafts that were run, by their place; theta and calibration_error: of the gate, at the end."""

    rounds: int
    drafted_rounds: int
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]
    theta: float
    calibration_error: float | None

    @property
    def wasted_rows(self) -> int:
        """Rows of drafts that did not count."""
        return sum(self.proposed) - sum(self.accepted)

    @property
    def acceptance_length(self) -> float:
        """Tokens of a round, mean."""
        return 1 + sum(self.accepted) / max(1, self.rounds)

    def text(self) -> str:
        """One line of them."""
        right, run = sum(self.accepted), sum(self.proposed)
        return (
            f"speculation: {self.acceptance_length:.2f} tokens a step · {right} of {run} drafts "
            f"right, in {self.drafted_rounds} of {self.rounds} steps · theta {self.theta:.2f}"
        )

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        counted: dict[str, Any] = msgspec.to_builtins(self)
        return counted | {
            "wasted_rows": self.wasted_rows,
            "acceptance_length": round(self.acceptance_length, 4),
        }


@dataclass
class _Counts:
    rounds: int = 0
    drafted_rounds: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


class Speculator:
    """Drafts of all requests of an engine; at most `most` rows of them in a step."""

    def __init__(self, drafter: Drafter, gate: Gate, *, most: int) -> None:
        self.most = most
        self.gate = gate
        self._drafter = drafter
        self._under_way: dict[int, list[Draft]] = {}
        self._known: set[int] = set()
        self._counts = _Counts(proposed=[0] * most, accepted=[0] * most)

    def begin(self, request_id: int, prompt: Sequence[int]) -> None:
        """A request has been admitted."""
        self._drafter.begin(request_id, prompt)
        self._known.add(request_id)

    def end(self, request_id: int) -> None:
        """It is over, or was cancelled; told of one that never began, nothing happens."""
        if request_id in self._known:
            self._known.remove(request_id)
            self._under_way.pop(request_id, None)
            self._drafter.end(request_id)

    def fill(self, room: dict[int, int], *, rows: int) -> dict[int, tuple[int, ...]]:
        """Drafts for a step of these requests: for each at most as many as it has room for, in all
        at most `rows`, those of the best survival first."""
        proposed: dict[int, list[Draft]] = {}
        heap: list[tuple[float, int, int]] = []
        chances: dict[int, list[float]] = {}
        for request_id, most in room.items():
            drafts = self._drafter.propose(request_id, min(most, self.most, rows))
            proposed[request_id] = drafts
            chances[request_id] = self.gate.survival(drafts)
            if chances[request_id]:
                heapq.heappush(heap, (-chances[request_id][0], request_id, 0))
        taken = dict.fromkeys(room, 0)
        for _ in range(min(rows, self.most)):
            if not heap:
                break
            _, request_id, depth = heapq.heappop(heap)
            taken[request_id] = depth + 1
            if depth + 1 < len(chances[request_id]):
                heapq.heappush(heap, (-chances[request_id][depth + 1], request_id, depth + 1))
        filled: dict[int, tuple[int, ...]] = {}
        for request_id, count in taken.items():
            drafts = self._under_way[request_id] = proposed[request_id][:count]
            if drafts:
                filled[request_id] = tuple(draft.token for draft in drafts)
        return filled

    def came_out(self, request_id: int, tokens: Sequence[int], *, is_over: bool) -> None:
        """Tokens that a step of a request has brought, all but the last of them drafts; whether
        its answer ends with them."""
        accepted = len(tokens) - 1
        drafts, counts = self._under_way.pop(request_id, []), self._counts
        counts.rounds += 1
        counts.drafted_rounds += bool(drafts)
        for place in range(len(drafts)):
            counts.proposed[place] += 1
            counts.accepted[place] += place < accepted
        self.gate.turned_out(drafts, accepted, is_over=is_over)
        if request_id in self._known:
            self._drafter.extend(request_id, tokens)

    @property
    def figures(self) -> SpeculationFigures:
        """Of all requests so far."""
        counts, gate = self._counts, self.gate
        error = gate.calibrator.error if isinstance(gate, SurvivalGate) else None
        return SpeculationFigures(
            rounds=counts.rounds,
            drafted_rounds=counts.drafted_rounds,
            proposed=tuple(counts.proposed),
            accepted=tuple(counts.accepted),
            theta=gate.theta,
            calibration_error=error,
        )
