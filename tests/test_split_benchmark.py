"""What benchmarks/split.py makes of its figures."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from benchmark_modules import benchmark


@pytest.fixture
def split() -> Iterator[ModuleType]:
    with benchmark("split") as module:
        yield module


def figure(split: ModuleType, values: list[float], **more: Any) -> Any:
    return split.Figure(name="a", unit="ms", values=values, **more)


@pytest.mark.parametrize(
    ("bounds", "broken"),
    [
        ({"least": 2.0}, False),
        ({"least": 2.1}, True),
        ({"most": 2.0}, False),
        ({"most": 1.9}, True),
        ({}, False),
    ],
)
def test_bounds_are_of_the_ratio_within_a_round(
    split: ModuleType, bounds: dict[str, float], broken: bool
) -> None:
    # a minute that slows both sides to a tenth: the medians alone would say 10 / 2
    compared = figure(split, [10.0, 1.0, 30.0], beside=[5.0, 0.5, 2.0], **bounds)
    assert compared.ratios == [2.0, 2.0, 15.0]
    assert compared.is_broken == broken


@pytest.mark.parametrize(("most", "broken"), [(3.0, False), (2.9, True)])
def test_what_stands_for_itself_is_held_by_its_median(
    split: ModuleType, most: float, broken: bool
) -> None:
    alone = figure(split, [1.0, 9.0, 3.0], most=most)
    assert alone.ratios is None
    assert alone.is_broken == broken


def test_decode_is_bounded_and_prefill_is_told(split: ModuleType) -> None:
    tasks = [split.hf.Task("decode", 16, 8), split.hf.Task("prefill", 64, 1)]
    arms = {"anyshard, -tp 2": [8.0, 9.0], "anyshard, 2 threads": [10.0, 10.0]}
    decode, prefill = split.cut_beside_whole("int8", tasks, {task.name: arms for task in tasks})
    assert decode.ratios == prefill.ratios == [0.8, 0.9]
    assert decode.is_broken and not prefill.is_broken


class FakeArm:
    """Steps of `step_ms`, by rows; its tokens are `tokens`."""

    def __init__(self, name: str, step_ms: dict[int, float], token: int = 7) -> None:
        self.name, self.step_ms, self.token, self.asked = name, step_ms, token, list[int]()

    def ask(self, prompt: list[int], num_tokens: int, *, rows: int, logits: bool) -> dict[str, Any]:
        assert len(prompt) == 2 and not logits
        self.asked.append(rows)
        rest_s = (num_tokens - 1) * self.step_ms[rows] / 1000
        return {"tokens": [self.token] * num_tokens, "first_s": 1.0, "rest_s": rest_s}


def test_a_step_is_the_time_of_a_token_after_the_first(
    split: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split.hf, "PAUSE_S", 0.0)
    task = split.hf.Task("decode", 2, 5)
    arms = [FakeArm("anyshard, 1 thread", {1: 8.0, 4: 10.0}), FakeArm("b", {1: 4.0, 4: 8.0})]
    one, two = split.steps(arms, task, [1, 2, 3], 3)
    assert one.values == pytest.approx([10.0] * 3) and one.beside == pytest.approx([8.0] * 3)
    assert one.name == "step, int8, 1 thread: 4 rows / 1 row"
    assert two.is_broken and not one.is_broken
    assert sorted(arms[0].asked) == [1] * 4 + [4] * 4, "a round to warm up, and three that count"
    arms[1].token = 8
    with pytest.raises(AssertionError, match="a batch changed a token"):
        split.steps(arms, task, [1, 2, 3], 1)


def test_every_row_of_the_table_has_the_columns_of_its_head(split: ModuleType) -> None:
    where = dict.fromkeys(("cpu", "cores", "kernel", "body", "load_before", "date"), "x")
    figures = [
        figure(split, [2.0], beside=[1.0], most=1.5),
        figure(split, [2.0]),
    ]
    lines = split.table(figures, where, rounds=1, command="c").splitlines()
    assert len({line.count("|") for line in lines[:4]}) == 1
    assert lines[2] == "| a | 2.0 (2.0–2.0) ms | 1.0 (1.0–1.0) | 2.00 (2.00–2.00) | at most 1.5 |"
    assert lines[3] == "| a | 2.0 (2.0–2.0) ms |  |  |  |"


@pytest.mark.ranks
def test_an_exchange_of_a_row_takes_time(
    split: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "EXCHANGES", 50)
    found = split.exchange(2)
    assert len(found.values) == 2 and min(found.values) > 0
