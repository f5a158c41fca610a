"""A run of a host that is not the head: load the share of its ranks, and run the head's frames.

Prompts, answers and figures are the head's. Knows nothing of tokens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec

from anyshard import __version__
from anyshard.cli.flags import HostFlags, SplitFlags
from anyshard.cli.hosts import Share, closed, hash_of, head_port, refuse_over_hosts, say
from anyshard.cli.memory import memory_need, tensors_of
from anyshard.cli.running import image_cache, local_model
from anyshard.cli.screen import Bar
from anyshard.errors import AnyshardError, OptionError, PeerLost, UserError
from anyshard.host import read_memory

if TYPE_CHECKING:
    from anyshard.checkpoint import Checkpoint
    from anyshard.launcher import Member, Start
    from anyshard.layout import Layout
    from anyshard.model import Program

__all__ = ["run_member"]

MOST_RANKS_NAMED: Final = 8


def run_member(model: str | None, split: SplitFlags, flags: HostFlags) -> int:
    """Be a host that is not the head, until the head ends; the exit code.

    Raises: UserError where this host or the head refuses, PeerLost.
    """
    from anyshard.checkpoint import open_checkpoint
    from anyshard.launcher import (
        Hello,
        Member,
        connect,
        interface_of,
        interface_text,
        printable,
    )
    from anyshard.ops import choose_body

    assert flags.master_addr is not None and flags.node_rank is not None
    refuse_over_hosts(split, flags)
    checkpoint = open_checkpoint(local_model(model, split))
    body, port = choose_body(split.kernels), head_port(flags)
    say(f"host {flags.node_rank} of {flags.num_hosts} asks for {flags.master_addr}, port {port}")
    channel = connect(flags.master_addr, port, patience_s=flags.join_timeout)
    member, interface = Member(channel), interface_of(channel.here)
    hello = Hello(flags.node_rank, flags.num_hosts, __version__, body, interface)
    try:
        told = member.join(hello, patience_s=flags.join_timeout)
        try:
            share = msgspec.msgpack.decode(told, type=Share)
        except msgspec.DecodeError as error:
            text = printable(f"host 0 does not say what to load: {error}")
            raise PeerLost(text) from None
        say(
            f"host {flags.node_rank} of {flags.num_hosts} has joined {channel.peer} from "
            f"{channel.here}{interface_text(interface)}"
        )
        _Host(checkpoint, split, share, flags.node_rank).run(member)
    except PeerLost:
        raise
    except AnyshardError as error:
        with suppress(PeerLost):  # who may have gone first
            member.fail(error)
        raise
    finally:
        channel.close()
    say(f"host 0 has ended; {member.frames} frames were run here")
    return 0


class _Host:
    """What a member loads and runs."""

    def __init__(
        self, checkpoint: Checkpoint, split: SplitFlags, share: Share, number: int
    ) -> None:
        from anyshard.launcher import printable
        from anyshard.loading import profile_of

        config = checkpoint.config
        self.checkpoint, self.split, self.share, self.number = checkpoint, split, share, number
        self.profile = profile_of(share.arithmetic, share.kv, share.wire)
        if share.config != hash_of(config):
            raise UserError(
                f"{checkpoint.path} is another model than host 0 has; give the same one on both"
            )
        if share.profile_sha256 != self.profile.sha256():
            raise UserError(
                f"the profile here is {self.profile.sha256()[:12]}, on host 0 "
                f"{printable(share.profile_sha256[:12])}: its constants differ; install the same "
                "anyshard"
            )
        _refuse_other_flags(split, share)
        self.programs = self._programs(share.layout)
        self.mine = [each for each in self.programs if share.hosts[each.rank] == number]

    def run(self, member: Member) -> None:
        """Load, and serve."""
        from anyshard.launcher import fork_launcher
        from anyshard.loading import loader
        from anyshard.worker import rank_main

        say(_ranks_text(self.mine))
        self._admit(tokens=self.profile.kv_block, num_seqs=1, chunk=1)
        load = loader(
            self.checkpoint,
            threads=len(os.sched_getaffinity(0)),
            cache=image_cache(self.split),
            record=self.share.record,
            arithmetic=self.share.arithmetic,
            kv=self.share.kv,
            wire=self.share.wire,
            names=tensors_of(self.mine),
        )
        group = fork_launcher(load, rank_main, deadline_s=self.split.deadline)
        with closed(group):
            with Bar("loading weights") as bar:
                member.load(group, bar.update)
            member.serve(group, self.prepare)

    def prepare(self, start: Start) -> Start:
        """The head's Start, with the threads and kernels of this host. Raises: LayoutError."""
        from msgspec.structs import replace as changed

        from anyshard.epoch import SPIN_US, rank_threads
        from anyshard.ops import choose_body
        from anyshard.worker import RankPlan

        plan = msgspec.msgpack.decode(start.payload, type=RankPlan)
        self._admit(
            plan.layout,
            loaded=True,
            tokens=plan.max_model_len,
            num_seqs=plan.num_slots,
            chunk=max(1, plan.rows_max - plan.num_slots),
            kv_pages=plan.num_pages,
            micro_batches=max(1, plan.frames - 2),
        )
        cores = len(os.sched_getaffinity(0))
        body = choose_body(self.split.kernels)
        threads = rank_threads(body, self.split.threads, cores=cores, ranks=len(self.mine))
        spin = len(self.mine) * threads <= cores
        payload = changed(plan, kernels=body, threads=threads, spin=spin)
        return changed(
            start,
            payload=msgspec.msgpack.encode(payload),
            sizes=changed(start.sizes, spin_us=SPIN_US if spin else 0),
        )

    def _admit(
        self, layout: Layout | None = None, *, loaded: bool = False, **sizes: int | None
    ) -> None:
        """Refuse what this host has no memory for, at the least before weights are loaded.

        layout: of the run, which may have cut keys and values anew. Raises: LayoutError.
        """
        memory = read_memory()
        if memory is None:
            return
        need = memory_need(
            self.checkpoint,
            self.programs if layout is None else self._programs(layout),
            record=self.share.record,
            hosts=self.share.hosts,
            host=self.number,
            **sizes,  # type: ignore[arg-type]
        )
        (replace(need, weights=0) if loaded else need).refuse_over(memory[1])

    def _programs(self, layout: Layout) -> list[Program]:
        from anyshard.model import program

        config, ranks = self.checkpoint.config, range(layout.world)
        return [program(config, self.profile, layout, rank) for rank in ranks]


