"""What int8 costs in accuracy: KL from float32, beside llama.cpp's Q8_0, on the same text.

    python benchmarks/kl.py [--environment .venv-bench] [--json FILE]

As llama-perplexity does it: chunks of 512 tokens, the second half of each compared, both models
made of the demo's Q4_1 file. The text is that of `verify --against`, and docs/numerics.md; both
sides must make the same tokens of it.

Exits 4 where our mean KL is more than 1.1 times that of Q8_0.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import hf
import llama
import numpy as np
from numpy.typing import NDArray

from anyshard.accuracy.measure import shipped_text
from anyshard.checkpoint import open_checkpoint
from anyshard.config import Arithmetic
from anyshard.tokenizer import open_tokenizer
from anyshard.verify.driver import Driver, served

CHUNK = 512
MOST_OF_Q8_0 = 1.1
LEAST_TOKENS = 4000


def log_softmax(logits_TV: NDArray[np.float32]) -> NDArray[np.float64]:
    """In float64."""
    wide = logits_TV.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=1, keepdims=True)))


def ours(tokens: list[int]) -> dict[str, float]:
    """KL of the int8 profile from the f32 profile, and both perplexities."""
    models = {kind: served(open_checkpoint(None), arithmetic=kind) for kind in arithmetics()}
    kl: list[float] = []
    nats: dict[str, list[float]] = {kind: [] for kind in models}
    for start in range(0, len(tokens) // CHUNK * CHUNK, CHUNK):
        chunk = tokens[start : start + CHUNK]
        found: dict[str, NDArray[np.float64]] = {}
        for kind, model in models.items():
            with Driver(model, rows_max=CHUNK, max_model_len=CHUNK, threads=2) as driver:
                found[kind] = log_softmax(driver.logits(chunk)[CHUNK // 2 : -1])
            after = np.array(chunk[CHUNK // 2 + 1 :])
            nats[kind] += (-found[kind][np.arange(len(after)), after]).tolist()
        kl += (np.exp(found["f32"]) * (found["f32"] - found["int8"])).sum(axis=1).tolist()
    perplexity = {kind: float(np.exp(np.mean(each))) for kind, each in nats.items()}
    return {
        "mean": float(np.mean(kl)),
        "p99.9": float(np.quantile(kl, 0.999)),
        "max": max(kl),
        "perplexity": perplexity["int8"],
        "of_float": perplexity["f32"],
        "positions": len(kl),
    }


def arithmetics() -> tuple[Arithmetic, ...]:
    return ("f32", "int8")


def theirs(
    programs: llama.Llama, files: dict[str, Path], text: Path, tokens: list[int]
) -> dict[str, float]:
    """The same of Q8_0 from F32; ends the benchmark if llama.cpp reads other tokens than ours."""
    with tempfile.TemporaryDirectory() as folder:
        base = ("-f", str(text), "-c", str(CHUNK), "--kl-divergence-base", f"{folder}/base")
        programs.run("llama-perplexity", "-m", str(files["F32"]), *base)
        if base_tokens(Path(folder, "base")) != tokens[: len(tokens) // CHUNK * CHUNK]:
            sys.exit("llama.cpp makes other tokens of the text than we do")
        said = programs.run(
            "llama-perplexity", "-m", str(files["Q8_0"]), *base, "--kl-divergence", with_log=True
        )
    return figures(said)


def base_tokens(path: Path) -> list[int]:
    """Of all chunks, from the head of a file of logits that llama-perplexity has written."""
    with path.open("rb") as file:
        magic = file.read(8)
        num_tokens, _, num_chunks = np.fromfile(file, np.int32, 3).tolist()
        assert magic == b"_logits_" and num_tokens == CHUNK, f"{magic!r} of {num_tokens} tokens"
        read: list[int] = np.fromfile(file, np.int32, num_tokens * num_chunks).tolist()
    return read


def figures(said: str) -> dict[str, float]:
    """What llama-perplexity has said of KL; ends the benchmark if a figure is not there."""
    patterns = {
        "mean": r"Mean +KLD: +([\d.]+)",
        "p99.9": r"99.9% +KLD: +([\d.]+)",
        "max": r"Maximum KLD: +([\d.]+)",
        "perplexity": r"Mean PPL\(Q\) +: +([\d.]+)",
        "of_float": r"Mean PPL\(base\) +: +([\d.]+)",
    }
    found: dict[str, float] = {}
    for name, pattern in patterns.items():
        match = re.search(pattern, said)
        if match is None:
            sys.exit(f"llama-perplexity did not say {name}:\n{said[-2000:]}")
        found[name] = float(match[1])
    return found


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = [
        "| SmolLM2-135M | mean KL from float32 | p99.9 | max | perplexity | of float32 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['mean']:.5f} | {row['p99.9']:.3f} | {row['max']:.3f} "
            f"| {row['perplexity']:.3f} | {row['of_float']:.3f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--environment", type=Path, default=hf.ROOT / ".venv-bench")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    asked = parser.parse_args()
    environment = asked.environment.resolve()
    programs = llama.build(environment, ["accuracy"])
    text = shipped_text() + (hf.ROOT / "docs" / "numerics.md").read_text("utf-8")
    tokens = list(open_tokenizer(open_checkpoint(None)).encode(text, add_special=False))
    assert len(tokens) >= LEAST_TOKENS, f"{len(tokens)} tokens are too few"
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as file:
        file.write(text)
        file.flush()
        files = llama.model_files(programs, environment)
        peer = theirs(programs, files, Path(file.name), tokens)
    mine = ours(tokens)
    rows: dict[str, Any] = {"anyshard int8": mine, "llama.cpp Q8_0": peer}
    ratio = mine["mean"] / peer["mean"]
    print(table(rows))
    print(
        f"\n{int(mine['positions'])} positions of {len(tokens)} tokens in chunks of {CHUNK}; "
        f"llama.cpp {programs.commit[:7]}; {hf.cpu()}; {date.today().isoformat()}; mean KL "
        f"{ratio:.2f} of Q8_0's, at most {MOST_OF_Q8_0} is asked; `python benchmarks/kl.py`."
    )
    if asked.json is not None:
        where = {"cpu": hf.cpu(), "date": date.today().isoformat(), "llama": programs.commit}
        record = {"machine": where, "tokens": len(tokens), **rows, "ratio": ratio}
        asked.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if ratio <= MOST_OF_Q8_0 else hf.CLAIM_BROKEN


if __name__ == "__main__":
    sys.exit(main())
