"""What splitting costs on one host: SmolLM2-135M on two ranks, in a batch, from the command line.

    python benchmarks/split.py [--rounds 7] [--json FILE] [--quick]

Arms are warm processes in turning order, as in hf.py, and a ratio is taken within a round:

decode, prefill: two ranks of one thread beside one process of two threads, tokens/s.
step: of decoding with four requests in one batch beside one with one request, int8, ms; nobody
asks for logits.
exchange: one row of the residual between two forked ranks over shared memory, written into the
buffer, run, and read out of the peer's; µs, of each round the median of many.
first token: wall clock of `anyshard generate`, a fresh process, to its first byte, s.

Exits 4 where a median breaks its bound, or a bit differs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Final

os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")  # before NumPy: we fork

import hf
import numpy as np

from anyshard.checkpoint import open_checkpoint
from anyshard.comm.base import ExchangeSpec, WireSizes
from anyshard.comm.control import ROW, ControlSizes
from anyshard.epoch import SPIN_US
from anyshard.launcher import EpochSizes, Progress, Seat, Start, fork_launcher
from anyshard.tokenizer import open_tokenizer
from anyshard.walk import Gathering, walks

PROFILES: Final = {"none": "f32", "int8": "int8"}  # by --quantization
WHOLE: Final = {1: "1 thread", 2: "2 threads"}  # one process
CUT: Final = "-tp 2"
ROWS: Final = 4  # of the batch
HIDDEN: Final = 576  # floats of a row of the residual
EXCHANGES: Final = 20_000  # a round

LEAST_DECODE: Final = 0.9
MOST_STEP: Final = 1.4
MOST_EXCHANGE_US: Final = 10.0
MOST_FIRST_S: Final = 1.5


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What each round gave, beside what it is compared with (None: it stands for itself).

    least, most: bounds of the median of the ratio, or of the values where there is none.
    """

    name: str
    unit: str
    values: list[float]
    beside: list[float] | None = None
    least: float | None = None
    most: float | None = None

    @property
    def ratios(self) -> list[float] | None:
        """Within a round."""
        if self.beside is None:
            return None
        return [a / b for a, b in zip(self.values, self.beside, strict=True)]

    @property
    def is_broken(self) -> bool:
        """Whether the median is beyond a bound."""
        found = hf.spread(self.ratios or self.values)["median"]
        too_little = self.least is not None and found < self.least
        return too_little or (self.most is not None and found > self.most)

    @property
    def asked(self) -> str:
        """Of the ratio, or of the values: `at least 0.9`; nothing where no bound is."""
        bounds = {"at least": self.least, "at most": self.most}
        return ", ".join(f"{words} {x:g}" for words, x in bounds.items() if x is not None)

    def cells(self) -> tuple[str, ...]:
        """Of its row in the table."""
        form = ".2f" if self.unit in ("s", "µs") else ".1f"
        beside = "" if self.beside is None else hf.shown(hf.spread(self.beside), form)
        ratio = "" if self.ratios is None else hf.shown(hf.spread(self.ratios), ".2f")
        values = hf.shown(hf.spread(self.values), form)
        return (self.name, f"{values} {self.unit}", beside, ratio, self.asked)


def start_arm(quantization: str, name: str, *, tp: int, threads: int) -> hf.Arm:
    flags = (str(tp), str(threads), "--quantization", quantization, "--rows", str(ROWS))
    process = hf.start([sys.executable, str(hf.HERE / "arm_anyshard.py"), *flags])
    arm = hf.Arm(f"anyshard, {name}", process, threads)
    arm.ready = arm.read()["ready"]
    return arm


def cut_beside_whole(kind: str, tasks: list[hf.Task], rates: dict[str, Any]) -> list[Figure]:
    """Two ranks beside two threads; what `hf.measure` gave of the tasks."""
    return [
        Figure(
            name=f"{task.name}, {kind}: {CUT} / {WHOLE[2]}",
            unit="tok/s",
            values=rates[task.name][f"anyshard, {CUT}"],
            beside=rates[task.name][f"anyshard, {WHOLE[2]}"],
            least=LEAST_DECODE if task.name == "decode" else None,
        )
        for task in tasks
    ]


def steps(arms: list[hf.Arm], task: hf.Task, tokens: list[int], rounds: int) -> list[Figure]:
    """Four rows in a step beside one; every row must give the tokens of one alone."""
    ways = [(arm, rows) for arm in arms for rows in (1, ROWS)]
    step_ms: dict[tuple[str, int], list[float]] = {(arm.name, rows): [] for arm, rows in ways}
    for round_ in range(rounds + 1):
        turn, given = round_ % len(ways), []
        for arm, rows in ways[turn:] + ways[:turn]:
            time.sleep(hf.PAUSE_S)
            answer = arm.ask(tokens[: task.prompt], task.new, rows=rows, logits=False)
            given.append(answer["tokens"])
            if round_:
                step_ms[arm.name, rows].append(1000 / task.rate(answer))
        assert all(each == given[0] for each in given), "a batch changed a token"
    return [
        Figure(
            name=f"step, int8, {arm.name.removeprefix('anyshard, ')}: {ROWS} rows / 1 row",
            unit="ms",
            values=step_ms[arm.name, ROWS],
            beside=step_ms[arm.name, 1],
            most=MOST_STEP,
        )
        for arm in arms
    ]


