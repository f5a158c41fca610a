"""How far from the true logits: ours and HF's float32, both measured against `Reference64`.

The bits of ours do not depend on layout, threads or batch (other tests hold that), so one layout
stands for all. Positions compared: all of a 64-token prompt, the last 64 of longer ones, where
the context is longest. HF runs with "sdpa", which transformers takes by default. The figures:
`pytest tests/test_accuracy.py --log-cli-level=info`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver import Driver, demo, served
from models import MODELS, random_weights, write_hf_model
from numpy.typing import NDArray

from anyshard.checkpoint import Checkpoint, open_checkpoint
from anyshard.ops.float64 import Reference64
from anyshard.tokenizer import open_tokenizer

hf = pytest.importorskip("hf", reason="needs torch and transformers")

pytestmark = pytest.mark.torch

log = logging.getLogger(__name__)

Floats = NDArray[Any]
Truth = Callable[[tuple[int, ...], range], Floats]  # reference logits, computed once

TEXTS = Path(__file__).with_name("texts")
TEXT_NAMES = ("english", "code", "multilingual")
TIMES_HF = 2.0  # ours may be as far from the reference as this many times HF's float32
MARGIN_TIMES_HF = 4.0  # a choice that differs lies within this many of HF's largest error
COMPARED = 64  # positions at the end of a prompt
FORCED = 256  # positions of each text


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(None)


@pytest.fixture(scope="module")
def truth(checkpoint: Checkpoint) -> Truth:
    reference = Reference64(checkpoint.config, weights_of(checkpoint))

    @lru_cache
    def logits(tokens: tuple[int, ...], positions: range) -> Floats:
        return reference.logits(tokens, positions=positions)

    return logits


@pytest.fixture(scope="module")
def peer(checkpoint: Checkpoint) -> Any:
    return hf.hf_model(checkpoint.config, weights_of(checkpoint))


@pytest.fixture(scope="module")
def ours(checkpoint: Checkpoint) -> Iterator[Driver]:
    with Driver(demo(), rows_max=64, max_model_len=1536, threads=2) as driver:
        yield driver


def weights_of(checkpoint: Checkpoint) -> dict[str, Floats]:
    return {name: checkpoint.read(name) for name in checkpoint.config.tensor_shapes()}


def tokens_of(checkpoint: Checkpoint, name: str, count: int) -> tuple[int, ...]:
    text = (TEXTS / f"{name}.txt").read_text("utf-8")
    tokens = open_tokenizer(checkpoint).encode(text, add_special=True)
    assert len(tokens) >= count, f"{name}.txt has {len(tokens)} tokens, {count} are needed"
    return tuple(tokens[:count])


def rms_and_max(error: Floats) -> NDArray[np.float64]:
    """Over all positions and the whole vocabulary."""
    return np.array([np.sqrt(np.mean(np.square(error))), np.abs(error).max()])


def assert_as_accurate(mine: Floats, peers: Floats, true: Floats) -> None:
    assert mine.dtype == peers.dtype == np.float32
    assert mine.shape == peers.shape == true.shape
    here, there = rms_and_max(mine - true), rms_and_max(peers - true)
    figures = (
        f"rms {here[0]:.3g} of HF's {there[0]:.3g}, max {here[1]:.3g} of HF's {there[1]:.3g}, "
        f"logits rms {rms_and_max(true)[0]:.3g}"
    )
    log.info(figures)
    assert (here <= TIMES_HF * there).all(), figures


def unexplained(mine: Floats, peers: Floats, true: Floats) -> list[str]:
    """Positions where the two choose differently though HF saw a margin beyond its own error.

    The margin is HF's logit of its choice less its logit of ours: at least its top 1 less top 2.
    """
    bound = MARGIN_TIMES_HF * np.abs(peers - true).max()
    differing = np.flatnonzero(mine.argmax(1) != peers.argmax(1))
    log.info("%d of %d choices differ, bound %.3g", len(differing), len(mine), bound)
    found = []
    for row in differing:
        margin = peers[row].max() - peers[row, mine[row].argmax()]
        if margin >= bound:
            found.append(f"position {row}: margin {margin:.3g}, HF's own error {bound:.3g} / 4")
    return found


SLOW = (pytest.mark.slow, pytest.mark.timeout(600))


@pytest.mark.parametrize(
    "length", [64, pytest.param(512, marks=SLOW), pytest.param(1500, marks=SLOW)]
)
def test_logits_are_at_most_twice_as_far_off_as_those_of_hf(
    checkpoint: Checkpoint, truth: Truth, peer: Any, ours: Driver, length: int
) -> None:
    tokens = tokens_of(checkpoint, "english", length)
    positions = range(length - COMPARED, length)
    with hf.torch_threads(2):
        peers = hf.hf_logits(peer, tokens, positions=positions)
    mine = ours.logits(tokens, positions=positions)
    assert_as_accurate(mine, peers, truth(tokens, positions))


@pytest.mark.parametrize(
    ("name", "count"), [("english", 64), *(pytest.param(t, FORCED, marks=SLOW) for t in TEXT_NAMES)]
)
def test_another_choice_than_that_of_hf_lies_within_its_error(
    checkpoint: Checkpoint, truth: Truth, peer: Any, ours: Driver, name: str, count: int
) -> None:
    tokens = tokens_of(checkpoint, name, count)
    with hf.torch_threads(2):
        peers = hf.hf_logits(peer, tokens)
    assert unexplained(ours.logits(tokens), peers, truth(tokens, range(count))) == []


@pytest.mark.parametrize("name", MODELS)
def test_random_models_are_as_accurate(tmp_path: Path, name: str) -> None:
    """Biases, other head sizes, untied heads, scores in the hundreds; read as HF directories."""
    config, adversarial = MODELS[name], name != "qwen2"
    weights = random_weights(config, seed=3, adversarial=adversarial)
    tokens = np.random.default_rng(4).integers(0, config.vocab, 64).tolist()
    with hf.torch_threads(1):
        peers = hf.hf_logits(hf.hf_model(config, weights), tokens)
    true = Reference64(config, weights).logits(tokens)
    directory = write_hf_model(tmp_path, config, seed=3, adversarial=adversarial)
    with Driver(served(open_checkpoint(str(directory))), tp=2, max_model_len=64) as driver:
        mine = driver.logits(tokens)
    assert_as_accurate(mine, peers, true)


def test_reference_agrees_with_hf_in_float64(checkpoint: Checkpoint, truth: Truth) -> None:
    """HF rounds norm, RoPE and softmax to float32 there: about six roundings a layer."""
    tokens = tokens_of(checkpoint, "english", 64)
    config, weights = checkpoint.config, weights_of(checkpoint)
    with hf.torch_threads(2):
        model = hf.hf_model(config, weights, dtype=hf.torch.float64, attention="eager")
        peers = hf.hf_logits(model, tokens)
    true = truth(tokens, range(64))
    bound = 6 * config.num_layers * 2.0**-24
    assert np.abs(peers - true).max() < bound * np.abs(true).max()


def test_weights_of_half_precision_are_not_as_accurate(
    checkpoint: Checkpoint, truth: Truth, peer: Any
) -> None:
    """The planted fault of the first test."""
    tokens = tokens_of(checkpoint, "english", 64)
    config, weights = checkpoint.config, weights_of(checkpoint)
    with hf.torch_threads(2):
        peers = hf.hf_logits(peer, tokens)
        coarse = hf.hf_model(config, weights, dtype=hf.torch.bfloat16).float()
        mine = hf.hf_logits(coarse, tokens)
    with pytest.raises(AssertionError, match="rms"):
        assert_as_accurate(mine, peers, truth(tokens, range(64)))


def test_a_wrong_kv_head_in_one_layer_is_a_choice_beyond_the_margin(
    checkpoint: Checkpoint, truth: Truth, peer: Any
) -> None:
    """The planted fault of the second test."""
    tokens = tokens_of(checkpoint, "english", 64)
    config, weights = checkpoint.config, weights_of(checkpoint)
    weights["layers.10.k"] = np.roll(weights["layers.10.k"], config.head_dim, axis=0)
    with hf.torch_threads(2):
        peers = hf.hf_logits(peer, tokens)
        mine = hf.hf_logits(hf.hf_model(config, weights), tokens)
    assert unexplained(mine, peers, truth(tokens, range(64)))


def test_a_choice_beyond_the_margin_is_reported() -> None:
    true = np.zeros((3, 4))
    peers = np.array([[3, 0, 0, 0], [1e-4, 0, 0, 0], [1, 0, 0, 0]], np.float32)
    true[:, :1] = peers[:, :1] + 1e-4
    mine = peers.copy()
    mine[0, 2] = mine[1, 3] = 5
    found: Sequence[str] = unexplained(mine, peers, true)
    assert [line.split(":")[0] for line in found] == ["position 0"]