def _refuse_other_flags(split: SplitFlags, share: Share) -> None:
    """Raises: OptionError for a flag that was given here and says other than the head's."""

    def sizes(spans: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in spans)

    layout = share.layout
    asked = {
        "-tp": (split.tensor_parallel_size, layout.tp),
        "-pp": (split.pipeline_parallel_size, layout.pp),
        "--heads": (split.head_counts, sizes(layout.heads)),
        "--layers": (split.layer_counts, sizes(layout.layers)),
        "--quantization": (split.quantization, "int8" if share.arithmetic == "int8" else "none"),
        "--kv-cache-dtype": (split.kv_cache_dtype, share.kv),
        "--wire-dtype": (split.wire_dtype, "int8" if share.wire == "int8" else "f32"),
    }
    for flag, (here, there) in asked.items():
        if here not in (None, "auto", there):
            texts = [
                ",".join(map(str, each)) if isinstance(each, tuple) else each
                for each in (here, there)
            ]
            raise OptionError(
                f"{flag} is {texts[0]} here and {texts[1]} on host 0; give the same flags on all "
                "hosts"
            )


def _ranks_text(programs: Sequence[Program]) -> str:
    """Which ranks a host has, of which layers."""
    parts = [
        f"rank {each.rank} (layers {each.layers[0]} to {each.layers[1] - 1})"
        for each in programs[:MOST_RANKS_NAMED]
    ]
    more = len(programs) - len(parts)
    return "this host has " + ", ".join(parts) + (f" and {more} more" if more else "")
