"""One digest for every split: the invariance grid, each cell beside its witness.

Models: the demo, one of Qwen2's shape, and adversarial ones with biases everywhere, a prime
vocabulary and weights over 40 binades (tests/models.py). A cell whose naive order changes no bit
proves nothing; such cells are listed here, and must stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest
from grid import (
    ORDERS,
    SEEDED,
    Loaded,
    baseline,
    demo_cells,
    planted_is_caught,
    random_cells,
    run_cell,
    seeded,
    shape_of,
    share_only,
    the_model,
    weight_bytes,
    wire_of,
    witness,
)
from models import MODELS, NUM_TWIN_ROWS

from anyshard.engine import Engine
from anyshard.epoch import EngineOptions
from anyshard.ops import available_bodies
from anyshard.request import Request
from anyshard.verify.cells import BATCH, GREEDY, Cell, neighbours, shuffled_pages
from anyshard.verify.driver import Driver, open_group
from anyshard.verify.prompt import hashed_tokens

ADVERSARIAL = tuple(name for name in MODELS if name.startswith("adversarial"))

# The same in int8, fewer of them: the wires, pages and batches are those of float32.
IN_INT8 = ("adversarial-9-3 int8", "adversarial-head-80 int8", "qwen2 int8", "demo int8")
# And with int8 keys and values.
IN_KV8 = ("adversarial-9-3 kv8", "adversarial-head-80 int8 kv8", "qwen2 int8 kv8", "demo int8 kv8")
# And with int8 wires: stages are cut where those round, and only cells with stages differ.
IN_W8 = ("adversarial-9-3 w8", "adversarial-head-80 int8 kv8 w8", "demo w8")
MODEL_NAMES = (*ADVERSARIAL, "qwen2", "demo", *IN_INT8, *IN_KV8, *IN_W8)

# (model, cell): the naive order changes nothing either. All scores of this model are in the
# thousands, so one key takes all the weight and softmax can be restarted without a trace; int8 keys
# and values round off what float32 has besides (up to a third of the logits). Chunks of
# int8 keys and values have their witness in the other three models.
VACUOUS = {
    *(("adversarial-head-80 int8 kv8", f"tp1 chunk {chunk}") for chunk in (1, 7, 32, 300)),
    ("adversarial-head-80", "tp1 chunk 300"),
    ("adversarial-head-80 int8", "tp1 chunk 32"),
    ("adversarial-head-80 int8", "tp1 chunk 300"),
}

# What `make test` runs of the two larger models; `make test-all` runs every cell.
FAST = {
    ("demo", "tp3"),
    ("qwen2", "tp3"),
    ("qwen2", "tp2pp2"),
    ("qwen2", "tp1 chunk 300"),
    ("qwen2", "tp1 threads 2"),
    ("adversarial-head-80 int8", "tp3"),
    ("demo int8", "tp3"),
    ("adversarial-head-80 int8 kv8", "tp3"),
    ("demo int8 kv8", "tp3"),
}
DEMO_WITNESS_TOKENS = 4


def grid(cells: Mapping[str, Iterable[Cell]]) -> list[object]:
    """Parameters (model name, cell), the slow ones marked."""
    rows: list[object] = []
    for name, of_model in cells.items():
        for cell in of_model:
            marks = [pytest.mark.ranks] if cell.comm in ("shm", "torch") else []
            if cell.comm == "torch":
                marks.append(pytest.mark.torch)
            fast = (*ADVERSARIAL, IN_INT8[0], IN_KV8[0], *IN_W8[:2])
            is_fast = name in fast or (name, cell.name) in FAST
            if cell.comm == "torch" or not is_fast:
                marks += [pytest.mark.slow, pytest.mark.timeout(1200)]
            rows.append(pytest.param(name, cell, marks=marks, id=f"{name}-{cell.name}"))
    return rows


def cells_of(name: str) -> list[Cell]:
    """Without loading the model."""
    wire, name = wire_of(name), shape_of(name)
    cells = demo_cells(wire) if name == "demo" else random_cells(MODELS[name])
    return [cell for cell in cells if cell.pp > 1 or cell.layers] if wire == "int8" else cells


def needs(cell: Cell) -> None:
    if cell.comm == "torch":
        pytest.importorskip("torch")
    if cell.kernels != "auto":
        have = available_bodies()
        if cell.kernels not in have:
            pytest.skip(f"no {cell.kernels} body here")
        if cell.kernels == have[0]:
            pytest.skip(f"{cell.kernels} is also what the unsplit run takes here")


@pytest.mark.parametrize(
    ("name", "cell"),
    grid(
        {
            name: cells_of(name)
            for name in (*ADVERSARIAL, "qwen2", "demo", *IN_INT8, *IN_KV8, *IN_W8)
        }
    ),
)
def test_a_cell_has_the_digest_of_the_unsplit_run(name: str, cell: Cell) -> None:
    needs(cell)
    model = the_model(name)
    whole, outcome = baseline(model, cell), run_cell(model, cell)
    assert outcome.fault is None
    assert len(outcome.tokens) == cell.num_tokens
    assert outcome.tokens == whole.tokens
    assert outcome.digest == whole.digest, _difference(outcome.logits, whole.logits)
    if cell.axis not in ORDERS:
        assert planted_is_caught(model, cell), "the planted bug goes unseen"
        return
    share = witness(model, cell, num_tokens=DEMO_WITNESS_TOKENS if model.is_demo else None)
    assert (share == 0) == ((name, cell.name) in VACUOUS), f"witness {share}"


def _difference(a: np.ndarray, b: np.ndarray) -> str:
    unlike = a.view(np.uint32) != b.view(np.uint32)
    row, column = (int(i) for i in np.argwhere(unlike)[0])
    return (
        f"{unlike.sum()} of {unlike.size} logits differ, first in row {row} at id {column}: "
        f"{float(a[row, column]).hex()} and {float(b[row, column]).hex()}"
    )


SEEDED_CELLS = {
    "adversarial-9-3": seeded(
        [
            *(Cell(axis="tp", tp=tp) for tp in (2, 3, 5, 9)),
            Cell(axis="pp", pp=3),
            Cell(axis="mixed", tp=2, pp=2),
            Cell(axis="chunk", chunk=7),
            Cell(axis="threads", threads=2),
            Cell(axis="batch", batch=BATCH, place="middle"),
            Cell(axis="comm", tp=2, comm="shm"),
            Cell(axis="body", kernels="reference", prompt_tokens=6, num_tokens=4),
        ]
    ),
    "qwen2": seeded([Cell(axis="tp", tp=5), Cell(axis="mixed", tp=2, pp=2)]),
    "demo": seeded(
        [
            *(Cell(axis="tp", tp=tp) for tp in (2, 3, 8)),
            Cell(axis="pp", pp=3),
            Cell(axis="mixed", tp=2, pp=2),
            Cell(axis="chunk", chunk=32),
            Cell(axis="threads", threads=2),
            Cell(axis="batch", batch=BATCH, place="last"),
            Cell(axis="comm", tp=2, comm="shm"),
        ]
    ),
}


@pytest.mark.parametrize(("name", "cell"), grid(SEEDED_CELLS))
def test_a_seeded_cell_draws_what_the_unsplit_run_draws(name: str, cell: Cell) -> None:
    needs(cell)
    model = the_model(name)
    whole, outcome = baseline(model, cell), run_cell(model, cell)
    greedy = baseline(model, replace(cell, sampling=GREEDY))
    assert outcome.tokens == whole.tokens
    assert outcome.digest == whole.digest
    assert outcome.tokens != greedy.tokens, "the noise decided nothing"


def test_another_seed_draws_something_else() -> None:
    model = the_model("adversarial-9-3")
    other = msgspec.structs.replace(SEEDED, seed=SEEDED.seed + 1)
    drawn = baseline(model, Cell(axis="base", sampling=other))
    assert drawn.tokens != baseline(model, Cell(axis="base", sampling=SEEDED)).tokens


@pytest.mark.parametrize("tp", [2, 3, 9])
def test_tokens_come_out_alike_when_nobody_asks_for_logits(tp: int) -> None:
    model = the_model("adversarial-9-3")
    cell = Cell(axis="tp", tp=tp, pp=2)
    outcome = run_cell(model, cell, want_logits=False)
    assert outcome.tokens == baseline(model, cell).tokens
    assert sum(view.wire_bytes["logits"] for view in outcome.statuses) == 0
    assert sum(view.wire_bytes["pairs"] for view in outcome.statuses) > 0


@pytest.mark.parametrize("want_logits", [True, False])
def test_equal_logits_on_two_ranks_go_to_the_lowest_id(want_logits: bool) -> None:
    """The last rows of the head repeat the first: every win of one is a tie across ranks."""
    base = the_model("adversarial-9-3")
    vocab = base.served.config.vocab
    cell = Cell(axis="tp", tp=3, prompt_tokens=5, num_tokens=8)
    ties = 0
    for seed in range(40, 60):
        model = Loaded.of(f"ties {seed}", base.served, hashed_tokens(5, vocab, seed=seed))
        split = run_cell(model, cell, want_logits=want_logits)
        assert split.tokens == run_cell(model, cell.unsplit()).tokens
        assert all(token < vocab - NUM_TWIN_ROWS for token in split.tokens)
        ties += sum(token < NUM_TWIN_ROWS for token in split.tokens)
    assert ties > 0, "no tie came up: the test shows nothing"


@pytest.mark.parametrize("name", [*ADVERSARIAL[:1], pytest.param("demo", marks=pytest.mark.slow)])
def test_every_request_of_a_batch_has_the_bits_it_has_alone(name: str) -> None:
    model = the_model(name)
    first, last = (
        run_cell(model, Cell(axis="batch", batch=BATCH, place=place)) for place in ("first", "last")
    )
    assert first.digest == last.digest == baseline(model).digest
    assert first.others == last.others and len(first.others) == 16
    for index, prompt in enumerate(neighbours(model)[: 2 if model.is_demo else None]):
        alone = Loaded.of(f"alone {index}", model.served, prompt)
        cell = Cell(axis="base", prompt_tokens=len(prompt), num_tokens=32 - index % 5)
        whole, there = run_cell(alone, cell), first.others[index]
        assert (whole.digest, whole.tokens) == (there.digest, there.tokens)


@pytest.mark.parametrize(
    "split",
    [{}, {"chunk": 7}, {"tp": 3, "pp": 2, "chunk": 20}, {"tp": 2, "batch": BATCH, "chunk": 16}],
)
@pytest.mark.parametrize("wanted", [1, 30, 89])
def test_logits_of_prompt_tokens_come_in_order(split: dict[str, int], wanted: int) -> None:
    model = the_model("adversarial-9-3")
    cell = Cell(axis="mixed", prompt_tokens=90, num_tokens=3, prompt_logits=wanted, **split)
    outcome = run_cell(model, cell)
    tokens = [*model.prompt[:90], *outcome.tokens[:-1]]
    with Driver(model.served, rows_max=92, max_model_len=96) as driver:
        assert np.array_equal(outcome.logits, driver.logits(tokens)[89 - wanted :])
    plain = run_cell(model, replace(cell, prompt_logits=0))
    assert plain.tokens == outcome.tokens and plain.others == outcome.others


@pytest.mark.parametrize("is_drawn", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (3, 2)])
def test_sequences_that_join_and_leave_leave_no_trace(tp: int, pp: int, is_drawn: bool) -> None:
    """Requests come while others decode; one is cancelled, its poisoned pages serve the next.

    Drawn: each with a seed of its own, which ranks are told once.
    """
    model = the_model("adversarial-9-3")
    served = model.served
    prompts = [model.prompt[:100], *neighbours(model)[8:12]]
    budget = [40, 9, 30, 12, 20]
    sampling = [
        msgspec.structs.replace(SEEDED, seed=90 + i) if is_drawn else GREEDY for i in range(5)
    ]
    group = open_group(served, forked=False)
    cell = Cell(axis="tp", tp=tp, pp=pp)
    engine = Engine(
        group,
        served.config,
        served.profile,
        cell.layout(model),
        EngineOptions(
            comm="threads",
            threads=1,
            chunk=17,
            max_num_seqs=3,
            max_model_len=160,
            poison=True,
            page_order=shuffled_pages(9),
        ),
        cores=2,
    )
    found: dict[int, list[bytes]] = {}

    def submit(index: int) -> None:
        request = Request(
            prompt=prompts[index],
            max_tokens=budget[index],
            sampling=sampling[index],
            want_logits=True,
        )
        found[engine.submit(request)] = []

    submit(0)
    for event in engine.run():
        assert event.fault is None and event.logits is not None
        found[event.request_id].append(event.logits.tobytes())
        emitted = sum(len(rows) for rows in found.values())
        if emitted in (3, 6, 10, 14) and len(found) == 1 + (3, 6, 10, 14).index(emitted):
            submit(len(found))
        if event.request_id == 2 and len(found[2]) == 4:
            engine.cancel(2)
    engine.close()
    group.close()
    assert [len(found[i]) for i in range(5)] == [40, 9, 4, 12, 20]
    for index, rows in found.items():
        alone = Loaded.of(f"alone {index}", served, prompts[index])
        count = len(prompts[index])
        cell = Cell(
            axis="base",
            prompt_tokens=count,
            num_tokens=budget[index],
            sampling=sampling[index],
        )
        outcome = run_cell(alone, cell)
        assert rows == [row.tobytes() for row in outcome.logits[: len(rows)]]


@pytest.mark.parametrize(("tp", "pp", "chunk"), [(1, 1, 512), (1, 1, 7), (3, 2, 7)])
@pytest.mark.parametrize("name", ["adversarial-9-3", "adversarial-9-3 kv8"])
def test_rows_run_again_from_an_earlier_position_overwrite(
    name: str, tp: int, pp: int, chunk: int
) -> None:
    model = the_model(name)
    right, wrong = model.prompt[:90], hashed_tokens(70, model.config.vocab, seed=9)
    with Driver(model.served, max_model_len=128, rows_max=90) as driver:
        want = driver.logits(right)
    with Driver(model.served, tp=tp, pp=pp, max_model_len=128, rows_max=90, poison=True) as driver:
        size = min(chunk, 90)
        assert np.array_equal(driver.logits(right, chunk=size), want)
        driver.logits(wrong, chunk=size, start=41)  # past the end of what was there
        assert np.array_equal(driver.logits(right[35:], chunk=size, start=35), want[35:])
        driver.logits(wrong[:5], chunk=size, start=0)
        assert np.array_equal(driver.logits(right[:3], chunk=size), want[:3])
        assert np.array_equal(driver.logits(right, chunk=size), want)


SHARE_CELLS = {
    name: [
        Cell(axis="tp", tp=3, prompt_tokens=40, num_tokens=4),
        Cell(axis="tp", tp=MODELS[name].num_heads, prompt_tokens=40, num_tokens=4),
        Cell(axis="tp", heads=(2, MODELS[name].num_heads - 2), prompt_tokens=40, num_tokens=4),
        Cell(axis="mixed", tp=2, pp=2, prompt_tokens=40, num_tokens=4),
    ]
    for name in ADVERSARIAL
} | {
    "adversarial-head-80 int8": [
        Cell(axis="tp", tp=3, prompt_tokens=40, num_tokens=4),
        Cell(axis="mixed", tp=2, pp=2, prompt_tokens=40, num_tokens=4),
    ],
    "demo": [
        Cell(axis="mixed", tp=2, pp=2, prompt_tokens=40, num_tokens=4),
        Cell(axis="tp", heads=(7, 2), prompt_tokens=40, num_tokens=4),
    ],
}


@pytest.mark.parametrize(("name", "cell"), grid(SHARE_CELLS))
def test_a_rank_that_holds_nothing_but_its_share_gives_the_same_bits(name: str, cell: Cell) -> None:
    """Everything outside the share is NaN, so no rank can have computed what is another's."""
    model = the_model(name)
    outcome = run_cell(model, cell, rank_body=share_only)
    assert outcome.fault is None
    assert outcome.digest == baseline(model, cell).digest


