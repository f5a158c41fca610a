"""Packed weight images kept on disk, where reading one back is faster than packing again.

Files are named by the content that they were packed from, are checked as they are read
(`stored_image.py`) and trusted for nothing else. What goes wrong here costs time, never a run:
the image is built, and the caller gets one sentence to print. Knows nothing of the environment:
the folder is passed in.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import stat
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from anyshard.checkpoint.image import (
    NATIVE_TYPES,
    ImageTensor,
    WeightImage,
    build_image,
    image_directory,
    is_mapped,
)
from anyshard.checkpoint.source import Checkpoint, TensorSource
from anyshard.checkpoint.stored_image import (
    FORMAT_VERSION,
    directory_json,
    read_stored,
    stored_bytes_of,
    write_stored,
)
from anyshard.config import Arithmetic
from anyshard.host import size_text
from anyshard.ops import Body, choose_body

__all__ = [
    "CACHE_BYTES",
    "ImageCache",
    "cache_problem",
    "clear_abandoned",
    "content_sha256",
    "image_key",
    "load_image",
    "not_worth_caching",
    "stored_images",
]

CACHE_BYTES: Final = 20 * 10**9
_HASHED_BYTES: Final = 16 << 20  # of a tensor, in one task
_SUFFIX: Final = ".image"
_PART_SUFFIX: Final = ".part"
_ABANDONED_S: Final = 86400.0
_NAMES_TRIED: Final = 8
Report = Callable[[int, int, str], None]  # bytes done, bytes in all, what is being done or ""


@dataclass(frozen=True, kw_only=True)
class ImageCache:
    """Where images are kept (None: the environment names no place), and how much of it at most."""

    folder: Path | None
    most_bytes: int = CACHE_BYTES


class _NotCached(Exception):
    """Why an image is not kept, in words that follow a colon."""


def not_worth_caching(
    sources: Mapping[str, TensorSource],
    *,
    body: Body,
    image_bytes: int,
    most_bytes: int = CACHE_BYTES,
) -> str | None:
    """Why images of these tensors are built every time; None if they are worth a file. Pure.

    Seconds of a core for the 538 MB of SmolLM2: 0.66 to read back checked, half of them sha256;
    0.50 to pack natively (Q4_1); 0.81 to 1.23 where NumPy widens first (Q4_0, Q5_0), so there the
    read wins, by little. An image over half the bound would push out everything else.

    Held by: test_cache.py::test_only_what_packs_slower_than_it_reads_is_cached.
    """
    matrices = {source.type for source in sources.values() if len(source.shape) == 2}
    if body != "reference" and matrices <= NATIVE_TYPES:
        return "it is packed faster than it could be read back"
    if image_bytes > most_bytes // 2:
        kept = size_text(most_bytes)
        return f"it takes {size_text(image_bytes)}, more than half of the {kept} kept"
    return None


def image_key(
    sources: Mapping[str, TensorSource], directory: Mapping[str, ImageTensor], *, threads: int
) -> str:
    """The content that an image is packed from, and the version of the packing, as 64 hex digits.

    Takes in every stored byte, type, shape and row map; no path and no time.

    Held by: test_cache.py::test_the_key_is_the_content.
    """
    entries = directory_json(directory)
    key = hashlib.sha256(struct.pack("<II", FORMAT_VERSION, len(entries)) + entries)
    pieces = [
        source.raw[start : start + _HASHED_BYTES]
        for source in sources.values()
        for start in range(0, source.raw.nbytes, _HASHED_BYTES)
    ]
    with ThreadPoolExecutor(threads) as pool:  # hashlib runs without the GIL
        digests = pool.map(lambda piece: hashlib.sha256(piece.data).digest(), pieces)
        for source in sources.values():
            rows = b"" if source.row_map is None else source.row_map.astype("<i4").tobytes()
            count = -(-source.raw.nbytes // _HASHED_BYTES)
            described = json.dumps(
                [source.name, source.type, source.shape, source.raw.nbytes, len(rows)]
            ).encode()
            key.update(struct.pack("<I", len(described)) + described + rows)
            for _ in range(count):
                key.update(next(digests))
            source.release()
    return key.hexdigest()


def content_sha256(sources: Mapping[str, TensorSource], *, threads: int) -> str:
    """Of all that a file stores of a model, hex: the same on every host that has the same file."""
    return image_key(sources, {}, threads=threads)


def load_image(
    checkpoint: Checkpoint,
    *,
    threads: int,
    cache: ImageCache | None,
    progress: Report | None = None,
    arithmetic: Arithmetic = "f32",
    names: Collection[str] | None = None,
) -> tuple[WeightImage, str]:
    """The image of all tensors, or of `names`, from the cache or built, and then kept if that is
    worth it.

    The second is why it was not kept, a sentence for the user, or "" if there is nothing to say.
    The bits are those of `build_image` in every case. cache None: no file is read or written.

    Raises: CheckpointError as `build_image` does.
    Held by: test_cache.py::test_a_hit_is_the_image_that_a_build_gives_and_packs_nothing.
    """
    report = progress or (lambda done, total, doing: None)
    sources = checkpoint.sources
    if names is not None:
        sources = {name: source for name, source in sources.items() if name in names}
    directory, num_bytes = image_directory(checkpoint.config, sources, arithmetic)

    def build(more_bytes: int = 0) -> WeightImage:
        """`more_bytes`: those that are saved afterwards, for the bar."""
        return build_image(
            checkpoint,
            names=sources,
            threads=threads,
            progress=lambda done, total: report(done, total + more_bytes, ""),
            arithmetic=arithmetic,
        )

    if (
        cache is None
        or is_mapped(checkpoint, arithmetic)
        or not_worth_caching(
            sources,
            body=choose_body("auto"),
            image_bytes=num_bytes,
            most_bytes=cache.most_bytes,
        )
    ):
        return build(), ""
    entry = _Entry(checkpoint, directory, num_bytes, threads, report)
    try:
        folder = _made(cache)
        clear_abandoned(folder)
        image = entry.read(folder)
        if image is not None:
            return image, ""
        _check_room(folder, entry.file_bytes)
    except (_NotCached, OSError) as error:
        return build(), _sentence(error, cache)
    image = build(num_bytes)
    try:
        entry.save(image, folder, most_bytes=cache.most_bytes)
    except (_NotCached, OSError) as error:
        return image, _sentence(error, cache)
    return image, ""


class _Entry:
    """One image's place in the cache, by its content; read it first."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: Mapping[str, ImageTensor],
        num_bytes: int,
        threads: int,
        report: Report,
    ) -> None:
        self._checkpoint, self._directory, self._num_bytes = checkpoint, directory, num_bytes
        self._threads, self._report = threads, report
        self._key = self._content_key()
        self.file_bytes = stored_bytes_of(directory, num_bytes)

    def _content_key(self) -> str:
        return image_key(self._checkpoint.sources, self._directory, threads=self._threads)

    def read(self, folder: Path) -> WeightImage | None:
        """The image, if it is there and whole. Raises: CheckpointError where memory lacks."""
        path = folder / f"{self._key}{_SUFFIX}"
        image = read_stored(
            path,
            self._key,
            self._directory,
            self._num_bytes,
            label=self._checkpoint.path,
            threads=self._threads,
            progress=lambda done, total: self._report(done, total, "reading cached weights"),
        )
        if image is not None:
            with contextlib.suppress(OSError):  # a folder that is read-only serves as it is
                os.utime(path)
        return image

    def save(self, image: WeightImage, folder: Path, *, most_bytes: int) -> None:
        """Keep `image`, whole or not at all. Raises: _NotCached, OSError."""
        if self._content_key() != self._key:
            raise _NotCached(f"{self._checkpoint.path} changed while it was read")
        packed = sum(place.bytes for place in self._directory.values())

        def report(done: int, total: int) -> None:
            self._report(packed + done, packed + total, "saving packed weights")

        _make_room(folder, self.file_bytes, most_bytes)
        with _part(folder) as (part, fd):
            write_stored(fd, image, self._key, threads=self._threads, progress=report)
            os.rename(part, folder / f"{self._key}{_SUFFIX}")
        _sync_folder(folder)
        _make_room(folder, 0, most_bytes)  # another may have saved at the same time


