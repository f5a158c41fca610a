"""What hosts tell each other of their mappings, and whom a head takes: no rank and no model run."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from anyshard.comm.base import Place, WireSizes
from anyshard.comm.control import PAGE, ROW, RankControl, publish_frame, publish_stop
from anyshard.comm.liveness import Liveness, Vigil
from anyshard.comm.mirror import HeadMirror, MemberMirror, RankSighting, Sighting
from anyshard.comm.region import CHANNEL_READY, ControlSizes, EpochRegion, EpochSizes
from anyshard.comm.signals import LATE, REACHED
from anyshard.errors import AnyshardError, PeerLost, UserError
from anyshard.launcher.channel import ChannelClosed, Failed, Loaded
from anyshard.launcher.hosts import HostGroup, Terms
from anyshard.launcher.meeting import (
    Hello,
    HostChannel,
    Ping,
    Pong,
    Refused,
    Welcome,
    listen,
)
from anyshard.launcher.member import Member
from anyshard.ops import native_module
from anyshard.trace import EVENT

BODIES = ["pipes"] if native_module() is None else ["native", "pipes"]
HOSTS = (1, 1, 0, 0)  # of ranks 0 to 3: the stages of tp 2, pp 2
EVENTS, COLUMNS, ROWS = 5, 3, 7


def regions(body: Any) -> tuple[EpochRegion, EpochRegion, EpochRegion]:
    """Of one epoch: the head's mapping as its front sees it, host 1's as its command and its ranks
    do."""
    sizes = EpochSizes(
        wires=WireSizes(tp=2, pp=2, hosts=HOSTS),
        control=ControlSizes(
            rows_max=ROWS, pages_max=4, digest_columns=COLUMNS, trace_events=EVENTS
        ),
        signals=body,
    )
    fronts, ranks = [], []
    for host in (0, 1):
        place = Place(host=host, clock_ns=1000 * host)
        made = EpochRegion.create(sizes, 5, shared=True, place=place)
        fronts.append(
            EpochRegion.attach(sizes, 5, [os.dup(each) for each in made.front_fds()], place)
        )
        ranks.append(made)
    return fronts[0], fronts[1], ranks[1]


def events_of(region: EpochRegion, rank: int, first: int, count: int) -> None:
    """Write events number `first` on, each of which starts at its number."""
    written, ring = region.event_ring(rank)
    for number in range(first, first + count):
        ring[number % EVENTS] = (number, number + 1, 0, number, 1, 0)
    written[0] = first + count


@pytest.mark.parametrize("body", BODIES)
def test_a_frame_goes_over_and_what_ranks_say_comes_back(body: str) -> None:
    head, member, theirs = regions(body)
    mirror, into = MemberMirror(member), HeadMirror(head)
    ranks = [RankControl(theirs, rank=rank) for rank in (0, 1)]
    front = head.signals(head.front)
    waiter = front.waiter(CHANNEL_READY, receivers=(), senders=[0, 1], spin_us=0)
    rows: NDArray[Any] = np.zeros(3, ROW)
    rows["token"] = [11, 12, 13]
    pages: NDArray[Any] = np.zeros(1, PAGE)

    def step(rank: RankControl, number: int) -> None:
        frame = rank.next_frame(5.0)
        assert frame is not None and frame.rows["token"].tolist() == [11, 12, 13]
        assert (frame.note, len(frame.pages)) == (b"note", 1)
        rank.status.beat()
        rank.post_digests(frame.sequence, np.full((3, COLUMNS), number, np.uint64))
        rank.next_frame(5.0)

    threads = [
        threading.Thread(target=step, args=(rank, 70 + number)) for number, rank in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    sighting = mirror.look(5_000_000)
    assert sighting is not None and sighting.asked == [1, 1]
    assert waiter.wait(1, 0) >= LATE, "the head has not heard of it"
    into.put(1, sighting)
    assert waiter.wait(1, 0) == REACHED
    events_of(member, 0, 0, 3)
    publish_frame(member, 1, rows=rows.tobytes(), pages=pages.tobytes(), note=b"note")
    sighting = mirror.look(5_000_000)
    while sighting is not None and sighting.asked != [2, 2]:  # one may be seen before the other
        into.put(1, sighting)
        sighting = mirror.look(5_000_000)
    assert sighting is not None
    into.put(1, sighting)
    assert waiter.wait(2, 0) == REACHED
    for rank in (0, 1):
        assert head.status(rank)["relayed"][0] == sighting.ranks[rank].sign
        assert (head.digests(1, rank)[:3] == 70 + rank).all()
        assert not head.digests(1, rank)[3:].any()
        assert head.status(rank)["operations"][0] >= 1
        assert head.status(rank)["pid"][0] == member.status(rank)["pid"][0]
    assert not head.status(2)["operations"][0] and not head.status(3)["operations"][0]
    count, ring = head.event_ring(0)
    assert int(count[0]) == 3 and ring["start"][:3].tolist() == [1000, 1001, 1002]
    publish_stop(member, 1)
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def test_events_that_the_ring_has_lost_are_lost_on_the_head_too() -> None:
    head, member, theirs = regions(BODIES[0])
    into, mirror = HeadMirror(head), MemberMirror(member)
    signals = [theirs.signals(rank) for rank in (0, 1)]
    for asked, first, count in ((1, 0, 2), (2, 2, 9), (3, 11, 0), (4, 11, 4)):
        events_of(member, 1, first, count)
        for each in signals:
            each.publish(CHANNEL_READY, asked, (member.front,))
        sighting = mirror.look(5_000_000)
        assert sighting is not None and sighting.asked == [asked, asked]
        into.put(1, sighting)
        written, ring = head.event_ring(1)
        last = first + count
        assert int(written[0]) == last
        want = [1000 + number for number in range(max(0, last - EVENTS), last)]
        assert sorted(ring["start"].tolist())[-len(want) :] == want


def test_a_sighting_of_other_sizes_is_refused_with_both() -> None:
    head, _, _ = regions(BODIES[0])
    status = head.status(0).tobytes()
    right, size = RankSighting(1, status, 1), len(status)
    wrong = {
        "tells of 1 ranks; it has 2": (right,),
        f"tells {size - 1}, 0 and 0 bytes of rank 1": (right, RankSighting(1, status[1:], 1)),
        "rank 0 and 8 rows": (RankSighting(2, status, 1, rows=ROWS + 1), right),
        f"tells {size}, 8 and 0 bytes": (right, RankSighting(2, status, 1, 2, b"12345678")),
        f"0 and {EVENT.itemsize - 1} bytes": (
            right,
            RankSighting(1, status, 1, events=bytes(EVENT.itemsize - 1)),
        ),
    }
    for words, ranks in wrong.items():
        with pytest.raises(AnyshardError, match=words):
            HeadMirror(head).put(1, Sighting(5, ranks))


def test_a_rank_that_goes_on_is_seen_to_though_another_of_its_host_does_not() -> None:
    head, member, theirs = regions(BODIES[0])
    mirror, into = MemberMirror(member), HeadMirror(head)
    signals = [theirs.signals(rank) for rank in (0, 1)]
    for asked in (1, 2, 3):
        signals[1].publish(CHANNEL_READY, asked, (member.front,))
    seen = [mirror.look(1000) for _ in range(4)]
    assert [each.asked if each else None for each in seen] == [[0, 1], [0, 2], [0, 3], [0, 3]]
    front = head.signals(head.front)
    waiters = [
        front.waiter(CHANNEL_READY, receivers=(), senders=[rank], spin_us=0) for rank in (0, 1)
    ]
    for each in seen:
        assert each is not None
        into.put(1, each)
    assert waiters[1].wait(3, 0) == REACHED and waiters[0].wait(1, 0) == LATE
    signals[0].publish(CHANNEL_READY, 1, (member.front,))
    started = time.monotonic()
    last = mirror.look(5_000_000)
    assert last is not None and last.asked == [1, 3]
    assert time.monotonic() - started < 2, "nobody waits for the rank that is ahead"


def test_the_head_judges_ranks_of_all_hosts_and_others_only_their_own() -> None:
    head, member, _ = regions(BODIES[0])
    vigil = Vigil(Liveness(head), 0.0)
    vigil.lost(1)
    assert vigil.lost(1) == 1, "no sign has come"
    head.status(1)["relayed"] = 17
    assert Vigil(Liveness(head), 30.0).lost(1) is None
    far = Vigil(Liveness(member), 0.0)
    assert [far.lost(3) for _ in range(3)] == [None] * 3
    member.status(0)["waiting_for"] = 3 + 1  # and so whoever waits for it, waits for the head's
    assert [far.lost(0) for _ in range(3)] == [None] * 3


# --- whom a head takes ---


class Loads:
    """A launcher of the head's that has loaded at once."""

    def __init__(self) -> None:
        self._says_nothing = os.eventfd(0)

    def fileno(self) -> int:
        return self._says_nothing

    def look_loaded(self, timeout_s: float, progress: Any = None) -> bytes:
        return b"mine"

    def poll(self) -> None:
        """All is well."""

    def close(self) -> None:
        os.close(self._says_nothing)


