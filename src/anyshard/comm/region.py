"""The one shared mapping of an epoch: where every word, frame, status and buffer lies.

`RegionLayout` is a pure function of the sizes, so front, launcher and ranks agree without
talking. The mapping is a memfd (or private memory for thread ranks): it has no name and
vanishes with the last process, whatever kills it. Pages that nobody touches cost nothing.

    words | status[world] | voids[1 + pp][slots] | frames[slots] | results[slots]
    | digests[slots][world] | events[world] | exchanges[pp] | hops[pp - 1][tp]
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from anyshard.comm.base import HERE, WIRE_KINDS, ExchangeSpec, FloatArray, Place, WireSizes
from anyshard.comm.hops import ByteArray
from anyshard.comm.signals import (
    LINE_BYTES,
    WRAP,
    NativeSignals,
    Pipes,
    PipeSignals,
    Signals,
    SignalsBody,
)
from anyshard.ops import native_module
from anyshard.ops.spread import SPREAD
from anyshard.schedule import MOST_FRAMES
from anyshard.trace import EVENT

__all__ = [
    "CHANNEL_EXCHANGES",
    "CHANNEL_FRAME",
    "CHANNEL_HOP",
    "CHANNEL_HOP_ACK",
    "CHANNEL_READY",
    "CHANNEL_RESULT",
    "CHANNEL_VERDICT",
    "FRAME_HEADER",
    "PAGE",
    "RESULT_HEADER",
    "ROW",
    "STATUS",
    "ControlSizes",
    "EpochRegion",
    "EpochSizes",
    "RegionLayout",
]

CHANNEL_FRAME = 0  # the front: frame n stands in its slot
CHANNEL_READY = 1  # each rank: it asks for frame n, so it is done with frame n - 1
CHANNEL_RESULT = 2  # the sampler: result n stands in its slot
CHANNEL_HOP = 3  # each sender: message n stands in its ring
CHANNEL_HOP_ACK = 4  # each receiver: message n is copied out
CHANNEL_VERDICT = 5  # tp rank 0 of each stage: whether frame n is void is known
CHANNEL_EXCHANGES = 6  # and one more per exchange

#: One row of a frame: sequence slot, position in the sequence, token id, generation, flag bits.
ROW = np.dtype([(name, "<i4") for name in ("slot", "position", "token", "generation", "flags")])
#: One page table update: page_table[slot][block] = page.
PAGE = np.dtype([(name, "<i4") for name in ("slot", "block", "page")])

FAILURE_BYTES = 512
#: What a rank tells of itself; one writer, read by front, launcher and peers at any time.
#: `waiting_for` is a rank + 1, 0 for none; `relayed` a sign of life that has come from another host
#: (comm/liveness.py).
STATUS = np.dtype(
    {
        "names": [
            "operations",
            "frames",
            "dropped_frames",
            "weight_bytes",
            "kv_bytes",
            "spared_bytes",
            "wire_bytes",
            "wire_messages",
            "fault_sequence",
            "fault_code",
            "pid",
            "thread",
            "waiting_for",
            "relayed",
            "blamed",
            "exit_code",
            "failure",
        ],
        "formats": [
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            ("<u8", len(WIRE_KINDS)),
            ("<u8", len(WIRE_KINDS)),
            ("<u8", MOST_FRAMES),
            ("<i4", MOST_FRAMES),
            "<i4",
            "<i4",
            "<i4",
            "<u4",
            "<i4",
            "<i4",
            f"S{FAILURE_BYTES}",
        ],
        "itemsize": 1280,
    }
)

FRAME_HEADER = struct.Struct("<IIQIIII")  # magic, crc, epoch, sequence, rows, pages, note bytes
RESULT_HEADER = struct.Struct("<IIIIQ")  # sequence, rows, logit rows, 1 if void, when it was sent
_HEADER_BYTES = 64
_PAGE_BYTES = 4096
_HEADER_FLOATS = 16  # before the values of a send buffer: their number
_STOPPING_WORD = 2  # in line 0: the front has asked the ranks to leave ...
_LAST_FRAME_WORD = 3  # ... after the frame of this sequence number


class ControlSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of frames and results.

    `rows_max` rows and `pages_max` page updates a frame; `note_bytes` of opaque bytes travel
    along; `logit_rows` rows of `vocab` floats a result; at most `frame_slots` frames in flight.
    `digest_columns`: uint64 that each rank has to say about each row, 0 for none. `trace_events`:
    the last events that are kept of each rank (trace.py), 0 for none. `tells_spread`: a result has
    SPREAD of each row (ops/spread.py).
    """

    rows_max: int
    pages_max: int
    note_bytes: int = 4096
    logit_rows: int = 0
    vocab: int = 0
    frame_slots: int = 2
    digest_columns: int = 0
    trace_events: int = 0
    tells_spread: bool = False

    @property
    def result_row_bytes(self) -> int:
        """Of a row's token, fault and spread."""
        return 8 + SPREAD.itemsize * self.tells_spread


class EpochSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is allocated for an epoch.

    `spin_us`: how long a waiting rank spins before it sleeps; keep 0 when ranks times threads
    exceed the cores. `signals`: "auto" takes the native body where it is compiled.
    """

    wires: WireSizes
    control: ControlSizes
    spin_us: int = 0
    signals: Literal["auto", "native", "pipes"] = "auto"

    def signals_body(self) -> SignalsBody:
        """Which body runs. Raises: ValueError if "native" is asked for and not compiled."""
        have = native_module() is not None
        if self.signals == "native" and not have:
            raise ValueError('signals="native" needs the compiled anyshard._native; use "auto"')
        return "native" if have and self.signals != "pipes" else "pipes"


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _num_buffers(spec: ExchangeSpec) -> int:
    """Of each rank."""
    return 1 if spec.is_fenced else 2


def _buffer_bytes(num_floats: int) -> int:
    return _up((_HEADER_FLOATS + num_floats) * 4, LINE_BYTES)


@dataclass(frozen=True)
class RegionLayout:
    """Byte offsets; see the module's first lines for the order."""

    num_members: int
    words_bytes: int
    status_offset: int
    void_offset: int
    frame_offset: int
    frame_bytes: int
    result_offset: int
    result_bytes: int
    digest_offset: int
    digest_bytes: int
    trace_offset: int
    trace_bytes: int
    exchange_offsets: tuple[int, ...]
    stage_offset: int
    stage_bytes: int
    hop_offset: int
    hop_bytes: int
    total_bytes: int

    @classmethod
    def of(cls, sizes: EpochSizes) -> RegionLayout:
        """Lay out `sizes`. Raises: ValueError for a size below its minimum."""
        wires, control = sizes.wires, sizes.control
        if min(wires.tp, wires.pp, control.rows_max, control.frame_slots) < 1:
            raise ValueError("tp, pp, rows_max and frame_slots start at 1")
        if control.frame_slots > MOST_FRAMES:
            raise ValueError(f"{control.frame_slots} frames in flight, {MOST_FRAMES} are possible")
        num_members = wires.world + 1
        num_channels = CHANNEL_EXCHANGES + len(wires.exchanges)
        words_bytes = _up((1 + num_channels * num_members) * LINE_BYTES, _PAGE_BYTES)
        status_offset = words_bytes
        void_offset = status_offset + wires.world * STATUS.itemsize
        void_bytes = (1 + wires.pp) * control.frame_slots * 4
        frame_offset = _up(void_offset + void_bytes, _PAGE_BYTES)
        frame_bytes = _up(
            _HEADER_BYTES
            + control.rows_max * ROW.itemsize
            + control.pages_max * PAGE.itemsize
            + control.note_bytes,
            LINE_BYTES,
        )
        result_offset = _up(frame_offset + control.frame_slots * frame_bytes, _PAGE_BYTES)
        result_bytes = _up(
            _HEADER_BYTES
            + control.rows_max * control.result_row_bytes
            + control.logit_rows * control.vocab * 4,
            LINE_BYTES,
        )
        digest_offset = _up(result_offset + control.frame_slots * result_bytes, _PAGE_BYTES)
        digest_bytes = _up(control.rows_max * control.digest_columns * 8, LINE_BYTES)
        all_digests = control.frame_slots * wires.world * digest_bytes
        trace_offset = _up(digest_offset + all_digests, _PAGE_BYTES)
        trace_bytes = _up(_HEADER_BYTES + control.trace_events * EVENT.itemsize, LINE_BYTES)
        trace_bytes = trace_bytes if control.trace_events else 0
        stage_offset = _up(trace_offset + wires.world * trace_bytes, _PAGE_BYTES)
        offset = 0
        exchange_offsets = []
        for spec in wires.exchanges:
            exchange_offsets.append(offset)
            offset += _num_buffers(spec) * wires.tp * _buffer_bytes(spec.capacity_floats)
        stage_bytes = _up(offset, _PAGE_BYTES)
        hop_offset = stage_offset + wires.pp * stage_bytes
        hop_bytes = _up(_HEADER_BYTES + wires.hop_bytes, LINE_BYTES)
        return cls(
            num_members=num_members,
            words_bytes=words_bytes,
            status_offset=status_offset,
            void_offset=void_offset,
            frame_offset=frame_offset,
            frame_bytes=frame_bytes,
            result_offset=result_offset,
            result_bytes=result_bytes,
            digest_offset=digest_offset,
            digest_bytes=digest_bytes,
            trace_offset=trace_offset,
            trace_bytes=trace_bytes,
            exchange_offsets=tuple(exchange_offsets),
            stage_offset=stage_offset,
            stage_bytes=stage_bytes,
            hop_offset=hop_offset,
            hop_bytes=hop_bytes,
            total_bytes=hop_offset + (wires.pp - 1) * wires.tp * wires.hop_depth * hop_bytes,
        )


