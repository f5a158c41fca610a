"""The front's log of digests: rows are laid by and summed many at a time, and none is mixed up."""

from __future__ import annotations

import numpy as np
import pytest
from models import MODELS

from anyshard.fidelity.log import DigestLog, RecordedRow
from anyshard.layout import plan
from anyshard.loading import f32_profile
from anyshard.model import program


@pytest.mark.parametrize("each", [1, 3, 64, 255, 256])
def test_rows_are_laid_by_as_long_as_there_is_room(each: int) -> None:
    """Steps of so many rows, every second one with logits: none is lost, and none mixed up."""
    model = MODELS["adversarial-9-3"]
    layout = plan(model, tp=1, pp=1, leaf=64)
    part = program(model, f32_profile(), layout, 0)
    numbers = np.random.default_rng(each).integers(0, 1 << 63, (600, part.record_columns))
    log = DigestLog([part], rows_max=256)
    log.open(7, positions=600, emitted=300)
    heads, steps = [], range(0, 600, each)
    for first in steps:
        whole = numbers[first : first + each].astype(np.uint64)
        last = first + len(whole)
        drawn = [p for p in range(first, last) if p % 2]
        rows = [
            RecordedRow(7, p, bool(p % 2), len(heads) + drawn.index(p) if p % 2 else None)
            for p in range(first, last)
        ]
        log.add(rows, [whole])
        heads += [numbers[first + index, part.digest_columns - 1] for index in range(len(drawn))]
    run = log.take(7, emitted=300)
    assert run.embed.tolist() == numbers[:, 0].tolist()
    layers = numbers[:, 1 : part.digest_columns - 1]
    assert run.layers.reshape(600, -1).tolist() == layers.tolist()
    assert run.logits.tolist() == heads


@pytest.mark.parametrize("is_kept", [True, False])
def test_ranks_may_disagree_in_a_row_that_failed(is_kept: bool) -> None:
    model = MODELS["adversarial-9-3"]
    layout = plan(model, tp=2, pp=1, leaf=64)
    parts = [program(model, f32_profile(), layout, rank) for rank in range(2)]
    log = DigestLog(parts, rows_max=2)
    log.open(7, positions=2, emitted=1)
    digests = [np.zeros((2, part.record_columns), np.uint64) for part in parts]
    digests[1][1, parts[1].replica_column(parts[1].replicas[0])] = 1
    log.add([RecordedRow(7, 0, False, None), RecordedRow(7, 1, False, None, is_kept)], digests)
    run = log.take(7, emitted=0)
    assert len(run.embed) == 1 + is_kept
    assert (run.disagreement is not None) == is_kept
