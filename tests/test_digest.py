"""The digest: every bit and every place counts, shards add up, and every body is equal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from golden.make import packed
from models import ADVERSARIAL_9_3, ADVERSARIAL_14_2, MODELS
from native_cases import BODIES, F32, floats, ints, native, needs_native, pool

from anyshard.checkpoint.image import WeightImage
from anyshard.config import ModelConfig
from anyshard.fidelity import weights_sha256
from anyshard.layout import plan
from anyshard.loading import f32_profile
from anyshard.model import Program, program
from anyshard.op import LAYER_POINTS
from anyshard.ops import reference
from anyshard.ops.digest import KEY_PADDING, digest_keys, digest_of, mix
from anyshard.ops.storage import pack_lanes, pack_q8_0, unpack

WIDTHS = (1, 7, 8, 9, 16, 63, 65, 203, 1009)


def words(x: F32) -> list[int]:
    return [int(word) for word in x.view(np.uint32)]


def by_hand(x: F32, first: int = 0) -> int:
    """docs/numerics.md, Digests, in Python's integers."""

    def fmix(h: int) -> int:
        h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
        h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
        return h ^ h >> 16

    total = 0
    for i, word in enumerate(words(x), start=first):
        total += fmix((word + i * 0x9E3779B9) % 2**32) * (fmix(i ^ 0x85EBCA6B) | 1)
    return total % 2**64


@pytest.mark.parametrize("first", [0, 5, 4096])
def test_it_is_what_the_definition_says(first: int) -> None:
    x = floats(np.random.default_rng(first), 67)
    assert int(digest_of(x, first=first)) == by_hand(x, first)


def test_the_mixing_is_a_bijection_where_it_matters() -> None:
    """No two of a million words collide; a key is odd; so one changed element always shows."""
    mixed = mix(np.arange(1 << 20, dtype=np.uint32) * np.uint32(4093))
    assert len(np.unique(mixed)) == 1 << 20
    assert (digest_keys(1 << 16).view(np.uint32) & 1 == 1).all()


def test_every_single_bit_of_every_element_shows() -> None:
    x = floats(np.random.default_rng(1), 43)
    want = int(digest_of(x))
    bits = x.view(np.uint32)
    for index in range(len(x)):
        for bit in range(32):
            bits[index] ^= np.uint32(1 << bit)
            assert int(digest_of(x)) != want
            bits[index] ^= np.uint32(1 << bit)
    assert int(digest_of(x)) == want


def test_signs_of_zero_and_of_nan_show() -> None:
    plus, minus = np.zeros(3, np.float32), np.array([0, -0.0, 0], np.float32)
    assert digest_of(plus) != digest_of(minus)
    quiet = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000], np.uint32).view(np.float32)
    assert len({int(digest_of(quiet[i : i + 1])) for i in range(3)}) == 3


def test_every_swap_and_every_shift_shows() -> None:
    """Two elements exchanged, a row moved by one, a value moved among zeros."""
    x = floats(np.random.default_rng(2), 60)
    want = digest_of(x)
    for i in range(60):
        for j in range(i):
            swapped = x.copy()
            swapped[[i, j]] = swapped[[j, i]]
            assert digest_of(swapped) != want
    assert digest_of(np.roll(x, 1)) != want
    alone = [np.eye(60, dtype=np.float32)[i] for i in range(60)]
    assert len({int(digest_of(row)) for row in alone}) == 60


def test_shards_add_up_to_the_whole_at_every_cut() -> None:
    x = floats(np.random.default_rng(3), 97)
    whole = digest_of(x)
    for cut in range(98):
        parts = [int(digest_of(x[:cut])), int(digest_of(x[cut:], first=cut))]
        assert sum(parts) % 2**64 == whole
    thirds = [int(digest_of(x[a:b], first=a)) for a, b in ((0, 10), (10, 11), (11, 97))]
    assert sum(thirds[::-1]) % 2**64 == whole


@needs_native
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("body", BODIES)
def test_native_rows_equal_the_reference_at_odd_widths(body: str, threads: int) -> None:
    rng = np.random.default_rng(4)
    workers, keys = pool(body, threads), digest_keys(3 * max(WIDTHS) + KEY_PADDING)
    for rows in (1, 2, 3, 17, 67):
        sources = [floats(rng, 67, width) for width in WIDTHS]
        firsts = [int(rng.integers(0, 2 * max(WIDTHS))) for _ in WIDTHS]
        columns = [2 * i + 1 for i in range(len(WIDTHS))]
        found = [np.full((67, 2 * len(WIDTHS) + 1), 9, np.uint64) for _ in range(2)]
        for module, threads_of, out in zip(
            (native, reference), (workers, None), found, strict=True
        ):
            module.Digest(threads_of, sources, firsts, columns, keys, out).run(rows)
        assert np.array_equal(*found)
        assert (found[0][rows:] == 9).all() and (found[0][:, ::2] == 9).all()
        assert int(found[0][rows - 1, 1]) == by_hand(sources[0][rows - 1], firsts[0])


