"""The measurement: our engine, and on request HF, against float64 over one text.

Teacher-forced: every position is given the text so far, whatever was predicted. One pass of ours
and of the reference serves all lengths, because a position depends on its past only; HF runs once
a length, because its sums depend on the shape of the batch.

Letters: T tokens, D hidden, P positions of a piece, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from importlib import resources
from math import prod
from types import ModuleType
from typing import Any, Final, Literal

import numpy as np

from anyshard import __version__
from anyshard.accuracy.figures import PositionFigures, TrueRows
from anyshard.accuracy.forced import CHUNK, forced_logits, query_factor
from anyshard.accuracy.local import OpMeter
from anyshard.accuracy.report import LengthFigures, LogitFigures, Manifest, Report
from anyshard.checkpoint import Checkpoint, build_image, open_checkpoint
from anyshard.config import KvType, ModelConfig, Quantization, WireType
from anyshard.errors import CheckpointError, OptionError, UserError
from anyshard.fidelity import tokens_sha256
from anyshard.host import free_memory, size_text
from anyshard.loading import profile_of
from anyshard.ops import KernelChoice, choose_body
from anyshard.ops.float64 import F64, Reference64
from anyshard.tokenizer import open_tokenizer
from anyshard.worker import Served, Worker

__all__ = ["LENGTHS", "Against", "compare", "measure", "needed_bytes", "shipped_text", "weights64"]

Against = Literal["float64", "hf"]
Progress = Callable[[int, int], None]

LENGTHS: Final = (64, 512, 1500)
_HF_BYTES: Final = 600_000_000  # torch and transformers, imported
_PIECE_COPIES: Final = 16  # float64 arrays [CHUNK, V] that exist at once, with some to spare


def shipped_text() -> str:
    """The text that comes with the package: prose, code, numbers, other languages and scripts."""
    return resources.files("anyshard.accuracy").joinpath("text.txt").read_text("utf-8")


def measure(
    model: str | None,
    *,
    against: Against = "float64",
    lengths: Sequence[int] | None = None,
    last: int | None = None,
    tokens: Sequence[int] | None = None,
    kernels: KernelChoice = "auto",
    threads: int = 1,
    progress: Progress | None = None,
    free_bytes: int | None = None,
    quantization: Quantization = "none",
    kv: KvType = "f32",
    wire: WireType = "none",
) -> Report:
    """How far the logits and every op of `model` are from float64, and beside HF if asked.

    model: what `open_checkpoint` takes. lengths: tokens of the text, each measured from its first
    position on, or over its `last` positions; None takes LENGTHS as far as context and text go.
    tokens: ids to run instead of the shipped text. progress(done, total) counts tokens of all
    passes. free_bytes: the memory to use, what the system calls available if None. quantization,
    kv, wire: the profile measured; float64 and HF take the weights as the file holds them.

    Raises: UserError in one sentence: no such length, no tokenizer, no memory, no transformers,
    a model that HF cannot express or that overflows float32.
    Held by: test_accuracy.py, test_accuracy_measure.py.
    """
    peer = _hf_module() if against == "hf" else None
    checkpoint = open_checkpoint(model)
    text = "given tokens" if tokens is not None else "shipped text"
    if tokens is None:
        tokens = open_tokenizer(checkpoint).encode(shipped_text(), add_special=True)
    chosen, notes = _choose(lengths, checkpoint.config, len(tokens))
    _check_tokens(tokens, checkpoint.config)
    _check_memory(checkpoint, against=against, length=chosen[-1], free_bytes=free_bytes)
    weights = weights64(checkpoint)
    arithmetic = checkpoint.arithmetic(quantization)
    image = build_image(checkpoint, threads=threads, kernels=kernels, arithmetic=arithmetic)
    with closing(image):
        return compare(
            Served(checkpoint.config, profile_of(arithmetic, kv, wire), image),
            Reference64(checkpoint.config, weights),
            tokens,
            lengths=chosen,
            last=last,
            peer=None if peer is None else peer.hf_model(checkpoint.config, _narrow(weights)),
            kernels=kernels,
            threads=threads,
            progress=progress,
            model=checkpoint.path.name,
            text=text,
            notes=notes,
        )


def compare(
    served: Served,
    reference: Reference64,
    tokens: Sequence[int],
    *,
    lengths: Sequence[int],
    last: int | None = None,
    peer: Any = None,
    kernels: KernelChoice = "auto",
    threads: int = 1,
    progress: Progress | None = None,
    worker_type: type[Worker] = Worker,
    model: str = "",
    text: str = "given tokens",
    notes: tuple[str, ...] = (),
) -> Report:
    """The measurement itself, on what is already loaded; `measure` says what the arguments are.

    `lengths`: ascending, each at most len(tokens). `peer`: a model of `accuracy.hf.hf_model`.
    `served` and `reference` may differ on purpose: that is how faults are planted.
    """
    config, longest = reference.config, lengths[-1]
    spans = {n: (max(0, n - last) if last is not None else 0, n) for n in lengths}
    body = choose_body(kernels)
    done = _Counter(progress, longest * 2 + (sum(lengths) if peer is not None else 0))
    ours = OpMeter(reference, query_factor=query_factor(config.head_dim))
    theirs = OpMeter(reference, query_factor=1.0)
    x_TD = reference.hidden(tokens[:longest], progress=done.within(longest))
    done.step(longest)
    hf = None if peer is None else _hf_module()
    runs: dict[int, Any] = {}
    with nullcontext() if hf is None else _torch_threads(hf, threads):
        for length in lengths if hf is not None else ():
            assert hf is not None
            meter = theirs if length == longest else None
            runs[length] = hf.HfRun(
                peer, tokens[:length], meter=meter, progress=done.within(length)
            )
            done.step(length)
        found = _Found(spans, config.vocab)
        forced = forced_logits(
            served,
            tokens[:longest],
            body=body,
            threads=threads,
            meter=ours,
            worker_type=worker_type,
        )
        for start, mine_PV in zip(range(0, longest, CHUNK), forced, strict=True):
            found.piece(reference, x_TD, tokens, start, mine_PV, runs)
            done.step(len(mine_PV))
    return Report(
        manifest=Manifest(
            model=model,
            architecture=config.architecture,
            num_weights=_num_weights(config),
            profile=served.profile.name,
            profile_sha256=served.profile.sha256(),
            text=text,
            num_tokens=longest,
            tokens_sha256=tokens_sha256(np.array(tokens[:longest])),
            kernels=body,
            threads=threads,
            version=__version__,
            peer=None if hf is None else hf.versions(),
        ),
        lengths=found.figures(),
        ops_length=longest,
        ops=ours.figures(),
        hf_ops=theirs.figures(),
        notes=notes,
    )


def weights64(checkpoint: Checkpoint) -> dict[str, F64]:
    """Every tensor by canonical name, widened once: 8 bytes a weight."""
    names = checkpoint.config.tensor_shapes()
    return {name: checkpoint.read(name).astype(np.float64) for name in names}


def needed_bytes(config: ModelConfig, *, against: Against, length: int) -> int:
    """Memory of a measurement over `length` tokens.

    Float64 and packed float32 weights, HF's copy and its libraries, pieces of logits, the rows of
    a float64 pass, and the keys and values that a meter keeps. Measured with the demo model at
    1,500 tokens beside HF: 3.53 GB resident, 3.45 said here.
    """
    with_hf = against == "hf"
    weights = (8 + 4 + (4 if with_hf else 0)) * _num_weights(config)
    logits = _PIECE_COPIES * 8 * CHUNK * config.vocab
    queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    rows = length * 8 * (4 * config.ffn + 8 * config.hidden + 4 * queries)
    kept = length * 4 * 2 * config.num_layers * keys * (2 if with_hf else 1)
    return weights + logits + rows + kept + (_HF_BYTES if with_hf else 0)


@dataclass
class _Found:
    """Figures of each length, gathered piece by piece. spans: length to positions compared."""

    spans: Mapping[int, tuple[int, int]]
    vocab: int
    ours: dict[int, list[PositionFigures]] = field(default_factory=dict)
    hf: dict[int, list[PositionFigures]] = field(default_factory=dict)

    def piece(
        self,
        reference: Reference64,
        x_TD: F64,
        tokens: Sequence[int],
        start: int,
        mine_PV: Any,
        runs: Mapping[int, Any],
    ) -> None:
        """Positions start... of ours and of every HF run, against the reference's."""
        stop = start + len(mine_PV)
        wanted = {n: (max(start, a), min(stop, b)) for n, (a, b) in self.spans.items()}
        wanted = {n: span for n, span in wanted.items() if span[0] < span[1]}
        if not wanted:
            return
        targets = [tokens[p] if p < len(tokens) else -1 for p in range(start + 1, stop + 1)]
        true = TrueRows(reference.head(x_TD[start:stop]), targets)
        _check_finite(true.logits, "float64", start)
        mine = true.compare(mine_PV)
        for length, (first, end) in wanted.items():
            part = mine.part(first - start, end - start)
            self.ours.setdefault(length, []).append(part)
            if length in runs:
                peers_PV = runs[length].logits(first, end)
                _check_finite(peers_PV, "HF", first)
                part = true.compare(peers_PV, first=first - start)
                self.hf.setdefault(length, []).append(part)

    def figures(self) -> tuple[LengthFigures, ...]:
        """All lengths, shortest first."""

        def summary(parts: list[PositionFigures], start: int) -> LogitFigures:
            return PositionFigures.joined(parts).summary(start=start, vocab=self.vocab)

        return tuple(
            LengthFigures(
                length=length,
                start=start,
                ours=summary(self.ours[length], start),
                hf=summary(self.hf[length], start) if length in self.hf else None,
            )
            for length, (start, _) in self.spans.items()
        )


