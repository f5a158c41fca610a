"""`anyshard bench wire`: what int8 rows between stages cost, and on which links they pay.

Knows flags and what is printed; what is measured is `anyshard.bench.wire`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import Parameter

from anyshard import __version__
from anyshard.cli.bench import FormatFlags, Printer, machine_record, machine_text
from anyshard.cli.flags import in_range, whole_numbers
from anyshard.cli.screen import Bar

if TYPE_CHECKING:
    from anyshard.bench.wire import WireResult

__all__ = ["wire"]

_REPETITIONS: Final = 101
_MOST_HIDDEN: Final = 1 << 16


def wire(
    *,
    hidden: Annotated[str, Parameter(show_env_var=False)] = "576,896,2048,4096",
    rows: Annotated[str, Parameter(show_env_var=False)] = "1,4,64",
    threads: Annotated[int, Parameter(name=["--threads", "-t"], show_env_var=False)] = 1,
    repetitions: Annotated[
        int, Parameter(name=["--repetitions", "-r"], show_env_var=False)
    ] = _REPETITIONS,
    kernels: Literal["auto", "vnni", "avx2", "scalar", "reference"] = "auto",
    output: FormatFlags = FormatFlags(),
) -> int:
    """Measure what a row of --wire-dtype int8 costs, and say on which links between stages it pays.

    It pays where the bytes that it saves take longer than to encode and decode them.

    Parameters
    ----------
    hidden
        Widths of the residual: 576 is SmolLM2-135M's, 896 Qwen2-0.5B's.
    rows
        Rows that hop at once.
    threads
        Threads of the rank at either end.
    repetitions
        Samples of each figure, after one to warm up.
    kernels
        Kernel bodies; all have the same bits.
    """
    widths = tuple(dict.fromkeys(whole_numbers("hidden", hidden, 1, _MOST_HIDDEN)))
    counts = tuple(dict.fromkeys(whole_numbers("rows", rows, 1, 1024)))
    in_range("threads", threads, 1, 256)
    in_range("repetitions", repetitions, 1, 1000)
    machine = machine_record()
    results, body = _measure(widths, counts, threads, repetitions, kernels)
    _tell(results, body, threads, repetitions, machine, Printer(output))
    return 0


def _measure(
    widths: tuple[int, ...],
    rows: tuple[int, ...],
    threads: int,
    repetitions: int,
    kernels: Literal["auto", "vnni", "avx2", "scalar", "reference"],
) -> tuple[list[WireResult], str]:
    """All figures, and the body that gave them. Raises: OptionError."""
    from anyshard.bench.wire import measure_wire
    from anyshard.ops import load_kernels

    loaded = load_kernels(kernels, threads=threads, spin=True)
    done, total = 0, len(widths) * len(rows) * repetitions

    def step() -> None:
        nonlocal done
        done += 1
        bar.update(done, total)

    try:
        with Bar("measuring") as bar:
            results = [
                each
                for hidden in widths
                for each in measure_wire(
                    loaded,
                    hidden=hidden,
                    rows=rows,
                    threads=threads,
                    repetitions=repetitions,
                    on_step=step,
                )
            ]
    finally:
        loaded.pool.close()
    return results, loaded.body


def _tell(
    results: list[WireResult],
    body: str,
    threads: int,
    repetitions: int,
    machine: dict[str, Any],
    printer: Printer,
) -> None:
    from anyshard.bench.tables import wire_records, wire_table
    from anyshard.bench.wire import MOST_INSIDE

    first = results[0]
    head = f"rows between stages in int8 · {body} · {threads} thread{'s'[: threads > 1]}"
    foot = (
        f"ns of a row: median of {repetitions} after a warm-up; GB/s: of float32 rows; pays below: "
        "where the bytes saved take as long as to encode and decode them; 2 stages: the same with "
        f"the roundings at {MOST_INSIDE} boundaries that are not cut, {first.round_ns:.0f} ns a "
        f"row of {first.hidden} each; under a link: what encoding, sending and decoding a row "
        f"gains there (below 0 it loses)\n{machine_text(machine)}"
    )
    record: dict[str, Any] = {
        "anyshard": __version__,
        "kernels": body,
        "threads": threads,
        "repetitions": repetitions,
        "machine": machine,
        "rows": wire_records(results),
    }
    printer.tell(head, wire_table(results), record, foot)
