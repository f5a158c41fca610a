"""A rank that runs one MLP block again and again, and the random block that it runs.

The block is a layer of an ordinary model whose attention is left out: norm, gate and up, SiLU,
down, the exchange of tree nodes, the reduce onto the residual. Weights of one layer stand in memory
several times, and passes walk over the copies, so that they come from memory as in a whole model.

Letters: M rows, D hidden, F ffn.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from anyshard.checkpoint import Checkpoint
from anyshard.checkpoint.source import TensorSource
from anyshard.comm.base import Comm
from anyshard.comm.control import Frame, RankControl
from anyshard.comm.voids import Voids
from anyshard.config import Arithmetic, ModelConfig
from anyshard.launcher import RankMain
from anyshard.model import Program
from anyshard.ops.exact import F32
from anyshard.ops.storage import Storage, stored_bytes
from anyshard.worker import RankPlan, Served, Worker, rank_main

__all__ = [
    "COPIES",
    "BlockBoard",
    "BlockShape",
    "BlockWeights",
    "block_checkpoint",
    "block_config",
    "block_rank",
    "random_block",
]

COPIES: Final = 6  # even: an exchange has two buffers, which take turns
_OPS: Final = ("gate_up", "down_proj", "gather_down", "reduce_down")


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Sizes and the seed of weights and input; rows_max rows at most."""

    hidden: int = 896
    ffn: int = 4864
    seed: int = 0
    rows_max: int = 128

    def weight_bytes(self, arithmetic: Arithmetic) -> int:
        """Of one copy, as ranks hold it; float32 is also how it is made."""
        storage: Storage = "int8" if arithmetic == "int8" else "float32"
        return stored_bytes(storage, 3 * self.hidden * self.ffn)


@dataclass(frozen=True)
class BlockWeights:
    """x [M, D], norm [D], gate and up [F, D], down [D, F]; what x goes through and is added to."""

    x_MD: F32
    norm_D: F32
    gate_FD: F32
    up_FD: F32
    down_DF: F32


def random_block(shape: BlockShape) -> BlockWeights:
    """Normal weights of the size that trained ones have; the same for the same seed."""
    rng = np.random.default_rng(shape.seed)

    def normal(*size: int) -> F32:
        return rng.standard_normal(size, np.float32)

    wide, deep = np.float32(shape.hidden**-0.5), np.float32(shape.ffn**-0.5)
    return BlockWeights(
        x_MD=normal(shape.rows_max, shape.hidden),
        norm_D=1 + normal(shape.hidden) * np.float32(0.1),
        gate_FD=normal(shape.ffn, shape.hidden) * wide,
        up_FD=normal(shape.ffn, shape.hidden) * wide,
        down_DF=normal(shape.hidden, shape.ffn) * deep,
    )


def block_config(shape: BlockShape) -> ModelConfig:
    """A model of `COPIES` layers with that MLP and hardly anything else."""
    return ModelConfig(
        architecture="qwen2",
        num_layers=COPIES,
        hidden=shape.hidden,
        ffn=shape.ffn,
        num_heads=8,
        num_kv_heads=8,
        head_dim=8,
        vocab=128,
        context=2 * shape.rows_max,
        norm_eps=1e-6,
        rope_theta=1e6,
        tied=True,
    )


def block_checkpoint(shape: BlockShape, weights: BlockWeights) -> Checkpoint:
    """A model that is in memory, each of its layers with the same weights."""
    config = block_config(shape)
    of_layer = {
        "mlp_norm": weights.norm_D,
        "gate": weights.gate_FD,
        "up": weights.up_FD,
        "down": weights.down_DF,
    }

    def source(name: str, size: tuple[int, ...]) -> TensorSource:
        values = of_layer.get(name.rsplit(".", 1)[-1])
        if values is None:
            values = np.zeros(size, np.float32)
        raw = values.reshape(-1).view(np.uint8)
        return TensorSource(name=name, file_name=name, shape=size, type="F32", raw=raw)

    return Checkpoint(
        path=Path("random block"),
        config=config,
        sources={name: source(name, size) for name, size in config.tensor_shapes().items()},
        tokenizer_material=None,
    )


class BlockBoard:
    """Memory that the front shares with ranks forked later: their clocks, what goes in and out.

    times_ns [ranks, passes, 2]: of a whole pass, and of its exchange. x_MD, out_MD [rows_max, D].
    """

    def __init__(self, x_MD: F32, *, ranks: int, passes: int) -> None:
        self.x_MD = x_MD
        clocks, floats = ranks * passes * 2, x_MD.size
        memory = mmap.mmap(-1, 8 * clocks + 4 * floats)  # shared with children
        self.times_ns = np.frombuffer(memory, np.int64, clocks).reshape(ranks, passes, 2)
        self.out_MD: F32 = np.frombuffer(memory, np.float32, floats, 8 * clocks).reshape(x_MD.shape)


class _BlockWorker(Worker):
    """A frame of M rows is the input's first M rows, as many passes as its first token says."""

    def __init__(
        self,
        served: Served,
        plan: RankPlan,
        *,
        rank: int,
        comm: Comm,
        control: RankControl,
        voids: Voids | None,
        board: BlockBoard,
    ) -> None:
        self.board = board
        super().__init__(served, plan, rank=rank, comm=comm, control=control, voids=voids)
        kinds = [op.kind for op in self.program.ops]
        size = len(kinds) // COPIES
        self.copies: list[list[tuple[bool, Callable[[int], None]]]] = [
            [(kinds[i] == "gather_down", self.body[i]) for i in range(first, first + size)]
            for first in range(0, len(kinds), size)
        ]

    def build_program(self, served: Served, rank: int) -> Program:
        """The MLP's ops alone."""
        whole = super().build_program(served, rank)
        return replace(whole, ops=tuple(op for op in whole.ops if op.kind in _OPS))

    def step(self, frame: Frame) -> None:
        """Passes over the copies in turn, each timed."""
        rows, times = len(frame.rows), self.board.times_ns[self.program.rank]
        passes = int(frame.rows["token"][0])
        assert passes % COPIES == 0, "an exchange would begin with the other buffer"
        for index in range(passes):
            self.x_RD[:rows] = self.board.x_MD[:rows]
            times[index] = self._pass(self.copies[index % COPIES], rows)
            self.control.status.beat()
        if self.is_sampler:
            self.board.out_MD[:rows] = self.x_RD[:rows]
            zeros = np.zeros(rows, np.int32)
            self.control.post_result(frame.sequence, zeros, self.row_fault[:rows])

    def _pass(self, ops: list[tuple[bool, Callable[[int], None]]], rows: int) -> tuple[int, int]:
        """(ns in all, ns in the exchange, waiting for peers included)."""
        clock: Callable[[], int] = time.perf_counter_ns
        start, exchanged = clock(), 0
        for is_exchange, run in ops:
            if is_exchange:
                before = clock()
                run(rows)
                exchanged += clock() - before
            else:
                run(rows)
        return clock() - start, exchanged


def block_rank(board: BlockBoard) -> RankMain:
    """What ranks run that are forked from the process that has made the board."""
    worker: Any = partial(_BlockWorker, board=board)
    return partial(rank_main, worker_type=worker)
