"""Recorded runs: equal digests on every layout, bugs named by their op, files that are checked.

Bugs are those of tests/mutants. The digests of a record are compared with the unsplit run's.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import mutants
import numpy as np
import pytest
from gguf_models import write_gguf_model
from grid import Loaded, the_model
from models import MODELS, write_hf_model
from mutants.sequence import GroupOfTheRank, PartialGather
from test_stored import shaped

from anyshard.binder import Binder
from anyshard.checkpoint import open_checkpoint
from anyshard.config import ModelConfig
from anyshard.engine import Engine
from anyshard.epoch import EngineOptions
from anyshard.fidelity import (
    Disagreement,
    Manifest,
    Record,
    RecordError,
    RunDigests,
    compare_records,
    read_record,
    tokens_sha256,
    weights_sha256,
    write_record,
)
from anyshard.launcher import RankMain
from anyshard.op import LAYER_POINTS, Op
from anyshard.ops import KernelChoice
from anyshard.request import Request, Sampling
from anyshard.verify.cells import Cell, shuffled_pages
from anyshard.verify.driver import open_group, served
from anyshard.verify.naive import NaivePp, rank_body
from anyshard.verify.prompt import hashed_tokens
from anyshard.worker import Worker, rank_main

ADVERSARIAL = ("adversarial-9-3", "adversarial-14-2", "adversarial-head-80")
PROMPT, TOKENS = 41, 4


def cell(**split: Any) -> Cell:
    """A short request over two blocks, in threads of this process."""
    return Cell(axis="mixed", **{"prompt_tokens": PROMPT, "num_tokens": TOKENS, **split})


def manifest_of(
    model: Loaded, engine: Engine, request: Request, run: RunDigests, sha: str, fault: str | None
) -> Manifest:
    return Manifest(
        anyshard="0",
        date="2026-11-29T00:00:00+00:00",
        weights_sha256=_weights(model.name),
        model=json.loads(json.dumps(msgspec.to_builtins(model.served.config))),
        profile=model.served.profile.name,
        profile_sha256=model.served.profile.sha256(),
        tokens_sha256=tokens_sha256(np.array(request.prompt, np.int32)),
        sampling=request.sampling,
        max_tokens=request.max_tokens,
        finish="length",
        fault=fault,
        logits_sha256=sha,
        layout={"tp": engine.layout.tp, "pp": engine.layout.pp},
        machine={},
        positions=len(run.embed),
        layers=engine.config.num_layers,
        prompt_tokens=len(request.prompt),
        emitted_tokens=len(run.logits),
        disagreement=run.disagreement or msgspec.UNSET,
    )


@lru_cache(maxsize=8)
def _weights(name: str) -> str:
    return weights_sha256(the_model(name).served.image, threads=1)


def recorded(name: str, cell: Cell, *, rank_body: RankMain = rank_main) -> list[Record]:
    """The records of a cell's requests: the cell's own first, then its neighbours'."""
    model = the_model(name)
    served = model.served
    requests = [
        Request(
            prompt=model.prompt[: cell.prompt_tokens],
            max_tokens=cell.num_tokens,
            sampling=cell.sampling,
            want_logits=True,
        )
    ]
    if cell.batch > 1:
        requests += [
            Request(prompt=hashed_tokens(3 + 7 * i, served.config.vocab, seed=i), max_tokens=2 + i)
            for i in range(4)
        ]
    pages = len(requests) * 3
    group = open_group(served, rank_body, forked=cell.comm in ("shm", "torch"))
    try:
        engine = Engine(
            group,
            served.config,
            served.profile,
            cell.layout(model),
            EngineOptions(
                kernels=cell.kernels,
                comm=cell.comm,
                threads=cell.threads,
                chunk=min(cell.chunk, 64),
                max_num_seqs=len(requests),
                max_model_len=64,
                deadline_s=300.0,
                page_order=shuffled_pages(pages) if cell.shuffled else None,
                poison=cell.poison,
                record=True,
            ),
            cores=4,
        )
        order = requests[::-1] if cell.place == "last" else requests
        ids = {engine.submit(request): request for request in order}
        tokens: dict[int, list[int]] = {request_id: [] for request_id in ids}
        digests = {request_id: hashlib.sha256() for request_id in ids}
        faults: dict[int, str | None] = dict.fromkeys(ids)
        for event in engine.run():
            faults[event.request_id] = event.fault
            if event.token is not None:
                tokens[event.request_id].append(event.token)
            if event.logits is not None:
                digests[event.request_id].update(event.logits.astype("<f4").tobytes())
        found = []
        for request_id, request in ids.items():
            run = engine.digests(request_id, emitted=len(tokens[request_id]))
            sha = digests[request_id].hexdigest()
            made = manifest_of(model, engine, request, run, sha, faults[request_id])
            drawn = np.array(tokens[request_id], np.int32)
            found.append(Record(made, np.array(request.prompt, np.int32), drawn, run))
        engine.close()
    finally:
        group.close()
    return found[::-1] if cell.place == "last" else found


