"""What a split will take is counted before anything is loaded, and refused where it is short."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from gguf_files import TINY, write_tiny_gguf
from grid import the_model
from models import ADVERSARIAL_9_3, write_hf_model

from anyshard.checkpoint import build_image, open_checkpoint
from anyshard.checkpoint.cache import load_image
from anyshard.cli import main, running
from anyshard.cli.memory import MemoryNeed, memory_need
from anyshard.config import Profile
from anyshard.engine import Engine
from anyshard.epoch import EngineOptions
from anyshard.errors import LayoutError
from anyshard.fidelity.log import digest_bytes
from anyshard.layout import KvShard, plan
from anyshard.loading import f32_profile
from anyshard.model import program
from anyshard.speculate import OpenGate, OracleDrafter, Speculator
from anyshard.verify.driver import open_group
from anyshard.verify.naive import rank_body
from anyshard.worker import Worker

MIB = 1 << 20
COMMAND = (sys.executable, "-m", "anyshard.cli")
CGROUPS = Path("/sys/fs/cgroup/memory")  # of version 1


class Measured(Worker):
    """Notes what each rank has allocated: (buffers, KV), by rank."""

    seen: ClassVar[dict[int, tuple[int, int]]] = {}

    def _allocate(self, profile: Profile) -> None:
        super()._allocate(profile)
        arrays = {id(v): v for v in vars(self).values() if isinstance(v, np.ndarray)}
        if self.program.layout.splits_sequence:
            del arrays[id(self.q_RN)]  # in the region, where others read it
        buffers = sum(array.nbytes for array in arrays.values())
        self.seen[self.program.rank] = (buffers, self.kv.bytes)


@pytest.mark.parametrize(("record", "drafts"), [(False, 0), (True, 0), (False, 3)])
@pytest.mark.parametrize("kv_shard", ["heads", "sequence"])
@pytest.mark.parametrize("name", ["adversarial-9-3", "adversarial-9-3 w8"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (3, 1), (2, 3)])
def test_what_is_counted_is_what_ranks_allocate(
    tp: int, pp: int, name: str, kv_shard: KvShard, record: bool, drafts: int, tmp_path: Path
) -> None:
    served = the_model(name).served
    config, profile = served.config, served.profile
    layout = plan(config, tp=tp, pp=pp, kv_shard=kv_shard, leaf=profile.leaf)
    Measured.seen.clear()
    group = open_group(served, rank_body(Measured), forked=False)
    try:
        options = EngineOptions(
            max_model_len=99, max_num_seqs=5, chunk=40, record=record, drafts=drafts
        )
        speculator = None
        if drafts:
            speculator = Speculator(OracleDrafter({}, right=1.0, vocab=1), OpenGate(), most=drafts)
        engine = Engine(group, config, profile, layout, options, cores=2, speculator=speculator)
        engine.close()
        region_bytes = engine.control._region.layout.total_bytes
    finally:
        group.close()
    checkpoint = open_checkpoint(str(write_hf_model(tmp_path / "m", config, seed=1)))
    programs = [program(config, profile, layout, rank) for rank in range(layout.world)]
    need = memory_need(
        checkpoint, programs, tokens=99, num_seqs=5, chunk=40, record=record, drafts=drafts
    )
    log_bytes = 5 * 99 * digest_bytes(config) if record else 0
    if record:  # 40 rows of a chunk and 5 that decode are fewer
        log_bytes += 256 * 8 * sum(each.record_columns for each in programs)
    assert len(Measured.seen) == layout.world
    assert need.kv == sum(kv for _, kv in Measured.seen.values())
    allocated = sum(buffers for buffers, _ in Measured.seen.values())
    assert need.buffers == region_bytes + allocated + log_bytes


def test_ranks_that_import_torch_are_counted_with_it(tmp_path: Path) -> None:
    """Measured on two ranks of SmolLM2: 546 MiB resident each instead of 349."""
    checkpoint = open_checkpoint(str(write_hf_model(tmp_path / "m", ADVERSARIAL_9_3, seed=1)))
    layout = plan(checkpoint.config, tp=3, leaf=f32_profile().leaf)
    programs = [program(checkpoint.config, f32_profile(), layout, rank) for rank in range(3)]
    plain, shm, torch = (
        memory_need(checkpoint, programs, tokens=32, num_seqs=1, chunk=32, comm=comm)
        for comm in ("auto", "shm", "torch")
    )
    assert plain == shm
    assert torch == replace(shm, processes=shm.processes + 3 * (200 << 20))


def test_weights_are_those_of_the_image(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_hf_model(tmp_path / "m", ADVERSARIAL_9_3, seed=1)))
    profile = f32_profile()
    layout = plan(checkpoint.config, leaf=profile.leaf)
    programs = [program(checkpoint.config, profile, layout, 0)]
    image = build_image(checkpoint, threads=1)
    weights = memory_need(checkpoint, programs, tokens=32, num_seqs=1, chunk=32).weights
    assert image.bytes == weights
    image.close()


NEED = MemoryNeed(
    weights=500_000_000,
    kv=113_000_000_000,
    buffers=10_000_000,
    processes=200_000_000,
    num_seqs=300,
    tokens=8192,
)


@pytest.mark.parametrize(
    ("need", "remedy"),
    [
        (NEED, "lower --max-model-len or --max-num-seqs, end"),
        (replace(NEED, num_seqs=1), "lower --max-model-len, end"),
        (replace(NEED, kv=1, buffers=NEED.kv), "--max-num-seqs or --chunk, end"),
        (replace(NEED, processes=NEED.kv, kv=NEED.processes), "; take fewer ranks (-tp, -pp), or"),
        (
            replace(NEED, weights=NEED.kv, kv=NEED.weights),
            "; end other programs, or take a smaller model",
        ),
    ],
)
def test_a_shortage_is_told_with_both_numbers_and_what_helps(need: MemoryNeed, remedy: str) -> None:
    need.refuse_over(need.total)
    with pytest.raises(LayoutError, match=r"^113\.7 GB of memory are needed and 20\.0 GB") as e:
        need.refuse_over(20_000_000_000)
    assert remedy in str(e.value) and "\n" not in str(e.value)


INT8 = ("--kv-cache-dtype int8", replace(NEED, kv=19_000_000_000))  # fits
SEQUENCE = ("--kv-shard sequence", replace(NEED, kv=50_000_000_000))


@pytest.mark.parametrize(
    ("need", "remedy"),
    [
        (
            replace(NEED, savers=(INT8, SEQUENCE)),
            "--max-num-seqs, take --kv-cache-dtype int8 (KV 19.0 GB) or --kv-shard sequence "
            "(KV 50.0 GB), end other",
        ),
        (replace(NEED, savers=(SEQUENCE,)), "seqs, take --kv-shard sequence (KV 50.0 GB), end o"),
        (replace(NEED, savers=(("--kv-shard sequence", NEED),)), "or --max-num-seqs, end other"),
        (replace(NEED, kv=1, buffers=NEED.kv, savers=(SEQUENCE,)), "or --chunk, end other"),
        (
            replace(NEED, kv=1, buffers=NEED.kv, savers=(INT8,)),
            "or --chunk, take --kv-cache-dtype int8 (KV 19.0 GB), end other",
        ),
        (
            replace(NEED, weights=NEED.kv, kv=NEED.weights, savers=(INT8,)),
            "; end other programs, or take a smaller model",
        ),
    ],
)
def test_flags_that_keep_less_are_named_where_kv_is_short_or_they_are_enough(
    need: MemoryNeed, remedy: str
) -> None:
    with pytest.raises(LayoutError) as error:
        need.refuse_over(20_000_000_000)
    assert remedy in str(error.value) and "\n" not in str(error.value)


def test_sizes_that_no_machine_has_are_refused_in_no_time_and_space(tmp_path: Path) -> None:
    """4096 sequences of 2^24 tokens would be 2^31 pages, were they listed."""
    checkpoint = open_checkpoint(str(write_hf_model(tmp_path / "m", ADVERSARIAL_9_3, seed=1)))
    profile = f32_profile()
    layout = plan(checkpoint.config, leaf=profile.leaf)
    programs = [program(checkpoint.config, profile, layout, 0)]
    need = memory_need(checkpoint, programs, tokens=1 << 24, num_seqs=4096, chunk=256)
    assert need.kv == 4096 * (1 << 24) * 2 * 3 * 3 * 16 * 4


@pytest.fixture(autouse=True)
def terminated_as_before() -> Iterator[None]:
    """`main` sets what SIGTERM does."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[str]:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    yield str(tmp_path / "tiny.gguf")


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Makes the machine one with so many bytes free."""

    def set_free(free: int) -> None:
        monkeypatch.setattr(running, "read_memory", lambda: (1 << 40, free))

    yield set_free


def tiny_need(tiny: str, *, tokens: int, num_seqs: int) -> int:
    checkpoint, profile = open_checkpoint(tiny), f32_profile()
    layout = plan(checkpoint.config, leaf=profile.leaf)
    programs = [program(checkpoint.config, profile, layout, 0)]
    return memory_need(checkpoint, programs, tokens=tokens, num_seqs=num_seqs, chunk=256).total


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "MODEL", "--prompt", "abc", "--max-model-len", "128"),
        ("chat", "MODEL"),
        ("generate", "MODEL", "--prompt", "abc", "--prompt", "a", "--max-model-len", "128"),
    ],
)
def test_what_is_known_to_fail_is_refused_before_anything_is_forked(
    arguments: tuple[str, ...],
    tiny: str,
    have: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a process was forked"))
    have(tiny_need(tiny, tokens=128, num_seqs=1) - 1)
    assert main([word.replace("MODEL", tiny) for word in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "of memory are needed and 20" in err and "--max-model-len" in err


def test_sequences_in_flight_are_the_prompts_or_max_num_seqs(
    tiny: str, have: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Three prompts need room for three at once, and for two where two may run."""
    have(tiny_need(tiny, tokens=128, num_seqs=2))
    prompts = [word for text in ("a", "b", "c") for word in ("--prompt", text)]
    command = ["generate", tiny, "--max-model-len", "128", "--comm", "threads"]
    command += ["--max-tokens", "2", *prompts]
    assert main(command) == 2
    assert "KV of 3 sequences of 128 tokens" in capsys.readouterr().err
    assert main([*command, "--max-num-seqs", "2"]) == 0


