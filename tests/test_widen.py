"""Stored types: the bits of the `gguf` package, for random, extreme and real blocks."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_models import write_gguf_model
from models import ADVERSARIAL_9_3
from test_image import BODIES, packed

from anyshard.checkpoint import open_checkpoint
from anyshard.checkpoint.widen import BLOCK, TensorType, widen
from anyshard.errors import CheckpointError

# rows of whole K blocks, a vocabulary that ends inside a panel
BLOCKY = replace(
    ADVERSARIAL_9_3, num_layers=1, hidden=256, ffn=512, num_heads=8, num_kv_heads=4, head_dim=32,
    vocab=259,
)  # fmt: skip


def oracle(raw: np.ndarray, kind: TensorType) -> np.ndarray:
    """By the `gguf` package, from any bytes; it warns where a NaN or an infinity is widened."""
    number = gguf.GGMLQuantizationType[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        if kind in ("F32", "F16"):
            return raw.view("<f4" if kind == "F32" else "<f2").astype(np.float32)
        return gguf.dequantize(raw.reshape(1, -1), number).reshape(-1)


def same_bits(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Equal bits; a NaN equals any NaN, of which no weight may be one."""
    nan = np.isnan(wanted)
    equal = found.view(np.uint32) == wanted.view(np.uint32)
    return found.shape == wanted.shape and bool((equal | (nan & np.isnan(found))).all())


@pytest.mark.parametrize("kind", BLOCK)
def test_random_bytes_widen_to_the_bits_of_gguf(kind: TensorType) -> None:
    raw = np.random.default_rng(5).integers(0, 256, (4096, BLOCK[kind][1]), np.uint8)
    raw[:2], raw[2:4] = 0, 255
    raw[4:20] &= 0x83  # subnormal fp16 scales of both signs
    found = widen(raw, kind)
    assert found.dtype == np.float32
    assert found.size == 4096 * BLOCK[kind][0]
    assert same_bits(found, oracle(raw.reshape(-1), kind))


@pytest.mark.parametrize("kind", BLOCK)
def test_every_code_at_every_place_widens_to_the_bits_of_gguf(kind: TensorType) -> None:
    num_bytes = BLOCK[kind][1]
    plain = np.random.default_rng(6).integers(0, 256, num_bytes, np.uint8)
    raw = np.tile(plain, (num_bytes * 256, 1))
    for place in range(num_bytes):
        raw[place * 256 : place * 256 + 256, place] = np.arange(256)
    assert same_bits(widen(raw, kind), oracle(raw.reshape(-1), kind))


@pytest.mark.parametrize("kind", BLOCK)
def test_a_file_of_that_type_packs_the_same_from_every_body(
    kind: TensorType, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    expected = write_gguf_model(path, BLOCKY, kind=kind, seed=3)
    checkpoint = open_checkpoint(str(path))
    assert {s.type for s in checkpoint.tensors().values() if len(s.shape) == 2} == {kind}
    for name, weight in expected.items():
        assert same_bits(checkpoint.read(name), weight), name
    reference = packed(checkpoint)
    for body in BODIES:
        for threads in (1, 2):
            assert packed(checkpoint, kernels=body, threads=threads).sha256() == reference.sha256()


@pytest.mark.parametrize("kind", [kind for kind in BLOCK if BLOCK[kind][0] > 1])
@pytest.mark.parametrize("body", ["reference", *BODIES])
def test_a_scale_that_is_not_finite_is_refused_by_tensor_name(
    kind: TensorType, body: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf_model(path, BLOCKY, kind=kind, seed=3)
    stored = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_up.weight")
    content = bytearray(path.read_bytes())
    place = int(stored.data_offset) + stored.n_bytes - BLOCK[kind][1]
    place += 208 if kind == "Q6_K" else 0
    content[place : place + 2] = b"\x00\x7c"  # infinity as fp16
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"'blk\.0\.ffn_up\.weight' .*holds a NaN"):
        packed(open_checkpoint(str(path)), kernels=body)
