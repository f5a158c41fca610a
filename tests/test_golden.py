"""Golden vectors pin every op: each body must give the stored bits (tests/golden/make.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from golden import make

from anyshard.config import LEAF
from anyshard.ops import Body, Kernels, available_bodies, native_module

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


def test_every_file_is_one_of_an_op_and_none_is_missing() -> None:
    files = {path.stem for path in make.HERE.glob("*.json")}
    assert files == {"primitives", *make.OPS}


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


def test_the_native_bodies_are_among_those_tested_where_they_were_built() -> None:
    assert native_module() is None or {"avx2", "scalar"} & {body for body, _ in BODIES}
