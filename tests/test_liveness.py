"""Liveness: a busy rank is waited for, a silent one is named, whoever waits for it in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_comm import BODIES, KINDS, Body, Work, rows, running, serve, sizes

from anyshard.comm.base import Comm, EpochAborted
from anyshard.comm.control import RankStatus
from anyshard.comm.liveness import Liveness, Patience, processor_sign
from anyshard.comm.region import EpochRegion
from anyshard.comm.signals import ABORTED, LATE, REACHED
from anyshard.comm.waiting import outwait
from anyshard.errors import PeerLost
from anyshard.launcher import Seat


def beating(seat: Seat, seconds: float) -> None:
    """Many short ops."""
    for _ in range(round(seconds / 0.05)):
        time.sleep(0.05)
        seat.control.status.beat()


def computing(seat: Seat, seconds: float) -> None:
    """One long op."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        np.sort(np.arange(10_000)[::-1])


def hanging(seat: Seat, seconds: float) -> None:
    """No sign of life."""
    time.sleep(seconds)


Busy = Callable[[Seat, float], None]


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyshard.comm.control._GRACE_S", 0.0)


@pytest.mark.parametrize("busy", [beating, computing])
@pytest.mark.parametrize("kind", KINDS)
def test_a_busy_rank_is_alive_to_the_front(kind: str, busy: Busy, no_grace: None) -> None:
    def rank_main(seat: Seat) -> None:
        busy(seat, 0.6)  # a long start
        serve(lambda seat, comm, token: busy(seat, 0.6))(seat)

    with running(kind, rank_main, sizes(tp=1), deadline_s=0.25) as (_, front):
        front.wait_ready(deadline_s=0.25)
        front.wait_result(front.send_frame(rows(1)))


def busy_for_peers(wire: str, busy: Busy) -> Work:
    def work(seat: Seat, comm: Comm, token: int) -> None:
        values = np.zeros(3, np.float32)
        if comm.rank == 0:
            busy(seat, 0.7)
        if wire == "exchange":
            comm.exchange("nodes").run(3, 3)
        elif comm.stage:
            comm.receive(values)
        if wire == "hop" and comm.stage + 1 < comm.pp:
            comm.send(values)

    return work


@pytest.mark.ranks
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("busy", [beating, computing])
@pytest.mark.parametrize(("wire", "tp", "pp"), [("hop", 1, 3), ("exchange", 3, 1)])
def test_a_busy_peer_is_waited_for(
    wire: str, tp: int, pp: int, busy: Busy, body: Body, no_grace: None
) -> None:
    epoch_sizes = sizes(tp=tp, pp=pp, hop_floats=3, body=body)
    work = serve(busy_for_peers(wire, busy))
    with running("fork", work, epoch_sizes, deadline_s=0.25) as (_, front):
        front.wait_result(front.send_frame(rows(1)))


@pytest.mark.ranks
@pytest.mark.parametrize(("wire", "tp", "pp"), [("hop", 1, 4), ("exchange", 3, 1)])
def test_a_peer_that_hangs_is_named_after_one_deadline_at_the_end_of_any_chain(
    wire: str, tp: int, pp: int
) -> None:
    epoch_sizes = sizes(tp=tp, pp=pp, hop_floats=3)
    work = serve(busy_for_peers(wire, lambda seat, seconds: time.sleep(5.0)))
    with running("fork", work, epoch_sizes, deadline_s=0.4) as (_, front):
        front.wait_ready()
        started = time.monotonic()
        with pytest.raises(PeerLost, match=r"waited 0\.4 s for rank 0") as lost:
            front.wait_result(front.send_frame(rows(1)))
        assert 0.35 < time.monotonic() - started < 1.2
        assert lost.value.rank == 0