@lru_cache(maxsize=32)
def unsplit(name: str, prompt_tokens: int = PROMPT, num_tokens: int = TOKENS) -> Record:
    return recorded(name, cell(prompt_tokens=prompt_tokens, num_tokens=num_tokens))[0]


# --- layouts ------------------------------------------------------------------------------------


def cells(name: str) -> list[Cell]:
    heads, layers = MODELS[name].num_heads, MODELS[name].num_layers
    widths = [tp for tp in (1, 2, 3, 5) if tp <= heads]
    deep = [pp for pp in (1, 2) if pp <= layers]
    return [
        *(cell(tp=tp, pp=pp, chunk=chunk) for tp in widths for pp in deep for chunk in (7, 64)),
        cell(threads=2, chunk=32),
        cell(tp=2, threads=2, pp=2),
        cell(batch=5, place="first", chunk=5, tp=min(3, heads)),
        cell(batch=5, place="last", pp=2),
        cell(shuffled=True, poison=True, tp=2, chunk=9),
        cell(kernels="scalar", tp=2),
        cell(tp=2, kv_shard="sequence", threads=2),
        cell(tp=min(8, heads), pp=2, kv_shard="sequence", chunk=7, shuffled=True, poison=True),
        cell(batch=5, place="last", tp=min(3, heads), kv_shard="sequence"),
        cell(kernels="reference", tp=2, kv_shard="sequence", prompt_tokens=5, num_tokens=2),
        cell(kernels="reference", tp=2, pp=2, prompt_tokens=5, num_tokens=2),
    ]


CASES = [(name, each) for name in ADVERSARIAL for each in cells(name)]


@pytest.mark.parametrize(
    ("name", "split"), CASES, ids=[f"{name} {each.name}" for name, each in CASES]
)
def test_every_layout_chunk_batch_thread_and_body_records_the_same(name: str, split: Cell) -> None:
    want = unsplit(name, split.prompt_tokens, split.num_tokens)
    got = recorded(name, split)[0]
    found = compare_records(want, got)
    assert found.equal and found.only_in == (0, 0) and not found.tokens_differing
    assert found.positions == split.prompt_tokens + split.num_tokens - 1
    columns = 1 + MODELS[name].num_layers * len(LAYER_POINTS)
    assert found.digests == found.positions * columns + split.num_tokens
    assert got.manifest.logits_sha256 == want.manifest.logits_sha256
    assert got.manifest.disagreement is msgspec.UNSET
    for array in (got.digests.embed, got.digests.layers, got.digests.logits):
        assert (array != 0).all(), "a point that nobody hashed would be zero"


@pytest.mark.ranks
@pytest.mark.parametrize(
    "split",
    [
        cell(tp=2, pp=2, comm="shm", chunk=7),
        cell(tp=3, comm="shm", threads=2),
        cell(tp=3, comm="shm", kv_shard="sequence"),
        pytest.param(cell(tp=2, pp=2, comm="torch"), marks=pytest.mark.torch),
    ],
    ids=lambda split: split.name,
)
def test_forked_ranks_record_the_same(split: Cell) -> None:
    if split.comm == "torch":
        pytest.importorskip("torch")
    found = compare_records(unsplit("adversarial-9-3"), recorded("adversarial-9-3", split)[0])
    assert found.equal


