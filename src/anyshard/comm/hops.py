"""What stands before every message to the next stage, and what is checked of it on arrival.

A stage names the frame that it sends rows of, and the next one compares that with the frame that
it runs, the epoch, the size and a checksum, before it uses a value. Anything else ends the epoch
with both numbers; only what a rank of an earlier epoch has left under way is dropped.
"""

from __future__ import annotations

import struct
import time
import zlib
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from anyshard.errors import AnyshardError

__all__ = [
    "HOP_HEADER_BYTES",
    "ByteArray",
    "HopTag",
    "HopTimes",
    "flat_bytes",
    "open_hop",
    "seal_hop",
]

ByteArray = NDArray[np.uint8]
HOP_MAGIC: Final = 0x31504F48  # "HOP1"
_HEADER: Final = struct.Struct("<IIQQQQ")  # magic, checksum, epoch, frame, bytes, when it was sent
_CHECKSUM, _CHECKSUM_AT = struct.Struct("<I"), 4
HOP_HEADER_BYTES: Final = _HEADER.size


@dataclass
class HopTag:
    """Which rows a hop carries: those of a frame of an epoch. The worker counts frames up.

    `clock_ns`: what to add to this host's clock, so that stamps of all hosts are of one.
    `is_void`: of a frame that nobody waits for any more; its hop has a header only. The worker says
    so before it sends, and hears so when it has received, where `may_be_void`.
    """

    epoch: int
    frame: int = 0
    clock_ns: int = 0
    is_void: bool = False
    may_be_void: bool = False

    def __str__(self) -> str:
        return f"frame {self.frame} of epoch {self.epoch}"


@dataclass
class HopTimes:
    """Of a rank's last hop, in ns of time.monotonic_ns: when it was sent, if it was received; when
    the waiting was over, and it was copied; its bytes, with the header. `spared_bytes`: what the
    rows of all void frames would have taken, sent by this rank."""

    sent_ns: int = 0
    ready_ns: int = 0
    num_bytes: int = 0
    spared_bytes: int = 0

    def payload(self, values: NDArray[np.generic], limit: int, tag: HopTag) -> ByteArray:
        """What a message to the next stage holds: no bytes of a void frame."""
        flat = flat_bytes(values, limit)
        if not tag.is_void:
            return flat
        self.spared_bytes += flat.size
        return flat[:0]


def seal_hop(header: memoryview, payload: ByteArray, tag: HopTag) -> None:
    """Write the header, HOP_HEADER_BYTES, of a message that stands in its buffer."""
    sent_ns = time.monotonic_ns() + tag.clock_ns
    _HEADER.pack_into(header, 0, HOP_MAGIC, 0, tag.epoch, tag.frame, payload.size, sent_ns)
    _CHECKSUM.pack_into(header, _CHECKSUM_AT, _checksum(header, payload))


def open_hop(
    header: memoryview, payload: ByteArray, tag: HopTag, *, num_bytes: int, here: int, sender: int
) -> int | None:
    """Check a message against what rank `here` runs; `payload` is all that its buffer holds.

    When it was sent, in time.monotonic_ns of this host; None if it is of an earlier epoch, and to
    be dropped. `tag` then says whether it is void. Raises: AnyshardError with both values.
    """
    magic, checksum, epoch, frame, size, sent_ns = _HEADER.unpack_from(header, 0)
    if magic == HOP_MAGIC and epoch < tag.epoch:
        return None
    if magic != HOP_MAGIC:
        raise AnyshardError(
            f"rank {here} has a damaged hop from rank {sender}: it begins with {magic:#010x}, not"
            f" {HOP_MAGIC:#010x}"
        )
    tag.is_void = tag.may_be_void and size == 0
    num_bytes = 0 if tag.is_void else num_bytes
    if (epoch, frame, size) != (tag.epoch, tag.frame, num_bytes):
        raise AnyshardError(
            f"rank {here} expects {num_bytes} bytes of {tag}, rank {sender} sent {size} bytes of"
            f" {HopTag(epoch, frame)}"
        )
    have = _checksum(header, payload[:num_bytes])
    if have != checksum:
        raise AnyshardError(
            f"rank {here} has a damaged hop from rank {sender}, {tag}: its checksum is"
            f" {have:#010x}, its header says {checksum:#010x}"
        )
    return int(sent_ns) - tag.clock_ns


def _checksum(header: memoryview, payload: ByteArray) -> int:
    """Of the header behind the checksum, and the rows."""
    behind = header[_CHECKSUM_AT + _CHECKSUM.size : HOP_HEADER_BYTES]
    return zlib.crc32(payload.data, zlib.crc32(behind))


def flat_bytes(values: NDArray[np.generic], limit: int) -> ByteArray:
    """A view of `values` as bytes. Raises: ValueError if not contiguous, or larger than `limit`."""
    if not values.flags.c_contiguous:
        raise ValueError("a hop needs C-contiguous values")
    if values.nbytes > limit:
        raise ValueError(f"{values.nbytes} bytes do not fit a hop of {limit}")
    return values.reshape(-1).view(np.uint8)
