"""What several ranks hold alike: every one of them hashes it, and one that differs is named.

Records are those of test_record.py, of small models; bugs strike one rank at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import mutants
import numpy as np
import pytest
from models import ADVERSARIAL_9_3, MODELS
from test_record import PROMPT, cell, recorded, unsplit

from anyshard.binder import Binder
from anyshard.fidelity import Disagreement, Divergence, Record, compare_records
from anyshard.fidelity.agreement import order_in_step
from anyshard.layout import KvShard, plan
from anyshard.loading import f32_profile
from anyshard.model import program
from anyshard.op import LAYER_POINTS, Op
from anyshard.replicas import Replica
from anyshard.verify.cells import Cell
from anyshard.verify.naive import rank_body
from anyshard.worker import Worker

A9 = "adversarial-9-3"


def first_of(split: Cell, bug: type[Worker]) -> Divergence:
    """Where a bugged run first differs from the unsplit one; it differs from itself there too."""
    want = unsplit(A9, split.prompt_tokens, split.num_tokens)
    got = recorded(A9, split, rank_body=rank_body(bug))[0]
    found = compare_records(want, got).first
    assert found is not None
    if found.rank is not None:
        again = compare_records(got, got).first
        assert again == replace(found, run=0) and found.run == 1
    return found


# --- what is hashed -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("kv_shard", ["heads", "sequence"])
def test_all_that_a_rank_shares_with_another_it_hashes(
    name: str, pp: int, kv_shard: KvShard
) -> None:
    """Where ranks split the sequence, keys and values of a row are on one of them."""
    config = MODELS[name]
    for tp in range(1, config.num_heads + 1):
        if tp > 8 and kv_shard == "sequence":
            break
        layout = plan(config, tp=tp, pp=pp, kv_shard=kv_shard, leaf=64)
        every = [
            program(config, f32_profile(), layout, rank, record=True)
            for rank in range(layout.world)
        ]
        for here in every:
            peers = [each for each in every if each.stage == here.stage and each is not here]
            first, last = here.layers
            wanted = set()
            if here.stage:
                wanted.add(Replica(first, "hop"))
            elif here.tp_index:
                wanted.add(Replica(-1, "embed"))
            for layer in range(first, last):
                if here.tp_index:
                    wanted |= {Replica(layer, "reduce_o"), Replica(layer, "reduce_down")}
                for head in range(*here.kv_heads):
                    alike = [each for each in peers if each.stripes == here.stripes]
                    if any(head in range(*each.kv_heads) for each in alike):
                        wanted |= {Replica(layer, "k", head), Replica(layer, "v", head)}
            assert set(here.replicas) == wanted
            hashed = [each for op in here.ops for each in op.replicas]
            assert sorted(hashed, key=repr) == sorted(wanted, key=repr)
            columns = [here.replica_column(each) for each in here.replicas]
            assert columns == list(range(here.digest_columns, here.record_columns - 1))


def test_the_order_of_a_step() -> None:
    places = [(None, "embed"), *((1, point) for point in ("hop", *LAYER_POINTS)), (2, "hop")]
    orders = [order_in_step(layer, point) for layer, point in places]
    assert orders == sorted(orders) and len(set(orders)) == len(orders)


# --- bugs of one rank ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "bug", "op", "rank"),
    [
        (cell(tp=2), mutants.NotReduced, "layers.0.reduce_o", 1),
        (cell(tp=3), mutants.NotReduced, "layers.0.reduce_o", 1),
        (cell(pp=2), mutants.ReusedHopBuffer, "layers.2.hop", 1),
        (cell(tp=2, pp=2), mutants.ReusedHopBuffer, "layers.2.hop", 2),
        (cell(pp=2), mutants.TransposedHop, "layers.2.hop", 1),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "name", str(value))),
)
def test_a_bug_that_another_rank_than_the_hashing_one_has_is_named(
    split: Cell, bug: type[Worker], op: str, rank: int
) -> None:
    found = first_of(split, bug)
    assert (found.op, found.rank, found.position) == (op, rank, 0)


def test_the_hop_before_is_named_at_the_chunk_that_had_it() -> None:
    found = first_of(cell(pp=2, chunk=20), mutants.PreviousChunk)
    assert (found.op, found.rank, found.position) == ("layers.2.hop", 1, 20)


class OneRankBinder(Binder):
    """One bit of what an op has written on one rank: of the residual, or of a stored KV head."""

    rank, kind, layer, head = 0, "", 0, -1

    def bind(self, op: Op) -> Callable[[int], None]:
        run, w = super().bind(op), self.w
        if (op.kind, op.layer, w.program.rank) != (self.kind, self.layer, self.rank):
            return run
        if self.head < 0:
            spoilt = w.x_RD[PROMPT - 1].view(np.uint32)
        else:
            values = w.kv.values(op.layer).view(np.uint32)
            page, lane = divmod(PROMPT - 1, 32)
            spoilt = values[page, self.head - w.program.kv_heads[0], lane]

        def flipped(rows: int) -> None:
            run(rows)
            if rows == PROMPT:
                spoilt[3] ^= 1

        return flipped


def one_bit(**where: Any) -> type[Worker]:
    return type("Flipping", (Worker,), {"binder_type": type("Flip", (OneRankBinder,), where)})


@pytest.mark.parametrize(
    ("rank", "kind", "layer", "named"),
    [
        (1, "embed", -1, "embed"),
        (2, "reduce_o", 0, "layers.0.reduce_o"),
        (1, "reduce_down", 1, "layers.1.reduce_down"),
        (3, "receive", -1, "layers.2.hop"),
        (4, "receive", -1, "layers.2.hop"),
        (5, "reduce_down", 2, "layers.2.reduce_down"),
        (4, "reduce_o", 2, "layers.2.reduce_o"),
    ],
)
def test_one_bit_of_a_residual_is_named_on_whichever_rank_it_is(
    rank: int, kind: str, layer: int, named: str
) -> None:
    assert plan(ADVERSARIAL_9_3, tp=3, pp=2, leaf=64).layers[0] == (0, 2)
    split = cell(tp=3, pp=2, num_tokens=1)
    found = first_of(split, one_bit(rank=rank, kind=kind, layer=layer))
    assert (found.op, found.rank, found.position) == (named, rank, PROMPT - 1)


def test_one_bit_of_a_residual_that_is_on_file_needs_no_rank_to_be_named() -> None:
    """Of the first rank of a stage: its digest differs from the other run's, and is named."""
    found = first_of(cell(tp=2, num_tokens=1), one_bit(rank=0, kind="reduce_o", layer=1))
    assert (found.op, found.rank, found.position) == ("layers.1.reduce_o", None, PROMPT - 1)


