"""The invariance grid: cells of a split, each run for its digest and for its witness.

    model = the_model("adversarial-9-3")
    outcome = run_cell(model, Cell(axis="tp", tp=3))
    assert outcome.digest == baseline(model).digest
    assert witness(model, cell) > 0

A cell is one way to run the same request. Its *digest* is sha256 over the logit rows of the
tokens emitted. Its *witness* is the share of those logits that change when the cell and the
unsplit run are both computed in the order of an ordinary engine on that axis (tests/planted.py),
fed the same tokens. Cells that only place work have no order to be naive in: they carry a
planted bug, which must change the digest.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal, cast

import models
import msgspec
import numpy as np
import planted
from driver import Driver, demo, served
from numpy.typing import NDArray

from anyshard.checkpoint import WeightImage, open_checkpoint
from anyshard.comm.control import StatusView
from anyshard.config import ModelConfig
from anyshard.engine import Engine, EngineOptions, Event
from anyshard.launcher import Progress, RankGroup, RankMain, Seat, ThreadGroup, fork_launcher
from anyshard.layout import Layout, plan
from anyshard.ledger import StepShape, WireCost, wire_cost
from anyshard.model import Program, Weight, program
from anyshard.ops import KernelChoice
from anyshard.ops.storage import Panels, panel_cut
from anyshard.request import Request, Sampling
from anyshard.tokenizer import open_tokenizer
from anyshard.worker import RankPlan, Served, Worker, rank_main

F32 = NDArray[np.float32]
Axis = Literal["base", "tp", "pp", "mixed", "chunk", "threads", "batch", "comm", "body", "pages"]
Place = Literal["alone", "first", "last", "middle"]

PROMPT_TOKENS = 307  # a chunk of 300 leaves 7 rows, blocks of 32 leave 19
NUM_TOKENS = 32
NUM_NEIGHBOURS = 16
WHOLE = 512  # a chunk that holds any prompt here
GREEDY = Sampling()
SEEDED = Sampling(temperature=0.8, seed=20_240_229)

TEXT = """
A lighthouse keeper kept two books. In the first he wrote what he had seen: the ships, the hour,
the wind, the colour of the water. In the second he wrote what he had been told: that the company
would send oil in spring, that the harbour would be widened, that a cousin in the north had bought
a boat. For many years nobody asked for either book. Then a storm took the breakwater, and a man
from the insurance came up the stairs and asked which ships had passed on the night of the ninth.
The keeper opened the first book and read it out, line by line, and the man wrote it all down. He
asked next whether the company had known that the breakwater was weak. The keeper opened the second
book, read what stood there, closed it again and said that he had been told so, but had not seen
it. The man put away his pen. He said that in thirty years he had never met a witness who kept the
two apart, and that most people, when they were asked what they knew, answered with what they had
heard, and when they were asked what they had heard, answered with what they would have liked. The
keeper thought about that for a while. He said it was easy enough with two books, and hard with
one, and that the whole of his art was to have bought the second. Then he asked the man whether he
wanted tea, because the wind had turned and the boat would not come back for him before evening,
and they sat by the lamp and talked about boats until it was dark. When the man had gone the keeper
wrote in the first book that a visitor had come, and in the second that he had seemed content.
"""


@dataclass(frozen=True)
class Model:
    """A loaded model and the request that every cell runs."""

    name: str
    served: Served
    prompt: tuple[int, ...]

    @property
    def is_demo(self) -> bool:
        """The real one, whose cells take seconds."""
        return self.name == "demo"


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
            model.served.config,
            tp=self.tp,
            pp=self.pp,
            heads=self.heads,
            layers=self.layers,
            leaf=model.served.profile.leaf,
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
    weight_bytes: list[int]
    wire_bytes_per_token: float
    seconds: float


def _commas(numbers: Iterable[int]) -> str:
    return ",".join(str(number) for number in numbers)


def hashed_tokens(count: int, vocab: int, *, seed: int) -> tuple[int, ...]:
    """`count` token ids below `vocab` that only integers decide."""
    return tuple(
        int.from_bytes(hashlib.sha256(f"{seed} {i}".encode()).digest()[:4]) % vocab
        for i in range(count)
    )


@cache
def the_model(name: str) -> Model:
    """`demo`, or one of tests/models.py, loaded once in a process."""
    if name == "demo":
        checkpoint = open_checkpoint(None)
        tokens = open_tokenizer(checkpoint).encode(TEXT, add_special=True)
        assert len(tokens) >= PROMPT_TOKENS
        return Model(name, demo(), tuple(tokens[:PROMPT_TOKENS]))
    config = models.MODELS[name]
    adversarial = name.startswith("adversarial")
    with tempfile.TemporaryDirectory() as folder:
        path = models.write_hf_model(Path(folder) / name, config, seed=7, adversarial=adversarial)
        loaded = served(open_checkpoint(str(path)))
    return Model(name, loaded, hashed_tokens(PROMPT_TOKENS, config.vocab, seed=0))


def neighbours(model: Model) -> list[tuple[int, ...]]:
    """Sixteen prompts of unequal length, none like another."""
    vocab = model.served.config.vocab
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


def open_group(model: Served, rank_body: RankMain, *, comm: str) -> RankGroup:
    """Ranks over a model that is already in memory."""

    def load(progress: Progress) -> tuple[object, bytes]:
        return model, b""

    group: RankGroup
    group = ThreadGroup(load, rank_body) if comm == "threads" else fork_launcher(load, rank_body)
    group.wait_loaded()
    return group


class ShareImage:
    """The weight image of a rank that was given nothing but its own share: NaN everywhere else.

    Also in the lanes that pad its last panel: what they hold must not matter.
    """

    def __init__(self, image: WeightImage, program: Program) -> None:
        self._image, self.directory, self.storage = image, image.directory, image.storage
        self._weights = {weight for op in program.ops for weight in op.weights}

    def panels(self, name: str) -> Panels:
        """Panels of the tensor, filled where the program says."""
        whole = self._image.panels(name)
        if self.storage[name] == "q8_0":
            return self._blocks(name, whole)
        share = np.empty_like(whole)
        share.view(np.uint8)[:] = 0xFF  # a NaN in every float type
        row_of = np.arange(len(whole) * 8).reshape(-1, 1, 8)
        for weight in self._mine(name):
            assert weight.columns is not None
            columns = slice(*weight.columns)
            mine = (row_of >= weight.rows[0]) & (row_of < weight.rows[1])
            share[:, columns] = np.where(mine, whole[:, columns], share[:, columns])
        return share

    def _blocks(self, name: str, whole: Panels) -> Panels:
        """Whole blocks of 16 rows: what cuts them falls between blocks, and the end is padding."""
        share = np.full_like(whole, 0xFF)  # scales are NaN
        for weight in self._mine(name):
            assert weight.columns is not None
            here = panel_cut(whole, weight.rows, weight.columns)
            panel_cut(share, weight.rows, weight.columns)[:] = here
        return share

    def vector(self, name: str) -> F32:
        """The vector, filled where the program says."""
        whole = self._image.vector(name)
        share: F32 = np.full_like(whole, np.nan)
        for weight in self._mine(name):
            share[slice(*weight.rows)] = whole[slice(*weight.rows)]
        return share

    def _mine(self, name: str) -> list[Weight]:
        return [weight for weight in self._weights if weight.name == name]


def share_only(seat: Seat, *, of_rank: Callable[[int], int] = lambda rank: rank) -> None:
    """A rank body over a ShareImage; of_rank: whose share a rank is given, its own by default."""
    state, rank_plan = seat.state, msgspec.msgpack.decode(seat.start.payload, type=RankPlan)
    assert isinstance(state, Served)
    mine = program(state.config, state.profile, rank_plan.layout, of_rank(seat.rank))
    image = cast(WeightImage, ShareImage(state.image, mine))
    rank_main(replace(seat, state=replace(state, image=image)))


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
    model: Model, cell: Cell, *, rank_body: RankMain = rank_main, want_logits: bool = True
) -> Outcome:
    """Run the request through the engine, ignoring any end of text. Raises: PeerLost.

    rank_body: what the ranks run, for planted bugs. Without `want_logits` only tokens come back,
    and greedy ranks exchange (value, id) pairs instead of logits.
    """
    start = time.monotonic()
    requests = _requests(model, cell, want_logits=want_logits)
    group = open_group(model.served, rank_body, comm=cell.comm)
    steps: list[StepShape] = []
    try:
        length = cell.prompt_tokens + cell.num_tokens
        pages = len(requests) * -(-length // 32)
        engine = Engine(
            group,
            model.served.config,
            model.served.profile,
            cell.layout(model),
            EngineOptions(
                kernels=cell.kernels,
                comm=cell.comm,
                threads=cell.threads,
                chunk=cell.chunk,
                max_num_seqs=len(requests),
                max_model_len=length,
                deadline_s=300.0,
                page_order=shuffled_pages(pages) if cell.shuffled else None,
                poison=cell.poison,
            ),
            cores=len(os.sched_getaffinity(0)),
            steps=steps,
        )
        collected = {engine.submit(request): _Collected() for request in requests}
        for event in engine.run():
            collected[event.request_id].add(event)
        statuses = engine.control.statuses()
        costs = [wire_cost(each, steps) for each in engine.programs]
        weight_bytes = [
            program(
                *(model.served.config, model.served.profile, engine.layout, rank),
                storage=model.served.image.storage,
            ).weight_bytes
            for rank in range(engine.layout.world)
        ]
        engine.close()
    finally:
        group.close()
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
        weight_bytes=weight_bytes,
        wire_bytes_per_token=sum(cost.bytes for cost in costs) / num_rows,
        seconds=time.monotonic() - start,
    )


@lru_cache(maxsize=8)
def _baseline(name: str, cell: Cell) -> Outcome:
    return run_cell(the_model(name), cell)


def baseline(model: Model, cell: Cell | None = None) -> Outcome:
    """The unsplit run of a cell's request; computed once."""
    return _baseline(model.name, (cell or Cell(axis="base")).unsplit())


