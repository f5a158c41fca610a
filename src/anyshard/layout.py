"""Where things go: the canonical reduction tree, its covers, and the cuts of a model over ranks.

Integers only. Knows nothing of tensors, files or processes. A rank is numbered
`stage * tp + tp_index`; a span is half-open `(start, stop)`; a node is a span of leaves.

The tree decides the order of every float sum, and never depends on a layout; a layout decides
only which rank evaluates which part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, combinations, pairwise
from typing import Final, Literal

from anyshard.config import ModelConfig, WireType
from anyshard.errors import LayoutError
from anyshard.stripes import STRIPES

__all__ = [
    "STRIPE_TREE",
    "KvShard",
    "Layout",
    "Span",
    "Tree",
    "even_spans",
    "ffn_tree",
    "head_tree",
    "hidden_tree",
    "hosts_of_ranks",
    "plan",
    "wire_boundaries",
]

Span = tuple[int, int]
#: What of the KV cache a TP rank keeps: the KV heads of its query heads, or all of some blocks.
KvShard = Literal["heads", "sequence"]
VOCAB_UNIT = 16  # rows: a block of Q8_0 holds two panels
WIRE_DEPTH = 3  # of the tree over layers, at whose nodes int8 wires round: at most 8 stages


def _internal_nodes(low: int, high: int) -> list[Span]:
    """Internal nodes over [low, high) in post-order; a node splits at low + ceil(half)."""
    if high - low < 2:
        return []
    middle = low + (high - low + 1) // 2
    return [*_internal_nodes(low, middle), *_internal_nodes(middle, high), (low, high)]


@dataclass(frozen=True)
class Tree:
    """The fixed order of one sum: leaves in groups (heads), the tree over groups first.

    leaf_lengths: consecutive k of each leaf, all leaves in k order.
    group_sizes: leaves per group; one group when K is not made of heads.
    Source: docs/numerics.md, Tree. Held by: test_layout.py.
    """

    leaf_lengths: tuple[int, ...]
    group_sizes: tuple[int, ...]

    @property
    def num_leaves(self) -> int:
        """Leaves of the whole sum."""
        return len(self.leaf_lengths)

    def leaf_of(self, k: int) -> int:
        """Index of the leaf that begins at k; num_leaves for the end.

        Raises: LayoutError if k is not a leaf boundary.
        """
        starts = _starts(self.leaf_lengths)
        if k not in starts:
            raise LayoutError(f"a cut at {k} is inside a leaf; leaves begin at {starts}")
        return starts.index(k)

    def merges(self, span: Span) -> tuple[int, ...]:
        """After each leaf of `span`, how many additions of the two topmost stack entries.

        What is left on the stack at the end are the values of `cover(span)`, in order.
        """
        return _merges_of(self, span)

    def cover(self, span: Span) -> tuple[Span, ...]:
        """The maximal nodes inside `span`, left to right, as spans of leaves."""
        return _cover_of(self, span)

    def node_merges(self, spans: Sequence[Span]) -> tuple[int, ...]:
        """Merge counts for the receiver that holds the covers of `spans`, concatenated.

        `spans` partition all leaves in order; empty ones add no node. The last count leaves one
        value: the sum.
        """
        return _node_merges_of(self, tuple(spans))


# Cached, because every layer of a program asks the same again.
@lru_cache(maxsize=1024)
def _merges_of(tree: Tree, span: Span) -> tuple[int, ...]:
    start, stop = span
    counts = [0] * (stop - start)
    for low, high in _nodes_of(tree):
        if low >= start and high <= stop:
            counts[high - 1 - start] += 1
    return tuple(counts)


@lru_cache(maxsize=1024)
def _cover_of(tree: Tree, span: Span) -> tuple[Span, ...]:
    stack: list[Span] = []
    for index, merges in enumerate(tree.merges(span)):
        stack.append((span[0] + index, span[0] + index + 1))
        for _ in range(merges):
            right = stack.pop()
            left = stack.pop()
            stack.append((left[0], right[1]))
    return tuple(stack)


@lru_cache(maxsize=1024)
def _node_merges_of(tree: Tree, spans: tuple[Span, ...]) -> tuple[int, ...]:
    nodes = [node for span in spans for node in tree.cover(span)]
    internal = _nodes_of(tree)
    return tuple(
        sum(1 for low, high in internal if high == stop and low < start) for start, stop in nodes
    )


@lru_cache(maxsize=256)
def _nodes_of(tree: Tree) -> tuple[Span, ...]:
    starts = [0, *accumulate(tree.group_sizes)]
    within = [node for low, high in pairwise(starts) for node in _internal_nodes(low, high)]
    over = [(starts[low], starts[high]) for low, high in _internal_nodes(0, len(tree.group_sizes))]
    return tuple(sorted(within + over, key=lambda node: (node[1], -node[0])))


@lru_cache(maxsize=256)
def _starts(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *accumulate(lengths))


def _leaves(k: int, leaf: int) -> tuple[int, ...]:
    return tuple(min(leaf, k - start) for start in range(0, k, leaf))


def hidden_tree(config: ModelConfig, leaf: int) -> Tree:
    """The sum over the hidden dimension: q, k, v, gate, up and head projections."""
    lengths = _leaves(config.hidden, leaf)
    return Tree(lengths, (len(lengths),))


def head_tree(config: ModelConfig, leaf: int) -> Tree:
    """The sum of o_proj: leaves inside each head, the tree over heads first."""
    lengths = _leaves(config.head_dim, leaf)
    return Tree(lengths * config.num_heads, (len(lengths),) * config.num_heads)


def ffn_tree(config: ModelConfig, leaf: int) -> Tree:
    """The sum of down_proj, over the ffn dimension."""
    lengths = _leaves(config.ffn, leaf)
    return Tree(lengths, (len(lengths),))


#: The merge of the softmax states of one row and head; a leaf is a stripe.
STRIPE_TREE: Final = Tree((1,) * STRIPES, (STRIPES,))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One split: `pp` stages of `tp` ranks, and what each of them owns.

    heads, ffn, vocab: one span per TP index (query heads, ffn columns, vocabulary rows).
    layers: one span per stage. Spans may be empty, and together they are everything, in order.
    kv_shard: how the ranks of a stage share keys and values; of one rank it changes nothing.
    """

    heads: tuple[Span, ...]
    ffn: tuple[Span, ...]
    vocab: tuple[Span, ...]
    layers: tuple[Span, ...]
    kv_shard: KvShard = "heads"

    @property
    def tp(self) -> int:
        """Ranks of one stage."""
        return len(self.heads)

    @property
    def pp(self) -> int:
        """Stages."""
        return len(self.layers)

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(stage, tp_index) of a rank."""
        return divmod(rank, self.tp)

    @property
    def sampler(self) -> int:
        """The rank that turns logits into tokens: TP index 0 of the last stage."""
        return (self.pp - 1) * self.tp

    @property
    def splits_sequence(self) -> bool:
        """Whether ranks of a stage keep different blocks of a sequence."""
        return self.kv_shard == "sequence" and self.tp > 1

    def stripes(self, tp_index: int) -> Span:
        """Stripes whose blocks this TP index keeps: all of them, unless they split the sequence."""
        return even_spans(STRIPES, self.tp)[tp_index] if self.splits_sequence else (0, STRIPES)

    @property
    def stripe_owners(self) -> tuple[int, ...]:
        """Of each stripe the TP index that keeps its blocks; 0 where all keep all."""
        if not self.splits_sequence:
            return (0,) * STRIPES
        return tuple(index for index in range(self.tp) for _ in range(*self.stripes(index)))

    def kv_heads(self, tp_index: int, q_per_kv: int) -> Span:
        """KV heads kept here: those that its query heads attend to, or all of some blocks."""
        if self.splits_sequence:
            return (0, self.heads[-1][1] // q_per_kv)
        start, stop = self.heads[tp_index]
        if start == stop:
            return (start // q_per_kv, start // q_per_kv)
        return (start // q_per_kv, -(-stop // q_per_kv))

    def owned_kv_heads(self, tp_index: int, q_per_kv: int) -> Span:
        """Those of them that no lower TP index holds: each KV head has one owner.

        Where ranks split the sequence, that is of each row who keeps its block, with all heads.
        Held by: test_digest.py::test_every_kv_head_has_one_owner.
        """
        if self.splits_sequence:
            return self.kv_heads(tp_index, q_per_kv)
        start, stop = self.heads[tp_index]
        return (-(-start // q_per_kv), -(-stop // q_per_kv))

    def describe(self) -> str:
        """`tp 2 pp 3`, for people."""
        text = f"tp {self.tp} pp {self.pp}"
        return f"{text} · KV by sequence" if self.splits_sequence else text


def even_spans(total: int, parts: int) -> tuple[Span, ...]:
    """Contiguous spans as equal as possible, larger first; empty ones when parts > total."""
    sizes = [total // parts + (1 if i < total % parts else 0) for i in range(parts)]
    return tuple(pairwise([0, *accumulate(sizes)]))


def _best_cut(
    num_units: int,
    parts: int,
    limits: Sequence[Callable[[Span], int]],
    nodes: Callable[[Span], int],
) -> tuple[Span, ...]:
    """Contiguous cut of units that minimises, in order, the maximum of each of `limits`, then
    of `nodes`, then the total of `nodes`; the largest leftmost spans win ties.

    A dynamic program over (parts left, first unit): small, since units are heads or 16ths.
    """
    spans = [
        (start, stop) for start in range(num_units + 1) for stop in range(start, num_units + 1)
    ]
    allowed = set(spans)
    for measure in (*limits, nodes):
        allowed = _tightest(allowed, spans, measure, num_units, parts)

    @cache
    def cheapest(left: int, start: int) -> float:
        if left == 0:
            return 0.0 if start == num_units else math.inf
        return min(
            (
                nodes((start, stop)) + cheapest(left - 1, stop)
                for stop in range(start, num_units + 1)
                if (start, stop) in allowed
            ),
            default=math.inf,
        )

    cut: list[Span] = []
    start = 0
    for left in range(parts, 0, -1):
        goal = cheapest(left, start)
        stop = next(
            stop
            for stop in range(num_units, start - 1, -1)
            if (start, stop) in allowed and nodes((start, stop)) + cheapest(left - 1, stop) == goal
        )
        cut.append((start, stop))
        start = stop
    return tuple(cut)


def _tightest(
    allowed: set[Span],
    spans: Sequence[Span],
    measure: Callable[[Span], int],
    num_units: int,
    parts: int,
) -> set[Span]:
    """The spans of `allowed` under the smallest bound on `measure` that still admits a cut."""
    values = {span: measure(span) for span in spans if span in allowed}
    for bound in sorted(set(values.values())):
        kept = {span for span, value in values.items() if value <= bound}
        reach = {0}
        for _ in range(parts):
            reach = {stop for start, stop in kept if start in reach}
        if num_units in reach:
            return kept
    raise AssertionError("one span over everything and empty ones are always a cut")


def _cut_heads(config: ModelConfig, tp: int) -> tuple[Span, ...]:
    tree = Tree((1,) * config.num_heads, (config.num_heads,))

    def kv_heads(span: Span) -> int:
        start, stop = span
        return -(-stop // config.q_per_kv) - start // config.q_per_kv if stop > start else 0

    return _best_cut(
        config.num_heads,
        tp,
        [lambda span: span[1] - span[0], kv_heads],
        lambda span: len(tree.cover(span)),
    )


def _depth_nodes(num_leaves: int, depth: int) -> tuple[int, ...]:
    """Boundaries of the nodes at `depth` of the tree over leaves (leaves higher up count too)."""
    bounds = [0, num_leaves]
    for _ in range(depth):
        middles = [low + (high - low + 1) // 2 for low, high in pairwise(bounds)]
        bounds = sorted({*bounds, *middles})
    return tuple(bounds)


def _cut_ffn(config: ModelConfig, leaf: int, tp: int) -> tuple[Span, ...]:
    tree = ffn_tree(config, leaf)
    bounds = _depth_nodes(tree.num_leaves, max(4, (tp - 1).bit_length()))
    starts = _starts(tree.leaf_lengths)

    def leaves(span: Span) -> Span:
        return (bounds[span[0]], bounds[span[1]])

    def columns(span: Span) -> int:
        low, high = leaves(span)
        return starts[high] - starts[low]

    cut = _best_cut(len(bounds) - 1, tp, [columns], lambda span: len(tree.cover(leaves(span))))
    return tuple((starts[leaves(span)[0]], starts[leaves(span)[1]]) for span in cut)


def _in_ratio(counts: Sequence[int], units: int) -> list[int]:
    """Boundaries that cut `units` as `counts` cut their total, rounded half up."""
    total = sum(counts)
    return [(2 * done * units + total) // (2 * total) for done in (0, *accumulate(counts))]


def wire_boundaries(wire: WireType, num_layers: int) -> tuple[int, ...]:
    """Where residual rows are rounded, and stages may be cut: layers that stand before each place.

    In int8 the interior boundaries of the depth-3 tree over layers: 4, 8, 12, 15, 19, 23, 27 of
    30. Of a wire that rounds nothing there are none, and stages may be cut anywhere.
    Source: docs/numerics.md, Wire int8. Held by: test_wire_int8.py.
    """
    return _depth_nodes(num_layers, WIRE_DEPTH)[1:-1] if wire == "int8" else ()


def _layer_spans(counts: Sequence[int]) -> tuple[Span, ...]:
    return tuple(pairwise([0, *accumulate(counts)]))


def _cut_layers(
    config: ModelConfig, pp: int, layers: Sequence[int] | None, wire: WireType
) -> tuple[Span, ...]:
    """Even, or as asked for; in int8 by boundaries of the wire. Raises: LayoutError."""
    total = config.num_layers
    if wire == "none":
        return even_spans(total, pp) if layers is None else _layer_spans(layers)
    bounds = wire_boundaries(wire, total)
    if pp > len(bounds) + 1:
        flag = f"--pipeline-parallel-size {pp}" if layers is None else f"--layers of {pp} stages"
        raise LayoutError(
            f"{flag} is not possible with --wire-dtype int8: rows are rounded, and stages cut, "
            f"after {_and(bounds)} of the model's {total} layers, so 1 to {len(bounds) + 1} stages "
            "can share them"
        )

    def sizes(cut: tuple[int, ...]) -> list[int]:
        return [stop - start for start, stop in pairwise([0, *cut, total])]

    cuts = list(combinations(bounds, pp - 1))
    if layers is None:
        # the least largest stage, then the least sum of squares; larger stages first on ties
        nearest = min(
            cuts,
            key=lambda cut: (
                max(sizes(cut)),
                sum(size * size for size in sizes(cut)),
                [-place for place in cut],
            ),
        )
        return _layer_spans(sizes(nearest))
    asked = tuple(accumulate(layers))[:-1]
    if not set(asked) <= set(bounds):

        def distance(cut: tuple[int, ...]) -> tuple[int, list[int]]:
            moved = sum(abs(a - b) for a, b in zip(cut, asked, strict=True))
            return moved, [-place for place in cut]

        nearest = min(cuts, key=distance)
        raise LayoutError(
            f"--layers {_commas(layers)} is not possible with --wire-dtype int8: rows are "
            f"rounded, and stages cut, after {_and(bounds)} of the model's {total} layers; the "
            f"nearest is --layers {_commas(sizes(nearest))}"
        )
    return _layer_spans(layers)


def _commas(counts: Sequence[int]) -> str:
    return ",".join(map(str, counts))


def _and(numbers: Sequence[int]) -> str:
    """`4, 8 and 12`."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}"


