"""Install the package where no compiler works, and see that it computes the same bits.

    python scripts/pure.py      from the environment of `make setup`

A scratch environment, an ordinary `pip install`, C and C++ compilers that fail. The command must
then say that it runs the reference bodies, two ranks of them must exchange nodes, and the digest
must be that of the native kernels here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

from anyshard.checkpoint import demo_model_path

ROOT = Path(__file__).resolve().parent.parent
ASKED = ("--prompt", "The capital of France is", "--max-tokens", "1", "--json")


def install(folder: Path) -> Path:
    """Make the environment; returns its `bin`."""
    venv.create(folder / "venv", with_pip=True)
    binaries = folder / "venv" / "bin"
    broken = {"CC": "/bin/false", "CXX": "/bin/false"}
    environment = {k: v for k, v in os.environ.items() if k != "ANYSHARD_NATIVE_REQUIRED"}
    pip = [str(binaries / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    pinned = ["--constraint", str(ROOT / "constraints.txt")]
    apart = f"--config-settings=build-dir={folder / 'build'}"  # not among the native objects
    subprocess.run([*pip, *pinned, apart, str(ROOT)], env=environment | broken, check=True)
    return binaries


def generate(command: Path, *flags: str) -> dict[str, Any]:
    """What `anyshard generate --json` says. `command`: which one."""
    done = subprocess.run(
        [str(command), "generate", *flags, *ASKED, "--no-cache"],
        stdout=subprocess.PIPE,
        check=True,
        cwd="/",
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> int:
    start = time.monotonic()
    model = str(demo_model_path())
    native = generate(Path(sys.executable).with_name("anyshard"), model)
    with tempfile.TemporaryDirectory() as scratch:
        pure = install(Path(scratch)) / "anyshard"
        installed = time.monotonic()
        answer = generate(pure, model, "-tp", "2", "--chunk", "8")
    bodies = [each["layout"]["kernels"] for each in (native, answer)]
    digests = [each["logits_sha256"] for each in (native, answer)]
    print(
        f"kernels {bodies[0]} and {bodies[1]}: logits_sha256 {digests[0][:16]} and "
        f"{digests[1][:16]} (install {installed - start:.0f} s, answer "
        f"{time.monotonic() - installed:.0f} s)"
    )
    if bodies[1] != "reference" or bodies[0] == "reference":
        print("the two installations should differ in their kernels", file=sys.stderr)
        return 1
    return 0 if digests[0] == digests[1] else 4


if __name__ == "__main__":
    sys.exit(main())