def test_every_request_of_a_batch_has_a_record_of_its_own() -> None:
    batch = recorded("adversarial-9-3", cell(batch=5, place="first", chunk=6))
    other = recorded("adversarial-9-3", cell(batch=5, place="last", tp=2, pp=2, chunk=64))
    assert len(batch) == len(other) == 5
    for one, two in zip(batch, other, strict=True):
        assert compare_records(one, two).equal
    assert len({record.manifest.tokens_sha256 for record in batch}) == 5


@lru_cache(maxsize=2)
def seeded(seed: int, tp: int) -> Record:
    drawn = Sampling(temperature=0.8, seed=seed)
    return recorded("adversarial-9-3", cell(tp=tp, sampling=drawn))[0]


def test_drawn_tokens_are_compared_with_those_of_their_seed_only() -> None:
    assert compare_records(seeded(1, 1), seeded(1, 2)).equal
    (reason,) = compare_records(seeded(1, 1), seeded(2, 1)).incomparable
    assert reason == "other sampling: seed is 1 and 2"


# --- bugs ---------------------------------------------------------------------------------------


def first_of(name: str, split: Cell, bug: type[Worker]) -> str | None:
    """Where a bugged run first differs from the unsplit one."""
    want = unsplit(name, split.prompt_tokens, split.num_tokens)
    found = compare_records(want, recorded(name, split, rank_body=rank_body(bug))[0])
    if found.first is None:
        return None
    assert found.digests_differing > 0 and not found.equal
    return f"{found.first.op} at {found.first.position}"


@pytest.mark.parametrize(
    ("split", "bug", "place"),
    [
        (cell(tp=2), mutants.BiasPerRank, "layers.0.reduce_o at 0"),
        (cell(tp=2), mutants.MissingNode, "layers.0.reduce_o at 0"),
        (cell(tp=3), mutants.MissingNode, "layers.0.reduce_o at 0"),
        (cell(tp=3), mutants.SwappedMerge, "layers.0.reduce_o at 0"),
        (cell(tp=2), mutants.WrongKvHead, "layers.0.attention at 0"),
        (cell(tp=3, kv_shard="sequence"), GroupOfTheRank, "layers.0.attention at 0"),
        (cell(tp=2, kv_shard="sequence"), PartialGather, "layers.0.q at 0"),
        (cell(tp=2), mutants.StaleExchange, "layers.0.reduce_o at 0"),
        (cell(pp=3), NaivePp, "layers.1.hop at 0"),
        (cell(pp=2, chunk=20), mutants.PositionReset, "layers.2.q at 20"),
        (cell(chunk=20), mutants.ChunkEdge, "layers.0.attention at 20"),
        (cell(kernels="scalar"), mutants.LostLane, "layers.0.ffn at 0"),
        (cell(), mutants.PageReadTwice, f"layers.0.attention at {PROMPT}"),
    ],
    ids=lambda value: (
        value.__name__ if isinstance(value, type) else str(getattr(value, "name", ""))
    ),
)
def test_a_planted_bug_is_named_by_its_op(split: Cell, bug: type[Worker], place: str) -> None:
    assert first_of("adversarial-9-3", split, bug) == place


def test_a_bug_that_this_layout_hides_is_not_named() -> None:
    assert first_of("adversarial-9-3", cell(), mutants.MissingNode) is None
    assert first_of("adversarial-9-3", cell(chunk=64), mutants.ChunkEdge) is None


class OneBitBinder(Binder):
    """One bit of one element of one op's output, in one layer."""

    kind, layer = "", 0

    def bind(self, op: Op) -> Callable[[int], None]:
        run = super().bind(op)
        if (op.kind, op.layer) != (self.kind, self.layer):
            return run
        target = {"qkv": self.w.q_RN, "attention": self.w.a_RN, "gate_up": self.w.f_RF}
        buffer = target.get(op.kind, self.w.x_RD).view(np.uint32)

        def flipped(rows: int) -> None:
            run(rows)
            buffer[rows - 1, -1] ^= 1

        return flipped


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize(
    ("kind", "point"),
    [
        ("qkv", "q"),
        ("attention", "attention"),
        ("reduce_o", "reduce_o"),
        ("gate_up", "ffn"),
        ("reduce_down", "reduce_down"),
    ],
)
def test_one_bit_of_any_op_is_named(kind: str, point: str, layer: int) -> None:
    binder = type("Flip", (OneBitBinder,), {"kind": kind, "layer": layer})
    worker = type("Flipping", (Worker,), {"binder_type": binder})
    last = f"layers.{layer}.{point} at {PROMPT - 1}"
    assert first_of("adversarial-9-3", cell(), worker) == last


