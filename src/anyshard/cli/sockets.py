"""Which sockets of anyshard, and of what starts it, others can reach: as the kernel lists them.

Reads files below /proc, of processes that this user may look into; `root` stands for another place
to find them.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from anyshard.host import read_text

__all__ = ["Listener", "listeners"]

_PROGRAMS: Final = ("anyshard", "torchrun")
_MODULES: Final = {
    "anyshard": "anyshard",
    "anyshard.cli": "anyshard",
    "torch.distributed.run": "torchrun",
}
_LISTENS: Final = "0A"


@dataclass(frozen=True, kw_only=True)
class Listener:
    """A socket that a process listens at; `is_wide`: at every address of this host."""

    pid: int
    command: str
    address: str
    port: int
    is_wide: bool


def listeners(root: Path = Path("/")) -> list[Listener]:
    """Those of anyshard and torchrun, each once, in the order of their processes.

    Held by: test_doctor.py.
    """
    places = _places(root)
    found: dict[int, Listener] = {}
    for folder in sorted((root / "proc").glob("[0-9]*"), key=lambda each: int(each.name)):
        program = _program(read_text(folder / "cmdline").split("\0"))
        if not program:
            continue
        for inode in _sockets(folder):
            if inode in places and inode not in found:
                address, port = places[inode]
                found[inode] = Listener(
                    pid=int(folder.name),
                    command=program,
                    address=address,
                    port=port,
                    is_wide=address in ("0.0.0.0", "::"),
                )
    return list(found.values())


def _program(arguments: list[str]) -> str:
    """`torchrun` of `python3 -u /usr/bin/torchrun --nnodes 2`, "" if it is none of ours."""
    for number, each in enumerate(arguments[:8]):
        if (name := each.rpartition("/")[2]) in _PROGRAMS:
            return name
        if each == "-m":
            return _MODULES.get(arguments[number + 1] if number + 1 < len(arguments) else "", "")
        if number and not each.startswith("-"):
            break  # the script of an interpreter, and another's
    return ""


def _sockets(folder: Path) -> list[int]:
    """Inodes of a process's sockets."""
    found = []
    with contextlib.suppress(OSError):
        for entry in sorted((folder / "fd").iterdir()):
            with contextlib.suppress(OSError):
                if (link := os.readlink(entry)).startswith("socket:["):
                    found.append(int(link[8:-1]))
    return found


def _places(root: Path) -> dict[int, tuple[str, int]]:
    """Address and port of every listening socket, by inode."""
    found = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in read_text(root / "proc/net" / name).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTENS:
                host, _, port = fields[1].partition(":")
                found[int(fields[9])] = _address(host, family), int(port, 16)
    return found


def _address(digits: str, family: socket.AddressFamily) -> str:
    """Of the kernel's words, each in this machine's byte order."""
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    return socket.inet_ntop(family, b"".join(words))
