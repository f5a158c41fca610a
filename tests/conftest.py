"""What holds for every test: none touches the cache of the person who runs it, all hear Ctrl-C, and
the demo model, whose file is quantised, runs in float32 unless a test asks for int8.

And a model that the cache keeps, for the tests of the cache. Imports nothing of the package at
its top: test_tidy.py also runs where nothing is built.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from anyshard.checkpoint import Checkpoint


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Also of the processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def in_float32() -> Iterator[None]:
    """As if --quantization none were given; also in the processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANYSHARD_QUANTIZATION", "none")
        yield


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> None:
    """A shell that starts the tests behind its back (`&`) has it ignored, in their children too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def q4k_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose image is worth caching."""
    from cached import SMALL
    from gguf_models import write_gguf_model

    path = tmp_path_factory.mktemp("model") / "small.gguf"
    write_gguf_model(path, SMALL, kind="Q4_K", seed=3)
    return path


@pytest.fixture(scope="session")
def q4k(q4k_path: Path) -> Checkpoint:
    from anyshard.checkpoint import open_checkpoint

    return open_checkpoint(str(q4k_path))


@pytest.fixture(scope="session")
def q4k_sha256(q4k: Checkpoint) -> str:
    """Of the image that is built."""
    from anyshard.checkpoint import build_image

    return build_image(q4k, threads=2).sha256()


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder for the cache, not made yet."""
    return tmp_path / "images"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces in a small image, the last one short."""
    from cached import PIECE_BYTES

    monkeypatch.setattr("anyshard.checkpoint.stored_image._PIECE_BYTES", PIECE_BYTES)
