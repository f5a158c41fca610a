"""What a rank sees of its peers: sizes fixed before start, exchanges, hops, and byte counters.

Bytes leave a process in `comm` only, and are counted here. No kind of `Comm` ever adds two
floats: buffers are moved, `ops` reduces them in a written order (docs/numerics.md, Tree).
Knows nothing of models, frames or processes.

rank = stage * tp + tp_rank. A *group* is the tp ranks of one stage; a *hop* goes from a rank to
the rank of the next stage with the same tp_rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from anyshard.comm.hops import HopTag, HopTimes
from anyshard.comm.link import EmulatedLink, LinkSpec
from anyshard.errors import AnyshardError, PeerLost

__all__ = [
    "HERE",
    "WIRE_KINDS",
    "Comm",
    "CommKind",
    "Counters",
    "EpochAborted",
    "Exchange",
    "ExchangeSpec",
    "FloatArray",
    "Place",
    "WireKind",
    "WireSizes",
    "check_floats",
    "incoming_link",
    "late_peer",
]

FloatArray = NDArray[np.float32]
WireKind = Literal["reduce", "hop", "logits", "pairs", "queries", "states"]
CommKind = Literal["solo", "threads", "shm", "torch"]
WIRE_KINDS: tuple[WireKind, ...] = get_args(WireKind)


class EpochAborted(AnyshardError):
    """The rank group ends; raised inside thread ranks (forked ranks are killed instead)."""


class ExchangeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One named exchange of a group: every rank owns a float32 buffer of `capacity_floats`.

    `root_only` exchanges are read by tp rank 0 alone (logits, value-and-id pairs). Of `all_to_all`
    ones the buffer holds a part for each tp rank, one after the other, and each reads its own.
    `is_fenced`: before a rank writes its buffer again, all have read it and then published another
    exchange, for which it has waited; so the buffers of both parities are the same.
    """

    name: str
    kind: WireKind
    capacity_floats: int
    root_only: bool = False
    all_to_all: bool = False
    is_fenced: bool = False

    def largest_wire(self, tp: int) -> int:
        """The most `wire_floats` of a run."""
        return self.capacity_floats // (tp if self.all_to_all else 1)


class WireSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a Comm allocates, known before the first rank exists.

    `hop_bytes` is the largest message to the next stage, rows_max rows as ops/wire.py counts them,
    without its header;
    `hop_depth` how many a stage may be ahead of the next one. `links`: emulated ones, to each next
    stage, then from the last one to the front; none, or one for each stage. `hosts`: of each rank,
    by number, 0 the front's; none where all ranks are on one.
    """

    tp: int
    pp: int
    exchanges: tuple[ExchangeSpec, ...] = ()
    hop_bytes: int = 0
    hop_depth: int = 2
    links: tuple[LinkSpec, ...] = ()
    hosts: tuple[int, ...] = ()

    @property
    def world(self) -> int:
        """Ranks of the epoch."""
        return self.tp * self.pp

    def host_of(self, rank: int) -> int:
        """The number of a rank's host."""
        return self.hosts[rank] if self.hosts else 0

    def ranks_of(self, host: int) -> list[int]:
        """The ranks of a host."""
        return [rank for rank in range(self.world) if self.host_of(rank) == host]

    @property
    def has_wide_stage(self) -> bool:
        """Whether ranks of one stage are on several hosts."""
        first = [rank - rank % self.tp for rank in range(self.world)]
        return any(self.host_of(rank) != self.host_of(root) for rank, root in enumerate(first))

    def exchange_index(self, name: str) -> int:
        """Position of the exchange called `name`. Raises: ValueError naming those that exist."""
        for index, spec in enumerate(self.exchanges):
            if spec.name == name:
                return index
        raise ValueError(f"no exchange {name!r}; have {[spec.name for spec in self.exchanges]}")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a host stands among several: its number (0 is the front's), its own address, and the
    address where the ranks of all hosts find each other. `clock_ns`: what the head's monotonic
    clock is ahead of this host's."""

    host: int = 0
    address: str = "127.0.0.1"
    store_address: str = ""
    store_port: int = 0
    clock_ns: int = 0


#: Of the only host.
HERE = Place()


class Counters:
    """Bytes and messages sent by one rank since its start, per kind.

    Held by: test_comm.py::test_counted_bytes_are_the_formula.
    """

    def __init__(self) -> None:
        # bytes of each of WIRE_KINDS, then messages
        self._sent: NDArray[np.int64] = np.zeros(2 * len(WIRE_KINDS), np.int64)
        self._words = self._sent.data

    def of(self, kind: WireKind) -> NDArray[np.int64]:
        """[2]: bytes and messages of a kind, in place; a native exchange counts into it."""
        return self._sent[WIRE_KINDS.index(kind) :: len(WIRE_KINDS)]

    def copy_to(self, num_bytes: memoryview, messages: memoryview) -> None:
        """Copy the counts of each of WIRE_KINDS."""
        for index in range(len(WIRE_KINDS)):
            num_bytes[index] = self._words[index]
            messages[index] = self._words[len(WIRE_KINDS) + index]

    def add(self, kind: WireKind, *, num_bytes: int, num_messages: int) -> None:
        """Count `num_messages` messages of `num_bytes` each."""
        number = WIRE_KINDS.index(kind)
        self._words[number] += num_bytes * num_messages
        self._words[len(WIRE_KINDS) + number] += num_messages

    @property
    def bytes(self) -> dict[WireKind, int]:
        """By kind."""
        return dict(zip(WIRE_KINDS, self._words[: len(WIRE_KINDS)], strict=True))

    @property
    def messages(self) -> dict[WireKind, int]:
        """By kind."""
        return dict(zip(WIRE_KINDS, self._words[len(WIRE_KINDS) :], strict=True))


class Exchange(Protocol):
    """A double-buffered gather within the group; one object serves all layers.

    Write `send_buffer(parity)`, call `run`, read `sources` of that same parity. They stay
    unchanged until *this* rank returns from the next `run`: a peer that has published step n + 1
    has read step n, so nobody writes a buffer that a slow peer still reads.

    Of an exchange that `is_fenced` both parities are one buffer, and the sources stay unchanged
    only until this rank publishes another exchange of the group, which is the fence: a peer that
    has seen that may write its buffer again at once. So whatever reads them comes before.
    Held by: test_model.py::test_a_fenced_buffer_is_read_by_all_before_any_rank_writes_it_again.
    """

    capacity_floats: int

    @property
    def parity(self) -> int:
        """0 or 1, of the buffers that the next `run` publishes."""
        ...

    def send_buffer(self, parity: int) -> FloatArray:
        """This rank's own buffer, f32[capacity_floats]."""
        ...

    def sources(self, parity: int) -> list[FloatArray]:
        """One f32[capacity_floats] per tp rank, in rank order; bind ops to them at set-up.

        Of a `root_only` exchange they hold data on tp rank 0 alone; of an `all_to_all` one, of
        each the part for this rank, from tp_rank * wire_floats on, besides all of this rank's own.
        """
        ...

    def run(self, num_floats: int, wire_floats: int) -> None:
        """Publish the first `num_floats` of mine and wait for the peers; then flip `parity`.

        `wire_floats` is the padded size, equal on all ranks, num_floats <= wire_floats <=
        capacity. Counted per rank: wire_floats * 4 * (tp - 1) bytes in tp - 1 messages; of a
        `root_only` exchange num_floats * 4 in one message on every rank but the root. Of an
        `all_to_all` one wire_floats is the size of each part, tp * wire_floats <= capacity, and
        num_floats of the longest without its padding.

        Raises: PeerLost if a peer is lost (comm/liveness.py), EpochAborted; AnyshardError
        naming both sizes if a peer's `wire_floats` differs, where the wire can tell.
        """
        ...

    def native(self, row_floats: int, row_wire: int) -> Any:
        """`run` of so many floats a row as a part of a native walk (`walk.py`), or None where
        there is no such thing. It counts, steps and flips as `run` does; what does not go on, since
        a peer is late or has another size, is handed to `end`."""
        ...

    def end(self, status: int, num_floats: int, wire_floats: int) -> None:
        """The rest of a `run` whose first wait ended with `status` (comm/signals.py)."""
        ...


class Comm(Protocol):
    """One rank's wires. Kinds: Solo, Shm (processes or threads of one host), Torch.

    `tag` names the frame that hops carry rows of; its owner counts frames up, before the first hop.
    `times`: of the last hop.
    """

    kind: CommKind
    rank: int
    world: int
    stage: int
    tp_rank: int
    tp: int
    pp: int
    counters: Counters
    tag: HopTag
    times: HopTimes

    def exchange(self, name: str) -> Exchange:
        """The exchange of that name in WireSizes; always the same object."""
        ...

    def send(self, values: NDArray[Any]) -> None:
        """To the next stage, same tp_rank; C-contiguous, at most `hop_bytes`. Counted with the
        header (comm/hops.py)."""
        ...

    def receive(self, into: NDArray[Any]) -> None:
        """From the previous stage; `into` must have the size that was sent.

        Raises: AnyshardError with both values if what comes is of another frame, or damaged.
        """
        ...

    def close(self) -> None:
        """Let go of buffers and sockets."""
        ...


def incoming_link(
    sizes: WireSizes, number: int, *, beat: Callable[[], None] = lambda: None
) -> EmulatedLink | None:
    """The receiver's end of link `number`, if links are emulated."""
    if not sizes.links:
        return None
    return EmulatedLink(sizes.links[number], seed=number % sizes.pp, beat=beat)


def check_floats(num_floats: int, wire_floats: int, capacity_floats: int) -> None:
    """Raises: ValueError unless 0 <= num_floats <= wire_floats <= capacity_floats."""
    if not 0 <= num_floats <= wire_floats <= capacity_floats:
        raise ValueError(
            f"num_floats {num_floats} <= wire_floats {wire_floats} <= capacity {capacity_floats}"
            " does not hold"
        )


def late_peer(*, waiting: int, late: int, deadline_s: float, what: str) -> PeerLost:
    """The exception of a rank whose wait `late`, a global rank, holds up."""
    return PeerLost(f"rank {waiting} waited {deadline_s:g} s for rank {late} in {what}", rank=late)
