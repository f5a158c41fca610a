"""What each rank did when: its events, the file that holds them, and what they add up to.

An event is a span of one rank's time, of one kind, for one frame. A rank's events do not overlap,
and what none covers is idle: no frame was there. Times are of one clock, the head's
where there are several hosts.
The file is Chrome's trace format, gzipped, which Perfetto opens; `anyshard trace` reads it back.

Knows nothing of ranks that run, or of models.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from anyshard.errors import TraceError
from anyshard.schedule import SCHEDULES, ScheduleKind

__all__ = [
    "EVENT",
    "KINDS",
    "EventKind",
    "Pace",
    "RankTrace",
    "Run",
    "Shares",
    "balanced",
    "bubble",
    "pace",
    "read_trace",
    "shares",
    "span_ns",
    "trace_bytes",
]

#: compute: the layers of a frame, with the exchanges within the stage. head: logits and the draw
#: of tokens. upstream: the message is not sent yet. wire: it is sent, and not yet there. receive,
#: send: it is copied. downstream: the next stage is too far behind to take one. idle: no frame.
EventKind = Literal["compute", "head", "upstream", "wire", "receive", "downstream", "send", "idle"]
KINDS: Final[tuple[EventKind, ...]] = get_args(EventKind)
BUSY: Final[tuple[EventKind, ...]] = ("compute", "head", "receive", "send")
#: A lane of a rank each.
STREAMS: Final[dict[str, tuple[EventKind, ...]]] = {
    "compute": ("compute", "head"),
    "receive": ("receive", "wire"),
    "send": ("send",),
    "wait": ("upstream", "downstream", "idle"),
}
#: An event as a rank writes it: ns of time.monotonic_ns, index of KINDS, bytes of a message.
EVENT: Final = np.dtype(
    [(name, "<u8") for name in ("start", "stop", "kind", "frame", "rows", "bytes")]
)
MOST_BYTES: Final = 1 << 29  # of a file, unpacked
_FORM: Final = "anyshard trace 1"

Events = NDArray[Any]  # EVENT


@dataclass(frozen=True)
class RankTrace:
    """A rank's events in order. lost: earlier ones that its ring had no room for.

    sent, ledger: bytes and messages between stages, counted by the rank and by the ledger.
    """

    rank: int
    stage: int
    events: Events
    lost: int = 0
    sent: tuple[int, int] = (0, 0)
    ledger: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Run:
    """The ranks of an epoch. layers: of each stage; links: emulated ones, in words, and delays_s of
    each; cuts: layers before which a stage may begin, none where that is any; note: what else there
    is to say of it."""

    name: str
    ranks: tuple[RankTrace, ...]
    layers: tuple[int, ...]
    schedule: ScheduleKind = "continuous"
    micro_batches: int = 1
    links: tuple[str, ...] = ()
    delays_s: tuple[float, ...] = ()
    cuts: tuple[int, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Shares:
    """Of a rank's time from the first event of any rank to the last, by what it did; sums to 1."""

    rank: int
    stage: int
    busy: float
    upstream: float
    downstream: float
    wire: float
    idle: float


@dataclass(frozen=True)
class Pace:
    """The stage that sets the pace. Seconds a frame of the same rows: its own, and of all together;
    layers: a cut that is faster by `gain`, the layers it has if none is."""

    stage: int
    stage_s: float
    frame_s: float
    layers: tuple[int, ...]
    gain: float


def span_ns(run: Run) -> tuple[int, int]:
    """From the first thing that a rank did to the last, as far back as the events of all ranks go;
    (0, 0) without any."""
    some = [rank.events[rank.events["kind"] != KINDS.index("idle")] for rank in run.ranks]
    some = [events for events in some if len(events)]
    if not some:
        return 0, 0
    begun = [int(rank.events["start"][0]) for rank in run.ranks if rank.lost and len(rank.events)]
    start = max([min(int(events["start"].min()) for events in some), *begun])
    return start, max(start, *(int(events["stop"].max()) for events in some))


def _total_ns(events: Events, kinds: Sequence[EventKind], start: int, stop: int) -> int:
    """Of those kinds, between start and stop."""
    mine = events[np.isin(events["kind"], [KINDS.index(kind) for kind in kinds])]
    low = np.clip(mine["start"].astype(np.int64), start, stop)
    high = np.clip(mine["stop"].astype(np.int64), start, stop)
    return sum((high - low).tolist())


def shares(run: Run) -> tuple[Shares, ...]:
    """By rank. Held by: test_trace.py."""
    start, stop = span_ns(run)
    whole = max(1, stop - start)
    found = []
    for rank in run.ranks:
        kinds: tuple[tuple[EventKind, ...], ...] = (BUSY, ("upstream",), ("downstream",), ("wire",))
        busy, *waits = (_total_ns(rank.events, kind, start, stop) / whole for kind in kinds)
        idle = 1 - busy - sum(waits)
        found.append(Shares(rank.rank, rank.stage, busy, waits[0], waits[1], waits[2], idle))
    return tuple(found)


