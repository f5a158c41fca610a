"""How launchers end: interrupted, stopped, silent, short of something, or without their front."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_launcher import begin, gone_within, is_gone, launched, no_load, serve, sizes

from anyshard import __main__ as entry
from anyshard import ops
from anyshard.errors import AnyshardError, PeerLost
from anyshard.launcher import Seat, Start, fork_launcher
from anyshard.launcher.channel import Channel, Started
from anyshard.launcher.process import _Launcher

pytestmark = pytest.mark.ranks

LONG_S = 60.0  # what nobody may wait for
GONE_S = 10.0  # on a busy machine


@pytest.mark.parametrize("method", ["_Launcher._begin", "_Epoch.kill"])
def test_a_launcher_that_does_not_answer_is_lost(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"anyshard.launcher.process.{method}", lambda *given: time.sleep(LONG_S))
    monkeypatch.setattr("anyshard.launcher.handle._ANSWER_S", 0.3)
    with launched(deadline_s=0.1) as handle:
        handle.wait_loaded(deadline_s=10.0)
        started = time.monotonic()
        with pytest.raises(PeerLost, match=r"the launcher has given no sign of life for 0\.3 s"):
            handle.start(Start(epoch=1, payload=b"", sizes=sizes()))
            handle.end()
        assert time.monotonic() - started < LONG_S / 4


@pytest.mark.parametrize("is_waiting", [False, True])
def test_nobody_waits_for_a_load_that_is_of_no_use_any_more(is_waiting: bool) -> None:
    def load(progress: Any) -> tuple[object, bytes]:
        progress(1, 100)
        until = time.monotonic() + LONG_S
        while time.monotonic() < until:
            time.sleep(0 if is_waiting else LONG_S)
        return None, b""

    with launched(load) as handle:
        if is_waiting:
            with pytest.raises(PeerLost, match=r"loading took more than 0\.1 s"):
                handle.wait_loaded(deadline_s=0.1)
        started = time.monotonic()
        handle.close()
        assert time.monotonic() - started < LONG_S / 4
        assert is_gone(handle.pid)


def test_signals_of_the_fork_are_handled_by_the_front_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both processes get SIGINT and SIGTERM the moment they are two."""
    front_pid, fork, seen = os.getpid(), os.fork, []

    def handler(number: int, frame: Any) -> None:
        if os.getpid() != front_pid:
            os._exit(99)  # not here
        seen.append(number)

    def signalled_fork() -> int:
        pid = fork()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.pthread_kill(threading.get_ident(), number)  # no other test's thread
        return pid

    before = [signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fork", signalled_fork)
            handle = fork_launcher(no_load, serve)
        assert sorted(seen) == [signal.SIGINT, signal.SIGTERM]
        begin(handle).wait_ready()
        for pid in ("self", handle.pid, *handle.pids):
            assert "\nSigBlk:\t0000000000000000\n" in Path(f"/proc/{pid}/status").read_text()
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
    handle.close()


def test_control_c_during_the_fork_leaves_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, pids = os.fork, []

    def interrupted_fork() -> int:
        if pid := fork():
            pids.append(pid)
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        return pid

    monkeypatch.setattr(os, "fork", interrupted_fork)
    with pytest.raises(KeyboardInterrupt):
        fork_launcher(no_load, serve)
    gone_within(pids, GONE_S)


# --- what the system refuses -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOMEM, "Cannot allocate memory"), r"\[Errno 12\] Cannot allocate memory"),
        (MemoryError(), "no memory is left"),
    ],
)
def test_a_load_that_the_system_refuses_is_one_sentence(error: Exception, text: str) -> None:
    def load(progress: Any) -> tuple[object, bytes]:
        raise error

    with launched(load) as handle:
        with pytest.raises(AnyshardError, match=f"^the system refused: {text}$") as raised:
            handle.wait_loaded(deadline_s=GONE_S)
        assert raised.value.exit_code == 1
        assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize("spare", [0, 1, 2, 3, 4, 5, 6])
def test_too_few_descriptors_are_one_sentence(spare: int) -> None:
    def load(progress: Any) -> tuple[object, bytes]:
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, lowest + spare))
        return None, b"ready"

    with launched(load) as handle:
        with pytest.raises(AnyshardError, match=r"^the system refused: \[Errno 24\]") as raised:
            begin(handle)
        assert raised.value.exit_code == 1
        assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (AnyshardError("8 threads could not be started"), "8 threads could not be started"),
        (OSError("no more"), "the system refused: no more"),
    ],
)
def test_a_rank_that_is_refused_something_says_so_without_a_stack(
    error: Exception, text: str
) -> None:
    def rank_main(seat: Seat) -> None:
        raise error

    with launched(rank_main=rank_main) as handle:
        front = begin(handle)
        with pytest.raises(PeerLost, match=f"^rank [01] failed: {text}$") as lost:
            front.wait_ready()
        assert not hasattr(lost.value, "__notes__")


