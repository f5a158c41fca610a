"""The first divergence: the op, the rank and the place of a fault, and none where there is none.

A healthy run must agree with the replay bit for bit at every point that a rank is looked at:
otherwise a point that differs would prove nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import mutants
import numpy as np
import pytest
from divergences import A9, A14, FAMILIES, diverges, family, named, short
from grid import Loaded, run_cell, the_model
from models import ADVERSARIAL_9_3, plant_overflow, write_hf_model
from test_builds import FLUSH, UP, needs_x86, under
from test_stored import HELD

from anyshard.capture import Arrays, Capture, read_capture
from anyshard.checkpoint import open_checkpoint
from anyshard.verify import cells, divergence, naive
from anyshard.verify.cells import Cell
from anyshard.verify.divergence import cell_divergence, cell_run
from anyshard.verify.driver import open_group, served
from anyshard.verify.naive import rank_body
from anyshard.verify.points import Point, Target, points
from anyshard.verify.prompt import hashed_tokens
from anyshard.verify.replay import replay_head
from anyshard.worker import Worker

KV8 = ("adversarial-9-3 kv8", "adversarial-head-80 int8 kv8")
W8 = ("adversarial-9-3 w8", "adversarial-head-80 int8 kv8 w8")

# --- healthy runs -------------------------------------------------------------------------------


def captured(model: Loaded, cell: Cell, target: Target, folder: Path) -> list[Arrays]:
    """By rank, the frame of the target's row."""
    folder.mkdir()
    capture = Capture(slot=0, folder=str(folder), position=target.position, layer=target.layer)
    group = open_group(model.served, forked=False)
    cells.run_cell(group, model, cell, capture=capture)
    group.close()
    found = [read_capture(folder, rank) for rank in range(cell.layout(model).world)]
    assert [len(frames) for frames in found] == [1] * len(found)
    return [frames[0] for frames in found]


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        # the wide one takes seconds in slow bodies
        pytest.param(name, body, marks=pytest.mark.slow if name == "qwen2" and body else [])
        for name in [*FAMILIES, *HELD, *KV8, *W8]
        for body in ("", "scalar", "reference")
    ],
)
def test_replay_and_every_healthy_rank_agree_bit_for_bit(
    name: str, kernels: Any, tmp_path: Path
) -> None:
    """At every point of the first and the last layer, on the last row of prompt and answer."""
    model, kernels = family(name, tmp_path), kernels or "auto"
    deep, heads = model.config.num_layers, model.config.num_heads
    size = {"prompt_tokens": 6, "num_tokens": 2} if kernels == "reference" else {}
    split = short(kernels=kernels, **size)
    last = split.prompt_tokens + split.num_tokens - 2
    for number, (position, layer) in enumerate([(last, deep - 1), (last, 0), (0, 0)]):
        target, folder = Target(position=position, layer=layer), tmp_path / f"{number}"
        folder.mkdir()
        right = captured(model, split.unsplit(), target, folder / "whole")[0]
        seen: set[str] = set()
        wide = replace(split, tp=min(3, heads), pp=deep, chunk=7)
        for cell in (split.unsplit(), wide, replace(wide, kv_shard="sequence")):
            layout = cell.layout(model)
            held = captured(model, cell, target, folder / cell.name)
            for point in points(model.served, layout, target, held, right):
                assert point.found is not None, (point.op, point.rank, point.what)
                assert point.found.tobytes() == point.expected.tobytes(), (point.op, point.rank)
                assert not point.differing()
                seen.add(point.op.split(".")[-1])
        assert {"qkv", "attention", "o_proj", "gather_o", "reduce_o"} <= seen
        assert {"gate_up", "down_proj", "gather_down", "reduce_down"} <= seen
        assert {"gather_q", "gather_states", "merge_states"} <= seen
        is_rounded = name in W8
        if layer == 0:
            assert "embed" in seen and ("round_wire" in seen) == is_rounded
        else:
            assert {"send", "receive", "head", "gather_logits"} <= seen
            assert ("decode_wire" in seen) == is_rounded == ("round_wire" in seen)
            logits = replay_head(model.served, right["x_head"], (0, model.config.vocab))
            assert logits.tobytes() == right["logits"].tobytes()


@pytest.mark.parametrize(
    "cell",
    [
        short(),
        short(tp=2),
        short(tp=3, pp=2, chunk=7),
        short(batch=17, place="middle", tp=2),
        short(shuffled=True, poison=True),
        short(tp=2, kv_shard="sequence"),
        short(tp=4, pp=2, kv_shard="sequence", chunk=7),
        short(tp=3, kv_shard="sequence", batch=17, place="middle", shuffled=True, poison=True),
        pytest.param(short(tp=2, kv_shard="sequence", comm="shm"), marks=pytest.mark.ranks),
        pytest.param(short(tp=2, comm="shm"), marks=pytest.mark.ranks),
        pytest.param(short(tp=2, comm="torch"), marks=[pytest.mark.ranks, pytest.mark.torch]),
    ],
    ids=lambda cell: cell.name,
)
def test_a_healthy_run_diverges_nowhere(cell: Cell) -> None:
    for name in (A9, A14, KV8[0], W8[0]) if cell.comm == "auto" else (A9,):
        model = the_model(name)
        assert diverges(model, cell) is None
        assert diverges(model, cell, at=Target(position=41, layer=1)) is None


