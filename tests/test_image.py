"""The weight image: the panels of the contract, the same bytes from every body, sealed."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cached import flags_of, mapping_of
from gguf_files import TINY, write_tiny_gguf
from models import ADVERSARIAL_9_3, write_hf_model
from safetensors.numpy import load_file, save_file
from test_checkpoint_gguf import QUANTISED, needs_demo

from anyshard import host
from anyshard.checkpoint import Checkpoint, WeightImage, build_image, open_checkpoint
from anyshard.errors import CheckpointError


def native_bodies() -> list[str]:
    try:
        native = importlib.import_module("anyshard._native")
    except ImportError:
        return []
    return list(native.available_bodies()) if hasattr(native, "pack_panels") else []


BODIES = native_bodies()
needs_native = pytest.mark.skipif(not BODIES, reason="built without a C++ compiler")


@pytest.fixture
def tiny(tmp_path: Path) -> Checkpoint:
    write_tiny_gguf(tmp_path / "tiny.gguf", types=QUANTISED)
    return open_checkpoint(str(tmp_path / "tiny.gguf"))


@pytest.fixture
def adversarial(tmp_path: Path) -> Checkpoint:
    directory = write_hf_model(tmp_path / "hf", ADVERSARIAL_9_3, seed=2, adversarial=True)
    return open_checkpoint(str(directory))


def packed(checkpoint: Checkpoint, **options: Any) -> WeightImage:
    return build_image(checkpoint, **{"threads": 1, "kernels": "reference", **options})


_HELD = {"Q8_0": "q8_0", "F16": "float16", "BF16": "bfloat16"}


def test_panels_hold_every_weight_at_its_place(tiny: Checkpoint) -> None:
    image = packed(tiny)
    for name, shape in TINY.tensor_shapes().items():
        weight = tiny.read(name)
        place = image.directory[name]
        if len(shape) == 1:
            assert place.offset % 64 == 0
            assert np.array_equal(image.vector(name), weight)
            continue
        assert place.offset % 4096 == 0
        assert np.array_equal(image.matrix(name), weight)
        panels = image.panels(name)
        assert place.storage == _HELD.get(tiny.sources[name].type, "float32")
        if place.storage != "float32":
            continue  # blocks and halves: test_stored.py
        assert panels.shape == (-(-shape[0] // 8), shape[1], 8)
        assert panels.strides == (shape[1] * 32, 32, 4)
        for n in range(shape[0]):
            assert np.array_equal(panels[n // 8, :, n % 8], weight[n])
        assert not panels.reshape(-1, shape[1], 8)[shape[0] // 8 :, :, shape[0] % 8 or 8 :].any()


def test_cuts_are_views(adversarial: Checkpoint) -> None:
    image = packed(adversarial)
    panels, weight = image.panels("layers.0.down"), adversarial.read("layers.0.down")
    cut = panels[2:5, 64:128, :]
    assert np.shares_memory(cut, panels)
    assert np.array_equal(cut.transpose(0, 2, 1).reshape(24, 64), weight[16:40, 64:128])


@needs_native
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("model", ["tiny", "adversarial"])
def test_native_and_numpy_pack_the_same_bytes(
    model: str, body: str, threads: int, request: pytest.FixtureRequest
) -> None:
    checkpoint = request.getfixturevalue(model)
    native = packed(checkpoint, kernels=body, threads=threads)
    reference = packed(checkpoint)
    assert native.sha256() == reference.sha256()
    assert native.to_json() == reference.to_json()


@needs_native
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("padding", [1, 2, 3])
def test_weights_at_an_odd_byte_pack_the_same(tmp_path: Path, body: str, padding: int) -> None:
    directory = write_hf_model(tmp_path, ADVERSARIAL_9_3, seed=2)
    expected = packed(open_checkpoint(str(directory))).sha256()
    path = directory / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size] + b" " * padding
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    checkpoint = open_checkpoint(str(directory))
    assert packed(checkpoint, kernels=body).sha256() == expected
    assert packed(checkpoint).sha256() == expected


@needs_demo
@needs_native
def test_demo_image_is_the_same_from_the_native_body() -> None:
    checkpoint = open_checkpoint(None)
    reference = packed(checkpoint)
    start = time.perf_counter()
    image = build_image(checkpoint, threads=2)
    assert time.perf_counter() - start < 5  # 0.3 to 0.8 s on two idle cores
    assert image.sha256() == reference.sha256()


def test_same_model_same_hash_and_one_bit_changes_it(tmp_path: Path) -> None:
    directory = write_hf_model(tmp_path, ADVERSARIAL_9_3, seed=2, adversarial=True)
    first = packed(open_checkpoint(str(directory))).sha256()
    assert packed(open_checkpoint(str(directory))).sha256() == first
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)
    assert packed(open_checkpoint(str(directory))).sha256() != first


def test_some_names_only_and_progress(tiny: Checkpoint) -> None:
    seen: list[tuple[int, int]] = []
    names = ["layers.0.q", "norm"]
    image = packed(tiny, names=names, progress=lambda done, total: seen.append((done, total)))
    assert list(image.directory) == names
    size = 64 * 64 * 4
    assert seen == [(size, size + 256), (size + 256, size + 256)]
    assert image.bytes == size + 4096
    with pytest.raises(KeyError):
        packed(tiny, names=["layers.9.q"])
    with pytest.raises(ValueError, match="threads is 0"):
        packed(tiny, threads=0)


def test_image_is_sealed_and_read_only(tiny: Checkpoint) -> None:
    image = packed(tiny)
    panels = image.panels("embed")
    assert not panels.flags.writeable
    assert mapping_of(image)[:2] == ("r--p", ""), "private, and whoever writes there dies"
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        panels.flags.writeable = True
    assert "hg" in flags_of(image), "no huge pages were asked for"
    before = panels.copy()
    image.close()
    image.close()
    assert np.array_equal(panels, before)


def test_a_write_into_the_image_ends_the_process(tiny: Checkpoint) -> None:
    image = packed(tiny)
    address = np.frombuffer(image.region, np.uint8).ctypes.data
    child = os.fork()
    if child == 0:
        ctypes.memset(address, 1, 1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
    assert json.loads(image.to_json())[0]["name"] == "embed"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("name", "file_name"),
    [
        ("layers.1.down", "model.layers.1.mlp.down_proj.weight"),
        ("layers.0.q_bias", "model.layers.0.self_attn.q_proj.bias"),
        ("head", "lm_head.weight"),
    ],
)
@pytest.mark.parametrize("body", ["reference", *BODIES])
def test_weight_that_is_not_finite_is_refused_by_name(
    tmp_path: Path, body: str, name: str, file_name: str, bad: float
) -> None:
    directory = write_hf_model(tmp_path, ADVERSARIAL_9_3, seed=2)
    tensors = load_file(directory / "model.safetensors")
    tensors[file_name].reshape(-1)[-1] = bad
    save_file(tensors, directory / "model.safetensors")
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError) as caught:
        packed(open_checkpoint(str(directory)), kernels=body)
    assert f"{file_name!r} ({name}) holds a NaN or an infinity" in str(caught.value)
    caught = None  # type: ignore[assignment]
    assert len(os.listdir("/proc/self/fd")) <= fds + 1


def test_the_limit_of_a_cgroup_is_what_is_free(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_cgroup_memory", lambda root: [(5000, 4000)])
    with pytest.raises(CheckpointError, match=r"1\.0 kB are free"):
        packed(tiny)


def test_memory_that_will_not_suffice_is_refused_with_both_numbers(tiny: Checkpoint) -> None:
    needed = packed(tiny).bytes
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match=r"need .* [kM]B of memory, but .* [kM]B are free"):
        packed(tiny, free_bytes=needed - 1)
    assert len(os.listdir("/proc/self/fd")) <= fds
    assert packed(tiny, free_bytes=needed).bytes == needed
