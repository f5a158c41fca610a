"""Cells: ways to run one request, each against the unsplit run, and beside a witness.

A cell's *digest* is sha256 over its logit rows: of the prompt positions that it is asked for, then
of every token emitted. In a batch every other request has one too, of its emitted rows. A cell's
*witness* is the share of logits that change when the cell and the unsplit run are both computed in
the order of an ordinary engine on that axis (`verify/naive.py`), fed the same tokens.

    outcome = run_cell(group, model, Cell(axis="tp", tp=3), epoch=2)
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from anyshard.capture import Capture
from anyshard.comm.control import StatusView
from anyshard.comm.link import LinkSpec
from anyshard.config import ModelConfig, Profile
from anyshard.engine import Engine, Event
from anyshard.epoch import EngineOptions
from anyshard.launcher import RankGroup
from anyshard.layout import KvShard, Layout, plan
from anyshard.ledger import StepShape, WireCost, wire_cost
from anyshard.ops import KernelChoice
from anyshard.request import Request, Sampling
from anyshard.schedule import ScheduleKind
from anyshard.trace import Run
from anyshard.verify.driver import Driver
from anyshard.verify.naive import Order
from anyshard.verify.prompt import hashed_tokens

__all__ = [
    "BATCH",
    "DEADLINE_S",
    "GREEDY",
    "NUM_TOKENS",
    "PROMPT_TOKENS",
    "WHOLE",
    "Axis",
    "Cell",
    "Model",
    "Neighbour",
    "Outcome",
    "alone",
    "batch_order",
    "first_tokens",
    "forced_logits",
    "neighbour_prompt",
    "neighbours",
    "run_cell",
    "shuffled_pages",
]

F32 = NDArray[np.float32]
Axis = Literal["base", "tp", "pp", "mixed", "chunk", "threads", "batch", "comm", "body", "pages"]
Place = Literal["first", "last", "middle"]

PROMPT_TOKENS = 307  # a chunk of 300 leaves 7 rows, blocks of 32 leave 19
NUM_TOKENS = 32
NEIGHBOUR_TOKENS = 81
BATCH = 17  # requests of a cell that has neighbours, if it does not say
WHOLE = 1 << 16  # a chunk that holds any prompt
GREEDY = Sampling()
TRACE_EVENTS = 1 << 13  # kept of each rank of a cell
DEADLINE_S = 30.0  # without a sign of life; an op that computes for long gives them


@dataclass(frozen=True)
class Model:
    """A model as the front knows it, and the request that every cell runs."""

    name: str
    config: ModelConfig
    profile: Profile
    prompt: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way to run the request. `place`: where it stands in a batch of `batch` requests.

    prompt_tokens, num_tokens: how much of the request is run (the baseline runs the same); a
    `check.RequestShape` puts all of its request here, or less where the cell is_short.
    prompt_logits: how many prompt positions before the last are compared, besides the tokens
    emitted. comm "auto": the wire of the rank group that runs it. is_short: it runs at most that
    much of any request, which its name says, for its digest is another. schedule, micro_batches,
    links: as in `epoch.EngineOptions`.
    """

    axis: Axis
    tp: int = 1
    pp: int = 1
    heads: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None
    kv_shard: KvShard = "heads"
    chunk: int = WHOLE
    threads: int = 1
    batch: int = 1
    place: Place = "last"
    kernels: KernelChoice = "auto"
    comm: Literal["auto", "threads", "shm", "torch"] = "auto"
    shuffled: bool = False
    poison: bool = False
    sampling: Sampling = GREEDY
    prompt_tokens: int = PROMPT_TOKENS
    num_tokens: int = NUM_TOKENS
    prompt_logits: int = 0
    is_short: bool = False
    schedule: ScheduleKind = "continuous"
    micro_batches: int | None = None
    links: tuple[LinkSpec, ...] = ()

    @property
    def name(self) -> str:
        """Short, as in a table; its first word is how `--layouts` writes it."""
        parts = [self.split]
        if self.chunk != WHOLE:
            parts.append(f"chunk {self.chunk}")
        if self.threads > 1:
            parts.append(f"threads {self.threads}")
        if self.batch > 1:
            parts.append(f"{self.place} of {self.batch}")
        if self.kernels != "auto":
            parts.append(self.kernels)
        if self.comm != "auto":
            parts.append(self.comm)
        if self.micro_batches is not None:
            parts.append(f"{self.schedule} {self.micro_batches}")
        parts += ["links"] if self.links else []
        parts += ["shuffled"] if self.shuffled else []
        parts += ["poisoned"] if self.poison else []
        parts += ["pages"] if self.shuffled or self.poison else []
        if not self.sampling.greedy:
            parts.append(f"T={self.sampling.temperature:g}")
        if self.is_short:
            parts.append(f"({self.prompt_tokens}+{self.num_tokens - 1} tokens)")
        return " ".join(parts)

    @property
    def split(self) -> str:
        """Only how the model is cut: tp3pp2, heads7+2, layers22+8, tp1 for not at all; tp3pp2seq
        where ranks split the sequence."""
        if self.heads is not None:
            wide = f"heads{'+'.join(map(str, self.heads))}"
        else:
            wide = f"tp{self.tp}" if self.tp > 1 else ""
        if self.layers is not None:
            deep = f"layers{'+'.join(map(str, self.layers))}"
        else:
            deep = f"pp{self.pp}" if self.pp > 1 else ""
        return (wide + deep or "tp1") + ("seq" if self.kv_shard == "sequence" else "")

    def layout(self, model: Model) -> Layout:
        """The cut that it asks for."""
        return plan(
            model.config,
            tp=self.tp,
            pp=self.pp,
            heads=self.heads,
            layers=self.layers,
            kv_shard=self.kv_shard,
            wire=model.profile.wire,
            leaf=model.profile.leaf,
        )

    @property
    def tokens_max(self) -> int:
        """Prompt and answer of its longest request."""
        longest = max(self.prompt_tokens, NEIGHBOUR_TOKENS if self.batch > 1 else 0)
        return longest + self.num_tokens

    @property
    def rows_compared(self) -> int:
        """Logit rows of it that are held against the unsplit run's."""
        return self.prompt_logits + self.num_tokens

    def unsplit(self) -> Cell:
        """The baseline: the same request on one rank, one thread, in one chunk, alone."""
        return Cell(
            axis="base",
            sampling=self.sampling,
            prompt_tokens=self.prompt_tokens,
            num_tokens=self.num_tokens,
            prompt_logits=self.prompt_logits,
        )


