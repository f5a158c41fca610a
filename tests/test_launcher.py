"""Process groups: whoever is killed or stopped, the front knows soon and nothing is left."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anyshard.comm.base import ExchangeSpec, WireSizes
from anyshard.comm.control import ROW, ControlSizes, FrontControl
from anyshard.comm.region import EpochSizes
from anyshard.errors import AnyshardError, CheckpointError, OptionError, PeerLost, UserError
from anyshard.launcher import LauncherHandle, Seat, Start, ThreadGroup, fork_launcher
from anyshard.launcher.channel import MAX_MESSAGE_BYTES, Channel, End, Loaded

pytestmark = pytest.mark.ranks

NOTICE_S = 5.0  # on a busy machine; half of the patience with a silent peer


def sizes(tp: int = 2, pp: int = 1) -> EpochSizes:
    spec = ExchangeSpec(name="nodes", kind="reduce", capacity_floats=64)
    return EpochSizes(
        wires=WireSizes(tp=tp, pp=pp, exchanges=(spec,), hop_bytes=32),
        control=ControlSizes(rows_max=2, pages_max=1),
    )


def no_load(progress: Any) -> tuple[object, bytes]:
    return {"weights": 5}, b"ready"


def serve(seat: Seat) -> None:
    """One exchange a frame; the token says what goes wrong, the position on which rank."""
    comm = seat.comm()
    sys.stdout.write(f"rank {seat.rank} is up\n")
    exchange = comm.exchange("nodes")
    while (frame := seat.control.next_frame()) is not None:
        if len(frame.rows) and int(frame.rows["position"][0]) == seat.rank:
            go_wrong(int(frame.rows["token"][0]))
        exchange.run(1, 1)
        if seat.rank == seat.region.sampler:
            tokens = np.full(1, os.getpid(), np.int32)
            seat.control.post_result(frame.sequence, tokens, np.zeros(1, np.int32))


def go_wrong(how: int) -> None:
    match how:
        case 1:
            raise ValueError("a wrong turn\nand a second line")
        case 2:
            os.kill(os.getpid(), signal.SIGKILL)
        case 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        case 4:
            raise OptionError("ask for less")
        case 5:
            ctypes.string_at(0)
        case 6:
            for number in range(20_000):
                sys.stdout.write(f"line {number:06}\n")
            sys.exit(3)
        case 7:
            os.kill(os.getpid(), signal.SIGTSTP)  # Ctrl-Z is the front's
        case 8:
            sys.stdout.write("one more line\n")


def wrong(how: int, *, rank: int) -> Any:
    made = np.zeros(1, ROW)
    made["token"], made["position"] = how, rank
    return made


FINE = wrong(0, rank=0)


@contextmanager
def launched(
    load: Any = no_load, rank_main: Callable[[Seat], None] = serve, deadline_s: float = 10.0
) -> Iterator[LauncherHandle]:
    handle = fork_launcher(load, rank_main, deadline_s=deadline_s)
    try:
        yield handle
    finally:
        handle.close()
    assert is_gone(handle.pid)


def begin(handle: LauncherHandle, *, deadline_s: float = 10.0) -> FrontControl:
    assert handle.wait_loaded(deadline_s=10.0) == b"ready"
    return handle.start(Start(epoch=1, payload=b"", sizes=sizes(), deadline_s=deadline_s))


def is_gone(pid: int) -> bool:
    """Dead and reaped; of an orphan the reaping is init's part, which takes its time."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    state, parent = stat.rpartition(")")[2].split()[:2]
    return state == "Z" and parent == "1"


def gone_within(pids: list[int], seconds: float) -> float:
    """Seconds until no process of `pids` is left, zombies counted as left."""
    started = time.monotonic()
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() - started < seconds, f"still there: {pids}"
        time.sleep(0.002)
    return time.monotonic() - started


