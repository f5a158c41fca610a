"""The fused native ops (embed, qkv, gate_up, head) against their reference twins, bit for bit."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from native_cases import (
    BODIES,
    I32,
    differing,
    floats,
    ints,
    leaves,
    native,
    needs_native,
    panels,
    pool,
)

from anyshard.ops import reference

pytestmark = needs_native

Arguments = dict[str, Any]
ROWS = (1, 2, 4, 5, 9, 33)


def qkv(
    rows: int, *, hidden: int, heads: int, kv_heads: int, head_dim: int, head_norm: bool = False
) -> Arguments:
    rng = np.random.default_rng(rows)
    lengths, merges = leaves(hidden)
    slots, blocks = 3, 5
    places = rng.permutation(slots * blocks * 32)[:rows].astype(np.int32)

    def weight(num: int) -> npt.NDArray[np.float32] | None:
        return panels(floats(rng, num * head_dim, hidden)) if num else None

    return {
        "x": floats(rng, rows, hidden),
        "norm_weight": floats(rng, hidden),
        "eps": 1e-5,
        "q_panels": weight(heads),
        "k_panels": weight(kv_heads),
        "v_panels": weight(kv_heads),
        "q_bias": floats(rng, heads * head_dim) if heads else None,
        "k_bias": floats(rng, kv_heads * head_dim) if kv_heads else None,
        "v_bias": None,
        "q_norm": floats(np.random.default_rng(1), head_dim) if head_norm else None,
        "k_norm": floats(np.random.default_rng(2), head_dim) if head_norm else None,
        "leaf_lengths": lengths,
        "merges": merges,
        "head_dim": head_dim,
        "q_scale": 0.1803,
        "cos": floats(rng, blocks * 32, head_dim // 2),
        "sin": floats(rng, blocks * 32, head_dim // 2),
        "positions": places // slots,
        "q_out": floats(rng, rows, heads * head_dim),
        "k_cache": floats(rng, slots * blocks, kv_heads, head_dim, 32),
        "v_cache": floats(rng, slots * blocks, kv_heads, 32, head_dim),
        "page_table": rng.permutation(slots * blocks).astype(np.int32).reshape(slots, blocks),
        "row_slot": places % slots,
        "row_fault": np.zeros(rows, np.int32),
        "fault_code": 5,
    }


def gate_up(rows: int, *, hidden: int, ffn: int, bias: bool) -> Arguments:
    rng = np.random.default_rng(rows)
    lengths, merges = leaves(hidden)
    return {
        "x": floats(rng, rows, hidden),
        "norm_weight": 20 * floats(rng, hidden),  # SiLU far out on both sides
        "eps": 1e-6,
        "gate_panels": panels(floats(rng, ffn, hidden)) if ffn else None,
        "up_panels": panels(floats(rng, ffn, hidden)) if ffn else None,
        "num_outputs": ffn,
        "gate_bias": floats(rng, ffn) if bias else None,
        "up_bias": floats(rng, ffn) if bias else None,
        "leaf_lengths": lengths,
        "merges": merges,
        "out": floats(rng, rows, ffn),
        "row_fault": np.zeros(rows, np.int32),
        "fault_code": 6,
    }


def head(rows: int, *, hidden: int, vocab: int) -> Arguments:
    rng = np.random.default_rng(rows)
    lengths, merges = leaves(hidden)
    return {
        "x": floats(rng, rows, hidden),
        "sample_rows": rng.integers(0, rows, rows).astype(np.int32),
        "norm_weight": floats(rng, hidden),
        "eps": 1e-5,
        "panels": panels(floats(rng, vocab, hidden)) if vocab else None,
        "num_outputs": vocab,
        "bias": None,
        "leaf_lengths": lengths,
        "merges": merges,
        "out": floats(rng, rows, vocab),
        "row_fault": np.zeros(rows, np.int32),
        "fault_code": 8,
    }


def embed(rows: int, *, hidden: int, vocab: int) -> Arguments:
    rng = np.random.default_rng(rows)
    return {
        "panels": panels(floats(rng, vocab, hidden)),
        "vocab": vocab,
        "tokens": rng.integers(0, vocab, rows).astype(np.int32),
        "out": floats(rng, rows, hidden),
    }


Builder = Callable[[int], Arguments]
CASES: list[tuple[str, str, Builder]] = [
    ("Qkv", "9/3 heads", lambda r: qkv(r, hidden=96, heads=9, kv_heads=3, head_dim=16)),
    ("Qkv", "odd", lambda r: qkv(r, hidden=131, heads=5, kv_heads=2, head_dim=24)),
    ("Qkv", "wide head", lambda r: qkv(r, hidden=64, heads=1, kv_heads=1, head_dim=256)),
    (
        "Qkv",
        "normed heads",
        lambda r: qkv(r, hidden=96, heads=5, kv_heads=2, head_dim=24, head_norm=True),
    ),
    (
        "Qkv",
        "normed wide head",
        lambda r: qkv(r, hidden=64, heads=2, kv_heads=1, head_dim=256, head_norm=True),
    ),
    ("Qkv", "no heads", lambda r: qkv(r, hidden=64, heads=0, kv_heads=0, head_dim=8)),
    ("GateUp", "odd", lambda r: gate_up(r, hidden=97, ffn=203, bias=True)),
    ("GateUp", "even", lambda r: gate_up(r, hidden=192, ffn=128, bias=False)),
    ("GateUp", "no columns", lambda r: gate_up(r, hidden=64, ffn=0, bias=False)),
    ("Head", "odd", lambda r: head(r, hidden=100, vocab=331)),
    ("Head", "no rows", lambda r: head(r, hidden=64, vocab=0)),
    ("Embed", "odd", lambda r: embed(r, hidden=77, vocab=43)),
]
OUTPUTS = ("out", "q_out", "k_cache", "v_cache", "row_fault")


def run(module: Any, name: str, op_pool: Any, arguments: Arguments, rows: int) -> Arguments:
    """The outputs, computed on copies of the arguments that are written."""
    mine = {k: v.copy() if k in OUTPUTS else v for k, v in arguments.items()}
    getattr(module, name)(op_pool, **mine).run(rows)
    return {key: mine[key] for key in OUTPUTS if key in mine}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(("name", "case", "build"), CASES, ids=[f"{n} {c}" for n, c, _ in CASES])
def test_op_equals_its_reference_twin(body: str, name: str, case: str, build: Builder) -> None:
    for rows in ROWS:
        arguments = build(rows)
        expected = run(reference, name, None, arguments, rows)
        for threads in (1, 2, 5):
            got = run(native, name, pool(body, threads), arguments, rows)
            for key, value in expected.items():
                assert differing(got[key], value) == 0, (case, rows, threads, key)


@pytest.mark.parametrize("spin", [False, True])
@pytest.mark.parametrize(("name", "case", "build"), CASES, ids=[f"{n} {c}" for n, c, _ in CASES])
def test_a_single_row_that_every_thread_prepares_is_right_each_time(
    name: str, case: str, build: Builder, spin: bool
) -> None:
    """Some thread comes late, or to the last phase only, once in a few hundred runs."""
    arguments = build(1)
    expected = run(reference, name, None, arguments, 1)
    mine = {k: v.copy() if k in OUTPUTS else v for k, v in arguments.items()}
    op = getattr(native, name)(pool(BODIES[0], 5, spin=spin), **mine)
    for turn in range(300):
        for key in expected:
            mine[key][...] = arguments[key]
        op.run(1)
        for key, value in expected.items():
            assert differing(mine[key], value) == 0, (case, turn, key)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_rank_without_outputs_still_finds_a_row_that_is_not_finite(
    threads: int, rows: int
) -> None:
    arguments = head(3, hidden=64, vocab=0)
    arguments["x"][arguments["sample_rows"][0]] = np.nan
    native.Head(pool(BODIES[0], threads), **arguments).run(rows)
    assert np.flatnonzero(arguments["row_fault"]).tolist() == [arguments["sample_rows"][0]]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(("name", "case", "build"), CASES, ids=[f"{n} {c}" for n, c, _ in CASES])
def test_rows_past_the_count_are_not_touched(
    body: str, name: str, case: str, build: Builder
) -> None:
    arguments = build(9)
    got = run(native, name, pool(body, 2), arguments, 4)
    expected = run(reference, name, None, arguments, 4)
    for key, value in expected.items():
        assert differing(got[key], value) == 0, (case, key)
    nothing = run(native, name, pool(body, 2), arguments, 0)
    for key, value in nothing.items():
        assert differing(value, arguments[key]) == 0, (case, key)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_norm_that_overflows_faults_its_row_only(body: str, threads: int, bad: float) -> None:
    for name, build in (
        ("Qkv", lambda r: qkv(r, hidden=40, heads=2, kv_heads=1, head_dim=8)),
        ("GateUp", lambda r: gate_up(r, hidden=40, ffn=24, bias=False)),
    ):
        for rows in (3, 12):
            arguments = build(rows)
            clean = run(native, name, pool(body, threads), arguments, rows)
            arguments["x"][1, 39] = bad
            arguments["row_fault"][2] = 77
            got = run(native, name, pool(body, threads), arguments, rows)
            faults = ints(*([0] * rows))
            faults[1], faults[2] = arguments["fault_code"], 77
            assert differing(got["row_fault"], faults) == 0
            others = np.arange(rows) != 1
            key = "q_out" if name == "Qkv" else "out"
            assert differing(got[key][others], clean[key][others]) == 0


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("panels_of", ["q_panels", "k_panels"])
def test_a_head_that_overflows_its_norm_faults_its_row_only(body: str, panels_of: str) -> None:
    rows = 5
    arguments = qkv(rows, hidden=40, heads=3, kv_heads=2, head_dim=8, head_norm=True)
    arguments["norm_weight"][:] = 1
    arguments["x"][:] = 0
    arguments["x"][:, :2] = 1  # normed, each row is the root of 20 in two places
    arguments["x"][3, 1] = -1
    arguments[panels_of][..., :2, :] = 0
    arguments[panels_of][-1, :2, 5] = (1e20, -1e20)  # they cancel but in row 3
    arguments["q_bias"][:], arguments["k_bias"][:] = 1, 1
    with np.errstate(over="ignore", invalid="ignore"):
        expected = run(reference, "Qkv", None, arguments, rows)
    got = run(native, "Qkv", pool(body, 2), arguments, rows)
    assert differing(got["row_fault"], ints(0, 0, 0, arguments["fault_code"], 0)) == 0
    assert differing(expected["row_fault"], got["row_fault"]) == 0
    assert differing(expected["q_out"], got["q_out"]) == 0


@pytest.mark.parametrize("body", BODIES)
def test_a_fault_of_a_sampled_row_is_the_rows(body: str) -> None:
    arguments = head(6, hidden=40, vocab=24)
    arguments["x"][4, 0] = np.nan
    arguments["sample_rows"] = ints(4, 0, 2)
    arguments["out"] = arguments["out"][:3].copy()
    got = run(native, "Head", pool(body), arguments, 3)
    assert differing(got["row_fault"], ints(0, 0, 0, 0, 8, 0)) == 0
    assert np.isnan(got["out"][0]).all()
    assert np.isfinite(got["out"][1:]).all()


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("Embed", "tokens", ints(1, 43, 0), "row 1 has token id 43; 0 to 42"),
        ("Embed", "tokens", ints(1, 2, -1), "row 2 has token id -1"),
        ("Head", "sample_rows", ints(0, 3, 0), r"sample_rows\[1\] is 3; 0 to 2"),
        ("Head", "sample_rows", ints(0, 0, -1), r"sample_rows\[2\] is -1"),
        ("Qkv", "positions", ints(0, 160, 0), "row 1 has position 160; 0 to 159"),
        ("Qkv", "row_slot", ints(0, 0, 3), "row 2 has slot 3; 0 to 2"),
        ("Qkv", "page_table", np.full((3, 5), 15, np.int32), "row 0 has page 15; 0 to 14"),
    ],
)
def test_indices_that_lead_outside_are_refused(
    name: str, key: str, value: I32, message: str
) -> None:
    build = {
        "Embed": lambda: embed(3, hidden=16, vocab=43),
        "Head": lambda: head(3, hidden=16, vocab=8),
        "Qkv": lambda: qkv(3, hidden=16, heads=1, kv_heads=1, head_dim=8),
    }[name]
    with pytest.raises(ValueError, match=message):
        run(native, name, pool(BODIES[0]), {**build(), key: value}, 3)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("norm_weight", np.ones(15, np.float32), r"norm_weight has shape \[15\]; \[16\]"),
        ("leaf_lengths", ints(8, 8), "merges has shape"),
        ("q_bias", np.ones(7, np.float32), "q_bias has shape"),
        ("q_norm", np.ones(7, np.float32), r"q_norm has shape \[7\]; \[8\]"),
        ("k_norm", np.ones(16, np.float32), r"k_norm has shape \[16\]; \[8\]"),
        ("k_panels", None, "k_panels is None, but 8 outputs"),
        ("cos", np.ones((160, 8), np.float32), "cos has shape"),
        ("sin", np.ones((159, 4), np.float32), "sin has shape"),
        ("positions", np.zeros(3), "positions must be of int32"),
        ("row_fault", np.zeros(2, np.int32), "row_fault has shape"),
        ("fault_code", 0, "fault_code is 0"),
        ("q_out", np.zeros((3, 12), np.float32), "q_panels has shape|whole number of heads"),
    ],
)
def test_bad_arguments_are_refused(key: str, value: Any, message: str) -> None:
    arguments = qkv(3, hidden=16, heads=1, kv_heads=1, head_dim=8)
    with pytest.raises(ValueError, match=message):
        native.Qkv(pool(BODIES[0]), **{**arguments, key: value})


def test_a_sum_that_is_not_whole_is_refused() -> None:
    arguments = gate_up(2, hidden=80, ffn=8, bias=False)
    arguments["merges"] = ints(0, 0)
    with pytest.raises(ValueError, match="merges leaves 2 nodes; a whole sum leaves 1"):
        native.GateUp(pool(BODIES[0]), **arguments)


def test_a_head_without_outputs_has_room_for_the_rows_that_it_norms() -> None:
    """2^60 rows of no columns are an array of no bytes; times 16 they are nothing, of 64 bits."""
    x, rows = np.ones((5, 16), np.float32), np.arange(5, dtype=np.int32)
    x[3, 2] = np.inf
    faults, out = np.zeros(5, np.int32), np.zeros((2**60, 0), np.float32)
    op = native.Head(
        pool(BODIES[0]),
        x,
        rows,
        x[0].copy(),
        1e-5,
        None,
        0,
        None,
        ints(16),
        ints(0),
        out,
        faults,
        7,
    )
    op.run(5)
    assert faults.tolist() == [0, 0, 0, 7, 0]


def test_ops_keep_their_arrays_and_pool_alive() -> None:
    arguments = embed(3, hidden=16, vocab=43)
    expected = run(reference, "Embed", None, arguments, 3)["out"]
    out = arguments["out"]
    op = native.Embed(pool(BODIES[0], 2), **arguments)
    del arguments
    op.run(3)
    assert differing(out, expected) == 0


def test_ops_share_the_scratch_of_their_pool_while_it_grows() -> None:
    op_pool = pool(BODIES[0], 3)
    ops, expected = [], []
    for rows, ffn in ((3, 8), (9, 40), (33, 203)):
        arguments = gate_up(rows, hidden=16 * rows, ffn=ffn, bias=False)
        expected.append(run(reference, "GateUp", None, arguments, rows)["out"])
        ops.append((native.GateUp(op_pool, **arguments), arguments["out"], rows))
    for _ in range(2):
        for (op, out, rows), want in zip(ops, expected, strict=True):
            out[:] = 7
            op.run(rows)
            assert differing(out, want) == 0


def test_binding_an_op_takes_no_memory_for_its_rows() -> None:
    """Rows x hidden floats an op: 61 of them took 1.3 GB on the demo model, at 4096 rows."""
    op_pool = pool(BODIES[0], 2)
    small = gate_up(1, hidden=1024, ffn=8, bias=False)
    rows = {"x": (4096, 1024), "out": (4096, 8)}
    arguments = small | {name: np.zeros(shape, np.float32) for name, shape in rows.items()}
    arguments["row_fault"] = np.zeros(4096, np.int32)
    before = resident_bytes()
    ops = [native.GateUp(op_pool, **arguments) for _ in range(32)]
    assert resident_bytes() - before < 4096 * 1024 * 4
    ops[-1].run(1)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