@contextmanager
def gathering(
    said: list[str], *, nnodes: int = 3, join_s: float = 5.0
) -> Iterator[tuple[int, threading.Thread, list[BaseException]]]:
    """A head that waits for its members on a thread: its port, and what it ended with."""

    def agree(name: str, mine: bytes, theirs: bytes) -> None:
        if theirs != mine:
            raise UserError(f"{name} has {theirs!r}")

    terms = Terms(
        nnodes=nnodes, version="1", share=b"share", agree=agree, tell=said.append, join_s=join_s
    )
    listening = listen("127.0.0.1", 0)
    port: int = listening.getsockname()[1]
    group = HostGroup(Loads(), listening, terms, deadline_s=1.0)  # type: ignore[arg-type]
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            assert group.wait_loaded() == b"mine"
        except BaseException as error:  # noqa: BLE001  looked at by the test
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield port, thread, ended
    finally:
        thread.join(20)
        assert not thread.is_alive()
        group.close()


def framed(body: bytes) -> bytes:
    """As it stands on a connection: its length, no descriptors, and itself."""
    return len(body).to_bytes(4, "little") + bytes(4) + body


def comes(port: int, number: int, *, version: str = "1", nnodes: int = 3) -> HostChannel:
    channel = HostChannel(socket.create_connection(("127.0.0.1", port)))
    channel.send(Hello(number, nnodes, version, "scalar", ""))
    return channel


