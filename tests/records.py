"""A small record that no engine made: for the tests of files, of refusals and of the command."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from anyshard.fidelity import Manifest, Record, RunDigests, tokens_sha256
from anyshard.op import LAYER_POINTS
from anyshard.request import Sampling


def small_record(**changes: Any) -> Record:
    """3 prompt tokens, 2 emitted, 2 layers; digests count from 1. changes: of the manifest."""
    prompt, tokens = np.array([5, 6, 7], np.int32), np.array([8, 9], np.int32)
    positions, layers = 4, 2
    manifest = Manifest(
        anyshard="0.1.0",
        date="2026-11-29T12:00:00+00:00",
        weights_sha256="a" * 64,
        model={"num_layers": layers, "hidden": 64},
        profile="f32",
        profile_sha256="b" * 64,
        tokens_sha256=tokens_sha256(prompt),
        sampling=Sampling(),
        max_tokens=2,
        finish="length",
        fault=None,
        logits_sha256="c" * 64,
        layout={"tp": 1, "pp": 1, "comm": "solo", "kernels": "avx2", "threads": 2},
        machine={"cpu": "a CPU"},
        positions=positions,
        layers=layers,
        prompt_tokens=3,
        emitted_tokens=2,
    )
    points = len(LAYER_POINTS)
    numbers = np.arange(1, 1 + positions * layers * points, dtype=np.uint64)
    digests = RunDigests(
        np.arange(1, 1 + positions, dtype=np.uint64),
        numbers.reshape(positions, layers, points),
        np.arange(1, 3, dtype=np.uint64),
    )
    return Record(msgspec.structs.replace(manifest, **changes), prompt, tokens, digests)


def empty_record(**changes: Any) -> Record:
    """The same, and its first row failed: nothing of it is recorded."""
    failed = {"fault": "layers.0.qkv", "finish": "fault"}
    whole = small_record(**{"positions": 0, "emitted_tokens": 0, **failed, **changes})
    of = whole.digests
    none = RunDigests(of.embed[:0], of.layers[:0], of.logits[:0])
    return Record(whole.manifest, whole.prompt, whole.tokens[:0], none)
