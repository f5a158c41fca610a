"""From the tensors of a file to the tensors of a model: names, row orders, leftovers.

One table per file format maps the file's names to the canonical names of
`ModelConfig.tensor_shapes()`. A tensor that the table does not know is refused unless it is
known to change nothing, because leaving a weight out gives wrong answers silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from anyshard.checkpoint.gguf import GgufFile, GgufTensor
from anyshard.checkpoint.safetensors import (
    SafeTensor,
    parse_json_object,
    read_json_object,
    read_safetensors,
)
from anyshard.checkpoint.source import (
    Checkpoint,
    TensorSource,
    TokenizerMaterial,
    check_depth,
    check_tensors,
)
from anyshard.checkpoint.split import read_whole_gguf
from anyshard.config import MAX_HEAD_DIM, ModelConfig, config_from_gguf, config_from_hf
from anyshard.errors import CheckpointError

__all__ = ["gguf_name", "hf_name", "open_gguf", "open_hf_directory", "rotate_half_rows"]

_GGUF_LAYER: Final = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_HF_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_GGUF_TOP: Final = {"embed": "token_embd", "norm": "output_norm", "head": "output"}
_HF_TOP: Final = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_ROPE_DIVISORS: Final = "rope_freqs.weight"


def _file_name(name: str, top: Mapping[str, str], layer: Mapping[str, str], prefix: str) -> str:
    if name in top:
        return f"{top[name]}.weight"
    _, index, part = name.split(".")
    kind = "bias" if part.endswith("_bias") else "weight"
    return f"{prefix}.{index}.{layer[part.removesuffix('_bias')]}.{kind}"


def gguf_name(name: str) -> str:
    """The name in a GGUF file of a canonical tensor: `layers.3.q_bias` is `blk.3.attn_q.bias`."""
    return _file_name(name, _GGUF_TOP, _GGUF_LAYER, "blk")


def hf_name(name: str) -> str:
    """The name in HF files: `layers.3.q` is `model.layers.3.self_attn.q_proj.weight`."""
    return _file_name(name, _HF_TOP, _HF_LAYER, "model.layers")


def rotate_half_rows(num_heads: int, head_dim: int) -> NDArray[np.int32]:
    """Row n in HF order is stored row `result[n]` of a GGUF `llama` q or k tensor.

    HF rotates pairs (i, i + d/2) of a head; the GGUF converter lays the two of a pair beside
    each other, at (2 i, 2 i + 1).

    Held by: test_checkpoint_gguf.py::test_llama_query_rows_come_back_in_hf_order.
    """
    stored = np.arange(num_heads * head_dim, dtype=np.int32)
    halves = stored.reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2)
    return np.ascontiguousarray(halves).reshape(-1)


def open_gguf(path: Path) -> Checkpoint:
    """A checkpoint from one GGUF file, or from all parts of a split one.

    Raises: CheckpointError naming the file and the key or tensor.
    """
    file = read_whole_gguf(path)
    config = _gguf_config(file)
    check_depth(config, len(file.tensors), label=str(path))
    names = {name: gguf_name(name) for name in config.tensor_shapes()}
    _refuse_leftovers(path, file.tensors, known=set(names.values()))
    found = {
        name: TensorSource(
            name=name,
            file_name=file_name,
            shape=file.tensors[file_name].shape,
            type=file.tensors[file_name].type,
            raw=file.tensors[file_name].raw,
        )
        for name, file_name in names.items()
        if file_name in file.tensors
    }
    sources = check_tensors(config, found, names, label=str(path))
    if config.architecture == "llama":
        sources = _in_hf_order(config, sources)
    material = None
    if "tokenizer.ggml.model" in file.metadata:
        material = TokenizerMaterial(label=str(path), metadata=file.metadata)
    return Checkpoint(path=file.path, config=config, sources=sources, tokenizer_material=material)


def _in_hf_order(
    config: ModelConfig, sources: Mapping[str, TensorSource]
) -> dict[str, TensorSource]:
    """Query and key tensors with the row map of the `llama` converter, the others as they are."""
    maps = {
        "q": rotate_half_rows(config.num_heads, config.head_dim),
        "k": rotate_half_rows(config.num_kv_heads, config.head_dim),
    }
    return {
        name: replace(source, row_map=maps.get(name.split(".")[-1].removesuffix("_bias")))
        for name, source in sources.items()
    }


def _gguf_config(file: GgufFile) -> ModelConfig:
    """The configuration by metadata; which biases there are, only the tensors say."""
    if not isinstance(file.metadata.get("tokenizer.ggml.tokens", ()), tuple):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens is no array")
    try:
        config = config_from_gguf(
            file.metadata,
            has_head="output.weight" in file.tensors,
            divisors=_rope_divisors(file.tensors.get(_ROPE_DIVISORS)),
        )
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {error}") from None
    return replace(
        config,
        qkv_bias=config.qkv_bias or "blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
    )


def _rope_divisors(tensor: GgufTensor | None) -> tuple[float, ...]:
    if tensor is None:
        return ()
    if tensor.type != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_HEAD_DIM:
        raise CheckpointError(
            f"tensor {_ROPE_DIVISORS!r} is {tensor.type} of shape {tensor.shape}; half a head of "
            "F32 is needed"
        )
    return tuple(map(float, tensor.raw.copy().view("<f4")))


def _refuse_leftovers(path: Path, tensors: Mapping[str, GgufTensor], *, known: set[str]) -> None:
    for name in tensors:
        if name in known or name == _ROPE_DIVISORS:
            continue
        raise CheckpointError(
            f"{path}: tensor {name!r} has no place in this model; leaving it out would change "
            "the answers"
        )


def open_hf_directory(directory: Path) -> Checkpoint:
    """A checkpoint from config.json and model.safetensors, in one file or with an index.

    Raises: CheckpointError naming the file and the field or tensor.
    """
    path = directory / "config.json"
    if not path.is_file():
        ggufs = sorted(file.name for file in directory.glob("*.gguf"))
        hint = f"; name the file itself: {directory / ggufs[0]}" if ggufs else ""
        raise CheckpointError(f"{directory}: has no config.json{hint}")
    config = parse_json_object(path, config_from_hf)
    tensors, label = _read_shards(directory)
    check_depth(config, len(tensors), label=label)
    names = {name: hf_name(name) for name in config.tensor_shapes()}
    _refuse_hf_leftovers(label, tensors, config, known=set(names.values()))
    found = {
        name: TensorSource(
            name=name,
            file_name=file_name,
            shape=tensors[file_name].shape,
            type=tensors[file_name].type,
            raw=tensors[file_name].raw,
        )
        for name, file_name in names.items()
        if file_name in tensors
    }
    material = None
    if (directory / "tokenizer.json").is_file():
        material = TokenizerMaterial(label=str(directory), directory=directory)
    sources = check_tensors(config, found, names, label=label)
    return Checkpoint(path=directory, config=config, sources=sources, tokenizer_material=material)


def _read_shards(directory: Path) -> tuple[dict[str, SafeTensor], str]:
    """All tensors of the directory, and the file to name in messages."""
    single = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
    if single.is_file():
        return read_safetensors(single), str(single)
    if not index.is_file():
        pickles = any(directory.glob("*.bin")) or any(directory.glob("*.pth"))
        hint = "; .bin and .pth files are programs and are not read" if pickles else ""
        raise CheckpointError(
            f"{directory}: has neither model.safetensors nor model.safetensors.index.json{hint}"
        )
    weight_map: Any = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: weight_map is missing or no object")
    file_names = sorted({str(value) for value in weight_map.values()})
    for file_name in file_names:  # all before any is opened
        plain = Path(file_name).name == file_name and file_name.endswith(".safetensors")
        if not plain:
            raise CheckpointError(
                f"{index}: weight_map names {file_name!r}; a .safetensors file in the same "
                "directory is needed"
            )
    tensors: dict[str, SafeTensor] = {}
    for file_name in file_names:
        for name, tensor in read_safetensors(directory / file_name).items():
            if weight_map.get(name) != file_name:
                raise CheckpointError(
                    f"{directory / file_name}: holds tensor {name!r}, which {index.name} places "
                    f"in {weight_map.get(name)!r}"
                )
            tensors[name] = tensor
    for name, file_name in weight_map.items():
        if name not in tensors:
            raise CheckpointError(
                f"{directory / file_name}: tensor {name!r} is missing; {index.name} places it here"
            )
    return tensors, str(index)


def _refuse_hf_leftovers(
    label: str, tensors: Mapping[str, SafeTensor], config: ModelConfig, *, known: set[str]
) -> None:
    for name, tensor in tensors.items():
        if name in known or name.endswith(".rotary_emb.inv_freq"):
            continue  # inv_freq follows from rope_theta; old exports store it
        if name == "lm_head.weight" and config.tied:
            embed = tensors.get("model.embed_tokens.weight")
            same_type = embed is not None and embed.type == tensor.type
            if embed is not None and same_type and np.array_equal(embed.raw, tensor.raw):
                continue
            raise CheckpointError(
                f"{label}: tensor {name!r} differs from model.embed_tokens.weight, but "
                "config.json says tie_word_embeddings"
            )
        raise CheckpointError(
            f"{label}: tensor {name!r} has no place in this model; leaving it out would change "
            "the answers"
        )
