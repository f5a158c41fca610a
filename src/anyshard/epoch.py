"""All sizes of an epoch, fixed before a rank exists: pure functions of options and programs.

Knows nothing of requests, ranks that run, or clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from msgspec.structs import replace

from anyshard.batch import Limits
from anyshard.capture import Capture
from anyshard.comm.base import CommKind, WireSizes
from anyshard.comm.control import ControlSizes
from anyshard.comm.link import LinkSpec
from anyshard.launcher import EpochSizes
from anyshard.layout import Layout
from anyshard.model import Program
from anyshard.ops import Body, KernelChoice
from anyshard.pages import pages_for
from anyshard.schedule import MOST_MICRO_BATCHES, SCHEDULES, Schedule, ScheduleKind
from anyshard.worker import RankPlan, note_bytes, wire_sizes

__all__ = [
    "SPIN_US",
    "EngineOptions",
    "EpochPlan",
    "default_chunk",
    "plan_epoch",
    "rank_threads",
    "schedule_of",
]

SPIN_US: Final = 500


def rank_threads(body: Body, asked: int | None, *, cores: int, ranks: int) -> int:
    """Threads of each of so many ranks that share a host's cores. A reference body has one,
    whatever was asked for."""
    return 1 if body == "reference" else asked or max(1, cores // ranks)


def default_chunk(layout: Layout) -> int:
    """Rows of one prompt in a step: 256, or 64 where there are stages, since a prompt keeps all of
    them busy only as far as its chunks are many (EXPERIMENTS.md)."""
    return 256 if layout.pp == 1 else 64


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How to run, none of which changes a bit: bodies, wires, threads, chunk, sizes.

    threads None: cores divided by local ranks. kv_pages: most pages for keys and values; else what
    max_num_seqs sequences of max_model_len tokens take. deadline_s bounds every wait for a rank.
    schedule, micro_batches: how sequences take turns in a pipeline (`schedule.py`); None: as many
    micro-batches as stages, 30 at most. links: emulated ones, hosts: of each rank
    (`comm.base.WireSizes`). drafts: rows of drafts in a step, at most; windows: frames of one
    sequence that may be under way, all but one of drafts alone.
    prompt_logits: most that the requests in flight ask for together. record: keep digests of what
    every op writes, for `Engine.digests`. trace_events: last events kept of each rank, for
    `Engine.traced`. capture: what ranks copy to be looked at (`capture.py`).
    """

    kernels: KernelChoice = "auto"
    comm: Literal["auto"] | CommKind = "auto"
    threads: int | None = None
    chunk: int = 256
    max_num_seqs: int = 32
    max_model_len: int
    kv_pages: int | None = None
    schedule: ScheduleKind = "continuous"
    micro_batches: int | None = None
    links: tuple[LinkSpec, ...] = ()
    hosts: tuple[int, ...] = ()
    drafts: int = 0
    windows: int = 1
    deadline_s: float = 10.0
    prompt_logits: int = 0
    page_order: tuple[int, ...] | None = None
    poison: bool = False
    record: bool = False
    trace_events: int = 0
    capture: Capture | None = None


def _comm(options: EngineOptions, layout: Layout) -> CommKind:
    """The wire asked for; torch where ranks of one stage are on several hosts."""
    wires = WireSizes(tp=layout.tp, pp=layout.pp, hosts=options.hosts)
    if options.comm == "auto" and wires.has_wide_stage:
        return "torch"
    return "shm" if options.comm == "auto" else options.comm


def schedule_of(
    kind: ScheduleKind, layout: Layout, *, micro_batches: int | None, rows_max: int = 0
) -> Schedule:
    """The schedule of that kind; micro_batches None: as many as stages."""
    many = micro_batches or min(layout.pp, MOST_MICRO_BATCHES)
    return SCHEDULES[kind](layout.pp, many, rows_max=rows_max)


@dataclass(frozen=True)
class EpochPlan:
    """All sizes of an epoch, fixed before a rank exists."""

    ranks: RankPlan
    sizes: EpochSizes
    limits: Limits
    pages: tuple[int, ...] | range
    schedule: Schedule


def plan_epoch(
    programs: list[Program], options: EngineOptions, *, body: Body, threads: int, spin: bool
) -> EpochPlan:
    """Turn options into sizes. Pure."""
    here = programs[0]
    config, profile, layout = here.config, here.profile, here.layout
    slots = options.max_num_seqs
    blocks = pages_for(options.max_model_len, block=profile.kv_block)
    needed = slots * blocks
    most = needed if options.kv_pages is None else min(needed, options.kv_pages)
    pages = options.page_order or range(most)
    rows_max = options.chunk + slots + options.drafts
    schedule = schedule_of(
        options.schedule, layout, micro_batches=options.micro_batches, rows_max=rows_max
    )
    limits = Limits(
        rows_max=rows_max,
        chunk=options.chunk,
        num_slots=slots,
        block=profile.kv_block,
        micro_batches=schedule.micro_batches,
        drafts=options.drafts,
    )
    frames = schedule.in_flight + options.windows  # one more: its digests are yet to be collected
    sampled = min(slots + options.drafts + options.prompt_logits, limits.rows_max)
    ranks = RankPlan(
        heads=layout.heads,
        ffn=layout.ffn,
        vocab=layout.vocab,
        layers=layout.layers,
        kv_shard=layout.kv_shard,
        kernels=body,
        comm=_comm(options, layout),
        threads=threads,
        spin=spin,
        rows_max=limits.rows_max,
        frames=frames,
        voids=options.windows > 1,
        tells_spread=options.drafts > 0,
        sampled_max=sampled,
        num_slots=slots,
        num_pages=len(pages),
        max_model_len=options.max_model_len,
        profile_sha256=profile.sha256(),
        poison=options.poison,
        record=options.record,
        trace=options.trace_events > 0,
        capture=options.capture,
    )
    sizes = EpochSizes(
        wires=replace(wire_sizes(programs, ranks), links=options.links, hosts=options.hosts),
        control=ControlSizes(
            rows_max=limits.rows_max,
            pages_max=len(pages),
            note_bytes=note_bytes(slots),
            logit_rows=sampled,
            vocab=config.vocab,
            frame_slots=frames,
            trace_events=options.trace_events,
            tells_spread=options.drafts > 0,
            digest_columns=max(each.record_columns for each in programs) if options.record else 0,
        ),
        spin_us=SPIN_US if spin else 0,
    )
    return EpochPlan(ranks, sizes, limits, pages, schedule)