@needs_native
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (3, 16), (2, 80)])
def test_native_stored_keys_and_values_equal_the_reference(body: str, heads: int, dim: int) -> None:
    rng = np.random.default_rng(5)
    k, v = floats(rng, 6, heads, dim, 32), floats(rng, 6, heads, 32, dim)
    table = np.array([[3, 1, 0], [5, 2, 4]], np.int32)
    slots, positions = ints(0, 1, 1, 0), ints(0, 95, 31, 64)
    keys = digest_keys(40 * dim)
    for start, stop in ((0, heads), (heads - 1, heads), (0, 0)):
        found = [np.zeros((4, 5), np.uint64) for _ in range(2)]
        for module, threads, out in zip(
            (native, reference), (pool(body, 2), None), found, strict=True
        ):
            module.DigestKv(
                *(threads, k, v, table, slots, positions, start, stop, 7 * dim, 2, keys, out)
            ).run(4)
        assert np.array_equal(*found)
        if stop == heads and start == 0:
            want = k[5, :, :, 31].reshape(-1)  # row 2: slot 1, position 31, block 0, page 5
            assert int(found[0][2, 2]) == by_hand(want, 7 * dim)
            assert int(found[0][2, 3]) == by_hand(v[5, :, 31].reshape(-1), 7 * dim)


@needs_native
@pytest.mark.parametrize("body", BODIES)
def test_native_rows_of_weights_equal_the_reference_in_every_storage(body: str) -> None:
    rng = np.random.default_rng(6)
    keys = digest_keys(2048)
    wide = floats(rng, 37, 96)
    held: list[Any] = [
        pack_lanes(wide),
        pack_lanes(wide.astype(np.float16)),
        pack_lanes((wide.view(np.uint32) >> 16).astype(np.uint16)),
        pack_q8_0(
            rng.integers(-127, 128, (37, 96)).astype(np.int8),
            rng.normal(0, 1, (37, 3)).astype(np.float16),
        ),
    ]
    for panels in held:
        out, want = np.zeros(37, np.uint64), np.zeros(37, np.uint64)
        native.digest_panels(pool(body, 2), panels, keys, 96, out)
        reference.digest_panels(reference.Pool(), panels, keys, 96, want)
        assert np.array_equal(out, want)
        assert int(out[36]) == by_hand(unpack(panels, 37)[36])
    nan_padded = packed(wide)
    out = np.zeros(37, np.uint64)
    native.digest_panels(pool(body), nan_padded, keys, 96, out)
    assert np.array_equal(out, digest_of(wide))


@needs_native
@pytest.mark.parametrize("body", BODIES)
def test_every_count_of_outputs_is_hashed_to_the_last(body: str) -> None:
    wide, keys = floats(np.random.default_rng(7), 73, 16), digest_keys(24)
    for outputs in range(1, 74):
        out = np.full(outputs, 9, np.uint64)
        native.digest_panels(pool(body), pack_lanes(wide[:outputs]), keys, 16, out)
        assert np.array_equal(out, digest_of(wide[:outputs]))


@needs_native
def test_a_wrong_argument_is_refused_before_anything_is_read() -> None:
    keys, out = digest_keys(64), np.zeros((4, 3), np.uint64)
    x = np.zeros((4, 16), np.float32)
    workers = pool("scalar")
    for sources, firsts, columns, table in (
        ([x], [0], [3], keys),
        ([x], [-1], [0], keys),
        ([x], [64], [0], keys),
        ([x], [2**63 - 1], [0], keys),
        ([x], [2**63 - 24], [0], keys),
        ([x], [0, 1], [0], keys),
        ([x], [0], [0], digest_keys(8)),
    ):
        with pytest.raises(ValueError, match=r"needed|possible|differ"):
            native.Digest(workers, sources, firsts, columns, table, out)
    pages, place = np.zeros((1, 1, 8, 32), np.float32), np.zeros(4, np.int32)
    values = pages.reshape(1, 1, 32, 8)
    for first, column in ((2**63 - 1, 0), (2**63 - 16, 0), (0, -1), (0, 2), (0, 2**63 - 1)):
        with pytest.raises(ValueError, match=r"needed|possible"):
            native.DigestKv(
                workers, pages, values, place[:1, None], place, place, 0, 1, first, column, keys,
                out,
            )  # fmt: skip
    panels, word = np.zeros((1, 16, 8), np.float32), np.zeros(8, np.uint64)
    for inputs in (-1, 2**62):
        with pytest.raises(ValueError, match=r"inputs is below 0|panels has shape"):
            native.digest_panels(workers, panels, keys, inputs, word)
    with pytest.raises(ValueError, match="uint64"):
        native.Digest(workers, [x], [0], [0], keys, np.zeros((4, 3), np.int64))
    with pytest.raises(ValueError, match="0 to 4"):
        native.Digest(workers, [x], [0], [0], keys, out).run(5)


