"""A rank group over several hosts, as the head's front sees it: one `RankGroup` like any other.

The head has a launcher of its own and a connection to each member (launcher/member.py). While ranks
run, a thread hears what members tell: of their ranks, into the head's mapping (comm/mirror.py), and
of what has ended. Frames are sent by the caller's thread. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

import msgspec
from msgspec.structs import replace

from anyshard.comm.base import Place
from anyshard.comm.control import FrontControl
from anyshard.comm.liveness import Patience
from anyshard.comm.mirror import HeadMirror, Sighting
from anyshard.errors import AnyshardError, PeerLost, UserError
from anyshard.launcher.channel import (
    GONE,
    ChannelClosed,
    End,
    Ended,
    Failed,
    Loaded,
    LoadProgress,
    RankLost,
    Started,
)
from anyshard.launcher.handle import LauncherHandle, raise_failed, raise_lost
from anyshard.launcher.meeting import (
    Alive,
    FrameOut,
    Hello,
    HostChannel,
    HostMessage,
    Leave,
    Over,
    Ping,
    Pong,
    Refused,
    VoidOut,
    Welcome,
    address_text,
    first_message,
    interface_of,
    interface_text,
    listen,
    printable,
)
from anyshard.launcher.seat import Progress, Start

__all__ = ["HostGroup", "Terms"]

_SLICE_S: Final = 0.02
_HELLO_S: Final = 5.0
_START_S: Final = 30.0  # of a member, to fork its ranks
_END_S: Final = 10.0
_GRACE_S: Final = 0.5  # signs of life come four times a second
_CODES: Final = (1, 2, 5)  # that a member may end the head with
_WORD_S: Final = 0.7  # until the host of a rank that others miss has said what became of it


@dataclass(frozen=True, kw_only=True)
class Terms:
    """On which a head takes members.

    `share` is what each is told to load. `agree` hears a member's name, the payload of the head's
    own load and the member's, and raises UserError where they do not fit. `tell` gets sentences for
    the user.
    """

    nnodes: int
    version: str
    share: bytes
    agree: Callable[[str, bytes, bytes], None]
    tell: Callable[[str], None]
    join_s: float


@dataclass
class _Member:
    """Another host; the thread that hears it writes what has come, the front reads it."""

    host: int
    channel: HostChannel
    done: int = 0
    total: int = 0
    loaded: bytes | None = None
    started: int = -1  # epoch
    ended: int = -1  # epoch
    lost: RankLost | None = None
    failed: Failed | None = None
    gone: str = ""
    words: int = 0  # messages
    heard: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        """For sentences."""
        return f"host {self.host} ({self.channel.peer})"


class HostGroup:
    """See `launcher.handle.RankGroup`. `listening`: the socket that members connect to."""

    def __init__(
        self, local: LauncherHandle, listening: socket.socket, terms: Terms, *, deadline_s: float
    ) -> None:
        self.pids: list[int] = []
        self._local, self._listening, self._terms = local, listening, terms
        self._address: str = listening.getsockname()[0]
        self._port: int = listening.getsockname()[1]
        self._deadline_s = deadline_s
        self._listens = True
        self._greeted: queue.SimpleQueue[tuple[Hello, HostChannel]] = queue.SimpleQueue()
        self._members: dict[int, _Member] = {}
        self._mirror: HeadMirror | None = None
        self._hosts: tuple[int, ...] = ()
        self._epoch = -1
        self._is_closing = False
        self._hearing: threading.Thread | None = None
        self._patience: dict[int, Patience] = {}
        self._heard_now: _Member | None = None

    def wait_loaded(
        self, progress: Progress | None = None, *, deadline_s: float | None = None
    ) -> bytes:
        """See RankGroup.wait_loaded; waits for all members too, who load at the same time."""
        terms = self._terms
        missing_until = time.monotonic() + (deadline_s or terms.join_s)
        terms.tell(
            f"host 0 of {terms.nnodes} listens at {address_text(self._address, self._port)}"
            f"{interface_text(interface_of(self._address))} for {_hosts_text(self._missing)}"
        )
        here, mine = (0, 0), None
        self._begin_patience()

        def local_progress(done: int, total: int, doing: str = "") -> None:
            nonlocal here
            here = done, total

        while mine is None or self._missing or any(m.loaded is None for m in self._all):
            if mine is not None:
                self._local.poll()
            self._attend(_SLICE_S, beside=self._local if mine is None else None)
            if mine is None:
                mine = self._local.look_loaded(0.0, local_progress)
            self._raise_failed()
            self._raise_silent()
            if self._missing and time.monotonic() > missing_until:
                raise PeerLost(
                    f"{_hosts_text(self._missing)} did not join within {terms.join_s:g} s; start "
                    f"the same command there, with its own --node-rank and --master-addr "
                    f"{self._address}"
                )
            if progress is not None:
                parts = [here, *((member.done, member.total) for member in self._all)]
                progress(sum(now for now, _ in parts), sum(total for _, total in parts) + 1)
        self._stop_listening()
        for member in self._all:
            assert member.loaded is not None
            try:
                terms.agree(member.name, mine, member.loaded)
            except UserError as error:
                self._refuse(member.channel, str(error))
                raise
        return mine

    @property
    def _all(self) -> list[_Member]:
        return list(self._members.values())

    @property
    def _missing(self) -> list[int]:
        return [host for host in range(1, self._terms.nnodes) if host not in self._members]

    def _attend(self, timeout_s: float, *, beside: LauncherHandle | None = None) -> None:
        """Take who comes, and hear who is there, for one slice; or until `beside` has a word."""
        channels: dict[int, _Member] = {m.channel.fileno(): m for m in self._all if not m.gone}
        listening = [self._listening.fileno()] if self._listens else []
        poll = select.poll()
        for descriptor in (*channels, *listening):
            poll.register(descriptor, select.POLLIN)
        if beside is not None:
            poll.register(beside, select.POLLIN)
        for descriptor, _ in poll.poll(timeout_s * 1e3):
            if descriptor in channels:
                self._hear(channels[descriptor])
            elif descriptor in listening:
                connection = self._listening.accept()[0]
                # by a thread each: one who says nothing keeps nobody else waiting
                threading.Thread(target=self._greet, args=(connection,), daemon=True).start()
        while not self._greeted.empty():
            self._admit(*self._greeted.get())

    def _greet(self, connection: socket.socket) -> None:
        """Hear who it is; whoever says nothing that we know, or not soon, is let go."""
        try:
            hello = first_message(connection, within_s=_HELLO_S)
            if not isinstance(hello, Hello):
                raise ChannelClosed("it is none of ours")
            channel = HostChannel(connection)
        except (OSError, AnyshardError, msgspec.DecodeError):
            connection.close()
        else:
            self._greeted.put((hello, channel))

    def _stop_listening(self) -> None:
        self._listens = False
        self._listening.close()

    def _admit(self, hello: Hello, channel: HostChannel) -> None:
        """Take a member, or refuse it."""
        terms = self._terms
        refusal = ""
        if hello.version != terms.version:
            refusal = f"host 0 runs anyshard {terms.version}, this one {hello.version}"
        elif hello.nnodes != terms.nnodes:
            refusal = f"host 0 was told --nnodes {terms.nnodes}, this one {hello.nnodes}"
        elif not 1 <= hello.host < terms.nnodes:
            refusal = f"--node-rank is {hello.host}; it can be 1 to {terms.nnodes - 1}"
        elif hello.host in self._members:
            there = self._members[hello.host].name
            refusal = f"--node-rank {hello.host} is taken, by {there}"
        if refusal:
            terms.tell(printable(f"refused {channel.peer}: {refusal}"))
            self._refuse(channel, refusal)
            channel.close()
            return
        member = _Member(hello.host, channel)
        self._members[hello.host] = member
        self._patience[hello.host] = Patience(self._deadline_s + _GRACE_S)
        with contextlib.suppress(ChannelClosed):  # read from it, it says so
            channel.send(Welcome(terms.share))
        way = interface_text(hello.interface)
        terms.tell(printable(f"{member.name} has joined{way}; its kernels: {hello.body}"))

    def _refuse(self, channel: HostChannel, message: str) -> None:
        with contextlib.suppress(ChannelClosed):
            channel.send(Refused(message))

    def _hear(self, member: _Member) -> None:
        """One message of a member."""
        self._heard_now = member
        try:
            message = member.channel.receive(0.0)
            if message is not None:
                self._take(member, message)
        except ChannelClosed as error:
            why = "" if str(error) == GONE else f": {error}"
            member.gone = f"{member.name} has closed its connection{why}"
        except (AnyshardError, msgspec.DecodeError) as error:
            member.gone = printable(f"{member.name} sent what is no message: {error}")
        except Exception as error:  # noqa: BLE001  the front is told; this may be another thread
            member.gone = f"{member.name} cannot be heard: {type(error).__name__}: {error}"
        member.words += 1
        member.heard.set()
        self._heard_now = None

    def _take(self, member: _Member, message: HostMessage) -> None:
        mirror = self._mirror
        match message:
            case Ping():
                member.channel.send(Pong(time.monotonic_ns()))
            case LoadProgress(done, total):
                member.done, member.total = done, total
            case Loaded(payload):
                member.loaded, member.done = payload, member.total
            case Failed():
                member.failed = message
            case Started(epoch):
                member.started = epoch
            case Sighting() if mirror is not None and message.epoch == mirror.epoch:
                mirror.put(member.host, message)
            case RankLost(epoch) if epoch == self._epoch:
                member.lost = message
            case Ended(epoch):
                member.ended = epoch
            case Alive() | Sighting() | RankLost():
                pass  # of an earlier epoch, the last two
            case _:
                raise AnyshardError(f"a {type(message).__name__}")

    def _raise_failed(self) -> None:
        for member in self._all:
            if member.failed is not None:
                failed = member.failed
                code = failed.exit_code if failed.exit_code in _CODES else 1
                text = printable(f"{member.name}: {failed.message}")
                raise_failed(replace(failed, message=text, exit_code=code, details=""))
            if member.gone:
                raise PeerLost(member.gone, rank=self._first_rank(member))

    def _first_rank(self, member: _Member) -> int | None:
        """Of a host, in the running epoch."""
        return self._hosts.index(member.host) if member.host in self._hosts else None

    def start(self, start: Start) -> FrontControl:
        """See RankGroup.start."""
        self._hosts, self._epoch = start.sizes.wires.hosts, start.epoch
        with listen(self._address, 0) as store:
            place = Place(
                address=self._address,
                store_address=self._address,
                store_port=store.getsockname()[1],
            )
            region = self._local.region(replace(start, place=place), listening_fd=store.fileno())
        self._mirror = HeadMirror(region)
        for member in self._all:
            member.lost = None
            theirs = replace(place, host=member.host, address=member.channel.peer)
            self._tell(member, replace(start, place=theirs))
        self.pids = self._local.pids
        if self._hearing is None:
            self._hearing = threading.Thread(target=self._listen_on, name="hosts", daemon=True)
            self._hearing.start()
        for member in self._all:
            self._await_started(member)
        self._begin_patience()
        return FrontControl(region, poll=self.poll, deadline_s=start.deadline_s, relay=self)

    def _begin_patience(self) -> None:
        """From now on silence counts."""
        self._patience = {
            member.host: Patience(self._deadline_s + _GRACE_S) for member in self._all
        }

    def _raise_silent(self) -> None:
        """A member that stops in the middle of a message keeps what others say from being heard: it
        is the silent one."""
        for member in self._all:
            is_over = self._patience[member.host].is_over(member.words)
            if is_over and self._heard_now in (None, member):
                raise PeerLost(
                    f"{member.name} has given no sign of life for {self._deadline_s:g} s",
                    rank=self._first_rank(member),
                )

    def _listen_on(self) -> None:
        """Hear members until the end; the thread."""
        while not self._is_closing:
            self._attend(0.1)

    def _await_started(self, member: _Member) -> None:
        """Raises: PeerLost if it takes a member too long to fork its ranks."""
        deadline = time.monotonic() + _START_S
        while member.started != self._epoch:
            member.heard.clear()
            self._raise_failed()
            self._raise_silent()
            self._local.poll()
            if time.monotonic() > deadline:
                rank = self._first_rank(member)
                raise PeerLost(f"{member.name} took over {_START_S:g} s to fork", rank=rank)
            if member.started != self._epoch:
                member.heard.wait(_SLICE_S)

    def _tell(self, member: _Member, message: HostMessage) -> None:
        try:
            member.channel.send(message)
        except ChannelClosed as error:
            member.gone = member.gone or f"{member.name} cannot be reached: {error}"
            self.poll()  # which may know more
            raise PeerLost(member.gone, rank=self._first_rank(member)) from error

    def frame(self, sequence: int, *, rows: bytes, pages: bytes, note: bytes) -> None:
        """See comm.control.Relay."""
        for member in self._all:
            self._tell(member, FrameOut(self._epoch, sequence, rows, pages, note))

    def void(self, sequence: int) -> None:
        """See comm.control.Relay."""
        for member in self._all:
            self._tell(member, VoidOut(self._epoch, sequence))

    def leave(self, last_sequence: int) -> None:
        """See comm.control.Relay."""
        for member in self._all:
            self._tell(member, Leave(self._epoch, last_sequence))

    def poll(self) -> None:
        """See RankGroup.poll.

        Of a rank that others miss, its own host knows more: that has a moment to say it.
        """
        noticed = self._look()
        if noticed is None:
            return
        deadline = time.monotonic() + _WORD_S
        while time.monotonic() < deadline:
            time.sleep(_SLICE_S)
            noticed = self._look() or noticed
        raise noticed

    def _look(self) -> PeerLost | None:
        """What ranks have noticed of another host's. Raises: what is known at first hand."""
        noticed: PeerLost | None = None
        for member in self._all:
            if member.lost is not None:
                if self._is_of(member.lost.rank, member.host):
                    self._raise_lost(member)
                noticed = PeerLost(printable(member.lost.reason), rank=member.lost.rank)
            if member.gone or member.failed:
                self._raise_failed()
        self._raise_silent()
        try:
            self._local.poll()
        except PeerLost as error:
            if error.rank is None or self._is_of(error.rank, 0):
                raise
            noticed = error
        return noticed

    def _is_of(self, rank: int, host: int) -> bool:
        return 0 <= rank < len(self._hosts) and self._hosts[rank] == host

    def _raise_lost(self, member: _Member) -> NoReturn:
        assert member.lost is not None
        lost = member.lost
        code = lost.exit_code if lost.exit_code in _CODES else PeerLost.exit_code
        reason = printable(f"{member.name}: {lost.reason}")
        tail = [printable(line) for line in lost.log_tail]
        raise_lost(replace(lost, reason=reason, exit_code=code, log_tail=tail))

    def end(self) -> None:
        """See RankGroup.end."""
        if self._epoch < 0:
            return
        epoch, self._epoch = self._epoch, -1
        self._mirror = None
        told = []
        for member in self._all:
            with contextlib.suppress(ChannelClosed):
                member.channel.send(End(epoch))
                told.append(member)
        self.pids = []
        self._local.end()
        deadline = time.monotonic() + self._deadline_s
        for member in told:
            while member.ended < epoch and not member.gone and time.monotonic() < deadline:
                member.heard.clear()
                member.heard.wait(_SLICE_S)

    def close(self, *, exit_code: int = 0) -> None:
        """See RankGroup.close."""
        self._is_closing = True
        for member in self._all:
            with contextlib.suppress(ChannelClosed):
                member.channel.send(Over(exit_code))
        if self._hearing is not None:
            self._hearing.join(_END_S)
            self._hearing = None
        for member in self._all:
            member.channel.close()
        self._members = {}
        self._stop_listening()
        while not self._greeted.empty():
            self._greeted.get()[1].close()
        self._local.close()


def _hosts_text(hosts: Sequence[int]) -> str:
    """`host 1`, `hosts 1, 2`."""
    return f"host{'s' * (len(hosts) > 1)} {', '.join(map(str, hosts))}"
