"""How many drafts are worth their rows: a row is run while its survival is worth its cost.

Survival of a draft is the chance that it and all before it are right, as a source's drafts of like
length, entropy and depth have turned out so far. Its cost is what one row more takes, over what a
token takes now: theta = seconds a row / seconds a token, both measured as it runs. Source:
docs/speculation.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from anyshard.speculate.drafter import Draft

__all__ = ["Calibrator", "FixedGate", "Gate", "OpenGate", "RowCost", "SurvivalGate"]

ENTROPY_EDGES: Final = (0.1, 0.3, 0.6, 1.2, 2.5)  # nats
DEPTH_EDGES: Final = (1, 2, 4)  # drafts before it: 0, 1, 2 to 3, more
DECAY: Final = 0.995  # of what is known, with each draft of the kind that turns out
SHRINK: Final = 4.0  # drafts that the kind's parent counts for
FIRST_THETA: Final = 0.25  # before anything is measured
SMOOTH: Final = 1 / 16  # of a new measurement
LEAST_GAIN: Final = 1.02
ROUNDS: Final = 64
MUTED_TOKENS: Final = 256


class Gate(Protocol):
    """Decides on drafts, and learns how they turned out."""

    def survival(self, drafts: Sequence[Draft]) -> list[float]:
        """The chance of each that it will count, as far as they are worth their rows."""
        ...

    def turned_out(self, drafts: Sequence[Draft], accepted: int, *, is_over: bool = False) -> None:
        """The first `accepted` of those that were run were right, the next one was not; of an
        answer that `is_over` nobody knows about that one."""
        ...

    def step(self, *, rows: int, tokens: int, seconds: float) -> None:
        """A step of so many rows, none of a prompt, has brought so many tokens."""
        ...

    @property
    def theta(self) -> float:
        """The least survival that is run."""
        ...


class OpenGate:
    """All drafts."""

    theta = 0.0

    def survival(self, drafts: Sequence[Draft]) -> list[float]:
        """See Gate: the first ones go first."""
        return [1.0 / (1 + depth) for depth in range(len(drafts))]

    def turned_out(self, drafts: Sequence[Draft], accepted: int, *, is_over: bool = False) -> None:
        """See Gate."""

    def step(self, *, rows: int, tokens: int, seconds: float) -> None:
        """See Gate."""


class FixedGate(OpenGate):
    """The first so many."""

    def __init__(self, most: int) -> None:
        self.most = most

    def survival(self, drafts: Sequence[Draft]) -> list[float]:
        """See Gate."""
        return super().survival(drafts)[: self.most]


@dataclass
class _Odds:
    hits: float = 0.0
    misses: float = 0.0

    def add(self, is_hit: bool) -> None:
        self.hits, self.misses = self.hits * DECAY, self.misses * DECAY
        if is_hit:
            self.hits += 1
        else:
            self.misses += 1


class Calibrator:
    """How often drafts of a kind are right, given that all before them are.

    Each kind (source, length of match, entropy, depth) leans on that of its source and depth, and
    that on one to one. Brier's error of what it said is kept beside.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, int, int, int], _Odds] = {}
        self._parents: dict[tuple[str, int], _Odds] = {}
        self._squares, self._count = 0.0, 0

    def _of(self, draft: Draft, depth: int) -> tuple[_Odds, _Odds]:
        place = bisect_left(DEPTH_EDGES, depth + 1)
        entropy = bisect_left(ENTROPY_EDGES, draft.entropy)
        kind = draft.source, min(draft.match, 8), entropy, place
        return (
            self._kinds.setdefault(kind, _Odds()),
            self._parents.setdefault((draft.source, place), _Odds()),
        )

    def chance(self, draft: Draft, depth: int) -> float:
        """That it is right, with `depth` right ones before it."""
        kind, parent = self._of(draft, depth)
        base = (parent.hits + 1) / (parent.hits + parent.misses + 2)
        return (kind.hits + SHRINK * base) / (kind.hits + kind.misses + SHRINK)

    def learn(self, draft: Draft, depth: int, *, is_hit: bool) -> None:
        """It was right, or was not."""
        self._squares += (self.chance(draft, depth) - is_hit) ** 2
        self._count += 1
        for odds in self._of(draft, depth):
            odds.add(is_hit)

    @property
    def error(self) -> float:
        """Mean square of what was said less what came, 0.25 for who always says one half."""
        return self._squares / max(1, self._count)


