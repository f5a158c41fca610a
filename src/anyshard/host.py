"""What this host grants the process: memory and cores' time, by the kernel and its cgroups.

Linux tells it in files below /proc and /sys; `root` stands for another place to find them. Reads
only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["core_quota", "free_memory", "read_memory", "read_text", "size_text"]

_UNLIMITED: Final = 1 << 60  # cgroup v1 writes a number near 2^63 where there is no limit


def read_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """(in all, free) bytes: what Linux calls available, or what the cgroups leave if that is less.

    None where the system does not say. Held by: test_doctor.py.
    """
    text = read_text(root / "proc/meminfo")
    memory = {key: int(kb) for key, kb in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    if not memory.keys() >= {"MemTotal", "MemAvailable"}:
        return None
    total, free = (1024 * memory[key] for key in ("MemTotal", "MemAvailable"))
    for limit, used in _cgroup_memory(root):
        total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    memory = read_memory(root)
    return None if memory is None else memory[1]


def core_quota(root: Path = Path("/")) -> float | None:
    """How many cores' time the cgroups grant, None for no limit. Held by: test_doctor.py."""
    quotas = []
    for folder in _cgroups(root, "cpu"):
        found = re.fullmatch(r"(\d+) (\d+)", read_text(folder / "cpu.max").strip())
        if found and int(found.group(2)):
            quotas.append(int(found.group(1)) / int(found.group(2)))
    return min(quotas, default=None)


def size_text(num_bytes: float) -> str:
    """Decimal, three digits or so: 24.0 kB, 1.2 MB, 538 MB, 1.2 GB."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    if num_bytes >= 1e7:
        return f"{num_bytes / 1e6:.0f} MB"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"


def read_text(path: Path) -> str:
    """Of a file of the kernel's; "" where there is none."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's group and those above it; of cgroup v1 for `controller`."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
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
            cache = re.search(pattern, read_text(folder / "memory.stat"), re.MULTILINE)
            yield limit, used - (int(cache.group(1)) if cache else 0)
