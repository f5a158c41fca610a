"""Traces: what a rank did adds up to all of its time, and the file gives back what went into it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grid import the_model
from hypothesis import given
from hypothesis import strategies as st
from models import ADVERSARIAL_9_3, write_hf_model
from test_speculate import A9, answers, group_of, prompts_of
from test_windows import FAR, Busy, windowed

from anyshard.bench.timeline import page, predicted, run_record, run_text
from anyshard.cli import main
from anyshard.comm.link import LinkSpec
from anyshard.engine import Engine
from anyshard.epoch import EngineOptions
from anyshard.errors import TraceError
from anyshard.layout import plan, wire_boundaries
from anyshard.request import Request
from anyshard.trace import (
    EVENT,
    KINDS,
    RankTrace,
    Run,
    balanced,
    bubble,
    pace,
    read_trace,
    shares,
    span_ns,
    trace_bytes,
)
from anyshard.verify.driver import open_group
from anyshard.verify.naive import rank_body

Span = tuple[str, int, int, int]  # kind, start and stop in us, frame


def rank_of(rank: int, stage: int, *spans: Span, **more: Any) -> RankTrace:
    events = [
        (start * 1000, stop * 1000, KINDS.index(kind), frame, 3, 7)  # type: ignore[arg-type]
        for kind, start, stop, frame in spans
    ]
    return RankTrace(rank, stage, np.array(events, EVENT), **more)


def small() -> Run:
    """Two stages, two frames; the second stage takes twice as long."""
    first = rank_of(
        0, 0, ("idle", 0, 100, 1), ("compute", 100, 200, 1), ("send", 200, 210, 1),
        ("compute", 210, 310, 2), ("downstream", 310, 390, 2), ("send", 390, 400, 2), sent=(80, 2),
        ledger=(80, 2),
    )  # fmt: skip
    second = rank_of(
        1, 1, ("upstream", 100, 205, 1), ("wire", 205, 240, 1), ("receive", 240, 250, 1),
        ("compute", 250, 400, 1), ("head", 400, 450, 1), ("receive", 450, 460, 2),
        ("compute", 460, 610, 2), ("head", 610, 660, 2), lost=4,
    )  # fmt: skip
    return Run("small <b>", (first, second), (12, 18), "continuous", 2, ("10 ms",), (0.01,))


def test_shares_are_of_the_same_time_and_sum_to_one() -> None:
    run = small()
    assert span_ns(run) == (100_000, 660_000)
    first, second = shares(run)
    for share in (first, second):
        parts = (share.busy, share.upstream, share.downstream, share.wire, share.idle)
        assert sum(parts) == pytest.approx(1, abs=1e-12) and min(parts) >= 0
    assert first.busy == pytest.approx(220 / 560) and first.downstream == pytest.approx(80 / 560)
    assert first.idle == pytest.approx(260 / 560), "what no event covers, and none before the start"
    assert second.upstream == pytest.approx(105 / 560) and second.wire == pytest.approx(35 / 560)
    assert bubble(run) == pytest.approx((2 * 560 - 220 - 420 - 35) / 1120)


def test_the_stage_that_takes_longest_sets_the_pace_and_a_better_cut_is_named() -> None:
    found = pace(small())
    assert found is not None and found.stage == 1
    assert found.stage_s == pytest.approx(200e-6) and found.frame_s == pytest.approx(300e-6)
    # 500 us in 30 layers, 100 in the head: 16.67 a layer, the head is 6 of them
    assert found.layers == (18, 12) and found.gain == pytest.approx(400 / 300)
    best = pace(replace(small(), layers=(18, 12), cuts=(18,)))
    assert best is not None and best.layers == (18, 12) and best.gain == 1
    wired = pace(replace(small(), cuts=wire_boundaries("int8", 30)))
    assert wired is not None and wired.layers == (19, 11), "18 is no boundary of an int8 wire"
    assert pace(Run("one", (small().ranks[0],), (30,))) is None


def test_a_stage_that_is_slow_though_the_cut_is_even_gains_nothing_by_another() -> None:
    slow = rank_of(0, 0, ("compute", 0, 200, 1), ("compute", 200, 400, 2))
    fast = rank_of(1, 1, ("compute", 200, 300, 1), ("compute", 400, 500, 2))
    found = pace(Run("uneven machines", (slow, fast), (15, 15)))
    assert found is not None and (found.stage, found.layers, found.gain) == (0, (15, 15), 1)


def test_what_a_rank_has_lost_is_no_idleness() -> None:
    """Two stages that are always busy, of which one kept the last frames only."""
    first = rank_of(0, 0, *(("compute", n * 100, n * 100 + 100, n + 1) for n in range(20)))
    second = rank_of(
        1, 1, *(("compute", n * 100, n * 100 + 100, n) for n in range(15, 21)), lost=90
    )
    run = Run("long", (first, second), (15, 15))
    assert span_ns(run) == (1_500_000, 2_100_000)
    assert [share.busy for share in shares(run)] == pytest.approx([5 / 6, 1])
    found = pace(run)
    assert found is not None and found.gain == 1 and found.stage_s == pytest.approx(100e-6)


def by_trial(layers: int, stages: int, head: float, cuts: list[int] | None) -> float:
    """The slowest stage of the best cut, all cuts tried."""
    best = float("inf")

    def go(start: int, left: int, slowest: float) -> None:
        nonlocal best
        if left == 1:
            best = min(best, max(slowest, layers - start + head))
            return
        for stop in range(start + 1, layers):
            if cuts is None or stop in cuts:
                go(stop, left - 1, max(slowest, stop - start))

    go(0, stages, 0.0)
    return best


@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.floats(0, 9),
    st.one_of(st.none(), st.sets(st.integers(1, 8))),
)
def test_a_balanced_cut_is_the_best_there_is(
    layers: int, stages: int, head: float, cuts: set[int] | None
) -> None:
    allowed = None if cuts is None else sorted(cut for cut in cuts if cut < layers)
    room = layers - 1 if allowed is None else len(allowed)
    if room < stages - 1:
        with pytest.raises(ValueError, match="places to cut"):
            balanced(layers, stages, head=head, cuts=allowed)
        return
    found = balanced(layers, stages, head=head, cuts=allowed)
    assert sum(found) == layers and len(found) == stages and min(found) > 0
    slowest = max(*found[:-1], found[-1] + head) if stages > 1 else layers + head
    assert slowest == by_trial(layers, stages, head, allowed)
    edges = {sum(found[: index + 1]) for index in range(stages - 1)}
    assert allowed is None or edges <= set(allowed)


def test_smollm2_is_cut_where_its_head_weighs_eight_layers() -> None:
    assert balanced(30, 2, head=8.0) == (19, 11)
    assert balanced(30, 2, head=0.0) == (15, 15)
    assert balanced(30, 2, head=8.0, cuts=(4, 8, 12, 15, 19, 23, 27)) == (19, 11)


def test_the_file_gives_back_what_went_into_it_and_perfetto_its_lanes(tmp_path: Path) -> None:
    path, runs = tmp_path / "run.json.gz", (small(), small())
    path.write_bytes(trace_bytes(runs))
    again = read_trace(path)
    for run, back in zip(runs, again, strict=True):
        assert [vars(a) for a in shares(back)] == [
            pytest.approx(vars(b), abs=1e-9) for b in shares(run)
        ]
        assert (back.name, back.layers, back.schedule) == (run.name, run.layers, run.schedule)
        assert back.micro_batches == 2 and back.links == ("10 ms",)
        starts = [[int(each.events["start"][0]) for each in r.ranks] for r in (run, back)]
        assert starts[0][1] - starts[0][0] == starts[1][1] - starts[1][0], "one zero for all ranks"
        assert [rank.lost for rank in back.ranks] == [0, 4]
        assert back.ranks[0].sent == back.ranks[0].ledger == (80, 2)
        assert [len(rank.events) for rank in back.ranks] == [6, 8]
    whole = json.loads(gzip.decompress(path.read_bytes()))
    spans = [event for event in whole["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 28 and all(event["dur"] > 0 and event["ts"] >= 0 for event in spans)
    names = {event["args"]["name"] for event in whole["traceEvents"] if event["ph"] == "M"}
    assert {"compute", "receive", "send", "wait", "small <b>: rank 1, stage 1"} <= names


def damaged(change: Callable[[dict[str, Any]], object]) -> bytes:
    whole = json.loads(gzip.decompress(trace_bytes([small()])))
    change(whole)
    return gzip.compress(json.dumps(whole).encode())


DAMAGED = {
    "empty": (b"", "no gzipped JSON"),
    "no gzip": (b"{}", "no gzipped JSON"),
    "cut short": (trace_bytes([small()])[:-30], "no gzipped JSON"),
    "another JSON": (gzip.compress(b"[1]"), "no trace of anyshard"),
    "nested": (gzip.compress(b"[" * 100_000), "no gzipped JSON"),
    "another form": (damaged(lambda w: w["otherData"].update(form="x")), "of the form 'x'"),
    "no ranks": (damaged(lambda w: w["otherData"]["runs"][0].update(ranks=[])), "of no stage"),
    "a stage too many": (
        damaged(lambda w: w["otherData"]["runs"][0].update(layers=[30])), "of no stage"
    ),
    "a stage without a rank": (
        damaged(lambda w: w["otherData"]["runs"][0].update(layers=[10, 10, 10])), "or a stage has"
    ),
    "a stage without a layer": (
        damaged(lambda w: w["otherData"]["runs"][0].update(layers=[30, 0])), "has no layer"
    ),
    "cuts that are none": (
        damaged(lambda w: w["otherData"]["runs"][0].update(cuts=[30])), "stages cannot be cut so"
    ),
    "a schedule that is none": (
        damaged(lambda w: w["otherData"]["runs"][0].update(schedule="1f1b")), "schedule is none"
    ),
    "a time below zero": (damaged(lambda w: w["traceEvents"][9].update(ts=-5e9)), "out of range"),
    "a kind that is none": (damaged(lambda w: w["traceEvents"][9].update(name="x")), "no trace"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_that_is_no_trace_is_refused_in_a_sentence(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    content, said = DAMAGED[name]
    path = tmp_path / "run.json.gz"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=said):
        read_trace(path)
    assert main(["trace", str(path)]) == 2
    out, err = capfd.readouterr()
    assert not out and err.count("\n") == 1


def test_a_file_that_unpacks_to_more_than_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json.gz"
    path.write_bytes(trace_bytes([small()]))
    size = len(gzip.decompress(path.read_bytes()))
    monkeypatch.setattr("anyshard.trace.MOST_BYTES", size)
    assert len(read_trace(path)) == 1
    monkeypatch.setattr("anyshard.trace.MOST_BYTES", size // 2)
    with pytest.raises(TraceError, match="or larger than 512 MiB"):
        read_trace(path)


def test_what_is_said_of_a_run(tmp_path: Path) -> None:
    text = run_text(small())
    assert "EMULATED links (10 ms) · small <b> · continuous, micro-batches: 2" in text
    assert "2 frames in 0.001 s" in text and "the same" in text
    assert "stage 1 sets the pace: 0.2 of 0.3 ms a frame; --layers 18,12 would give 1.33x" in text
    assert "the first 4 events are not kept" in text
    record = run_record(small())
    assert json.loads(json.dumps(record))["ranks"][1]["stage"] == 1
    shown = page([small()])
    assert "small &lt;b&gt;" in shown and "<b>" not in shown.split("</style>")[1]
    assert "http" not in shown, "nothing from outside"
    back = 0.01 + 110e-6 + 210e-6  # the first stage's next round: there, computed, and back
    slots = predicted(replace(small(), delays_s=(0.01, 0.0)))
    starts = [each.start for each in slots if each.slot.stage == 0]
    assert starts[:3] == [0.0, pytest.approx(110e-6), pytest.approx(back)]


def traced(pp: int, **asked: Any) -> Run:
    model = the_model("adversarial-9-3")
    group = open_group(model.served, forked=False)
    try:
        usual = {"comm": "threads", "threads": 1, "max_model_len": 128, "trace_events": 4096}
        engine = Engine(
            group,
            model.config,
            model.profile,
            plan(model.config, pp=pp, leaf=model.profile.leaf),
            EngineOptions(**(usual | asked)),
            cores=2,
        )
        for index in range(asked.get("max_num_seqs", 1)):
            engine.submit(Request(prompt=tuple(range(index + 1, index + 60)), max_tokens=8))
        assert all(event.fault is None for event in engine.run())
        return engine.traced("test")
    finally:
        group.close()


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_a_real_run_is_covered_without_overlap_and_counts_what_the_ledger_says(pp: int) -> None:
    run = traced(pp, chunk=16, max_num_seqs=3)
    frames = set(run.ranks[0].events["frame"].tolist())
    assert len(frames) > 8 and frames == set(range(1, len(frames) + 1))
    for rank in run.ranks:
        start, stop = (rank.events[name].astype(np.int64) for name in ("start", "stop"))
        assert (stop > start).all() and (start[1:] >= stop[:-1]).all(), (
            "in order, none over another"
        )
        assert set(rank.events["frame"].tolist()) == frames and rank.lost == 0
        kinds = {KINDS[kind] for kind in rank.events["kind"].tolist()}
        assert "compute" in kinds and ("head" in kinds) == (rank.stage == pp - 1)
        assert ("receive" in kinds) == (rank.stage > 0)
        assert ("send" in kinds) == (rank.stage < pp - 1)
        assert rank.sent == rank.ledger
        sends = rank.events[rank.events["kind"] == KINDS.index("send")]
        assert int(sends["bytes"].sum()) == rank.sent[0]
        assert len(sends) == rank.sent[1]
    for share in shares(run):
        assert 0 < share.busy < 1 and min(vars(share).values()) >= 0


def test_a_slow_link_shows_as_wire() -> None:
    slow, quick = traced(2, chunk=64, links=(LinkSpec(delay_s=0.02),) * 2), traced(2, chunk=64)

    def wires_s(run: Run) -> list[float]:
        events = run.ranks[1].events
        wire = events[events["kind"] == KINDS.index("wire")]
        return sorted(((wire["stop"] - wire["start"]) * 1e-9).tolist())

    assert wires_s(slow)[len(wires_s(slow)) // 2] > 0.018 and shares(slow)[1].wire > 0.05
    assert shares(slow)[0].wire == 0
    assert wires_s(quick)[0] < 0.01, "but on a busy machine others may take long"


def test_the_last_events_are_kept_where_a_run_is_longer_than_its_ring() -> None:
    run = traced(2, chunk=4, trace_events=16)
    for rank in run.ranks:
        assert len(rank.events) == 16 and rank.lost > 20
        assert (np.diff(rank.events["start"].astype(np.int64)) > 0).all()
    assert "events are not kept" in run_text(run)


def test_verify_writes_what_the_ranks_of_every_cell_did(tmp_path: Path) -> None:
    model = write_hf_model(tmp_path / "model", ADVERSARIAL_9_3, seed=5)
    file = tmp_path / "cells.json.gz"
    done = subprocess.run(
        [sys.executable, "-m", "anyshard.cli", "verify", str(model), "--layouts", "pp3,tp2",
         "--in-process", "--prompt-tokens", "40", "--tokens", "3", "--trace", str(file)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs = {run.name: run for run in read_trace(file)}
    assert list(runs) == ["verify tp1", "verify pp3", "verify tp2"]
    assert [len(run.ranks) for run in runs.values()] == [1, 3, 2]
    for run in runs.values():
        assert all(rank.sent == rank.ledger and len(rank.events) for rank in run.ranks)


def test_rows_of_void_frames_are_in_no_hop_and_not_in_the_ledger() -> None:
    model = the_model(A9)
    prompts = prompts_of(model.config.vocab)[3:6]
    with group_of(model, rank_body(Busy)) as group:
        whole = answers(group, model, prompts, epoch=1)
        known = list(zip(prompts, whole, strict=True))
        speculator = windowed(known, model.config.vocab, right=0.5, most=3, windows=8)
        engine = Engine(
            group,
            model.config,
            model.profile,
            plan(model.config, pp=2, leaf=model.profile.leaf),
            EngineOptions(
                comm="threads", threads=1, max_model_len=160, max_num_seqs=1, links=FAR,
                trace_events=100, drafts=3, windows=8,
            ),
            cores=2,
            epoch=2,
            speculator=speculator,
        )  # fmt: skip
        for prompt in prompts:
            engine.submit(Request(prompt=prompt, max_tokens=20))
        for _ in engine.run():
            pass
        first, last = engine.traced("drafts").ranks
        assert engine.control.statuses()[0].spared_bytes > 0
        assert first.sent == first.ledger and first.sent[0] > 0 == last.sent[0]
        engine.close()
