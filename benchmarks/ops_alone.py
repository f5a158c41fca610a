"""What benchmarks of single ops share: kernels, memory read beside them, how they end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import hf

from anyshard.bench.bandwidth import open_probe
from anyshard.ops import load_kernels

__all__ = ["OpsAlone"]


class OpsAlone:
    """One run of such a script: flags --threads, --rounds and --json; figures, and how they end."""

    def __init__(self, script: str, doc: str | None, *, rounds: int) -> None:
        parser = hf.flags(doc, rounds=rounds)
        parser.add_argument("--threads", type=int, default=1)
        self._script, self._asked, self._load = script, parser.parse_args(), os.getloadavg()[0]
        self.threads: int = self._asked.threads
        self.kernels = load_kernels("auto", threads=self.threads, spin=True)
        self._probe = open_probe()

    def measure(self, run: Callable[[], dict[str, float]]) -> dict[str, list[float]]:
        """Of each figure of `run` all rounds but a first, and memory in GB/s, read after each."""
        found: dict[str, list[float]] = {}
        for number in range(self._asked.rounds + 1):
            rates = run()
            if self._probe is not None:
                rates["memory"] = self._probe.rate(self.threads) / 1e9
            for name, rate in rates.items() if number else ():
                found.setdefault(name, []).append(rate)
        return found

    def end(self, table: Sequence[str], spreads: dict[str, Any]) -> None:
        """Print the table, when and on which machine; with --json, keep the spreads."""
        where = hf.machine([], self._load) | {"body": self.kernels.body}
        command = f"python benchmarks/{self._script} --threads {self.threads}"
        print(*table, "", sep="\n")
        print(hf.measured(where, rounds=self._asked.rounds, command=command))
        if self._asked.json:
            found = {"machine": where, "rates": spreads}
            self._asked.json.write_text(json.dumps(found, indent=1) + "\n")
