"""The front's engine: owns a rank group, admits requests, walks ticks, yields tokens.

It holds what must not be lost (tokens, sampling, page tables); ranks hold what can be computed
again. Knows nothing of text: stop strings and detokenising are the caller's, through `cancel`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec
import numpy as np

from anyshard.batch import Batch, Limits, Sequence, Tick, apply, next_tick
from anyshard.binder import FaultCode
from anyshard.checkpoint import open_checkpoint
from anyshard.checkpoint.image import build_image
from anyshard.comm.base import CommKind
from anyshard.comm.control import PAGE, ROW, ControlSizes, FrontControl, Result
from anyshard.config import ModelConfig, Profile
from anyshard.errors import PromptTooLong
from anyshard.launcher import EpochSizes, Progress, RankGroup, Start
from anyshard.layout import Layout
from anyshard.ledger import StepShape
from anyshard.model import Program, program
from anyshard.ops import KernelChoice, choose_body
from anyshard.ops.coefficients import constants_sha256
from anyshard.ops.exact import F32
from anyshard.pages import PagePool, pages_for
from anyshard.request import Request, Sampling
from anyshard.worker import ROW_LOGITS, ROW_SAMPLE, RankPlan, Served, wire_sizes

__all__ = [
    "Engine",
    "EngineOptions",
    "Event",
    "FinishReason",
    "Served",
    "f32_profile",
    "loader",
]

FinishReason = Literal["stop", "length", "fault"]
SPIN_US = 500


def f32_profile() -> Profile:
    """The float32 arithmetic, with the hash of its constants filled in."""
    return Profile(constants_sha256=constants_sha256())


def loader(path: str | None, *, threads: int) -> Callable[[Progress], tuple[object, bytes]]:
    """What the launcher runs once: read the checkpoint at `path`, pack its weight image."""

    def load(progress: Progress) -> tuple[object, bytes]:
        checkpoint = open_checkpoint(path)
        image = build_image(checkpoint, threads=threads, progress=progress)
        return Served(checkpoint.config, f32_profile(), image), b""

    return load


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How to run, none of which changes a bit: bodies, wires, threads, chunk, sizes.

    threads None: cores divided by local ranks. deadline_s bounds every wait for a rank.
    """

    kernels: KernelChoice = "auto"
    comm: Literal["auto"] | CommKind = "auto"
    threads: int | None = None
    chunk: int = 256
    max_num_seqs: int = 32
    max_model_len: int
    deadline_s: float = 10.0
    page_order: tuple[int, ...] | None = None
    poison: bool = False


@dataclass(frozen=True)
class Event:
    """A token of a request (with its logit row, if asked for), its end, or both."""

    request_id: int
    token: int | None
    logits: F32 | None
    finish: FinishReason | None
    fault: str | None = None


@dataclass
class Timings:
    """When things happened, in seconds of the monotonic clock, and how many tokens they moved."""

    first_frame: float = 0.0
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0


