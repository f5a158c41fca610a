"""What the tests of the first divergence share: short cells, models, and the search itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from gguf_models import write_gguf_model
from grid import Loaded, shape_of, the_model
from models import ADVERSARIAL_9_3, MODELS, QWEN3_SHAPED, write_hf_model
from test_stored import shaped

from anyshard.checkpoint import open_checkpoint
from anyshard.checkpoint.widen import TensorType
from anyshard.config import Llama3Scaling
from anyshard.launcher import RankMain
from anyshard.verify import divergence
from anyshard.verify.cells import Cell
from anyshard.verify.divergence import Divergence, cell_run, first_divergence
from anyshard.verify.driver import open_group, served
from anyshard.verify.points import Target
from anyshard.verify.prompt import hashed_tokens
from anyshard.worker import rank_main

A9, A14 = "adversarial-9-3", "adversarial-14-2"
Bound = Callable[[int], None]


def short(**split: Any) -> Cell:
    """A cell of a few tokens over two blocks."""
    return Cell(axis="mixed", **{"prompt_tokens": 40, "num_tokens": 3, **split})


def diverges(
    model: Loaded, cell: Cell, body: RankMain = rank_main, *, at: Target | None = None
) -> Divergence | None:
    """What is found when the cell's ranks run `body` and the unsplit rank does not.

    at: where the search is told to begin, though nothing may differ there.
    """
    forked = cell.comm in ("shm", "torch")
    suspect = open_group(model.served, body, forked=forked)
    truth = open_group(model.served, rank_main, forked=False)
    epochs = itertools.count(1)
    try:
        runs = (
            cell_run(suspect, model, cell, epochs=epochs),
            cell_run(truth, model, cell.unsplit(), epochs=epochs),
        )
        if at is not None:
            return divergence._followed(model.served, *runs, at)
        return first_divergence(model.served, *runs)
    finally:
        suspect.close()
        truth.close()


def named(found: Divergence | None) -> tuple[str, int, str] | None:
    """Op, rank and what."""
    return None if found is None else (found.op, found.rank, found.what)


LLAMA3 = replace(
    ADVERSARIAL_9_3,
    rope_theta=500.0,
    rope_scaling=Llama3Scaling(
        factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=100
    ),
)
FAMILIES = {**MODELS, "qwen3": QWEN3_SHAPED, "llama 3.1": LLAMA3}


def family(name: str, folder: Path) -> Loaded:
    """A loaded model of random weights; `BF16` and the like are GGUF files of that type."""
    if shape_of(name) in MODELS:
        return the_model(name)
    if name in FAMILIES:
        path, config = folder / "hf", FAMILIES[name]
        write_hf_model(path, config, seed=11, adversarial=True)
    else:
        path, config = folder / "m.gguf", shaped(32)
        write_gguf_model(path, config, kind=cast(TensorType, name), seed=3)
    prompt = hashed_tokens(70, config.vocab, seed=5)
    return Loaded.of(name, served(open_checkpoint(str(path))), prompt)
