"""Mutants: ranks that are wrong on purpose, each one mistake that a real engine has made.

A checker is worth what it catches. Here are the bugs (`Worker` classes, for
`naive.rank_body`; and rank bodies with other weights), by where they strike: `sums`, `attention`,
`rows`, `stages`, `vocabulary`, `weights`. `catalogue` says of each which public bug it stands
for, the smallest cell that shows it on each model, and the op and rank that must be named;
`scoreboard` runs that. `make mutants` prints it. `quantised` has the bugs of int8, and is not
imported here: it needs models.
"""

from __future__ import annotations

from mutants.attention import (
    BaseE,
    DistinctKvHeads,
    LocalConstants,
    NormTogether,
    ScaleOverTokens,
    Unmasked,
    WrongKvHead,
)
from mutants.rows import (
    BlockBoundary,
    ChunkEdge,
    ChunkPositions,
    LongerThanItIs,
    PageReadTwice,
    PositionReset,
    StaleRow,
)
from mutants.stages import (
    LocalLayerIndex,
    PreviousChunk,
    ReusedHopBuffer,
    RoundsOnlyAtCuts,
    ScaleOfTwoBlocks,
    TiedHeadMissing,
    TransposedHop,
)
from mutants.sums import (
    BiasPerRank,
    Doubled,
    DroppedLeaf,
    LostLane,
    MissingNode,
    NotReduced,
    OneRowPath,
    OrderByBatch,
    OverwrittenAfter,
    OverwrittenBefore,
    StaleExchange,
    SwappedMerge,
)
from mutants.vocabulary import LastRowsDropped, LocalIds, PaddingWins
from mutants.weights import NeighboursSlice

__all__ = [
    "BaseE",
    "BiasPerRank",
    "BlockBoundary",
    "ChunkEdge",
    "ChunkPositions",
    "DistinctKvHeads",
    "Doubled",
    "DroppedLeaf",
    "LastRowsDropped",
    "LocalConstants",
    "LocalIds",
    "LocalLayerIndex",
    "LongerThanItIs",
    "LostLane",
    "MissingNode",
    "NeighboursSlice",
    "NormTogether",
    "NotReduced",
    "OneRowPath",
    "OrderByBatch",
    "OverwrittenAfter",
    "OverwrittenBefore",
    "PaddingWins",
    "PageReadTwice",
    "PositionReset",
    "PreviousChunk",
    "ReusedHopBuffer",
    "RoundsOnlyAtCuts",
    "ScaleOfTwoBlocks",
    "ScaleOverTokens",
    "StaleExchange",
    "StaleRow",
    "SwappedMerge",
    "TiedHeadMissing",
    "TransposedHop",
    "Unmasked",
    "WrongKvHead",
]
