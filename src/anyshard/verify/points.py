"""What each op of a row and layer must give, beside what the ranks of a layout hold.

A `Point` is one such pair. They come in program order, so the first one that differs is where the
fault is: everything before it was right, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from anyshard.capture import Arrays
from anyshard.layout import STRIPE_TREE, Layout, Span, Tree
from anyshard.model import Program, program
from anyshard.op import STATE_HEADER
from anyshard.ops.exact import F32
from anyshard.ops.kv_pages import Pages
from anyshard.ops.storage import unpack
from anyshard.ops.wire import decode_rows
from anyshard.stripes import stripe_of
from anyshard.verify.replay import (
    LayerReplay,
    RowSum,
    explain_attention,
    replay_layer,
    replay_states,
)
from anyshard.worker import Served

__all__ = ["Point", "Target", "points", "same_bits"]


def same_bits(a: F32 | Pages, b: F32 | Pages) -> npt.NDArray[np.bool_]:
    """Where two arrays of one shape agree; a NaN equals a NaN, whose payload nothing defines."""
    if a.dtype == np.int8:
        return np.asarray(a == b)
    return np.asarray((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b)))


@dataclass(frozen=True, kw_only=True)
class Target:
    """A row and a layer to look at."""

    position: int
    layer: int


@dataclass(frozen=True, kw_only=True)
class Point:
    """What a rank holds after an op, beside what it must hold.

    found None: the op has not run. describe: names an element of it. explain: says more of a
    difference, or ''; note: what holds of any. kv: a stored key or value of an earlier row, whose
    position is the first index.
    """

    op: str
    rank: int
    what: str
    found: F32 | Pages | None
    expected: F32 | Pages
    describe: Callable[[tuple[int, ...]], str]
    note: str = ""
    explain: Callable[[], str] | None = None
    kv: bool = False

    def differing(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the elements that differ, in order."""
        if not self.expected.size:
            return ()
        if self.found is None or self.found.shape != self.expected.shape:
            return ((0,) * self.expected.ndim,)
        differing = np.argwhere(~same_bits(self.found, self.expected))
        return tuple(tuple(int(i) for i in index) for index in differing)


def _at(text: str, first: int, index: tuple[int, ...]) -> str:
    """`ffn column 17`."""
    return f"{text} {first + index[0]}"


def _at_head(text: str, first: int, head_dim: int, index: tuple[int, ...]) -> str:
    head, dim = divmod(index[0], head_dim)
    return f"{text} of head {first + head}, dim {dim}"


def _at_kv_head(text: str, first: int, head_dim: int, index: tuple[int, ...]) -> str:
    """`key of position 3, KV head 1, dim 7`; past the dims are the bytes of the scales."""
    position = f" of position {index[0]}" if len(index) == 3 else ""
    place = f"dim {index[-1]}"
    if index[-1] >= head_dim:
        scale, byte = divmod(index[-1] - head_dim, 2)
        place = f"{'high' if byte else 'low'} byte of scale {scale}"
    return f"{text}{position}, KV head {first + index[-2]}, {place}"


def _at_state(stripes: Span, first_head: int, index: tuple[int, ...]) -> str:
    """`o of head 3 over stripes [4,8), dim 7`."""
    head, node, place = index
    low, high = STRIPE_TREE.cover(stripes)[node]
    what = ("M", "l")[place] if place < STATE_HEADER else "o"
    dim = f", dim {place - STATE_HEADER}" if place >= STATE_HEADER else ""
    return f"{what} of head {first_head + head} over stripes [{low},{high}){dim}"


def _at_node(tree: Tree, span: Span, text: str, index: tuple[int, ...]) -> str:
    """`node [5,7) of the head tree (k 80 to 112), output 3`."""
    low, high = tree.cover(span)[index[0]]
    lengths = tree.leaf_lengths
    start, stop = sum(lengths[:low]), sum(lengths[:high])
    return f"node [{low},{high}) of the {text} tree (k {start} to {stop}), output {index[1]}"


