"""The front's engine: owns a rank group, admits requests, walks ticks, yields tokens.

It holds what must not be lost (tokens, sampling, page tables); ranks hold what can be computed
again. Knows nothing of text: stop strings and detokenising are the caller's, through `cancel`.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from anyshard.batch import (
    Batch,
    Limits,
    Sequence,
    Tick,
    apply,
    end_session,
    next_tick,
    take_waiting,
)
from anyshard.binder import FaultCode
from anyshard.capture import Capture
from anyshard.checkpoint import Checkpoint
from anyshard.checkpoint.cache import ImageCache, load_image
from anyshard.comm.base import CommKind
from anyshard.comm.control import PAGE, ROW, ControlSizes, FrontControl, Result
from anyshard.config import INT8_LEAF, Arithmetic, KvType, ModelConfig, Profile
from anyshard.errors import PromptTooLong
from anyshard.fidelity.log import DigestLog, RecordedRow, RunDigests
from anyshard.fidelity.weights import weights_sha256
from anyshard.launcher import EpochSizes, Progress, RankGroup, Start
from anyshard.layout import Layout
from anyshard.ledger import StepShape
from anyshard.model import Program, program
from anyshard.ops import Body, KernelChoice, choose_body
from anyshard.ops.coefficients import constants_sha256
from anyshard.ops.control_word import set_control_word
from anyshard.ops.exact import F32
from anyshard.pages import PagePool, pages_for
from anyshard.request import Request, Sampling
from anyshard.worker import (
    ROW_LOGITS,
    ROW_SAMPLE,
    ROW_WHOLE,
    RankPlan,
    Served,
    note_bytes,
    wire_sizes,
)

__all__ = [
    "Engine",
    "EngineOptions",
    "EpochPlan",
    "Event",
    "FinishReason",
    "LoadReport",
    "f32_profile",
    "int8_profile",
    "loader",
    "plan_epoch",
    "profile_of",
]

FinishReason = Literal["stop", "length", "fault"]
SPIN_US = 500


def f32_profile() -> Profile:
    """The float32 arithmetic, with the hash of its constants filled in."""
    return Profile(constants_sha256=constants_sha256())


def int8_profile() -> Profile:
    """The block int8 arithmetic (`ops/quant.py`)."""
    return Profile(arithmetic="int8", leaf=INT8_LEAF, constants_sha256=constants_sha256())


def profile_of(arithmetic: Arithmetic, kv: KvType = "f32") -> Profile:
    """The profile of that arithmetic and KV (`ops/kv_pages.py`)."""
    return dataclasses.replace(int8_profile() if arithmetic == "int8" else f32_profile(), kv=kv)


class LoadReport(msgspec.Struct, frozen=True):
    """What the launcher has to say of a load: a sentence for the user, or "", and the hash of the
    weights (`fidelity/weights.py`), hex, "" if it was not asked for."""

    note: str = ""
    weights_sha256: str = ""

    def encoded(self) -> bytes:
        """As a payload."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def of(cls, payload: bytes) -> LoadReport:
        """From a payload."""
        return msgspec.msgpack.decode(payload, type=cls)