def test_load_reports_progress_and_hands_its_payload_over() -> None:
    def load(progress: Any) -> tuple[object, bytes]:
        for done in range(1000):
            progress(done, 1000)
        return None, b"config"

    with launched(load) as handle:
        seen: list[tuple[int, int]] = []
        payload = handle.wait_loaded(lambda done, total, doing="": seen.append((done, total)))
        assert payload == b"config"
        assert 90 <= len(seen) <= 101
        assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("error", "kind", "exit_code"),
    [
        (CheckpointError("no such file: x"), UserError, 2),
        (AnyshardError("cannot"), AnyshardError, 1),
        (ZeroDivisionError("oh"), AnyshardError, 1),
    ],
)
def test_what_load_raises_comes_out_in_the_front(
    error: Exception, kind: type[AnyshardError], exit_code: int
) -> None:
    def load(progress: Any) -> tuple[object, bytes]:
        raise error

    with launched(load) as handle:
        with pytest.raises(kind, match=str(error)) as raised:
            handle.wait_loaded(deadline_s=5.0)
        assert raised.value.exit_code == exit_code
        assert ("Traceback" in "".join(getattr(raised.value, "__notes__", []))) == (exit_code == 1)


def test_ranks_inherit_what_was_loaded_and_answer() -> None:
    def rank_main(seat: Seat) -> None:
        assert seat.state == {"weights": 5}
        serve(seat)

    with launched(rank_main=rank_main) as handle:
        front = begin(handle)
        pids = handle.pids
        result = front.wait_result(front.send_frame(FINE))
        assert result.tokens == [pids[0]]
        assert len(set(pids)) == 2
    gone_within(pids, NOTICE_S)
    with pytest.raises(ChildProcessError):  # no zombie
        os.waitpid(-1, os.WNOHANG)


def test_a_killed_rank_is_noticed_and_its_group_is_killed() -> None:
    with launched() as handle:
        front = begin(handle)
        front.wait_result(front.send_frame(FINE))
        pids = handle.pids
        started = time.monotonic()
        with pytest.raises(PeerLost, match=r"rank 1 was killed by signal 9 \(SIGKILL\)") as lost:
            front.wait_result(front.send_frame(wrong(2, rank=1)))
        assert time.monotonic() - started < NOTICE_S
        assert lost.value.rank == 1
        assert lost.value.exit_code == 5
        assert "rank 1 is up" in lost.value.__notes__[0]
        gone_within(pids, 0.1)
        with pytest.raises(PeerLost):
            handle.poll()


def test_a_killed_idle_rank_is_noticed_by_poll() -> None:
    with launched() as handle:
        front = begin(handle)
        front.wait_ready()
        handle.poll()
        os.kill(handle.pids[0], signal.SIGKILL)
        with pytest.raises(PeerLost, match="rank 0 was killed"):
            poll_for(handle, NOTICE_S)


def poll_for(handle: LauncherHandle, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        handle.poll()
        time.sleep(0.002)


def test_an_exception_in_a_rank_is_quoted_with_its_log() -> None:
    with launched() as handle:
        front = begin(handle)
        with pytest.raises(PeerLost, match="rank 1 failed: ValueError: a wrong turn") as lost:
            front.wait_result(front.send_frame(wrong(1, rank=1)))
        assert str(lost.value) == "rank 1 failed: ValueError: a wrong turn"
        assert "go_wrong" in lost.value.__notes__[0]


def test_a_users_mistake_found_by_a_rank_keeps_its_exit_code() -> None:
    with launched() as handle:
        front = begin(handle)
        with pytest.raises(UserError, match=r"^ask for less") as raised:
            front.wait_result(front.send_frame(wrong(4, rank=0)))
        assert raised.value.exit_code == 2


def test_a_crash_in_native_code_leaves_its_stack_in_the_log() -> None:
    with launched() as handle:
        front = begin(handle)
        with pytest.raises(PeerLost, match=r"killed by signal 11 \(SIGSEGV\)") as lost:
            front.wait_result(front.send_frame(wrong(5, rank=1)))
        assert "Segmentation fault" in lost.value.__notes__[0]


def test_a_talkative_rank_blocks_nobody_and_its_log_is_bounded() -> None:
    with launched() as handle:
        front = begin(handle)
        with pytest.raises(PeerLost, match="rank 0 failed: SystemExit: 3") as lost:
            front.wait_result(front.send_frame(wrong(6, rank=0)))
        lines = lost.value.__notes__[0].splitlines()
        assert "line 019999" in lines
        assert len(lines) <= 21


def test_a_stopped_rank_is_lost_after_the_deadline_and_named() -> None:
    with launched() as handle:
        front = begin(handle, deadline_s=0.5)
        pids = handle.pids
        started = time.monotonic()
        with pytest.raises(PeerLost, match="rank 1 has been stopped") as lost:
            front.wait_result(front.send_frame(wrong(3, rank=1)))
        assert 0.4 < time.monotonic() - started < NOTICE_S
        assert lost.value.rank == 1
        gone_within(pids, 0.1)


def test_a_rank_stopped_for_less_goes_on() -> None:
    with launched() as handle:
        front = begin(handle, deadline_s=5.0)
        front.wait_ready()
        os.kill(handle.pids[1], signal.SIGSTOP)
        sequence = front.send_frame(FINE)
        time.sleep(0.3)
        os.kill(handle.pids[1], signal.SIGCONT)
        front.wait_result(sequence)


def test_control_z_does_not_stop_ranks() -> None:
    with launched() as handle:
        front = begin(handle, deadline_s=1.0)
        front.wait_result(front.send_frame(wrong(7, rank=1)))


def test_a_term_for_the_whole_group_is_the_fronts() -> None:
    with launched() as handle:
        front = begin(handle)
        front.wait_ready()
        for pid in (handle.pid, *handle.pids):
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.1)
        front.wait_result(front.send_frame(FINE))


