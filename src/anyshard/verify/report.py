"""What a grid came to, as one record: a sentence, one JSON object, or lines of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from anyshard.verify.result import CellResult

__all__ = [
    "Column",
    "Report",
    "as_json",
    "columns",
    "divergence_text",
    "head_line",
    "mark_text",
    "per_rank_text",
    "row_line",
    "summary",
    "witness_text",
]

MB = 1e6
MARKS = {"equal": "", "vacuous": "nothing to show", "differs": "DIFFERS", "lost": "LOST"}
NO_ORDER = "no order to change"
MOST_OF_MARK = len("chunk: nothing to show")


@dataclass(frozen=True, kw_only=True)
class Report:
    """A grid that was run. `unsplit` is the run that all `cells` were held against.

    skipped: (cell, reason). date: when it began, UTC. seconds: all runs together, without loading.
    """

    model: str
    version: str
    profile: str
    profile_hash: str
    prompt_tokens: int
    decode_tokens: int
    ranks_are: str
    cores: int
    unsplit: CellResult
    cells: tuple[CellResult, ...]
    skipped: tuple[tuple[str, str], ...]
    date: str
    seconds: float

    @property
    def equal(self) -> bool:
        """Whether every cell was compared and none differs."""
        return all(cell.verdict in ("equal", "vacuous") for cell in self.cells)

    @property
    def num_lost(self) -> int:
        """Cells that lost ranks and of which no difference is known."""
        return sum(cell.verdict == "lost" for cell in self.cells)

    @property
    def num_vacuous(self) -> int:
        """Cells of which no axis could have shown another order."""
        return sum(cell.verdict == "vacuous" for cell in self.cells)

    @property
    def num_partly_vacuous(self) -> int:
        """Equal cells of which an axis could have, and another could not."""
        return sum(bool(cell.silent_axes) for cell in self.cells)


def summary(report: Report) -> str:
    """One sentence: how many cells are equal, how many differ, how many show nothing."""
    total = len(report.cells)
    differing = sum(cell.verdict == "differs" for cell in report.cells)
    equal = total - differing - report.num_vacuous - report.num_lost
    parts = [f"{differing} of {total} {_cells(total)} DIFFER"] if differing else []
    if report.num_lost:
        parts.append(f"{report.num_lost} of {total} {_cells(total)} LOST ranks")
    parts.append(f"{equal} of {total} {_cells(total)} equal the unsplit run in every bit")
    if report.num_partly_vacuous:
        parts.append(f"in {report.num_partly_vacuous} of them one axis had nothing to show")
    if report.num_vacuous:
        parts.append(
            f"{report.num_vacuous} {_cells(report.num_vacuous)} had nothing to show (equal, but so "
            "is another order of summation there)"
        )
    if report.skipped:
        parts.append(f"{len(report.skipped)} skipped")
    return "; ".join(parts)


def _cells(count: int) -> str:
    return "cell" if count == 1 else "cells"


def as_json(report: Report) -> dict[str, Any]:
    """The whole record in plain types."""
    record = asdict(report)
    record["cells"] = list(record["cells"])
    record["skipped"] = [{"cell": cell, "reason": reason} for cell, reason in report.skipped]
    return {
        "equal": report.equal,
        "vacuous": report.num_vacuous,
        "partly_vacuous": report.num_partly_vacuous,
        "lost": report.num_lost,
        "summary": summary(report),
    } | record


def witness_text(cell: CellResult) -> str:
    """`tp 95.7% chunk 92.6%`, or that there is no order to change."""
    if not cell.witness:
        return NO_ORDER if cell.lost is None else "-"
    return " ".join(f"{axis} {_percent(share)}" for axis, share in cell.witness.items())


def _percent(share: float) -> str:
    if 0 < share < 0.001:
        return "<0.1%"
    return f"{share:.1%}"


def per_rank_text(sizes: Sequence[int]) -> str:
    """Bytes of each rank in MB: one number where all have about the same, or least to most.

    `-` without ranks.
    """
    if not sizes:
        return "-"
    low, high = min(sizes) / MB, max(sizes) / MB
    return f"{high:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f}-{high:.1f}"


def divergence_text(cell: CellResult) -> str:
    """Where a cell first parts from the unsplit run, or what else is wrong with it; else empty."""
    parts, found = [], cell.first_divergence
    if found is not None and found.what == "logit":
        values = f"{found.unsplit} became {found.cell}"
        parts.append(f"position {found.position}, id {found.token_id}: {values}")
    elif found is not None:
        how = {
            "token": "and all logits up to there are equal",
            "pair": "where nobody asks for logits, and ranks exchange only the best of each",
        }[found.what]
        values = f"token {found.unsplit} became {found.cell}"
        parts.append(f"position {found.position}: {values}, {how}")
    if cell.fault is not None:
        parts.append(f"it failed: a value left float32 in {cell.fault}")
    others = [cell.neighbours] if cell.neighbours else []
    place = [cell.where] if cell.where is not None else []
    parts += [*others, *place] if cell.only_neighbours_differ else [*place, *others]
    if cell.lost is not None:
        parts.append(f"ranks were lost: {cell.lost.splitlines()[0]}")
    return "; ".join(parts)


@dataclass(frozen=True)
class Column:
    """One of a table in text. rank: the higher, the sooner a narrow terminal does without it."""

    name: str
    width: int
    rank: int
    text: Callable[[CellResult], str]
    left: bool = False

    def cell(self, text: str) -> str:
        """`text` in the column's width."""
        return f"{text:{self.width}}" if self.left else f"{text:>{self.width}}"


