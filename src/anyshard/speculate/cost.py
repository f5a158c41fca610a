"""What rows cost, measured as it runs: a frame's time from sending to result, by itself and behind
others, the time between results of frames that follow each other, and the time of a token.

Times of steps are no line over rows (kernels take rows by fours), so each number of rows has its
own. Knows nothing of drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

__all__ = ["Costs", "RowCost", "predicted_s"]

FIRST_ROW: Final = 0.04  # of a step of one row, what one more is taken to cost before two are known
FIRST_INTERVAL: Final = 0.25  # of a frame's time
WINDOW: Final = 12  # measurements that a mean goes by
_OUTLIER: Final = 1.6  # times the mean, at most, is what one measurement counts for


class RowCost:
    """Seconds by rows: a mean of the last ones of each number of rows; between those a line, behind
    the last one the line through the outer two."""

    def __init__(self) -> None:
        self._mean: dict[int, tuple[float, int]] = {}

    def add(self, rows: int, seconds: float) -> None:
        """One measurement."""
        mean, count = self._mean.get(rows, (seconds, 0))
        count = min(count + 1, WINDOW)
        seconds = min(seconds, _OUTLIER * mean)
        self._mean[rows] = (mean + (seconds - mean) / count, count)

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._mean)

    def of(self, rows: int) -> float:
        """Seconds, if any are known."""
        if rows in self._mean:
            return self._mean[rows][0]
        below = max((n for n in self._mean if n < rows), default=None)
        above = min((n for n in self._mean if n > rows), default=None)
        if below is None or above is None:
            return self._beyond(rows)
        low, high = self._mean[below][0], self._mean[above][0]
        return low + (max(low, high) - low) * (rows - below) / (above - below)

    def _beyond(self, rows: int) -> float:
        known = sorted(self._mean)
        near = known[0] if rows < known[0] else known[-1]
        far = known[-1] if near == known[0] else known[0]
        here = self._mean[near][0]
        slope = here * FIRST_ROW / (1 + FIRST_ROW * (near - 1))
        if far != near:
            slope = max(0.0, (self._mean[far][0] - here) / (far - near))
        return max(0.1 * here, here + slope * (rows - near))


@dataclass
class Costs:
    """Of a run. latency: of frames that begin with what is certain, when nothing was under way;
    queued: of those that followed others; spacing: between results of frames that were under way
    together. is_full: frames of other requests keep the stages busy, by the last one that began
    with what is certain."""

    latency: RowCost = field(default_factory=RowCost)
    queued: RowCost = field(default_factory=RowCost)
    spacing: RowCost = field(default_factory=RowCost)
    is_full: bool = False
    _seconds: float = 0.0
    _tokens: float = 0.0

    def step(
        self,
        *,
        rows: int,
        tokens: int,
        seconds: float,
        latency_s: float | None,
        spacing_s: float | None,
    ) -> None:
        """A result has come, `seconds` after the last one: of rows (0: a void frame), and tokens.

        latency_s: since the frame was sent, if it began with what is certain. spacing_s: since the
        last result of a frame that was not void, if that came meanwhile.
        """
        if rows and spacing_s is not None:
            self.spacing.add(rows, spacing_s)
        if rows and latency_s is not None:
            self.is_full = spacing_s is not None
            self._round.add(rows, latency_s)
        keep = 1 - 1 / 64
        self._seconds, self._tokens = self._seconds * keep + seconds, self._tokens * keep + tokens

    @property
    def _round(self) -> RowCost:
        return self.queued if self.is_full else self.latency

    @property
    def is_known(self) -> bool:
        """Whether a frame that began with what is certain was measured."""
        return self._round.is_known

    def round(self, rows: int) -> float:
        """Seconds from sending such a frame to its result, if any are known."""
        return self._round.of(rows)

    def frame(self, rows: int) -> float:
        """Seconds by which such a frame puts off what comes next, if any are known: where stages
        are busy with others as well, only those of the slowest."""
        return self.spacing.of(rows) if self.is_full else self.latency.of(rows)

    @property
    def token_s(self) -> float | None:
        """Seconds a token lately; None before there was one."""
        return self._seconds / self._tokens if self._tokens else None

    def interval(self, rows: int) -> float:
        """Seconds between frames of so many rows that follow each other, if any are known; before
        there were two, a part of what one takes."""
        if self.spacing.is_known:
            return self.spacing.of(rows)
        return self.latency.of(rows) * FIRST_INTERVAL


def predicted_s(right: float, rows: float, *, latency_s: float, interval_s: float) -> float:
    """Seconds a token of frames of m = `rows` rows, the first one certain, if each draft is right
    with probability a: T = (1-a) [R + tau a^m / (1-a^m)].

    R is a frame's time, tau that between frames that are under way together; one at a time, tau is
    R. Source: docs/speculation.md.
    """
    if right >= 1:
        return interval_s / rows
    whole: float = right**rows
    return (1 - right) * (latency_s + interval_s * whole / (1 - whole))
