"""Stripes: the eight sequences of KV blocks whose softmax states merge in a tree.

What `--kv-shard sequence` deals to the TP ranks: each keeps the blocks of its stripes. Integers
only; block b of a sequence holds its tokens 32 b to 32 b + 31. A span of stripes is half-open.

Source: docs/numerics.md, Attention. Held by: test_stripes.py.
"""

from __future__ import annotations

from typing import Final

__all__ = ["STRIPES", "blocks_of", "page_stripe", "stripe_of"]

STRIPES: Final = 8
_ORDER: Final = (0, 4, 2, 6, 1, 5, 3, 7)  # index mod 8, its three bits back to front


def stripe_of(block: int) -> int:
    """The stripe of a block of a sequence: the first blocks spread over it."""
    return _ORDER[block % STRIPES]


def page_stripe(page: int, sequence_blocks: int) -> int:
    """The stripe that a page is of, and so the rank that keeps it: pages are dealt as the blocks of
    whole sequences one after another."""
    return stripe_of(page % sequence_blocks)


def blocks_of(stripes: tuple[int, int], count: int) -> int:
    """How many of the first `count` blocks of a sequence are of a span of stripes."""
    whole, rest = divmod(count, STRIPES)
    first, stop = stripes
    return whole * (stop - first) + sum(first <= stripe_of(block) < stop for block in range(rest))