def columns(
    cells: Iterable[str], *, width: int, axes: Iterable[Sequence[str]] = ()
) -> list[Column]:
    """Those that fit into `width` characters, for cells of these names.

    axes: of every cell, those that it has a witness for; their column is as wide as they need.
    """
    widest, split = max((len(name) for name in cells), default=0), list(axes)
    shares = [sum(len(f"{axis} 100.0% ") for axis in each) - 1 for each in split]
    crossed = any(len(each) > 1 for each in split)
    found = [
        Column("cell", max(widest, len("unsplit")), 0, lambda c: c.cell, left=True),
        Column("digest", 12, 4, lambda c: c.digest[:12] or "-", left=True),
        Column("differ", 9, 0, lambda c: _short(c.elements_differing)),
        Column("ulp", 7, 2, lambda c: _short(c.max_ulp)),
        Column("tokens", 6, 1, _tokens_column, left=True),
        Column("witness", max(len(NO_ORDER), *shares, 0), 0, _witness_column, left=True),
        Column("wire B/tok", 10, 5, lambda c: f"{c.wire_bytes_per_token:,.0f}"),
        Column("weights MB", 11, 6, lambda c: per_rank_text(c.weight_bytes)),
        Column("KV MB", 9, 7, lambda c: per_rank_text(c.kv_bytes)),
        Column("tok/s", 6, 3, lambda c: f"{c.decode_tokens_per_s:.1f}"),
        Column("ratio", 5, 3, lambda c: f"{c.speed_ratio:.2f}"),
        Column("", MOST_OF_MARK if crossed else len(MARKS["vacuous"]), 0, mark_text, left=True),
    ]
    while len(found) > 4 and sum(column.width + 2 for column in found) > width:
        found.remove(max(found, key=lambda column: column.rank))
    return found


def _witness_column(cell: CellResult) -> str:
    return "" if cell.cell == "unsplit" else witness_text(cell)


def _tokens_column(cell: CellResult) -> str:
    return {True: "equal", False: "DIFFER", None: "-"}[cell.tokens_equal]


def mark_text(cell: CellResult) -> str:
    """What a row says at its end; nothing of a cell that is equal."""
    if cell.silent_axes:
        return f"{' '.join(cell.silent_axes)}: {MARKS['vacuous']}"
    return MARKS[cell.verdict]


def head_line(table: Sequence[Column]) -> str:
    """The names above `row_line`."""
    return "  ".join(column.cell(column.name) for column in table).rstrip()


def row_line(cell: CellResult, table: Sequence[Column]) -> str:
    """A cell in one line; its first divergence is not in it."""
    return "  ".join(column.cell(column.text(cell)) for column in table).rstrip()


def _short(count: int | None) -> str:
    """A count in at most nine characters; `-` for none."""
    if count is None:
        return "-"
    return f"{count:,}" if count < 1_000_000 else f"{count:.1e}"
