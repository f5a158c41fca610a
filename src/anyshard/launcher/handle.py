"""The front's side of a rank group: fork the launcher, start epochs, notice losses."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
import threading
import time
from typing import NoReturn, Protocol

from anyshard.comm.control import FrontControl
from anyshard.comm.liveness import Patience, processor_sign
from anyshard.comm.region import EpochRegion
from anyshard.errors import AnyshardError, PeerLost, UserError
from anyshard.launcher.channel import (
    Channel,
    ChannelClosed,
    End,
    Ended,
    Failed,
    Loaded,
    LoadProgress,
    Message,
    RankLost,
    Started,
    Stop,
)
from anyshard.launcher.process import run_launcher, signal_text
from anyshard.launcher.seat import Load, Progress, RankMain, Start

__all__ = ["LauncherHandle", "RankGroup", "fork_launcher", "raise_failed", "raise_lost"]

_SLICE_S = 0.05
_CLOSE_S = 2.0
_ANSWER_S = 10.0  # at least; killed ranks may take seconds to give their memory back
_FRONTS_OWN = (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP)  # its handlers run in no child


class RankGroup(Protocol):
    """What the engine drives: forked (LauncherHandle), threads (ThreadGroup), or over several hosts
    (HostGroup)."""

    pids: list[int]  #: of the running epoch's ranks; empty for threads

    def wait_loaded(
        self, progress: Progress | None = None, *, deadline_s: float | None = None
    ) -> bytes:
        """Wait for `load` and return its payload; its exceptions come out here.

        Raises: UserError or AnyshardError as load raised, PeerLost if the launcher goes or
        `deadline_s` passes (default: no deadline).
        """
        ...

    def start(self, start: Start) -> FrontControl:
        """Begin an epoch; a running one ends first. Raises: AnyshardError, PeerLost."""
        ...

    def poll(self) -> None:
        """Return at once if all is well.

        Raises: PeerLost with the rank, the reason and the log's tail as notes; UserError if a
        rank raised one.
        """
        ...

    def end(self) -> None:
        """End the running epoch, if any; none of its ranks is left afterwards."""
        ...

    def close(self, *, exit_code: int = 0) -> None:
        """End everything; may be called twice. Other hosts hear of the `exit_code`."""
        ...


def fork_launcher(load: Load, rank_main: RankMain, *, deadline_s: float = 10.0) -> LauncherHandle:
    """Fork the launcher, which begins to load at once.

    Call it early: before any thread, and before anything large is imported. `deadline_s` bounds
    how long the launcher may stay stopped; silent (comm/liveness.py) it may be for ten seconds,
    or `deadline_s` if that is longer. Both functions run in forked processes only.

    Raises: AnyshardError off the main thread (the launcher would die with that thread).
    """
    if threading.current_thread() is not threading.main_thread():
        raise AnyshardError("fork the launcher on the main thread: it dies with its thread")
    front_pid = os.getpid()
    front, launcher = Channel.pair()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by the caller's shell
            stream.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FRONTS_OWN)
    handle: LauncherHandle | None = None
    collects = gc.isenabled()
    gc.disable()  # handlers of other modules run in the child before we do, and may set it off
    try:
        pid = os.fork()
        if pid == 0:
            gc.freeze()  # what the front left is the front's to finalise: its threads are not here
            if collects:
                gc.enable()
            front.close()
            run_launcher(launcher, front_pid, load, rank_main, mask)
        launcher.close()
        handle = LauncherHandle(front, pid, deadline_s=deadline_s)
    except BaseException:
        front.close()
        launcher.close()
        raise
    finally:
        if collects:
            gc.enable()
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what has waited is handled here
        except BaseException:
            if handle is not None:
                handle.close()
            raise
    return handle


def raise_lost(lost: RankLost) -> NoReturn:
    """Raise what a lost rank means: its own UserError, or PeerLost with the log as notes."""
    error: AnyshardError
    if lost.exit_code == UserError.exit_code:
        error = UserError(lost.reason)
    else:
        error = PeerLost(lost.reason, rank=lost.rank)
    if lost.log_tail:
        error.add_note(f"last lines of rank {lost.rank}:\n" + "\n".join(lost.log_tail))
    raise error


def raise_failed(failed: Failed) -> NoReturn:
    """Raise what a load, or a start, ended with."""
    error = UserError(failed.message) if failed.is_user else AnyshardError(failed.message)
    error.exit_code = failed.exit_code
    if failed.details:
        error.add_note(failed.details)
    raise error


class LauncherHandle:
    """A forked launcher, as its parent sees it; made by `fork_launcher`. One thread may use it."""

    def __init__(self, channel: Channel[Message], pid: int, *, deadline_s: float) -> None:
        self.pid = pid
        self.pids: list[int] = []
        self._channel = channel
        self._deadline_s = deadline_s
        self._answer_s = max(deadline_s, _ANSWER_S)
        self._silent = f"the launcher has given no sign of life for {self._answer_s:g} s"
        self._readable = select.poll()
        self._readable.register(channel, select.POLLIN)
        self._region: EpochRegion | None = None
        self._stopped_at: float | None = None
        self._exit_status: int | None = None
        self._epoch = -1
        self._may_have_ranks = False
        self.lost: RankLost | None = None  #: what has ended the epoch
        self._gone = ""  # why the launcher is no more

    def fileno(self) -> int:
        """For selectors: readable when the launcher has something to say."""
        return self._channel.fileno()

    def wait_loaded(
        self, progress: Progress | None = None, *, deadline_s: float | None = None
    ) -> bytes:
        """See RankGroup.wait_loaded."""
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        while (payload := self.look_loaded(_SLICE_S, progress)) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise PeerLost(f"loading took more than {deadline_s:g} s")
        return payload

    def look_loaded(self, timeout_s: float, progress: Progress | None = None) -> bytes | None:
        """Wait for its next word; the payload if all is loaded. Raises as `wait_loaded` does."""
        match self._next_message(timeout_s):
            case LoadProgress(done, total, doing):
                if progress is not None:
                    progress(done, total, doing)
            case Loaded(payload):
                return payload
            case Failed() as failed:
                self.close()
                raise_failed(failed)
            case None:
                pass
            case message:
                raise AnyshardError(f"the launcher sent {type(message).__name__}")
        return None

    def start(self, start: Start) -> FrontControl:
        """See RankGroup.start."""
        return FrontControl(self.region(start), poll=self.poll, deadline_s=start.deadline_s)

    def region(self, start: Start, *, listening_fd: int | None = None) -> EpochRegion:
        """Begin an epoch; its mapping. `listening_fd`: where ranks of several hosts meet, on the
        head (`comm.region.EpochRegion`)."""
        self._forget_epoch()
        self._epoch = start.epoch
        self._may_have_ranks = True
        self._send(start, [] if listening_fd is None else [listening_fd])
        patience = Patience(self._answer_s)
        while True:
            message, descriptors = self._next_with_descriptors(_SLICE_S, patience)
            match message:
                case Started(epoch, pids) if epoch == start.epoch:
                    self.pids = pids
                    self._region = EpochRegion.attach(
                        start.sizes, start.epoch, descriptors, start.place
                    )
                    return self._region
                case Failed() as failed:
                    raise_failed(failed)
                case _:
                    pass  # of an earlier epoch

    def poll(self) -> None:
        """See RankGroup.poll."""
        while self.lost is None and (message := self._next_message(0.0)) is not None:
            match message:
                case RankLost(epoch) as lost if epoch == self._epoch:
                    self.lost = lost
                    self.pids = []
                case Failed() as failed:
                    raise_failed(failed)
                case _:
                    pass
        if self.lost is not None:
            raise_lost(self.lost)

    def end(self) -> None:
        """See RankGroup.end."""
        if self._epoch < 0 or self._gone:
            return
        epoch, self._epoch = self._epoch, -1
        self._send(End(epoch))
        patience = Patience(self._answer_s)
        while True:
            match self._next_message(_SLICE_S, patience):
                case Ended(ended) if ended == epoch:
                    break
                case _:
                    pass
        self._forget_epoch()

    def close(self, *, exit_code: int = 0) -> None:
        """See RankGroup.close; SIGKILL, after two seconds of grace if it has ranks to reap."""
        if self._exit_status is None:
            if self._may_have_ranks:
                with contextlib.suppress(ChannelClosed, OSError):
                    self._channel.send(Stop())
                deadline = time.monotonic() + _CLOSE_S
                while self._reap(os.WNOHANG) is None and time.monotonic() < deadline:
                    time.sleep(0.002)
            if self._reap(os.WNOHANG) is None:
                os.kill(self.pid, signal.SIGKILL)
                self._reap(0)
        self._channel.close()
        self._forget_epoch()
        self._gone = self._gone or "the launcher is closed"

    def _forget_epoch(self) -> None:
        self.pids = []
        self.lost = None
        region, self._region = self._region, None
        if region is not None:
            region.close_descriptors()

    def _send(self, message: Message, descriptors: list[int] | None = None) -> None:
        if self._gone:
            raise PeerLost(self._gone)
        try:
            self._channel.send(message, descriptors)
        except ChannelClosed:
            self._launcher_gone()
        except TimeoutError:
            self._launcher_gone(self._silent)

    def _next_message(self, timeout_s: float, patience: Patience | None = None) -> Message | None:
        message, descriptors = self._next_with_descriptors(timeout_s, patience)
        for descriptor in descriptors:
            os.close(descriptor)
        return message

    def _next_with_descriptors(
        self, timeout_s: float, patience: Patience | None
    ) -> tuple[Message | None, list[int]]:
        """The launcher's next message, or None after `timeout_s`.

        Raises: PeerLost if it is gone, or lost by the rule of comm/liveness.py.
        """
        if self._gone:
            raise PeerLost(self._gone)
        if self._readable.poll(timeout_s * 1e3):
            try:
                return self._channel.receive(self._answer_s)
            except ChannelClosed:
                self._launcher_gone()
            except TimeoutError:  # half a message
                self._launcher_gone(self._silent)
        self._watch_launcher()
        if patience is not None and patience.is_over(processor_sign(self.pid)):
            self._launcher_gone(self._silent)
        return None, []

    def _reap(self, flags: int) -> int | None:
        """The launcher's exit status once it has one; notes stops on the way."""
        while self._exit_status is None:
            try:
                pid, status = os.waitpid(self.pid, flags | os.WUNTRACED | os.WCONTINUED)
            except InterruptedError:
                continue
            if pid == 0:
                return None
            if os.WIFSTOPPED(status):
                self._stopped_at = time.monotonic()
            elif os.WIFCONTINUED(status):
                self._stopped_at = None
            else:
                self._exit_status = status
        return self._exit_status

    def _watch_launcher(self) -> None:
        if self._reap(os.WNOHANG) is not None:
            self._launcher_gone()
        if self._stopped_at is not None:
            stopped_s = time.monotonic() - self._stopped_at
            if stopped_s > self._deadline_s:
                self._launcher_gone(f"the launcher has been stopped for {stopped_s:.1f} s")

    def _launcher_gone(self, reason: str = "") -> NoReturn:
        """Make sure the launcher is dead (its ranks die with it) and raise PeerLost.

        The reason is how it died by itself, or else why it is killed here.
        """
        deadline = time.monotonic() + (0.0 if reason else 1.0)
        while self._reap(os.WNOHANG) is None and time.monotonic() < deadline:
            time.sleep(0.002)
        status = self._exit_status
        if status is None:
            self._gone = reason or "the launcher has closed its channel without leaving"
            os.kill(self.pid, signal.SIGKILL)
            self._reap(0)
        elif os.WIFSIGNALED(status):
            self._gone = f"the launcher was killed by {signal_text(os.WTERMSIG(status))}"
        else:
            self._gone = f"the launcher left with exit code {os.WEXITSTATUS(status)}"
        self._channel.close()
        self._forget_epoch()
        raise PeerLost(self._gone)
