"""How many drafts are worth their rows: those with which a token takes the least time.

Survival of a draft is the chance that it and all before it are right, as a source's drafts of like
length, entropy and depth, behind rows of which the model was as sure, have turned out so far; what
rows cost is measured (`cost.py`). Rows are added, the likeliest first, while tokens to come over
seconds to spend grows. Source: docs/speculation.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from anyshard.speculate.cost import Costs, predicted_s
from anyshard.speculate.drafter import Draft

__all__ = ["Calibrator", "FixedGate", "Gate", "OpenGate", "SurvivalGate"]

ENTROPY_EDGES: Final = (0.1, 0.3, 0.6, 1.2, 2.5)  # nats
DEPTH_EDGES: Final = (1, 2, 4, 8)  # drafts before it: 0, 1, 2 to 3, 4 to 7, more
DECAY: Final = 0.995  # of what is known, with each draft of the kind that turns out
SHRINK: Final = 5.0  # drafts that the kind's parent counts for, and what the source says
PART_SHRINK: Final = 16.0  # that a kind counts for, of its part by the model's entropy
NEAR: Final = 0.95  # of the best rate, that fewer rows reach: what is known of it is no better
FIRST_SURVIVAL: Final = 0.25  # least that is run before anything is measured
SPAN: Final = 4  # rows by which the cost of one more is told
AHEAD: Final = 0.1  # of a row's cost, what one costs that others do not wait for
LEAST_GAIN: Final = 1.02
ROUNDS: Final = 64
CLEAR_LOSS: Final = 0.9  # a gain below it is enough
FEW_ROUNDS: Final = 16  # after so many
MUTED_TOKENS: Final = 256
MOST_SILENCES: Final = 5  # in a row, each twice as long


class Gate(Protocol):
    """Decides on drafts, and learns how they turned out."""

    def is_silent(self, sources: Collection[str]) -> bool:
        """Whether drafts of none of these are wanted now."""
        ...

    def survival(
        self,
        drafts: Sequence[Draft],
        *,
        depth: int,
        before: float,
        are_ahead: bool = False,
        target_entropy: float = math.nan,
    ) -> list[float]:
        """The chance of each that it will count. They follow `depth` drafts that are under way, all
        of which are right with chance `before`. are_ahead: in a frame of drafts alone.
        target_entropy: of the model's row that drew the last token, in nats; NaN: unknown."""
        ...

    def may_follow(self, costs: Costs, *, under_way: int) -> bool:
        """Whether a frame of drafts alone is worth asking drafts for, with so many under way."""
        ...

    def count(self, chances: Sequence[float], costs: Costs, *, certain: int) -> int:
        """How many rows of drafts to run, of those with these chances, which fall, beside so many
        certain rows; of these there are none in a frame of drafts alone."""
        ...

    def turned_out(
        self, draft: Draft, depth: int, *, is_hit: bool, target_entropy: float = math.nan
    ) -> None:
        """A draft behind `depth` others, which were right, was or was not. target_entropy: that it
        was proposed with."""
        ...

    def round_over(self, source: str, gain: float) -> None:
        """With drafts of a source a request has come from one certain row to the next so many times
        sooner than it would have without."""
        ...

    def passed(self, tokens: int) -> None:
        """Tokens have come out."""
        ...

    def theta(self, costs: Costs) -> float:
        """The least survival that is worth a row."""
        ...


class OpenGate:
    """All drafts."""

    def is_silent(self, sources: Collection[str]) -> bool:
        """See Gate."""
        return False

    def survival(
        self,
        drafts: Sequence[Draft],
        *,
        depth: int,
        before: float,
        are_ahead: bool = False,
        target_entropy: float = math.nan,
    ) -> list[float]:
        """See Gate: the first ones go first."""
        return [1.0 / (1 + depth + place) for place in range(len(drafts))]

    def may_follow(self, costs: Costs, *, under_way: int) -> bool:
        """See Gate."""
        return True

    def count(self, chances: Sequence[float], costs: Costs, *, certain: int) -> int:
        """See Gate."""
        return len(chances)

    def turned_out(
        self, draft: Draft, depth: int, *, is_hit: bool, target_entropy: float = math.nan
    ) -> None:
        """See Gate."""

    def round_over(self, source: str, gain: float) -> None:
        """See Gate."""

    def passed(self, tokens: int) -> None:
        """See Gate."""

    def theta(self, costs: Costs) -> float:
        """See Gate."""
        return 0.0


