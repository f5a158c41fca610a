"""What the verbs that run a model share: the opened checkpoint, the rank group, the engine.

What can be refused is refused before the launcher packs a weight. Knows flags and the engine's
front half; nothing of prompts or answers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from anyshard.cli.balance import EPOCH, balanced_layout
from anyshard.cli.drafting import (
    DraftModel,
    draft_group,
    open_draft_model,
    speculator_of,
    wait_draft_loaded,
)
from anyshard.cli.flags import NO_DRAFTS, ONE_HOST, HostFlags, SpeculationFlags, SplitFlags
from anyshard.cli.hosts import Share, closed, head_group, refuse_over_hosts
from anyshard.cli.load_gate import LoadGate, at_once
from anyshard.cli.memory import (
    DEFAULT_SEQUENCES,
    MemoryNeed,
    kv_bytes,
    memory_need,
    pages_in,
    tensors_of,
)
from anyshard.cli.screen import Bar
from anyshard.errors import LayoutError, OptionError
from anyshard.host import read_memory, size_text

if TYPE_CHECKING:
    from anyshard.checkpoint import Checkpoint
    from anyshard.checkpoint.cache import ImageCache
    from anyshard.config import ModelConfig, Profile
    from anyshard.engine import Engine
    from anyshard.launcher import Load, Progress, RankGroup, RankMain
    from anyshard.layout import Layout
    from anyshard.loading import LoadReport
    from anyshard.model import Program
    from anyshard.tokenizer import Tokenizer

__all__ = [
    "Loading",
    "Opened",
    "context_limit",
    "image_cache",
    "layout_of",
    "local_model",
    "open_model",
    "rank_group",
    "start_engine",
    "wait_loaded",
]


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model that is opened and cut, of which nothing is loaded.

    `limit` is the most tokens that one of the `num_seqs` sequences in flight may hold; it
    `is_final` unless the prompts may turn out to need less. `free`: bytes of memory before anything
    is loaded, None where the system does not say. `record`: runs are recorded, weights hashed.
    `host_flags`, `hosts`: of each rank, where there are several; memory is this one's, the head's.
    """

    flags: SplitFlags
    checkpoint: Checkpoint
    profile: Profile
    layout: Layout
    programs: tuple[Program, ...]
    num_seqs: int
    limit: int
    is_final: bool
    free: int | None
    record: bool = False
    host_flags: HostFlags = ONE_HOST
    hosts: tuple[int, ...] = ()
    speculation: SpeculationFlags = NO_DRAFTS
    draft: DraftModel | None = None

    @property
    def tensors(self) -> frozenset[str] | None:
        """Names of what the ranks of this host read; None where all ranks are here."""
        if not self.hosts:
            return None
        return tensors_of([each for each in self.programs if self.hosts[each.rank] == 0])

    @property
    def config(self) -> ModelConfig:
        """Of the checkpoint."""
        return self.checkpoint.config

    @property
    def chunk(self) -> int:
        """Most rows of one prompt in a step: where stages take turns, few, to fill them."""
        from anyshard.epoch import default_chunk

        return self.flags.chunk or default_chunk(self.layout)

    @property
    def kv_pages(self) -> int | None:
        """Most pages of KV that the ranks allocate, a draft model's rank as many of its own; None
        without --kv-memory. Raises: LayoutError if that holds not one.
        """
        memory = self.flags.kv_memory_bytes
        parts = (*self.programs, *(() if self.draft is None else (self.draft.part,)))
        return None if memory is None else pages_in(parts, memory)

    def fits(self, tokens: int) -> bool:
        """Whether sequences of so many tokens have room."""
        return self._has_room(tokens) or self.for_tokens(tokens)._has_room(tokens)

    def admit(self, tokens: int) -> None:
        """Refuse sequences of so many tokens if they have no room: in the memory that is free, and
        in --kv-memory. Raises: LayoutError with what is short."""
        taken = self.for_tokens(tokens)
        if taken.flags.kv_memory_bytes is not None and tokens > taken.kv_tokens:
            raise LayoutError(taken._why_no_pages(tokens))
        if self.free is None:
            return
        need = taken.need(tokens)
        if need.total > self.free:
            replace(need, savers=tuple(taken._savers(tokens))).refuse_over(self.free)

    def need(self, tokens: int) -> MemoryNeed:
        """What sequences of so many tokens take of this host."""
        from anyshard.speculate.ngram import TOKEN_BYTES

        found = memory_need(
            self.checkpoint,
            self.programs,
            tokens=tokens,
            num_seqs=self.num_seqs,
            chunk=self.chunk,
            kv_pages=self.kv_pages,
            micro_batches=self.flags.micro_batches,
            comm=self.flags.comm,
            record=self.record,
            hosts=self.hosts,
            drafts=self.speculation.drafts,
            windows=self.windows,
        )
        if self.draft is None:
            tables = self.num_seqs * tokens * TOKEN_BYTES if self.speculation.drafts else 0
            return replace(found, buffers=found.buffers + tables)
        pages, num_seqs = self.kv_pages, self.num_seqs
        return found.plus(self.draft.need(tokens=tokens, num_seqs=num_seqs, pages=pages))

    @property
    def windows(self) -> int:
        """Frames of one request that may be under way. Raises: OptionError."""
        from anyshard.epoch import schedule_of

        flags = self.flags
        schedule = schedule_of(flags.schedule, self.layout, micro_batches=flags.micro_batches)
        return self.speculation.windows(schedule)

    def _savers(self, tokens: int) -> Iterator[tuple[str, MemoryNeed]]:
        """Flags of KV that were not given, and what is needed with each."""
        if self.profile.kv == "f32":
            int8 = self._cut(self.layout, replace(self.profile, kv="int8"))
            yield "--kv-cache-dtype int8", int8.need(tokens)
        if self.flags.kv_shard == "heads" and self._may_split_sequence:
            sequence = self._cut(replace(self.layout, kv_shard="sequence"), self.profile)
            yield "--kv-shard sequence", sequence.need(tokens)

    def _why_no_pages(self, tokens: int) -> str:
        """That --kv-memory has too few pages, and why the other way to split KV does not help."""
        text = (
            f"{tokens} tokens have no room: --kv-memory {self.flags.kv_memory} holds "
            f"{self.kv_tokens} on these ranks"
        )
        other = self._by_sequence()
        if other is None or self.free is None or tokens > other.kv_tokens:
            return f"{text}; raise --kv-memory, or lower --max-tokens or --max-model-len"
        needed, free = size_text(other.need(tokens).total), size_text(self.free)
        return (
            f"{text} by heads, and by the sequence {needed} of memory are needed and {free} are "
            "free; raise --kv-memory, lower --max-tokens or --max-model-len, or end other programs"
        )

    def for_tokens(self, tokens: int) -> Opened:
        """With keys and values split by the sequence, where --kv-shard is auto and sequences of so
        many tokens have room only then. Held by: test_kv_shard.py."""
        other = None if self._has_room(tokens) else self._by_sequence()
        return self if other is None or not other._has_room(tokens) else other

    def _by_sequence(self) -> Opened | None:
        """That way, if --kv-shard leaves it open."""
        if self.flags.kv_shard != "auto" or not self._may_split_sequence:
            return None
        return self._cut(replace(self.layout, kv_shard="sequence"), self.profile)

    @property
    def _may_split_sequence(self) -> bool:
        from anyshard.stripes import STRIPES

        return 1 < self.layout.tp <= STRIPES and not self.layout.splits_sequence

    def _cut(self, layout: Layout, profile: Profile) -> Opened:
        """The same, cut and computed so."""
        from anyshard.model import program

        ranks = range(layout.world)
        programs = tuple(program(self.config, profile, layout, rank) for rank in ranks)
        return replace(self, layout=layout, profile=profile, programs=programs)

    def within_kv_memory(self) -> Opened:
        """With a limit that --kv-memory has room for, whichever way --kv-shard may take.

        Raises: OptionError with both numbers where --max-model-len asks for more.
        """
        flags = self.flags
        if flags.kv_memory_bytes is None:
            return self
        other = self._by_sequence()
        tokens = max(self.kv_tokens, 0 if other is None else other.kv_tokens)
        if not tokens:
            assert (other or self).kv_pages, "raises"
        if flags.max_model_len is not None and flags.max_model_len > tokens:
            raise OptionError(
                f"--max-model-len is {flags.max_model_len}, but --kv-memory {flags.kv_memory} has "
                f"room for {tokens} tokens on these ranks"
            )
        return replace(self, limit=min(self.limit, tokens))

    @property
    def kv_tokens(self) -> int:
        """Tokens of one sequence that --kv-memory has room for: what there is without it."""
        try:
            pages = self.kv_pages
        except LayoutError:
            return 0
        return self.limit if pages is None else pages * self.profile.kv_block

    def _has_room(self, tokens: int) -> bool:
        if self.flags.kv_memory_bytes is not None and tokens > self.kv_tokens:
            return False
        return self.free is None or self.need(tokens).total <= self.free


