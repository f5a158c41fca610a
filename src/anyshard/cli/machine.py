"""What this machine has: cores, instruction sets, memory, huge pages, build tools. Reads only.

Linux tells it in files below /proc and /sys; `root` stands for another place to find them. Knows
nothing of models.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from anyshard.host import core_quota, read_memory, read_text

__all__ = ["Machine", "read_machine"]

_ISA: Final = (
    "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8",
    "asimd", "asimddp", "sve", "bf16", "i8mm",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts, as the kernel gives them; bytes for memory.

    cores: that this process may run on. core_quota: how many cores' time its cgroup grants, None
    for no limit. isa: of those that matter here. huge_pages: the setting for private memory, which
    weights, KV and buffers are in; None where the kernel has none.
    """

    architecture: str
    cpu: str
    isa: tuple[str, ...]
    cores: int
    cores_present: int
    core_quota: float | None
    memory_total: int
    memory_free: int
    huge_pages: str | None
    compiler: str | None
    python_headers: bool
    torch_extra: bool
    verify_extra: bool


def read_machine(root: Path = Path("/")) -> Machine:
    """Look; a file that is not there leaves its fact empty.

    Held by: test_doctor.py.
    """
    cpu = read_text(root / "proc/cpuinfo")
    flags = set(re.findall(r"^(?:flags|Features)\s*:\s*(.*)$", cpu, re.MULTILINE)[:1] or [""])
    here = {flag for line in flags for flag in line.split()}
    names = re.findall(r"^(?:model name|Processor)\s*:\s*(.*)$", cpu, re.MULTILINE)
    memory = read_memory(root) or (0, 0)
    settings = root / "sys/kernel/mm/transparent_hugepage"
    return Machine(
        architecture=platform.machine(),
        cpu=" ".join(names[0].split()) if names else "unnamed CPU",
        isa=tuple(flag for flag in _ISA if flag in here),
        cores=len(os.sched_getaffinity(0)),
        cores_present=os.cpu_count() or 1,
        core_quota=core_quota(root),
        memory_total=memory[0],
        memory_free=memory[1],
        huge_pages=_chosen(settings / "enabled"),
        compiler=_compiler(),
        python_headers=Path(sysconfig.get_path("include"), "Python.h").exists(),
        torch_extra=_is_installed("torch"),
        verify_extra=_is_installed("torch") and _is_installed("transformers"),
    )


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _chosen(path: Path) -> str | None:
    """`madvise` of "always [madvise] never"."""
    found = re.search(r"\[(\w+)\]", read_text(path))
    return found.group(1) if found else None


def _compiler() -> str | None:
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)
