"""SmolLM2-135M held as bfloat16, float16 and float32: decode speed, and the same bits.

    python benchmarks/storage.py [--rounds 7] [--json FILE]

Writes the demo model rounded to bfloat16, the float32 copy of that, and a float16 one, as HF
directories. Arms are warm processes in turning order, as in hf.py; the bfloat16 model and its
copy must give equal tokens and equal logit digests.

Exits 4 where bfloat16 decodes less than 1.5 times as fast as float32, or a bit differs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, Literal

import hf
import numpy as np
from numpy.typing import NDArray

from anyshard.checkpoint import Checkpoint, open_checkpoint
from anyshard.checkpoint.names import hf_name
from anyshard.tokenizer import open_tokenizer

Kind = Literal["float32", "bfloat16", "float16"]
KINDS: Final[tuple[Kind, ...]] = ("float32", "bfloat16", "float16")
IN_FILE: Final = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}
FASTER: Final = 1.5
TASK: Final = hf.Task("decode", 16, 128)


def narrowed(weight: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of float32: bfloat16, cut off."""
    return (weight.view(np.uint32) >> 16).astype(np.uint16)


def stored(weight: NDArray[np.float32], kind: Kind) -> bytes:
    """The bytes of a tensor whose bfloat16 the float32 model holds too."""
    halves = narrowed(weight)
    if kind == "bfloat16":
        return halves.tobytes()
    wide = (halves.astype(np.uint32) << 16).view(np.float32)
    return wide.astype(kind).tobytes()


def write_model(checkpoint: Checkpoint, directory: Path, kind: Kind) -> None:
    """One HF directory."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hf.raw_config(checkpoint.config)))
    shapes = {hf_name(name): shape for name, shape in checkpoint.config.tensor_shapes().items()}
    dtype, item_bytes = IN_FILE[kind]
    with (directory / "model.safetensors").open("wb") as file:
        file.write(hf.safetensors_header(shapes, dtype=dtype, item_bytes=item_bytes))
        for name in checkpoint.config.tensor_shapes():
            file.write(stored(checkpoint.read(name), kind))


def main() -> None:
    parser = hf.flags(__doc__, rounds=7)
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    checkpoint = open_checkpoint(None)
    tokens = open_tokenizer(checkpoint).encode(hf.TEXT.read_text("utf-8"), add_special=True)
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            write_model(checkpoint, Path(folder) / kind, kind)
        arms = [
            hf.Arm(f"anyshard, {kind}, {threads}", start_arm(Path(folder) / kind, threads), threads)
            for kind in KINDS
            for threads in (1, 2)
        ]
        for arm in arms:
            arm.ready = arm.read()["ready"]
        where = hf.machine(arms, load)
        digests = {arm.name: arm.ask(tokens[:64], 8)["logits_sha256"] for arm in arms}
        rates = hf.measure(arms, [TASK], tokens, asked.rounds)["decode"]
        for arm in arms:
            arm.process.communicate()
    rows = [
        ratio_row(rates, kind, threads) for kind in ("bfloat16", "float16") for threads in (1, 2)
    ]
    found = {"machine": where, "rounds": asked.rounds, "rows": rows, "digests": digests}
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    equal = len({digest for name, digest in digests.items() if "float16," not in name}) == 1
    slow = [row for row in rows if row["kind"] == "bfloat16" and row["ratio"]["median"] < FASTER]
    print("one digest" if equal else "DIGESTS DIFFER", file=sys.stderr)
    sys.exit(hf.CLAIM_BROKEN if slow or not equal else 0)


def start_arm(directory: Path, threads: int) -> Any:
    arm = str(hf.HERE / "arm_anyshard.py")
    return hf.start([sys.executable, arm, "1", str(threads), str(directory)])


def ratio_row(rates: dict[str, list[float]], kind: Kind, threads: int) -> dict[str, Any]:
    """Speed of a kind beside float32; the ratio is the median of those within a round."""
    ours, wide = (rates[f"anyshard, {name}, {threads}"] for name in (kind, "float32"))
    return {
        "kind": kind,
        "threads": threads,
        "ours": hf.spread(ours),
        "float32": hf.spread(wide),
        "ratio": hf.spread([a / b for a, b in zip(ours, wide, strict=True)]),
    }


def table(found: dict[str, Any]) -> str:
    """Markdown, with the machine and the date below."""
    lines = [
        "| SmolLM2-135M, decode, batch 1 | tok/s | held as float32 | ratio |",
        "| --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        cells = (hf.shown(row["ours"], ".1f"), hf.shown(row["float32"], ".1f"))
        plural = "s" if row["threads"] > 1 else ""
        lines.append(
            f"| {row['kind']}, {row['threads']} thread{plural} | {' | '.join(cells)} | "
            f"{hf.shown(row['ratio'], '.2f')} |"
        )
    lines += [
        "",
        hf.measured(
            found["machine"],
            rounds=found["rounds"],
            command="python benchmarks/storage.py",
        ),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
