"""`anyshard bench blocks`: every width has the bits of one rank, and another order is counted.

Speeds are not judged here: the machine of a test is busy.
"""

from __future__ import annotations

import importlib.util
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from models import F32
from mutants.sums import SwappedMerge

from anyshard.bench import block_rank, blocks
from anyshard.bench.block_rank import (
    COPIES,
    BlockBoard,
    BlockShape,
    block_checkpoint,
    random_block,
)
from anyshard.bench.blocks import ARMS, MOST_PASSES, PEER_ARMS, BlockArm, RankBlocks, TorchBlocks
from anyshard.cli import main
from anyshard.config import Arithmetic
from anyshard.loading import profile_of
from anyshard.ops import Body, available_bodies
from anyshard.verify.driver import open_group, served

SHAPE = BlockShape(hidden=64, ffn=512, seed=3, rows_max=5)
SMALL = ("--hidden", "64", "--ffn", "512", "--rows", "1,5", "-r", "1")
ROW_FIELDS = {
    "block", "engine", "profile", "tp", "threads", "rows", "latency_us", "latency_us_sd",
    "latency_us_least", "latency_us_most", "speedup", "comm_share", "elements",
    "elements_differing", "max_ulp", "samples_latency_us",
}  # fmt: skip
HAS_TORCH = importlib.util.find_spec("torch") is not None


class Ran:
    """Exit code and both streams of a command that ran in this process."""

    def __init__(self, capfd: pytest.CaptureFixture[str], *arguments: str) -> None:
        before = signal.getsignal(signal.SIGTERM)
        try:
            self.code = main(["bench", "blocks", *arguments])
        finally:
            signal.signal(signal.SIGTERM, before)
        self.out, self.err = capfd.readouterr()


def exact_block(rows: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """In float64."""
    weights = random_block(SHAPE)
    x = weights.x_MD[:rows].astype(np.float64)
    norm = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6) * weights.norm_D
    gate = norm @ weights.gate_FD.T.astype(np.float64)
    inner = gate / (1 + np.exp(-gate)) * (norm @ weights.up_FD.T)
    whole: np.ndarray[Any, np.dtype[np.float64]] = x + inner @ weights.down_DF.T
    return whole


@contextmanager
def ranks(arithmetic: Arithmetic, body: Body | None = None) -> Iterator[RankBlocks]:
    """In the fastest body, unless one is named."""
    weights = random_block(SHAPE)
    board = BlockBoard(weights.x_MD, ranks=4, passes=MOST_PASSES)
    model = served(block_checkpoint(SHAPE, weights), arithmetic=arithmetic)
    group = open_group(model, block_rank.block_rank(board), forked=False)
    profile = profile_of(arithmetic)
    body = body or available_bodies()[0]
    yield RankBlocks(group, SHAPE, profile, board, body=body, cores=2, threads=True)
    group.close()


def out_of_every_arm(blocks: RankBlocks, rows: int) -> F32:
    """One of them; all are of the same bits."""
    outs = []
    for arm in ARMS:
        with blocks.start(arm) as started:
            run = started.run(rows)
        assert len(run.times_us) == len(run.comm_us) == MOST_PASSES / (1 if rows == 1 else 4) - 1
        assert all(0 <= comm < whole for comm, whole in zip(run.comm_us, run.times_us, strict=True))
        assert (max(run.comm_us) > 0) == (arm.tp > 1)
        outs.append(run.out_MD)
    assert all(np.array_equal(out.view(np.uint32), outs[0].view(np.uint32)) for out in outs)
    return outs[0]


@pytest.mark.parametrize("rows", [1, 5])
def test_the_block_is_the_block(rows: int) -> None:
    """Near float64, and of the same bits on every arm."""
    with ranks("f32") as ours:
        out_MD = out_of_every_arm(ours, rows)
    # the bound of a float32 sum over 512 products of size one, times 8 for the ops around it
    assert np.abs(out_MD - exact_block(rows)).max() < 8 * 512 * 2.0**-24


