"""The Comm within one host: exchanges read in place from the epoch's shared mapping.

The same class serves forked ranks (kind "shm") and threads of one process (kind "threads").
A rank that has published step n + 1 of an exchange has finished reading step n: two buffers a
rank are enough, and nothing is copied. Hops are a ring of messages with acks: a stage computes the
next one while this one lies there.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from anyshard.comm.base import (
    CommKind,
    Counters,
    FloatArray,
    check_floats,
    incoming_link,
)
from anyshard.comm.hops import (
    HOP_HEADER_BYTES,
    ByteArray,
    HopTag,
    HopTimes,
    flat_bytes,
    open_hop,
    seal_hop,
)
from anyshard.comm.liveness import SLICE_S, Liveness, beat_of
from anyshard.comm.region import (
    CHANNEL_EXCHANGES,
    CHANNEL_HOP,
    CHANNEL_HOP_ACK,
    EpochRegion,
)
from anyshard.comm.signals import REACHED, WRAP, NativeSignals
from anyshard.comm.waiting import outwait
from anyshard.errors import AnyshardError
from anyshard.ops import native_module
from anyshard.ops.exact import FLOAT_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from anyshard.comm.signals import Waiter

__all__ = ["Shm"]


class _ShmExchange:
    """An Exchange over the shared mapping; see comm.base.Exchange."""

    def __init__(self, comm: Shm, index: int) -> None:
        spec = comm.region.sizes.wires.exchanges[index]
        self.capacity_floats = spec.capacity_floats
        self._steps: NDArray[np.uint32] = np.zeros(1, np.uint32)
        self._step = self._steps.data  # of the last run; a step's parity is step & 1
        self._comm = comm
        self._index = index
        self._spec = spec
        self._buffers = comm.region.exchange_buffers(comm.stage, index)
        group = [comm.stage * comm.tp + tp_rank for tp_rank in range(comm.tp)]
        peers = [rank for rank in group if rank != comm.rank]
        if spec.root_only and comm.tp_rank != 0:
            # The root has entered run(n) only after it has read n - 1: wait for that, then the
            # caller may overwrite n - 1.
            peers = group[:1]
        self._peers = peers
        self._waiter = comm.signals.waiter(
            CHANNEL_EXCHANGES + index,
            receivers=peers,
            senders=peers,
            spin_us=comm.region.sizes.spin_us,
        )
        self._first = comm.stage * comm.tp  # rank of tp rank 0
        self._sends = 0 if spec.root_only and comm.tp_rank == 0 else len(peers)

    @property
    def parity(self) -> int:
        """See Exchange."""
        return (self._step[0] + 1) & 1

    def send_buffer(self, parity: int) -> FloatArray:
        """This rank's buffer of that parity, in the shared mapping."""
        return self._buffers[parity][self._comm.tp_rank][1]

    def sources(self, parity: int) -> list[FloatArray]:
        """All ranks' buffers of that parity, in place."""
        return [values for _, values in self._buffers[parity]]

    def run(self, num_floats: int, wire_floats: int) -> None:
        """Publish mine and wait for the peers; see comm.base.Exchange.run."""
        check_floats(num_floats, wire_floats, self._spec.largest_wire(self._comm.tp))
        self._step[0] = step = (self._step[0] + 1) % WRAP
        if not self._peers:
            return
        comm = self._comm
        self._buffers[step & 1][comm.tp_rank][0][0] = wire_floats
        self.end(self._waiter.run(step, comm.slice_us), num_floats, wire_floats)

    def native(self, row_floats: int, row_wire: int) -> Any:
        """See Exchange; None without native signals."""
        native: Any = native_module()
        if not isinstance(self._comm.signals, NativeSignals) or self._spec.root_only:
            return None
        comm = self._comm
        (even_sizes, odd_sizes), places = comm.region.exchange_sizes(comm.stage, self._index)
        return native.Exchange(
            self._waiter,
            step=self._steps,
            even_sizes=even_sizes,
            odd_sizes=odd_sizes,
            places=places,
            sent=comm.counters.of(self._spec.kind),
            row_floats=row_floats,
            row_wire=row_wire,
            capacity_floats=self._spec.largest_wire(comm.tp),
            messages=self._sends,
            tp_rank=comm.tp_rank,
            slice_us=comm.slice_us,
        )

    def end(self, status: int, num_floats: int, wire_floats: int) -> None:
        """See Exchange."""
        comm, step = self._comm, self._step[0]
        buffers = self._buffers[step & 1]
        if status != REACHED:
            comm.outwait(self._waiter, step, status, self._peers, f"exchange {self._spec.name!r}")
        for peer in self._peers:
            if buffers[peer - self._first][0][0] != wire_floats:
                raise AnyshardError(
                    f"exchange {self._spec.name!r}: rank {comm.rank} has {wire_floats} floats on"
                    f" the wire, rank {peer} {buffers[peer - self._first][0][0]}"
                )
        if self._sends:
            comm.counters.add(
                self._spec.kind,
                num_bytes=(num_floats if self._spec.root_only else wire_floats) * FLOAT_BYTES,
                num_messages=self._sends,
            )


def _wire_bytes(flat: ByteArray) -> int:
    return HOP_HEADER_BYTES + flat.size