def test_a_pool_without_threads_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def pool(threads: int, body: str, spin: bool) -> None:
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr(ops, "native_module", lambda: SimpleNamespace(Pool=pool))
    with pytest.raises(AnyshardError, match=r"^8 threads could not be started; lower --threads$"):
        ops.Kernels("scalar", threads=8, spin=False)


# --- stopped in mid-sentence, and lost for another reason than our own kill --------------------


@pytest.fixture
def half_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher begins to answer, and stops there."""

    def begin_to_answer(launcher: _Launcher, start: Start) -> None:
        launcher._channel._socket.sendall(b"\x04\x00\x00\x00")
        os.kill(os.getpid(), signal.SIGSTOP)

    monkeypatch.setattr(_Launcher, "_begin", begin_to_answer)
    monkeypatch.setattr("anyshard.launcher.handle._ANSWER_S", 0.3)


def test_a_launcher_that_stops_in_mid_message_is_silent(half_a_message: None) -> None:
    with launched(deadline_s=0.1) as handle:
        with pytest.raises(PeerLost, match=r"^the launcher has given no sign of life for 0\.3 s$"):
            begin(handle)
        with pytest.raises(PeerLost, match="no sign of life"):
            handle.poll()


def test_a_launcher_that_only_hangs_up_is_not_said_to_be_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hang_up(launcher: _Launcher, start: Start) -> None:
        launcher._channel.close()
        time.sleep(LONG_S)

    monkeypatch.setattr(_Launcher, "_begin", hang_up)
    with launched() as handle, pytest.raises(PeerLost, match="closed its channel without leaving"):
        begin(handle)


def test_a_message_with_descriptors_comes_in_one_piece() -> None:
    front, launcher = Channel.pair()
    launcher.send(Started(1, [5, 6]), [0])
    os.set_blocking(front.fileno(), False)
    message, descriptors = front.receive(0.0)
    assert message == Started(1, [5, 6])
    os.close(*descriptors)
    front.close()
    launcher.close()


# --- the entry point ---------------------------------------------------------------------------


@pytest.fixture
def dispositions() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_once_the_work_is_done_no_signal_changes_the_exit_code(
    dispositions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anyshard.cli.main", lambda: 4)
    assert entry.main() == 4
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)


def refuse() -> int:
    raise ImportError("long advice\n\nlibx.so: failed to map segment\n")


def exhaust() -> int:
    raise MemoryError("Unable to allocate 2. GiB")


def exhaust_without_words() -> int:
    raise MemoryError


def interrupt() -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("run", "text", "code"),
    [
        (refuse, "a module could not be loaded: libx.so: failed to map segment", 1),
        (
            exhaust,
            "memory ran out: Unable to allocate 2. GiB; end other programs, or ask for less",
            1,
        ),
        (exhaust_without_words, "memory ran out; end other programs, or ask for less", 1),
        (interrupt, "interrupted", 130),
    ],
)
def test_what_the_command_line_cannot_say_is_one_line(
    run: Callable[[], int],
    text: str,
    code: int,
    dispositions: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("anyshard.cli.main", run)
    assert entry.main() == code
    assert capsys.readouterr().err == f"anyshard: {text}\n"


# --- the front's own death, seen from outside -----------------------------------------------

FRONT = textwrap.dedent(
    """
    import sys, time
    sys.path.insert(0, sys.argv[1])
    import test_launcher as t
    handle = t.fork_launcher(t.no_load, t.serve)
    try:
        front = t.begin(handle)
        front.wait_result(front.send_frame(t.FINE))
        print(handle.pid, *handle.pids, flush=True)
        if sys.argv[2] == "idle":
            time.sleep(60)
        while True:
            front.wait_result(front.send_frame(t.FINE))
    finally:
        handle.close()
    """
)


@contextmanager
def front_process(what: str, temporary: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    process = subprocess.Popen(
        [sys.executable, "-c", FRONT, str(Path(__file__).parent), what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    try:
        assert len(pids) == 3, process.stderr and process.stderr.read()
        yield process, pids
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("what", ["idle", "busy"])
def test_nothing_is_left_of_a_killed_front(what: str, tmp_path: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    with front_process(what, tmp_path) as (process, pids):
        process.kill()
        process.wait()
        gone_within(pids, GONE_S)
    assert set(os.listdir("/dev/shm")) <= shared
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["idle", "busy"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_control_c_or_term_to_the_whole_group(
    number: signal.Signals, what: str, tmp_path: Path
) -> None:
    with front_process(what, tmp_path) as (process, pids):
        os.killpg(process.pid, number)
        process.wait(GONE_S)
        gone_within(pids, GONE_S)
        assert process.stderr is not None
        told = process.stderr.read()
        assert "PeerLost" not in told
        assert ("KeyboardInterrupt" in told) == (number == signal.SIGINT)
    assert list(tmp_path.iterdir()) == []
