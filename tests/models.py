"""Models for tests: HF directories of random float32 weights, and a reader for them.

`QWEN2_SHAPED` has the proportions of Qwen2-0.5B. The adversarial ones are tiny llamas made so
that a mistake shows: biases everywhere, a prime vocabulary, distinct norm weights, weights over
40 binades (another order of summation gives other bits), rows of the head that are equal (a tie
must go to the lowest id), and scores of head 0 in the thousands beside scores near 10.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from anyshard.accuracy.hf_fields import hf_config
from anyshard.checkpoint.names import hf_name
from anyshard.config import ModelConfig

F32 = NDArray[np.float32]

QWEN2_SHAPED = ModelConfig(
    architecture="qwen2",
    num_layers=2,
    hidden=896,
    ffn=4864,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    vocab=4099,
    context=2048,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    tied=True,
    qkv_bias=True,
)
ADVERSARIAL_9_3 = ModelConfig(
    architecture="llama",
    num_layers=3,
    hidden=144,
    ffn=424,
    num_heads=9,
    num_kv_heads=3,
    head_dim=16,
    vocab=1009,
    context=512,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    tied=False,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
)
ADVERSARIAL_14_2 = replace(
    ADVERSARIAL_9_3, num_layers=2, hidden=224, ffn=616, num_heads=14, num_kv_heads=2, vocab=1013
)
ADVERSARIAL_HEAD_80 = replace(
    ADVERSARIAL_9_3, num_layers=2, hidden=240, ffn=328, num_heads=3, num_kv_heads=1, head_dim=80
)
QWEN3_SHAPED = replace(
    ADVERSARIAL_9_3, architecture="qwen3", num_layers=2, hidden=96, num_heads=6, num_kv_heads=2,
    head_dim=40, qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=True,
)  # fmt: skip
DEEP_10 = replace(
    ADVERSARIAL_9_3, num_layers=10, hidden=80, ffn=136, num_heads=5, num_kv_heads=1, vocab=211
)  # as many stages as an int8 wire allows, and a residual whose last block is short
MODELS = {
    "qwen2": QWEN2_SHAPED,
    "adversarial-9-3": ADVERSARIAL_9_3,
    "adversarial-14-2": ADVERSARIAL_14_2,
    "adversarial-head-80": ADVERSARIAL_HEAD_80,
}

MAX_BINADES = 20  # of a weight's exponent to either side, before its row is scaled
NUM_TWIN_ROWS = 16  # rows of the head at its end that repeat rows at its start


def write_hf_model(
    directory: Path,
    config: ModelConfig,
    *,
    seed: int,
    adversarial: bool = False,
    change: Callable[[dict[str, F32]], None] | None = None,
) -> Path:
    """Write config.json and model.safetensors; returns `directory`.

    `change` edits the weights first. Equal arguments write equal bytes. Rows have norm 2 for
    inputs of unit size, so logits differ by whole numbers and a sampled continuation does not
    stick to one token.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights = random_weights(config, seed=seed, adversarial=adversarial)
    if change is not None:
        change(weights)
    (directory / "config.json").write_text(json.dumps(hf_config(config), indent=2))
    save_file(
        {hf_name(name): weight for name, weight in weights.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    return directory


def read_hf_weights(directory: Path, config: ModelConfig) -> dict[str, F32]:
    """Canonical name to float32 array, by the safetensors library, not by the package."""
    stored = load_file(directory / "model.safetensors")
    return {name: stored[hf_name(name)] for name in config.tensor_shapes()}


def random_weights(config: ModelConfig, *, seed: int, adversarial: bool) -> dict[str, F32]:
    """Canonical name to weights; each tensor has its own stream, so shapes do not disturb it."""
    weights: dict[str, F32] = {}
    for index, (name, shape) in enumerate(config.tensor_shapes().items()):
        rng = np.random.default_rng([seed, index])
        part = name.rsplit(".", 1)[-1]
        if part.endswith("norm"):
            weights[name] = (1 + 0.5 * rng.uniform(-1, 1, shape)).astype(np.float32)
        elif len(shape) == 1:
            weights[name] = rng.normal(0, 0.25, shape).astype(np.float32)
        else:
            weights[name] = _matrix(rng, shape, adversarial=adversarial)
    if adversarial:
        for i in range(config.num_layers):  # scores of head 0 about 64 times those of others
            weights[f"layers.{i}.q"][: config.head_dim] *= np.float32(8)
            weights[f"layers.{i}.k"][: config.head_dim] *= np.float32(8)
        if not config.tied:
            head = weights["head"]
            head[-NUM_TWIN_ROWS:] = head[:NUM_TWIN_ROWS]
    return weights


def plant_overflow(weights: dict[str, F32], *, layer_of: Mapping[int, int]) -> None:
    """Make tokens whose residual overflows in the MLP of a layer; no other token's can.

    layer_of: token id to layer. Each gets a lane of the residual, which every other token and
    every op but that MLP leaves at zero. The next norm finds the overflow.
    """
    lanes = len(layer_of)
    weights["embed"][:, :lanes] = 0
    for name, weight in weights.items():
        if name.rsplit(".", 1)[-1] in ("o", "o_bias", "down", "down_bias"):
            weight[:lanes] = 0
    for lane, (token, layer) in enumerate(layer_of.items()):
        weights["embed"][token] = 0
        weights["embed"][token, lane] = 1
        for name in ("gate", "up"):
            weights[f"layers.{layer}.{name}"][lane] = 0
            weights[f"layers.{layer}.{name}"][lane, lane] = 1e12
            weights[f"layers.{layer}.{name}_bias"][lane] = 0
        weights[f"layers.{layer}.down"][lane, lane] = 1e12


def _matrix(rng: np.random.Generator, shape: tuple[int, ...], *, adversarial: bool) -> F32:
    rows = rng.normal(0, 1, shape)
    if adversarial:
        binades = np.clip(rng.normal(0, 8, shape), -MAX_BINADES, MAX_BINADES)
        rows = np.copysign(2.0**binades * rng.uniform(1, 2, shape), rows)
    rows *= 2 / np.sqrt(np.square(rows).sum(axis=1, keepdims=True))
    return rows.astype(np.float32)
