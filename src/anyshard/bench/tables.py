"""What was measured, as a person, Markdown, a spreadsheet or a script reads it.

Pure: records in, text out. Figures of a table are rounded; the records have them whole.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from anyshard.bench.blocks import BlockResult
from anyshard.bench.rows import Row, Spread
from anyshard.bench.wire import LINKS, WireResult

__all__ = [
    "Table",
    "block_records",
    "block_table",
    "csv_text",
    "row_records",
    "speed_table",
    "wire_records",
    "wire_table",
]


@dataclass(frozen=True)
class Table:
    """A head and rows of cells; the columns of `left` (indices) begin at the left."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[int]

    def plain(self) -> str:
        """Columns aligned, two spaces between them."""
        lines = (self.head, *self.rows)
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.head))]
        return "\n".join(
            "  ".join(self._aligned(i, cell, widths[i]) for i, cell in enumerate(line)).rstrip()
            for line in lines
        )

    def markdown(self) -> str:
        """To paste."""
        rule = ("---" if i in self.left else "---:" for i in range(len(self.head)))
        return "\n".join(f"| {' | '.join(line)} |" for line in (self.head, rule, *self.rows))

    def _aligned(self, column: int, cell: str, width: int) -> str:
        return f"{cell:<{width}}" if column in self.left else f"{cell:>{width}}"


def speed_table(rows: Sequence[Row]) -> Table:
    """One line a row."""
    return Table(
        ("test", "layout", "threads", "profile", "tok/s", "MB/token", "GB/s", "of memory"),
        tuple(
            (
                row.test.name,
                row.layout,
                str(row.threads),
                row.profile,
                f"{row.speed.median:.1f} ± {row.speed.sd:.1f}",
                f"{row.bytes_per_token / 1e6:.1f}",
                *_memory(row),
            )
            for row in rows
        ),
        frozenset({0, 1, 3}),
    )


def _memory(row: Row) -> tuple[str, str]:
    """GB/s that the weights and KV came at, and the share of what memory gives."""
    if row.test.kind == "pp":
        return ("–", "–")
    read = f"{row.speed.median * row.bytes_per_token / 1e9:.1f}"
    if row.share is None:
        return (read, "–")
    return (read, f"{row.share:.0%} of {median(row.reads) / 1e9:.1f}")


def row_records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """All of each row, samples too."""
    return [
        {
            "test": row.test.name,
            "prompt_tokens": row.test.tokens if row.test.kind == "pp" else 0,
            "gen_tokens": row.test.tokens if row.test.kind == "tg" else 0,
            "layout": row.layout,
            "tp": row.tp,
            "pp": row.pp,
            "threads": row.threads,
            "comm": row.comm,
            "kernels": row.kernels,
            "profile": row.profile,
            **_figures("tokens_per_s", row.speed),
            "weight_bytes_per_token": row.weight_bytes,
            "kv_bytes_per_token": row.kv_bytes,
            "memory_share": row.share,
            "samples_tokens_per_s": list(row.rates),
            "samples_memory_bytes_per_s": list(row.reads),
        }
        for row in rows
    ]


def _figures(name: str, figures: Spread) -> dict[str, float]:
    return {
        name: figures.median,
        f"{name}_sd": figures.sd,
        f"{name}_least": figures.least,
        f"{name}_most": figures.most,
    }


def block_table(results: Sequence[BlockResult]) -> Table:
    """One line for each arm and number of rows."""
    return Table(
        (
            "block",
            "profile",
            "rows",
            "µs",
            "least–most",
            "against one rank",
            "in comm",
            "differing",
            "max ulp",
        ),
        tuple(
            (
                result.name,
                result.profile,
                str(result.rows),
                f"{result.latency.median:.0f}",
                f"{result.latency.least:.0f}–{result.latency.most:.0f}",
                f"{result.speedup:.2f}×",
                f"{result.comm_share:.0%}" if result.tp > 1 else "–",
                f"{result.differing} of {result.elements}",
                str(result.max_ulp),
            )
            for result in results
        ),
        frozenset({0, 1}),
    )


def block_records(results: Sequence[BlockResult]) -> list[dict[str, Any]]:
    """All of each result, samples too."""
    return [
        {
            "block": result.name,
            "engine": result.engine,
            "profile": result.profile,
            "tp": result.tp,
            "threads": result.threads,
            "rows": result.rows,
            **_figures("latency_us", result.latency),
            "speedup": result.speedup,
            "comm_share": result.comm_share,
            "elements": result.elements,
            "elements_differing": result.differing,
            "max_ulp": result.max_ulp,
            "samples_latency_us": list(result.latencies),
        }
        for result in results
    ]


def wire_table(results: Sequence[WireResult]) -> Table:
    """One line for each width and number of rows; of each link whether it pays, and what a row
    gains."""
    return Table(
        (
            "hidden",
            "rows",
            "bytes",
            "in int8",
            "encode ns",
            "decode ns",
            "GB/s",
            "pays below",
            "2 stages",
            *(link.name for link in LINKS),
        ),
        tuple(
            (
                str(result.hidden),
                str(result.rows),
                str(result.raw_bytes),
                f"{result.int8_bytes} ({result.int8_bytes / result.raw_bytes:.3f})",
                f"{result.encode_ns:.0f}",
                f"{result.decode_ns:.0f}",
                f"{result.raw_bytes / result.encode_ns:.1f} / "
                f"{result.raw_bytes / result.decode_ns:.1f}",
                f"{result.pays_below_bits_s / 1e9:.1f} Gbit/s",
                f"{result.pays_below_alone_bits_s / 1e9:.1f} Gbit/s",
                *(_gain(result.gain_ns(link)) for link in LINKS),
            )
            for result in results
        ),
        frozenset(),
    )


def _gain(gain_ns: float) -> str:
    """`yes, 135 µs`."""
    value, unit = (gain_ns / 1e6, "ms") if abs(gain_ns) >= 1e6 else (gain_ns / 1e3, "µs")
    return f"{'yes' if gain_ns > 0 else 'no'}, {value:.3g} {unit}"


def wire_records(results: Sequence[WireResult]) -> list[dict[str, Any]]:
    """All of each result, samples too."""
    return [
        {
            "hidden": result.hidden,
            "rows": result.rows,
            "threads": result.threads,
            "bytes_per_row": result.raw_bytes,
            "int8_bytes_per_row": result.int8_bytes,
            "encode_ns_per_row": result.encode_ns,
            "decode_ns_per_row": result.decode_ns,
            "round_ns_per_row": result.round_ns,
            "encode_bytes_per_s": 1e9 * result.raw_bytes / result.encode_ns,
            "decode_bytes_per_s": 1e9 * result.raw_bytes / result.decode_ns,
            "pays_below_bits_per_s": result.pays_below_bits_s,
            "pays_below_on_2_stages_bits_per_s": result.pays_below_alone_bits_s,
            **{
                f"{what}_{link.bits_s / 1e6:.0f}_mbit": value
                for link in LINKS
                for what, value in (
                    ("pays_at", result.gain_ns(link) > 0),
                    ("gain_ns_per_row_at", result.gain_ns(link)),
                )
            },
            "samples_encode_ns": list(result.samples_encode_ns),
            "samples_decode_ns": list(result.samples_decode_ns),
        }
        for result in results
    ]


def csv_text(records: Sequence[dict[str, Any]]) -> str:
    """A head and one line a record; samples stand between spaces."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]), lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow(
            {
                key: " ".join(map(str, value)) if isinstance(value, list) else value
                for key, value in record.items()
            }
        )
    return out.getvalue().rstrip("\n")
