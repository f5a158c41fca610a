"""What several ranks hold alike, and which of it a rank hashes besides its share of an output.

The residual is on every TP index of a stage, a KV head on every one whose query heads attend to
it, and what enters a stage is what has left the stage before. The digests on file are of one of
them (`model.py`); the others are hashed so that a rank that holds other bits is seen
(`fidelity/agreement.py`). Integers only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from anyshard.config import ModelConfig
from anyshard.layout import Layout

__all__ = ["Replica", "ReplicaPoint", "replicas_of"]

#: hop: the residual as a stage has received it, before its first layer.
ReplicaPoint = Literal["embed", "hop", "k", "v", "reduce_o", "reduce_down"]


@dataclass(frozen=True)
class Replica:
    """Equal on all ranks that hold it. layer: -1 for embed; for hop, the one that it enters.

    head: of k and v, a global KV head; else -1.
    """

    layer: int
    point: ReplicaPoint
    head: int = -1


def replicas_of(config: ModelConfig, layout: Layout, rank: int) -> tuple[Replica, ...]:
    """What a rank hashes of its own besides its share, in the order of a step; v follows its k.

    Residuals on all TP indices but the first, which hashes its own for the file; a shared KV head
    on all ranks that have it, since its owner's digest on file is of all heads that it owns.

    Held by: test_replicas.py.
    """
    stage, tp_index = layout.coordinates(rank)
    return tuple(_replicas(config, layout, stage, tp_index))


def _replicas(config: ModelConfig, layout: Layout, stage: int, tp_index: int) -> Iterator[Replica]:
    first, last = layout.layers[stage]
    if stage:
        yield Replica(first, "hop")
    elif tp_index:
        yield Replica(-1, "embed")
    # where ranks split the sequence, a row's keys are on one rank alone
    split = layout.splits_sequence
    heads = () if split else _shared_heads(layout, tp_index, config.q_per_kv)
    for layer in range(first, last):
        for head in heads:
            yield Replica(layer, "k", head)
            yield Replica(layer, "v", head)
        if tp_index:
            yield Replica(layer, "reduce_o")
            yield Replica(layer, "reduce_down")


def _shared_heads(layout: Layout, tp_index: int, q_per_kv: int) -> tuple[int, ...]:
    """KV heads here that another TP index has too: at most the first and the last, since query
    heads are cut into contiguous spans."""
    start, stop = layout.heads[tp_index]
    if start == stop:
        return ()
    low, high = layout.kv_heads(tp_index, q_per_kv)
    shared = {low} if start % q_per_kv else set()
    if stop % q_per_kv:
        shared.add(high - 1)
    return tuple(sorted(shared))
