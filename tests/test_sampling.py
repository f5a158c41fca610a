"""Sampling is a function of (logits, seed, position): filters, noise and ties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anyshard.errors import OptionError
from anyshard.ops import draw, native_module, reference
from anyshard.ops.sampling import _best_first, allowed_ids, sample
from anyshard.request import Request, Sampling

_native = native_module()
MODULES = [reference] + ([_native] if _native is not None else [])


@pytest.fixture(params=MODULES, ids=lambda module: module.__name__)
def module(request: pytest.FixtureRequest) -> Any:
    return request.param


def logits(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=3, size=size).astype(np.float32)


def test_philox_gives_the_published_words() -> None:
    # Random123's known answers for Philox4x32-10
    zeros = reference.philox_words(4, 0, 0, 0, 0)
    assert [hex(w) for w in zeros] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    key = 0x299F31D0_A4093822
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    words = draw._philox([np.array([c], np.uint64) for c in counter], key)
    assert [hex(int(w)) for w in words[0]] == [
        "0xd16cfe09",
        "0x94fdcceb",
        "0x5001e420",
        "0x24126ea1",
    ]


def test_ties_go_to_the_lowest_id(module: Any) -> None:
    row = np.zeros(97, np.float32)
    row[[13, 40, 96]] = 5
    assert module.argmax(row)[0] == 13
    assert sample(module, row, Sampling(), position=3) == 13


def test_a_row_that_is_not_finite_gives_no_token(module: Any) -> None:
    row = logits(50, 0)
    row[7] = np.nan
    assert sample(module, row, Sampling(), position=1) == -1
    row[7] = np.inf
    assert sample(module, row, Sampling(temperature=1.0), position=1) == -1


def test_noise_depends_on_seed_and_position_only_and_follows_the_distribution() -> None:
    row = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    drawn = [sample(reference, row, Sampling(temperature=1.0, seed=5), position=p)
             for p in range(4000)]  # fmt: skip
    again = sample(reference, row, Sampling(temperature=1.0, seed=5), position=77)
    assert again == drawn[77]
    share = np.bincount(drawn, minlength=4) / 4000
    # four standard deviations of a share of 1/2 over 4,000 draws are 0.032
    assert np.all(np.abs(share - [0.5, 0.25, 0.125, 0.125]) < 0.032)
    other = [sample(reference, row, Sampling(temperature=1.0, seed=6), position=p)
             for p in range(100)]  # fmt: skip
    assert other != drawn[:100]


def test_noise_of_an_id_does_not_depend_on_the_size_of_the_vocabulary(module: Any) -> None:
    small, large = logits(1000, 1), np.full(1003, -50, np.float32)
    large[:1000] = small
    drawn = Sampling(temperature=0.8, seed=3)
    for position in range(20):
        assert sample(module, small, drawn, position=position) == sample(
            module, large, drawn, position=position
        )


@pytest.mark.skipif(_native is None, reason="needs the compiled module")
@pytest.mark.parametrize("size", [1, 3, 8, 9, 31, 33, 257, 1009, 49152])
def test_native_and_reference_draw_the_same_token(size: int) -> None:
    row = logits(size, size)
    for position in range(8):
        drawn = Sampling(temperature=1.3, seed=(1 << 63) + 11, choice=2, stream=1)
        assert sample(_native, row, drawn, position=position) == sample(
            reference, row, drawn, position=position
        )


def test_filters_keep_what_they_say() -> None:
    row = np.array([1, 4, 3, 4, 0], np.float32)
    kept = allowed_ids(reference, row, Sampling(temperature=1.0, top_k=2))
    assert kept is not None and kept.tolist() == [0, 1, 0, 1, 0]
    # min-p 0.3: e^-1 = 0.37 stays, e^-3 does not
    kept = allowed_ids(reference, row, Sampling(temperature=1.0, min_p=0.3))
    assert kept is not None and kept.tolist() == [0, 1, 1, 1, 0]
    # terms 1, 1, .37, .05, .02 of 2.44: the first two reach 0.8
    kept = allowed_ids(reference, row, Sampling(temperature=1.0, top_p=0.8))
    assert kept is not None and kept.tolist() == [0, 1, 0, 1, 0]
    kept = allowed_ids(reference, row, Sampling(temperature=1.0, top_p=0.83))
    assert kept is not None and kept.tolist() == [0, 1, 1, 1, 0]
    kept = allowed_ids(reference, row, Sampling(temperature=1.0, top_p=1e-9))
    assert kept is not None and kept.tolist() == [0, 1, 0, 0, 0]
    assert allowed_ids(reference, row, Sampling(temperature=1.0)) is None


def test_top_k_of_one_is_greedy_at_any_temperature(module: Any) -> None:
    row = logits(500, 9)
    drawn = Sampling(temperature=5.0, top_k=1, seed=4)
    assert sample(module, row, drawn, position=2) == int(np.argmax(row))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 2.0},
        {"seed": -1},
        {"seed": 1 << 64},
    ],
)
def test_values_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    name = next(iter(wrong)).replace("_", "-")
    with pytest.raises(OptionError, match=f"--{name}"):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(OptionError, match="empty"):
        Request(prompt=(), max_tokens=1)


def test_candidates_are_in_the_order_of_logit_then_id() -> None:
    row = np.array([0.0, -0.0, 3, -3, 3, 1e-45, -1e-45, -np.inf], np.float32)
    assert _best_first(row).tolist() == [2, 4, 5, 0, 1, 6, 3, 7]
    random = np.round(logits(5000, 2), 1)
    assert np.array_equal(_best_first(random), np.argsort(-random, kind="stable"))


@pytest.mark.skipif(_native is None, reason="needs the compiled module")
def test_filters_leave_the_same_ids_in_both_modules() -> None:
    row = logits(4099, 5)
    for drawn in (
        Sampling(temperature=0.7, top_p=0.9),
        Sampling(temperature=1.9, min_p=0.02, top_p=0.95, top_k=1000),
    ):
        ours, theirs = (allowed_ids(m, row, drawn) for m in (reference, _native))
        assert ours is not None and theirs is not None
        assert np.array_equal(ours, theirs) and 1 < ours.sum() < 4099
