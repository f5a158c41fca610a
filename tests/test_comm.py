"""Wires: the same bits arrive whatever the width, the body, or who is slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from anyshard.comm import control
from anyshard.comm.base import WIRE_KINDS, Comm, Counters, ExchangeSpec, WireSizes
from anyshard.comm.control import PAGE, ROW, ControlSizes, FrontControl, RankStatus
from anyshard.comm.hops import HOP_HEADER_BYTES, HopTag, HopTimes
from anyshard.comm.region import MOST_FRAMES, EpochRegion, EpochSizes
from anyshard.comm.signals import ABORTED, LATE, REACHED
from anyshard.comm.solo import Solo
from anyshard.errors import AnyshardError, PeerLost
from anyshard.launcher import RankGroup, Seat, Start, ThreadGroup, fork_launcher
from anyshard.ops import native_module

Body = Literal["native", "pipes"]
BODIES = [
    pytest.param(
        "native", marks=pytest.mark.skipif(native_module() is None, reason="not compiled")
    ),
    "pipes",
]
KINDS = [pytest.param("threads"), pytest.param("fork", marks=pytest.mark.ranks)]
STEPS = 40

Work = Callable[[Seat, Comm, int], None]


def sizes(
    *,
    tp: int,
    pp: int = 1,
    body: Body = "pipes",
    floats: int = 4096,
    spin_us: int = 0,
    root_only: bool = False,
    hop_floats: int = 0,
    control: ControlSizes | None = None,
) -> EpochSizes:
    spec = ExchangeSpec(
        name="nodes",
        kind="logits" if root_only else "reduce",
        capacity_floats=floats,
        root_only=root_only,
    )
    wires = WireSizes(tp=tp, pp=pp, exchanges=(spec,), hop_bytes=4 * hop_floats)
    control = control or ControlSizes(rows_max=4, pages_max=2, logit_rows=1, vocab=5)
    return EpochSizes(wires=wires, control=control, spin_us=spin_us, signals=body)


def no_load(progress: Any) -> tuple[object, bytes]:
    return None, b""


def serve(work: Work) -> Callable[[Seat], None]:
    """A rank_main that does `work(seat, comm, token of row 0)` in every frame."""

    def rank_main(seat: Seat) -> None:
        comm = seat.comm()
        while (frame := seat.control.next_frame()) is not None:
            work(seat, comm, int(frame.rows["token"][0]))
            seat.control.status.report(comm.counters)
            if seat.rank == seat.region.sampler:
                zero = np.zeros(len(frame.rows), np.int32)
                seat.control.post_result(frame.sequence, frame.rows["token"] + 1, zero)

    return rank_main


@contextmanager
def running(
    kind: str, rank_main: Callable[[Seat], None], epoch_sizes: EpochSizes, deadline_s: float = 10.0
) -> Iterator[tuple[RankGroup, FrontControl]]:
    group: RankGroup
    group = fork_launcher(no_load, rank_main) if kind == "fork" else ThreadGroup(no_load, rank_main)
    try:
        group.wait_loaded(deadline_s=10.0)
        start = Start(epoch=1, payload=b"", sizes=epoch_sizes, deadline_s=deadline_s)
        yield group, group.start(start)
    finally:
        group.close()


def rows(token: int, count: int = 1) -> Any:
    made = np.zeros(count, ROW)
    made["token"] = token
    return made


def bits(rank: int, step: int, count: int) -> Any:
    """Any bit pattern counts, NaN and subnormal included."""
    generator = np.random.default_rng((rank, step))
    return generator.integers(0, 1 << 32, count, np.uint64).astype(np.uint32)


def gather_and_check(seat: Seat, comm: Comm, *, slow: int | None) -> None:
    exchange = comm.exchange("nodes")
    for step in range(STEPS):
        parity = exchange.parity
        count = 1 + (step * 977) % exchange.capacity_floats
        exchange.send_buffer(parity)[:count] = bits(comm.rank, step, count).view(np.float32)
        exchange.run(count, count)
        if comm.tp_rank == slow:
            time.sleep(0.002)
        for tp_rank, source in enumerate(exchange.sources(parity)):
            sender = comm.stage * comm.tp + tp_rank
            assert np.array_equal(source[:count].view(np.uint32), bits(sender, step, count))


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tp", [1, 2, 3, 5, 8])
def test_gather_delivers_the_same_bits_at_every_width(kind: str, tp: int, body: Body) -> None:
    work: Work = lambda seat, comm, token: gather_and_check(seat, comm, slow=None)  # noqa: E731
    with running(kind, serve(work), sizes(tp=tp, body=body)) as (_, front):
        assert front.wait_result(front.send_frame(rows(1))).tokens == [2]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_no_buffer_is_overwritten_while_a_slow_peer_reads_it(slow: int, body: Body) -> None:
    work: Work = lambda seat, comm, token: gather_and_check(seat, comm, slow=slow)  # noqa: E731
    with running("threads", serve(work), sizes(tp=3, body=body)) as (_, front):
        front.wait_result(front.send_frame(rows(1)))


@pytest.mark.parametrize("body", BODIES)
def test_senders_of_a_root_only_exchange_wait_for_a_slow_root(body: Body) -> None:
    def work(seat: Seat, comm: Comm, token: int) -> None:
        exchange = comm.exchange("nodes")
        for step in range(STEPS):
            parity = exchange.parity
            exchange.send_buffer(parity)[:7] = bits(comm.rank, step, 7).view(np.float32)
            exchange.run(7, 7)
            if comm.tp_rank == 0:
                time.sleep(0.002)
                for sender, source in enumerate(exchange.sources(parity)):
                    assert np.array_equal(source[:7].view(np.uint32), bits(sender, step, 7))

    with running("threads", serve(work), sizes(tp=3, body=body, root_only=True)) as (_, front):
        front.wait_result(front.send_frame(rows(1)))


def pass_on(seat: Seat, comm: Comm, token: int) -> None:
    """Every stage adds its number to what it got; sizes change from hop to hop."""
    for step in range(STEPS):
        values = np.zeros((1 + step % 3, 5), np.float32)
        if comm.stage:
            comm.receive(values)
            assert (values == comm.stage * 100 + step).all()
        if step % 7 == comm.stage:
            time.sleep(0.001)
        if comm.stage + 1 < comm.pp:
            comm.send(values * 0 + ((comm.stage + 1) * 100 + step))


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 3), (1, 5)])
def test_hops_arrive_in_order(kind: str, tp: int, pp: int, body: Body) -> None:
    epoch_sizes = sizes(tp=tp, pp=pp, body=body, hop_floats=15)
    with running(kind, serve(pass_on), epoch_sizes) as (_, front):
        front.wait_result(front.send_frame(rows(1)))


def test_a_hop_of_another_size_is_refused_with_both_numbers() -> None:
    def work(seat: Seat, comm: Comm, token: int) -> None:
        if comm.stage == 0:
            comm.send(np.zeros(4, np.float32))
        else:
            comm.receive(np.zeros(5, np.float32))

    with (
        running("threads", serve(work), sizes(tp=1, pp=2, hop_floats=8)) as (_, front),
        pytest.raises(
            PeerLost,
            match="rank 1 expects 20 bytes of frame 0 of epoch 1, rank 0 sent 16 bytes of",
        ),
    ):
        front.wait_result(front.send_frame(rows(1)))


@pytest.mark.parametrize("body", BODIES)
def test_a_peer_that_does_not_come_is_named_after_the_deadline(body: Body) -> None:
    def work(seat: Seat, comm: Comm, token: int) -> None:
        if comm.rank == 2:
            seat.control.next_frame()
        exchange = comm.exchange("nodes")
        exchange.run(1, 1)

    with running("threads", serve(work), sizes(tp=3, body=body), deadline_s=0.3) as (_, front):
        started = time.monotonic()
        with pytest.raises(PeerLost, match=r"waited 0\.3 s for rank 2 in exchange 'nodes'") as lost:
            front.wait_result(front.send_frame(rows(1)))
        assert 0.25 < time.monotonic() - started < 1.5
        assert lost.value.rank == 2


@pytest.mark.parametrize("body", BODIES)
def test_abort_wakes_every_waiting_rank(body: Body) -> None:
    def work(seat: Seat, comm: Comm, token: int) -> None:
        if comm.rank == 1 and token == 1:
            raise RuntimeError("of no use")
        comm.exchange("nodes").run(1, 1)

    with running("threads", serve(work), sizes(tp=5, body=body)) as (group, front):
        with pytest.raises(PeerLost, match="rank 1 failed: RuntimeError: of no use"):
            front.wait_result(front.send_frame(rows(1)))
        started = time.monotonic()
        group.end()
        assert time.monotonic() - started < 0.5


@pytest.mark.parametrize("body", BODIES)
def test_signals_pass_the_32_bit_wrap(body: Body) -> None:
    region = EpochRegion.create(sizes(tp=2, body=body), 1, shared=False)
    sender, receiver = region.signals(0), region.signals(1)
    waiter = receiver.waiter(1, receivers=(), senders=[0], spin_us=0)
    for value in (1, 1 << 30, (1 << 31) - 1, 3 << 30, (1 << 32) - 1, 0, 1):
        assert waiter.wait((value + 1) % (1 << 32), 1000) == LATE
        sender.publish(1, value, [1])
        assert waiter.wait(value, 1_000_000) == REACHED
    region.signals(2).abort()
    assert waiter.wait(2, -1) == ABORTED
    region.close_descriptors()


def count(seat: Seat, comm: Comm, token: int) -> None:
    values = np.zeros(6, np.float32)
    if comm.stage:
        comm.receive(values)
    comm.exchange("nodes").run(3, 5)
    if comm.stage + 1 < comm.pp:
        comm.send(values)


@pytest.mark.parametrize("root_only", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_counted_bytes_are_the_formula(kind: str, root_only: bool) -> None:
    epoch_sizes = sizes(tp=3, pp=2, hop_floats=6, root_only=root_only)
    with running(kind, serve(count), epoch_sizes) as (_, front):
        for _ in range(4):
            front.wait_result(front.send_frame(rows(1)))
        for status in front.statuses():
            stage, tp_rank = divmod(status.rank, 3)
            hops = 4 if stage == 0 else 0
            if root_only:
                name, messages, floats = "logits", 0 if tp_rank == 0 else 4, 3
            else:
                name, messages, floats = "reduce", 8, 5
            expected = dict.fromkeys(WIRE_KINDS, 0)
            expected |= {name: messages, "hop": hops}
            assert status.wire_messages == expected
            hop_bytes = HOP_HEADER_BYTES + 6 * 4
            expected |= {name: messages * floats * 4, "hop": hops * hop_bytes}
            assert status.wire_bytes == expected


def test_sizes_out_of_bounds_are_refused() -> None:
    solo = Solo(sizes(tp=1, floats=8).wires)
    exchange = solo.exchange("nodes")
    for num_floats, wire_floats in ((-1, 3), (4, 3), (3, 9)):
        with pytest.raises(ValueError, match="does not hold"):
            exchange.run(num_floats, wire_floats)
    with pytest.raises(ValueError, match="no exchange 'other'; have"):
        solo.exchange("other")


def test_solo_sends_nothing_and_reads_its_own_buffer() -> None:
    solo = Solo(sizes(tp=1, floats=8).wires)
    exchange = solo.exchange("nodes")
    for step in range(3):
        parity = exchange.parity
        exchange.send_buffer(parity)[:] = step
        exchange.run(8, 8)
        assert (exchange.sources(parity)[0] == step).all()
    assert not any(solo.counters.bytes.values())
    assert not any(solo.counters.messages.values())


def echo(seat: Seat) -> None:
    """Rows back as tokens, the note's length as faults, logits with the frame's number."""
    seat.control.status.set(weight_bytes=10 + seat.rank, kv_bytes=20)
    while (frame := seat.control.next_frame()) is not None:
        seat.control.status.beat()
        if seat.rank == seat.region.sampler:
            faults = np.full(len(frame.rows), len(frame.note) + len(frame.pages), np.int32)
            logits = np.full((1, 5), frame.sequence, np.float32)
            seat.control.post_result(frame.sequence, frame.rows["token"], faults, logits)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kind", KINDS)
def test_frames_and_results_travel_whole(kind: str, body: Body) -> None:
    with running(kind, echo, sizes(tp=2, pp=2, hop_floats=1, body=body)) as (_, front):
        for number in range(1, 10):
            sent = rows(number, count=number % 5)
            result = front.wait_result(front.send_frame(sent, note=b"x" * number))
            assert result.sequence == number
            assert result.tokens == [number] * (number % 5)
            assert result.faults == [number] * (number % 5)
            assert result.logits is not None
            assert (result.logits == number).all()
        views = front.statuses()
        assert [view.weight_bytes for view in views] == [10, 11, 12, 13]
        assert [view.operations for view in views] == [view.frames for view in views] == [9] * 4
        front.send_frame(rows(1))
        front.send_frame(rows(2))
        with pytest.raises(ValueError, match="2 results are unread, the limit is 2"):
            front.send_frame(rows(3))
        assert [front.wait_result(n).tokens for n in (10, 11)] == [[1], [2]]


def test_frames_over_a_bound_are_refused_with_both_numbers() -> None:
    with running("threads", echo, sizes(tp=1)) as (_, front):
        with pytest.raises(ValueError, match="5 rows of 4"):
            front.send_frame(rows(1, count=5))
        with pytest.raises(ValueError, match="a note of 4097 bytes, the limit is 4096"):
            front.send_frame(rows(1), note=b"x" * 4097)
        with pytest.raises(ValueError, match="result 1 asked for"):
            front.wait_result(1)


def change_frames(monkeypatch: pytest.MonkeyPatch, change: Callable[[memoryview], None]) -> None:
    """`change` what stands in a frame's slot before the ranks hear of it."""
    write = control._write_frame

    def changed(region: EpochRegion, sequence: int, *parts: bytes) -> None:
        write(region, sequence, *parts)
        layout, slots = region.layout, region.sizes.control.frame_slots
        at = layout.frame_offset + sequence % slots * layout.frame_bytes
        change(memoryview(region.memory)[at : at + layout.frame_bytes])

    monkeypatch.setattr(control, "_write_frame", changed)