class Shm:
    """Ranks that share one mapping; `rank` must be one of the layout's."""

    def __init__(
        self, region: EpochRegion, *, rank: int, deadline_s: float, kind: CommKind = "shm"
    ) -> None:
        wires = region.sizes.wires
        if not 0 <= rank < wires.world:
            raise ValueError(f"rank {rank} of {wires.world}")
        self.kind: CommKind = kind
        self.region = region
        self.signals = region.signals(rank)
        self.deadline_s = deadline_s
        self.slice_us = round(min(SLICE_S, deadline_s) * 1e6)
        self._liveness = Liveness(region)
        self.rank = rank
        self.world = wires.world
        self.stage, self.tp_rank = divmod(rank, wires.tp)
        self.tp = wires.tp
        self.pp = wires.pp
        self.counters = Counters()
        self.tag, self.times = HopTag(region.epoch, clock_ns=region.place.clock_ns), HopTimes()
        self._exchanges = {
            spec.name: _ShmExchange(self, index) for index, spec in enumerate(wires.exchanges)
        }
        self._bind_hops()

    def _bind_hops(self) -> None:
        spin_us = self.region.sizes.spin_us
        self._next = self.rank + self.tp
        self._previous = self.rank - self.tp
        self._sent = self._received = 0
        if self.stage + 1 < self.pp:
            self._out_ring = self.region.hop_ring(self.rank)
            self._acks = self.signals.waiter(
                CHANNEL_HOP_ACK, receivers=(), senders=[self._next], spin_us=spin_us
            )
        if self.stage > 0:
            self._in_ring = self.region.hop_ring(self._previous)
            beat = beat_of(self.region, self.rank)
            self._link = incoming_link(self.region.sizes.wires, self.stage - 1, beat=beat)
            self._hops = self.signals.waiter(
                CHANNEL_HOP, receivers=(), senders=[self._previous], spin_us=spin_us
            )

    def exchange(self, name: str) -> _ShmExchange:
        """The exchange of that name. Raises: ValueError naming those that exist."""
        self.region.sizes.wires.exchange_index(name)
        return self._exchanges[name]

    def send(self, values: NDArray[Any]) -> None:
        """Copy `values` into the ring; waits while the next stage is as far behind as that holds.

        Raises: PeerLost if a later stage is lost (comm/liveness.py), EpochAborted.
        """
        if self.stage + 1 >= self.pp:
            raise ValueError(f"stage {self.stage} of {self.pp} has no next stage")
        flat = self.times.payload(values, self.region.sizes.wires.hop_bytes, self.tag)
        number, depth = self._sent + 1, len(self._out_ring)
        if number > depth:
            acked = (number - depth) % WRAP
            status = self._acks.wait(acked, self.slice_us)
            if status != REACHED:
                what = "a hop to the next stage"
                self.outwait(self._acks, acked, status, (self._next,), what)
        self.times.ready_ns, self.times.num_bytes = time.monotonic_ns(), _wire_bytes(flat)
        header, ring = self._out_ring[number % depth]
        ring[: flat.size] = flat
        seal_hop(header, ring[: flat.size], self.tag)
        self._sent = number
        self.signals.publish(CHANNEL_HOP, number % WRAP, (self._next,))
        self.counters.add("hop", num_bytes=_wire_bytes(flat), num_messages=1)

    def receive(self, into: NDArray[Any]) -> None:
        """Copy the previous stage's next message into `into`; see comm.base.Comm.

        Raises: PeerLost if an earlier stage is lost (comm/liveness.py), EpochAborted.
        """
        if self.stage == 0:
            raise ValueError("stage 0 has no previous stage")
        flat = flat_bytes(into, self.region.sizes.wires.hop_bytes)
        while not self._receive_one(flat):
            pass

    def _receive_one(self, flat: ByteArray) -> bool:
        """The next message into `flat`; False if it was of no use."""
        number = self._received + 1
        status = self._hops.wait(number % WRAP, self.slice_us)
        if status != REACHED:
            what = "a hop from the previous stage"
            self.outwait(self._hops, number % WRAP, status, (self._previous,), what)
        header, ring = self._in_ring[number % len(self._in_ring)]
        sent_ns = open_hop(
            header, ring, self.tag, num_bytes=flat.size, here=self.rank, sender=self._previous
        )
        if sent_ns is not None:
            flat = flat[:0] if self.tag.is_void else flat
            if self._link is not None:
                self._link.hold(sent_ns, _wire_bytes(flat))
            self.times.sent_ns, self.times.ready_ns = sent_ns, time.monotonic_ns()
            self.times.num_bytes = _wire_bytes(flat)
            flat[:] = ring[: flat.size]
        self._received = number
        self.signals.publish(CHANNEL_HOP_ACK, number % WRAP, (self._previous,))
        return sent_ns is not None

    def outwait(
        self, waiter: Waiter, value: int, status: int, senders: Sequence[int], what: str
    ) -> None:
        """Go on with a wait whose first slice ended with `status`, until it is reached.

        Raises: PeerLost naming the rank that holds us up, EpochAborted.
        """
        outwait(
            self._liveness,
            waiter,
            value=value,
            status=status,
            senders=senders,
            rank=self.rank,
            deadline_s=self.deadline_s,
            slice_us=self.slice_us,
            what=what,
        )

    def close(self) -> None:
        """Nothing of its own; the region belongs to the launcher."""
