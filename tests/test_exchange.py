"""Exchanges that bring every rank a part of its own, and buffers that another exchange fences."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from test_comm import BODIES, KINDS, Body, bits, rows, running, serve

from anyshard.comm.base import Comm, ExchangeSpec, WireSizes
from anyshard.comm.control import ControlSizes
from anyshard.comm.region import EpochSizes, RegionLayout
from anyshard.launcher import Seat
from anyshard.ops import native_module
from anyshard.walk import Gathering, walks

STEPS = 13  # odd: the last one is of the other parity
PART = 24
NODES = ExchangeSpec(name="nodes", kind="reduce", capacity_floats=8)


def states_of(tp: int, *, is_fenced: bool = True) -> ExchangeSpec:
    return ExchangeSpec(
        name="states",
        kind="states",
        capacity_floats=3 * tp * PART,
        all_to_all=True,
        is_fenced=is_fenced,
    )


def sizes(tp: int, body: Body, *, is_fenced: bool = True) -> EpochSizes:
    wires = WireSizes(tp=tp, pp=1, exchanges=(states_of(tp, is_fenced=is_fenced), NODES))
    control = ControlSizes(rows_max=4, pages_max=2, logit_rows=1, vocab=5)
    return EpochSizes(wires=wires, control=control, signals=body)


def all_to_all(comm: Comm, *, slow: int | None = None, in_walk: bool = False) -> None:
    """Parts of a size that changes with the rows; before a buffer is written again, all have
    published nodes, and so have read it."""
    states, nodes = comm.exchange("states"), comm.exchange("nodes")
    run = Gathering(states, row_floats=PART, row_wire=PART)
    calls: list[Any] = [run]
    if in_walk:
        calls = walks([run], np.zeros(1, np.uint64))
        assert calls != [run] or native_module() is None or states.native(1, 1) is None
    for step in range(STEPS):
        count = 1 + step % 3
        sent = states.send_buffer(states.parity)
        for receiver in range(comm.tp):
            part = bits(10 * comm.rank + receiver, step, count * PART).view(np.float32)
            sent[receiver * count * PART : (receiver + 1) * count * PART] = part
        parity = states.parity
        calls[0](count)
        if comm.tp_rank == slow:
            time.sleep(0.002)
        start = comm.tp_rank * count * PART
        for sender, source in enumerate(states.sources(parity)):
            expected = bits(10 * sender + comm.tp_rank, step, count * PART)
            part = source[start : start + count * PART]
            assert np.array_equal(part.view(np.uint32), expected), (step, sender)
        nodes.run(2, 2)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tp", [2, 3, 5, 8])
def test_every_rank_gets_its_own_part_of_every_buffer(kind: str, tp: int, body: Body) -> None:
    def work(seat: Seat, comm: Comm, token: int) -> None:
        all_to_all(comm, in_walk=bool(token % 2))

    floats = sum(1 + step % 3 for step in range(STEPS)) * PART
    with running(kind, serve(work), sizes(tp, body)) as (_, front):
        for token in (1, 2, 3):
            front.wait_result(front.send_frame(rows(token)))
        for status in front.statuses():
            assert status.wire_bytes["states"] == 3 * floats * 4 * (tp - 1)
            assert status.wire_messages["states"] == 3 * STEPS * (tp - 1)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_one_buffer_is_enough_where_another_exchange_comes_between(slow: int, body: Body) -> None:
    def work(seat: Seat, comm: Comm, token: int) -> None:
        all_to_all(comm, slow=slow, in_walk=True)

    with running("threads", serve(work), sizes(3, body)) as (_, front):
        front.wait_result(front.send_frame(rows(1)))


def test_a_fenced_exchange_takes_half_the_memory() -> None:
    fenced, free = (
        RegionLayout.of(sizes(4, "pipes", is_fenced=is_fenced)) for is_fenced in (True, False)
    )
    buffers = 4 * (3 * 4 * PART + 16) * 4
    assert (fenced.exchange_offsets[1], free.exchange_offsets[1]) == (buffers, 2 * buffers)


def test_parts_that_do_not_fit_are_refused() -> None:
    def work(seat: Seat, comm: Comm, token: int) -> None:
        states = comm.exchange("states")
        for num_floats, wire_floats in ((4, 3), (3 * PART + 1, 3 * PART + 1)):
            with pytest.raises(ValueError, match=f"capacity {3 * PART} does not hold"):
                states.run(num_floats, wire_floats)
        if states.native(PART, PART) is not None:
            (walk,) = walks(
                [Gathering(states, row_floats=PART, row_wire=PART)], np.zeros(1, np.uint64)
            )
            with pytest.raises(ValueError, match=f"4 rows of {PART} of {PART} floats do not fit"):
                walk(4)

    with running("threads", serve(work), sizes(2, "native" if native_module() else "pipes")) as (
        _,
        f,
    ):
        f.wait_result(f.send_frame(rows(1)))


@pytest.mark.torch
@pytest.mark.ranks
def test_gloo_brings_the_same_parts_and_counts_the_same() -> None:
    pytest.importorskip("torch")
    tp = 3

    def rank_main(seat: Seat) -> None:
        comm = seat.comm("torch")
        while (frame := seat.control.next_frame()) is not None:
            all_to_all(comm)
            seat.control.status.report(comm.counters)
            if seat.rank == seat.region.sampler:
                zero = np.zeros(1, np.int32)
                seat.control.post_result(frame.sequence, zero, zero)
        comm.close()

    floats = sum(1 + step % 3 for step in range(STEPS)) * PART
    with running("fork", rank_main, sizes(tp, "pipes")) as (_, front):
        front.wait_ready(deadline_s=60.0)
        front.wait_result(front.send_frame(rows(1)))
        for status in front.statuses():
            assert status.wire_bytes["states"] == floats * 4 * (tp - 1)
            assert status.wire_messages["states"] == STEPS * (tp - 1)
