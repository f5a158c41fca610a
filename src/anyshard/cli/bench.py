"""`anyshard bench`: how fast a model runs here, on which layouts; `bench blocks`: one MLP block.

Knows flags and what is printed; what is measured is `anyshard.bench`'s.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from anyshard import __version__
from anyshard.cli.flags import BenchFlags, in_range, whole_numbers
from anyshard.cli.machine import read_machine
from anyshard.cli.running import Opened, open_model, rank_group, wait_loaded
from anyshard.cli.screen import Bar
from anyshard.cli.trace import TRACE_EVENTS, TraceFile
from anyshard.comm.link import emulated_text
from anyshard.errors import LayoutError, OptionError, PromptTooLong

if TYPE_CHECKING:
    from anyshard.bench.bandwidth import ReadProbe
    from anyshard.bench.rows import Row, SpeedTest
    from anyshard.bench.tables import Table
    from anyshard.cli.running import Loading
    from anyshard.engine import Engine
    from anyshard.verify.grid import Split

__all__ = ["FormatFlags", "Printer", "bench", "machine_record", "machine_text"]

DEFAULT_REPETITIONS: Final = 5


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class FormatFlags:
    """How the figures are printed, if not as a table for people."""

    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False
    "Print one JSON object, with every sample."
    csv: Annotated[bool, Parameter(negative="", show_env_var=False)] = False
    "Print one line for each row."
    markdown: Annotated[bool, Parameter(negative="", show_env_var=False)] = False
    "Print a table to paste, with machine and date below it."

    def __post_init__(self) -> None:
        given = {"--json": self.json_output, "--csv": self.csv, "--markdown": self.markdown}
        names = [name for name, is_given in given.items() if is_given]
        if len(names) > 1:
            raise OptionError(f"{' and '.join(names)} are two formats; give one of them")

    @property
    def for_people(self) -> bool:
        """A table that is read as it grows."""
        return not (self.json_output or self.csv or self.markdown)


def bench(
    model: str | None = None,
    /,
    *,
    split: BenchFlags = BenchFlags(),
    prompt_tokens: Annotated[
        str, Parameter(name=["--prompt-tokens", "-p", "--n-prompt"], show_env_var=False)
    ] = "256",
    gen_tokens: Annotated[
        str, Parameter(name=["--gen-tokens", "-n", "--n-gen"], show_env_var=False)
    ] = "64",
    repetitions: Annotated[
        int, Parameter(name=["--repetitions", "-r"], show_env_var=False)
    ] = DEFAULT_REPETITIONS,
    trace: str | None = None,
    output: FormatFlags = FormatFlags(),
) -> int:
    """Measure how fast a model reads prompts (pp) and generates (tg), as llama-bench does.

    Decoding stands beside the speed at which this machine's memory is read, measured in the same
    minute. Prompts are fixed token ids; nothing ends a generation early.

    Parameters
    ----------
    model
        A .gguf file, a Hugging Face directory, or a Hub id; without it the demo model.
    prompt_tokens
        Lengths of prompts to read, such as 128,512; 0 is none.
    gen_tokens
        Tokens to generate after a prompt of one token, such as 64,128; 0 is none.
    repetitions
        Runs of each test, after one to warm up.
    trace
        Write what every rank did when to this file, such as run.json.gz, for anyshard trace.
    """
    from anyshard.bench.rows import SpeedTest

    in_range("repetitions", repetitions, 1, 1000)
    tests = [
        SpeedTest("pp", count)
        for count in whole_numbers("prompt-tokens", prompt_tokens, 0, 1 << 20)
        if count
    ] + [
        SpeedTest("tg", count)
        for count in whole_numbers("gen-tokens", gen_tokens, 0, 1 << 20)
        if count
    ]
    if not tests:
        raise OptionError("--prompt-tokens and --gen-tokens are both 0; give one of them a length")
    return _Bench(model, split, tests, repetitions, output, trace=trace).run()


@dataclass(frozen=True)
class _Cell:
    """One layout at one number of threads."""

    name: str
    opened: Opened
    threads: int | None


class _Bench:
    """Runs one checked command line."""

    def __init__(
        self,
        model: str | None,
        flags: BenchFlags,
        tests: Sequence[SpeedTest],
        repetitions: int,
        output: FormatFlags,
        *,
        trace: str | None,
    ) -> None:
        self.path, self.flags, self.tests = model, flags, tests
        self.trace = None if trace is None else TraceFile(trace)
        self.repetitions, self.printer = repetitions, Printer(output)
        self.threads, self.splits = flags.thread_counts(), _splits(flags)
        self.notes: list[str] = []  # for the time when no bar is shown

    def run(self) -> int:
        """Print the figures; returns the exit code. Raises: UserError, PeerLost."""
        from anyshard.bench.bandwidth import open_probe
        from anyshard.bench.tables import row_records, speed_table

        machine = machine_record()
        longest = max(self.tests, key=lambda test: test.sequence_tokens)
        limit = longest.sequence_tokens
        opened = open_model(self.path, self.flags.split(), num_prompts=1, default_len=limit)
        if self.trace is not None:
            self.trace.spare(opened.checkpoint.path)
        if limit > opened.limit:
            is_pp = longest.kind == "pp"
            raise PromptTooLong(
                prompt_tokens=longest.tokens if is_pp else 1,
                max_tokens=1 if is_pp else longest.tokens + 1,
                limit=opened.limit,
                remedy=f"lower --{'prompt' if is_pp else 'gen'}-tokens",
            )
        cells = self._cells(opened, limit)
        rows: list[Row] = []
        with ExitStack() as stack:
            loading = stack.enter_context(rank_group(cells[0].opened))
            wait_loaded(loading, limit=limit)
            probe = open_probe()
            if probe is not None:
                stack.callback(probe.close)
            rows += self._rows(loading, cells, limit, probe)
            if self.trace is not None:
                self.trace.write()
        for note in self.notes:
            print(note, file=sys.stderr)
        name = "demo model, SmolLM2-135M-Instruct" if self.path is None else self.path
        profile = opened.profile
        record = {
            "anyshard": __version__,
            "model": name,
            "profile": profile.name,
            "profile_hash": profile.sha256(),
            "repetitions": self.repetitions,
            "machine": machine,
            "rows": row_records(rows),
        }
        head = f"{name} · {profile.name} {profile.sha256()[:12]} · {rows[0].kernels}"
        if links := self.flags.links(None):
            record["emulated_links"] = list(map(str, links))
            head = emulated_text(links) + head
        self.printer.tell(head, speed_table(rows), record, self._foot(probe, machine))
        return 0

    def _cells(self, opened: Opened, limit: int) -> list[_Cell]:
        """Layouts crossed with threads. Raises: LayoutError, OptionError."""
        from anyshard.model import program
        from anyshard.verify.cells import Model
        from anyshard.verify.grid import Lists, cells_of, check_layouts

        config, profile = opened.config, opened.profile
        model, cells = Model("", config, profile, ()), cells_of(Lists(splits=self.splits))
        check_layouts(cells, model)
        found: list[_Cell] = []
        for cell in cells:
            layout = cell.layout(model)
            ranks = range(layout.world)
            programs = tuple(program(config, profile, layout, rank) for rank in ranks)
            here = replace(opened, layout=layout, programs=programs)
            try:
                here.admit(limit)
            except LayoutError as error:
                raise LayoutError(f"layout {cell.split}: {error}") from None
            taken = here.for_tokens(limit)
            taken.flags.links(layout.pp)  # raises before anything is loaded
            name = replace(cell, kv_shard=taken.layout.kv_shard).split
            found += [_Cell(name, taken, threads) for threads in self.threads]
        return found

    def _rows(
        self, loading: Loading, cells: list[_Cell], limit: int, probe: ReadProbe | None
    ) -> Iterator[Row]:
        """One after the other behind a bar."""
        from anyshard.bench.rows import measure

        done, total = 0, len(cells) * len(self.tests) * (self.repetitions + 1)

        def step() -> None:
            nonlocal done
            done += 1
            bar.update(done, total)

        with Bar("measuring") as bar:
            for epoch, cell in enumerate(cells, 1):
                engine = self._engine(loading, cell, limit, epoch)
                for test in self.tests:
                    bar.update(done, total, f"{test.name} {cell.name}")
                    yield measure(
                        engine,
                        test,
                        layout=cell.name,
                        repetitions=self.repetitions,
                        probe=probe,
                        on_step=step,
                    )
                if self.trace is not None:
                    self.trace.add(engine, f"bench {cell.name}")
                engine.close()

    def _engine(self, loading: Loading, cell: _Cell, limit: int, epoch: int) -> Engine:
        from anyshard.engine import Engine
        from anyshard.epoch import EngineOptions

        opened = cell.opened
        flags = opened.flags
        engine = Engine(
            loading.group,
            opened.config,
            opened.profile,
            opened.layout,
            EngineOptions(
                kernels=flags.kernels,
                comm=flags.comm,
                threads=cell.threads,
                chunk=min(opened.chunk, limit),
                schedule=flags.schedule,
                micro_batches=flags.micro_batches,
                max_num_seqs=1,
                max_model_len=limit,
                links=flags.links(opened.layout.pp),
                trace_events=TRACE_EVENTS if self.trace is not None else 0,
                deadline_s=flags.deadline,
            ),
            cores=len(os.sched_getaffinity(0)),
            epoch=epoch,
        )
        if engine.crowded:
            self.notes.append(
                f"note: {cell.name}: {opened.layout.world} ranks x {engine.threads} threads on "
                f"{engine.cores} cores take turns"
            )
        return engine

    def _foot(self, probe: ReadProbe | None, machine: dict[str, Any]) -> str:
        from anyshard.bench.bandwidth import STREAMS
        from anyshard.bench.rows import SLICE_S

        figures = f"tok/s: median ± sd of {self.repetitions} after a warm-up"
        memory = (
            "the speed of memory was not measured: no native kernels, or no room"
            if probe is None
            else f"of memory: median share of the GB/s at which {probe.bytes >> 20} MiB were read "
            f"every {SLICE_S:g} s, the faster of {' and '.join(map(str, STREAMS))} streams a thread"
        )
        return f"{figures}; {memory}\n{machine_text(machine)}"


def _splits(flags: BenchFlags) -> tuple[Split, ...]:
    """Those of --layouts, or the one of -tp and its like. Raises: OptionError."""
    from anyshard.verify.grid import Split, parse_layouts, sharded

    one = Split(
        tp=flags.tensor_parallel_size or 1,
        pp=flags.pipeline_parallel_size or 1,
        heads=flags.head_counts,
        layers=flags.layer_counts,
    )
    splits = (one,) if flags.layouts is None else parse_layouts(flags.layouts)
    return sharded(splits, flags.kv_shard)


class Printer:
    """The one answer on stdout, in the form asked for."""

    def __init__(self, output: FormatFlags) -> None:
        self._output = output

    def tell(self, head: str, table: Table, record: dict[str, Any], foot: str) -> None:
        """A table with a line above and lines below, or the record."""
        from anyshard.bench.tables import csv_text

        if self._output.json_output:
            print(json.dumps(record))
        elif self._output.csv:
            print(csv_text(record["rows"]))
        elif self._output.markdown:
            print(f"{table.markdown()}\n\n{head}; {foot.replace(chr(10), '; ')}")
        else:
            print(f"{head}\n\n{table.plain()}\n\n{foot}")


def machine_record() -> dict[str, Any]:
    """Where and when; the load is that before the run."""
    machine = read_machine()
    return {
        "cpu": machine.cpu,
        "cores": machine.cores,
        "huge_pages": machine.huge_pages,
        "linux": platform.release(),
        "load": round(os.getloadavg()[0], 2),
        "date": time.strftime("%F %H:%M UTC", time.gmtime()),
    }


def machine_text(machine: dict[str, Any]) -> str:
    """In one line."""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['linux']} · load "
        f"{machine['load']} before · anyshard {__version__} · {machine['date']}"
    )
