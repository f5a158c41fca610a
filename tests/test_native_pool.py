"""The pool of threads, the float environment, and the machine code of the hot loops."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from native_cases import BODIES, differing, floats, leaves, native, needs_native, panels, pool

from anyshard.ops.exact import linear_nodes

pytestmark = needs_native


def test_bodies_are_named_best_first() -> None:
    assert BODIES[-1] == "scalar"
    op_pool = native.Pool(3, "scalar", False)
    assert (op_pool.threads, op_pool.body) == (3, "scalar")


@pytest.mark.parametrize("threads", [-1, 0, 257])
def test_a_pool_of_an_impossible_size_is_refused(threads: int) -> None:
    with pytest.raises(ValueError, match=f"threads is {threads}; a pool has 1 to 256"):
        native.Pool(threads, "scalar", False)


def test_an_unknown_body_is_refused_with_the_possible_ones() -> None:
    with pytest.raises(ValueError, match=r"body 'sse' is not available here; these are:.* scalar"):
        native.Pool(1, "sse", False)


def embed_op(op_pool: object, rows: int = 64) -> tuple[object, np.ndarray, np.ndarray]:
    weight = floats(np.random.default_rng(0), 16, 512)
    tokens = np.arange(rows, dtype=np.int32) % 16
    out = np.zeros((rows, 512), np.float32)
    return native.Embed(op_pool, panels(weight), 16, tokens, out), out, weight[tokens]


@pytest.mark.parametrize("spin", [False, True])
@pytest.mark.parametrize("threads", [2, 7])
def test_many_short_tasks_on_more_threads_than_cores(spin: bool, threads: int) -> None:
    op, out, expected = embed_op(pool(BODIES[0], threads, spin=spin))
    for _ in range(300):
        out[:] = 0
        op.run(64)
        assert differing(out, expected) == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_a_closed_pool_refuses_to_run(threads: int) -> None:
    op_pool = pool(BODIES[0], threads)
    op, _, _ = embed_op(op_pool)
    op_pool.close()
    op_pool.close()
    with pytest.raises(RuntimeError, match="the pool is closed"):
        op.run(64)


FORKED = """
import gc, os, sys
from anyshard import _native as native
pool = native.Pool(int(sys.argv[1]), "scalar", False)
child = os.fork()
if child == 0:
    if sys.argv[2] == "close":
        pool.close()
        pool.close()
    del pool
    gc.collect()
    os._exit(0)
_, status = os.waitpid(child, 0)
pool.close()
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("way", ["close", "collect"])
def test_a_forked_child_can_let_go_of_a_pool_whose_threads_it_does_not_have(
    threads: int, way: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, str(threads), way],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "0\n"


def test_callers_from_two_threads_take_turns() -> None:
    op_pool = pool(BODIES[0], 2)
    cases = [embed_op(op_pool) for _ in range(2)]

    def work(number: int) -> None:
        for _ in range(200):
            cases[number][0].run(64)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for _, out, expected in cases:
        assert differing(out, expected) == 0


def test_an_idle_pool_uses_no_processor_time() -> None:
    op, _, _ = embed_op(pool(BODIES[0], 4, spin=True))
    op.run(64)
    time.sleep(0.05)  # the spinning ends after some 100 us
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.15


