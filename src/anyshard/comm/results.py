"""What the sampler made of a frame, and how that lies in the mapping: by row a token, a fault and,
if it is asked for, how sure the model was (ops/spread.py); then rows of logits.

Knows nothing of signals: control.py says when a result is there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from anyshard.comm.base import FloatArray
from anyshard.comm.region import RESULT_HEADER, EpochRegion
from anyshard.comm.signals import WRAP
from anyshard.errors import AnyshardError
from anyshard.ops.spread import SPREAD, Spread

if TYPE_CHECKING:
    from anyshard.comm.link import EmulatedLink

__all__ = ["Result", "ResultSlot"]

Int32Array = NDArray[np.int32]

_BODY = 64  # byte offset of tokens in a result slot


@dataclass(frozen=True)
class Result:
    """What the sampler made of a frame: a token and a fault (0 is fine) of each row, logits
    f32[k, vocab] or None, the spread of each row or None; of one that is void, nothing of use."""

    sequence: int
    tokens: list[int]
    faults: list[int]
    logits: FloatArray | None
    is_void: bool = False
    spreads: list[Spread] | None = None


class ResultSlot:
    """Where the result of a frame lies: written by the sampler, read by the front."""

    def __init__(self, region: EpochRegion, slot: int) -> None:
        sizes = region.sizes.control
        self._at = region.layout.result_offset + slot * region.layout.result_bytes
        self._memory = region.memory
        at = self._at + _BODY
        self._tokens = region.array(np.int32, sizes.rows_max, at)
        self._faults = region.array(np.int32, sizes.rows_max, at + sizes.rows_max * 4)
        spreads = sizes.rows_max if sizes.tells_spread else 0
        self._spreads = region.array(SPREAD, spreads, at + sizes.rows_max * 8)
        at += sizes.rows_max * sizes.result_row_bytes
        logits = region.array(np.float32, sizes.logit_rows * sizes.vocab, at)
        self._logits = logits.reshape(sizes.logit_rows, sizes.vocab)

    def write(
        self,
        sequence: int,
        tokens: Int32Array,
        faults: Int32Array,
        logits: Sequence[FloatArray],
        *,
        spreads: NDArray[Any] | None,
        is_void: bool,
    ) -> None:
        """See RankControl.post_result."""
        if len(faults) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens but {len(faults)} faults")
        self._tokens[: len(tokens)] = tokens
        self._faults[: len(faults)] = faults
        if spreads is not None:
            self._spreads[: len(spreads)] = spreads
        for index, row in enumerate(logits):
            self._logits[index] = row
        counts = len(tokens), len(logits), is_void
        sent_ns = time.monotonic_ns()
        RESULT_HEADER.pack_into(self._memory, self._at, sequence % WRAP, *counts, sent_ns)

    def read(self, sequence: int, link: EmulatedLink | None) -> Result:
        """The result of frame `sequence`, once that is there; held back as `link` would.

        Raises: AnyshardError if another one lies here.
        """
        found, num_rows, num_logits, is_void, sent_ns = RESULT_HEADER.unpack_from(
            self._memory, self._at
        )
        if found != sequence % WRAP:
            raise AnyshardError(f"result slot holds sequence {found}, want {sequence}")
        tells_spread = len(self._spreads) > 0
        if link is not None:  # no faults and no logits would go back
            row_bytes = 4 + SPREAD.itemsize * tells_spread
            link.hold(sent_ns, RESULT_HEADER.size + row_bytes * num_rows)
        return Result(
            sequence,
            self._tokens[:num_rows].tolist(),
            self._faults[:num_rows].tolist(),
            self._logits[:num_logits].copy() if num_logits else None,
            bool(is_void),
            [Spread(*each) for each in self._spreads[:num_rows].tolist()] if tells_spread else None,
        )