@dataclass(frozen=True)
class _Nodes:
    """A row-parallel sum of a layout: its ops, and the span of leaves of each TP index."""

    name: Literal["o", "down"]
    layer: int
    total: RowSum
    spans: Sequence[Span]

    def op(self, kind: Literal["proj", "gather", "reduce"]) -> str:
        """`layers.3.gather_o`."""
        name = f"{self.name}_proj" if kind == "proj" else f"{kind}_{self.name}"
        return f"layers.{self.layer}.{name}"

    def at(self, tp_index: int) -> Callable[[tuple[int, ...]], str]:
        """Names an element of the nodes of a rank."""
        text = "head" if self.name == "o" else "ffn"
        return partial(_at_node, self.total.tree, self.spans[tp_index], text)


@dataclass(frozen=True)
class _Walk:
    """The points of one row and layer in program order, for every rank of a layout."""

    served: Served
    layout: Layout
    target: Target
    captures: Sequence[Arrays]
    truth: Arrays
    replay: LayerReplay

    @cached_property
    def stage(self) -> int:
        """The one that has the layer."""
        spans = self.layout.layers
        return next(i for i, (low, high) in enumerate(spans) if low <= self.target.layer < high)

    @cached_property
    def programs(self) -> dict[int, Program]:
        """Of the ranks of that stage."""
        first = self.stage * self.layout.tp
        served = self.served
        return {
            rank: program(served.config, served.profile, self.layout, rank)
            for rank in range(first, first + self.layout.tp)
        }

    def points(self) -> Iterator[Point]:
        """All of them, in order."""
        layer, replay = self.target.layer, self.replay
        if layer == self.layout.layers[self.stage][0]:
            yield from self._entry()
        for rank, here in self.programs.items():
            first = next(op for op in here.ops if op.layer == layer)
            yield self._residual(first.name, rank, "x_in", replay.x_in)
        yield from self._qkv()
        yield from self._attention()
        yield from self._row_parallel("o", replay.o, replay.x_o)
        for rank, here in self.programs.items():
            start, stop = here.ffn
            if stop > start:
                at = partial(_at, "ffn column", start)
                op = f"layers.{layer}.gate_up"
                yield self._point(op, rank, "ffn", "ffn", replay.ffn[start:stop], at)
        yield from self._row_parallel("down", replay.down, replay.x_down)
        if replay.x_round is not None:
            for rank in self.programs:
                op = f"layers.{layer}.round_wire"
                yield self._residual(op, rank, "x_round", replay.x_round)
        if layer == self.served.config.num_layers - 1 and len(self.truth["sampled"]):
            yield from self._head()

    def _point(
        self,
        op: str,
        rank: int,
        what: str,
        name: str,
        expected: F32,
        describe: Callable[[tuple[int, ...]], str],
        *,
        rows: int | slice | None = None,
        note: str = "",
        explain: Callable[[], str] | None = None,
        kv: bool = False,
    ) -> Point:
        """`rows`: the part of the captured array that is meant."""
        found = self.captures[rank].get(name)
        if found is not None and rows is not None:
            found = found[rows]
        return Point(
            op=op,
            rank=rank,
            what=what,
            found=None if found is None else np.ascontiguousarray(found),
            expected=np.ascontiguousarray(expected),
            describe=describe,
            note=note,
            explain=explain,
            kv=kv,
        )

    def _residual(
        self,
        op: str,
        rank: int,
        name: str,
        expected: F32,
        *,
        rows: int | None = None,
        note: str = "",
        explain: Callable[[], str] | None = None,
    ) -> Point:
        at = partial(_at, "residual", 0)
        return self._point(
            op, rank, "residual", name, expected, at, rows=rows, note=note, explain=explain
        )

    def _entry(self) -> Iterator[Point]:
        """How the row came into the stage: looked up, or from the stage before."""
        x_in, tp = self.replay.x_in, self.layout.tp
        if self.stage == 0:
            table = self.served.image.panels("embed")
            row = unpack(table, self.truth["token"])[0, : self.served.config.hidden]
            for rank in self.programs:
                note = self._table(rank)
                yield self._residual("embed", rank, "trail", row, rows=0, note=note)
            return
        if self.served.profile.wire == "int8":
            yield from self._int8_hop()
            return
        for rank in self.programs:
            yield self._residual("send", rank - tp, "x_send", x_in)
            yield self._residual("send", rank - tp, "hop_out", x_in)
        for rank in self.programs:
            note = f"rank {rank - tp} sent the right row"
            yield self._residual("receive", rank, "hop_in", x_in, note=note)
            yield self._residual("receive", rank, "trail", x_in, rows=0, note=note)

    def _int8_hop(self) -> Iterator[Point]:
        """Bytes of the row as what they stand for: encoded, as they left, came and were decoded."""
        x_in, tp, before = self.replay.x_in, self.layout.tp, self.target.layer - 1
        for rank in self.programs:
            yield self._carried(f"layers.{before}.round_wire", rank - tp, "wire")
            yield self._carried("send", rank - tp, "hop_out")
        for rank in self.programs:
            note = f"rank {rank - tp} sent the right row"
            yield self._carried("receive", rank, "hop_in", note=note)
            note = "its buffer was changed after the row had come"
            yield self._carried("receive", rank, "wire_in", note=note)
            yield self._residual("decode_wire", rank, "trail", x_in, rows=0)

    def _carried(self, op: str, rank: int, name: str, *, note: str = "") -> Point:
        point = self._residual(op, rank, name, self.replay.x_in, note=note)
        if point.found is None:
            return point
        decoded = decode_rows(point.found.reshape(1, -1), len(self.replay.x_in))[0]
        return replace(point, found=decoded)

    def _table(self, rank: int) -> str:
        """What the rank's row table says, where it is not what the frame says."""
        token, position, slot = (int(value) for value in self.captures[rank]["table"])
        right = (int(self.captures[rank]["token"][0]), self.target.position)
        if (token, position) == right:
            return ""
        return (
            f"the rank's row table has token {token} at position {position} of slot {slot}, the "
            f"frame token {right[0]} at position {right[1]}"
        )

    def _qkv(self) -> Iterator[Point]:
        op, d, p = f"layers.{self.target.layer}.qkv", self._head_dim, self.target.position
        rows = (("key", "keys", self.replay.key_Gd), ("value", "values", self.replay.value_Gd))
        for rank, (low, high), (first, last) in self._owners():
            note = self._table(rank)
            q, at = self.replay.q[low * d : high * d], partial(_at_head, "q", low, d)
            if high > low:
                yield self._point(op, rank, "q", "q", q, at, note=note)
            if not self._keeps(rank, p):
                continue
            for what, name, right in rows:
                at = partial(_at_kv_head, what, first, d)
                expected = right[first:last]
                yield self._point(op, rank, what, name, expected, at, rows=p, note=note)

    def _attention(self) -> Iterator[Point]:
        op, d, p = f"layers.{self.target.layer}.attention", self._head_dim, self.target.position
        if self.layout.splits_sequence:
            yield from self._gathered_q()
        for rank, _, kv in self._owners():
            kept = np.array([self._keeps(rank, position) for position in range(p)], np.bool_)
            for what, name in (("key", "keys"), ("value", "values")):
                at, rows = partial(_at_kv_head, f"stored {what}", kv[0], d), slice(0, p)
                stored = self.truth[name][:p, slice(*kv)]
                right = np.where(kept[:, None, None], stored, np.zeros((), stored.dtype))
                explain = partial(self._explain_history, rank, name, kv)
                yield self._point(
                    op, rank, what, name, right, at, rows=rows, explain=explain, kv=True
                )
        if self.layout.splits_sequence:
            yield from self._states()
            op = f"layers.{self.target.layer}.merge_states"
        for rank, (low, high), _ in self._owners():
            if high == low:
                continue
            right = self.replay.attention[low * d : high * d]
            at = partial(_at_head, "output", low, d)
            explain = partial(self._explain_attention, rank, low)
            yield self._point(op, rank, "attention", "attention", right, at, explain=explain)

    def _gathered_q(self) -> Iterator[Point]:
        """The sender's own first: where its buffer has changed, it is at fault."""
        op, d = f"layers.{self.target.layer}.gather_q", self._head_dim
        for sender, (low, high), _ in self._owners():
            right, at = self.replay.q[low * d : high * d], partial(_at_head, "q", low, d)
            index = self.layout.coordinates(sender)[1]
            for rank in (sender, *(each for each in self.programs if each != sender)):
                note = f"rank {sender} sent the right q"
                if rank == sender:
                    note = "its buffer was changed before every rank had read it"
                for moment in ("received", "read") if high > low else ():
                    held = f"{moment}_q_{index}"
                    yield self._point(op, rank, "q", held, right, at, note=note)

    def _states(self) -> Iterator[Point]:
        """What every rank's stripes give all heads, and what of it the rank of a head receives."""
        layer, tp = self.target.layer, self.layout.tp
        rights = {
            rank: replay_states(
                self.served,
                self.replay.q,
                self.truth["keys"][: self.target.position + 1],
                self.truth["values"][: self.target.position + 1],
                here.stripes,
            )
            for rank, here in self.programs.items()
        }
        for rank, right in rights.items():
            at = partial(_at_state, self.layout.stripes(rank % tp), 0)
            op = f"layers.{layer}.attention"
            yield self._point(op, rank, "state", "states", right, at)
        op = f"layers.{layer}.gather_states"
        for rank, right in rights.items():
            at = partial(_at_state, self.layout.stripes(rank % tp), 0)
            note = "the buffer was changed before it was sent"
            yield self._point(op, rank, "state", "published_states", right, at, note=note)
        for rank, here in self.programs.items():
            low, high = here.heads
            for sender, right in rights.items() if high > low else ():
                at = partial(_at_state, self.layout.stripes(sender % tp), low)
                note = f"rank {sender} sent the right state"
                for moment in ("received", "read"):
                    held = f"{moment}_states_{sender % tp}"
                    yield self._point(op, rank, "state", held, right[low:high], at, note=note)

    def _keeps(self, rank: int, position: int) -> bool:
        """Whether a rank keeps the key and value of that position."""
        first, stop = self.programs[rank].stripes
        return first <= stripe_of(position // self.served.profile.kv_block) < stop

    def _explain_history(self, rank: int, name: str, kv: Span) -> str:
        """Whether the first wrong row is another position's."""
        found = self.captures[rank].get(name)
        if found is None:
            return ""
        right = self.truth[name][:, slice(*kv)]
        bad = next(j for j in range(len(right)) if not same_bits(found[j], right[j]).all())
        for other in range(len(right)):
            if same_bits(found[bad], np.ascontiguousarray(right[other])).all():
                return f"it is the row of position {other}: the wrong page"
        return "a stale row, or the wrong page"

    def _explain_attention(self, rank: int, first_head: int) -> str:
        found, d = self.captures[rank].get("attention"), self._head_dim
        if found is None:
            return ""
        right = self.replay.attention.reshape(-1, d)[first_head:][: len(found) // d]
        found_Hd = found.reshape(-1, d)
        head = int(np.flatnonzero(~same_bits(found_Hd, right).all(axis=1))[0])
        keys, values = self.truth["keys"], self.truth["values"]
        return explain_attention(
            self.served, self.replay.q, keys, values, head=first_head + head, found_d=found_Hd[head]
        )

    @property
    def _head_dim(self) -> int:
        return self.served.config.head_dim

    def _owners(self) -> list[tuple[int, Span, Span]]:
        """(rank, query heads, KV heads) of the ranks that have any KV head."""
        every = [(rank, here.heads, here.kv_heads) for rank, here in self.programs.items()]
        return [(rank, heads, kv) for rank, heads, kv in every if kv[1] > kv[0]]

    def _row_parallel(self, name: Literal["o", "down"], total: RowSum, x: F32) -> Iterator[Point]:
        d, layout, tree = self._head_dim, self.layout, total.tree
        cuts = [(low * d, high * d) for low, high in layout.heads] if name == "o" else layout.ffn
        spans = [(tree.leaf_of(low), tree.leaf_of(high)) for low, high in cuts]
        sums = _Nodes(name, self.target.layer, total, spans)
        senders = [
            (tp_index, rank, total.nodes(spans[tp_index]))
            for tp_index, rank in enumerate(self.programs)
            if spans[tp_index][1] > spans[tp_index][0]
        ]
        for tp_index, rank, right in senders:
            at, explain = sums.at(tp_index), partial(self._explain_nodes, rank, sums, right)
            held = f"nodes_{name}"
            yield self._point(sums.op("proj"), rank, "node", held, right, at, explain=explain)
        if layout.tp > 1:
            yield from self._gather(sums, senders)
        for rank in self.programs:
            held = "x_o" if name == "o" else "x_down"
            explain = partial(self._explain_sum, rank, held, sums)
            yield self._residual(sums.op("reduce"), rank, held, x, explain=explain)

    def _gather(self, sums: _Nodes, senders: list[tuple[int, int, F32]]) -> Iterator[Point]:
        """Own nodes first: where the sender's own buffer has changed, the sender is at fault."""
        op, name = sums.op("gather"), sums.name
        for tp_index, rank, right in senders:
            at, note = sums.at(tp_index), "the buffer was changed before it was sent"
            yield self._point(op, rank, "node", f"published_{name}", right, at, note=note)
            note = "its buffer was changed before every rank had read it"
            for moment in ("received", "read"):
                held = f"{moment}_{name}_{tp_index}"
                yield self._point(op, rank, "node", held, right, at, note=note)
        for tp_index, sender, right in senders:
            note = f"rank {sender} sent the right node"
            for rank in self.programs:
                for moment in ("received", "read") if rank != sender else ():
                    held = f"{moment}_{name}_{tp_index}"
                    yield self._point(op, rank, "node", held, right, sums.at(tp_index), note=note)

    def _explain_nodes(self, rank: int, sums: _Nodes, right: F32) -> str:
        found, bias = self.captures[rank].get(f"nodes_{sums.name}"), sums.total.bias_D
        biased = None if bias is None else right + bias
        if found is not None and biased is not None and same_bits(found, biased).all():
            return "equal to its nodes with the bias added to each"
        return ""

    def _explain_sum(self, rank: int, held: str, sums: _Nodes) -> str:
        found = self.captures[rank].get(held)
        return "" if found is None else sums.total.explain(found, sums.spans)

    def _head(self) -> Iterator[Point]:
        layout, first, right = self.layout, min(self.programs), self.truth["logits"]
        owners = [(rank, here.vocab) for rank, here in self.programs.items()]
        owners = [(rank, (low, high)) for rank, (low, high) in owners if high > low]
        for rank, (low, high) in owners:
            yield self._residual("head", rank, "x_head", self.replay.x_down)
            yield self._logits("head", rank, "logits", right[low:high], low)
        if "received_logits_0" not in self.captures[first]:
            return  # one rank, or nobody wanted the logits
        op = "gather_logits"
        for rank, (low, high) in owners:
            yield self._logits(op, rank, "published_logits", right[low:high], low)
        for rank, (low, high) in owners:
            held = f"received_logits_{layout.coordinates(rank)[1]}"
            yield self._logits(op, first, held, right[low:high], low)
        yield self._logits(op, first, "gathered", right, 0)

    def _logits(self, op: str, rank: int, name: str, expected: F32, start: int) -> Point:
        at = partial(_at, "logit of vocabulary id", start)
        return self._point(op, rank, "logit", name, expected, at)


def points(
    served: Served,
    layout: Layout,
    target: Target,
    captures: Sequence[Arrays],
    truth: Arrays,
) -> Iterator[Point]:
    """Every point of a row and layer, on every rank of its stage, in program order.

    captures: one a rank of `layout`; truth: that of the unsplit run. Held by: test_divergence.py.
    """
    p = target.position
    replay = replay_layer(
        served,
        target.layer,
        x_in_D=truth["x_in"],
        keys_JGd=truth["keys"][:p],
        values_JGd=truth["values"][:p],
    )
    yield from _Walk(served, layout, target, captures, truth, replay).points()
