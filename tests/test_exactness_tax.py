"""What benchmarks/exactness_tax.py makes of its figures, and that its twins compute the same sums.

The twins are compiled in a slow test, by the folder that the benchmark uses too.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from benchmark_modules import benchmark

from anyshard.ops import native_module

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BENCHMARKS = ROOT / "benchmarks"
PATHS = (str(BENCHMARKS), str(ROOT / "scripts"))

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Found = dict[str, npt.NDArray[Any]]

UNIT = 2.0**-24  # of float32 rounding


def gamma(count: int) -> float:
    """Relative error of `count` roundings one after another, in any order of a sum."""
    return count * UNIT / (1 - count * UNIT)


@pytest.fixture
def tax() -> Iterator[ModuleType]:
    with benchmark("exactness_tax") as module:
        yield module


# --- figures --------------------------------------------------------------------------------------

STEPS = {
    "ours": [{"qkv": 2.0, "head": 1.1, "head_all": 9.0}, {"qkv": 30.0, "head": 2.0, "head_all": 1}],
    "free": [{"qkv": 1.0, "head": 1.0, "head_all": 8.0}, {"qkv": 20.0, "head": 4.0, "head_all": 2}],
}


def test_a_tax_is_taken_within_a_round(tax: ModuleType) -> None:
    qkv, head, outside = tax.op_rows(STEPS, in_step=True)
    assert qkv["tax"] == pytest.approx({"median": 0.75, "least": 0.5, "most": 1.0})
    assert head["tax"] == pytest.approx({"median": -0.2, "least": -0.5, "most": 0.1})
    assert qkv["ours_us"]["median"] == 16e6
    assert qkv["share"] == pytest.approx((1 / 2 + 20 / 24) / 2)
    assert outside["op"] == "head_all" and outside["share"] is None


def test_a_steps_tax_is_that_of_its_ops_weighed_by_their_shares(tax: ModuleType) -> None:
    one_round = {arm: rounds[:1] for arm, rounds in STEPS.items()}
    rows = tax.op_rows(one_round, in_step=True)
    weighed = sum(row["tax"]["median"] * row["share"] for row in rows if row["share"] is not None)
    step = tax.step_row(one_round)
    assert step["op"] == "step"
    assert step["tax"]["median"] == pytest.approx(weighed) == pytest.approx(3.1 / 2.0 - 1)


def test_a_step_over_its_bound_is_named_and_an_op_is_not(tax: ModuleType) -> None:
    def claims(rows: int, op: str, median: float) -> list[str]:
        row = {"arithmetic": "int8", "threads": 1, "rows": rows, "op": op}
        found: list[str] = tax.broken_claims([row | {"tax": {"median": median}}])
        return found

    assert claims(1, "step", 0.05) == claims(256, "step", 0.1) == []
    assert claims(1, "qkv", 0.9) == claims(16, "step", 0.9) == []
    (said,) = claims(1, "step", 0.051)
    assert "5.1%" in said and "5% is claimed" in said
    assert claims(256, "step", 0.101)


def test_the_table_has_a_line_for_each_op_and_number_of_rows(tax: ModuleType) -> None:
    rows = [
        row
        for threads in tax.THREADS
        for row in tax.results({("step", 256): STEPS, ("alone", 1): STEPS}, "f32", threads)
    ]
    where = {"cpu": "C", "cores": 2, "kernel": "6", "body": "vnni", "load_before": 0, "date": "D"}
    lines = tax.table({"rows": rows, "rounds": 2, "machine": where}).splitlines()
    assert "| f32 step | 256 | 44.2% (33.3%–55.0%) | 44.2% (33.3%–55.0%) |" in lines
    assert "| f32 head, alone | 1 | -20.0% (-50.0%–10.0%) | -20.0% (-50.0%–10.0%) |" in lines
    assert sum("head_all" in line for line in lines) == 2
    assert "2 interleaved rounds; C, 2 cores, Linux 6; kernels vnni" in lines[-1]


# --- twins ----------------------------------------------------------------------------------------


def test_what_is_installed_has_no_twins() -> None:
    native = native_module()
    if native is None:
        pytest.skip("built without the native core")
    assert not [body for body in native.available_bodies() if "free" in body]


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What a process computes that holds the benchmark's module."""
    sys.path[:0] = PATHS
    try:
        from native import compile_beside, compiler

        if not compiler():
            pytest.skip("no C++ compiler")
        folder = ROOT / "build" / "exactness_tax"
        compile_beside(folder, {"ANYSHARD_FREE_ORDER": "ON"})
    finally:
        for path in PATHS:
            sys.path.remove(path)
    results = tmp_path_factory.mktemp("twins") / "found.npz"
    child = f"import {Path(__file__).stem} as here; here.compute({str(folder)!r}, {str(results)!r})"
    path = {"PYTHONPATH": f"{HERE}:{ROOT / 'scripts'}", "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", child], check=True, env=path)
    with np.load(results) as content:
        return {name.replace("\\", "/"): content[name] for name in content.files}


