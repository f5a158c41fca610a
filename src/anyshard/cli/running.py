"""What the verbs that run a model share: the rank group, the layout, the engine.

Knows flags and the engine's front half; nothing of prompts or answers.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from anyshard.cli.flags import SplitFlags
from anyshard.cli.screen import Bar
from anyshard.errors import OptionError

if TYPE_CHECKING:
    from anyshard.config import ModelConfig, Profile
    from anyshard.engine import Engine
    from anyshard.launcher import RankGroup
    from anyshard.layout import Layout

__all__ = ["context_limit", "layout_of", "rank_group", "start_engine"]


@contextmanager
def rank_group(model: str | None, split: SplitFlags) -> Iterator[RankGroup]:
    """A group that begins to load `model` at once, and is closed at the end.

    Enter it early: it forks, and the fork wants one thread and little memory.
    """
    from anyshard.engine import loader
    from anyshard.launcher import ThreadGroup, fork_launcher
    from anyshard.worker import rank_main

    load = loader(model, threads=len(os.sched_getaffinity(0)))
    group: RankGroup
    if split.comm == "threads":
        group = ThreadGroup(load, rank_main)
    else:
        group = fork_launcher(load, rank_main, deadline_s=split.deadline)
    try:
        yield group
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C changes nothing
        try:
            group.close()
        finally:
            signal.signal(signal.SIGINT, before)


def layout_of(config: ModelConfig, profile: Profile, split: SplitFlags) -> Layout:
    """The cuts that the flags ask for. Raises: LayoutError."""
    from anyshard.layout import plan

    return plan(
        config,
        tp=split.tensor_parallel_size or 1,
        pp=split.pipeline_parallel_size or 1,
        heads=split.head_counts,
        layers=split.layer_counts,
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


def start_engine(
    group: RankGroup,
    config: ModelConfig,
    profile: Profile,
    layout: Layout,
    split: SplitFlags,
    *,
    limit: int,
    num_seqs: int,
) -> Engine:
    """Wait for the weights behind a bar, and start ranks for `num_seqs` of `limit` tokens each."""
    from anyshard.engine import Engine, EngineOptions

    with Bar("loading weights") as bar:
        group.wait_loaded(bar.update)
    engine = Engine(
        group,
        config,
        profile,
        layout,
        EngineOptions(
            kernels=split.kernels,
            comm=split.comm,
            threads=split.threads,
            chunk=min(split.chunk, limit),
            max_num_seqs=min(split.max_num_seqs, num_seqs),
            max_model_len=limit,
            deadline_s=split.deadline,
        ),
        cores=len(os.sched_getaffinity(0)),
    )
    if engine.crowded:
        print(
            f"note: {layout.world} ranks x {engine.threads} threads on {engine.cores} cores "
            "take turns; that may cost speed, not bits",
            file=sys.stderr,
        )
    return engine
