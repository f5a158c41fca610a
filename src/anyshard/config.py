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

__all__ = [
    "INT8_LEAF",
    "LEAF",
    "MAX_HEAD_DIM",
    "Arithmetic",
    "KvType",
    "Llama3Scaling",
    "ModelConfig",
    "Profile",
    "Quantization",
    "RopeDivisors",
    "WireType",
    "config_from_gguf",
    "config_from_hf",
    "config_to_hf",
]

Architecture = Literal["llama", "qwen2", "qwen3"]
Arithmetic = Literal["f32", "int8"]
KvType = Literal["f32", "int8"]
WireType = Literal["none", "int8"]  # what residual rows are rounded to where stages may be cut
Quantization = Literal["auto", "none", "int8"]

MAX_HEAD_DIM = 256  # of the native attention
LEAF = 64  # consecutive k of one fma chain in the f32 profile (docs/numerics.md, Tree)
INT8_LEAF = 32  # of one exact sum in the int8 profile: a block


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Slower rotation of long waves, as Llama 3.1 and later have it (docs/numerics.md, RoPE).

    Waves longer than original_context / low_frequency_factor turn `factor` times slower, those
    shorter than original_context / high_frequency_factor as before, between them by a ramp.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int


@dataclass(frozen=True, kw_only=True)
class RopeDivisors:
    """Inverse frequency i is divided by `divisors[i]`: what `rope_freqs.weight` in GGUF holds."""

    divisors: tuple[float, ...]


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
    qk_norm: bool = False
    rope_scaling: Llama3Scaling | RopeDivisors | None = None

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
            if self.qk_norm:
                layer |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
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
    """The arithmetic: everything that rounds. Two runs compare only under one profile hash.

    leaf: most inputs that are summed before the tree; in int8 a block, which has one scale.
    """

    arithmetic: Arithmetic = "f32"
    kv: KvType = "f32"
    wire: WireType = "none"
    leaf: int = LEAF
    kv_block: int = 32
    stripes: int = 8
    constants_sha256: str = ""

    @property
    def name(self) -> str:
        """Short form for people: `f32`, `int8`; with int8 KV `f32+kv8`, with an int8 wire
        `f32+w8`, with both `f32+kv8+w8`."""
        kv, wire = "" if self.kv == "f32" else "+kv8", "" if self.wire == "none" else "+w8"
        return f"{self.arithmetic}{kv}{wire}"

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


