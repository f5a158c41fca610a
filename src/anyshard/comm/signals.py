"""Who has got how far: growing numbers that members of an epoch publish and wait for.

A *member* is a rank (0 .. world - 1) or the front (number world). On every *channel* a member
publishes values that only grow (32-bit wrap-around order); others wait until it has reached one.
Whatever a member wrote to shared memory before it published is visible to whoever saw the value.

Two bodies with one meaning. `NativeSignals`: release stores in shared words, spin, then futex.
`PipeSignals`: without the compiled module; one pipe per member, so the kernel's own locks order
memory on every machine. Waits return REACHED, ABORTED, or LATE + i when senders[i] is late.
"""

from __future__ import annotations

import errno
import os
import select
import struct
import time
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from anyshard.ops import native_module

__all__ = [
    "ABORTED",
    "LATE",
    "LINE_BYTES",
    "REACHED",
    "NativeSignals",
    "PipeSignals",
    "Pipes",
    "Signals",
    "SignalsBody",
    "Waiter",
]

SignalsBody = Literal["native", "pipes"]

REACHED = 0
ABORTED = -1
LATE = 1

LINE_BYTES = 64  # one value and its sleepers; a cache line, so writers do not share one
LINE_WORDS = LINE_BYTES // 4
WRAP = 1 << 32
HALF = 1 << 31

_RECORD = struct.Struct("<HHI")  # sender, channel, value; pipes keep 8 bytes in one piece
_READ_BYTES = _RECORD.size * 512
_ABORT_CHANNEL = 0xFFFF


class Waiter(Protocol):
    """A wait bound once to its channel, receivers and senders."""

    def run(self, value: int, timeout_us: int) -> int:
        """Publish `value`, then wait until all senders have; timeout_us < 0 waits for ever."""
        ...

    def wait(self, value: int, timeout_us: int) -> int:
        """Only wait."""
        ...


class Signals(Protocol):
    """One member's view."""

    def publish(self, channel: int, value: int, receivers: Sequence[int]) -> None:
        """Reach `value` on `channel`; only `receivers` may rely on seeing it."""
        ...

    def waiter(
        self, channel: int, *, receivers: Sequence[int], senders: Sequence[int], spin_us: int
    ) -> Waiter:
        """Bind a wait. `spin_us` 0 sleeps at once; ignored without the native module."""
        ...

    def abort(self) -> None:
        """Wake every waiting member with ABORTED, now and from now on."""
        ...


class NativeSignals:
    """Signals on shared uint32 words [num_channels * members + 1][16]; line 0 is the abort word."""

    def __init__(self, words: NDArray[np.uint32], *, member: int, num_members: int) -> None:
        self._native: Any = native_module()
        self._words = words
        self._member = member
        self._num_members = num_members

    def _line(self, channel: int, member: int) -> int:
        return (1 + channel * self._num_members + member) * LINE_WORDS

    def publish(self, channel: int, value: int, receivers: Sequence[int]) -> None:
        """One release store; a system call only if somebody sleeps."""
        self._native.shm_publish(self._words, self._line(channel, self._member), value)

    def waiter(
        self, channel: int, *, receivers: Sequence[int], senders: Sequence[int], spin_us: int
    ) -> Waiter:
        """A native object; its calls release the GIL."""
        waiter: Waiter = self._native.Gather(
            self._words,
            self._line(channel, self._member) if receivers else -1,
            [self._line(channel, sender) for sender in senders],
            0,
            spin_us,
        )
        return waiter

    def abort(self) -> None:
        """Set the abort word and wake all sleepers."""
        self._native.shm_abort(self._words, 0)


