"""The measurement finds a fault where it was made, and refuses what cannot be measured.

Faults are planted in the engine's side only: weights, configuration, or what a rank runs.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from accuracy_cases import Place, Weights, in_memory, measured, rows, visible
from models import (
    ADVERSARIAL_9_3,
    MODELS,
    QWEN3_SHAPED,
    plant_overflow,
    random_weights,
    write_hf_model,
)

from anyshard.accuracy import measure
from anyshard.accuracy.figures import log_softmax
from anyshard.accuracy.forced import CHUNK, forced_logits, query_factor
from anyshard.accuracy.local import POINTS, OpMeter
from anyshard.accuracy.measure import LENGTHS, _Found, needed_bytes, shipped_text
from anyshard.accuracy.table import as_markdown, as_text
from anyshard.binder import Binder
from anyshard.checkpoint import open_checkpoint
from anyshard.errors import CheckpointError, UserError
from anyshard.op import Op
from anyshard.ops import choose_body
from anyshard.ops.float64 import Reference64
from anyshard.tokenizer import open_tokenizer
from anyshard.verify.driver import Driver, served
from anyshard.verify.naive import to_bf16
from anyshard.verify.prompt import hashed_tokens
from anyshard.worker import Worker

CONFIGS = {**MODELS, "qwen3": QWEN3_SHAPED}
LENGTHS_TRIED = (1, 31, 32, 33, 65)

TINY = replace(ADVERSARIAL_9_3, num_layers=2, vocab=211)  # 211 is no multiple of 8
TOKENS = hashed_tokens(70, TINY.vocab, seed=3)  # two frames


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for each in value.values() for number in numbers(each)]
    if isinstance(value, list):
        return [number for each in value for number in numbers(each)]
    return [float(value)] if isinstance(value, (int, float)) else []


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_and_length_has_every_row_and_finite_numbers(name: str) -> None:
    config = CONFIGS[name]
    weights = random_weights(config, seed=3, adversarial=name != "qwen2")
    tokens = hashed_tokens(66, config.vocab, seed=1)
    report = measured(config, weights, tokens, lengths=LENGTHS_TRIED)
    assert [each.length for each in report.lengths] == list(LENGTHS_TRIED)
    layers = [(layer, point) for layer in range(config.num_layers) for point in POINTS[1:-1]]
    assert list(rows(report.ops)) == [(None, "embed"), *layers, (None, "logits")]
    plain = msgspec.json.decode(report.to_json())
    assert plain["lengths"][0]["ours"]["true_perplexity"] > 0  # one token, and the next is told
    assert np.isfinite(numbers(plain)).all()
    assert rows(report.ops)[None, "embed"].max_error == 0
    assert all(op.rms_error > 0 for op in report.ops[1:])  # float32 rounds everywhere
    for each in report.lengths:
        assert each.ours.rms_error < each.ours.max_error < each.ours.magnitude
    assert as_text(report) and as_markdown(report)


@pytest.mark.parametrize("name", ["adversarial-9-3", "qwen3"])
@pytest.mark.parametrize("length", [*LENGTHS_TRIED, CHUNK])
def test_what_is_measured_has_the_bits_of_a_split_engine(name: str, length: int) -> None:
    config = CONFIGS[name]
    weights = random_weights(config, seed=3, adversarial=True)
    model = served(in_memory(config, weights))
    tokens = hashed_tokens(length, config.vocab, seed=1)
    meter = OpMeter(Reference64(config, weights), query_factor=query_factor(config.head_dim))
    body = choose_body("auto")
    found = [
        np.concatenate(list(forced_logits(model, tokens, body=body, threads=1, meter=each)))
        for each in (None, meter)
    ]
    with Driver(model, tp=2, pp=2, rows_max=7, max_model_len=length) as driver:
        split = driver.logits(tokens)
    assert all(np.array_equal(split, each) for each in found)


def test_the_reference_body_is_measured_as_the_same_numbers() -> None:
    config = replace(TINY, hidden=72, ffn=72, num_layers=1)
    weights = random_weights(config, seed=3, adversarial=True)
    model = served(in_memory(config, weights))
    tokens = TOKENS[:5]
    bodies = (choose_body("auto"), choose_body("reference"))
    one, other = (next(iter(forced_logits(model, tokens, body=body, threads=1))) for body in bodies)
    assert np.array_equal(one, other)


# --- planted faults -----------------------------------------------------------------------------


class Bf16Ffn(Worker):
    """Activations of one layer's MLP rounded to bfloat16."""

    class binder_type(Binder):
        def _gate_up(self, op: Op) -> Callable[[int], None]:
            gate_up, f_RF = super()._gate_up(op), self.w.f_RF

            def run(count: int) -> None:
                gate_up(count)
                f_RF[:count] = to_bf16(f_RF[:count])

            return run if op.layer == 1 else gate_up


