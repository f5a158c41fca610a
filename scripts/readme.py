"""Run the commands of README.md and some pages of docs and put what they print below them.

A fenced `console` block holds lines that begin with `$ `; what follows each is its output, both
streams as a terminal shows them. `--check` runs them and fails where anything differs but
figures and what is of one machine, which is how CI keeps the transcripts true. `--accuracy`
measures the tables between the `accuracy` marks of README.md again (minutes; needs torch). The
table between the `kv` marks is what KV caches of those ranks allocate, here as well as in a run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("verify", "compare", "bench", "doctor", "speculation")
    ),
)
KV = ("<!-- kv: scripts/readme.py -->", "<!-- /kv -->")
KV_RANKS = (1, 2, 3, 4, 5, 8)
KV_TOKENS = 8192
#: layers, query heads, KV heads, all of 64 dims
KV_MODELS = {"9/3 (SmolLM2-135M)": (30, 9, 3), "14/2 (Qwen2-0.5B)": (24, 14, 2)}
ACCURACY = ("<!-- accuracy: scripts/readme.py --accuracy -->", "<!-- /accuracy -->")
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
# what differs between two machines or minutes: figures, also tok/s and ratio at the end of a row,
# kernel body, threads, the note on cores; version, date and CPU of a record; what doctor says of
# the machine, and what is missing there; how many drafts were worth their rows
MEASURED = re.compile(
    r" +\d+\.\d  +\d+\.\d\d$|\d+(\.\d+)? (tok/s|s\b|MB)|\"[a-z_]+_s\": [\d.]+"
    r"|\b(vnni|avx2|scalar)( x\d+)?|\"threads\": \d+|^note: .*\n"
    r"|anyshard [\d.]+ · .*$"
    r"|^(machine|kernels|memory|installed|demo model|model|cache) {2,}\S.*$"
    r"|^speculation: .*$"
    r"|\d+(\.\d+)? [kG]B|\s+what is missing, and what to type:(?s:.*)",
    re.MULTILINE,
)
INSTALLED = re.compile(r"/\S*/site-packages/")


def outputs(block: str) -> str:
    """The block with every command's output as it is now."""
    with tempfile.TemporaryDirectory() as home:  # the cache of the user stays as it is
        return "\n".join(_lines(block, Path(home))) + "\n"


def _lines(block: str, home: Path) -> list[str]:
    lines: list[str] = []
    for command in re.findall(r"^\$ (.*)$", block, re.MULTILINE):
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / ".cache"),
        }
        done = subprocess.run(
            ["bash", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=environment,
            timeout=600,
        )
        shown = INSTALLED.sub("…/", done.stdout)
        lines += [f"$ {command}", *shown.rstrip().splitlines()]
    return lines


def masked(text: str) -> str:
    """Without what differs between two machines or minutes."""
    return MEASURED.sub("#", text)


def kv_table() -> str:
    """What the fullest rank allocates for one sequence, and its share of what one rank would."""
    ranks = " | ".join(f"{tp} rank{'s' * (tp > 1)}" for tp in KV_RANKS)
    lines = [f"| query/KV heads | `--kv-shard` | KV | {ranks} |", "| --- " * 9 + "|"]
    for name, shape in KV_MODELS.items():
        for kind in ("heads", "sequence"):
            for kv in ("f32", "int8"):
                held = [_fullest(shape, tp, kind, kv) for tp in KV_RANKS]
                cells = [f"{each / 1e6:.0f} MB ({each / held[0]:.1%})" for each in held]
                lines.append(f"| {name} | {kind} | {kv} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _fullest(shape: tuple[int, int, int], tp: int, kind: Any, kv: Any) -> int:
    from anyshard.config import ModelConfig
    from anyshard.kv import KvCache, num_local_pages
    from anyshard.layout import plan
    from anyshard.loading import profile_of

    layers, heads, kv_heads = shape
    config = ModelConfig(
        architecture="llama", num_layers=layers, hidden=64 * heads, ffn=1024, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=64, vocab=256, context=KV_TOKENS, norm_eps=1e-5,
        rope_theta=1e4, tied=True,
    )  # fmt: skip
    profile = profile_of("f32", kv)
    layout = plan(config, tp=tp, kv_shard=kind, leaf=profile.leaf)
    blocks = KV_TOKENS // profile.kv_block
    return max(
        KvCache(
            config,
            profile,
            layers=(0, layers),
            kv_heads=layout.kv_heads(index, config.q_per_kv),
            num_pages=num_local_pages(
                layout.stripes(index), num_pages=blocks, sequence_blocks=blocks
            ),
        ).bytes
        for index in range(tp)
    )


def write_accuracy() -> int:
    """The demo model beside float64 and HF, as README.md shows it."""
    from anyshard.accuracy import as_markdown, measure

    page = ROOT / "README.md"
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(ACCURACY[0])
    after = rest.split(ACCURACY[1])[1]
    tables = as_markdown(measure(None, against="hf"))
    page.write_text(f"{before}{ACCURACY[0]}\n{tables}\n{ACCURACY[1]}{after}", encoding="utf-8")
    return 0


def main() -> int:
    if "--accuracy" in sys.argv:
        return write_accuracy()
    check = "--check" in sys.argv
    return max(write_kv(check=check), *(transcripts(page, check=check) for page in PAGES))


def write_kv(*, check: bool) -> int:
    """The table of README.md, again or compared; returns the exit code."""
    page, now = ROOT / "README.md", kv_table()
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(KV[0])
    said, after = rest.split(KV[1])
    if check and said.strip() != now:
        print(f"README.md says of KV:\n{said}\nbut it is:\n{now}", file=sys.stderr)
        return 1
    page.write_text(f"{before}{KV[0]}\n{now}\n{KV[1]}{after}", encoding="utf-8")
    return 0


def transcripts(page: Path, *, check: bool) -> int:
    """Write the page again, or say what is stale in it; returns the exit code."""
    text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT)
    blocks = [match.group(1) for match in BLOCK.finditer(text)]
    stale = 0
    for block in blocks:
        now = outputs(block)
        if masked(now) != masked(block):
            stale += 1
            print(f"{name} says:\n{block}\nbut it is:\n{now}", file=sys.stderr)
        text = text.replace(block, now)
    if check:
        print(f"{name}: {len(blocks)} transcripts, {stale} stale")
        return 1 if stale else 0
    page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