@pytest.mark.parametrize("rows", [1, 5])
def test_the_block_in_int8_is_that_of_the_reference(rows: int) -> None:
    """Of the same bits on every arm, and farther from float64 than float32 may be."""
    with ranks("int8") as ours:
        out_MD = out_of_every_arm(ours, rows)
    with ranks("int8", "reference") as written, written.start(ARMS[0]) as started:
        assert np.array_equal(out_MD.view(np.uint32), started.run(rows).out_MD.view(np.uint32))
    assert np.abs(out_MD - exact_block(rows)).max() > 8 * 512 * 2.0**-24


@pytest.mark.parametrize("arithmetic", ["f32", "int8"])
def test_copies_are_the_same_layer(arithmetic: Arithmetic) -> None:
    """Each of the bytes that its size is counted with."""
    model = served(block_checkpoint(SHAPE, random_block(SHAPE)), arithmetic=arithmetic)
    held = [model.image.panels(f"layers.0.{name}").nbytes for name in ("gate", "up", "down")]
    assert sum(held) == SHAPE.weight_bytes(arithmetic)
    for name in ("gate", "up", "down"):
        first = model.image.panels(f"layers.0.{name}")
        others = [model.image.panels(f"layers.{layer}.{name}") for layer in range(1, COPIES)]
        assert first.any() and all(np.array_equal(first, other) for other in others)


class FakeEngine:
    """Arms whose results are `outs`, by name, and whose passes take `times_us`."""

    def __init__(self, outs: dict[str, F32], times_us: dict[str, list[float]]) -> None:
        self.outs, self.times_us, self.started = outs, times_us, list[str]()
        self.profile_name = "int8"

    def start(self, arm: BlockArm) -> Any:
        self.started.append(arm.name)
        engine = self

        class Started:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def run(self, rows: int) -> Any:
                times = tuple(engine.times_us[arm.name])
                return blocks._Run(times, tuple(t / 4 for t in times), engine.outs[arm.name])

        return Started()


def test_differing_elements_and_speedups_are_against_one_rank_of_the_same_engine() -> None:
    one = np.ones((2, 3), np.float32)
    other = one.copy()
    other[1] = np.nextafter(np.float32(1), np.float32(2), dtype=np.float32)
    names = [arm.name for arm in ARMS]
    engine = FakeEngine(
        dict.fromkeys(names, one) | {names[3]: other},
        {name: [8.0, 6.0, 7.0] for name in names} | {names[1]: [3.5, 3.5, 3.5]},
    )
    heard: list[str] = []
    found = blocks.measure_blocks(engine, None, rows=(2,), repetitions=2, on_step=heard.append)
    assert heard == engine.started == names * 3, "a round to warm up, and two that count"
    assert [each.name for each in found] == names
    assert {each.profile for each in found} == {"int8"}
    assert [each.differing for each in found] == [0, 0, 0, 3]
    assert [each.max_ulp for each in found] == [0, 0, 0, 1]
    assert [each.speedup for each in found] == [1, 2, 1, 1]
    assert found[0].latencies == (7.0, 7.0) and found[0].comm_share == 0.25
    assert found[0].elements == 6


