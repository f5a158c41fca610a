"""Cells against the unsplit run, bit by bit, each beside its witnesses.

    checker = Checker(group, model, request)
    for cell in cells:
        result = checker.check(cell)

What is compared are logits: of every prompt position asked for, and of every token emitted. All
cells run as epochs of one loaded rank group, whose ranks run `naive.rank_of_any_order`.

A *witness* is measured along one axis at a time: the share of logits that change when the axis
alone is split and both sides sum in the order of an ordinary engine (`verify/naive.py`). A cell
has one for every axis that it splits; where one is 0, the equality along that axis shows nothing.
A cell that only places work (pages, bodies, wires) has no order to change.

A cell whose ranks are lost is a row too, and the cells after it run. Where a difference comes from
is another module's question (`divergence.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from anyshard.errors import AnyshardError
from anyshard.launcher import RankGroup
from anyshard.launcher.seat import REFUSALS, error_text
from anyshard.ops.exact import F32
from anyshard.verify.cells import (
    DEADLINE_S,
    WHOLE,
    Axis,
    Cell,
    Model,
    Outcome,
    forced_logits,
    run_cell,
)
from anyshard.verify.naive import ORDERS, Order
from anyshard.verify.prompt import hashed_tokens

__all__ = [
    "CellResult",
    "Checker",
    "Difference",
    "RequestShape",
    "Unlike",
    "max_ulp",
    "unlike",
    "why",
    "witness_cells",
]

Verdict = Literal["equal", "vacuous", "differs", "lost"]

WITNESS_PROMPT = 70  # tokens of a witness run: three blocks of keys, whatever the cell itself runs
WITNESS_TOKENS = 4
COMPARED_BYTES = 1 << 27  # of the logits that a run keeps; more positions are left out


@dataclass(frozen=True, kw_only=True)
class RequestShape:
    """What every cell runs, unless it says less: prompt tokens, then tokens decoded one by one."""

    prompt_tokens: int
    decode_tokens: int

    def of(self, cell: Cell, vocab: int) -> Cell:
        """The cell with this request, and as many prompt positions compared as are kept.

        The token that the last step emits is not fed back, so it adds no position.
        """
        prompt = min(cell.prompt_tokens, self.prompt_tokens)
        emitted = min(cell.num_tokens, self.decode_tokens + 1)
        most = max(0, COMPARED_BYTES // (4 * vocab) - emitted)
        return replace(
            cell,
            prompt_tokens=prompt,
            num_tokens=emitted,
            prompt_logits=min(prompt - 1, most),
        )


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first logit or token that differs, and where the run parts, if that was looked for.

    what "logit": that of `token_id` after `position`, as hex floats. "token": all logits up to
    `position` are equal, and from the last of them another token was drawn; both as ids, and
    `token_id` is the cell's.
    """

    what: Literal["logit", "token"]
    position: int
    token_id: int
    unsplit: str
    cell: str
    where: str | None = None


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """One row of the table.

    positions: logit rows compared, each `vocab` wide. max_ulp: the largest distance of two
    differing logits, counted in floats between them; None if nothing is there to compare. witness:
    by axis, the share of logits that would change, 0..1; empty for a cell that only places work.
    neighbours: other requests of the batch whose logits are not those that they had in an earlier
    cell: how many, of how many, and which cell; empty if none. lost: why ranks were lost, with the
    end of their log; what was not compared then is None, empty or 0.
    Bytes are lists by rank; wire_bytes_per_token is the sum over ranks. tokens_per_s: decoding.
    """

    cell: str
    profile_hash: str
    positions: int
    vocab: int
    digest: str
    elements_differing: int | None
    max_ulp: int | None
    tokens_equal: bool | None
    verdict: Verdict
    witness: dict[Axis, float]
    first_divergence: Difference | None
    neighbours: str
    fault: str | None
    lost: str | None
    wire_bytes_per_token: float
    weight_bytes: list[int]
    kv_bytes: list[int]
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    speed_ratio: float
    seconds: float

    @property
    def ranks(self) -> int:
        """Processes or threads that ran it."""
        return len(self.weight_bytes)


def why(error: BaseException) -> str:
    """Its sentence, and below it its notes: of a lost rank, the end of the log."""
    return "\n".join([error_text(error), *getattr(error, "__notes__", [])])


def max_ulp(a: F32, b: F32) -> int:
    """The largest distance of two floats in the order of all floats; 0 where both are empty.

    -0 and +0 are one apart, though not equal in bits; a NaN counts as beyond infinity.
    Held by: test_verify.py::test_max_ulp_counts_floats.
    """
    first, second = (_ordinal(x) for x in (a, b))
    return int(np.abs(first - second).max(initial=0))


def _ordinal(x: F32) -> np.ndarray:
    bits = np.ascontiguousarray(x).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)


@dataclass(frozen=True)
class Unlike:
    """How many values of two arrays [n, V] differ, by how much, and where first (row, column)."""

    count: int
    ulp: int
    first: tuple[int, int] | None


def unlike(a: F32, b: F32) -> Unlike:
    """Compare two arrays of one shape, bit by bit, in the memory of a few rows.

    Held by: test_check.py.
    """
    count, ulp, first = 0, 0, None
    for row, (mine, other) in enumerate(zip(a, b, strict=True)):
        differs = mine.view(np.uint32) != other.view(np.uint32)
        here = int(np.count_nonzero(differs))
        if here:
            first = first or (row, int(differs.argmax()))
            ulp = max(ulp, max_ulp(mine[differs], other[differs]))
        count += here
    return Unlike(count, ulp, first)