class _Counter:
    """Tells a caller how many tokens of all passes are done."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def within(self, tokens: int) -> Progress:
        """For a pass of so many tokens that reports its layers."""
        return lambda layer, layers: self._tell(tokens * layer // layers)

    def step(self, tokens: int) -> None:
        """A pass, or a piece of one, of so many tokens has ended."""
        self._done += tokens
        self._tell(0)

    def _tell(self, tokens: int) -> None:
        if self._progress is not None:
            self._progress(self._done + tokens, self._total)


def _choose(
    lengths: Sequence[int] | None, config: ModelConfig, num_tokens: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The lengths to measure, ascending, and what to say of those that were not asked for.

    Raises: OptionError for one asked for that context or text does not hold.
    """
    if num_tokens == 0:
        raise OptionError("no tokens were given; at least one is needed")
    limit = min(config.context, num_tokens)
    why = f"the context holds {limit} tokens"
    if num_tokens < config.context:
        why = f"the text has {num_tokens} tokens"
    if lengths is None:
        cut = [n for n in LENGTHS if n > limit]
        note = f"{why}: {limit} measured in place of {', '.join(map(str, cut))}"
        return tuple(sorted({min(n, limit) for n in LENGTHS})), (note,) if cut else ()
    chosen = tuple(sorted(set(lengths)))
    wrong = [n for n in chosen if not 1 <= n <= limit]
    if wrong or not chosen:
        asked = f"length {wrong[0]} was asked for" if wrong else "no length was asked for"
        raise OptionError(f"{asked}, but {why}; lengths from 1 to {limit} can be measured")
    return chosen, ()


