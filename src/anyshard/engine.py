"""The front's engine: owns a rank group, admits requests, walks ticks, yields tokens.

It holds what must not be lost (tokens, sampling, page tables); ranks hold what can be computed
again. Knows nothing of text: stop strings and detokenising are the caller's, through `cancel`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from msgspec.structs import replace

from anyshard.batch import (
    Batch,
    Sequence,
    Tick,
    ahead,
    ahead_tick,
    apply,
    end_session,
    next_tick,
    ready,
    rewind,
    take_waiting,
)
from anyshard.binder import FaultCode
from anyshard.comm.control import PAGE, ROW, FrontControl, Result
from anyshard.config import ModelConfig, Profile
from anyshard.epoch import EngineOptions, plan_epoch, rank_threads
from anyshard.errors import PeerLost, PromptTooLong
from anyshard.fidelity.log import DigestLog, RunDigests
from anyshard.flight import FinishReason, Flight, Outcome, Said, outcome
from anyshard.launcher import RankGroup, Start
from anyshard.layout import Layout, wire_boundaries
from anyshard.ledger import StepShape, wire_cost
from anyshard.model import program
from anyshard.ops import choose_body
from anyshard.ops.exact import F32
from anyshard.pages import PagePool, pages_for
from anyshard.request import Request, Sampling
from anyshard.speculate import Speculator
from anyshard.trace import RankTrace, Run
from anyshard.worker import (
    ROW_DRAFT,
    ROW_LOGITS,
    ROW_SAMPLE,
    ROW_WHOLE,
)

POLL_S: Final = 0.25  # between looks at the rank group, where results never keep the front waiting

__all__ = [
    "Engine",
    "Event",
    "FinishReason",
]


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
    """Seconds spent in steps and the tokens that they moved; a mixed step counts by its rows.
    Drafts count where they were right."""

    prefill_s: float = 0.0
    prefill_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0


class Engine:
    """One epoch of a rank group, and the requests in it.

    `epoch` grows with every engine on the same group; `cores` are those that the ranks share.
    A list given as `steps` receives the shape of every step, for the ledger. `speculator`: whose
    drafts are run beside (`speculate`), as many as `options.drafts` allows.

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
        speculator: Speculator | None = None,
    ) -> None:
        assert (speculator is not None) == (options.drafts > 0)
        assert options.windows == (1 if speculator is None else speculator.windows)
        assert speculator is None or not options.record, "what is run and does not count"
        self.speculator = speculator
        self.group, self.config, self.profile = group, config, profile
        self.layout, self.options, self.cores = layout, options, cores
        self.steps = [] if steps is None and options.trace_events else steps
        self.timings = Timings()
        world = layout.world
        self.body = choose_body(options.kernels)
        here = options.hosts.count(0) or world  # ranks of this host
        self.threads = rank_threads(self.body, options.threads, cores=cores, ranks=here)
        self.crowded = here * self.threads > cores
        self.programs = [program(config, profile, layout, rank) for rank in range(world)]
        plan = plan_epoch(
            self.programs,
            options,
            body=self.body,
            threads=self.threads,
            spin=not self.crowded,
        )
        self.comm, self.limits, self.schedule = plan.ranks.comm, plan.limits, plan.schedule
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
        self._uncollected: tuple[Flight, Result, frozenset[int]] | None = None
        self._slot = 0  # of the schedule's first stage, which comes next
        self._in_flight: deque[Flight] = deque()
        self._void: set[int] = set()  # frames of them
        self._result_at = 0.0  # when the last one was read
        self._polled_at = 0.0
        self._spent_s = 0.0  # over it
        self._run_at = 0.0  # when that of one that was not void was
        self._drafted_s = 0.0  # over all drafts
        self._drafting_s = 0.0  # over drafts of the next frame
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

    def traced(self, name: str) -> Run:
        """What every rank did when, since the start. Needs `EngineOptions.trace_events`."""
        assert self.steps is not None
        views, ranks = self.control.statuses(), []
        for part, view in zip(self.programs, views, strict=True):
            events, lost = self.control.events(part.rank)
            cost = wire_cost(part, self.steps)
            ranks.append(
                RankTrace(
                    part.rank,
                    part.stage,
                    events,
                    lost,
                    (view.wire_bytes["hop"], view.wire_messages["hop"]),
                    (cost.hop_bytes - view.spared_bytes, cost.hop_messages),
                )
            )
        return Run(
            name,
            tuple(ranks),
            tuple(stop - start for start, stop in self.layout.layers),
            self.options.schedule,
            self.schedule.micro_batches,
            tuple(map(str, self.options.links)),
            tuple(link.delay_s for link in self.options.links),
            wire_boundaries(self.profile.wire, self.config.num_layers),
            "" if self.speculator is None else self.speculator.figures.text(),
        )

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
            if (tick := self._next_tick()) is not None:
                self._send(tick, slot=self._slot - 1)
                continue
            if (tick := self._ahead_tick()) is not None:
                self._send(tick, slot=-1)
                continue
            if not self._in_flight:
                assert not self.batch.busy, "submit refuses what the pages never hold"
                return
            before = self.timings.prefill_tokens
            flight, result, codes = self._receive()
            if on_prefill is not None and self.timings.prefill_tokens > before:
                under_way = sum(each.prompt_rows for each in self._in_flight)
                unread = self.batch.unread + under_way + self._queued_tokens
                done = self.timings.prefill_tokens - read
                on_prefill(done, done + unread)
            for event in self._finish(flight, result, codes):
                if event.request_id not in self._cancelled:  # by whom an earlier one was shown
                    yield event

    def _next_tick(self) -> Tick | None:
        """Rows for the schedule's next slot that has some; None if a result must come first."""
        entries = self.schedule.entries
        for _ in entries:
            under_way = [each.slot for each in self._in_flight if not each.is_ahead]
            if not self.schedule.may_enter(self._slot, under_way):
                return None
            micro_batch = entries[self._slot % len(entries)]
            tick, self.batch = next_tick(
                self.batch,
                self.limits,
                micro_batch=micro_batch,
                drafts=self._drafts(ready(self.batch, micro_batch=micro_batch)),
            )
            self._slot += 1
            if tick.rows:
                return tick
        return None

    def _ahead_tick(self) -> Tick | None:
        """Rows of drafts behind those that are under way; None if they are better waited for.

        Only while stages would idle: where as many frames as there are stages hold rows that are
        certain, all work on those.
        """
        certain = sum(not flight.is_ahead for flight in self._in_flight)
        free = self.options.windows - 1 - (len(self._in_flight) - certain)
        if free < 1 or not self._in_flight or certain >= self.layout.pp:
            return None
        drafts = self._drafts(ahead(self.batch), are_ahead=True)
        if not drafts:
            return None
        tick, self.batch = ahead_tick(self.batch, drafts)
        return tick

    def _drafts(
        self, sequences: tuple[Sequence, ...], *, are_ahead: bool = False
    ) -> dict[int, tuple[int, ...]]:
        """By slot, for a tick of sequences that are ready, or ahead."""
        if self.speculator is None:
            return {}
        slots = {sequence.request_id: sequence.slot for sequence in sequences}
        room = {
            s.request_id: s.request.max_tokens - s.emitted - 1 - len(s.drafted) for s in sequences
        }
        now_s = time.monotonic()
        filled = self.speculator.fill(
            room, rows=self.limits.drafts, now_s=now_s, are_ahead=are_ahead
        )
        spent_s = time.monotonic() - now_s
        self._drafting_s += spent_s
        self._drafted_s += spent_s
        return {slots[request_id]: tokens for request_id, tokens in filled.items()}

    def _open_logs(self, tick: Tick) -> None:
        if self._log is None:
            return
        for request_id, request in ((s.request_id, s.request) for s in tick.admitted):
            length = len(request.prompt) + request.max_tokens
            self._log.open(request_id, positions=length - 1, emitted=request.max_tokens)

    def _drop_cancelled(self) -> None:
        if not self._cancelled:
            return
        if self.speculator is not None:
            for request_id in self._cancelled:
                self.speculator.end(request_id)
        gone = frozenset(s.slot for s in self.batch.running if s.request_id in self._cancelled)
        self.batch = replace(self.batch, running=tuple(map(self._settled, self.batch.running)))
        waiting = tuple(w for w in self.batch.waiting if w[0] not in self._cancelled)
        self.batch = apply(replace(self.batch, waiting=waiting), {}, gone)
        self._void_frames()
        if self._queue and max(self._cancelled) >= self._queue[0][0]:  # ids grow along the queue
            kept = [each for each in self._queue if each[0] not in self._cancelled]
            self._queue = deque(kept)
            self._queued_tokens = sum(len(request.prompt) for _, request in kept)
        self._cancelled.clear()

    def _settled(self, sequence: Sequence) -> Sequence:
        """A cancelled one without the rows that are under way: what they store may yet fail, and a
        session goes on from what it has stored."""
        if sequence.request_id not in self._cancelled:
            return sequence
        under_way = [
            row.position
            for flight in self._in_flight
            for row in flight.tick.rows
            if flight.sequences[row.slot].request_id == sequence.request_id
        ]
        return replace(sequence, computed=min([sequence.computed, *under_way]))

    def _send(self, tick: Tick, *, slot: int) -> None:
        """Give a tick to the ranks. slot: of the schedule; -1 for drafts alone."""
        self._open_logs(tick)
        sequences = {s.slot: s for s in self.batch.running}
        if not self._in_flight:
            self._result_at = time.monotonic() - self._drafting_s
        self._drafting_s = 0.0
        frame = self.control.send_frame(*self._frame(tick, sequences))
        self._in_flight.append(
            Flight(frame, slot, tick, sequences, time.monotonic(), self._drafted_s)
        )
        self._collect_digests()
        if self.steps is not None:
            sampled = [sequences[row.slot].request for row in tick.rows if row.through_head]
            whole = any(request.needs_logits for request in sampled)
            self.steps.append(StepShape(len(tick.rows), len(sampled), whole))

    def _receive(self) -> tuple[Flight, Result, list[int]]:
        """Wait for the sampler's next result; keeps the clock.

        Also the earliest fault code of each row on any rank, in a recorded run; else nothing.
        """
        codes: list[int] = []
        flight = self._in_flight[0]
        result = self.control.wait_result(
            flight.frame, deadline_s=self.options.deadline_s, poll=self.group.poll
        )
        if time.monotonic() - self._polled_at > POLL_S:
            self.group.poll()
            self._polled_at = time.monotonic()
        self._in_flight.popleft()
        self._void.discard(flight.frame)
        if self._log is not None:
            self._collect_digests()
            running = frozenset(s.request_id for s in self.batch.running)
            self._uncollected = (flight, result, running)
            if any(result.faults):
                rows = len(flight.tick.rows)
                codes = self._log.faults(self.control.wait_digests(flight.frame, rows))
        now = time.monotonic()
        self._account(flight, now - self._result_at)
        self._spent_s = now - self._result_at
        self._result_at = now
        return flight, result, codes

    def _collect_digests(self) -> None:
        """Take the last result's digests into the log: while the next frames run, which leave their
        slot alone, or when somebody asks for them."""
        if self._log is not None and self._uncollected is not None:
            flight, result, running = self._uncollected
            parts = self.control.wait_digests(result.sequence, len(flight.tick.rows))
            self._log.add(flight.recorded_rows(result, running), parts)
            self._uncollected = None

    def _frame(
        self, tick: Tick, sequences: dict[int, Sequence]
    ) -> tuple[np.ndarray, np.ndarray | None, bytes]:
        rows = self._rows[: len(tick.rows)]
        for index, row in enumerate(tick.rows):
            request = sequences[row.slot].request
            flags = ROW_DRAFT if row.is_draft else 0
            if row.through_head:
                flags |= ROW_SAMPLE
                flags |= ROW_LOGITS if row.logits else 0
                flags |= ROW_WHOLE if request.needs_logits else 0
            generation = sequences[row.slot].generation
            rows[index] = (row.slot, row.position, row.token, generation, flags)
        news = [(s.slot, block, page) for s in tick.admitted for block, page in enumerate(s.pages)]
        pages = np.array(news, PAGE) if news else None
        drawn: dict[int, Sampling] = {s.slot: s.request.sampling for s in tick.admitted}
        note = msgspec.msgpack.encode(drawn) if drawn else b""
        return rows, pages, note

    def _account(self, flight: Flight, seconds: float) -> None:
        rows, prefill = flight.certain_rows, flight.prompt_rows
        if flight.is_ahead:
            self.timings.decode_s += seconds
            return
        self.timings.prefill_s += seconds * prefill / rows
        self.timings.decode_s += seconds * (rows - prefill) / rows
        self.timings.prefill_tokens += prefill
        self.timings.decode_tokens += rows - prefill

    def _finish(self, flight: Flight, result: Result, codes: list[int]) -> list[Event]:
        """Apply a result: append tokens, free what ended, and say what happened.

        codes: fault codes of rows, if they are known from all ranks. Rows of a request that has
        ended meanwhile are passed over.
        """
        by_slot = {s.slot: s for s in self.batch.running}
        found = outcome(flight, result, by_slot)
        events = [self._event(each, result, codes) for each in found.said]
        self._tell_speculator(flight, by_slot, found, is_void=result.is_void)
        self.batch = apply(
            self.batch,
            {slot: tuple(tokens) for slot, tokens in found.drawn.items()},
            found.finished,
        )
        for slot in found.again:
            (tokens,) = (s.tokens for s in self.batch.running if s.slot == slot)
            self.batch = rewind(self.batch, slot, computed=len(tokens) - 1, tokens=tokens)
        for said in found.said:  # what it stored may be NaN
            if said.fault is not None and said.sequence.request.session is not None:
                self.end_session(said.sequence.request.session)
        self._void_frames()
        return events

    def _event(self, said: Said, result: Result, codes: list[int]) -> Event:
        request_id = said.sequence.request_id
        if said.fault is None:
            return Event(request_id, said.token, said.logits, said.finish)
        code = codes[said.fault] if codes else result.faults[said.fault]
        code = code if codes else self._earliest(code, result.sequence)
        name = FaultCode.name(code, self.config.num_layers)
        return Event(request_id, None, None, "fault", fault=name)

    def _void_frames(self) -> None:
        """Let ranks go over frames of which nobody waits for any row."""
        if self.options.windows == 1:
            return
        running = {s.slot: s for s in self.batch.running}
        for flight in self._in_flight:
            if flight.frame not in self._void and not any(
                flight.awaited(row, running) for row in flight.tick.rows
            ):
                self._void.add(flight.frame)
                with suppress(PeerLost):  # whoever waits for a result will find it out
                    self.control.void(flight.frame)

    def _tell_speculator(
        self, flight: Flight, by_slot: dict[int, Sequence], found: Outcome, *, is_void: bool
    ) -> None:
        """What became of drafts; their rows that were right count as decoded."""
        self.timings.decode_tokens += found.drafts_right
        speculator = self.speculator
        if speculator is None:
            return
        running = {sequence.request_id for sequence in by_slot.values()}
        for sequence in flight.tick.admitted:
            if sequence.request_id in running:
                request = sequence.request
                speculator.begin(sequence.request_id, request.prompt, sampling=request.sampling)
        for slot, tokens in found.drawn.items():
            request_id = by_slot[slot].request_id
            speculator.came_out(
                request_id,
                tokens,
                found.spreads.get(slot, ()),
                now_s=self._result_at,
                is_over=slot in found.finished,
                is_ahead=flight.is_ahead,
            )
        for slot in found.again:
            speculator.drop(by_slot[slot].request_id)
        rows = flight.tick.rows
        if is_void:
            speculator.voided(sum(row.is_draft for row in rows))
        if found.drawn:
            under_way = (rows, *(each.tick.rows for each in self._in_flight))
            speculator.saw(sum(map(len, under_way)))
        if not flight.prompt_rows:
            self._tell_costs(speculator, flight, found, is_void=is_void)
        if not is_void:
            self._run_at = self._result_at
        for slot in found.finished:
            speculator.end(by_slot[slot].request_id)

    def _tell_costs(
        self, speculator: Speculator, flight: Flight, found: Outcome, *, is_void: bool
    ) -> None:
        """What the frame took: of one whose result lay unread while drafts were made, nothing."""
        took_s = self._result_at - flight.sent_s
        is_clear = self._drafted_s - flight.drafted_s < took_s / 10
        is_behind = flight.sent_s < self._run_at
        speculator.costs.step(
            rows=0 if is_void or not is_clear else len(flight.tick.rows),
            tokens=sum(map(len, found.drawn.values())),
            seconds=self._spent_s,
            latency_s=None if flight.is_ahead else took_s,
            spacing_s=self._result_at - self._run_at if is_behind else None,
        )

    def _earliest(self, code: int, step: int) -> int:
        """The earliest fault code that any rank marked in this step.

        Several requests that fail in one step are all named by the earliest.
        """
        views = self.control.statuses()
        return min([code, *(view.faults[step] for view in views if step in view.faults)])

    def close(self) -> None:
        """Tell the ranks to stop and end them."""
        self.control.send_stop()
        self.group.end()
