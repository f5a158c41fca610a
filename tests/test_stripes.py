"""Stripes of a sequence: whose a block is, what number a page has on a rank, what a pool holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import ADVERSARIAL_9_3, MODELS, QWEN2_SHAPED

from anyshard.config import Profile
from anyshard.errors import LayoutError
from anyshard.kv import local_pages, num_local_pages
from anyshard.layout import STRIPE_TREE, Layout, plan
from anyshard.ops import coefficients
from anyshard.pages import PagePool
from anyshard.stripes import STRIPES, blocks_of, page_stripe, stripe_of

WIDE = replace(ADVERSARIAL_9_3, num_heads=12, num_kv_heads=4)


def split(tp: int) -> Layout:
    return plan(WIDE, tp=tp, kv_shard="sequence", leaf=64)


def test_a_stripe_is_the_blocks_number_back_to_front() -> None:
    assert STRIPES == coefficients.STRIPES == Profile().stripes
    for block in range(40):
        bits = f"{block % 8:03b}"
        assert stripe_of(block) == int(bits[::-1], 2)
        assert stripe_of(stripe_of(block)) == block % 8


@pytest.mark.parametrize("tp", range(1, 9))
def test_ranks_share_the_stripes_as_evenly_as_can_be(tp: int) -> None:
    layout = split(tp)
    spans = [layout.stripes(index) for index in range(tp)]
    sizes = [stop - start for start, stop in spans]
    assert [stripe for span in spans for stripe in range(*span)] == list(range(8))
    assert sizes == sorted(sizes, reverse=True) and max(sizes) == -(-8 // tp)
    assert max(len(STRIPE_TREE.cover(span)) for span in spans) <= 2
    if tp in (1, 2, 4, 8):
        assert all(len(STRIPE_TREE.cover(span)) == 1 for span in spans)
    for count in range(70):  # equal within one block of the share, at every length
        kept = [blocks_of(span, count) for span in spans]
        assert sum(kept) == count
        for size, mine in zip(sizes, kept, strict=True):
            assert abs(mine - count * size / 8) < 1.5
        if tp in (2, 4, 8):
            assert max(kept) - min(kept) <= 1


def test_one_rank_and_ranks_that_share_heads_keep_every_stripe() -> None:
    for layout in (split(1), plan(WIDE, tp=4, leaf=64)):
        assert not layout.splits_sequence
        assert {layout.stripes(index) for index in range(layout.tp)} == {(0, 8)}
    assert split(1).kv_heads(0, 3) == (0, 4)
    assert [split(5).kv_heads(index, 3) for index in range(5)] == [(0, 4)] * 5
    assert [split(5).owned_kv_heads(index, 3) for index in range(5)] == [(0, 4)] * 5


def test_more_ranks_than_stripes_are_refused_with_both_numbers() -> None:
    for tp in (9, 12):
        with pytest.raises(LayoutError, match=rf"not possible with {tp} ranks: .* 1 to 8 ranks"):
            split(tp)
        assert plan(WIDE, tp=tp, leaf=64).tp == tp
    with pytest.raises(LayoutError, match="1 to 8 ranks"):
        plan(WIDE, heads=[1] * 12, kv_shard="sequence", leaf=64)


@pytest.mark.parametrize("tp", range(2, 9))
@pytest.mark.parametrize("blocks", [1, 3, 5, 8, 9, 16, 21])
def test_every_page_is_one_ranks_and_has_a_number_there(tp: int, blocks: int) -> None:
    for num_pages in (blocks, 3 * blocks, 2 * blocks + blocks // 2, 1):
        layout, holders = split(tp), np.zeros(num_pages, int)
        for index in range(tp):
            span = layout.stripes(index)
            numbers = local_pages(span, num_pages=num_pages, sequence_blocks=blocks)
            mine = numbers[numbers >= 0]
            count = num_local_pages(span, num_pages=num_pages, sequence_blocks=blocks)
            assert mine.tolist() == list(range(count))
            holders += numbers >= 0
            for page in np.flatnonzero(numbers >= 0):
                assert span[0] <= page_stripe(int(page), blocks) < span[1]
                own = blocks_of(span, blocks)
                before = blocks_of(span, int(page) % blocks)
                assert numbers[page] == page // blocks * own + before
        assert (holders == 1).all()


def test_sizes_that_no_machine_has_are_counted_at_once() -> None:
    pages = {"num_pages": 4096 << 19, "sequence_blocks": 1 << 19}
    assert num_local_pages((0, 4), **pages) == 2048 << 19


def test_whose_a_stripe_is() -> None:
    for tp in range(1, 9):
        owners = split(tp).stripe_owners
        assert len(owners) == STRIPES
        for index in range(tp):
            span = split(tp).stripes(index)
            assert owners[slice(*span)] == (0 if tp == 1 else index,) * (span[1] - span[0])
    assert plan(WIDE, tp=4, leaf=64).stripe_owners == (0,) * 8


@given(
    st.integers(1, 8), st.integers(1, 21), st.lists(st.integers(0, 60), max_size=12), st.randoms()
)
def test_a_block_is_given_a_page_of_its_rank(
    tp: int, blocks: int, asked: list[int], random: object
) -> None:
    order, owners = list(range(3 * blocks)), split(tp).stripe_owners
    random.shuffle(order)  # type: ignore[attr-defined]
    pool = PagePool.of(order, owners=owners, sequence_blocks=blocks)
    assert pool.most_blocks() >= blocks
    held: list[tuple[int, ...]] = []
    for each in asked:
        if each % 3 == 0 and held:
            pool = pool.give(held.pop(each % len(held)))
        else:
            first = each % (blocks + 1)
            count = min(each // 4, blocks - first)
            if not pool.holds(count, first=first):
                continue
            pages, pool = pool.take(count, first=first)
            held.append(pages)
            ranks = [owners[page_stripe(page, blocks)] for page in pages]
            assert ranks == [owners[stripe_of(first + index)] for index in range(count)]
        assert sorted([*pool.free, *(page for pages in held for page in pages)]) == sorted(order)


def test_pages_of_another_rank_do_not_help() -> None:
    pool = PagePool.of(range(16), owners=tuple(range(8)), sequence_blocks=16)
    first, pool = pool.take(8)  # blocks 0 to 7
    assert first == tuple(range(8))
    assert pool.holds(8) and not pool.holds(9)
    again, pool = pool.take(1, first=0)
    assert again == (8,)
    assert not pool.holds(1, first=8) and len(pool.free) == 7
    with pytest.raises(AssertionError):
        pool.take(1, first=16)
    with pytest.raises(AssertionError):
        pool.give((9,))
    assert pool.give(again).holds(1, first=8)


@pytest.mark.parametrize("tp", range(1, 9))
@pytest.mark.parametrize("blocks", [1, 5, 8, 40])
def test_prompts_of_one_block_may_use_every_page_of_the_first_rank(tp: int, blocks: int) -> None:
    """And no other's: all begin with block 0."""
    num_pages = 6 * blocks
    pool = PagePool.of(range(num_pages), owners=split(tp).stripe_owners, sequence_blocks=blocks)
    numbers = local_pages(split(tp).stripes(0), num_pages=num_pages, sequence_blocks=blocks)
    taken: list[int] = []
    while pool.holds(1):
        pages, pool = pool.take(1)
        taken += pages
    assert sorted(taken) == np.flatnonzero(numbers >= 0).tolist()
    if blocks % 8 == 0:
        assert len(taken) == num_pages * -(-8 // tp) // 8


@pytest.mark.parametrize("pages", range(1, 40))
@pytest.mark.parametrize("tp", range(1, 9))
def test_the_longest_sequence_is_known(pages: int, tp: int) -> None:
    """Of pages that are no whole number of sequences, it may be shorter than they are many."""
    for blocks in (3, 8, 13):
        pool = PagePool.of(range(pages), owners=split(tp).stripe_owners, sequence_blocks=blocks)
        most = pool.most_blocks()
        assert pool.holds(most) and not pool.holds(most + 1)
        assert most == pages if tp == 1 or pages <= blocks else blocks <= most <= pages


@pytest.mark.parametrize("config", [*MODELS.values(), QWEN2_SHAPED], ids=lambda c: str(c.num_heads))
def test_a_layout_says_how_it_splits(config: object) -> None:
    layout = plan(config, tp=2, pp=2, kv_shard="sequence", leaf=64)  # type: ignore[arg-type]
    assert layout.describe() == "tp 2 pp 2 · KV by sequence"
    assert replace(layout, kv_shard="heads").describe() == "tp 2 pp 2"
