"""Faults of one rank, each named by its op and its rank: a weight, a row, a buffer, a hop.

Each is one mistake of one rank, which the grid would only see as another digest. Those that stand
for a public bug are in tests/mutants; the others have no other home.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mutants
import numpy as np
import pytest
from divergences import A9, A14, Bound, diverges, family, named, short
from grid import KV8, Loaded, run_cell, the_model
from mutants.exhibits import bug, shows
from mutants.scoreboard import rerun, score
from mutants.weights import HIGH_BIT, altered, flip
from test_stored import HELD

from anyshard.binder import Binder
from anyshard.config import ModelConfig
from anyshard.model import program
from anyshard.op import Op, Weight
from anyshard.ops.kv_pages import packed_row, unpack_row
from anyshard.verify.cells import Cell
from anyshard.verify.naive import rank_body
from anyshard.verify.points import Target
from anyshard.verify.prompt import hashed_tokens
from anyshard.worker import Worker, rank_main

# --- weights ------------------------------------------------------------------------------------


KIND_OF = {
    **{"q": "qkv", "k": "qkv", "v": "qkv", "o": "o_proj", "gate": "gate_up", "up": "gate_up"},
    **{"down": "down_proj", "head": "head", "embed": "embed"},
}


def weight_of(model: Loaded, cell: Cell, rank: int, name: str) -> Weight:
    """The cut of a tensor that the rank maps."""
    ops = program(model.config, model.profile, cell.layout(model), rank).ops
    return next(weight for op in ops for weight in op.weights if weight.name == name)


def place_in(weight: Weight, salt: int) -> tuple[int, int]:
    """An element of the cut, without pattern."""
    assert weight.columns is not None
    spans = (weight.rows, weight.columns)
    row, column = (
        low + hashed_tokens(1, high - low, seed=salt + i)[0] for i, (low, high) in enumerate(spans)
    )
    return row, column


def words(part: str, config: ModelConfig, row: int, column: int, position: int) -> str:
    """How the output that the weight enters is named; of a rotated pair, the first one."""
    head, dim = divmod(row, config.head_dim)
    pair = dim % (config.head_dim // 2) if position else dim
    return {
        "q": f"q of head {head}, dim {pair}",
        "k": f"key, KV head {head}, dim {pair}",
        "v": f"value, KV head {head}, dim {dim}",
        "o": f"output {row}",
        "down": f"output {row}",
        "gate": f"ffn column {row}",
        "up": f"ffn column {row}",
        "head": f"logit of vocabulary id {row}",
        "embed": f"residual {column}",
    }[part]


@pytest.mark.parametrize("storage", ["F32", *HELD])
@pytest.mark.parametrize(("tp", "pp", "rank"), [(2, 1, 1), (3, 1, 2), (3, 2, 4), (2, 1, 0)])
def test_one_flipped_bit_on_one_rank_is_named(
    storage: str, tp: int, pp: int, rank: int, tmp_path: Path
) -> None:
    """Of every kind of matrix: layer, op, rank, and the output that the weight enters."""
    model = family(storage, tmp_path)
    cell = short(tp=tp, pp=pp, prompt_tokens=20)
    here = cell.layout(model).layers[rank // tp]
    layer = here[1] - 1
    parts = [*"qkvo", "gate", "up", "down"]
    parts += ["embed"] if here[0] == 0 else []
    parts += ["head"] if here[1] == model.config.num_layers else []
    for salt, part in enumerate(parts):
        name = part if part in ("embed", "head") else f"layers.{layer}.{part}"
        weight = weight_of(model, cell, rank, name)
        row, column = place_in(weight, 10 * salt)
        if part == "embed":
            row = model.prompt[3]
        change = flip(row, column, HIGH_BIT[model.served.image.storage[name]])
        found = diverges(model, cell, altered(name, change, rank=rank))
        assert found is not None, name
        op = KIND_OF[part] if part in ("embed", "head") else f"layers.{layer}.{KIND_OF[part]}"
        assert (found.op, found.rank) == (op, rank), found.sentence()
        wanted = words(part, model.config, row, column, found.position)
        assert found.place.endswith(wanted), found.sentence()
        if part == "embed":
            assert found.position == 3
        if part in ("o", "down"):
            low, high = (int(n) for n in found.place.split("(k ")[1].split(")")[0].split(" to "))
            assert low <= column < high


@pytest.mark.parametrize("name", [A9, A14])
def test_a_flipped_bit_that_is_seen_at_all_is_named(name: str) -> None:
    """Any bit of weights over 40 binades: most are lost in rounding, none is named wrongly."""
    model, cell = the_model(name), short(tp=2, prompt_tokens=20)
    seen = 0
    for salt in range(24):
        part = ["q", "k", "v", "o", "gate", "up", "down", "head"][salt % 8]
        rank, layer, bit = salt % 2, model.config.num_layers - 1, salt % 23
        tensor = part if part == "head" else f"layers.{layer}.{part}"
        row, column = place_in(weight_of(model, cell, rank, tensor), salt)
        body = altered(tensor, flip(row, column, bit), rank=rank)
        found = diverges(model, cell, body)
        if found is None:
            assert run_cell(model, cell, rank_body=body).digest == run_cell(model, cell).digest
            continue
        seen += 1
        op = part if part == "head" else f"layers.{layer}.{KIND_OF[part]}"
        assert (found.op, found.rank) == (op, rank), found.sentence()
        assert found.differing == 1 and found.ulp is not None
    assert 3 <= seen < 24


@pytest.mark.parametrize(
    ("vector", "op"),
    [
        ("layers.1.attn_norm", "layers.1.qkv"),
        ("layers.1.q_bias", "layers.1.qkv"),
        ("layers.1.v_bias", "layers.1.qkv"),
        ("layers.1.o_bias", "layers.1.reduce_o"),
        ("layers.1.mlp_norm", "layers.1.gate_up"),
        ("layers.1.up_bias", "layers.1.gate_up"),
        ("layers.1.down_bias", "layers.1.reduce_down"),
        ("norm", "head"),
    ],
)
@pytest.mark.parametrize(("name", "tp", "rank"), [(A9, 2, 1), (A14, 3, 2)])
def test_a_wrong_vector_on_one_rank_is_named(
    name: str, tp: int, rank: int, vector: str, op: str
) -> None:
    def change(values: Any) -> None:
        values *= np.float32(1.5)

    found = diverges(the_model(name), short(tp=tp), altered(vector, change, rank=rank))
    assert found is not None and (found.op, found.rank) == (op, rank)


# --- rows, buffers and hops ---------------------------------------------------------------------


def test_stale_row_after_a_shorter_rerun() -> None:
    for name in (A9, A14):
        model, cell = the_model(name), short(tp=2)
        assert rerun(model, cell, rank_main) == (False, None)
        _, found = rerun(model, cell, rank_body(mutants.StaleRow))
        assert named(found) == ("layers.1.attention", 1, "value")
        assert found is not None and (found.position, found.kv_position) == (9, 5)
        assert found.note.startswith("a stale row")
        _, found = rerun(model, cell, rank_body(mutants.LongerThanItIs))
        assert named(found) == ("layers.0.attention", 0, "attention")
        assert found is not None and found.position == 4


class CorruptedBefore(Binder):
    """Key row 3 of layer 1 is stored wrong, though the row itself still reads the right one."""

    def bind(self, op: Op) -> Bound:
        run = super().bind(op)
        w: Any = self.w
        if op.layer != 1 or op.kind not in ("qkv", "attention") or w.program.tp_index != 1:
            return run
        pages = w.kv.keys(1)

        def around(rows: int) -> None:
            mine = 3 in w.positions[:rows]
            if op.kind == "attention" and mine:
                unpack_row(pages, 0, 3, w.right, keys=True)
            run(rows)
            if mine:
                w.right = packed_row(pages, 0, 3, keys=True)
                wrong = w.right.copy()
                wrong[:, : w.config.head_dim] += 1
                unpack_row(pages, 0, 3, wrong, keys=True)

        return around


class Corrupted(Worker):
    """See CorruptedBefore."""

    binder_type = CorruptedBefore


@pytest.mark.parametrize("name", [A9, A9 + KV8])
def test_a_row_that_was_stored_wrong_is_named_where_it_was_stored(name: str) -> None:
    """The first residual that differs is a later row's: the search goes back to the row itself."""
    found = diverges(the_model(name), short(tp=2, chunk=1), rank_body(Corrupted))
    assert named(found) == ("layers.1.qkv", 1, "key")
    assert found is not None and found.position == 3


