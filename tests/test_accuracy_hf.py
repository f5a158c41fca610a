"""HF as the peer: the same weights, the same rows, and the rule that a fault breaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accuracy_cases import measured, rows, visible
from models import ADVERSARIAL_9_3, QWEN2_SHAPED, QWEN3_SHAPED, random_weights, write_hf_model
from test_accuracy_measure import FAULTS, TINY, TOKENS, run_with

from anyshard.accuracy import as_text, measure
from anyshard.accuracy.hf_fields import hf_config
from anyshard.accuracy.local import OpMeter
from anyshard.config import Llama3Scaling, ModelConfig, RopeDivisors, config_from_hf
from anyshard.errors import UserError
from anyshard.ops.float64 import Reference64
from anyshard.verify.prompt import hashed_tokens

hf = pytest.importorskip("anyshard.accuracy.hf", reason="needs torch and transformers")

pytestmark = pytest.mark.torch

SMALL_QWEN2 = replace(QWEN2_SHAPED, hidden=112, ffn=200, head_dim=8, vocab=211)
SCALED = replace(
    TINY,
    rope_scaling=Llama3Scaling(
        factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=100
    ),
)
DIVIDED = replace(
    TINY, rope_scaling=RopeDivisors(divisors=(1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 6.5, 8.0))
)
FAMILIES: dict[str, ModelConfig] = {
    "llama": TINY,
    "llama 3.1": SCALED,
    "llama 3.1 as GGUF": DIVIDED,
    "qwen2": SMALL_QWEN2,
    "qwen3": QWEN3_SHAPED,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_ours_and_hf_are_measured_in_the_same_rows(name: str) -> None:
    config = FAMILIES[name]
    weights = random_weights(config, seed=3, adversarial=False)
    tokens = hashed_tokens(70, config.vocab, seed=3)
    peer = hf.hf_model(config, weights)
    report = measured(config, weights, tokens, lengths=(1, 33, 70), peer=peer)
    assert report.passed, as_text(report)
    mine, theirs = rows(report.ops), rows(report.hf_ops)
    assert list(mine) == list(theirs)
    assert theirs[None, "embed"].max_error == 0
    # both are given the same float64 op: HF's rows would show a hook at another place
    for place, op in theirs.items():
        assert op.rms_error < 1e-3 * op.magnitude
        assert abs(op.magnitude - mine[place].magnitude) < 1e-3 * op.magnitude


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_breaks_the_rule(fault: str) -> None:
    weights = random_weights(TINY, seed=3, adversarial=False)
    peer = hf.hf_model(TINY, weights)
    clean = measured(TINY, weights, TOKENS, peer=peer)
    assert clean.passed, as_text(clean)
    planted = run_with(weights, fault, peer=peer)
    assert planted.passed is False
    assert planted.hf_ops == clean.hf_ops
    assert planted.lengths[0].hf == clean.lengths[0].hf


def test_a_fault_of_hf_shows_in_its_rows() -> None:
    weights = random_weights(TINY, seed=3, adversarial=False)
    clean = measured(TINY, weights, TOKENS, peer=hf.hf_model(TINY, weights))
    wrong = {**weights, "layers.1.v": weights["layers.1.v"] * np.float32(1.01)}
    report = measured(TINY, weights, TOKENS, peer=hf.hf_model(TINY, wrong))
    assert visible(report.hf_ops, clean.hf_ops) == {(1, "v")}
    assert report.ops == clean.ops


@pytest.mark.parametrize("name", FAMILIES)
def test_metered_logits_are_those_of_a_plain_forward_pass(name: str) -> None:
    config = FAMILIES[name]
    weights = random_weights(config, seed=3, adversarial=False)
    tokens = hashed_tokens(70, config.vocab, seed=3)
    model = hf.hf_model(config, weights)
    plain = hf.hf_logits(model, tokens)
    meter = OpMeter(Reference64(config, weights), query_factor=1.0)
    run = hf.HfRun(model, tokens, meter=meter)
    assert np.array_equal(run.logits(0, 70), plain)
    assert np.array_equal(hf.hf_logits(model, tokens), plain)  # and nothing is left behind


def test_fields_lead_back_to_the_configuration() -> None:
    for config in (TINY, SCALED, SMALL_QWEN2, QWEN3_SHAPED, ADVERSARIAL_9_3):
        assert config_from_hf(hf_config(config)) == config


@pytest.mark.parametrize(
    ("config", "answer"),
    [
        (replace(SMALL_QWEN2, head_dim=16), "14 heads of 16 and a hidden size of 112"),
        (replace(TINY, o_bias=False), "has biases on q, k, v and no biases on o"),
        (replace(TINY, qkv_bias=False), "has no biases on q, k, v and biases on o"),
    ],
)
def test_a_model_without_an_hf_counterpart_is_refused(config: ModelConfig, answer: str) -> None:
    with pytest.raises(UserError, match=answer):
        hf.hf_model(config, random_weights(config, seed=3, adversarial=False))


def test_a_directory_is_measured_beside_hf(tmp_path: Path) -> None:
    directory = write_hf_model(tmp_path, TINY, seed=3)
    told: list[Any] = []
    report = measure(
        str(directory),
        against="hf",
        tokens=TOKENS,
        lengths=[5, 70],
        progress=lambda done, total: told.append((done, total)),
    )
    assert report.passed
    assert report.manifest.peer is not None and "transformers" in report.manifest.peer
    assert told == sorted(told) and told[-1] == (2 * 70 + 75, 2 * 70 + 75)
    assert (70 + 5 + 35, 2 * 70 + 75) in told  # HF's pass tells its layers, here the first of two
