"""A model configuration in the words of HF's config.json: the inverse of `config_from_hf`.

Needs neither torch nor transformers.
"""

from __future__ import annotations

from anyshard.config import Llama3Scaling, ModelConfig
from anyshard.errors import UserError

__all__ = ["hf_config"]

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def hf_config(config: ModelConfig) -> dict[str, object]:
    """The fields of config.json from which `config_from_hf` gives `config` again.

    RoPE divisors, which only a GGUF file has, are left out: no field holds them.

    Raises: UserError for a model that transformers has no fields for.
    Held by: test_config.py, test_accuracy_hf.py.
    """
    raw: dict[str, object] = {
        "architectures": [_CLASSES[config.architecture]],
        "model_type": config.architecture,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if isinstance(config.rope_scaling, Llama3Scaling):
        scaling = config.rope_scaling
        raw["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    if config.architecture == "qwen2":
        if config.head_dim * config.num_heads != config.hidden:
            raise UserError(
                f"this qwen2 has {config.num_heads} heads of {config.head_dim} and a hidden size "
                f"of {config.hidden}; transformers' qwen2 divides it evenly, so there is no HF "
                "model to compare with; --against float64 works"
            )
        return raw
    if config.qkv_bias != config.o_bias:
        qkv, o = ("biases" if flag else "no biases" for flag in (config.qkv_bias, config.o_bias))
        raise UserError(
            f"this {config.architecture} has {qkv} on q, k, v and {o} on o; transformers has one "
            "switch for both, so there is no HF model to compare with; --against float64 works"
        )
    raw |= {"head_dim": config.head_dim, "attention_bias": config.qkv_bias}
    return raw | ({"mlp_bias": config.mlp_bias} if config.architecture == "llama" else {})
