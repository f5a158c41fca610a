"""What `--speculate` asks for: drafts of n-grams, or of a second model on a rank of its own.

A draft model is opened with the model and refused before either is loaded. Knows flags; nothing of
prompts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyshard.cli.flags import SpeculationFlags, SplitFlags
from anyshard.cli.hosts import closed
from anyshard.cli.memory import MemoryNeed, memory_need
from anyshard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyshard.checkpoint import Checkpoint
    from anyshard.checkpoint.cache import ImageCache
    from anyshard.config import ModelConfig, Profile
    from anyshard.draft_model import DraftFigures, ModelDrafter
    from anyshard.engine import Engine
    from anyshard.epoch import EngineOptions
    from anyshard.launcher import Load, RankGroup
    from anyshard.model import Program
    from anyshard.speculate import Gate, Speculator
    from anyshard.tokenizer import Tokenizer

__all__ = [
    "DraftModel",
    "draft_figures",
    "draft_group",
    "open_draft_model",
    "speculation_json",
    "speculator_of",
    "wait_draft_loaded",
]

CHUNK = 256  # rows of a text that it reads in a frame


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    """A model that drafts for another, opened and not loaded. `name`: as the user has it;
    `is_same`: it is the very file of that other."""

    name: str
    checkpoint: Checkpoint
    profile: Profile
    part: Program
    flags: SplitFlags
    threads: int
    is_same: bool

    def options(self, *, tokens: int, num_seqs: int, pages: int | None) -> EngineOptions:
        """For so many sequences of so many tokens, or of its context where that is shorter; pages:
        most that --kv-memory leaves it, so that it follows fewer sequences at once."""
        from anyshard.epoch import EngineOptions
        from anyshard.pages import pages_for

        tokens = min(tokens, self.checkpoint.config.context)
        if pages is not None:
            whole = pages // pages_for(tokens, block=self.profile.kv_block)
            num_seqs = min(num_seqs, max(1, whole))
        return EngineOptions(
            kernels=self.flags.kernels,
            comm="shm",
            threads=self.threads,
            chunk=min(CHUNK, tokens),
            max_num_seqs=num_seqs,
            max_model_len=tokens,
            deadline_s=self.flags.deadline,
        )

    def need(self, *, tokens: int, num_seqs: int, pages: int | None) -> MemoryNeed:
        """What its launcher and rank take; the front is there already."""
        options = self.options(tokens=tokens, num_seqs=num_seqs, pages=pages)
        return memory_need(
            self.checkpoint,
            [self.part],
            tokens=options.max_model_len,
            num_seqs=options.max_num_seqs,
            chunk=options.chunk,
        ).without_front()

    def refuse_other_tokens(self, tokenizer: Tokenizer) -> None:
        """Raises: UserError if its vocabulary is not that of the model's tokenizer; CheckpointError
        if it comes without one."""
        from anyshard.tokenizer import open_tokenizer, vocabulary_difference

        if self.is_same:
            return
        if difference := vocabulary_difference(tokenizer, open_tokenizer(self.checkpoint)):
            raise _other_vocabulary(self.name, difference)


def _other_vocabulary(name: str, difference: str) -> UserError:
    return UserError(
        f"{name} cannot draft: {difference}; --speculate needs a model of the same vocabulary"
    )


def open_draft_model(
    name: str | None,
    place: Callable[[str], str | None],
    model: Checkpoint,
    flags: SplitFlags,
    threads: int,
) -> DraftModel | None:
    """Open what --speculate names, if anything, to draft for `model`. place: finds where it lies.

    Raises: UserError for what cannot be opened, or has another number of tokens.
    """
    from anyshard.checkpoint import open_checkpoint
    from anyshard.layout import plan
    from anyshard.loading import profile_of
    from anyshard.model import program

    if name is None:
        return None
    try:
        checkpoint = open_checkpoint(place(name))
    except UserError as error:
        raise UserError(f"--speculate: {error}") from None
    config = checkpoint.config
    if config.vocab != model.config.vocab:
        both = f"its vocabulary has {config.vocab} tokens, that of MODEL {model.config.vocab}"
        raise _other_vocabulary(name, both)
    profile = profile_of(checkpoint.arithmetic(flags.quantization), flags.kv, flags.wire)
    layout = plan(config, wire=profile.wire, leaf=profile.leaf)
    return DraftModel(
        name=name,
        checkpoint=checkpoint,
        profile=profile,
        part=program(config, profile, layout, 0),
        flags=flags,
        threads=threads,
        is_same=os.path.samefile(checkpoint.path, model.path),
    )


@contextmanager
def draft_group(
    draft: DraftModel | None, *, behind: Callable[[Load], Load], cache: ImageCache | None
) -> Iterator[RankGroup | None]:
    """The launcher of its rank, which loads `behind` whatever is to be waited for; forked first of
    all, and closed at the end."""
    from anyshard.launcher import fork_launcher
    from anyshard.loading import loader
    from anyshard.worker import rank_main

    if draft is None:
        yield None
        return
    load = loader(
        draft.checkpoint,
        threads=len(os.sched_getaffinity(0)),
        cache=cache,
        arithmetic=draft.profile.arithmetic,
        kv=draft.profile.kv,
        wire=draft.profile.wire,
    )
    with closed(fork_launcher(behind(load), rank_main, deadline_s=draft.flags.deadline)) as group:
        yield group


def wait_draft_loaded(group: RankGroup) -> None:
    """Wait for its weights, and pass on what loading has to say."""
    from anyshard.draft_model import draft_rank
    from anyshard.loading import LoadReport

    with draft_rank():
        report = LoadReport.of(group.wait_loaded())
    if report.note:
        print(f"note: draft model: {report.note}", file=sys.stderr)


def speculator_of(
    flags: SpeculationFlags,
    config: ModelConfig,
    draft: tuple[DraftModel, RankGroup] | None,
    *,
    windows: int,
    tokens: int,
    num_seqs: int,
    pages: int | None,
) -> Speculator | None:
    """Drafts and gate for `num_seqs` sequences of so many tokens; None without --speculate. pages:
    those of --kv-memory."""
    from anyshard.speculate import FixedGate, NgramDrafter, OpenGate, Speculator, SurvivalGate

    if not flags.drafts:
        return None
    gate: Gate = SurvivalGate(windows) if flags.gate == "entropy" else OpenGate()
    if flags.fixed is not None:
        gate = FixedGate(flags.fixed)
    drafter = (
        NgramDrafter(config.vocab)
        if draft is None
        else _model_drafter(*draft, tokens=tokens, num_seqs=num_seqs, pages=pages)
    )
    return Speculator(drafter, gate, most=flags.drafts, windows=windows)


def draft_figures(speculator: Speculator) -> DraftFigures | None:
    """Of the rank that drafts; None where n-grams do."""
    from anyshard.draft_model import ModelDrafter

    drafter = speculator.drafter
    return drafter.figures if isinstance(drafter, ModelDrafter) else None


def speculation_json(engine: Engine) -> dict[str, Any]:
    """What --json has of it, of all requests so far; nothing without --speculate."""
    speculator = engine.speculator
    if speculator is None:
        return {}
    figures = speculator.figures
    sent = sum(sum(view.wire_bytes.values()) for view in engine.control.statuses())
    tokens = figures.rounds + sum(figures.accepted)
    found = figures.as_json() | {"wire_bytes_per_token": round(sent / max(1, tokens))}
    draft_model = draft_figures(speculator)
    if draft_model is not None:
        found["draft_model"] = draft_model.as_json()
    return {"speculation": found}


def _model_drafter(
    draft: DraftModel, group: RankGroup, *, tokens: int, num_seqs: int, pages: int | None
) -> ModelDrafter:
    from anyshard.draft_model import ModelDrafter

    options = draft.options(tokens=tokens, num_seqs=num_seqs, pages=pages)
    drafter = ModelDrafter(group, draft.checkpoint.config, draft.profile, options)
    ends = ""
    if options.max_model_len < tokens:
        ends = f"; drafts end after {options.max_model_len} tokens, which its context holds"
    if options.max_num_seqs < num_seqs:
        ends += f"; --kv-memory leaves room for {options.max_num_seqs} of {num_seqs} at once"
    print(
        f"note: {draft.name} drafts on a rank of its own, profile {drafter.profile_text}{ends}",
        file=sys.stderr,
    )
    return drafter
