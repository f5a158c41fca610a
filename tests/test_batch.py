"""Scheduling is pure: which rows run next, who gets pages, what a roll-back leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from anyshard.batch import (
    Batch,
    Limits,
    Tick,
    apply,
    end_session,
    next_tick,
    ready,
    rewind,
    take_waiting,
)
from anyshard.pages import PagePool, pages_for
from anyshard.request import Request
from anyshard.stripes import STRIPES, page_stripe, stripe_of

LIMITS = Limits(rows_max=12, chunk=5, num_slots=3, block=4)


def batch_of(
    *prompts: int,
    max_tokens: int = 3,
    pages: int = 100,
    slots: int = 3,
    owners: tuple[int, ...] = (0,) * STRIPES,
    sequence_blocks: int = 1,
) -> Batch:
    waiting = tuple(
        (i, Request(prompt=tuple(range(1, n + 1)), max_tokens=max_tokens))
        for i, n in enumerate(prompts)
    )
    return Batch(
        waiting=waiting,
        running=(),
        free_slots=tuple(range(slots)),
        pool=PagePool.of(range(pages), owners=owners, sequence_blocks=sequence_blocks),
    )


def answer(batch: Batch, tick: Tick) -> Batch:
    """Every sampled row draws token 9; a request ends at its max_tokens."""
    by_slot = {s.slot: s for s in batch.running}
    drawn = {row.slot: (9,) for row in tick.rows if row.sample}
    done = {slot for slot in drawn if by_slot[slot].emitted + 1 == by_slot[slot].request.max_tokens}
    return apply(batch, drawn, frozenset(done))


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=7),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_every_token_runs_once_at_its_position_whatever_the_sizes(
    prompts: list[int], chunk: int, slots: int, max_tokens: int
) -> None:
    limits = Limits(rows_max=chunk + slots, chunk=chunk, num_slots=slots, block=4)
    batch = batch_of(*prompts, max_tokens=max_tokens, slots=slots)
    ran: dict[int, list[tuple[int, int, bool]]] = {}
    for _ in range(1000):
        if not batch.busy:
            break
        tick, batch = next_tick(batch, limits)
        assert 0 < len(tick.rows) <= limits.rows_max
        ids = {s.slot: s.request_id for s in batch.running}
        for row in tick.rows:
            ran.setdefault(ids[row.slot], []).append((row.position, row.token, row.sample))
        batch = answer(batch, tick)
    assert not batch.busy
    for index, length in enumerate(prompts):
        # the last token drawn is never run
        want = [(p, p + 1 if p < length else 9, p >= length - 1)
                for p in range(length + max_tokens - 1)]  # fmt: skip
        assert ran[index] == want
    assert sorted(batch.pool.free) == list(range(100))
    assert sorted(batch.free_slots) == list(range(slots))


@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    chunk=st.integers(1, 9),
    slots=st.integers(1, 4),
    max_tokens=st.integers(1, 12),
    guesses=st.lists(st.integers(0, 3), min_size=1, max_size=40),
)
def test_a_row_finds_its_past_stored_whatever_drafts_were_wrong(
    prompts: list[int], chunk: int, slots: int, max_tokens: int, guesses: list[int]
) -> None:
    """The answer is 50 + position % 7; a guess is how many drafts are right before a wrong one."""
    limits = Limits(rows_max=chunk + slots + 6, chunk=chunk, num_slots=slots, block=4, drafts=6)
    batch = batch_of(*prompts, max_tokens=max_tokens, slots=slots)
    stored: dict[int, dict[int, int]] = {}
    turn = certain = 0
    while batch.busy:
        drafts: dict[int, tuple[int, ...]] = {}
        left = limits.drafts
        for sequence in ready(batch, micro_batch=0):
            end, most = len(sequence.tokens), max_tokens - sequence.emitted - 1
            right = guesses[turn % len(guesses)]
            text = [50 + place % 7 for place in range(end, end + right)] + [99]
            drafts[sequence.slot] = tuple(text[: min(most, left)])
            left -= len(drafts[sequence.slot])
            turn += 1
        tick, batch = next_tick(batch, limits, drafts=drafts)
        assert 0 < len(tick.rows) <= limits.rows_max
        by_slot = {s.slot: s for s in batch.running}
        drawn: dict[int, list[int]] = {}
        for row in tick.rows:
            sequence = by_slot[row.slot]
            mine = stored.setdefault(sequence.request_id, {})
            mine[row.position] = row.token
            is_right = not row.is_draft or drawn[row.slot][-1] == row.token
            if row.is_draft and (99 in drawn[row.slot] or not is_right):
                drawn[row.slot].append(99)  # what follows it counts for nothing
                continue
            certain += not row.is_draft
            past = [mine[place] for place in range(row.position)]
            known = [*sequence.tokens, *drawn.get(row.slot, ())]
            assert past == known[: row.position], "what it attends to is the text"
            if row.sample:
                drawn.setdefault(row.slot, []).append(50 + (row.position + 1) % 7)
        tokens = {
            slot: tuple(each for each in found if each != 99) for slot, found in drawn.items()
        }
        done = frozenset(
            slot for slot in tokens if by_slot[slot].emitted + len(tokens[slot]) == max_tokens
        )
        batch = apply(batch, tokens, done)
    for index, length in enumerate(prompts):
        text = [*range(1, length + 1), *(50 + p % 7 for p in range(length, length + max_tokens))]
        kept = [stored[index][place] for place in range(length + max_tokens - 1)]
        assert kept == text[:-1]
    assert certain <= sum(prompts) + len(prompts) * max_tokens
    assert sorted(batch.pool.free) == list(range(100))


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=7),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 6),
)
def test_ticks_under_way_together_lose_no_token_and_run_none_twice(
    prompts: list[int], chunk: int, slots: int, max_tokens: int, many: int, depth: int
) -> None:
    """Micro-batches take turns, and up to `depth` ticks have no answer yet."""
    limits = Limits(
        rows_max=chunk + slots, chunk=chunk, num_slots=slots, block=4, micro_batches=many
    )
    batch = batch_of(*prompts, max_tokens=max_tokens, slots=slots)
    ran: dict[int, list[tuple[int, int, bool]]] = {}
    under_way: deque[Tick] = deque()
    turn = together = 0
    while batch.busy:
        sent = False
        for _ in range(many if len(under_way) < depth else 0):
            tick, batch = next_tick(batch, limits, micro_batch=turn % many)
            turn += 1
            if tick.rows:
                ids = {s.slot: s.request_id for s in batch.running}
                for row in tick.rows:
                    ran.setdefault(ids[row.slot], []).append((row.position, row.token, row.sample))
                under_way.append(tick)
                sent = True
                break
        together = max(together, len(under_way))
        sizes = [sum(s.micro_batch == index for s in batch.running) for index in range(many)]
        assert max(sizes) <= -(-slots // many)
        if not sent:
            batch = answer(batch, under_way.popleft())
    assert not under_way and together <= depth
    for index, length in enumerate(prompts):
        want = [(p, p + 1 if p < length else 9, p >= length - 1)
                for p in range(length + max_tokens - 1)]  # fmt: skip
        assert ran[index] == want
    assert sorted(batch.pool.free) == list(range(100))


def test_decoding_rows_go_first_and_a_long_prompt_does_not_hold_them_up() -> None:
    batch = batch_of(2, 30)
    tick, batch = next_tick(batch, LIMITS)
    assert [(r.slot, r.position) for r in tick.rows] == [
        (0, 0),
        (0, 1),
        *[(1, p) for p in range(5)],
    ]
    batch = answer(batch, tick)
    tick, batch = next_tick(batch, LIMITS)
    assert [(r.slot, r.position) for r in tick.rows][:2] == [(0, 2), (1, 5)]


def test_a_request_waits_until_its_pages_are_free() -> None:
    batch = batch_of(8, 8, pages=4)
    tick, batch = next_tick(batch, LIMITS)
    assert [s.request_id for s in tick.admitted] == [0]
    for _ in range(20):
        batch = answer(batch, tick)
        tick, batch = next_tick(batch, LIMITS)
        if tick.admitted:
            break
    assert [s.request_id for s in tick.admitted] == [1]
    assert set(tick.admitted[0].pages) <= {0, 1, 2, 3}


def test_a_rewound_sequence_runs_again_from_the_position_it_went_back_to() -> None:
    batch = batch_of(4, max_tokens=9)
    for _ in range(3):
        tick, batch = next_tick(batch, LIMITS)
        batch = answer(batch, tick)
    sequence = batch.running[0]
    batch = rewind(batch, sequence.slot, computed=2, tokens=(*sequence.tokens[:3], 7))
    tick, batch = next_tick(batch, LIMITS)
    assert [(r.position, r.token, r.sample) for r in tick.rows] == [(2, 3, False), (3, 7, True)]


def test_pages_are_counted_by_ceiling_and_never_handed_out_twice() -> None:
    assert [pages_for(n, block=32) for n in (0, 1, 31, 32, 33)] == [0, 1, 1, 1, 2]
    pool = PagePool.of([5, 3, 9])
    taken, rest = pool.take(2)
    assert taken == (5, 3) and rest.free == (9,)
    assert rest.give(taken).take(3)[0] == (5, 3, 9)
    with pytest.raises(AssertionError):
        rest.give((9,))
    with pytest.raises(AssertionError):
        pool.take(4)


def ask(batch: Batch, request_id: int, prompt: tuple[int, ...], session: int | None) -> Batch:
    request = Request(prompt=prompt, max_tokens=3, session=session)
    return replace(batch, waiting=(*batch.waiting, (request_id, request)))


def run_out(batch: Batch) -> tuple[Batch, list[tuple[int, int]]]:
    """Run to the end; (position, token) of every row in order."""
    ran = []
    while batch.busy:
        tick, batch = next_tick(batch, LIMITS)
        assert tick.rows
        ran += [(row.position, row.token) for row in tick.rows]
        batch = answer(batch, tick)
    return batch, ran


def test_a_session_runs_only_what_differs_from_what_it_has_stored() -> None:
    empty = batch_of()
    batch, _ = run_out(ask(empty, 0, (1, 2, 3, 4), session=7))
    assert [s.slot for s in batch.resting] == [0] and batch.free_slots == (1, 2)
    # the answer was 9 9 9, and its last token never ran
    batch, ran = run_out(ask(batch, 1, (1, 2, 3, 4, 9, 9, 9, 5), session=7))
    assert ran == [(6, 9), (7, 5), (8, 9), (9, 9)]
    batch, ran = run_out(ask(batch, 2, (1, 2, 8, 4), session=7))
    assert ran[:2] == [(2, 8), (3, 4)]
    batch, ran = run_out(ask(batch, 3, (1, 2), session=7))
    assert ran[0] == (1, 2), "the last token runs again: its logits are wanted"
    batch, ran = run_out(ask(batch, 4, (1, 2), session=8))
    assert ran[0] == (0, 1), "another session shares nothing"
    batch = end_session(end_session(batch, 7), 8)
    assert sorted(batch.pool.free) == list(range(100)) and sorted(batch.free_slots) == [0, 1, 2]
    assert end_session(batch, 7) == batch


def test_a_second_request_of_a_session_waits_for_the_first_and_lets_others_pass() -> None:
    batch = ask(ask(ask(batch_of(), 0, (1, 2), 7), 1, (1, 2, 9), 7), 2, (3,), None)
    tick, batch = next_tick(batch, LIMITS)
    assert [s.request_id for s in tick.admitted] == [0, 2]
    assert [request_id for request_id, _ in batch.waiting] == [1]
    batch, _ = run_out(answer(batch, tick))
    assert [s.request_id for s in batch.resting] == [1]


def test_what_has_rested_longest_gives_way_and_nothing_does_in_vain() -> None:
    batch = batch_of(pages=6, slots=3)
    for session in (1, 2, 3):
        batch, _ = run_out(ask(batch, session, (4, 5, 6, 7, 8), session))
    batch, _ = run_out(ask(batch, 4, (1, 2, 3), None))
    assert [s.request.session for s in batch.resting] == [2, 3]
    # five pages: two are its own and two are free, so another must go
    batch, ran = run_out(ask(batch, 5, (4, 5, 6, 7, 8, *range(9)), 2))
    assert ran[0] == (5, 0) and [s.request.session for s in batch.resting] == [2]
    blocked = ask(batch, 6, tuple(range(60)), None)
    tick, after = next_tick(blocked, LIMITS)
    assert not tick.rows and after == blocked


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.sampled_from((1, 9)), min_size=1, max_size=24)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 3),
    st.integers(7, 30),
    st.sampled_from([7, 13]),
    st.sampled_from([(0,) * 8, (0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 0, 1, 1, 1, 2, 2), range(8)]),
)
def test_every_row_finds_its_own_past_stored(
    asked: list[tuple[int, list[int]]],
    slots: int,
    pages: int,
    sequence_blocks: int,
    owners: Iterable[int],
) -> None:
    """A cache of tokens instead of keys and values, under any order of sessions and evictions; also
    where a page may hold blocks of its own rank only."""
    of = tuple(owners)
    batch = batch_of(pages=pages, slots=slots, owners=of, sequence_blocks=sequence_blocks)
    for request_id, (session, prompt) in enumerate(asked):
        batch = ask(batch, request_id, tuple(prompt), session or None)
    limits = replace(LIMITS, num_slots=slots)
    stored: dict[tuple[int, int], int] = {}
    for _ in range(1000):
        if not batch.busy:
            break
        tick, batch = next_tick(batch, limits)
        assert tick.rows
        by_slot = {s.slot: s for s in batch.running}
        held = [page for s in (*batch.running, *batch.resting) for page in s.pages]
        assert sorted([*held, *batch.pool.free]) == list(range(pages))
        for row in tick.rows:
            own = by_slot[row.slot]
            stored[own.pages[row.position // 4], row.position % 4] = row.token
            ranks = [of[page_stripe(page, sequence_blocks)] for page in own.pages]
            assert ranks == [of[stripe_of(block)] for block in range(len(own.pages))]
            past = [stored[own.pages[p // 4], p % 4] for p in range(row.position + 1)]
            assert past == list(own.tokens[: row.position + 1])
        batch = answer(batch, tick)
    assert not batch.busy


@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 4), st.sampled_from([None, None, 7, 8])),
        max_size=25,
    ),
    st.integers(9, 30),
)
def test_a_queue_in_front_changes_no_tick_and_keeps_the_wait_short(
    asked: list[tuple[int, int, int | None]], pages: int
) -> None:
    requests = [
        (i, Request(prompt=tuple(range(1, n + 1)), max_tokens=max_tokens, session=session))
        for i, (n, max_tokens, session) in enumerate(asked)
    ]
    whole = replace(batch_of(pages=pages), waiting=tuple(requests))
    part, queue = batch_of(pages=pages), deque(requests)
    while True:
        taken, part = take_waiting(part, queue, LIMITS)
        assert part.waiting[len(part.waiting) - len(taken) :] == taken
        free = [request for _, request in part.waiting if request.session is None]
        assert len(free) <= LIMITS.num_slots
        assert whole.waiting == (*part.waiting, *queue)
        if not whole.busy:
            break
        tick, whole = next_tick(whole, LIMITS)
        same, part = next_tick(part, LIMITS)
        assert tick == same and tick.rows
        whole, part = answer(whole, tick), answer(part, same)
    assert not part.busy and not queue
