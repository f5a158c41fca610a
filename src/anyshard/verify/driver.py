"""Explicit frames into real ranks: every row's slot, position, token and page is the caller's.

A `Driver` is what the engine is to a rank group, without requests, ticks or admission: it starts
one epoch, sends rows as given, and returns the logits of every row that wants them. It can
therefore do what an engine never does: re-run from an earlier position, share a frame between
sequences in any order, move a sequence's pages, or ask for logits in the middle of a prompt.

    with Driver(model, tp=2, rows_max=64) as driver:
        logits_TV = driver.logits(tokens, chunk=32)
        step = driver.step([(0, 5, 17, True), (1, 0, 4, False)])
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from anyshard.capture import Capture
from anyshard.checkpoint import Checkpoint, build_image
from anyshard.comm.control import PAGE, ROW, ControlSizes, StatusView
from anyshard.config import Arithmetic, KvType, ModelConfig, Profile, WireType
from anyshard.launcher import (
    EpochSizes,
    Progress,
    RankGroup,
    RankMain,
    Start,
    ThreadGroup,
    fork_launcher,
)
from anyshard.layout import KvShard, Layout, plan
from anyshard.loading import profile_of
from anyshard.model import program
from anyshard.ops import KernelChoice
from anyshard.pages import pages_for
from anyshard.request import Sampling
from anyshard.verify.naive import Order, OrderedPlan
from anyshard.worker import (
    ROW_LOGITS,
    ROW_SAMPLE,
    RankPlan,
    Served,
    note_bytes,
    rank_main,
    wire_sizes,
)

__all__ = ["Driver", "Shape", "Step", "open_group", "served"]

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

Row = tuple[int, int, int, bool]  # slot, position, token, whether its logits are wanted
PageEntry = tuple[int, int, int]  # slot, block, page


@dataclass(frozen=True)
class Step:
    """What came back for a frame of n rows, k of which wanted logits.

    tokens [n] (-1 where none was wanted), faults [n] (0 is fine), logits [k, V] in row order.
    """

    tokens: I32
    faults: I32
    logits: F32


def served(
    checkpoint: Checkpoint,
    *,
    kernels: KernelChoice = "auto",
    arithmetic: Arithmetic = "f32",
    kv: KvType = "f32",
    wire: WireType = "none",
) -> Served:
    """A checkpoint as the launcher loads it, on all cores."""
    threads = len(os.sched_getaffinity(0))
    image = build_image(checkpoint, threads=threads, kernels=kernels, arithmetic=arithmetic)
    return Served(checkpoint.config, profile_of(arithmetic, kv, wire), image)


class Shape(Protocol):
    """What the front must know of a model; a `Served` has it too."""

    @property
    def config(self) -> ModelConfig:
        """Its sizes."""

    @property
    def profile(self) -> Profile:
        """Its arithmetic."""


def open_group(
    model: Served, rank_body: RankMain = rank_main, *, forked: bool, deadline_s: float = 10.0
) -> RankGroup:
    """Ranks over a model that is in this process already: threads of it, or forked from it."""

    def load(progress: Progress) -> tuple[Any, bytes]:
        return model, b""

    group: RankGroup
    if forked:
        group = fork_launcher(load, rank_body, deadline_s=deadline_s)
    else:
        group = ThreadGroup(load, rank_body)
    group.wait_loaded()
    return group


class Driver:
    """One epoch of one layout; a context manager.

    rows_max: most rows of a frame. Slot s holds consecutive pages from s * blocks on, until a step
    says otherwise; where ranks split the sequence, with pages of the same ranks (`pages.py`).
    poison: the KV cache starts as NaN. ranks: "threads" of this process, or "forked" processes as
    in production; rank_body: what they run, for naive orders and planted faults. capture: what they
    copy (`capture.py`).

    With `group` the epoch runs in a rank group that is loaded already, as its epoch number `epoch`,
    and leaves it open; `model` then need not hold the weights, and `ranks` and `rank_body` are the
    group's. `order` is heeded where that body is `naive.rank_of_any_order`.
    """

    def __init__(
        self,
        model: Shape,
        *,
        group: RankGroup | None = None,
        epoch: int = 1,
        order: Order = "written",
        tp: int = 1,
        pp: int = 1,
        heads: Sequence[int] | None = None,
        layers: Sequence[int] | None = None,
        kv_shard: KvShard = "heads",
        kernels: KernelChoice = "auto",
        threads: int = 1,
        rows_max: int = 64,
        num_slots: int = 1,
        max_model_len: int = 512,
        num_pages: int | None = None,
        poison: bool = False,
        ranks: Literal["threads", "forked"] = "threads",
        comm: Literal["shm", "torch"] = "shm",
        rank_body: RankMain = rank_main,
        deadline_s: float = 60.0,
        capture: Capture | None = None,
    ) -> None:
        self.model, self.num_slots, self.rows_max = model, num_slots, rows_max
        self.block = model.profile.kv_block
        blocks = pages_for(max_model_len, block=self.block)
        self.pages: dict[int, Sequence[int]] = {
            slot: range(slot * blocks, (slot + 1) * blocks) for slot in range(num_slots)
        }
        self._unsent: list[PageEntry] = [
            (slot, block, page)
            for slot, pages in self.pages.items()
            for block, page in enumerate(pages)
        ]
        highest = max((page for _, _, page in self._unsent), default=0)
        self.layout: Layout = plan(
            model.config,
            tp=tp,
            pp=pp,
            heads=heads,
            layers=layers,
            kv_shard=kv_shard,
            wire=model.profile.wire,
            leaf=model.profile.leaf,
        )
        rank_plan = OrderedPlan(
            order=order,
            heads=self.layout.heads,
            ffn=self.layout.ffn,
            vocab=self.layout.vocab,
            layers=self.layout.layers,
            kv_shard=self.layout.kv_shard,
            kernels=kernels,
            comm=comm,
            threads=threads,
            spin=False,
            rows_max=rows_max,
            sampled_max=rows_max,
            num_slots=num_slots,
            num_pages=num_pages or highest + 1,
            max_model_len=max_model_len,
            profile_sha256=model.profile.sha256(),
            poison=poison,
            capture=capture,
        )
        self._owns_group = group is None
        if group is None:
            assert isinstance(model, Served), "no group and no weights"
            group = open_group(model, rank_body, forked=ranks == "forked", deadline_s=deadline_s)
        self._group = group
        self._control = self._group.start(
            Start(
                epoch=epoch,
                payload=msgspec.msgpack.encode(rank_plan),
                sizes=self._sizes(rank_plan),
                deadline_s=deadline_s,
            )
        )

    def _sizes(self, rank_plan: RankPlan) -> EpochSizes:
        model, layout = self.model, self.layout
        programs = [
            program(model.config, model.profile, layout, rank) for rank in range(layout.world)
        ]
        return EpochSizes(
            wires=wire_sizes(programs, rank_plan),
            control=ControlSizes(
                rows_max=self.rows_max,
                pages_max=max(rank_plan.num_pages, len(self._unsent)) + self.rows_max,
                note_bytes=note_bytes(self.num_slots),
                logit_rows=self.rows_max,
                vocab=model.config.vocab,
            ),
        )

    def step(
        self,
        rows: Sequence[Row],
        pages: Iterable[PageEntry] | None = None,
        *,
        sampling: Mapping[int, Sampling] | None = None,
    ) -> Step:
        """One frame. `pages`: page-table entries that take effect before it; `sampling`: by slot.

        Raises: PeerLost, or what a rank raised.
        """
        table = np.zeros(len(rows), ROW)
        for index, (slot, position, token, want) in enumerate(rows):
            flags = ROW_SAMPLE | ROW_LOGITS if want else 0
            table[index] = (slot, position, token, 0, flags)
        entries, self._unsent = [*self._unsent, *(pages or ())], []
        note = msgspec.msgpack.encode(dict(sampling)) if sampling else b""
        sequence = self._control.send_frame(table, np.array(entries, PAGE), note)
        result = self._control.wait_result(sequence, poll=self._group.poll)
        empty = np.zeros((0, self.model.config.vocab), np.float32)
        logits = empty if result.logits is None else result.logits
        tokens, faults = (np.array(each, np.int32) for each in (result.tokens, result.faults))
        return Step(tokens, faults, logits)

    def logits(
        self,
        tokens: Sequence[int],
        *,
        chunk: int | None = None,
        slot: int = 0,
        start: int = 0,
        positions: Iterable[int] | None = None,
    ) -> F32:
        """Teacher-forced logits [P, V] of `tokens`, which stand at positions start, start + 1...

        `chunk` rows a frame (default: as many as fit). `positions`: absolute ones whose logits are
        returned, all if None. What stood in the slot from `start` on is overwritten.
        """
        size = chunk or self.rows_max
        end = start + len(tokens)
        wanted = set(range(start, end) if positions is None else positions)
        parts: list[F32] = []
        for first in range(start, end, size):
            rows = [
                (slot, position, int(tokens[position - start]), position in wanted)
                for position in range(first, min(first + size, end))
            ]
            step = self.step(rows)
            assert not step.faults.any(), f"faults {step.faults[step.faults != 0]}"
            parts.append(step.logits)
        return np.concatenate(parts)

    def statuses(self) -> list[StatusView]:
        """What every rank says of itself: bytes, messages, faults."""
        return self._control.statuses()

    def close(self) -> None:
        """End the ranks; nothing of them is left."""
        try:
            self._control.send_stop()
        finally:
            self._end()

    def _end(self) -> None:
        if self._owns_group:
            self._group.close()
        else:
            self._group.end()

    def __enter__(self) -> Driver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:  # the ranks may be gone: only make sure of it
            self._end()
