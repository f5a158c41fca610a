"""Frames from the front to every rank, results and status back, over the epoch's mapping.

A frame has a fixed header (magic, checksum, epoch, sequence, counts), then rows, page updates
and a note of opaque bytes. Each slot is written again only after all ranks have copied it out
and the front has read its result. A frame of another epoch is dropped and counted; a damaged
one ends the epoch. Knows nothing of models: what a row's flags mean is the worker's concern.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from anyshard.comm.base import (
    WIRE_KINDS,
    Counters,
    EpochAborted,
    FloatArray,
    WireKind,
    incoming_link,
)
from anyshard.comm.liveness import STARTUP_S, Liveness, Vigil
from anyshard.comm.region import (
    CHANNEL_FRAME,
    CHANNEL_READY,
    CHANNEL_RESULT,
    FAILURE_BYTES,
    FRAME_HEADER,
    PAGE,
    ROW,
    ControlSizes,
    EpochRegion,
)
from anyshard.comm.results import Result, ResultSlot
from anyshard.comm.signals import ABORTED, LATE, REACHED, WRAP
from anyshard.comm.voids import publish_void
from anyshard.errors import AnyshardError, PeerLost
from anyshard.schedule import MOST_FRAMES

if TYPE_CHECKING:
    from anyshard.comm.signals import Waiter

__all__ = [
    "PAGE",
    "ROW",
    "ControlSizes",
    "Frame",
    "FrontControl",
    "RankControl",
    "RankStatus",
    "Relay",
    "Result",
    "StatusView",
    "publish_frame",
    "publish_stop",
]

Int32Array = NDArray[np.int32]

FRAME_MAGIC = 0x31534E41  # "ANS1"
_BODY = 64  # byte offset of rows in a frame slot
_GRACE_S = 1.0  # the ranks' own deadlines come first: they can say who is late
_NO_PAGES = np.zeros(0, PAGE)
_SLICE_US = 20_000  # the front looks at its launcher this often while it waits


@dataclass(frozen=True)
class Frame:
    """One step's work, copied out of the mapping; arrays are reused by the next frame.

    rows: ROW[n], pages: PAGE[m].
    """

    sequence: int
    rows: NDArray[Any]
    pages: NDArray[Any]
    note: bytes


@dataclass(frozen=True, kw_only=True)
class StatusView:
    """A rank's status at one moment; `faults`: code by frame, of the last frames that had one;
    `spared_bytes`: that hops of void frames would have had."""

    rank: int
    operations: int
    frames: int
    dropped_frames: int
    weight_bytes: int
    kv_bytes: int
    spared_bytes: int
    wire_bytes: dict[WireKind, int]
    wire_messages: dict[WireKind, int]
    faults: dict[int, int]


class RankStatus:
    """A rank's own status record; the only writer."""

    def __init__(self, region: EpochRegion, rank: int) -> None:
        self._record = region.status(rank)
        self.operations: NDArray[np.uint64] = self._record["operations"]  #: [1], in place
        self._operations_word = self.operations.data
        self._wires = (self._record["wire_bytes"][0].data, self._record["wire_messages"][0].data)
        self._spared = self._record["spared_bytes"].data
        self._record["blamed"] = -1
        Liveness(region).introduce(rank)

    def beat(self) -> None:
        """One more op done: a sign of life (comm/liveness.py)."""
        self._operations_word[0] += 1

    def set(self, *, weight_bytes: int, kv_bytes: int) -> None:
        """Memory this rank uses, bytes."""
        self._record["weight_bytes"] = weight_bytes
        self._record["kv_bytes"] = kv_bytes

    def fault(self, *, sequence: int, code: int) -> None:
        """Frame `sequence` had a fault here, first of all at `code`."""
        place = sequence % MOST_FRAMES
        self._record["fault_code"][0, place] = code
        self._record["fault_sequence"][0, place] = sequence

    def report(self, counters: Counters) -> None:
        """Copy the wire counters out; call once a step."""
        counters.copy_to(*self._wires)

    def spare(self, num_bytes: int) -> None:
        """What hops of void frames have been spared so far."""
        self._spared[0] = num_bytes

    def fail(self, message: str, *, blamed: int, exit_code: int) -> None:
        """Why this rank leaves, for its launcher; `blamed` is the rank at fault."""
        self._record["failure"] = message.encode("utf-8", "replace")[:FAILURE_BYTES]
        self._record["exit_code"] = exit_code
        self._record["blamed"] = blamed