def cache_problem(
    cache: ImageCache, checkpoint: Checkpoint, *, body: Body, arithmetic: Arithmetic = "f32"
) -> str | None:
    """Why the image of this model is not kept, or None if it is; makes and changes nothing."""
    if is_mapped(checkpoint, arithmetic):
        return "its file is mapped as it is"
    directory, num_bytes = image_directory(checkpoint.config, checkpoint.sources, arithmetic)
    reason = not_worth_caching(
        checkpoint.sources, body=body, image_bytes=num_bytes, most_bytes=cache.most_bytes
    )
    if reason is not None:
        return reason
    try:
        folder = _named(cache)
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        if existing == folder:
            _check_folder(folder)
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        _check_room(existing, stored_bytes_of(directory, num_bytes))
    except (_NotCached, OSError) as error:
        return _reason(error, cache)
    return None


def stored_images(cache: ImageCache) -> tuple[int, int]:
    """(number, bytes) of the files that are kept."""
    found = [] if cache.folder is None else _images(cache.folder)
    return len(found), sum(size for _, size, _ in found)


def clear_abandoned(folder: Path) -> None:
    """Remove what writers that are no more have left half-written.

    A writer holds a lock on its file, which ends with it, also where the process numbers of
    others mean nothing (a folder shared by containers). Without locks, a day must have passed.
    """
    for path in _ours(folder, _PART_SUFFIX):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if _is_abandoned(fd):
                    os.unlink(path)
            finally:
                os.close(fd)


