"""Which rows run in the next tick: pure functions over a frozen state.

A tick holds one row for every sequence that decodes, then prompt rows in arrival order, at most
`chunk` of one prompt, at most `rows_max` in all; rows of drafts (`speculate`) follow that of the
token before them, and count once they are known to be right. Sequences are dealt to micro-batches,
and a tick is of one of these; several ticks may be under way, and a sequence has no row to run
while its token is yet to come out. Pages for a whole request are taken when it is admitted, so
nothing runs out half way. A request of a *session* leaves its sequence resting when it ends, pages
and all; the session's next request continues it from the first token that differs.
Knows nothing of ranks, text or clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from anyshard.pages import PagePool, pages_for
from anyshard.request import Request

__all__ = [
    "Batch",
    "Limits",
    "Row",
    "Sequence",
    "Tick",
    "admit",
    "ahead",
    "ahead_tick",
    "apply",
    "end_session",
    "next_tick",
    "ready",
    "rewind",
    "take_waiting",
]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes fixed before start: rows of a tick, rows of one prompt in it, slots, tokens a page,
    micro-batches that take turns, rows of drafts in a tick."""

    rows_max: int
    chunk: int
    num_slots: int
    block: int
    micro_batches: int = 1
    drafts: int = 0


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """A request in flight. `computed` tokens have their keys and values stored, or will have when
    the ticks under way have run; if that is all of them, its next token is yet to come out.

    `drafted`: tokens behind these whose rows are under way, each right if all before it are and it
    is what comes out. `generation`: how often one was not.
    """

    request_id: int
    request: Request
    slot: int
    pages: tuple[int, ...]
    tokens: tuple[int, ...]
    computed: int = 0
    micro_batch: int = 0
    drafted: tuple[int, ...] = ()
    generation: int = 0

    @property
    def emitted(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def unrun(self) -> int:
        """Tokens that a tick has yet to take; 0 while the next one is yet to come out."""
        return len(self.tokens) - self.computed

    @property
    def unread(self) -> int:
        """Those of the prompt among them."""
        return max(0, len(self.request.prompt) - self.computed)


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """All that scheduling knows: who waits, who runs, who rests, what is free.

    A resting sequence has ended, but its slot and pages stay stored for the next request of its
    session. It is a cache: the one that has rested longest gives way when others need its room.
    """

    waiting: tuple[tuple[int, Request], ...]
    running: tuple[Sequence, ...]
    free_slots: tuple[int, ...]
    pool: PagePool
    resting: tuple[Sequence, ...] = ()

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.waiting or self.running)

    @property
    def unread(self) -> int:
        """Prompt tokens that have yet to run, as far as is known (a waiting one may be stored)."""
        return sum(s.unread for s in self.running) + sum(len(r.prompt) for _, r in self.waiting)


class Row(msgspec.Struct, frozen=True):
    """One token of one sequence to run: its slot and absolute position; whether a token is drawn
    after it, and whether the caller wants its logits; whether it is a draft."""

    slot: int
    position: int
    token: int
    sample: bool
    logits: bool = False
    is_draft: bool = False

    @property
    def through_head(self) -> bool:
        """Whether the head runs over it at all."""
        return self.sample or self.logits


class Tick(msgspec.Struct, frozen=True):
    """Rows of a step, and the sequences admitted for it (their page tables are news)."""

    rows: tuple[Row, ...]
    admitted: tuple[Sequence, ...]


def take_waiting(
    batch: Batch, queue: deque[tuple[int, Request]], limits: Limits
) -> tuple[tuple[tuple[int, Request], ...], Batch]:
    """Let requests of `queue` wait, as many as the next tick could look at; returns those.

    They are popped. With as many that no session holds back as there are slots, a tick never comes
    to a later one: so a tick costs the same however long the queue is. Held by: test_batch.py.
    """
    free = sum(request.session is None for _, request in batch.waiting)
    taken: list[tuple[int, Request]] = []
    while queue and free < limits.num_slots:
        taken.append(queue.popleft())
        free += taken[-1][1].session is None
    return tuple(taken), replace(batch, waiting=(*batch.waiting, *taken))