@dataclass(frozen=True)
class Neighbour:
    """What another request of a batch came to: sha256 over its emitted logit rows, its tokens."""

    digest: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """What a cell came to.

    logits: float32 [prompt_logits + num_tokens, V], in position order; digest: sha256 over them.
    others: by their index in `neighbours`, for of a small vocabulary prompts may be alike.
    wire_bytes_per_token: of all ranks, per row run, without the logits gathered to be compared.
    """

    digest: str
    tokens: tuple[int, ...]
    logits: F32
    fault: str | None
    others: dict[int, Neighbour]
    statuses: list[StatusView]
    costs: list[WireCost]
    wire_bytes_per_token: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    seconds: float


def neighbours(model: Model, count: int = BATCH - 1) -> list[tuple[int, ...]]:
    """`count` prompts of 6 to NEIGHBOUR_TOKENS tokens; of one token, some are alike."""
    return [neighbour_prompt(model, index) for index in range(count)]


def neighbour_prompt(model: Model, index: int) -> tuple[int, ...]:
    """One of `neighbours`."""
    lengths = range(6, NEIGHBOUR_TOKENS + 1, 5)
    return hashed_tokens(lengths[index % 16], model.config.vocab, seed=index + 1)


def alone(model: Model, cell: Cell, index: int) -> tuple[Model, Cell]:
    """A neighbour of the cell's batch by itself: the model that reads it, and its unsplit cell."""
    prompt = neighbour_prompt(model, index)
    num_tokens = max(1, cell.num_tokens - index % 5)
    unsplit = Cell(axis="base", prompt_tokens=len(prompt), num_tokens=num_tokens)
    return replace(model, prompt=prompt), unsplit