class StaleAttention(Worker):
    """One layer's attention output is that of the row before, in the last head."""

    class binder_type(Binder):
        def _attention(self, op: Op) -> Callable[[int], None]:
            attention, a_RN = super()._attention(op), self.w.a_RN
            d = self.w.config.head_dim

            def run(count: int) -> None:
                attention(count)
                a_RN[1:count, -d:] = a_RN[: count - 1, -d:].copy()

            return run if op.layer == 0 else attention


def one_weight(name: str) -> Callable[[dict[str, Any]], None]:
    """Its largest element grows by 1 %."""

    def change(weights: dict[str, Any]) -> None:
        wrong = weights[name] = weights[name].copy()
        place = np.unravel_index(np.abs(wrong).argmax(), wrong.shape)
        wrong[place] *= np.float32(1.01)

    return change


def dropped_norm(name: str) -> Callable[[dict[str, Any]], None]:
    """Its weight is one everywhere."""

    def change(weights: dict[str, Any]) -> None:
        weights[name] = np.ones_like(weights[name])

    return change


FAULTS: dict[str, dict[str, Any]] = {
    "one weight of q": {"change": one_weight("layers.1.q")},
    "one weight of o": {"change": one_weight("layers.0.o")},
    "one weight of up": {"change": one_weight("layers.1.up")},
    "one weight of down": {"change": one_weight("layers.0.down")},
    "one weight of the head": {"change": one_weight("head")},
    "attention norm dropped": {"change": dropped_norm("layers.1.attn_norm")},
    "mlp norm dropped": {"change": dropped_norm("layers.0.mlp_norm")},
    "last norm dropped": {"change": dropped_norm("norm")},
    "RoPE theta": {"config": replace(TINY, rope_theta=500_000.0)},
    "bf16 activations": {"worker": Bf16Ffn},
    "stale attention": {"worker": StaleAttention},
}
WHERE: dict[str, set[Place]] = {
    "one weight of q": {(1, "q")},
    "one weight of o": {(0, "reduce_o")},
    "one weight of up": {(1, "ffn")},
    "one weight of down": {(0, "reduce_down")},
    "one weight of the head": {(None, "logits")},
    "attention norm dropped": {(1, "q"), (1, "k"), (1, "v")},
    "mlp norm dropped": {(0, "ffn")},
    "last norm dropped": {(None, "logits")},
    "RoPE theta": {(layer, point) for layer in (0, 1) for point in ("q", "k")},
    "bf16 activations": {(1, "ffn")},
    "stale attention": {(0, "attention")},
}


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(TINY, seed=3, adversarial=False)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows_in_the_row_where_it_was_made(weights: Weights, fault: str) -> None:
    clean = measured(TINY, weights, TOKENS)
    assert visible(clean.ops, clean.ops) == set()
    planted = run_with(weights, fault)
    assert visible(planted.ops, clean.ops) == WHERE[fault]
    assert planted.lengths[0].ours.rms_error > 8 * clean.lengths[0].ours.rms_error


def run_with(weights: Weights, fault: str, *, peer: Any = None) -> Any:
    """The measurement with that fault in the engine."""
    plan = FAULTS[fault]
    wrong = dict(weights)
    if "change" in plan:
        plan["change"](wrong)
    return measured(
        TINY,
        weights,
        TOKENS,
        engine_weights=wrong,
        engine_config=plan.get("config"),
        worker_type=plan.get("worker", Worker),
        peer=peer,
    )


# --- what is asked for --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return str(write_hf_model(folder, TINY, seed=3))