def admit(batch: Batch, limits: Limits) -> tuple[tuple[Sequence, ...], Batch]:
    """Move waiting requests into slots, in order, while their pages last.

    Only a request whose session still answers an earlier one lets others pass.
    """
    admitted: list[Sequence] = []
    later: list[tuple[int, Request]] = []
    waiting = batch.waiting
    for index, (request_id, request) in enumerate(waiting):
        if request.session is not None and _of_session(batch.running, request.session):
            later.append((request_id, request))
            continue
        placed = _place(batch, request_id, request, limits)
        if placed is None:
            later += waiting[index:]
            break
        sequence, batch = placed
        admitted.append(sequence)
    return tuple(admitted), replace(batch, waiting=tuple(later))


def _of_session(sequences: tuple[Sequence, ...], session: int | None) -> Sequence | None:
    if session is None:
        return None
    return next((s for s in sequences if s.request.session == session), None)


def _place(
    batch: Batch, request_id: int, request: Request, limits: Limits
) -> tuple[Sequence, Batch] | None:
    """The sequence of a request, running: the session's own continued, or one in a free slot.

    Room is made by ending what rests, the longest at rest first; None if even that is too little.
    """
    own = _of_session(batch.resting, request.session)
    others = tuple(s for s in batch.resting if s is not own)
    need = pages_for(len(request.prompt) + request.max_tokens, block=limits.block)
    held = len(own.pages) if own else 0
    missing = max(0, need - held)
    slots, pool = batch.free_slots, batch.pool
    while others and not (pool.holds(missing, first=held) and (own or slots)):
        slots, pool = (*slots, others[0].slot), pool.give(others[0].pages)
        others = others[1:]
    if not (pool.holds(missing, first=held) and (own or slots)):
        return None
    pages, pool = pool.take(missing, first=held)
    if own is None:
        slot, slots, computed = slots[0], slots[1:], 0
    else:
        slot, pages, computed = own.slot, own.pages + pages, _stored_of(own, request.prompt)
    sequence = Sequence(
        request_id=request_id,
        request=request,
        slot=slot,
        pages=pages,
        tokens=request.prompt,
        computed=computed,
        micro_batch=_emptiest(batch.running, limits.micro_batches),
    )
    return sequence, replace(
        batch,
        running=(*batch.running, sequence),
        resting=others,
        free_slots=slots,
        pool=pool,
    )


def _emptiest(running: tuple[Sequence, ...], micro_batches: int) -> int:
    """The micro-batch with the fewest sequences, the first of those."""
    counts = [0] * micro_batches
    for sequence in running:
        counts[sequence.micro_batch] += 1
    return counts.index(min(counts))


def _stored_of(sequence: Sequence, prompt: tuple[int, ...]) -> int:
    """How many tokens of `prompt` stand stored in `sequence`; the last one always runs."""
    most = min(sequence.computed, len(prompt) - 1)
    pairs = zip(sequence.tokens[:most], prompt, strict=False)
    return next((index for index, (old, new) in enumerate(pairs) if old != new), most)


def ready(batch: Batch, *, micro_batch: int) -> tuple[Sequence, ...]:
    """Sequences of which the next tick of a micro-batch has one row, after which a token is drawn:
    those that drafts can follow."""
    return tuple(s for s in batch.running if s.micro_batch == micro_batch and s.unrun == 1)


def next_tick(
    batch: Batch,
    limits: Limits,
    *,
    micro_batch: int = 0,
    drafts: Mapping[int, tuple[int, ...]] | None = None,
) -> tuple[Tick, Batch]:
    """The rows of the next step of a micro-batch, and the state in which they count as computed.

    drafts: by slot, of sequences that are `ready`; `limits.drafts` at most in all. Their rows do
    not count as computed: `apply` is told how many were right.

    One that has none takes the next chunk of another's prompt, which waits for no token. So the
    chunks of a single prompt follow each other through a pipeline. Held by: test_batch.py.
    """
    admitted, batch = admit(batch, limits)
    mine = [s for s in batch.running if s.micro_batch == micro_batch and s.unrun]
    if not mine:
        mine = [s for s in batch.running if s.unread][:1]
    decoding = [s for s in mine if s.unrun == 1]
    prefilling = [s for s in mine if s.unrun > 1]
    rows: list[Row] = []
    ran: dict[int, int] = {}
    for sequence in (*decoding, *prefilling):
        count = min(limits.chunk, sequence.unrun, limits.rows_max - len(rows))
        last, request = len(sequence.tokens) - 1, sequence.request
        for position in range(sequence.computed, sequence.computed + count):
            sample = position == last
            logits = request.want_logits if sample else request.wants_row(position)
            rows.append(Row(sequence.slot, position, sequence.tokens[position], sample, logits))
        for place, token in enumerate((drafts or {}).get(sequence.slot, ()), last + 1):
            assert count == 1, "only what is ready has drafts"
            rows.append(Row(sequence.slot, place, token, True, request.want_logits, True))
        ran[sequence.slot] = count
    running = tuple(
        replace(s, computed=s.computed + ran[s.slot], drafted=tuple((drafts or {}).get(s.slot, ())))
        if s.slot in ran
        else s
        for s in batch.running
    )
    assert rows or not admitted, "page tables of the admitted travel with rows"
    return Tick(tuple(rows), admitted), replace(batch, running=running)


