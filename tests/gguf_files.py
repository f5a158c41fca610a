"""Tiny GGUF files for tests, written by the `gguf` package or byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

from anyshard.checkpoint.names import gguf_name
from anyshard.config import ModelConfig

TINY = ModelConfig(
    architecture="llama",
    num_layers=1,
    hidden=64,
    ffn=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab=35,
    context=128,
    norm_eps=2.0**-17,  # GGUF stores it as float32
    rope_theta=10000.0,
    tied=False,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
)
TOKENS = ["<|end|>", "a", "b", "c", "ab", "abc", "Ġ", "<think>"]


def write_tiny_gguf(
    path: Path,
    *,
    seed: int = 0,
    types: Mapping[str, str] | None = None,
    template: str | None = None,
) -> dict[str, np.ndarray]:
    """A llama of one layer with a tokenizer; returns what the `gguf` package dequantises.

    `types` maps canonical names to Q8_0 or Q4_1; the other tensors are F32. Rows of q and k are
    stored as written here: the test says where they belong.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(TINY.num_layers)
    writer.add_context_length(TINY.context)
    writer.add_embedding_length(TINY.hidden)
    writer.add_feed_forward_length(TINY.ffn)
    writer.add_head_count(TINY.num_heads)
    writer.add_head_count_kv(TINY.num_kv_heads)
    writer.add_layer_norm_rms_eps(TINY.norm_eps)
    writer.add_rope_freq_base(TINY.rope_theta)
    writer.add_vocab_size(TINY.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS + [f"pad{i}" for i in range(TINY.vocab - len(TOKENS))])
    writer.add_token_types([3, 1, 1, 1, 1, 1, 1, 4] + [1] * (TINY.vocab - len(TOKENS)))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(True)
    if template is not None:
        writer.add_chat_template(template)
    writer.add_array("test.floats", [0.5, 1.5])
    writer.add_bool("test.bool", True)
    dequantised: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(seed)
    for name, shape in TINY.tensor_shapes().items():
        kind = gguf.GGMLQuantizationType[(types or {}).get(name, "F32")]
        stored = gguf.quantize(rng.normal(0, 1, shape).astype(np.float32), kind)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
        dequantised[name] = gguf.dequantize(stored, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dequantised


def text(value: str | bytes) -> bytes:
    """A string as GGUF stores it."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    """One metadata entry."""
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """One line of the tensor table."""
    packed = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return text(name) + packed


def file_bytes(
    *,
    entries: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    payload: int = 0,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A whole file; `counts` (tensors, entries) may lie."""
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries)
    body = head + b"".join(entries) + b"".join(tensors)
    return body + bytes(-len(body) % 32) + bytes(payload)
