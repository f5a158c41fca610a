"""Walks: the calls of a step made by one native call do what they do one by one.

That a rank which is lost is found inside a walk too: test_liveness.py, test_fault.py. That every
layout keeps its bits: test_grid.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from native_cases import panels
from test_comm import BODIES, Body, bits, rows, running, serve, sizes

from anyshard.comm.base import Comm, WireSizes
from anyshard.comm.solo import Solo
from anyshard.errors import PeerLost
from anyshard.launcher import Seat
from anyshard.ops import native_module
from anyshard.walk import Gathering, Several, walks

WIDTH = 8
ROWS = 3
native = native_module()
needs_native = pytest.mark.skipif(native is None, reason="not compiled")


def embed(out: Any, tokens: Any) -> Any:
    """An op that writes, of each row's token, eight times the token itself."""
    table = np.repeat(np.arange(16, dtype=np.float32)[:, None], WIDTH, axis=1)
    assert native is not None
    pool = native.Pool(1, "scalar", False)
    return native.Embed(pool, panels(table), 16, tokens, out).run


def words() -> Any:
    return np.zeros(1, np.uint64)


@needs_native
def test_calls_that_follow_each_other_become_one_and_keep_their_order() -> None:
    first, second = (np.zeros((ROWS, WIDTH), np.float32) for _ in range(2))
    tokens, seen = np.array([1, 2, 3], np.int32), []

    def between(count: int) -> None:
        seen.append((count, first[:count, 0].tolist()))
        tokens[:] += 1

    operations = words()
    exchange = Gathering(
        Solo(WireSizes(tp=1, pp=1, exchanges=sizes(tp=1).wires.exchanges)).exchange("nodes"),
        row_floats=WIDTH,
        row_wire=WIDTH,
    )
    calls = [Several([embed(first, tokens), exchange]), between, embed(second, tokens), exchange]
    made = walks(calls, operations)
    assert len(made) == 3
    assert made[1] is between
    for call in made:
        call(2)
    assert seen == [(2, [1.0, 2.0])]
    assert first[:, 0].tolist() == [1, 2, 0]
    assert second[:, 0].tolist() == [2, 3, 0]
    assert operations[0] == 4, "a call of Python's is not counted here"


def test_without_the_module_calls_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyshard.walk.native_module", lambda: None)
    calls: list[Callable[[int], None]] = [lambda count: None, lambda count: None]
    assert walks([Several(calls)], words()) == calls


@needs_native
def test_an_op_that_refuses_ends_the_walk_with_its_sentence() -> None:
    out, operations = np.zeros((ROWS, WIDTH), np.float32), words()
    good, bad = np.array([1, 2, 3], np.int32), np.array([1, 99, 3], np.int32)
    (walk,) = walks([embed(out, good), embed(out, bad), embed(out, good)], operations)
    with pytest.raises(ValueError, match="row 1 has token id 99"):
        walk(ROWS)
    assert operations[0] == 1


@needs_native
def test_rows_that_do_not_fit_are_refused() -> None:
    spec = sizes(tp=1, floats=WIDTH * ROWS).wires.exchanges
    exchange = Solo(WireSizes(tp=1, pp=1, exchanges=spec)).exchange("nodes")
    (walk,) = walks([Gathering(exchange, row_floats=WIDTH, row_wire=WIDTH)], words())
    walk(ROWS)
    for count in (ROWS + 1, -1):
        with pytest.raises(ValueError, match=f"^{count} rows of 8 of 8 floats do not fit"):
            walk(count)


@needs_native
def test_arrays_of_another_kind_are_not_copied_but_refused() -> None:
    assert native is not None
    run: Any = embed(np.zeros((ROWS, WIDTH), np.float32), np.zeros(ROWS, np.int32))
    for wrong in (np.zeros(1, np.int64), np.zeros(4, np.uint64)[::2], np.zeros(1, np.uint32)):
        with pytest.raises(TypeError):
            native.Walk((run.__self__,), wrong)
    with pytest.raises(TypeError):
        native.Gather(np.zeros(64, np.int64), -1, [], 0, 0)
    with pytest.raises(TypeError):
        native.Walk([run.__self__], words())  # a list could lose what is in it


