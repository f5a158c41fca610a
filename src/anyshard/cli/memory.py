"""What a split takes of this host's memory, and whether that is there: one answer for every verb.

Counted before anything is loaded: the weight image, the KV of all sequences in flight, the
buffers that grow with flags, and a lump for each process. Knows programs and plans; reads no
weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from anyshard.errors import LayoutError
from anyshard.host import size_text

if TYPE_CHECKING:
    from anyshard.checkpoint import Checkpoint
    from anyshard.comm.base import CommKind
    from anyshard.model import Program

__all__ = ["DEFAULT_SEQUENCES", "MemoryNeed", "kv_bytes", "memory_need", "pages_in", "tensors_of"]

DEFAULT_SEQUENCES: Final = 32  # of --max-num-seqs
PROCESS_BYTES: Final = 64 << 20  # of a process besides weights and KV; 30 to 79 MB measured
TORCH_BYTES: Final = 200 << 20  # more of a rank that imports torch; 197 MiB measured, resident


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Bytes on this host: `weights` once, the rest over all ranks.

    `kv` holds `num_seqs` sequences of `tokens` tokens; `buffers` are those that grow with
    --chunk, --max-num-seqs and --max-model-len; `processes` are front, launcher and ranks.
    `savers`: flags that were not given, and what is needed with each, for `refuse_over` to name.
    """

    weights: int
    kv: int
    buffers: int
    processes: int
    num_seqs: int
    tokens: int
    savers: tuple[tuple[str, MemoryNeed], ...] = ()
    models: int = 1

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights + self.kv + self.buffers + self.processes

    def plus(self, other: MemoryNeed) -> MemoryNeed:
        """With what the ranks of a draft model take; the sequences are these."""
        return replace(
            self,
            models=self.models + 1,
            weights=self.weights + other.weights,
            kv=self.kv + other.kv,
            buffers=self.buffers + other.buffers,
            processes=self.processes + other.processes,
        )

    def without_front(self) -> MemoryNeed:
        """Of a second launcher, below a front that is counted already."""
        return replace(self, processes=self.processes - PROCESS_BYTES)

    def refuse_over(self, free: int) -> None:
        """Say what is short, and what would help.

        Raises: LayoutError with both numbers if more than `free` bytes are needed.
        Held by: test_admission.py, test_doctor.py.
        """
        if self.total <= free:
            return
        sequences = f"{self.num_seqs} sequence{'s' if self.num_seqs > 1 else ''}"
        raise LayoutError(
            f"{size_text(self.total)} of memory are needed and {size_text(free)} are free "
            f"(weights {size_text(self.weights)}, KV of {sequences} of {self.tokens} tokens "
            f"{'in both models ' * (self.models > 1)}{size_text(self.kv)}, buffers and processes "
            f"{size_text(self.buffers + self.processes)}); {self._remedy(free)}"
        )

    def _remedy(self, free: int) -> str:
        if self.weights + self.processes > free:
            if self.processes > max(self.weights, 3 * PROCESS_BYTES):
                return "take fewer ranks (-tp, -pp), or end other programs"
            return f"end other programs, {self._leave}or take a smaller model"
        flags = ["--max-model-len"]
        flags += ["--max-num-seqs"] if self.num_seqs > 1 else []
        flags += ["--chunk"] if self.buffers > self.kv else []
        named = [
            f"{flag} (KV {size_text(need.kv)})"
            for flag, need in self.savers
            if need.total <= free or (self.kv >= self.buffers and need.total < self.total)
        ]
        take = f"take {' or '.join(named)}, " if named else ""
        return (
            f"lower {' or '.join(flags)}, {take}end other programs, {self._leave}or take a smaller "
            "model"
        )

    @property
    def _leave(self) -> str:
        return "leave --speculate out, " if self.models > 1 else ""