def batch_order(cell: Cell) -> list[int | None]:
    """Whose slot is which: indices in `neighbours` as they are submitted, None for the request."""
    others = list(range(cell.batch - 1))
    match cell.place:
        case "first":
            return [None, *others]
        case "last":
            return [*others[::-1], None]
        case _:
            before = cell.batch // 2 - 1
            return [*others[:before], None, *others[before:]]


def _requests(model: Model, cell: Cell, *, want_logits: bool) -> list[tuple[int | None, Request]]:
    """The batch of a cell in `batch_order`."""
    mine = Request(
        prompt=model.prompt[: cell.prompt_tokens],
        max_tokens=cell.num_tokens,
        sampling=cell.sampling,
        want_logits=want_logits,
        prompt_logits=cell.prompt_logits,
    )

    def other(index: int) -> Request:
        reads, each = alone(model, cell, index)
        return Request(prompt=reads.prompt, max_tokens=each.num_tokens, want_logits=want_logits)

    return [(i, mine if i is None else other(i)) for i in batch_order(cell)]


def shuffled_pages(count: int) -> tuple[int, ...]:
    """0..count-1 in an order without pattern."""
    return tuple(sorted(range(count), key=lambda page: hashlib.sha256(b"%d" % page).digest()))


@dataclass
class _Collected:
    """Of one request; the rows themselves only if they are kept, or a batch would fill memory."""

    keeps_rows: bool
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    tokens: list[int] = field(default_factory=list)
    logits: list[F32] = field(default_factory=list)
    fault: str | None = None

    def add(self, event: Event) -> None:
        if event.fault is not None:
            self.fault = event.fault
            self.digest.update(b"fault")
            return
        if event.token is not None:
            self.tokens.append(event.token)
        if event.logits is not None:
            self.digest.update(event.logits.astype("<f4").tobytes())
            if self.keeps_rows:
                self.logits.append(event.logits.copy())


