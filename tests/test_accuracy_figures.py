"""The numbers of a report, each against a slow computation of its definition."""

from __future__ import annotations

import json
import math
from decimal import Context, Decimal, localcontext

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from anyshard.accuracy.figures import (
    Distance,
    PositionFigures,
    TrueRows,
    kl_divergence,
    log_softmax,
    over_layers,
)
from anyshard.accuracy.report import (
    TIMES_HF,
    LengthFigures,
    LogitFigures,
    Manifest,
    OpFigures,
    Report,
)
from anyshard.accuracy.table import Table, as_markdown, as_text, logits_table, ops_table

F64 = NDArray[np.float64]

ROUNDING = 2.0**-53
STEPS = 64  # roundings on the way to one number, over a vocabulary of 11


def naive_kl(p_row: F64, error_row: F64) -> Decimal:
    """Sum of p (log p - log q) in 60 digits; the logits of q are those of p plus the error."""
    with localcontext(Context(prec=60)):
        p = [Decimal(float(x)) for x in p_row]
        q = [x + Decimal(float(e)) for x, e in zip(p, error_row, strict=True)]
        log_p, log_q = (
            [x - sum((each.exp() for each in row), Decimal(0)).ln() for x in row] for row in (p, q)
        )
        terms = [a.exp() * (a - b) for a, b in zip(log_p, log_q, strict=True)]
        return sum(terms, Decimal(0))


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-7, 1e-3, 0.4, 3.0, 40.0])
def test_kl_is_that_of_a_naive_computation_in_many_digits(size: float) -> None:
    rng = np.random.default_rng(3)
    p_PV = rng.normal(0, 4, (5, 11))
    error_PV = rng.normal(0, 1, (5, 11)) * size
    found = kl_divergence(log_softmax(p_PV), log_softmax(p_PV + error_PV), error_PV)
    assert found.dtype == np.float64
    for row in range(5):
        exact = naive_kl(p_PV[row], error_PV[row])
        largest = np.abs(error_PV[row]).max()
        if largest > 0.5:  # the plain sum, whose terms are as large as log q
            largest = np.abs(log_softmax(p_PV + error_PV)).max()
        assert abs(Decimal(float(found[row])) - exact) <= Decimal(STEPS * ROUNDING * largest)
        assert size == 0 or found[row] > 0


def test_a_shift_of_all_logits_is_no_divergence() -> None:
    p_PV = np.random.default_rng(3).normal(0, 4, (5, 11))
    shift = np.full_like(p_PV, 0.5)
    found = kl_divergence(log_softmax(p_PV), log_softmax(p_PV + shift), shift)
    assert np.abs(found).max() <= STEPS * ROUNDING


def test_log_softmax_of_large_logits_is_finite_and_sums_to_one() -> None:
    log_p = log_softmax(np.array([[1e4, 0.0, -1e4], [5.0, 5.0, 5.0]]))
    assert np.isfinite(log_p).all()
    assert np.abs(np.exp(log_p).sum(axis=1) - 1).max() <= STEPS * ROUNDING
    assert log_p[1].tolist() == [-math.log(3)] * 3


TRUE = np.array(
    [
        [3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0],
        [0.0, 5.0, 5.0, 1.0, 2.0, 3.0, 4.0],
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    ]
)


def summary(mine: F64, targets: tuple[int, ...] = (1, 2, -1)) -> LogitFigures:
    return TrueRows(TRUE, targets).compare(mine).summary(start=10, vocab=7)


def test_equal_logits_have_no_error_and_all_agreement() -> None:
    figures = summary(TRUE)
    assert (figures.rms_error, figures.max_error, figures.relative_error) == (0, 0, 0)
    assert (figures.kl_mean, figures.kl_p999, figures.kl_max) == (0, 0, 0)
    assert (figures.top1_agreement, figures.top5_agreement) == (1, 1)
    assert (figures.num_flips, figures.first_flip, figures.largest_flip_margin) == (0, None, None)
    assert figures.perplexity_difference == 0
    log_p = log_softmax(TRUE)
    assert figures.perplexity == np.exp(-(log_p[0, 1] + log_p[1, 2]) / 2)