def test_progress_counts_up_to_the_end(directory: str) -> None:
    told: list[tuple[int, int]] = []
    measure(
        directory,
        tokens=TOKENS,
        lengths=[65, 2],
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == sorted(told)
    assert {total for _, total in told} == {130}
    assert told[-1] == (130, 130)
    assert len({done for done, _ in told}) >= TINY.num_layers + 2  # and it moves on the way


def test_without_lengths_the_usual_ones_are_cut_to_what_there_is(directory: str) -> None:
    report = measure(directory, tokens=TOKENS)
    assert [each.length for each in report.lengths] == [64, 70]
    assert report.notes == ("the text has 70 tokens: 70 measured in place of 512, 1500",)
    assert report.ops_length == report.manifest.num_tokens == 70
    assert report.passed is None


def test_the_last_positions_alone_can_be_measured(directory: str) -> None:
    report = measure(directory, tokens=TOKENS, lengths=[70], last=3)
    whole = measure(directory, tokens=TOKENS, lengths=[70])
    assert (report.lengths[0].start, whole.lengths[0].start) == (67, 0)
    assert report.lengths[0].ours != whole.lengths[0].ours
    assert report.ops == whole.ops
    assert "70 tokens, the last 3" in as_text(report)


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ({"lengths": [71]}, "length 71 was asked for, but the text has 70 tokens; lengths from 1"),
        ({"lengths": [0, 5]}, "length 0 was asked for"),
        ({"lengths": []}, "no length was asked for"),
        ({"tokens": []}, "no tokens were given"),
        ({"tokens": [1, 211]}, "token 211 is none of this model, whose ids run from 0 to 210"),
        ({"tokens": [5] * 600, "lengths": [513]}, "the context holds 512 tokens"),
        ({"tokens": None}, "comes without a tokenizer"),
        ({"free_bytes": 1000}, r"million weights with float64 needs .* MB of memory.*1\.0 kB are"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(
    directory: str, asked: dict[str, Any], answer: str
) -> None:
    with pytest.raises(UserError, match=answer) as caught:
        measure(directory, **({"tokens": TOKENS} | asked))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_model_that_does_not_fit_is_refused_before_it_is_read() -> None:
    config = open_checkpoint(None).config
    need = needed_bytes(config, against="float64", length=64)
    assert need > 12 * 134e6
    with pytest.raises(CheckpointError, match=r"135 million weights.*needs 2\.0 GB.*1\.5 GB are"):
        measure(None, lengths=[64], free_bytes=1_500_000_000)
    assert needed_bytes(config, against="hf", length=64) > need + 4 * 134e6
    assert needed_bytes(config, against="float64", length=1500) > need


def test_a_model_that_overflows_is_refused_with_position_and_op(tmp_path: Path) -> None:
    def change(weights: dict[str, Any]) -> None:
        plant_overflow(weights, layer_of={7: 0})

    directory = write_hf_model(tmp_path, ADVERSARIAL_9_3, seed=3, change=change)
    tokens = [1, 2, 3, 7, 4]
    with pytest.raises(UserError, match=r"position 3 .* float32 in layers\.1\.qkv"):
        measure(str(directory), tokens=tokens)


def test_a_missing_extra_is_named_with_what_to_type(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "anyshard.accuracy.hf", raising=False)
    monkeypatch.delattr("anyshard.accuracy.hf", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        UserError, match=r"transformers is not installed; pip install -e '\.\[verify"
    ):
        measure(directory, against="hf", tokens=TOKENS)


def test_without_hf_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys, anyshard.accuracy\n"
        "print({'torch', 'transformers', 'anyshard.accuracy.hf'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_positions_and_the_tokens_after_them_are_those_of_the_text() -> None:
    """Two pieces of 4, of which the last 3 positions count; HF gives what we give."""
    rng = np.random.default_rng(0)
    true = rng.normal(0, 2, (8, 11))
    mine = (true + rng.normal(0, 0.1, true.shape)).astype(np.float32)
    tokens = [int(token) for token in rng.integers(0, 11, 9)]
    spans = {8: (5, 8), 6: (0, 6)}
    found = _Found(spans, 11)
    same: Any = SimpleNamespace(head=lambda x: x)
    peer = SimpleNamespace(logits=lambda first, end: mine[first:end])
    for start in (0, 4):
        found.piece(same, true, tokens, start, mine[start : start + 4], {8: peer, 6: peer})
    log_q = log_softmax(mine.astype(np.float64))
    for figures, (low, high) in zip(found.figures(), spans.values(), strict=True):
        assert figures.hf == figures.ours
        nats = [-log_q[place, tokens[place + 1]] for place in range(low, high)]
        assert figures.ours.perplexity is not None
        assert math.isclose(figures.ours.perplexity, math.exp(sum(nats) / len(nats)))


def test_the_shipped_text_is_long_enough_and_of_many_kinds() -> None:
    text = shipped_text()
    tokens = open_tokenizer(open_checkpoint(None)).encode(text, add_special=True)
    assert len(tokens) > max(LENGTHS)
    for kind in (
        "```python",
        "SELECT",
        "Übrigens",
        "¿Quién",
        "Часы",
        "時計",
        "钟表匠",
        "الساعة",
        "🙂",
    ):
        assert kind in text
