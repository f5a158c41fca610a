"""Speculation: what might come next is run beside what must, and kept where it was right.

A *draft* is a token that a drafter expects. Its row runs in the same step as the *certain* row
before it; if the token drawn after that one is the draft, the draft's own token counts too. Tokens
are drawn by position (`ops/sampling.py`) and a row's bits depend on its past alone, so an answer is
the same with any drafter, or none. Source: docs/speculation.md. Held by: test_speculate.py.
"""

from anyshard.speculate.cost import Costs, RowCost, predicted_s
from anyshard.speculate.drafter import Draft, Drafter, OracleDrafter
from anyshard.speculate.gate import Calibrator, FixedGate, Gate, OpenGate, SurvivalGate
from anyshard.speculate.ngram import NgramDrafter, NgramStore, NgramTable
from anyshard.speculate.speculator import SpeculationFigures, Speculator

__all__ = [
    "Calibrator",
    "Costs",
    "Draft",
    "Drafter",
    "FixedGate",
    "Gate",
    "NgramDrafter",
    "NgramStore",
    "NgramTable",
    "OpenGate",
    "OracleDrafter",
    "RowCost",
    "SpeculationFigures",
    "Speculator",
    "SurvivalGate",
    "predicted_s",
]