@pytest.mark.torch
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("threads", [1, 2])
def test_denormals_survive_a_caller_that_flushes_them(body: str, threads: int) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    x = floats(rng, 5, 70)
    w = floats(rng, 19, 70) * np.float32(1e-40)
    lengths, merges = leaves(70)
    expected = linear_nodes(x, w, lengths.tolist(), merges.tolist())
    assert ((expected != 0) & (np.abs(expected) < 1e-38)).all()
    out = np.zeros(5 * 19, np.float32)
    op = native.RowLinear(pool(body, threads), x, panels(w), 19, lengths, merges, out)
    tiny = np.full(4, 1e-40, np.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        op.run(5)
        flushed = tiny * np.float32(0.5)
    finally:
        torch.set_flush_denormal(False)
    assert differing(out.reshape(expected.shape), expected) == 0
    assert not flushed.any(), "the caller's setting was not restored"


def innermost_loops(assembly: str) -> list[list[str]]:
    """Instructions of each loop that holds no other jump, by its backward branch."""
    instructions: list[tuple[int, str]] = []
    for line in assembly.splitlines():
        found = re.match(r"\s*([0-9a-f]+):\s+(\S.*)", line)
        if found:
            instructions.append((int(found[1], 16), found[2]))
    place = {address: number for number, (address, _) in enumerate(instructions)}
    loops = []
    for number, (address, text) in enumerate(instructions):
        branch = re.match(r"j[a-z]+\s+([0-9a-f]+)", text)
        start = place.get(int(branch[1], 16)) if branch else None
        if start is None or instructions[start][0] >= address:
            continue
        body = [text for _, text in instructions[start:number]]
        if not any(re.match(r"(j[a-z]+|call|ret)\b", text) for text in body):
            loops.append(body)
    return loops


def disassembled() -> str:
    return subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", native.__file__],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.skipif("avx2" not in BODIES, reason="no AVX2 body here")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
@pytest.mark.parametrize("product", ["vpmaddubsw", "vpdpbusd"])
def test_blocks_of_int8_keep_their_sums_in_registers(product: str) -> None:
    """A block of a tile is unrolled; gcc 12 likes to make a tree of its sums, which it then stores.

    64 products are those of 4 rows x 2 vectors over 8 groups of 4 k.
    """
    lines = disassembled().splitlines()
    places = [number for number, line in enumerate(lines) if product in line]
    blocks: list[list[int]] = []
    for place in places:
        if not blocks or place - blocks[-1][-1] > 60:
            blocks.append([])
        blocks[-1].append(place)
    assert sorted(len(block) for block in blocks)[-4:] == [16, 32, 48, 64]
    for block in blocks:
        inside = lines[block[0] : block[-1] + 1]
        stores = [line for line in inside if re.search(r"vmov\S+\s+%ymm\d+,.*\(%r[sb]p", line)]
        assert stores == []


@pytest.mark.skipif("avx2" not in BODIES, reason="no AVX2 body here")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
def test_hot_loops_keep_their_sums_in_registers() -> None:
    """gcc 12 can store every accumulator at every k: 27 instead of 68 GFLOP/s."""
    hot = [
        loop
        for loop in innermost_loops(disassembled())
        if sum("vfmadd" in line for line in loop) >= 8
    ]
    most = max(sum("vfmadd" in line and "ymm" in line for line in loop) for loop in hot)
    assert most >= 48, "the tile of 4 rows x 3 panels, four k at a time, was not found"
    for loop in hot:
        sums = sum("vfmadd" in line for line in loop)
        stores = [re.match(r"vmov[au]p[sd]\s+%[xyz]mm\d+,.*\(%r[sb]p", line) for line in loop]
        # none in float32 tiles; of weights that were widened early, gcc puts one by now and then
        widens = any(re.match(r"vpslld|vcvtph2ps|vcvtdq2ps", line) for line in loop)
        assert sum(map(bool, stores)) <= (sums // 12 if widens else 0), "\n".join(loop)


@pytest.mark.skipif("vnni" not in BODIES, reason="no VNNI body here")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
@pytest.mark.parametrize(("product", "most"), [("vpmaddwd", 1), ("vpdpwssd", 0)])
def test_attention_over_int8_keeps_its_sums_in_registers(product: str, most: int) -> None:
    """3 queries x 4 vectors in scores and values; gcc 12 made all products before any sum.

    On AVX2 sums, pairs, a vector and a product are 17 for 16 registers: one sum waits in memory,
    which takes 6 cycles of the 9 that the 28 multiplies, adds and widenings keep their ports.
    """
    hot = [
        loop
        for loop in innermost_loops(disassembled())
        if sum(product in line for line in loop) == 12
    ]
    assert len(hot) >= 4, "scores and values, each with and without asking for the next page"
    for loop in hot:
        stores = [line for line in loop if re.search(r"vmov\S+\s+%ymm\d+,.*\(%r[sb]p", line)]
        assert len(stores) <= most, "\n".join(loop)
