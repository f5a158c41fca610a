"""What a model is, and which arithmetic it is run in: two frozen records.

Knows the fields that HF `config.json` and GGUF metadata use, and refuses what the program
builder cannot express. Knows nothing of files, tensors or layouts.

Letters: D hidden, H query heads, G KV heads, d head dim, F ffn, V vocab, L layers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from anyshard.errors import CheckpointError

__all__ = ["LEAF", "ModelConfig", "Profile", "config_from_gguf", "config_from_hf"]

Architecture = Literal["llama", "qwen2"]

MAX_HEAD_DIM = 256  # of the native attention
LEAF = 64  # consecutive k of one fma chain in the f32 profile (docs/numerics.md, Tree)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only transformer. Flags, not families, decide what the program holds."""

    architecture: Architecture
    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float
    rope_theta: float
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False

    @property
    def q_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the weight image, canonical name to logical shape."""
        d, h, g, f = self.hidden, self.num_heads, self.num_kv_heads, self.ffn
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab, d)}
        for i in range(self.num_layers):
            layer = {
                "attn_norm": (d,),
                "q": (h * self.head_dim, d),
                "k": (g * self.head_dim, d),
                "v": (g * self.head_dim, d),
                "o": (d, h * self.head_dim),
                "mlp_norm": (d,),
                "gate": (f, d),
                "up": (f, d),
                "down": (d, f),
            }
            biased = {
                "q": self.qkv_bias,
                "k": self.qkv_bias,
                "v": self.qkv_bias,
                "o": self.o_bias,
                "gate": self.mlp_bias,
                "up": self.mlp_bias,
                "down": self.mlp_bias,
            }
            for name, shape in layer.items():
                shapes[f"layers.{i}.{name}"] = shape
                if biased.get(name, False):
                    shapes[f"layers.{i}.{name}_bias"] = (shape[0],)
        shapes["norm"] = (d,)
        if not self.tied:
            shapes["head"] = (self.vocab, d)
        return shapes


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The arithmetic: everything that rounds. Two runs compare only under one profile hash."""

    arithmetic: Literal["f32"] = "f32"
    kv: Literal["f32"] = "f32"
    wire: Literal["none"] = "none"
    leaf: int = LEAF
    kv_block: int = 32
    stripes: int = 8
    constants_sha256: str = ""

    @property
    def name(self) -> str:
        """Short form for people, such as `f32`."""
        return self.arithmetic

    def sha256(self) -> str:
        """Hash of all fields, hex."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def _positive(value: Any, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 28:
        raise CheckpointError(
            f"field {field} is {value!r}; a whole number from 1 to 2^28 is needed"
        )
    return value


def _real(value: Any, field: str) -> float:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not ok or not math.isfinite(value) or value <= 0:
        raise CheckpointError(f"field {field} is {value!r}; a finite number above 0 is needed")
    return float(value)


def _checked(config: ModelConfig) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{config.num_heads} query heads do not divide into {config.num_kv_heads} KV heads"
        )
    if config.head_dim % 8 or config.head_dim > MAX_HEAD_DIM:
        raise CheckpointError(
            f"head_dim is {config.head_dim}; the kernels take multiples of 8 up to {MAX_HEAD_DIM}"
        )
    return config


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Build from the parsed `config.json` of an HF directory.

    Raises: CheckpointError naming the field that decided.
    Held by: test_config.py.
    """
    names = raw.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else raw.get("model_type")
    families: dict[object, Architecture] = {
        "LlamaForCausalLM": "llama",
        "llama": "llama",
        "Qwen2ForCausalLM": "qwen2",
        "qwen2": "qwen2",
    }
    if not isinstance(name, str) or name not in families:
        raise CheckpointError(
            f"architecture {name!r} (config.json: architectures) is not supported; "
            "LlamaForCausalLM and Qwen2ForCausalLM are"
        )
    architecture = families[name]
    _refuse_unsupported_hf(raw)
    hidden = _positive(raw.get("hidden_size"), "hidden_size")
    heads = _positive(raw.get("num_attention_heads"), "num_attention_heads")
    head_dim = raw.get("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise CheckpointError(f"hidden_size {hidden} does not divide into {heads} heads")
        head_dim = hidden // heads
    attention_bias = bool(raw.get("attention_bias", False))
    return _checked(
        ModelConfig(
            architecture=architecture,
            num_layers=_positive(raw.get("num_hidden_layers"), "num_hidden_layers"),
            hidden=hidden,
            ffn=_positive(raw.get("intermediate_size"), "intermediate_size"),
            num_heads=heads,
            num_kv_heads=_positive(raw.get("num_key_value_heads", heads), "num_key_value_heads"),
            head_dim=_positive(head_dim, "head_dim"),
            vocab=_positive(raw.get("vocab_size"), "vocab_size"),
            context=_positive(raw.get("max_position_embeddings"), "max_position_embeddings"),
            norm_eps=_real(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
            rope_theta=_hf_rope_theta(raw),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "qwen2" or attention_bias,
            o_bias=architecture == "llama" and attention_bias,
            mlp_bias=architecture == "llama" and bool(raw.get("mlp_bias", False)),
        )
    )


def _hf_rope_theta(raw: Mapping[str, Any]) -> float:
    # transformers 5 moved rope_theta into rope_parameters; older files have it at the top.
    parameters = raw.get("rope_parameters")
    nested = parameters.get("rope_theta") if isinstance(parameters, Mapping) else None
    return _real(nested if nested is not None else raw.get("rope_theta", 10000.0), "rope_theta")


def _refuse_unsupported_hf(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act {raw['hidden_act']!r} is not supported; silu is")
    _refuse_other_than_one(raw, "", "partial_rotary_factor")
    for field in ("rope_scaling", "rope_parameters"):
        scaling = raw.get(field)
        if scaling is None:
            continue
        if not isinstance(scaling, Mapping):
            raise CheckpointError(f"{field} is {scaling!r:.80}; an object or null is needed")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            raise CheckpointError(f"{field} of type {kind!r:.80} is not supported yet")
        for name in ("factor", "partial_rotary_factor"):
            _refuse_other_than_one(scaling, f"{field}.", name)
    if raw.get("use_sliding_window"):
        raise CheckpointError("use_sliding_window is true; sliding windows are not supported")
    if raw.get("quantization_config"):
        raise CheckpointError("quantization_config is set; quantised HF files are not supported")


def _refuse_other_than_one(fields: Mapping[str, Any], prefix: str, name: str) -> None:
    """Refuse a factor that scales positions or cuts rotation short; null and 1 do neither.

    Raises: CheckpointError naming `prefix + name`.
    """
    value = fields.get(name)
    if value is not None and not (isinstance(value, (int, float)) and value == 1):
        raise CheckpointError(f"{prefix}{name} is {value!r:.80}; only 1 is supported yet")


def config_from_gguf(metadata: Mapping[str, Any], *, has_head: bool) -> ModelConfig:
    """Build from GGUF metadata; `has_head` says whether `output.weight` is in the file.

    Raises: CheckpointError naming the key that decided.
    Held by: test_config.py.
    """
    name = metadata.get("general.architecture")
    if name not in ("llama", "qwen2"):
        raise CheckpointError(
            f"general.architecture {name!r} is not supported; llama and qwen2 are"
        )
    architecture: Architecture = "llama" if name == "llama" else "qwen2"

    def field(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{key}", default)

    if metadata.get(f"{name}.expert_count"):
        raise CheckpointError(f"{name}.expert_count is set; mixtures of experts are not supported")
    scaling = field("rope.scaling.type", "none")
    if scaling not in (None, "none"):
        raise CheckpointError(f"{name}.rope.scaling.type {scaling!r} is not supported yet")
    # files without a type scale by the factor alone; rope.scale_linear is its older name
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        _refuse_other_than_one(metadata, "", f"{name}.{key}")
    hidden = _positive(field("embedding_length"), "embedding_length")
    heads = _positive(field("attention.head_count"), "attention.head_count")
    head_dim = field("attention.key_length", hidden // heads)
    rope_dim = field("rope.dimension_count", head_dim)
    if rope_dim != head_dim:
        raise CheckpointError(
            f"{name}.rope.dimension_count {rope_dim} differs from head_dim {head_dim}"
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocab = field("vocab_size", len(tokens) if tokens is not None else None)
    return _checked(
        ModelConfig(
            architecture=architecture,
            num_layers=_positive(field("block_count"), "block_count"),
            hidden=hidden,
            ffn=_positive(field("feed_forward_length"), "feed_forward_length"),
            num_heads=heads,
            num_kv_heads=_positive(
                field("attention.head_count_kv", heads), "attention.head_count_kv"
            ),
            head_dim=_positive(head_dim, "head_dim"),
            vocab=_positive(vocab, "vocab_size"),
            context=_positive(field("context_length"), "context_length"),
            norm_eps=_real(
                field("attention.layer_norm_rms_epsilon", 1e-5), "layer_norm_rms_epsilon"
            ),
            rope_theta=_real(field("rope.freq_base", 10000.0), "rope.freq_base"),
            tied=not has_head,
            qkv_bias=architecture == "qwen2",
        )
    )
