"""Both readers against headers that hypothesis makes up: parsed truly, or refused in a sentence."""

from __future__ import annotations

import json
import struct
import tempfile
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from gguf_files import entry, file_bytes, tensor, text
from hypothesis import given, settings
from hypothesis import strategies as st

from anyshard.checkpoint.gguf import read_gguf
from anyshard.checkpoint.safetensors import read_safetensors
from anyshard.checkpoint.widen import BLOCK
from anyshard.errors import CheckpointError

MOST_MEMORY = 2 << 20  # bytes; files here have some kilobytes
EDGES = [0, 1, 2, 31, 32, 33, 64, 255, 256, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1]
numbers = st.one_of(st.sampled_from(EDGES), st.integers(0, 600))
names = st.sampled_from(["t", "u", "blk.0.attn_q.weight", "é", "", "x" * 64, "x" * 65])
kinds = st.one_of(st.sampled_from([0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 30]), st.integers(0, 300))
gguf_tensors = st.builds(
    tensor, names, st.lists(numbers, max_size=5).map(tuple), kinds, numbers.map(lambda n: n & -32)
)
values = st.one_of(
    st.builds(lambda n: (4, struct.pack("<I", n & 0xFFFFFFFF)), numbers),
    st.builds(lambda s: (8, text(s)), st.text(max_size=5)),
    st.builds(
        lambda kind, count, tail: (9, struct.pack("<IQ", kind, count) + tail),
        st.integers(0, 14), numbers, st.binary(max_size=40),
    ),
    st.builds(lambda kind, tail: (kind, tail), st.integers(0, 14), st.binary(max_size=9)),
)  # fmt: skip
keys = st.sampled_from(["k", "general.alignment", "split.count", "l", ""])
gguf_entries = st.builds(lambda key, value: entry(key, *value), keys, values)
gguf_contents = st.builds(
    lambda tensors, entries, payload, counts: file_bytes(
        tensors=tuple(tensors), entries=tuple(entries), payload=payload, counts=counts
    ),
    st.lists(gguf_tensors, max_size=4),
    st.lists(gguf_entries, max_size=4),
    st.integers(0, 5000),
    st.one_of(st.none(), st.none(), st.none(), st.tuples(numbers, numbers)),
)

dtypes = st.sampled_from(["F32", "F16", "BF16", "I8", "", 3, None])
safe_entries = st.one_of(
    st.fixed_dictionaries(
        {
            "dtype": dtypes,
            "shape": st.lists(numbers, max_size=3),
            "data_offsets": st.lists(numbers, min_size=2, max_size=2),
        }
    ),
    st.builds(  # one that is sound by itself
        lambda rows, start: {
            "dtype": "F16",
            "shape": [rows, 2],
            "data_offsets": [start, start + 4 * rows],
        },
        st.integers(0, 8),
        st.sampled_from([0, 4, 8, 32]),
    ),
    st.recursive(st.none() | st.booleans() | st.integers(), st.lists, max_leaves=4),
)
safe_headers = st.dictionaries(names, safe_entries, max_size=3)


def outcome(read: Callable[[Path], Any], content: bytes) -> Any:
    """What the reader gives, None where it refuses; never much memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        tracemalloc.start()
        try:
            return read(path)
        except CheckpointError as error:
            assert "\n" not in str(error) and str(path) in str(error)
            return None
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < MOST_MEMORY


@settings(max_examples=600, deadline=None)
@given(content=gguf_contents)
def test_a_made_up_gguf_is_read_truly_or_refused(content: bytes) -> None:
    found = outcome(read_gguf, content)
    if found is None:
        return
    spans = []
    for each in found.tensors.values():
        elements, num_bytes = BLOCK[each.type]
        assert each.raw.size == prod(each.shape) // elements * num_bytes > 0
        start = each.raw.__array_interface__["data"][0]
        spans.append((start, start + each.raw.size))
    spans.sort()
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert sum(each.raw.size for each in found.tensors.values()) <= len(content)


@settings(max_examples=600, deadline=None)
@given(header=safe_headers, payload=st.sampled_from([0, 4, 8, 32, 36, 64]), claimed=numbers)
def test_a_made_up_safetensors_is_read_truly_or_refused(
    header: dict[str, Any], payload: int, claimed: int
) -> None:
    raw = json.dumps(header).encode()
    for length in {len(raw), claimed}:
        found = outcome(read_safetensors, struct.pack("<Q", length) + raw + bytes(payload))
        if found is None:
            continue
        assert sum(each.raw.size for each in found.values()) <= payload + len(raw)
        for each in found.values():
            assert each.raw.size == prod(each.shape) * BLOCK[each.type][1]


@settings(max_examples=300, deadline=None)
@given(content=st.binary(max_size=300))
def test_any_bytes_are_refused_or_read(content: bytes) -> None:
    outcome(read_gguf, content)
    outcome(read_gguf, b"GGUF\x03\x00\x00\x00" + content)
    outcome(read_safetensors, content)
    outcome(read_safetensors, struct.pack("<Q", len(content)) + content)
