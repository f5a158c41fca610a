"""Cells against the unsplit run, bit by bit, each beside its witnesses.

    checker = Checker(group, model, request)
    for cell in cells:
        result = checker.check(cell)

What is compared are logits: of every prompt position asked for, and of every token emitted. The
other requests of a batch are held against what each gives alone and unsplit, and once for every cut
of the vocabulary the tokens are too that ranks choose where nobody asks for logits. All cells run
as epochs of one loaded rank group, whose ranks run `naive.rank_of_any_order`.

A *witness* is measured along one axis at a time: the share of logits that change when the axis
alone is split and both sides sum in the order of an ordinary engine (`verify/naive.py`). A cell
has one for every axis that it splits; where one is 0, the equality along that axis shows nothing,
and a cell of which all are 0 is `vacuous`.
A cell that only places work (pages, bodies, wires) has no order to change.

A cell whose ranks are lost is a row too, and the cells after it run. Where a difference comes from
is another module's question (`divergence.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from anyshard.errors import AnyshardError
from anyshard.launcher import RankGroup
from anyshard.launcher.seat import REFUSALS, error_text
from anyshard.layout import Span
from anyshard.ops.exact import F32
from anyshard.trace import Run
from anyshard.verify.cells import (
    DEADLINE_S,
    WHOLE,
    Axis,
    Cell,
    Model,
    Neighbour,
    Outcome,
    alone,
    first_tokens,
    forced_logits,
    neighbour_prompt,
    run_cell,
)
from anyshard.verify.naive import ORDERS, Order
from anyshard.verify.prompt import hashed_tokens
from anyshard.verify.result import CellResult, Difference, Unlike, Verdict, unlike

__all__ = [
    "Checker",
    "RequestShape",
    "why",
    "witness_axes",
    "witness_cells",
]

_Cut = tuple[tuple[Span, ...], str]  # vocabulary rows of each rank of a stage, and the wire

WITNESS_PROMPT = 70  # tokens of a witness run: three blocks of keys, whatever the cell itself runs
WITNESS_TOKENS = 4
ROWS_OF_SECOND_CHUNK = 7  # of a witness run whose chunk is longer than its prompt would be
COMPARED_BYTES = 1 << 27  # of the logits that a run keeps; more positions are left out


@dataclass(frozen=True, kw_only=True)
class RequestShape:
    """What every cell runs, unless it says less: prompt tokens, then tokens decoded one by one."""

    prompt_tokens: int
    decode_tokens: int

    def of(self, cell: Cell, vocab: int) -> Cell:
        """The cell with this request, and as many prompt positions compared as are kept.

        The token that the last step emits is not fed back, so it adds no position. Only a cell that
        is_short, which its name says, runs less of it. Held by: test_check.py.
        """
        prompt, emitted = self.prompt_tokens, self.decode_tokens + 1
        if cell.is_short:
            prompt, emitted = min(cell.prompt_tokens, prompt), min(cell.num_tokens, emitted)
        most = max(0, COMPARED_BYTES // (4 * vocab) - emitted)
        return replace(
            cell,
            prompt_tokens=prompt,
            num_tokens=emitted,
            prompt_logits=min(prompt - 1, most),
        )


def why(error: BaseException) -> str:
    """Its sentence, and below it its notes: of a lost rank, the end of the log."""
    return "\n".join([error_text(error), *getattr(error, "__notes__", [])])


def witness_axes(cell: Cell) -> tuple[Axis, ...]:
    """Those that the row of the cell has a share for."""
    axes = tuple(witness_cells(cell))
    return axes if cell.chunk == WHOLE or "chunk" in axes else (*axes, "chunk")


def witness_cells(cell: Cell) -> dict[Axis, Cell]:
    """For every axis that the cell splits in which an order could show: that axis alone.

    The request is cut short, but never below two chunks. Held by: test_verify.py.
    """
    parts: dict[Axis, Cell] = {}
    if cell.tp > 1 or cell.heads is not None:
        parts["tp"] = Cell(axis="tp", tp=cell.tp, heads=cell.heads, kv_shard=cell.kv_shard)
    if cell.pp > 1 or cell.layers is not None:
        parts["pp"] = Cell(axis="pp", pp=cell.pp, layers=cell.layers)
    if cell.chunk < cell.prompt_tokens:
        parts["chunk"] = Cell(axis="chunk", chunk=cell.chunk)
    if cell.threads > 1:
        parts["threads"] = Cell(axis="threads", threads=cell.threads)
    if cell.batch > 1:
        parts["batch"] = Cell(axis="batch", batch=cell.batch)
    count = min(cell.num_tokens, WITNESS_TOKENS)
    second = 0 if cell.chunk == WHOLE else cell.chunk + ROWS_OF_SECOND_CHUNK
    lengths = {axis: max(WITNESS_PROMPT, second if axis == "chunk" else 0) for axis in parts}
    return {
        axis: replace(each, num_tokens=count, prompt_tokens=min(cell.prompt_tokens, lengths[axis]))
        for axis, each in parts.items()
    }


class Checker:
    """Runs cells of one model in one loaded group, an epoch each; unsplit runs only once.

    epochs: the numbers left for other runs of the group. on_step: called after every run. on_trace:
    hears what ranks did in those of the cells and unsplit ones.
    deadline_s: how long a rank may give no sign of life.
    """

    def __init__(
        self,
        group: RankGroup,
        model: Model,
        request: RequestShape,
        *,
        on_step: Callable[[], None] = lambda: None,
        deadline_s: float = DEADLINE_S,
        on_trace: Callable[[Run], None] | None = None,
    ) -> None:
        self.group, self.model, self.request = group, model, request
        self._on_trace = on_trace
        self._on_step, self.epochs = on_step, itertools.count(1)
        self._deadline_s = deadline_s
        self._unsplit: dict[Cell, Outcome] = {}
        self._forced: dict[tuple[Order, Cell], F32] = {}
        self._witness: dict[Cell, float] = {}
        self._alone: dict[tuple[int, int], Neighbour] = {}
        self._paired: set[_Cut] = set()

    def steps(self, cells: list[Cell]) -> int:
        """How often on_step will be called by `baseline` and a `check` of each of `cells`."""
        base = self.asked(Cell(axis="base"))
        asked = [self.asked(cell) for cell in cells]
        witnesses = {part for cell in asked for part in witness_cells(cell).values()}
        whole = {cell.unsplit() for cell in (base, *asked)}
        others = {(cell.num_tokens, i) for cell in asked for i in range(cell.batch - 1)}
        cuts = {self._cut(cell) for cell in asked} - {None}
        return len(cells) + len(whole) + len(witnesses) + len(others) + len(cuts)

    def asked(self, cell: Cell) -> Cell:
        """The cell as it is run, with the request of this grid."""
        return self.request.of(cell, self.model.config.vocab)

    def unsplit(self, cell: Cell) -> Outcome:
        """The unsplit run of a cell's request. Raises: AnyshardError if it fails by itself."""
        whole = cell.unsplit()
        if whole not in self._unsplit:
            outcome = self._run(whole)
            if outcome.fault is not None:
                raise AnyshardError(
                    "the unsplit run itself fails, so there is nothing to compare: a value left "
                    f"the range of float32 in {outcome.fault}"
                )
            self._unsplit[whole] = outcome
        return self._unsplit[whole]

    def baseline(self) -> CellResult:
        """The row of the unsplit run itself. Raises: AnyshardError, PeerLost."""
        cell = self.asked(Cell(axis="base"))
        return replace(self._result(cell, self.unsplit(cell), {}), cell="unsplit")

    def check(self, cell: Cell) -> CellResult:
        """Run the cell, and what was not run before of all that it is held against.

        That is its unsplit run, its neighbours alone, tokens without logits, and its witnesses.
        Ranks that are lost, or that the system refuses, make a row that says so; the group may
        run the next cell all the same. Held by: test_check.py.
        """
        cell = self.asked(cell)
        try:
            self.unsplit(cell)
            outcome = self._run(cell)
        except (AnyshardError, *REFUSALS) as error:
            return self._lost(cell, why(error))
        lost: list[str] = []
        self._run_alone(cell, outcome, lost)
        pair = self._wrong_pair(cell, lost) if outcome.fault is None else None
        parts = witness_cells(cell)
        for axis, part in parts.items():
            if part not in self._witness:
                with self._beside(lost, f"in its witness along {axis}"):
                    self._witness[part] = self._measure(part)
        measured = {a: self._witness[part] for a, part in parts.items() if part in self._witness}
        if cell.chunk != WHOLE and "chunk" not in parts:
            measured["chunk"] = 0.0  # it was to be cut, and the prompt is too short for that
        return self._result(cell, outcome, measured, lost=lost[0] if lost else None, pair=pair)

    @contextmanager
    def _beside(self, lost: list[str], what: str) -> Iterator[None]:
        """A run besides the cell's own: if it loses ranks, that is noted, and the rest stands."""
        try:
            yield
        except (AnyshardError, *REFUSALS) as error:
            lost.append(f"{what}: {why(error)}")
        else:
            self._on_step()

    def _run_alone(self, cell: Cell, outcome: Outcome, lost: list[str]) -> None:
        """Every neighbour by itself and unsplit, if it was not run before."""
        for index in outcome.others:
            if (cell.num_tokens, index) in self._alone or lost:
                continue
            model, whole = alone(self.model, cell, index)
            epoch, deadline_s = next(self.epochs), self._deadline_s
            with self._beside(lost, f"in the run of neighbour {index} alone"):
                got = run_cell(self.group, model, whole, epoch=epoch, deadline_s=deadline_s)
                self._alone[cell.num_tokens, index] = Neighbour(got.digest, got.tokens)

    def _cut(self, cell: Cell) -> _Cut | None:
        """How ranks of the cell share the vocabulary; None where they exchange no pairs."""
        layout = cell.layout(self.model)
        is_cut = layout.tp > 1 and cell.sampling.greedy
        return (layout.vocab, cell.comm) if is_cut else None

    def _wrong_pair(self, cell: Cell, lost: list[str]) -> Difference | None:
        """A token that ranks choose wrongly where nobody asks for logits; once for each cut.

        For every rank the shortest prefix of the prompt is run whose next token is one of its own
        rows: otherwise the ids of that rank would never be looked at.
        """
        cut, whole = self._cut(cell), self.unsplit(cell)
        if cut is None or cut in self._paired:
            return None
        start = cell.prompt_tokens - cell.prompt_logits  # the shortest prefix that is known
        best = whole.logits[: cell.prompt_logits + 1].argmax(axis=1)
        right: dict[int, int] = {}
        for low, high in cut[0]:
            rows = np.flatnonzero((best >= low) & (best < high))[:1]
            right |= {start + int(row): int(best[row]) for row in rows}
        lengths = sorted(right)
        with self._beside(lost, "in its run without logits"):
            found = first_tokens(
                self.group,
                self.model,
                cell,
                lengths,
                epoch=next(self.epochs),
                deadline_s=self._deadline_s,
            )
            self._paired.add(cut)
            for length, token in zip(lengths, found, strict=True):
                if token != right[length]:
                    return Difference(
                        what="pair",
                        position=length - 1,
                        token_id=-1 if token is None else token,
                        unsplit=str(right[length]),
                        cell="nothing" if token is None else str(token),
                    )
        return None

    def _run(self, cell: Cell) -> Outcome:
        epoch, deadline_s = next(self.epochs), self._deadline_s
        outcome = run_cell(
            self.group,
            self.model,
            cell,
            epoch=epoch,
            deadline_s=deadline_s,
            on_trace=self._on_trace,
        )
        self._on_step()
        return outcome

    def _lost(self, cell: Cell, reason: str) -> CellResult:
        return CellResult(
            cell=cell.name,
            profile_hash=self.model.profile.sha256(),
            positions=0,
            vocab=self.model.config.vocab,
            digest="",
            elements_differing=None,
            max_ulp=None,
            tokens_equal=None,
            verdict="lost",
            witness={},
            first_divergence=None,
            where=None,
            neighbours="",
            neighbour=None,
            fault=None,
            lost=reason,
            wire_bytes_per_token=0.0,
            weight_bytes=[],
            kv_bytes=[],
            prefill_tokens_per_s=0.0,
            decode_tokens_per_s=0.0,
            speed_ratio=0.0,
            seconds=0.0,
        )

    def _result(
        self,
        cell: Cell,
        outcome: Outcome,
        witness: dict[Axis, float],
        *,
        lost: str | None = None,
        pair: Difference | None = None,
    ) -> CellResult:
        whole = self.unsplit(cell)
        found: Unlike | None = None
        if outcome.logits.shape == whole.logits.shape:
            found = unlike(outcome.logits, whole.logits)
        differing = whole.logits.size if found is None else found.count
        tokens_equal = outcome.tokens == whole.tokens and pair is None
        first = None if found is None else self._difference(cell, outcome, found) or pair
        where: str | None = None
        if first is not None and first.what == "token":
            where = f"sample on rank {cell.layout(self.model).sampler}, from the same logits"
        others = self._unlike_alone(cell, outcome)
        verdict: Verdict = "equal"
        if differing or not tokens_equal or others:
            verdict = "differs"
        elif lost is not None:
            verdict = "lost"
        elif witness and not any(witness.values()):
            verdict = "vacuous"
        return CellResult(
            cell=cell.name,
            profile_hash=self.model.profile.sha256(),
            positions=len(whole.logits),
            vocab=self.model.config.vocab,
            digest=outcome.digest,
            elements_differing=differing,
            max_ulp=None if found is None else found.ulp,
            tokens_equal=tokens_equal,
            verdict=verdict,
            witness=witness,
            first_divergence=first,
            where=where,
            neighbours=self._neighbours_text(outcome, others),
            neighbour=min(others, default=None),
            fault=outcome.fault,
            lost=lost,
            wire_bytes_per_token=outcome.wire_bytes_per_token,
            weight_bytes=[view.weight_bytes for view in outcome.statuses],
            kv_bytes=[view.kv_bytes for view in outcome.statuses],
            prefill_tokens_per_s=outcome.prefill_tokens_per_s,
            decode_tokens_per_s=outcome.decode_tokens_per_s,
            speed_ratio=outcome.decode_tokens_per_s / max(whole.decode_tokens_per_s, 1e-9),
            seconds=outcome.seconds,
        )

    def _difference(self, cell: Cell, outcome: Outcome, found: Unlike) -> Difference | None:
        """The first logit, or a token that was drawn before it from logits that are equal."""
        whole = self.unsplit(cell)
        start = cell.prompt_tokens - 1 - cell.prompt_logits
        drawn = zip(outcome.tokens, whole.tokens, strict=True)
        for row, (mine, right) in enumerate(drawn, start=cell.prompt_logits):
            if found.first is not None and found.first[0] <= row:
                break
            if mine != right:
                return Difference(
                    what="token",
                    position=start + row,
                    token_id=mine,
                    unsplit=str(right),
                    cell=str(mine),
                )
        if found.first is None:
            return None
        row, token_id = found.first
        return Difference(
            what="logit",
            position=start + row,
            token_id=token_id,
            unsplit=float(whole.logits[row, token_id]).hex(),
            cell=float(outcome.logits[row, token_id]).hex(),
        )

    def _unlike_alone(self, cell: Cell, outcome: Outcome) -> list[int]:
        """Neighbours whose logits or tokens are not those that they have alone."""
        known = (
            (i, got, self._alone.get((cell.num_tokens, i))) for i, got in outcome.others.items()
        )
        return [index for index, got, right in known if right is not None and got != right]

    def _neighbours_text(self, outcome: Outcome, differing: list[int]) -> str:
        if not differing:
            return ""
        first, count = min(differing), len(outcome.others)
        length = len(neighbour_prompt(self.model, first))
        return (
            f"{len(differing)} of {count} neighbours differ from what each gives alone and "
            f"unsplit; the first is neighbour {first}, of {length} prompt tokens"
        )

    def _measure(self, part: Cell) -> float:
        whole = self._forced_logits(part.unsplit(), part.axis)
        split = self._forced_logits(part, part.axis)
        unlike = np.count_nonzero(split.view(np.uint32) != whole.view(np.uint32))
        return float(unlike) / split.size

    def _forced_logits(self, cell: Cell, axis: Axis) -> F32:
        """Of a cell whose ranks sum in the order named after `axis`, fed tokens of no meaning."""
        assert axis in ORDERS
        order: Order = axis  # type: ignore[assignment]  # the names are the same
        known = self._forced.get((order, cell))
        if known is not None:
            return known
        tokens = hashed_tokens(cell.num_tokens, self.model.config.vocab, seed=0)
        found = forced_logits(
            self.group,
            self.model,
            cell,
            tokens,
            order=order,
            epoch=next(self.epochs),
            deadline_s=self._deadline_s,
        )
        if cell.axis == "base":  # many cells are held against it
            self._forced[order, cell] = found
        return found
