"""`anyshard verify`: many layouts against the unsplit run, bit by bit.

Knows flags, tables and pages; what a cell is and how it is judged is `anyshard.verify`'s.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from anyshard import __version__
from anyshard.cli.correctness import Against, tell_accuracy
from anyshard.cli.flags import SplitFlags, in_range, whole_numbers
from anyshard.cli.inputs import spare_model, spare_streams
from anyshard.cli.parting import Parting, admit_cells
from anyshard.cli.running import Opened, open_model, rank_group, wait_loaded
from anyshard.cli.screen import Bar, abandon_stdout, tell
from anyshard.cli.trace import TraceFile
from anyshard.errors import (
    AnyshardError,
    DifferenceFound,
    OptionError,
    PeerLost,
    PromptTooLong,
)
from anyshard.files import check_place, replace_file

if TYPE_CHECKING:
    from anyshard.launcher import RankGroup
    from anyshard.ops import KernelChoice
    from anyshard.verify.cells import Cell, Model
    from anyshard.verify.check import RequestShape
    from anyshard.verify.grid import Lists
    from anyshard.verify.report import Report
    from anyshard.verify.result import CellResult

__all__ = ["GridFlags", "verify"]

DEFAULT_PROMPT_TOKENS = 300
DEFAULT_TOKENS = 8
DEFAULT_DEADLINE_S = 30.0
ALL_COLUMNS = 1 << 16
SHORT_NOTE = (
    "a cell that names a number of tokens runs less of the request; its bits and its ratio are "
    "held against an unsplit run as short"
)
BODIES = ("auto", "vnni", "avx2", "scalar", "reference")
#: Without a variable: ANYSHARD_THREADS and its like are `generate`'s, and would make a small grid.
List = Annotated[str | None, Parameter(show_env_var=False)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class GridFlags:
    """Which cells are run: a named grid, or lists that are crossed with each other."""

    grid: Literal["quick", "full"] | None = None
    "A fixed set of cells: quick (the default) or full, of which some take minutes."
    layouts: str | None = None
    "Splits: tp2,pp3,tp3pp2, or cuts of your own: heads7+2,layers22+8; tp1 is the unsplit model."
    heads: List = None
    "One more layout: query heads of each rank, such as 5,4."
    layers: List = None
    "One more layout, or the depth of --heads: layers of each stage, such as 22,8."
    batch: str | None = None
    "Requests in flight at once, such as 1,17; the one compared is the last of them."
    chunk: List = None
    "Most rows of the prompt in a step, such as 7,32,all."
    threads: List = None
    "Threads per rank, such as 1,2."
    kernels: List = None
    "Kernel bodies, such as auto,scalar."
    kv_shard: Annotated[Literal["heads", "sequence"] | None, Parameter(show_env_var=False)] = None
    "sequence: ranks of every layout split keys and values by it, as those named tp2seq do."

    def lists(self) -> Lists | None:
        """The lists, or None for a named grid. Raises: OptionError naming the flag."""
        from anyshard.verify.grid import Lists, Split, parse_layouts, sharded

        texts = {name: text for name, text in asdict(self).items() if name != "grid"}
        given = [f"--{name.replace('_', '-')}" for name, text in texts.items() if text is not None]
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
        splits = splits or (Split(),)
        return Lists(
            splits=sharded(splits, self.kv_shard),
            batches=whole_numbers("batch", "1" if self.batch is None else self.batch, 1, 1024),
            chunks=tuple(
                None
                if part.strip() == "all"
                else whole_numbers("chunk", part, 1, 1 << 16, more=", or all")[0]
                for part in ("all" if self.chunk is None else self.chunk).split(",")
            ),
            threads=whole_numbers("threads", "1" if self.threads is None else self.threads, 1, 256),
            kernels=_bodies("auto" if self.kernels is None else self.kernels),
        )


def _bodies(text: str) -> tuple[KernelChoice, ...]:
    from anyshard.ops import choose_body

    found: list[KernelChoice] = []
    for part in text.split(","):
        match part.strip():
            case "auto" | "vnni" | "avx2" | "scalar" | "reference" as body:
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
    tokens: int | None = None,
    in_process: Annotated[bool, Parameter(negative="")] = False,
    quantization: Literal["auto", "none", "int8"] = "auto",
    kv_cache_dtype: Literal["auto", "f32", "int8"] = "auto",
    wire_dtype: Literal["auto", "f32", "int8"] = "auto",
    deadline: Annotated[float | None, Parameter(show_env_var=False)] = None,
    against: Against | None = None,
    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
    report: str | None = None,
    trace: str | None = None,
) -> int:
    """Run many layouts against the unsplit model and compare every logit, bit by bit.

    Each cell stands beside its witness: the share of logits that would change if the same split
    were summed in the order of an ordinary engine.

    Exit code 0: no cell differs. 4: one does, or lost its ranks. 5: all lost them. 2: bad input, or
    a report that could not be written. 1: the unsplit run itself fails, or an error of ours. 130:
    Ctrl-C. 143: SIGTERM. 141: the reader of stdout left before the verdict.

    Parameters
    ----------
    model
        A .gguf file, a Hugging Face directory, or a Hub id; without it the demo model.
    prompt_tokens
        Tokens of the prompt, 300 if the context holds them.
    tokens
        Decode steps after the prompt, one token each, 8 by default.
    in_process
        Run ranks as threads of this process instead of forked processes.
    quantization
        Arithmetic: float32 (none), or blocks of int8; auto takes int8 for files that are quantised.
    kv_cache_dtype
        Keys and values as float32 (auto, f32), or as int8.
    wire_dtype
        Rows between stages as float32 (auto, f32), or as int8; cuts then lie where those round.
    deadline
        Seconds without a sign of life after which a rank counts as lost, 30 by default.
    against
        Measure another thing instead: how far logits and ops are from float64, by themselves
        (float64) or beside HF transformers in float32 (hf). Exit code 4 if HF is twice as near.
    json_output
        Print one JSON object with every cell, and nothing else.
    report
        Write a self-contained HTML page here.
    trace
        Write what every rank of every cell did when to this file, for anyshard trace.
    """
    if against is not None:
        used = [name for name, is_used in (
            ("--report", report is not None), ("--trace", trace is not None),
            ("--in-process", in_process),
            ("--prompt-tokens", prompt_tokens is not None), ("--tokens", tokens is not None),
            ("--deadline", deadline is not None),
            *((f"--{each.name}", getattr(cells, each.name) is not None) for each in fields(cells)),
        ) if is_used]  # fmt: skip
        if used:
            raise OptionError(f"--against {against} runs no cells, so {used[0]} has no place there")
        return tell_accuracy(
            model,
            against,
            quantization=quantization,
            kv="int8" if kv_cache_dtype == "int8" else "f32",
            wire="int8" if wire_dtype == "int8" else "none",
            as_json=json_output,
        )
    flags = SplitFlags(
        comm="threads" if in_process else "shm",
        deadline=DEFAULT_DEADLINE_S if deadline is None else deadline,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        wire_dtype=wire_dtype,
    )
    return _Verify(model, cells, flags, prompt_tokens, tokens, json_output, report, trace).run()


class _Verify:
    """Runs one checked command line."""

    def __init__(
        self,
        model: str | None,
        cells: GridFlags,
        flags: SplitFlags,
        prompt_tokens: int | None,
        tokens: int | None,
        as_json: bool,
        report: str | None,
        trace: str | None,
    ) -> None:
        in_range("prompt-tokens", prompt_tokens, 1, 1 << 16)
        in_range("tokens", tokens, 1, 1 << 12)
        self.flags = flags
        self._unsaid: AnyshardError | None = None
        self.path, self.as_json = model, as_json
        self.report = None if report is None else _report_target(report)
        self.trace = None if trace is None else TraceFile(trace)
        self.grid, self.lists = cells.grid or "quick", cells.lists()
        self.asked_prompt, self.in_process = prompt_tokens, flags.comm == "threads"
        self.tokens = DEFAULT_TOKENS if tokens is None else tokens

    def run(self) -> int:
        """Print the table or the JSON; returns the exit code. Raises: UserError, PeerLost."""
        from anyshard.verify.naive import rank_of_any_order
        from anyshard.verify.page import html
        from anyshard.verify.scratch import clear_abandoned

        clear_abandoned()
        opened = open_model(self.path, self.flags, num_prompts=1)
        if self.report is not None:
            spare_model("--report", [self.report], opened.checkpoint.path)
        if self.trace is not None:
            other = None if self.report is None else str(self.report)
            self.trace.spare(opened.checkpoint.path, other)
        model, request = self._subject(opened)
        cells, skipped = self._cells(model)
        admit_cells(opened, model, request, cells)
        with rank_group(opened, body=rank_of_any_order) as loading:
            wait_loaded(loading, limit=request.prompt_tokens + request.decode_tokens + 1)
            report = self._compare(opened, loading.group, model, request, cells, skipped)
        self._tell(report)
        code = _exit_code(report)
        if self.trace is not None:
            self._write_trace(self.trace, code)
        if self.report is not None:
            try:
                _write(self.report, html(report))
            except OptionError as error:
                if not code:
                    raise
                print(f"anyshard: {error}", file=sys.stderr)  # the verdict weighs more
        if self._unsaid is not None:
            if not code:
                raise self._unsaid
            print(f"anyshard: {self._unsaid}", file=sys.stderr)
        return code

    def _write_trace(self, trace: TraceFile, code: int) -> None:
        try:
            trace.write()
        except OptionError as error:
            if not code:
                raise
            print(f"anyshard: {error}", file=sys.stderr)  # the verdict weighs more

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
                prompt_tokens=max(1, count),
                max_tokens=self.tokens + 1,
                limit=config.context,
                remedy="lower --prompt-tokens or --tokens",
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
        from anyshard.verify.grid import cells_of, check_layouts, full, quick, runnable, telling

        if self.lists is None:
            make = quick if self.grid == "quick" else full
            grid = make(model.config, model.profile.wire)
            return runnable(grid, forked=not self.in_process)
        cells, skipped = telling(cells_of(self.lists))
        if not cells:
            raise OptionError(
                f"--kernels: {skipped[0][1]}; name another body, or more than the unsplit model"
            )
        check_layouts(cells, model)
        return cells, skipped

    def _compare(
        self,
        opened: Opened,
        group: RankGroup,
        model: Model,
        request: RequestShape,
        cells: list[Cell],
        skipped: tuple[tuple[str, str], ...],
    ) -> Report:
        """Run them behind a bar; without one, print each row as it comes."""
        from anyshard.verify.check import Checker
        from anyshard.verify.report import Report

        start, date, done = time.monotonic(), time.strftime("%F %H:%M UTC", time.gmtime()), 0
        table, results, doing = _Table(cells, self._say), [], "unsplit"

        def step() -> None:
            nonlocal done
            done += 1
            bar.update(done, total, doing)

        try:
            with Bar("comparing") as bar:
                table.live = not (self.as_json or bar.shown)
                checker = Checker(
                    group,
                    model,
                    request,
                    on_step=step,
                    deadline_s=self.flags.deadline,
                    on_trace=None if self.trace is None else self.trace.add_run,
                )
                parting = Parting(opened, group, model, epochs=checker.epochs)
                total = checker.steps(cells)
                for cell in (None, *cells):
                    doing = "unsplit" if cell is None else cell.name
                    bar.update(done, total, doing)
                    result = checker.baseline() if cell is None else checker.check(cell)
                    table.add(result)
                    if cell is not None and result.verdict == "differs" and result.where is None:
                        bar.update(done, total, f"replaying {cell.name}")
                        where = parting.where(checker.asked(cell), result)
                        result = replace(result, where=where)
                    table.add_note(result)
                    results.append(result)
        finally:
            if not self.as_json:
                table.rest()  # also of a grid that did not come to its end
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
        from anyshard.verify.report import as_json, summary

        for cell in report.cells:
            if cell.lost is not None:
                print(f"anyshard: cell {cell.cell}: ranks were lost: {cell.lost}", file=sys.stderr)
        if self.as_json:
            self._say(json.dumps(as_json(report)))
            return
        for name, reason in report.skipped:
            self._say(f"skipped {name}: {reason}")
        parts = (
            report.model,
            f"{report.profile} {report.profile_hash[:12]}",
            f"{report.prompt_tokens} prompt tokens, {report.decode_tokens} decode steps",
            f"{report.unsplit.positions} x {report.unsplit.vocab} logits a cell",
            f"{report.seconds:.0f} s",
        )
        self._say(f"\n{summary(report)}\n{_wrapped(parts, width=_stdout_width())}")
        if any(cell.positions < report.unsplit.positions for cell in report.cells if cell.digest):
            self._say(SHORT_NOTE)

    def _say(self, text: str) -> None:
        """On stdout; if its reader has left, a report is still to be written."""
        try:
            tell(text)
        except BrokenPipeError:
            if self.report is None:
                raise
            abandon_stdout()
        except AnyshardError as error:
            if self.report is None:
                raise
            self._unsaid = self._unsaid or error


def _stdout_width() -> int:
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: it is closed
    return shutil.get_terminal_size().columns if is_terminal else ALL_COLUMNS


def _wrapped(parts: Sequence[str], *, width: int) -> str:
    """All parts with a dot between two, in lines that end between parts."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]} · {part}"
        lines = [*lines[:-1], longer] if len(longer) <= width else [*lines, part]
    return "\n".join(lines)


