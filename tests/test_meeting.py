"""Strangers at the port of a head, words of other epochs, clocks and signs of life of members: what
hosts say to each other, without a rank or a model."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from test_mirror import BODIES, Loads, framed, regions

from anyshard.comm.base import Place
from anyshard.comm.control import ROW
from anyshard.comm.mirror import Sighting
from anyshard.comm.region import EpochRegion
from anyshard.errors import OptionError, PeerLost, UserError
from anyshard.launcher.channel import ChannelClosed, End, Failed, Loaded, RankLost
from anyshard.launcher.hosts import HostGroup, Terms, _Member
from anyshard.launcher.meeting import (
    Alive,
    FrameOut,
    Hello,
    HostChannel,
    Leave,
    Ping,
    Pong,
    Refused,
    VoidOut,
    Welcome,
    connect,
    first_message,
    listen,
)
from anyshard.launcher.member import Member, _Sighter
from anyshard.launcher.seat import Start


class Told:
    """A head's mapping, and who it is told of."""

    epoch = 5

    def __init__(self) -> None:
        self.put_of: list[tuple[int, int]] = []

    def put(self, host: int, sighting: Sighting) -> None:
        self.put_of.append((host, sighting.epoch))


class Local(Loads):
    """A launcher of the head's; what each look at it brings."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[Any] = []
        self.starts: list[Start] = []
        self.pids: list[int] = []

    def poll(self) -> None:
        what = self.looks.pop(0) if len(self.looks) > 1 else (self.looks or [None])[0]
        if isinstance(what, PeerLost):
            raise what
        if what is not None:
            what()

    def region(self, start: Start, *, listening_fd: int) -> EpochRegion:
        self.starts.append(start)
        return EpochRegion.create(start.sizes, start.epoch, shared=False, place=start.place)

    def end(self) -> None:
        """All are gone."""


class Near:
    """A head's end of a connection to a member, which answers as `answer` does."""

    def __init__(self, number: int) -> None:
        self.peer = f"10.0.0.{number + 1}"
        self.said: list[Any] = []
        self.answer: Callable[[Any], None] = lambda message: None
        self._says_nothing = os.eventfd(0)

    def fileno(self) -> int:
        return self._says_nothing

    def send(self, message: Any) -> None:
        self.said.append(message)
        self.answer(message)

    def close(self) -> None:
        os.close(self._says_nothing)


@contextmanager
def head_of(hosts: tuple[int, ...]) -> Iterator[tuple[HostGroup, Local, list[_Member]]]:
    """The head of an epoch 5 whose ranks are on these hosts, with all members there."""
    numbers = sorted(set(hosts) - {0})
    terms = Terms(
        nnodes=len(numbers) + 1, version="1", share=b"", agree=lambda *_: None,
        tell=lambda _: None, join_s=1.0,
    )  # fmt: skip
    local: Any = Local()
    members: list[_Member] = []
    for number in numbers:
        near: Any = Near(number)
        members.append(_Member(number, near))
    group = HostGroup(local, listen("127.0.0.1", 0), terms, deadline_s=5.0)
    group._stop_listening()
    group._members = {member.host: member for member in members}
    group._hosts, group._epoch = hosts, 5
    group._begin_patience()
    try:
        yield group, local, members
    finally:
        group.close()


def test_of_a_rank_that_others_miss_its_own_host_has_the_word() -> None:
    with head_of((1, 0)) as (group, local, (member,)):
        missed = PeerLost("rank 1 lost a peer, rank 0, in a hop", rank=0)
        told = RankLost(5, 0, "rank 0 was killed by signal 9", 5, [])
        local.looks = [missed, missed, lambda: group._take(member, told)]
        with pytest.raises(PeerLost, match=r"^host 1 \(10.0.0.2\): rank 0 was killed by signal 9"):
            group.poll()
    with head_of((1, 0)) as (group, local, (member,)):
        member.lost = RankLost(5, 1, "rank 0 lost a peer, rank 1, in a hop", 5, [])
        local.looks = [None, None, PeerLost("rank 1 was killed by signal 9", rank=1)]
        with pytest.raises(PeerLost, match=r"^rank 1 was killed by signal 9") as caught:
            group.poll()
        assert caught.value.rank == 1
    with head_of((1, 0)) as (group, _, (member,)):
        for rank, name in ((0, r"host 1 \(10.0.0.2\): "), (1, "")):
            member.lost = RankLost(5, rank, "\x1b[2Jgone", 0, ["\x1b[2J"])
            with pytest.raises(PeerLost, match=rf"^{name} \[2Jgone") as caught:
                group.poll()
            assert caught.value.exit_code == 5, "whatever the member says"
            said = [str(caught.value), *getattr(caught.value, "__notes__", [])]
            assert all(line.isprintable() for each in said for line in each.splitlines())