def failure_of(region: EpochRegion, rank: int) -> tuple[str, int, int] | None:
    """(message, blamed rank, exit code) that `rank` left behind, or None."""
    record = region.status(rank)
    message = bytes(record["failure"][0]).decode("utf-8", "ignore")
    if not message:
        return None
    return message, int(record["blamed"][0]), int(record["exit_code"][0])


def _checksum(epoch: int, sequence: int, parts: tuple[bytes, ...]) -> int:
    crc = zlib.crc32(b"%d %d" % (epoch, sequence))
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


def publish_frame(
    region: EpochRegion, sequence: int, *, rows: bytes, pages: bytes, note: bytes
) -> None:
    """Give the ranks of this host a frame; by the front, or for it.

    rows: ROW[n], pages: PAGE[m], within the sizes of the region.
    """
    _write_frame(region, sequence, rows, pages, note)
    region.signals(region.front).publish(CHANNEL_FRAME, sequence % WRAP, region.ranks_here)


def _write_frame(
    region: EpochRegion, sequence: int, rows: bytes, pages: bytes, note: bytes
) -> None:
    """Into its slot."""
    sizes, layout, memory = region.sizes.control, region.layout, region.memory
    at = layout.frame_offset + (sequence % sizes.frame_slots) * layout.frame_bytes
    crc = _checksum(region.epoch, sequence, (rows, pages, note))
    counts = len(rows) // ROW.itemsize, len(pages) // PAGE.itemsize, len(note)
    FRAME_HEADER.pack_into(memory, at, FRAME_MAGIC, crc, region.epoch, sequence % WRAP, *counts)
    rows_at = at + _BODY
    memory[rows_at : rows_at + len(rows)] = rows
    pages_at = rows_at + sizes.rows_max * ROW.itemsize
    memory[pages_at : pages_at + len(pages)] = pages
    note_at = pages_at + sizes.pages_max * PAGE.itemsize
    memory[note_at : note_at + len(note)] = note


def publish_stop(region: EpochRegion, last_sequence: int) -> None:
    """Ask the ranks of this host to leave after frame `last_sequence`."""
    region.set_stopping(last_sequence)
    next_sequence = (last_sequence + 1) % WRAP
    region.signals(region.front).publish(CHANNEL_FRAME, next_sequence, region.ranks_here)


class Relay(Protocol):
    """Takes frames to the ranks of other hosts."""

    def frame(self, sequence: int, *, rows: bytes, pages: bytes, note: bytes) -> None:
        """See publish_frame. Raises: PeerLost."""
        ...

    def void(self, sequence: int) -> None:
        """See FrontControl.void. Raises: PeerLost."""
        ...

    def leave(self, last_sequence: int) -> None:
        """See publish_stop."""
        ...


