"""Golden vectors: what every op of docs/numerics.md gives, bit for bit, on inputs made of integers.

    python tests/golden/make.py            compare with the files beside this one
    python tests/golden/make.py --write    write them again, from the reference bodies

A file names the profile that it is of; under one profile, vectors may be added and never changed
(docs/builds.md has the rule, and --write keeps it). Inputs come from an integer hash, so no
generator of random numbers has to stay the same; outputs are hex floats.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyshard.checkpoint.widen import BLOCK, TensorType, widen
from anyshard.config import INT8_LEAF, KvType, Profile
from anyshard.layout import Tree
from anyshard.ops import exact
from anyshard.ops import reference as reference_ops
from anyshard.ops.coefficients import constants_sha256
from anyshard.ops.digest import digest_keys
from anyshard.ops.kv_pages import packed_row, page_shape, store_row
from anyshard.ops.quant import quantize_weights, split_blocks
from anyshard.ops.rope import rope_table
from anyshard.ops.storage import pack_lanes, pack_q8_0

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Vectors = dict[str, list[str] | list[int]]

HERE = Path(__file__).resolve().parent
EPS = 1e-5
HEAD_DIM = 16
POSITIONS = (0, 31, 32, 300)
# Of norms: no order to change at 1, one fold at 64, a lane that is short or missing elsewhere.
NORM_WIDTHS = (1, 64, 65, 576, 896, 1000)
NATIVE_TYPES: tuple[TensorType, ...] = ("F16", "BF16", "Q8_0", "Q4_1")  # of pack_panels
TIE_HEAT = 0.7
PROFILE_KEY = "profile_sha256"


def hashed(stream: int, *shape: int, binades: int = 3) -> F32:
    """Floats of 24 significant bits, signs mixed, exponents over 2 * binades; exact by design."""
    count = int(np.prod(shape))
    x = np.arange(count, dtype=np.uint64) + np.uint64(stream * 1_000_003 + 1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    x ^= x >> np.uint64(31)
    mantissa = (x & np.uint64(0xFFFFFF)).astype(np.float64) + 2.0**23
    exponent = ((x >> np.uint64(24)) % np.uint64(2 * binades + 1)).astype(np.int64) - binades
    sign = np.where((x >> np.uint64(60)) & np.uint64(1), -1.0, 1.0)
    return (sign * np.ldexp(mantissa, exponent - 24)).astype(np.float32).reshape(shape)


def packed(weight_NK: F32) -> F32:
    """[N, K] as panels [ceil(N/8), K, 8]; lanes past N hold NaN, which no result may show."""
    n, k = weight_NK.shape
    rows = np.full((-(-n // 8) * 8, k), np.nan, np.float32)
    rows[:n] = weight_NK
    return np.ascontiguousarray(rows.reshape(-1, 8, k).transpose(0, 2, 1))


def leaves(
    k: int, span: tuple[int, int] | None = None, *, leaf: int = 64
) -> tuple[I32, I32, int, int]:
    """leaf_lengths, merges, first k, last k of a span of the tree over k."""
    lengths = tuple(min(leaf, k - start) for start in range(0, k, leaf))
    return tree_span(Tree(lengths, (len(lengths),)), span or (0, len(lengths)))


def tree_span(tree: Tree, span: tuple[int, int]) -> tuple[I32, I32, int, int]:
    """The same of any tree."""
    start = sum(tree.leaf_lengths[: span[0]])
    lengths = tree.leaf_lengths[slice(*span)]
    return (
        np.array(lengths, np.int32),
        np.array(tree.merges(span), np.int32),
        start,
        start + sum(lengths),
    )


def zeros(*shape: int) -> F32:
    """Float32 zeros."""
    return np.zeros(shape, np.float32)


def faults(rows: int) -> I32:
    """No row is marked."""
    return np.zeros(rows, np.int32)


def linear(module: Any, pool: Any) -> dict[str, F32 | I32]:
    """A short last leaf and partial panel; covers of several nodes; leaves inside heads."""
    found: dict[str, F32 | I32] = {}
    heads = Tree((64, 16) * 5, (2,) * 5)  # head_dim 80
    cases = {
        "whole k=150 n=11": (150, 11, leaves(150)),
        "span 1..6 of 9 leaves": (560, 5, leaves(560, (1, 6))),
        "heads 1..4 of 5, d=80": (400, 8, tree_span(heads, (2, 8))),
    }
    for stream, (name, (k, n, (lengths, merges, low, high))) in enumerate(cases.items()):
        rows = 3
        a = np.ascontiguousarray(hashed(10 + stream, rows, k)[:, low:high])
        panels = packed(hashed(20 + stream, n, k))[:, low:high]
        num_nodes = len(lengths) - int(merges.sum())
        out = zeros(num_nodes * rows * n)
        module.RowLinear(pool, a, panels, n, lengths, merges, out).run(rows)
        found[name] = out
    return found


def rms_norm(module: Any, pool: Any) -> dict[str, F32 | I32]:
    """Through a head whose matrix is the identity; a width that 32 does not divide."""
    found: dict[str, F32 | I32] = {}
    for width in (40, 72):
        x, out, marked = hashed(30, 3, width), zeros(2, width), faults(3)
        eye = packed(np.eye(width, dtype=np.float32))
        rows = np.array([2, 0], np.int32)
        lengths, merges, _, _ = leaves(width)
        module.Head(
            pool, x, rows, hashed(31, width), EPS, eye, width, None, lengths, merges, out, marked, 9
        ).run(2)
        assert not marked.any()
        found[f"d={width}"] = out
    for number, width in enumerate(NORM_WIDTHS):
        found[f"steep d={width}"] = _steep_norm(module, pool, width, 32 + 2 * number)
    return found


def steep(stream: int, rows: int, width: int) -> F32:
    """Rows whose mean of squares lies a little above a power of four.

    There the inverse root shows every last bit of the sum, and so the order that made it; one
    element of each row, anywhere in it, is chosen for that.
    """
    x = hashed(stream, rows, width, binades=1) * np.float32(0.875)
    for row in range(rows):
        place = row * 7919 % width
        x[row, place] = 0
        rest = math.fsum(float(value) * float(value) for value in x[row])
        wanted = width * (1 + row / 1024)
        while wanted <= rest:
            wanted *= 4
        x[row, place] = math.sqrt(wanted - rest)
    return x


def steep_rows(width: int) -> int:
    """Few sums of a short row round, so it takes more rows to see every order."""
    return 8 if width == 1 else max(48, 256 * 64 // width)


def picked(width: int) -> NDArray[np.int64]:
    """The columns of a steep norm that are stored: the inverse root is in all of them."""
    return np.unique(np.linspace(0, width - 1, 2).astype(np.int64))


def _steep_norm(module: Any, pool: Any, width: int, stream: int) -> F32:
    columns, rows = picked(width), steep_rows(width)
    pick = zeros(len(columns), width)
    pick[np.arange(len(columns)), columns] = 1
    lengths, merges, _, _ = leaves(width)
    out, marked = zeros(rows, len(columns)), faults(rows)
    module.Head(
        pool, steep(stream, rows, width), np.arange(rows, dtype=np.int32),
        hashed(stream + 1, width), EPS, packed(pick), len(columns), None, lengths, merges, out,
        marked, 9,
    ).run(rows)  # fmt: skip
    assert not marked.any()
    return out


def qkv(module: Any, pool: Any) -> dict[str, F32 | I32]:
    """Norm, three linears with bias, RoPE by absolute position, pages written; with head norms."""
    d = HEAD_DIM
    plain, normed = (_qkv(module, pool, w) for w in ((None,) * 2, (hashed(48, d), hashed(49, d))))
    assert np.array_equal(plain["v"], normed["v"])
    return plain | {"q normed": normed["q"], "k normed": normed["k"]}


def _qkv(module: Any, pool: Any, norms: Any, kv: KvType = "f32") -> dict[str, Any]:
    hidden, heads, kv_heads, d, rows = 72, 3, 2, HEAD_DIM, len(POSITIONS)
    cos, sin = rope_table(301, d, 10_000.0)
    table = np.arange(10, dtype=np.int32)[::-1].reshape(1, 10).copy()
    blank = partial(np.zeros, dtype="i1" if kv == "int8" else "f4")
    k_cache, v_cache = (blank((10, 2, *page_shape(kv, d, keys=k))) for k in (True, False))
    q_out = zeros(rows, heads * d)
    lengths, merges, _, _ = leaves(hidden)
    positions = np.array(POSITIONS, np.int32)
    module.Qkv(
        pool, hashed(40, rows, hidden), hashed(41, hidden), EPS,
        packed(hashed(42, heads * d, hidden)),
        packed(hashed(43, kv_heads * d, hidden)),
        packed(hashed(44, kv_heads * d, hidden)),
        hashed(45, heads * d), hashed(46, kv_heads * d), hashed(47, kv_heads * d),
        *norms, lengths, merges, d, 0.375, cos, sin, positions, q_out, k_cache, v_cache,
        table, np.zeros(rows, np.int32), faults(rows), 1,
    ).run(rows)  # fmt: skip
    places = np.stack([table[0, positions // 32], positions % 32], axis=1)
    k, v = ([packed_row(c, *at, keys=c is k_cache) for at in places] for c in (k_cache, v_cache))
    return {"q": q_out, "k": np.stack(k), "v": np.stack(v)}


def kv_int8(module: Any, pool: Any) -> dict[str, Any]:
    """Keys and values as they are stored, and attention over such pages."""
    return _qkv(module, pool, (None, None), "int8") | attention(module, pool, int8=True)


def in_int8(pages: F32, *, keys: bool) -> NDArray[np.int8]:
    """Pages [P, G, d, 32] or [.., 32, d] of float32 as int8."""
    shape = page_shape("int8", pages.shape[2 if keys else 3], keys=keys)
    found = np.zeros((*pages.shape[:2], *shape), np.int8)
    for page, lane in np.ndindex(len(pages), 32):
        store_row(found, page, lane, packed_row(pages, page, lane, keys=keys), keys=keys)
    return found


def attention(module: Any, pool: Any, *, int8: bool = False) -> dict[str, F32 | I32]:
    """Rows at positions 0, 31, 32 and 300: one block, all stripes, a second round of a stripe."""
    found: dict[str, F32 | I32] = {}
    for d, stream in ((16, 50), (80, 60)):
        rows, heads, kv_heads = len(POSITIONS), 3, 2
        table = (np.arange(10, dtype=np.int32) * 7 % 10).reshape(1, 10)
        k_cache = hashed(stream, 10, kv_heads, d, 32)
        v_cache = hashed(stream + 1, 10, kv_heads, 32, d)
        last = int(table[0, POSITIONS[-1] // 32])
        k_cache[last, :, :, POSITIONS[-1] % 32 + 1 :] = np.nan  # past the end of the sequence
        v_cache[last, :, POSITIONS[-1] % 32 + 1 :] = np.nan
        caches: Any = k_cache, v_cache
        if int8:
            caches = [in_int8(each, keys=each is k_cache) for each in caches]
        out, marked = zeros(rows, heads * d), faults(rows)
        module.Attention(
            pool, hashed(stream + 2, rows, heads * d, binades=1), *caches, table,
            np.zeros(rows, np.int32), np.array(POSITIONS, np.int32), d,
            np.array([0, 1, 1], np.int32), out, marked, 1,
        ).run(rows)  # fmt: skip
        assert not marked.any()
        found[f"d={d}"] = out if d == 16 else out[:, ::5].copy()
    return found


def exp2_in_attention(module: Any, pool: Any) -> dict[str, F32 | I32]:
    """Scores that are given, values that are the identity: out[d] = exp2(s_d - M) / sum."""
    found: dict[str, F32 | I32] = {}
    scores = hashed(70, 6, 8, binades=6)
    scores[0] = [0, -1, -125.5, -126, -126.5, -127, -150, -201]
    scores[1] = [-0.5, 0.5, 1.5, -1.5, 2.5, 0.49999997, -0.49999997, 0.50000006]
    for index, row in enumerate(scores):
        k_cache, v_cache = zeros(1, 1, 8, 32), zeros(1, 1, 32, 8)
        k_cache[0, 0, 0, :8], v_cache[0, 0, :8] = row, np.eye(8)
        q = zeros(1, 8)
        q[0, 0] = 1
        out, zero = zeros(1, 8), np.zeros((1, 1), np.int32)
        module.Attention(
            pool, q, k_cache, v_cache, zero, zero[0], np.array([7], np.int32), 8, zero[0], out,
            faults(1), 1,
        ).run(1)  # fmt: skip
        found[f"row {index}"] = out
    return found


def reduce(module: Any, pool: Any) -> dict[str, F32 | I32]:
    """Nodes of three ranks, one of them idle; bias once; then the residual."""
    found: dict[str, F32 | I32] = {}
    rows, width = 2, 11
    tree = Tree((1,) * 9, (9,))
    for name, spans in {
        "nodes 3 0 2": ((0, 7), (7, 7), (7, 9)),
        "nodes 1 1 1": ((0, 5), (5, 7), (7, 9)),
    }.items():
        nodes = [len(tree.cover(span)) for span in spans]
        sources = [hashed(80 + i, max(1, count) * rows * width) for i, count in enumerate(nodes)]
        for bias in (None, hashed(84, width)):
            x = hashed(85, rows, width)
            merges = np.array(tree.node_merges(spans), np.int32)
            module.Reduce(pool, sources, nodes, merges, bias, x, width).run(rows)
            found[name if bias is None else f"{name} bias"] = x
    return found


def gate_up(module: Any, pool: Any) -> dict[str, F32 | I32]:
    """The whole op; and SiLU alone, of biases under zero weights."""
    rows, hidden, width = 2, 72, 13
    lengths, merges, _, _ = leaves(hidden)
    out, marked = zeros(rows, width), faults(rows)
    module.GateUp(
        pool, hashed(90, rows, hidden), hashed(91, hidden), EPS,
        packed(hashed(92, width, hidden)), packed(hashed(93, width, hidden)), width,
        hashed(94, width), hashed(95, width), lengths, merges, out, marked, 1,
    ).run(rows)  # fmt: skip
    inputs = silu_inputs()
    alone, nothing = zeros(1, len(inputs)), packed(zeros(len(inputs), hidden))
    module.GateUp(
        pool, hashed(90, 1, hidden), hashed(91, hidden), EPS, nothing, nothing, len(inputs),
        inputs, np.ones_like(inputs), lengths, merges, alone, faults(1), 1,
    ).run(1)  # fmt: skip
    return {"gate_up": out, "silu": alone}


def silu_inputs() -> F32:
    """Both sides of zero, the ends where e^-|x| leaves float32, and what lies between."""
    ends = np.array([0.0, 1, -1, 88, -88, 100, -100, 130, -130, -131, 1e30, -1e30], np.float32)
    return np.concatenate([ends, hashed(96, 24, binades=6)])


def embed(module: Any, pool: Any) -> dict[str, F32 | I32]:
    """Rows of a table, copied; ids at both ends of a panel."""
    out, tokens = zeros(3, 5), np.array([10, 0, 7], np.int32)
    module.Embed(pool, packed(hashed(100, 11, 5)), 11, tokens, out).run(3)
    return {"out": out}


def head(module: Any, pool: Any) -> dict[str, F32 | I32]:
    """Sampled rows only, a vocabulary share that ends inside a panel."""
    hidden, vocab = 72, 11
    lengths, merges, _, _ = leaves(hidden)
    out = zeros(2, vocab)
    module.Head(
        pool, hashed(110, 4, hidden), np.array([3, 1], np.int32), hashed(111, hidden), EPS,
        packed(hashed(112, vocab, hidden)), vocab, None, lengths, merges, out, faults(4), 9,
    ).run(2)  # fmt: skip
    return {"out": out}


def digest(module: Any, pool: Any) -> dict[str, NDArray[Any]]:
    """Widths around a vector, an index that is not zero, stored keys and values, panels."""
    rows, keys = 3, digest_keys(400)
    sources = [hashed(140 + width, rows, width, binades=40) for width in (1, 8, 13, 203)]
    out, stored_out = np.zeros((rows, 6), np.uint64), np.zeros((rows, 6), np.uint64)
    module.Digest(pool, sources, [0, 0, 64, 100], [0, 1, 2, 3], keys, out).run(rows)
    k, v = hashed(150, 3, 2, HEAD_DIM, 32), hashed(151, 3, 2, 32, HEAD_DIM)
    table, slots = np.array([[2, 0], [1, 1]], np.int32), np.array([0, 0, 1], np.int32)
    where = np.array([5, 40, 31], np.int32)
    module.DigestKv(pool, k, v, table, slots, where, 1, 2, 48, 4, keys, stored_out).run(rows)
    panels = np.zeros(11, np.uint64)
    module.digest_panels(pool, packed(hashed(152, 11, 70)), keys, 70, panels)
    return {"out": out + stored_out, "panels": panels}  # each writes columns of its own


def sampling(module: Any, pool: Any, **body: str) -> dict[str, F32 | I32]:
    """Argmax with a tie; Gumbel draws over seeds, positions, choices and streams."""
    logits = hashed(120, 203)
    top = logits.copy()
    top[[17, 90, 202]] = 999
    draws = [
        module.gumbel_argmax(logits, temperature, seed, position, choice, stream, None, **body)
        for temperature in (0.125, 8.0)
        for seed in (0, 5, (1 << 64) - 1)
        for position in (1, 300)
        for choice, stream in ((0, 0), (3, 1))
    ]
    mask = (np.arange(203) % 3 == 1).astype(np.uint8)
    draws += [
        module.gumbel_argmax(logits, 8.0, 7, position, 0, 0, mask, **body) for position in range(9)
    ]
    best = [module.argmax(row, **body)[0] for row in (logits, top)]
    ties = [
        module.gumbel_argmax(near_tie(position), TIE_HEAT, 11, position, 0, 0, None, **body)
        for position in range(96)
    ]
    return {
        "argmax": np.array(best, np.int32),
        "gumbel": np.array(draws, np.int32),
        "near ties": np.array(ties, np.int32),
    }


def near_tie(position: int) -> F32:
    """Two logits whose scores at TIE_HEAT are equal or neighbours.

    A product that is not rounded before it is added, as a compiler fuses it, draws another.
    """
    words = reference_ops.philox_words(2, 11, position, 0, 0)
    u = ((words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    noise = np.float32(TIE_HEAT) * -exact.log(-exact.log(u))
    first = hashed(121, 96)[position]
    return np.array([first, (first + noise[0]) - noise[1]], np.float32)


def widening(module: Any, pool: Any) -> dict[str, F32 | I32]:
    """Stored types, in panels: what `pack_panels` packs, and of all types what `widen` gives."""
    found: dict[str, F32 | I32] = {}
    pack = getattr(module, "pack_panels", None)
    for number, (kind, (columns, num_bytes)) in enumerate(sorted(BLOCK.items())):
        width = max(columns, 32)
        raw = raw_blocks(150 + number, 5, width // columns, num_bytes, kind)
        wide = pack_lanes(widen(raw.reshape(-1, num_bytes), kind).reshape(5, width))
        if pack is not None and kind in NATIVE_TYPES:
            wide[:] = 7
            pack(pool, wide, raw.reshape(-1), kind, 5, width, None)
        found[kind] = wide[0, :: width // 16, :5].copy()
    return found


def raw_blocks(
    stream: int, rows: int, blocks: int, num_bytes: int, kind: TensorType
) -> NDArray[np.uint8]:
    """Blocks of bytes that mean finite values: every scale is an fp16 below 2, some subnormal."""
    count = rows * blocks * num_bytes
    raw = (hashed(stream, count).view(np.uint32) & np.uint32(0xFF)).astype(np.uint8)
    raw = raw.reshape(rows, blocks, num_bytes)
    for place in SCALES[kind]:
        raw[:, :, place + 1] &= 0xBF
        raw[::4, :, place + 1] &= 0x83
    return raw


# First bytes of the 16-bit floats of a block: bit 6 of the second is the top of the exponent.
SCALES: Mapping[TensorType, tuple[int, ...]] = {
    "F32": (2,), "F16": (0,), "BF16": (0,), "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2),
    "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def int8(module: Any, pool: Any) -> dict[str, F32 | I32]:
    """The int8 profile: rows and weights quantised, sums of every shape, an embedding row.

    Rows hold halves of a step, subnormals, zeros, a huge leaf, and one leaf that is not finite.
    """
    found: dict[str, F32 | I32] = {}
    heads = Tree((32, 32, 16) * 5, (3,) * 5)  # head_dim 80
    cases = {
        "whole k=150 n=19": (150, 19, 0, leaves(150, leaf=32)),
        "span 3..11 of 18 blocks": (576, 5, 0, leaves(576, (3, 11), leaf=32)),
        "heads 1..4 of 5, d=80": (400, 8, 80, tree_span(heads, (3, 12))),
    }
    for stream, (name, (k, n, group, (lengths, merges, low, high))) in enumerate(cases.items()):
        rows = 6
        x = hashed(160 + stream, rows, k)
        x[1] = np.rint(x[1] * np.float32(40)) / np.float32(2)
        x[1, ::16] = 127
        x[2] *= np.float32(2.0**-140)
        x[3, : k // 2] = -0.0
        x[4] *= np.float32(2.0**100)
        x[5, k // 2] = np.inf
        weight = hashed(170 + stream, n, k)
        weight[0] = np.rint(weight[0] * np.float32(40)) / np.float32(2)
        weight[0, ::16] = -127
        weight[1] *= np.float32(2.0**-20)
        weight[2] = 0
        panels = int8_panels(module, pool, weight, group)
        found[f"packed {name}"] = panels[:, ::3].reshape(-1).view(np.int32)[::5].copy()
        index, here = np.cumsum([0, *block_lengths(k, group)]), slice(low, high)
        cut = panels[:, int(np.searchsorted(index, low)) : int(np.searchsorted(index, high))]
        out = zeros((len(lengths) - int(merges.sum())) * rows * n)
        a = np.ascontiguousarray(x[:, here])
        module.RowLinear(pool, a, cut, n, lengths, merges, out).run(rows)
        found[name] = out.view(np.int32) & np.where(np.isnan(out), 0x7FC00000, -1).astype(np.int32)
    table, embedded = int8_panels(module, pool, hashed(180, 21, 70), 0), zeros(3, 70)
    module.Embed(pool, table, 21, np.array([0, 16, 20], np.int32), embedded).run(3)
    found["embedded"] = embedded
    return found


def block_lengths(k: int, group: int) -> list[int]:
    """Inputs of each block of a row."""
    width = group or k
    return [min(32, width - at) for at in range(0, width, 32)] * (k // width)


def int8_panels(module: Any, pool: Any, weight_NK: F32, group: int) -> NDArray[np.int8]:
    """Packed by the module, or by the reference where it packs nothing."""
    n, k = weight_NK.shape
    pack = getattr(module, "pack_panels", None)
    q, scale = quantize_weights(split_blocks(weight_NK, block_lengths(k, group)))
    panels = pack_q8_0(q.reshape(n, -1), scale).view(np.int8)
    if pack is not None:
        pack(pool, panels, weight_NK.view(np.uint8).reshape(-1), "F32", n, k, None, group)
    return panels


def primitives() -> dict[str, F32 | I32]:
    """The elementary functions of `ops.exact`, and the RoPE table; no body but the reference."""
    negative = -np.abs(hashed(130, 40, binades=7))
    negative[:8] = [0, -0.5, -1.5, -125.5, -126, -126.5, -200, -201]
    positive = np.abs(hashed(131, 40, binades=12))
    positive[:4] = [1, np.float32(0.5) * 2**-23, 0.70710677, 0.70710683]
    cos, sin = rope_table(8192, 64, 100_000.0)
    wide = np.array([0, 1, 5, 31, 300, 8191])
    a, b, c = hashed(132, 40, binades=9), hashed(133, 40, binades=9), hashed(134, 40, binades=18)
    return {
        "fma32": exact.fma32(a, b, c),
        "exp2": exact.exp2(negative),
        "exp": exact.exp(negative),
        "log": exact.log(positive),
        "silu": exact.silu(silu_inputs()),
        "pow2": exact.pow2(np.array([0, -1, -126, -127, -(1 << 30)], np.int32)),
        "halving_tree": exact.halving_tree(hashed(135, 3, 32)),
        "rope cos": cos[wide][:, ::5].copy(),
        "rope sin": sin[wide][:, ::5].copy(),
        "philox": reference_ops.philox_words(10, 0xDEADBEEF_01234567, 300, 2, 1).view(np.int32),
    }


OPS: Mapping[str, Callable[..., Mapping[str, NDArray[Any]]]] = {
    "attention": attention,
    "digest": digest,
    "embed": embed,
    "exp2_in_attention": exp2_in_attention,
    "gate_up": gate_up,
    "head": head,
    "int8": int8,
    "kv_int8": kv_int8,
    "linear": linear,
    "qkv": qkv,
    "reduce": reduce,
    "rms_norm": rms_norm,
    "sampling": sampling,
    "widening": widening,
}


def texts(found: Mapping[str, NDArray[Any]]) -> Vectors:
    """Hex floats, or integers, in flat order."""
    return {
        name: [float(value).hex() for value in values.reshape(-1)]
        if values.dtype == np.float32
        else [int(value) for value in values.reshape(-1)]
        for name, values in found.items()
    }


def profile_sha256(name: str = "") -> str:
    """The profile that the code computes, of the vectors of that name."""
    constants = constants_sha256()
    if name == "int8":
        return Profile(arithmetic="int8", leaf=INT8_LEAF, constants_sha256=constants).sha256()
    kv: KvType = "int8" if name == "kv_int8" else "f32"
    return Profile(constants_sha256=constants, kv=kv).sha256()


def stored(name: str, folder: Path = HERE) -> Vectors:
    """The golden vectors of an op.

    Raises: ValueError if the file is of another profile than the code computes.
    """
    loaded = json.loads((folder / f"{name}.json").read_text("utf-8"))
    of, here = loaded.pop(PROFILE_KEY, "none"), profile_sha256(name)
    if of != here:
        raise ValueError(
            f"{name}.json is of profile {of[:12]}, but the code computes {here[:12]}; vectors of "
            "another profile say nothing here (docs/builds.md, What changes bits)"
        )
    return loaded  # type: ignore[no-any-return]


def write(name: str, made: Vectors, folder: Path = HERE) -> None:
    """Write a file; under the profile that it is of, vectors are added only.

    Raises: ValueError if one that is there would change.
    """
    path, of = folder / f"{name}.json", profile_sha256(name)
    if path.exists() and json.loads(path.read_text("utf-8")).get(PROFILE_KEY) == of:
        old = stored(name, folder)
        changed = [key for key, row in old.items() if made.get(key) != row]
        if changed:
            raise ValueError(
                f"{name}.json: {', '.join(changed)} would change under profile "
                f"{of[:12]}; other bits are another profile (docs/builds.md, What "
                "changes bits)"
            )
    rows = {PROFILE_KEY: of, **made}
    lines = [f" {json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the files again")
    asked, pool, differing = parser.parse_args().write, reference_ops.Pool(), []
    for name in ("primitives", *OPS):
        found = primitives() if name == "primitives" else OPS[name](reference_ops, pool)
        made = texts(found)
        try:
            if asked:
                write(name, made)
            elif made != stored(name):
                differing.append(name)
        except ValueError as error:
            print(error, file=sys.stderr)  # noqa: T201
            return 2
    if differing:
        print(f"differ from the files: {', '.join(differing)}")  # noqa: T201
    return 4 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
