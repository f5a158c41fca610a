"""The first divergence: op, rank, place and both values of where a layout leaves the unsplit run.

Two runs of the same request, a suspect and the unsplit one, are repeated with a `Capture`: first
for the residuals of every position, which give the position and the layer, then for that row of
that layer. What each op must give is replayed by the reference bodies from the unsplit run's
residual and history; the captures are compared in program order, bit for bit, and the first
difference is the fault, because everything before it was right.

A NaN equals a NaN: their payloads are not defined. Nothing else has a tolerance.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anyshard.capture import Arrays, Capture, read_capture
from anyshard.launcher import RankGroup
from anyshard.layout import Layout
from anyshard.ops.control_word import set_control_word
from anyshard.ops.exact import F32
from anyshard.ops.kv_pages import Pages
from anyshard.verify.cells import DEADLINE_S, Cell, Model, alone, batch_order, run_cell
from anyshard.verify.points import Point, Target, points, same_bits
from anyshard.verify.replay import replay_head, unsplit_layout
from anyshard.verify.result import max_ulp
from anyshard.verify.scratch import scratch_folder
from anyshard.worker import Served

__all__ = ["Divergence", "Parted", "Run", "cell_divergence", "cell_run", "first_divergence"]

VOCAB_ROWS = 16  # of the head, replayed together; a block of Q8_0

Start = Callable[[Capture], None]
Answer = tuple[str, tuple[int, ...]]  # digest of the logits, and tokens


@dataclass(frozen=True)
class Run:
    """A run that can be repeated: its layout, the slot of the request, and how to run it.

    start: runs the same frames in a new epoch whose ranks have that capture, and returns when
    every rank has ended the last frame.
    """

    layout: Layout
    slot: int
    start: Start


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first op whose result on some rank has other bits than the unsplit run's.

    op: as `Op.name`. what: `q`, `key`, `node`, ...; place: the element in words; index: in the
    array that the rank holds. expected, found: float32 (None: nothing was computed). differing of
    elements: in that array. ulp: the largest distance, None where a value is not finite.
    kv_position: where it is a stored key or value, the position that it belongs to.
    """

    op: str
    rank: int
    stage: int
    tp_index: int
    position: int
    what: str
    place: str
    index: tuple[int, ...]
    expected: np.float32
    found: np.float32 | None
    differing: int
    elements: int
    ulp: int | None
    note: str = ""
    kv_position: int | None = None

    def sentence(self) -> str:
        """For people, values as hex floats."""
        found = "nothing" if self.found is None else _hex(self.found)
        text = (
            f"{self.op} on rank {self.rank} (tp {self.tp_index}, stage {self.stage}), position "
            f"{self.position}: {self.place}: {found} where {_hex(self.expected)} is right "
            f"({self.differing} of {self.elements} differ"
        )
        text += ")" if self.ulp is None else f", at most {self.ulp} ulp)"
        return text + (f"; {self.note}" if self.note else "")

    def record(self) -> dict[str, Any]:
        """For JSON: values as hex floats and as 8 hex digits of their bits."""
        return {
            "op": self.op,
            "rank": self.rank,
            "stage": self.stage,
            "tp_index": self.tp_index,
            "position": self.position,
            "what": self.what,
            "place": self.place,
            "index": list(self.index),
            "expected": _hex(self.expected),
            "expected_bits": _bits(self.expected),
            "found": None if self.found is None else _hex(self.found),
            "found_bits": None if self.found is None else _bits(self.found),
            "differing": self.differing,
            "elements": self.elements,
            "max_ulp": self.ulp,
            "note": self.note,
            "sentence": self.sentence(),
        }


def _hex(value: np.float32) -> str:
    """`0x1.8p-3`: float.hex without the zeros that only a float64 has room for."""
    return re.sub(r"\.?0*p", "p", float(value).hex())


def _bits(value: np.float32) -> str:
    return f"{int(value.view(np.uint32)):08x}"


def _ulps(found: F32 | Pages, expected: F32 | Pages) -> int | None:
    """The most floats between two values; None if one is not finite, and of what is no float."""
    if found.dtype == np.int8:
        return None
    finite = np.isfinite(found).all() and np.isfinite(expected).all()
    return max_ulp(found, expected) if finite else None


