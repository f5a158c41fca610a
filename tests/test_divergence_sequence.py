"""Faults of ranks that split the sequence: op and rank are named as they are where ranks do not.

The bugs are those of other tests; what is new is that a key or value is on one rank only, and that
what a rank reads of others is queries and states. Bugs of that itself: tests/mutants/sequence.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mutants
import numpy as np
import pytest
from divergences import A9, A14, Bound, diverges, family, short
from grid import the_model
from mutants.weights import HIGH_BIT, altered, flip
from test_divergence_faults import KIND_OF, place_in, weight_of, words

from anyshard.binder import Binder
from anyshard.op import Op
from anyshard.verify.cells import Cell
from anyshard.verify.naive import rank_body
from anyshard.worker import Worker


def cell(**split: Any) -> Cell:
    """Over four blocks, so that of two ranks each keeps two."""
    return short(**{"prompt_tokens": 110, "kv_shard": "sequence", **split})


@pytest.mark.parametrize(("tp", "pp", "rank"), [(2, 1, 1), (3, 2, 4), (2, 1, 0), (4, 1, 2)])
def test_one_flipped_bit_on_one_rank_is_named(tp: int, pp: int, rank: int, tmp_path: Path) -> None:
    """Of k and v, whose weights are on all ranks, at the first position that the rank keeps."""
    model, split = family("F32", tmp_path), cell(tp=tp, pp=pp, prompt_tokens=70)
    layout = split.layout(model)
    layer = layout.layers[rank // tp][1] - 1
    first, stop = layout.stripes(rank % tp)
    kept = min(block for block in range(3) if first <= (0, 4, 2)[block] < stop)
    for salt, part in enumerate([*"qkvo", "gate", "down"]):
        name = f"layers.{layer}.{part}"
        weight = weight_of(model, split, rank, name)
        row, column = place_in(weight, 10 * salt)
        change = flip(row, column, HIGH_BIT[model.served.image.storage[name]])
        found = diverges(model, split, altered(name, change, rank=rank))
        assert found is not None, name
        assert (found.op, found.rank) == (f"layers.{layer}.{KIND_OF[part]}", rank), found.sentence()
        assert found.place.endswith(words(part, model.config, row, column, found.position))
        if part in ("k", "v"):
            assert found.position // 32 == kept, found.sentence()


@pytest.mark.parametrize(
    ("bug", "split", "op", "rank"),
    [
        (mutants.BiasPerRank, {"tp": 2}, "layers.0.o_proj", 0),
        (mutants.MissingNode, {"tp": 3, "pp": 2}, "layers.0.reduce_o", 0),
        (mutants.NotReduced, {"tp": 2}, "layers.0.reduce_o", 1),
        (mutants.StaleExchange, {"tp": 4}, "layers.0.reduce_o", 0),
        (mutants.OverwrittenBefore, {"tp": 2}, "layers.0.gather_o", 1),
        (mutants.ChunkPositions, {"tp": 2, "chunk": 50}, "layers.0.qkv", 0),
        (mutants.PreviousChunk, {"tp": 2, "pp": 2, "chunk": 20}, "receive", 2),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_bugs_of_the_rest_are_named_as_ever(
    bug: type[Worker], split: dict[str, int], op: str, rank: int
) -> None:
    found = diverges(the_model(A9), cell(**split), rank_body(bug))
    assert found is not None and (found.op, found.rank) == (op, rank), found


class SpoiltRow(Worker):
    """Rank 1 loses the key of position 37, which it keeps, once it has been stored."""

    frames = 0

    def step(self, frame: Any) -> None:
        if self.program.rank == 1 and self.frames == 1:
            page = self.page_table[self.row_slot[0], 1]
            self.kv.keys(1)[page, :, :, 5] += 1
        super().step(frame)
        self.frames += 1


def test_a_stored_key_that_was_lost_is_named_with_its_position() -> None:
    """On the rank that keeps it, and no other is accused."""
    found = diverges(the_model(A9), cell(tp=2, chunk=60), rank_body(SpoiltRow))
    assert found is not None and (found.op, found.rank) == ("layers.1.attention", 1)
    assert found.kv_position == 37 and found.place.startswith("stored key of position 37")


class OtherQueryBinder(Binder):
    """Rank 0 attends with other queries than it was sent."""

    def _gather_q(self, op: Op) -> Bound:
        gather, w = super()._gather_q(op), self.w
        if op.layer or w.program.tp_index:
            return gather

        def run(rows: int) -> None:
            gather(rows)
            w.query_sources()[1][:rows] *= np.float32(0.5)

        return run


class OtherQuery(Worker):
    """See OtherQueryBinder."""

    binder_type = OtherQueryBinder


class TornStatesBinder(Binder):
    """What rank 2 has been sent is altered before it is merged."""

    def _merge_states(self, op: Op) -> Bound:
        merge, w = super()._merge_states(op), self.w
        if op.layer != 1 or w.program.tp_index != 2:
            return merge

        def run(rows: int) -> None:
            start = 2 * rows * w.program.row_wire("gather_states")
            w.comm.exchange("states").sources(0)[0][start + 2] += 1
            merge(rows)

        return run


class TornStates(Worker):
    """See TornStatesBinder."""

    binder_type = TornStatesBinder


@pytest.mark.parametrize("name", [A9, A14])
def test_what_was_gathered_and_changed_is_named_where_it_shows(name: str) -> None:
    found = diverges(the_model(name), cell(tp=2), rank_body(OtherQuery))
    assert found is not None and found.op == "layers.0.gather_q" and found.what == "q"
    found = diverges(the_model(name), cell(tp=3), rank_body(TornStates))
    assert found is not None and (found.op, found.rank) == ("layers.1.gather_states", 2)
    assert found.note == "rank 0 sent the right state"