def open_model(
    model: str | None,
    flags: SplitFlags,
    *,
    num_prompts: int,
    default_len: int | None = None,
    record: bool = False,
    hosts: HostFlags = ONE_HOST,
    speculation: SpeculationFlags = NO_DRAFTS,
) -> Opened:
    """Open and cut a model; a Hub id is fetched first, where its cache does not hold it.

    Raises: UserError for what cannot be opened, or cut that way.
    """
    from anyshard.checkpoint import open_checkpoint
    from anyshard.layout import hosts_of_ranks
    from anyshard.loading import profile_of
    from anyshard.model import program

    refuse_over_hosts(flags, hosts)
    memory = read_memory()
    drafts = speculation.draft_model
    forking = (
        flags if drafts is None else replace(flags, comm="shm")
    )  # a rank that drafts is forked
    checkpoint = open_checkpoint(local_model(model, forking))
    arithmetic = checkpoint.arithmetic(flags.quantization)
    profile = profile_of(arithmetic, flags.kv, flags.wire)
    layout = layout_of(checkpoint.config, profile, flags)
    flags.links(layout.pp)  # raises what would otherwise be said after loading
    programs = tuple(
        program(checkpoint.config, profile, layout, rank) for rank in range(layout.world)
    )
    return Opened(
        flags=flags,
        checkpoint=checkpoint,
        profile=profile,
        layout=layout,
        programs=programs,
        num_seqs=min(flags.max_num_seqs or DEFAULT_SEQUENCES, num_prompts),
        limit=context_limit(checkpoint.config, flags, default=default_len),
        is_final=flags.max_model_len is not None or default_len is not None,
        free=None if memory is None else memory[1],
        record=record,
        host_flags=hosts,
        hosts=hosts_of_ranks(layout, hosts.num_hosts) if hosts.num_hosts > 1 else (),
        speculation=speculation,
        draft=open_draft_model(
            drafts,
            lambda name: local_model(name, forking),
            checkpoint,
            flags,
            speculation.draft_threads,
        ),
    ).within_kv_memory()


