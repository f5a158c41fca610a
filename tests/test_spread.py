"""How sure the model is of a row: against float64, on every split, and unknown where it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from grid import Loaded, the_model
from native_cases import BODIES, native
from test_speculate import A9, GREEDY, NOISY, group_of, oracle, prompts_of

from anyshard.engine import Engine
from anyshard.epoch import EngineOptions
from anyshard.launcher import RankGroup
from anyshard.layout import plan
from anyshard.ops import draw
from anyshard.ops.spread import UNKNOWN, Spread, spread
from anyshard.request import Request, Sampling
from anyshard.speculate import OpenGate, Speculator
from anyshard.verify.driver import open_group
from anyshard.verify.naive import rank_body
from anyshard.worker import Worker

F32 = npt.NDArray[np.float32]
WIDTHS = (1, 2, 3, 31, 32, 33, 1013, 49152)
KERNELS = [*BODIES, "reference"]
ERROR = 2.0**-17  # of the margin, and of the entropy times 1 + entropy: see ops/draw.py


def spread_of(logits: F32, body: str) -> tuple[float, float, int, int]:
    found: tuple[float, float, int, int] = (
        draw.spread(logits) if body == "reference" else native.spread(logits, body=body)
    )
    return found


def exact(logits: F32) -> tuple[float, float, int, int]:
    """In float64; the second of one is -1."""
    row = logits.astype(np.float64)
    chances = np.exp(row - row.max())
    chances /= chances.sum()
    some = chances[chances > 0]
    order = np.argsort(-row, kind="stable")
    first, second = int(order[0]), int(order[1]) if len(order) > 1 else -1
    margin = chances[first] - (chances[second] if second >= 0 else 0.0)
    return float(-(some * np.log(some)).sum()), float(margin), first, second


def close(found: Sequence[float], want: Sequence[float]) -> bool:
    return (
        abs(found[0] - want[0]) <= ERROR * (1 + want[0])
        and abs(found[1] - want[1]) <= ERROR
        and found[0] >= 0 <= found[1]
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("body", KERNELS)
def test_a_row_is_told_as_float64_has_it(body: str, width: int) -> None:
    rng = np.random.default_rng(width)
    rows = [rng.normal(scale=scale, size=width) for scale in (0, 1e-3, 1, 4, 12, 60)]
    rows += [np.linspace(-1, 30, width), np.linspace(30, -1, width), rng.normal(size=width) - 900]
    for row in rows:
        logits = row.astype(np.float32)
        found, want = spread_of(logits, body), exact(logits)
        assert found[2:] == want[2:]
        assert close(found, want), (found, want)


@pytest.mark.parametrize("body", KERNELS)
def test_of_equals_the_lowest_id_is_the_better_one(body: str) -> None:
    rng = np.random.default_rng(2)
    for width in (2, 3, 8, 9, 31, 33, 257, 1013):
        for _ in range(40):
            logits = np.round(rng.normal(size=width)).astype(np.float32)
            assert spread_of(logits, body)[2:] == exact(logits)[2:]
    for ids in ((3, 11), (11, 19), (7, 8), (0, 99), (42, 50)):  # of one lane, and of two
        logits = np.zeros(100, np.float32)
        logits[list(ids)] = 5
        assert spread_of(logits, body)[1:] == (0.0, *ids)
        logits[99 - ids[0]] = 7  # a better one later on
        assert spread_of(logits, body)[2:] == exact(logits)[2:]
    flat = spread_of(np.full(8192, -3, np.float32), body)
    assert flat[0] == pytest.approx(np.log(8192)) and flat[1:] == (0.0, 0, 1)


@pytest.mark.parametrize("body", KERNELS)
def test_a_row_that_is_not_finite_is_unknown(body: str) -> None:
    for width in WIDTHS[:-1]:
        for place in {0, width // 2, width - 1}:
            for bad in (np.nan, np.inf, -np.inf):
                logits = np.linspace(-4, 4, width, dtype=np.float32)
                logits[place] = bad
                found = spread_of(logits, body)
                assert np.isnan(found[:2]).all() and found[2:] == (-1, -1)
    for bad in (np.nan, np.inf, -np.inf):
        found = spread_of(np.full(40, bad, np.float32), body)
        assert np.isnan(found[:2]).all() and found[2:] == (-1, -1)
    far = spread_of(np.array([3e38, -3e38], np.float32), body)
    assert np.isnan(far[:2]).all() and far[2:] == (-1, -1)


@pytest.mark.skipif(native is None, reason="built without the native core")
def test_no_row_is_refused() -> None:
    with pytest.raises(ValueError, match="logits is empty"):
        native.spread(np.zeros(0, np.float32))
    with pytest.raises(ValueError, match="logits must be of float32"):
        native.spread(np.zeros(5))


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