def test_a_member_that_stops_in_the_middle_of_a_message_is_named_and_no_other() -> None:
    is_over = threading.Event()
    with head_of((1, 2, 0)) as (group, _, members), listen("127.0.0.1", 0) as listening:
        far = []
        for member in members:
            member.channel.close()
            far.append(HostChannel(socket.create_connection(listening.getsockname())))
            member.channel = HostChannel(listening.accept()[0])
        group._deadline_s = 0.2

        def lives() -> None:
            while not is_over.wait(0.05):
                far[0].send(Alive())

        far[1]._connection.sendall(framed(bytes(100))[:50])
        alive = threading.Thread(target=lives)
        group._hearing = threading.Thread(target=group._listen_on)
        group._hearing.start()
        try:
            until = time.monotonic() + 5
            while group._heard_now is not members[1]:
                assert time.monotonic() < until
            alive.start()
            group._begin_patience()
            with pytest.raises(PeerLost, match=r"^host 2 \(127.0.0.1\) has given no sign of life"):
                while time.monotonic() < until:
                    group.poll()
                    time.sleep(0.02)
        finally:
            is_over.set()
            alive.join()
            for channel in far:
                channel.close()


def test_a_member_gets_its_own_place_and_is_waited_for_until_its_ranks_have_gone() -> None:
    sizes = regions(BODIES[0])[0].sizes
    with head_of((1, 1, 0, 0)) as (group, local, (member,)):
        near: Any = member.channel

        def starts(message: Any) -> None:
            if isinstance(message, Start):
                member.started = message.epoch

        near.answer = starts
        start = Start(epoch=6, sizes=sizes, deadline_s=1.0, payload=b"x", place=Place(host=3))
        group.start(start)
        (mine,), (theirs,) = local.starts, near.said
        store = {"store_address": "127.0.0.1", "store_port": mine.place.store_port}
        assert mine.place == Place(host=0, address="127.0.0.1", **store)
        assert theirs.place == Place(host=1, address="10.0.0.2", **store)
        assert mine.place.store_port > 0 and theirs.payload == mine.payload == b"x"
        gone = threading.Timer(0.15, lambda: setattr(member, "ended", 6))
        near.answer = lambda message: gone.start()
        group.end()
        assert member.ended == 6 and near.said[1:] == [End(6)]
        near.answer = lambda message: None


def test_a_head_hears_each_member_as_itself_and_only_of_the_epoch_that_runs() -> None:
    told: Any = Told()
    with head_of((1, 2, 0)) as (group, _, (first, second)):
        group._mirror = told
        for member, epoch in ((first, 5), (second, 4), (second, 5), (first, 6)):
            group._take(member, Sighting(epoch, ()))
        assert told.put_of == [(1, 5), (2, 5)]
        group._take(first, RankLost(4, 0, "an earlier one", 5, []))
        assert first.lost is None
        group._take(first, RankLost(5, 0, "it is gone", 5, []))
        assert first.lost is not None and first.lost.reason == "it is gone"


@pytest.mark.parametrize("what", ["too much", "too slowly"])
def test_a_stranger_has_only_so_many_bytes_and_seconds(what: str) -> None:
    mine, theirs = socket.socketpair()
    is_over = threading.Event()

    def drip() -> None:
        for each in framed(msgspec.msgpack.encode(Hello(1, 2, "1", "scalar", ""))):
            if not is_over.wait(0.05):
                theirs.sendall(bytes([each]))

    thread = threading.Thread(target=drip)
    if what == "too much":
        theirs.sendall((1 << 20).to_bytes(4, "little") + bytes(5000))
        is_over.set()
    words = {"too much": "it says too much", "too slowly": "timed out|who it is"}
    thread.start()
    started = time.monotonic()
    try:
        with pytest.raises((ChannelClosed, TimeoutError), match=words[what]):
            first_message(mine, within_s=0.3)
        assert time.monotonic() - started < 1.0
    finally:
        is_over.set()
        thread.join()
        mine.close()
        theirs.close()


def test_addresses_of_many_hosts_are_not_listened_at() -> None:
    for address in ("0.0.0.0", "::", "::ffff:0.0.0.0", "224.0.0.1", "ff02::1", "255.255.255.255"):
        with pytest.raises(OptionError, match="is of many hosts, or all"):
            listen(address, 0).close()


@pytest.mark.timeout(20)
def test_a_head_that_does_not_come_is_given_up_after_the_patience() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        port: int = taken.getsockname()[1]
        words = f"host 0 has not answered at 127.0.0.1:{port} for 0.2 s: connection refused"
        with pytest.raises(PeerLost, match=words):
            connect("127.0.0.1", port, patience_s=0.2)


