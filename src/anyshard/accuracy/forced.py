"""Our engine over a given text: an unsplit rank that returns the logits of every position.

The rank is the one that serves requests, on a thread of this process: same program, kernels and
buffers. Its bits do not depend on layout, chunk, threads or wire (`test_grid.py`), so this one
stands for all. With an `OpMeter`, the calls of the bound ops are followed by a look at what they
wrote; nothing else differs.

Letters: R rows of a frame, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np

from anyshard.accuracy.local import OpMeter
from anyshard.binder import Binder, FaultCode, Workspace
from anyshard.comm.control import PAGE, ROW
from anyshard.epoch import EngineOptions, plan_epoch
from anyshard.errors import UserError
from anyshard.launcher import Start, ThreadGroup
from anyshard.layout import plan
from anyshard.model import program
from anyshard.op import Op
from anyshard.ops import Body
from anyshard.ops.coefficients import KV_BLOCK, LOG2_E
from anyshard.ops.exact import F32
from anyshard.ops.kv_pages import Pages, widened_row
from anyshard.worker import ROW_LOGITS, ROW_SAMPLE, Served, Worker, rank_main

__all__ = ["CHUNK", "forced_logits", "query_factor"]

CHUNK: Final = 64  # positions a frame: 64 rows of 49,152 float64 logits are 25 MB
_SILENCE_S: Final = 600.0  # the meter's float64 runs inside an op


def query_factor(head_dim: int) -> float:
    """What our queries are multiplied with: log2(e) / sqrt(d), as a real number."""
    return LOG2_E / math.sqrt(head_dim)


def forced_logits(
    served: Served,
    tokens: Sequence[int],
    *,
    body: Body,
    threads: int,
    meter: OpMeter | None = None,
    worker_type: type[Worker] = Worker,
) -> Iterator[F32]:
    """Logits [R, V] of the next CHUNK positions of `tokens`, until all were given.

    `worker_type` is what runs; tests plant faults with it.

    Raises: UserError naming position and op where a value leaves float32's range; PeerLost.
    """
    config, profile = served.config, served.profile
    layout = plan(config, wire=profile.wire, leaf=profile.leaf)
    here = program(config, profile, layout, 0)
    options = EngineOptions(
        comm="solo",
        chunk=CHUNK,
        max_num_seqs=1,
        max_model_len=len(tokens),
        prompt_logits=CHUNK,
        deadline_s=_SILENCE_S,
    )
    epoch = plan_epoch([here], options, body=body, threads=threads, spin=False)
    watched = worker_type if meter is None else _metered(worker_type, meter)
    group = ThreadGroup(lambda progress: (served, b""), partial(rank_main, worker_type=watched))
    group.wait_loaded()
    try:
        control = group.start(
            Start(
                epoch=1,
                payload=msgspec.msgpack.encode(epoch.ranks),
                sizes=epoch.sizes,
                deadline_s=_SILENCE_S,
            )
        )
        pages = np.array([(0, block, page) for block, page in enumerate(epoch.pages)], PAGE)
        frames = _frames(tokens)
        sent = control.send_frame(frames[0], pages)
        for index, frame in enumerate(frames):
            result = control.wait_result(sent, poll=group.poll)
            _refuse_faults(result.faults, frame, config.num_layers)
            if index + 1 < len(frames):  # the rank goes on while the caller looks at these
                sent = control.send_frame(frames[index + 1])
            assert result.logits is not None
            yield result.logits
        control.send_stop()
    finally:
        group.end()


def _frames(tokens: Sequence[int]) -> list[np.ndarray]:
    """Rows of CHUNK positions each; all want their logits."""
    rows = np.zeros(len(tokens), ROW)
    rows["position"] = np.arange(len(tokens))
    rows["token"] = tokens
    rows["flags"] = ROW_SAMPLE | ROW_LOGITS
    return [rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)]


def _refuse_faults(faults: list[int], frame: np.ndarray, num_layers: int) -> None:
    bad = np.flatnonzero(faults)
    if len(bad):
        place = FaultCode.name(faults[int(bad[0])], num_layers)
        raise UserError(
            f"position {frame['position'][bad[0]]} of the text leaves the range of float32 in "
            f"{place}; a model that overflows cannot be compared, check its weights"
        )


def _metered(worker_type: type[Worker], meter: OpMeter) -> type[Worker]:
    """That worker, telling the meter what each op wrote."""

    class MeteredBinder(worker_type.binder_type):  # type: ignore[name-defined, misc]
        def bind(self, op: Op) -> Callable[[int], None]:
            run: Callable[[int], None] = super().bind(op)
            look = _looks(self.w, meter).get(op.kind)
            if look is None:
                return run

            def run_and_look(rows: int) -> None:
                run(rows)
                look(op.layer, rows)

            return run_and_look

    class Metered(worker_type):  # type: ignore[valid-type, misc]
        binder_type: type[Binder] = MeteredBinder

    return Metered


def _looks(w: Workspace, meter: OpMeter) -> dict[str, Callable[[int, int], None]]:
    """By kind of op: tell the meter what lies in the buffers, for a layer and a row count."""

    def stored(cache: Pages, rows: int, *, keys: bool) -> F32:
        """Rows [R, G d] of a layer's keys or values, out of the pages."""
        positions = w.positions[:rows]
        page, lane = w.page_table[0, positions // KV_BLOCK], positions % KV_BLOCK
        each = [widened_row(cache, *place, keys=keys) for place in zip(page, lane, strict=True)]
        return np.stack(each).reshape(rows, -1)

    def qkv(layer: int, rows: int) -> None:
        k_TN = stored(w.kv.keys(layer), rows, keys=True)
        meter.qkv(layer, w.q_RN[:rows], k_TN, stored(w.kv.values(layer), rows, keys=False))

    return {
        "embed": lambda layer, rows: meter.embed(w.tokens[:rows].tolist(), w.x_RD[:rows]),
        "qkv": qkv,
        "attention": lambda layer, rows: meter.attention(layer, w.a_RN[:rows]),
        "reduce_o": lambda layer, rows: meter.o_proj(layer, w.x_RD[:rows]),
        "gate_up": lambda layer, rows: meter.ffn(layer, w.f_RF[:rows]),
        "reduce_down": lambda layer, rows: meter.down_proj(layer, w.x_RD[:rows]),
        "round_wire": lambda layer, rows: meter.round_wire(w.x_RD[:rows]),
        "head": lambda layer, rows: meter.logits(w.x_RD[:rows], w.shard_RV[:rows]),
    }
