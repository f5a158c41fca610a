"""Reading memory in streams: every word is read, whatever the size, the streams, the threads."""

from __future__ import annotations

import numpy as np
import pytest
from native_cases import native, needs_native

pytestmark = needs_native

PANEL = 4096  # words


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("streams", [1, 2, 5, 8, 16])
def test_every_word_is_read_once(threads: int, streams: int) -> None:
    rng = np.random.default_rng(streams)
    pool = native.Pool(threads, "", False)
    for size in (0, 1, PANEL - 1, streams * PANEL, 3 * streams * PANEL + 77):
        words = rng.integers(0, 1 << 64, size, np.uint64)
        words.flags.writeable = False
        expected = int(np.bitwise_xor.reduce(words)) if size else 0
        assert native.read_streams(pool, words, streams) == expected


@pytest.mark.parametrize("streams", [-1, 0, 17])
def test_streams_that_cannot_be_are_refused(streams: int) -> None:
    pool = native.Pool(1, "", False)
    with pytest.raises(ValueError, match="streams can be 1 to 16"):
        native.read_streams(pool, np.zeros(8, np.uint64), streams)


def test_what_is_no_array_of_words_is_refused() -> None:
    pool = native.Pool(1, "", False)
    for wrong in (np.zeros(8, np.float32), np.zeros((2, 8), np.uint64)):
        with pytest.raises(ValueError, match="words"):
            native.read_streams(pool, wrong, 8)