def test_whoever_waits_is_not_the_culprit() -> None:
    region = EpochRegion.create(sizes(tp=2, pp=2), 1, shared=False)
    liveness = Liveness(region)
    liveness.introduce(1)
    liveness.set_waiting(3, 2)
    liveness.set_waiting(2, 1)
    assert [liveness.culprit(rank) for rank in range(4)] == [0, 1, 1, 1]
    before = liveness.sign(1)
    computing(None, 0.1)  # type: ignore[arg-type]
    assert liveness.sign(1) != before
    liveness.set_waiting(1, 3)  # a circle: somebody is named, and spinning is no sign of life
    assert liveness.culprit(3) in (1, 2, 3)
    before = liveness.sign(1)
    computing(None, 0.1)  # type: ignore[arg-type]
    assert liveness.sign(1) == before
    RankStatus(region, 1).beat()
    assert liveness.sign(1) != before
    region.close_descriptors()


@pytest.mark.ranks
def test_who_waits_says_for_whom_and_no_longer_than_that() -> None:
    """Else it would be forgiven its silence later, and another be named."""
    liveness = Liveness(EpochRegion.create(sizes(tp=3), 1, shared=False))
    said: list[int | None] = []

    class Waits:
        def __init__(self, *comes: int) -> None:
            self.comes = list(comes)

        def wait(self, value: int, timeout_us: int) -> int:
            said.append(liveness.waiting_for(0))
            return self.comes.pop(0)

    def wait(waiter: Any) -> None:
        outwait(
            liveness, waiter, value=1, status=LATE + 1, senders=(1, 2), rank=0, deadline_s=30.0,
            slice_us=1, what="a test",
        )  # fmt: skip

    wait(Waits(LATE + 1, LATE, REACHED))
    assert said == [2, 2, 1] and liveness.waiting_for(0) is None
    with pytest.raises(EpochAborted):
        wait(Waits(ABORTED))
    assert said[3:] == [2] and liveness.waiting_for(0) is None


def test_wanting_a_processor_is_a_sign_of_life_and_being_stopped_is_none() -> None:
    spinning = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(spinning) as process:
        try:
            signs = {processor_sign(process.pid) for _ in range(50)}
            assert len(signs) > 10  # far more often than a tick
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            assert len({processor_sign(process.pid) for _ in range(50)}) == 1
        finally:
            process.kill()
    assert processor_sign(process.pid) == (0, 0.0)


def test_a_freeze_of_everybody_is_nobodys_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("anyshard.comm.liveness.time.monotonic", lambda: now)
    patience = Patience(2.0)
    assert not patience.is_over("sign")
    now += 3600.0
    assert not patience.is_over("sign")
    for _ in range(3):
        now += 0.45
        assert not patience.is_over("sign")
    now += 0.45
    assert patience.is_over("sign")
    assert not patience.is_over("another sign")


@pytest.mark.torch
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("busy", "tp", "pp"), [(hanging, 3, 1), (hanging, 1, 3), (computing, 3, 1)]
)
def test_over_gloo_the_front_decides_who_is_lost(
    busy: Busy, tp: int, pp: int, no_grace: None
) -> None:
    pytest.importorskip("torch")

    def rank_main(seat: Seat) -> None:
        comm = seat.comm("torch")
        seat.control.next_frame()
        if comm.rank == 1:
            busy(seat, 2.0)
        values = np.zeros(3, np.float32)
        comm.exchange("nodes").run(3, 3)
        if comm.stage:
            comm.receive(values)
        if comm.stage + 1 < comm.pp:
            comm.send(values)
        if seat.rank == seat.region.sampler:
            seat.control.post_result(1, np.zeros(1, np.int32), np.zeros(1, np.int32))
        seat.control.next_frame()

    epoch_sizes = sizes(tp=tp, pp=pp, hop_floats=3)
    with running("fork", rank_main, epoch_sizes, deadline_s=0.6) as (_, front):
        front.wait_ready()
        sequence = front.send_frame(rows(1))
        if busy is computing:
            front.wait_result(sequence)
        else:
            with pytest.raises(PeerLost, match=r"rank 1 has given no sign of life for 0\.6 s"):
                front.wait_result(sequence)
