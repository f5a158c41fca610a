"""Cells: ways to run one request, each against the unsplit run, and beside a witness.

A cell's *digest* is sha256 over the logit rows of the tokens emitted. Its *witness* is the share
of those logits that change when the cell and the unsplit run are both computed in the order of an
ordinary engine on that axis (`verify/naive.py`), fed the same tokens.

    outcome = run_cell(group, model, Cell(axis="tp", tp=3), epoch=2)
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from anyshard.comm.control import StatusView
from anyshard.config import ModelConfig, Profile
from anyshard.engine import Engine, EngineOptions, Event
from anyshard.launcher import RankGroup
from anyshard.layout import Layout, plan
from anyshard.ledger import StepShape, WireCost, wire_cost
from anyshard.ops import KernelChoice
from anyshard.request import Request, Sampling
from anyshard.verify.driver import Driver
from anyshard.verify.naive import (
    NaiveChunk,
    NaivePp,
    NaiveTpOfFour,
    NaiveTpPp,
    SplitByRows,
    SplitByThread,
)
from anyshard.verify.prompt import hashed_tokens
from anyshard.worker import Worker

__all__ = [
    "GREEDY",
    "NAIVE",
    "NUM_NEIGHBOURS",
    "NUM_TOKENS",
    "PROMPT_TOKENS",
    "Axis",
    "Cell",
    "Model",
    "Outcome",
    "forced_logits",
    "neighbours",
    "run_cell",
    "shuffled_pages",
]

F32 = NDArray[np.float32]
Axis = Literal["base", "tp", "pp", "mixed", "chunk", "threads", "batch", "comm", "body", "pages"]
Place = Literal["alone", "first", "last", "middle"]

PROMPT_TOKENS = 307  # a chunk of 300 leaves 7 rows, blocks of 32 leave 19
NUM_TOKENS = 32
NUM_NEIGHBOURS = 16
WHOLE = 512  # a chunk that holds any prompt here
GREEDY = Sampling()
DEADLINE_S = 300.0  # a reference body is slow, and silence is not what is tested here

NAIVE: Mapping[Axis, type[Worker]] = {
    "tp": NaiveTpOfFour,
    "pp": NaivePp,
    "mixed": NaiveTpPp,
    "chunk": NaiveChunk,
    "threads": SplitByThread,
    "batch": SplitByRows,
}


@dataclass(frozen=True)
class Model:
    """A model as the front knows it, and the request that every cell runs."""

    name: str
    config: ModelConfig
    profile: Profile
    prompt: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way to run the request. `place`: where it stands in a batch of 17; "alone": no batch.

    prompt_tokens, num_tokens: how much of the request is run (the baseline runs the same).
    """

    axis: Axis
    tp: int = 1
    pp: int = 1
    heads: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None
    chunk: int = WHOLE
    threads: int = 1
    place: Place = "alone"
    kernels: KernelChoice = "auto"
    comm: Literal["threads", "shm", "torch"] = "threads"
    shuffled: bool = False
    poison: bool = False
    sampling: Sampling = GREEDY
    prompt_tokens: int = PROMPT_TOKENS
    num_tokens: int = NUM_TOKENS

    @property
    def name(self) -> str:
        """Short, as in a table."""
        parts = [f"tp{self.tp}"] if self.heads is None else [f"heads {_commas(self.heads)}"]
        parts.append(f"pp{self.pp}" if self.layers is None else f"layers {_commas(self.layers)}")
        if self.chunk != WHOLE:
            parts.append(f"chunk {self.chunk}")
        if self.threads > 1:
            parts.append(f"threads {self.threads}")
        if self.place != "alone":
            parts.append(f"{self.place} of {NUM_NEIGHBOURS + 1}")
        if self.kernels != "auto":
            parts.append(self.kernels)
        if self.comm != "threads" or self.axis == "comm":
            parts.append(self.comm)
        parts += ["shuffled pages"] if self.shuffled else []
        parts += ["poisoned pages"] if self.poison else []
        if not self.sampling.greedy:
            parts.append(f"T={self.sampling.temperature:g}")
        if (self.prompt_tokens, self.num_tokens) != (PROMPT_TOKENS, NUM_TOKENS):
            parts.append(f"{self.prompt_tokens}+{self.num_tokens} tokens")
        return " ".join(parts)

    def layout(self, model: Model) -> Layout:
        """The cut that it asks for."""
        return plan(
            model.config,
            tp=self.tp,
            pp=self.pp,
            heads=self.heads,
            layers=self.layers,
            leaf=model.profile.leaf,
        )

    def unsplit(self) -> Cell:
        """The baseline: the same request on one rank, one thread, in one chunk, alone."""
        return Cell(
            axis="base",
            sampling=self.sampling,
            prompt_tokens=self.prompt_tokens,
            num_tokens=self.num_tokens,
        )


@dataclass(frozen=True)
class Outcome:
    """What a cell came to. others: digests of the neighbours, by prompt."""

    digest: str
    tokens: tuple[int, ...]
    logits: F32
    fault: str | None
    others: dict[tuple[int, ...], str]
    statuses: list[StatusView]
    costs: list[WireCost]
    wire_bytes_per_token: float
    seconds: float


