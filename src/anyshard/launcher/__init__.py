"""Rank groups: forked processes or threads that run one rank_main each, epoch after epoch.

`fork_launcher` makes a process that loads once and forks the ranks of every epoch; any fault
ends the epoch, all its ranks are killed, and a new one can start in another layout. No process,
file or shared memory outlives the front, however it ends. `ThreadGroup` does the same in
threads, for tests and wide grids. `HostGroup` is one over several hosts, of which each `Member` has
a launcher of its own.

Knows nothing of models: what is loaded and what a rank does are functions passed in.
"""

from anyshard.launcher.handle import LauncherHandle, RankGroup, fork_launcher
from anyshard.launcher.hosts import HostGroup, Terms
from anyshard.launcher.meeting import (
    Hello,
    connect,
    interface_of,
    interface_text,
    listen,
    printable,
)
from anyshard.launcher.member import Member
from anyshard.launcher.seat import EpochSizes, Load, Progress, RankMain, Seat, Start
from anyshard.launcher.threads import ThreadGroup

__all__ = [
    "EpochSizes",
    "Hello",
    "HostGroup",
    "LauncherHandle",
    "Load",
    "Member",
    "Progress",
    "RankGroup",
    "RankMain",
    "Seat",
    "Start",
    "Terms",
    "ThreadGroup",
    "connect",
    "fork_launcher",
    "interface_of",
    "interface_text",
    "listen",
    "printable",
]
