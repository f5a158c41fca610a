"""The file that holds a packed weight image: written whole or not at all, read checked.

A reader knows every byte of the header but the hashes before it opens the file, so it parses
nothing and takes no length from it: what differs is no image. The region is read piece by piece
into memory of ours and each piece hashed there; mapping the file instead would mean SIGBUS when
somebody truncates it. Knows nothing of which images are worth a file, or where files lie.

    "ANYSHIMG" · version u32 · bytes of the directory u32 · bytes of the region u64 · bytes of a
    piece u32 · pieces u32 · key [32]                                        all little-endian
    directory, JSON · sha256 of each piece [32] · sha256 of all before [32] · zeros to 4096
    region
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from anyshard.checkpoint.image import ImageTensor, WeightImage, sealed_image

__all__ = [
    "FORMAT_VERSION",
    "directory_json",
    "read_stored",
    "stored_bytes_of",
    "write_stored",
]

#: Of this layout and of what lies in a region: it grows when either changes.
FORMAT_VERSION: Final = 1
_MAGIC: Final = b"ANYSHIMG"
_FIELDS: Final = struct.Struct("<8sIIQII32s")
_PIECE_BYTES: Final = 4 << 20
_ALIGNMENT: Final = 4096
_DIGEST_BYTES: Final = 32
_OURS: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # an open that fails for want of these

_Report = Callable[[int, int], None]
_Result = TypeVar("_Result")


class _Damaged(Exception):
    """What was read is not what was written."""


def directory_json(directory: Mapping[str, ImageTensor]) -> bytes:
    """The directory as it stands in the file and in the key."""
    return json.dumps([asdict(tensor) for tensor in directory.values()]).encode()


def stored_bytes_of(directory: Mapping[str, ImageTensor], num_bytes: int) -> int:
    """Bytes of the whole file for a region of `num_bytes`."""
    return _header_bytes(len(directory_json(directory)), num_bytes) + num_bytes


def _num_pieces(num_bytes: int) -> int:
    return -(-num_bytes // _PIECE_BYTES)


def _header_bytes(json_bytes: int, num_bytes: int) -> int:
    exact = _FIELDS.size + json_bytes + _DIGEST_BYTES * (_num_pieces(num_bytes) + 1)
    return -(-exact // _ALIGNMENT) * _ALIGNMENT


def _known(key: str, directory: Mapping[str, ImageTensor], num_bytes: int) -> bytes:
    """What stands before the hashes of the pieces."""
    entries = directory_json(directory)
    sizes = (len(entries), num_bytes, _PIECE_BYTES, _num_pieces(num_bytes))
    return _FIELDS.pack(_MAGIC, FORMAT_VERSION, *sizes, bytes.fromhex(key)) + entries


def write_stored(
    fd: int, image: WeightImage, key: str, *, threads: int, progress: _Report | None = None
) -> None:
    """Write `image` under `key` (64 hex digits) into the empty file `fd`, and sync it to disk.

    `progress(bytes done, bytes in all)` is called after each piece of the region.

    Raises: OSError; then the file holds no usable image.
    Held by: test_cache.py::test_a_write_that_fails_anywhere_leaves_nothing.
    """
    known = _known(key, image.directory, image.bytes)
    start = _header_bytes(len(directory_json(image.directory)), image.bytes)

    def write(piece: slice) -> bytes:
        _write_at(fd, image.region[piece], start + piece.start)
        return hashlib.sha256(image.region[piece]).digest()

    digests = _each_piece(write, image.bytes, threads, progress)
    header = known + b"".join(digests)
    header += hashlib.sha256(header).digest()
    _write_at(fd, memoryview(header.ljust(start, b"\0")), 0)
    os.fsync(fd)


def _write_at(fd: int, content: memoryview, offset: int) -> None:
    done = 0
    while done < len(content):  # a full disk or a limit may take only a part, and refuse the next
        done += os.pwrite(fd, content[done:], offset + done)


def _each_piece(
    work: Callable[[slice], _Result],
    num_bytes: int,
    threads: int,
    progress: _Report | None,
) -> list[_Result]:
    """`work(where it lies)` of every piece, in order; the first that raises ends it."""
    pieces = [
        slice(start, min(start + _PIECE_BYTES, num_bytes))
        for start in range(0, num_bytes, _PIECE_BYTES)
    ]
    results: list[_Result] = []
    pool = ThreadPoolExecutor(threads)  # reads, writes and hashes run without the GIL
    try:
        for piece, result in zip(pieces, pool.map(work, pieces), strict=True):
            results.append(result)
            if progress is not None:
                progress(piece.stop, num_bytes)
    finally:
        pool.shutdown(cancel_futures=True)
    return results


def read_stored(
    path: Path,
    key: str,
    directory: Mapping[str, ImageTensor],
    num_bytes: int,
    *,
    label: Path,
    threads: int,
    progress: _Report | None = None,
) -> WeightImage | None:
    """The image in the file at `path`, in a sealed region of its own, or None.

    None where no file is, or where it cannot be read, or anything differs from an image of this
    version, `key`, directory and size, each byte checked; what is there and ours is then removed.

    Raises: CheckpointError naming `label` where the memory will not suffice; OSError where the
    system refuses the region or a descriptor, which is no fault of the file: it stays.
    Held by: test_stored_image.py.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in _OURS:
            raise
        _remove_ours(path)  # a symbolic link, or nothing that we may read
        return None
    try:
        start = _header_bytes(len(directory_json(directory)), num_bytes)
        digests = _checked_digests(fd, _known(key, directory, num_bytes), start, num_bytes)

        def fill(region: NDArray[np.uint8]) -> None:
            def read(piece: slice) -> None:
                part = region.data[piece]
                _read_stored_at(fd, part, start + piece.start)
                if hashlib.sha256(part).digest() != digests[piece.start // _PIECE_BYTES]:
                    raise _Damaged

            _each_piece(read, num_bytes, threads, progress)

        return sealed_image(directory, num_bytes, fill, label=label)
    except _Damaged:
        _remove_ours(path)
        return None
    finally:
        os.close(fd)


def _checked_digests(fd: int, known: bytes, start: int, num_bytes: int) -> list[bytes]:
    """The hashes of the pieces. Raises: _Damaged if the header is not what was written."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise _Damaged
    if status.st_size != start + num_bytes:
        raise _Damaged
    header = bytearray(start)
    _read_stored_at(fd, memoryview(header), 0)
    end = len(known) + _DIGEST_BYTES * _num_pieces(num_bytes)
    closed = header[:end] + hashlib.sha256(header[:end]).digest()
    if not header.startswith(known) or header != closed.ljust(start, b"\0"):
        raise _Damaged
    return [bytes(header[at : at + _DIGEST_BYTES]) for at in range(len(known), end, _DIGEST_BYTES)]


def _read_at(fd: int, into: memoryview, offset: int) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], offset + done)
        if count == 0:
            raise _Damaged  # truncated meanwhile
        done += count


def _read_stored_at(fd: int, into: memoryview, offset: int) -> None:
    """From the file of an image. Raises: _Damaged also for what the disk cannot read."""
    try:
        _read_at(fd, into, offset)
    except OSError as error:
        raise _Damaged from error


def _remove_ours(path: Path) -> None:
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        if status.st_uid == os.geteuid():
            (os.rmdir if stat.S_ISDIR(status.st_mode) else os.unlink)(path)