def test_what_is_put_on_the_wire_must_fit_too() -> None:
    """Of ranks that cut 7 heads 4 / 3, each puts as much on the wire as the first."""
    spec = sizes(tp=1, floats=WIDTH * ROWS).wires.exchanges
    exchange = Solo(WireSizes(tp=1, pp=1, exchanges=spec)).exchange("nodes")
    (walk,) = walks([Gathering(exchange, row_floats=WIDTH // 2, row_wire=WIDTH)], words())
    walk(ROWS)
    with pytest.raises(ValueError, match=r"^4 rows of 4 of 8 floats do not fit"):
        walk(ROWS + 1)


def gather(seat: Seat, comm: Comm, *, late: int | None, in_walk: bool) -> None:
    """Exchanges of every parity; the late rank comes after more than a slice of a wait."""
    exchange, mine = comm.exchange("nodes"), WIDTH - 2 * comm.tp_rank
    calls = [Gathering(exchange, row_floats=mine, row_wire=WIDTH)]
    operations = words()
    (run,) = walks(calls, operations) if in_walk else calls
    for step in range(6):
        parity = exchange.parity
        assert parity == (step + 1) % 2
        sent = bits(comm.rank, step, ROWS * mine).view(np.float32)
        exchange.send_buffer(parity)[: ROWS * mine] = sent
        if late == comm.rank and step == 3:
            time.sleep(0.3)
        run(ROWS)
        for peer, source in enumerate(exchange.sources(parity)):
            count = ROWS * (WIDTH - 2 * peer)
            assert np.array_equal(source[:count].view(np.uint32), bits(peer, step, count))
        if step == 4:  # a walk goes on where a single call has stopped, and a call after a walk
            run = calls[0] if in_walk else walks(calls, operations)[0]
    if exchange.native(mine, WIDTH) is not None:
        assert operations[0] == (5 if in_walk else 1), "late ones count as well"


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("late", [None, 0, 1])
@pytest.mark.parametrize("in_walk", [False, True])
def test_an_exchange_in_a_walk_moves_and_counts_what_a_call_does(
    in_walk: bool, late: int | None, body: Body
) -> None:
    def work(seat: Seat, comm: Comm, token: int) -> None:
        gather(seat, comm, late=late, in_walk=in_walk)

    with running("threads", serve(work), sizes(tp=2, body=body)) as (_, front):
        front.wait_result(front.send_frame(rows(1)))
        views = front.statuses()
    assert [view.wire_bytes["reduce"] for view in views] == [6 * ROWS * WIDTH * 4] * 2
    assert [view.wire_messages["reduce"] for view in views] == [6] * 2


@needs_native
@pytest.mark.parametrize("late", [None, 0, 1])
def test_a_walk_goes_on_right_after_a_wait_that_took_long(late: int | None) -> None:
    """With the next call; all are counted, also an exchange that Python has ended."""
    counted = [0, 0]

    def work(seat: Seat, comm: Comm, token: int) -> None:
        exchange = Gathering(comm.exchange("nodes"), row_floats=WIDTH, row_wire=WIDTH)
        tokens, operations = np.array([1, 2, 3], np.int32), words()
        outs = [np.zeros((ROWS, WIDTH), np.float32) for _ in range(3)]
        embeds = [embed(out, tokens) for out in outs]
        (walk,) = walks([embeds[0], exchange, embeds[1], embeds[2], exchange], operations)
        if late == comm.rank:
            time.sleep(0.3)
        walk(ROWS)
        for out in outs:
            assert out[:, 0].tolist() == [1, 2, 3]
        counted[comm.rank] = int(operations[0])

    with running("threads", serve(work), sizes(tp=2, body="native")) as (_, front):
        front.wait_result(front.send_frame(rows(1)))
        views = front.statuses()
    assert [view.wire_messages["reduce"] for view in views] == [2] * 2
    assert counted == [5, 5]


@needs_native
def test_peers_that_disagree_in_a_walk_are_told_both_sizes() -> None:
    def work(seat: Seat, comm: Comm, token: int) -> None:
        wire = WIDTH + comm.rank
        exchange = Gathering(comm.exchange("nodes"), row_floats=WIDTH, row_wire=wire)
        walks([exchange], words())[0](ROWS)

    with (
        running("threads", serve(work), sizes(tp=2, body="native")) as (_, front),
        pytest.raises(PeerLost, match=r"'nodes': rank \d has 2\d floats on the wire, rank \d 2\d"),
    ):
        front.wait_result(front.send_frame(rows(1)))


@needs_native
@pytest.mark.ranks
def test_a_peer_that_never_comes_is_named() -> None:
    def work(seat: Seat, comm: Comm, token: int) -> None:
        if comm.rank == 0:
            exchange = Gathering(comm.exchange("nodes"), row_floats=WIDTH, row_wire=WIDTH)
            walks([exchange], words())[0](ROWS)
        else:
            time.sleep(30)

    with (
        running("fork", serve(work), sizes(tp=2, body="native"), deadline_s=0.5) as (_, front),
        pytest.raises(PeerLost) as caught,
    ):
        front.wait_result(front.send_frame(rows(1)))
    assert caught.value.rank == 1
