"""What memory gives to reading: the ceiling that decoding is measured against.

A probe owns memory far larger than the caches and reads all of it, as one stream a thread and as
several at a time, as kernels read weights, and counts the faster: which that is depends on machine
and minute, and a kernel should not seem to beat the memory. Knows nothing of models.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from anyshard.host import free_memory, read_text
from anyshard.ops import load_kernels, native_module

__all__ = ["STREAMS", "ReadProbe", "open_probe", "probe_bytes"]

STREAMS: Final = (1, 8)
_LEAST_BYTES: Final = 256 << 20
_MOST_BYTES: Final = 1 << 30


class ReadProbe:
    """Memory that is read again and again; every number of threads has a pool, made when asked."""

    def __init__(self, num_bytes: int) -> None:
        # written, so that every page is there; the exclusive or of 0 to 4n - 1 is 0
        self._words = np.arange(num_bytes // 32 * 4, dtype=np.uint64)
        self._pools: dict[int, tuple[Any, Any]] = {}

    @property
    def bytes(self) -> int:
        """Read by one pass."""
        return self._words.nbytes

    def rate(self, threads: int) -> float:
        """Bytes/s of a pass on so many threads, the faster one's."""
        if threads not in self._pools:
            kernels = load_kernels("auto", threads=threads, spin=False)
            self._pools[threads] = (kernels.module, kernels.pool)
        module, pool = self._pools[threads]
        seconds = []
        for streams in STREAMS:
            start = time.perf_counter()
            found = module.read_streams(pool, self._words, streams)
            seconds.append(time.perf_counter() - start)
            assert found == 0, "a word was not read"
        return self.bytes / min(seconds)

    def close(self) -> None:
        """End the threads."""
        for _, pool in self._pools.values():
            pool.close()
        self._pools = {}


def probe_bytes(root: Path = Path("/")) -> int:
    """Twice the largest cache that the system tells of, 256 MiB to 1 GiB."""
    folder = root / "sys/devices/system/cpu/cpu0/cache"
    sizes = (read_text(file) for file in folder.glob("index*/size"))
    kib = max((int(size) for text in sizes for size in re.findall(r"^(\d+)K", text)), default=0)
    return min(max(_LEAST_BYTES, 2 * kib << 10), _MOST_BYTES)


def open_probe(num_bytes: int | None = None) -> ReadProbe | None:
    """A probe; None without native kernels, or where it would take over half of the free memory.

    Held by: test_bench.py.
    """
    size, free = num_bytes or probe_bytes(), free_memory()
    if native_module() is None or (free is not None and 2 * size > free):
        return None
    return ReadProbe(size)
