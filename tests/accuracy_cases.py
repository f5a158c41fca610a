"""Models in memory for the tests of `anyshard.accuracy`, with right and wrong weights.

The engine is given one set of weights, float64 (and HF) another: so faults are planted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyshard.accuracy.measure import compare
from anyshard.accuracy.report import OpFigures, Report
from anyshard.checkpoint.source import Checkpoint, TensorSource
from anyshard.checkpoint.widen import TensorType
from anyshard.config import ModelConfig
from anyshard.loading import f32_profile
from anyshard.ops.float64 import Reference64
from anyshard.verify.driver import served
from anyshard.worker import Served, Worker

F32 = NDArray[np.float32]
Weights = Mapping[str, F32]
Place = tuple[int | None, str]  # layer and point of a row

VISIBLE = 8.0  # times the error of the same op without the fault: beyond what rounding varies by


def in_memory(config: ModelConfig, weights: Weights) -> Checkpoint:
    """A checkpoint that stores these float32 arrays."""
    kind: TensorType = "F32"
    sources = {
        name: TensorSource(
            name=name,
            file_name=name,
            shape=weights[name].shape,
            type=kind,
            raw=np.ascontiguousarray(weights[name]).view(np.uint8).reshape(-1),
        )
        for name in config.tensor_shapes()
    }
    return Checkpoint(path=Path("memory"), config=config, sources=sources, tokenizer_material=None)


def measured(
    config: ModelConfig,
    weights: Weights,
    tokens: Sequence[int],
    *,
    lengths: Sequence[int] | None = None,
    engine_config: ModelConfig | None = None,
    engine_weights: Weights | None = None,
    worker_type: type[Worker] = Worker,
    peer: Any = None,
) -> Report:
    """`compare` of an engine that may have another configuration, weights or worker."""
    image = served(in_memory(config, engine_weights or weights)).image
    return compare(
        Served(engine_config or config, f32_profile(), image),
        Reference64(config, weights),
        tokens,
        lengths=lengths or (len(tokens),),
        worker_type=worker_type,
        peer=peer,
    )


def rows(ops: Sequence[OpFigures]) -> dict[Place, OpFigures]:
    """By layer and point."""
    return {(op.layer, op.point): op for op in ops}


def visible(planted: Sequence[OpFigures], clean: Sequence[OpFigures]) -> set[Place]:
    """Rows whose relative error is VISIBLE times that of the run without the fault."""
    before = rows(clean)
    return {
        place
        for place, op in rows(planted).items()
        if (op.relative_error or 0) > VISIBLE * (before[place].relative_error or 0)
    }