class Pipes:
    """One inbox pipe per member, made before the fork and inherited by all."""

    def __init__(self, inboxes: Sequence[tuple[int, int]]) -> None:
        self.inboxes = tuple(inboxes)  # (read fd or -1, write fd) per member

    @classmethod
    def create(cls, num_members: int) -> Pipes:
        """Open 2 * num_members descriptors."""
        inboxes = []
        for _ in range(num_members):
            read_fd, write_fd = os.pipe()
            os.set_blocking(read_fd, False)
            os.set_blocking(write_fd, False)
            inboxes.append((read_fd, write_fd))
        return cls(inboxes)

    def close(self) -> None:
        """Close this process's copies."""
        for inbox in self.inboxes:
            for descriptor in inbox:
                if descriptor >= 0:
                    os.close(descriptor)
        self.inboxes = ()


class PipeSignals:
    """Signals as 8-byte records in the receivers' inboxes.

    At most a few records a channel are under way (waits bound every sender), far below the
    64 KiB of a pipe; a full inbox is a defect and raises.
    """

    def __init__(self, pipes: Pipes, *, member: int) -> None:
        self._pipes = pipes
        self._member = member
        self._inbox = pipes.inboxes[member][0]
        self._poll: select.poll | None = None  # of who only publishes here the inbox is elsewhere
        self._reached: dict[tuple[int, int], int] = {}
        self._aborted = False

    def publish(self, channel: int, value: int, receivers: Sequence[int]) -> None:
        """One system call per receiver."""
        record = _RECORD.pack(self._member, channel, value)
        for receiver in receivers:
            try:
                os.write(self._pipes.inboxes[receiver][1], record)
            except OSError as error:
                if error.errno != errno.EPIPE:  # the reader is gone: its launcher reports it
                    raise

    def waiter(
        self, channel: int, *, receivers: Sequence[int], senders: Sequence[int], spin_us: int
    ) -> Waiter:
        """A wait on this member's inbox."""
        return _PipeWaiter(self, channel, tuple(receivers), tuple(senders))

    def abort(self) -> None:
        """Put an abort record into every inbox."""
        record = _RECORD.pack(self._member, _ABORT_CHANNEL, 0)
        for _, write_fd in self._pipes.inboxes:
            os.write(write_fd, record)

    def late_sender(self, channel: int, senders: Sequence[int], value: int) -> int:
        """Index of the first sender that has not reached `value`, or -1."""
        for index, sender in enumerate(senders):
            if (self._reached.get((channel, sender), 0) - value) % WRAP >= HALF:
                return index
        return -1

    def wait(self, channel: int, senders: Sequence[int], value: int, timeout_us: int) -> int:
        """Read the inbox until all senders have reached `value`."""
        deadline = None if timeout_us < 0 else time.monotonic() + timeout_us * 1e-6
        while True:
            late = self.late_sender(channel, senders, value)
            if self._aborted:
                return ABORTED
            if late < 0:
                return REACHED
            left_ms: float | None = None
            if deadline is not None:
                left_ms = (deadline - time.monotonic()) * 1e3
                if left_ms <= 0 and timeout_us > 0:
                    return LATE + late
                left_ms = max(left_ms, 0.0)
            ready = self._readable().poll(left_ms)
            if not ready and timeout_us == 0:
                return LATE + late
            self._drain()

    def _readable(self) -> select.poll:
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._inbox, select.POLLIN)
        return self._poll

    def _drain(self) -> None:
        try:
            records = os.read(self._inbox, _READ_BYTES)
        except BlockingIOError:
            return
        for sender, channel, value in _RECORD.iter_unpack(records):
            if channel == _ABORT_CHANNEL:
                self._aborted = True
            else:
                self._reached[channel, sender] = value


class _PipeWaiter:
    def __init__(
        self,
        signals: PipeSignals,
        channel: int,
        receivers: tuple[int, ...],
        senders: tuple[int, ...],
    ) -> None:
        self._signals = signals
        self._channel = channel
        self._receivers = receivers
        self._senders = senders

    def run(self, value: int, timeout_us: int) -> int:
        self._signals.publish(self._channel, value, self._receivers)
        return self._signals.wait(self._channel, self._senders, value, timeout_us)

    def wait(self, value: int, timeout_us: int) -> int:
        return self._signals.wait(self._channel, self._senders, value, timeout_us)