def test_a_head_takes_each_host_once_and_refuses_others_by_name() -> None:
    said: list[str] = []
    with gathering(said) as (port, thread, ended):
        first = comes(port, 1)
        assert first.receive(5.0) == Welcome(b"share")
        wrong = {
            "--node-rank 1 is taken, by host 1 (127.0.0.1)": comes(port, 1),
            "--node-rank is 0; it can be 1 to 2": comes(port, 0),
            "--node-rank is 3; it can be 1 to 2": comes(port, 3),
            "host 0 runs anyshard 1, this one 2": comes(port, 2, version="2"),
            "host 0 was told --nnodes 3, this one 4": comes(port, 2, nnodes=4),
        }
        for words, channel in wrong.items():
            assert channel.receive(5.0) == Refused(words)
            channel.close()
        ping = msgspec.msgpack.encode(Ping())  # a word of ours, and no first one
        for garbage in (b"\x00" * 8, b"\xff" * 64, framed(b"hello"), framed(ping)):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(garbage)
        silent = socket.create_connection(("127.0.0.1", port))  # and keeps nobody waiting
        silent.sendall(b"\x00\x00\x00\x01\x00")
        first.send(Ping())
        assert isinstance(first.receive(5.0), Pong)
        started = time.monotonic()
        second = comes(port, 2)
        assert second.receive(5.0) == Welcome(b"share")
        for channel in (first, second):
            channel.send(Loaded(b"mine"))
        thread.join(5)
        assert not ended and time.monotonic() - started < 3
        with pytest.raises(ConnectionRefusedError):  # nobody else is wanted
            socket.create_connection(("127.0.0.1", port))
        silent.close()
        first.close()
        second.close()
    assert sum(line.startswith("refused 127.0.0.1") for line in said) == len(wrong)


def test_a_member_with_other_weights_is_told_and_ends_the_run() -> None:
    """Though another one has the right ones."""
    with gathering([]) as (port, thread, ended):
        right, other = comes(port, 1), comes(port, 2)
        for channel, loaded in ((right, b"mine"), (other, b"theirs")):
            assert channel.receive(5.0) == Welcome(b"share")
            channel.send(Loaded(loaded))
        assert other.receive(5.0) == Refused("host 2 (127.0.0.1) has b'theirs'")
        thread.join(5)
        right.close()
        other.close()
    (error,) = ended
    assert isinstance(error, UserError) and error.exit_code == 2


