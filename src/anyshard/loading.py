"""What the launcher loads before the first rank: the weight image, under a profile.

Knows nothing of ranks or requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import msgspec

from anyshard.checkpoint import Checkpoint
from anyshard.checkpoint.cache import ImageCache, content_sha256, load_image
from anyshard.config import INT8_LEAF, Arithmetic, KvType, Profile, WireType
from anyshard.fidelity.weights import weights_sha256
from anyshard.launcher import Progress
from anyshard.ops.coefficients import constants_sha256
from anyshard.ops.control_word import set_control_word
from anyshard.worker import Served

__all__ = ["LoadReport", "f32_profile", "int8_profile", "loader", "profile_of"]


def f32_profile() -> Profile:
    """The float32 arithmetic, with the hash of its constants filled in."""
    return Profile(constants_sha256=constants_sha256())


def int8_profile() -> Profile:
    """The block int8 arithmetic (`ops/quant.py`)."""
    return Profile(arithmetic="int8", leaf=INT8_LEAF, constants_sha256=constants_sha256())


def profile_of(arithmetic: Arithmetic, kv: KvType = "f32", wire: WireType = "none") -> Profile:
    """The profile of that arithmetic, KV (`ops/kv_pages.py`) and wire (`ops/wire.py`)."""
    plain = int8_profile() if arithmetic == "int8" else f32_profile()
    return dataclasses.replace(plain, kv=kv, wire=wire)


class LoadReport(msgspec.Struct, frozen=True):
    """What the launcher has to say of a load: a sentence for the user, or "", the hash of the
    weights (`fidelity/weights.py`), hex, "" if it was not asked for, and that of what the file
    stores, on one of several hosts."""

    note: str = ""
    weights_sha256: str = ""
    content_sha256: str = ""

    def encoded(self) -> bytes:
        """As a payload."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def of(cls, payload: bytes) -> LoadReport:
        """From a payload."""
        return msgspec.msgpack.decode(payload, type=cls)


def loader(
    checkpoint: Checkpoint,
    *,
    threads: int,
    cache: ImageCache | None = None,
    record: bool = False,
    arithmetic: Arithmetic = "f32",
    kv: KvType = "f32",
    wire: WireType = "none",
    names: Collection[str] | None = None,
) -> Callable[[Progress], tuple[object, bytes]]:
    """What the launcher runs once: pack the weight image of a checkpoint opened before the fork.

    An image in `cache` is read instead, where one is. `record`: also hash the weights. `names`: the
    tensors that the ranks of this host read, where it is one of several; then the file is hashed,
    for the hosts to compare. The payload is a LoadReport.
    """

    def load(progress: Progress) -> tuple[object, bytes]:
        set_control_word()
        image, note = load_image(
            checkpoint,
            threads=threads,
            cache=cache,
            progress=progress,
            arithmetic=arithmetic,
            names=None if record else names,
        )
        content = "" if names is None else content_sha256(checkpoint.sources, threads=threads)
        sha256 = weights_sha256(image, threads=threads) if record else ""
        report = LoadReport(note.encode("utf-8", "replace").decode(), sha256, content)
        profile = profile_of(arithmetic, kv, wire)
        return Served(checkpoint.config, profile, image), report.encoded()

    return load
