"""Int8 wires: their written definition, native bodies with its bits, and one digest for all cuts.

A row is rounded at the same places in every layout, so that the cut of a layout decides where bytes
travel, and nothing else; each equality stands beside a witness that a difference would be seen.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from divergences import diverges
from golden import wire as golden
from grid import Loaded, baseline, run_cell, the_model, witness
from mutants.stages import RoundsOnlyAtCuts, ScaleOfTwoBlocks
from native_cases import BODIES, F32, differing, floats, native, needs_native, pool
from test_layout import SMOLLM

from anyshard.config import ModelConfig
from anyshard.errors import LayoutError
from anyshard.layout import plan, wire_boundaries
from anyshard.ledger import StepShape, wire_cost
from anyshard.loading import profile_of
from anyshard.model import program
from anyshard.ops import reference
from anyshard.ops.kv_pages import quantize_groups
from anyshard.ops.wire import decode_rows, encode_rows, wire_row_bytes
from anyshard.verify import naive
from anyshard.verify.cells import BATCH, Cell
from anyshard.verify.grid import full, quick

DEEP, A9, DEMO = "deep-10 w8", "adversarial-9-3 w8", "demo w8"
EDGES = (31, 32, 33, 63, 64, 65)


# --- the definition -----------------------------------------------------------------------------


def test_a_row_is_its_bytes_and_half_a_byte_for_each_eight() -> None:
    assert wire_row_bytes("int8", 576) == 612
    assert wire_row_bytes("none", 576) == 2304
    assert [wire_row_bytes("int8", width) for width in (1, 31, 32, 33)] == [3, 33, 34, 37]
    rows = floats(np.random.default_rng(0), 3, 33)
    assert encode_rows(rows).shape == (3, 37) and encode_rows(rows).dtype == np.uint8


def test_blocks_are_those_of_keys_and_values() -> None:
    rows = floats(np.random.default_rng(1), 5, 72)
    q, scales = quantize_groups(rows)
    encoded = encode_rows(rows)
    np.testing.assert_array_equal(encoded[:, :72].view(np.int8), q)
    stored = np.ascontiguousarray(encoded[:, 72:]).view(np.float16)
    np.testing.assert_array_equal(stored.astype(np.float32), scales)


def test_a_decoded_row_is_within_half_a_step() -> None:
    rows = floats(np.random.default_rng(2), 50, 64) * np.float32(9)
    found = decode_rows(encode_rows(rows), 64)
    amax = np.abs(rows).reshape(50, 2, 32).max(axis=2).repeat(32, axis=1)
    step = amax / 127 * (1 + 2**-11)
    assert (np.abs(found - rows) <= step / 2 + amax * 2**-11).all()


def test_a_scale_never_spans_blocks_or_rows() -> None:
    rows = floats(np.random.default_rng(3), 2, 64)
    before = decode_rows(encode_rows(rows), 64)
    rows[1] *= np.float32(100)
    rows[0, 32:] = np.nan
    after = decode_rows(encode_rows(rows), 64)
    np.testing.assert_array_equal(after[0, :32], before[0, :32])
    assert np.isnan(after[0, 32:]).all()


@pytest.mark.parametrize(
    ("largest", "scale"),
    [
        (0.0, 0.0),
        (127 * 2.0**-24, 2.0**-24),  # the smallest scale there is
        (127 * 2.0**-26, 0.0),  # rounds to no scale at all
        (2.0**-140, 0.0),
        (127 * 65504.0, 65504.0),
        (127 * 65536.0, np.nan),
        (3e38, np.nan),
        (np.inf, np.nan),
        (np.nan, np.nan),
    ],
)
@pytest.mark.parametrize("body", ["reference", *BODIES])
def test_blocks_at_the_ends_of_float16(body: str, largest: float, scale: float) -> None:
    x = np.full((1, 40), 1.0, np.float32)
    x[0, :32] = 0
    x[0, 5] = largest
    rounded, wire = through(body, x)
    stored = np.ascontiguousarray(wire[:, 40:]).view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(stored[0], [np.float32(scale), np.float16(1 / 127)])
    if np.isnan(scale):
        assert np.isnan(rounded[0, :32]).all()
    else:
        want = np.zeros(32, np.float32)
        want[5] = 127 * scale
        np.testing.assert_array_equal(rounded[0, :32], want)
    assert (rounded[0, 32:] == np.float32(127) * np.float16(1 / 127)).all(), "the other block"


# --- native bodies ------------------------------------------------------------------------------


def through(body: str, x_MD: F32, threads: int = 1) -> tuple[F32, Any]:
    """What a body makes of rows, in place, and their bytes."""
    module: Any = reference if body == "reference" else native
    op_pool = reference.Pool() if body == "reference" else pool(body, threads)
    x, wire = x_MD.copy(), np.full((len(x_MD), wire_row_bytes("int8", x_MD.shape[1])), 9, np.uint8)
    with np.errstate(all="ignore"):
        module.RoundWire(op_pool, x, wire).run(len(x))
    decoded = np.full_like(x, 7)
    module.DecodeWire(op_pool, wire, decoded).run(len(x))
    assert differing(decoded, x) == 0, "a row that was sent is not the row that was rounded"
    inside = x_MD.copy()
    with np.errstate(all="ignore"):
        module.RoundWire(op_pool, inside).run(len(x))
    assert differing(inside, x) == 0, "a boundary inside a stage is not one between stages"
    return x, wire


def hard_rows(width: int) -> F32:
    """Rows over 60 binades, with halves, zeros, subnormals, huge values and what is not finite."""
    rng = np.random.default_rng(width)
    rows = floats(rng, 9, width) * np.exp2(rng.integers(-30, 30, (9, width))).astype(np.float32)
    rows[1] = rng.integers(-254, 255, width).astype(np.float32) / 2
    rows[1, 0] = 127
    rows[2] = 0
    rows[3] *= np.float32(2.0**-120)
    rows[4, rng.integers(width)] = np.inf
    rows[5, rng.integers(width)] = np.nan
    rows[6, rng.integers(width)] = -3e38
    rows[7] = np.float32(-0.0)
    rows[8] = floats(rng, width) * np.float32(2.0**-18)  # scales that are subnormal
    return rows


@needs_native
@pytest.mark.parametrize("body", BODIES)
def test_native_rows_equal_the_reference_at_every_width(body: str) -> None:
    for width in (*range(1, 101), 576, 896):
        rows = hard_rows(width)
        want, bytes_of = through("reference", rows)
        for threads in (1, 3):
            got, wire = through(body, rows, threads)
            np.testing.assert_array_equal(wire, bytes_of)
            assert differing(got, want) == 0, width


@needs_native
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("width", EDGES)
def test_only_the_rows_of_a_step_are_touched(body: str, width: int) -> None:
    x = hard_rows(width)
    before, wire = x.copy(), np.full((9, wire_row_bytes("int8", width)), 9, np.uint8)
    native.RoundWire(pool(body, 2), x, wire).run(4)
    assert differing(x[4:], before[4:]) == 0 and (wire[4:] == 9).all()
    out = np.full_like(x, 5)
    native.DecodeWire(pool(body, 2), wire, out).run(3)
    assert differing(out[:3], x[:3]) == 0 and (out[3:] == 5).all()


@pytest.mark.parametrize("body", ["reference", *BODIES])
def test_every_body_gives_the_golden_bits(body: str) -> None:
    assert golden.profile_sha256() == profile_of("f32", wire="int8").sha256()
    op_pool = reference.Pool() if body == "reference" else pool(body, 2)
    module: Any = reference if body == "reference" else native
    assert golden.vectors(module, op_pool) == golden.stored()


@needs_native
def test_many_rows_over_many_threads() -> None:
    rows = floats(np.random.default_rng(4), 300, 576)
    want, bytes_of = through("reference", rows)
    for threads in (1, 2, 5):
        got, wire = through(BODIES[0], rows, threads)
        np.testing.assert_array_equal(wire, bytes_of)
        assert differing(got, want) == 0
    shifted = rows.copy()
    shifted[:, 1:] = rows[:, :-1]
    assert differing(through(BODIES[0], shifted)[0], want) > 0, "a block elsewhere would be seen"


@needs_native
def test_arrays_that_do_not_fit_are_refused() -> None:
    x, op_pool = np.zeros((4, 40), np.float32), pool(BODIES[0])
    for wire in (np.zeros((4, 43), np.uint8), np.zeros((3, 44), np.uint8)):
        with pytest.raises(ValueError, match=r"wire has shape .*; \[4, 44\] is needed"):
            native.RoundWire(op_pool, x, wire)
        with pytest.raises(ValueError, match=r"\[4, 44\] is needed"):
            native.DecodeWire(op_pool, wire, x)
    with pytest.raises(ValueError, match="wire must be of uint8"):
        native.RoundWire(op_pool, x, np.zeros((4, 44), np.int8))
    with pytest.raises(ValueError, match="rows is 5; 0 to 4"):
        native.RoundWire(op_pool, x).run(5)


# --- the profile and its cuts -------------------------------------------------------------------


def test_a_wire_is_a_profile_of_its_own() -> None:
    names, hashes = set(), set()
    for arithmetic in ("f32", "int8"):
        for kv in ("f32", "int8"):
            for wire in ("none", "int8"):
                each = profile_of(arithmetic, kv, wire)  # type: ignore[arg-type]
                names.add(each.name)
                hashes.add(each.sha256())
    assert len(hashes) == 8
    assert names == {
        *("f32", "f32+kv8", "f32+w8", "f32+kv8+w8"),
        *("int8", "int8+kv8", "int8+w8", "int8+kv8+w8"),
    }


def test_boundaries_are_the_nodes_of_the_tree_over_layers() -> None:
    assert wire_boundaries("int8", 30) == (4, 8, 12, 15, 19, 23, 27)
    assert wire_boundaries("int8", 24) == (3, 6, 9, 12, 15, 18, 21)
    assert wire_boundaries("int8", 3) == (1, 2)
    assert wire_boundaries("int8", 1) == ()
    assert wire_boundaries("none", 30) == ()


def sizes(config: ModelConfig, **cut: Any) -> list[int]:
    spans = plan(config, wire="int8", leaf=64, **cut).layers
    return [stop - start for start, stop in spans]


def test_depths_take_the_cuts_that_come_nearest_to_even() -> None:
    assert [sizes(SMOLLM, pp=pp) for pp in range(1, 9)] == [
        [30],
        [15, 15],
        [8, 11, 11],
        [8, 7, 8, 7],
        [8, 7, 4, 4, 7],
        [4, 4, 7, 4, 4, 7],
        [4, 4, 7, 4, 4, 4, 3],
        [4, 4, 4, 3, 4, 4, 4, 3],
    ]
    assert sizes(SMOLLM, layers=(23, 7)) == [23, 7]


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ({"pp": 9}, "--pipeline-parallel-size 9 is not possible .* so 1 to 8 stages"),
        ({"layers": (22, 8)}, "--layers 22,8 is not possible .* the nearest is --layers 23,7"),
        ({"layers": (1, 1, 28)}, "the nearest is --layers 4,4,22"),
        ({"layers": (3,) * 10}, "--layers of 10 stages .* so 1 to 8 stages"),
    ],
)
def test_cuts_off_the_list_are_refused_with_the_nearest(cut: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutError, match=words) as raised:
        plan(SMOLLM, wire="int8", leaf=64, **cut)
    assert "4, 8, 12, 15, 19, 23 and 27" in str(raised.value)
    plan(SMOLLM, leaf=64, **cut)  # with float32 wires it is a cut like any other


def test_one_layer_is_one_stage() -> None:
    one = replace(SMOLLM, num_layers=1)
    assert sizes(one) == [1]


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 30])
def test_named_grids_only_hold_cuts_that_a_wire_takes(layers: int) -> None:
    config = replace(SMOLLM, num_layers=layers)
    model = Loaded.of("", replace(the_model(A9).served, config=config), ())
    for make in (quick, full):
        deepest = max(cell.layout(model).pp for cell in make(config, "int8"))
        assert deepest == min(layers, 7 if make is full else 3)
        assert len(set(make(config, "int8"))) == len(make(config, "int8"))


@pytest.mark.parametrize("split", [{}, {"pp": 2}, {"pp": 3}, {"tp": 3, "pp": 8}])
def test_every_layout_rounds_at_every_boundary_once(split: dict[str, int]) -> None:
    config, profile = the_model(DEEP).config, profile_of("f32", wire="int8")
    layout = plan(config, wire="int8", leaf=64, **split)
    found = []
    for rank in range(0, layout.world, layout.tp):
        ops = program(config, profile, layout, rank).ops
        found += [op.layer + 1 for op in ops if op.kind == "round_wire"]
        for before, op in pairwise(ops):
            assert (op.kind == "send") == (before.kind == "round_wire" and before.wire_bytes > 0)
            assert (op.kind == "decode_wire") == (before.kind == "receive")
    assert found == list(wire_boundaries("int8", config.num_layers))


# --- one digest ---------------------------------------------------------------------------------

SHORT = {"prompt_tokens": 70, "num_tokens": 6}
CELLS = [
    *(Cell(axis="pp", pp=pp, **SHORT) for pp in (2, 3, 8)),
    Cell(axis="pp", layers=(9, 1), **SHORT),
    Cell(axis="tp", tp=5, **SHORT),
    Cell(axis="mixed", tp=2, pp=2, **SHORT),
    Cell(axis="mixed", tp=3, pp=3, kv_shard="sequence", **SHORT),
    *(Cell(axis="chunk", pp=3, chunk=chunk, **SHORT) for chunk in (1, 7, 32)),
    Cell(axis="threads", threads=3, **SHORT),
    Cell(axis="threads", pp=2, threads=2, **SHORT),
    Cell(axis="batch", pp=3, batch=BATCH, place="middle", **SHORT),
    Cell(axis="batch", pp=2, batch=BATCH, micro_batches=3, schedule="fill-drain", **SHORT),
    Cell(axis="pages", pp=2, shuffled=True, poison=True, **SHORT),
    Cell(axis="body", pp=2, kernels="scalar", **SHORT),
    Cell(axis="body", pp=2, kernels="reference", prompt_tokens=6, num_tokens=2),
    pytest.param(Cell(axis="comm", tp=2, pp=3, comm="shm", **SHORT), marks=pytest.mark.ranks),
    pytest.param(
        Cell(axis="comm", pp=3, comm="torch", **SHORT),
        marks=[pytest.mark.ranks, pytest.mark.torch],
    ),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_cell_has_the_digest_of_the_unsplit_run(cell: Cell) -> None:
    if cell.comm == "torch":
        pytest.importorskip("torch")
    if cell.kernels != "auto" and cell.kernels not in ("reference", *BODIES):
        pytest.skip(f"no {cell.kernels} body here")
    model = the_model(DEEP)
    outcome, whole = run_cell(model, cell), baseline(model, cell)
    assert outcome.fault is None and outcome.tokens == whole.tokens
    assert outcome.digest == whole.digest


def test_the_digest_is_not_that_of_a_wire_that_does_not_round() -> None:
    cell = Cell(axis="base", **SHORT)
    digests = {run_cell(the_model(name), cell).digest for name in (DEEP, "deep-10")}
    assert len(digests) == 2


@pytest.mark.parametrize("pp", [2, 3, 8])
def test_rounding_only_at_cuts_would_be_seen(pp: int) -> None:
    assert witness(the_model(DEEP), Cell(axis="pp", pp=pp, **SHORT)) > 0


@pytest.mark.parametrize("bug", [RoundsOnlyAtCuts, ScaleOfTwoBlocks])
def test_a_planted_bug_changes_the_digest(bug: Any) -> None:
    model, cell = the_model(DEEP), Cell(axis="pp", pp=2, **SHORT)
    body = naive.rank_body(bug)
    assert run_cell(model, cell, rank_body=body).digest != baseline(model, cell).digest


@pytest.mark.parametrize("cell", [Cell(axis="base", **SHORT), Cell(axis="pp", pp=3, **SHORT)])
def test_a_row_that_is_not_finite_fails_alone(cell: Cell) -> None:
    """A rank puts an infinity into one row before the wire rounds it; its neighbours go on."""

    class Poisoned(naive.Binder):
        def _round_wire(self, op: Any) -> Any:
            run = super()._round_wire(op)

            def poisoned(rows: int) -> None:
                hit = np.flatnonzero((self.w.row_slot[:rows] == 0) & (op.layer == 3))
                self.w.x_RD[hit, 33] = np.inf
                run(rows)

            return poisoned

    class Poisoning(naive.Worker):
        binder_type = Poisoned

    model, crowd = the_model(DEEP), replace(cell, batch=5, place="first")
    outcome = run_cell(model, crowd, rank_body=naive.rank_body(Poisoning))
    assert outcome.fault == "layers.4.qkv" and outcome.tokens == ()
    right = run_cell(model, crowd)
    assert right.fault is None and outcome.others == right.others


# --- faults -------------------------------------------------------------------------------------


class Faulty(naive.Binder):
    """Rank 2 (the first of stage 1, which has layers 4 to 6) is wrong where `fault` says."""

    fault = ""

    def after(self, run: Any, spoil: Any) -> Any:
        """The op, and then the fault."""

        def spoilt(rows: int) -> None:
            run(rows)
            spoil(rows)

        return spoilt if self.w.program.rank == 2 else run

    def _round_wire(self, op: Any) -> Any:
        run = super()._round_wire(op)
        x_RD, wire_RB = self.w.x_RD, self.w.wire_RB

        def another(rows: int) -> None:
            x_RD[rows - 1, 5] = np.nextafter(x_RD[rows - 1, 5], np.float32(9e9))

        def encoded(rows: int) -> None:
            wire_RB[rows - 1, 5] ^= 1

        if self.fault == ("inside", "ends")[op.wire_bytes > 0]:
            return self.after(run, another)
        return self.after(run, encoded) if self.fault == "encoded" and op.wire_bytes else run

    def _send(self, op: Any) -> Any:
        comm, wire_RB = self.w.comm, self.w.wire_RB
        if self.fault != "sent" or self.w.program.rank != 2:
            return super()._send(op)

        def send(rows: int) -> None:
            moved = wire_RB[:rows].copy()
            moved[-1, 5] ^= 1
            comm.send(moved)

        return send

    def _receive(self, op: Any) -> Any:
        wire_RB = self.w.wire_RB

        def scale(rows: int) -> None:
            wire_RB[rows - 1, -1] ^= 1

        run = super()._receive(op)
        return self.after(run, scale) if self.fault == "received" else run

    def _decode_wire(self, op: Any) -> Any:
        x_RD = self.w.x_RD

        def first_again(rows: int) -> None:
            x_RD[rows - 1] = x_RD[0]

        run = super()._decode_wire(op)
        return self.after(run, first_again) if self.fault == "decoded" else run


@pytest.mark.parametrize(
    ("fault", "op"),
    [
        ("inside", "layers.4.round_wire"),
        ("ends", "layers.6.round_wire"),
        ("encoded", "layers.6.round_wire"),
        ("sent", "send"),
        ("received", "receive"),
        ("decoded", "decode_wire"),
    ],
)
def test_a_fault_of_one_rank_is_named(fault: str, op: str) -> None:
    binder = type("Binder", (Faulty,), {"fault": fault})
    body = naive.rank_body(type("Wrong", (naive.Worker,), {"binder_type": binder}))
    cell = Cell(axis="mixed", tp=2, pp=3, prompt_tokens=20, num_tokens=2)
    assert cell.layout(the_model(DEEP)).layers == ((0, 4), (4, 7), (7, 10))
    found = diverges(the_model(DEEP), cell, body)
    assert found is not None and (found.op, found.rank) == (op, 2), found
    assert found.what == "residual" and found.position == 19


# --- bytes --------------------------------------------------------------------------------------


def test_a_hop_of_the_demo_model_is_612_bytes_a_row() -> None:
    profile = profile_of("f32", wire="int8")
    layout = plan(SMOLLM, pp=3, wire="int8", leaf=64)
    step = StepShape(rows=5, sampled=1, gather_logits=False)
    ranks = [program(SMOLLM, profile, layout, rank) for rank in range(3)]
    costs = [wire_cost(each, [step]) for each in ranks]
    assert [cost.hop_bytes for cost in costs] == [5 * 612 + 40, 5 * 612 + 40, 0]
    assert [each.hop_row_bytes for each in ranks] == [612, 612, 612]
    plain = [program(SMOLLM, profile_of("f32"), layout, rank) for rank in range(3)]
    assert [wire_cost(each, [step]).hop_bytes for each in plain] == [5 * 2304 + 40] * 2 + [0]


@pytest.mark.parametrize("cell", [each for each in CELLS if isinstance(each, Cell)][:9:2])
def test_counted_hop_bytes_are_the_ledgers(cell: Cell) -> None:
    model = the_model(DEEP)
    outcome = run_cell(model, cell)
    row = wire_row_bytes("int8", model.config.hidden)
    for view, cost in zip(outcome.statuses, outcome.costs, strict=True):
        assert view.wire_bytes["hop"] == cost.hop_bytes
        messages = cost.hop_messages
        assert messages == 0 or (cost.hop_bytes - 40 * messages) % row == 0