def _options(
    model: Model, cell: Cell, *, num_seqs: int, length: int, deadline_s: float
) -> EngineOptions:
    """Of an epoch of the cell that holds so many requests, none longer than `length`."""
    pages = num_seqs * -(-length // model.profile.kv_block)
    return EngineOptions(
        kernels=cell.kernels,
        comm=cell.comm,
        threads=cell.threads,
        chunk=min(cell.chunk, length),
        max_num_seqs=num_seqs,
        max_model_len=length,
        deadline_s=deadline_s,
        schedule=cell.schedule,
        micro_batches=cell.micro_batches,
        links=cell.links,
        page_order=shuffled_pages(pages) if cell.shuffled else None,
        poison=cell.poison,
    )


def _engine(
    group: RankGroup,
    model: Model,
    cell: Cell,
    options: EngineOptions,
    *,
    epoch: int,
    steps: list[StepShape] | None = None,
) -> Engine:
    return Engine(
        group,
        model.config,
        model.profile,
        cell.layout(model),
        options,
        cores=len(os.sched_getaffinity(0)),
        epoch=epoch,
        steps=steps,
    )


def run_cell(
    group: RankGroup,
    model: Model,
    cell: Cell,
    *,
    epoch: int = 1,
    want_logits: bool = True,
    capture: Capture | None = None,
    deadline_s: float = DEADLINE_S,
    on_trace: Callable[[Run], None] | None = None,
) -> Outcome:
    """Run the request through the engine, ignoring any end of text, as an epoch of `group`.

    Without `want_logits` only tokens come back, and greedy ranks exchange (value, id) pairs
    instead of logits. capture: what the ranks copy (`capture.py`). on_trace: hears what they did
    when.

    Raises: PeerLost.
    """
    start = time.monotonic()
    requests = _requests(model, cell, want_logits=want_logits)
    steps: list[StepShape] = []
    options = _options(
        model, cell, num_seqs=len(requests), length=cell.tokens_max, deadline_s=deadline_s
    )
    options = replace(
        options,
        prompt_logits=cell.prompt_logits,
        capture=capture,
        trace_events=0 if on_trace is None else TRACE_EVENTS,
    )
    engine = _engine(group, model, cell, options, epoch=epoch, steps=steps)
    mine, others = _Collected(keeps_rows=True), dict[int, _Collected]()
    collected: dict[int, _Collected] = {}
    for index, request in requests:
        got = mine if index is None else others.setdefault(index, _Collected(keeps_rows=False))
        collected[engine.submit(request)] = got
    for event in engine.run():
        collected[event.request_id].add(event)
    statuses = engine.control.statuses()
    costs = [wire_cost(each, steps) for each in engine.programs]
    if on_trace is not None:
        on_trace(engine.traced(f"verify {cell.name}"))
    engine.close()
    timings, num_rows = engine.timings, sum(step.rows for step in steps)
    return Outcome(
        digest=mine.digest.hexdigest(),
        tokens=tuple(mine.tokens),
        logits=np.array(mine.logits, np.float32),
        fault=mine.fault,
        others={
            index: Neighbour(got.digest.hexdigest(), tuple(got.tokens))
            for index, got in sorted(others.items())
        },
        statuses=statuses,
        costs=costs,
        wire_bytes_per_token=sum(cost.bytes for cost in costs) / num_rows,
        prefill_tokens_per_s=timings.prefill_tokens / max(timings.prefill_s, 1e-9),
        decode_tokens_per_s=timings.decode_tokens / max(timings.decode_s, 1e-9),
        seconds=time.monotonic() - start,
    )


def first_tokens(
    group: RankGroup,
    model: Model,
    cell: Cell,
    lengths: Sequence[int],
    *,
    epoch: int = 1,
    deadline_s: float = DEADLINE_S,
) -> list[int | None]:
    """The token that follows each prefix of the prompt, by its length; None where it failed.

    The prefixes are greedy requests, one after another, that ask for no logits, so ranks exchange
    only (value, id) pairs, as for `chat`. Raises: PeerLost.
    """
    options = _options(model, cell, num_seqs=1, length=max(lengths) + 1, deadline_s=deadline_s)
    engine = _engine(group, model, cell, options, epoch=epoch)
    found: dict[int, int | None] = {}
    for length in lengths:
        found[engine.submit(Request(prompt=model.prompt[:length], max_tokens=1))] = None
    for event in engine.run():
        found[event.request_id] = event.token if event.fault is None else None
    engine.close()
    return list(found.values())


def forced_logits(
    group: RankGroup,
    model: Model,
    cell: Cell,
    tokens: Sequence[int],
    *,
    order: Order = "written",
    epoch: int = 1,
    deadline_s: float = DEADLINE_S,
) -> F32:
    """Logits [n, V] of the n rows that emit `tokens`, whatever ranks of `order` would have drawn.

    The prompt runs in the cell's chunks, then one row a frame; in a batch all decode. `order`
    is heeded by a group whose ranks run `naive.rank_of_any_order`.
    """
    prompt = model.prompt[: cell.prompt_tokens]
    others = neighbours(model, cell.batch - 1)
    vocab = model.config.vocab
    with Driver(
        model,
        group=group,
        epoch=epoch,
        order=order,
        tp=cell.tp,
        pp=cell.pp,
        heads=cell.heads,
        layers=cell.layers,
        kv_shard=cell.kv_shard,
        kernels=cell.kernels,
        threads=cell.threads,
        rows_max=max(len(prompt), *(len(other) for other in others), cell.batch),
        num_slots=1 + len(others),
        max_model_len=cell.tokens_max,
        deadline_s=deadline_s,
    ) as driver:
        for slot, other in enumerate(others, start=1):
            driver.step([(slot, position, token, False) for position, token in enumerate(other)])
        last = len(prompt) - 1
        found = [driver.logits(prompt, chunk=min(cell.chunk, len(prompt)), positions=[last])]
        for step, token in enumerate(tokens[:-1]):
            rows = [(0, last + 1 + step, token, True)]
            for slot, other in enumerate(others, start=1):
                rows.append((slot, len(other) + step, (token + slot) % vocab, False))
            found.append(driver.step(rows).logits)
    return np.concatenate(found)
