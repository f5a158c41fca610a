"""Every family and every stored type: as accurate as HF, and one digest for every split.

The HF checkpoints are made by transformers itself, so configuration, names and shards are what
it writes; the GGUF files by the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_models import write_gguf_model
from grid import Loaded, run_cell
from models import ADVERSARIAL_9_3, QWEN3_SHAPED, random_weights, write_hf_model
from numpy.typing import NDArray
from test_widen import BLOCKY

from anyshard.accuracy import as_text
from anyshard.accuracy.measure import compare
from anyshard.accuracy.report import TIMES_HF
from anyshard.checkpoint import Checkpoint, open_checkpoint
from anyshard.checkpoint.widen import BLOCK, TensorType
from anyshard.config import Llama3Scaling, ModelConfig, RopeDivisors
from anyshard.ops.float64 import Reference64
from anyshard.verify.cells import Cell
from anyshard.verify.driver import served
from anyshard.verify.prompt import hashed_tokens

hf = pytest.importorskip("anyshard.accuracy.hf", reason="needs torch and transformers")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.torch

TOKENS = 64
SPLITS = [(tp, pp) for tp in (1, 2, 3) for pp in (1, 2)]

SIZES: dict[str, Any] = {
    **{"vocab_size": 211, "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 2},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2},
}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 100},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("Llama", {"num_key_value_heads": 6, "rms_norm_eps": 1e-5}),
    "llama 3": ("Llama", {"rope_theta": 5e5, "rms_norm_eps": 1e-5}),
    "llama 3.2": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None, "rope_theta": 1e6}),
    "mistral nemo": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("Qwen2", {"rope_theta": 1e6, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 40, "rope_theta": 1e6}),
    "qwen3 biases": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "smollm2": (
        "Llama",
        {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3}
        | {"tie_word_embeddings": True, "rope_theta": 1e5},
    ),
    "tinyllama": ("Llama", {"num_attention_heads": 12, "num_key_value_heads": 3}),
}


def hf_directory(folder: Path, name: str, *, dtype: str = "float32", shard: str = "5GB") -> Any:
    """What transformers writes for a family, and the model that it wrote."""
    kind, changes = FAMILIES[name]
    config = getattr(transformers, f"{kind}Config")(**(SIZES | changes))
    hf.torch.manual_seed(7)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with hf.torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("norm.weight"):
                parameter += 0.3 * hf.torch.randn_like(parameter)
            elif parameter_name.endswith("bias"):
                parameter.normal_(0, 0.2)
    model = model.to(getattr(hf.torch, dtype))
    model.save_pretrained(folder, max_shard_size=shard)
    return model.float()


def assert_accurate(
    checkpoint: Checkpoint, peer: Any, weights: Mapping[str, Any] | None = None
) -> None:
    """Ours against the reference with `weights` (its own if None), beside HF."""
    config = checkpoint.config
    if weights is None:
        weights = {name: checkpoint.read(name) for name in config.tensor_shapes()}
    report = compare(
        served(checkpoint),
        Reference64(config, weights),
        hashed_tokens(TOKENS, config.vocab, seed=3),
        lengths=(TOKENS,),
        peer=peer,
    )
    figures = report.lengths[0]
    assert report.passed, as_text(report)
    assert figures.hf is not None
    assert figures.ours.max_error <= TIMES_HF * figures.hf.max_error, as_text(report)
    assert figures.ours.magnitude > 0.1  # the model says something


def digests(checkpoint: Checkpoint) -> set[str]:
    """Over all splits; 70 tokens of prompt span three blocks."""
    prompt = hashed_tokens(70, checkpoint.config.vocab, seed=5)
    model = Loaded.of("", served(checkpoint), prompt)
    return {
        run_cell(model, Cell(axis="mixed", tp=tp, pp=pp, prompt_tokens=70, num_tokens=6)).digest
        for tp, pp in SPLITS
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_as_accurate_as_hf_and_has_one_digest(name: str, tmp_path: Path) -> None:
    peer = hf_directory(tmp_path, name)
    checkpoint = open_checkpoint(str(tmp_path))
    assert_accurate(checkpoint, peer)
    assert len(digests(checkpoint)) == 1


@pytest.mark.parametrize("name", ["tinyllama", "qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_width_shards_are_their_float32_copy(name: str, dtype: str, tmp_path: Path) -> None:
    peer = hf_directory(tmp_path / "half", name, dtype=dtype, shard="60KB")
    assert len(list((tmp_path / "half").glob("*.safetensors"))) > 2
    peer.save_pretrained(tmp_path / "wide")
    half, wide = (open_checkpoint(str(tmp_path / part)) for part in ("half", "wide"))
    assert {source.type for source in half.tensors().values()} <= {"BF16", "F16"}
    assert {source.type for source in wide.tensors().values()} == {"F32"}
    assert_accurate(half, peer)
    found = digests(half)
    assert found == digests(wide)
    assert len(found) == 1


@pytest.mark.parametrize("kind", BLOCK)
def test_a_gguf_type_is_as_accurate_as_hf_and_has_the_digest_of_its_float32_copy(
    kind: TensorType, tmp_path: Path
) -> None:
    config = replace(BLOCKY, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64)
    weights = write_gguf_model(tmp_path / "m.gguf", config, kind=kind, seed=1)
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
    assert checkpoint.config == replace(config, norm_eps=checkpoint.config.norm_eps)
    assert_accurate(checkpoint, hf.hf_model(checkpoint.config, weights))
    write_gguf_model(tmp_path / "wide.gguf", config, weights=weights)
    found = digests(checkpoint)
    assert found == digests(open_checkpoint(str(tmp_path / "wide.gguf")))
    assert len(found) == 1


NO_BIAS = replace(ADVERSARIAL_9_3, qkv_bias=False, o_bias=False, mlp_bias=False, norm_eps=2.0**-17)
GGUF_FAMILIES: dict[str, ModelConfig] = {
    "llama": NO_BIAS,
    "qwen2": replace(NO_BIAS, architecture="qwen2", qkv_bias=True, tied=True),
    "qwen3": replace(QWEN3_SHAPED, norm_eps=2.0**-17),
}


@pytest.mark.parametrize("name", GGUF_FAMILIES)
def test_a_gguf_family_has_the_digest_of_its_safetensors_copy(name: str, tmp_path: Path) -> None:
    config = GGUF_FAMILIES[name]
    weights = random_weights(config, seed=4, adversarial=True)
    write_gguf_model(tmp_path / "m.gguf", config, weights=weights)
    write_hf_model(tmp_path / "hf", config, seed=4, adversarial=True)
    one, other = open_checkpoint(str(tmp_path / "m.gguf")), open_checkpoint(str(tmp_path / "hf"))
    assert one.config == other.config == config
    found = digests(one)
    assert found == digests(other)
    assert len(found) == 1


def converters_divisors(config: ModelConfig, scaling: Llama3Scaling) -> NDArray[np.float32]:
    """`rope_freqs.weight` as the converter of GGUF computes it, in float32."""
    half = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    length = 2 * np.pi * np.float32(config.rope_theta) ** half
    smooth = (scaling.original_context / length - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    between = 1 / ((1 - smooth) / scaling.factor + smooth)
    kept = length < scaling.original_context / scaling.high_frequency_factor
    slow = length > scaling.original_context / scaling.low_frequency_factor
    return np.where(kept, 1, np.where(slow, scaling.factor, between)).astype(np.float32)


def test_llama_3_as_gguf_is_as_accurate_as_hf(tmp_path: Path) -> None:
    scaling = Llama3Scaling(
        factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=100
    )
    config = replace(NO_BIAS, rope_theta=500.0)
    weights = random_weights(config, seed=4, adversarial=False)
    divisors = converters_divisors(config, scaling)
    assert divisors[0] == 1 and divisors[-1] == 8 and len(set(divisors)) > 3
    write = partial(write_gguf_model, config=config, weights=weights)
    write(tmp_path / "m.gguf", extra={"rope_freqs.weight": divisors})
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
    assert checkpoint.config.rope_scaling == RopeDivisors(divisors=tuple(map(float, divisors)))
    assert_accurate(checkpoint, hf.hf_model(replace(config, rope_scaling=scaling), weights))
    found = digests(checkpoint)
    assert len(found) == 1
    write(tmp_path / "plain.gguf")
    assert found != digests(open_checkpoint(str(tmp_path / "plain.gguf")))


@pytest.mark.parametrize("name", ["layers.1.q_norm", "layers.0.k_norm"])
def test_a_wrong_head_norm_is_not_accurate(name: str, tmp_path: Path) -> None:
    """The planted fault of the first test: two halves of one vector change places."""
    weights = random_weights(QWEN3_SHAPED, seed=2, adversarial=False)
    config = replace(QWEN3_SHAPED, norm_eps=2.0**-17)
    peer = hf.hf_model(config, weights)
    write_gguf_model(tmp_path / "right.gguf", config, weights=weights)
    assert_accurate(open_checkpoint(str(tmp_path / "right.gguf")), peer, weights)
    wrong = {**weights, name: np.roll(weights[name], 20)}
    write_gguf_model(tmp_path / "wrong.gguf", config, weights=wrong)
    with pytest.raises(AssertionError):
        assert_accurate(open_checkpoint(str(tmp_path / "wrong.gguf")), peer, weights)