@pytest.mark.parametrize("what", ["failed", "steers", "gone", "garbage", "wrong", "never"])
def test_a_member_that_does_not_load_is_named(what: str) -> None:
    with gathering([], nnodes=2, join_s=1.0) as (port, thread, ended):
        if what != "never":
            other = comes(port, 1, nnodes=2)
            assert other.receive(5.0) == Welcome(b"share")
        if what == "failed":
            other.send(Failed(True, "no memory", 2))
        elif what == "steers":  # a terminal, and what a caller takes for success
            other.send(Failed(False, "\x1b[2Jall is well", 0))
        elif what == "gone":
            other.close()
        elif what == "garbage":
            other._connection.sendall(framed(msgspec.msgpack.encode({"type": "\x1b[2Jnone"})))
        elif what == "wrong":
            other.send(Welcome(b""))
        thread.join(10)
        if what not in ("never", "gone"):
            other.close()
    (error,) = ended
    want: dict[str, tuple[type[BaseException], str]] = {
        "failed": (UserError, "host 1 (127.0.0.1): no memory"),
        "steers": (AnyshardError, "host 1 (127.0.0.1):  [2Jall is well"),
        "gone": (PeerLost, "host 1 (127.0.0.1) has closed its connection"),
        "garbage": (PeerLost, "host 1 (127.0.0.1) sent what is no message: "),
        "wrong": (PeerLost, "host 1 (127.0.0.1) sent what is no message: a Welcome"),
        "never": (PeerLost, "host 1 did not join within 1 s"),
    }
    kind, words = want[what]
    assert isinstance(error, kind) and str(error).startswith(words)
    assert str(error).isprintable()
    assert error.exit_code in (1, 2, 5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("ahead_ns", [10**15, -(10**12)])
def test_a_member_learns_what_the_clock_of_the_head_is_ahead(ahead_ns: int) -> None:
    with listen("127.0.0.1", 0) as listening:
        mine = HostChannel(socket.create_connection(listening.getsockname()))
        head = HostChannel(listening.accept()[0])

    def answer() -> None:
        assert isinstance(head.receive(5.0), Hello)
        head.send(Welcome(b"share"))
        while isinstance(head.receive(1.0), Ping):
            head.send(Pong(time.monotonic_ns() + ahead_ns))

    thread = threading.Thread(target=answer)
    thread.start()
    member = Member(mine)
    assert member.join(Hello(1, 2, "1", "scalar", ""), patience_s=5.0) == b"share"
    thread.join(10)
    assert abs(member._clock_ns - ahead_ns) < 5e6
    mine.close()
    head.close()


@pytest.mark.parametrize("what", ["nothing", "garbage", "ssh", "closed"])
def test_what_answers_in_place_of_a_head_is_named(what: str) -> None:
    with listen("127.0.0.1", 0) as listening:
        mine = HostChannel(socket.create_connection(listening.getsockname()))
        other = listening.accept()[0]
    if what in ("garbage", "ssh"):
        other.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" if what == "ssh" else bytes(16) + b"\xff" * 64)
    if what == "closed":
        other.close()
    member = Member(mine)
    words = {
        "nothing": r"host 0 \(127.0.0.1\) took the connection and said nothing in 0.2 s",
        "garbage": r"what answers as host 0 \(127.0.0.1\) is no anyshard: ",
        "ssh": r"what answers as host 0 \(127.0.0.1\) is no anyshard: a message says \d+ bytes",
        "closed": r"the connection to host 0 \(127.0.0.1\) is lost: ",
    }
    with pytest.raises(PeerLost, match=words[what]):
        member.join(Hello(1, 2, "1", "scalar", ""), patience_s=0.2)
    mine.close()
    other.close()


def test_a_channel_that_is_closed_wakes_its_readers_at_both_ends() -> None:
    with listen("127.0.0.1", 0) as listening:
        mine = HostChannel(socket.create_connection(listening.getsockname()))
        theirs = HostChannel(listening.accept()[0])
    heard: list[BaseException] = []

    def listens() -> None:
        try:
            theirs.receive(5.0)
        except ChannelClosed as error:
            heard.append(error)

    thread = threading.Thread(target=listens)
    thread.start()
    time.sleep(0.05)
    theirs.close()
    thread.join(2)
    assert not thread.is_alive() and heard
    with pytest.raises(ChannelClosed):
        mine.receive(5.0)
    mine.close()
