"""A wider set than the golden vectors, for builds that are compared with each other.

Every storage, 1 to 67 rows, odd and prime widths, tails of K, histories of 31, 32 and 33 keys,
subnormal weights and marks of rows that went out of range. Nothing of it is stored: `SETS` has the
shape of `make.OPS`, and two builds agree where their arrays have the same bits.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from golden.make import (
    EPS,
    F32,
    I32,
    NATIVE_TYPES,
    faults,
    hashed,
    in_int8,
    int8_panels,
    leaves,
    packed,
    raw_blocks,
    zeros,
)
from numpy.typing import NDArray

from anyshard.checkpoint.widen import BLOCK
from anyshard.ops.digest import digest_keys
from anyshard.ops.rope import rope_table
from anyshard.ops.storage import pack_lanes, pack_q8_0
from anyshard.ops.wire import encode_rows

__all__ = ["SETS"]

Found = dict[str, F32 | I32]

STORAGES = ("f32", "bf16", "f16", "q8_0")
ROWS = (1, 2, 3, 4, 5, 8, 23, 24, 31, 33, 63, 64, 67)
# (outputs, inputs): one panel and less, pairs that end early, primes, tails of a leaf
SIZES = ((1, 1), (3, 31), (8, 64), (11, 67), (19, 127), (29, 200), (41, 577), (61, 1000))
POSITIONS = (0, 1, 30, 31, 32, 33, 63, 64, 127, 255, 256, 257, 511)


def weights(storage: str, stream: int, num_outputs: int, num_inputs: int) -> NDArray[Any]:
    """Panels near 1, in that storage; a few are subnormal in it, some zero, of both signs."""
    wide = hashed(stream, num_outputs, num_inputs, binades=1)
    wide.reshape(-1)[3::97] = 0
    wide.reshape(-1)[5::89] = -0.0
    if storage == "q8_0":
        q = (wide.view(np.uint32) & np.uint32(0xFF)).astype(np.uint8).view(np.int8)
        scales = hashed(stream + 1, num_outputs, num_inputs // 32) * np.float32(2**-7)
        scales.reshape(-1)[1::7] = 2**-24  # the least fp16
        return pack_q8_0(q, scales.astype(np.float16))
    tiny = {"f32": 2.0**-140, "bf16": 2.0**-130, "f16": 2.0**-20}[storage]
    wide.reshape(-1)[7::53] *= np.float32(tiny)
    if storage == "f32":
        return packed(wide)  # lanes past N hold NaN
    if storage == "f16":
        return pack_lanes(wide.astype(np.float16))
    return pack_lanes((wide.view(np.uint32) >> np.uint32(16)).astype(np.uint16))


def inputs_of(storage: str, num_inputs: int) -> int:
    """Q8_0 takes whole blocks."""
    return -(-num_inputs // 32) * 32 if storage == "q8_0" else num_inputs


def linears(module: Any, pool: Any) -> Found:
    """Every storage, size and number of rows; and a span of leaves that leaves several nodes."""
    found: Found = {}
    for number, storage in enumerate(STORAGES):
        for place, (n, width) in enumerate(SIZES):
            k = inputs_of(storage, width)
            panels = weights(storage, 200 + 20 * number + place, n, k)
            x = hashed(300 + place, max(ROWS), k)
            lengths, merges, _, _ = leaves(k)
            for rows in ROWS:
                out = zeros(rows * n)
                module.RowLinear(pool, x[:rows], panels, n, lengths, merges, out).run(rows)
                found[f"{storage} {n}x{k} rows {rows}"] = out
        lengths, merges, low, high = leaves(576, (1, 6))
        unit = 32 if storage == "q8_0" else 1
        panels = weights(storage, 290 + number, 21, 576)[:, low // unit : high // unit]
        out = zeros((len(lengths) - int(merges.sum())) * 3 * 21)
        x = np.ascontiguousarray(hashed(310, 3, 576)[:, low:high])
        module.RowLinear(pool, x, panels, 21, lengths, merges, out).run(3)
        found[f"{storage} leaves 1..6 of 9"] = out
    return found


def every_row(module: Any, pool: Any) -> Found:
    """1 to 67 rows, one after another."""
    found: Found = {}
    lengths, merges, _, _ = leaves(96)
    x = hashed(320, 67, 96)
    for number, storage in enumerate(STORAGES):
        panels = weights(storage, 330 + 2 * number, 13, 96)
        for rows in range(1, 68):
            out = zeros(rows * 13)
            module.RowLinear(pool, x[:rows], panels, 13, lengths, merges, out).run(rows)
            found[f"{storage} rows {rows}"] = out
    return found


def subnormals(module: Any, pool: Any) -> Found:
    """Products and sums below 2^-126: a thread that flushes them to zero gives zeros."""
    found: Found = {}
    lengths, merges, _, _ = leaves(70)
    x = hashed(340, 33, 70)
    panels = packed(hashed(341, 203, 70) * np.float32(2.0**-133))
    out = zeros(33 * 203)
    module.RowLinear(pool, x, panels, 203, lengths, merges, out).run(33)
    assert not out.any() or (np.abs(out) < 2.0**-126).any()
    found["linear"] = out
    residual = hashed(342, 5, 67) * np.float32(2.0**-131)
    nodes = [hashed(343 + i, 5 * 67) * np.float32(2.0**-132) for i in range(2)]
    both = np.array([0, 1], np.int32)
    module.Reduce(pool, nodes, [1, 1], both, None, residual, 67).run(5)
    found["reduce"] = residual
    return found


def norms_and_heads(module: Any, pool: Any) -> Found:
    """Norm and head at odd widths, sampled rows out of order, a bias."""
    found: Found = {}
    for number, width in enumerate((1, 7, 31, 32, 33, 63, 67, 127, 257, 576, 1000)):
        rows, vocab = 5, 23
        lengths, merges, _, _ = leaves(width)
        sampled = np.array([4, 0, 0, 2], np.int32)
        for storage in STORAGES[:3] if width % 32 else STORAGES:
            out, marked = zeros(4, vocab), faults(rows)
            module.Head(
                pool, hashed(360 + number, rows, width, binades=6), sampled,
                hashed(380 + number, width), EPS, weights(storage, 400 + number, vocab, width),
                vocab, hashed(381, vocab), lengths, merges, out, marked, 9,
            ).run(4)  # fmt: skip
            found[f"{storage} {width}"] = out
    return found


def gate_ups(module: Any, pool: Any) -> Found:
    """Two storages at once, odd widths, rows up to 67."""
    found: Found = {}
    for number, (hidden, width) in enumerate(((32, 1), (67, 13), (96, 203), (160, 101))):
        lengths, merges, _, _ = leaves(hidden)
        kinds = STORAGES if hidden % 32 == 0 else STORAGES[:3]
        for gate, up in zip(kinds, (*kinds[1:], kinds[0]), strict=True):
            rows = (1, 3, 5, 67)[number]
            out, marked = zeros(rows, width), faults(rows)
            module.GateUp(
                pool, hashed(420 + number, rows, hidden), hashed(430 + number, hidden), EPS,
                weights(gate, 440 + number, width, hidden),
                weights(up, 450 + number, width, hidden),
                width, hashed(460, width), None, lengths, merges, out, marked, 1,
            ).run(rows)  # fmt: skip
            found[f"{gate} {up} {hidden}x{width}"] = out
    return found


def qkvs(module: Any, pool: Any) -> Found:
    """Head dims, storages, norms of heads, positions up to 8191; what was written of the pages."""
    found: Found = {}
    for number, d in enumerate((8, 16, 24, 64, 80, 128)):
        rows, heads, kv_heads, hidden = 7, 5, 2, (96 if number % 2 else 67)
        positions = np.array([0, 1, 31, 32, 33, 4095, 8191], np.int32)
        slots = np.array([0, 1, 0, 1, 0, 1, 0], np.int32)
        cos, sin = rope_table(8192, d, 10_000.0)
        table = np.zeros((2, 256), np.int32)
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            table[slot, position // 32] = row
        k_cache, v_cache = zeros(7, kv_heads, d, 32), zeros(7, kv_heads, 32, d)
        q_out = zeros(rows, heads * d)
        lengths, merges, _, _ = leaves(hidden)
        kinds = STORAGES[-3:] if hidden % 32 == 0 else STORAGES[:3]
        norms = (hashed(480, d), hashed(481, d)) if number % 2 else (None, None)
        module.Qkv(
            pool, hashed(470 + number, rows, hidden), hashed(482, hidden), 1e-6,
            weights(kinds[0], 490 + number, heads * d, hidden),
            weights(kinds[1], 500 + number, kv_heads * d, hidden),
            weights(kinds[2], 510 + number, kv_heads * d, hidden),
            hashed(483, heads * d), None, hashed(484, kv_heads * d),
            *norms, lengths, merges, d, 0.17677669, cos, sin, positions, q_out, k_cache, v_cache,
            table, slots, faults(rows), 1,
        ).run(rows)  # fmt: skip
        found |= {f"q d={d}": q_out, f"k d={d}": k_cache, f"v d={d}": v_cache}
    return found


def attentions(module: Any, pool: Any) -> Found:
    """1 to 512 keys, the edges of blocks and stripes among them; several rows of a sequence."""
    found: Found = {}
    for number, (d, heads, of) in enumerate(
        ((8, 1, (0,)), (24, 3, (0, 0, 1)), (64, 3, (0, 1, 1)), (80, 4, (0, 0, 0, 0)))
    ):
        blocks, kv_heads = 16, of[-1] + 1
        table = (np.arange(2 * blocks, dtype=np.int32) * 7 % (2 * blocks)).reshape(2, blocks)
        k_cache = hashed(520 + number, 2 * blocks, kv_heads, d, 32, binades=1)
        v_cache = hashed(530 + number, 2 * blocks, kv_heads, 32, d)
        v_cache.reshape(-1)[::31] *= np.float32(2.0**-137)
        for name, chosen in (
            ("edges", POSITIONS),
            ("chunk", tuple(range(20, 53))),
            ("one", (511,)),
        ):
            rows = len(chosen)
            out, marked = zeros(rows, heads * d), faults(rows)
            slots = np.full(rows, 1, np.int32) if name == "chunk" else faults(rows)
            module.Attention(
                pool, hashed(540 + number, rows, heads * d, binades=1), k_cache, v_cache, table,
                slots, np.array(chosen, np.int32), d, np.array(of, np.int32), out, marked, 1,
            ).run(rows)  # fmt: skip
            assert not marked.any()
            found[f"d={d} {name}"] = out
    return found


def split_sequences(module: Any, pool: Any) -> Found:
    """States of spans of stripes, one node and two, over pages of both kinds; merges of hashed
    states, an empty one last.

    The merge does not take what the first op gives: calls are played back elsewhere.
    """
    found: Found = {}
    for number, (d, heads, of) in enumerate(((8, (1, 0), (0,)), (80, (1, 3), (0, 0, 1, 1)))):
        blocks, kv_heads, count = 16, of[-1] + 1, heads[0]
        table = (np.arange(blocks, dtype=np.int32) * 7 % blocks).reshape(1, blocks)
        k_cache = hashed(680 + number, blocks, kv_heads, d, 32, binades=1)
        v_cache = hashed(682 + number, blocks, kv_heads, 32, d)
        caches = {
            "f32": (k_cache, v_cache),
            "int8": (in_int8(k_cache, keys=True), in_int8(v_cache, keys=False)),
        }
        part = 2 * max(heads) * (d + 2)
        for kind, chosen, stripes in product(
            caches, (POSITIONS, POSITIONS[-1:]), ((0, 4), (3, 6), (7, 8))
        ):
            rows = len(chosen)
            queries = [hashed(684 + i, rows, each * d, binades=1) for i, each in enumerate(heads)]
            out = zeros(2 * rows * part)
            module.AttentionStates(
                pool, queries, *caches[kind], table, faults(rows), np.array(chosen, np.int32), d,
                np.array(of, np.int32), *stripes, part, out,
            ).run(rows)  # fmt: skip
            name = f"{kind} d={d} rows {rows} stripes {stripes[0]} to {stripes[1]}"
            found[name] = out[:: 1 if d == 8 else 3].copy()
        merges = np.array((0, 1, 0, 1, 2), np.int32)
        sources = []
        for rank, nodes in enumerate((2, 2, 1)):
            source = hashed(690 + rank, 5 * part).reshape(5, -1)
            states = source[:, : count * nodes * (d + 2)].reshape(5, count, nodes, d + 2)
            states[..., 0] = (
                (np.arange(5 * count * nodes, dtype=np.int32) % 9 - 4)
                .view(np.float32)
                .reshape(5, count, nodes)
            )
            states[..., 1] = np.abs(states[..., 1])
            if rank == 2:
                states[2, :, :, 0] = np.int32(-(1 << 30)).view(np.float32)
                states[2, :, :, 1], states[2, :, :, 2:] = 0, np.nan
            sources.append(np.ascontiguousarray(states).reshape(-1))
        sources = [np.concatenate([each, zeros(5 * part - len(each))]) for each in sources]
        merged, marked = zeros(5, count * d), faults(5)
        module.MergeStates(pool, sources, [2, 2, 1], merges, 0, part, d, merged, marked, 3).run(5)
        assert not marked.any()
        found[f"d={d} merged"] = merged
    return found


def marks(module: Any, pool: Any) -> Found:
    """Rows out of range are marked, on every CPU; what they hold is NaN, of whichever bits."""
    rows, hidden, width = 5, 67, 9
    lengths, merges, _, _ = leaves(hidden)
    x = hashed(550, rows, hidden)
    x[1, 3], x[3, 66], x[4, 0] = np.inf, np.nan, 3e38
    out, marked = zeros(rows, width), faults(rows)
    module.GateUp(
        pool, x, hashed(551, hidden), EPS, packed(hashed(552, width, hidden)),
        packed(hashed(553, width, hidden)), width, None, None, lengths, merges, out, marked, 3,
    ).run(rows)  # fmt: skip
    d, q = 16, hashed(554, 3, 32)
    q[1, :16] *= np.float32(2.0**20)
    attended, late = zeros(3, 32), faults(3)
    nothing = faults(3)
    module.Attention(
        pool, q, hashed(555, 1, 1, d, 32), hashed(556, 1, 1, 32, d), nothing[:1].reshape(1, 1),
        nothing, np.array([3, 4, 31], np.int32), d, np.array([0, 0], np.int32), attended, late, 7,
    ).run(3)  # fmt: skip
    return {"norm": marked, "others": out[[0, 2]], "attention": late, "sums": attended[[0, 2]]}


def embeds(module: Any, pool: Any) -> Found:
    """Rows of tables in every storage."""
    found: Found = {}
    tokens = np.array([0, 7, 8, 15, 16, 36], np.int32)
    for number, storage in enumerate(STORAGES):
        out = zeros(6, 96)
        table = weights(storage, 560 + 2 * number, 37, 96)
        module.Embed(pool, table, 37, tokens, out).run(6)
        found[storage] = out
    return found


def reduces(module: Any, pool: Any) -> Found:
    """One to six ranks' nodes, widths with and without a tail, bias or none."""
    found: Found = {}
    for number, (ranks, width) in enumerate(((1, 7), (2, 64), (3, 67), (4, 577), (6, 1000))):
        merges = np.array([0, *[1] * (ranks - 1)], np.int32)
        sources = [hashed(570 + 10 * number + i, 5 * width) for i in range(ranks)]
        for bias in (None, hashed(579, width)):
            x = hashed(578, 5, width)
            module.Reduce(pool, sources, [1] * ranks, merges, bias, x, width).run(5)
            found[f"{ranks} ranks {width} {'bias' if bias is not None else 'plain'}"] = x
    return found