def test_a_killed_launcher_is_noticed_and_its_ranks_die() -> None:
    with launched() as handle:
        front = begin(handle)
        front.wait_ready()
        pids = handle.pids
        os.kill(handle.pid, signal.SIGKILL)
        with pytest.raises(PeerLost, match=r"the launcher was killed by signal 9") as lost:
            poll_for(handle, NOTICE_S)
        assert lost.value.rank is None
        gone_within([handle.pid, *pids], NOTICE_S)
        with pytest.raises(PeerLost):
            handle.start(Start(epoch=2, payload=b"", sizes=sizes()))


def test_a_stopped_launcher_is_lost_after_the_deadline() -> None:
    with launched(deadline_s=0.3) as handle:
        front = begin(handle)
        front.wait_ready()
        pids = handle.pids
        os.kill(handle.pid, signal.SIGSTOP)
        with pytest.raises(PeerLost, match="the launcher has been stopped"):
            poll_for(handle, NOTICE_S)
        gone_within([handle.pid, *pids], NOTICE_S)


def test_epochs_follow_each_other_in_any_layout_without_leaks() -> None:
    with launched() as handle:
        begin(handle)

        def descriptors(pid: int | str) -> int:
            gc.collect()
            return len(os.listdir(f"/proc/{pid}/fd"))

        for epoch, (tp, pp) in enumerate([(1, 1), (3, 1), (1, 2), (2, 2), (2, 1), (1, 1)], 2):
            earlier = handle.pids
            front = handle.start(Start(epoch=epoch, payload=b"", sizes=sizes(tp, pp)))
            gone_within(earlier, 0.1)
            assert len(handle.pids) == tp * pp
            front.wait_result(front.send_frame(FINE))
            if epoch % 2:
                with pytest.raises(PeerLost):
                    front.wait_result(front.send_frame(wrong(2, rank=tp * (pp - 1))))
            if epoch == 2:
                before = descriptors("self"), descriptors(handle.pid)
        assert (descriptors("self"), descriptors(handle.pid)) <= before
        with pytest.raises(AnyshardError, match="epoch 3 after epoch 7"):
            handle.start(Start(epoch=3, payload=b"", sizes=sizes()))
        handle.end()
        handle.end()
        handle.poll()


def test_output_that_comes_with_the_end_of_its_epoch_harms_nobody() -> None:
    with launched() as handle:
        front = begin(handle)
        front.wait_ready()
        os.kill(handle.pid, signal.SIGSTOP)
        while ") T " not in Path(f"/proc/{handle.pid}/stat").read_text():
            time.sleep(0.001)
        handle._send(End(1))
        front.wait_result(front.send_frame(wrong(8, rank=1)))
        os.kill(handle.pid, signal.SIGCONT)
        front = handle.start(Start(epoch=2, payload=b"", sizes=sizes()))
        front.wait_result(front.send_frame(FINE))


def test_ranks_leave_when_the_front_says_stop() -> None:
    with launched() as handle:
        front = begin(handle)
        front.wait_result(front.send_frame(FINE))
        pids = handle.pids
        front.send_stop()
        gone_within(pids, 2.0)
        handle.poll()