def _commas(numbers: Iterable[int]) -> str:
    return ",".join(str(number) for number in numbers)


def neighbours(model: Model) -> list[tuple[int, ...]]:
    """Sixteen prompts of unequal length, none like another."""
    vocab = model.config.vocab
    return [hashed_tokens(1 + 5 * i, vocab, seed=i) for i in range(1, NUM_NEIGHBOURS + 1)]


def _requests(model: Model, cell: Cell, *, want_logits: bool) -> list[Request]:
    """The batch of a cell, in submission order."""
    mine = Request(
        prompt=model.prompt[: cell.prompt_tokens],
        max_tokens=cell.num_tokens,
        sampling=cell.sampling,
        want_logits=want_logits,
    )
    if cell.place == "alone":
        return [mine]
    others = [
        Request(prompt=prompt, max_tokens=cell.num_tokens - i % 5, want_logits=want_logits)
        for i, prompt in enumerate(neighbours(model))
    ]
    match cell.place:
        case "first":
            return [mine, *others]
        case "last":
            return [*others[::-1], mine]
        case _:
            return [*others[:7], mine, *others[7:]]


def shuffled_pages(count: int) -> tuple[int, ...]:
    """0..count-1 in an order without pattern."""
    return tuple(sorted(range(count), key=lambda page: hashlib.sha256(b"%d" % page).digest()))


@dataclass
class _Collected:
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    tokens: list[int] = field(default_factory=list)
    logits: list[F32] = field(default_factory=list)
    fault: str | None = None

    def add(self, event: Event) -> None:
        if event.fault is not None:
            self.fault = event.fault
            self.digest.update(b"fault")
            return
        assert event.token is not None
        self.tokens.append(event.token)
        if event.logits is not None:
            self.digest.update(event.logits.astype("<f4").tobytes())
            self.logits.append(event.logits.copy())


def run_cell(
    group: RankGroup, model: Model, cell: Cell, *, epoch: int = 1, want_logits: bool = True
) -> Outcome:
    """Run the request through the engine, ignoring any end of text, as an epoch of `group`.

    Without `want_logits` only tokens come back, and greedy ranks exchange (value, id) pairs
    instead of logits.

    Raises: PeerLost.
    """
    start = time.monotonic()
    requests = _requests(model, cell, want_logits=want_logits)
    steps: list[StepShape] = []
    length = cell.prompt_tokens + cell.num_tokens
    pages = len(requests) * -(-length // model.profile.kv_block)
    engine = Engine(
        group,
        model.config,
        model.profile,
        cell.layout(model),
        EngineOptions(
            kernels=cell.kernels,
            comm=cell.comm,
            threads=cell.threads,
            chunk=cell.chunk,
            max_num_seqs=len(requests),
            max_model_len=length,
            deadline_s=DEADLINE_S,
            page_order=shuffled_pages(pages) if cell.shuffled else None,
            poison=cell.poison,
        ),
        cores=len(os.sched_getaffinity(0)),
        epoch=epoch,
        steps=steps,
    )
    collected = {engine.submit(request): _Collected() for request in requests}
    for event in engine.run():
        collected[event.request_id].add(event)
    statuses = engine.control.statuses()
    costs = [wire_cost(each, steps) for each in engine.programs]
    engine.close()
    found = {request.prompt: got for request, got in zip(requests, collected.values(), strict=True)}
    mine = found.pop(model.prompt[: cell.prompt_tokens])
    num_rows = sum(step.rows for step in steps)
    return Outcome(
        digest=mine.digest.hexdigest(),
        tokens=tuple(mine.tokens),
        logits=np.array(mine.logits, np.float32),
        fault=mine.fault,
        others={prompt: got.digest.hexdigest() for prompt, got in found.items()},
        statuses=statuses,
        costs=costs,
        wire_bytes_per_token=sum(cost.bytes for cost in costs) / num_rows,
        seconds=time.monotonic() - start,
    )


def forced_logits(
    group: RankGroup, model: Model, cell: Cell, tokens: Sequence[int], *, epoch: int = 1
) -> F32:
    """Logits [n, V] of the n rows that emitted `tokens`, whatever a naive rank would have drawn.

    The prompt runs in the cell's chunks, then one row a frame; in a batch cell all 17 decode.
    """
    prompt = model.prompt[: cell.prompt_tokens]
    others = [] if cell.place == "alone" else neighbours(model)
    vocab = model.config.vocab
    with Driver(
        model,
        group=group,
        epoch=epoch,
        tp=cell.tp,
        pp=cell.pp,
        heads=cell.heads,
        layers=cell.layers,
        kernels=cell.kernels,
        threads=cell.threads,
        rows_max=max(len(prompt), NUM_NEIGHBOURS + 1),
        num_slots=1 + len(others),
        max_model_len=len(prompt) + len(tokens),
        deadline_s=DEADLINE_S,
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
