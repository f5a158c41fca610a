"""KV page accounting in the front: which pages are free, and who holds which.

Pure: taking and giving back make a new pool. Knows nothing of what is stored in a page. Where TP
ranks split the sequence, a page is kept by one of them: it may hold blocks of one stripe only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from anyshard.stripes import STRIPES, page_stripe, stripe_of

__all__ = ["PagePool", "pages_for"]


def pages_for(num_tokens: int, *, block: int) -> int:
    """Pages that hold `num_tokens` tokens of one sequence, `block` tokens a page."""
    return -(-num_tokens // block)


@dataclass(frozen=True)
class PagePool:
    """Free pages; the last one given back is the first one taken.

    stacks: one, or where pages belong to stripes one for each of those, the next to be taken last.
    sequence_blocks: then of the longest sequence, else 0.
    """

    stacks: tuple[tuple[int, ...], ...]
    sequence_blocks: int = 0

    @classmethod
    def of(cls, order: Iterable[int], *, sequence_blocks: int = 0) -> PagePool:
        """A pool that hands out pages in the given order. Raises: AssertionError if one repeats."""
        return cls(((),) * (STRIPES if sequence_blocks else 1), sequence_blocks).give(tuple(order))

    @property
    def free(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(page for stack in self.stacks for page in stack)

    def holds(self, count: int, *, first: int = 0) -> bool:
        """Whether there are pages for `count` blocks of a sequence, from block `first` on."""
        needed = [0] * len(self.stacks)
        for block in range(first, first + count):
            needed[self._stack_of(block)] += 1
        return all(need <= len(stack) for need, stack in zip(needed, self.stacks, strict=True))

    def most_blocks(self) -> int:
        """Blocks of the longest sequence for which there are pages."""
        if not self.sequence_blocks:
            return len(self.stacks[0])
        # of a stripe with n pages, all blocks before its block number n
        ends = (
            STRIPES * len(stack) + stripe_of(stripe) for stripe, stack in enumerate(self.stacks)
        )
        return min(ends)

    def take(self, count: int, *, first: int = 0) -> tuple[tuple[int, ...], PagePool]:
        """Pages of `count` blocks from block `first` on, in order, and the pool without them."""
        assert self.holds(count, first=first), "admission reserves pages before it takes them"
        stacks = [list(stack) for stack in self.stacks]
        taken = tuple(stacks[self._stack_of(first + i)].pop() for i in range(count))
        return taken, PagePool(tuple(tuple(stack) for stack in stacks), self.sequence_blocks)

    def give(self, pages: tuple[int, ...]) -> PagePool:
        """The pool with `pages` back in it."""
        stacks = [list(stack) for stack in self.stacks]
        for page in reversed(pages):
            stripe = page_stripe(page, self.sequence_blocks) if self.sequence_blocks else 0
            stacks[stripe].append(page)
        assert all(len(set(stack)) == len(stack) for stack in stacks)
        return PagePool(tuple(tuple(stack) for stack in stacks), self.sequence_blocks)

    def _stack_of(self, block: int) -> int:
        return stripe_of(block) if self.sequence_blocks else 0