@pytest.mark.ranks
@pytest.mark.parametrize("fits", [True, False])
def test_where_the_prompts_decide_nothing_is_packed_before_they_have(
    fits: bool,
    tiny: str,
    tmp_path: Path,
    have: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    packed, encoded = tmp_path / "packed", tmp_path / "encoded"

    def note_and_load(*arguments: object, **options: object) -> object:
        packed.write_text("late" if encoded.exists() else "early")
        return load_image(*arguments, **options)  # type: ignore[arg-type]

    admit = running.Opened.admit

    def note_and_admit(opened: running.Opened, tokens: int) -> None:
        is_exact = tokens > 32  # not the least of all, before the fork
        time.sleep(0.5 * is_exact)
        admit(opened, tokens)
        if is_exact:
            encoded.touch()

    monkeypatch.setattr("anyshard.loading.load_image", note_and_load)
    monkeypatch.setattr(running.Opened, "admit", note_and_admit)
    have(tiny_need(tiny, tokens=64, num_seqs=1))
    code = main(["generate", tiny, "--prompt", "abc", "--max-tokens", "50" if fits else "100"])
    err = capsys.readouterr().err
    when = packed.read_text() if packed.exists() else "never"
    assert (code, when) == ((0, "late") if fits else (2, "never")), err
    assert TINY.context == 128  # all of it would not fit, so the launcher has waited


def test_a_system_that_does_not_tell_its_memory_refuses_nothing(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "read_memory", lambda: None)
    assert main(["generate", tiny, "--prompt", "a", "--max-tokens", "2", "--comm", "threads"]) == 0


@pytest.fixture
def group_of_150_mib() -> Iterator[Path]:
    folder = CGROUPS / f"anyshard-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(150 * MIB))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield folder
    with contextlib.suppress(OSError):
        folder.rmdir()


def test_the_limit_of_a_real_container_is_what_is_free(tiny: str, group_of_150_mib: Path) -> None:
    """A model of 0.2 MB, in a group that holds no three processes of 64 MiB."""
    inside = f'echo $$ > {group_of_150_mib}/cgroup.procs && exec "$@"'
    command = [*COMMAND, "generate", tiny, "--prompt", "a", "--max-tokens", "2", "--json"]
    done = subprocess.run(
        ["sh", "-c", inside, "sh", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "MB of memory are needed and 1" in done.stderr and done.stderr.count("\n") == 1
    outside = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert len(json.loads(outside.stdout)["tokens"]) <= 2
