"""How the fronts of several hosts meet: addresses, sockets, and what they say to each other.

The *head*, host 0, listens at the address that it was given and nowhere else; every other host, a
*member*, connects to it. Messages are typed structs in msgpack, bounded, never pickle. Whoever
reaches the port can take a member's place, so it belongs into a network that one trusts.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import select
import socket
import struct
import threading
import time
from typing import Any, Final

import msgspec

from anyshard.comm.mirror import Sighting
from anyshard.errors import OptionError, PeerLost
from anyshard.launcher.channel import (
    PREFIX_BYTES,
    Channel,
    ChannelClosed,
    End,
    Ended,
    Failed,
    Loaded,
    LoadProgress,
    RankLost,
    Started,
)
from anyshard.launcher.seat import Start

__all__ = [
    "Alive",
    "FrameOut",
    "Hello",
    "HostChannel",
    "HostMessage",
    "Leave",
    "Over",
    "Ping",
    "Pong",
    "Refused",
    "VoidOut",
    "Welcome",
    "address_text",
    "connect",
    "first_message",
    "interface_of",
    "interface_text",
    "listen",
    "printable",
]

_SIOCGIFADDR: Final = 0x8915
_SEND_S: Final = 10.0
_MOST_FIRST_BYTES: Final = 4096
_KEEP_ALIVE: Final = {  # a host that has vanished is noticed after ten seconds
    socket.TCP_KEEPIDLE: 4,
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 10_000,  # ms, while something is under way
}


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Member: its number of how many hosts, the version of the program, the kernel body of its CPU,
    and the interface that it has come by."""

    host: int
    nnodes: int
    version: str
    body: str
    interface: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Head: what to load; `share` is for the verbs alone."""

    share: bytes


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Head: why it does not want this member."""

    message: str


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Member: what time is it?"""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Head: time.monotonic_ns()."""

    now_ns: int


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Member: nothing is new."""


class Over(msgspec.Struct, frozen=True, tag="over"):
    """Head: it has ended, with that exit code."""

    exit_code: int


class FrameOut(msgspec.Struct, frozen=True, tag="frame"):
    """Head: a frame (`comm.control.publish_frame`)."""

    epoch: int
    sequence: int
    rows: bytes
    pages: bytes
    note: bytes


class VoidOut(msgspec.Struct, frozen=True, tag="void"):
    """Head: nobody waits for this frame any more (`comm.control.FrontControl.void`)."""

    epoch: int
    sequence: int


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Head: the ranks leave after this frame."""

    epoch: int
    last_sequence: int


HostMessage = (
    Hello
    | Welcome
    | Refused
    | Ping
    | Pong
    | Alive
    | LoadProgress
    | Loaded
    | Failed
    | Start
    | Started
    | FrameOut
    | VoidOut
    | Leave
    | Sighting
    | RankLost
    | End
    | Ended
    | Over
)


def first_message(connection: socket.socket, *, within_s: float) -> HostMessage:
    """What somebody says who may be anybody: short, and soon.

    Raises: OSError, ChannelClosed, msgspec.DecodeError.
    """
    deadline, found = time.monotonic() + within_s, b""
    wanted = PREFIX_BYTES
    while len(found) < wanted:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(wanted - len(found))
        if not part or time.monotonic() > deadline:
            raise ChannelClosed("it does not say who it is")
        found += part
        if len(found) == PREFIX_BYTES:
            wanted += int.from_bytes(found[:4], "little")
            if wanted > _MOST_FIRST_BYTES:
                raise ChannelClosed("it says too much")
    return msgspec.msgpack.decode(found[PREFIX_BYTES:], type=HostMessage)


def printable(text: str) -> str:
    """Of another host, without what would steer a terminal."""
    return "".join(each if each.isprintable() else " " for each in text)


