"""The program is data: who owns which weight, what is named how, and that ranks agree."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from models import MODELS, QWEN2_SHAPED, QWEN3_SHAPED

from anyshard.config import ModelConfig
from anyshard.epoch import EngineOptions, plan_epoch
from anyshard.layout import Layout, plan
from anyshard.loading import f32_profile
from anyshard.model import Program, program
from anyshard.op import Op, OpKind, Weight

TINY = [config for name, config in MODELS.items() if name.startswith("adversarial")]
TINY.append(QWEN3_SHAPED)
CUTS = [
    (config, tp, pp)
    for config in TINY
    for tp in range(1, config.num_heads + 1)
    for pp in range(1, config.num_layers + 1)
]
IN_ONE_PLACE = ("q", "o", "gate", "up", "down", "q_bias", "gate_bias", "up_bias")
PER_STAGE = ("attn_norm", "q_norm", "k_norm", "mlp_norm", "o_bias", "down_bias", "norm")


def programs(config: ModelConfig, layout: Layout) -> list[Program]:
    return [program(config, f32_profile(), layout, rank) for rank in range(layout.world)]


def name_of(value: object) -> str:
    return f"{value.num_heads}h" if isinstance(value, ModelConfig) else str(value)


def owned(shape: tuple[int, ...], weights: list[Weight]) -> np.ndarray:
    """How many of `weights` cover each element of a tensor of that shape."""
    count = np.zeros(shape, np.int32)
    for weight in weights:
        rows = slice(*weight.rows)
        assert 0 <= weight.rows[0] < weight.rows[1] <= shape[0], weight
        if weight.columns is None:
            assert len(shape) == 1
            count[rows] += 1
        else:
            assert 0 <= weight.columns[0] < weight.columns[1] <= shape[1], weight
            count[rows, slice(*weight.columns)] += 1
    return count


@pytest.mark.parametrize(("config", "tp", "pp"), CUTS, ids=name_of)
def test_every_weight_element_is_owned_once_by_its_cut(
    config: ModelConfig, tp: int, pp: int
) -> None:
    layout = plan(config, tp=tp, pp=pp, leaf=64)
    taken: dict[str, list[Weight]] = {name: [] for name in config.tensor_shapes()}
    for each in programs(config, layout):
        for op in each.ops:
            if op.kind != "embed":
                for weight in op.weights:
                    taken[weight.name].append(weight)
    with_heads = sum(stop > start for start, stop in layout.heads)
    with_ffn = sum(stop > start for start, stop in layout.ffn)
    with_vocab = sum(stop > start for start, stop in layout.vocab)
    holders = {
        "attn_norm": with_heads,
        "q_norm": with_heads,
        "k_norm": with_heads,
        "mlp_norm": with_ffn,
        "norm": with_vocab,
    }
    for name, shape in config.tensor_shapes().items():
        part = name.rsplit(".", 1)[-1]
        count = owned(shape, taken[name])
        if part in IN_ONE_PLACE or part == "head":
            assert (count == 1).all(), name
        elif part in PER_STAGE:
            assert (count == holders.get(part, tp)).all(), name
        elif part == "embed":
            assert (count == 0).all(), "untied: the head has its own"
        else:  # K and V: as many ranks as have a query head of the group
            per_head = count.reshape(config.num_kv_heads, -1)
            for kv_head, counts in enumerate(per_head):
                low, high = kv_head * config.q_per_kv, (kv_head + 1) * config.q_per_kv
                users = sum(start < high and stop > low for start, stop in layout.heads)
                assert (counts == users).all(), name


@pytest.mark.parametrize("tp", [1, 2, 3, 5, 8, 14])
def test_a_tied_head_is_cut_over_the_last_stage_and_looked_up_whole_on_the_first(tp: int) -> None:
    config = QWEN2_SHAPED
    layout = plan(config, tp=tp, pp=2, leaf=64)
    rows = np.zeros(config.vocab, np.int32)
    for each in programs(config, layout):
        kinds = {op.kind: op for op in each.ops}
        assert ("embed" in kinds) == (each.stage == 0) == ("receive" not in kinds)
        assert ("head" in kinds) == (each.stage == 1)
        if each.stage == 0:
            (table,) = kinds["embed"].weights
            assert table.rows == (0, config.vocab)
        else:
            (table,) = (weight for weight in kinds["head"].weights if weight.name == "embed")
            assert table.rows == each.vocab and table.rows[0] % 8 == 0
            rows[slice(*table.rows)] += 1
    assert (rows == 1).all()


@pytest.mark.parametrize(("config", "tp", "pp"), CUTS, ids=name_of)
def test_names_are_unique_and_layer_numbers_are_the_models(
    config: ModelConfig, tp: int, pp: int
) -> None:
    layout = plan(config, tp=tp, pp=pp, leaf=64)
    for each in programs(config, layout):
        names = [op.name for op in each.ops]
        assert len(set(names)) == len(names)
        assert sorted({op.layer for op in each.ops} - {-1}) == list(
            range(*layout.layers[each.stage])
        )
        for op in each.ops:
            assert all(
                weight.name.startswith(f"layers.{op.layer}.")
                for weight in op.weights
                if op.layer >= 0
            )
    layers = [layer for start, stop in layout.layers for layer in range(start, stop)]
    assert layers == list(range(config.num_layers))


@pytest.mark.parametrize(("config", "tp", "pp"), CUTS, ids=name_of)
def test_ranks_of_a_stage_agree_on_every_exchange_and_sum(
    config: ModelConfig, tp: int, pp: int
) -> None:
    layout = plan(config, tp=tp, pp=pp, leaf=64)
    everyone = programs(config, layout)
    for stage in range(pp):
        group = [each for each in everyone if each.stage == stage]
        shared = [
            [op for op in each.ops if op.kind.startswith(("gather_o", "gather_d", "reduce"))]
            for each in group
        ]
        assert all(ops == shared[0] for ops in shared)
        for op in shared[0]:
            nodes = op.sum.nodes_per_rank
            assert len(nodes) == tp
            if op.kind.startswith("gather"):
                assert op.wire_floats == max(nodes) * config.hidden and op.receivers == tp - 1
            else:
                assert len(op.sum.merges) == sum(nodes) == sum(op.sum.merges) + 1
        for each in group:
            kinds = {(op.kind, op.layer): op for op in each.ops}
            for (kind, layer), op in kinds.items():
                if kind in ("o_proj", "down_proj"):
                    reduce = kinds["reduce_o" if kind == "o_proj" else "reduce_down", layer]
                    left = len(op.sum.leaf_lengths) - sum(op.sum.merges)
                    assert left == reduce.sum.nodes_per_rank[each.tp_index]
                    (weight,) = op.weights
                    assert weight.columns is not None
                    assert sum(op.sum.leaf_lengths) == weight.columns[1] - weight.columns[0]


def test_an_idle_rank_still_takes_part_in_every_exchange() -> None:
    config = TINY[0]
    layout = plan(config, heads=(9, 0), leaf=64)
    idle = programs(config, layout)[1]
    kinds = Counter(op.kind for op in idle.ops)
    assert kinds["gather_o"] == kinds["reduce_o"] == config.num_layers
    assert kinds["qkv"] == kinds["attention"] == kinds["o_proj"] == kinds["gate_up"] == 0
    assert idle.weight_bytes == 2 * config.num_layers * config.hidden * 4  # the two biases


def test_weight_bytes_over_ranks_are_the_model_plus_what_is_held_twice() -> None:
    config = QWEN2_SHAPED
    (whole,) = programs(config, plan(config, leaf=64))
    for low, high in pairwise((1, 2, 7)):
        few, many = (
            max(each.weight_bytes for each in programs(config, plan(config, tp=tp, leaf=64)))
            for tp in (low, high)
        )
        assert many < few <= whole.weight_bytes


# --- exchanges of one buffer --------------------------------------------------------------------

#: Of each exchange that is fenced: the op that writes its buffer, its gather, the op that reads it.
FENCED: dict[str, tuple[OpKind, OpKind, OpKind]] = {
    "queries": ("qkv", "gather_q", "attention"),
    "states": ("attention", "gather_states", "merge_states"),
}
SPLIT_ALIKE = [{"tp": tp, "pp": pp} for tp in range(2, 9) for pp in range(1, 4)]
SPLIT_BY_HAND = [
    {"heads": heads, "pp": pp}
    for heads in ((0, 7, 2), (2, 7), (9, 0), (0, 0, 9), (4, 0, 0, 5))
    for pp in (1, 3)
]


def seen_by_all(parts: list[Program], name: str) -> list[set[tuple[OpKind, int]]]:
    """For every use of a fenced exchange: the others in which all ranks of a stage take part
    between their last read of it and their next write, in the next frame where this one ends."""
    writes, gathers, reads = FENCED[name]
    uses: dict[int, list[set[tuple[OpKind, int]]]] = {}
    for part in parts:
        ops = [op for op in part.ops if op.kind != "gather_logits"] * 2
        starts = [at for at, op in enumerate(ops) if op.kind == gathers]
        for use, (start, again) in enumerate(pairwise(starts[: len(starts) // 2 + 1])):
            between = range(start + 1, again)
            read = max((at for at in between if ops[at].kind == reads), default=start)
            written = next(at for at in range(read + 1, len(ops)) if ops[at].kind == writes)
            assert written < again, "what is sent is written before"
            fences = {_place(op) for op in ops[read + 1 : written] if op.kind.startswith("gather")}
            uses.setdefault(use, []).append(fences - {_place(ops[start])})
    assert all(len(each) == len(parts) for each in uses.values()), "one takes no part"
    return [set.intersection(*each) for each in uses.values()]


def _place(op: Op) -> tuple[OpKind, int]:
    return op.kind, op.layer


@pytest.mark.parametrize("split", [*SPLIT_ALIKE, *SPLIT_BY_HAND], ids=str)
def test_a_fenced_buffer_is_read_by_all_before_any_rank_writes_it_again(
    split: dict[str, Any],
) -> None:
    config = MODELS["adversarial-9-3"]
    layout = plan(config, kv_shard="sequence", leaf=64, **split)
    parts = programs(config, layout)
    options = EngineOptions(max_model_len=64)
    sizes = plan_epoch(parts, options, body="scalar", threads=1, spin=False).sizes
    assert {each.name for each in sizes.wires.exchanges if each.is_fenced} == set(FENCED)
    for stage in range(layout.pp):
        group = [part for part in parts if part.stage == stage]
        for name in FENCED:
            found = seen_by_all(group, name)
            assert len(found) == layout.layers[stage][1] - layout.layers[stage][0]
            assert all(found), (name, found)