def functions(module: Any, pool: Any, **body: str) -> Found:
    """exp at every count and at its ends; greedy and drawn ids over 1 to 67 and more logits."""
    found: Found = {}
    x = -np.abs(hashed(630, 67, binades=8))
    x[:9] = [0, -0.0, -130, -130.00002, -87.33655, -87.4, -103.97, -1e-40, -3e38]
    for count in range(1, 68):
        out = zeros(count)
        module.exp_into(x[:count].copy(), out, **body)
        found[f"exp {count}"] = out
    logits = hashed(631, 1009)
    sizes = (*range(1, 68), 203, 1009)
    best = [module.argmax(logits[:size].copy(), **body) for size in sizes]
    found["argmax"] = np.array([index for index, _ in best], np.int32)
    found["largest"] = np.array([value for _, value in best], np.float32)
    mask = (np.arange(1009) % 5 != 1).astype(np.uint8)
    found["drawn"] = np.array(
        [
            module.gumbel_argmax(
                logits[:size].copy(), temperature, 0xDEADBEEF_01234567 + size, size, number, 2,
                mask[:size].copy() if number % 2 else None, **body,
            )
            for size in sizes
            for number, temperature in enumerate((0.0, 0.5, 1.0, 3.0, 1e9))
        ],
        np.int32,
    )  # fmt: skip
    return found


