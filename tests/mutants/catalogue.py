"""Every bug of the scoreboard: what it stands for, where it shows, where it must be named.

A bug that every rank commits is to be named on the first rank that shows it; one of a single rank,
on that. Where a model hides a bug, its cell must stay equal, for the reason given.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from grid import INT8, KV8, W8, Loaded

import mutants as bugs
from anyshard.launcher import RankMain
from anyshard.model import Program, program
from anyshard.request import Sampling
from anyshard.worker import Worker
from mutants import quantised, sequence, weights
from mutants.exhibits import Exhibit, Mutant, Plant, bug, hides, shows, unseen
from mutants.subjects import A9, A14, AFFINE, BLOCKS, DEMO, HALVES, NEGATIVE, NORMS, TIED


def flipped(part: str, bit: int, model: Loaded, exhibit: Exhibit) -> RankMain:
    """One bit of the largest weight of a matrix, in the rank and layer that have to be named.

    Of the embedding, a weight of the prompt's first token that the rank has in no head.
    """
    served, layout = model.served, exhibit.cell.layout(model)
    here = program(model.config, model.profile, layout, exhibit.rank)
    name = f"{exhibit.op.rsplit('.', 1)[0]}.{part}"
    if part in ("head", "embed"):
        name = "embed" if model.config.tied else part
    mapped = weights.weights_of(here)[name]
    if part == "embed":
        token = next(each for each in model.prompt if not _in_head(model, here, each))
        mapped = replace(mapped, rows=(token, token + 1))
    place = weights.largest_in(served, mapped)
    return weights.altered(name, weights.flip(*place, bit), rank=exhibit.rank)


def _in_head(model: Loaded, here: Program, token: int) -> bool:
    """Whether the token's embedding is also a row of the rank's head."""
    return model.config.tied and here.vocab[0] <= token < here.vocab[1]


def bit_flips() -> list[Mutant]:
    """The lowest bit of the mantissa, of every kind of matrix; of some the lowest of an int8."""
    op_of = {
        **{"q": "qkv", "k": "qkv", "v": "qkv", "o": "o_proj"},
        **{"gate": "gate_up", "up": "gate_up", "down": "down_proj"},
    }
    found = []
    for part in (*op_of, "head", "embed"):
        places = [(A9, 2, 1, 2), (DEMO, 17, 1, 2)]  # model, layer, rank, width
        if part in ("o", "down", "gate", "head", "embed"):
            places += [(model + INT8, *place) for model, *place in places]
        exhibits = [
            shows(model, f"layers.{layer}.{op_of[part]}" if part in op_of else part, rank, tp=tp)
            for model, layer, rank, tp in places
        ]
        mutant = Mutant(
            name=f"bit flipped in {part}",
            says=f"the lowest bit of one weight of {part} on one rank",
            source=("", ""),
            plant=partial(flipped, part, 0),
            exhibits=tuple(exhibits),
        )
        found.append(mutant)
    return found


def image(changes_of: Any) -> Plant:
    """Ranks with other weights."""
    return lambda model, exhibit: weights.with_weights(changes_of)


OURS = sequence.OURS
UNSPLIT_TOO = "the unsplit run commits it too"
NO_SUCH_CELL = "no cell runs a sequence again"
SAME_BUILD = "the unsplit run is of the same build"

SUMS = [
    bug(
        "bias on every rank",
        "every rank adds the bias of o_proj and down_proj",
        ("TGI 1036", "huggingface/text-generation-inference/issues/1036"),
        bugs.BiasPerRank,
        shows(A9, "layers.0.o_proj", tp=2),
        hides(DEMO, "no bias on o_proj and down_proj", tp=2),
    ),
    bug(
        "reduction missing on a rank",
        "rank 1 goes on with its own nodes of o_proj",
        ("sglang 14811", "sgl-project/sglang/pull/14811"),
        bugs.NotReduced,
        shows(A9, "layers.0.reduce_o", 1, tp=2),
        shows(DEMO, "layers.0.reduce_o", 1, tp=2),
    ),
    bug(
        "node left out",
        "the last node is never added",
        ("sglang 14811", "sgl-project/sglang/pull/14811"),
        bugs.MissingNode,
        shows(A9, "layers.0.reduce_o", tp=2),
        shows(DEMO, "layers.0.reduce_o", tp=2),
    ),
    bug(
        "reduced again",
        "the first node of down_proj is added twice",
        ("tokenspeed 80", "lightseekorg/tokenspeed/pull/80"),
        bugs.Doubled,
        shows(A9, "layers.0.reduce_down", tp=2),
        shows(DEMO, "layers.0.reduce_down", tp=2),
    ),
    bug(
        "dropped last leaf",
        "the last leaf of down_proj is not in its rank's node",
        OURS,
        bugs.DroppedLeaf,
        shows(A9, "layers.0.down_proj", 1, tp=2),
        shows(DEMO, "layers.0.down_proj", 1, tp=2),
    ),
    bug(
        "swapped merge",
        "the right nodes, one addition at another place",
        ("sglang 10785", "sgl-project/sglang/issues/10785"),
        bugs.SwappedMerge,
        shows(A9, "layers.0.reduce_o", tp=3),
        shows(DEMO, "layers.0.reduce_o", tp=3),
    ),
    bug(
        "stale exchange",
        "a reduce reads the buffer of the exchange before",
        OURS,
        bugs.StaleExchange,
        shows(A9, "layers.0.reduce_o", tp=2),
        shows(DEMO, "layers.0.reduce_o", tp=2),
    ),
    bug(
        "node overwritten before its send",
        "rank 1 writes into its nodes before they are published",
        ("vllm 54962", "vllm-project/vllm/pull/54962"),
        bugs.OverwrittenBefore,
        shows(A9, "layers.0.gather_o", 1, tp=2),
        shows(DEMO, "layers.0.gather_o", 1, tp=2),
    ),
    bug(
        "node overwritten before it was read",
        "rank 1 writes into its nodes while others read them",
        ("vllm 54962", "vllm-project/vllm/pull/54962"),
        bugs.OverwrittenAfter,
        shows(A9, "layers.0.gather_o", 1, tp=2),
        shows(DEMO, "layers.0.gather_o", 1, tp=2),
    ),
    bug(
        "order depends on the batch",
        "K in two chains when a frame holds several sequences",
        ("sglang 10785", "sgl-project/sglang/issues/10785"),
        bugs.OrderByBatch,
        shows(A9, "layers.0.qkv", batch=2),
        shows(DEMO, "layers.0.qkv", batch=2),
    ),
    bug(
        "path chosen by rows",
        "K in two chains when a frame holds one row",
        ("vllm 51290", "vllm-project/vllm/issues/51290"),
        bugs.OneRowPath,
        *unseen(
            UNSPLIT_TOO,
            shows(A9, "layers.0.qkv"),
            shows(DEMO, "layers.0.qkv"),
        ),
    ),
    bug(
        "lost lane",
        "the last column of gate and up is never written",
        OURS,
        bugs.LostLane,
        *unseen(
            UNSPLIT_TOO,
            shows(A9, "layers.0.gate_up"),
            shows(DEMO, "layers.0.gate_up"),
        ),
    ),
]

HEADS = [
    bug(
        "KV heads counted as distinct",
        "a KV head that two ranks hold moves the later ranks on",
        ("sglang 19086", "sgl-project/sglang/pull/19086"),
        bugs.DistinctKvHeads,
        shows(A14, "layers.0.qkv", 1, tp=4),
        shows(DEMO, "layers.0.qkv", 1, heads=(2, 1, 6)),
    ),
    bug(
        "KV head map of the rank",
        "the KV head of a query head from its number on the rank",
        ("sglang 32858", "sgl-project/sglang/pull/32858"),
        bugs.WrongKvHead,
        shows(A9, "layers.0.attention", 1, tp=2),
        shows(DEMO, "layers.0.attention", 1, tp=2),
    ),
    bug(
        "norm over the heads of a rank",
        "q_norm and k_norm over all heads of a rank together",
        ("yalis 36", "axonn-ai/yalis/pull/36"),
        bugs.NormTogether,
        shows(NORMS, "layers.0.qkv", tp=2),
        hides(DEMO, "no q_norm, no k_norm", tp=2),
    ),
    bug(
        "per-head constants of the rank",
        "q bias by the head's number on the rank",
        ("Megatron-DeepSpeed 227", "bigscience-workshop/Megatron-DeepSpeed/issues/227"),
        bugs.LocalConstants,
        shows(A9, "layers.0.qkv", 1, tp=2),
        hides(DEMO, "no bias on q, k and v", tp=2),
    ),
    bug(
        "states merged in base e",
        "attention states are merged with e^x, not 2^x",
        ("vllm 28840", "vllm-project/vllm/pull/28840"),
        bugs.BaseE,
        *unseen(
            UNSPLIT_TOO,
            shows(A9, "layers.0.attention", tp=2),
            shows(DEMO, "layers.0.attention", tp=2),
        ),
    ),
    bug(
        "unmasked keys",
        "masked keys have weight zero and are still added; the page holds NaN",
        ("vllm 42245", "vllm-project/vllm/pull/42245"),
        bugs.Unmasked,
        shows(A9, "layers.0.attention", poison=True, prompt_tokens=7),
        shows(DEMO, "layers.0.attention", poison=True, prompt_tokens=7),
    ),
]

ROWS = [
    bug(
        "chunk edge off by one",
        "the first row of a later chunk does not see its own key",
        ("nano-vllm 213", "GeeeekExplorer/nano-vllm/pull/213"),
        bugs.ChunkEdge,
        shows(A9, "layers.0.attention", chunk=20),
        shows(DEMO, "layers.0.attention", chunk=20),
    ),
    bug(
        "positions of the chunk",
        "every chunk counts its positions from 0",
        ("HF 43082", "huggingface/transformers/issues/43082"),
        bugs.ChunkPositions,
        shows(A9, "layers.0.qkv", chunk=20),
        shows(DEMO, "layers.0.qkv", chunk=20),
    ),
    bug(
        "positions restart on a stage",
        "stages after the first count from the first row of a step",
        ("SwiftTransformer 9", "LLMServe/SwiftTransformer/pull/9"),
        bugs.PositionReset,
        shows(A9, "layers.2.qkv", 1, pp=2),
        shows(DEMO, "layers.15.qkv", 1, pp=2),
    ),
    bug(
        "page at a block's boundary",
        "a step that begins a block goes on in the page before",
        ("sglang 22819", "sgl-project/sglang/issues/22819"),
        bugs.BlockBoundary,
        shows(A9, "layers.0.attention", chunk=32),
        shows(DEMO, "layers.0.attention", chunk=32),
    ),
    bug(
        "page read twice",
        "after the prompt, block 0 is read from the page of block 1",
        OURS,
        bugs.PageReadTwice,
        *unseen(
            UNSPLIT_TOO,
            shows(A9, "layers.0.attention"),
            shows(DEMO, "layers.0.attention"),
        ),
    ),
    bug(
        "stale KV row",
        "after a shorter re-run rank 1 has a value row of the longer one",
        OURS,
        bugs.StaleRow,
        *unseen(
            NO_SUCH_CELL,
            shows(A9, "layers.1.attention", 1, tp=2),
            shows(DEMO, "layers.1.attention", 1, tp=2),
        ),
        scenario="rerun",
    ),
    bug(
        "length of the longer run",
        "after a shorter re-run attention reads as far as the longer one went",
        OURS,
        bugs.LongerThanItIs,
        *unseen(
            NO_SUCH_CELL,
            shows(A9, "layers.0.attention", tp=2),
            shows(DEMO, "layers.0.attention", tp=2),
        ),
        scenario="rerun",
    ),
]

STAGES = [
    bug(
        "tied head missing",
        "the last stage has no head where it is the embedding",
        ("sglang 15890", "sgl-project/sglang/pull/15890"),
        bugs.TiedHeadMissing,
        shows(TIED, "head", 1, pp=2),
        hides(A9, "head and embedding are two", pp=2),
        shows(DEMO, "head", 1, pp=2),
    ),
    bug(
        "layer index of the stage",
        "a stage takes the weights of the first layers",
        ("TRT-LLM 17466", "NVIDIA/TensorRT-LLM/pull/17466"),
        bugs.LocalLayerIndex,
        shows(A9, "layers.2.qkv", 1, pp=2),
        shows(DEMO, "layers.15.qkv", 1, pp=2),
    ),
    bug(
        "hop buffer reused before its send ended",
        "the first row of a hop is already another",
        ("vllm 54962", "vllm-project/vllm/pull/54962"),
        bugs.ReusedHopBuffer,
        shows(A9, "send", pp=2),
        shows(DEMO, "send", pp=2),
    ),
    bug(
        "hop of a view that is not contiguous",
        "rows are sent as their memory lies",
        ("pytorch 192920", "pytorch/pytorch/issues/192920"),
        bugs.TransposedHop,
        shows(A9, "send", pp=2),
        shows(DEMO, "send", pp=2),
    ),
    bug(
        "rows of the chunk before",
        "a stage goes on with the hop of the chunk before",
        ("DeepSpeed 5729", "deepspeedai/DeepSpeed/issues/5729"),
        bugs.PreviousChunk,
        shows(A9, "receive", 1, pp=2, chunk=20),
        shows(DEMO, "receive", 1, pp=2, chunk=20),
    ),
]

VOCABULARY = [
    bug(
        "last vocabulary rows dropped",
        "the remainder of vocabulary / ranks belongs to nobody",
        ("Megatron 1754", "NVIDIA/Megatron-LM/issues/1754"),
        bugs.LastRowsDropped,
        shows(A9, "head", 1, tp=2),
        hides(DEMO, "49,152 rows divide by two", tp=2),
        shows(DEMO, "head", 4, tp=5),
    ),
    bug(
        "padded vocabulary rows win",
        "a row of padding is drawn when all logits are negative",
        ("tt-metal 47021", "tenstorrent/tt-metal/pull/47021"),
        bugs.PaddingWins,
        shows(NEGATIVE, "sample", tp=3),
        hides(A9, "its best logit is positive", tp=3),
        hides(DEMO, "its best logit is positive", heads=(5, 4)),
    ),
    bug(
        "ids of the rank",
        "the (value, id) of a rank's best logit has the row's number on the rank",
        ("gpt-oss 270", "openai/gpt-oss/issues/270"),
        bugs.LocalIds,
        shows(A9, "sample", 1, tp=2, prompt_logits=0),
        shows(DEMO, "sample", 1, tp=2, prompt_tokens=23, prompt_logits=0),
        scenario="pairs",
    ),
]

WEIGHTS = [
    bug(
        "gate and up cut as one",
        "a contiguous cut of gate above up",
        ("Automodel 1324", "NVIDIA-NeMo/Automodel/pull/1324"),
        image(weights.fused_gate_up),
        shows(A9, "layers.0.gate_up", tp=2),
        shows(DEMO, "layers.0.gate_up", tp=2),
    ),
    bug(
        "q, k and v cut as one",
        "a contiguous cut of q above k above v",
        ("vllm 36242", "vllm-project/vllm/pull/36242"),
        image(weights.fused_qkv),
        shows(A9, "layers.0.qkv", tp=3),
        shows(DEMO, "layers.0.qkv", tp=3),
    ),
    bug(
        "scale of the block before",
        "the first blocks of a rank's columns of o_proj have their neighbours' scales",
        ("auto-round 643", "intel/auto-round/issues/643"),
        image(weights.neighbours_scale),
        shows(BLOCKS, "layers.0.o_proj", 1, tp=2),
        hides(DEMO, "its Q4_1 blocks are widened when it is loaded: no scale is left", tp=2),
        *(shows(model + INT8, "layers.0.o_proj", 1, tp=2) for model in (A9, BLOCKS, DEMO)),
    ),
    bug(
        "neighbour's slice",
        "rank 1 maps its matrices from where rank 0 begins",
        OURS,
        bugs.NeighboursSlice,
        shows(A9, "layers.0.qkv", 1, tp=2),
        shows(DEMO, "layers.0.qkv", 1, tp=2),
    ),
    *bit_flips(),
]


QUANTISED = [
    bug(
        "quantised after sharding",
        "int8 rows have one scale over all columns of a rank",
        ("vllm 54683", "vllm-project/vllm/pull/54683"),
        quantised.OneScale,
        *(shows(model + INT8, "layers.0.o_proj", tp=2) for model in (A9, BLOCKS, DEMO)),
    ),
    bug(
        "-128 kept",
        "rank 1 has Q8_0 blocks that hold -128 as they are, and its products of it wrap",
        ("ggml 1393", "ggml-org/ggml/issues/1393"),
        lambda model, exhibit: quantised.kept_as_stored(model),
        shows(BLOCKS + INT8, "layers.0.o_proj", 1, tp=2),
        hides(DEMO + INT8, "its o_proj and down_proj are stored as Q4_1", tp=2),
    ),
    bug(
        "halves rounded away from zero",
        "int8 rows are rounded as by roundf, not to even",
        ("FBGEMM 9", "pytorch/FBGEMM/pull/9"),
        quantised.HalfAway,
        *unseen(UNSPLIT_TOO, shows(HALVES + INT8, "layers.0.o_proj")),
        hides(A9 + INT8, "none of its quotients is exactly a half"),
        *unseen(UNSPLIT_TOO, shows(DEMO + INT8, "layers.9.down_proj")),  # where one is, by chance
    ),
    bug(
        "scale after scale",
        "an int8 dot times the weights' scale, then times the row's",
        OURS,
        quantised.ScaleAfterScale,
        *unseen(
            UNSPLIT_TOO,
            *(shows(model + INT8, "layers.0.o_proj") for model in (A9, BLOCKS, DEMO)),
        ),
    ),
]


QUANTISED_KV = [
    bug(
        "scale shared along tokens",
        "int8 values of a step have one scale for 32 dims, over all its tokens",
        OURS,
        bugs.ScaleOverTokens,
        shows(A9 + KV8, "layers.0.qkv", chunk=7),
        shows(DEMO + INT8 + KV8, "layers.0.qkv", chunk=7),
    ),
]


WIRES = [
    bug(
        "int8 rounding only at real cuts",
        "an int8 wire rounds rows where a stage ends, and nowhere else",
        OURS,
        bugs.RoundsOnlyAtCuts,
        shows(A9 + W8, "layers.0.round_wire", pp=2),
        shows(DEMO + W8, "layers.3.round_wire", pp=2),
    ),
    bug(
        "scale shared by two blocks",
        "rows that leave a stage have one int8 scale for 64 values",
        OURS,
        bugs.ScaleOfTwoBlocks,
        shows(A9 + W8, "layers.1.round_wire", pp=2),
        shows(DEMO + W8, "layers.14.round_wire", pp=2),
    ),
]


def near_tie(temperature: str, seed: int) -> Sampling:
    """Of the drawn token's score and the next one's, only a rounding decides."""
    return Sampling(temperature=float.fromhex(temperature), seed=seed)


BUILDS = [
    bug(
        "products fused by the compiler",
        "a build with -ffp-contract=fast (ANYSHARD_MUTANT=fused)",
        OURS,
        Worker,
        *unseen(
            SAME_BUILD,
            shows(A9, "sample", sampling=near_tie("0x1.076c34p+0", 3)),
            shows(DEMO, "sample", sampling=near_tie("0x1.eddcb4p+0", 1)),
        ),
        hides(AFFINE, "what widening Q4_1 multiplies is exact: 11 bits by 4"),
        scenario="build",
    ),
]

MUTANTS: tuple[Mutant, ...] = (
    *(*SUMS, *HEADS, *ROWS, *STAGES, *VOCABULARY, *WEIGHTS, *QUANTISED, *QUANTISED_KV, *WIRES),
    *BUILDS,
    *sequence.SEQUENCE,
)
