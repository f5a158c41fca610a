"""The Comms over torch.distributed's Gloo: contiguous copies, no library reduction.

`Torch` takes Gloo for everything, `Across` only for hops to other hosts. The only importer of
torch on the path, and only inside a rank. Uses `ProcessGroupGloo` itself, not the module-wide
default group: no global state, and the device is by argument: loopback, or the address of this
host among several. The rendezvous is a FileStore on a memfd that the ranks inherited, so no file is
ever left behind; of several hosts, a TCPStore on a socket that the head's front has bound.
Never an `*_object*` collective (they pickle).

A Gloo wait that times out poisons its pair, so there is none shorter than `_GLOO_TIMEOUT`: a dead
peer breaks its connections and ends the wait at once, and about a silent one the front decides.
It sees whom a rank waits for (comm/liveness.py); in an all-gather, where any peer may be late,
every rank names the next one of the group, so that following them leads to who is not there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

from anyshard.comm.base import (
    CommKind,
    Counters,
    ExchangeSpec,
    FloatArray,
    WireSizes,
    check_floats,
    incoming_link,
)
from anyshard.comm.hops import HOP_HEADER_BYTES, HopTag, HopTimes, flat_bytes, open_hop, seal_hop
from anyshard.comm.liveness import Liveness, beat_of
from anyshard.comm.region import EpochRegion
from anyshard.comm.shm import Shm
from anyshard.errors import PeerLost
from anyshard.ops.exact import FLOAT_BYTES

__all__ = ["Across", "Torch", "through_store"]

_distributed: Any = distributed  # its stubs leave out most of what is used here
_HOP_TAG = 0
_FIRST_EXCHANGE_TAG = 1
_GLOO_TIMEOUT = timedelta(days=1)
_MEETING_TIMEOUT = timedelta(seconds=60)  # who retries without end counts as alive


def _store(region: EpochRegion, rank: int) -> Any:
    """Where groups find each other; of several hosts the sampler serves it, on the head."""
    place, world = region.place, region.sizes.wires.world
    if not region.sizes.wires.hosts:
        store = _distributed.FileStore(f"/proc/self/fd/{region.store_fd}", world)
    else:
        serves = rank == region.sampler
        store = _distributed.TCPStore(
            place.store_address,
            place.store_port,
            is_master=serves,
            timeout=_MEETING_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=region.store_fd if serves else None,
        )
    store.set_timeout(_GLOO_TIMEOUT)
    return store


def through_store(address: str, port: int, key: str, value: str | None, *, timeout_s: float) -> str:
    """Put a value into the store of torchrun, or, if None, wait until it is there.

    Raises: PeerLost without an answer.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        store = _distributed.TCPStore(address, port, is_master=False, timeout=timeout)
        if value is not None:
            store.set(key, value)
        found: str = store.get(key).decode()
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise PeerLost(f"torchrun's store at {address}:{port}: {first_line}") from error
    return found


def _gloo(region: EpochRegion, store: Any, name: str, rank: int, size: int) -> Any:
    """The group of that name, once all of it are there."""
    device = {"hostname": region.place.address} if region.sizes.wires.hosts else {"interface": "lo"}
    options = _distributed.ProcessGroupGloo._Options()
    options._devices = [_distributed.ProcessGroupGloo.create_device(**device)]
    options._timeout = _GLOO_TIMEOUT
    prefixed = _distributed.PrefixStore(name, store)
    return _distributed.ProcessGroupGloo(prefixed, rank, size, options)


@contextmanager
def _waiting(liveness: Liveness, rank: int, peer: int, what: str) -> Iterator[None]:
    """`rank` waits for `peer` inside; Gloo's RuntimeError becomes PeerLost."""
    if peer != rank:
        liveness.set_waiting(rank, peer)
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        message = f"rank {rank} lost a peer, rank {peer}, in {what}: {first_line}"
        raise PeerLost(message, rank=peer) from error
    finally:
        liveness.set_waiting(rank, None)


