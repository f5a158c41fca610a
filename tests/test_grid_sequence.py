"""Ranks that split the sequence give the bits of one rank: every width, depth, batch and chunk.

The unsplit run is that of test_grid.py, so one digest holds for both ways to share keys and values.
What shows that a difference would be seen are bugs of tests/mutants/sequence.py, planted in the
same cells.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from grid import INT8 as INT8_TOO
from grid import KV8, Loaded, baseline, run_cell, share_only, the_model
from models import ADVERSARIAL_9_3, write_hf_model
from mutants import sequence
from test_grid import needs

from anyshard.binder import Binder
from anyshard.checkpoint import open_checkpoint
from anyshard.comm.control import Frame
from anyshard.config import KvType
from anyshard.engine import Engine
from anyshard.epoch import EngineOptions
from anyshard.errors import PromptTooLong
from anyshard.op import Op
from anyshard.ops import native_module
from anyshard.ops.exact import F32
from anyshard.ops.kv_pages import page_bytes
from anyshard.pages import PagePool
from anyshard.request import Request
from anyshard.stripes import blocks_of, page_stripe, stripe_of
from anyshard.verify.cells import BATCH, Cell, forced_logits, shuffled_pages
from anyshard.verify.driver import Driver, open_group, served
from anyshard.verify.naive import NaiveTp, rank_body
from anyshard.verify.prompt import hashed_tokens
from anyshard.worker import Worker

A9, A14, HEAD_80, INT8 = (
    "adversarial-9-3",
    "adversarial-14-2",
    "adversarial-head-80",
    "adversarial-9-3 int8",
)
LENGTHS = (31, 32, 33, 255, 256, 257)


def cell(**split: Any) -> Cell:
    """Over nine blocks; every logit of it is compared."""
    asked = {"prompt_tokens": 257, "num_tokens": 4, "kv_shard": "sequence"} | split
    return Cell(axis="mixed", **{"prompt_logits": asked["prompt_tokens"] - 1} | asked)


def grid(names: Iterable[str], cells: Iterable[Cell]) -> list[object]:
    """Parameters (model name, cell)."""
    rows: list[object] = []
    for name in names:
        for each in cells:
            marks = [pytest.mark.ranks] if each.comm in ("shm", "torch") else []
            if each.comm == "torch":
                marks += [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(1200)]
            label = f"{name}-{each.name}-{each.prompt_tokens}"
            rows.append(pytest.param(name, each, marks=marks, id=label))
    return rows


WIDTHS = [cell(tp=tp, pp=pp) for pp in (1, 2) for tp in (1, 2, 3, 4, 5, 8)]
OTHERS = [
    cell(heads=(2, 7)),
    cell(heads=(0, 7, 2)),
    *(cell(tp=tp, pp=pp, chunk=chunk) for tp, pp in ((3, 1), (2, 2)) for chunk in (1, 33)),
    *(cell(tp=tp, threads=threads) for tp in (2, 5) for threads in (2, 3)),
    *(
        cell(tp=tp, batch=BATCH, place=place, chunk=33, prompt_logits=0)
        for tp, place in ((2, "first"), (3, "middle"), (8, "last"))
    ),
    cell(tp=4, pp=2, batch=BATCH, place="last", prompt_logits=0),
    *(cell(tp=tp, shuffled=True, poison=True) for tp in (2, 3, 8)),
    cell(tp=3, batch=BATCH, place="middle", shuffled=True, poison=True, prompt_logits=0),
    *(
        cell(tp=3, prompt_tokens=length, chunk=chunk)
        for length in LENGTHS
        for chunk in (32, 1 << 16)
    ),
    cell(tp=4, prompt_tokens=1, num_tokens=2),
    *(cell(tp=tp, kernels="scalar", prompt_tokens=70) for tp in (2, 5)),
    cell(tp=2, kernels="avx2", prompt_tokens=257),
    cell(tp=3, kernels="reference", prompt_tokens=6, num_tokens=2),
    cell(tp=2, pp=2, comm="shm"),
    cell(tp=5, comm="shm", threads=2),
    cell(tp=3, comm="torch", prompt_tokens=70),
]
NARROW = [cell(tp=tp, pp=pp) for tp, pp in ((2, 1), (3, 2), (3, 1))]


@pytest.mark.parametrize(
    ("name", "each"),
    [
        *grid((A9,), [*WIDTHS, *OTHERS]),
        *grid((A14,), [*WIDTHS, *(c for c in OTHERS if c.heads is None and c.tp in (2, 8))]),
        *grid((INT8,), [*WIDTHS, *(c for c in OTHERS if c.batch > 1 or c.chunk == 33)]),
        *grid((HEAD_80, HEAD_80 + INT8_TOO + KV8), NARROW),
        *grid((A9 + KV8,), [*WIDTHS, *OTHERS]),
        *grid((A14 + INT8_TOO + KV8,), WIDTHS),
    ],
)
def test_a_split_sequence_has_the_digest_of_the_unsplit_run(name: str, each: Cell) -> None:
    needs(each)
    model = the_model(name)
    whole, outcome = baseline(model, each), run_cell(model, each)
    assert outcome.fault is None and outcome.tokens == whole.tokens
    unlike = outcome.logits.view(np.uint32) != whole.logits.view(np.uint32)
    assert outcome.digest == whole.digest, f"{unlike.sum()} of {unlike.size} logits differ"
    if each.batch > 1:
        heads = run_cell(model, replace(each, kv_shard="heads"))
        assert heads.others == outcome.others and heads.digest == outcome.digest


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name", ["qwen2", "qwen2 int8", "demo", "demo int8", "qwen2 int8 kv8", "demo int8 kv8"]
)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 2), (4, 1), (8, 1)])
def test_larger_models_too(name: str, tp: int, pp: int) -> None:
    each = cell(tp=tp, pp=pp, prompt_logits=0)
    model = the_model(name)
    assert run_cell(model, each).digest == baseline(model, each).digest


@pytest.mark.parametrize(("tp", "pp"), [(3, 1), (2, 2)])
def test_a_seeded_answer_is_drawn_alike_and_without_logits_tokens_are(tp: int, pp: int) -> None:
    model, each = the_model(A9), cell(tp=tp, pp=pp, prompt_logits=0)
    assert run_cell(model, each, want_logits=False).tokens == baseline(model, each).tokens


@cache
def long_model(kv: KvType) -> Loaded:
    """adversarial-9-3 with room for 2,048 tokens."""
    config = replace(ADVERSARIAL_9_3, context=2048)
    with tempfile.TemporaryDirectory() as folder:
        path = write_hf_model(Path(folder) / "m", config, seed=7, adversarial=True)
        loaded = served(open_checkpoint(str(path)), kv=kv)
    return Loaded.of("long", loaded, hashed_tokens(2000, config.vocab, seed=0))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 2), (8, 1)])
@pytest.mark.parametrize("kv", ["f32", "int8"])
def test_two_thousand_positions(tp: int, pp: int, kv: KvType) -> None:
    each = cell(tp=tp, pp=pp, prompt_tokens=2000, prompt_logits=200, chunk=250, threads=2)
    model = long_model(kv)
    assert run_cell(model, each).digest == run_cell(model, each.unsplit()).digest


@pytest.mark.parametrize(("tp", "pp", "chunk"), [(2, 1, 512), (3, 2, 7), (8, 1, 33), (4, 2, 512)])
@pytest.mark.parametrize("name", [A9, A9 + KV8])
def test_rows_run_again_from_an_earlier_position_overwrite(
    name: str, tp: int, pp: int, chunk: int
) -> None:
    model = the_model(name)
    right, wrong = model.prompt[:290], hashed_tokens(200, model.config.vocab, seed=9)
    size = {"max_model_len": 320, "rows_max": 290}
    with Driver(model.served, **size) as driver:
        want = driver.logits(right)
    with Driver(model.served, tp=tp, pp=pp, kv_shard="sequence", poison=True, **size) as driver:
        size = min(chunk, 290)  # type: ignore[assignment]
        assert np.array_equal(driver.logits(right, chunk=size), want)
        driver.logits(wrong, chunk=size, start=101)  # past the end of what was there
        assert np.array_equal(driver.logits(right[95:], chunk=size, start=95), want[95:])
        driver.logits(wrong[:5], chunk=size, start=0)
        assert np.array_equal(driver.logits(right[:3], chunk=size), want[:3])
        assert np.array_equal(driver.logits(right, chunk=size), want)


@pytest.mark.parametrize("tp", [2, 3, 5])
def test_rows_of_several_sequences_in_any_order_and_pages_that_move(tp: int) -> None:
    """Pages of a slot move within their rank, as those of a pool do."""
    model = the_model(A9)
    vocab, blocks = model.config.vocab, 5
    prompts = [model.prompt[:150], hashed_tokens(97, vocab, seed=4)]
    order = shuffled_pages(3 * blocks)
    owners = cell(tp=tp).layout(model).stripe_owners
    pool, tables = PagePool.of(order, owners=owners, sequence_blocks=blocks), []
    for _ in prompts:
        pages, pool = pool.take(blocks)
        tables.append(pages)
    stripes = [[page_stripe(page, blocks) for page in table] for table in tables]
    assert any(each != [stripe_of(block) for block in range(blocks)] for each in stripes), "alike"
    entries = [
        (slot, block, page) for slot, table in enumerate(tables) for block, page in enumerate(table)
    ]
    rows = [(slot, at, token, True) for slot, p in enumerate(prompts) for at, token in enumerate(p)]
    mixed = sorted(rows, key=lambda row: (row[1] * 7 % 20, row[0]))
    size = {"num_slots": 2, "max_model_len": 160, "rows_max": 64, "num_pages": 3 * blocks}
    with Driver(model.served, max_model_len=160, rows_max=160) as driver:
        want = [driver.logits(prompt) for prompt in prompts]
    with Driver(model.served, tp=tp, kv_shard="sequence", poison=True, **size) as driver:
        for start in range(0, 150, 20):
            part = [row for row in mixed if start <= row[1] < start + 20]
            step = driver.step(part, entries if start == 0 else None)
            assert not step.faults.any()
            for (slot, at, _, _), logits in zip(part, step.logits, strict=True):
                assert np.array_equal(logits, want[slot][at]), (slot, at)


@pytest.mark.parametrize("split", [{"tp": 3}, {"tp": 2, "pp": 2}, {"tp": 8}, {"tp": 4, "chunk": 7}])
def test_scores_out_of_range_fail_the_request_by_the_same_name(
    split: dict[str, int], tmp_path: Path
) -> None:
    """Whichever rank has seen the key: the rank of the head says so."""

    def change(weights: dict[str, F32]) -> None:
        weights["layers.1.q_bias"][16:32] = 1e9  # of head 1

    write_hf_model(tmp_path / "m", ADVERSARIAL_9_3, seed=7, change=change)
    model = Loaded.of("high", served(open_checkpoint(str(tmp_path / "m"))), the_model(A9).prompt)
    each = cell(prompt_tokens=100, prompt_logits=0, **split)
    for right in (each.unsplit(), replace(each, kv_shard="heads"), each):
        outcome = run_cell(model, right)
        assert (outcome.fault, outcome.tokens) == ("layers.1.attention", ())


# --- a rank holds its share ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [A9, A14, A9 + KV8])
@pytest.mark.parametrize("tp", [2, 3, 4, 5, 8])
def test_kv_bytes_of_a_rank_are_its_stripes_share(name: str, tp: int) -> None:
    """1/2, 1/4, 1/8 at 2, 4 and 8 ranks, of 9/3 and of 14/2 heads; of a few blocks within one."""
    model = the_model(name)
    config = model.config
    block = 2 * config.num_layers * config.num_kv_heads * page_bytes(model.profile.kv, 16)
    for blocks in (*range(1, 10), 15, 16):
        each = cell(tp=tp, prompt_tokens=32 * blocks - 2, num_tokens=2, prompt_logits=0)
        each = replace(each, prompt_tokens=4) if blocks == 1 else each
        held = [view.kv_bytes for view in run_cell(model, each).statuses]
        layout = each.layout(model)
        assert held == [block * blocks_of(layout.stripes(index), blocks) for index in range(tp)]
        assert sum(held) == block * blocks
        if tp in (2, 4, 8):
            assert max(held) - min(held) <= block
            if blocks % 8 == 0:
                assert held == [block * blocks // tp] * tp
        assert max(held) <= block * (-(-8 // tp)) * -(-blocks // 8)


def test_a_rank_computes_with_its_share_of_weights_only() -> None:
    for tp in (2, 4):
        each = cell(tp=tp, prompt_tokens=70)
        model = the_model(A9)
        outcome = run_cell(model, each, rank_body=share_only)
        assert outcome.fault is None and outcome.digest == baseline(model, each).digest


def test_pages_that_are_no_whole_number_of_sequences_limit_what_is_admitted() -> None:
    """Three pages of sequences of five blocks: there is room for three."""
    model = the_model(A9)
    served_ = model.served
    layout = cell(tp=3).layout(model)
    group = open_group(served_, forked=False)
    options = EngineOptions(
        comm="threads", threads=1, chunk=64, max_num_seqs=3, max_model_len=160, poison=True,
        page_order=shuffled_pages(3),
    )  # fmt: skip
    engine = Engine(group, served_.config, served_.profile, layout, options, cores=2)
    with pytest.raises(PromptTooLong, match="96"):
        engine.submit(Request(prompt=model.prompt[:96], max_tokens=1))
    ids = [
        engine.submit(Request(prompt=model.prompt[:n], max_tokens=5, want_logits=True))
        for n in (90, 40)
    ]
    found: dict[int, list[F32]] = {each: [] for each in ids}
    for event in engine.run():
        assert event.logits is not None
        found[event.request_id].append(event.logits)
    engine.close()
    group.close()
    with Driver(served_, max_model_len=96, rows_max=96) as driver:
        assert np.array_equal(found[ids[0]][0], driver.logits(model.prompt[:90])[-1])
        assert np.array_equal(found[ids[1]][0], driver.logits(model.prompt[:40])[-1])


class Counted(Worker):
    """Notes how many calls of Python a step is, before the head."""

    calls: ClassVar[dict[int, int]] = {}

    def step(self, frame: Frame) -> None:
        self.calls[self.program.rank] = len(self.body)
        super().step(frame)


@pytest.mark.skipif(native_module() is None, reason="not compiled")
@pytest.mark.parametrize(("tp", "pp", "layers"), [(2, 1, 3), (5, 1, 3), (3, 2, 3)])
def test_a_step_stays_one_native_call_between_two_hops(tp: int, pp: int, layers: int) -> None:
    """Also where a stage has an odd number of layers."""
    each = cell(tp=tp, pp=pp, prompt_tokens=70)
    Counted.calls.clear()
    model = the_model(A9)
    assert model.config.num_layers == layers
    assert (
        run_cell(model, each, rank_body=rank_body(Counted)).digest == baseline(model, each).digest
    )
    assert list(Counted.calls.values()) == [1 if pp == 1 else 2] * (tp * pp)


class Late(Binder):
    """One rank comes late to what it reads of others; `slow`: which."""

    slow = 0

    def _lately(self, run: Callable[[int], None]) -> Callable[[int], None]:
        def late(rows: int) -> None:
            time.sleep(0.002)
            run(rows)

        return late if self.w.program.tp_index == self.slow else run

    def _attention_states(self, op: Op) -> Callable[[int], None]:
        return self._lately(super()._attention_states(op))

    def _merge_states(self, op: Op) -> Callable[[int], None]:
        return self._lately(super()._merge_states(op))


@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.parametrize(
    "split", [{"tp": 3}, {"heads": (0, 7, 2)}, {"tp": 3, "pp": 2}, {"heads": (0, 7, 2), "pp": 2}],
    ids=str,
)  # fmt: skip
def test_a_rank_that_reads_late_finds_what_was_sent(slow: int, split: dict[str, Any]) -> None:
    """Nobody writes a buffer that it has not read, though there is one of each."""
    late = type("LateWorker", (Worker,), {"binder_type": type("L", (Late,), {"slow": slow})})
    each = cell(prompt_tokens=100, num_tokens=8, chunk=40, **split)
    model = the_model(A9)
    assert run_cell(model, each, rank_body=rank_body(late)).digest == baseline(model, each).digest


# --- a difference would be seen -----------------------------------------------------------------


@pytest.mark.parametrize("name", [A9, A14, INT8])
@pytest.mark.parametrize(
    ("bug", "splits"),
    [
        (sequence.StripeOffByOne, [{"tp": 2}, {"tp": 3, "pp": 2}]),
        (sequence.MergedInRankOrder, [{"tp": 4}, {"tp": 8}, {"tp": 5, "pp": 2}]),
        (sequence.EmptyStateRead, [{"tp": 4, "prompt_tokens": 40}]),
        (sequence.PartialGather, [{"tp": 2}, {"tp": 8}]),
        (sequence.ForgottenNode, [{"tp": 3}]),
    ],
)
def test_a_planted_bug_changes_the_digest(
    name: str, bug: type[Worker], splits: list[dict[str, int]]
) -> None:
    model = the_model(name)
    for split in splits:
        each = cell(**split)
        outcome = run_cell(model, each, rank_body=rank_body(bug))
        assert outcome.fault or outcome.digest != baseline(model, each).digest, split


@pytest.mark.parametrize("name", [A9, A14])
def test_an_ordinary_order_of_merges_would_show(name: str) -> None:
    """One rank's states merged as they come, beside one that holds everything: the share of logits
    that differ, in ranks whose other sums are alike."""
    model = the_model(name)
    heads = Cell(axis="tp", tp=4, prompt_tokens=200, num_tokens=4)
    shares = []
    group = open_group(model.served, rank_body(NaiveTp), forked=False)
    try:
        tokens = hashed_tokens(4, model.config.vocab, seed=0)
        found = [
            forced_logits(group, model, replace(heads, kv_shard=kv_shard), tokens, epoch=epoch)
            for epoch, kv_shard in enumerate(("heads", "sequence"), 1)
        ]
        shares.append(float(np.mean(found[0].view(np.uint32) != found[1].view(np.uint32))))
    finally:
        group.close()
    assert shares[0] > 0.1, shares
