"""How sure the model was of every token: on every split, and unknown where that is."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from grid import Loaded, the_model
from test_native_spread import F32, close, exact
from test_speculate import A9, GREEDY, NOISY, group_of, oracle, prompts_of

from anyshard.comm.base import WireSizes
from anyshard.comm.region import RESULT_HEADER, ControlSizes, EpochRegion, EpochSizes
from anyshard.comm.results import ResultSlot
from anyshard.engine import Engine
from anyshard.epoch import EngineOptions
from anyshard.launcher import RankGroup
from anyshard.layout import plan
from anyshard.ops import draw
from anyshard.ops.spread import SPREAD, UNKNOWN, Spread, spread
from anyshard.request import Request, Sampling
from anyshard.speculate import OpenGate, Speculator
from anyshard.verify.driver import open_group
from anyshard.verify.naive import rank_body
from anyshard.worker import Worker


def test_the_runner_up_is_the_likeliest_token_that_was_not_drawn() -> None:
    logits = np.array([0, 4, 9, 1], np.float32)
    assert [spread(draw, logits, token).runner_up for token in range(4)] == [2, 2, 1, 2]
    assert spread(draw, np.full(4, np.nan, np.float32), -1).runner_up == -1
    assert spread(draw, logits[:1], 0) == Spread(0.0, 1.0, -1)


# --- of every token that is drawn ----------------------------------------------------------------


class Heard(Speculator):
    """Keeps what it is told."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.heard: dict[int, list[Spread]] = {}

    def came_out(
        self, request_id: int, tokens: Sequence[int], spreads: Any = (), **named: Any
    ) -> None:
        assert len(spreads) == len(tokens)
        self.heard.setdefault(request_id, []).extend(spreads)
        super().came_out(request_id, tokens, spreads, **named)


def told(
    group: RankGroup,
    model: Loaded,
    prompts: Sequence[tuple[int, ...]],
    *,
    epoch: int,
    sampling: Sampling,
    known: Sequence[tuple[tuple[int, ...], tuple[int, ...]]] = (),
    want_logits: bool = True,
    tp: int = 1,
    pp: int = 1,
    **options: Any,
) -> tuple[list[list[int]], list[list[F32]], Heard]:
    """Tokens and logits of each prompt, and who was told of them. known: answers to draft from."""
    drafter = oracle([(prompt, (tokens, "")) for prompt, tokens in known], 0.7, model.config.vocab)
    windows = options.get("windows", 1)
    speculator = Heard(drafter, OpenGate(), most=3, windows=windows)
    engine = Engine(
        group,
        model.config,
        model.profile,
        plan(model.config, tp=tp, pp=pp, leaf=model.profile.leaf),
        EngineOptions(
            **({"comm": "threads", "threads": 1, "max_num_seqs": 2} | options),
            max_model_len=160,
            drafts=3,
        ),
        cores=2,
        epoch=epoch,
        speculator=speculator,
    )
    for prompt in prompts:
        engine.submit(
            Request(prompt=prompt, max_tokens=12, sampling=sampling, want_logits=want_logits)
        )
    tokens: list[list[int]] = [[] for _ in prompts]
    rows: list[list[F32]] = [[] for _ in prompts]
    for event in engine.run():
        assert event.token is not None
        tokens[event.request_id].append(event.token)
        if event.logits is not None:
            rows[event.request_id].append(event.logits)
    engine.close()
    return tokens, rows, speculator


def check(tokens: list[list[int]], rows: list[list[F32]], speculator: Heard) -> None:
    """All that was told is what float64 makes of the logits."""
    entropies, margins = [], []
    for request_id, drawn in enumerate(tokens):
        heard = speculator.heard[request_id]
        assert len(heard) == len(drawn) == len(rows[request_id])
        for token, row, each in zip(drawn, rows[request_id], heard, strict=True):
            entropy, margin, first, second = exact(row)
            assert close(each, (entropy, margin))
            assert each.runner_up == (second if token == first else first)
            entropies.append(entropy)
            margins.append(margin)
    figures = speculator.figures
    assert figures.target_entropy == pytest.approx(np.mean(entropies), abs=1e-3)
    assert figures.target_margin == pytest.approx(np.mean(margins), abs=1e-3)
    assert figures.runner_ups == figures.rollbacks


