"""What an int8 row between stages costs, and how slow a link must be for it to pay.

A row is encoded by the last op of a stage (which rounds it in place and writes its bytes) and
decoded by the next stage. It saves bytes, and so time on a link of a given rate; the latency of a
link is the same either way, and so is the header of a hop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from anyshard.ops import Kernels
from anyshard.ops.wire import wire_row_bytes

__all__ = ["LINKS", "MOST_INSIDE", "LinkRate", "WireResult", "measure_wire"]

# Calls of a sample take at least that long: far less than a time slice of the system, so that on a
# busy machine few samples hold other work.
SAMPLE_S: Final = 0.0002
_MOST_CALLS: Final = 1 << 14
MOST_INSIDE: Final = 6  # boundaries that are not cut, of the seven that a deep model has


@dataclass(frozen=True)
class LinkRate:
    """A link by name and rate."""

    name: str
    bits_s: float


LINKS: Final = (
    LinkRate("4 Mbit/s", 4e6),
    LinkRate("100 Mbit/s", 1e8),
    LinkRate("1 Gbit/s", 1e9),
    LinkRate("10 Gbit/s", 1e10),
)


@dataclass(frozen=True, kw_only=True)
class WireResult:
    """One width and number of rows; ns of a row, the median of its samples.

    round_ns: of a boundary inside a stage, which writes no bytes. Held by: test_bench_wire.py.
    """

    hidden: int
    rows: int
    threads: int
    round_ns: float
    encode_ns: float
    decode_ns: float
    samples_encode_ns: tuple[float, ...]
    samples_decode_ns: tuple[float, ...]

    @property
    def raw_bytes(self) -> int:
        """Of a row in float32."""
        return wire_row_bytes("none", self.hidden)

    @property
    def int8_bytes(self) -> int:
        """Of a row in int8."""
        return wire_row_bytes("int8", self.hidden)

    @property
    def cost_ns(self) -> float:
        """Of encoding and decoding a row."""
        return self.encode_ns + self.decode_ns

    @property
    def pays_below_bits_s(self) -> float:
        """The rate at which the bytes saved take as long as encoding and decoding."""
        return 8e9 * (self.raw_bytes - self.int8_bytes) / self.cost_ns

    @property
    def pays_below_alone_bits_s(self) -> float:
        """The same with all that the profile does where a single boundary is cut: it also rounds at
        the MOST_INSIDE others."""
        cost_ns = self.cost_ns + MOST_INSIDE * self.round_ns
        return 8e9 * (self.raw_bytes - self.int8_bytes) / cost_ns

    def gain_ns(self, link: LinkRate) -> float:
        """What a row gains on a link; below 0 it loses."""
        return 8e9 * (self.raw_bytes - self.int8_bytes) / link.bits_s - self.cost_ns


def measure_wire(
    kernels: Kernels,
    *,
    hidden: int,
    rows: Sequence[int],
    threads: int,
    repetitions: int,
    on_step: Callable[[], None] = lambda: None,
) -> list[WireResult]:
    """One result for each number of rows, of a residual of `hidden` floats; after a warm-up."""
    most = max(rows)
    x = np.random.default_rng(hidden).standard_normal((most, hidden)).astype(np.float32)
    wire = np.zeros((most, wire_row_bytes("int8", hidden)), np.uint8)
    module, pool = kernels.module, kernels.pool
    calls = (
        module.RoundWire(pool, x.copy()).run,
        module.RoundWire(pool, x, wire).run,
        module.DecodeWire(pool, wire, np.zeros_like(x)).run,
    )
    found = []
    for count in rows:
        sizes = [_calls_of(run, count) for run in calls]
        samples: list[tuple[float, ...]] = []
        for _ in range(repetitions):
            each = zip(calls, sizes, strict=True)
            samples.append(tuple(_seconds(run, count, size) * 1e9 / count for run, size in each))
            on_step()
        rounds, encodes, decodes = zip(*samples, strict=True)
        found.append(
            WireResult(
                hidden=hidden,
                rows=count,
                threads=threads,
                round_ns=median(rounds),
                encode_ns=median(encodes),
                decode_ns=median(decodes),
                samples_encode_ns=encodes,
                samples_decode_ns=decodes,
            )
        )
    return found


def _calls_of(run: Callable[[int], None], rows: int) -> int:
    """How many calls make a sample; warms up."""
    calls = 1
    while _seconds(run, rows, calls) * calls < SAMPLE_S and calls < _MOST_CALLS:
        calls *= 2
    return calls


def _seconds(run: Callable[[int], None], rows: int, calls: int) -> float:
    """Of one call."""
    start = time.perf_counter()
    for _ in range(calls):
        run(rows)
    return (time.perf_counter() - start) / calls