class RowCost:
    """Seconds of a step by its rows: a line through what was measured, older steps for less."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows2 = self._product = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """A step."""
        keep = 1 - SMOOTH
        self._weight = self._weight * keep + 1
        self._rows = self._rows * keep + rows
        self._seconds = self._seconds * keep + seconds
        self._rows2 = self._rows2 * keep + rows * rows
        self._product = self._product * keep + rows * seconds

    @property
    def row_s(self) -> float | None:
        """Of one row more; None while all steps had as many."""
        spread = self._rows2 - self._rows * self._rows / max(self._weight, 1e-12)
        if spread < 1e-6 * max(1.0, self._rows2):
            return None
        slope = (self._product - self._rows * self._seconds / self._weight) / spread
        return max(0.0, slope)

    def step_s(self, rows: float) -> float | None:
        """Of a step of so many rows; None before any."""
        if not self._weight:
            return None
        mean = self._seconds / self._weight
        return max(1e-9, mean + (self.row_s or 0.0) * (rows - self._rows / self._weight))


@dataclass
class _Worth:
    """Whether a source pays."""

    gain: float = 1.1
    rounds: int = 0
    muted: int = 0  # tokens to go


@dataclass
class SurvivalGate:
    """Drafts while their survival is theta or more; a source that does not pay is silent for a
    while."""

    calibrator: Calibrator = field(default_factory=Calibrator)
    cost: RowCost = field(default_factory=RowCost)
    _token_s: float = 0.0
    _worth: dict[str, _Worth] = field(default_factory=dict)

    @property
    def theta(self) -> float:
        """See Gate."""
        row_s = self.cost.row_s
        if row_s is None or not self._token_s:
            return FIRST_THETA
        return min(1.0, row_s / self._token_s)

    def survival(self, drafts: Sequence[Draft]) -> list[float]:
        """See Gate."""
        if not drafts or self._worth.setdefault(drafts[0].source, _Worth()).muted:
            return []
        found, chance, theta = [], 1.0, self.theta
        for depth, draft in enumerate(drafts):
            chance *= self.calibrator.chance(draft, depth)
            if chance < theta:
                break
            found.append(chance)
        return found

    def turned_out(self, drafts: Sequence[Draft], accepted: int, *, is_over: bool = False) -> None:
        """See Gate."""
        known = drafts[: accepted + (not is_over)]
        for depth, draft in enumerate(known):
            self.calibrator.learn(draft, depth, is_hit=depth < accepted)
        if drafts and not is_over:
            self._judge(drafts[0].source, rows=1 + len(drafts), tokens=1 + accepted)

    def _judge(self, source: str, *, rows: int, tokens: int) -> None:
        worth = self._worth.setdefault(source, _Worth())
        alone, taken = self.cost.step_s(1), self.cost.step_s(rows)
        if alone is None or taken is None:
            return
        worth.rounds += 1
        worth.gain += (tokens * alone / taken - worth.gain) / 32
        if worth.rounds >= ROUNDS and worth.gain < LEAST_GAIN:
            self._worth[source] = _Worth(muted=MUTED_TOKENS)

    def step(self, *, rows: int, tokens: int, seconds: float) -> None:
        """See Gate."""
        self.cost.add(rows, seconds)
        each = seconds / max(1, tokens)
        self._token_s += (each - self._token_s) * (SMOOTH if self._token_s else 1.0)
        for worth in self._worth.values():
            worth.muted = max(0, worth.muted - tokens)
