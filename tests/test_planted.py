"""Bugs that real engines had, planted here: the grid turns red under each, and only under it.

Each test runs the smallest scenario in which the bug shows, the same scenario without it, and,
where there is one, the scenario that hides it. Why random models with biases stand beside the
real ones: SmolLM2 and Qwen2 have no bias on o_proj and down_proj and tie their embeddings, so on
them a bias added per rank changes nothing; widths that are multiples of the KV heads hide a
wrong KV head; two nodes have one order only; clean pages hide a missing mask.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import planted
import pytest
from grid import PLANTED, Loaded, baseline, run_cell, the_model

from anyshard.verify import naive
from anyshard.verify.cells import Axis, Cell
from anyshard.verify.driver import Driver
from anyshard.verify.prompt import hashed_tokens
from anyshard.worker import Worker


def short(axis: Axis, **split: Any) -> Cell:
    """A cell of a few tokens over two blocks."""
    return Cell(axis=axis, prompt_tokens=40, num_tokens=3, **split)


def digest(model: Loaded, cell: Cell, bug: type[Worker] | None = None) -> str:
    """Of the cell, planted or not; the cell without the bug equals the unsplit run."""
    if bug is not None:
        return run_cell(model, cell, rank_body=naive.rank_body(bug)).digest
    right = run_cell(model, cell)
    assert right.fault is None and right.digest == baseline(model, cell).digest
    return right.digest


def caught(name: str, cell: Cell, bug: type[Worker]) -> bool:
    """Whether the bug changes the digest that the cell has without it."""
    model = the_model(name)
    return digest(model, cell) != digest(model, cell, bug)


def test_row_parallel_bias_added_per_rank() -> None:
    """TGI 1036. One rank, or a model without such a bias, hides it: SmolLM2, Qwen2."""
    two = short("tp", tp=2)
    assert caught("adversarial-9-3", two, planted.BiasPerRank)
    assert not caught("adversarial-9-3", replace(two, tp=1), planted.BiasPerRank)
    assert not caught("qwen2", two, planted.BiasPerRank)


def test_missing_node() -> None:
    """sglang 14811: a partial that is never added. Shows on every model."""
    for tp in (2, 3):
        assert caught("adversarial-9-3", short("tp", tp=tp), planted.MissingNode)
    assert caught("qwen2", short("tp", tp=2), planted.MissingNode)


def test_swapped_merge() -> None:
    """sglang 10785: the same partials in another order. Two of them have one order only."""
    cell = short("tp", tp=3)
    assert caught("adversarial-9-3", cell, planted.SwappedMerge)
    assert caught("qwen2", cell, planted.SwappedMerge)
    assert not caught("adversarial-9-3", replace(cell, tp=1), planted.SwappedMerge)


def test_wrong_kv_head() -> None:
    """sglang 19086, 32858. Hidden where every rank begins with the first head of a KV group."""
    cell = short("tp", tp=2)
    assert caught("adversarial-9-3", cell, planted.WrongKvHead)
    assert caught("adversarial-14-2", replace(cell, tp=3), planted.WrongKvHead)
    assert not caught("adversarial-9-3", replace(cell, tp=3), planted.WrongKvHead)
    assert not caught("adversarial-14-2", replace(cell, tp=4), planted.WrongKvHead)  # 4/3/4/3


def test_position_reset_on_stage_two() -> None:
    """SwiftTransformer 9. Hidden in a prompt that is one chunk, until the second decode step."""
    cell = short("pp", pp=2)
    assert caught("adversarial-9-3", cell, planted.PositionReset)
    assert caught("qwen2", cell, planted.PositionReset)
    assert not caught("adversarial-9-3", replace(cell, num_tokens=1), planted.PositionReset)
    assert caught("adversarial-9-3", replace(cell, num_tokens=1, chunk=39), planted.PositionReset)


def test_chunk_edge_off_by_one() -> None:
    """HF 43082, nano-vllm 213: one key of one row of a later chunk. One chunk hides it."""
    cell = short("chunk", chunk=20)
    assert caught("adversarial-9-3", cell, planted.ChunkEdge)
    assert caught("qwen2", cell, planted.ChunkEdge)
    assert not caught("adversarial-9-3", replace(cell, chunk=40), planted.ChunkEdge)


def test_tied_head_missing_on_the_last_stage() -> None:
    """sglang 15890. Needs tied embeddings and a last stage that is not the first."""
    cell = short("pp", pp=2)
    assert caught("qwen2", cell, planted.TiedHeadMissing)
    assert not caught("qwen2", replace(cell, pp=1), planted.TiedHeadMissing)
    assert not caught("adversarial-9-3", cell, planted.TiedHeadMissing)


def test_page_reused_with_nan_in_it() -> None:
    """vLLM 42245: masked keys have weight zero, and zero times NaN is NaN. Clean pages hide it."""
    clean = Cell(axis="pages", prompt_tokens=7, num_tokens=2)
    assert not caught("adversarial-9-3", clean, planted.Unmasked)
    assert caught("adversarial-9-3", replace(clean, poison=True), planted.Unmasked)


@pytest.mark.parametrize("bug", [Worker, planted.Unmasked])
def test_page_that_another_sequence_left(bug: type[Worker]) -> None:
    """A slot is given the pages of an earlier sequence, whose last rows lie past its own length."""
    model = the_model("adversarial-9-3")
    vocab = model.config.vocab
    earlier, mine = hashed_tokens(30, vocab, seed=1), model.prompt[:5]
    body = naive.rank_body(bug)
    with Driver(model.served, num_slots=2, max_model_len=32, rank_body=body) as driver:
        want = driver.logits(mine, slot=1)
        driver.logits(earlier, slot=0)
        page = driver.pages[0][0]
        driver.step([(1, 0, mine[0], False)], [(1, 0, page)])
        again = driver.logits(mine[1:], slot=1, start=1)
    assert np.array_equal(again, want[1:]), "finite rows with weight zero add zero"


@pytest.mark.parametrize(
    ("axis", "cell"),
    [
        ("comm", short("comm", tp=2, comm="threads")),
        ("comm", short("comm", tp=3, pp=2, comm="threads")),
        pytest.param("comm", short("comm", tp=2, comm="shm"), marks=pytest.mark.ranks),
        ("body", short("body", kernels="scalar")),
        ("pages", short("pages", shuffled=True)),
    ],
    ids=lambda value: value.name if isinstance(value, Cell) else value,
)
def test_cells_that_only_place_work_catch_the_bug_that_they_carry(axis: Axis, cell: Cell) -> None:
    """A stale exchange, a lost lane, a page read twice."""
    for name in ("adversarial-9-3", "qwen2"):
        assert caught(name, cell, PLANTED[axis])


def test_a_fault_of_one_request_is_told_by_name() -> None:
    """The poisoned run above ends as a fault, not as silent NaN."""
    cell = Cell(axis="pages", prompt_tokens=7, num_tokens=2, poison=True)
    outcome = run_cell(
        the_model("adversarial-9-3"), cell, rank_body=naive.rank_body(planted.Unmasked)
    )
    assert outcome.fault is not None and outcome.fault.startswith("layers.0.")
    assert outcome.tokens == ()
