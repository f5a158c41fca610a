"""A host that is not the head: it does with its own launcher what the head says.

Frames of the head go into this host's mapping at once; a thread tells the head, frame by frame and
four times a second, what there is to see of the ranks (comm/mirror.py). With the head gone
everything ends. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec.structs import replace

from anyshard.comm.control import publish_frame, publish_stop
from anyshard.comm.mirror import MemberMirror, Sighting
from anyshard.comm.region import EpochRegion
from anyshard.comm.voids import publish_void
from anyshard.errors import AnyshardError, PeerLost, UserError
from anyshard.launcher.channel import (
    ChannelClosed,
    End,
    Ended,
    Failed,
    Loaded,
    LoadProgress,
    RankLost,
    Started,
)
from anyshard.launcher.handle import LauncherHandle
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
    printable,
)
from anyshard.launcher.seat import REFUSALS, Progress, Start, error_text

__all__ = ["Member"]

_SLICE_S: Final = 0.05
_TELL_S: Final = 0.25
_PINGS: Final = 5
_ANSWER_S: Final = 30.0


class Member:
    """A member's connection to the head, from the first word to the last.

    Raises everywhere: PeerLost when the head goes, UserError where it refuses this host.
    """

    def __init__(self, channel: HostChannel) -> None:
        self.channel = channel
        self.frames = 0  #: that this host's ranks were given
        self._clock_ns = 0
        self._reported: BaseException | None = None
        self._told_s = 0.0
        self._region: EpochRegion | None = None
        self._sighter: _Sighter | None = None

    def join(self, hello: Hello, *, patience_s: float) -> bytes:
        """Say who this is; what the head wants loaded, and the difference of the clocks."""
        self._send(hello)
        message = self._receive(patience_s)
        if message is None:
            raise PeerLost(f"{self._head} took the connection and said nothing in {patience_s:g} s")
        if not isinstance(message, Welcome):
            raise self._unexpected(message)
        best_ns = 1 << 62
        for _ in range(_PINGS):
            asked_ns = time.monotonic_ns()
            self._send(Ping())
            pong = self._receive(_ANSWER_S)
            took_ns = time.monotonic_ns() - asked_ns
            if isinstance(pong, Pong) and took_ns < best_ns:
                best_ns, self._clock_ns = took_ns, pong.now_ns - asked_ns - took_ns // 2
        return message.share

    def load(self, group: LauncherHandle, progress: Progress) -> None:
        """Wait until all is loaded, and let the head know."""

        def passed_on(done: int, total: int, doing: str = "") -> None:
            progress(done, total, doing)
            self._send(LoadProgress(done, total))

        try:
            payload = None
            while payload is None:
                payload = group.look_loaded(_SLICE_S, passed_on)
                self._show_life()
                if (message := self._receive(0.0)) is not None:
                    if isinstance(message, Over):
                        raise _ended(message)
                    raise self._unexpected(message)
        except REFUSALS as error:
            raise AnyshardError(error_text(error)) from error
        self._send(Loaded(payload))

    def serve(self, group: LauncherHandle, prepare: Callable[[Start], Start]) -> None:
        """Do what the head says until it has no more to say. `prepare` makes of its Start that of
        this host, or raises UserError.

        Raises: what has failed here, once the head knows of it and has ended; what its exit code
        means, if that is not 0.
        """
        waiting = select.poll()
        for each in (self.channel, group):
            waiting.register(each, select.POLLIN)
        try:
            while True:
                waiting.poll(_SLICE_S * 1e3)
                while (message := self._receive(0.0)) is not None:
                    if isinstance(message, Over):
                        break
                    self._take(message, group, prepare)
                if message is not None:
                    break
                if self._reported is None:
                    self._watch(group)
                else:
                    time.sleep(_SLICE_S)  # the launcher may have gone, and then it is always heard
                if self._sighter is None:
                    self._show_life()
        finally:
            self._stop_sighting()
        if self._reported is not None:
            raise self._reported
        if message.exit_code:
            raise _ended(message)

    def _take(
        self, message: HostMessage, group: LauncherHandle, prepare: Callable[[Start], Start]
    ) -> None:
        region = self._region
        match message:
            case Start():
                self._begin(message, group, prepare)
            case FrameOut(epoch, sequence, rows, pages, note):
                if region is not None and region.epoch == epoch:
                    self.frames += 1
                    publish_frame(region, sequence, rows=rows, pages=pages, note=note)
            case VoidOut(epoch, sequence):
                if region is not None and region.epoch == epoch:
                    publish_void(region, sequence)
            case Leave(epoch, last_sequence):
                if region is not None and region.epoch == epoch:
                    publish_stop(region, last_sequence)
            case End(epoch):
                self._end(group)
                self._send(Ended(epoch))
            case _:
                raise self._unexpected(message)

    def _begin(
        self, start: Start, group: LauncherHandle, prepare: Callable[[Start], Start]
    ) -> None:
        self._end(group)
        self._reported = None
        start = replace(start, place=replace(start.place, clock_ns=self._clock_ns))
        try:
            region = group.region(prepare(start))
        except (AnyshardError, *REFUSALS) as error:
            self._report(error)
            return
        self._region = region
        self._sighter = _Sighter(region, self.channel)
        self._sighter.start()
        self._send(Started(start.epoch, []))

    def _watch(self, group: LauncherHandle) -> None:
        """Tell the head of a rank that is lost here."""
        region, sighter = self._region, self._sighter
        if sighter is not None and sighter.failure is not None:
            raise self._gone(sighter.failure)
        try:
            group.poll()
        except AnyshardError as error:
            if region is None:
                self._report(error)
                return
            rank = error.rank if isinstance(error, PeerLost) else None
            lost = group.lost or RankLost(
                region.epoch,
                region.ranks_here[0] if rank is None else rank,
                str(error),
                error.exit_code,
                [],
            )
            self._reported = PeerLost(lost.reason, rank=lost.rank)
            self._region = None
            self._stop_sighting()
            self._send(lost)

    def _report(self, error: BaseException) -> None:
        """Tell the head of what has failed; raised once that has ended."""
        self._reported = error
        with contextlib.suppress(PeerLost):
            self.fail(error)

    def _show_life(self) -> None:
        """While nothing else is said."""
        if (now := time.monotonic()) - self._told_s >= _TELL_S:
            self._told_s = now
            self._send(Alive())

    def _end(self, group: LauncherHandle) -> None:
        self._stop_sighting()
        self._region = None
        group.end()

    def _stop_sighting(self) -> None:
        if self._sighter is not None:
            self._sighter.stop()
            self._sighter = None

    def fail(self, error: BaseException) -> None:
        """Let the head know why this host cannot go on."""
        is_user = isinstance(error, UserError)
        code = error.exit_code if isinstance(error, AnyshardError) else 1
        self._send(Failed(is_user, error_text(error), code))

    def _send(self, message: HostMessage) -> None:
        try:
            self.channel.send(message)
        except ChannelClosed as error:
            raise self._gone(error) from error

    def _receive(self, timeout_s: float) -> HostMessage | None:
        try:
            message = self.channel.receive(timeout_s)
        except ChannelClosed as error:
            raise self._gone(error) from error
        except (AnyshardError, msgspec.DecodeError) as error:
            text = printable(f"what answers as {self._head} is no anyshard: {error}")
            raise PeerLost(text) from error
        if isinstance(message, Refused):
            raise UserError(printable(f"host 0 refuses this one: {message.message}"))
        return message

    @property
    def _head(self) -> str:
        return f"host 0 ({self.channel.peer})"

    def _unexpected(self, message: HostMessage) -> PeerLost:
        return PeerLost(f"{self._head} sent a {type(message).__name__}, which has no place here")

    def _gone(self, error: BaseException) -> PeerLost:
        return PeerLost(f"the connection to {self._head} is lost: {error}")


def _ended(over: Over) -> AnyshardError:
    """What it means here that the head has ended."""
    text = f"host 0 has ended with exit code {over.exit_code}, and says why"
    if over.exit_code == PeerLost.exit_code:
        return PeerLost(text)
    error = AnyshardError(text)
    error.exit_code = over.exit_code
    return error


class _Sighter(threading.Thread):
    """Tells the head what there is to see of the ranks of one epoch."""

    def __init__(self, region: EpochRegion, channel: HostChannel) -> None:
        super().__init__(name="sightings", daemon=True)
        self._mirror, self._channel = MemberMirror(region), channel
        self.failure: Exception | None = None
        self._is_over = False

    def run(self) -> None:
        """Until `stop`, or the head is gone: then `failure` says so."""
        told: Sighting | None = None
        told_s = 0.0
        while not self._is_over:
            sighting = self._mirror.look(round(_SLICE_S * 1e6))
            if sighting is None:
                return
            now = time.monotonic()
            is_next = told is None or sighting.asked != told.asked
            if not is_next and now - told_s < _TELL_S:
                continue
            try:
                # a head that is stopped reads nothing, for hours perhaps
                self._channel.send(sighting if sighting != told else Alive())
            except Exception as error:  # noqa: BLE001  the other thread raises it
                self.failure = error
                return
            told, told_s = sighting, now

    def stop(self) -> None:
        """Wait for it to end."""
        self._is_over = True
        self.join()
