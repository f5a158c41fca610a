"""What it costs that sums have one order: every op beside its twin that may add as it likes.

    python benchmarks/exactness_tax.py [--rounds 15] [--json FILE] [--quick]

Needs a compiler and an x86 CPU with AVX2. Compiles the native module once more, in
build/exactness_tax, with the kernels of benchmarks/exactness_tax/ beside the shipped ones: the same
tiles, panels, prefetch, threads and ops, but no leaves, no tree, no stripes (both go through KV
head by head, where a single row of ours goes through all heads block by block). A step of the demo
model is walked op by op on both bodies, in turning order, in one process and over one weight image,
so that weights come from memory as they do in a run. `cached`: one layer's op again and again.
`norm` is alone, `reduce` over the nodes that two ranks send; both hardly count in an unsplit run.

A tax is ours / twin - 1, taken within a round, in which each call counts with the least of some
passes: on one thread of that thread's time, on two of wall-clock time. A step's is that of all its
ops together, and so the mean of theirs, each weighed by its share of the twin's time. 1 row: the
300th token. More: a chunk that ends the prompt; its head is of one row (`head_all`: of every row,
not in the step).

Exits 4 where a step of one row is taxed by more than 5 %, or one of 256 by more than 10 %.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any, Final

import hf
import numpy as np

from anyshard.checkpoint import build_image, open_checkpoint
from anyshard.comm.solo import Solo
from anyshard.config import Arithmetic
from anyshard.layout import plan
from anyshard.loading import profile_of
from anyshard.model import Program, program
from anyshard.ops import Kernels, available_bodies
from anyshard.tokenizer import open_tokenizer
from anyshard.worker import RankPlan, Served, Worker, wire_sizes

sys.path.insert(0, str(hf.ROOT / "scripts"))

from native import ROOT, compile_beside, load

FOLDER: Final = ROOT / "build" / "exactness_tax"
MOST: Final = {1: 0.05, 256: 0.10}  # tax of a step, by its rows
ROWS: Final = (1, 16, 128, 256)
THREADS: Final = (1, 2)
ARITHMETICS: Final[tuple[Arithmetic, ...]] = ("f32", "int8")
KEYS: Final = 300  # that the step of one row sees
PASSES: Final = {1: 8, 16: 4, 128: 3, 256: 2}  # measured in a round
BATCHES: Final = 5  # of an op that is measured by itself
CALLS: Final = 8  # in a batch
OUTSIDE: Final = ("head_all",)  # measured beside a step, and no part of it
LINEARS: Final = ("qkv", "o_proj", "gate_up", "down_proj")

Clock = Callable[[], float]
Times = dict[str, float]  # seconds by op, all layers together
Measured = dict[tuple[str, int], dict[str, list[Times]]]  # (what, rows) to arm to rounds


def twin_of(body: str, threads: int) -> str:
    """The body of any order: on several threads it halves the keys of a decode step."""
    return f"{body}-free" + ("-halves" if threads > 1 else "")


class Walker(Worker):
    """An unsplit rank whose ops are timed, one by one."""

    @classmethod
    def of(cls, served: Served, body: Any, threads: int) -> Walker:
        """Bound, with the first 300 tokens of a text in its KV cache."""
        layout = plan(served.config, leaf=served.profile.leaf)
        rank_plan = RankPlan(
            heads=layout.heads,
            ffn=layout.ffn,
            vocab=layout.vocab,
            layers=layout.layers,
            kernels=body,
            comm="solo",
            threads=threads,
            spin=threads <= len(os.sched_getaffinity(0)),
            rows_max=max(ROWS),
            sampled_max=max(ROWS),
            num_slots=1,
            num_pages=16,
            max_model_len=512,
            profile_sha256=served.profile.sha256(),
        )
        part = program(served.config, served.profile, layout, 0)
        status = SimpleNamespace(set=lambda **_: None)
        return cls(
            served,
            rank_plan,
            rank=0,
            comm=Solo(wire_sizes([part], rank_plan)),
            control=SimpleNamespace(status=status),  # type: ignore[arg-type]
        )

    def place(self, tokens: Sequence[int], stop: int) -> None:
        """The rows of the next steps: these tokens, the last at position stop - 1."""
        count = len(tokens)
        self.tokens[:count] = tokens
        self.positions[:count] = np.arange(stop - count, stop)
        self.page_table[0] = np.arange(self.page_table.shape[1])
        self.sample_rows[:] = np.arange(len(self.sample_rows))

    def walk(self, rows: int, clock: Clock) -> list[float]:
        """One step: seconds of each call, in the order of `kinds`."""
        (head,) = self.head
        calls = [*((run, rows) for run in self.body), (head, 1)]
        if rows > 1:
            calls.append((head, rows))
        times = [timed(run, count, clock) for run, count in calls]
        assert not self.row_fault[:rows].any()
        return times

    def kinds(self, rows: int) -> list[str]:
        """The op of each call of a step."""
        body = [op.kind for op in self.program.ops if op.kind != "head"]
        return [*body, "head", *(OUTSIDE if rows > 1 else ())]

    def steps(self, rows: int, clock: Clock) -> Times:
        """Some steps, by op: of each call the least, so that what displaced it does not count."""
        passes = [self.walk(rows, clock) for _ in range(PASSES[rows] + 1)][1:]
        times: Times = {}
        for kind, *seconds in zip(self.kinds(rows), *passes, strict=True):
            times[kind] = times.get(kind, 0.0) + min(seconds)
        return times

    def repeat(self, rows: int, clock: Clock) -> Times:
        """Linears of one layer, each again and again."""
        ops = [op for op in self.program.ops if op.kind != "head"]
        middle = self.config.num_layers // 2
        return {
            op.kind: repeated(run, rows, clock)
            for op, run in zip(ops, self.body, strict=True)
            if op.kind in LINEARS and op.layer == middle
        }


def timed(run: Callable[[int], None], rows: int, clock: Clock) -> float:
    start = clock()
    run(rows)
    return clock() - start


def repeated(run: Callable[[int], None], rows: int, clock: Clock) -> float:
    """Seconds of a call among others: the least of some batches."""

    def batch(_: int) -> None:
        for _ in range(CALLS):
            run(rows)

    return min(timed(batch, rows, clock) for _ in range(BATCHES)) / CALLS


class Alone:
    """Ops that an unsplit run has no calls of: a norm without a linear, nodes of two ranks."""

    def __init__(self, kernels: Kernels, whole: Program, halved: Program) -> None:
        config = whole.config
        rng = np.random.default_rng(0)
        rows = max(ROWS)
        x_RD = rng.standard_normal((rows, config.hidden), np.float32)
        weight_D = np.ones(config.hidden, np.float32)
        head = next(op for op in whole.ops if op.kind == "head")
        reduce = next(op for op in halved.ops if op.kind == "reduce_o")
        nodes = reduce.sum.nodes_per_rank
        sources = [rng.standard_normal(count * rows * config.hidden, np.float32) for count in nodes]
        self.ops: dict[str, Any] = {
            "norm": kernels.module.Head(
                kernels.pool,
                x_RD,
                np.arange(rows, dtype=np.int32),
                weight_D,
                config.norm_eps,
                None,
                0,
                None,
                np.array(head.sum.leaf_lengths, np.int32),
                np.array(head.sum.merges, np.int32),
                np.zeros((rows, 0), np.float32),
                np.zeros(rows, np.int32),
                1,
            ),
            "reduce": kernels.module.Reduce(
                kernels.pool,
                sources,
                list(nodes),
                np.array(reduce.sum.merges, np.int32),
                None,
                np.zeros_like(x_RD),
                config.hidden,
            ),
        }

    def repeat(self, rows: int, clock: Clock) -> Times:
        """Each again and again."""
        return {name: repeated(op.run, rows, clock) for name, op in self.ops.items()}


def measure(
    served: Served, bodies: Mapping[str, str], threads: int, tokens: Sequence[int], rounds: int
) -> Measured:
    """Both arms in turning order; a round more, which warms up and is dropped."""
    config, profile = served.config, served.profile
    walkers = {arm: Walker.of(served, body, threads) for arm, body in bodies.items()}
    halved = program(config, profile, plan(config, tp=2, leaf=profile.leaf), 0)
    alone = {arm: Alone(w.kernels, w.program, halved) for arm, w in walkers.items()}
    found: Measured = {}
    clock: Clock = time.thread_time if threads == 1 else time.perf_counter

    def add(what: str, rows: int, arm: str, times: Times) -> None:
        found.setdefault((what, rows), {arm: [] for arm in bodies})[arm].append(times)

    for walker in walkers.values():
        for stop in (256, KEYS):
            count = min(stop, 256)
            walker.place(tokens[stop - count : stop], stop)
            walker.walk(count, clock)
    for round_ in range(rounds + 1):
        arms = list(walkers)[:: -1 if round_ % 2 else 1]
        for rows in ROWS:
            stop = KEYS if rows == 1 else max(rows, 256)
            for arm in arms:
                walkers[arm].place(tokens[stop - rows : stop], stop)
                add("step", rows, arm, walkers[arm].steps(rows, clock))
                add("alone", rows, arm, alone[arm].repeat(rows, clock))
                if rows == 1:
                    add("cached", rows, arm, walkers[arm].repeat(rows, clock))
    for walker in walkers.values():
        walker.kernels.pool.close()
    return {key: {arm: each[1:] for arm, each in by_arm.items()} for key, by_arm in found.items()}


def op_rows(by_arm: Mapping[str, Sequence[Times]], *, in_step: bool) -> list[dict[str, Any]]:
    """A row for each op: µs, the tax within a round, its share of the step's time.

    The share is of the twin's time: a step's tax is then the mean of its ops', so weighed.
    """
    ours, free = by_arm["ours"], by_arm["free"]
    rows = []
    for op in ours[0]:
        counts = in_step and op not in OUTSIDE
        shares = [times[op] / whole(times) for times in free] if counts else []
        rows.append(
            {
                "op": op,
                "ours_us": hf.spread([1e6 * times[op] for times in ours]),
                "free_us": hf.spread([1e6 * times[op] for times in free]),
                "tax": hf.spread([a[op] / b[op] - 1 for a, b in zip(ours, free, strict=True)]),
                "share": median(shares) if shares else None,
            }
        )
    return rows


def whole(times: Times) -> float:
    """Seconds of a step's ops together."""
    return sum(seconds for op, seconds in times.items() if op not in OUTSIDE)