class _TorchExchange:
    """An Exchange whose sources are local copies; both parities are the same buffers."""

    def __init__(self, comm: Torch, index: int, spec: ExchangeSpec) -> None:
        self.capacity_floats = spec.capacity_floats
        self.parity = 0
        self._comm = comm
        self._spec = spec
        self._tag = _FIRST_EXCHANGE_TAG + index
        self._copies: list[FloatArray] = [
            np.zeros(spec.capacity_floats, np.float32) for _ in range(comm.tp)
        ]
        self._tensors = [torch.from_numpy(copy) for copy in self._copies]
        self._own_copy = torch.zeros(spec.capacity_floats)  # all-gather insists on returning mine,
        # and all-to-all on bringing what others sent in one piece

    def send_buffer(self, parity: int) -> FloatArray:
        """This rank's buffer."""
        return self._copies[self._comm.tp_rank]

    def sources(self, parity: int) -> list[FloatArray]:
        """Local copies of all ranks' buffers, filled by `run`."""
        return self._copies

    def run(self, num_floats: int, wire_floats: int) -> None:
        """See comm.base.Exchange.run."""
        comm = self._comm
        check_floats(num_floats, wire_floats, self._spec.largest_wire(comm.tp))
        self.parity ^= 1
        if comm.tp == 1:
            return
        if self._spec.all_to_all:
            self._run_all_to_all(wire_floats)
        elif not self._spec.root_only:
            mine = comm.tp_rank
            outputs = [
                (self._own_copy if peer == mine else self._tensors[peer])[:wire_floats]
                for peer in range(comm.tp)
            ]
            with comm.waiting(comm.next_in_group, self._what):
                inputs = [self._tensors[mine][:wire_floats]]
                comm.group.allgather([outputs], inputs).wait(_GLOO_TIMEOUT)
            comm.counters.add(
                self._spec.kind, num_bytes=wire_floats * FLOAT_BYTES, num_messages=comm.tp - 1
            )
        elif comm.tp_rank == 0:
            self._receive_all(wire_floats)
        else:
            mine_tensor = self._tensors[comm.tp_rank][:num_floats]
            with comm.waiting(comm.first_in_group, self._what):
                comm.group.send([mine_tensor], 0, self._tag).wait(_GLOO_TIMEOUT)
            comm.counters.add(self._spec.kind, num_bytes=num_floats * FLOAT_BYTES, num_messages=1)

    def native(self, row_floats: int, row_wire: int) -> None:
        """See Exchange; Gloo's calls are Python's."""

    def end(self, status: int, num_floats: int, wire_floats: int) -> None:
        """There is no native part to end."""
        raise AssertionError("no part of a walk")

    def _receive_all(self, wire_floats: int) -> None:
        """The root posts all receives, then waits: a shorter message fills the front part."""
        comm = self._comm
        works = [
            comm.group.recv([self._tensors[peer][:wire_floats]], peer, self._tag)
            for peer in range(1, comm.tp)
        ]
        for peer, work in enumerate(works, 1):
            with comm.waiting(comm.first_in_group + peer, self._what):
                work.wait(_GLOO_TIMEOUT)

    def _run_all_to_all(self, wire_floats: int) -> None:
        """Parts of equal size; each peer's is put where it lies in the peer's own buffer."""
        comm, size = self._comm, wire_floats * self._comm.tp
        received = self._own_copy[:size]
        sent = self._tensors[comm.tp_rank][:size]
        with comm.waiting(comm.next_in_group, self._what):
            comm.group.alltoall_base(received, sent, [], []).wait(_GLOO_TIMEOUT)
        part = slice(comm.tp_rank * wire_floats, (comm.tp_rank + 1) * wire_floats)
        for peer in range(comm.tp):
            if peer != comm.tp_rank:
                start = peer * wire_floats
                self._tensors[peer][part] = received[start : start + wire_floats]
        comm.counters.add(
            self._spec.kind, num_bytes=wire_floats * FLOAT_BYTES, num_messages=comm.tp - 1
        )

    @property
    def _what(self) -> str:
        return f"exchange {self._spec.name!r}"


