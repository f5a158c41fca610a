"""Which rows run in the next tick: pure functions over a frozen state.

A tick holds one row for every sequence that decodes, then prompt rows in arrival order, at most
`chunk` of one prompt, at most `rows_max` in all. Pages for a whole request are taken when it is
admitted, so nothing runs out half way. Knows nothing of ranks, text or clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from anyshard.pages import PagePool, pages_for
from anyshard.request import Request

__all__ = ["Batch", "Limits", "Row", "Sequence", "Tick", "admit", "apply", "next_tick", "rewind"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes fixed before start: rows of a tick, rows of one prompt in it, slots, tokens a page."""

    rows_max: int
    chunk: int
    num_slots: int
    block: int


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """A request in flight. `computed` tokens have their keys and values stored."""

    request_id: int
    request: Request
    slot: int
    pages: tuple[int, ...]
    tokens: tuple[int, ...]
    computed: int = 0

    @property
    def emitted(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """All that scheduling knows: who waits, who runs, what is free."""

    waiting: tuple[tuple[int, Request], ...]
    running: tuple[Sequence, ...]
    free_slots: tuple[int, ...]
    pool: PagePool

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.waiting or self.running)


@dataclass(frozen=True)
class Row:
    """One token of one sequence to run: its slot, absolute position, and whether to sample."""

    slot: int
    position: int
    token: int
    sample: bool


@dataclass(frozen=True)
class Tick:
    """Rows of a step, and the sequences admitted for it (their page tables are news)."""

    rows: tuple[Row, ...]
    admitted: tuple[Sequence, ...]


def admit(batch: Batch, limits: Limits) -> tuple[tuple[Sequence, ...], Batch]:
    """Move waiting requests into free slots, in order, while their pages last."""
    admitted: list[Sequence] = []
    waiting, slots, pool = list(batch.waiting), list(batch.free_slots), batch.pool
    while waiting and slots:
        request_id, request = waiting[0]
        need = pages_for(len(request.prompt) + request.max_tokens, block=limits.block)
        if need > len(pool.free):
            break
        pages, pool = pool.take(need)
        admitted.append(
            Sequence(
                request_id=request_id,
                request=request,
                slot=slots.pop(0),
                pages=pages,
                tokens=request.prompt,
            )
        )
        waiting.pop(0)
    return tuple(admitted), replace(
        batch,
        waiting=tuple(waiting),
        running=batch.running + tuple(admitted),
        free_slots=tuple(slots),
        pool=pool,
    )


def next_tick(batch: Batch, limits: Limits) -> tuple[Tick, Batch]:
    """The rows of the next step. Held by: test_batch.py."""
    admitted, batch = admit(batch, limits)
    rows: list[Row] = []
    decoding = [s for s in batch.running if len(s.tokens) - s.computed == 1]
    prefilling = [s for s in batch.running if len(s.tokens) - s.computed > 1]
    for sequence in (*decoding, *prefilling):
        count = min(
            limits.chunk, len(sequence.tokens) - sequence.computed, limits.rows_max - len(rows)
        )
        last = len(sequence.tokens) - 1
        for position in range(sequence.computed, sequence.computed + count):
            rows.append(Row(sequence.slot, position, sequence.tokens[position], position == last))
    return Tick(tuple(rows), admitted), batch


def apply(batch: Batch, tick: Tick, tokens: dict[int, int], finished: frozenset[int]) -> Batch:
    """The state after a tick: rows computed, `tokens` by slot appended, `finished` slots freed."""
    ran: dict[int, int] = {}
    for row in tick.rows:
        ran[row.slot] = ran.get(row.slot, 0) + 1
    running: list[Sequence] = []
    slots, pool = list(batch.free_slots), batch.pool
    for sequence in batch.running:
        if sequence.slot in finished:
            slots.append(sequence.slot)
            pool = pool.give(sequence.pages)
            continue
        new = (tokens[sequence.slot],) if sequence.slot in tokens else ()
        running.append(
            replace(
                sequence,
                tokens=sequence.tokens + new,
                computed=sequence.computed + ran.get(sequence.slot, 0),
            )
        )
    return replace(batch, running=tuple(running), free_slots=tuple(slots), pool=pool)


def rewind(batch: Batch, slot: int, *, computed: int, tokens: tuple[int, ...]) -> Batch:
    """Roll a sequence back: `tokens` from now on, of which the first `computed` stay stored.

    Nothing moves: rows re-run from position `computed` overwrite their keys and values.
    """
    running = tuple(
        replace(s, tokens=tokens, computed=computed) if s.slot == slot else s for s in batch.running
    )
    return replace(batch, running=running)