def local_model(model: str | None, flags: SplitFlags) -> str | None:
    """MODEL, or the place of a Hub id in the cache.

    A process of its own fetches it: that leaves threads behind, and the front is yet to fork.
    """
    from anyshard.checkpoint import download, find_hub_id

    hub_id = find_hub_id(model)
    if hub_id is None:
        return model

    def fetch(progress: Progress) -> tuple[object, bytes]:
        return None, os.fsencode(download(hub_id))

    with closed(_group(fetch, flags)) as group:
        return os.fsdecode(group.wait_loaded())


@contextmanager
def rank_group(opened: Opened, *, body: RankMain | None = None) -> Iterator[Loading]:
    """A group that begins to load as soon as all is known to fit, and is closed at the end.

    Enter it early: it forks, and the fork wants one thread and little memory. body: what its ranks
    run, a plain worker if None.

    Raises: LayoutError, before anything is forked, for what will not fit whatever the prompts are.
    """
    from anyshard.checkpoint.cache import clear_abandoned
    from anyshard.loading import loader

    block = opened.profile.kv_block  # no prompt takes less
    opened.admit(opened.limit if opened.is_final else min(block, opened.limit))
    cache = image_cache(opened.flags)
    load = loader(
        opened.checkpoint,
        threads=len(os.sched_getaffinity(0)),
        cache=cache,
        record=opened.record,
        arithmetic=opened.profile.arithmetic,
        kv=opened.profile.kv,
        wire=opened.profile.wire,
        names=opened.tensors,
    )
    draft, gate, is_here = opened.draft, None, opened.flags.comm == "threads"
    if (draft and not draft.is_same) or not (is_here or opened.fits(opened.limit)):
        gate = LoadGate()
    behind = at_once if gate is None else gate.before
    try:
        with (
            draft_group(draft, behind=behind, cache=cache) as drafting,
            closed(
                _over_hosts(_group(load if is_here else behind(load), opened.flags, body), opened)
            ) as group,
        ):
            yield Loading(opened, group, gate, drafting)
    finally:
        if gate is not None:
            gate.close()
        if cache is not None and cache.folder is not None:
            clear_abandoned(cache.folder)  # a launcher that was killed leaves its file


