"""The report as one HTML page: no script, no outside resource, readable on a phone and in the dark.

Everything that comes from outside the package (a model's name, a reason) is escaped.
"""

from __future__ import annotations

from html import escape

from anyshard.verify.report import (
    Report,
    divergence_text,
    mark_text,
    per_rank_text,
    summary,
    witness_text,
)
from anyshard.verify.result import CellResult

__all__ = ["html"]

COLUMNS = (
    "cell", "verdict", "profile", "compared", "digest", "differing", "max ulp", "tokens",
    "witness", "wire bytes / token", "weights MB / rank", "KV MB / rank", "tok/s", "× unsplit",
)  # fmt: skip
NUMBERS = {"differing", "max ulp", "wire bytes / token", "weights MB / rank", "KV MB / rank",
           "tok/s", "× unsplit"}  # fmt: skip
WRAPPED = {"cell", "witness"}

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --dim: #5c636b; --line: #d9dde1;
  --page: #ffffff; --good: #1a7f37; --bad: #c5221f; --odd: #9a6700; --stripe: #f5f7f8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e6e8; --dim: #9aa2aa; --line: #3a4046;
  --page: #15181b; --good: #57c26f; --bad: #ff7b72; --odd: #e3b341; --stripe: #1c2024; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 110rem; color: var(--ink);
  background: var(--page); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
.summary { font-size: 1.1rem; font-weight: 600; margin: .5rem 0 1rem; }
.equal { color: var(--good); } .differs, .lost { color: var(--bad); }
.vacuous { color: var(--odd); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 0 0 1.5rem; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .87rem; }
th, td { padding: .35rem .45rem; text-align: left; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { vertical-align: bottom; } td { white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.wide { white-space: normal; min-width: 8.5rem; overflow-wrap: break-word; }
thead th { color: var(--dim); font-weight: 600; }
tr.parts td { border-bottom: 0; }
tr.where td { font: .95em ui-monospace, monospace; padding-left: 2rem; overflow-wrap: anywhere; }
code { font: .92em ui-monospace, monospace; }
.notes { color: var(--dim); font-size: .87rem; max-width: 60rem; }
@media (max-width: 44rem) {
  thead { display: none; }
  table, tbody, tr, td { display: block; width: 100%; }
  tbody tr { border: 1px solid var(--line); border-radius: .4rem; margin: 0 0 .8rem;
    padding: .3rem .2rem; background: var(--stripe); }
  tr.parts { border-bottom: 0; margin-bottom: 0; } tr.where { border-top: 0; }
  tr.where td { padding: .15rem .6rem; text-align: left; }
  tr.where td::before { content: none; }
  td, td.number, td.wide { display: flex; justify-content: space-between; gap: 1rem; border: 0;
    padding: .15rem .6rem; text-align: right; white-space: normal; min-width: 0; }
  td::before { content: attr(data-name); color: var(--dim); text-align: left; flex: none; }
  td:first-child { font-weight: 600; } td.empty { display: none; }
}
"""

NOTES = (
    "Compared: logit rows × vocabulary, bit by bit, with no tolerance. Digest: SHA-256 over them, "
    "first 12 digits. Witness: share of logits that change when the same split is summed in the "
    "order of an ordinary engine, one axis at a time; at 0 that axis has nothing to show. A cell "
    "that only places work has no order to change. Wire: of all ranks, without the logits gathered "
    "to be compared. tok/s: decoding, of all requests in flight; × unsplit: against the unsplit "
    "run of one such request. A cell whose name has a number of tokens runs less of the request: "
    "its bits and its speed are held against an unsplit run as short. Where a cell differs, the "
    "line below it shows the first logit that does, as hexadecimal floats, and the op and rank "
    "where the run parts. Lost: ranks of the cell died or fell silent."
)


def html(report: Report) -> str:
    """The page. Held by: test_verify_report.py."""
    facts = {
        "model": report.model,
        "profile": f"{report.profile} {report.profile_hash[:12]}",
        "request": f"{report.prompt_tokens} prompt tokens, {report.decode_tokens} decode steps",
        "ranks": f"{report.ranks_are} on {report.cores} cores",
        "anyshard": report.version,
        "run": f"{report.date}, {report.seconds:.0f} s",
    }
    verdict = "vacuous" if report.num_vacuous else "equal"
    results = (report.unsplit, *report.cells)
    rows = "\n".join(_row(cell) for cell in results)
    skipped = "".join(
        f"<li>{escape(cell)}: {escape(reason)}</li>" for cell, reason in report.skipped
    )
    head = "".join(f'<th scope="col"{_class(name)}>{escape(name)}</th>' for name in COLUMNS)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>anyshard verify: {escape(report.model)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>anyshard verify: {escape(report.model)}</h1>
<p class="summary {verdict if report.equal else "differs"}">{escape(summary(report))}</p>
<dl>
{"".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())}
</dl>
<div class="scroll">
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
{f"<h2>Skipped</h2><ul>{skipped}</ul>" if skipped else ""}
<p class="notes">{escape(NOTES)}</p>
</body>
</html>
"""


def _witness(cell: CellResult) -> str:
    """Wrapped between axes, not inside one."""
    return escape(witness_text(cell)).replace(" ", "&nbsp;").replace("%&nbsp;", "% ")


def _class(name: str, *, empty: bool = False) -> str:
    classes = ["number"] if name in NUMBERS else []
    classes += ["wide"] if name in WRAPPED else []
    classes += ["empty"] if empty else []
    return f' class="{" ".join(classes)}"' if classes else ""


def _row(cell: CellResult) -> str:
    is_unsplit = cell.cell == "unsplit"
    verdict = mark_text(cell) if cell.verdict == "vacuous" else str(cell.verdict)
    if cell.silent_axes:
        verdict = f"equal; {mark_text(cell)}"
    tokens = {True: "equal", False: '<span class="differs">differ</span>', None: ""}
    values = (
        escape(cell.cell),
        "" if is_unsplit else f'<span class="{cell.verdict}">{verdict}</span>',
        f"<code>{escape(cell.profile_hash[:8])}</code>",
        f"{cell.positions} × {cell.vocab}",
        f"<code>{escape(cell.digest[:12])}</code>",
        "" if cell.elements_differing is None else f"{cell.elements_differing:,}",
        "" if cell.max_ulp is None else f"{cell.max_ulp:,}",
        tokens[cell.tokens_equal],
        "" if is_unsplit else _witness(cell),
        f"{cell.wire_bytes_per_token:,.0f}",
        per_rank_text(cell.weight_bytes),
        per_rank_text(cell.kv_bytes),
        f"{cell.decode_tokens_per_s:.1f}",
        f"{cell.speed_ratio:.2f}",
    )
    cells = "".join(
        f'<td{_class(name, empty=not value)} data-name="{escape(name)}">{value}</td>'
        for name, value in zip(COLUMNS, values, strict=True)
    )
    where = divergence_text(cell)
    if not where:
        return f"<tr>{cells}</tr>"
    below = f'<td class="wide" colspan="{len(COLUMNS)}">{escape(where)}</td>'
    return f'<tr class="parts">{cells}</tr>\n<tr class="where">{below}</tr>'
