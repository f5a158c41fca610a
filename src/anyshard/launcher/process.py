"""The launcher process: load once, then fork, watch and kill rank groups.

One thread, so that forking is safe at any time. Death is passed down by PR_SET_PDEATHSIG: ranks
die with the launcher, the launcher with the front. The loop waits for: messages of the front,
output of ranks (kept in bounded logs), and SIGCHLD (a rank died, stopped or went on).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from anyshard.comm.control import failure_of
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
from anyshard.launcher.seat import (
    REFUSALS,
    Load,
    Progress,
    RankMain,
    Seat,
    Start,
    error_text,
    failure_text,
)

__all__ = ["die_with_parent", "run_launcher", "signal_text"]

LOG_BYTES = 64 << 10
LOG_TAIL_LINES = 20
_CRASH = "Fatal Python error"  # how faulthandler begins
_TICK_S = 0.25
_RECEIVE_S = 10.0
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
#: The front's alone, which ends or stops everybody; sent to the whole process group, they would
#: race its own account of what happened. Stop and the parent's death end launcher and ranks.
_FOR_THE_FRONT = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)
_ALONE_S = 1.0  # a joined thread is listed for a moment longer

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int, name: str) -> None:
    """Be killed when the parent's forking thread ends; leave at once if it already has."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def signal_text(number: int) -> str:
    """ "signal 9 (SIGKILL)"."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _num_threads() -> int:
    """Threads of this process; waits a moment until it is one."""
    deadline = time.monotonic() + _ALONE_S
    while (number := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    return number


@dataclass
class _Rank:
    """A forked rank as its launcher sees it."""

    rank: int
    pid: int
    log_fd: int
    log: bytearray = field(default_factory=bytearray)
    stopped_at: float | None = None  # monotonic seconds
    exit_status: int | None = None  # as waitpid gives it

    def drain(self) -> bool:
        """Take what the rank has written; False once its output is closed."""
        while True:
            try:
                part = os.read(self.log_fd, LOG_BYTES)
            except BlockingIOError:
                return True
            if not part:
                return False
            self.log += part
            del self.log[:-LOG_BYTES]

    def tail(self) -> list[str]:
        """The last lines of the log; of a crash, the first lines of its report."""
        lines = self.log.decode("utf-8", "replace").splitlines()
        crashes = [index for index, line in enumerate(lines) if line.startswith(_CRASH)]
        if crashes:
            return lines[crashes[-1] :][:LOG_TAIL_LINES]
        return lines[-LOG_TAIL_LINES:]


class _Epoch:
    """One rank group: its region and its processes."""

    def __init__(self, start: Start, region: EpochRegion) -> None:
        self.start = start
        self.region = region
        self.ranks: list[_Rank] = []

    def reap(self) -> None:
        """Note who has died, stopped or gone on since the last call."""
        for rank in self.ranks:
            while rank.exit_status is None:
                flags = os.WNOHANG | os.WUNTRACED | os.WCONTINUED
                pid, status = os.waitpid(rank.pid, flags)
                if pid == 0:
                    break
                if os.WIFSTOPPED(status):
                    rank.stopped_at = time.monotonic()
                elif os.WIFCONTINUED(status):
                    rank.stopped_at = None
                else:
                    rank.exit_status = status

    def kill(self) -> None:
        """No process of this epoch is left afterwards."""
        for rank in self.ranks:
            if rank.exit_status is None:
                os.kill(rank.pid, signal.SIGKILL)
        for rank in self.ranks:
            if rank.exit_status is None:
                _, rank.exit_status = os.waitpid(rank.pid, 0)
            rank.drain()
            os.close(rank.log_fd)
        self.region.close_descriptors()

    def fault(self) -> tuple[int, str, int] | None:
        """(rank, reason, exit code) of what ends this epoch, if anything does.

        Its part of the rule in comm/liveness.py: who is dead, and who has been stopped.
        A stopped rank is named before those that gave up waiting for it, and a killed one
        before those that only noticed.
        """
        now = time.monotonic()
        dead = [rank for rank in self.ranks if rank.exit_status is not None]
        faults = [fault for rank in dead if (fault := self._death(rank)) is not None]
        for rank in self.ranks:
            if rank.exit_status is None and rank.stopped_at is not None:
                stopped_s = now - rank.stopped_at
                if faults or stopped_s > self.start.deadline_s:
                    reason = f"rank {rank.rank} has been stopped (SIGSTOP) for {stopped_s:.1f} s"
                    return rank.rank, reason, PeerLost.exit_code
        own = [(rank, text, code) for rank, text, code, is_own in faults if is_own]
        others = [(rank, text, code) for rank, text, code, is_own in faults if not is_own]
        return next(iter(own + others), None)

    def _death(self, rank: _Rank) -> tuple[int, str, int, bool] | None:
        status = rank.exit_status
        assert status is not None
        if os.WIFSIGNALED(status):
            reason = f"rank {rank.rank} was killed by {signal_text(os.WTERMSIG(status))}"
            return rank.rank, reason, PeerLost.exit_code, True
        code = os.WEXITSTATUS(status)
        failure = failure_of(self.region, rank.rank)
        if failure is not None:
            text, blamed, exit_code = failure
            if blamed != rank.rank and 0 <= blamed < self.start.world:
                return blamed, text, exit_code, False
            prefix = "" if exit_code == UserError.exit_code else f"rank {rank.rank} failed: "
            return rank.rank, prefix + text, exit_code, True
        if code == 0 and self.region.stopping:
            return None
        reason = f"rank {rank.rank} left with exit code {code} without being asked to"
        return rank.rank, reason, PeerLost.exit_code, True

    def tail(self, rank: int) -> list[str]:
        """The last lines that a rank has written; none of one on another host."""
        return next((each.tail() for each in self.ranks if each.rank == rank), [])

    @property
    def is_over(self) -> bool:
        """True once every rank has left."""
        return all(rank.exit_status is not None for rank in self.ranks)

    def next_deadline_s(self) -> float:
        """Seconds until a stopped rank counts as lost; at most one tick."""
        now = time.monotonic()
        waits = [
            rank.stopped_at + self.start.deadline_s - now
            for rank in self.ranks
            if rank.stopped_at is not None
        ]
        return max(0.0, min([*waits, _TICK_S]))


def run_launcher(
    channel: Channel[Message],
    front_pid: int,
    load: Load,
    rank_main: RankMain,
    mask: set[int | signal.Signals],
) -> NoReturn:
    """The life of the launcher, after its fork; `mask` is set once its dispositions stand."""
    status = 1
    try:
        die_with_parent(front_pid, "anyshard-launch")
        _leave_terminal()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = _serve(channel, load, rank_main)
    except ChannelClosed:
        status = 0  # the front has gone first
    except BaseException:  # noqa: BLE001  the last frame of this process
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(status)


def _leave_terminal() -> None:
    """Ctrl-C and Ctrl-Z are the front's; stdin is empty; stdout stays free for the answer."""
    for number in _FOR_THE_FRONT:
        signal.signal(number, signal.SIG_IGN)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.close(null_fd)
    os.dup2(2, 1)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _serve(channel: Channel[Message], load: Load, rank_main: RankMain) -> int:
    try:
        state, payload = load(_percent_sender(channel))
        launcher = _Launcher(channel, state, rank_main)
    except Exception as error:
        if isinstance(error, ChannelClosed):
            raise
        channel.send(_failed(error))
        return 1
    channel.send(Loaded(payload))
    gc.collect()
    gc.freeze()  # ranks share these pages; no later collection writes to them
    return launcher.loop()


