"""`anyshard verify --against`: how far the arithmetic is from float64, and whether HF is nearer.

Knows flags and what a terminal shows; what is measured is `anyshard.accuracy`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from anyshard.cli.screen import Bar, tell
from anyshard.errors import DifferenceFound
from anyshard.host import read_memory

if TYPE_CHECKING:
    from anyshard.config import KvType, Quantization, WireType

__all__ = ["Against", "tell_accuracy"]

Against = Literal["float64", "hf"]


def tell_accuracy(
    model: str | None,
    against: Against,
    *,
    quantization: Quantization,
    kv: KvType,
    wire: WireType,
    as_json: bool,
) -> int:
    """Measure, print the tables or the JSON; exit code 4 if HF is over twice as near.

    Raises: UserError, for what cannot be measured.
    """
    from anyshard.accuracy import as_text, measure

    memory = read_memory()
    with Bar("widening the weights to float64") as bar:
        report = measure(
            model,
            against=against,
            quantization=quantization,
            kv=kv,
            wire=wire,
            progress=lambda done, total: bar.update(done, total, f"against {against}"),
            free_bytes=None if memory is None else memory[1],
        )
    tell(report.to_json().decode() if as_json else as_text(report))
    return DifferenceFound.exit_code if report.passed is False else 0