class Wire:
    """A connection to a head, on a clock of its own: each word there and back takes its time."""

    peer = "10.0.0.1"

    def __init__(self, ahead_ns: int, trips: list[tuple[int, int]]) -> None:
        self.now_ns, self._ahead_ns, self._trips = 1000, ahead_ns, trips
        self._answer: Any = None
        self._back_ns = 0

    def send(self, message: object) -> None:
        self._answer = Welcome(b"share")
        if isinstance(message, Ping):
            there_ns, self._back_ns = self._trips.pop(0)
            self.now_ns += there_ns
            self._answer = Pong(self.now_ns + self._ahead_ns)

    def receive(self, timeout_s: float) -> object:
        self.now_ns += self._back_ns
        return self._answer


def test_clocks_are_compared_in_the_middle_of_the_quickest_trip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire: Any = Wire(10**9, [(900, 100), (100, 700), (60, 60), (900, 500), (70, 300)])
    clock = SimpleNamespace(monotonic_ns=lambda: wire.now_ns)
    monkeypatch.setattr("anyshard.launcher.member.time", clock)
    member = Member(wire)
    member.join(Hello(1, 2, "1", "scalar", ""), patience_s=5.0)
    assert member._clock_ns == 10**9


@pytest.mark.parametrize("what", ["refuses", "garbage"])
def test_what_a_head_says_does_not_steer_the_terminal_of_a_member(what: str) -> None:
    with listen("127.0.0.1", 0) as listening:
        mine = HostChannel(socket.create_connection(listening.getsockname()))
        head = listening.accept()[0]
    words = Refused("\x1b[2Jno") if what == "refuses" else {"type": "\x1b[2Jno"}
    head.sendall(framed(msgspec.msgpack.encode(words)))
    kind, said = {
        "refuses": (UserError, r"^host 0 refuses this one:  \[2Jno$"),
        "garbage": (PeerLost, r"^what answers as host 0 \(127.0.0.1\) is no anyshard: .*\[2Jno"),
    }[what]
    with pytest.raises(kind, match=said) as caught:
        Member(mine).join(Hello(1, 2, "1", "scalar", ""), patience_s=5.0)
    assert str(caught.value).isprintable()
    mine.close()
    head.close()


# --- what a member does ---


class Heard:
    """A connection to a head that writes down what is said."""

    peer = "10.0.0.1"

    def __init__(self) -> None:
        self.said: list[Any] = []

    def send(self, message: object) -> None:
        self.said.append(message)

    def receive(self, timeout_s: float) -> None:
        return None


def member_of(region: EpochRegion) -> tuple[Any, Heard]:
    """That runs an epoch, and what it says."""
    heard: Any = Heard()
    member: Any = Member(heard)
    member._region, member._clock_ns = region, 77
    return member, heard


def test_a_member_passes_by_what_the_head_says_of_another_epoch() -> None:
    _, region, _ = regions(BODIES[0])
    member, _ = member_of(region)
    row = np.zeros(1, ROW).tobytes()
    for epoch in (4, 6):
        member._take(FrameOut(epoch, 1, row, b"", b""), None, None)
        member._take(VoidOut(epoch, 1), None, None)
        member._take(Leave(epoch, 0), None, None)
    assert member.frames == 0 and not region.voids().any() and not region.leave_after(1)
    member._take(VoidOut(5, 1), None, None)
    member._take(FrameOut(5, 1, row, b"", b""), None, None)
    member._take(Leave(5, 0), None, None)
    assert member.frames == 1 and region.voids().any() and region.leave_after(1)


def test_ranks_of_a_member_are_told_what_the_clock_of_the_head_is_ahead() -> None:
    _, region, _ = regions(BODIES[0])
    member, heard = member_of(region)
    places: list[Place] = []

    class Group:
        def end(self) -> None:
            """Nothing runs."""

        def region(self, start: Start) -> EpochRegion:
            places.append(start.place)
            raise UserError("no room")

    start = Start(epoch=6, sizes=region.sizes, deadline_s=1.0, payload=b"", place=Place(host=1))
    member._take(start, Group(), lambda start: start)
    assert places == [Place(host=1, clock_ns=77)]
    assert heard.said == [Failed(True, "no room", 2)]


def test_a_member_shows_life_while_it_loads_and_while_its_ranks_say_nothing_new() -> None:
    _, region, _ = regions(BODIES[0])
    member, heard = member_of(region)
    until = time.monotonic() + 0.7

    class Group:
        def look_loaded(self, timeout_s: float, progress: object) -> bytes | None:
            time.sleep(timeout_s)
            return b"loaded" if time.monotonic() > until else None

    member.load(Group(), lambda done, total, doing="": None)
    assert heard.said[-1] == Loaded(b"loaded")
    assert heard.said[:-1] and set(heard.said[:-1]) == {Alive()} and len(heard.said) > 2
    heard.said.clear()
    sighter = _Sighter(region, member.channel)
    sighter.start()
    time.sleep(0.7)
    sighter.stop()
    assert isinstance(heard.said[0], Sighting) and len(heard.said) > 2 and sighter.failure is None
