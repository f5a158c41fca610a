"""The invariance table: every cell of the grid, its digest, and what an ordinary order would do.

    python benchmarks/invariance.py                      the demo model, markdown
    python benchmarks/invariance.py --model qwen2 --json
    python benchmarks/invariance.py --only pp --only chunk

One row a cell: digest of the logits of all emitted tokens, logits compared with the unsplit run
and how many of them differ, the witness (the share of logits that changes when the same cell is
computed in the order of an ordinary engine), wire bytes of all ranks a token, verdict. A cell that
only places work has no other order; it carries a planted bug, which must change the digest.

Exit code 4 if a cell differs or a planted bug goes unseen. Cells and naive orders: tests/grid.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from grid import (
    SEEDED,
    Loaded,
    baseline,
    demo_cells,
    planted_is_caught,
    random_cells,
    run_cell,
    seeded,
    the_model,
    witness,
)
from models import MODELS

from anyshard.verify.cells import BATCH, NUM_TOKENS, PROMPT_TOKENS, Cell
from anyshard.verify.naive import ORDERS

DIFFERS = 4


@dataclass(frozen=True)
class Row:
    """One line of the table. witness: a share, or None where `planted` says caught or unseen."""

    cell: str
    digest: str
    tokens: int
    logits_compared: int
    logits_differing: int
    witness: float | None
    planted: str | None
    wire_bytes_per_token: float
    seconds: float
    verdict: str


def table_cells(model: Loaded) -> list[Cell]:
    """Greedy cells, then a few of them at temperature 0.8."""
    cells = demo_cells() if model.is_demo else random_cells(model.config)
    if importlib.util.find_spec("torch") is None:
        cells = [cell for cell in cells if cell.comm != "torch"]
    drawn = [
        Cell(axis="tp", tp=3),
        Cell(axis="pp", pp=2),
        Cell(axis="mixed", tp=2, pp=2),
        Cell(axis="chunk", chunk=32),
        Cell(axis="batch", batch=BATCH, place="last"),
    ]
    return [Cell(axis="base"), *cells, Cell(axis="base", sampling=SEEDED), *seeded(drawn)]


def measure(model: Loaded, cell: Cell, *, witness_tokens: int) -> Row:
    """Run a cell, its naive twin or planted bug, and judge."""
    whole = baseline(model, cell)
    outcome = whole if cell.axis == "base" else run_cell(model, cell)
    same_shape = outcome.logits.shape == whole.logits.shape
    differing = (
        int(np.count_nonzero(outcome.logits.view(np.uint32) != whole.logits.view(np.uint32)))
        if same_shape
        else whole.logits.size
    )
    equal = differing == 0 and (outcome.digest, outcome.tokens) == (whole.digest, whole.tokens)
    share: float | None = None
    planted: str | None = None
    if cell.axis in ORDERS:
        share = witness(model, cell, num_tokens=min(witness_tokens, cell.num_tokens))
    elif cell.axis != "base":
        planted = "caught" if planted_is_caught(model, cell) else "UNSEEN"
    verdict = "baseline" if cell.axis == "base" else "equal"
    if not equal:
        verdict = "DIFFERS"
    elif share == 0:
        verdict = "vacuous"
    return Row(
        cell=cell.name,
        digest=outcome.digest,
        tokens=len(outcome.tokens),
        logits_compared=whole.logits.size,
        logits_differing=differing,
        witness=share,
        planted=planted,
        wire_bytes_per_token=outcome.wire_bytes_per_token,
        seconds=outcome.seconds,
        verdict=verdict,
    )


def markdown(row: Row) -> str:
    """A line of the table."""
    shown = "" if row.witness is None else f"{row.witness:.1%}"
    if row.planted is not None:
        shown = f"planted bug {row.planted}"
    return (
        f"| {row.cell} | `{row.digest[:12]}` | {row.logits_compared:,} | {row.logits_differing:,} "
        f"| {shown} | {row.wire_bytes_per_token:,.0f} | {row.verdict} |"
    )


def rows(model: Loaded, only: Sequence[str], witness_tokens: int) -> Iterator[Row]:
    """The rows that were asked for, as they are measured."""
    for cell in table_cells(model):
        if not only or any(text in cell.name or text == cell.axis for text in only):
            yield measure(model, cell, witness_tokens=witness_tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", choices=["demo", *MODELS])
    parser.add_argument("--only", action="append", default=[], help="cells whose name holds this")
    parser.add_argument(
        "--witness-tokens", type=int, default=8, help="rows that a witness compares"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of markdown")
    options = parser.parse_args()
    model = the_model(options.model)
    done: list[Row] = []
    if not options.json:
        print(
            f"Model {model.name}, {PROMPT_TOKENS} prompt tokens, {NUM_TOKENS} emitted, unless a "
            "cell says otherwise.\n\n"
            "| cell | digest | logits compared | differing | witness "
            "| wire bytes/token | verdict |\n"
            "|---|---|---:|---:|---:|---:|---|"
        )
    for row in rows(model, options.only, options.witness_tokens):
        done.append(row)
        if not options.json:
            print(markdown(row), flush=True)
    failed = [row for row in done if row.verdict == "DIFFERS" or row.planted == "UNSEEN"]
    if options.json:
        print(json.dumps({"model": model.name, "rows": [asdict(row) for row in done]}, indent=1))
    else:
        vacuous = sum(row.verdict == "vacuous" for row in done)
        print(f"\n{len(done)} cells, {len(failed)} failed, {vacuous} vacuous.")
    return DIFFERS if failed else 0


if __name__ == "__main__":
    sys.exit(main())