class OtherKey(Worker):
    """A stored key of layer 1 loses its last bit before it is read."""

    class binder_type(Binder):
        def _digest_attention(self, op: Op) -> Callable[[int], None]:
            run = super()._digest(op)
            keys = self.w.kv.keys(op.layer).view(np.uint32)

            def spoilt(rows: int) -> None:
                if op.layer == 1:
                    keys[self.w.page_table[0, 0], 0, 0, 3] ^= 1
                run(rows)

            return spoilt


def test_a_stored_key_is_named_though_no_output_of_its_step_has_changed() -> None:
    assert first_of("adversarial-9-3", cell(), OtherKey) == "layers.1.k at 3"


def test_a_token_that_the_logits_do_not_give_is_named() -> None:
    record = unsplit("adversarial-9-3")
    tokens = record.tokens.copy()
    tokens[1] += 1
    found = compare_records(record, replace(record, tokens=tokens))
    assert found.first is not None and found.first.op == "token"
    assert (found.first.position, found.tokens_differing) == (PROMPT, 1)


def test_logits_that_the_ranks_did_not_hash_are_named() -> None:
    """Every digest is equal, and what the front was given is not."""
    record = unsplit("adversarial-9-3")
    other = replace(record, manifest=msgspec.structs.replace(record.manifest, logits_sha256="0"))
    for one, two in ((record, other), (other, record)):
        found = compare_records(one, two)
        assert found.first is not None and not found.equal
        assert (found.first.op, found.first.position) == ("gather_logits", None)
        assert (found.digests_differing, found.tokens_differing) == (0, 0)
    longer = unsplit("adversarial-9-3", PROMPT, 2)
    assert longer.manifest.logits_sha256 != other.manifest.logits_sha256
    assert compare_records(longer, other).equal, "another number of tokens, another hash"


def test_fields_of_a_configuration_that_an_earlier_build_did_not_have_have_their_default() -> None:
    record = unsplit("adversarial-9-3")
    plain = {field.name: field.default for field in fields(ModelConfig)}
    plain = {name: default for name, default in plain.items() if default is not MISSING}
    assert json.loads(json.dumps(plain)) == plain, "a record has it as it is"
    model = record.manifest.model
    assert model["o_bias"] and not model["qk_norm"]

    def without(*names: str) -> Record:
        kept = {name: value for name, value in model.items() if name not in names}
        return replace(record, manifest=msgspec.structs.replace(record.manifest, model=kept))

    for earlier in (without("qk_norm"), without("qk_norm", "rope_scaling"), without("context")):
        assert compare_records(earlier, record).equal and compare_records(record, earlier).equal
    (reason,) = compare_records(without("o_bias"), record).incomparable
    assert reason == "other models: o_bias is False and True"
    (reason,) = compare_records(record, without("hidden")).incomparable
    assert reason == f"other models: hidden is {model['hidden']} and None"


def test_a_step_that_failed_is_left_out_and_is_a_difference_to_one_that_did_not() -> None:
    """Pages full of NaN, and attention that does not mask them."""
    poisoned = cell(prompt_tokens=7, num_tokens=2, poison=True)
    right = recorded("adversarial-9-3", poisoned)[0]
    body = rank_body(mutants.Unmasked)
    failed = recorded("adversarial-9-3", poisoned, rank_body=body)[0]
    assert failed.manifest.fault is not None and failed.manifest.fault.startswith("layers.0.")
    assert (failed.manifest.positions, failed.manifest.emitted_tokens) == (0, 0)
    found = compare_records(right, failed)
    assert found.first is not None and (found.first.op, found.first.position) == ("fault", 0)
    assert compare_records(failed, failed).incomparable


def test_a_shorter_run_is_compared_as_far_as_it_goes() -> None:
    short = unsplit("adversarial-9-3", PROMPT, 2)
    found = compare_records(short, unsplit("adversarial-9-3"))
    assert found.equal and found.only_in == (0, TOKENS - 2)
    assert (found.positions, found.tokens) == (PROMPT + 1, 2)