def test_a_frame_of_another_epoch_is_dropped_and_counted() -> None:
    def of_epoch_7(frame: memoryview) -> None:
        frame[8:16] = (7).to_bytes(8, "little")

    with running("threads", echo, sizes(tp=1)) as (_, front):
        front.wait_result(front.send_frame(rows(1)))
        with pytest.MonkeyPatch.context() as patch:
            change_frames(patch, of_epoch_7)
            stale = front.send_frame(rows(2))
        with pytest.raises(PeerLost, match="rank 0 has given no sign of life"):
            front.wait_result(stale, deadline_s=0.1)
        fresh = front.send_frame(rows(3))
        front._read = stale
        assert front.wait_result(fresh).tokens == [3]
        assert [view.dropped_frames for view in front.statuses()] == [1]


@pytest.mark.parametrize("part", ["rows", "pages", "note"])
def test_a_damaged_frame_ends_the_epoch_naming_both_checksums(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = np.cumsum([0, 4 * ROW.itemsize, 2 * PAGE.itemsize]).tolist()
    place = 64 + dict(zip(("rows", "pages", "note"), ends, strict=True))[part]

    def damage(frame: memoryview) -> None:
        frame[place] ^= 1

    with running("threads", echo, sizes(tp=1)) as (_, front):
        change_frames(monkeypatch, damage)
        with pytest.raises(PeerLost, match=r"checksum 0x\w{8}, its header says 0x\w{8}"):
            front.wait_result(front.send_frame(rows(1), np.ones(1, PAGE), b"n"))


@pytest.mark.parametrize("root_only", [False, True])
def test_peers_that_disagree_about_the_wire_are_told_both_sizes(root_only: bool) -> None:
    def work(seat: Seat, comm: Comm, token: int) -> None:
        comm.exchange("nodes").run(2, 4 + comm.rank)

    with (
        running("threads", serve(work), sizes(tp=2, root_only=root_only)) as (_, front),
        pytest.raises(PeerLost, match=r"'nodes': rank \d has \d floats on the wire, rank \d \d"),
    ):
        front.wait_result(front.send_frame(rows(1)))


def test_the_faults_of_as_many_frames_as_can_be_in_flight_are_kept() -> None:
    region = EpochRegion.create(sizes(tp=1), 1, shared=False)
    status = RankStatus(region, 0)
    front = FrontControl(region, poll=lambda: None, deadline_s=1.0)

    def kept() -> dict[int, int]:
        (view,) = front.statuses(settled=False)
        return view.faults

    assert kept() == {}
    status.fault(sequence=4, code=3)
    status.fault(sequence=7, code=9)
    assert kept() == {4: 3, 7: 9}
    status.fault(sequence=4 + MOST_FRAMES, code=5)
    assert kept() == {7: 9, 4 + MOST_FRAMES: 5}
    region.close_descriptors()


def test_native_signals_are_refused_where_they_are_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("anyshard.comm.region.native_module", lambda: None)
    with pytest.raises(ValueError, match="compiled"):
        EpochRegion.create(sizes(tp=1, body="native"), 1, shared=False)


@pytest.mark.skipif(native_module() is None, reason="not compiled")
@pytest.mark.parametrize("index", [-16, 8, 64, 2**63 - 16])
def test_a_line_outside_the_words_is_refused(index: int) -> None:
    native: Any = native_module()
    words = np.zeros(64, np.uint32)
    with pytest.raises(ValueError, match="a line starts at a multiple of 16 words inside"):
        native.shm_publish(words, index, 1)


@pytest.mark.torch
@pytest.mark.ranks
@pytest.mark.parametrize(("tp", "pp", "root_only"), [(3, 1, False), (3, 1, True), (2, 2, True)])
def test_gloo_delivers_the_same_bits_and_counts_the_same(tp: int, pp: int, root_only: bool) -> None:
    pytest.importorskip("torch")

    def num_floats_of(tp_rank: int) -> int:
        return (2, 5, 1)[tp_rank]  # the root's own may be smaller or larger than its peers'

    def rank_main(seat: Seat) -> None:
        comm = seat.comm("torch")
        exchange = comm.exchange("nodes")
        while (frame := seat.control.next_frame()) is not None:
            for step in range(5):
                num_floats, wire_floats = num_floats_of(comm.tp_rank), 5
                parity = exchange.parity
                sent = bits(comm.rank, step, num_floats).view(np.float32)
                exchange.send_buffer(parity)[:num_floats] = sent
                exchange.run(num_floats, wire_floats)
                readable = not root_only or comm.tp_rank == 0
                for tp_rank, source in enumerate(exchange.sources(parity) if readable else []):
                    length = num_floats_of(tp_rank)
                    expected = bits(comm.stage * comm.tp + tp_rank, step, length)
                    assert np.array_equal(source[:length].view(np.uint32), expected)
            pass_on(seat, comm, 0)
            seat.control.status.report(comm.counters)
            if seat.rank == seat.region.sampler:
                zero = np.zeros(1, np.int32)
                seat.control.post_result(frame.sequence, zero, zero)
        comm.close()

    epoch_sizes = sizes(tp=tp, pp=pp, root_only=root_only, hop_floats=15)
    with running("fork", rank_main, epoch_sizes) as (_, front):
        front.wait_ready(deadline_s=60.0)
        front.wait_result(front.send_frame(rows(1)))
        for status in front.statuses():
            stage, tp_rank = divmod(status.rank, tp)
            if root_only:
                sent = 5 * 4 * num_floats_of(tp_rank) if tp_rank else 0
                assert status.wire_bytes["logits"] == sent
            else:
                assert status.wire_bytes["reduce"] == 5 * 5 * 4 * (tp - 1)
            assert status.wire_messages["hop"] == (STEPS if stage + 1 < pp else 0)


class Post:
    """A Gloo group of two whose messages are handed over when they are waited for, each once."""

    def __init__(self, messages: list[bytes]) -> None:
        self.messages, self.waited = messages, 0

    def recv(self, tensors: list[Any], index: int, tag: int) -> Any:
        into = tensors[0].numpy()

        def wait(timeout: object) -> None:
            message = self.messages.pop(0)
            into[: len(message)] = np.frombuffer(message, np.uint8)

        return self._once(wait)

    def send(self, tensors: list[Any], index: int, tag: int) -> Any:
        values = tensors[0].numpy()
        return self._once(lambda timeout: self.messages.append(values.tobytes()))

    def _once(self, wait: Callable[[object], None]) -> Any:
        def waited(timeout: object) -> None:
            assert not work.is_over, "nothing is under way"
            work.is_over = True
            self.waited += 1
            wait(timeout)

        work = SimpleNamespace(wait=waited, is_over=False)
        return work


@pytest.mark.torch
def test_gloo_hops_own_their_buffers_until_they_are_read_and_drop_those_of_earlier_epochs() -> None:
    pytest.importorskip("torch")
    from anyshard.comm.torch import _HopsIn, _HopsOut

    epoch_sizes = sizes(tp=1, pp=2, hop_floats=3)
    region = EpochRegion.create(epoch_sizes, 5, shared=False)
    posts, depth = Post([]), epoch_sizes.wires.hop_depth
    comms: list[Any] = [
        SimpleNamespace(
            rank=rank, stage=rank, tp=1, tag=HopTag(5), times=HopTimes(), counters=Counters()
        )
        for rank in (0, 1)
    ]
    out = _HopsOut(comms[0], region, posts, 1)
    values = np.zeros(3, np.float32)
    frames = [*range(1, 2 + 2 * depth)]
    for frame in frames:  # those of an earlier epoch between the others
        for epoch in (4, 5):
            comms[0].tag = HopTag(epoch, frame)
            values.fill(frame if epoch == 5 else -1)
            out.send(values)
    assert posts.waited == 2 * len(frames) - depth, "no buffer is written while it is under way"
    for work in (*out._ring.works[out._ring._next :], *out._ring.works[: out._ring._next]):
        work.wait(None)
    into = _HopsIn(comms[1], region, posts, 0)
    for frame in frames:
        comms[1].tag = HopTag(5, frame)
        got = np.zeros(3, np.float32)
        into.receive(got)
        assert got.tolist() == [frame] * 3
    assert not posts.messages


def test_errors_of_the_package_keep_their_words() -> None:
    """A rank that raises an AnyshardError is quoted without the class's name."""

    def refuse(seat: Seat) -> None:
        raise AnyshardError("no room for 3 pages")

    with (
        running("threads", refuse, sizes(tp=1)) as (group, front),
        pytest.raises(PeerLost, match=r"^rank 0 failed: no room for 3 pages"),
    ):
        front.wait_ready(deadline_s=2.0)
        group.poll()
