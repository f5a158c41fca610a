"""Weights held as they are stored (bf16, f16, Q8_0): their bytes, their cuts, the same bits.

Every model here has a copy that is widened to float32 before it is written.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_models import write_gguf_model
from grid import Loaded, run_cell, share_only, weight_bytes
from test_widen import BLOCKY

from anyshard.checkpoint import Checkpoint, build_image, open_checkpoint
from anyshard.checkpoint.widen import TensorType
from anyshard.config import ModelConfig
from anyshard.layout import VOCAB_UNIT
from anyshard.ops.storage import Q8_OUTPUTS, stored_bytes
from anyshard.verify.cells import Cell
from anyshard.verify.driver import served
from anyshard.verify.prompt import hashed_tokens

HELD: dict[TensorType, str] = {"BF16": "bfloat16", "F16": "float16", "Q8_0": "q8_0"}
SPLITS = [(1, 1), (2, 1), (3, 1), (5, 2)]


def shaped(head_dim: int, *, vocab: int = 211) -> ModelConfig:
    """Five query heads, of which tp 2 and 3 cut unevenly; hidden and ffn are whole blocks."""
    heads = {"num_heads": 5, "num_kv_heads": 5, "head_dim": head_dim, "num_layers": 2}
    return replace(BLOCKY, **heads, vocab=vocab, hidden=160, ffn=416)


def both(folder: Path, config: ModelConfig, kind: TensorType) -> tuple[Checkpoint, Checkpoint]:
    """A model in `kind` and its float32 copy."""
    weights = write_gguf_model(folder / "m.gguf", config, kind=kind, seed=3)
    write_gguf_model(folder / "wide.gguf", config, weights=weights)
    return open_checkpoint(str(folder / "m.gguf")), open_checkpoint(str(folder / "wide.gguf"))


def digests(checkpoint: Checkpoint, splits: list[tuple[int, int]], **cell: Any) -> set[str]:
    model = Loaded.of("", served(checkpoint), hashed_tokens(40, checkpoint.config.vocab, seed=5))
    sizes = {"prompt_tokens": 40, "num_tokens": 5}
    return {
        run_cell(model, Cell(axis="mixed", tp=tp, pp=pp, **sizes, **cell)).digest
        for tp, pp in splits
    }


@pytest.mark.parametrize("kind", HELD)
@pytest.mark.parametrize("head_dim", [32, 64, 96])
def test_whole_blocks_are_held_as_stored(kind: TensorType, head_dim: int, tmp_path: Path) -> None:
    narrow, wide = both(tmp_path, shaped(head_dim), kind)
    image, copy = build_image(narrow, threads=1), build_image(wide, threads=1)
    for name, place in image.directory.items():
        assert place.storage == (HELD[kind] if place.kind == "matrix" else "float32")
        if place.kind == "vector":
            assert np.array_equal(image.vector(name), copy.vector(name))
            continue
        assert image.matrix(name).tobytes() == copy.matrix(name).tobytes()
        padded = -(-place.shape[0] // Q8_OUTPUTS) * Q8_OUTPUTS * place.shape[1]
        assert place.bytes <= stored_bytes(place.storage, padded)
    assert image.storage.keys() == copy.storage.keys()
    assert set(copy.storage.values()) == {"float32"}


# head dim, and what of a Q8_0 model is widened because a head ends inside a block
@pytest.mark.parametrize(
    ("head_dim", "widened"), [(16, "o"), (32, ""), (48, "o"), (8, "qkvo"), (24, "qkvo"), (80, "o")]
)
def test_what_a_head_would_cut_is_widened(head_dim: int, widened: str, tmp_path: Path) -> None:
    config = replace(shaped(head_dim), num_heads=4, num_kv_heads=2)
    narrow, wide = both(tmp_path, config, "Q8_0")
    storage = build_image(narrow, threads=1).storage
    for part in ("q", "k", "v", "o", "gate", "up", "down"):
        wanted = "float32" if part in widened else "q8_0"
        assert storage[f"layers.1.{part}"] == wanted, part
    found = digests(narrow, [(1, 1), (3, 1), (4, 2)])
    assert found == digests(wide, [(1, 1)])
    assert len(found) == 1


@pytest.mark.parametrize("kind", HELD)
@pytest.mark.parametrize("kernels", ["auto", "scalar", "reference"])
def test_one_digest_in_every_body_and_split(kind: TensorType, kernels: str, tmp_path: Path) -> None:
    splits = SPLITS if kernels == "auto" else [(1, 1), (3, 2)]
    narrow, wide = both(tmp_path, shaped(64), kind)
    found = digests(narrow, splits, kernels=kernels)
    assert found == digests(wide, [(1, 1)])
    assert len(found) == 1


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 33, 163])
def test_vocabularies_that_end_inside_a_block(vocab: int, tmp_path: Path) -> None:
    narrow, wide = both(tmp_path, shaped(32, vocab=vocab), "Q8_0")
    found = digests(narrow, SPLITS)
    assert found == digests(wide, [(1, 1)])
    assert len(found) == 1


@pytest.mark.parametrize("kind", HELD)
@pytest.mark.parametrize(("tp", "pp"), [(3, 1), (5, 2)])
def test_a_rank_reads_its_own_share_only(
    kind: TensorType, tp: int, pp: int, tmp_path: Path
) -> None:
    narrow, _ = both(tmp_path, shaped(64), kind)
    model = Loaded.of("", served(narrow), hashed_tokens(40, narrow.config.vocab, seed=5))
    cell = Cell(axis="mixed", tp=tp, pp=pp, prompt_tokens=40, num_tokens=5)
    wanted = run_cell(model, cell.unsplit())
    shared = run_cell(model, cell, rank_body=share_only)
    assert shared.digest == wanted.digest
    neighbours = partial(share_only, of_rank=lambda rank: (rank + 1) % (tp * pp))
    assert run_cell(model, cell, rank_body=neighbours).fault is not None  # the witness
    assert [view.weight_bytes for view in shared.statuses] == weight_bytes(model, cell)
    assert max(weight_bytes(model, cell)) < weight_bytes(model, cell.unsplit())[0]


@pytest.mark.parametrize("kind", HELD)
def test_one_flipped_bit_is_seen(kind: TensorType, tmp_path: Path) -> None:
    narrow, _ = both(tmp_path, shaped(32), kind)
    before = digests(narrow, [(2, 1)])
    source = narrow.sources["layers.1.down"]
    content = bytearray((tmp_path / "m.gguf").read_bytes())
    place = content.find(source.raw.tobytes())
    content[place + 70] ^= 1  # Q8_0: a value of the third block
    (tmp_path / "flipped.gguf").write_bytes(content)
    assert digests(open_checkpoint(str(tmp_path / "flipped.gguf")), [(2, 1)]) != before


def poisoned(path: Path, checkpoint: Checkpoint, kind: TensorType) -> None:
    """The file again, with a weight of layers.0.up (its scale, for Q8_0) that is infinite."""
    content = bytearray(path.read_bytes())
    place = content.find(checkpoint.sources["layers.0.up"].raw.tobytes())
    content[place : place + 2] = b"\x80\x7f" if kind == "BF16" else b"\x00\x7c"
    path.write_bytes(content)


@pytest.mark.parametrize("kind", HELD)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_what_is_not_finite_is_refused_by_name(
    kind: TensorType, kernels: Any, tmp_path: Path
) -> None:
    narrow, _ = both(tmp_path, shaped(32), kind)
    poisoned(tmp_path / "m.gguf", narrow, kind)
    with pytest.raises(Exception, match=r"blk\.0\.ffn_up\.weight.*NaN or an infinity"):
        build_image(open_checkpoint(str(tmp_path / "m.gguf")), threads=1, kernels=kernels)


@pytest.mark.parametrize("kind", HELD)
def test_native_and_numpy_pack_the_same_bytes(kind: TensorType, tmp_path: Path) -> None:
    narrow, _ = both(tmp_path, shaped(64), kind)
    numpy = build_image(narrow, threads=1, kernels="reference")
    for threads in (1, 3):
        assert build_image(narrow, threads=threads).sha256() == numpy.sha256()


def test_vocabulary_is_cut_between_blocks() -> None:
    assert VOCAB_UNIT % Q8_OUTPUTS == 0