class HostChannel:
    """A connection to another host. One thread may read; any may send.

    Raises: OSError for one that has ended by now.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self.here: str = connection.getsockname()[0]
        self.peer: str = connection.getpeername()[0]
        connection.settimeout(_SEND_S)
        sending = connection.dup()
        sending.settimeout(_SEND_S)
        self._connection = connection
        self._in: Channel[HostMessage] = Channel(connection, HostMessage)
        self._out: Channel[HostMessage] = Channel(sending, HostMessage)
        self._lock = threading.Lock()
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)

    def fileno(self) -> int:
        """For selectors, to read."""
        return self._in.fileno()

    def send(self, message: HostMessage) -> None:
        """Raises: ChannelClosed, also if the other end takes nothing for ten seconds."""
        try:
            with self._lock:
                self._out.send(message)
        except OSError as error:
            raise ChannelClosed(_why(error) or "it takes nothing") from error

    def receive(self, timeout_s: float) -> HostMessage | None:
        """The next message, None if it does not begin in time.

        Raises: ChannelClosed, also for one that stops half-way; AnyshardError or
        msgspec.DecodeError for what is none.
        """
        if not self._readable.poll(timeout_s * 1e3):
            return None
        try:
            message, descriptors = self._in.receive(_SEND_S)
        except OSError as error:
            raise ChannelClosed(_why(error) or "it stops in the middle of a message") from error
        assert not descriptors
        return message

    def close(self) -> None:
        """Let go; whoever waits to read is woken."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._in.close()
        self._out.close()


def _why(error: OSError) -> str:
    """ "no route to host"."""
    return (error.strerror or str(error)).lower()


def address_text(address: str, port: int) -> str:
    """`10.0.0.1:29500`, `[fe80::1]:29500`."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _resolve(address: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Raises: OptionError for a name that nobody knows."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # a name of a form that no host has
        why = getattr(error, "strerror", None) or "it is no name of a host"
        raise OptionError(f"--master-addr {address[:60]!r}: {why}") from None
    family, _, _, _, place = found[0]
    number = ipaddress.ip_address(str(place[0]).partition("%")[0])
    mapped = getattr(number, "ipv4_mapped", None)
    if mapped is not None:
        return _resolve(str(mapped), port)
    if number.is_unspecified or number.is_multicast or str(number) == "255.255.255.255":
        raise OptionError(
            f"--master-addr {address} is of many hosts, or all; give one of host 0's own"
        )
    return family, place


def listen(address: str, port: int) -> socket.socket:
    """The head's socket, bound to that address only; port 0 takes a free one.

    Raises: OptionError for an address that this host does not have, or a port in use.
    """
    family, place = _resolve(address, port)
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen()
    except OSError as error:
        listening.close()
        why = _why(error)
        raise OptionError(
            f"{address_text(address, port)} cannot be listened at: {why}; --master-addr is an "
            "address of host 0, as the other hosts reach it, and --master-port a free port there"
        ) from None
    return listening


def connect(address: str, port: int, *, patience_s: float) -> HostChannel:
    """To the head, which may be yet to start.

    Raises: PeerLost after `patience_s` without it, with the last answer.
    """
    family, place = _resolve(address, port)
    deadline = time.monotonic() + patience_s
    while True:
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(min(2.0, max(deadline - time.monotonic(), 0.1)))
        try:
            connection.connect(place)
            if connection.getsockname() != connection.getpeername():  # to itself, by chance
                return HostChannel(connection)
            error: OSError = ConnectionRefusedError("connection refused")
        except OSError as failure:
            error = failure
        connection.close()
        if time.monotonic() > deadline:
            raise PeerLost(
                f"host 0 has not answered at {address_text(address, port)} for {patience_s:g} s: "
                f"{_why(error)}"
            )
        time.sleep(0.1)


def interface_of(address: str) -> str:
    """The name of the interface that has an address, "" if there is none."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return _interface_of_ipv6(address)


def interface_text(interface: str) -> str:
    """Behind an address: ` (eth0)`, or nothing."""
    return f" ({interface})" if interface else ""


def _interface_of_ipv6(address: str) -> str:
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        for line in file:
            fields = line.split()
            if fields[0] == wanted:
                return fields[-1]
    return ""