def test_a_difference_is_counted_and_ends_in_exit_4(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four nodes may be added in another order, two may not."""

    class Swapped(SwappedMerge, block_rank._BlockWorker):
        pass

    monkeypatch.setattr(block_rank, "_BlockWorker", Swapped)
    ran = Ran(capfd, *SMALL, "--no-peer", "--json", "--comm", "threads")
    rows = json.loads(ran.out)["rows"]
    assert ran.code == 4
    for row in rows:
        assert (row["elements_differing"] > 0) == (row["max_ulp"] > 0) == (row["tp"] == 4)


@pytest.mark.ranks
@pytest.mark.parametrize(("quantization", "profile"), [("none", "f32"), ("int8", "int8")])
def test_json_has_every_arm_at_every_number_of_rows(
    quantization: str, profile: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ran = Ran(capfd, *SMALL, "--no-peer", "--json", "--quantization", quantization)
    assert ran.code == 0, ran.err
    record = json.loads(ran.out)
    assert {"hidden", "ffn", "seed", "profile", "profile_hash", "kernels", "machine"} <= set(record)
    assert record["torch"] is None
    assert record["profile"] == profile
    assert {row["profile"] for row in record["rows"]} == {profile}
    assert [(row["rows"], row["block"]) for row in record["rows"]] == [
        (rows, arm.name) for rows in (1, 5) for arm in ARMS
    ]
    assert all(set(row) == ROW_FIELDS for row in record["rows"])
    assert all(row["elements"] == 64 * row["rows"] for row in record["rows"])
    assert not any(row["elements_differing"] for row in record["rows"])


def test_a_person_reads_a_table_and_why_torch_is_not_there(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ran = Ran(capfd, *SMALL, "--comm", "threads")
    assert ran.code == 0, ran.err
    assert "torch is not installed, so the block was not run on it" in ran.out
    assert "MLP block 64→512→64, random weights of seed 0" in ran.out
    assert ran.out.count("0 of 320") == len(ARMS)
    pasted = Ran(capfd, *SMALL, "--comm", "threads", "--no-peer", "--markdown").out
    assert pasted.startswith("| block | profile | rows | µs |") and "anyshard TP 4" in pasted
    listed = Ran(capfd, *SMALL, "--comm", "threads", "--no-peer", "--csv").out.splitlines()
    assert len(listed) == 1 + 2 * len(ARMS) and set(listed[0].split(",")) == ROW_FIELDS


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
def test_torch_computes_the_same_block() -> None:
    """Within the same bound of float64, whole and split; the processes are gone afterwards."""
    with TorchBlocks(SHAPE) as peers:
        pids = [process.popen.pid for process in peers._all()]
        for arm in PEER_ARMS:
            with peers.start(arm) as started:
                run = started.run(5)
            assert np.abs(run.out_MD - exact_block(5)).max() < 8 * 512 * 2.0**-24
            assert len(run.times_us) == MOST_PASSES / 4 - 1
            assert (median_share(run) > 0.01) == (arm.tp > 1)
        processes = list(peers._all())
    assert len(pids) == 3 and all(process.popen.poll() is not None for process in processes)


def median_share(run: Any) -> float:
    shares = sorted(c / t for c, t in zip(run.comm_us, run.times_us, strict=True))
    return float(shares[len(shares) // 2])


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
def test_a_torch_process_that_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with TorchBlocks(SHAPE) as peers:
        for process in peers._all():
            process.popen.kill()
        with (
            pytest.raises(Exception, match=r"a torch process ended with code -9 .*--no-peer"),
            peers.start(PEER_ARMS[0]) as started,
        ):
            started.run(1)


@pytest.mark.torch
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
def test_torch_has_float32_beside_int8(capfd: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capfd, *SMALL, "--json", "--quantization", "int8")
    assert ran.code == 0, ran.err
    profiles = {(row["engine"], row["profile"]) for row in json.loads(ran.out)["rows"]}
    assert profiles == {("anyshard", "int8"), ("torch", "f32")}


@pytest.mark.torch
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
def test_the_block_of_qwen2_has_no_differing_element_and_that_of_gloo_has(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ran = Ran(capfd, "-r", "1", "--json")
    assert ran.code == 0, ran.err
    rows = json.loads(ran.out)["rows"]
    assert len(rows) == 3 * (len(ARMS) + len(PEER_ARMS))
    differing = {row["block"] for row in rows if row["elements_differing"]}
    assert "torch + Gloo TP 2" in differing
    assert not [row for row in rows if row["engine"] == "anyshard" and row["elements_differing"]]


def test_a_block_that_has_no_room_is_refused_before_it_is_made(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anyshard.cli.bench_blocks.free_memory", lambda: 8 << 30)
    monkeypatch.setattr(block_rank, "random_block", None)
    for quantization, need in (("none", "90.2 GB"), ("int8", "33.4 GB")):
        size = ("--hidden", "16384", "--ffn", "65536")
        ran = Ran(capfd, *size, "--quantization", quantization)
        assert (ran.code, ran.out) == (2, "")
        assert f"{need} of memory are needed for 7 copies of the block and 8.6 GB" in ran.err