@dataclass
class Engine:
    """One epoch of a rank group, and the requests in it.

    `epoch` grows with every engine on the same group.

    Raises from `run`: PeerLost when a rank is lost.
    """

    group: RankGroup
    config: ModelConfig
    profile: Profile
    layout: Layout
    options: EngineOptions
    epoch: int = 1
    steps: list[StepShape] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)

    def __post_init__(self) -> None:
        cores = len(os.sched_getaffinity(0))
        world, options = self.layout.world, self.options
        self.threads = options.threads or max(1, cores // world)
        self.body = choose_body(options.kernels)
        self.comm = "shm" if options.comm == "auto" else options.comm
        spin = world * self.threads <= cores
        slots = options.max_num_seqs
        blocks = pages_for(options.max_model_len, block=self.profile.kv_block)
        pages = options.page_order or tuple(range(slots * blocks))
        self.limits = Limits(
            rows_max=options.chunk + slots,
            chunk=options.chunk,
            num_slots=slots,
            block=self.profile.kv_block,
        )
        self.programs: list[Program] = [
            program(self.config, self.profile, self.layout, rank) for rank in range(world)
        ]
        plan = RankPlan(
            heads=self.layout.heads,
            ffn=self.layout.ffn,
            vocab=self.layout.vocab,
            layers=self.layout.layers,
            kernels=self.body,
            comm=self.comm,
            threads=self.threads,
            spin=spin,
            rows_max=self.limits.rows_max,
            sampled_max=slots,
            num_slots=slots,
            num_pages=len(pages),
            max_model_len=options.max_model_len,
            profile_sha256=self.profile.sha256(),
            poison=options.poison,
        )
        nodes_max = max(program_.exchange_nodes for program_ in self.programs)
        sizes = EpochSizes(
            wires=wire_sizes(self.config, plan, nodes_max),
            control=ControlSizes(
                rows_max=plan.rows_max,
                pages_max=len(pages),
                note_bytes=64 + 192 * slots,
                logit_rows=slots,
                vocab=self.config.vocab,
            ),
            spin_us=SPIN_US if spin else 0,
        )
        self.batch = Batch(
            waiting=(), running=(), free_slots=tuple(range(slots)), pool=PagePool.of(pages)
        )
        self._next_id = 0
        self._prompt_tokens = 0
        self._cancelled: set[int] = set()
        self.control: FrontControl = self.group.start(
            Start(
                epoch=self.epoch,
                payload=msgspec.msgpack.encode(plan),
                sizes=sizes,
                deadline_s=options.deadline_s,
            )
        )

    def submit(self, request: Request) -> int:
        """Queue a request; returns its id.

        Raises: PromptTooLong if prompt and answer exceed the context.
        """
        total = len(request.prompt) + request.max_tokens
        if total > self.options.max_model_len:
            raise PromptTooLong(
                prompt_tokens=len(request.prompt),
                max_tokens=request.max_tokens,
                limit=self.options.max_model_len,
            )
        assert all(0 <= token < self.config.vocab for token in request.prompt)
        self._prompt_tokens += len(request.prompt)
        request_id = self._next_id
        self._next_id += 1
        self.batch = replace(self.batch, waiting=(*self.batch.waiting, (request_id, request)))
        return request_id

    def cancel(self, request_id: int) -> None:
        """End a request before its next token; no further event of it comes."""
        self._cancelled.add(request_id)

    def run(self, on_prefill: Callable[[int, int], None] | None = None) -> Iterator[Event]:
        """Walk ticks until no request is left; tokens come in request order within a tick.

        on_prefill hears, after every step with prompt rows, how many prompt tokens of how many
        have run.
        """
        while True:
            self._drop_cancelled()
            if not self.batch.busy:
                return
            tick, self.batch = next_tick(self.batch, self.limits)
            before = self.timings.prefill_tokens
            result = self._step(tick)
            if on_prefill is not None and self.timings.prefill_tokens > before:
                on_prefill(self.timings.prefill_tokens, self._prompt_tokens)
            yield from self._finish(tick, result)

    def _drop_cancelled(self) -> None:
        if not self._cancelled:
            return
        gone = frozenset(s.slot for s in self.batch.running if s.request_id in self._cancelled)
        waiting = tuple(w for w in self.batch.waiting if w[0] not in self._cancelled)
        self.batch = apply(replace(self.batch, waiting=waiting), Tick((), ()), {}, gone)
        self._cancelled.clear()

    def _step(self, tick: Tick) -> Result:
        """Send a tick to the ranks and wait for the sampler; keeps the ledger and the clock."""
        start = time.monotonic()
        frame = self._frame(tick)
        sequence = self.control.send_frame(*frame)
        result = self.control.wait_result(
            sequence, deadline_s=self.options.deadline_s, poll=self.group.poll
        )
        self._account(tick, time.monotonic() - start, start)
        return result

    def _frame(self, tick: Tick) -> tuple[np.ndarray, np.ndarray, bytes]:
        requests = {s.slot: s.request for s in self.batch.running}
        rows = np.zeros(len(tick.rows), ROW)
        for index, row in enumerate(tick.rows):
            wanted = ROW_LOGITS if requests[row.slot].want_logits else 0
            flags = (ROW_SAMPLE | wanted) if row.sample else 0
            rows[index] = (row.slot, row.position, row.token, 0, flags)
        pages = [(s.slot, block, page) for s in tick.admitted for block, page in enumerate(s.pages)]
        drawn: dict[int, Sampling] = {s.slot: s.request.sampling for s in tick.admitted}
        note = msgspec.msgpack.encode(drawn) if drawn else b""
        return rows, np.array(pages, PAGE), note

    def _account(self, tick: Tick, seconds: float, start: float) -> None:
        by_slot = {s.slot: s for s in self.batch.running}
        sampled = [by_slot[row.slot].request for row in tick.rows if row.sample]
        whole = any(r.want_logits or not r.sampling.greedy for r in sampled)
        self.steps.append(StepShape(len(tick.rows), len(sampled), whole))
        timings = self.timings
        timings.first_frame = timings.first_frame or start
        prefill = sum(
            1 for row in tick.rows if row.position < len(by_slot[row.slot].request.prompt)
        )
        if prefill:
            timings.prefill_s += seconds
            timings.prefill_tokens += prefill
        else:
            timings.decode_s += seconds
            timings.decode_tokens += len(tick.rows)

    def _finish(self, tick: Tick, result: Result) -> list[Event]:
        """Apply a result: append tokens, free what ended, and say what happened."""
        by_slot = {s.slot: s for s in self.batch.running}
        tokens: dict[int, int] = {}
        finished: set[int] = set()
        events: list[Event] = []
        logits_index = 0
        for index, row in enumerate(tick.rows):
            sequence = by_slot[row.slot]
            logits = None
            if row.sample and sequence.request.want_logits:
                assert result.logits is not None
                logits = result.logits[logits_index]
                logits_index += 1
            if row.slot in finished:
                continue
            if result.faults[index]:
                finished.add(row.slot)
                code = int(result.faults[index])
                events.append(self._faulted(sequence, code, result.sequence))
            elif row.sample:
                token = int(result.tokens[index])
                tokens[row.slot] = token
                finish = _finish_reason(sequence, token)
                if finish is not None:
                    finished.add(row.slot)
                events.append(Event(sequence.request_id, token, logits, finish))
        self.batch = apply(self.batch, tick, tokens, frozenset(finished))
        return events

    def _faulted(self, sequence: Sequence, code: int, step: int) -> Event:
        """The earliest op that any rank marked in this step names the fault."""
        views = self.control.statuses()
        marked = [view.fault_code for view in views if view.fault_sequence == step]
        name = FaultCode.name(min([code, *marked]), self.config.num_layers)
        return Event(sequence.request_id, None, None, "fault", fault=name)

    def close(self) -> None:
        """Tell the ranks to stop and end them."""
        self.control.send_stop()
        self.group.end()


def _finish_reason(sequence: Sequence, token: int) -> FinishReason | None:
    if token in sequence.request.stop_ids:
        return "stop"
    if sequence.emitted + 1 >= sequence.request.max_tokens:
        return "length"
    return None
