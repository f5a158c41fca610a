"""GGUF models of any configuration for tests, written by the `gguf` package.

Matrices are stored in one type each; what the package dequantises is returned, q and k rows in
HF order, so that the same model can be written again as safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from anyshard.checkpoint.names import gguf_name
from anyshard.checkpoint.widen import BLOCK
from anyshard.config import ModelConfig

F32 = NDArray[np.float32]

# type -> bytes of each block that hold an fp16
_HALVES = {
    **{"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q6_K": (208,)},
    **{"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)},
}
_LARGEST = {"Q4_K": 63 * 15, "Q5_K": 63 * 31, "Q6_K": 127 * 32}  # times a scale, a weight


def random_blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    """Stored rows [N, bytes] of random codes under scales that make weights near 1/sqrt(K)."""
    elements, num_bytes = BLOCK[kind]  # type: ignore[index]
    if elements == 1:
        wide = (rng.normal(0, 1, shape) / np.sqrt(shape[-1])).astype(np.float32)
        number = gguf.GGMLQuantizationType[kind]
        return wide if kind == "F32" else gguf.quantize(wide, number)
    blocks = rng.integers(0, 256, (shape[0], shape[1] // elements, num_bytes), np.uint8)
    size = 2 / np.sqrt(shape[1]) / _LARGEST.get(kind, 16 if kind != "Q8_0" else 128)
    for place in _HALVES[kind]:
        signs = -1.0 if place else 1.0  # a minimum is subtracted in K types, added in the others
        mean = size * (8 if place and kind.endswith("1") else 1)
        halves = signs * mean * rng.uniform(0.5, 1, (*blocks.shape[:2], 1))
        if place and kind.endswith("K"):
            halves = -halves * (_LARGEST[kind] / 126)
        blocks[..., place : place + 2] = halves.astype("<f2").view(np.uint8)
    return blocks.reshape(shape[0], -1)


def permuted(weight: F32, num_heads: int) -> F32:
    """Rows as llama's converter stores them: the two of a pair (i, i + d/2) side by side."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(np.swapaxes(halves, 1, 2).reshape(weight.shape))


def restored(weight: F32, num_heads: int) -> F32:
    """`permuted` undone."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(np.swapaxes(pairs, 1, 2).reshape(weight.shape))


def heads_of(config: ModelConfig, name: str) -> int | None:
    """Heads whose rows llama's converter permutes in that tensor, or None."""
    part = name.rsplit(".", 1)[-1].removesuffix("_bias")
    if config.architecture != "llama" or part not in ("q", "k"):
        return None
    return config.num_heads if part == "q" else config.num_kv_heads


def metadata_of(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(config.vocab)


def write_gguf_model(
    path: Path,
    config: ModelConfig,
    *,
    weights: Mapping[str, F32] | None = None,
    kind: str = "F32",
    seed: int = 0,
    extra: Mapping[str, F32] | None = None,
    metadata: Mapping[str, object] | None = None,
    split_tensors: int = 0,
) -> dict[str, F32]:
    """Write a model without a tokenizer; returns canonical name to float32 weights, HF order.

    Matrices of `weights` are quantised to `kind`; without them they are random blocks. `extra`
    are further tensors by their file name; `split_tensors` makes parts of so many tensors.
    """
    writer = gguf.GGUFWriter(path, config.architecture, split_max_tensors=split_tensors)
    metadata_of(writer, config)
    for key, value in (metadata or {}).items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
        add[type(value)](key, value)  # type: ignore[operator]
    wide: dict[str, F32] = {}
    rng = np.random.default_rng(seed)
    for name, shape in config.tensor_shapes().items():
        heads = heads_of(config, name)
        number = gguf.GGMLQuantizationType[kind if len(shape) == 2 else "F32"]
        if weights is not None:
            stored = permuted(weights[name], heads) if heads else weights[name]
            if len(shape) == 2 and kind != "F32":
                stored = gguf.quantize(stored, number)
            found = gguf.dequantize(stored, number)
            wide[name] = restored(found, heads) if heads else found
        elif len(shape) == 1:
            base = 1 if name.endswith("norm") else 0
            wide[name] = (base + 0.1 * rng.normal(0, 1, shape)).astype(np.float32)
            stored = permuted(wide[name], heads) if heads else wide[name]
        else:
            stored = random_blocks(kind, shape, rng)
            found = gguf.dequantize(stored, number)
            wide[name] = restored(found, heads) if heads else found
        writer.add_tensor(gguf_name(name), stored, raw_dtype=number)
    for file_name, tensor in (extra or {}).items():
        writer.add_tensor(file_name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return wide
