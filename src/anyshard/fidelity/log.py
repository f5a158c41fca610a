"""The front's half of recording: sums the digests of all ranks, and keeps them by request.

Each rank hashes its own part of an output; parts add up modulo 2^64 (docs/numerics.md, Digests).
What several ranks hold alike is compared besides (`agreement.py`), which changes no digest. Rows
are only laid by, and summed many at a time: the front shares its processors with the ranks. Memory
for a request is taken when it begins to run, and handed over when it has ended. Knows nothing of
files or models.

Shapes: P positions that ran, L layers of the model, E tokens emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from anyshard.config import ModelConfig
from anyshard.fidelity.agreement import Agreement, Disagreement
from anyshard.model import Program
from anyshard.op import LAYER_POINTS
from anyshard.ops.digest import U64

__all__ = ["DigestLog", "RecordedRow", "RunDigests", "digest_bytes", "laid_by_bytes"]

_ROWS_TOGETHER: Final = 256
_NO_FAULT: Final = np.uint64(2**64 - 1)  # after every code


@dataclass(frozen=True)
class RunDigests:
    """Digests of one request: embed [P], layers [P, L, points of a layer], logits [E]; and the
    first place at which ranks held different bits of what they should hold alike, if there is one.

    Position p holds token p of prompt and answer; the last emitted token never runs. logits[i] are
    those that emitted token i was drawn from. Points: `model.LAYER_POINTS`.
    """

    embed: U64
    layers: U64
    logits: U64
    disagreement: Disagreement | None = None


class RecordedRow(msgspec.Struct, frozen=True):
    """A row of a step: whose it is, its position, whether it has logits, which token those gave
    (None: nothing was drawn), and whether to keep it: what failed is not, nor what follows it."""

    request_id: int
    position: int
    through_head: bool
    emitted: int | None
    is_kept: bool = True


class DigestLog:
    """Digests of the requests of an engine that are opened and not yet taken.

    `programs`: of all ranks, in rank order. rows_max: of a step. Held by: test_record.py.
    """

    def __init__(self, programs: Sequence[Program], *, rows_max: int) -> None:
        self._programs = programs
        room = max(rows_max, _ROWS_TOGETHER)
        self._parts = [np.zeros((room, each.record_columns), np.uint64) for each in programs]
        self._rows: list[tuple[RecordedRow, int]] = []  # and the row that has its logits' digest
        self._num_layers = programs[0].config.num_layers
        self._runs: dict[int, RunDigests] = {}
        self._num_positions: dict[int, int] = {}
        self._agreement = Agreement(programs)
        self._disagreements: dict[int, Disagreement] = {}
        self._fault_columns = [each.record_columns - 1 for each in programs]

    def open(self, request_id: int, *, positions: int, emitted: int) -> None:
        """Make room for a request: the most positions that it can run, and tokens it can emit."""
        self._runs[request_id] = RunDigests(
            np.zeros(positions, np.uint64),
            np.zeros((positions, self._num_layers, len(LAYER_POINTS)), np.uint64),
            np.zeros(emitted, np.uint64),
        )
        self._num_positions[request_id] = 0

    def add(self, rows: Sequence[RecordedRow], parts: Sequence[U64]) -> None:
        """Take a step. parts: of each rank uint64[rows, record_columns of its program], or more;
        the column of the logits holds in row i those of the i-th row that went through the head."""
        if len(self._rows) + len(rows) > len(self._parts[0]):
            self._sum_up()
        first = in_head = len(self._rows)
        for mine, part in zip(self._parts, parts, strict=True):
            mine[first : first + len(rows)] = part[: len(rows), : mine.shape[1]]
        for at in rows:
            self._rows.append((at, in_head))
            in_head += at.through_head

    def _sum_up(self) -> None:
        """Give every row that has been laid by to its run."""
        rows = [at for at, _ in self._rows]
        parts = [part[: len(rows)] for part in self._parts]
        self._compare_ranks(rows, parts)
        embed, layers, logits = self._whole(len(rows), parts)
        for row, (at, in_head) in enumerate(self._rows):
            run = self._runs.get(at.request_id)
            if run is None:  # it has ended, and was taken, while this row was under way
                assert not at.is_kept and at.emitted is None
                continue
            if at.is_kept:
                run.embed[at.position] = embed[row]
                run.layers[at.position] = layers[row]
                self._num_positions[at.request_id] = at.position + 1
            if at.emitted is not None:
                run.logits[at.emitted] = logits[in_head]
        self._rows.clear()

    def _compare_ranks(self, rows: Sequence[RecordedRow], parts: Sequence[U64]) -> None:
        found = self._agreement.disagreements([row.position for row in rows], parts)
        for row, disagreement in found.items():
            at = rows[row]
            if at.is_kept:  # rows of a request come in the order of their positions
                self._disagreements.setdefault(at.request_id, disagreement)

    def faults(self, parts: Sequence[U64]) -> list[int]:
        """The earliest fault code of each row of a step on any rank, 0 where there is none."""
        codes = np.stack(
            [part[:, column] for column, part in zip(self._fault_columns, parts, strict=True)]
        )
        if not codes.any():
            return [0] * codes.shape[1]
        earliest = np.where(codes == 0, _NO_FAULT, codes).min(axis=0)
        return [0 if code == _NO_FAULT else int(code) for code in earliest]

    def _whole(self, rows: int, parts: Sequence[U64]) -> tuple[U64, U64, U64]:
        embed, logits = np.zeros(rows, np.uint64), np.zeros(rows, np.uint64)
        layers = np.zeros((rows, self._num_layers, len(LAYER_POINTS)), np.uint64)
        for program, part in zip(self._programs, parts, strict=True):
            start, stop = program.layers
            mine = part[:, : program.digest_columns]
            embed += mine[:, 0]
            layers[:, start:stop] += mine[:, 1:-1].reshape(rows, stop - start, len(LAYER_POINTS))
            logits += mine[:, -1]
        return embed, layers, logits

    def take(self, request_id: int, *, emitted: int) -> RunDigests:
        """What was recorded of a request that emitted so many tokens; it is forgotten here."""
        self._sum_up()
        run, positions = self._runs.pop(request_id), self._num_positions.pop(request_id)
        disagreement = self._disagreements.pop(request_id, None)
        return RunDigests(
            run.embed[:positions], run.layers[:positions], run.logits[:emitted], disagreement
        )


def laid_by_bytes(programs: Sequence[Program], *, rows_max: int) -> int:
    """What the log takes for rows of steps that have not been summed, once."""
    columns = sum(each.record_columns for each in programs)
    return 8 * columns * max(rows_max, _ROWS_TOGETHER)


def digest_bytes(config: ModelConfig) -> int:
    """What the log holds of a position and of the token drawn there."""
    return 8 * (2 + config.num_layers * len(LAYER_POINTS))