@dataclass(frozen=True)
class Loading:
    """A rank group that loads `opened`, or waits at its gate; `drafting`: that of its draft model,
    which does the same."""

    opened: Opened
    group: RankGroup
    gate: LoadGate | None
    drafting: RankGroup | None = None

    def admit(self, tokens: int) -> None:
        """Sequences hold at most so many tokens: open the gate. Once; raises: LayoutError."""
        self.opened.admit(tokens)
        if self.gate is not None:
            self.gate.open()


def _group(load: Load, flags: SplitFlags, body: RankMain | None = None) -> RankGroup:
    """One that begins to load at once."""
    from anyshard.launcher import ThreadGroup, fork_launcher
    from anyshard.worker import rank_main

    if flags.comm == "threads":
        return ThreadGroup(load, body or rank_main)
    return fork_launcher(load, body or rank_main, deadline_s=flags.deadline)


def _over_hosts(group: RankGroup, opened: Opened) -> RankGroup:
    """The group of all hosts, where there are several."""
    from anyshard.launcher import LauncherHandle

    if not opened.hosts:
        return group
    assert isinstance(group, LauncherHandle)
    share = Share.of(
        opened.config, opened.profile, opened.layout, opened.hosts, record=opened.record
    )
    return head_group(group, opened.host_flags, share, deadline_s=opened.flags.deadline)


def image_cache(flags: SplitFlags) -> ImageCache | None:
    """Where packed weights are kept, by the XDG rules; None with --no-cache."""
    from anyshard.checkpoint.cache import ImageCache

    if not flags.cache:
        return None
    places = (os.environ.get("XDG_CACHE_HOME", ""), f"{os.environ.get('HOME', '')}/.cache")
    base = next((place for place in places if place.startswith("/") and place != "/.cache"), None)
    return ImageCache(folder=None if base is None else Path(base, "anyshard", "images"))


def layout_of(config: ModelConfig, profile: Profile, split: SplitFlags) -> Layout:
    """The cuts that the flags ask for. Raises: LayoutError."""
    from anyshard.layout import plan

    return plan(
        config,
        tp=split.tensor_parallel_size or 1,
        pp=split.pipeline_parallel_size or 1,
        heads=split.head_counts,
        layers=None if split.balance else split.layer_counts,
        kv_shard="sequence" if split.kv_shard == "sequence" else "heads",
        wire=profile.wire,
        leaf=profile.leaf,
    )


def context_limit(config: ModelConfig, split: SplitFlags, *, default: int | None = None) -> int:
    """Tokens that a prompt and its answer may hold: --max-model-len, or `default` or the context,
    whichever is less.

    Raises: OptionError over the context.
    """
    asked = split.max_model_len
    if asked is not None and asked > config.context:
        raise OptionError(f"--max-model-len is {asked}; the model's context holds {config.context}")
    return asked or min(default or config.context, config.context)


def wait_loaded(loading: Loading, *, limit: int, tokenizer: Tokenizer | None = None) -> LoadReport:
    """Wait for the weights behind a bar, and pass on what loading has to say.

    tokenizer: of the model, where another drafts for it. Raises: UserError if the two have other
    vocabularies; LayoutError if sequences of `limit` tokens have no room.
    """
    from anyshard.loading import LoadReport

    if loading.opened.draft is not None:
        assert tokenizer is not None
        loading.opened.draft.refuse_other_tokens(tokenizer)
    loading.admit(limit)
    with Bar("loading weights") as bar:
        payload = loading.group.wait_loaded(bar.update)
        if loading.drafting is not None:
            wait_draft_loaded(loading.drafting)
    report = LoadReport.of(payload)
    if report.note:
        print(f"note: {report.note}", file=sys.stderr)
    return report


