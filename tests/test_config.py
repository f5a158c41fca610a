"""Which checkpoints are taken, and by which field the others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from anyshard.config import Profile, config_from_gguf, config_from_hf
from anyshard.errors import CheckpointError

HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": ["a"] * 101,
}


def test_the_same_model_from_both_kinds_of_file() -> None:
    assert config_from_hf(HF | {"tie_word_embeddings": True}) == config_from_gguf(
        GGUF, has_head=False
    )


def test_qwen2_has_qkv_biases_and_nothing_else() -> None:
    config = config_from_hf(HF | {"architectures": ["Qwen2ForCausalLM"]})
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)
    shapes = config.tensor_shapes()
    assert shapes["layers.1.k_bias"] == (32,) and "layers.1.o_bias" not in shapes


def test_llama_biases_follow_the_config() -> None:
    config = config_from_hf(HF | {"attention_bias": True, "mlp_bias": True})
    shapes = config.tensor_shapes()
    assert shapes["layers.0.o_bias"] == (64,) and shapes["layers.0.gate_bias"] == (96,)
    assert "head" in shapes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": [["x"]]}, "architecture"),
        ({"architectures": None, "model_type": None}, "architecture"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "llama3"),
        ({"use_sliding_window": True}, "sliding"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "4 query heads"),
        ({"head_dim": 20}, "multiple of 8"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
    ],
)
def test_an_hf_config_that_cannot_be_run_is_refused_by_its_field(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        config_from_hf(HF | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general.architecture": "gemma"}, "gemma"),
        ({"llama.expert_count": 8}, "expert"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.rope.dimension_count": 8}, "dimension_count"),
        ({"llama.block_count": 0}, "block_count"),
        ({"llama.embedding_length": None}, "embedding_length"),
        ({"llama.attention.head_count": [4, 4]}, "head_count"),
    ],
)
def test_gguf_metadata_that_cannot_be_run_is_refused_by_its_key(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        config_from_gguf(GGUF | change, has_head=True)


def test_a_profile_hash_covers_every_field() -> None:
    plain = Profile(constants_sha256="a")
    assert plain.sha256() == Profile(constants_sha256="a").sha256()
    assert plain.sha256() != Profile(constants_sha256="b").sha256()
    assert plain.sha256() != Profile(constants_sha256="a", leaf=32).sha256()
