"""The MLP block on ranks of every width, beside the same block on torch and Gloo.

A round runs every arm once, at each number of rows, so that a slow minute of the machine hits all
alike; what an arm gains is a ratio within a round. Ours are compared with our one rank bit by bit,
torch's with torch's one process. Clocks are rank 0's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Final, Literal, Protocol

import msgspec
import numpy as np

from anyshard.bench.block_rank import COPIES, BlockBoard, BlockShape, block_config
from anyshard.bench.rows import Spread, spread
from anyshard.comm.control import ROW, FrontControl
from anyshard.config import Profile
from anyshard.epoch import EngineOptions, plan_epoch
from anyshard.errors import AnyshardError
from anyshard.launcher import RankGroup, Start
from anyshard.layout import plan
from anyshard.model import program
from anyshard.ops import Body
from anyshard.ops.exact import F32
from anyshard.verify.result import unlike

__all__ = [
    "ARMS",
    "MOST_PASSES",
    "PEER_ARMS",
    "BlockArm",
    "BlockResult",
    "RankBlocks",
    "TorchBlocks",
    "measure_blocks",
]

_PAUSE_S: Final = 0.25  # after torch, whose threads spin for a while
_FEW_ROWS: Final = 4


@dataclass(frozen=True)
class BlockArm:
    """A way to run the block: ranks that share it, threads of each."""

    name: str
    engine: Literal["anyshard", "torch"]
    tp: int
    threads: int


#: The first of each is what the others are compared with.
ARMS: Final = (
    BlockArm("anyshard 1 rank", "anyshard", 1, 1),
    BlockArm("anyshard 1 rank x 2 threads", "anyshard", 1, 2),
    BlockArm("anyshard TP 2", "anyshard", 2, 1),
    BlockArm("anyshard TP 4", "anyshard", 4, 1),
)
PEER_ARMS: Final = (
    BlockArm("torch 1 process", "torch", 1, 1),
    BlockArm("torch 1 process x 2 threads", "torch", 1, 2),
    BlockArm("torch + Gloo TP 2", "torch", 2, 1),
)


def _passes(rows: int) -> int:
    """Of one run: more where they are short."""
    return COPIES * (4 if rows <= _FEW_ROWS else 1)


MOST_PASSES: Final = _passes(1)


@dataclass(frozen=True)
class _Run:
    """µs of each pass and of its exchange, without the first; what came out of the last."""

    times_us: tuple[float, ...]
    comm_us: tuple[float, ...]
    out_MD: F32


@dataclass(frozen=True, kw_only=True)
class BlockResult:
    """One arm at one number of rows.

    latencies: µs, of each round the median of its passes. comm_share: of the time, median; waiting
    for a peer counts. speedup: against one rank of the same engine, median of the rounds.
    differing: elements of the result that are not those of one rank, of `elements`. profile: the
    arithmetic of that engine.
    """

    name: str
    engine: str
    profile: str
    tp: int
    threads: int
    rows: int
    latencies: tuple[float, ...]
    comm_share: float
    speedup: float
    elements: int
    differing: int
    max_ulp: int

    @property
    def latency(self) -> Spread:
        """Of the rounds, µs."""
        return spread(self.latencies)


class _Started(Protocol):
    """An arm that is ready to run."""

    def run(self, rows: int) -> _Run:
        """The passes for so many rows."""


class _Engine(Protocol):
    """Runs arms, one at a time, all in the arithmetic of that name."""

    @property
    def profile_name(self) -> str:
        """`f32`, `int8`."""

    def start(self, arm: BlockArm) -> AbstractContextManager[_Started]:
        """Make an arm ready."""


class RankBlocks:
    """Our arms, as epochs of a group whose ranks run `block_rank(board)`."""

    def __init__(
        self,
        group: RankGroup,
        shape: BlockShape,
        profile: Profile,
        board: BlockBoard,
        *,
        body: Body,
        cores: int,
        threads: bool = False,
        deadline_s: float = 10.0,
    ) -> None:
        self._group, self._shape, self._profile, self._board = group, shape, profile, board
        self._body, self._cores, self._deadline_s = body, cores, deadline_s
        self._comm: Literal["threads", "shm"] = "threads" if threads else "shm"
        self._epoch = 0

    @property
    def profile_name(self) -> str:
        """Of our profile."""
        return self._profile.name

    def start(self, arm: BlockArm) -> AbstractContextManager[_Started]:
        """Fork its ranks; they end with the context."""
        self._epoch += 1
        config, profile = block_config(self._shape), self._profile
        layout = plan(config, tp=arm.tp, leaf=profile.leaf)
        programs = [program(config, profile, layout, rank) for rank in range(arm.tp)]
        options = EngineOptions(
            comm=self._comm,
            threads=arm.threads,
            chunk=self._shape.rows_max,
            max_num_seqs=1,
            max_model_len=config.context,
        )
        spin = arm.tp * arm.threads <= self._cores
        sizes = plan_epoch(programs, options, body=self._body, threads=arm.threads, spin=spin)
        control = self._group.start(
            Start(
                epoch=self._epoch,
                payload=msgspec.msgpack.encode(sizes.ranks),
                sizes=sizes.sizes,
                deadline_s=self._deadline_s,
            )
        )
        return _RankArm(self._group, control, self._board, self._deadline_s)


class _RankArm:
    def __init__(
        self, group: RankGroup, control: FrontControl, board: BlockBoard, deadline_s: float
    ) -> None:
        self._group, self._control, self._board = group, control, board
        self._deadline_s = deadline_s

    def run(self, rows: int) -> _Run:
        """One frame. Raises: PeerLost."""
        passes = _passes(rows)
        frame = np.zeros(rows, ROW)
        frame["token"] = passes
        sequence = self._control.send_frame(frame)
        result = self._control.wait_result(
            sequence, deadline_s=self._deadline_s, poll=self._group.poll
        )
        if any(result.faults):
            raise AnyshardError("a value of the random block left the range of float32")
        times = self._board.times_ns[0, 1:passes] / 1000
        return _Run(
            tuple(times[:, 0].tolist()),
            tuple(times[:, 1].tolist()),
            self._board.out_MD[:rows].copy(),
        )

    def __enter__(self) -> _RankArm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._control.send_stop()
        self._group.end()


@dataclass(frozen=True)
class _Process:
    """A torch process, and where its errors go."""

    popen: subprocess.Popen[str]
    log: str

    def write(self, asked: dict[str, Any]) -> None:
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(json.dumps(asked) + "\n")
            self.popen.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def read(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        self.popen.kill()
        self.popen.communicate()

    def _ended(self) -> AnyshardError:
        said = Path(self.log).read_text("utf-8", "replace").splitlines()[-1:] or ["it said nothing"]
        return AnyshardError(
            f"a torch process ended with code {self.popen.wait()} ({said[0]}); --no-peer leaves "
            "torch out"
        )


class TorchBlocks:
    """Torch's arms: processes that stay warm, one for both thread counts, two with Gloo.

    What they write (results, errors, Gloo's rendezvous) lies in memory: no file is left, however
    this ends.

    Raises: AnyshardError if one of them ends before its time.
    """

    def __init__(self, shape: BlockShape) -> None:
        self._shape = shape
        self._stack = ExitStack()
        self._out = self._memory("out")
        self._processes: dict[int, list[_Process]] = {}
        self.version = ""

    def __enter__(self) -> TorchBlocks:
        try:
            for world in sorted({arm.tp for arm in PEER_ARMS}):
                store = self._memory("store")
                processes = self._processes.setdefault(world, [])
                for rank in range(world):
                    processes.append(self._spawn(rank, world, store))
            for process in self._all():
                self.version = process.read()["ready"]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all of them."""
        for process in self._all():
            process.kill()
        self._processes = {}
        self._stack.close()

    def _all(self) -> Iterator[_Process]:
        for processes in self._processes.values():
            yield from processes

    def _memory(self, name: str) -> int:
        """The descriptor of a file in memory, closed at the end."""
        descriptor = os.memfd_create(f"anyshard-torch-{name}")
        self._stack.callback(os.close, descriptor)
        return descriptor

    def _spawn(self, rank: int, world: int, store: int) -> _Process:
        shape, log = self._shape, self._memory("log")
        sizes = (shape.hidden, shape.ffn, shape.seed, shape.rows_max)
        asked = map(str, (rank, world, _path(store), *sizes))
        popen = subprocess.Popen(
            [sys.executable, "-m", "anyshard.bench.torch_block", *asked],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            pass_fds=(store, self._out),
        )
        return _Process(popen, _path(log))

    @property
    def profile_name(self) -> str:
        """Torch is always given float32."""
        return "f32"

    def start(self, arm: BlockArm) -> AbstractContextManager[_Started]:
        """They run already."""
        processes = self._processes[arm.tp]
        return _TorchArm(processes, arm.threads, _path(self._out), self._shape.hidden)


def _path(descriptor: int) -> str:
    """Of a file in memory, for whoever has inherited it."""
    return f"/proc/self/fd/{descriptor}"


class _TorchArm:
    def __init__(self, processes: list[_Process], threads: int, out: str, hidden: int) -> None:
        self._processes, self._threads, self._out, self._hidden = processes, threads, out, hidden

    def run(self, rows: int) -> _Run:
        """Ask all ranks; the first one's answer counts."""
        asked: dict[str, Any] = {
            "threads": self._threads,
            "rows": rows,
            "passes": _passes(rows),
            "out": "",
        }
        for rank, process in enumerate(self._processes):
            process.write(asked | {"out": "" if rank else self._out})
        answer, *_ = [process.read() for process in self._processes]
        out_MD = np.fromfile(self._out, np.float32).reshape(rows, self._hidden)
        return _Run(tuple(answer["times_us"][1:]), tuple(answer["comm_us"][1:]), out_MD)

    def __enter__(self) -> _TorchArm:
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(_PAUSE_S)


def measure_blocks(
    ours: _Engine,
    peers: _Engine | None,
    *,
    rows: Sequence[int],
    repetitions: int,
    on_step: Callable[[str], None],
) -> list[BlockResult]:
    """`repetitions` rounds after one to warm up; by rows, then by arm.

    on_step hears of each arm that is done. Raises: PeerLost, AnyshardError.
    Held by: test_bench_blocks.py.
    """
    arms = [(arm, ours) for arm in ARMS]
    arms += [] if peers is None else [(arm, peers) for arm in PEER_ARMS]
    runs: dict[tuple[BlockArm, int], list[_Run]] = {}
    for round_ in range(repetitions + 1):
        for arm, engine in arms:
            with engine.start(arm) as started:
                for count in rows:
                    run = started.run(count)
                    runs.setdefault((arm, count), [])
                    runs[arm, count] += [run] if round_ else []
            on_step(arm.name)
    return [
        _result(arm, engine.profile_name, count, runs[arm, count], runs[_base(arm), count])
        for count in rows
        for arm, engine in arms
    ]


def _base(arm: BlockArm) -> BlockArm:
    return ARMS[0] if arm.engine == "anyshard" else PEER_ARMS[0]


def _result(
    arm: BlockArm, profile: str, rows: int, runs: list[_Run], base: list[_Run]
) -> BlockResult:
    latencies = tuple(median(run.times_us) for run in runs)
    shares = [
        exchanged / whole
        for run in runs
        for exchanged, whole in zip(run.comm_us, run.times_us, strict=True)
    ]
    found = [unlike(run.out_MD, base[0].out_MD) for run in runs]
    return BlockResult(
        name=arm.name,
        engine=arm.engine,
        profile=profile,
        tp=arm.tp,
        threads=arm.threads,
        rows=rows,
        latencies=latencies,
        comm_share=median(shares),
        speedup=median(
            median(first.times_us) / mine for first, mine in zip(base, latencies, strict=True)
        ),
        elements=runs[0].out_MD.size,
        differing=max(each.count for each in found),
        max_ulp=max(each.ulp for each in found),
    )