class RankControl:
    """The control channel as one rank sees it."""

    def __init__(self, region: EpochRegion, *, rank: int) -> None:
        sizes = region.sizes.control
        layout = region.layout
        self.status = RankStatus(region, rank)
        self._region = region
        self._sizes = sizes
        self._signals = region.signals(rank)
        self._frames: Waiter = self._signals.waiter(
            CHANNEL_FRAME, receivers=(), senders=[region.front], spin_us=0
        )
        record = region.status(rank)
        self._frames_word = record["frames"].data
        self._dropped_word = record["dropped_frames"].data
        self._rank = rank
        self._sequence = 0
        self._rows = np.zeros(sizes.rows_max, ROW)
        self._pages = np.zeros(sizes.pages_max, PAGE)
        self._slots = [
            layout.frame_offset + slot * layout.frame_bytes for slot in range(sizes.frame_slots)
        ]
        self._row_bytes = self._rows.view(np.uint8).data
        self._page_bytes = self._pages.view(np.uint8).data
        self._pages_at = pages_at = _BODY + sizes.rows_max * ROW.itemsize
        self._note_at = pages_at + sizes.pages_max * PAGE.itemsize
        self._results = [ResultSlot(region, slot) for slot in range(sizes.frame_slots)]
        self._digests = [region.digests(slot, rank) for slot in range(sizes.frame_slots)]

    def next_frame(self, deadline_s: float | None = None) -> Frame | None:
        """Wait for the next frame and copy it out; None when the front says stop.

        Raises: AnyshardError for a damaged frame, with both checksums; PeerLost when
        `deadline_s` passes; EpochAborted.
        """
        timeout_us = -1 if deadline_s is None else round(deadline_s * 1e6)
        while True:
            sequence = self._sequence + 1
            self._signals.publish(CHANNEL_READY, sequence % WRAP, (self._region.front,))
            status = self._frames.wait(sequence % WRAP, timeout_us)
            if status == ABORTED:
                raise EpochAborted(f"rank {self._rank}: the epoch ended while waiting for a frame")
            if status == LATE:
                raise PeerLost(f"rank {self._rank} waited {deadline_s:g} s for a frame")
            if self._region.leave_after(sequence):
                return None
            frame = self._copy_out(sequence)
            self._sequence = sequence
            if frame is not None:
                self._frames_word[0] = sequence
                return frame
            self._dropped_word[0] += 1

    def _copy_out(self, sequence: int) -> Frame | None:
        at = self._slots[sequence % self._sizes.frame_slots]
        magic, crc, epoch, found, num_rows, num_pages, num_note = FRAME_HEADER.unpack_from(
            self._region.memory, at
        )
        if magic == FRAME_MAGIC and epoch != self._region.epoch:
            return None
        sizes = self._sizes
        if (
            magic != FRAME_MAGIC
            or found != sequence % WRAP
            or num_rows > sizes.rows_max
            or num_pages > sizes.pages_max
            or num_note > sizes.note_bytes
        ):
            raise AnyshardError(
                f"damaged frame header: magic {magic:#x} (want {FRAME_MAGIC:#x}), sequence {found}"
                f" (want {sequence}), {num_rows} rows of {sizes.rows_max}, {num_pages} pages of"
                f" {sizes.pages_max}, note {num_note} of {sizes.note_bytes} bytes"
            )
        row_bytes = self._copy(at + _BODY, num_rows * ROW.itemsize, self._row_bytes)
        page_bytes = self._copy(at + self._pages_at, num_pages * PAGE.itemsize, self._page_bytes)
        note = self._region.memory[at + self._note_at : at + self._note_at + num_note]
        have = _checksum(epoch, sequence, (row_bytes, page_bytes, note))
        if have != crc:
            raise AnyshardError(
                f"damaged frame {sequence}: checksum {have:#010x}, its header says {crc:#010x}"
            )
        return Frame(sequence, self._rows[:num_rows], self._pages[:num_pages], note)

    def _copy(self, at: int, num_bytes: int, into: memoryview) -> bytes:
        """So many bytes of the mapping, which also go to the front of `into`."""
        found = self._region.memory[at : at + num_bytes]
        into[:num_bytes] = found
        return found

    def post_result(
        self,
        sequence: int,
        tokens: Int32Array,
        faults: Int32Array,
        logits: Sequence[FloatArray] = (),
        *,
        spreads: NDArray[Any] | None = None,
        is_void: bool = False,
    ) -> None:
        """Hand the front the result of frame `sequence`; by the sampler, once a frame.

        tokens and faults int32[n], n <= rows_max; logits f32[vocab] each, at most logit_rows;
        spreads SPREAD[n], if the region has room for them.
        """
        slot = self._results[sequence % self._sizes.frame_slots]
        slot.write(sequence, tokens, faults, logits, spreads=spreads, is_void=is_void)
        self._signals.publish(CHANNEL_RESULT, sequence % WRAP, (self._region.front,))

    def event_ring(self) -> tuple[memoryview, memoryview]:
        """The count of this rank's events, and the words of the ring that they stand in."""
        count, ring = self._region.event_ring(self._rank)
        return count.data, ring.view(np.uint64).data

    def post_digests(self, sequence: int, digests: NDArray[np.uint64]) -> None:
        """Leave uint64[n, c], c <= digest_columns, for the front; before the next frame is asked
        for, which is what tells the front that they are there."""
        rows, columns = digests.shape
        slot = self._digests[sequence % self._sizes.frame_slots]
        slot[:rows, :columns] = digests