Buffer = tuple[memoryview, FloatArray]  # its size word, uint32[1], and its values
Hop = tuple[memoryview, ByteArray]  # its header, and its values


class EpochRegion:
    """The mapping of one epoch in one process, and the descriptors that others need to map it."""

    def __init__(
        self,
        sizes: EpochSizes,
        epoch: int,
        *,
        descriptor: int,
        store_fd: int,
        pipes: Pipes | None,
        place: Place = HERE,
    ) -> None:
        self.sizes = sizes
        self.epoch = epoch
        self.layout = RegionLayout.of(sizes)
        self.descriptor = descriptor  # -1: private memory, threads only
        self.store_fd = store_fd  # where the ranks of comm/torch.py meet: an empty memfd, or of
        # several hosts the head's listening socket; -1: none
        self.place = place
        self._pipes = pipes
        self._signals: dict[int, Signals] = {}
        self.memory = mmap.mmap(descriptor, self.layout.total_bytes)
        self._words = np.frombuffer(self.memory, np.uint32, self.layout.words_bytes // 4)

    @classmethod
    def create(
        cls,
        sizes: EpochSizes,
        epoch: int,
        *,
        shared: bool,
        place: Place = HERE,
        listening_fd: int = -1,
    ) -> EpochRegion:
        """A zeroed region: a memfd to fork with, or private memory for threads.

        Of several hosts each has one, at its `place`; `listening_fd`, on the head, goes over to it.
        Raises: OSError if the memory cannot be had; ValueError from RegionLayout.
        """
        layout = RegionLayout.of(sizes)
        body = sizes.signals_body()
        descriptor = store_fd = -1
        if shared:
            descriptor = os.memfd_create(f"anyshard-epoch-{epoch}")
            os.ftruncate(descriptor, layout.total_bytes)
            store_fd = listening_fd
            if not sizes.wires.hosts:
                store_fd = os.memfd_create(f"anyshard-store-{epoch}")
        pipes = Pipes.create(layout.num_members) if body == "pipes" else None
        return cls(sizes, epoch, descriptor=descriptor, store_fd=store_fd, pipes=pipes, place=place)

    def front_fds(self) -> list[int]:
        """What the front needs, for SCM_RIGHTS: the memfd, then its inbox and all others."""
        descriptors = [self.descriptor]
        if self._pipes is not None:
            descriptors.append(self._pipes.inboxes[-1][0])
            descriptors.extend(write_fd for _, write_fd in self._pipes.inboxes)
        return descriptors

    @classmethod
    def attach(
        cls, sizes: EpochSizes, epoch: int, descriptors: list[int], place: Place = HERE
    ) -> EpochRegion:
        """Map a region from `front_fds`; takes over the descriptors."""
        pipes = None
        if len(descriptors) > 1:
            inboxes = [(-1, write_fd) for write_fd in descriptors[2:]]
            inboxes[-1] = (descriptors[1], descriptors[-1])
            pipes = Pipes(inboxes)
        return cls(sizes, epoch, descriptor=descriptors[0], store_fd=-1, pipes=pipes, place=place)

    @property
    def front(self) -> int:
        """Member number of the front."""
        return self.sizes.wires.world

    @property
    def sampler(self) -> int:
        """The rank that posts results: tp rank 0 of the last stage."""
        return self.sizes.wires.world - self.sizes.wires.tp

    @property
    def ranks_here(self) -> list[int]:
        """The ranks of this host."""
        return self.sizes.wires.ranks_of(self.place.host)

    def signals(self, member: int) -> Signals:
        """The signals as `member` sees them; one object a member, it remembers what it has read."""
        if member not in self._signals:
            if self._pipes is not None:
                self._signals[member] = PipeSignals(self._pipes, member=member)
            else:
                self._signals[member] = NativeSignals(
                    self._words, member=member, num_members=self.layout.num_members
                )
        return self._signals[member]

    @property
    def stopping(self) -> bool:
        """True once the front has asked the ranks to leave."""
        return bool(self._words[_STOPPING_WORD])

    def leave_after(self, sequence: int) -> bool:
        """True if no frame `sequence` will come because the front has asked the ranks to leave."""
        return self.stopping and sequence % WRAP == (int(self._words[_LAST_FRAME_WORD]) + 1) % WRAP

    def set_stopping(self, last_sequence: int) -> None:
        """Ask the ranks to leave after `last_sequence`; then publish the number after it."""
        self._words[_LAST_FRAME_WORD] = last_sequence % WRAP
        self._words[_STOPPING_WORD] = 1

    def array(self, dtype: Any, count: int, offset: int) -> NDArray[Any]:
        """A view of the mapping."""
        return np.frombuffer(self.memory, dtype, count, offset)

    def status(self, rank: int) -> NDArray[Any]:
        """STATUS[1] of one rank."""
        return self.array(STATUS, 1, self.layout.status_offset + rank * STATUS.itemsize)

    def voids(self, stage: int | None = None) -> NDArray[np.uint32]:
        """uint32[frame_slots]: in a frame's slot, its number once it is void; of a stage, once that
        is so for all its ranks."""
        slots = self.sizes.control.frame_slots
        number = 0 if stage is None else 1 + stage
        return self.array(np.uint32, slots, self.layout.void_offset + number * slots * 4)

    def digests(self, slot: int, rank: int) -> NDArray[np.uint64]:
        """uint64[rows_max, digest_columns] that a rank fills for the frame in a slot."""
        control, layout = self.sizes.control, self.layout
        at = layout.digest_offset
        at += (slot * self.sizes.wires.world + rank) * layout.digest_bytes
        flat = self.array(np.uint64, control.rows_max * control.digest_columns, at)
        return flat.reshape(control.rows_max, control.digest_columns)

    def event_ring(self, rank: int) -> tuple[NDArray[np.uint64], NDArray[Any]]:
        """uint64[1], how many events a rank has written, and EVENT[trace_events], the last of them,
        number n in place n mod their number."""
        at = self.layout.trace_offset + rank * self.layout.trace_bytes
        count = self.sizes.control.trace_events
        return self.array(np.uint64, 1, at), self.array(EVENT, count, at + _HEADER_BYTES)

    def exchange_buffers(self, stage: int, index: int) -> list[list[Buffer]]:
        """buffers[parity][tp_rank], with f32[capacity], of exchange `index` in `stage`."""
        capacity, tp = self.sizes.wires.exchanges[index].capacity_floats, self.sizes.wires.tp
        stride = self._exchange_place(stage, index)[1]
        return [
            [self._buffer(base + tp_rank * stride, capacity) for tp_rank in range(tp)]
            for base in self._parity_places(stage, index)
        ]

    def _exchange_place(self, stage: int, index: int) -> tuple[int, int]:
        """Where its buffers begin, and how far they are apart, in bytes."""
        layout, capacity = self.layout, self.sizes.wires.exchanges[index].capacity_floats
        base = layout.stage_offset + stage * layout.stage_bytes + layout.exchange_offsets[index]
        return base, _buffer_bytes(capacity)

    def exchange_sizes(self, stage: int, index: int) -> tuple[list[NDArray[np.uint32]], list[int]]:
        """Words of exchange `index` in `stage`, of either parity, and where in them each tp rank
        has the size of its buffer."""
        tp, words = self.sizes.wires.tp, self._exchange_place(stage, index)[1] // 4
        places = self._parity_places(stage, index)
        sizes = [self.array(np.uint32, tp * words, base) for base in places]
        return sizes, [tp_rank * words for tp_rank in range(tp)]

    def _parity_places(self, stage: int, index: int) -> list[int]:
        """Where the buffers of either parity begin."""
        base, stride = self._exchange_place(stage, index)
        is_fenced = self.sizes.wires.exchanges[index].is_fenced
        return [base, base if is_fenced else base + self.sizes.wires.tp * stride]

    def _buffer(self, offset: int, capacity: int) -> Buffer:
        size = memoryview(self.memory)[offset : offset + 4].cast("I")
        return size, self.array(np.float32, capacity, offset + _HEADER_FLOATS * 4)

    def hop_ring(self, sender: int) -> list[Hop]:
        """hop_depth buffers of hop_bytes that rank `sender` fills, each with its header."""
        wires, stride = self.sizes.wires, self.layout.hop_bytes
        base = self.layout.hop_offset + sender * wires.hop_depth * stride
        memory = memoryview(self.memory)
        return [
            (
                memory[place : place + _HEADER_BYTES],
                self.array(np.uint8, wires.hop_bytes, place + _HEADER_BYTES),
            )
            for place in range(base, base + wires.hop_depth * stride, stride)
        ]

    def close_descriptors(self) -> None:
        """Close this process's descriptors; the mapping lives until its last view goes."""
        for descriptor in (self.descriptor, self.store_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptor = self.store_fd = -1
        if self._pipes is not None:
            self._pipes.close()