def loader(
    checkpoint: Checkpoint,
    *,
    threads: int,
    cache: ImageCache | None = None,
    record: bool = False,
    arithmetic: Arithmetic = "f32",
    kv: KvType = "f32",
) -> Callable[[Progress], tuple[object, bytes]]:
    """What the launcher runs once: pack the weight image of a checkpoint opened before the fork.

    An image in `cache` is read instead, where one is. `record`: also hash the weights. The payload
    is a LoadReport.
    """

    def load(progress: Progress) -> tuple[object, bytes]:
        set_control_word()
        image, note = load_image(
            checkpoint, threads=threads, cache=cache, progress=progress, arithmetic=arithmetic
        )
        sha256 = weights_sha256(image, threads=threads) if record else ""
        report = LoadReport(note.encode("utf-8", "replace").decode(), sha256)
        return Served(checkpoint.config, profile_of(arithmetic, kv), image), report.encoded()

    return load


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How to run, none of which changes a bit: bodies, wires, threads, chunk, sizes.

    threads None: cores divided by local ranks. kv_pages: most pages for keys and values; else what
    max_num_seqs sequences of max_model_len tokens take. deadline_s bounds every wait for a rank.
    prompt_logits: most that the requests in flight ask for together. record: keep digests of what
    every op writes, for `Engine.digests`.
    capture: what ranks copy to be looked at (`capture.py`).
    """

    kernels: KernelChoice = "auto"
    comm: Literal["auto"] | CommKind = "auto"
    threads: int | None = None
    chunk: int = 256
    max_num_seqs: int = 32
    max_model_len: int
    kv_pages: int | None = None
    deadline_s: float = 10.0
    prompt_logits: int = 0
    page_order: tuple[int, ...] | None = None
    poison: bool = False
    record: bool = False
    capture: Capture | None = None


class Event(msgspec.Struct, frozen=True):
    """A token of a request (with its logit row, if asked for), its end, or both.

    Neither, for the logits of a prompt token.
    """

    request_id: int
    token: int | None
    logits: F32 | None
    finish: FinishReason | None
    fault: str | None = None


@dataclass
class Timings:
    """Seconds spent in steps and the tokens that they moved; a mixed step counts by its rows."""

    prefill_s: float = 0.0
    prefill_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0


@dataclass(frozen=True)
class EpochPlan:
    """All sizes of an epoch, fixed before a rank exists."""

    ranks: RankPlan
    sizes: EpochSizes
    limits: Limits
    pages: tuple[int, ...] | range


def plan_epoch(
    programs: list[Program], options: EngineOptions, *, body: Body, threads: int, spin: bool
) -> EpochPlan:
    """Turn options into sizes. Pure."""
    here = programs[0]
    config, profile, layout = here.config, here.profile, here.layout
    slots = options.max_num_seqs
    blocks = pages_for(options.max_model_len, block=profile.kv_block)
    needed = slots * blocks
    most = needed if options.kv_pages is None else min(needed, options.kv_pages)
    pages = options.page_order or range(most)
    limits = Limits(
        rows_max=options.chunk + slots,
        chunk=options.chunk,
        num_slots=slots,
        block=profile.kv_block,
    )
    sampled = min(slots + options.prompt_logits, limits.rows_max)
    ranks = RankPlan(
        heads=layout.heads,
        ffn=layout.ffn,
        vocab=layout.vocab,
        layers=layout.layers,
        kv_shard=layout.kv_shard,
        kernels=body,
        comm="shm" if options.comm == "auto" else options.comm,
        threads=threads,
        spin=spin,
        rows_max=limits.rows_max,
        sampled_max=sampled,
        num_slots=slots,
        num_pages=len(pages),
        max_model_len=options.max_model_len,
        profile_sha256=profile.sha256(),
        poison=options.poison,
        record=options.record,
        capture=options.capture,
    )
    sizes = EpochSizes(
        wires=wire_sizes(programs, ranks),
        control=ControlSizes(
            rows_max=limits.rows_max,
            pages_max=len(pages),
            note_bytes=note_bytes(slots),
            logit_rows=sampled,
            vocab=config.vocab,
            digest_columns=max(each.record_columns for each in programs) if options.record else 0,
        ),
        spin_us=SPIN_US if spin else 0,
    )
    return EpochPlan(ranks, sizes, limits, pages)


class Engine:
    """One epoch of a rank group, and the requests in it.

    `epoch` grows with every engine on the same group; `cores` are those that the ranks share.
    A list given as `steps` receives the shape of every step, for the ledger.

    Raises: PeerLost, here and from `run`, when a rank is lost.
    """

    def __init__(
        self,
        group: RankGroup,
        config: ModelConfig,
        profile: Profile,
        layout: Layout,
        options: EngineOptions,
        *,
        cores: int,
        epoch: int = 1,
        steps: list[StepShape] | None = None,
    ) -> None:
        self.group, self.config, self.profile = group, config, profile
        self.layout, self.options, self.cores, self.steps = layout, options, cores, steps
        self.timings = Timings()
        world = layout.world
        self.body = choose_body(options.kernels)
        # a reference body has one thread, whatever was asked for
        asked = options.threads or max(1, cores // world)
        self.threads = 1 if self.body == "reference" else asked
        self.crowded = world * self.threads > cores
        self.programs = [program(config, profile, layout, rank) for rank in range(world)]
        plan = plan_epoch(
            self.programs,
            options,
            body=self.body,
            threads=self.threads,
            spin=not self.crowded,
        )
        self.comm, self.limits = plan.ranks.comm, plan.limits
        pool = PagePool.of(
            plan.pages,
            owners=layout.stripe_owners,
            sequence_blocks=pages_for(options.max_model_len, block=profile.kv_block),
        )
        self._num_pages, self._most_blocks = len(plan.pages), pool.most_blocks()
        self.batch = Batch(
            waiting=(),
            running=(),
            free_slots=tuple(range(options.max_num_seqs)),
            pool=pool,
        )
        self._queue: deque[tuple[int, Request]] = deque()  # submitted, and not yet in the batch
        self._queued_tokens = 0  # of their prompts
        self._rows = np.zeros(self.limits.rows_max, ROW)  # of a frame
        self._next_id = 0
        self._cancelled: set[int] = set()
        rows_max = self.limits.rows_max
        self._log = DigestLog(self.programs, rows_max=rows_max) if options.record else None
        self._uncollected: tuple[Tick, Result, tuple[Sequence, ...]] | None = None
        self.control: FrontControl = group.start(
            Start(
                epoch=epoch,
                payload=msgspec.msgpack.encode(plan.ranks),
                sizes=plan.sizes,
                deadline_s=options.deadline_s,
            )
        )

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit, of all sequences together."""
        return self._num_pages * self.limits.block

    def submit(self, request: Request) -> int:
        """Queue a request; returns its id.

        Raises: PromptTooLong if prompt and answer exceed the context.
        """
        limit = min(self.options.max_model_len, self._most_blocks * self.limits.block)
        if len(request.prompt) + request.max_tokens > limit:
            raise PromptTooLong(
                prompt_tokens=len(request.prompt), max_tokens=request.max_tokens, limit=limit
            )
        assert all(0 <= token < self.config.vocab for token in request.prompt)
        if request.prompt_logits:  # so asked for by at most as many as there are such logits
            in_flight = sum(each.prompt_logits for each in self._requests())
            assert in_flight + request.prompt_logits <= self.options.prompt_logits
        request_id = self._next_id
        self._next_id += 1
        if self._log is not None:
            assert request.session is None, "what a session has stored would not be recorded"
        self._queue.append((request_id, request))
        self._queued_tokens += len(request.prompt)
        return request_id

    def _requests(self) -> Iterator[Request]:
        """Those in flight: running, waiting, queued."""
        yield from (sequence.request for sequence in self.batch.running)
        yield from (request for _, request in self.batch.waiting)
        yield from (request for _, request in self._queue)

    def cancel(self, request_id: int) -> None:
        """End a request before its next token; no further event of it comes."""
        self._cancelled.add(request_id)

    def digests(self, request_id: int, *, emitted: int) -> RunDigests:
        """What was recorded of a request that has ended after `emitted` tokens; ask once, at its
        last event: until then the engine holds it, beside those of the requests in flight.

        The row that failed is left out. Needs `EngineOptions.record`.
        """
        assert self._log is not None
        self._collect_digests()
        return self._log.take(request_id, emitted=emitted)

    def end_session(self, session: int) -> None:
        """Free the slot and pages that the ended requests of a session left stored."""
        self.batch = end_session(self.batch, session)

    def run(self, on_prefill: Callable[[int, int], None] | None = None) -> Iterator[Event]:
        """Walk ticks until no request is left; tokens come in request order within a tick.

        on_prefill hears, after every step with prompt rows, how many prompt tokens of how many
        have run; what a session has stored counts in neither.
        """
        read = self.timings.prefill_tokens
        while True:
            self._drop_cancelled()
            taken, self.batch = take_waiting(self.batch, self._queue, self.limits)
            self._queued_tokens -= sum(len(request.prompt) for _, request in taken)
            if not self.batch.busy:
                return
            tick, self.batch = next_tick(self.batch, self.limits)
            assert tick.rows, "submit refuses what the pages never hold"
            self._open_logs(tick)
            before = self.timings.prefill_tokens
            result, codes = self._step(tick)
            if on_prefill is not None and self.timings.prefill_tokens > before:
                unread = self.batch.unread + self._queued_tokens
                on_prefill(self.timings.prefill_tokens - read, before - read + unread)
            yield from self._finish(tick, result, codes)

    def _open_logs(self, tick: Tick) -> None:
        if self._log is None:
            return
        for request_id, request in ((s.request_id, s.request) for s in tick.admitted):
            length = len(request.prompt) + request.max_tokens
            self._log.open(request_id, positions=length - 1, emitted=request.max_tokens)

    def _drop_cancelled(self) -> None:
        if not self._cancelled:
            return
        gone = frozenset(s.slot for s in self.batch.running if s.request_id in self._cancelled)
        waiting = tuple(w for w in self.batch.waiting if w[0] not in self._cancelled)
        self.batch = apply(replace(self.batch, waiting=waiting), Tick((), ()), {}, gone)
        if self._queue and max(self._cancelled) >= self._queue[0][0]:  # ids grow along the queue
            kept = [each for each in self._queue if each[0] not in self._cancelled]
            self._queue = deque(kept)
            self._queued_tokens = sum(len(request.prompt) for _, request in kept)
        self._cancelled.clear()

    def _step(self, tick: Tick) -> tuple[Result, list[int]]:
        """Send a tick to the ranks and wait for the sampler; keeps the ledger and the clock.

        Also the earliest fault code of each row on any rank, in a recorded run; else nothing.
        """
        codes: list[int] = []
        start = time.monotonic()
        frame = self._frame(tick)
        sequence = self.control.send_frame(*frame)
        self._collect_digests()
        result = self.control.wait_result(
            sequence, deadline_s=self.options.deadline_s, poll=self.group.poll
        )
        if self._log is not None:
            self._uncollected = (tick, result, self.batch.running)
            if any(result.faults):
                codes = self._log.faults(self.control.wait_digests(sequence, len(tick.rows)))
        self._account(tick, time.monotonic() - start)
        return result, codes

    def _collect_digests(self) -> None:
        """Take the last step's digests into the log: while the next one runs, which leaves their
        slot alone, or when somebody asks for them."""
        if self._log is not None and self._uncollected is not None:
            tick, result, running = self._uncollected
            parts = self.control.wait_digests(result.sequence, len(tick.rows))
            self._log.add(_recorded_rows(tick, result, running), parts)
            self._uncollected = None

    def _frame(self, tick: Tick) -> tuple[np.ndarray, np.ndarray | None, bytes]:
        requests = {s.slot: s.request for s in self.batch.running}
        rows = self._rows[: len(tick.rows)]
        for index, row in enumerate(tick.rows):
            request = requests[row.slot]
            flags = 0
            if row.through_head:
                flags |= ROW_SAMPLE
                flags |= ROW_LOGITS if row.logits else 0
                flags |= ROW_WHOLE if request.needs_logits else 0
            rows[index] = (row.slot, row.position, row.token, 0, flags)
        news = [(s.slot, block, page) for s in tick.admitted for block, page in enumerate(s.pages)]
        pages = np.array(news, PAGE) if news else None
        drawn: dict[int, Sampling] = {s.slot: s.request.sampling for s in tick.admitted}
        note = msgspec.msgpack.encode(drawn) if drawn else b""
        return rows, pages, note

    def _account(self, tick: Tick, seconds: float) -> None:
        by_slot = {s.slot: s for s in self.batch.running}
        if self.steps is not None:
            sampled = [by_slot[row.slot].request for row in tick.rows if row.through_head]
            whole = any(request.needs_logits for request in sampled)
            self.steps.append(StepShape(len(tick.rows), len(sampled), whole))
        prefill = sum(
            1 for row in tick.rows if row.position < len(by_slot[row.slot].request.prompt)
        )
        decode = len(tick.rows) - prefill
        self.timings.prefill_s += seconds * prefill / len(tick.rows)
        self.timings.decode_s += seconds * decode / len(tick.rows)
        self.timings.prefill_tokens += prefill
        self.timings.decode_tokens += decode

    def _finish(self, tick: Tick, result: Result, codes: list[int]) -> list[Event]:
        """Apply a result: append tokens, free what ended, and say what happened.

        codes: fault codes of rows, if they are known from all ranks.
        """
        by_slot = {s.slot: s for s in self.batch.running}
        tokens: dict[int, int] = {}
        finished: set[int] = set()
        faulted: list[Sequence] = []
        events: list[Event] = []
        logits_index = 0
        for index, row in enumerate(tick.rows):
            sequence = by_slot[row.slot]
            logits = None
            if row.logits:
                assert result.logits is not None
                logits = result.logits[logits_index]
                logits_index += 1
            if row.slot in finished:
                continue
            if result.faults[index]:
                finished.add(row.slot)
                faulted.append(sequence)
                if codes:
                    events.append(self._faulted(sequence, codes[index]))
                else:
                    code = result.faults[index]
                    events.append(self._faulted(sequence, self._earliest(code, result.sequence)))
            elif row.sample:
                token = result.tokens[index]
                tokens[row.slot] = token
                finish = _finish_reason(sequence, token)
                if finish is not None:
                    finished.add(row.slot)
                events.append(Event(sequence.request_id, token, logits, finish))
            elif row.logits:
                events.append(Event(sequence.request_id, None, logits, None))
        self.batch = apply(self.batch, tick, tokens, frozenset(finished))
        for sequence in faulted:  # what it stored may be NaN
            if sequence.request.session is not None:
                self.end_session(sequence.request.session)
        return events

    def _earliest(self, code: int, step: int) -> int:
        """The earliest fault code that any rank marked in this step.

        Several requests that fail in one step are all named by the earliest.
        """
        views = self.control.statuses()
        return min([code, *(view.fault_code for view in views if view.fault_sequence == step)])

    def _faulted(self, sequence: Sequence, code: int) -> Event:
        name = FaultCode.name(code, self.config.num_layers)
        return Event(sequence.request_id, None, None, "fault", fault=name)

    def close(self) -> None:
        """Tell the ranks to stop and end them."""
        self.control.send_stop()
        self.group.end()


def _recorded_rows(tick: Tick, result: Result, running: tuple[Sequence, ...]) -> list[RecordedRow]:
    """The rows of a tick as the log wants them; `running` before its result was applied."""
    by_slot = {s.slot: s for s in running}
    failed: dict[int, int] = {}  # slot to its first position that failed
    for row, fault in zip(tick.rows, result.faults, strict=True):
        if fault:
            failed[row.slot] = min(row.position, failed.get(row.slot, row.position))
    return [
        RecordedRow(
            by_slot[row.slot].request_id,
            row.position,
            row.through_head,
            by_slot[row.slot].emitted if row.sample else None,
            is_kept=row.position < failed.get(row.slot, row.position + 1),
        )
        for row in tick.rows
    ]


def _finish_reason(sequence: Sequence, token: int) -> FinishReason | None:
    if token in sequence.request.stop_ids:
        return "stop"
    if sequence.emitted + 1 >= sequence.request.max_tokens:
        return "length"
    return None
