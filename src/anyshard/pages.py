"""KV page accounting in the front: which pages are free, and who holds which.

Pure: taking and giving back make a new pool. Knows nothing of what is stored in a page.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["PagePool", "pages_for"]


def pages_for(num_tokens: int, *, block: int) -> int:
    """Pages that hold `num_tokens` tokens of one sequence, `block` tokens a page."""
    return -(-num_tokens // block)


@dataclass(frozen=True)
class PagePool:
    """Free pages; the last one given back is the first one taken."""

    free: tuple[int, ...]

    @classmethod
    def of(cls, order: Iterable[int]) -> PagePool:
        """A pool that hands out pages in the given order. Raises: AssertionError if one repeats."""
        free = tuple(order)[::-1]
        assert len(set(free)) == len(free)
        return cls(free)

    def take(self, count: int) -> tuple[tuple[int, ...], PagePool]:
        """`count` pages and the pool without them."""
        assert count <= len(self.free), "admission reserves pages before it takes them"
        split = len(self.free) - count
        return self.free[split:][::-1], PagePool(self.free[:split])

    def give(self, pages: tuple[int, ...]) -> PagePool:
        """The pool with `pages` back in it."""
        return PagePool.of((self.free + pages[::-1])[::-1])