def _is_abandoned(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(fd).st_mtime > _ABANDONED_S
    return True


def _named(cache: ImageCache) -> Path:
    if cache.folder is None:
        raise _NotCached("neither XDG_CACHE_HOME nor HOME names a folder")
    return cache.folder


def _made(cache: ImageCache) -> Path:
    """The folder, made if need be. Raises: _NotCached, OSError."""
    folder = _named(cache)
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
    _check_folder(folder)
    return folder


def _check_folder(folder: Path) -> None:
    """Nobody else may put files there. Raises: _NotCached, OSError."""
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise _NotCached(f"{folder} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _NotCached(f"others may write in {folder}")


def _check_room(folder: Path, file_bytes: int) -> None:
    """Raises: _NotCached where the file would take more than half of what is free."""
    free = _free_bytes(folder)
    if file_bytes > free // 2:
        raise _NotCached(
            f"no space left in {folder} ({size_text(file_bytes)} needed, at most half of the "
            f"{size_text(free)} free are taken)"
        )


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _make_room(folder: Path, file_bytes: int, most_bytes: int) -> None:
    """Remove images, those longest unused first, until `file_bytes` more are within the bound."""
    images = sorted(_images(folder))
    total = sum(size for _, size, _ in images) + file_bytes
    for _, size, path in images:
        if total <= most_bytes:
            return
        with contextlib.suppress(FileNotFoundError):  # another makes room as well
            os.unlink(path)
        total -= size


def _images(folder: Path) -> list[tuple[int, int, Path]]:
    """(when last used in ns, bytes, path) of each file."""
    found = []
    for path in _ours(folder, _SUFFIX):
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            found.append((status.st_mtime_ns, status.st_size, path))
    return found


def _ours(folder: Path, suffix: str) -> Iterable[Path]:
    """Regular files of ours with that suffix; none where there is no folder."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if entry.name.endswith(suffix)
            and entry.is_file(follow_symlinks=False)
            and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
        ]
    return []


@contextlib.contextmanager
def _part(folder: Path) -> Iterator[tuple[Path, int]]:
    """A new locked file, which is gone at the end unless it was renamed. Raises: OSError."""
    path, fd = _new_part(folder)
    try:
        yield path, fd
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.close(fd)


def _new_part(folder: Path) -> tuple[Path, int]:
    for _ in range(_NAMES_TRIED):
        path = folder / f"{os.getpid()}-{secrets.token_hex(8)}{_PART_SUFFIX}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if _lock(fd) and os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)  # between our open and our lock, `clear_abandoned` took it for abandoned
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def _lock(fd: int) -> bool:
    """False if another has the lock; True where there are no locks at all."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _sync_folder(folder: Path) -> None:
    # Not every file system can; a name that a crash undoes is a miss.
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _reason(error: _NotCached | OSError, cache: ImageCache) -> str:
    if isinstance(error, _NotCached):
        return str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left in {cache.folder}"
    if error.errno == errno.EROFS:
        return f"{cache.folder} is read-only"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"there is no permission to write in {cache.folder}"
    return f"{cache.folder} cannot be used ({error.strerror})"


def _sentence(error: _NotCached | OSError, cache: ImageCache) -> str:
    return f"the weight image was not cached: {_reason(error, cache)}; --no-cache stops trying"
