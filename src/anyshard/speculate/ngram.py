"""Drafts from what was said: the text of a request itself, and answers that are over.

A table holds, for every context of one to ORDERS tokens, how often which token followed. The
posterior of the next one is that of Witten and Bell: P_l(w) = c(w)/(n+q) + q/(n+q) P_(l-1)(w), from
one token of context up to the longest that has been seen, over a uniform P_0; n is how often the
context was seen and q how many tokens have followed it. What was seen once has so the odds of one
to one, where its share of counts would be 1 and could gate nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from anyshard.request import Sampling
from anyshard.speculate.drafter import Draft

__all__ = ["TOKEN_BYTES", "NgramDrafter", "NgramStore", "NgramTable"]

ORDERS: Final = 8  # tokens of context, at most
LEAST_MATCH: Final = 2  # below it, a guess by one token is noise
TOKEN_BYTES: Final = 1024  # of a table, a token of its text; 914 at most, of tokens at random
STORE_ORDERS: Final = (8, 5, 3)
STORE_ENTRIES: Final = 1 << 18  # of 16 bytes
_MOST_COUNT: Final = 1 << 15


class NgramTable:
    """Contexts of one text, which grows at its end; work and memory are constant a token.

    Most contexts come once: of those it keeps the token alone, without a count.
    """

    def __init__(self, vocab: int) -> None:
        self.tokens: list[int] = []
        self._uniform = 1.0 / vocab
        self._followers: list[dict[tuple[int, ...], int | dict[int, int]]] = [
            {} for _ in range(ORDERS)
        ]

    def append(self, token: int) -> None:
        """The next token of the text."""
        history = self.tokens
        for order in range(1, min(ORDERS, len(history)) + 1):
            followers, context = self._followers[order - 1], tuple(history[-order:])
            known = followers.get(context)
            if known is None:
                followers[context] = token
            elif isinstance(known, dict):
                known[token] = known.get(token, 0) + 1
            else:
                followers[context] = {known: 2} if known == token else {known: 1, token: 1}
        history.append(token)

    def after(self, context: Sequence[int]) -> tuple[dict[int, float], float, int]:
        """Of the token after `context`: the mass of each that has followed some end of it, the mass
        that all others share, and how long the longest end is that has been seen."""
        mass: dict[int, float] = {}
        rest, match = 1.0, 0
        for order in range(1, min(ORDERS, len(context)) + 1):
            counts = self._followers[order - 1].get(tuple(context[-order:]))
            if counts is None:
                break  # nor was any longer one
            if isinstance(counts, int):
                counts = {counts: 1}
            seen, kinds = sum(counts.values()), len(counts)
            escape = kinds / (seen + kinds)
            for token in mass:
                mass[token] *= escape
            rest *= escape
            for token, count in counts.items():
                mass[token] = mass.get(token, 0.0) + count / (seen + kinds)
            match = order
        return mass, rest, match

    def propose(self, most: int, *, after: Sequence[int] = ()) -> list[Draft]:
        """The likeliest tokens, one after the other, while the context has been seen; behind the
        text and `after`."""
        context = [*self.tokens[-ORDERS:], *after][-ORDERS:]
        found: list[Draft] = []
        while len(found) < most:
            if tuple(context[-LEAST_MATCH:]) not in self._followers[LEAST_MATCH - 1]:
                break  # before anything is reckoned: that is the rule in new text
            mass, rest, match = self.after(context)
            best = heapq.nsmallest(2, mass, key=lambda each: (-mass[each], each))
            token, second = best[0], best[1] if len(best) > 1 else -1
            entropy = self._entropy(mass, rest)
            found.append(Draft(token, entropy, match, "text", second, mass[token]))
            context = [*context[1 - ORDERS :], token]
        return found

    def _entropy(self, mass: dict[int, float], rest: float) -> float:
        """In nats; the rest is spread over the vocabulary."""
        known = -sum(each * math.log(each) for each in mass.values())
        return known - rest * math.log(rest * self._uniform)


class NgramStore:
    """What followed contexts of requests that are over, in memory that never grows.

    Of each context the one token that followed it last and most: another takes its place once it
    has come as often. A context is known by 64 bits of hash, so that one in 2^46 that are looked up
    is another's; a wrong draft costs a row, nothing else.
    """

    def __init__(self, entries: int = STORE_ENTRIES) -> None:
        self._keys = np.zeros(entries, np.uint64)
        self._tokens = np.zeros(entries, np.int32)
        self._counts = np.zeros(entries, np.int32)

    def add(self, tokens: Sequence[int]) -> None:
        """A text that is over."""
        for order in STORE_ORDERS:
            for end in range(order, len(tokens)):
                self._add(tokens[end - order : end], tokens[end])

    def _add(self, context: Sequence[int], token: int) -> None:
        key, place = self._place(context)
        if int(self._keys[place]) == key and int(self._tokens[place]) == token:
            self._counts[place] = min(int(self._counts[place]) + 1, _MOST_COUNT)
        elif self._counts[place] > 1 and int(self._keys[place]) == key:
            self._counts[place] -= 1
        else:
            self._keys[place], self._tokens[place], self._counts[place] = key, token, 1

    def _place(self, context: Sequence[int]) -> tuple[int, int]:
        key = hash((len(context), *context)) & (2**64 - 1)
        return key, key % len(self._keys)

    def propose(self, context: Sequence[int], most: int, *, vocab: int) -> list[Draft]:
        """What followed, one after the other."""
        context = list(context[-max(STORE_ORDERS) :])
        found: list[Draft] = []
        while len(found) < most and (draft := self._next(context, vocab)) is not None:
            found.append(draft)
            context = [*context[1 - max(STORE_ORDERS) :], draft.token]
        return found

    def _next(self, context: Sequence[int], vocab: int) -> Draft | None:
        for order in STORE_ORDERS:
            if len(context) < order:
                continue
            key, place = self._place(context[-order:])
            count = int(self._counts[place])
            if count and int(self._keys[place]) == key:
                escape = 1.0 / (count + 1)
                entropy = -(1 - escape) * math.log(1 - escape) - escape * math.log(escape / vocab)
                return Draft(int(self._tokens[place]), entropy, order, "store", chance=1 - escape)
        return None


class NgramDrafter:
    """Drafts of a request's own text, or, where that has none, of those that are over."""

    sources: tuple[str, ...] = ("text", "store")
    takes_time: bool = False

    def __init__(self, vocab: int, *, store: NgramStore | None = None) -> None:
        self._vocab = vocab
        self._store = NgramStore() if store is None else store
        self._tables: dict[int, NgramTable] = {}

    def begin(
        self, request_id: int, prompt: Sequence[int], *, sampling: Sampling | None = None
    ) -> None:
        """See Drafter."""
        self._tables[request_id] = NgramTable(self._vocab)
        self.extend(request_id, prompt)

    def extend(self, request_id: int, tokens: Sequence[int]) -> None:
        """See Drafter."""
        table = self._tables[request_id]
        for token in tokens:
            table.append(token)

    def propose(self, request_id: int, most: int, *, after: Sequence[int] = ()) -> list[Draft]:
        """See Drafter."""
        table = self._tables[request_id]
        if found := table.propose(most, after=after):
            return found
        context = [*table.tokens[-max(STORE_ORDERS) :], *after]
        return self._store.propose(context, most, vocab=self._vocab)

    def end(self, request_id: int) -> None:
        """See Drafter; only now does the store learn of it."""
        self._store.add(self._tables.pop(request_id).tokens)