def bubble(run: Run) -> float:
    """Share of all ranks' time in which they neither work nor wait for a link."""
    each = shares(run)
    return sum(1 - one.busy - one.wire for one in each) / max(1, len(each))


def pace(run: Run) -> Pace | None:
    """Who sets the pace, by the busy time of frames that all stages ran; None with fewer than two
    stages.

    A cut's time is that of its layers, all as costly as the mean of those measured, the head's in
    the last stage. Held by: test_trace.py.
    """
    stages = len(run.layers)
    if stages < 2:
        return None
    spent = [(0, 0)] * stages  # in layers, in the head; the slowest rank of a stage
    start, stop = span_ns(run)
    ran = [set(rank.events["frame"][rank.events["kind"] == 0].tolist()) for rank in run.ranks]
    common = sorted(set.intersection(*ran))
    frames = max(1, len(common))
    for rank in run.ranks:
        events = rank.events[np.isin(rank.events["frame"], common)]
        mine = (
            _total_ns(events, ("compute",), start, stop),
            _total_ns(events, ("head",), start, stop),
        )
        spent[rank.stage] = max(spent[rank.stage], mine, key=lambda pair: pair[0] + pair[1])
    total, head = sum(layers for layers, _ in spent), spent[-1][1]
    times = [layers + head_ for layers, head_ in spent]
    slowest = times.index(max(times))
    layer = total / max(1, sum(run.layers))
    best = balanced(
        sum(run.layers), stages, head=head / layer if layer else 0.0, cuts=run.cuts or None
    )
    fastest = _slowest_s(best, layer, head)
    gain = _slowest_s(run.layers, layer, head) / fastest if fastest else 1.0
    if best == run.layers or gain < 1.02:  # the noise of a run
        best, gain = run.layers, 1.0
    return Pace(slowest, times[slowest] / frames * 1e-9, sum(times) / frames * 1e-9, best, gain)


def _slowest_s(layers: Sequence[int], layer: float, head: float) -> float:
    return max(count * layer + (head if last else 0) for count, last in _with_last(layers))


def _with_last(layers: Sequence[int]) -> list[tuple[int, bool]]:
    return [(count, index == len(layers) - 1) for index, count in enumerate(layers)]


