"""A model configuration in the words of HF's config.json: the inverse of `config_from_hf`.

Needs neither torch nor transformers.
"""

from __future__ import annotations

from anyshard.config import ModelConfig, config_to_hf
from anyshard.errors import UserError

__all__ = ["hf_config"]


def hf_config(config: ModelConfig) -> dict[str, object]:
    """The fields of config.json from which `config_from_hf` gives `config` again.

    RoPE divisors, which only a GGUF file has, are left out: no field holds them.

    Raises: UserError for a model that transformers has no fields for.
    Held by: test_config.py, test_accuracy_hf.py.
    """
    raw: dict[str, object] = config_to_hf(config)
    raw |= {"torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2}
    if config.architecture == "qwen2":
        if config.head_dim * config.num_heads != config.hidden:
            raise UserError(
                f"this qwen2 has {config.num_heads} heads of {config.head_dim} and a hidden size "
                f"of {config.hidden}; transformers' qwen2 divides it evenly, so there is no HF "
                "model to compare with; --against float64 works"
            )
        raw.pop("head_dim")
        return raw
    if config.qkv_bias != config.o_bias:
        qkv, o = ("biases" if flag else "no biases" for flag in (config.qkv_bias, config.o_bias))
        raise UserError(
            f"this {config.architecture} has {qkv} on q, k, v and {o} on o; transformers has one "
            "switch for both, so there is no HF model to compare with; --against float64 works"
        )
    return raw
