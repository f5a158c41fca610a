"""Bugs in the cut of the vocabulary: rows lost, padded, or numbered from 0 on each rank."""

from __future__ import annotations

from collections.abc import Callable

from anyshard.binder import Binder
from anyshard.op import Op
from anyshard.ops.exact import F32
from anyshard.worker import ROW_SAMPLE, Worker

Run = Callable[[int], None]
PADDED_TO = 128  # rows


class LastRowsDroppedBinder(Binder):
    """The remainder of vocabulary / ranks belongs to nobody: its logits stay zero."""

    def _head(self, op: Op) -> Run:
        head, here, config = super()._head(op), self.w.program, self.w.config
        lost = config.vocab % self.w.comm.tp if here.vocab[1] == config.vocab else 0
        if not lost:
            return head
        shard_RV = self.w.shard_RV

        def run(rows: int) -> None:
            head(rows)
            shard_RV[:rows, -lost:] = 0

        return run


class LastRowsDropped(Worker):
    """See LastRowsDroppedBinder."""

    binder_type = LastRowsDroppedBinder


class PaddingWins(Worker):
    """Shards are padded with rows of zeros, and a padded row is drawn when all logits are below."""

    def _sample(self, flags: list[int]) -> list[F32]:
        logits = super()._sample(flags)
        padded = [stop for start, stop in self.plan.layout.vocab if (stop - start) % PADDED_TO]
        sampled = [row for row, flag in enumerate(flags) if flag & ROW_SAMPLE]
        if self.is_sampler and self.comm.tp > 1 and padded:
            for index, row in enumerate(sampled):
                if self.logits_RV[index].max() < 0:
                    self.drawn[row] = padded[0]
        return logits


class LocalIds(Worker):
    """The (value, id) of a rank's best logit has the row's number on the rank."""

    def _best_here(self, index: int) -> tuple[float, int]:
        value, token = super()._best_here(index)
        return value, token - self.program.vocab[0]