@pytest.mark.parametrize("tp", [2, 9])
def test_one_bit_of_a_kv_head_is_named_on_whichever_rank_it_is(tp: int) -> None:
    """Head 1 of three; cut in nine, three ranks have one of its query heads each."""
    layout = plan(ADVERSARIAL_9_3, tp=tp, pp=1, leaf=64)
    holders = [index for index in range(tp) if 1 in range(*layout.kv_heads(index, 3))]
    assert len(holders) == (2 if tp == 2 else 3)
    for rank in holders:
        bug = one_bit(rank=rank, kind="qkv", layer=1, head=1)
        found = first_of(cell(tp=tp, num_tokens=1), bug)
        wanted = rank if rank != holders[0] else None
        assert (found.op, found.rank, found.position) == ("layers.1.v", wanted, PROMPT - 1)


# --- what is said of them -----------------------------------------------------------------------


def with_disagreement(record: Record, **place: Any) -> Record:
    found = Disagreement(**{"layer": 1, "point": "reduce_o", "rank": 1, "other": 0, **place})
    return replace(record, manifest=msgspec.structs.replace(record.manifest, disagreement=found))


def test_the_earlier_of_a_digest_and_of_ranks_that_disagree_is_first() -> None:
    record = unsplit(A9)
    layers = record.digests.layers.copy()
    layers[3, 1, LAYER_POINTS.index("reduce_o") :] += np.uint64(1)
    other = replace(record, digests=replace(record.digests, layers=layers))
    for place, rank in (
        ({"position": 3}, None),  # the digest is of the rank that is wrong
        ({"position": 3, "point": "reduce_down"}, None),
        ({"position": 4, "layer": 0}, None),
        ({"position": 2}, 1),
        ({"position": 3, "layer": 0}, 1),
        ({"position": 3, "point": "k"}, 1),
        ({"position": 3, "point": "hop"}, 1),
        ({"position": 3, "layer": None, "point": "embed"}, 1),
    ):
        found = compare_records(with_disagreement(record, **place), other).first
        assert found is not None and found.rank == rank
        assert found.run == (None if rank is None else 0)


def test_ranks_that_disagree_where_the_other_run_has_not_come_to_say_nothing() -> None:
    short, long = unsplit(A9, PROMPT, 2), unsplit(A9)
    assert compare_records(short, with_disagreement(long, position=PROMPT + 1)).equal
    found = compare_records(short, with_disagreement(long, position=PROMPT)).first
    assert found is not None and (found.position, found.run) == (PROMPT, 1)


def test_rows_that_failed_are_not_held_against_ranks() -> None:
    """Each rank has NaN of its own there; the fault is what is told."""
    poisoned = cell(tp=2, prompt_tokens=7, num_tokens=2, poison=True)
    failed = recorded(A9, poisoned, rank_body=rank_body(mutants.Unmasked))[0]
    assert failed.manifest.fault is not None
    assert failed.manifest.disagreement is msgspec.UNSET


def test_of_a_batch_only_the_run_that_ranks_disagree_in_says_so() -> None:
    batch = cell(batch=5, tp=2, place="first", chunk=64, num_tokens=1)
    records = recorded(A9, batch, rank_body=rank_body(by_slot(0)))
    found = [record.manifest.disagreement for record in records]
    assert found[0] is not msgspec.UNSET and set(found[1:]) == {msgspec.UNSET}


def by_slot(slot: int) -> type[Worker]:
    """Rank 1 flips a bit of the residual of the rows of one slot, after o_proj of layer 0."""

    class Flip(Binder):
        def _reduce_o(self, op: Op) -> Callable[[int], None]:
            run, w = super()._reduce_o(op), self.w
            x = w.x_RD.view(np.uint32)

            def flipped(rows: int) -> None:
                run(rows)
                if op.layer == 0 and w.program.rank == 1:
                    x[np.flatnonzero(w.row_slot[:rows] == slot), 3] ^= 1

            return flipped

    return type("Flipping", (Worker,), {"binder_type": Flip})
