"""What was measured, as frozen records that become JSON; and the rule that passes or fails.

Knows nothing of how it was measured, nor of how it is shown (`table.py`).
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "TIMES_HF",
    "Flip",
    "LengthFigures",
    "LogitFigures",
    "Manifest",
    "OpFigures",
    "Report",
]

#: Ours may be this many times as far from float64 as HF's float32, by the rms of all logits.
TIMES_HF = 2.0


class Flip(msgspec.Struct, frozen=True, kw_only=True):
    """A position where the most likely token is not the reference's.

    margin: the reference's logit of its own choice less its logit of the other.
    """

    position: int
    margin: float


class LogitFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Logits of one engine over some positions, against float64.

    relative_error: Frobenius norm of the error over that of the true logits (None: those are
    zero). magnitude: rms of the true logits. kl_*: KL(true || engine) of a position, in nats;
    p999 is the value that at most one position in a thousand exceeds. top1_agreement: share of
    positions with the same most likely token; top5_agreement: mean share of the reference's five
    that are among the engine's five. Perplexities are None where the text tells no next token.
    """

    rms_error: float
    max_error: float
    relative_error: float | None
    magnitude: float
    kl_mean: float
    kl_p999: float
    kl_max: float
    top1_agreement: float
    top5_agreement: float
    num_flips: int
    first_flip: Flip | None
    largest_flip_margin: float | None
    perplexity: float | None
    true_perplexity: float | None

    @property
    def perplexity_difference(self) -> float | None:
        """The engine's less the reference's."""
        if self.perplexity is None or self.true_perplexity is None:
            return None
        return self.perplexity - self.true_perplexity


class OpFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The output of one op, against float64 given the engine's own float32 inputs of that op.

    So a row holds the error made in this op; what came in wrong is not counted again. `layer` is
    None for embed and logits. relative_error, magnitude: as in LogitFigures.
    """

    point: str
    layer: int | None
    rms_error: float
    max_error: float
    relative_error: float | None
    magnitude: float


class LengthFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Logits at positions start:length of the first `length` tokens; hf is None without HF."""

    length: int
    start: int
    ours: LogitFigures
    hf: LogitFigures | None = None

    @property
    def ratio(self) -> float | None:
        """Our rms error over HF's; infinite where only HF has none, 0 where neither has."""
        if self.hf is None:
            return None
        if self.hf.rms_error == 0:
            return float("inf") if self.ours.rms_error else 0.0
        return self.ours.rms_error / self.hf.rms_error


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared, so that the figures can be cited and repeated.

    tokens_sha256: of the ids as little-endian int32. kernels: the body that ran ours. peer: HF's
    versions and settings.
    """

    model: str
    architecture: str
    num_weights: int
    profile: str
    profile_sha256: str
    text: str
    num_tokens: int
    tokens_sha256: str
    kernels: str
    threads: int
    version: str
    peer: str | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `measure` found. notes: what was left out, and why, in sentences."""

    manifest: Manifest
    lengths: tuple[LengthFigures, ...]
    ops_length: int
    ops: tuple[OpFigures, ...]
    hf_ops: tuple[OpFigures, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool | None:
        """Whether ours is at most TIMES_HF times as far off as HF, at every length.

        None where there is no HF, or none of the same arithmetic: HF is in float32.
        """
        if self.manifest.profile != "f32":
            return None
        ratios = [each.ratio for each in self.lengths if each.ratio is not None]
        return all(ratio <= TIMES_HF for ratio in ratios) if ratios else None

    @property
    def verdict(self) -> str:
        """One sentence for people."""
        ratios = {each.length: each.ratio for each in self.lengths if each.ratio is not None}
        if not ratios:
            return "reported only: without HF (--against hf) there is nothing to be as accurate as"
        told = ", ".join(f"{ratio:.2f} at {length}" for length, ratio in ratios.items())
        if self.passed is None:
            return (
                f"reported only: HF is in float32, no peer of {self.manifest.profile} (rms error "
                f"of the logits over HF's: {told}); --quantization none is held against it"
            )
        rule = f"(rms error of the logits over HF's: {told}; at most {TIMES_HF:g} is allowed)"
        return f"{'accurate' if self.passed else 'NOT as accurate as HF'} {rule}"

    def to_json(self) -> bytes:
        """One JSON object: the fields, and `passed`, `times_hf` and each length's `ratio`."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        for entry, figures in zip(plain["lengths"], self.lengths, strict=True):
            entry["ratio"] = figures.ratio
        return msgspec.json.encode(plain | {"passed": self.passed, "times_hf": TIMES_HF})