def ahead(batch: Batch) -> tuple[Sequence, ...]:
    """Sequences whose next token is yet to come out: those that `ahead_tick` takes drafts of."""
    return tuple(s for s in batch.running if s.emitted and not s.unrun)


def ahead_tick(batch: Batch, drafts: Mapping[int, tuple[int, ...]]) -> tuple[Tick, Batch]:
    """Rows of drafts alone, by slot, each of a sequence that is `ahead`: they follow those that are
    under way."""
    rows: list[Row] = []
    running: list[Sequence] = []
    for sequence in batch.running:
        new = drafts.get(sequence.slot, ())
        assert not (new and sequence.unrun), "what is certain runs first"
        first, logits = len(sequence.tokens) + len(sequence.drafted), sequence.request.want_logits
        rows += [
            Row(sequence.slot, at, token, True, logits, True) for at, token in enumerate(new, first)
        ]
        running.append(replace(sequence, drafted=sequence.drafted + new) if new else sequence)
    return Tick(tuple(rows), ()), replace(batch, running=tuple(running))


def apply(batch: Batch, tokens: Mapping[int, tuple[int, ...]], finished: frozenset[int]) -> Batch:
    """The state after a tick has run: `tokens` by slot appended, all but the last of them drafts
    that were right, and so are stored.

    `finished` slots are freed, or rest if their request belongs to a session. Ticks that are under
    way may still hold rows of theirs: ranks run those before any later tick, so slot and pages can
    be handed on at once.
    """
    running: list[Sequence] = []
    resting = list(batch.resting)
    slots, pool = list(batch.free_slots), batch.pool
    for sequence in batch.running:
        if sequence.slot in finished and sequence.request.session is None:
            slots.append(sequence.slot)
            pool = pool.give(sequence.pages)
            continue
        grown = _grown(sequence, tokens.get(sequence.slot, ()))
        if sequence.slot in finished:
            stored = min(grown.computed, len(grown.tokens) - 1)  # the last may yet be left out
            resting.append(replace(grown, computed=stored, drafted=()))
        else:
            running.append(grown)
    return replace(
        batch,
        running=tuple(running),
        resting=tuple(resting),
        free_slots=tuple(slots),
        pool=pool,
    )


def _grown(sequence: Sequence, new: tuple[int, ...]) -> Sequence:
    """With tokens that have come out, of which those that were drafted stand stored, or will have
    when the ticks under way have run; the first that was drafted otherwise ends its generation."""
    drafted = sequence.drafted
    pairs = zip(new, drafted, strict=False)
    right = next((at for at, (token, draft) in enumerate(pairs) if token != draft), None)
    is_refuted = right is not None
    if right is None:
        right = min(len(new), len(drafted))
    return replace(
        sequence,
        tokens=sequence.tokens + new,
        computed=sequence.computed + right,
        drafted=() if is_refuted else drafted[right:],
        generation=sequence.generation + is_refuted,
    )


def end_session(batch: Batch, session: int) -> Batch:
    """Free what rests of a session, if anything does."""
    own = _of_session(batch.resting, session)
    if own is None:
        return batch
    return replace(
        batch,
        resting=tuple(s for s in batch.resting if s is not own),
        free_slots=(*batch.free_slots, own.slot),
        pool=batch.pool.give(own.pages),
    )


def rewind(batch: Batch, slot: int, *, computed: int, tokens: tuple[int, ...]) -> Batch:
    """Roll a sequence back: `tokens` from now on, of which the first `computed` stay stored.

    Nothing moves: rows re-run from position `computed` overwrite their keys and values.
    """
    running = tuple(
        replace(s, tokens=tokens, computed=computed, drafted=(), generation=s.generation + 1)
        if s.slot == slot
        else s
        for s in batch.running
    )
    return replace(batch, running=running)