def _exit_code(report: Report) -> int:
    """0 all equal; 5 ranks were lost in every cell; else 4."""
    if report.equal:
        return 0
    all_lost = report.num_lost == len(report.cells)
    return (PeerLost if all_lost else DifferenceFound).exit_code


class _Table:
    """Rows for `say`: as they come if it is live, or all at the end."""

    def __init__(self, cells: Sequence[Cell], say: Callable[[str], None]) -> None:
        from anyshard.verify.check import witness_axes
        from anyshard.verify.report import columns

        self._columns = columns(
            [cell.name for cell in cells],
            width=_stdout_width(),
            axes=[witness_axes(cell) for cell in cells],
        )
        self._say, self._lines, self._has_head, self.live = say, list[str](), False, False

    def add(self, result: CellResult) -> None:
        """The next row."""
        from anyshard.verify.report import head_line, row_line

        self._lines += [] if self._has_head else [head_line(self._columns)]
        self._lines.append(row_line(result, self._columns))
        self._has_head = True
        self._show()

    def add_note(self, result: CellResult) -> None:
        """What is wrong with it, if anything is, below its row."""
        from anyshard.verify.report import divergence_text

        text = divergence_text(result)
        self._lines += [f"  {text}"] if text else []
        self._show()

    def _show(self) -> None:
        if self.live:
            self.rest()

    def rest(self) -> None:
        """Say what is not said yet."""
        lines, self._lines = self._lines, []
        for line in lines:
            self._say(line)


def _report_target(report: str) -> Path:
    """The file that --report names. Raises: OptionError if it cannot be written."""
    path = Path(report)
    if not report or report.endswith("/"):
        raise OptionError(f"--report is {report!r}; name a file, such as verify.html")
    try:
        if not path.parent.is_dir() or path.is_dir():
            raise OptionError(f"--report {path}: name a file in a folder that exists")
        check_place(path)
    except OSError as error:
        raise OptionError(
            f"--report {path} cannot be written: {error.strerror}; name another file"
        ) from None
    spare_streams("--report", [path])
    return path


def _write(target: Path, text: str) -> None:
    """Whole or not at all. Raises: OptionError."""
    try:
        # A model's name may be bytes that are no UTF-8, which Python holds as lone surrogates.
        replace_file(target, text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise OptionError(f"--report {target} cannot be written: {error.strerror}") from None
