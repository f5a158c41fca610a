"""How fast one linear reads its weights, by storage, inputs and rows: GB/s out of memory.

    python benchmarks/linears.py [--threads 1] [--rounds 7] [--json FILE]

`RowLinear` is walked over as many matrices as hold 400 MB, so that each comes from memory; a round
runs every kind once. Beside them stands what `bench` calls memory: 256 MiB read as one stream and
as eight. The figures behind the tiles of `_native/linear.h` and `int8.h`.
"""

from __future__ import annotations

import time
from typing import Any, Final

import hf
import numpy as np
from ops_alone import OpsAlone

from anyshard.config import INT8_LEAF, LEAF
from anyshard.layout import Tree
from anyshard.ops.storage import Q8_BYTES, Q8_OUTPUTS, stored_bytes

#: element, a small value of it as stored, most inputs of a leaf
TYPES: Final[dict[Any, tuple[Any, Any, int]]] = {
    "float32": (np.float32, 0.01, LEAF),
    "float16": (np.float16, 0.01, LEAF),
    "bfloat16": (np.uint16, 0x3C24, LEAF),
    "int8": (np.int8, 33, INT8_LEAF),  # the scales too: 0x2121
}
OUTPUTS: Final = 1536
INPUTS: Final = (576, 1536)
ROWS: Final = (1, 2, 4)
WALKED: Final = 400e6  # bytes: past every cache


class Walk:
    """One storage and K, bound to as many matrices as are walked."""

    def __init__(self, kernels: Any, storage: Any, inputs: int) -> None:
        dtype, value, leaf = TYPES[storage]
        self.name = f"{storage}, K {inputs}"
        size = stored_bytes(storage, OUTPUTS * inputs)
        count = int(WALKED / size) + 1
        self.bytes = count * size
        lengths = tuple(min(leaf, inputs - start) for start in range(0, inputs, leaf))
        merges = Tree(lengths, (len(lengths),)).merges((0, len(lengths)))
        shape = (OUTPUTS // 8, inputs, 8)
        if storage == "int8":
            shape = (OUTPUTS // Q8_OUTPUTS, len(lengths), Q8_BYTES)
        weights = np.full((count, *shape), value, dtype)  # one array: huge pages
        a = np.random.default_rng(0).standard_normal((max(ROWS), inputs), np.float32)
        out = np.zeros(max(ROWS) * OUTPUTS, np.float32)
        sums = np.array(lengths, np.int32), np.array(merges, np.int32)
        self.ops = [
            kernels.module.RowLinear(kernels.pool, a, each, OUTPUTS, *sums, out) for each in weights
        ]

    def rate(self, rows: int) -> float:
        """GB/s of weights in one walk."""
        start = time.perf_counter()
        for op in self.ops:
            op.run(rows)
        return self.bytes / (time.perf_counter() - start) / 1e9


def main() -> None:
    alone = OpsAlone("linears.py", __doc__, rounds=7)
    found: dict[str, list[float]] = {}
    # one after the other, since all of them would not fit in memory: memory is read beside each
    for storage in TYPES:
        for inputs in INPUTS:
            walk = Walk(alone.kernels, storage, inputs)
            rates = alone.measure(lambda walk=walk: {str(rows): walk.rate(rows) for rows in ROWS})
            for name, rounds in rates.items():
                row = name if name == "memory" else f"{walk.name}, {name} rows"
                found.setdefault(row, []).extend(rounds)
    spreads = {name: hf.spread(rates) for name, rates in found.items()}
    rows = [f"| {name} | {hf.shown(spread, '.1f')} |" for name, spread in spreads.items()]
    head = [f"| GB/s of weights, {alone.threads} threads | |", "| --- | --- |"]
    alone.end([*head, *rows], spreads)


if __name__ == "__main__":
    main()
