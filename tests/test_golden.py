"""Golden vectors pin every op: each body must give the stored bits (tests/golden/make.py)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden import make, wire

from anyshard.config import LEAF, KvType
from anyshard.loading import f32_profile, int8_profile, profile_of
from anyshard.ops import Body, Kernels, available_bodies, exact, native_module

BODIES = [
    (body, threads)
    for body in available_bodies()
    for threads in ((1,) if body == "reference" else (1, 3))
]


def kernels(body: Body, threads: int) -> tuple[Any, Any]:
    chosen = Kernels(body, threads=threads, spin=False)
    return chosen.module, chosen.pool


@pytest.mark.parametrize("name", make.OPS)
@pytest.mark.parametrize(("body", "threads"), BODIES)
def test_every_body_gives_the_golden_bits(name: str, body: Body, threads: int) -> None:
    module, pool = kernels(body, threads)
    named = {"body": body} if name == "sampling" and body != "reference" else {}
    assert make.texts(make.OPS[name](module, pool, **named)) == make.stored(name)


def test_the_elementary_functions_give_the_golden_bits() -> None:
    assert make.texts(make.primitives()) == make.stored("primitives")


def test_silu_of_the_op_is_silu_of_the_primitives() -> None:
    assert make.stored("gate_up")["silu"] == make.stored("primitives")["silu"]


def test_the_vectors_are_of_this_profile() -> None:
    assert LEAF == 64, "another leaf is another profile: write the vectors again"
    assert make.profile_sha256() == f32_profile().sha256()
    assert make.profile_sha256("int8") == int8_profile().sha256()
    for name in ("primitives", *make.OPS):
        text = (make.HERE / f"{name}.json").read_text("utf-8")
        kv: KvType = "int8" if name == "kv_int8" else "f32"
        profile = int8_profile() if name == "int8" else profile_of("f32", kv)
        assert json.loads(text)[make.PROFILE_KEY] == profile.sha256()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of one file of vectors, to change."""
    shutil.copy(make.HERE / "reduce.json", tmp_path)
    return tmp_path


@pytest.mark.parametrize("profile", ["0" * 64, None])
def test_vectors_of_another_profile_are_refused(folder: Path, profile: str | None) -> None:
    content = json.loads((folder / "reduce.json").read_text("utf-8"))
    of = content.pop(make.PROFILE_KEY)
    written = content if profile is None else {make.PROFILE_KEY: profile, **content}
    (folder / "reduce.json").write_text(json.dumps(written), "utf-8")
    wanted = rf"reduce.json is of profile {'none' if profile is None else '0' * 12}, .*{of[:12]}"
    with pytest.raises(ValueError, match=wanted):
        make.stored("reduce", folder)


def test_another_constant_is_another_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "constants_sha256", lambda: "another")
    with pytest.raises(ValueError, match=r"linear.json is of profile"):
        make.stored("linear")


def test_under_one_profile_vectors_are_added_and_never_changed(folder: Path) -> None:
    made = make.stored("reduce", folder)
    make.write("reduce", {**made, "new": ["0x1.0p+0"]}, folder)
    assert make.stored("reduce", folder) == {**made, "new": ["0x1.0p+0"]}
    before = (folder / "reduce.json").read_bytes()
    last = list(made)[-1]
    with pytest.raises(ValueError, match=rf"{last} would change under profile"):
        make.write("reduce", {**made, last: made[last][::-1], "new": ["0x1.0p+0"]}, folder)
    with pytest.raises(ValueError, match="new would change"):  # a vector that goes is a change
        make.write("reduce", made, folder)
    assert (folder / "reduce.json").read_bytes() == before


def test_every_file_is_one_of_an_op_and_none_is_missing() -> None:
    files = {path.stem for path in make.HERE.glob("*.json")}
    assert files == {"primitives", *make.OPS, wire.PATH.stem}