def witness_cells(cell: Cell) -> dict[Axis, Cell]:
    """For every axis that the cell splits in which an order could show: that axis alone.

    The request is cut short, but never below two chunks. Held by: test_verify.py.
    """
    alone: dict[Axis, Cell] = {}
    if cell.tp > 1 or cell.heads is not None:
        alone["tp"] = Cell(axis="tp", tp=cell.tp, heads=cell.heads)
    if cell.pp > 1 or cell.layers is not None:
        alone["pp"] = Cell(axis="pp", pp=cell.pp, layers=cell.layers)
    if cell.chunk < cell.prompt_tokens:
        alone["chunk"] = Cell(axis="chunk", chunk=cell.chunk)
    if cell.threads > 1:
        alone["threads"] = Cell(axis="threads", threads=cell.threads)
    if cell.batch > 1:
        alone["batch"] = Cell(axis="batch", batch=cell.batch)
    count = min(cell.num_tokens, WITNESS_TOKENS)
    return {
        axis: replace(
            each,
            num_tokens=count,
            prompt_tokens=min(cell.prompt_tokens, max(WITNESS_PROMPT, 7 + each.chunk % WHOLE)),
        )
        for axis, each in alone.items()
    }


class Checker:
    """Runs cells of one model in one loaded group, an epoch each; unsplit runs only once.

    epochs: the numbers left for other runs of the group. on_step: called after every run.
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
    ) -> None:
        self.group, self.model, self.request = group, model, request
        self._on_step, self.epochs = on_step, itertools.count(1)
        self._deadline_s = deadline_s
        self._unsplit: dict[Cell, Outcome] = {}
        self._forced: dict[tuple[Order, Cell], F32] = {}
        self._witness: dict[Cell, float] = {}
        self._neighbours: dict[tuple[int, int], tuple[str, str]] = {}

    def steps(self, cells: list[Cell]) -> int:
        """How often on_step will be called by `baseline` and a `check` of each of `cells`."""
        base = self.asked(Cell(axis="base"))
        asked = [self.asked(cell) for cell in cells]
        alone = {part for cell in asked for part in witness_cells(cell).values()}
        whole = {cell.unsplit() for cell in (base, *asked)}
        return len(cells) + len(whole) + len(alone)

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
        return replace(self._result(cell, self.unsplit(cell), {}, None), cell="unsplit")

    def check(self, cell: Cell) -> CellResult:
        """Run the cell, its unsplit run and its witnesses, what of them was not run before.

        Ranks that are lost, or that the system refuses, make a row that says so; the group may
        run the next cell all the same. Held by: test_check.py.
        """
        cell = self.asked(cell)
        try:
            self.unsplit(cell)
            outcome = self._run(cell)
        except (AnyshardError, *REFUSALS) as error:
            return self._lost(cell, why(error))
        lost: str | None = None
        parts = witness_cells(cell)
        for axis, part in parts.items():
            if part in self._witness:
                continue
            try:
                self._witness[part] = self._measure(part)
            except (AnyshardError, *REFUSALS) as error:
                lost = lost or f"in its witness along {axis}: {why(error)}"
            else:
                self._on_step()
        measured = {a: self._witness[part] for a, part in parts.items() if part in self._witness}
        if cell.chunk != WHOLE and "chunk" not in parts:
            measured["chunk"] = 0.0  # it was to be cut, and the prompt is too short for that
        return self._result(cell, outcome, measured, lost)

    def _run(self, cell: Cell) -> Outcome:
        epoch, deadline_s = next(self.epochs), self._deadline_s
        outcome = run_cell(self.group, self.model, cell, epoch=epoch, deadline_s=deadline_s)
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
            neighbours="",
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
        self, cell: Cell, outcome: Outcome, witness: dict[Axis, float], lost: str | None
    ) -> CellResult:
        whole = self.unsplit(cell)
        found: Unlike | None = None
        if outcome.logits.shape == whole.logits.shape:
            found = unlike(outcome.logits, whole.logits)
        differing = whole.logits.size if found is None else found.count
        tokens_equal, neighbours = outcome.tokens == whole.tokens, self._others(cell, outcome)
        verdict: Verdict = "equal"
        if differing or not tokens_equal or neighbours:
            verdict = "differs"
        elif lost is not None:
            verdict = "lost"
        elif 0.0 in witness.values():
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
            first_divergence=None if found is None else self._difference(cell, outcome, found),
            neighbours=neighbours,
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
                sampler = cell.layout(self.model).sampler
                return Difference(
                    what="token",
                    position=start + row,
                    token_id=mine,
                    unsplit=str(right),
                    cell=str(mine),
                    where=f"sample on rank {sampler}, from the same logits",
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

    def _others(self, cell: Cell, outcome: Outcome) -> str:
        """The neighbours are held against the cell that first ran them: none of them is alone."""
        differing, first = 0, ""
        for index, digest in outcome.others.items():
            key = (cell.num_tokens, index)
            known, name = self._neighbours.setdefault(key, (digest, cell.name))
            if digest != known:
                differing, first = differing + 1, first or name
        if not differing:
            return ""
        return f"{differing} of {len(outcome.others)} neighbours differ from those of {first}"

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
