"""A report as tables: plain text for a terminal, Markdown for a README. Prints nothing.

Where HF was measured too, a cell holds both: ours / HF.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from anyshard.accuracy.figures import over_layers
from anyshard.accuracy.report import LengthFigures, LogitFigures, OpFigures, Report

__all__ = ["Table", "as_markdown", "as_text", "logits_table", "ops_table"]

F = TypeVar("F", LogitFigures, OpFigures)

_POINTS = {
    "embed": "embedding",
    "q": "q after RoPE",
    "k": "k after RoPE",
    "v": "v",
    "attention": "attention output",
    "reduce_o": "residual after o_proj",
    "ffn": "SiLU(gate) · up",
    "reduce_down": "residual after down_proj",
    "logits": "logits",
}


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column names the row."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self) -> str:
        """Columns two spaces apart, the first to the left, the others to the right."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]

        def line(cells: Sequence[str]) -> str:
            first, *rest = zip(cells, widths, strict=True)
            padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
            return "  ".join(padded).rstrip()

        return "\n".join([line(self.header), *map(line, self.rows)])

    def markdown(self) -> str:
        """A Markdown table."""
        lines = [self.header, ("---",) * len(self.header), *self.rows]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def as_text(report: Report) -> str:
    """All tables, notes and the verdict for a terminal."""
    parts = [_subject(report), logits_table(report).text(), ops_table(report).text()]
    parts += [f"note: {note}" for note in report.notes]
    return "\n\n".join([*parts, report.verdict])


def as_markdown(report: Report) -> str:
    """The same for a README."""
    parts = [logits_table(report).markdown(), ops_table(report).markdown()]
    parts += [f"{note[:1].upper()}{note[1:]}." for note in report.notes]
    verdict = f"{report.verdict[:1].upper()}{report.verdict[1:]}."
    return "\n\n".join([*parts, f"{_subject(report)}. {verdict}"])


def logits_table(report: Report) -> Table:
    """One column a length, one row a figure."""
    with_hf = report.manifest.peer is not None
    what = "anyshard / HF float32" if with_hf else "anyshard"
    header = tuple(_span(each) for each in report.lengths)
    rows = [
        (name, *(_both(each.ours, each.hf, show) for each in report.lengths))
        for name, show in _FIGURES
    ]
    rows.append(("rms of the logits", *(_short(each.ours.magnitude) for each in report.lengths)))
    rows.append(
        ("perplexity in float64", *(_fixed(each.ours.true_perplexity) for each in report.lengths))
    )
    return Table((f"logits against float64, {what}", *header), tuple(rows))


def ops_table(report: Report) -> Table:
    """One row a point, over all layers; the float64 op is given the engine's own inputs."""
    mine, theirs = over_layers(report.ops), over_layers(report.hf_ops)
    what = ", anyshard / HF float32" if theirs else ""

    def cells(point: str) -> tuple[str, ...]:
        (all_here, worst), there = mine[point], theirs.get(point)
        hf = None if there is None else there[0]
        worst_layer = "" if worst.layer is None or not worst.rms_error else str(worst.layer)
        return (
            _POINTS[point],
            _both(all_here, hf, lambda op: _short(op.rms_error)),
            _both(all_here, hf, lambda op: _short(op.max_error)),
            _both(all_here, hf, lambda op: _short(op.relative_error)),
            worst_layer,
            _short(all_here.magnitude),
        )

    header = (f"op by op{what}", "rms error", "max error", "relative", "worst layer", "rms")
    return Table(header, tuple(cells(point) for point in mine))


def _subject(report: Report) -> str:
    m = report.manifest
    peer = "" if m.peer is None else f"; {m.peer}"
    return (
        f"{m.model or m.architecture}, {m.num_weights / 1e6:.4g} million weights, profile "
        f"{m.profile}, kernels {m.kernels}, {m.num_tokens} tokens ({m.text}){peer}"
    )


def _span(figures: LengthFigures) -> str:
    if figures.start == 0:
        return f"{figures.length} tokens"
    return f"{figures.length} tokens, the last {figures.length - figures.start}"


def _both(here: F, there: F | None, show: Callable[[F], str]) -> str:
    return show(here) if there is None else f"{show(here)} / {show(there)}"


def _short(value: float | None) -> str:
    """Two digits: 4.8e-6, 0.012, 6.1."""
    if value is None:
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _fixed(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _share(value: float) -> str:
    return f"{100 * value:.6g} %" if value in (0, 1) else f"{100 * value:.2f} %"


def _flip(figures: LogitFigures) -> str:
    flip = figures.first_flip
    return "no flip" if flip is None else f"{_short(flip.margin)} at {flip.position}"


_FIGURES: tuple[tuple[str, Callable[[LogitFigures], str]], ...] = (
    ("rms error", lambda f: _short(f.rms_error)),
    ("max error", lambda f: _short(f.max_error)),
    ("relative error (Frobenius)", lambda f: _short(f.relative_error)),
    ("KL mean, nats", lambda f: _short(f.kl_mean)),
    ("KL p99.9", lambda f: _short(f.kl_p999)),
    ("KL max", lambda f: _short(f.kl_max)),
    ("same most likely token", lambda f: _share(f.top1_agreement)),
    ("same five most likely", lambda f: _share(f.top5_agreement)),
    ("margin at the first flip", _flip),
    ("perplexity less float64's", lambda f: _short(f.perplexity_difference)),
)
