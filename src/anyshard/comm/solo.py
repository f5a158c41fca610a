"""The Comm of a single rank: every exchange returns its own buffer, no byte leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyshard.comm.base import CommKind, Counters, FloatArray, WireSizes, check_floats
from anyshard.comm.hops import HopTag, HopTimes
from anyshard.comm.signals import LINE_WORDS
from anyshard.ops import native_module

__all__ = ["Solo"]


class _OwnBuffer:
    """An Exchange with one participant; both parities are the same buffer."""

    def __init__(self, capacity_floats: int) -> None:
        self.capacity_floats = capacity_floats
        self._steps: NDArray[np.uint32] = np.zeros(1, np.uint32)
        self._buffer: FloatArray = np.zeros(capacity_floats, np.float32)

    @property
    def parity(self) -> int:
        """See Exchange."""
        return int(self._steps[0] & 1)

    def send_buffer(self, parity: int) -> FloatArray:
        """The only buffer."""
        return self._buffer

    def sources(self, parity: int) -> list[FloatArray]:
        """The only buffer, as a list of one."""
        return [self._buffer]

    def run(self, num_floats: int, wire_floats: int) -> None:
        """Check the sizes and flip the parity."""
        check_floats(num_floats, wire_floats, self.capacity_floats)
        self._steps[0] ^= 1

    def native(self, row_floats: int, row_wire: int) -> Any:
        """See Exchange; one that waits for nobody."""
        native: Any = native_module()
        if native is None:
            return None
        size = np.zeros(1, np.uint32)
        return native.Exchange(
            native.Gather(np.zeros(LINE_WORDS, np.uint32), -1, (), 0, 0),
            step=self._steps,
            even_sizes=size,
            odd_sizes=size,
            places=(0,),
            sent=np.zeros(2, np.int64),
            row_floats=row_floats,
            row_wire=row_wire,
            capacity_floats=self.capacity_floats,
            messages=0,
            tp_rank=0,
            slice_us=0,
        )

    def end(self, status: int, num_floats: int, wire_floats: int) -> None:
        """There is nobody to wait for."""
        raise AssertionError("an exchange with nobody has ended early")


class Solo:
    """World of one: tp == pp == 1."""

    kind: CommKind = "solo"

    def __init__(self, sizes: WireSizes) -> None:
        if sizes.world != 1:
            raise ValueError(f"Solo has one rank, the layout has {sizes.tp} x {sizes.pp}")
        self.rank = self.stage = self.tp_rank = 0
        self.world = self.tp = self.pp = 1
        self.counters = Counters()
        self.tag, self.times = HopTag(0), HopTimes()  # nothing ever hops
        self._sizes = sizes
        self._exchanges = {spec.name: _OwnBuffer(spec.capacity_floats) for spec in sizes.exchanges}

    def exchange(self, name: str) -> _OwnBuffer:
        """The exchange of that name. Raises: ValueError naming those that exist."""
        self._sizes.exchange_index(name)
        return self._exchanges[name]

    def send(self, values: FloatArray) -> None:
        """There is no next stage. Raises: ValueError always."""
        raise ValueError("a single rank has no next stage")

    def receive(self, into: FloatArray) -> None:
        """There is no previous stage. Raises: ValueError always."""
        raise ValueError("a single rank has no previous stage")

    def close(self) -> None:
        """Nothing to let go of."""