def step_row(by_arm: Mapping[str, Sequence[Times]]) -> dict[str, Any]:
    """The step as one op."""
    times = {arm: [{"step": whole(each)} for each in rounds] for arm, rounds in by_arm.items()}
    return op_rows(times, in_step=False)[0]


def results(measured: Measured, arithmetic: Arithmetic, threads: int) -> list[dict[str, Any]]:
    """All rows of one arithmetic and number of threads."""
    rows = []
    for (what, count), by_arm in measured.items():
        where = {"arithmetic": arithmetic, "threads": threads, "rows": count, "what": what}
        if what == "step":
            rows.append({**where, **step_row(by_arm)})
        rows += [{**where, **row} for row in op_rows(by_arm, in_step=what == "step")]
    return rows


def broken_claims(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Steps that are taxed by more than they may be, by medians."""
    return [
        f"{row['arithmetic']}, {row['threads']} threads, {row['rows']} rows: a step is taxed by "
        f"{row['tax']['median']:.1%}, {MOST[row['rows']]:.0%} is claimed"
        for row in rows
        if row["op"] == "step" and row["tax"]["median"] > MOST.get(row["rows"], float("inf"))
    ]


def cell(row: Mapping[str, Any]) -> str:
    """`1.2% (0.3%–2.0%)`, and the share of the step."""
    share = "" if row["share"] is None else f", share {row['share']:.1%}"
    return hf.shown(row["tax"], ".1%") + share


def table(found: Mapping[str, Any]) -> str:
    """Markdown, with the machine and the date below."""
    names = ", ".join(f"{rows} row{'s' * (rows > 1)} {most:.0%}" for rows, most in MOST.items())
    lines = [
        "Tax (least–most) of an op and its share of the step; bounds of a step: " + names + ".",
        "",
        "| SmolLM2-135M | rows | " + " | ".join(f"{n} thread{'s' * (n > 1)}" for n in THREADS),
        "| --- | --- |" + " --- |" * len(THREADS),
    ]
    lines[-2] += " |"
    cells: dict[tuple[str, str, int], dict[int, str]] = {}
    for row in found["rows"]:
        op = row["op"] if row["what"] == "step" else f"{row['op']}, {row['what']}"
        key = (f"{row['arithmetic']} {op}", row["what"], row["rows"])
        cells.setdefault(key, {})[row["threads"]] = cell(row)
    for (name, _, count), by_threads in cells.items():
        shown = " | ".join(by_threads.get(threads, "") for threads in THREADS)
        lines.append(f"| {name} | {count} | {shown} |")
    lines += [
        "",
        hf.measured(
            found["machine"],
            rounds=found["rounds"],
            command="python benchmarks/exactness_tax.py",
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = hf.flags(__doc__, rounds=15)
    parser.add_argument("--quick", action="store_true", help="one round: does it run?")
    asked = parser.parse_args()
    rounds = 1 if asked.quick else asked.rounds
    compile_beside(FOLDER, {"ANYSHARD_FREE_ORDER": "ON"})
    load(FOLDER)  # before anything imports the installed module
    load_before = os.getloadavg()[0]
    body, *_ = available_bodies()
    if twin_of(body, 1) not in available_bodies():
        sys.exit(f"the kernels here are {body}, which has no twin")
    checkpoint = open_checkpoint(None)
    tokens = open_tokenizer(checkpoint).encode(hf.TEXT.read_text("utf-8"), add_special=True)
    rows = []
    for arithmetic in ARITHMETICS:
        image = build_image(checkpoint, threads=max(THREADS), arithmetic=arithmetic)
        served = Served(checkpoint.config, profile_of(arithmetic), image)
        for threads in THREADS:
            bodies = {"ours": f"{body}-stripes", "free": twin_of(body, threads)}
            measured = measure(served, bodies, threads, tokens, rounds)
            rows += results(measured, arithmetic, threads)
            print(f"{arithmetic}, threads: {threads}", file=sys.stderr, flush=True)
    found = {
        "machine": hf.machine([], load_before) | {"body": body},
        "rounds": rounds,
        "rows": rows,
    }
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    missed = broken_claims(rows)
    print("\n".join(missed) or "every claim held", file=sys.stderr)
    sys.exit(hf.CLAIM_BROKEN if missed else 0)


if __name__ == "__main__":
    main()
