"""How far from the true logits: ours and HF's float32, both measured against `Reference64`.

The bits of ours do not depend on layout, threads or batch (other tests hold that), so one layout
stands for all. Positions compared: all of a 64-token prompt, the last 64 of longer ones, where
the context is longest. HF runs with "sdpa", which transformers takes by default. The figures:
`pytest tests/test_accuracy.py --log-cli-level=info`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accuracy_cases import in_memory, measured, rows, visible
from grid import demo
from models import MODELS, random_weights
from numpy.typing import NDArray

from anyshard.accuracy.measure import compare, weights64
from anyshard.accuracy.report import TIMES_HF, Report
from anyshard.accuracy.table import as_text
from anyshard.checkpoint import Checkpoint, open_checkpoint
from anyshard.loading import f32_profile
from anyshard.ops.float64 import Reference64
from anyshard.tokenizer import open_tokenizer
from anyshard.verify.driver import served
from anyshard.worker import Served

hf = pytest.importorskip("anyshard.accuracy.hf", reason="needs torch and transformers")

pytestmark = pytest.mark.torch

log = logging.getLogger(__name__)

TEXTS = Path(__file__).with_name("texts")
TEXT_NAMES = ("english", "code", "multilingual")
MARGIN_TIMES_HF = 4.0  # a choice that differs lies within this many of HF's largest error
COMPARED = 64  # positions at the end of a prompt
FORCED = 256  # positions of each text

Measured = Callable[..., Report]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(None)


@pytest.fixture(scope="module")
def weights(checkpoint: Checkpoint) -> dict[str, NDArray[np.float64]]:
    return weights64(checkpoint)


@pytest.fixture(scope="module")
def peer(checkpoint: Checkpoint) -> Any:
    return hf.hf_model(checkpoint.config, checkpoint.read)


@pytest.fixture(scope="module")
def of_demo(checkpoint: Checkpoint, weights: dict[str, NDArray[np.float64]], peer: Any) -> Measured:
    """The demo model on the first tokens of a text of these tests, measured once."""
    reference = Reference64(checkpoint.config, weights)

    @lru_cache
    def report(name: str, length: int, model: Served | None = None) -> Report:
        return compare(
            model or demo(),
            reference,
            tokens_of(checkpoint, name, length),
            lengths=(length,),
            last=COMPARED if length != FORCED else None,
            peer=peer,
            threads=2,
        )

    return report


def tokens_of(checkpoint: Checkpoint, name: str, count: int) -> list[int]:
    text = (TEXTS / f"{name}.txt").read_text("utf-8")
    tokens = open_tokenizer(checkpoint).encode(text, add_special=True)
    assert len(tokens) >= count, f"{name}.txt has {len(tokens)} tokens, {count} are needed"
    return tokens[:count]


def assert_as_accurate(report: Report) -> None:
    """By the rule of the report, and the largest error by the same factor."""
    log.info("%s", as_text(report))
    assert report.passed, as_text(report)
    for each in report.lengths:
        assert each.hf is not None
        assert each.ours.max_error <= TIMES_HF * each.hf.max_error, as_text(report)


def unexplained(report: Report) -> list[str]:
    """Lengths where ours chose another token than float64 did across more than HF's own error."""
    found = []
    for each in report.lengths:
        assert each.hf is not None
        bound = MARGIN_TIMES_HF * each.hf.max_error
        log.info("%d choices differ from float64's, bound %.3g", each.ours.num_flips, bound)
        margin = each.ours.largest_flip_margin
        if margin is not None and margin >= bound:
            found.append(f"{each.length}: margin {margin:.3g}, HF's own error {bound:.3g} / 4")
    return found


SLOW = (pytest.mark.slow, pytest.mark.timeout(600))


@pytest.mark.parametrize(
    "length", [64, pytest.param(512, marks=SLOW), pytest.param(1500, marks=SLOW)]
)
def test_logits_are_at_most_twice_as_far_off_as_those_of_hf(of_demo: Measured, length: int) -> None:
    assert_as_accurate(of_demo("english", length))


@pytest.mark.parametrize(
    ("name", "count"), [("english", 64), *(pytest.param(t, FORCED, marks=SLOW) for t in TEXT_NAMES)]
)
def test_another_choice_than_the_true_one_lies_within_the_error_of_hf(
    of_demo: Measured, name: str, count: int
) -> None:
    assert unexplained(of_demo(name, count)) == []


def test_every_op_is_at_most_twice_as_far_off_as_that_of_hf(of_demo: Measured) -> None:
    """Each given its own side's inputs; all layers."""
    report = of_demo("english", 64)
    theirs = rows(report.hf_ops)
    assert rows(report.ops).keys() == theirs.keys()
    far = {
        place: (op.rms_error, theirs[place].rms_error)
        for place, op in rows(report.ops).items()
        if op.rms_error > TIMES_HF * theirs[place].rms_error
    }
    assert not far


@pytest.mark.parametrize("name", MODELS)
def test_random_models_are_as_accurate(name: str) -> None:
    """Biases, other head sizes, untied heads, scores in the hundreds."""
    config, adversarial = MODELS[name], name != "qwen2"
    weights = random_weights(config, seed=3, adversarial=adversarial)
    tokens = np.random.default_rng(4).integers(0, config.vocab, 64).tolist()
    assert_as_accurate(measured(config, weights, tokens, peer=hf.hf_model(config, weights)))


def test_reference_agrees_with_hf_in_float64(
    checkpoint: Checkpoint, weights: dict[str, NDArray[np.float64]]
) -> None:
    """HF rounds norm, RoPE and softmax to float32 there: about six roundings a layer."""
    tokens = tokens_of(checkpoint, "english", 64)
    config = checkpoint.config
    with hf.torch_threads(2):
        model = hf.hf_model(config, checkpoint.read, dtype=hf.torch.float64, attention="eager")
        peers = hf.hf_logits(model, tokens)
    true = Reference64(config, weights).logits(tokens)
    bound = 6 * config.num_layers * 2.0**-24
    assert np.abs(peers - true).max() < bound * np.abs(true).max()


def planted(checkpoint: Checkpoint, change: Callable[[str, Any], Any]) -> Served:
    """The demo model with other weights, packed for the engine."""
    names: Sequence[str] = list(checkpoint.config.tensor_shapes())
    wrong = {name: change(name, checkpoint.read(name)) for name in names}
    image = served(in_memory(checkpoint.config, wrong)).image
    return Served(checkpoint.config, f32_profile(), image)


def test_weights_of_half_precision_are_not_as_accurate(
    checkpoint: Checkpoint, of_demo: Measured
) -> None:
    """The planted fault of the first test."""

    def coarse(name: str, weight: Any) -> Any:
        return hf.torch.from_numpy(weight).bfloat16().float().numpy()

    with pytest.raises(AssertionError, match="rms"):
        assert_as_accurate(of_demo("english", 64, planted(checkpoint, coarse)))


def test_a_wrong_kv_head_in_one_layer_is_a_choice_beyond_the_margin(
    checkpoint: Checkpoint, of_demo: Measured
) -> None:
    """The planted fault of the second test; the table names layer and op."""

    def rolled(name: str, weight: Any) -> Any:
        return np.roll(weight, 64, axis=0) if name == "layers.10.k" else weight

    report = of_demo("english", 64, planted(checkpoint, rolled))
    assert unexplained(report)
    assert visible(report.ops, of_demo("english", 64).ops) == {(10, "k")}