class _Ring:
    """Messages of hops with their headers, and what Gloo does with each."""

    def __init__(self, sizes: WireSizes) -> None:
        shape = (sizes.hop_depth, HOP_HEADER_BYTES + sizes.hop_bytes)
        self.tensors = torch.zeros(shape, dtype=torch.uint8)
        rows = self.tensors.numpy()
        self.headers = [row[:HOP_HEADER_BYTES].data for row in rows]
        self.values = [row[HOP_HEADER_BYTES:] for row in rows]
        self.works: list[Any] = [None] * sizes.hop_depth
        self._next = 0

    def turn(self) -> int:
        """The next slot."""
        slot, self._next = self._next, (self._next + 1) % len(self.works)
        return slot


class _Hops:
    """One rank's hops over Gloo, to `peer` or from it, which is number `index` of `group`."""

    def __init__(self, comm: Torch | Across, region: EpochRegion, group: Any, index: int) -> None:
        self._comm, self._sizes = comm, region.sizes.wires
        self._group, self._index = group, index
        self._liveness = Liveness(region)
        self._ring = _Ring(self._sizes)

    def waiting(self, peer: int, what: str) -> Any:
        """See _waiting."""
        return _waiting(self._liveness, self._comm.rank, peer, what)


class _HopsOut(_Hops):
    """To the next stage."""

    def send(self, values: NDArray[Any]) -> None:
        """Copy and send; waits while as many as the ring holds are under way. Raises: PeerLost."""
        comm, ring, slot = self._comm, self._ring, self._ring.turn()
        flat = comm.times.payload(values, self._sizes.hop_bytes, comm.tag)
        with self.waiting(comm.rank + comm.tp, "a hop to the next stage"):
            if ring.works[slot] is not None:
                ring.works[slot].wait(_GLOO_TIMEOUT)
            comm.times.ready_ns = time.monotonic_ns()
            comm.times.num_bytes = HOP_HEADER_BYTES + flat.size
            ring.values[slot][: flat.size] = flat
            seal_hop(ring.headers[slot], ring.values[slot][: flat.size], comm.tag)
            message = ring.tensors[slot][: HOP_HEADER_BYTES + flat.size]
            ring.works[slot] = self._group.send([message], self._index, _HOP_TAG)
        comm.counters.add("hop", num_bytes=HOP_HEADER_BYTES + flat.size, num_messages=1)


class _HopsIn(_Hops):
    """From the previous stage; all receives that the ring holds are under way from the start."""

    def __init__(self, comm: Torch | Across, region: EpochRegion, group: Any, index: int) -> None:
        super().__init__(comm, region, group, index)
        beat = beat_of(region, comm.rank)
        self._link = incoming_link(self._sizes, comm.stage - 1, beat=beat)
        for slot in range(self._sizes.hop_depth):
            self._post(slot)

    def receive(self, into: NDArray[Any]) -> None:
        """The next message; see comm.base.Comm. Raises: PeerLost."""
        comm, ring = self._comm, self._ring
        flat, sender = flat_bytes(into, self._sizes.hop_bytes), comm.rank - comm.tp
        sent_ns: int | None = None
        while sent_ns is None:
            slot = ring.turn()
            with self.waiting(sender, "a hop from the previous stage"):
                ring.works[slot].wait(_GLOO_TIMEOUT)
            values = ring.values[slot]
            sent_ns = open_hop(
                ring.headers[slot],
                values,
                comm.tag,
                num_bytes=flat.size,
                here=comm.rank,
                sender=sender,
            )
            if sent_ns is not None:
                flat = flat[:0] if comm.tag.is_void else flat
                if self._link is not None:
                    self._link.hold(sent_ns, HOP_HEADER_BYTES + flat.size)
                comm.times.sent_ns, comm.times.ready_ns = sent_ns, time.monotonic_ns()
                comm.times.num_bytes = HOP_HEADER_BYTES + flat.size
                flat[:] = values[: flat.size]
            self._post(slot)

    def _post(self, slot: int) -> None:
        """A shorter message than is posted fills its front part."""
        self._ring.works[slot] = self._group.recv([self._ring.tensors[slot]], self._index, _HOP_TAG)