@pytest.mark.parametrize(
    ("bug", "note"),
    [
        (mutants.OverwrittenAfter, "before every rank had read it"),
        (mutants.OverwrittenBefore, "before it was sent"),
    ],
)
@pytest.mark.parametrize("tp", [2, 3])
def test_a_buffer_written_again_is_named_by_its_owner(
    bug: type[Worker], note: str, tp: int
) -> None:
    found = diverges(the_model(A9), short(tp=tp), rank_body(bug))
    assert named(found) == ("layers.0.gather_o", 1, "node")
    assert found is not None and note in found.note


class WrongHopBinder(Binder):
    """TP index 1 sends its rows one place late, or never stores the last row that it received."""

    def _send(self, op: Op) -> Bound:
        comm, x = self.w.comm, self.w.x_RD
        if self.w.program.tp_index != 1:
            return super()._send(op)
        return lambda rows: comm.send(np.ascontiguousarray(np.roll(x[:rows], 1, axis=0)))


class WrongHop(Worker):
    """See WrongHopBinder."""

    binder_type: type[Binder] = WrongHopBinder


class LostHopBinder(Binder):
    """TP index 1 leaves the last row of a hop as it was."""

    def _receive(self, op: Op) -> Bound:
        receive, x = super()._receive(op), self.w.x_RD
        if self.w.program.tp_index != 1:
            return receive

        def run(rows: int) -> None:
            last = x[rows - 1].copy()
            receive(rows)
            x[rows - 1] = last

        return run


