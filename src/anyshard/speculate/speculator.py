"""What an engine asks for drafts, and tells what became of them.

Knows nothing of ticks, ranks or clocks.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from anyshard.ops.spread import UNKNOWN, Spread
from anyshard.request import Sampling
from anyshard.speculate.cost import Costs, predicted_s
from anyshard.speculate.drafter import Draft, Drafter
from anyshard.speculate.gate import Gate, SurvivalGate

__all__ = ["SpeculationFigures", "Speculator"]


PLACES: Final = 32  # that drafts are counted by; the last one stands for all behind it


class SpeculationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of a run. rounds: certain rows after which a token was drawn, of which drafts followed
    some; proposed and accepted: drafts that were run, by their place behind it. rollbacks:
    drafts that were wrong, and rollback_rows: with those behind them. void_rows: of drafts, in
    frames that came back void. rows_in_flight: mean of those under way when tokens came, and as
    many of them as count in the end. theta and calibration_error: of the gate, at the end.
    token_ms: measured lately, and predicted from a draft's chance, rows of a frame, and what
    frames take.

    Of the drafts that were wrong: near_misses were the model's runner-up there, of runner_ups of
    which that is known; rescued counts those whose source's second choice was the token drawn, of
    second_choices that had one: what a branch would have saved. target_entropy (nats) and
    target_margin: means over all tokens drawn, None if unknown.
    """

    rounds: int
    drafted_rounds: int
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]
    rollbacks: int
    rollback_rows: int
    void_rows: int
    rows_in_flight: float
    useful_rows_in_flight: float
    theta: float
    calibration_error: float | None
    token_ms: float | None
    predicted_token_ms: float | None
    near_misses: int
    runner_ups: int
    rescued: int
    second_choices: int
    target_entropy: float | None
    target_margin: float | None

    @property
    def wasted_rows(self) -> int:
        """Rows of drafts that did not count."""
        return sum(self.proposed) - sum(self.accepted)

    @property
    def acceptance_length(self) -> float:
        """Tokens of a round, mean."""
        return 1 + sum(self.accepted) / max(1, self.rounds)

    @property
    def acceptance_rate(self) -> float | None:
        """Drafts that counted, of those that were run; None where none was."""
        run = sum(self.proposed)
        return round(sum(self.accepted) / run, 4) if run else None

    def text(self) -> str:
        """One line of them."""
        right, run = sum(self.accepted), sum(self.proposed)
        return (
            f"speculation: {self.acceptance_length:.2f} tokens a round · {right} of {run} drafts "
            f"right, in {self.drafted_rounds} of {self.rounds} rounds"
        )

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        counted: dict[str, Any] = msgspec.to_builtins(self)
        return counted | {
            "wasted_rows": self.wasted_rows,
            "acceptance_length": round(self.acceptance_length, 4),
            "acceptance_rate": self.acceptance_rate,
        }


@dataclass
class _Counts:
    proposed: list[int]
    accepted: list[int]
    rounds: int = 0
    drafted_rounds: int = 0
    frames: int = 0  # of drafts
    rows: int = 0
    hits: int = 0
    rollbacks: int = 0
    rollback_rows: int = 0
    void_rows: int = 0
    looks: int = 0
    rows_seen: int = 0
    near_misses: int = 0
    runner_ups: int = 0
    rescued: int = 0
    second_choices: int = 0
    spreads: int = 0  # that are known
    entropy: float = 0.0  # of these together
    margin: float = 0.0

    def drawn(self, spread: Spread) -> None:
        if spread.entropy >= 0:
            self.spreads += 1
            self.entropy += spread.entropy
            self.margin += spread.margin

    def refuted(self, draft: Draft, token: int, spread: Spread) -> None:
        self.runner_ups += spread.runner_up >= 0
        self.near_misses += spread.runner_up == draft.token
        self.second_choices += draft.second >= 0
        self.rescued += draft.second == token

    def a_token(self, total: float) -> float | None:
        return round(total / self.spreads, 4) if self.spreads else None


class _UnderWay(NamedTuple):
    """A draft, its place behind what was certain, how many were under way before it, the chance
    that it is right if those are, and the model's entropy when it was proposed."""

    draft: Draft
    place: int
    depth: int
    chance: float
    entropy: float


