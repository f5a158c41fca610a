"""What benchmarks/peers.py makes of its figures, and when benchmarks/llama.py builds."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_modules import benchmark


@pytest.fixture
def peers() -> Iterator[ModuleType]:
    with benchmark("peers") as module:
        yield module


@pytest.fixture
def llama() -> Iterator[ModuleType]:
    with benchmark("llama") as module:
        yield module


# --- figures --------------------------------------------------------------------------------------


def measured(**rates: list[float]) -> dict[tuple[str, int], dict[str, list[float]]]:
    return {("decode", 1): rates}


def test_a_ratio_is_taken_within_a_round(peers: ModuleType) -> None:
    # a minute that slows both sides to a tenth: the medians alone would say 10 / 2
    rows = peers.compared(
        measured(a=[10.0, 1.0, 30.0], b=[5.0, 0.5, 2.0]), peers.Pair("decode", ("a",), ("b",))
    )
    assert [row["ratio"] for row in rows] == [{"median": 2.0, "least": 2.0, "most": 15.0}]


def test_of_several_arms_the_one_with_the_greatest_median_is_compared(peers: ModuleType) -> None:
    rates = measured(a=[1.0, 2.0, 9.0], b=[3.0, 3.0, 3.0], c=[4.0, 1.0, 1.0])
    (row,) = peers.compared(rates, peers.Pair("decode", ("a", "b"), ("c", "not measured")))
    assert (row["ours"], row["theirs"]) == ("b", "c")
    assert row["ratio"]["median"] == 3.0


def test_what_was_not_measured_has_no_row(peers: ModuleType) -> None:
    assert not peers.compared(measured(a=[1.0]), peers.Pair("decode", ("a",), ("b",)))
    assert not peers.compared(measured(a=[1.0], b=[1.0]), peers.Pair("prefill", ("a",), ("b",)))


@pytest.mark.parametrize(("least", "missed"), [(1.25, 1), (1.2, 0), (None, 0)])
def test_a_ratio_below_the_least_is_told(
    peers: ModuleType, least: float | None, missed: int
) -> None:
    pair = peers.Pair("decode", ("a",), ("b",), least=least)
    assert len(peers.below(peers.compared(measured(a=[6.0], b=[5.0]), pair))) == missed


def test_every_row_of_the_tables_has_the_columns_of_its_head(peers: ModuleType) -> None:
    names = {name: [2.0] for name in peers.ARMS if name != peers.OURS["int8"]}
    rates = {(task, n): names for task in ("decode", "prefill") for n in peers.THREADS}
    speeds = peers.speeds(rates)
    rows = [row for pair in peers.PAIRS for row in peers.compared(rates, pair)]
    for table in (speeds, peers.ratios(rows)):
        assert len({line.count("|") for line in table}) == 1
    assert "2.0 (2.0–2.0)" in speeds[2] and "int8" not in speeds[0]


# --- the build ------------------------------------------------------------------------------------

CMAKE = """#!/bin/sh
echo "$*" >> {calls}
test ! -e {broken}
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A bin/cmake that notes its calls in `calls` and fails while `broken` is there."""
    cmake = tmp_path / "bin" / "cmake"
    cmake.parent.mkdir()
    cmake.write_text(CMAKE.format(calls=tmp_path / "calls", broken=tmp_path / "broken"))
    cmake.chmod(0o755)
    return tmp_path


def test_a_finished_build_is_not_made_again(llama: ModuleType, environment: Path) -> None:
    llama.compile_targets(environment, environment, "speed", wanted="this CPU")
    calls = (environment / "calls").read_text()
    assert len(calls.splitlines()) == 2  # configure, build
    llama.compile_targets(environment, environment, "speed", wanted="this CPU")
    assert (environment / "calls").read_text() == calls
    llama.compile_targets(environment, environment, "serving", wanted="this CPU")
    assert len((environment / "calls").read_text().splitlines()) == 4


def test_a_build_that_broke_off_goes_on_and_another_cpu_begins_anew(
    llama: ModuleType, environment: Path
) -> None:
    (environment / "broken").touch()
    with pytest.raises(SystemExit, match="the build ended with 1"):
        llama.compile_targets(environment, environment, "speed", wanted="this CPU")
    compiled = environment / "build" / "some.o"
    compiled.touch()
    (environment / "broken").unlink()
    llama.compile_targets(environment, environment, "speed", wanted="this CPU")
    assert compiled.exists()
    llama.compile_targets(environment, environment, "speed", wanted="another CPU")
    assert not compiled.exists()


def test_the_source_is_the_vendored_tree_and_its_commit(llama: ModuleType, tmp_path: Path) -> None:
    files = {
        "package-1/setup.py": "",
        "package-1/.git/modules/vendor/llama.cpp/HEAD": "0c1e570\n",
        "package-1/vendor/llama.cpp/.git": "gitdir: elsewhere",
        "package-1/vendor/llama.cpp/src/llama.cpp": "int main;",
    }
    path = tmp_path / "package.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    with tarfile.open(path) as archive:
        assert llama.unpack(archive, tmp_path / "source") == "0c1e570"
    found = [p.relative_to(tmp_path / "source").as_posix() for p in tmp_path.glob("source/**/*")]
    assert sorted(found) == ["src", "src/llama.cpp"]