def memory_need(
    checkpoint: Checkpoint,
    programs: Sequence[Program],
    *,
    tokens: int,
    num_seqs: int,
    chunk: int,
    kv_pages: int | None = None,
    micro_batches: int | None = None,
    comm: Literal["auto"] | CommKind = "auto",
    record: bool = False,
    prompt_logits: int = 0,
    hosts: Sequence[int] = (),
    host: int = 0,
    drafts: int = 0,
    windows: int = 1,
) -> MemoryNeed:
    """What ranks of `programs` take for `num_seqs` sequences of `tokens` tokens at once.

    drafts: rows of those in a frame, windows: frames of them. hosts: of each rank, where there are
    several; what is counted
    is of `host`, which loads what its ranks read.
    kv_pages: most of --kv-memory. micro_batches: those that take turns. comm: the wire, for what
    the ranks import. prompt_logits: prompt tokens whose logits are asked for. record: at most
    `num_seqs` runs are held, each until it has ended.

    KV counts in full, though its pages are touched only as tokens arrive: what has been admitted
    must not fail for memory later. Held by: test_admission.py (the sizes of a run).
    """
    from anyshard.checkpoint import image_directory
    from anyshard.comm.region import RegionLayout
    from anyshard.epoch import EngineOptions, plan_epoch
    from anyshard.fidelity.log import digest_bytes, laid_by_bytes
    from anyshard.worker import buffer_bytes

    options = EngineOptions(
        max_model_len=tokens,
        max_num_seqs=num_seqs,
        chunk=min(chunk, tokens),
        threads=1,
        record=record,
        prompt_logits=prompt_logits,
        kv_pages=kv_pages,
        micro_batches=micro_batches,
        drafts=drafts,
        windows=windows,
    )
    plan = plan_epoch(list(programs), options, body="scalar", threads=1, spin=False)
    arithmetic, sources = programs[0].profile.arithmetic, checkpoint.sources
    if hosts:
        programs = [each for each in programs if hosts[each.rank] == host]
        if not record:
            names = tensors_of(programs)
            sources = {name: source for name, source in sources.items() if name in names}
    _, weights = image_directory(checkpoint.config, sources, arithmetic)
    return MemoryNeed(
        weights=weights,
        kv=sum(_kept_bytes(each, plan.ranks.num_pages, tokens=tokens) for each in programs),
        buffers=RegionLayout.of(plan.sizes).total_bytes
        + sum(buffer_bytes(each, plan.ranks) for each in programs)
        + (num_seqs * tokens * digest_bytes(checkpoint.config) if record else 0)
        + (laid_by_bytes(programs, rows_max=plan.limits.rows_max) if record else 0),
        processes=(len(programs) + 2) * PROCESS_BYTES
        + (len(programs) * TORCH_BYTES if comm == "torch" or hosts else 0),
        num_seqs=num_seqs,
        tokens=tokens,
    )


def tensors_of(programs: Sequence[Program]) -> frozenset[str]:
    """Names of those that these ranks read."""
    return frozenset(weight.name for each in programs for op in each.ops for weight in op.weights)


def _page_bytes(part: Program) -> int:
    """Bytes of one rank for a page that it keeps."""
    from anyshard.kv import rank_page_bytes

    spans = {"layers": part.layers, "kv_heads": part.kv_heads}
    return rank_page_bytes(part.config, part.profile, **spans)


def _kept_bytes(part: Program, num_pages: int, *, tokens: int) -> int:
    """Bytes of one rank for its part of so many pages, of sequences of `tokens` tokens."""
    from anyshard.kv import num_local_pages
    from anyshard.pages import pages_for

    blocks = pages_for(tokens, block=part.profile.kv_block)
    kept = num_local_pages(part.stripes, num_pages=num_pages, sequence_blocks=blocks)
    return _page_bytes(part) * kept


def kv_bytes(part: Program, *, tokens: int) -> int:
    """Bytes of one rank for one sequence, in whole pages: those of its stripes."""
    from anyshard.pages import pages_for
    from anyshard.stripes import blocks_of

    num_pages = blocks_of(part.stripes, pages_for(tokens, block=part.profile.kv_block))
    return _page_bytes(part) * num_pages


def pages_in(programs: Sequence[Program], kv_memory: int) -> int:
    """Pages that the ranks together hold in so many bytes.

    Raises: LayoutError with both numbers if not one.
    """
    layout = programs[0].layout
    of_all = sum(  # of ranks that split the sequence, one of a stage keeps it
        _page_bytes(each) for each in programs if not layout.splits_sequence or each.tp_index == 0
    )
    if kv_memory < of_all:
        raise LayoutError(
            f"--kv-memory of {kv_memory} bytes holds no page: {programs[0].profile.kv_block} "
            f"tokens take {of_all} bytes on these ranks"
        )
    return kv_memory // of_all