def test_a_rank_that_holds_the_share_of_its_neighbour_fails() -> None:
    """What the test above rests on: a weight outside the share that is read ends the request."""
    body = partial(share_only, of_rank=lambda rank: rank ^ 1)
    cell = Cell(axis="tp", tp=2, prompt_tokens=40, num_tokens=4)
    outcome = run_cell(the_model("adversarial-9-3"), cell, rank_body=body)
    assert outcome.fault is not None and outcome.tokens == ()


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [("adversarial-9-3", 9, 1), ("adversarial-14-2", 3, 2), ("adversarial-9-3", 4, 3)],
)
def test_weight_bytes_of_a_rank_are_its_own_share(name: str, tp: int, pp: int) -> None:
    model = the_model(name)
    cell = Cell(axis="mixed", tp=tp, pp=pp, prompt_tokens=5, num_tokens=1)
    outcome = run_cell(model, cell)
    (whole,) = weight_bytes(model, cell.unsplit())
    held = [view.weight_bytes for view in outcome.statuses]
    assert held == weight_bytes(model, cell)
    matrices = sum(
        4 * int(np.prod(shape))
        for tensor, shape in model.config.tensor_shapes().items()
        if len(shape) == 2 and tensor != "embed"
    )
    assert matrices <= whole
    assert max(held) < whole
    # what more than one rank holds: norms, row-parallel biases, K and V of shared KV heads
    assert matrices <= sum(held)
    config = model.config
    twice = 2 * config.num_kv_heads * config.head_dim * config.hidden * config.num_layers * 4
    vectors = whole - matrices
    assert sum(held) <= matrices + (tp - 1) * twice + tp * vectors