class FrontControl:
    """The control channel as the front sees it; `poll` raises when the rank group is lost."""

    def __init__(
        self,
        region: EpochRegion,
        *,
        poll: Callable[[], None],
        deadline_s: float,
        relay: Relay | None = None,
    ) -> None:
        self._relay = relay
        self.sequence = 0
        self._region = region
        self._sizes = region.sizes.control
        self._poll = poll
        self._deadline_s = deadline_s
        self._signals = region.signals(region.front)
        self._ranks = list(range(region.sizes.wires.world))
        self._results: Waiter = self._signals.waiter(
            CHANNEL_RESULT, receivers=(), senders=[region.sampler], spin_us=0
        )
        self._askers: Waiter = self._signals.waiter(
            CHANNEL_READY, receivers=(), senders=self._ranks, spin_us=0
        )
        self._records = [region.status(rank) for rank in self._ranks]
        self._liveness = Liveness(region)
        self._read = 0
        self._ready = False
        self._link = incoming_link(region.sizes.wires, -1)
        self._result_slots = [ResultSlot(region, slot) for slot in range(self._sizes.frame_slots)]
        self._digests = [
            [region.digests(slot, rank) for rank in self._ranks]
            for slot in range(self._sizes.frame_slots)
        ]

    def wait_ready(self, *, deadline_s: float = STARTUP_S) -> None:
        """Until every rank has asked for its first frame; `send_frame` does it if you do not.

        `deadline_s` of silence, not of work: a start may take any time (comm/liveness.py).
        Raises: PeerLost.
        """
        self._wait_askers(1, "all ranks to be ready", deadline_s)
        self._ready = True

    def send_frame(
        self,
        rows: NDArray[Any],
        pages: NDArray[Any] | None = None,
        note: bytes = b"",
    ) -> int:
        """Give every rank the next frame and return its sequence number, from 1.

        At most `frame_slots` frames may be without a read result. Raises: ValueError over a
        bound, PeerLost.
        """
        if not self._ready:
            self._poll()
            self.wait_ready()
        sizes = self._sizes
        pages = _NO_PAGES if pages is None else pages
        if len(rows) > sizes.rows_max or len(pages) > sizes.pages_max:
            raise ValueError(
                f"{len(rows)} rows of {sizes.rows_max}, {len(pages)} pages of {sizes.pages_max}"
            )
        if len(note) > sizes.note_bytes:
            raise ValueError(f"a note of {len(note)} bytes, the limit is {sizes.note_bytes}")
        sequence = self.sequence + 1
        if sequence - self._read > sizes.frame_slots:
            raise ValueError(
                f"{sequence - 1 - self._read} results are unread, the limit is {sizes.frame_slots}"
            )
        if sequence > sizes.frame_slots:
            done = sequence - sizes.frame_slots
            self._wait_askers(done + 1, "all ranks to finish a frame")
        row_bytes = np.ascontiguousarray(rows, ROW).tobytes()
        page_bytes = np.ascontiguousarray(pages, PAGE).tobytes() if len(pages) else b""
        if self._relay is not None:  # first: theirs is the longer way
            self._relay.frame(sequence, rows=row_bytes, pages=page_bytes, note=note)
        publish_frame(self._region, sequence, rows=row_bytes, pages=page_bytes, note=note)
        self.sequence = sequence
        return sequence

    def void(self, sequence: int) -> None:
        """Tell all ranks that nobody waits for frame `sequence`, whose result is yet to be read:
        they go over it (comm/voids.py). Raises: PeerLost.
        """
        if self._relay is not None:
            self._relay.void(sequence)
        publish_void(self._region, sequence)

    def wait_result(
        self,
        sequence: int,
        *,
        deadline_s: float | None = None,
        poll: Callable[[], None] | None = None,
    ) -> Result:
        """The result of frame `sequence`; ask for them in order.

        The deadline (default: the ranks' own) counts from the last sign of life of the rank
        that holds the result up, and has a second of grace: the ranks say more exactly what
        they wait in.

        Raises: PeerLost, or whatever `poll` raises (default: the rank group's poll).
        """
        if sequence != self._read + 1 or sequence > self.sequence:
            raise ValueError(
                f"result {sequence} asked for, {self._read} read and {self.sequence} sent"
            )
        sampler = (self._region.sampler,)
        self._wait(self._results, sampler, sequence, "a result", deadline_s, poll)
        self._read = sequence
        return self._result_slots[sequence % self._sizes.frame_slots].read(sequence, self._link)

    def wait_digests(self, sequence: int, rows: int) -> list[NDArray[np.uint64]]:
        """What every rank has left for frame `sequence`: uint64[rows, digest_columns] by rank,
        views that hold until frame `sequence` + frame_slots is sent.

        Raises: PeerLost, by the rule of `wait_result`.
        """
        self._wait_askers(sequence + 1, "the digests of all ranks")
        slot = self._digests[sequence % self._sizes.frame_slots]
        return [digests[:rows] for digests in slot]

    def _wait_askers(self, sequence: int, what: str, deadline_s: float | None = None) -> None:
        self._wait(self._askers, self._ranks, sequence, what, deadline_s)

    def _wait(
        self,
        waiter: Waiter,
        senders: Sequence[int],
        sequence: int,
        what: str,
        deadline_s: float | None = None,
        poll: Callable[[], None] | None = None,
    ) -> None:
        if (status := waiter.wait(sequence % WRAP, _SLICE_US)) == REACHED:
            return
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        vigil = Vigil(self._liveness, deadline_s + _GRACE_S)
        while status != REACHED:
            (poll or self._poll)()
            if status == ABORTED:
                raise PeerLost("the rank group has ended")
            late = vigil.lost(senders[status - LATE])
            if late is not None:
                raise PeerLost(
                    f"rank {late} has given no sign of life for {deadline_s:g} s while the front"
                    f" waits for {what} (number {sequence})",
                    rank=late,
                )
            status = waiter.wait(sequence % WRAP, _SLICE_US)

    def statuses(self, *, settled: bool = True) -> list[StatusView]:
        """Every rank's status, in rank order.

        The sampler's result may come before another rank has ended its step: `settled` waits until
        all have ended the last one whose result was read. False: as it stands now.

        Raises: PeerLost.
        """
        if settled:
            self._wait_askers(self._read + 1, "all ranks to finish a frame")
        views = []
        for rank, record in enumerate(self._records):
            names = (
                "operations",
                "frames",
                "dropped_frames",
                "weight_bytes",
                "kv_bytes",
                "spared_bytes",
            )
            counts = {name: int(record[name][0]) for name in names}
            kinds = zip(
                WIRE_KINDS, record["wire_bytes"][0], record["wire_messages"][0], strict=True
            )
            wires = [(kind, int(sent), int(messages)) for kind, sent, messages in kinds]
            faults = zip(record["fault_sequence"][0], record["fault_code"][0], strict=True)
            views.append(
                StatusView(
                    rank=rank,
                    wire_bytes={kind: sent for kind, sent, _ in wires},
                    wire_messages={kind: messages for kind, _, messages in wires},
                    faults={int(sequence): int(code) for sequence, code in faults if sequence},
                    **counts,
                )
            )
        return views

    def events(self, rank: int) -> tuple[NDArray[Any], int]:
        """EVENT[n] that a rank has written, in order, and how many earlier ones are lost."""
        count, ring = self._region.event_ring(rank)
        written, size = int(count[0]), len(ring)
        if written <= size:
            return ring[:written].copy(), 0
        return np.roll(ring, -(written % size)), written - size

    def send_stop(self) -> None:
        """Ask all ranks to leave: after the frames sent so far, `next_frame` returns None."""
        if self._relay is not None:
            self._relay.leave(self.sequence)
        publish_stop(self._region, self.sequence)
