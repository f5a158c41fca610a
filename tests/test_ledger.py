"""What ranks count while they run is what the ledger adds up from the program."""

from __future__ import annotations

from dataclasses import replace

import pytest
from grid import run_cell, the_model

from anyshard.layout import plan
from anyshard.ledger import (
    StepShape,
    step_flop,
    step_kv_bytes,
    step_weight_bytes,
    wire_cost,
)
from anyshard.loading import f32_profile
from anyshard.model import program
from anyshard.verify.cells import BATCH, Cell, Outcome

CELLS = [
    Cell(axis="base"),
    Cell(axis="tp", tp=2),
    Cell(axis="tp", tp=5),
    Cell(axis="tp", tp=9),
    Cell(axis="tp", heads=(0, 7, 2)),
    Cell(axis="pp", pp=3),
    Cell(axis="mixed", tp=3, pp=2),
    Cell(axis="chunk", tp=2, pp=2, chunk=7),
    Cell(axis="batch", tp=2, batch=BATCH, place="middle", chunk=30),
    Cell(axis="batch", tp=4, pp=3, batch=BATCH, place="last"),
    *(Cell(axis="tp", tp=tp, kv_shard="sequence") for tp in (1, 2, 3, 5, 8)),
    Cell(axis="tp", heads=(0, 7, 2), kv_shard="sequence"),
    Cell(axis="batch", tp=3, pp=2, batch=BATCH, chunk=30, kv_shard="sequence"),
    pytest.param(Cell(axis="comm", tp=2, pp=2, comm="shm"), marks=pytest.mark.ranks),
    pytest.param(Cell(axis="comm", tp=4, comm="shm", kv_shard="sequence"), marks=pytest.mark.ranks),
    pytest.param(
        Cell(axis="comm", tp=3, comm="torch", kv_shard="sequence"),
        marks=[pytest.mark.ranks, pytest.mark.torch, pytest.mark.slow],
    ),
    pytest.param(
        Cell(axis="comm", tp=2, pp=2, comm="torch"),
        marks=[pytest.mark.ranks, pytest.mark.torch, pytest.mark.slow],
    ),
]


@pytest.mark.parametrize("want_logits", [True, False], ids=["logits", "pairs"])
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_counted_wire_bytes_equal_the_ledger(cell: Cell, want_logits: bool) -> None:
    if cell.comm == "torch":
        pytest.importorskip("torch")
    _check_counts(run_cell(the_model("adversarial-9-3"), cell, want_logits=want_logits), cell)


@pytest.mark.parametrize("cell", [cell for cell in CELLS if isinstance(cell, Cell) and cell.pp > 1])
def test_counted_bytes_of_int8_rows_equal_the_ledger(cell: Cell) -> None:
    model = the_model("adversarial-9-3 w8")
    outcome = run_cell(model, cell)
    _check_counts(outcome, cell)
    wide = run_cell(the_model("adversarial-9-3"), cell)
    for mine, its in zip(outcome.costs, wide.costs, strict=True):
        assert replace(mine, hop_bytes=0) == replace(its, hop_bytes=0)
        rows = (its.hop_bytes - 40 * its.hop_messages) // (4 * model.config.hidden)
        assert mine.hop_bytes == rows * 154 + 40 * mine.hop_messages  # 144 + 5 scales


def _check_counts(outcome: Outcome, cell: Cell) -> None:
    for view, cost in zip(outcome.statuses, outcome.costs, strict=True):
        assert view.wire_bytes == {
            "reduce": cost.reduce_bytes,
            "hop": cost.hop_bytes,
            "logits": cost.logits_bytes,
            "pairs": cost.pairs_bytes,
            "queries": cost.queries_bytes,
            "states": cost.states_bytes,
        }
        assert view.wire_messages == {
            "reduce": cost.reduce_messages,
            "hop": cost.hop_messages,
            "logits": cost.logits_messages,
            "pairs": cost.pairs_messages,
            "queries": cost.queries_messages,
            "states": cost.states_messages,
        }
        is_split = cell.kv_shard == "sequence" and cell.layout(the_model("adversarial-9-3")).tp > 1
        assert (view.wire_messages["queries"] > 0) == is_split
        assert view.wire_messages["queries"] == view.wire_messages["states"]
    sent = sum(cost.bytes + cost.logits_bytes for cost in outcome.costs)
    assert (sent > 0) == (len(outcome.costs) > 1)


def test_a_decode_step_of_the_demo_model_costs_what_arithmetic_on_paper_says() -> None:
    """SmolLM2-135M on two ranks: 30 layers, two exchanges of one node of 576 floats each way."""
    config = the_model("demo").served.config
    layout = plan(config, tp=2, leaf=64)
    step = StepShape(rows=1, sampled=1, gather_logits=False)
    programs = [program(config, f32_profile(), layout, rank) for rank in range(2)]
    costs = [wire_cost(each, [step]) for each in programs]
    for each, cost in zip(programs, costs, strict=True):
        nodes = [max(op.sum.nodes_per_rank) for op in each.ops if op.receivers and op.layer >= 0]
        assert cost.reduce_bytes == sum(nodes) * 576 * 4
        assert cost.reduce_messages == 60
    assert [cost.pairs_bytes for cost in costs] == [0, 8]
    whole = program(config, f32_profile(), plan(config, leaf=64), 0)
    matrices = 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576) + 49152 * 576
    assert step_weight_bytes(whole) == 4 * (matrices + 61 * 576)
    attention = 4 * 9 * 64 * 30
    adds = 30 * 2 * (576)  # residuals; the sums of one rank have no node to add
    assert step_flop(whole, rows=1, sampled=1, keys=100) == 2 * matrices + 100 * attention + adds


def test_a_split_sequence_costs_what_arithmetic_on_paper_says() -> None:
    """SmolLM2-135M on four ranks, cut 3/3/3/0: a row gathers three heads of q, and sends each rank
    the states of its two stripes, merged, of as many heads; to three others, 30 times."""
    config = the_model("demo").served.config
    layout = plan(config, tp=4, kv_shard="sequence", leaf=64)
    step = StepShape(rows=5, sampled=1, gather_logits=False)
    whole = program(config, f32_profile(), plan(config, leaf=64), 0)
    programs = [program(config, f32_profile(), layout, rank) for rank in range(4)]
    for each in programs:
        cost = wire_cost(each, [step])
        assert cost.queries_messages == cost.states_messages == 30 * 3
        assert cost.queries_bytes == 5 * 30 * 3 * (3 * 64) * 4
        assert cost.states_bytes == 5 * 30 * 3 * (3 * (64 + 2)) * 4
        assert cost.bytes == cost.reduce_bytes + cost.queries_bytes + cost.states_bytes + (
            cost.pairs_bytes
        )
    read = [step_kv_bytes(each, keys=800) for each in programs]
    assert read == [step_kv_bytes(whole, keys=200)] * 4