def compute(folder: str, results: str) -> None:
    """The child: every op by every body, beside float64 and the bound on what is between them."""
    from native import load

    load(Path(folder))
    cases = {"linear": linears, "int8": int8, "norm": norms, "reduce": reduces, "attend": attends}
    found: Found = {}
    for name, case in cases.items():
        for body in native_module().available_bodies():  # type: ignore[union-attr]
            for threads in (1, 2):
                value, exact, bound = case(body, threads)
                found[f"{name}\\{body}\\{threads}"] = np.stack([value, exact, bound])
    np.savez(results, **found)  # type: ignore[arg-type]


Case = tuple[npt.NDArray[Any], F64, F64]  # float32 values, float64 values, bound: [n]


def row_linear(body: str, threads: int, x_MK: F32, panels: Any, num_outputs: int, leaf: int) -> F32:
    import native_cases as cases

    out = np.zeros(len(x_MK) * num_outputs, np.float32)
    lengths, merges = cases.leaves(x_MK.shape[1], leaf)
    pool = cases.pool(body, threads)
    op = cases.native.RowLinear(pool, x_MK, panels, num_outputs, lengths, merges, out)
    op.run(len(x_MK))
    return out


def linears(body: str, threads: int) -> Case:
    import native_cases as cases

    rng = np.random.default_rng(1)
    parts = []
    for rows in (1, 2, 5, 33):
        x_MK, w_NK = cases.floats(rng, rows, 583), cases.floats(rng, 101, 583)
        value = row_linear(body, threads, x_MK, cases.panels(w_NK), 101, 64)
        exact = x_MK.astype(float) @ w_NK.T.astype(float)
        bound = gamma(583) * (np.abs(x_MK).astype(float) @ np.abs(w_NK).T.astype(float))
        parts.append((value, exact.ravel(), bound.ravel()))
    value, exact, bound = (np.concatenate(part) for part in zip(*parts, strict=True))
    return value, exact, bound


def int8(body: str, threads: int) -> Case:
    """Beside float64 sums of the same integers and scales: a leaf is rounded three times."""
    import native_cases as cases
    from test_int8 import blocks, lengths_of

    from anyshard.ops.quant import quantize_rows
    from anyshard.ops.storage import unpack_blocks

    rng = np.random.default_rng(2)
    lengths = lengths_of(583)
    parts = []
    for rows in (1, 2, 3, 5, 33):
        x_MK, panels = cases.floats(rng, rows, 583), blocks(cases.floats(rng, 101, 583))
        value = row_linear(body, threads, x_MK, panels, 101, 32)
        qx_MBk, sx_MB = (each.astype(float) for each in quantize_rows(x_MK, lengths))
        qw_NBk, sw_NB = (each.astype(float) for each in unpack_blocks(panels, np.arange(101)))
        leaf_MNB = np.einsum("mbk,nbk,mb,nb->mnb", qx_MBk, qw_NBk, sx_MB, sw_NB)
        bound = gamma(len(lengths) + 3) * np.abs(leaf_MNB).sum(axis=2)
        parts.append((value, leaf_MNB.sum(axis=2).ravel(), bound.ravel()))
    value, exact, bound = (np.concatenate(part) for part in zip(*parts, strict=True))
    return value, exact, bound


