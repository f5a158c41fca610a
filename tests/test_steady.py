"""The token loop: after its first step ranks allocate nothing, nor does the front but for logits
that are asked for; and memory stays as it is.

What counts is preloaded into a run of its own (tests/steady.py), and seen to count.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anyshard.ops import native_module

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    native_module() is None or shutil.which("g++") is None,
    reason="needs the native module, and g++ for what counts",
)
LAYOUTS = [
    {},
    {"threads": 2, "arithmetic": "int8"},
    {"tp": 2},
    {"tp": 2, "temperature": 0.8},
    {"drafts": 2},
    {"tp": 2, "drafts": 2},
    {"tp": 2, "pp": 2, "temperature": 0.8, "drafts": 2},
    {"tp": 3, "arithmetic": "int8"},
    {"tp": 2, "kv": "int8"},
    {"tp": 2, "pp": 2},
    {"tp": 2, "pp": 3, "wire": "int8"},
    {"pp": 2, "micro_batches": 3},
    {"pp": 3, "micro_batches": 3, "wire": "int8", "trace_events": 100},
    {"tp": 2, "kv_shard": "sequence"},
    {"tp": 2, "kv_shard": "sequence", "kv": "int8"},
    {"tp": 3, "kv_shard": "sequence", "arithmetic": "int8", "threads": 2},
    {"drafts": 3},
    {"pp": 2, "drafts": 2, "windows": 6},
    {"tp": 2, "pp": 2, "drafts": 3, "windows": 4},
    {"tp": 2, "leak": "late"},  # ranks that wait for long, and say for whom
]
QUIET = {"native": 0, "numpy": 0}


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that counts."""
    built = tmp_path_factory.mktemp("counts") / "counts.so"
    source = HERE / "standalone" / "count_allocations.cpp"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["g++", *flags, "-o", built, source, "-ldl"], check=True)
    return built


def steady(asked: dict[str, Any], counts: Path | None = None) -> dict[str, Any]:
    """What tests/steady.py prints."""
    environment = dict(os.environ) | ({"LD_PRELOAD": str(counts)} if counts else {})
    command = [sys.executable, str(HERE / "steady.py"), json.dumps(asked)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_allocates_nothing(layout: dict[str, Any], counts: Path) -> None:
    found = steady({"steps": 40, **layout}, counts)
    assert found["front"] == QUIET
    assert found["ranks"] == [QUIET] * (layout.get("tp", 1) * layout.get("pp", 1))


def test_logits_cost_the_front_one_row_a_step_and_ranks_nothing(counts: Path) -> None:
    found = steady({"steps": 40, "tp": 2, "logits": True}, counts)
    assert found["ranks"] == [QUIET] * 2
    assert found["front"]["native"] == 0
    assert 39 <= found["front"]["numpy"] <= 42  # they are the caller's to keep


def test_what_counts_is_seen_to_count(counts: Path) -> None:
    numpy = steady({"steps": 20, "leak": "numpy"}, counts)["ranks"][0]
    assert numpy == {"native": 0, "numpy": 19}
    native = steady({"steps": 20, "leak": "native"}, counts)["ranks"][0]
    assert native["native"] >= 19
    assert native["numpy"] == 0


def drift(sizes: list[int]) -> float:
    """The largest change, of what the second round has left."""
    return max(abs(size - sizes[1]) for size in sizes[1:]) / sizes[1]


@pytest.mark.parametrize("split", [{"tp": 2}, {"pp": 2, "micro_batches": 3}], ids=str)
def test_ten_thousand_steps_leave_memory_as_it_is(split: dict[str, Any]) -> None:
    found = steady({"steps": 500, "rounds": 22, **split})
    assert len(found["ranks"]) == 2
    for sizes in (found["front"], *found["ranks"]):
        assert len(sizes) >= 22  # the first two are what a run takes
        assert drift(sizes) <= 0.01, sizes


@pytest.mark.parametrize("split", [{}, {"pp": 2, "windows": 4}], ids=str)
def test_ten_thousand_times_back_leave_memory_as_it_is(split: dict[str, Any]) -> None:
    found = steady({"steps": 250, "rounds": 22, "drafts": 3, **split})
    assert found["rollbacks"] > 10_000
    for sizes in (found["front"], *found["ranks"]):
        assert drift(sizes[:22]) <= 0.01, sizes


def test_a_leak_of_a_kilobyte_a_step_is_seen() -> None:
    """By then: a megabyte or two is what the heap may have free."""
    found = steady({"steps": 500, "rounds": 12, "leak": "memory"})
    assert drift(found["ranks"][0]) > 0.01
