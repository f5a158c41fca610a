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
        ({"rope_scaling": {"type": "linear", "factor": 4}}, "linear"),
        ({"rope_scaling": {"factor": 4}}, r"rope_scaling\.factor is 4"),
        ({"rope_scaling": [4]}, r"rope_scaling is \[4\]"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, r"rope_parameters\.factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"rope_parameters\.partial_rotary"),
        ({"partial_rotary_factor": 0.5}, r"^partial_rotary_factor is 0\.5"),
        ({"partial_rotary_factor": [1]}, "partial_rotary_factor"),
        ({"use_sliding_window": True}, "sliding"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "4 query heads"),
        ({"head_dim": 20}, "head_dim is 20; .* multiples of 8 up to 256"),
        ({"head_dim": 264}, "head_dim is 264; .* multiples of 8 up to 256"),
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
        ({"llama.rope.scaling.factor": 4.0}, r"llama\.rope\.scaling\.factor is 4\.0"),
        ({"llama.rope.scale_linear": 4.0}, r"llama\.rope\.scale_linear is 4\.0"),
        (
            {"llama.attention.key_length": 512, "llama.rope.dimension_count": 512},
            "head_dim is 512; .* up to 256",
        ),
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


def test_factors_of_one_are_taken_as_none() -> None:
    plain = config_from_hf(HF)
    for same in (
        {"partial_rotary_factor": 1.0, "rope_scaling": None},
        {"partial_rotary_factor": None, "rope_scaling": {}},
        {"rope_parameters": {"rope_type": "default", "factor": 1, "partial_rotary_factor": 1.0}},
    ):
        assert config_from_hf(HF | same) == plain
    same = {"llama.rope.scaling.factor": 1.0, "llama.rope.scale_linear": 1.0}
    assert config_from_gguf(GGUF | same, has_head=True) == config_from_gguf(GGUF, has_head=True)


def test_a_profile_hash_covers_every_field() -> None:
    plain = Profile(constants_sha256="a")
    assert plain.sha256() == Profile(constants_sha256="a").sha256()
    assert plain.sha256() != Profile(constants_sha256="b").sha256()
    assert plain.sha256() != Profile(constants_sha256="a", leaf=32).sha256()