def _check_tokens(tokens: Sequence[int], config: ModelConfig) -> None:
    bad = [token for token in tokens if not 0 <= token < config.vocab]
    if bad:
        raise UserError(
            f"token {bad[0]} is none of this model, whose ids run from 0 to {config.vocab - 1}"
        )


def _check_memory(
    checkpoint: Checkpoint, *, against: Against, length: int, free_bytes: int | None
) -> None:
    need = needed_bytes(checkpoint.config, against=against, length=length)
    free = free_memory() if free_bytes is None else free_bytes
    if free is not None and need > free:
        count = _num_weights(checkpoint.config)
        copies = "float64 and float32" + (" and HF's copy" if against == "hf" else "")
        raise CheckpointError(
            f"{checkpoint.path}: comparing {count / 1e6:.0f} million weights with float64 needs "
            f"{size_text(need)} of memory ({copies}), but {size_text(free)} are free; take a "
            "smaller model of the family, or end other programs"
        )


def _check_finite(logits: Any, whose: str, start: int) -> None:
    bad = np.flatnonzero(~np.isfinite(logits).all(axis=1))
    if len(bad):
        raise UserError(
            f"the {whose} logits of position {start + int(bad[0])} hold a NaN or an infinity; a "
            "model that overflows cannot be compared, check its weights"
        )


def _hf_module() -> ModuleType:
    """`accuracy.hf`, which imports torch and transformers.

    Raises: UserError saying what to install.
    """
    try:
        from anyshard.accuracy import hf
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("anyshard"):
            raise
        raise UserError(
            f"--against hf needs torch and transformers 5 or newer, but {error.name} is not "
            "installed; pip install -e '.[verify]' in the clone, or take --against float64"
        ) from None
    return hf


def _torch_threads(hf: ModuleType, threads: int) -> AbstractContextManager[None]:
    context: AbstractContextManager[None] = hf.torch_threads(threads)
    return context


def _narrow(weights: Mapping[str, F64]) -> Callable[[str], Any]:
    """The float32 numbers that the float64 ones are."""
    return lambda name: weights[name].astype(np.float32)


def _num_weights(config: ModelConfig) -> int:
    return sum(prod(shape) for shape in config.tensor_shapes().values())