@dataclass
class _Line:
    """Of one request: the entropy of the row that drew its last token; drafts under way; of its
    round, how many drafts there were, whose, since when, and what it has brought."""

    entropy: float = math.nan
    drafts: deque[_UnderWay] = field(default_factory=deque)
    place: int = 0
    source: str = ""
    begun_s: float = 0.0
    plain_s: float = 0.0  # what a frame takes without drafts
    tokens: int = 0

    def begin(self, now_s: float) -> None:
        """A certain row goes in."""
        assert not self.drafts, "what is certain follows what has come out"
        self.place, self.source, self.tokens = 0, "", 0
        self.begun_s, self.plain_s = now_s, 0.0


class Speculator:
    """Drafts of all requests of an engine; at most `most` rows of them in a frame, and `windows`
    frames of one request under way."""

    def __init__(self, drafter: Drafter, gate: Gate, *, most: int, windows: int = 1) -> None:
        self.most, self.windows = most, windows
        self.gate = gate
        self.costs = Costs()
        self.drafter = drafter
        self._lines: dict[int, _Line] = {}
        places = min(PLACES, most * windows)
        self._counts = _Counts(proposed=[0] * places, accepted=[0] * places)

    def begin(
        self, request_id: int, prompt: Sequence[int], *, sampling: Sampling | None = None
    ) -> None:
        """A request has been admitted, whose tokens are drawn so."""
        self.drafter.begin(request_id, prompt, sampling=sampling)
        self._lines[request_id] = _Line()

    def end(self, request_id: int) -> None:
        """It is over, or was cancelled; told of one that never began, nothing happens."""
        if self._lines.pop(request_id, None) is not None:
            self.drafter.end(request_id)

    def fill(
        self, room: dict[int, int], *, rows: int, now_s: float, are_ahead: bool = False
    ) -> dict[int, tuple[int, ...]]:
        """Drafts for a frame of these requests: for each at most as many as it has room for, in all
        at most `rows`, those of the best survival first. are_ahead: they follow those under way;
        else certain rows, one of each request."""
        known = [each for each in room if each in self._lines]
        if not known or self.gate.is_silent(self.drafter.sources):
            return {}
        under_way = sum(len(self._lines[each].drafts) for each in known)
        if are_ahead and not self.gate.may_follow(self.costs, under_way=under_way):
            return {}
        proposed: dict[int, list[Draft]] = {}
        chances: dict[int, list[float]] = {}
        heap: list[tuple[float, int, int]] = []
        for request_id in known:
            line = self._lines[request_id]
            after = [each.draft.token for each in line.drafts]
            drafts = self.drafter.propose(request_id, min(room[request_id], rows), after=after)
            proposed[request_id] = drafts
            chances[request_id] = self.gate.survival(
                drafts,
                depth=len(after),
                before=math.prod(each.chance for each in line.drafts),
                are_ahead=are_ahead,
                target_entropy=line.entropy,
            )
            if chances[request_id]:
                heap.append((-chances[request_id][0], request_id, 0))
        heapq.heapify(heap)
        order: list[tuple[float, int]] = []
        while heap and len(order) < rows:
            falls, request_id, at = heapq.heappop(heap)
            order.append((-falls, request_id))
            if at + 1 < len(chances[request_id]):
                heapq.heappush(heap, (-chances[request_id][at + 1], request_id, at + 1))
        if not are_ahead:
            for request_id in known:
                self._lines[request_id].begin(now_s)
        certain = 0 if are_ahead else len(room)
        count = self.gate.count([chance for chance, _ in order], self.costs, certain=certain)
        taken = dict.fromkeys(known, 0)
        for _, request_id in order[:count]:
            taken[request_id] += 1
        if not are_ahead and self.costs.is_known:
            for request_id in known:
                line, drafts = self._lines[request_id], proposed[request_id]
                line.plain_s = self.costs.round(certain)
                if drafts and self.drafter.takes_time:  # asked for nothing, if none is run
                    line.source = drafts[0].source
        self._counts.frames += count > 0
        self._counts.rows += count + certain * (count > 0)
        return {
            request_id: self._run(request_id, proposed[request_id][:number], chances[request_id])
            for request_id, number in taken.items()
            if number
        }

    def _run(
        self,
        request_id: int,
        drafts: list[Draft],
        chances: list[float],
    ) -> tuple[int, ...]:
        """Put drafts under way, the first of `chances` that they count."""
        line, counts = self._lines[request_id], self._counts
        line.source = line.source or drafts[0].source
        counts.drafted_rounds += line.place == 0
        before = math.prod(each.chance for each in line.drafts)
        for draft, chance in zip(drafts, chances, strict=False):
            own = chance / max(before, 1e-99)
            line.drafts.append(_UnderWay(draft, line.place, len(line.drafts), own, line.entropy))
            counts.proposed[min(line.place, len(counts.proposed) - 1)] += 1
            line.place, before = line.place + 1, chance
        return tuple(draft.token for draft in drafts)

    def came_out(
        self,
        request_id: int,
        tokens: Sequence[int],
        spreads: Sequence[Spread] = (),
        *,
        now_s: float,
        is_over: bool,
        is_ahead: bool = False,
    ) -> None:
        """Tokens that a frame of a request has brought, all but the last of them drafts, and the
        spread of each, if known; whether its answer ends with them, and whether its first row was a
        draft as well."""
        counts = self._counts
        spreads = spreads or [UNKNOWN] * len(tokens)
        for spread in spreads:
            counts.drawn(spread)
        counts.rounds += not is_ahead
        self.gate.passed(len(tokens))
        line = self._lines.get(request_id)
        if line is None:
            return
        line.tokens += len(tokens)
        for number, token in enumerate(tokens):
            if not line.drafts or (is_over and number == len(tokens) - 1):
                break
            draft, place, depth, _, entropy = line.drafts.popleft()
            is_hit = draft.token == token
            self.gate.turned_out(draft, depth, is_hit=is_hit, target_entropy=entropy)
            if is_hit:
                counts.hits += 1
                counts.accepted[min(place, len(counts.accepted) - 1)] += 1
                continue
            counts.refuted(draft, token, spreads[number])
            counts.rollbacks += 1
            counts.rollback_rows += 1 + len(line.drafts)
            line.drafts.clear()
        self.drafter.extend(request_id, tokens)
        line.entropy = spreads[-1].entropy
        if line.drafts:
            return
        if line.source and line.plain_s and not is_over:
            gain = line.tokens * line.plain_s / max(1e-9, now_s - line.begun_s)
            self.gate.round_over(line.source, gain)
        line.begin(now_s)  # until the certain row goes in

    def drop(self, request_id: int) -> None:
        """The drafts of a request that are under way do not count, whatever they are."""
        if (line := self._lines.get(request_id)) is not None:
            self._counts.rollback_rows += len(line.drafts)
            line.drafts.clear()

    def saw(self, rows: int) -> None:
        """So many rows were under way when a result came."""
        self._counts.looks += 1
        self._counts.rows_seen += rows

    def voided(self, rows: int) -> None:
        """So many rows of drafts were of a frame that came back void."""
        self._counts.void_rows += rows

    @property
    def figures(self) -> SpeculationFigures:
        """Of all requests so far."""
        counts, gate = self._counts, self.gate
        token_s, predicted = self.costs.token_s, self._predicted_s()
        in_flight = counts.rows_seen / max(1, counts.looks)
        useful = counts.rounds + sum(counts.accepted)
        wasted = sum(counts.proposed) - sum(counts.accepted)
        return SpeculationFigures(
            rounds=counts.rounds,
            drafted_rounds=counts.drafted_rounds,
            proposed=tuple(counts.proposed),
            accepted=tuple(counts.accepted),
            rollbacks=counts.rollbacks,
            rollback_rows=counts.rollback_rows,
            void_rows=counts.void_rows,
            rows_in_flight=round(in_flight, 4),
            useful_rows_in_flight=round(in_flight * useful / max(1, useful + wasted), 4),
            theta=gate.theta(self.costs),
            calibration_error=gate.calibrator.error if isinstance(gate, SurvivalGate) else None,
            token_ms=None if token_s is None else round(1e3 * token_s, 4),
            predicted_token_ms=None if predicted is None else round(1e3 * predicted, 4),
            near_misses=counts.near_misses,
            runner_ups=counts.runner_ups,
            rescued=counts.rescued,
            second_choices=counts.second_choices,
            target_entropy=counts.a_token(counts.entropy),
            target_margin=counts.a_token(counts.margin),
        )

    def _predicted_s(self) -> float | None:
        """By the formula, with what was measured; None where no drafts were run."""
        counts = self._counts
        if not counts.frames or not self.costs.is_known:
            return None
        rows = counts.rows / counts.frames
        right = counts.hits / max(1, counts.hits + counts.rollbacks)
        frame_s = self.costs.frame(round(rows))
        are_behind = self.windows > 1 and not self.costs.is_full
        interval_s = self.costs.interval(round(rows)) if are_behind else frame_s
        return predicted_s(right, rows, latency_s=frame_s, interval_s=interval_s)
