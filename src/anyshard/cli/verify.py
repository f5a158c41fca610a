"""`anyshard verify`: many layouts against the unsplit run, bit by bit.

Knows flags, tables and pages; what a cell is and how it is judged is `anyshard.verify`'s.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from anyshard import __version__
from anyshard.cli.correctness import Against, tell_accuracy
from anyshard.cli.flags import SplitFlags, in_range
from anyshard.cli.memory import memory_need
from anyshard.cli.running import Opened, open_model, rank_group, wait_loaded
from anyshard.cli.screen import Bar
from anyshard.errors import DifferenceFound, LayoutError, OptionError, PromptTooLong
from anyshard.files import replace_file
from anyshard.host import size_text

if TYPE_CHECKING:
    from anyshard.checkpoint import Checkpoint
    from anyshard.launcher import RankGroup
    from anyshard.ops import KernelChoice
    from anyshard.verify.cells import Cell, Model
    from anyshard.verify.check import CellResult, RequestShape
    from anyshard.verify.grid import Lists
    from anyshard.verify.report import Report

__all__ = ["GridFlags", "verify"]

DEFAULT_PROMPT_TOKENS = 300
ALL_COLUMNS = 1 << 16
BODIES = ("auto", "avx2", "scalar", "reference")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class GridFlags:
    """Which cells are run: a named grid, or lists that are crossed with each other."""

    grid: Literal["quick", "full"] | None = None
    "A fixed set of cells: quick (the default) or full, of which some take minutes."
    layouts: str | None = None
    "Splits: tp2,pp3,tp3pp2, or cuts of your own: heads7+2,layers22+8; tp1 is the unsplit model."
    heads: str | None = None
    "One more layout: query heads of each rank, such as 5,4."
    layers: str | None = None
    "One more layout, or the depth of --heads: layers of each stage, such as 22,8."
    batch: str | None = None
    "Requests in flight at once, such as 1,17; the one compared is the last of them."
    chunk: str | None = None
    "Most rows of the prompt in a step, such as 7,32,all."
    threads: str | None = None
    "Threads per rank, such as 1,2."
    kernels: str | None = None
    "Kernel bodies, such as auto,scalar."

    def lists(self) -> Lists | None:
        """The lists, or None for a named grid. Raises: OptionError naming the flag."""
        from anyshard.verify.grid import Lists, Split, parse_layouts

        texts = {name: text for name, text in asdict(self).items() if name != "grid"}
        given = [f"--{name}" for name, text in texts.items() if text is not None]
        if self.grid is not None and given:
            raise OptionError(
                f"--grid {self.grid} is a fixed set of cells and {given[0]} makes another; "
                "give one of them"
            )
        if not given:
            return None
        own = SplitFlags(heads=self.heads, layers=self.layers)
        splits = () if self.layouts is None else parse_layouts(self.layouts)
        if self.heads is not None or self.layers is not None:
            splits += (Split(heads=own.head_counts, layers=own.layer_counts),)
        return Lists(
            splits=splits or (Split(),),
            batches=_numbers("batch", self.batch or "1", 1, 1024),
            chunks=tuple(
                None if part.strip() == "all" else _numbers("chunk", part, 1, 1 << 16)[0]
                for part in (self.chunk or "all").split(",")
            ),
            threads=_numbers("threads", self.threads or "1", 1, 256),
            kernels=_bodies(self.kernels or "auto"),
        )


def _numbers(name: str, text: str, least: int, most: int) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        more = ", or all" if name == "chunk" else ""
        raise OptionError(
            f"--{name} is {text[:40]!r}; whole numbers such as 1,17 are needed{more}"
        ) from None
    for number in numbers:
        in_range(name, number, least, most)
    return numbers


def _bodies(text: str) -> tuple[KernelChoice, ...]:
    from anyshard.ops import choose_body

    found: list[KernelChoice] = []
    for part in text.split(","):
        match part.strip():
            case "auto" | "avx2" | "scalar" | "reference" as body:
                choose_body(body)
                found.append(body)
            case other:
                raise OptionError(f"--kernels has {other[:40]!r}; it can hold {', '.join(BODIES)}")
    return tuple(found)


def verify(
    model: str | None = None,
    /,
    *,
    cells: GridFlags = GridFlags(),
    prompt_tokens: int | None = None,
    tokens: int = 8,
    in_process: Annotated[bool, Parameter(negative="")] = False,
    against: Against | None = None,
    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
    report: Path | None = None,
) -> int:
    """Run many layouts against the unsplit model and compare every logit, bit by bit.

    Each cell stands beside its witness: the share of logits that would change if the same split
    were summed in the order of an ordinary engine. Exit code 4 if any cell differs.

    Parameters
    ----------
    model
        A .gguf file, a Hugging Face directory, or a Hub id; without it the demo model.
    prompt_tokens
        Tokens of the prompt, 300 if the context holds them.
    tokens
        Decode steps after the prompt, one token each.
    in_process
        Run ranks as threads of this process instead of forked processes.
    against
        Measure another thing instead: how far logits and ops are from float64, by themselves
        (float64) or beside HF transformers in float32 (hf). Exit code 4 if HF is twice as near.
    json_output
        Print one JSON object with every cell, and nothing else.
    report
        Write a self-contained HTML page here.
    """
    if against is not None:
        used = [name for name, is_used in (
            ("--report", report is not None), ("--in-process", in_process),
            ("--prompt-tokens", prompt_tokens is not None), ("a grid", cells != GridFlags()),
        ) if is_used]  # fmt: skip
        if used:
            raise OptionError(f"--against {against} runs no cells, so {used[0]} has no place there")
        return tell_accuracy(model, against, as_json=json_output)
    run = _Verify(model, cells, prompt_tokens, tokens, in_process, json_output, report)
    return run.run()


class _Verify:
    """Runs one checked command line."""

    def __init__(
        self,
        model: str | None,
        flags: GridFlags,
        prompt_tokens: int | None,
        tokens: int,
        in_process: bool,
        as_json: bool,
        report: Path | None,
    ) -> None:
        in_range("prompt-tokens", prompt_tokens, 1, 1 << 16)
        in_range("tokens", tokens, 1, 1 << 12)
        self.path, self.as_json, self.report = model, as_json, report
        self.grid, self.lists = flags.grid or "quick", flags.lists()
        self.asked_prompt, self.tokens, self.in_process = prompt_tokens, tokens, in_process
        if report is not None and (report.is_dir() or not report.resolve().parent.is_dir()):
            raise OptionError(f"--report {report}: name a file in a folder that exists")

    def run(self) -> int:
        """Print the table or the JSON; returns the exit code. Raises: UserError, PeerLost."""
        from anyshard.verify.naive import rank_of_any_order

        flags = SplitFlags(comm="threads" if self.in_process else "shm")
        opened = open_model(self.path, flags, num_prompts=1)
        model, request = self._subject(opened)
        cells, skipped = self._cells(model)
        self._admit(opened, model, request, cells)
        with rank_group(opened, body=rank_of_any_order) as loading:
            wait_loaded(loading, limit=request.prompt_tokens + request.decode_tokens + 1)
            report = self._compare(loading.group, opened.checkpoint, model, request, cells, skipped)
        self._tell(report)
        return 0 if report.equal else DifferenceFound.exit_code

    def _subject(self, opened: Opened) -> tuple[Model, RequestShape]:
        """The model and the request of every cell. Raises: PromptTooLong, OptionError."""
        from anyshard.tokenizer import open_tokenizer
        from anyshard.verify.cells import Model
        from anyshard.verify.check import RequestShape
        from anyshard.verify.prompt import hashed_tokens, text_tokens

        checkpoint, config = opened.checkpoint, opened.config
        room = config.context - self.tokens - 1
        count = self.asked_prompt or min(DEFAULT_PROMPT_TOKENS, room)
        if not 1 <= count <= room:
            raise PromptTooLong(
                prompt_tokens=max(1, count), max_tokens=self.tokens + 1, limit=config.context
            )
        if checkpoint.tokenizer_material is None:
            prompt = hashed_tokens(count, config.vocab, seed=0)
        else:
            prompt = text_tokens(open_tokenizer(checkpoint), count)
        name = "demo model, SmolLM2-135M-Instruct" if self.path is None else self.path
        return (
            Model(name, config, opened.profile, prompt),
            RequestShape(prompt_tokens=count, decode_tokens=self.tokens),
        )

    def _cells(self, model: Model) -> tuple[list[Cell], tuple[tuple[str, str], ...]]:
        """(cells to run, those of a named grid that cannot run here). Raises: UserError."""
        from anyshard.verify.grid import cells_of, check_layouts, full, quick, runnable

        if self.lists is None:
            make = quick if self.grid == "quick" else full
            return runnable(make(model.config), forked=not self.in_process)
        cells = cells_of(self.lists)
        check_layouts(cells, model)
        return cells, ()

    def _admit(
        self, opened: Opened, model: Model, request: RequestShape, cells: list[Cell]
    ) -> None:
        """Raises: LayoutError for the first cell that this host has too little memory for."""
        from anyshard.model import program

        if opened.free is None:
            return
        known: set[tuple[str, int]] = set()
        for cell in cells:
            if (cell.split, cell.batch) in known:
                continue
            known.add((cell.split, cell.batch))
            layout, asked = cell.layout(model), request.of(cell, model.config.vocab)
            ranks = (
                program(model.config, model.profile, layout, rank) for rank in range(layout.world)
            )
            need = memory_need(
                opened.checkpoint,
                tuple(ranks),
                tokens=asked.tokens_max,
                num_seqs=cell.batch,
                chunk=request.prompt_tokens,
                comm=cell.comm,
                prompt_logits=asked.prompt_logits,
            )
            compared = 8 * asked.rows_compared * model.config.vocab  # of both runs
            if need.total + compared > opened.free:
                raise LayoutError(
                    f"cell {cell.name}: {size_text(need.total + compared)} of memory are needed "
                    f"and {size_text(opened.free)} are free; choose other cells with --layouts and "
                    "--batch, lower --prompt-tokens, or end other programs"
                )

    def _compare(
        self,
        group: RankGroup,
        checkpoint: Checkpoint,
        model: Model,
        request: RequestShape,
        cells: list[Cell],
        skipped: tuple[tuple[str, str], ...],
    ) -> Report:
        """Run them behind a bar; without one, print each row as it comes."""
        from anyshard.verify.check import Checker
        from anyshard.verify.divergence import cell_divergence
        from anyshard.verify.driver import served
        from anyshard.verify.report import Report

        image = cache(lambda: served(checkpoint))  # for the replay, which is seldom wanted

        start, date, done = time.monotonic(), time.strftime("%F %H:%M UTC", time.gmtime()), 0
        with Bar("comparing") as bar:

            def step() -> None:
                nonlocal done
                done += 1
                bar.update(done, total)

            def explain(cell: Cell) -> str:
                bar.update(done, total, f"replaying {cell.name}")
                found = cell_divergence(image(), group, model, cell, epochs=checker.epochs)
                return "it did not repeat" if found is None else found.sentence()

            checker = Checker(group, model, request, explain=explain, on_step=step)
            total = checker.steps(cells)
            results: list[CellResult] = []
            table = _Table(cells, live=not (self.as_json or bar.shown))
            for cell in (None, *cells):
                results.append(checker.baseline() if cell is None else checker.check(cell))
                table.add(results[-1])
        if not self.as_json:
            table.rest()
        return Report(
            model=model.name,
            version=__version__,
            profile=model.profile.name,
            profile_hash=model.profile.sha256(),
            prompt_tokens=request.prompt_tokens,
            decode_tokens=request.decode_tokens,
            ranks_are="threads" if self.in_process else "processes",
            cores=len(os.sched_getaffinity(0)),
            unsplit=results[0],
            cells=tuple(results[1:]),
            skipped=skipped,
            date=date,
            seconds=time.monotonic() - start,
        )

    def _tell(self, report: Report) -> None:
        from anyshard.verify.page import html
        from anyshard.verify.report import as_json, summary

        if self.report is not None:
            _write(self.report, html(report))
        if self.as_json:
            print(json.dumps(as_json(report)))
            return
        for cell, reason in report.skipped:
            print(f"skipped {cell}: {reason}")
        print(
            f"\n{summary(report)}\n"
            f"{report.model} · {report.profile} {report.profile_hash[:12]} · "
            f"{report.prompt_tokens} prompt tokens, {report.decode_tokens} decode steps · "
            f"{report.unsplit.positions} x {report.unsplit.vocab} logits a cell · "
            f"{report.seconds:.0f} s"
        )


class _Table:
    """Rows on stdout, as they come or all at the end."""

    def __init__(self, cells: Sequence[Cell], *, live: bool) -> None:
        from anyshard.verify.report import columns, head_line

        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else ALL_COLUMNS
        self._columns = columns([cell.name for cell in cells], width=width)
        self._live, self._lines = live, [head_line(self._columns)]

    def add(self, result: CellResult) -> None:
        """The next row."""
        from anyshard.verify.report import divergence_text, row_line

        self._lines.append(row_line(result, self._columns))
        where = divergence_text(result)
        self._lines += [f"  {where}"] if where else []
        if self._live:
            self.rest()

    def rest(self) -> None:
        """Print what is not printed yet."""
        for line in self._lines:
            print(line, flush=True)
        self._lines = []


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise OptionError(f"--report {path} cannot be written: {error}") from None