def exchange(rounds: int) -> Figure:
    """On two forked ranks, with the wires and the wait of the engine's."""
    nodes = ExchangeSpec(name="nodes", kind="reduce", capacity_floats=HIDDEN)
    sizes = EpochSizes(
        wires=WireSizes(tp=2, pp=1, exchanges=(nodes,)),
        control=ControlSizes(rows_max=1, pages_max=1),
        spin_us=SPIN_US,
    )
    group = fork_launcher(load_nothing, exchange_rank)
    try:
        group.wait_loaded()
        control = group.start(Start(epoch=1, payload=b"", sizes=sizes, deadline_s=10.0))
        found = []
        for _ in range(rounds + 1):
            sequence = control.send_frame(np.zeros(1, ROW))
            result = control.wait_result(sequence, deadline_s=60.0, poll=group.poll)
            found.append(int(result.tokens[0]) / 1000)
        control.send_stop()
        group.end()
    finally:
        group.close()
    name = f"exchange of {HIDDEN} floats, two ranks"
    return Figure(name=name, unit="µs", values=found[1:], most=MOST_EXCHANGE_US)


def load_nothing(progress: Progress) -> tuple[object, bytes]:
    return None, b""


def exchange_rank(seat: Seat) -> None:
    """Many exchanges a frame; its token is the median of their ns."""
    comm = seat.comm()
    nodes, clock = comm.exchange("nodes"), time.perf_counter_ns
    mine = [nodes.send_buffer(parity)[:HIDDEN] for parity in (0, 1)]
    others = [nodes.sources(parity)[1 - comm.tp_rank][:HIDDEN] for parity in (0, 1)]
    row, read = np.full(HIDDEN, comm.tp_rank, np.float32), np.zeros(HIDDEN, np.float32)
    spent = np.zeros(EXCHANGES, np.int64)
    bound = Gathering(nodes, row_floats=HIDDEN, row_wire=HIDDEN)
    (exchange,) = walks([bound], seat.control.status.operations)  # as the engine makes it
    while (frame := seat.control.next_frame()) is not None:
        for index in range(EXCHANGES):
            start, parity = clock(), nodes.parity
            mine[parity][:] = row
            exchange(1)
            read[:] = others[parity]
            spent[index] = clock() - start
        assert (read == 1 - comm.tp_rank).all(), "the row of the peer did not come"
        if seat.rank == seat.region.sampler:
            median_ns = np.array([np.median(spent)], np.int32)
            seat.control.post_result(frame.sequence, median_ns, np.zeros(1, np.int32))


def first_tokens(rounds: int) -> list[Figure]:
    """Of the command, split or not, after a round that warms the page cache."""
    ways = ("", CUT)
    seconds: dict[str, list[float]] = {flags: [] for flags in ways}
    for round_ in range(rounds + 1):
        for flags in ways[round_ % 2 :] + ways[: round_ % 2]:
            time.sleep(hf.PAUSE_S)
            seconds[flags].append(hf.first_byte_s(*flags.split()))
    return [
        Figure(
            name=f"first token of `generate{flags and ' ' + flags}`",
            unit="s",
            values=found[1:],
            most=MOST_FIRST_S,
        )
        for flags, found in seconds.items()
    ]


def table(figures: list[Figure], where: dict[str, Any], *, rounds: int, command: str) -> str:
    """Markdown, with the machine and the date below."""
    head = ("SmolLM2-135M on one host", "measured", "beside", "ratio", "asked")
    rows = [head, ("---",) * len(head), *(figure.cells() for figure in figures)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines += [
        "",
        hf.measured(where, rounds=rounds, command=command),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = hf.flags(__doc__, rounds=7)
    parser.add_argument("--quick", action="store_true", help="one short round: does it run?")
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    rounds = 1 if asked.quick else asked.rounds
    new, prompt = (8, 64) if asked.quick else (128, 256)
    tasks = [hf.Task("decode", 16, new), hf.Task("prefill", prompt, 1)]
    tokens = open_tokenizer(open_checkpoint(None)).encode(
        hf.TEXT.read_text("utf-8"), add_special=True
    )
    figures = [exchange(rounds)]  # first: its ranks inherit no pipe of an arm
    digests: dict[str, set[str]] = {}
    for quantization, kind in PROFILES.items():
        whole = start_arm(quantization, WHOLE[2], tp=1, threads=2)
        arms = [whole, start_arm(quantization, CUT, tp=2, threads=1)]
        where = hf.machine(arms, load)
        digests[kind] = {arm.ask(tokens[:64], 8)["logits_sha256"] for arm in arms}
        figures += cut_beside_whole(kind, tasks, hf.measure(arms, tasks, tokens, rounds))
        if kind == "int8":
            arms.append(start_arm(quantization, WHOLE[1], tp=1, threads=1))
            figures += steps([arms[-1], whole], tasks[0], tokens, rounds)
        for arm in arms:
            arm.process.communicate()  # closes its stdin; it leaves
    figures += first_tokens(rounds)
    command = f"python benchmarks/split.py{' --quick' * asked.quick}"
    if asked.json:
        record = {
            "machine": where,
            "rounds": rounds,
            "figures": [
                {**asdict(each), "ratios": each.ratios, "is_broken": each.is_broken}
                for each in figures
            ],
        }
        asked.json.write_text(json.dumps(record, indent=1) + "\n")
    print(table(figures, where, rounds=rounds, command=command))
    missed = [f"{each.name}: {each.asked} was asked" for each in figures if each.is_broken]
    missed += [f"DIGESTS DIFFER in {kind}" for kind, found in digests.items() if len(found) > 1]
    print("\n".join(missed) or "every bound was kept", file=sys.stderr)
    sys.exit(hf.CLAIM_BROKEN if missed else 0)


if __name__ == "__main__":
    main()
