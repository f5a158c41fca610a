"""Correctness: how far ours is from float64, and whether that is near enough beside HF.

`measure` runs a model over a text and gives a `Report`; `as_text` and `as_markdown` show it.
Invariance (layout against layout, in bits) is another question and has no part here.
"""

from __future__ import annotations

from anyshard.accuracy.measure import LENGTHS, Against, measure
from anyshard.accuracy.report import Report
from anyshard.accuracy.table import as_markdown, as_text

__all__ = ["LENGTHS", "Against", "Report", "as_markdown", "as_text", "measure"]