def balanced(
    num_layers: int, stages: int, *, head: float, cuts: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Layers of each stage that make the slowest one fastest, the head as heavy as `head` layers.

    cuts: layers before which a stage may begin, all if None. Stages take as much as the slowest
    allows from the left on. Raises: ValueError where there are fewer cuts than stages need.
    """
    allowed = [*range(1, num_layers)] if cuts is None else sorted(set(cuts))
    if len(allowed) < stages - 1:
        raise ValueError(f"{stages} stages, and {len(allowed)} places to cut")
    ends = [*allowed, num_layers]
    # least[s][i]: the slowest of s stages that hold the layers before ends[i]
    least = [float(end) for end in ends[:-1]] + [float("inf")]
    choices: list[list[int]] = []
    for stage in range(2, stages + 1):
        last = stage == stages
        row, chosen = [float("inf")] * len(ends), [0] * len(ends)
        for i, end in enumerate(ends):
            if last != (i == len(ends) - 1):
                continue
            for j in range(i):
                time = max(least[j], end - ends[j] + (head if last else 0.0))
                if time < row[i] or (time == row[i] and ends[j] > ends[chosen[i]]):
                    row[i], chosen[i] = time, j
        least = row
        choices.append(chosen)
    if stages == 1:
        return (num_layers,)
    places = [len(ends) - 1]
    for chosen in reversed(choices):
        places.append(chosen[places[-1]])
    bounds = [0, *(ends[place] for place in reversed(places))]
    return tuple(high - low for low, high in pairwise(bounds))


# --- the file -------------------------------------------------------------------------------------


def trace_bytes(runs: Sequence[Run]) -> bytes:
    """The content of a file that `read_trace` reads and Perfetto opens."""
    events: list[dict[str, Any]] = []
    about = []
    for number, run in enumerate(runs):
        zero = min((int(r.events["start"].min()) for r in run.ranks if len(r.events)), default=0)
        about.append(_about(run))
        for rank in run.ranks:
            process = number * 1000 + rank.rank
            name = f"{run.name}: rank {rank.rank}, stage {rank.stage}"
            events.append(_named("process_name", process, 0, name))
            for stream, (lane, kinds) in enumerate(STREAMS.items()):
                events.append(_named("thread_name", process, stream, lane))
                events += _spans(rank.events, kinds, process, stream, zero)
    whole = {"otherData": {"form": _FORM, "runs": about}, "traceEvents": events}
    packed = zlib.compressobj(6, zlib.DEFLATED, 31)  # as gzip, without the time of day
    content = json.dumps(whole, separators=(",", ":")).encode()
    return packed.compress(content) + packed.flush()


def _about(run: Run) -> dict[str, Any]:
    ranks = [
        {
            "rank": rank.rank,
            "stage": rank.stage,
            "lost": rank.lost,
            "sent": list(rank.sent),
            "ledger": list(rank.ledger),
        }
        for rank in run.ranks
    ]
    return {
        "name": run.name,
        "layers": list(run.layers),
        "schedule": run.schedule,
        "micro_batches": run.micro_batches,
        "links": list(run.links),
        "note": run.note,
        "delays_s": list(run.delays_s),
        "cuts": list(run.cuts),
        "ranks": ranks,
    }


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _spans(
    events: Events, kinds: Sequence[EventKind], process: int, stream: int, zero: int
) -> list[dict[str, Any]]:
    mine = events[np.isin(events["kind"], [KINDS.index(kind) for kind in kinds])]
    return [
        {
            "ph": "X",
            "name": KINDS[kind],
            "pid": process,
            "tid": stream,
            "ts": (start - zero) / 1000,
            "dur": (stop - start) / 1000,
            "args": {"frame": frame, "rows": rows, "bytes": num_bytes},
        }
        for start, stop, kind, frame, rows, num_bytes in mine.tolist()
    ]


def read_trace(path: Path) -> tuple[Run, ...]:
    """The runs of a file of `trace_bytes`. Raises: TraceError saying what is wrong."""
    whole = _unpacked(path)
    try:
        if whole["otherData"]["form"] != _FORM:
            raise TraceError(f"{path}: it is of the form {whole['otherData']['form']!r}")
        by_process: dict[int, list[tuple[int, ...]]] = {}
        for event in whole["traceEvents"]:
            if event["ph"] == "X":
                by_process.setdefault(event["pid"], []).append(_event_of(event))
        return tuple(
            _run_of(number, about, by_process)
            for number, about in enumerate(whole["otherData"]["runs"])
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TraceError(
            f"{path}: it is no trace of anyshard ({type(error).__name__}: {error})"
        ) from None


def _unpacked(path: Path) -> Any:
    try:
        packed = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from None
    try:
        unpacker = zlib.decompressobj(31)
        content = unpacker.decompress(packed, MOST_BYTES)
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise ValueError("it is cut short, or larger than 512 MiB")
        return json.loads(content)
    except (zlib.error, ValueError, RecursionError) as error:
        raise TraceError(f"{path}: it is no gzipped JSON: {error}") from None


def _event_of(event: Mapping[str, Any]) -> tuple[int, ...]:
    arguments, start = event["args"], round(event["ts"] * 1000)
    found = (
        start,
        start + round(event["dur"] * 1000),
        KINDS.index(event["name"]),
        *(int(arguments[name]) for name in ("frame", "rows", "bytes")),
    )
    if min(found) < 0 or max(found) >= 1 << 62:
        raise ValueError(f"{found} is out of range")
    return found


def _run_of(
    number: int, about: Mapping[str, Any], by_process: Mapping[int, list[tuple[int, ...]]]
) -> Run:
    ranks = []
    for each in about["ranks"]:
        events = sorted(by_process.get(number * 1000 + each["rank"], []))
        ranks.append(
            RankTrace(
                int(each["rank"]),
                int(each["stage"]),
                np.array(events, EVENT),
                int(each["lost"]),
                (int(each["sent"][0]), int(each["sent"][1])),
                (int(each["ledger"][0]), int(each["ledger"][1])),
            )
        )
    layers = tuple(int(count) for count in about["layers"])
    cuts = tuple(int(place) for place in about["cuts"])
    if cuts and (len(set(cuts)) < len(layers) - 1 or not 0 < min(cuts) <= max(cuts) < sum(layers)):
        raise ValueError("stages cannot be cut so")
    if not ranks or {rank.stage for rank in ranks} != set(range(len(layers))):
        raise ValueError("a rank is of no stage, or a stage has none")
    if min(layers) < 1:
        raise ValueError("a stage has no layer")
    if about["schedule"] not in SCHEDULES or not 1 <= about["micro_batches"] <= 1 << 16:
        raise ValueError("the schedule is none")
    return Run(
        str(about["name"]),
        tuple(ranks),
        layers,
        about["schedule"],
        int(about["micro_batches"]),
        tuple(map(str, about["links"])),
        tuple(map(float, about["delays_s"])),
        cuts,
        str(about.get("note", "")),
    )