def test_a_request_that_overflows_diverges_nowhere(tmp_path: Path) -> None:
    """Its rows hold NaN from there on, whose payload nothing defines."""
    change = partial(plant_overflow, layer_of={7: 1})
    write_hf_model(tmp_path / "m", ADVERSARIAL_9_3, seed=3, adversarial=True, change=change)
    model = served(open_checkpoint(str(tmp_path / "m")))
    prompt = (*hashed_tokens(38, 7, seed=1), 7, 3)
    cell = short(tp=3, pp=2, chunk=7)
    loaded = Loaded.of("overflow", model, prompt)
    assert run_cell(loaded, cell).fault == "layers.2.qkv"
    for at in (None, Target(position=38, layer=1), Target(position=38, layer=2)):
        assert diverges(loaded, cell, at=at) is None


@needs_x86
def test_the_replay_rounds_as_ranks_do_whatever_a_library_set() -> None:
    with under(FLUSH | UP):
        assert diverges(the_model(A9), short(tp=2), at=Target(position=41, layer=1)) is None


def test_a_capture_changes_no_bit(tmp_path: Path) -> None:
    model, cell = the_model(A9), short(tp=3, pp=2, chunk=7)
    group = open_group(model.served, forked=False)
    capture = Capture(slot=0, folder=str(tmp_path), position=41, layer=1)
    watched = cells.run_cell(group, model, cell, capture=capture)
    group.close()
    plain = run_cell(model, cell)
    assert watched.digest == plain.digest
    assert watched.statuses[0].wire_bytes == plain.statuses[0].wire_bytes
    assert len(list(tmp_path.iterdir())) == 6


# --- planted bugs -------------------------------------------------------------------------------

EVERY = [short(tp=2), short(tp=3), short(tp=3, pp=2), short(tp=2, chunk=7)]


@pytest.mark.parametrize("name", [A9, A14])
@pytest.mark.parametrize("cell", EVERY, ids=lambda cell: cell.name)
@pytest.mark.parametrize(
    ("bug", "op", "what"),
    [
        (mutants.BiasPerRank, "layers.0.o_proj", "node"),
        (mutants.MissingNode, "layers.0.reduce_o", "residual"),
        (mutants.StaleExchange, "layers.0.reduce_o", "residual"),
        (mutants.LostLane, "layers.0.gate_up", "ffn"),
        (naive.NaiveTp, "layers.0.qkv", "q"),
    ],
)
def test_a_bug_of_every_rank_is_named_on_the_first(
    name: str, cell: Cell, bug: type[Worker], op: str, what: str
) -> None:
    found = diverges(the_model(name), cell, rank_body(bug))
    assert named(found) == (op, 0, what)
    assert found is not None and found.position == 0


@pytest.mark.parametrize("name", [A9, A14])
@pytest.mark.parametrize(
    ("bug", "cell", "note"),
    [
        (mutants.BiasPerRank, short(tp=2), "the bias added"),
        (mutants.MissingNode, short(tp=3), "without node ["),
        (mutants.SwappedMerge, short(tp=3), "a merge of node ["),
        (mutants.ChunkEdge, short(chunk=20), "all keys but its own"),
        (mutants.PageReadTwice, short(), "the row of position 32: the wrong page"),
        (mutants.PositionReset, short(pp=2), "row table has token"),
    ],
)
def test_what_a_value_is_equal_to_is_said(
    name: str, bug: type[Worker], cell: Cell, note: str
) -> None:
    found = diverges(the_model(name), cell, rank_body(bug))
    assert found is not None and note in found.note, found


