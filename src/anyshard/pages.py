"""KV page accounting in the front: which pages are free, and who holds which.

Pure: taking and giving back make a new pool. Knows nothing of what is stored in a page. Where TP
ranks split the sequence, a page is kept by one of them for good: it may hold blocks of that rank's
stripes only, of any of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from anyshard.stripes import STRIPES, page_stripe, stripe_of

__all__ = ["PagePool", "pages_for"]


def pages_for(num_tokens: int, *, block: int) -> int:
    """Pages that hold `num_tokens` tokens of one sequence, `block` tokens a page."""
    return -(-num_tokens // block)


@dataclass(frozen=True)
class PagePool:
    """Free pages; the last one given back is the first one taken.

    stacks: one for each rank that keeps pages of its own, the next to be taken last; one in all
    where every rank keeps every page. owners: of each stripe, the stack of its blocks.
    sequence_blocks: of the longest sequence, by which a page has a stripe and so an owner.
    """

    stacks: tuple[tuple[int, ...], ...]
    owners: tuple[int, ...] = (0,) * STRIPES
    sequence_blocks: int = 1

    @classmethod
    def of(
        cls,
        order: Iterable[int],
        *,
        owners: tuple[int, ...] = (0,) * STRIPES,
        sequence_blocks: int = 1,
    ) -> PagePool:
        """A pool that hands out pages in the given order. Raises: AssertionError if one repeats."""
        assert len(owners) == STRIPES
        return cls(((),) * (max(owners) + 1), owners, sequence_blocks).give(tuple(order))

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
        ends: list[int] = []
        for index, stack in enumerate(self.stacks):
            of_rank = self.owners.count(index)
            end = len(stack) // of_rank * STRIPES  # so many of its pages are used up by then
            left = len(stack) % of_rank
            while self._stack_of(end) != index or left:
                left -= self._stack_of(end) == index
                end += 1
            ends.append(end)
        return min(ends)

    def take(self, count: int, *, first: int = 0) -> tuple[tuple[int, ...], PagePool]:
        """Pages of `count` blocks from block `first` on, in order, and the pool without them."""
        assert self.holds(count, first=first), "admission reserves pages before it takes them"
        stacks = [list(stack) for stack in self.stacks]
        taken = tuple(stacks[self._stack_of(first + i)].pop() for i in range(count))
        return taken, replace(self, stacks=tuple(tuple(stack) for stack in stacks))

    def give(self, pages: tuple[int, ...]) -> PagePool:
        """The pool with `pages` back in it."""
        stacks = [list(stack) for stack in self.stacks]
        for page in reversed(pages):
            stacks[self.owners[page_stripe(page, self.sequence_blocks)]].append(page)
        assert all(len(set(stack)) == len(stack) for stack in stacks)
        return replace(self, stacks=tuple(tuple(stack) for stack in stacks))

    def _stack_of(self, block: int) -> int:
        return self.owners[stripe_of(block)]