class FixedGate(OpenGate):
    """The first so many of each request, behind what is certain; one more in a frame of drafts
    alone."""

    def __init__(self, most: int) -> None:
        self.most = most

    def survival(
        self,
        drafts: Sequence[Draft],
        *,
        depth: int,
        before: float,
        are_ahead: bool = False,
        target_entropy: float = math.nan,
    ) -> list[float]:
        """See Gate."""
        return super().survival(drafts[: self.most + are_ahead], depth=depth, before=before)


@dataclass
class _Odds:
    hits: float = 0.0
    misses: float = 0.0

    @property
    def share(self) -> float:
        """Of hits."""
        return self.hits / (self.hits + self.misses)

    def add(self, is_hit: bool) -> None:
        self.hits, self.misses = self.hits * DECAY, self.misses * DECAY
        if is_hit:
            self.hits += 1
        else:
            self.misses += 1


class Calibrator:
    """How often drafts of a kind are right, given that all before them are.

    Each kind (source, length of match, entropy, depth) leans on that of its source and entropy, and
    that on what the source says; the part of a kind by the model's own entropy, where a draft was
    proposed, leans on the kind. Brier's error of what it said is kept beside.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int, int, int, int], _Odds] = {}
        self._kinds: dict[tuple[str, int, int, int], _Odds] = {}
        self._parents: dict[tuple[str, int], _Odds] = {}  # by source and entropy
        self._squares, self._count = 0.0, 0

    def _of(self, draft: Draft, depth: int, target_entropy: float) -> tuple[_Odds, _Odds, _Odds]:
        place = bisect_left(DEPTH_EDGES, depth + 1)
        entropy = bisect_left(ENTROPY_EDGES, draft.entropy)
        target = bisect_left(ENTROPY_EDGES, target_entropy) if target_entropy >= 0 else -1
        kind = draft.source, min(draft.match, 8), entropy, place
        return (
            self._parts.setdefault((*kind, target), _Odds()),
            self._kinds.setdefault(kind, _Odds()),
            self._parents.setdefault((draft.source, entropy), _Odds()),
        )

    def chance(self, draft: Draft, depth: int, *, target_entropy: float = math.nan) -> float:
        """That it is right, with `depth` right ones before it. target_entropy: see Gate."""
        part, kind, parent = self._of(draft, depth, target_entropy)
        base = (parent.hits + SHRINK * draft.chance) / (parent.hits + parent.misses + SHRINK)
        base = (kind.hits + SHRINK * base) / (kind.hits + kind.misses + SHRINK)
        return (part.hits + PART_SHRINK * base) / (part.hits + part.misses + PART_SHRINK)

    def learn(
        self, draft: Draft, depth: int, *, is_hit: bool, target_entropy: float = math.nan
    ) -> None:
        """It was right, or was not."""
        chance = self.chance(draft, depth, target_entropy=target_entropy)
        self._squares += (chance - is_hit) ** 2
        self._count += 1
        for odds in self._of(draft, depth, target_entropy):
            odds.add(is_hit)

    @property
    def error(self) -> float:
        """Mean square of what was said less what came, 0.25 for who always says one half."""
        return self._squares / max(1, self._count)


@dataclass
class _Worth:
    """Whether a source pays."""

    gain: float = 1.1
    rounds: int = 0
    muted: int = 0  # tokens to go
    silences: int = 0  # in a row


@dataclass
class SurvivalGate:
    """Drafts while they bring tokens sooner; a source that does not pay is silent for a while.

    windows: frames of one request that may be under way.
    """

    windows: int = 1
    calibrator: Calibrator = field(default_factory=Calibrator)
    _worth: dict[str, _Worth] = field(default_factory=dict)
    _lately: _Odds = field(default_factory=lambda: _Odds(3.0, 2.0))  # all drafts that were run
    _follows: bool = False  # whether frames of drafts do, in this round,
    _rows: int = 1  # of so many rows

    def theta(self, costs: Costs) -> float:
        """See Gate: what one row more costs, over what a token takes."""
        token_s = costs.token_s
        if not costs.is_known or token_s is None:
            return FIRST_SURVIVAL
        few, many = costs.interval(1), costs.interval(1 + SPAN)
        return min(1.0, max(0.0, many - few) / SPAN / token_s)

    def is_silent(self, sources: Collection[str]) -> bool:
        """See Gate."""
        seen = [self._worth[source] for source in sources if source in self._worth]
        return bool(seen) and all(worth.muted for worth in seen)

    def survival(
        self,
        drafts: Sequence[Draft],
        *,
        depth: int,
        before: float,
        are_ahead: bool = False,
        target_entropy: float = math.nan,
    ) -> list[float]:
        """See Gate."""
        if not drafts or self._worth.setdefault(drafts[0].source, _Worth()).muted:
            return []
        found = []
        for place, draft in enumerate(drafts, depth):
            before *= self.calibrator.chance(draft, place, target_entropy=target_entropy)
            found.append(before)
        return found

    def may_follow(self, costs: Costs, *, under_way: int) -> bool:
        """See Gate: where the certain frame was of one request and tokens come sooner so, as many
        frames as leave before its token is back."""
        if not self._follows:
            return False
        rows = self._rows
        return under_way < rows * math.ceil(costs.latency.of(rows) / costs.interval(rows))

    def count(self, chances: Sequence[float], costs: Costs, *, certain: int) -> int:
        """See Gate; the first step runs none, to have something to compare with."""
        if certain:
            self._follows = False
        if not costs.is_known:
            return 0
        if self.windows == 1 or certain > 1 or costs.is_full:
            return self._at_once(chances, costs, certain=certain)
        if certain:
            self._rows, self._follows = self._following(costs, most=len(chances) + 1)
        if not self._follows:
            return self._at_once(chances, costs, certain=1) if certain else 0
        least = self.theta(costs) * AHEAD
        worth = sum(chance >= least for chance in chances)
        return min(worth, self._rows - certain)

    def _at_once(self, chances: Sequence[float], costs: Costs, *, certain: int) -> int:
        """Rows of a frame that the next one waits for: tokens over seconds."""
        rates, tokens = [], float(certain)
        for number, chance in enumerate((0.0, *chances)):
            tokens += chance
            rates.append(tokens / costs.frame(certain + number))
        enough = NEAR * max(rates)
        return next(number for number, rate in enumerate(rates) if rate >= enough)

    def _following(self, costs: Costs, *, most: int) -> tuple[int, bool]:
        """Rows of frames that follow each other, by the formula; whether tokens come sooner so, if
        what follows a wrong draft is in the way for half of a frame."""
        right = min(self._lately.share, 0.999)
        at_once, following = [], []
        for rows in range(1, max(1, most) + 1):
            latency, interval = costs.latency.of(rows), costs.interval(rows)
            at_once.append(predicted_s(right, rows, latency_s=latency, interval_s=latency))
            each = predicted_s(right, rows, latency_s=latency, interval_s=interval)
            following.append(each + (1 - right) * interval / 2)
        sooner = min(following)
        return following.index(sooner) + 1, sooner < min(at_once)

    def turned_out(
        self, draft: Draft, depth: int, *, is_hit: bool, target_entropy: float = math.nan
    ) -> None:
        """See Gate."""
        self._lately.add(is_hit)
        self.calibrator.learn(draft, depth, is_hit=is_hit, target_entropy=target_entropy)

    def round_over(self, source: str, gain: float) -> None:
        """See Gate."""
        worth = self._worth.setdefault(source, _Worth())
        worth.rounds += 1
        worth.gain += (gain - worth.gain) / 32
        is_loss = worth.rounds >= FEW_ROUNDS and worth.gain < CLEAR_LOSS
        if is_loss or (worth.rounds >= ROUNDS and worth.gain < LEAST_GAIN):
            tokens = MUTED_TOKENS << worth.silences
            silences = min(worth.silences + 1, MOST_SILENCES)
            self._worth[source] = _Worth(muted=tokens, silences=silences)
        elif worth.rounds >= ROUNDS:
            worth.silences = 0

    def passed(self, tokens: int) -> None:
        """See Gate."""
        for worth in self._worth.values():
            worth.muted = max(0, worth.muted - tokens)