# --- witnesses ----------------------------------------------------------------------------------


NAIVE: dict[Axis, type[Worker]] = {
    "tp": planted.NaiveTpOfFour,
    "pp": planted.NaivePp,
    "mixed": planted.NaiveTpPp,
    "chunk": planted.NaiveChunk,
    "threads": planted.SplitByThread,
    "batch": planted.SplitByRows,
}
PLANTED: dict[Axis, type[Worker]] = {
    "comm": planted.StaleExchange,
    "body": planted.LostLane,
    "pages": planted.PageReadTwice,
}


def forced_logits(
    model: Model, cell: Cell, tokens: Sequence[int], *, worker_type: type[Worker]
) -> F32:
    """Logits [n, V] of the n rows that emitted `tokens`, whatever a naive rank would have drawn.

    The prompt runs in the cell's chunks, then one row a frame; in a batch cell all 17 decode.
    """
    prompt = model.prompt[: cell.prompt_tokens]
    others = [] if cell.place == "alone" else neighbours(model)
    vocab = model.served.config.vocab
    with Driver(
        model.served,
        tp=cell.tp,
        pp=cell.pp,
        heads=cell.heads,
        layers=cell.layers,
        kernels=cell.kernels,
        threads=cell.threads,
        rows_max=max(len(prompt), NUM_NEIGHBOURS + 1),
        num_slots=1 + len(others),
        max_model_len=len(prompt) + len(tokens),
        rank_body=planted.rank_body(worker_type),
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


@lru_cache(maxsize=8)
def _naive_unsplit(name: str, axis: Axis, cell: Cell, num_tokens: int) -> F32:
    model = the_model(name)
    if axis == "pp":
        return baseline(model, cell).logits[:num_tokens]
    tokens = baseline(model, cell).tokens[:num_tokens]
    return forced_logits(model, cell, tokens, worker_type=NAIVE[axis])


def witness(model: Model, cell: Cell, *, num_tokens: int | None = None) -> float:
    """Share of logits that differ between the naive cell and the naive unsplit run, 0..1.

    num_tokens: how many of the emitted rows are compared (default: all).
    """
    count = num_tokens or cell.num_tokens
    tokens = baseline(model, cell).tokens[:count]
    split = forced_logits(model, cell, tokens, worker_type=NAIVE[cell.axis])
    whole = _naive_unsplit(model.name, cell.axis, cell.unsplit(), count)
    assert split.shape == whole.shape
    return float(np.mean(split.view(np.uint32) != whole.view(np.uint32)))


def planted_is_caught(model: Model, cell: Cell) -> bool:
    """Whether the planted bug of a cell that only places work changes the digest.

    A request of a few tokens over three blocks is enough for that.
    """
    short = replace(
        cell, prompt_tokens=min(70, cell.prompt_tokens), num_tokens=min(3, cell.num_tokens)
    )
    bugged = run_cell(model, short, rank_body=planted.rank_body(PLANTED[cell.axis]))
    return bugged.digest != baseline(model, short).digest


# --- the cells ----------------------------------------------------------------------------------


def demo_cells() -> list[Cell]:
    """Item 2 of the issue, on the demo model: 9 heads, 3 KV heads, 30 layers."""
    return [
        *(Cell(axis="tp", tp=tp) for tp in (2, 3, 4, 5, 8)),
        Cell(axis="tp", heads=(7, 2)),
        *(Cell(axis="pp", pp=pp) for pp in (2, 3, 7)),
        Cell(axis="pp", layers=(22, 8)),
        Cell(axis="mixed", tp=2, pp=2),
        *(Cell(axis="chunk", chunk=chunk) for chunk in (1, 7, 32, 300)),
        Cell(axis="threads", threads=2),
        Cell(axis="batch", place="first"),
        Cell(axis="batch", place="last"),
        Cell(axis="pages", shuffled=True, poison=True),
        Cell(axis="comm", tp=2, comm="shm"),
        Cell(axis="comm", tp=2, pp=2, comm="shm"),
        Cell(axis="comm", tp=2, comm="torch"),
        Cell(axis="comm", tp=2, pp=2, comm="torch"),
        Cell(axis="body", kernels="scalar"),
        Cell(axis="body", kernels="reference", prompt_tokens=6, num_tokens=2),
    ]


def random_cells(config: ModelConfig) -> list[Cell]:
    """Item 3: the same on a model with random weights, in the widths and depths that it has."""
    heads, deep = config.num_heads, config.num_layers
    widths = sorted({2, 3, 4, 5, 8, heads} & set(range(2, heads + 1)))
    return [
        *(Cell(axis="tp", tp=tp) for tp in widths),
        Cell(axis="tp", heads=(heads - 2, 2)),
        *(Cell(axis="pp", pp=pp) for pp in range(2, deep + 1)),
        *([Cell(axis="pp", layers=(1, deep - 1))] if deep > 2 else []),
        Cell(axis="mixed", tp=2, pp=2),
        Cell(axis="mixed", tp=3, pp=deep),
        *(Cell(axis="chunk", chunk=chunk) for chunk in (1, 7, 32, 300)),
        *(Cell(axis="threads", threads=threads) for threads in (2, 3)),
        Cell(axis="batch", place="first"),
        Cell(axis="batch", place="last"),
        Cell(axis="batch", place="middle", tp=3, chunk=7),
        Cell(axis="pages", shuffled=True, poison=True),
        Cell(axis="comm", tp=2, comm="shm"),
        Cell(axis="comm", tp=2, pp=2, comm="shm"),
        Cell(axis="comm", heads=(2, heads - 2), comm="shm"),
        Cell(axis="comm", tp=3, comm="threads"),
        Cell(axis="comm", tp=2, pp=2, comm="torch"),
        Cell(axis="comm", heads=(2, heads - 2), comm="torch"),
        Cell(axis="body", kernels="scalar", prompt_tokens=70),
        Cell(axis="body", kernels="reference", prompt_tokens=6, num_tokens=2),
    ]


def seeded(cells: Iterable[Cell]) -> list[Cell]:
    """The same cells at temperature 0.8."""
    return [replace(cell, sampling=SEEDED) for cell in cells]
