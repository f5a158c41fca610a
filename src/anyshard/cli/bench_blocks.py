"""`anyshard bench blocks`: one MLP block on one rank and on several, beside torch and Gloo.

Knows flags and what is printed; what is measured is `anyshard.bench`'s.
"""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import Parameter

from anyshard import __version__
from anyshard.cli.bench import (
    DEFAULT_REPETITIONS,
    FormatFlags,
    Printer,
    machine_record,
    machine_text,
)
from anyshard.cli.flags import SplitFlags, in_range, whole_numbers
from anyshard.cli.running import Opened, rank_group, wait_loaded
from anyshard.cli.screen import Bar
from anyshard.errors import DifferenceFound, OptionError
from anyshard.host import free_memory, size_text

if TYPE_CHECKING:
    from anyshard.bench.block_rank import BlockShape
    from anyshard.bench.blocks import BlockResult
    from anyshard.config import Arithmetic

__all__ = ["blocks"]

_UNIT: Final = 64  # of both sizes: a leaf
_PEER_BYTES: Final = 300 << 20  # of a process that imports torch, besides weights
_NUM_PEERS: Final = 3


def blocks(
    *,
    rows: Annotated[str, Parameter(show_env_var=False)] = "1,16,128",
    hidden: Annotated[int, Parameter(show_env_var=False)] = 896,
    ffn: Annotated[int, Parameter(show_env_var=False)] = 4864,
    seed: Annotated[int, Parameter(show_env_var=False)] = 0,
    repetitions: Annotated[
        int, Parameter(name=["--repetitions", "-r"], show_env_var=False)
    ] = DEFAULT_REPETITIONS,
    peer: Annotated[bool, Parameter(show_env_var=False)] = True,
    quantization: Literal["none", "int8"] = "none",
    kernels: Literal["auto", "vnni", "avx2", "scalar", "reference"] = "auto",
    comm: Literal["auto", "shm", "threads"] = "auto",
    output: FormatFlags = FormatFlags(),
) -> int:
    """Measure one MLP block, Qwen2-0.5B's by default: one rank, two threads, TP 2, TP 4.

    Every element that is not the one rank's is counted: exit code 4 if there is any. The same
    block on PyTorch, in one process and over Gloo, stands beside it where torch is installed.

    Parameters
    ----------
    rows
        Rows that go through the block at once.
    hidden
        Width of the residual.
    ffn
        Width inside.
    seed
        Of the random weights and rows.
    repetitions
        Rounds over all arms, after one to warm up.
    peer
        Also run torch, if it is installed.
    quantization
        Arithmetic of our ranks: float32 (none), or blocks of int8; torch has float32.
    kernels
        Kernel bodies; all have the same bits.
    comm
        Ranks as processes over shared memory (auto, shm), or as threads.
    """
    from anyshard.bench.block_rank import BlockShape

    counts = tuple(dict.fromkeys(whole_numbers("rows", rows, 1, 1024)))
    in_range("repetitions", repetitions, 1, 1000)
    in_range("seed", seed, 0, (1 << 64) - 1)
    for name, size, least, most in (("hidden", hidden, 64, 1 << 14), ("ffn", ffn, 512, 1 << 16)):
        in_range(name, size, least, most)
        if size % _UNIT:
            raise OptionError(f"--{name} is {size}; it can be a multiple of {_UNIT}")
    shape = BlockShape(hidden=hidden, ffn=ffn, seed=seed, rows_max=max(counts))
    flags = SplitFlags(quantization=quantization, kernels=kernels, comm=comm, cache=False)
    return _Blocks(shape, flags, counts, repetitions, peer, output).run()