def _divergence(point: Point, layout: Layout, position: int) -> Divergence | None:
    """What a point says if it differs."""
    differing = point.differing()
    if not differing:
        return None
    index = differing[0]
    stage, tp_index = layout.coordinates(point.rank)
    found = point.found
    if found is not None and found.shape != point.expected.shape:
        found = None
    return Divergence(
        op=point.op,
        rank=point.rank,
        stage=stage,
        tp_index=tp_index,
        position=position,
        what=point.what,
        place=point.describe(index),
        index=index,
        expected=np.float32(point.expected[index]),
        found=None if found is None else np.float32(found[index]),
        differing=point.expected.size if found is None else len(differing),
        elements=point.expected.size,
        ulp=None if found is None else _ulps(found, point.expected),
        note=point.note if point.explain is None else point.explain(),
        kv_position=index[0] if point.kv else None,
    )


# --- where to look ------------------------------------------------------------------------------


def _repeat(run: Run, *, position: int | None, layer: int | None) -> list[list[Arrays]]:
    """Run once more with a capture; by rank, the frames that hold the row."""
    with scratch_folder() as folder:
        run.start(Capture(slot=run.slot, folder=str(folder), position=position, layer=layer))
        return [read_capture(folder, rank) for rank in range(run.layout.world)]


def _detail(run: Run, target: Target) -> list[Arrays]:
    """By rank, the last frame that holds the target's row."""
    frames = _repeat(run, position=target.position, layer=target.layer)
    assert all(frames), f"no frame of slot {run.slot} holds position {target.position}"
    return [each[-1] for each in frames]


@dataclass(frozen=True)
class _Trail:
    """What all ranks hold of all positions: the last frame that holds a position counts.

    rows: by rank and position, [L+1, D]; logits: by rank and position, [V here]; gathered: what
    the sampler made of them, [V].
    """

    tokens: Mapping[int, int]
    rows: Sequence[Mapping[int, F32]]
    logits: Sequence[Mapping[int, F32]]
    gathered: Mapping[int, F32]


def _trail(run: Run) -> _Trail:
    tokens: dict[int, int] = {}
    rows: list[dict[int, F32]] = []
    logits: list[dict[int, F32]] = []
    gathered: dict[int, F32] = {}
    for frames in _repeat(run, position=None, layer=None):
        mine: dict[int, F32] = {}
        drawn: dict[int, F32] = {}
        for frame in frames:
            positions = frame["position"].tolist()
            tokens |= dict(zip(positions, frame["token"].tolist(), strict=True))
            mine |= dict(zip(positions, frame["trail"], strict=True))
            for name, kept in (("logits", drawn), ("gathered", gathered)):
                if name in frame:
                    kept |= dict(zip(frame["sampled"].tolist(), frame[name], strict=True))
        rows.append(mine)
        logits.append(drawn)
    return _Trail(tokens, rows, logits, gathered)


def _same(a: F32, b: F32) -> bool:
    return a.shape == b.shape and bool(same_bits(a, b).all())


def _first_layer(layout: Layout, trails: Sequence[F32], right: F32) -> int | None:
    """The layer whose work is first wrong in the residuals of one row, of any rank.

    The first layer of a stage also stands for how the row came into the stage.
    """
    for stage, (start, stop) in enumerate(layout.layers):
        ranks = range(stage * layout.tp, (stage + 1) * layout.tp)
        for boundary in range(start, stop + 1):
            if not all(_same(trails[rank][boundary - start], right[boundary]) for rank in ranks):
                return max(start, boundary - 1)
    return None


def _first_target(suspect: Run, truth: Run) -> Target | Divergence | None:
    """Position and layer where a residual or a logit of some rank first differs."""
    a, b = _trail(suspect), _trail(truth)
    layout, last = suspect.layout, suspect.layout.layers[-1][1] - 1
    for position in sorted(a.tokens.keys() & b.tokens.keys()):
        if a.tokens[position] != b.tokens[position]:
            return _other_token(suspect, position, a.tokens[position], b.tokens[position])
        trails = [rows[position] for rows in a.rows]
        layer = _first_layer(layout, trails, b.rows[0][position])
        if layer is not None:
            return Target(position=position, layer=layer)
        if position not in b.logits[0]:
            continue
        right = b.logits[0][position]
        shards = [
            (a.logits[layout.sampler + tp_index].get(position), right[start:stop])
            for tp_index, (start, stop) in enumerate(layout.vocab)
        ]
        shards.append((a.gathered.get(position), right))
        if not all(found is None or _same(found, wanted) for found, wanted in shards):
            return Target(position=position, layer=last)
    return None


