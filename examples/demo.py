"""One question, answered by two processes and then by one; the digests must be equal.

Runs the installed command line twice, as a user would: `anyshard generate -tp 2`, streaming
to the terminal, and the unsplit run beside it.

Exits 0 when both runs produced the same logit bits and the same answer, 4 when they did not,
and with the command's own code when it failed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

QUESTION = "What is the capital of France, and what is it known for?"
NUM_TOKENS = 64
# the digest of this question and number of tokens, on every machine
PUBLISHED = "c40bc42a61dda6d7d20996adb33fbf39314076937f86572d12ff817c6a000483"
BUSY = 0.2
NUM_TOKENS_REFERENCE = 4  # without native kernels a token takes long
DIFFERENCE_FOUND = 4

STATS = re.compile(
    r"prefill \d+ tok (?P<prefill>[\d.]+) tok/s · decode \d+ tok (?P<decode>[\d.]+) tok/s"
    r".* x(?P<threads>\d+)\s+logits_sha256 (?P<digest>[0-9a-f]{64})",
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run said about itself; speeds in tokens/s."""

    digest: str
    threads: int  # of each process
    prefill: float
    decode: float
    text: str


def native_is_built() -> bool:
    """Whether the kernels were compiled when the package was installed."""
    try:
        from anyshard._native import available_bodies
    except ImportError:
        return False
    return bool(available_bodies())


def busy_share(seconds: float = 0.5) -> float:
    """Share of the machine's cores that other programs use just now, 0..1."""

    def ticks() -> tuple[int, int]:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        counts = [int(field) for field in fields]
        return sum(counts), counts[3] + counts[4]  # all, idle and waiting for a disk

    total, idle = ticks()
    time.sleep(seconds)
    total_after, idle_after = ticks()
    return 1 - (idle_after - idle) / max(1, total_after - total)


def command(*flags: str) -> list[str]:
    """The command line of one run."""
    anyshard = Path(sys.executable).with_name("anyshard")
    num_tokens = str(NUM_TOKENS if native_is_built() else NUM_TOKENS_REFERENCE)
    ask = ["generate", "--chat", "--prompt", QUESTION, "--max-tokens", num_tokens]
    return [str(anyshard), *ask, *flags]


def environment() -> dict[str, str]:
    """A demo leaves nothing in the user's cache, also where packing is slow enough to keep."""
    return os.environ | {"ANYSHARD_CACHE": "false"}


def streamed(*flags: str) -> Run:
    """Run with the answer streaming to our stdout, and read the closing line on stderr."""
    answer = b""
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command(*flags), stdout=subprocess.PIPE, stderr=errors, env=environment()
        ) as process,
    ):
        assert process.stdout is not None
        while piece := os.read(process.stdout.fileno(), 4096):
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            answer += piece
        returncode = process.wait()
        errors.seek(0)
        log = errors.read().decode(errors="replace")
    found = STATS.search(log)
    if returncode or found is None:
        sys.stderr.write(log)
        sys.exit(returncode or "the run printed no closing line")
    return Run(
        digest=found["digest"],
        threads=int(found["threads"]),
        prefill=float(found["prefill"]),
        decode=float(found["decode"]),
        text=answer.decode().strip(),
    )


def measured(*flags: str) -> tuple[Run, str]:
    """Run with --json; also returns the name of the kernels that computed."""
    done = subprocess.run(command(*flags, "--json"), capture_output=True, env=environment())
    if done.returncode:
        sys.stderr.buffer.write(done.stderr)
        sys.exit(done.returncode)
    result = json.loads(done.stdout)
    timings = result["timings"]
    run = Run(
        digest=result["logits_sha256"],
        threads=result["layout"]["threads"],
        prefill=timings["prefill_tokens_per_s"],
        decode=timings["decode_tokens_per_s"],
        text=result["text"].strip(),
    )
    return run, str(result["layout"]["kernels"])


def main() -> int:
    print(f"> {QUESTION}\n", flush=True)
    busy = busy_share()
    split = streamed("-tp", "2")
    unsplit, kernels = measured()
    print(f"\n{'processes x threads':20}{'prefill':>9}{'decode':>9}  tokens/s, {kernels} kernels")
    for num_processes, run in ((2, split), (1, unsplit)):
        name = f"{num_processes} x {run.threads}"
        print(f"{name:20}{run.prefill:9.1f}{run.decode:9.1f}  logits_sha256 {run.digest}")
    if busy > BUSY:
        print(f"\nOther programs used {busy:.0%} of this machine: do not compare the speeds.")
    if split.digest != unsplit.digest or split.text != unsplit.text:
        print("\nDIFFERENT: the split changed the result, which is a defect; please report it.")
        return DIFFERENCE_FOUND
    print("\nequal: every logit bit behind every token of the answer.")
    if native_is_built():
        if split.digest != PUBLISHED:
            print(
                "But not the published digest, which every machine should give: please report it."
            )
            return DIFFERENCE_FOUND
        print("It is the published digest: the same bits as on our machines.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