_HF_FAMILIES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "llama": "llama",
    "MistralForCausalLM": "llama",  # the same program; a sliding window is refused
    "mistral": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "qwen2": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "qwen3": "qwen3",
}


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Build from the parsed `config.json` of an HF directory.

    A field that is missing has the value that transformers gives it.

    Raises: CheckpointError naming the field that decided.
    Held by: test_config.py, test_families.py.
    """
    name = _hf_name(raw)
    architecture = _HF_FAMILIES[name]
    _refuse_unsupported_hf(raw, is_mistral=name in ("MistralForCausalLM", "mistral"))
    hidden = _positive(raw.get("hidden_size"), "hidden_size")
    heads = _positive(raw.get("num_attention_heads"), "num_attention_heads")
    head_dim = raw.get("head_dim", 128 if architecture == "qwen3" else None)
    if head_dim is None:
        if hidden % heads:
            raise CheckpointError(f"hidden_size {hidden} does not divide into {heads} heads")
        head_dim = hidden // heads
    kv_heads = raw.get("num_key_value_heads", heads if architecture == "llama" else 0)
    bias = bool(raw.get("attention_bias", False)) and name not in ("MistralForCausalLM", "mistral")
    return _checked(
        ModelConfig(
            architecture=architecture,
            num_layers=_positive(raw.get("num_hidden_layers"), "num_hidden_layers"),
            hidden=hidden,
            ffn=_positive(raw.get("intermediate_size"), "intermediate_size"),
            num_heads=heads,
            num_kv_heads=_positive(heads if kv_heads is None else kv_heads, "num_key_value_heads"),
            head_dim=_positive(head_dim, "head_dim"),
            vocab=_positive(raw.get("vocab_size"), "vocab_size"),
            context=_positive(raw.get("max_position_embeddings"), "max_position_embeddings"),
            norm_eps=_real(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
            rope_theta=_hf_rope_theta(raw),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "qwen2" or bias,
            o_bias=architecture != "qwen2" and bias,
            mlp_bias=name in ("LlamaForCausalLM", "llama") and bool(raw.get("mlp_bias", False)),
            qk_norm=architecture == "qwen3",
            rope_scaling=_hf_rope_scaling(raw),
        )
    )


_HF_CLASSES: dict[Architecture, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json from which `config_from_hf` gives `config` again.

    RoPE divisors and biases that HF has no switch for, which only GGUF files have, are not in it.
    Held by: test_config.py::test_hf_fields_give_the_configuration_again.
    """
    raw: dict[str, Any] = {
        "architectures": [_HF_CLASSES[config.architecture]],
        "model_type": config.architecture,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
    }
    if config.architecture != "qwen2":
        raw["attention_bias"] = config.o_bias
    if config.architecture == "llama":
        raw["mlp_bias"] = config.mlp_bias
    if isinstance(config.rope_scaling, Llama3Scaling):
        scaling = config.rope_scaling
        raw["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    return raw


def _hf_name(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else raw.get("model_type")
    if not isinstance(name, str) or name not in _HF_FAMILIES:
        known = ", ".join(name for name in _HF_FAMILIES if name.endswith("LM"))
        raise CheckpointError(
            f"architecture {name!r:.80} (config.json: architectures) is not supported; {known} are"
        )
    return name


def _hf_rope_theta(raw: Mapping[str, Any]) -> float:
    # transformers 5 moved rope_theta into rope_parameters; older files have it at the top.
    parameters = raw.get("rope_parameters")
    nested = parameters.get("rope_theta") if isinstance(parameters, Mapping) else None
    return _real(nested if nested is not None else raw.get("rope_theta", 10000.0), "rope_theta")


def _hf_rope_scaling(raw: Mapping[str, Any]) -> Llama3Scaling | None:
    """From rope_scaling (older files) or rope_parameters; both may be there and then agree."""
    found: dict[str, Llama3Scaling | None] = {}
    for field in ("rope_scaling", "rope_parameters"):
        scaling = raw.get(field)
        if scaling is None:
            continue
        if not isinstance(scaling, Mapping):
            raise CheckpointError(f"{field} is {scaling!r:.80}; an object or null is needed")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise CheckpointError(
                f"{field} of type {kind!r:.80} is not supported; default and llama3 are"
            )
        _refuse_other_than_one(scaling, f"{field}.", "partial_rotary_factor")
        if kind == "default":
            _refuse_other_than_one(scaling, f"{field}.", "factor")
        found[field] = _llama3(scaling, field) if kind == "llama3" else None
    if len(set(found.values())) > 1:
        raise CheckpointError("rope_scaling and rope_parameters disagree about the rotation")
    return next(iter(found.values()), None)


def _llama3(scaling: Mapping[str, Any], field: str) -> Llama3Scaling:
    def number(name: str) -> float:
        return _real(scaling.get(name), f"{field}.{name}")

    original = "original_max_position_embeddings"
    result = Llama3Scaling(
        factor=number("factor"),
        low_frequency_factor=number("low_freq_factor"),
        high_frequency_factor=number("high_freq_factor"),
        original_context=_positive(scaling.get(original), f"{field}.{original}"),
    )
    if result.high_frequency_factor <= result.low_frequency_factor:
        raise CheckpointError(
            f"{field}.high_freq_factor is {result.high_frequency_factor}; it must exceed "
            f"low_freq_factor, which is {result.low_frequency_factor}"
        )
    return result


def _refuse_unsupported_hf(raw: Mapping[str, Any], *, is_mistral: bool) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act {raw['hidden_act']!r:.80} is not supported; silu is")
    _refuse_other_than_one(raw, "", "partial_rotary_factor")
    # Mistral's files without the field mean 4,096
    if is_mistral and (window := raw.get("sliding_window", 4096)) is not None:
        raise CheckpointError(
            f"sliding_window is {window!r:.80}; sliding windows are not supported, null is needed"
        )
    if raw.get("use_sliding_window"):
        raise CheckpointError("use_sliding_window is true; sliding windows are not supported")
    layers = raw.get("layer_types")
    if layers is not None and (
        not isinstance(layers, list) or any(kind != "full_attention" for kind in layers)
    ):
        raise CheckpointError(
            "layer_types holds something else than full_attention, which alone is supported"
        )
    for field in ("num_local_experts", "num_experts", "n_routed_experts"):
        if raw.get(field):
            raise CheckpointError(f"{field} is set; mixtures of experts are not supported")
    if raw.get("quantization_config"):
        raise CheckpointError("quantization_config is set; quantised HF files are not supported")


def _refuse_other_than_one(fields: Mapping[str, Any], prefix: str, name: str) -> None:
    """Refuse a factor that scales positions or cuts rotation short; null and 1 do neither.

    Raises: CheckpointError naming `prefix + name`.
    """
    value = fields.get(name)
    if value is not None and not (isinstance(value, (int, float)) and value == 1):
        raise CheckpointError(f"{prefix}{name} is {value!r:.80}; only 1 is supported")


_GGUF_FAMILIES: dict[str, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def config_from_gguf(
    metadata: Mapping[str, Any], *, has_head: bool, divisors: tuple[float, ...] = ()
) -> ModelConfig:
    """Build from GGUF metadata; `has_head` says whether `output.weight` is in the file.

    `divisors` are the numbers of `rope_freqs.weight`, if it is there: how GGUF states the
    rotation of Llama 3.1.

    Raises: CheckpointError naming the key that decided.
    Held by: test_config.py.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _GGUF_FAMILIES:
        raise CheckpointError(
            f"general.architecture {name!r:.80} is not supported; llama, qwen2 and qwen3 are"
        )
    architecture = _GGUF_FAMILIES[name]

    def field(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{key}", default)

    _refuse_unsupported_gguf(metadata, name)
    hidden = _positive(field("embedding_length"), "embedding_length")
    heads = _positive(field("attention.head_count"), "attention.head_count")
    head_dim = _positive(field("attention.key_length", hidden // heads), "attention.key_length")
    for key in ("rope.dimension_count", "attention.value_length"):
        if field(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{name}.{key} {field(key)!r:.40} differs from head_dim {head_dim}"
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
            head_dim=head_dim,
            vocab=_positive(vocab, "vocab_size"),
            context=_positive(field("context_length"), "context_length"),
            norm_eps=_real(
                field("attention.layer_norm_rms_epsilon", 1e-5), "layer_norm_rms_epsilon"
            ),
            rope_theta=_real(field("rope.freq_base", 10000.0), "rope.freq_base"),
            tied=not has_head,
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            rope_scaling=_divisors(divisors, head_dim),
        )
    )


def _refuse_unsupported_gguf(metadata: Mapping[str, Any], name: str) -> None:
    for key, what in (
        ("expert_count", "mixtures of experts"),
        ("attention.sliding_window", "sliding windows"),
        ("attention.clamp_kqv", "clamped projections"),
        ("attention.scale", "own attention scales"),
    ):
        if metadata.get(f"{name}.{key}"):
            raise CheckpointError(f"{name}.{key} is set; {what} are not supported")
    scaling = metadata.get(f"{name}.rope.scaling.type", "none")
    if scaling not in (None, "none"):
        raise CheckpointError(f"{name}.rope.scaling.type {scaling!r:.80} is not supported")
    # files without a type scale by the factor alone; rope.scale_linear is its older name
    for key in ("rope.scaling.factor", "rope.scale_linear", "rope.scaling.attn_factor"):
        _refuse_other_than_one(metadata, "", f"{name}.{key}")
    for key in ("logit_scale", "embedding_scale", "residual_scale"):
        _refuse_other_than_one(metadata, "", f"{name}.{key}")


def _divisors(divisors: tuple[float, ...], head_dim: int) -> RopeDivisors | None:
    if not divisors or all(value == 1 for value in divisors):
        return None
    if len(divisors) != head_dim // 2:
        raise CheckpointError(
            f"rope_freqs.weight holds {len(divisors)} numbers; half of head_dim, {head_dim // 2}, "
            "are needed"
        )
    for value in divisors:
        _real(value, "rope_freqs.weight")
    return RopeDivisors(divisors=divisors)