def test_what_makes_runs_incomparable_is_said() -> None:
    record = unsplit("adversarial-9-3")
    other = unsplit("adversarial-14-2")
    reasons = compare_records(record, other).incomparable
    assert reasons[0].startswith("other models: ffn is 424 and 616")
    assert any(reason.startswith("other weights: sha256 ") for reason in reasons)
    for change, said in (
        ({"profile_sha256": "00"}, "other profiles: sha256 "),
        ({"tokens_sha256": "00"}, "other prompt tokens: sha256 "),
        ({"weights_sha256": "00"}, "other weights: sha256 "),
    ):
        changed = replace(record, manifest=msgspec.structs.replace(record.manifest, **change))
        (reason,) = compare_records(record, changed).incomparable
        assert reason.startswith(said)
    elsewhere = msgspec.structs.replace(
        record.manifest, layout={"tp": 8}, machine={"cpu": "x"}, date="then", max_tokens=99
    )
    assert compare_records(record, replace(record, manifest=elsewhere)).equal


# --- weights ------------------------------------------------------------------------------------


def test_the_hash_of_weights_is_of_values_and_not_of_a_file(tmp_path: Path) -> None:
    """Q8_0, its float32 copy, its HF copy, every body, any threads; one bit is another hash."""
    config = shaped(32)
    weights = write_gguf_model(tmp_path / "q8.gguf", config, kind="Q8_0", seed=3)
    write_gguf_model(tmp_path / "wide.gguf", config, weights=weights)
    write_hf_model(tmp_path / "hf", config, seed=1, change=lambda own: own.update(weights))
    files = ("q8.gguf", "wide.gguf", "hf")
    images = [served(open_checkpoint(str(tmp_path / name))).image for name in files]
    assert images[0].storage["layers.0.q"] == "q8_0" and images[1].storage != images[0].storage
    bodies: list[tuple[int, KernelChoice]] = [(1, "auto"), (3, "scalar"), (1, "reference")]
    hashes = {weights_sha256(image, threads=n, kernels=k) for image in images for n, k in bodies}
    assert len(hashes) == 1
    spoilt = dict(weights)
    spoilt["layers.1.down"] = spoilt["layers.1.down"].copy()
    spoilt["layers.1.down"].view(np.uint32)[5, 7] ^= 1
    write_gguf_model(tmp_path / "spoilt.gguf", config, weights=spoilt)
    other = served(open_checkpoint(str(tmp_path / "spoilt.gguf"))).image
    assert weights_sha256(other, threads=2) not in hashes


# --- files --------------------------------------------------------------------------------------