def test_a_rank_that_leaves_unasked_is_lost() -> None:
    with launched(rank_main=lambda seat: None) as handle:
        begin(handle)
        with pytest.raises(PeerLost, match="left with exit code 0 without being asked"):
            poll_for(handle, NOTICE_S)


def test_a_launcher_with_threads_refuses_to_fork() -> None:
    def load(progress: Any) -> tuple[object, bytes]:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        return None, b"ready"

    with launched(load) as handle, pytest.raises(AnyshardError, match="2 threads"):
        begin(handle)


def test_threads_that_are_about_to_end_do_not_keep_a_launcher_from_forking() -> None:
    def load(progress: Any) -> tuple[object, bytes]:
        threading.Thread(target=time.sleep, args=(0.3,), daemon=True).start()
        return None, b"ready"

    with launched(load) as handle:
        begin(handle).wait_ready()


def test_sizes_that_cannot_be_had_are_an_error_and_not_a_hang() -> None:
    with launched() as handle:
        handle.wait_loaded(deadline_s=5.0)
        huge = EpochSizes(
            wires=WireSizes(
                tp=1,
                pp=1,
                exchanges=(ExchangeSpec(name="x", kind="reduce", capacity_floats=1 << 60),),
            ),
            control=ControlSizes(rows_max=1, pages_max=1),
        )
        with pytest.raises(AnyshardError):
            handle.start(Start(epoch=1, payload=b"", sizes=huge))
        front = handle.start(Start(epoch=2, payload=b"", sizes=sizes()))
        front.wait_result(front.send_frame(FINE))


def test_messages_are_bounded() -> None:
    front, launcher = Channel.pair()
    with pytest.raises(ValueError, match=f"the limit is {MAX_MESSAGE_BYTES}"):
        front.send(Loaded(bytes(MAX_MESSAGE_BYTES)))
    front._socket.sendall(b"\xff" * 8)
    with pytest.raises(AnyshardError, match=r"a message says 4294967295 bytes \(limit"):
        launcher.receive(1.0)
    front._socket.sendall(b"\x04\x00\x00\x00\x00\x00\x00\x00ab")
    with pytest.raises(TimeoutError):
        launcher.receive(0.05)
    front.close()
    launcher.close()


def test_a_launcher_is_not_forked_off_the_main_thread() -> None:
    errors: list[Exception] = []

    def fork() -> None:
        try:
            fork_launcher(no_load, serve)
        except AnyshardError as error:
            errors.append(error)

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


def test_threads_report_a_rank_that_leaves_unasked() -> None:
    group = ThreadGroup(no_load, lambda seat: None)
    group.wait_loaded()
    front = group.start(Start(epoch=1, payload=b"", sizes=sizes(tp=1)))
    with pytest.raises(PeerLost, match="rank 0 left without being asked"):
        front.wait_ready(deadline_s=5.0)
    group.close()
    group.close()


def test_temporary_names_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "mkstemp", None)
    monkeypatch.setattr(tempfile, "mkdtemp", None)
    with launched() as handle:
        front = begin(handle)
        front.wait_result(front.send_frame(FINE))


class MustNotDieElsewhere:
    """As an object of torch, whose finaliser waits for threads that a fork does not copy."""

    def __init__(self) -> None:
        self.owner, self.itself = os.getpid(), self  # a cycle: only a collection finds it

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            os.abort()


NOISY: list[bool] = []  # whether a fork's child allocates, as handlers of filelock do
os.register_at_fork(after_in_child=lambda: NOISY and [[] for _ in range(5000)] and None)


@pytest.mark.parametrize("noisy", [False, True])
def test_garbage_of_the_front_is_not_finalised_in_the_launcher(
    noisy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor set off by what runs in the child before the launcher does, collections on or off."""
    monkeypatch.setattr(f"{__name__}.NOISY", [True] if noisy else [])
    gc.collect()
    if not noisy:
        gc.disable()
    try:
        MustNotDieElsewhere()
        group = fork_launcher(lambda progress: (None, b"loaded"), lambda seat: None)
        try:
            assert group.wait_loaded() == b"loaded"
            time.sleep(0.2)  # it collects once it has said so
            group.poll()
        finally:
            group.close()
    finally:
        gc.enable()
        gc.collect()  # no later fork of these tests has it
