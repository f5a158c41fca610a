"""The scoreboard of planted bugs: each caught or not, op and rank named right or wrong.

    python scripts/mutants.py [--model adversarial|demo] [--only WORD] [--json] [--no-build]
    python scripts/mutants.py --write    the same, and docs/mutants.md with it

What they are: tests/mutants. `--only`: bugs that have WORD in their name. One bug is a native
module that is compiled wrongly, which takes a minute the first time; `--no-build`, or no compiler,
leaves it out. Progress goes to stderr. Exit code 1 if a bug is missed or named wrongly, or one
shows that a model was expected to hide, or `verify` sees another than the catalogue says; 2 on bad
usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from builds import FOLDER, Build, of_the_module
from native import ROOT, compiler, load

sys.path.insert(0, str(ROOT / "tests"))

if TYPE_CHECKING:
    from mutants.exhibits import Exhibit, Mutant
    from mutants.scoreboard import Score

PAGE = ROOT / "docs" / "mutants.md"
BEGIN, END = "<!-- written by scripts/mutants.py -->", "<!-- end -->"
LINE = "{:40} {:22} {:16} {:24} {:6} {:26} {:6} {}"


def main(arguments: Sequence[str]) -> int:
    asked = _parser().parse_args(arguments)
    if asked.in_build:
        load(Path(asked.in_build))  # before anything imports the installed module
    from grid import shape_of
    from mutants.catalogue import MUTANTS
    from mutants.scoreboard import cell_words, score
    from mutants.subjects import DEMO

    rows = [
        (mutant, exhibit)
        for mutant in MUTANTS
        for exhibit in mutant.exhibits
        if asked.only in mutant.name
        and asked.model in (None, "demo" if shape_of(exhibit.model) == DEMO else "adversarial")
    ]
    if not rows:
        names = ", ".join(mutant.name for mutant in MUTANTS)
        print(f"no bug has {asked.only!r} in its name; there are: {names}", file=sys.stderr)
        return 2
    compiled = [row for row in rows if row[0].scenario == "build"]
    if asked.in_build:
        found = [dataclasses.asdict(score(*row)) for row in compiled]
        print(json.dumps(found))
        return 0
    rows = [row for row in rows if row not in compiled]
    scores: list[tuple[Mutant, Score]] = []

    def add(mutant: Mutant, row: Score) -> None:
        scores.append((mutant, row))
        if not asked.json:
            print(_line(mutant.source[0], row), flush=True)
            if not row.as_expected:
                print(f"    {row.sentence or 'nothing was named'}", flush=True)

    if not asked.json:
        print(LINE.format("bug", "public bug", "model", "cell", "caught", "named", "verify", ""))
    total = len(rows) + len(compiled)
    for index, (mutant, exhibit) in enumerate(rows, start=1):
        _progress(f"{index}/{total} {mutant.name}: {exhibit.model}, {cell_words(mutant, exhibit)}")
        add(mutant, score(mutant, exhibit))
    if compiled and (asked.no_build or not compiler()):
        why = "--no-build" if asked.no_build else "no C++ compiler"
        print(f"left out, {why}: {compiled[0][0].name}", file=sys.stderr)
        compiled = []
    if compiled:
        _progress(f"{total}/{total} {compiled[0][0].name}: compiling, then in a process of its own")
        for (mutant, exhibit), row in zip(compiled, _of_build(arguments), strict=True):
            add(mutant, _checked(row, exhibit))
    _progress("")
    wrong = [row for _, row in scores if not row.as_expected]
    summary = _summary([row for _, row in scores], num_wrong=len(wrong))
    if asked.json:
        record = [dataclasses.asdict(row) for _, row in scores]
        print(json.dumps({"summary": summary, "as_expected": not wrong, "rows": record}))
    else:
        print(summary)
    if asked.write and not wrong:
        _write(summary, scores)
    return 1 if wrong else 0


def _summary(rows: Sequence[Score], *, num_wrong: int) -> str:
    hidden = sum(row.verdict == "hidden" for row in rows)
    return (
        f"{len({row.bug for row in rows})} bugs in {len(rows)} cells: "
        f"{len(rows) - hidden - num_wrong} caught and named right, "
        f"{hidden} hidden by the model as expected, {num_wrong} not as expected; "
        f"`verify` sees {sum(row.seen for row in rows)}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=("adversarial", "demo"), help="one of the two halves")
    parser.add_argument("--only", default="", metavar="WORD", help="bugs with WORD in their name")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.add_argument("--no-build", action="store_true", help="without the wrong native build")
    parser.add_argument("--write", action="store_true", help="also docs/mutants.md")
    parser.add_argument("--in-build", metavar="FOLDER", help=argparse.SUPPRESS)
    return parser


def _progress(text: str) -> None:
    """One line of a terminal, written over; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)


def _named(row: Score) -> str:
    return "-" if row.op is None else f"{row.op} rank {row.rank}"


def _line(source: str, row: Score) -> str:
    verdict = f"hidden: {row.hidden}" if row.verdict == "hidden" else row.verdict
    caught = "yes" if row.caught else "no"
    seen = "yes" if row.seen else "no"
    return LINE.format(row.bug, source, row.model, row.cell, caught, _named(row), seen, verdict)


def _fused() -> Build:
    return next(build for build in of_the_module(["g++"]) if build.name.endswith("fused"))


def _of_build(arguments: Sequence[str]) -> Iterator[Score]:
    """Scores of a process that has the wrong module in the place of the installed one."""
    from mutants.scoreboard import Score

    FOLDER.mkdir(parents=True, exist_ok=True)
    build = _fused()
    build.compile()
    command = [sys.executable, __file__, *arguments, "--in-build", str(build.folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return (Score(**row) for row in json.loads(done.stdout))


def _checked(row: Score, exhibit: Exhibit) -> Score:
    """What the wrong build takes for right must be what the installed one computes."""
    from mutants.scoreboard import unsplit

    if row.truth == unsplit(row.model, exhibit.cell.unsplit()).digest:
        return row
    return dataclasses.replace(row, verdict="MISNAMED", sentence="it differs elsewhere too")


def _write(summary: str, scores: Sequence[tuple[Mutant, Score]]) -> None:
    """The table of docs/mutants.md."""
    lines = [
        BEGIN,
        "",
        f"{summary}.",
        "",
        "| bug | public bug | model | cell | caught | named | seen by `verify` |",
        "|---|---|---|---|---|---|---|",
    ]
    before = ""
    for mutant, row in scores:
        text, path = mutant.source
        link = f"[{text}](https://github.com/{path})" if text else "–"
        bug = f"**{mutant.name}**: {mutant.says}"
        first = (bug, link) if mutant.name != before else ("", "")
        before = mutant.name
        named = f"hidden: {row.hidden}" if row.hidden else f"`{row.op}`, rank {row.rank}"
        seen = "yes" if row.seen else f"no: {row.unseen}" if row.unseen else "no"
        last = ("yes" if row.caught else "no", named, seen)
        lines.append("| " + " | ".join((*first, row.model, row.cell, *last)) + " |")
    text = PAGE.read_text("utf-8")
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(head + "\n".join([*lines, "", END]) + tail, "utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