def same(one: Record, two: Record) -> bool:
    arrays = [
        (one.prompt, two.prompt),
        (one.tokens, two.tokens),
        (one.digests.embed, two.digests.embed),
        (one.digests.layers, two.digests.layers),
        (one.digests.logits, two.digests.logits),
    ]
    return one.manifest == two.manifest and all(np.array_equal(a, b) for a, b in arrays)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    record, path = unsplit("adversarial-9-3"), tmp_path / "run.anyd"
    write_record(record, path)
    assert same(record, read_record(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.anyd"]
    write_record(unsplit("adversarial-14-2"), path)
    assert same(unsplit("adversarial-14-2"), read_record(path))


def test_every_cut_and_every_flipped_byte_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "run.anyd"
    write_record(unsplit("adversarial-9-3", 5, 2), path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    spots = [*range(40), *(int(spot) for spot in rng.integers(40, len(whole), 200))]
    for spot in spots:
        for content in (
            whole[:spot],
            whole[:spot] + bytes([whole[spot] ^ 0x41]) + whole[spot + 1 :],
        ):
            path.write_bytes(content)
            with pytest.raises(RecordError) as error:
                read_record(path)
            assert "\n" not in str(error.value) and str(path) in str(error.value)
    path.write_bytes(whole + b"x")
    with pytest.raises(RecordError, match="left over"):
        read_record(path)


def sealed(content: bytes) -> bytes:
    return content + hashlib.sha256(content).digest()


def forged(tmp_path: Path, **changes: Any) -> Path:
    """A record with a manifest that lies, and a hash that holds."""
    path = tmp_path / "forged.anyd"
    write_record(unsplit("adversarial-9-3", 5, 2), path)
    whole = path.read_bytes()
    (num_bytes,) = struct.unpack_from("<I", whole, 12)
    manifest = json.loads(whole[16 : 16 + num_bytes]) | changes
    text = json.dumps(manifest).encode()
    head = whole[:12] + struct.pack("<I", len(text)) + text
    path.write_bytes(sealed(head + whole[16 + num_bytes : -32]))
    return path


DISAGREEMENT: dict[str, Any] = {
    "position": 5,
    "layer": 0,
    "point": "reduce_o",
    "rank": 1,
    "other": 0,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"positions": 1 << 27}, "more positions than tokens"),
        ({"emitted_tokens": 1 << 27, "positions": (1 << 27) + 4}, "cut short"),
        ({"positions": 7}, "more positions than tokens"),
        ({"positions": 5}, "no position drew"),
        ({"emitted_tokens": 0}, "more positions than tokens"),
        ({"prompt_tokens": 0, "positions": 1}, "prompt_tokens is 0"),
        ({"layers": 0}, "layers is 0"),
        ({"layers": -1}, "layers is -1"),
        ({"layers": 1 << 40}, "layers is 1099511627776"),
        ({"layers": 2}, "num_layers of its model is"),
        ({"model": {"num_layers": 3.0}, "layers": 3}, "num_layers of its model is 3.0"),
        ({"model": {}}, "num_layers of its model is None"),
        ({"model": {"num_layers": 1}, "layers": 1}, "left over"),
        ({"points": ["q"]}, "digest points"),
        ({"sampling": {"temperature": -1.0}}, "cannot be read"),
        ({"more": 1}, "cannot be read"),
        ({"disagreement": DISAGREEMENT | {"position": 6}}, "where nothing ran"),
        ({"disagreement": DISAGREEMENT | {"position": -1}}, "where nothing ran"),
        ({"disagreement": DISAGREEMENT | {"layer": 99}}, "where nothing ran"),
        ({"disagreement": DISAGREEMENT | {"layer": None}}, "where nothing ran"),
        ({"disagreement": DISAGREEMENT | {"point": "embed"}}, "where nothing ran"),
        ({"disagreement": DISAGREEMENT | {"rank": 1 << 40}}, "where nothing ran"),
        ({"disagreement": DISAGREEMENT | {"point": "q"}}, "cannot be read"),
        ({"disagreement": None}, "cannot be read"),
        ({"model": 3}, "cannot be read"),
        ({"tokens_sha256": "00"}, "another hash"),
    ],
)
def test_a_manifest_that_lies_is_refused_before_memory_is_taken(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(RecordError, match=said):
        read_record(forged(tmp_path, **changes))


def test_ranks_that_disagree_are_on_file_and_others_leave_no_word_of_it(tmp_path: Path) -> None:
    """Which builds from before there was such a field can read."""
    path = forged(tmp_path, disagreement=DISAGREEMENT)
    found = read_record(path)
    assert found.manifest.disagreement == Disagreement(**DISAGREEMENT)
    write_record(found, path)
    assert same(found, read_record(path))
    write_record(unsplit("adversarial-9-3", 5, 2), path)
    assert b"disagreement" not in path.read_bytes()


def test_another_version_and_another_format_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.anyd"
    write_record(unsplit("adversarial-9-3", 5, 2), path)
    whole = path.read_bytes()
    path.write_bytes(sealed(whole[:8] + struct.pack("<I", 2) + whole[12:-32]))
    with pytest.raises(RecordError, match="is a record of version 2, and 1 can be read; a newer"):
        read_record(path)
    path.write_bytes(b"GGUF" + whole[4:])
    with pytest.raises(RecordError, match="is no record"):
        read_record(path)
    for absent in (tmp_path / "no.anyd", tmp_path):
        with pytest.raises(RecordError, match=r"cannot be read|not a file"):
            read_record(absent)


def test_a_write_that_fails_leaves_the_old_record_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.anyd"
    write_record(unsplit("adversarial-9-3", 5, 2), path)

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(RecordError, match=r"cannot be written .No space left"):
        write_record(unsplit("adversarial-14-2"), path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.anyd"]
    assert same(read_record(path), unsplit("adversarial-9-3", 5, 2))
