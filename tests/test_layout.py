"""The canonical tree, its covers and the cuts: integers that every bit depends on."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyshard.config import LEAF, ModelConfig
from anyshard.errors import LayoutError
from anyshard.layout import Span, Tree, even_spans, ffn_tree, head_tree, plan
from anyshard.ops.storage import Q8_OUTPUTS

SMOLLM = ModelConfig(
    architecture="llama",
    num_layers=30,
    hidden=576,
    ffn=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab=49152,
    context=8192,
    norm_eps=1e-5,
    rope_theta=1e5,
    tied=True,
)
QWEN = replace(
    SMOLLM, architecture="qwen2", num_layers=24, hidden=896, ffn=4864, num_heads=14, num_kv_heads=2
)


def fold(spans: tuple[Span, ...], merges: tuple[int, ...]) -> list[str]:
    """Write the additions of a merge list as brackets over leaf numbers."""
    stack: list[str] = []
    for (low, high), count in zip(spans, merges, strict=True):
        stack.append(_brackets(low, high))
        for _ in range(count):
            right = stack.pop()
            stack.append(f"({stack.pop()}+{right})")
    return stack


def _brackets(low: int, high: int) -> str:
    """The tree as NUMERICS words it: [lo, hi) splits at lo + ceil((hi - lo) / 2)."""
    if high - low == 1:
        return str(low)
    middle = low + -(-(high - low) // 2)
    return f"({_brackets(low, middle)}+{_brackets(middle, high)})"


trees = st.integers(1, 40).map(lambda n: Tree((1,) * n, (n,)))


@given(trees)
def test_merges_write_the_ceil_halving_tree(tree: Tree) -> None:
    n = tree.num_leaves
    leaves = tuple((i, i + 1) for i in range(n))
    assert fold(leaves, tree.merges((0, n))) == [_brackets(0, n)]


@given(trees, st.lists(st.integers(0, 40), max_size=7))
def test_any_cut_sends_covers_that_complete_to_the_same_tree(tree: Tree, cuts: list[int]) -> None:
    n = tree.num_leaves
    bounds = sorted([0, *[min(cut, n) for cut in cuts], n])
    spans = list(pairwise(bounds))
    nodes = tuple(chain.from_iterable(tree.cover(span) for span in spans))
    assert fold(nodes, tree.node_merges(spans)) == [_brackets(0, n)]


@given(trees, st.integers(0, 40), st.integers(0, 40))
def test_a_cover_is_the_maximal_nodes_inside(tree: Tree, a: int, b: int) -> None:
    n = tree.num_leaves
    low, high = sorted((min(a, n), min(b, n)))
    nodes = set()

    def walk(start: int, stop: int) -> None:
        if start >= low and stop <= high:
            nodes.add((start, stop))
        elif stop - start > 1:
            middle = start + -(-(stop - start) // 2)
            walk(start, middle)
            walk(middle, stop)

    walk(0, n)
    assert list(tree.cover((low, high))) == sorted(nodes)


def test_the_o_proj_tree_is_over_heads_first_and_the_last_leaf_of_each_head_is_short() -> None:
    tree = head_tree(replace(SMOLLM, head_dim=80, num_heads=3, num_kv_heads=1), 64)
    assert tree.leaf_lengths == (64, 16, 64, 16, 64, 16)
    # heads split 2 + 1; each head adds its own two leaves first
    assert tree.merges((0, 6)) == (0, 1, 0, 2, 0, 2)
    assert tree.cover((2, 6)) == ((2, 4), (4, 6))


def test_default_head_cuts_are_the_ones_numerics_names() -> None:
    def heads(config: ModelConfig, tp: int) -> list[int]:
        return [b - a for a, b in plan(config, tp=tp, leaf=LEAF).heads]

    assert heads(SMOLLM, 2) == [5, 4]
    assert heads(SMOLLM, 3) == [3, 3, 3]
    assert heads(QWEN, 4) == [4, 3, 4, 3]
    assert heads(QWEN, 8) == [2, 2, 2, 1, 2, 2, 2, 1]


@pytest.mark.parametrize("config", [SMOLLM, QWEN], ids=["smollm", "qwen"])
def test_every_width_and_depth_covers_the_model_once(config: ModelConfig) -> None:
    for tp in range(1, config.num_heads + 1):
        layout = plan(config, tp=tp, leaf=LEAF)
        for spans, total in (
            (layout.heads, config.num_heads),
            (layout.ffn, config.ffn),
            (layout.vocab, config.vocab),
        ):
            assert [i for a, b in spans for i in range(a, b)] == list(range(total))
        assert all(a % Q8_OUTPUTS == 0 for a, _ in layout.vocab)
        tree = ffn_tree(config, LEAF)
        for a, b in layout.ffn:
            tree.leaf_of(a)
            tree.leaf_of(b)
    for pp in range(1, config.num_layers + 1):
        spans = plan(config, pp=pp, leaf=LEAF).layers
        assert [i for a, b in spans for i in range(a, b)] == list(range(config.num_layers))
        assert all(b > a for a, b in spans)


def test_kv_heads_follow_their_query_heads_and_may_be_on_two_ranks() -> None:
    layout = plan(SMOLLM, tp=2, leaf=LEAF)
    assert [layout.kv_heads(i, 3) for i in (0, 1)] == [(0, 2), (1, 3)]
    empty = plan(SMOLLM, heads=(9, 0), leaf=LEAF)
    assert empty.kv_heads(1, 3) == (3, 3)
    assert empty.ffn == ((0, 1536), (1536, 1536))


def test_explicit_heads_cut_ffn_and_vocabulary_in_the_same_ratio() -> None:
    layout = plan(SMOLLM, heads=(7, 2), leaf=LEAF)
    assert layout.ffn == ((0, 1216), (1216, 1536))
    assert layout.vocab[0][1] == 38224
    assert plan(SMOLLM, layers=(22, 8), leaf=LEAF).layers == ((0, 22), (22, 30))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tp": 10}, "9 query heads"),
        ({"tp": 0}, "1 to 9"),
        ({"pp": 31}, "30 layers"),
        ({"heads": (5, 5)}, "sum to 10"),
        ({"heads": (-1, 10)}, "at least 0"),
        ({"layers": (30, 0)}, "at least 1"),
        ({"layers": (22, 7)}, "sum to 29"),
    ],
)
def test_cuts_that_do_not_fit_are_refused_with_the_numbers(
    arguments: dict[str, int], words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        plan(SMOLLM, leaf=LEAF, **arguments)


@given(st.integers(0, 200), st.integers(1, 200))
def test_even_spans_lose_nothing(total: int, parts: int) -> None:
    spans = even_spans(total, parts)
    assert [i for a, b in spans for i in range(a, b)] == list(range(total))
    sizes = [b - a for a, b in spans]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
