"""Which checkpoints are taken, and by which field the others are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from anyshard.config import (
    Llama3Scaling,
    Profile,
    RopeDivisors,
    config_from_gguf,
    config_from_hf,
    config_to_hf,
)
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


LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}


def test_llama_3_scaling_is_read_from_old_and_new_files() -> None:
    wanted = Llama3Scaling(
        factor=32.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=8192
    )
    old = config_from_hf(HF | {"rope_scaling": LLAMA3, "rope_theta": 5e5})
    new = config_from_hf(HF | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}})
    assert old == new and old.rope_scaling == wanted
    both = {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}}
    assert config_from_hf(HF | both) == new


def test_mistral_is_a_llama_without_a_window() -> None:
    mistral = config_from_hf(HF | MISTRAL | {"sliding_window": None, "attention_bias": True})
    assert mistral == config_from_hf(HF)


def test_qwen3_norms_its_heads_and_has_a_head_dim_of_its_own() -> None:
    config = config_from_hf(HF | QWEN3)
    assert (config.head_dim, config.qk_norm, config.qkv_bias) == (128, True, False)
    shapes = config.tensor_shapes()
    assert shapes["layers.1.q_norm"] == shapes["layers.1.k_norm"] == (128,)
    assert shapes["layers.0.q"] == (512, 64) and shapes["layers.0.o"] == (64, 512)
    biased = config_from_hf(HF | QWEN3 | {"attention_bias": True})
    assert biased.qkv_bias and biased.o_bias
    renamed = {key.replace("llama.", "qwen3."): value for key, value in GGUF.items()}
    renamed |= {"general.architecture": "qwen3", "qwen3.attention.key_length": 128}
    assert config_from_gguf(renamed, has_head=True) == replace(config, norm_eps=1e-5)


def test_divisors_of_a_gguf_are_taken_and_ones_are_none() -> None:
    divisors = (1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0)
    config = config_from_gguf(GGUF, has_head=True, divisors=divisors)
    assert config.rope_scaling == RopeDivisors(divisors=divisors)
    assert config_from_gguf(GGUF, has_head=True, divisors=(1.0,) * 8).rope_scaling is None
    for bad, words in [
        ((2.0,) * 7, r"rope_freqs\.weight holds 7 numbers; half of head_dim, 8,"),
        ((2.0,) * 7 + (0.0,), r"rope_freqs\.weight is 0\.0"),
        ((2.0,) * 7 + (float("nan"),), r"rope_freqs\.weight is nan"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            config_from_gguf(GGUF, has_head=True, divisors=bad)


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


HF_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
    ({"architectures": [["x"]]}, "architecture"),
    ({"architectures": None, "model_type": None}, "architecture"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"rope_scaling": {"rope_type": "llama3"}}, r"rope_scaling\.factor is None"),
    (
        {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
        r"high_freq_factor is 1\.0; it must exceed low_freq_factor, which is 1\.0",
    ),
    (
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": None}},
        r"rope_scaling\.original_max_position_embeddings is None",
    ),
    (
        {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}},
        "rope_scaling and rope_parameters disagree",
    ),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters of type 'yarn'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling of type 'dynamic'"),
    (MISTRAL, "sliding_window is 4096; .* null is needed"),
    (MISTRAL | {"sliding_window": 2048}, "sliding_window is 2048"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"layer_types": 3}, "layer_types"),
    ({"num_local_experts": 8}, "num_local_experts is set"),
    ({"num_experts": 8}, "num_experts is set"),
    (QWEN3 | {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    (QWEN3 | {"head_dim": 12}, "head_dim is 12"),
    ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
    ({"architectures": ["Gemma3ForCausalLM"]}, "MistralForCausalLM, Qwen2ForCausalLM"),
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
]


@pytest.mark.parametrize(("change", "words"), HF_REFUSED)
def test_an_hf_config_that_cannot_be_run_is_refused_by_its_field(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        config_from_hf(HF | change)


GGUF_REFUSED: list[tuple[dict[str, Any], str]] = [
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
    ({"llama.attention.value_length": 8}, "value_length 8 differs"),
    ({"llama.attention.sliding_window": 4096}, "sliding_window is set"),
    ({"llama.attention.scale": 0.5}, "attention.scale is set"),
    ({"llama.logit_scale": 0.5}, r"logit_scale is 0\.5"),
    ({"general.architecture": "qwen3moe"}, "qwen3moe"),
    ({"general.architecture": ["llama"]}, "not supported"),
    ({"llama.block_count": 0}, "block_count"),
    ({"llama.embedding_length": None}, "embedding_length"),
    ({"llama.attention.head_count": [4, 4]}, "head_count"),
]


@pytest.mark.parametrize(("change", "words"), GGUF_REFUSED)
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


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"rope_scaling": LLAMA3, "rope_theta": 5e5},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 24},
        QWEN3 | {"head_dim": 40, "attention_bias": True},
        {"architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 9.999999747378752e-06},
        MISTRAL | {"sliding_window": None},
    ],
)
def test_hf_fields_give_the_configuration_again(more: dict[str, Any]) -> None:
    config = config_from_hf(HF | more)
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config
