"""`anyshard compare A B`: two recorded runs are equal, or the first op that differs is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from anyshard.cli.screen import tell
from anyshard.errors import DifferenceFound, OptionError, UserError

if TYPE_CHECKING:
    from anyshard.fidelity import Comparison, Divergence, Record

__all__ = ["compare"]


def compare(
    first: Annotated[str, Parameter(show_env_var=False)],
    second: Annotated[str, Parameter(show_env_var=False)],
    /,
    *,
    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Compare two records of generate --record: every op of every token, bit for bit.

    Exit code 0: equal. 4: they differ, and the first op that does is named. 2: they cannot be
    compared, or a file is no sound record.

    Parameters
    ----------
    first
        A record.
    second
        Another, of the same weights, prompt, profile and sampling, on whatever split or machine.
    json_output
        Print one JSON object.
    """
    from anyshard.fidelity import compare_records, read_record

    if not (first and second):
        raise OptionError(
            "a name of a record is empty; give two files that generate --record has written"
        )
    records = [read_record(Path(path)) for path in (first, second)]
    found = compare_records(*records)
    if found.incomparable:
        raise UserError(f"{first} and {second} cannot be compared: {'; '.join(found.incomparable)}")
    if json_output:
        tell(json.dumps(_json([first, second], records, found)))
    else:
        tell("\n".join(_lines([first, second], records, found)))
    return 0 if found.equal else DifferenceFound.exit_code


def _lines(paths: list[str], records: list[Record], found: Comparison) -> list[str]:
    from anyshard.fidelity import printable

    width = max(len(path) for path in paths)
    lines = [
        f"{path:{width}}  {_run_text(record)}" for path, record in zip(paths, records, strict=True)
    ]
    prompt = records[0].manifest.prompt_tokens
    what = f"{found.digests:,} digests of {found.positions} positions and {found.tokens} tokens"
    if found.first is None:
        lines.append(f"equal: {what}")
        fault, last = records[0].manifest.fault, found.positions
        if fault is not None and fault == records[1].manifest.fault and found.only_in == (0, 0):
            op = printable(fault)
            lines.append(f"       both left the range of float32 in {op} at position {last}")
    else:
        lines += [
            f"differ: {_first_text(found.first, prompt)}",
            f"        {found.digests_differing:,} of {what}; "
            f"{found.tokens_differing} of the tokens",
        ]
        if found.first.run is not None:
            lines.append(f"        {_ranks_text(found.first, paths[found.first.run])}")
    for path, more in zip(paths, found.only_in, strict=True):
        if more:
            lines.append(f"not compared: {more} positions that only {path} has")
    return lines


def _first_text(first: Divergence, prompt: int) -> str:
    if first.position is None:
        return f"in {first.op}; digests are equal, and the sha256 of all logits is not"
    last = prompt - 1
    place = (
        f"prompt token {first.position + 1} of {prompt}"
        if first.position <= last
        else f"token {first.position - last} of the answer"
    )
    rank = "" if first.rank is None else f" on rank {first.rank}"
    return f"first in {first.op}{rank} at position {first.position}, {place}"


def _ranks_text(first: Divergence, path: str) -> str:
    """The run differs from itself."""
    sent = " has sent" if first.point == "hop" else ""
    return f"in {path} rank {first.rank} holds other bits there than rank {first.other}{sent}"


def _run_text(record: Record) -> str:
    """`tp 2 pp 1 · shm · avx2 x1 · 2026-11-29 · AMD EPYC`; a record may be anybody's."""
    from anyshard.fidelity import printable

    def named(values: dict[str, Any], name: str) -> str:
        return printable(values.get(name, "?"))

    manifest = record.manifest
    layout = manifest.layout
    by_sequence = layout.get("kv_shard") == "sequence"
    parts = [
        f"tp {named(layout, 'tp')} pp {named(layout, 'pp')}",
        *(["KV by sequence"] if by_sequence else []),
        named(layout, "comm"),
        f"{named(layout, 'kernels')} x{named(layout, 'threads')}",
        f"anyshard {printable(manifest.anyshard)}",
        printable(manifest.date),
        named(manifest.machine, "cpu"),
    ]
    return " · ".join(parts)


def _json(paths: list[str], records: list[Record], found: Comparison) -> dict[str, Any]:
    import msgspec

    first = found.first
    return {
        "equal": found.equal,
        "first": None
        if first is None
        else {
            "op": first.op,
            "position": first.position,
            "layer": first.layer,
            "point": first.point,
            "rank": first.rank,
            "run": first.run,
        },
        "positions": found.positions,
        "digests": found.digests,
        "digests_differing": found.digests_differing,
        "tokens": found.tokens,
        "tokens_differing": found.tokens_differing,
        "only_in": list(found.only_in),
        "runs": [
            {"path": path, **msgspec.to_builtins(record.manifest)}
            for path, record in zip(paths, records, strict=True)
        ],
    }
