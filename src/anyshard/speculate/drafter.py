"""What a drafter is, and one that knows the answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

import msgspec

from anyshard.request import Sampling

__all__ = ["Draft", "Drafter", "OracleDrafter"]


class Draft(msgspec.Struct, frozen=True):
    """A token that may come next, and how sure its source is.

    entropy: of the source's distribution, in nats. match: tokens of context that it goes by.
    source: which one, for figures and calibration. chance: that its source gives it, before anybody
    has seen how such drafts turn out. second: its next likeliest token there, -1 if it names none.
    """

    token: int
    entropy: float
    match: int
    source: str
    second: int = -1
    chance: float = 0.5


class Drafter(Protocol):
    """Follows the tokens of requests and proposes what comes next."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Those that its drafts name."""
        ...

    @property
    def takes_time(self) -> bool:
        """Whether asking for drafts that are not run then is a loss worth counting."""
        ...

    def begin(
        self, request_id: int, prompt: Sequence[int], *, sampling: Sampling | None = None
    ) -> None:
        """A request has been admitted, whose tokens are drawn so; None: greedily."""
        ...

    def extend(self, request_id: int, tokens: Sequence[int]) -> None:
        """Tokens of its answer have come out."""
        ...

    def propose(self, request_id: int, most: int, *, after: Sequence[int] = ()) -> list[Draft]:
        """At most so many tokens, each after the ones before it, the first after those that have
        come out and then `after`."""
        ...

    def end(self, request_id: int) -> None:
        """It is over."""
        ...


class OracleDrafter:
    """For tests and benchmarks: replays known answers, each token right with probability `right`.

    answers: by prompt. Wrong tokens are drawn by `seed`, request and place, so that every run of
    the same answers proposes the same.
    """

    sources: tuple[str, ...] = ("oracle",)
    takes_time: bool = False

    def __init__(
        self,
        answers: dict[tuple[int, ...], tuple[int, ...]],
        *,
        right: float,
        vocab: int,
        seed: int = 0,
    ) -> None:
        self._answers, self._right, self._vocab, self._seed = answers, right, vocab, seed
        self._known: dict[int, tuple[int, ...]] = {}
        self._emitted: dict[int, int] = {}

    def begin(
        self, request_id: int, prompt: Sequence[int], *, sampling: Sampling | None = None
    ) -> None:
        """See Drafter."""
        self._known[request_id] = self._answers.get(tuple(prompt), ())
        self._emitted[request_id] = 0

    def extend(self, request_id: int, tokens: Sequence[int]) -> None:
        """See Drafter."""
        self._emitted[request_id] += len(tokens)

    def propose(self, request_id: int, most: int, *, after: Sequence[int] = ()) -> list[Draft]:
        """See Drafter."""
        start = self._emitted[request_id] + len(after)
        found = []
        for place in range(start, start + most):
            known = self._known[request_id]
            if place >= len(known):
                break
            token = known[place]
            draw = random.Random(f"{self._seed} {request_id} {place}")
            if draw.random() >= self._right:
                token = (token + 1 + draw.randrange(self._vocab - 1)) % self._vocab
            found.append(Draft(token, 1.0 - self._right, 0, "oracle"))
        return found

    def end(self, request_id: int) -> None:
        """See Drafter."""
        del self._known[request_id], self._emitted[request_id]
