"""The speed of an engine: prompts read (pp) and tokens generated (tg), each repeated.

While tokens are generated the clock stops now and then and memory is read, so that whatever slows
the machine slows both: the share of the memory's speed is a ratio within one repetition. Times are
the front's own clock around all that a request takes. Knows engines; nothing of flags.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import harmonic_mean, median, stdev
from typing import Final, Literal

from anyshard.bench.bandwidth import ReadProbe
from anyshard.engine import Engine, Event
from anyshard.errors import AnyshardError
from anyshard.ledger import step_kv_bytes
from anyshard.request import Request
from anyshard.verify.prompt import hashed_tokens

__all__ = ["SLICE_S", "Row", "SpeedTest", "Spread", "measure", "spread"]

SLICE_S: Final = 0.2  # of generating, between two readings of memory


@dataclass(frozen=True)
class SpeedTest:
    """pp: read a prompt of so many tokens; tg: generate so many after a prompt of one token."""

    kind: Literal["pp", "tg"]
    tokens: int

    @property
    def name(self) -> str:
        """`pp256`, `tg64`."""
        return f"{self.kind}{self.tokens}"

    @property
    def sequence_tokens(self) -> int:
        """That the sequence holds in the end; the last is drawn and not read."""
        return self.tokens + (1 if self.kind == "pp" else 2)

    def request(self, vocab: int) -> Request:
        """Token ids that only integers decide; no token ends it."""
        is_pp = self.kind == "pp"
        prompt = hashed_tokens(self.tokens if is_pp else 1, vocab, seed=0)
        return Request(prompt=prompt, max_tokens=1 if is_pp else self.tokens + 1)


@dataclass(frozen=True)
class Spread:
    """Median, sample standard deviation (0 of one sample), least and most."""

    median: float
    sd: float
    least: float
    most: float


def spread(samples: tuple[float, ...]) -> Spread:
    """Of at least one sample."""
    sd = stdev(samples) if len(samples) > 1 else 0.0
    return Spread(median(samples), sd, min(samples), max(samples))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One test on one layout.

    threads: per rank. rates: tokens/s of each repetition. reads: bytes/s that memory gave during
    each, to as many threads as compute at once; empty of pp, and without a probe.
    weight_bytes, kv_bytes: read per token, over all ranks; KV of tg only, mean over its tokens.
    """

    test: SpeedTest
    layout: str
    tp: int
    pp: int
    threads: int
    comm: str
    kernels: str
    profile: str
    rates: tuple[float, ...]
    reads: tuple[float, ...]
    weight_bytes: float
    kv_bytes: float

    @property
    def speed(self) -> Spread:
        """Of the rates."""
        return spread(self.rates)

    @property
    def bytes_per_token(self) -> float:
        """Weights and KV."""
        return self.weight_bytes + self.kv_bytes

    @property
    def share(self) -> float | None:
        """Bytes read per second over what memory gives, median of the repetitions; tg only."""
        if not self.reads:
            return None
        pairs = zip(self.rates, self.reads, strict=True)
        return median(rate * self.bytes_per_token / read for rate, read in pairs)


def measure(
    engine: Engine,
    test: SpeedTest,
    *,
    layout: str,
    repetitions: int,
    probe: ReadProbe | None,
    on_step: Callable[[], None],
) -> Row:
    """Run a test once to warm up and `repetitions` times for its figures.

    on_step hears of every run. Raises: PeerLost; AnyshardError if a value left the range of
    float32. Held by: test_bench.py.
    """
    cut = engine.layout
    read: Callable[[], float] | None = None
    if probe is not None and test.kind == "tg":
        readers = min(cut.tp * engine.threads, engine.cores)  # one stage computes, the others wait
        read = partial(probe.rate, readers)
    rates: list[float] = []
    reads: list[float] = []
    for repetition in range(repetitions + 1):
        seconds, given = _run(engine, test, read)
        on_step()
        if repetition:
            rates.append(test.tokens / seconds)
            reads += [harmonic_mean(given)] if given else []
    weights = sum(view.weight_bytes for view in engine.control.statuses())
    return Row(
        test=test,
        layout=layout,
        tp=cut.tp,
        pp=cut.pp,
        threads=engine.threads,
        comm="solo" if cut.world == 1 else engine.comm,
        kernels=engine.body,
        profile=engine.profile.name,
        rates=tuple(rates),
        reads=tuple(reads),
        weight_bytes=weights * _steps(engine, test) / test.tokens,
        kv_bytes=_kv_bytes(engine, test),
    )


def _run(
    engine: Engine, test: SpeedTest, read: Callable[[], float] | None
) -> tuple[float, list[float]]:
    """Seconds to the first token (pp), or from the first to the last (tg); what `read` gave."""
    clock = time.perf_counter
    start, spent = clock(), 0.0
    reads: list[float] = []
    engine.submit(test.request(engine.config.vocab))
    events = _sound(engine.run())
    if test.kind == "tg":
        next(events)
        reads += [read()] if read is not None else []
        start = clock()
    for _ in events:
        if read is not None and clock() - start > SLICE_S:
            spent += clock() - start
            reads.append(read())
            start = clock()
    spent += clock() - start
    reads += [read()] if read is not None else []
    return spent, reads


def _sound(events: Iterator[Event]) -> Iterator[Event]:
    for event in events:
        if event.fault is not None:
            raise AnyshardError(
                f"the random prompt failed: a value left the range of float32 in {event.fault}"
            )
        yield event


def _steps(engine: Engine, test: SpeedTest) -> int:
    """Steps of a run, each of which reads the weights once."""
    return test.tokens if test.kind == "tg" else -(-test.tokens // engine.limits.chunk)


def _kv_bytes(engine: Engine, test: SpeedTest) -> float:
    """KV that one token reads over all ranks, mean: token i, from 1 on, sees i + 1 keys."""
    if test.kind == "pp":
        return 0.0
    keys = sum(i + 1 for i in range(1, test.tokens + 1))
    return sum(step_kv_bytes(each, keys=keys) for each in engine.programs) / test.tokens
