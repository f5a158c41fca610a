"""Messages between front and launcher: length-prefixed msgpack on a socket pair, bounded.

Descriptors travel with a message by SCM_RIGHTS. No pickle: every message is a typed struct.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

from anyshard.errors import AnyshardError
from anyshard.launcher.seat import Start

__all__ = [
    "GONE",
    "MAX_MESSAGE_BYTES",
    "PREFIX_BYTES",
    "Channel",
    "ChannelClosed",
    "End",
    "Ended",
    "Failed",
    "LoadProgress",
    "Loaded",
    "Message",
    "RankLost",
    "Started",
    "Stop",
]

MAX_MESSAGE_BYTES = 16 << 20
GONE = "the other end is gone"
MAX_DESCRIPTORS = 250  # SCM_RIGHTS carries at most 253
_PREFIX = struct.Struct("<II")  # body bytes, descriptors
PREFIX_BYTES = _PREFIX.size


class End(msgspec.Struct, frozen=True, tag="end"):
    """Front: kill the ranks of this epoch."""

    epoch: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Front: kill all ranks and leave."""


class LoadProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Launcher: `done` of `total` units of loading, and what it is doing if that has a name."""

    done: int
    total: int
    doing: str = ""


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Launcher: ready to start epochs."""

    payload: bytes


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Launcher: loading or starting failed; `is_user` if the user can mend it."""

    is_user: bool
    message: str
    exit_code: int
    details: str = ""


class Started(msgspec.Struct, frozen=True, tag="started"):
    """Launcher: the ranks run; the region's descriptors come along."""

    epoch: int
    pids: list[int]


class RankLost(msgspec.Struct, frozen=True, tag="lost"):
    """Launcher: the epoch is over and all its ranks are dead, because of `rank`."""

    epoch: int
    rank: int
    reason: str
    exit_code: int
    log_tail: list[str]


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Launcher: the epoch is over as asked; no rank of it is left."""

    epoch: int


Message = Start | End | Stop | LoadProgress | Loaded | Failed | Started | RankLost | Ended


class ChannelClosed(AnyshardError):
    """The other end is gone."""


M = TypeVar("M")


class Channel(Generic[M]):
    """One end of a stream of messages; `kinds` is M, the union of their types."""

    def __init__(self, end: socket.socket, kinds: Any) -> None:
        self._socket = end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kinds)

    @staticmethod
    def pair() -> tuple[Channel[Message], Channel[Message]]:
        """Two connected ends, of a front and its launcher."""
        one, other = socket.socketpair()
        return Channel(one, Message), Channel(other, Message)

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, message: M, descriptors: list[int] | None = None) -> None:
        """Raises: ChannelClosed; ValueError for a message over the bound, with both sizes."""
        body = self._encoder.encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(body)} bytes, the limit is {MAX_MESSAGE_BYTES}")
        descriptors = descriptors or []
        if len(descriptors) > MAX_DESCRIPTORS:
            raise ValueError(f"{len(descriptors)} descriptors, the limit is {MAX_DESCRIPTORS}")
        prefix = _PREFIX.pack(len(body), len(descriptors))
        try:
            message_bytes = prefix + body  # at once: half a message would make its reader wait
            sent = 0
            if descriptors:
                sent = socket.send_fds(self._socket, [message_bytes], descriptors)
            self._socket.sendall(message_bytes[sent:])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed(GONE) from error

    def receive(self, timeout_s: float) -> tuple[M, list[int]]:
        """The next message, whole.

        Raises: TimeoutError if it does not come or stops half-way; ChannelClosed; AnyshardError
        for a length over the bound; msgspec.DecodeError for anything that is not a message.
        """
        self._socket.settimeout(timeout_s)
        descriptors: list[int] = []
        prefix = b""
        while len(prefix) < _PREFIX.size:
            part, found = self._receive_some(_PREFIX.size - len(prefix))
            prefix += part
            descriptors.extend(found)
        num_bytes, num_descriptors = _PREFIX.unpack(prefix)
        if num_bytes > MAX_MESSAGE_BYTES or num_descriptors != len(descriptors):
            for descriptor in descriptors:
                os.close(descriptor)
            raise AnyshardError(
                f"a message says {num_bytes} bytes (limit {MAX_MESSAGE_BYTES}) and"
                f" {num_descriptors} descriptors, {len(descriptors)} came"
            )
        body = bytearray()
        while len(body) < num_bytes:
            part = self._socket.recv(min(num_bytes - len(body), 1 << 20))
            if not part:
                raise ChannelClosed("the other end left in the middle of a message")
            body += part
        return self._decoder.decode(body), descriptors

    def _receive_some(self, num_bytes: int) -> tuple[bytes, list[int]]:
        descriptors = array.array("i")
        try:
            part, ancillary, _, _ = self._socket.recvmsg(
                num_bytes, socket.CMSG_LEN(MAX_DESCRIPTORS * descriptors.itemsize)
            )
        except ConnectionResetError as error:
            raise ChannelClosed(GONE) from error
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = len(content) - len(content) % descriptors.itemsize
                descriptors.frombytes(content[:whole])
        if not part:
            raise ChannelClosed(GONE)
        return part, list(descriptors)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
