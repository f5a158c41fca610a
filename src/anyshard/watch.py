"""What a rank writes down of its time: an event for every wait, hop and run of ops (trace.py).

A `Watch` puts its own calls in the place of a worker's, so a rank that is not watched runs none.
An event is six words of a ring in shared memory that is sized before start, so nothing is
allocated; the front reads it when the run is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from anyshard.comm.base import Comm
from anyshard.comm.control import Frame, RankControl
from anyshard.op import OpKind
from anyshard.ops.exact import F32
from anyshard.trace import EVENT, KINDS, EventKind
from anyshard.walk import Run

__all__ = ["Watch"]

_WORDS = EVENT.itemsize // 8


class Watch:
    """Of one rank, from its first frame on. Held by: test_trace.py."""

    def __init__(self, control: RankControl, comm: Comm) -> None:
        self._count, self._words = control.event_ring()
        self._size = len(self._words) // _WORDS
        self._times, self._take = comm.times, control.next_frame
        self._frame = self._rows = 0

    def next_frame(self) -> Frame | None:
        """The rank's next frame; idle until it comes."""
        start = time.monotonic_ns()
        frame = self._take()
        if frame is not None:
            self._frame, self._rows = frame.sequence, len(frame.rows)
            self._add("idle", start, time.monotonic_ns())
        return frame

    def over(self, runs: Sequence[Run], kinds: Sequence[OpKind]) -> list[Run]:
        """The same calls, written down: hops each by itself, what is between them in one event.

        kinds: of the ops that the calls are of; a hop is the first of them, or the last.
        """
        first = [self._receiving(runs[0])] if kinds[0] == "receive" else []
        last = [self._sending(runs[-1])] if kinds[-1] == "send" else []
        return [*first, self._computing(runs[len(first) : len(runs) - len(last)]), *last]

    def drawing(self, draw: Callable[[list[int]], list[F32]]) -> Callable[[list[int]], list[F32]]:
        """The same call, written down as the head's work."""

        def drawn(flags: list[int]) -> list[F32]:
            start = time.monotonic_ns()
            found = draw(flags)
            self._add("head", start, time.monotonic_ns())
            return found

        return drawn

    def _add(self, kind: EventKind, start: int, stop: int, num_bytes: int = 0) -> None:
        if stop <= start:
            return
        count, words = self._count[0], self._words
        at = count % self._size * _WORDS
        words[at], words[at + 1], words[at + 2] = start, stop, KINDS.index(kind)
        words[at + 3], words[at + 4], words[at + 5] = self._frame, self._rows, num_bytes
        self._count[0] = count + 1

    def _computing(self, runs: Sequence[Run]) -> Run:
        def run(rows: int) -> None:
            start = time.monotonic_ns()
            for each in runs:
                each(rows)
            self._add("compute", start, time.monotonic_ns())

        return run

    def _receiving(self, receive: Run) -> Run:
        def run(rows: int) -> None:
            start = time.monotonic_ns()
            receive(rows)
            stop, times = time.monotonic_ns(), self._times
            sent = min(max(times.sent_ns, start), times.ready_ns)
            self._add("upstream", start, sent)
            self._add("wire", sent, times.ready_ns, times.num_bytes)
            self._add("receive", times.ready_ns, stop, times.num_bytes)

        return run

    def _sending(self, send: Run) -> Run:
        def run(rows: int) -> None:
            start = time.monotonic_ns()
            send(rows)
            ready, num_bytes = self._times.ready_ns, self._times.num_bytes
            self._add("downstream", start, ready)
            self._add("send", ready, time.monotonic_ns(), num_bytes)

        return run