def _other_token(run: Run, position: int, found: int, right: int) -> Divergence:
    """The frames differ: all logits were equal, and another token was drawn from them."""
    return _wrong_pair(run, position - 1) or _wrong_draw(run, position, found, right)


def _wrong_pair(run: Run, position: int) -> Divergence | None:
    """The rank that sent another (value, id) than that of its best logit, if pairs were sent."""
    layout = run.layout
    captures = _detail(run, Target(position=position, layer=layout.layers[-1][1] - 1))
    for tp_index, (start, stop) in enumerate(layout.vocab):
        rank = layout.sampler + tp_index
        pair, logits = captures[rank].get("pair"), captures[rank].get("logits")
        if pair is None or logits is None or stop == start:
            continue
        best = int(np.argmax(logits))
        found, right = int(pair[1:].view(np.int32)[0]), start + best
        same_value = _same(pair[:1], logits[best : best + 1])
        if found == right and same_value:
            continue
        return Divergence(
            op="sample",
            rank=rank,
            stage=layout.pp - 1,
            tp_index=tp_index,
            position=position,
            what="pair",
            place=f"{'id' if same_value else 'value'} of its best logit",
            index=(int(same_value),),
            expected=np.float32(right) if same_value else logits[best],
            found=np.float32(found) if same_value else pair[0],
            differing=1 + (found != right and not same_value),
            elements=2,
            ulp=None,
            note=f"its best logit is that of vocabulary id {right}, it sent id {found}",
        )
    return None


def _wrong_draw(run: Run, position: int, found: int, right: int) -> Divergence:
    """The sampler drew another token from the right logits."""
    rank = run.layout.sampler
    stage, tp_index = run.layout.coordinates(rank)
    return Divergence(
        op="sample",
        rank=rank,
        stage=stage,
        tp_index=tp_index,
        position=position - 1,
        what="token",
        place=f"token of position {position}",
        index=(position,),
        expected=np.float32(right),
        found=np.float32(found),
        differing=1,
        elements=1,
        ulp=None,
        note=f"token {found} was drawn where {right} is right, from the same logits",
    )


def _with_replayed_logit(served: Served, found: Divergence, right: Arrays) -> Divergence:
    """Only the logits around one vocabulary id are replayed: a head of all of them is long."""
    vocabulary_id = int(found.place.rsplit(" ", 1)[-1])
    start = vocabulary_id // VOCAB_ROWS * VOCAB_ROWS
    stop = min(start + VOCAB_ROWS, served.config.vocab)
    replayed = replay_head(served, right["x_head"], (start, stop))
    if _same(replayed, np.ascontiguousarray(right["logits"][start:stop])):
        return found
    note = "the unsplit run's logits differ from the reference body's"
    return replace(found, expected=replayed[vocabulary_id - start], note=note)


def _located(
    served: Served, suspect: Run, truth: Run, target: Target
) -> Divergence | Target | None:
    """The first difference at a target; another target if the fault lies before it."""
    right = _detail(truth, target)[0]
    captures = _detail(suspect, target)
    tokens = [int(each["token"][0]) for each in (captures[0], right)]
    if tokens[0] != tokens[1]:
        return _other_token(suspect, target.position, *tokens)
    layer = _first_layer(suspect.layout, [each["trail"] for each in captures], right["trail"])
    if layer is not None and layer < target.layer:
        return replace(target, layer=layer)
    whole = unsplit_layout(served)
    for point in points(served, whole, target, [right], right):
        found = _divergence(point, whole, target.position)
        if found is not None:
            note = "the unsplit run itself differs from the reference body"
            return replace(found, note=f"{note}; {found.note}" if found.note else note)
    for point in points(served, suspect.layout, target, captures, right):
        found = _divergence(point, suspect.layout, target.position)
        if found is not None:
            return _with_replayed_logit(served, found, right) if found.what == "logit" else found
    return None if layer is None or layer == target.layer else replace(target, layer=layer)


