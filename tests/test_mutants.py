"""Bugs that real engines had, planted: each is caught, and named by its op and its rank.

The scoreboard (tests/mutants) is the first half: every bug on its smallest cell of an adversarial
model, and, slowly, on SmolLM2. Why there are both: SmolLM2 and Qwen2 have no bias on o_proj and
down_proj and tie their embeddings, so on them a bias added per rank changes nothing. The second
half are the cells that hide a bug on a model that could show it: widths that are multiples of the
KV heads hide a wrong KV head; two nodes have one order only; clean pages hide a missing mask.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import mutants
import numpy as np
import pytest
from grid import PLANTED, Loaded, baseline, run_cell, shape_of, the_model
from mutants import catalogue
from mutants.catalogue import MUTANTS
from mutants.exhibits import Exhibit, Mutant, by, shows
from mutants.quantised import Quantised
from mutants.scoreboard import score
from mutants.subjects import A9, DEMO
from test_builds import ROOT, needs_gcc, script

from anyshard.verify import naive
from anyshard.verify.cells import Axis, Cell
from anyshard.verify.driver import Driver
from anyshard.verify.prompt import hashed_tokens
from anyshard.worker import Worker

EXHIBITS = [
    pytest.param(
        mutant,
        exhibit,
        marks=pytest.mark.slow if shape_of(exhibit.model) == DEMO else [],
        id=re.sub(r"\W+", "-", f"{mutant.name} {exhibit.model}"),
    )
    for mutant in MUTANTS
    for exhibit in mutant.exhibits
    if mutant.scenario != "build"
]


@pytest.mark.parametrize(("mutant", "exhibit"), EXHIBITS)
def test_a_bug_is_caught_and_named_or_hidden_for_a_reason(mutant: Mutant, exhibit: Exhibit) -> None:
    row = score(mutant, exhibit)
    assert row.as_expected, row
    assert (row.verdict == "hidden") == bool(exhibit.hidden)


def test_the_catalogue_is_whole() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))
    for mutant in MUTANTS:
        models = [shape_of(exhibit.model) for exhibit in mutant.exhibits]
        assert DEMO in models, mutant.name
        assert any(model != DEMO for model in models), mutant.name
        assert any(not exhibit.hidden for exhibit in mutant.exhibits), "it shows nowhere"
        for exhibit in mutant.exhibits:
            assert bool(exhibit.op) != bool(exhibit.hidden)
    public = {mutant.source[1] for mutant in MUTANTS} - {""}
    assert len(public) >= 16


# --- the scoreboard can fail --------------------------------------------------------------------


def of(name: str) -> Mutant:
    return next(mutant for mutant in MUTANTS if mutant.name == name)


@pytest.mark.parametrize("name", ["node left out", "ids of the rank", "stale KV row"])
def test_a_mutant_that_does_nothing_is_missed(name: str) -> None:
    idle = replace(of(name), plant=by(Worker))
    row = score(idle, idle.exhibits[0])
    assert (row.verdict, row.caught, row.op) == ("MISSED", False, None)
    assert not row.as_expected


def test_int8_linears_that_the_bugs_derive_from_are_right() -> None:
    """What differs is the bug, not the steps that it is planted into."""
    mutant = of("scale after scale")
    row = score(replace(mutant, plant=by(Quantised)), mutant.exhibits[0])
    assert (row.verdict, row.caught, row.op) == ("MISSED", False, None)


@pytest.mark.parametrize(
    ("op", "rank"), [("layers.0.reduce_o", 1), ("layers.1.reduce_o", 0), ("layers.0.o_proj", 0)]
)
def test_a_bug_that_is_expected_elsewhere_is_misnamed(op: str, rank: int) -> None:
    row = score(of("node left out"), shows(A9, op, rank, tp=2))
    assert row.caught and row.verdict == "MISNAMED" and not row.as_expected


def test_a_reason_that_is_not_true_is_found() -> None:
    mutant = of("bias on every rank")
    exhibit = replace(mutant.exhibits[0], hidden="no bias on o_proj and down_proj")
    row = score(mutant, exhibit)
    assert row.verdict == "NOT HIDDEN" and not row.as_expected


def test_the_script_ends_in_1_where_a_bug_is_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = script("mutants").main
    found = of("node left out")
    found = replace(found, exhibits=found.exhibits[:1])
    monkeypatch.setattr(catalogue, "MUTANTS", (found,))
    assert main([]) == 0
    assert "1 caught and named right, 0 hidden" in capsys.readouterr().out
    monkeypatch.setattr(catalogue, "MUTANTS", (found, replace(found, plant=by(Worker))))
    assert main([]) == 1
    out = capsys.readouterr().out
    assert "MISSED\n    nothing was named" in out and "1 not as expected" in out
    assert main(["--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in record["rows"]] == ["right", "MISSED"]
    assert record["as_expected"] is False
    assert main(["--only", "no such bug"]) == 2
    assert (
        "no bug has 'no such bug' in its name; there are: node left out" in capsys.readouterr().err
    )


@needs_gcc
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_module_that_is_compiled_wrongly_is_caught() -> None:
    """On x86 such a build differs in nothing but the score of a drawn token."""
    command = [sys.executable, str(ROOT / "scripts" / "mutants.py"), "--only", "products"]
    done = subprocess.run(
        [*command, "--model", "adversarial", "--json"], stdout=subprocess.PIPE, check=False
    )
    assert done.returncode == 0
    rows = json.loads(done.stdout)["rows"]
    assert [row["verdict"] for row in rows] == ["right", "hidden"]
    assert rows[0]["op"] == "sample"


# --- cells that hide a bug ----------------------------------------------------------------------


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
    """One rank, or a model without such a bias, hides it."""
    two = short("tp", tp=2)
    assert not caught(A9, replace(two, tp=1), mutants.BiasPerRank)
    assert not caught("qwen2", two, mutants.BiasPerRank)


def test_missing_node() -> None:
    for tp in (2, 3):
        assert caught(A9, short("tp", tp=tp), mutants.MissingNode)
    assert caught("qwen2", short("tp", tp=2), mutants.MissingNode)


def test_swapped_merge() -> None:
    """Two nodes have one order only."""
    cell = short("tp", tp=3)
    assert caught("qwen2", cell, mutants.SwappedMerge)
    assert not caught(A9, replace(cell, tp=1), mutants.SwappedMerge)


def test_wrong_kv_head() -> None:
    """Hidden where every rank begins with the first head of a KV group."""
    cell = short("tp", tp=3)
    assert caught("adversarial-14-2", cell, mutants.WrongKvHead)
    assert not caught(A9, cell, mutants.WrongKvHead)
    assert not caught("adversarial-14-2", replace(cell, tp=4), mutants.WrongKvHead)  # 4/3/4/3


def test_position_reset_on_stage_two() -> None:
    """Hidden in a prompt that is one chunk, until the second decode step."""
    cell = short("pp", pp=2)
    assert caught("qwen2", cell, mutants.PositionReset)
    assert not caught(A9, replace(cell, num_tokens=1), mutants.PositionReset)
    assert caught(A9, replace(cell, num_tokens=1, chunk=39), mutants.PositionReset)


def test_chunk_edge_off_by_one() -> None:
    """One chunk hides it."""
    cell = short("chunk", chunk=20)
    assert caught("qwen2", cell, mutants.ChunkEdge)
    assert not caught(A9, replace(cell, chunk=40), mutants.ChunkEdge)


def test_tied_head_missing_on_the_last_stage() -> None:
    """Needs a last stage that is not the first."""
    cell = short("pp", pp=2)
    assert caught("qwen2", cell, mutants.TiedHeadMissing)
    assert not caught("qwen2", replace(cell, pp=1), mutants.TiedHeadMissing)


def test_page_reused_with_nan_in_it() -> None:
    """Masked keys have weight zero, and zero times NaN is NaN. Clean pages hide it."""
    clean = Cell(axis="pages", prompt_tokens=7, num_tokens=2)
    assert not caught(A9, clean, mutants.Unmasked)
    assert caught(A9, replace(clean, poison=True), mutants.Unmasked)


@pytest.mark.parametrize("bug", [Worker, mutants.Unmasked])
def test_page_that_another_sequence_left(bug: type[Worker]) -> None:
    """A slot is given the pages of an earlier sequence, whose last rows lie past its own length."""
    model = the_model(A9)
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
    for name in (A9, "qwen2"):
        assert caught(name, cell, PLANTED[axis])


def test_a_fault_of_one_request_is_told_by_name() -> None:
    """The poisoned run above ends as a fault, not as silent NaN."""
    cell = Cell(axis="pages", prompt_tokens=7, num_tokens=2, poison=True)
    outcome = run_cell(the_model(A9), cell, rank_body=naive.rank_body(mutants.Unmasked))
    assert outcome.fault is not None and outcome.fault.startswith("layers.0.")
    assert outcome.tokens == ()