def start_engine(loading: Loading, *, limit: int, trace_events: int = 0) -> Engine:
    """Start ranks for sequences of `limit` tokens, once the weights are loaded."""
    from anyshard.engine import Engine
    from anyshard.epoch import EngineOptions
    from anyshard.schedule import SCHEDULES, idle_share

    opened = loading.opened.for_tokens(limit)
    flags, layout = opened.flags, opened.layout
    if opened.kv_pages is not None:
        print(
            f"note: --kv-memory {flags.kv_memory} has room for "
            f"{opened.kv_pages * opened.profile.kv_block} tokens; {opened.num_seqs} at once of up "
            f"to {limit} are planned for",
            file=sys.stderr,
        )
    if layout != loading.opened.layout:
        print(f"note: {_why_sequence(loading.opened, opened, limit)}", file=sys.stderr)
    options = EngineOptions(
        kernels=flags.kernels,
        comm=flags.comm,
        threads=flags.threads,
        chunk=min(opened.chunk, limit),
        schedule=flags.schedule,
        micro_batches=flags.micro_batches,
        max_num_seqs=opened.num_seqs,
        max_model_len=limit,
        links=flags.links(layout.pp),
        hosts=opened.hosts,
        drafts=opened.speculation.drafts,
        windows=opened.windows,
        kv_pages=opened.kv_pages,
        deadline_s=flags.deadline,
        record=opened.record,
        trace_events=trace_events,
    )
    _tell_idle(opened, layout)
    group, model = loading.group, (opened.config, opened.profile)
    if flags.balance is not None and layout.pp > 1:
        layout = balanced_layout(group, *model, layout, options, by=flags.balance)
    cores = len(os.sched_getaffinity(0))
    drafting = (opened.draft, loading.drafting) if opened.draft and loading.drafting else None
    speculator = speculator_of(
        opened.speculation,
        opened.config,
        drafting,
        windows=opened.windows,
        tokens=limit,
        num_seqs=opened.num_seqs,
        pages=opened.kv_pages,
    )
    engine = Engine(
        group,
        *model,
        layout,
        options,
        cores=cores,
        epoch=EPOCH + 1,
        speculator=speculator,
    )
    engine.control.wait_ready()
    if engine.crowded:
        print(
            f"note: {opened.hosts.count(0) or layout.world} ranks x {engine.threads} threads on "
            f"{engine.cores} cores take turns; that may cost speed, not bits",
            file=sys.stderr,
        )
    many = min(opened.num_seqs, engine.schedule.micro_batches)
    if many < layout.pp and opened.windows == 1:
        idle = idle_share(SCHEDULES[flags.schedule](layout.pp, many))
        print(
            f"note: {many} of {layout.pp} stages work at a time while tokens are drawn, since each "
            f"waits for the one before: {float(idle):.0%} idle; more prompts at once, in as many "
            "--micro-batches, would fill them",
            file=sys.stderr,
        )
    return engine


def _tell_idle(opened: Opened, layout: Layout) -> None:
    """Say which flags were given and do nothing in such a run."""
    flags, idle = opened.flags, opened.speculation.idle
    if idle:
        lacking = "a draft model" if opened.speculation.drafts else "--speculate"
        print(f"note: without {lacking} these have no effect: {', '.join(idle)}", file=sys.stderr)
    given = {
        "--schedule": flags.schedule != "continuous",
        "--micro-batches": flags.micro_batches is not None,
    }
    turns = [name for name, is_given in given.items() if is_given and layout.pp == 1]
    if turns:
        print(f"note: with one stage these have no effect: {', '.join(turns)}", file=sys.stderr)


def _why_sequence(heads: Opened, sequence: Opened, tokens: int) -> str:
    """What --kv-shard auto took, and what either way takes."""
    from anyshard.ledger import StepShape, wire_cost

    memory = heads.flags.kv_memory

    def of(opened: Opened) -> str:
        each = [kv_bytes(part, tokens=tokens) * opened.num_seqs for part in opened.programs]
        fullest, limit = max(each), opened.flags.kv_memory_bytes
        if limit is not None and sum(each) > limit:  # the ranks share so many pages
            fullest = fullest * limit // sum(each)
        step = StepShape(rows=1, sampled=1, gather_logits=False)
        costs = [wire_cost(each, [step]) for each in opened.programs]
        messages, sent = sum(cost.messages for cost in costs), sum(cost.bytes for cost in costs)
        return (
            f"{size_text(fullest)} of KV on the fullest rank, {messages} messages and "
            f"{size_text(sent)} a token"
        )

    if memory is not None and tokens > heads.kv_tokens:
        return (
            f"KV is split by the sequence ({of(sequence)}), since by heads --kv-memory {memory} "
            f"has room for {heads.kv_tokens} of {tokens} tokens"
        )
    return (
        f"KV is split by the sequence ({of(sequence)}), since by heads ({of(heads)}) it has no room"
    )