def test_error_flip_and_agreement_are_counted() -> None:
    mine = TRUE.copy()
    mine[1, 2] += 0.25  # of two equal logits the first was chosen; now the second
    mine[2, 6] += 0.5  # a tie of all: ids 0 to 4 were the five, now 6 and 0 to 3
    figures = summary(mine)
    assert figures.max_error == 0.5
    assert figures.rms_error == math.sqrt((0.25**2 + 0.5**2) / 21)
    assert figures.magnitude == math.sqrt(np.square(TRUE).sum() / 21)
    assert figures.relative_error is not None
    assert math.isclose(figures.relative_error, figures.rms_error / figures.magnitude)
    assert figures.num_flips == 2
    assert figures.first_flip is not None
    assert (figures.first_flip.position, figures.first_flip.margin) == (11, 0.0)
    assert figures.largest_flip_margin == 0.0
    assert figures.top1_agreement == 1 / 3
    assert math.isclose(figures.top5_agreement, (5 + 5 + 4) / 15)


def test_a_flip_tells_what_the_reference_saw_between_the_two() -> None:
    mine = TRUE.copy()
    mine[0, 3] = 9.0
    figures = summary(mine)
    assert figures.first_flip is not None
    assert (figures.first_flip.position, figures.first_flip.margin) == (10, 3.0)


def test_a_text_that_ends_has_no_perplexity() -> None:
    figures = summary(TRUE, (-1, -1, -1))
    assert figures.perplexity is figures.true_perplexity is figures.perplexity_difference is None


def test_perplexity_is_that_of_the_engine() -> None:
    mine = TRUE.copy()
    mine[0, 1] += 1.0  # the id that the text goes on with
    figures = summary(mine)
    log_q = log_softmax(mine)
    assert figures.perplexity == np.exp(-(log_q[0, 1] + log_q[1, 2]) / 2)
    assert figures.perplexity_difference is not None and figures.perplexity_difference < 0


def test_parts_joined_are_the_whole_and_an_engine_may_begin_later() -> None:
    mine = TRUE + np.random.default_rng(1).normal(0, 0.1, TRUE.shape)
    true = TrueRows(TRUE, (1, 2, -1))
    whole = true.compare(mine)
    joined = PositionFigures.joined([whole.part(0, 1), true.compare(mine[1:], first=1)])
    assert joined.summary(start=0, vocab=7) == whole.summary(start=0, vocab=7)


def test_the_quantile_is_a_value_that_was_seen() -> None:
    kl = np.arange(3000.0)
    zero = np.zeros(3000)
    figures = PositionFigures(zero, zero, zero, kl, zero == 0, zero, zero, zero, zero)
    assert figures.summary(start=0, vocab=1).kl_p999 == 2996.0  # three of 3,000 lie above it


def test_a_distance_of_pieces_is_that_of_the_whole() -> None:
    true = np.random.default_rng(1).normal(0, 1, (4, 6))
    mine = true.astype(np.float32)
    whole, pieces = Distance(), Distance()
    whole.add(mine, true)
    for row in range(4):
        pieces.add(mine[row : row + 1], true[row : row + 1])
    one, other = whole.figures("v", 0), pieces.figures("v", 0)
    assert math.isclose(one.rms_error, other.rms_error)
    assert one.rms_error == math.sqrt(np.square(mine - true).mean()) > 0
    assert one.max_error == other.max_error == np.abs(mine - true).max()
    error = np.linalg.norm(mine - true) / np.linalg.norm(true)
    assert one.relative_error is not None and math.isclose(one.relative_error, error)


def test_a_wrong_tensor_where_zero_is_true_has_no_ratio() -> None:
    distance = Distance()
    distance.add(np.ones((1, 2), np.float32), np.zeros((1, 2)))
    assert distance.figures("v", 0).relative_error is None
    assert Distance().figures("v", 0).relative_error == 0


def op(layer: int | None, error: float, magnitude: float = 2.0, point: str = "v") -> OpFigures:
    return OpFigures(
        point=point,
        layer=layer,
        rms_error=error,
        max_error=2 * error,
        relative_error=error / magnitude,
        magnitude=magnitude,
    )