def test_every_row_name_and_shape_of_every_tensor_is_in_the_hash() -> None:
    rng = np.random.default_rng(0)
    shapes = {"a": (9, 16), "b": (16,), "c": (17, 16), "d": (17, 16), "e": (1, 16)}
    tensors = {name: rng.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}

    def hashed(held: dict[str, F32]) -> str:
        kinds = {1: "vector", 2: "matrix"}
        image = SimpleNamespace(
            directory={
                name: SimpleNamespace(kind=kinds[x.ndim], shape=x.shape, stored_columns=x.shape[-1])
                for name, x in held.items()
            },
            vector=held.__getitem__,
            panels=lambda name: pack_lanes(held[name]),
        )
        return weights_sha256(cast(WeightImage, image), threads=1)

    found = [hashed(tensors)]
    for name, values in tensors.items():
        for index in (0, -1):
            spoilt = values.copy()
            spoilt.reshape(-1).view(np.uint32)[index] ^= 1
            found.append(hashed({**tensors, name: spoilt}))
    found.append(hashed({**tensors, "c": tensors["d"], "d": tensors["c"]}))
    found.append(hashed({**tensors, "e": tensors["e"][0]}))  # a vector, not a matrix of one row
    rest = {name: x for name, x in tensors.items() if name != "e"}
    found.append(hashed({**rest, "f": tensors["e"]}))
    assert len(set(found)) == len(found)


# --- the program --------------------------------------------------------------------------------


CUTS = [(1, 1), (2, 1), (3, 2), (5, 1), (9, 3)]


def programs(config: ModelConfig, tp: int, pp: int, *, record: bool) -> list[Program]:
    layout = plan(config, tp=tp, pp=pp, leaf=64)
    return [
        program(config, f32_profile(), layout, rank, record=record) for rank in range(layout.world)
    ]


@pytest.mark.parametrize(("tp", "pp"), CUTS)
def test_recording_only_adds_ops(tp: int, pp: int) -> None:
    """Off, not one op is another; on, the same ops stand in the same order."""
    off = programs(ADVERSARIAL_9_3, tp, pp, record=False)
    on = programs(ADVERSARIAL_9_3, tp, pp, record=True)
    for without, with_digests in zip(off, on, strict=True):
        assert not any(op.points or op.kind.startswith("digest") for op in without.ops)
        left = tuple(op for op in with_digests.ops if not op.kind.startswith("digest"))
        assert left == without.ops and len(left) < len(with_digests.ops)
        names = [op.name for op in with_digests.ops]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", MODELS)
def test_every_kv_head_has_one_owner(name: str) -> None:
    config = MODELS[name]
    for tp in range(1, config.num_heads + 1):
        layout = plan(config, tp=tp, pp=1, leaf=64)
        owned = [range(*layout.owned_kv_heads(i, config.q_per_kv)) for i in range(tp)]
        assert sorted(head for heads in owned for head in heads) == list(range(config.num_kv_heads))
        for index, heads in enumerate(owned):
            assert set(heads) <= set(range(*layout.kv_heads(index, config.q_per_kv)))


@pytest.mark.parametrize(("tp", "pp"), [*CUTS, (4, 2)])
def test_every_point_of_every_layer_is_hashed_and_has_a_column_of_its_own(tp: int, pp: int) -> None:
    config = ADVERSARIAL_14_2 if (tp, pp) == (4, 2) else ADVERSARIAL_9_3
    hashed: dict[tuple[int, str], int] = {}
    for each in programs(config, tp, pp, record=True):
        columns = []
        for op in each.ops:
            for point in op.points:
                hashed[op.layer, point] = hashed.get((op.layer, point), 0) + 1
                columns.append(each.digest_column(op.layer, point))
        assert len(set(columns)) == len(columns)
        assert all(0 <= column < each.digest_columns for column in columns)
    layers = {(layer, point) for layer in range(config.num_layers) for point in LAYER_POINTS}
    assert set(hashed) == layers | {(-1, "embed"), (-1, "logits")}
    once = [(layer, point) for layer, point in hashed if point in ("reduce_o", "reduce_down")]
    assert all(hashed[place] == 1 for place in [*once, (-1, "embed")])