def test_the_vectors_show_a_change_of_order() -> None:
    """One chain over all of K, instead of leaves and tree, gives other bits."""

    def one_chain(k: int, span: object = None) -> Any:
        lengths, merges, low, high = make.leaves(k)
        return lengths, np.array([0, *[1] * (len(merges) - 1)], np.int32), low, high

    module, pool = kernels("reference", 1)
    rows = 3
    k, n = 300, 11
    lengths, merges, low, high = one_chain(k)
    a, panels = make.hashed(1, rows, k), make.packed(make.hashed(2, n, k))
    found = []
    for order in (merges, make.leaves(k)[1]):
        out = make.zeros(rows * n)
        module.RowLinear(pool, a, panels[:, low:high], n, lengths, order, out).run(rows)
        found.append(out)
    assert (found[0] != found[1]).any()


def running(x_MK: make.F32, *, lanes: int, fused: bool = True) -> make.F32:
    """Sums of squares in so many lanes, lane i over k = i, i + lanes, ...; [M, lanes]."""
    sums = make.zeros(len(x_MK), lanes)
    for start in range(0, x_MK.shape[1], lanes):
        part = x_MK[:, start : start + lanes]
        here = sums[:, : part.shape[1]]
        here[:] = exact.fma32(part, part, here) if fused else part * part + here
    return sums


def blocked(x_MK: make.F32) -> make.F32:
    """Lane i over the i-th thirty-second of the row, as threads would share it."""
    width = x_MK.shape[1]
    bounds = [width * lane // 32 for lane in range(33)]
    lanes = [running(x_MK[:, low:high], lanes=1) for low, high in pairwise(bounds)]
    return exact.halving_tree(np.concatenate(lanes, axis=1))


def neighbours(lanes_MN: make.F32) -> make.F32:
    """The tree over (0, 1), (2, 3), ... instead of halves."""
    while lanes_MN.shape[1] > 1:
        lanes_MN = lanes_MN[:, ::2] + lanes_MN[:, 1::2]
    return lanes_MN[:, 0]


def in_line(lanes_MN: make.F32) -> make.F32:
    """One lane after the other."""
    total = make.zeros(len(lanes_MN))
    for lane in range(lanes_MN.shape[1]):
        total = total + lanes_MN[:, lane]
    return total


OTHER_ORDERS: dict[str, Callable[[make.F32], make.F32]] = {
    "one chain": lambda x: running(x, lanes=1)[:, 0],
    "8 lanes": lambda x: exact.halving_tree(running(x, lanes=8)),
    "16 lanes": lambda x: exact.halving_tree(running(x, lanes=16)),
    "64 lanes": lambda x: exact.halving_tree(running(x, lanes=64)),
    "from the end": lambda x: exact.halving_tree(running(x[:, ::-1], lanes=32)),
    "blocks of K": blocked,
    "neighbours": lambda x: neighbours(running(x, lanes=32)),
    "lanes in line": lambda x: in_line(running(x, lanes=32)),
    "not fused": lambda x: exact.halving_tree(running(x, lanes=32, fused=False)),
    "NumPy's": lambda x: np.square(x).sum(axis=1),
}


def normed(width: int, sums: Callable[[make.F32], make.F32]) -> make.F32:
    """What the golden vector of that width would be under another sum."""
    stream = 32 + 2 * make.NORM_WIDTHS.index(width)
    x, weight = make.steep(stream, make.steep_rows(width), width), make.hashed(stream + 1, width)
    mean = sums(x) / np.float32(width)
    inverse = np.float32(1) / np.sqrt(mean + np.float32(make.EPS))
    return np.ascontiguousarray(((x * inverse[:, None]) * weight)[:, make.picked(width)])


@pytest.mark.parametrize("width", make.NORM_WIDTHS)
def test_the_vectors_of_the_norm_show_every_other_order(width: int) -> None:
    golden = make.stored("rms_norm")[f"steep d={width}"]

    def right(x_MK: make.F32) -> make.F32:
        return exact.halving_tree(running(x_MK, lanes=32))

    assert make.texts({"": normed(width, right)})[""] == golden, "the twin here is not the op's"
    if width == 1:
        return  # one square: no order, and fused or not
    for name, sums in OTHER_ORDERS.items():
        assert make.texts({"": normed(width, sums)})[""] != golden, name


def test_the_native_bodies_are_among_those_tested_where_they_were_built() -> None:
    assert native_module() is None or {"avx2", "scalar"} & {body for body, _ in BODIES}