def plan(
    config: ModelConfig,
    *,
    tp: int = 1,
    pp: int = 1,
    heads: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    kv_shard: KvShard = "heads",
    wire: WireType = "none",
    leaf: int,
) -> Layout:
    """The layout for a width and depth, or for explicit cuts in query heads and layers.

    Raises: LayoutError when a width exceeds the query heads, or the stripes that a sequence is cut
    into, a depth the layers, or a cut does not add up, or a stage ends where an int8 wire does not
    round; the message holds the numbers.
    Source: docs/numerics.md, Cuts. Held by: test_layout.py.
    """
    if heads is not None:
        _check_cut(heads, config.num_heads, flag="--heads", noun="query heads", least=0)
        tp = len(heads)
    if layers is not None:
        _check_cut(layers, config.num_layers, flag="--layers", noun="layers", least=1)
        pp = len(layers)
    if not 1 <= tp <= config.num_heads:
        raise LayoutError(
            f"--tensor-parallel-size {tp} is not possible: the model has {config.num_heads} "
            f"query heads, so 1 to {config.num_heads} ranks can share a layer"
        )
    if kv_shard == "sequence" and tp > STRIPES:
        raise LayoutError(
            f"--kv-shard sequence is not possible with {tp} ranks: a sequence is kept in {STRIPES} "
            f"stripes, so 1 to {STRIPES} ranks can share a layer; take fewer, or --kv-shard heads"
        )
    if not 1 <= pp <= config.num_layers:
        raise LayoutError(
            f"--pipeline-parallel-size {pp} is not possible: the model has {config.num_layers} "
            f"layers, so 1 to {config.num_layers} stages can share them"
        )
    pairs = -(-config.vocab // VOCAB_UNIT)
    if heads is None:
        head_spans = _cut_heads(config, tp)
        ffn_spans = _cut_ffn(config, leaf, tp)
        pair_spans = even_spans(pairs, tp)
    else:
        starts = _starts(ffn_tree(config, leaf).leaf_lengths)
        head_spans = tuple(pairwise([0, *accumulate(heads)]))
        ffn_spans = tuple(pairwise([starts[leaf_] for leaf_ in _in_ratio(heads, len(starts) - 1)]))
        pair_spans = tuple(pairwise(_in_ratio(heads, pairs)))
    return Layout(
        heads=head_spans,
        ffn=ffn_spans,
        vocab=tuple(
            (min(VOCAB_UNIT * low, config.vocab), min(VOCAB_UNIT * high, config.vocab))
            for low, high in pair_spans
        ),
        layers=_cut_layers(config, pp, layers, wire),
        kv_shard=kv_shard,
    )


def _check_cut(counts: Sequence[int], total: int, *, flag: str, noun: str, least: int) -> None:
    text = ",".join(str(count) for count in counts)[:40]
    if any(count < least for count in counts):
        raise LayoutError(
            f"{flag} {text} has a part of {min(counts)}: each of the parts needs at least {least}, "
            f"and together they are the model's {total} {noun}"
        )
    if sum(counts) != total:
        raise LayoutError(
            f"{flag} {text} does not add up: the model has {total} {noun}, and the "
            f"parts sum to {sum(counts)}"
        )


def hosts_of_ranks(layout: Layout, num_hosts: int) -> tuple[int, ...]:
    """The host of each rank: as many stages to each as can be, or each stage over as many hosts.

    Host 0 has the last stage, where tokens are drawn, and so the logits that the front wants; the
    ones before it are of hosts 1, 2 and so on. Raises: LayoutError with what there is.
    """
    tp, pp = layout.tp, layout.pp
    wide = num_hosts // pp  # hosts of a stage, where there are more of them than stages
    if num_hosts > layout.world or (num_hosts > pp and num_hosts % pp):
        stages = f"{pp} stage{'s' * (pp > 1)} of {tp} rank{'s' * (tp > 1)}"
        raise LayoutError(
            f"{num_hosts} hosts cannot share {stages}: each takes some stages, or ranks of one "
            "stage; take as many stages (-pp) or more, or fewer hosts"
        )
    if num_hosts <= pp:
        blocks = [stage * num_hosts // pp for stage in range(pp) for _ in range(tp)]
    else:
        blocks = [stage * wide + index * wide // tp for stage in range(pp) for index in range(tp)]
    head = blocks[layout.sampler]
    return tuple((block - head) % num_hosts for block in blocks)