@pytest.mark.parametrize(
    ("name", "bug", "cell", "op", "rank", "position"),
    [
        (A9, mutants.SwappedMerge, short(tp=3), "layers.0.reduce_o", 0, 0),
        (A14, mutants.SwappedMerge, short(tp=3, pp=2), "layers.0.reduce_o", 0, 0),
        (A9, mutants.WrongKvHead, short(tp=2), "layers.0.attention", 1, 0),
        (A9, mutants.WrongKvHead, short(tp=2, chunk=7), "layers.0.attention", 1, 0),
        (A14, mutants.WrongKvHead, short(tp=3), "layers.0.attention", 1, 0),
        (A9, mutants.PositionReset, short(pp=2), "layers.2.qkv", 1, 40),
        (A9, mutants.PositionReset, short(tp=3, pp=2, chunk=39), "layers.2.qkv", 3, 39),
        (A9, mutants.ChunkEdge, short(tp=2, chunk=20), "layers.0.attention", 0, 20),
        (A9, mutants.ChunkEdge, short(tp=3, pp=2, chunk=20), "layers.0.attention", 0, 20),
        (A9, mutants.PageReadTwice, short(tp=2), "layers.0.attention", 0, 40),
        (A9, mutants.Unmasked, short(poison=True, tp=2), "layers.0.attention", 0, 32),
        (A9, naive.NaivePp, short(tp=2, pp=2), "send", 0, 0),
        (A9, naive.NaiveChunk, short(chunk=20), "layers.0.attention", 0, 0),
        ("qwen2", mutants.TiedHeadMissing, short(pp=2, prompt_tokens=5), "head", 1, 4),
        ("qwen2", mutants.TiedHeadMissing, short(tp=2, pp=2, prompt_tokens=5), "head", 2, 4),
    ],
)
def test_a_bug_with_a_place_is_named_there(
    name: str, bug: type[Worker], cell: Cell, op: str, rank: int, position: int
) -> None:
    found = diverges(the_model(name), cell, rank_body(bug))
    assert found is not None and (found.op, found.rank, found.position) == (op, rank, position)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("comm", "op", "what"),
    [
        ("shm", "layers.0.reduce_o", "residual"),
        pytest.param("torch", "layers.0.gather_down", "node", marks=pytest.mark.torch),
    ],
)
def test_ranks_that_are_processes_are_looked_at_too(comm: Any, op: str, what: str) -> None:
    """Over Gloo that bug leaves an exchange out: nothing is published."""
    found = diverges(the_model(A9), short(tp=2, comm=comm), rank_body(mutants.StaleExchange))
    assert named(found) == (op, 0, what)
    assert found is not None and (found.found is None) == (comm == "torch")
    assert comm != "torch" or "nothing where" in found.sentence()


@pytest.mark.ranks
def test_one_loaded_group_runs_the_cell_and_its_unsplit_run() -> None:
    """As `verify` does: the bug shows where a rank begins inside a KV group, so not unsplit."""
    model, epochs = the_model(A9), itertools.count(1)
    group = open_group(model.served, rank_body(mutants.WrongKvHead), forked=True)
    try:
        found = cell_divergence(model.served, group, model, short(tp=2), epochs=epochs)
        assert named(found.found) == ("layers.0.attention", 1, "attention") and found.repeats
        healthy = cell_divergence(model.served, group, model, short(tp=3), epochs=epochs)
        assert healthy.found is None and not healthy.repeats
        assert healthy.sentence() == "it did not repeat"
    finally:
        group.close()


def test_a_search_that_begins_too_late_goes_back_to_the_fault() -> None:
    """Layers after it are wrong too, and its own row may be."""
    cell, bug = short(tp=2), rank_body(mutants.WrongKvHead)
    for layer in (0, 1, 2):
        found = diverges(the_model(A9), cell, bug, at=Target(position=0, layer=layer))
        assert named(found) == ("layers.0.attention", 1, "attention")


# --- how it is said -----------------------------------------------------------------------------


def test_the_unsplit_run_is_held_against_the_reference_too() -> None:
    """A fault that both runs share is no difference between them, but it is one from the replay."""
    model, at = the_model(A9), Target(position=0, layer=0)
    group = open_group(model.served, rank_body(mutants.LostLane), forked=False)
    run = cell_run(group, model, short().unsplit(), epochs=itertools.count(1))
    found = divergence._followed(model.served, run, run, at)
    group.close()
    assert named(found) == ("layers.0.gate_up", 0, "ffn")
    assert found is not None and found.note.startswith("the unsplit run itself")


def test_values_are_said_in_hex() -> None:
    found = diverges(the_model(A9), short(tp=3), rank_body(mutants.SwappedMerge))
    assert found is not None and found.found is not None
    record = found.record()
    assert msgspec.json.decode(msgspec.json.encode(record)) == record
    for name, value in (("found", found.found), ("expected", found.expected)):
        assert np.float32(float.fromhex(record[name])).tobytes() == value.tobytes()
        assert int(record[f"{name}_bits"], 16) == int(value.view(np.uint32))
    assert record["found"] in found.sentence() and record["expected"] in found.sentence()
    assert found.sentence().startswith("layers.0.reduce_o on rank 0 (tp 0, stage 0), position 0: ")
    steps = abs(int(found.found.view(np.int32)) - int(found.expected.view(np.int32)))
    assert found.ulp is not None and found.ulp >= steps > 0


def test_a_nan_equals_a_nan_and_nothing_else() -> None:
    """The sign of a NaN made by an addition differs between instruction sets."""
    nans = np.array([0x7FC00000, 0xFFC00001, 0x7FC00000], np.uint32).view(np.float32)
    right = np.array([np.nan, np.nan, 1.0], np.float32)
    point = Point(op="head", rank=0, what="logit", found=nans, expected=right, describe=str)
    assert point.differing() == ((2,),)
    zeros = replace(
        point, found=np.array([0.0, -0.0], np.float32), expected=np.zeros(2, np.float32)
    )
    assert zeros.differing() == ((1,),)
    assert replace(point, found=None).differing() == ((0,),)