@pytest.mark.parametrize("sampling", [GREEDY, NOISY], ids=["greedy", "sampled"])
def test_every_token_is_told_of_on_any_split(sampling: Sampling) -> None:
    model = the_model(A9)
    prompts = prompts_of(model.config.vocab)[4:7]
    with group_of(model) as group:
        whole, rows, speculator = told(group, model, prompts, epoch=1, sampling=sampling)
        check(whole, rows, speculator)
        first = speculator.heard
        known = [(p, tuple(tokens)) for p, tokens in zip(prompts, whole, strict=True)]
        ways: list[dict[str, Any]] = [
            {},
            {"kernels": "scalar", "chunk": 7},
            {"tp": 2},
            {"tp": 3, "pp": 2},
            {"pp": 2, "windows": 4},
            {"kernels": "reference", "max_num_seqs": 1},
        ]
        for epoch, how in enumerate(ways, 2):
            tokens, rows, speculator = told(
                group, model, prompts, epoch=epoch, sampling=sampling, known=known, **how
            )
            assert tokens == whole
            check(tokens, rows, speculator)
            assert speculator.figures.rollbacks
            if how.get("kernels") != "reference":
                assert speculator.heard == first, "bit for bit, though nobody asks for it"


def test_where_only_the_best_travel_it_is_unknown() -> None:
    model = the_model(A9)
    prompts = prompts_of(model.config.vocab)[4:6]
    with group_of(model) as group:
        whole, rows, _ = told(group, model, prompts, epoch=1, sampling=GREEDY)
        tokens, rows, speculator = told(
            group, model, prompts, epoch=2, sampling=GREEDY, want_logits=False, tp=2
        )
        assert tokens == whole and rows == [[], []]
        heard = [each for all_of_one in speculator.heard.values() for each in all_of_one]
        assert len(heard) == 24 and all(str(each) == str(UNKNOWN) for each in heard)
        figures = speculator.figures
        assert figures.target_entropy is figures.target_margin is None
        assert figures.runner_ups == figures.near_misses == 0


@pytest.mark.parametrize(("tells", "row_bytes"), [(True, 4 + 12), (False, 4)])
def test_a_link_is_held_for_what_a_result_weighs(*, tells: bool, row_bytes: int) -> None:
    """Tokens, and 12 bytes beside each where their spread is told."""
    control = ControlSizes(rows_max=4, pages_max=4, frame_slots=5, tells_spread=tells)
    sizes = EpochSizes(wires=WireSizes(tp=1, pp=1), control=control)
    slot, held = ResultSlot(EpochRegion.create(sizes, 1, shared=False), 2), []
    link: Any = SimpleNamespace(hold=lambda sent_ns, num_bytes: held.append(num_bytes))
    words = np.arange(3, dtype=np.int32)
    spreads = np.array([(1.0, 0.5, 7)] * 3, SPREAD) if tells else None
    slot.write(7, words, words * 0, (), spreads=spreads, is_void=tells)
    found = slot.read(7, link)
    assert held == [RESULT_HEADER.size + 3 * row_bytes]
    assert (found.tokens, found.faults, found.is_void) == ([0, 1, 2], [0, 0, 0], tells)
    assert found.spreads == ([Spread(1.0, 0.5, 7)] * 3 if tells else None)


@pytest.mark.ranks
@pytest.mark.parametrize("comm", ["shm", pytest.param("torch", marks=pytest.mark.torch)])
def test_processes_tell_alike(comm: str) -> None:
    if comm == "torch":
        pytest.importorskip("torch")
    model = the_model(A9)
    prompts = prompts_of(model.config.vocab)[4:6]
    group = open_group(model.served, rank_body(Worker), forked=True)
    try:
        for epoch, shape in enumerate(({"pp": 2}, {"tp": 2}), 1):
            found = told(group, model, prompts, epoch=epoch, sampling=NOISY, comm=comm, **shape)
            check(*found)
    finally:
        group.close()