def first_divergence(served: Served, suspect: Run, truth: Run) -> Divergence | None:
    """The first op, on the first rank, whose bits are not the unsplit run's; None if all agree.

    truth: the same tokens at the same positions on one rank. Every residual of both runs is
    compared, which takes positions x layers x hidden x 4 bytes a rank in memory.

    Held by: test_divergence.py, test_divergence_faults.py.
    """
    return _followed(served, suspect, truth, _first_target(suspect, truth))


def _followed(
    served: Served, suspect: Run, truth: Run, target: Target | Divergence | None
) -> Divergence | None:
    """From where a residual or logit differs to the op that is at fault, which may lie before."""
    set_control_word()  # the replay computes here
    kept: Divergence | None = None
    tried: set[Target] = set()
    while isinstance(target, Target) and target not in tried:
        tried.add(target)
        with np.errstate(over="ignore", invalid="ignore"):  # a fault may be an overflow
            found = _located(served, suspect, truth, target)
        if isinstance(found, Divergence) and found.kv_position is not None:
            # was that row right when it was written?
            kept = found
            found = Target(position=found.kv_position, layer=int(found.op.split(".")[1]))
        target = found
    return target if isinstance(target, Divergence) else kept


@dataclass(frozen=True)
class Parted:
    """What a cell came to that was run again. found: the first op that differs, if one was named.

    repeats: whether its logits or tokens were again not those of the unsplit run.
    """

    found: Divergence | None
    repeats: bool

    def sentence(self) -> str:
        """For people. Held by: test_parting.py."""
        if self.found is not None:
            return self.found.sentence()
        if not self.repeats:
            return "it did not repeat"
        return (
            "it differs again, but everything that was looked at on its ranks is right: no op can "
            "be named"
        )


def cell_divergence(
    served: Served,
    group: RankGroup,
    model: Model,
    cell: Cell,
    *,
    epochs: Iterator[int],
    neighbour: int | None = None,
    want_logits: bool = True,
    deadline_s: float = DEADLINE_S,
) -> Parted:
    """Where a cell first parts from its unsplit run, both run again as epochs of `group`.

    neighbour: not the request but that one of its batch, which is held against itself alone.
    Without `want_logits` the cell's ranks exchange pairs, and tokens are compared.
    """
    reads, whole = (model, cell.unsplit()) if neighbour is None else alone(model, cell, neighbour)
    given: list[Answer] = []
    right: list[Answer] = []
    suspect = cell_run(
        group,
        model,
        cell,
        epochs=epochs,
        neighbour=neighbour,
        want_logits=want_logits,
        answers=given,
        deadline_s=deadline_s,
    )
    truth = cell_run(group, reads, whole, epochs=epochs, answers=right, deadline_s=deadline_s)
    found = first_divergence(served, suspect, truth)
    compared = slice(0 if want_logits else 1, 2)
    repeats = {answer[compared] for answer in given} != {answer[compared] for answer in right}
    return Parted(found, repeats)


def cell_run(
    group: RankGroup,
    model: Model,
    cell: Cell,
    *,
    epochs: Iterator[int],
    neighbour: int | None = None,
    want_logits: bool = True,
    answers: list[Answer] | None = None,
    deadline_s: float = DEADLINE_S,
) -> Run:
    """A cell as a `Run`, each time as the next epoch of `group`.

    neighbour: whose rows are looked at, if not the request's own. answers: gets what the one that
    is looked at came to, each time.
    """

    def start(capture: Capture) -> None:
        outcome = run_cell(
            group,
            model,
            cell,
            epoch=next(epochs),
            want_logits=want_logits,
            capture=capture,
            deadline_s=deadline_s,
        )
        mine = outcome if neighbour is None else outcome.others[neighbour]
        if answers is not None:
            answers.append((mine.digest, mine.tokens))

    return Run(cell.layout(model), batch_order(cell).index(neighbour), start)
