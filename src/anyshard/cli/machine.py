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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Machine", "read_machine", "read_memory"]

_ISA: Final = (
    "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8",
    "asimd", "asimddp", "sve", "bf16", "i8mm",
)  # fmt: skip
_UNLIMITED: Final = 1 << 60  # cgroup v1 writes a number near 2^63 where there is no limit


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts, as the kernel gives them; bytes for memory.

    cores: that this process may run on. core_quota: how many cores' time its cgroup grants, None
    for no limit. isa: of those that matter here. huge_pages, shared_huge_pages: the setting for
    private memory (KV, buffers) and for shared memory (weights), None where the kernel has none.
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
    shared_huge_pages: str | None
    compiler: str | None
    python_headers: bool
    torch_extra: bool


def read_machine(root: Path = Path("/")) -> Machine:
    """Look; a file that is not there leaves its fact empty.

    Held by: test_doctor.py.
    """
    cpu = _text(root / "proc/cpuinfo")
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
        core_quota=_core_quota(root),
        memory_total=memory[0],
        memory_free=memory[1],
        huge_pages=_chosen(settings / "enabled"),
        shared_huge_pages=_chosen(settings / "shmem_enabled"),
        compiler=_compiler(),
        python_headers=Path(sysconfig.get_path("include"), "Python.h").exists(),
        torch_extra=importlib.util.find_spec("torch") is not None,
    )


def read_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """(in all, free) bytes: what Linux calls available, or what the cgroups leave if that is less.

    None where the system does not say. Held by: test_doctor.py.
    """
    text = _text(root / "proc/meminfo")
    memory = {key: int(kb) for key, kb in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    if not memory.keys() >= {"MemTotal", "MemAvailable"}:
        return None
    total, free = (1024 * memory[key] for key in ("MemTotal", "MemAvailable"))
    for limit, used in _cgroup_memory(root):
        total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _chosen(path: Path) -> str | None:
    """`madvise` of "always [madvise] never"."""
    found = re.search(r"\[(\w+)\]", _text(path))
    return found.group(1) if found else None


def _compiler() -> str | None:
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's group and those above it; of cgroup v1 for `controller`."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup"
        if controllers:
            if controller not in controllers.split(","):
                continue
            base /= controller
        own = Path(path.lstrip("/"))
        yield from (base / folder for folder in (own, *own.parents))


def _cgroup_memory(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) bytes of each group with a limit; cache that can be dropped is not used."""
    for folder in _cgroups(root, "memory"):
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is None or used is None or limit >= _UNLIMITED:
                continue
            pattern = rf"^{cache_name} (\d+)$"
            cache = re.search(pattern, _text(folder / "memory.stat"), re.MULTILINE)
            yield limit, used - (int(cache.group(1)) if cache else 0)


def _core_quota(root: Path) -> float | None:
    quotas = []
    for folder in _cgroups(root, "cpu"):
        found = re.fullmatch(r"(\d+) (\d+)", _text(folder / "cpu.max").strip())
        if found and int(found.group(2)):
            quotas.append(int(found.group(1)) / int(found.group(2)))
    return min(quotas, default=None)