def norms(body: str, threads: int) -> Case:
    """Seen through a head that is the identity."""
    import native_cases as cases

    rng = np.random.default_rng(3)
    size, rows = 203, 256
    x_MD, weight_D = cases.floats(rng, rows, size), cases.floats(rng, size)
    out = np.zeros((rows, size), np.float32)
    cases.native.Head(
        cases.pool(body, threads),
        x_MD,
        np.arange(rows, dtype=np.int32),
        weight_D,
        1e-5,
        cases.panels(np.eye(size, dtype=np.float32)),
        size,
        None,
        *cases.leaves(size),
        out,
        np.zeros(rows, np.int32),
        1,
    ).run(rows)
    wide = x_MD.astype(float)
    mean = (wide * wide).sum(axis=1, keepdims=True) / size + float(np.float32(1e-5))
    exact = wide / np.sqrt(mean) * weight_D
    return out.ravel(), exact.ravel(), gamma(size + 8) * np.abs(exact).ravel()


def reduces(body: str, threads: int) -> Case:
    import native_cases as cases

    rng = np.random.default_rng(4)
    rows, size, nodes = 33, 77, 5
    x_MD, bias_D = cases.floats(rng, rows, size), cases.floats(rng, size)
    parts = [cases.floats(rng, count, rows, size) for count in (2, 3)]
    _, merges = cases.leaves(nodes, 1)
    terms = [x_MD, np.broadcast_to(bias_D, x_MD.shape), *parts[0], *parts[1]]
    exact = np.sum([term.astype(float) for term in terms], axis=0)
    bound = gamma(nodes + 2) * np.sum([np.abs(term).astype(float) for term in terms], axis=0)
    out = x_MD.copy()
    sources = [part.reshape(-1) for part in parts]
    pool = cases.pool(body, threads)
    cases.native.Reduce(pool, sources, [2, 3], merges, bias_D, out, size).run(rows)
    return out.ravel(), exact.ravel(), bound.ravel()


def attends(body: str, threads: int) -> Case:
    """A score is off by `score`, so a weight by at most twice the factor that makes of it."""
    import native_cases as cases
    from test_native_attention import scattered

    dim = 40
    case = scattered(dim, cases.ints(0, 0, 0, 0, 1))
    value, faults = case.run(cases.native, cases.pool(body, threads))
    assert not faults.any()
    exact, bound = np.zeros_like(value, float), np.zeros_like(value, float)
    for row, position in enumerate(case.positions):
        pages = case.page_table[case.row_slot[row]]
        for head, kv_head in enumerate(case.kv_head_of):
            at = slice(head * dim, (head + 1) * dim)
            k_dJ = np.concatenate(case.k_cache[pages, kv_head], axis=1)[:, : position + 1]
            v_Jd = np.concatenate(case.v_cache[pages, kv_head])[: position + 1].astype(float)
            q_d = case.q[row, at].astype(float)
            scores = q_d @ k_dJ
            weights = np.exp2(scores - scores.max())
            exact[row, at] = weights @ v_Jd / weights.sum()
            score = gamma(dim + 2) * (np.abs(q_d) @ np.abs(k_dJ)).max() * np.log(2)
            off = 2 * (np.expm1(score) + gamma(len(scores) + 40))
            bound[row, at] = off * np.abs(v_Jd).max()
    return value.ravel(), exact.ravel(), bound.ravel()


OPS = ("linear", "int8", "norm", "reduce", "attend")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("op", OPS)
def test_every_body_and_its_twin_are_within_rounding_of_float64(computed: Found, op: str) -> None:
    names = [name for name in computed if name.startswith(f"{op}/")]
    assert len(names) >= 2
    for name in names:
        value, exact, bound = computed[name]
        assert (np.abs(value - exact) <= bound).all(), name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("op", OPS)
def test_a_twin_adds_in_another_order(computed: Found, op: str) -> None:
    twins = [name for name in computed if name.startswith(f"{op}/") and "-free" in name]
    if not twins:
        pytest.skip("this CPU has no body with a twin")
    for name in twins:
        _, body, threads = name.split("/")
        ours = computed[f"{op}/{body.split('-')[0]}/{threads}"][0]
        assert (computed[name][0] != ours).mean() > 0.02, name
