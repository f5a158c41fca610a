"""A small model that the cache keeps, and what its tests share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from models import ADVERSARIAL_9_3

from anyshard.checkpoint import Checkpoint, WeightImage, cache
from anyshard.checkpoint.cache import CACHE_BYTES, ImageCache, image_key, load_image
from anyshard.checkpoint.image import image_directory

SLOW_TYPES = ["Q4_0", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
SMALL = replace(ADVERSARIAL_9_3, num_layers=1, hidden=256, ffn=512, num_heads=4, num_kv_heads=2,
                head_dim=64, vocab=173)  # fmt: skip
PIECE_BYTES = 64 << 10  # the region has 31 of them
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def loaded(
    checkpoint: Checkpoint, images: Path, *, note: str = "", most_bytes: int = CACHE_BYTES
) -> WeightImage:
    """What a run gets; `note` must be in the sentence that it prints."""
    kept = ImageCache(folder=images, most_bytes=most_bytes)
    image, said = load_image(checkpoint, threads=2, cache=kept)
    assert note in said and bool(note) == bool(said), said
    return image


@contextmanager
def packing_is_forbidden() -> Iterator[None]:
    def build(*arguments: object, **options: object) -> WeightImage:
        raise AssertionError("packed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "build_image", build)
        yield


def only_file(images: Path) -> Path:
    (path,) = images.iterdir()
    return path


def key_of(checkpoint: Checkpoint) -> str:
    directory, _ = image_directory(checkpoint.config, checkpoint.sources)
    return image_key(checkpoint.sources, directory, threads=2)


def changed_at(place: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[place] ^= 0x10
        path.write_bytes(content)

    return damage


def mapping_of(image: WeightImage) -> tuple[str, str, int]:
    """How the kernel has mapped it: permissions, file ("" if none), and bytes that are resident."""
    address = np.frombuffer(image.region, np.uint8).ctypes.data
    head, resident = ("", ""), 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        place = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+\s*(.*)", line)
        if place is not None:
            inside = int(place[1], 16) <= address < int(place[2], 16)
            head = (place[3], place[4]) if inside else head
        elif inside and line.startswith("Rss:"):
            resident = int(line.split()[1]) * 1024
    return (*head, resident)


def flags_of(image: WeightImage) -> list[str]:
    """What the kernel was advised of it: `hg` for huge pages."""
    address, inside = np.frombuffer(image.region, np.uint8).ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        place = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if place is not None:
            inside = int(place[1], 16) <= address < int(place[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []
