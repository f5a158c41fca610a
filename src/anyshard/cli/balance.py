"""`--layers auto`: a cut by what layers and head cost on this machine, measured before ranks start.

A group without stages runs a few steps of the loaded weights, as wide and with as many threads as
each stage will be; its own record of time says what layers and head take. Knows nothing of answers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Final, Literal

from anyshard.cli.screen import Bar

if TYPE_CHECKING:
    from anyshard.config import ModelConfig, Profile
    from anyshard.epoch import EngineOptions
    from anyshard.launcher import RankGroup
    from anyshard.layout import Layout
    from anyshard.trace import EventKind, Run

__all__ = ["Balance", "Costs", "balanced_layout", "measured"]

Balance = Literal["decode", "prefill"]
DECODE_STEPS: Final = 6
PROMPT_CHUNKS: Final = 3
TRACE_EVENTS: Final = 4096
EPOCH: Final = 1  #: of the measurement; the run's own is later


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of a step of `rows` rows: of one layer, and of the head."""

    rows: int
    layer_s: float
    head_s: float

    def slowest_s(self, layers: Sequence[int]) -> float:
        """Of the stages of a cut."""
        last = len(layers) - 1
        return max(
            count * self.layer_s + (self.head_s if stage == last else 0.0)
            for stage, count in enumerate(layers)
        )


def measured(run: Run, num_layers: int, *, rows: int) -> dict[Balance, Costs]:
    """Medians over the steps of a run without stages, of the slowest rank: those of `rows` rows are
    decoding, those with most a prompt's, whose chunks but the last need no head.

    Held by: test_balance.py.
    """
    most = max(int(rank.events["rows"].max()) for rank in run.ranks)
    decode = _median_s(run, "compute", rows), _median_s(run, "head", rows)
    prefill = _median_s(run, "compute", most)
    return {
        "decode": Costs(rows=rows, layer_s=decode[0] / num_layers, head_s=decode[1]),
        "prefill": Costs(rows=most, layer_s=prefill / num_layers, head_s=0.0),
    }


def _median_s(run: Run, kind: EventKind, rows: int) -> float:
    from anyshard.trace import KINDS

    slowest = 0.0
    for rank in run.ranks:
        events = rank.events
        mine = events[(events["rows"] == rows) & (events["kind"] == KINDS.index(kind))]
        spans = zip(mine["start"].tolist(), mine["stop"].tolist(), strict=True)
        slowest = max(slowest, median([stop - start for start, stop in spans]) * 1e-9)
    return slowest


def balanced_layout(
    group: RankGroup,
    config: ModelConfig,
    profile: Profile,
    layout: Layout,
    options: EngineOptions,
    *,
    by: Balance,
) -> Layout:
    """`layout` with the layers of its stages cut anew; says what either way of running takes.

    For prompts that is the cut it has: layers cost alike, and of a prompt's chunks only the last
    one needs the head. options: of the run. Raises: PeerLost.
    """
    from anyshard.layout import wire_boundaries
    from anyshard.trace import balanced

    costs = _costs(group, config, profile, layout, options)
    even = tuple(stop - start for start, stop in layout.layers)
    if costs is None:
        print(
            f"note: --layers {_text(even)}: there is too little room to measure, or what was run "
            "for it failed",
            file=sys.stderr,
        )
        return layout
    head = costs["decode"].head_s / costs["decode"].layer_s
    cuts = wire_boundaries(profile.wire, config.num_layers) or None
    best: dict[Balance, tuple[int, ...]] = {
        "decode": balanced(config.num_layers, layout.pp, head=head, cuts=cuts),
        "prefill": even,
    }
    layers = best[by]
    other: Balance = "prefill" if by == "decode" else "decode"
    print(
        f"note: --layers {_text(layers)}, measured: {_takes(by, costs, layers, even)} on the "
        f"slowest stage, {_takes(other, costs, layers, best[other])}; the head weighs "
        f"{head:.1f} layers where tokens are drawn",
        file=sys.stderr,
    )
    starts = [sum(layers[:stage]) for stage in range(len(layers) + 1)]
    return replace(layout, layers=tuple(pairwise(starts)))


def _costs(
    group: RankGroup,
    config: ModelConfig,
    profile: Profile,
    layout: Layout,
    options: EngineOptions,
) -> dict[Balance, Costs] | None:
    """Run a few steps of sequences that mean nothing; None where they have no room or fail.

    They take no more than the run itself will: its sequences, its tokens, its pages.
    """
    from anyshard.engine import Engine
    from anyshard.request import Request

    cores = len(os.sched_getaffinity(0))
    many = options.micro_batches or layout.pp
    sequences = max(1, -(-options.max_num_seqs // many))
    steps = DECODE_STEPS + PROMPT_CHUNKS  # of those that go on while a prompt is read
    limit = options.max_model_len
    if options.kv_pages is not None:
        limit = min(limit, options.kv_pages // sequences * profile.kv_block)
    prompt = min(PROMPT_CHUNKS * options.chunk, limit - DECODE_STEPS)
    if prompt < 2 or limit < 1 + steps:
        return None
    engine = Engine(
        group,
        config,
        profile,
        replace(layout, layers=((0, config.num_layers),)),
        replace(
            options,
            threads=options.threads or max(1, cores // layout.world),
            max_num_seqs=sequences,
            micro_batches=1,
            links=(),
            drafts=0,
            windows=1,
            record=False,
            trace_events=TRACE_EVENTS,
        ),
        cores=cores,
        epoch=EPOCH,
    )
    has_failed = False
    with Bar("measuring layers") as bar:
        for number in range(sequences):
            length, tokens = (prompt, DECODE_STEPS) if number == 0 else (1, steps)
            ids = tuple(token % config.vocab for token in range(1, length + 1))
            engine.submit(Request(prompt=ids, max_tokens=tokens))
        for event in engine.run(bar.update):
            has_failed |= event.fault is not None
    run = engine.traced("measurement")
    engine.close()
    return None if has_failed else measured(run, config.num_layers, rows=sequences)


def _text(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers))


def _takes(
    name: Balance, costs: Mapping[Balance, Costs], layers: Sequence[int], other: Sequence[int]
) -> str:
    """`a step of 2 rows 2.9 ms (15,15: 3.4 ms)`."""
    cost = costs[name]
    rows = f"{cost.rows} row{'s' * (cost.rows > 1)}"
    what = f"a step of {rows}" if name == "decode" else f"a chunk of {rows} of a prompt"
    mine, theirs = (f"{cost.slowest_s(each) * 1e3:.1f} ms" for each in (layers, other))
    return f"{what} {mine}" + ("" if other == layers else f" ({_text(other)}: {theirs})")
