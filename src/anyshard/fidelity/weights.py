"""A hash of weights as values: the same for a Q8_0 file and its float32 copy, for GGUF and HF.

What is hashed are digests (`ops/digest.py`) of every row of every matrix, and of every vector, all
widened to float32: one pass over the weights as they are held, on all cores. It tells models
apart; it does not resist somebody who forges one.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np

from anyshard.checkpoint.image import WeightImage
from anyshard.ops import KernelChoice, load_kernels
from anyshard.ops.digest import KEY_PADDING, digest_keys, digest_of

__all__ = ["weights_sha256"]


def weights_sha256(image: WeightImage, *, threads: int, kernels: KernelChoice = "auto") -> str:
    """sha256, hex, over name, shape and row digests of every tensor in the order of their names.

    The threads that it starts have ended when it returns. Held by: test_record.py.
    """
    body = load_kernels(kernels, threads=threads, spin=False)
    whole = hashlib.sha256()
    widest = max(
        place.stored_columns if place.kind == "matrix" else place.shape[0]
        for place in image.directory.values()
    )
    keys = digest_keys(widest + KEY_PADDING)
    try:
        for name, place in sorted(image.directory.items()):
            if place.kind == "vector":
                rows = np.array([digest_of(image.vector(name))], np.uint64)
            else:
                rows = np.zeros(place.shape[0], np.uint64)
                panels = image.panels(name)
                body.module.digest_panels(body.pool, panels, keys, place.stored_columns, rows)
            whole.update(json.dumps([name, place.shape]).encode())
            whole.update(rows.astype("<u8").tobytes())
    finally:
        body.pool.close()
    return whole.hexdigest()
