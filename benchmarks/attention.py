"""Attention alone at 2,048, 8,192 and 32,768 positions: decode beside memory, prefill in GFLOP/s.

    python benchmarks/attention.py [--threads 1] [--rounds 5] [--json FILE]

Heads of SmolLM2-135M (9 query, 3 KV, 64 dims) and of Qwen2-0.5B (14, 2). Decode: one row, over as
many layers' pages as hold 200 MB, so that each page comes from memory. Prefill: the last 256 rows
of a prompt of that length. A round runs every case once; memory is read beside it.
"""

from __future__ import annotations

import time
from typing import Any, Final

import hf
import numpy as np
from ops_alone import OpsAlone

from anyshard.ops.kv_pages import page_shape

SHAPES: Final = {"9/3 heads": (9, 3), "14/2 heads": (14, 2)}
POSITIONS: Final = (2048, 8192, 32768)
CHUNK: Final = 256
DIMS: Final = 64
WALKED: Final = 200e6  # bytes of KV: past every cache


class Case:
    """Attention ops over pages that are full."""

    def __init__(self, kernels: Any, heads: int, kv_heads: int, positions: int, kv: Any) -> None:
        blocks, rng = positions // 32, np.random.default_rng(0)
        shapes = [(kv_heads, *page_shape(kv, DIMS, keys=keys)) for keys in (True, False)]
        dtype = np.int8 if kv == "int8" else np.float32
        of_layer = sum(blocks * int(np.prod(shape)) for shape in shapes) * np.dtype(dtype).itemsize
        layers = int(WALKED / of_layer) + 1
        self.bytes, self.flop = layers * of_layer, 4.0 * heads * DIMS * CHUNK * positions
        caches = []
        for shape in shapes:
            page = rng.integers(-100, 100, shape).astype(dtype)
            if kv == "int8":
                page[:, DIMS:].view(np.float16)[:] = 0.01
            else:
                page *= np.float32(0.01)
            caches.append(np.broadcast_to(page, (layers, blocks, *shape)).copy())
        fixed = {
            "page_table": np.arange(blocks, dtype=np.int32)[None],
            "row_slot": np.zeros(CHUNK, np.int32),
            "positions": np.arange(positions - CHUNK, positions, dtype=np.int32),
            "head_dim": DIMS,
            "kv_head_of": (np.arange(heads) // (heads // kv_heads)).astype(np.int32),
            "out": np.zeros((CHUNK, heads * DIMS), np.float32),
            "row_fault": np.zeros(CHUNK, np.int32),
            "fault_code": 1,
        }
        q = rng.standard_normal((CHUNK, heads * DIMS), np.float32) * np.float32(0.2)
        last = fixed | {"positions": np.full(CHUNK, positions - 1, np.int32)}
        attention = kernels.module.Attention
        self.decode_ops = [
            attention(kernels.pool, q=q, k_cache=k, v_cache=v, **last)
            for k, v in zip(*caches, strict=True)
        ]
        self.prefill_op = attention(
            kernels.pool, q=q, k_cache=caches[0][0], v_cache=caches[1][0], **fixed
        )

    def rates(self) -> dict[str, float]:
        """Both, once."""
        return {"decode": self.decode(), "prefill": self.prefill()}

    def decode(self) -> float:
        """GB/s."""
        start = time.perf_counter()
        for op in self.decode_ops:
            op.run(1)
        return self.bytes / (time.perf_counter() - start) / 1e9

    def prefill(self) -> float:
        """GFLOP/s."""
        start = time.perf_counter()
        self.prefill_op.run(CHUNK)
        return self.flop / (time.perf_counter() - start) / 1e9


def main() -> None:
    alone = OpsAlone("attention.py", __doc__, rounds=5)
    spreads: dict[str, dict[str, Any]] = {}
    for shape, (heads, kv_heads) in SHAPES.items():
        for positions in POSITIONS:
            for kv in ("f32", "int8"):
                case = Case(alone.kernels, heads, kv_heads, positions, kv)
                rates = alone.measure(case.rates)
                spreads[f"{shape}, {positions} positions, KV {kv}"] = {
                    name: hf.spread(rounds) for name, rounds in rates.items()
                }
    table = [
        f"| {alone.threads} threads | decode, GB/s | memory, GB/s | prefill, GFLOP/s |",
        "| --- | --- | --- | --- |",
    ]
    for name, kinds in spreads.items():
        shown = (
            hf.shown(kinds[kind], ".1f") if kind in kinds else "unknown"
            for kind in ("decode", "memory", "prefill")
        )
        table.append(f"| {name} | {' | '.join(shown)} |")
    alone.end(table, spreads)


if __name__ == "__main__":
    main()
