"""Split GGUF models: read as one, whichever part is named; a part that is wrong is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf_models import write_gguf_model
from models import ADVERSARIAL_9_3

from anyshard.checkpoint import open_checkpoint
from anyshard.errors import CheckpointError


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    write_gguf_model(tmp_path / "m.gguf", ADVERSARIAL_9_3, seed=2, split_tensors=20)
    found = sorted(tmp_path.glob("*.gguf"))
    assert [p.name for p in found] == [f"m-{n:05}-of-00003.gguf" for n in (1, 2, 3)]
    return found


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_parts_read_like_the_whole_whichever_is_named(
    parts: list[Path], tmp_path: Path
) -> None:
    whole = write_gguf_model(tmp_path / "whole.gguf", ADVERSARIAL_9_3, seed=2)
    for part in parts:
        checkpoint = open_checkpoint(str(part))
        assert checkpoint.path == parts[0]
        for name, weight in whole.items():
            assert np.array_equal(checkpoint.read(name), weight)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_part_is_named(parts: list[Path], missing: int) -> None:
    parts[missing].unlink()
    present = parts[(missing + 1) % 3]
    assert refusal(present) == f"{parts[missing]}: part {missing + 1} of 3 does not exist"


def test_parts_that_were_renamed_or_mixed_are_refused(parts: list[Path], tmp_path: Path) -> None:
    renamed = tmp_path / "model.gguf"
    shutil.copy(parts[0], renamed)
    assert "is one of 3 parts by its split.count, but is not called" in refusal(renamed)
    wrong_count = tmp_path / "m-00001-of-00004.gguf"
    shutil.copy(parts[0], wrong_count)
    assert "is one of 3 parts by its split.count, but is not called" in refusal(wrong_count)
    shutil.copy(parts[1], parts[2])
    assert f"{parts[2]}: split.no is 1, but its name says 2" in refusal(parts[0])
    other = tmp_path / "other"
    other.mkdir()
    write_gguf_model(other / "m.gguf", ADVERSARIAL_9_3, seed=2)
    shutil.copy(other / "m.gguf", parts[2])
    assert f"{parts[2]}: split.no is -1" in refusal(parts[0])
    parts[2].write_bytes(b"GGUF")
    assert str(parts[2]) in refusal(parts[0])


def test_a_tensor_in_two_parts_and_a_count_that_lies_are_refused(
    parts: list[Path],
) -> None:
    first = parts[0].read_bytes()
    at = first.index(b"split.tensors.count") + len("split.tensors.count") + 4
    parts[0].write_bytes(first[:at] + (999).to_bytes(4, "little") + first[at + 4 :])
    assert "split.tensors.count is 999, but the 3 parts hold" in refusal(parts[1])
    at = first.index(b"split.no") + len("split.no") + 4
    as_second = first[:at] + (1).to_bytes(2, "little") + first[at + 2 :]
    parts[0].write_bytes(first)
    parts[1].write_bytes(as_second)
    assert "is in an earlier part, too" in refusal(parts[0])