def test_layers_are_taken_together_and_the_worst_is_named() -> None:
    found = over_layers(
        [op(0, 3.0), op(1, 4.0, magnitude=8.0), op(2, 0.0), op(None, 1.0, 2.0, "q")]
    )
    together, worst = found["v"]
    assert together.rms_error == math.sqrt(25 / 3)
    assert together.max_error == 8.0
    assert together.magnitude == math.sqrt((4 + 64 + 4) / 3)
    assert worst.layer == 0
    assert found["q"][1].layer is None


def report(ours: float, hf: float | None) -> Report:
    def figures(rms: float) -> LogitFigures:
        return msgspec.structs.replace(summary(TRUE), rms_error=rms)

    length = LengthFigures(
        length=3, start=0, ours=figures(ours), hf=None if hf is None else figures(hf)
    )
    manifest = Manifest(
        model="m",
        architecture="llama",
        num_weights=1,
        profile="f32",
        profile_sha256="",
        text="given tokens",
        num_tokens=3,
        tokens_sha256="",
        kernels="avx2",
        threads=1,
        version="0",
        peer=None if hf is None else "transformers",
    )
    return Report(
        manifest=manifest,
        lengths=(length,),
        ops_length=3,
        ops=(op(None, 0.0, point="embed"), op(0, 1.0)),
        hf_ops=() if hf is None else (op(None, 0.0, point="embed"), op(0, 2.0)),
        notes=("the context holds 3 tokens",),
    )


def test_the_rule_is_twice_the_error_of_hf() -> None:
    assert TIMES_HF == 2
    assert report(2.0, 1.0).passed is True
    assert report(2.1, 1.0).passed is False
    assert report(1.0, 0.0).passed is False
    assert report(0.0, 0.0).passed is True
    assert report(1.0, None).passed is None
    assert "NOT as accurate" in report(2.1, 1.0).verdict
    assert "2.10 at 3" in report(2.1, 1.0).verdict
    assert "--against hf" in report(1.0, None).verdict


def test_int8_is_shown_beside_hf_and_not_judged_by_it() -> None:
    """HF computes in float32: the rule is of one arithmetic."""
    far = report(900.0, 1.0)
    int8 = msgspec.structs.replace(
        far, manifest=msgspec.structs.replace(far.manifest, profile="int8")
    )
    assert far.passed is False and int8.passed is None
    assert "900.00 at 3" in int8.verdict and "--quantization none" in int8.verdict
    assert json.loads(int8.to_json())["passed"] is None


def test_every_length_must_pass() -> None:
    good, bad = report(1.0, 1.0), report(2.1, 1.0)
    for lengths in ((*good.lengths, *bad.lengths), (*bad.lengths, *good.lengths)):
        assert msgspec.structs.replace(good, lengths=lengths).passed is False


def test_json_holds_the_whole_report_and_the_verdict() -> None:
    one = report(2.1, 1.0)
    raw = one.to_json()
    assert msgspec.json.decode(raw, type=Report) == one
    plain = msgspec.json.decode(raw)
    assert (plain["passed"], plain["times_hf"], plain["lengths"][0]["ratio"]) == (False, 2.0, 2.1)


def test_tables_hold_both_sides_in_one_cell() -> None:
    one = report(2.1e-6, 1.5e-7)
    assert ("rms error", "2.1e-6 / 1.5e-7") in logits_table(one).rows
    assert ops_table(one).rows[1] == ("v", "1 / 2", "2 / 4", "0.5 / 1", "0", "2")
    alone = report(2.1e-6, None)
    assert ("rms error", "2.1e-6") in logits_table(alone).rows
    for shown in (as_text(one), as_markdown(one)):
        assert "rms error" in shown and "the last" not in shown
        assert "NOT as accurate" in shown
        assert "context holds 3 tokens" in shown.replace("The", "the")


def test_a_table_is_aligned_as_text_and_whole_as_markdown() -> None:
    table = Table(("a", "bb"), (("long", "1"), ("x", "100")))
    assert table.text() == "a      bb\nlong    1\nx     100"
    assert table.markdown() == "| a | bb |\n| --- | --- |\n| long | 1 |\n| x | 100 |"
