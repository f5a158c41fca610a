"""The spread of a row, native and reference, against float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from native_cases import BODIES, native

from anyshard.ops import draw

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