def _percent_sender(channel: Channel[Message]) -> Progress:
    """Sends at most about a hundred messages, so that a front that does not look blocks nobody."""
    sent = -1

    def send(done: int, total: int, doing: str = "") -> None:
        nonlocal sent
        percent = 100 * done // max(total, 1)
        if percent > sent:
            sent = percent
            channel.send(LoadProgress(done, total, doing))

    return send


def _failed(error: Exception) -> Failed:
    is_user = isinstance(error, UserError)
    is_clear = is_user or isinstance(error, (PeerLost, *REFUSALS))
    return Failed(
        is_user=is_user,
        message=error_text(error),
        exit_code=error.exit_code if isinstance(error, AnyshardError) else 1,
        details="" if is_clear else "".join(traceback.format_exception(error)),
    )


class _Launcher:
    """The loop after loading."""

    def __init__(self, channel: Channel[Message], state: object, rank_main: RankMain) -> None:
        self._channel = channel
        self._state = state
        self._rank_main = rank_main
        self._pid = os.getpid()
        self._epoch: _Epoch | None = None
        self._last_epoch = -1
        self._selector = selectors.DefaultSelector()
        self._wakeup_fd, self._wakeup_write_fd = os.pipe()
        for descriptor in (self._wakeup_fd, self._wakeup_write_fd):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._wakeup_write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._selector.register(channel, selectors.EVENT_READ, self._take_message)
        self._selector.register(self._wakeup_fd, selectors.EVENT_READ, self._take_wakeup)
        self._leaving = False

    def loop(self) -> int:
        """Until Stop or the front is gone."""
        try:
            while not self._leaving:
                timeout_s = _TICK_S if self._epoch is None else self._epoch.next_deadline_s()
                for key, _ in self._selector.select(timeout_s):
                    # A message may have ended the epoch whose logs come later in this list.
                    if self._selector.get_map().get(key.fileobj) is key:
                        take: Callable[[], None] = key.data
                        take()
                self._watch()
        finally:
            self._kill_epoch()
        return 0

    def _take_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup_fd, 4096)

    def _take_message(self) -> None:
        message, descriptors = self._channel.receive(_RECEIVE_S)
        match message:
            case Stop():
                self._leaving = True
            case End(epoch):
                if self._epoch is not None and self._epoch.start.epoch == epoch:
                    self._kill_epoch()
                self._channel.send(Ended(epoch))
            case Start():
                self._kill_epoch()
                try:
                    self._begin(message, *descriptors)
                except (AnyshardError, *REFUSALS, ValueError, OverflowError) as error:
                    self._kill_epoch()
                    self._channel.send(_failed(error))
            case _:
                raise AnyshardError(f"the front sent {type(message).__name__}")

    def _begin(self, start: Start, listening_fd: int = -1) -> None:
        try:
            self._check(start)
        except BaseException:
            if listening_fd >= 0:
                os.close(listening_fd)
            raise
        self._fork_ranks(start, listening_fd)

    def _check(self, start: Start) -> None:
        if start.epoch <= self._last_epoch:
            raise AnyshardError(f"epoch {start.epoch} after epoch {self._last_epoch}")
        if (num_threads := _num_threads()) != 1:
            raise AnyshardError(
                f"the launcher has {num_threads} threads and needs to be alone to fork; close"
                " pools before load returns and set OPENBLAS_NUM_THREADS=1"
            )

    def _fork_ranks(self, start: Start, listening_fd: int) -> None:
        self._last_epoch = start.epoch
        region = EpochRegion.create(
            start.sizes,
            start.epoch,
            shared=True,
            place=start.place,
            listening_fd=listening_fd,
        )
        epoch = self._epoch = _Epoch(start, region)
        for rank in region.ranks_here:
            forked = self._fork_rank(epoch, rank)
            epoch.ranks.append(forked)
            self._selector.register(forked.log_fd, selectors.EVENT_READ, self._log_taker(forked))
        pids = [rank.pid for rank in epoch.ranks]
        self._channel.send(Started(start.epoch, pids), region.front_fds())

    def _log_taker(self, rank: _Rank) -> Callable[[], None]:
        def take() -> None:
            if not rank.drain():
                self._selector.unregister(rank.log_fd)

        return take

    def _fork_rank(self, epoch: _Epoch, rank: int) -> _Rank:
        read_fd, write_fd = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError:
            os.close(read_fd)
            os.close(write_fd)
            raise
        if pid == 0:
            self._run_rank(epoch, rank, write_fd)
        os.close(write_fd)
        os.set_blocking(read_fd, False)
        return _Rank(rank, pid, read_fd)

    def _run_rank(self, epoch: _Epoch, rank: int, log_fd: int) -> NoReturn:
        """The life of a forked rank."""
        code = PeerLost.exit_code
        try:
            os.dup2(log_fd, 1)
            os.dup2(log_fd, 2)
            die_with_parent(self._pid, f"anyshard-rank{rank}")
            self._let_go(epoch)
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            faulthandler.enable(file=2)
            code = self._sit(epoch, rank)
        except BaseException:  # noqa: BLE001  the last frame of this process
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _let_go(self, epoch: _Epoch) -> None:
        """Close what only the launcher may hold."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        self._channel.close()
        os.close(self._wakeup_fd)
        os.close(self._wakeup_write_fd)
        for earlier in epoch.ranks:
            os.close(earlier.log_fd)

    def _sit(self, epoch: _Epoch, rank: int) -> int:
        seat = Seat.of(epoch.start, rank=rank, state=self._state, region=epoch.region, kind="shm")
        try:
            self._rank_main(seat)
        except BaseException as error:  # noqa: BLE001  the launcher tells the front
            if not isinstance(error, (AnyshardError, *REFUSALS)):
                traceback.print_exc()
            text, blamed, exit_code = failure_text(error, rank=rank)
            seat.control.status.fail(text, blamed=blamed, exit_code=exit_code)
            return exit_code
        return 0

    def _watch(self) -> None:
        epoch = self._epoch
        if epoch is None:
            return
        epoch.reap()
        fault = epoch.fault()
        if fault is not None:
            rank, reason, exit_code = fault
            number = epoch.start.epoch
            self._kill_epoch()
            tail = epoch.tail(rank)
            self._channel.send(RankLost(number, rank, reason, exit_code, tail))
        elif epoch.is_over:
            self._kill_epoch()
            self._channel.send(Ended(epoch.start.epoch))

    def _kill_epoch(self) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is None:
            return
        for rank in epoch.ranks:
            with contextlib.suppress(KeyError):
                self._selector.unregister(rank.log_fd)
        epoch.kill()