class LostHop(Worker):
    """See LostHopBinder."""

    binder_type: type[Binder] = LostHopBinder


@pytest.mark.parametrize(
    ("bug", "op", "rank", "position"), [(WrongHop, "send", 1, 0), (LostHop, "receive", 3, 6)]
)
def test_a_wrong_hop_is_named_by_who_made_it(
    bug: type[Worker], op: str, rank: int, position: int
) -> None:
    found = diverges(the_model(A9), short(tp=2, pp=2, chunk=7), rank_body(bug))
    assert found is not None and (found.op, found.rank, found.position) == (op, rank, position)


class WrongGather(Worker):
    """The sampler puts the second shard of logits one place too far."""

    def _gather_logits(self, count: int) -> None:
        super()._gather_logits(count)
        if self.is_sampler:
            start, stop = self.plan.layout.vocab[1]
            self.logits_RV[:count, start:stop] = np.roll(self.logits_RV[:count, start:stop], 1, 1)


class WrongToken(Worker):
    """The sampler draws the next id after the first token."""

    def _sample(self, flags: list[int]) -> Any:
        logits = super()._sample(flags)
        sampled = self.drawn >= 0
        self.drawn[sampled] = (self.drawn[sampled] + 1) % self.config.vocab
        return logits


def test_gathered_logits_and_drawn_tokens() -> None:
    """The shards of the logits are right in both; only what is made of them is not."""
    found = diverges(the_model(A9), short(tp=2, pp=2), rank_body(WrongToken))
    assert named(found) == ("sample", 2, "token") and found is not None and found.position == 39
    for at in (None, Target(position=39, layer=2)):
        found = diverges(the_model(A9), short(tp=2, pp=2), rank_body(WrongGather), at=at)
        assert named(found) == ("gather_logits", 2, "logit")
        assert found is not None and found.position == 39


class WrongPair(Worker):
    """TP index 1 sends a value that is not its best logit's, and wins with it."""

    def _best_here(self, index: int) -> Any:
        value, token = super()._best_here(index)
        return value + 1000 * (self.program.tp_index == 1), token


def test_a_wrong_pair_is_named_by_the_rank_that_sent_it() -> None:
    """Where nobody wants logits, only (value, id) of each rank's best one travel."""
    exhibit = shows(A9, "sample", 3, tp=2, pp=2, prompt_logits=0)
    row = score(bug("value", "", ("", ""), WrongPair, exhibit, scenario="pairs"), exhibit)
    assert (row.op, row.rank, row.verdict) == ("sample", 3, "right")
    assert ": value of its best logit: " in row.sentence