class _Blocks:
    """Runs one checked command line."""

    def __init__(
        self,
        shape: BlockShape,
        flags: SplitFlags,
        rows: tuple[int, ...],
        repetitions: int,
        peer: bool,
        output: FormatFlags,
    ) -> None:
        self.shape, self.flags, self.rows = shape, flags, rows
        self.arithmetic: Arithmetic = "int8" if flags.quantization == "int8" else "f32"
        self.repetitions, self.peer, self.printer = repetitions, peer, Printer(output)

    def run(self) -> int:
        """Print the figures; returns the exit code. Raises: UserError, PeerLost."""
        from anyshard.bench.block_rank import BlockBoard, block_rank, random_block
        from anyshard.bench.blocks import ARMS, MOST_PASSES, RankBlocks, TorchBlocks
        from anyshard.ops import choose_body

        machine, body = machine_record(), choose_body(self.flags.kernels)
        self._admit()
        weights = random_block(self.shape)
        board = BlockBoard(weights.x_MD, ranks=max(arm.tp for arm in ARMS), passes=MOST_PASSES)
        opened = self._opened(weights)
        with ExitStack() as stack:
            loading = stack.enter_context(rank_group(opened, body=block_rank(board)))
            wait_loaded(loading, limit=opened.limit)
            reason = self._no_peer()
            peers = None if reason else stack.enter_context(TorchBlocks(self.shape))
            ours = RankBlocks(
                loading.group,
                self.shape,
                opened.profile,
                board,
                body=body,
                cores=machine["cores"],
                threads=self.flags.comm == "threads",
                deadline_s=self.flags.deadline,
            )
            results = self._measure(ours, peers)
        shape, torch = self.shape, "" if peers is None else peers.version
        record: dict[str, Any] = {
            "anyshard": __version__,
            "torch": torch or None,
            "hidden": shape.hidden,
            "ffn": shape.ffn,
            "seed": shape.seed,
            "profile": opened.profile.name,
            "profile_hash": opened.profile.sha256(),
            "kernels": body,
            "repetitions": self.repetitions,
            "machine": machine,
        }
        self._tell(results, record, reason or f"torch {torch}")
        different = any(each.differing for each in results if each.engine == "anyshard")
        return DifferenceFound.exit_code if different else 0

    def _opened(self, weights: Any) -> Opened:
        from anyshard.bench.block_rank import block_checkpoint
        from anyshard.bench.blocks import ARMS
        from anyshard.layout import plan
        from anyshard.loading import profile_of
        from anyshard.model import program

        checkpoint = block_checkpoint(self.shape, weights)
        profile = profile_of(self.arithmetic)
        layout = plan(checkpoint.config, tp=max(arm.tp for arm in ARMS), leaf=profile.leaf)
        return Opened(
            flags=self.flags,
            checkpoint=checkpoint,
            profile=profile,
            layout=layout,
            programs=tuple(
                program(checkpoint.config, profile, layout, rank) for rank in range(layout.world)
            ),
            num_seqs=1,
            limit=checkpoint.config.context,
            is_final=True,
            free=free_memory(),
        )

    def _admit(self) -> None:
        """Raises: OptionError where the weights alone would not fit, before they are made."""
        from anyshard.bench.block_rank import COPIES

        free, shape = free_memory(), self.shape
        need = shape.weight_bytes("f32") + COPIES * shape.weight_bytes(self.arithmetic)
        if free is not None and need > free:
            raise OptionError(
                f"{size_text(need)} of memory are needed for {COPIES + 1} copies of the block and "
                f"{size_text(free)} are free; lower --hidden or --ffn"
            )

    def _no_peer(self) -> str:
        """Why torch is left out, or nothing."""
        from anyshard.bench.block_rank import COPIES

        if not self.peer:
            return "torch was left out"
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed, so the block was not run on it"
        free = free_memory()
        copy_bytes = self.shape.weight_bytes("f32")
        need = _NUM_PEERS * (_PEER_BYTES + copy_bytes) + 2 * COPIES * copy_bytes
        if free is not None and need > free:
            return f"torch was left out: it needs {size_text(need)} of memory"
        return ""

    def _measure(self, ours: Any, peers: Any) -> list[BlockResult]:
        from anyshard.bench.blocks import ARMS, PEER_ARMS, measure_blocks

        done, arms = 0, len(ARMS) + (0 if peers is None else len(PEER_ARMS))
        total = arms * (self.repetitions + 1)

        def step(name: str) -> None:
            nonlocal done
            done += 1
            bar.update(done, total, name)

        with Bar("measuring") as bar:
            return measure_blocks(
                ours, peers, rows=self.rows, repetitions=self.repetitions, on_step=step
            )

    def _tell(self, results: list[BlockResult], record: dict[str, Any], torch: str) -> None:
        from anyshard.bench.tables import block_records, block_table

        shape = self.shape
        head = (
            f"MLP block {shape.hidden}→{shape.ffn}→{shape.hidden}, random weights of seed "
            f"{shape.seed} · {record['profile']} {record['profile_hash'][:12]} · "
            f"{record['kernels']} · {torch}"
        )
        foot = (
            f"µs: median of {self.repetitions} rounds after a warm-up, each of them the median of "
            "its passes; in comm: waiting for a peer included; differing: from one rank of the "
            f"same engine\n{machine_text(record['machine'])}"
        )
        record["rows"] = block_records(results)
        self.printer.tell(head, block_table(results), record, foot)
