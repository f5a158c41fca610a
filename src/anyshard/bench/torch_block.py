"""The MLP block on stock PyTorch, alone or over Gloo: a process that `blocks.py` starts.

    python -m anyshard.bench.torch_block RANK WORLD STORE HIDDEN FFN SEED ROWS_MAX

Columns of gate and up, and rows of down, are cut evenly; the partial sums meet in an all-reduce, as
Megatron-LM does it. Lines of JSON on stdin ask: `threads`, `rows`, `passes`, `out` (a file for the
result); one line on stdout answers: `times_us`, `comm_us`, lists by pass. Ends with its stdin.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.nn import functional

from anyshard.bench.block_rank import COPIES, BlockShape, random_block
from anyshard.launcher.process import die_with_parent

__all__ = ["TorchBlock", "main"]

_distributed: Any = distributed  # its stubs leave out most of what is used here
_EPS = 1e-6
_TIMEOUT = timedelta(seconds=60)


class TorchBlock:
    """One rank's share of the block, in several copies; letters as in block_rank."""

    def __init__(self, shape: BlockShape, *, rank: int, world: int, store: str) -> None:
        whole = random_block(shape)
        first, last = rank * shape.ffn // world, (rank + 1) * shape.ffn // world
        cut = (
            torch.from_numpy(whole.gate_FD[first:last]),
            torch.from_numpy(whole.up_FD[first:last]),
            torch.from_numpy(whole.down_DF[:, first:last]),
        )
        self._copies = [tuple(weight.clone().contiguous() for weight in cut) for _ in range(COPIES)]
        self._x_MD, self._norm_D = torch.from_numpy(whole.x_MD), torch.from_numpy(whole.norm_D)
        self._group = None if world == 1 else _gloo(store, rank, world)

    def run(self, rows: int, passes: int) -> tuple[list[float], list[float], torch.Tensor]:
        """(µs of each pass, µs of its all-reduce, the last result)."""
        x_MD = self._x_MD[:rows]
        times, comm = [], []
        out = x_MD
        for index in range(passes):
            gate, up, down = self._copies[index % COPIES]
            start = time.perf_counter()
            h_MD = functional.rms_norm(x_MD, (x_MD.shape[1],), self._norm_D, _EPS)
            f_MF = functional.silu(functional.linear(h_MD, gate)) * functional.linear(h_MD, up)
            y_MD = functional.linear(f_MF, down)
            before = time.perf_counter()
            if self._group is not None:
                self._group.allreduce([y_MD]).wait(_TIMEOUT)
            after = time.perf_counter()
            out = x_MD + y_MD
            times.append(1e6 * (time.perf_counter() - start))
            comm.append(1e6 * (after - before))
        return times, comm, out


def _gloo(store: str, rank: int, world: int) -> Any:
    options = _distributed.ProcessGroupGloo._Options()
    options._devices = [_distributed.ProcessGroupGloo.create_device(interface="lo")]
    options._timeout = _TIMEOUT
    return _distributed.ProcessGroupGloo(_distributed.FileStore(store, world), rank, world, options)


def main(arguments: list[str]) -> None:
    """Answer lines until stdin ends."""
    die_with_parent(os.getppid(), "torch-block")
    rank, world, store = int(arguments[0]), int(arguments[1]), arguments[2]
    hidden, ffn, seed, rows_max = map(int, arguments[3:7])
    torch.set_num_threads(1)
    shape = BlockShape(hidden=hidden, ffn=ffn, seed=seed, rows_max=rows_max)
    with torch.inference_mode():
        block = TorchBlock(shape, rank=rank, world=world, store=store)
        _answer({"ready": torch.__version__})
        for line in sys.stdin:
            asked = json.loads(line)
            torch.set_num_threads(asked["threads"])
            times, comm, out = block.run(asked["rows"], asked["passes"])
            if asked["out"]:
                out.numpy().tofile(asked["out"])
            _answer({"times_us": times, "comm_us": comm})


def _answer(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