class Torch:
    """One rank over Gloo; all ranks of an epoch must make one.

    Raises: ValueError in a region of threads, PeerLost when a peer breaks its connections.
    """

    kind: CommKind = "torch"

    def __init__(self, region: EpochRegion, *, rank: int) -> None:
        sizes = region.sizes.wires
        if region.store_fd < 0 and not sizes.hosts:
            raise ValueError("torch needs ranks that are processes; these are threads")
        self.rank = rank
        self.world = sizes.world
        self.tp = sizes.tp
        self.pp = sizes.pp
        self.stage, self.tp_rank = divmod(rank, sizes.tp)
        self.first_in_group = rank - self.tp_rank
        self.next_in_group = self.first_in_group + (self.tp_rank + 1) % sizes.tp
        self.counters = Counters()
        self._sizes = sizes
        self._liveness = Liveness(region)
        torch.set_num_threads(1)
        with self.waiting(region.sampler if sizes.hosts else self.next_in_group, "the rendezvous"):
            store = _store(region, rank)
        with self.waiting(self.next_in_group, "the rendezvous of its stage"):
            self.group = _gloo(region, store, f"stage{self.stage}", self.tp_rank, self.tp)
        self._exchanges = {
            spec.name: _TorchExchange(self, index, spec)
            for index, spec in enumerate(sizes.exchanges)
        }
        self.tag = HopTag(region.epoch, clock_ns=region.place.clock_ns)
        self.times = HopTimes()
        self._out: _HopsOut | None = None
        self._in: _HopsIn | None = None
        if self.pp > 1:
            with self.waiting((rank + 1) % self.world, "the rendezvous of all stages"):
                hops = _gloo(region, store, "hops", rank, self.world)
            if self.stage + 1 < self.pp:
                self._out = _HopsOut(self, region, hops, rank + self.tp)
            if self.stage:
                self._in = _HopsIn(self, region, hops, rank - self.tp)

    def waiting(self, peer: int, what: str) -> Any:
        """See _waiting."""
        return _waiting(self._liveness, self.rank, peer, what)

    def exchange(self, name: str) -> _TorchExchange:
        """The exchange of that name. Raises: ValueError naming those that exist."""
        self._sizes.exchange_index(name)
        return self._exchanges[name]

    def send(self, values: NDArray[Any]) -> None:
        """To the next stage; see comm.base.Comm. Raises: PeerLost; ValueError on the last one."""
        if self._out is None:
            raise ValueError(f"stage {self.stage} of {self.pp} has no next stage")
        self._out.send(values)

    def receive(self, into: NDArray[Any]) -> None:
        """From the previous stage; see comm.base.Comm. Raises: PeerLost; ValueError on stage 0."""
        if self._in is None:
            raise ValueError("stage 0 has no previous stage")
        self._in.receive(into)

    def close(self) -> None:
        """Forget the groups; a rank that leaves by exit code need not call it."""
        self._out = self._in = self.group = None


class Across(Shm):
    """Shared memory within a host, Gloo for hops from and to other hosts: a group for each.

    Every stage lies on one host. Raises: PeerLost when a peer breaks its connections.
    """

    def __init__(self, region: EpochRegion, *, rank: int, deadline_s: float) -> None:
        super().__init__(region, rank=rank, deadline_s=deadline_s)
        torch.set_num_threads(1)
        here, wires, liveness = region.place.host, region.sizes.wires, Liveness(region)
        self._out: _HopsOut | None = None
        self._in: _HopsIn | None = None
        previous = rank - self.tp if self.stage else rank
        following = rank + self.tp if self.stage + 1 < self.pp else rank
        with _waiting(liveness, rank, region.sampler, "the rendezvous"):
            store = _store(region, rank)
        with _waiting(liveness, rank, previous, "the rendezvous"):
            if wires.host_of(previous) != here:
                group = _gloo(region, store, f"hops{previous}", 1, 2)
                self._in = _HopsIn(self, region, group, 0)
        if wires.host_of(following) != here:
            with _waiting(liveness, rank, following, "the rendezvous"):
                group = _gloo(region, store, f"hops{rank}", 0, 2)
            self._out = _HopsOut(self, region, group, 1)
        self._store = store  # the sampler's ends with it

    def send(self, values: NDArray[Any]) -> None:
        """See comm.base.Comm."""
        (super().send if self._out is None else self._out.send)(values)

    def receive(self, into: NDArray[Any]) -> None:
        """See comm.base.Comm."""
        (super().receive if self._in is None else self._in.receive)(into)

    def close(self) -> None:
        """Forget the groups."""
        self._out = self._in = None