def int8s(module: Any, pool: Any) -> Found:
    """int8 of every size and number of rows; from every stored type, heads of 48 or none."""
    found: Found = {}
    for place, (n, k) in enumerate(SIZES):
        panels = int8_panels(module, pool, hashed(680 + place, n, k), 0)
        x = hashed(690 + place, max(ROWS), k)
        lengths, merges, _, _ = leaves(k, leaf=32)
        for rows in ROWS:
            out = zeros(rows * n)
            module.RowLinear(pool, x[:rows], panels, n, lengths, merges, out).run(rows)
            found[f"{n}x{k} rows {rows}"] = out
    for number, kind in enumerate(NATIVE_TYPES):
        columns, num_bytes = BLOCK[kind]
        raw = raw_blocks(700 + number, 37, 96 // columns, num_bytes, kind).reshape(-1)
        for group, blocks in ((0, 3), (48, 4)):
            kept = np.zeros((3, blocks, 544), np.int8)
            module.pack_panels(pool, kept, raw, kind, 37, 96, None, group)
            found[f"{kind} by {group}"] = kept.view(np.int32)
    return found


def packing(module: Any, pool: Any) -> Found:
    """Stored types into float32 panels and into panels of their own; rows by a map."""
    found: Found = {}
    for number, kind in enumerate(NATIVE_TYPES):
        columns, num_bytes = BLOCK[kind]
        raw = raw_blocks(640 + number, 37, 96 // columns, num_bytes, kind).reshape(-1)
        order = np.arange(37, dtype=np.int32)[::-1].copy()
        wide = zeros(5, 96, 8)
        fine = [module.pack_panels(pool, wide, raw, kind, 37, 96, order)]
        found[f"{kind} widened"] = wide
        if kind != "Q4_1":
            shape = (3, 3, 544) if kind == "Q8_0" else (5, 96, 8)
            kept = np.zeros(shape, {"F16": "f2", "BF16": "u2", "Q8_0": "u1"}[kind])
            fine.append(module.pack_panels(pool, kept, raw, kind, 37, 96, order))
            found[f"{kind} kept"] = kept.view(np.int32)
        found[f"{kind} finite"] = np.array(fine, np.int32)
    return found


def hashes(module: Any, pool: Any) -> Found:
    """Digests of rows of every width to 67 and of panels in every storage, as halves of words."""
    found: Found = {}
    keys = digest_keys(2048)
    for width in (*range(1, 68), 1000):
        out = np.zeros((3, 1), np.uint64)
        module.Digest(pool, [hashed(660, 3, width, binades=40)], [width], [0], keys, out).run(3)
        found[f"rows of {width}"] = out.view(np.int32)
    for number, storage in enumerate(STORAGES):
        words = np.zeros(37, np.uint64)
        module.digest_panels(pool, weights(storage, 661 + 2 * number, 37, 96), keys, 96, words)
        found[f"panels {storage}"] = words.view(np.int32)
    k, v = hashed(670, 4, 3, 24, 32), hashed(671, 4, 3, 32, 24)
    out, table = np.zeros((5, 2), np.uint64), np.array([[3, 1], [0, 2]], np.int32)
    slots, where = np.array([0, 0, 1, 1, 0], np.int32), np.array([0, 63, 31, 32, 7], np.int32)
    module.DigestKv(pool, k, v, table, slots, where, 1, 3, 72, 0, keys, out).run(5)
    found["keys and values"] = out.view(np.int32)
    return found


def many_wires(module: Any, pool: Any) -> dict[str, NDArray[Any]]:
    """Rows as int8 wires carry them, of every tail of a block; what is decoded is made by NumPy,
    for no call may read what another wrote."""
    found: dict[str, NDArray[Any]] = {}
    for width in (*range(1, 41), 63, 64, 65, 97, 576):
        x = hashed(width, 5, width, binades=4)
        x[1::2] *= np.float32(2.0**-22)  # scales that are subnormal in float16
        wire = encode_rows(x)
        out, into = np.zeros_like(x), np.zeros_like(wire)
        module.DecodeWire(pool, wire, out).run(5)
        module.RoundWire(pool, x, into).run(5)
        found |= {f"rounded_{width}": x, f"wire_{width}": into, f"decoded_{width}": out}
    return found


SETS = {
    "attention": attentions,
    "digest": hashes,
    "embed": embeds,
    "every_row": every_row,
    "functions": functions,
    "gate_up": gate_ups,
    "int8": int8s,
    "linear": linears,
    "marks": marks,
    "norm_and_head": norms_and_heads,
    "packing": packing,
    "qkv": qkvs,
    "reduce": reduces,
    "split_sequences": split_sequences,
    "subnormals": subnormals,
    "wires": many_wires,
}
