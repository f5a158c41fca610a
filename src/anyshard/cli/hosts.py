"""One model over several hosts: how they find each other, and what the head has the others load.

The same command runs on every host; only the head reads prompts (a whole run of another host is in
member.py). Knows nothing of frames.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import sys
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import msgspec

from anyshard import __version__
from anyshard.cli.flags import HostFlags, SplitFlags
from anyshard.config import Arithmetic, KvType, WireType
from anyshard.errors import AnyshardError, OptionError, UserError
from anyshard.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anyshard.config import ModelConfig, Profile
    from anyshard.launcher import HostGroup, LauncherHandle, RankGroup

__all__ = [
    "Share",
    "agree",
    "closed",
    "from_torchrun",
    "hash_of",
    "head_group",
    "head_port",
    "refuse_over_hosts",
    "say",
]


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What a head tells the others to load: the cuts, the arithmetic, and who has which rank.

    `config`: a hash of the model's shapes. `record`: runs are recorded, which takes all weights.
    """

    layout: Layout
    arithmetic: Arithmetic
    kv: KvType
    wire: WireType
    profile_sha256: str
    config: str
    hosts: tuple[int, ...]
    record: bool

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        profile: Profile,
        layout: Layout,
        hosts: tuple[int, ...],
        *,
        record: bool,
    ) -> Share:
        """Of a model that is opened and cut."""
        return cls(
            layout=layout,
            arithmetic=profile.arithmetic,
            kv=profile.kv,
            wire=profile.wire,
            profile_sha256=profile.sha256(),
            config=hash_of(config),
            hosts=hosts,
            record=record,
        )


def hash_of(config: ModelConfig) -> str:
    """Of its shapes, hex."""
    return hashlib.sha256(repr(config).encode()).hexdigest()


def agree(name: str, mine: bytes, theirs: bytes) -> None:
    """Raises: UserError if a member has loaded another file than the head; payloads of loads."""
    from anyshard.launcher import printable
    from anyshard.loading import LoadReport

    here = LoadReport.of(mine)
    try:
        there = LoadReport.of(theirs)
    except msgspec.DecodeError as error:
        raise UserError(f"{name} does not say what it has loaded: {error}") from None
    if here.content_sha256 != there.content_sha256:
        hashes = printable(there.content_sha256[:12]), here.content_sha256[:12]
        raise UserError(
            f"{name} has other weights: its file has the hash {hashes[0]}, the one here "
            f"{hashes[1]}; copy the same file to both"
        )
    if there.note:
        say(printable(f"{name}: {there.note}"))


def from_torchrun(flags: HostFlags) -> HostFlags:
    """The flags, filled in from torchrun's environment where that started this process.

    Raises: OptionError for flags that contradict it, or several processes a host.
    """
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" not in environment:
        return flags
    try:
        nnodes, rank = (int(environment[name]) for name in ("GROUP_WORLD_SIZE", "GROUP_RANK"))
        address, _ = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise OptionError(
            f"torchrun's environment is not whole: {error}; start the command by torchrun, or "
            "unset TORCHELASTIC_RUN_ID"
        ) from None
    processes = environment.get("LOCAL_WORLD_SIZE", "1")
    if processes != "1":
        raise OptionError(
            f"torchrun starts {processes} processes a host; take --nproc-per-node 1: anyshard "
            "forks the ranks of a host itself, of -tp times -pp on all hosts"
        )
    if flags.num_hosts not in (1, nnodes):
        raise OptionError(
            f"--nnodes is {flags.nnodes} and torchrun's {nnodes}; leave it to torchrun"
        )
    if flags.node_rank not in (None, rank):
        raise OptionError(
            f"--node-rank is {flags.node_rank} and torchrun's {rank}; leave it to torchrun"
        )
    if nnodes == 1:
        return flags
    return replace(
        flags,
        nnodes=nnodes,
        node_rank=rank,
        master_addr=address,
    )


def _store_key() -> tuple[str, int, str] | None:
    """Address and port of torchrun's store, and the key of the head's port; None without one."""
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    run = environment["TORCHELASTIC_RUN_ID"], environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), f"anyshard/{'/'.join(run)}"


def _through_store(flags: HostFlags, value: str | None) -> str:
    """Put a value into torchrun's store, or wait for it there; in a process of its own, since that
    imports torch."""
    from anyshard.launcher import fork_launcher

    store = _store_key()
    assert store is not None
    address, port, key = store

    def ask(progress: object) -> tuple[object, bytes]:
        from anyshard.comm.torch import through_store

        found = through_store(address, port, key, value, timeout_s=flags.join_timeout)
        return None, found.encode()

    def no_rank(seat: object) -> None:
        raise AssertionError("no rank is started here")

    with closed(fork_launcher(ask, no_rank)) as group:
        return group.wait_loaded().decode()


G = TypeVar("G", bound="RankGroup")


@contextmanager
def closed(group: G) -> Iterator[G]:
    """The group, closed at the end; other hosts hear of how it ended."""
    code = 0
    try:
        yield group
    except BaseException as error:
        code = error.exit_code if isinstance(error, AnyshardError) else 1
        if isinstance(error, KeyboardInterrupt):
            code = 128 + signal.SIGINT
        raise
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C changes nothing
        try:
            group.close(exit_code=code)
        finally:
            signal.signal(signal.SIGINT, before)


def head_group(
    local: LauncherHandle, flags: HostFlags, share: Share, *, deadline_s: float
) -> HostGroup:
    """The rank group of all hosts, of which `local` is the head's; takes it over.

    Raises: OptionError where the head cannot listen.
    """
    from anyshard.launcher import HostGroup, Terms, listen

    assert flags.master_addr is not None
    by_torchrun, listening = _store_key() is not None, None
    try:
        listening = listen(flags.master_addr, 0 if by_torchrun else flags.master_port)
        if by_torchrun:
            _through_store(flags, str(listening.getsockname()[1]))
    except BaseException:
        if listening is not None:
            listening.close()
        local.close()
        raise
    terms = Terms(
        nnodes=flags.num_hosts,
        version=__version__,
        share=msgspec.msgpack.encode(share),
        agree=agree,
        tell=say,
        join_s=flags.join_timeout,
    )
    return HostGroup(local, listening, terms, deadline_s=deadline_s)


def say(text: str) -> None:
    """A note to the user, at once."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def head_port(flags: HostFlags) -> int:
    """Where a member finds the head: --master-port, or what torchrun's store says."""
    return flags.master_port if _store_key() is None else int(_through_store(flags, None))


def refuse_over_hosts(split: SplitFlags, hosts: HostFlags) -> None:
    """Raises: OptionError for what several hosts cannot do, or not without torch."""
    if hosts.num_hosts == 1:
        return
    if importlib.util.find_spec("torch") is None:
        raise OptionError(
            "--nnodes needs torch on every host, and here it is not installed; run make setup in "
            "the clone, or pip install -e '.[torch]' there"
        )
    if split.comm == "threads":
        raise OptionError("--comm threads is for one host; leave it out with --nnodes")
    if split.balance is not None:
        raise OptionError(
            f"--layers {split.layers} measures all layers on one host; with --nnodes give numbers, "
            "which anyshard trace names"
        )
