"""Capture: for one row of one layer, a rank copies what it holds after every op.

A second run of the frames of a run that differs; `verify/replay.py` reads the copies and names
the op, the rank and the value. A rank without a capture binds none of this: its list of calls is
another one. The copies are taken from the rank's own buffers and at its wires, outside of the
bound calls, so that a fault inside them cannot hide.

Knows nothing of what is right. Letters: P positions, L layers here, D hidden, n nodes of a rank,
J keys (positions 0..p), G KV heads here, d head dim, V vocabulary rows here.

Where ranks split the sequence, `keys` and `values` hold a rank's own positions and +0 for others;
`received_q_<tp>` is what the exchange of queries brought, `read_q_<tp>` the same after attention,
`states` [H, n, d + 2] what a rank's stripes have given all heads, `published_states` the same as
the exchange began, `received_states_<tp>` [H here, n, d + 2] what came, `read_states_<tp>` the same
once it was merged; states as `legible_states` makes them.

A file holds, of a row: `trail` [L+1, D] (residual at the start of the stage, and after each of its
layers), `table` (token, position, slot as this rank has them), `hop_out`, `hop_in`, `x_send` [D]
(of int8 wires `hop_out`, `hop_in`, `wire` as it was encoded, and `wire_in` as it is decoded, are
the row's bytes); of the layer: `x_in`, `q`, `keys`, `values` [J, G, ..] (as `packed_row` gives
them), `attention`, `ffn`, `x_o`, `x_down`, `x_round` (where the wire rounds), and for o and down
`nodes_*` [n, D] after the linear, `published_*` as the exchange began, `received_*_<tp>` as it
ended and `read_*_<tp>` once the reduce was over; of a sampled row `x_head`, `logits` [V],
`published_logits`, `received_logits_<tp>`, `gathered`; where nobody wants logits, `pair` (value and
bits of the id of this rank's best one, as it is sent).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from anyshard.comm.base import Comm, CommKind, Counters, Exchange, FloatArray
from anyshard.comm.control import Frame
from anyshard.kv import KvCache
from anyshard.model import Program
from anyshard.op import STATE_HEADER, Op, OpKind
from anyshard.ops.exact import EMPTY_MAX
from anyshard.ops.kv_pages import blank_row, packed_row
from anyshard.stripes import stripe_of

__all__ = ["Arrays", "Capture", "Tap", "TappedComm", "legible_states", "read_capture"]

Arrays = Mapping[str, npt.NDArray[Any]]
Run = Callable[[int], None]
NODES = {"o_proj": "o", "gather_o": "o", "reduce_o": "o"} | {
    "down_proj": "down",
    "gather_down": "down",
    "reduce_down": "down",
}


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank of an epoch copies, of the last frame that holds the row.

    position None: every position of the slot, but only `trail`, `logits` and `gathered` of each.
    layer None: no layer's ops. folder: an existing directory, private to this run; ranks write
    `<rank>.<frame>.npz`. They are complete once the front has seen all ranks end the frame
    (`FrontControl.statuses`).
    """

    slot: int
    folder: str
    position: int | None = None
    layer: int | None = None


class Tapped(Protocol):
    """The part of a worker that is looked at."""

    program: Program
    kv: KvCache
    comm: Comm
    is_sampler: bool
    x_RD: FloatArray
    wire_RB: npt.NDArray[np.uint8]
    q_RN: FloatArray
    a_RN: FloatArray
    f_RF: FloatArray
    shard_RV: FloatArray
    logits_RV: FloatArray
    tokens: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    row_slot: npt.NDArray[np.int32]
    page_table: npt.NDArray[np.int32]
    body: list[Run]
    head: list[Run]

    def step(self, frame: Frame) -> None:
        """One frame."""
        ...


class Tap:
    """Copies what a `Capture` asks for on one rank.

    `program` is that of the layout, not of the worker: a fault may have altered the worker's.
    `sample_flag`: the bit of a row that wants a token; `head`: the kinds of op that run over such
    rows only.
    """

    def __init__(
        self,
        capture: Capture,
        program: Program,
        comm: Comm,
        *,
        sample_flag: int,
        head: Collection[str],
    ) -> None:
        self.capture, self.program, self.sample_flag, self.head = (
            capture,
            program,
            sample_flag,
            head,
        )
        self.nodes = comm.exchange("nodes")
        self.parity = self.nodes.parity
        self.comm = TappedComm(comm, self)
        self.rows = 0
        self.index: npt.NDArray[np.intp] = np.zeros(0, np.intp)  # rows of the frame to copy
        self.sampled: npt.NDArray[np.intp] = np.zeros(0, np.intp)  # of those that want a token,
        self.places: npt.NDArray[np.intp] = np.zeros(0, np.intp)  # their numbers in the head
        self.op: Op | None = None
        self.gathered = False  # whether logits were exchanged in this frame
        self.found: dict[str, npt.NDArray[Any]] = {}
        self._counts = {
            NODES[op.kind]: op.sum.nodes_per_rank
            for op in program.ops
            if op.kind in ("reduce_o", "reduce_down")
        }

    @property
    def detailed(self) -> bool:
        """Whether it is one row that is copied."""
        return self.capture.position is not None

    def around(self, worker: Tapped) -> Callable[[Frame], None]:
        """The worker's step, watched; its bound calls are replaced."""
        ops = worker.program.ops
        head = [op for op in ops if op.kind in self.head]
        body = [op for op in ops if op.kind not in (*self.head, "gather_logits")]
        worker.body = [self._watched(worker, *each) for each in zip(body, worker.body, strict=True)]
        worker.head = [self._watched(worker, *each) for each in zip(head, worker.head, strict=True)]

        def step(frame: Frame) -> None:
            self._begin(frame)
            number = frame.sequence
            worker.step(frame)
            if len(self.index):
                self._end(worker, number)

        return step

    def _begin(self, frame: Frame) -> None:
        self.rows, self.found, self.gathered = len(frame.rows), {}, False
        mine = frame.rows["slot"] == self.capture.slot
        if self.detailed:
            mine &= frame.rows["position"] == self.capture.position
        self.index = np.flatnonzero(mine)
        drawn = np.flatnonzero(frame.rows["flags"] & self.sample_flag)
        self.places = np.flatnonzero(np.isin(drawn, self.index))
        self.sampled = drawn[self.places]
        if not len(self.index):
            return
        layers = self.program.layers[1] - self.program.layers[0]
        shape = (len(self.index), layers + 1, self.program.config.hidden)
        self.found["trail"] = np.full(shape, np.nan, np.float32)
        for name in ("token", "position"):
            self.found[name] = frame.rows[name][self.index].copy()
        self.found["sampled"] = frame.rows["position"][self.sampled].copy()

    def _end(self, worker: Tapped, sequence: int) -> None:
        if self.detailed:
            tables = (worker.tokens, worker.positions, worker.row_slot)
            self.found["table"] = np.array([table[self.index[0]] for table in tables])
            self.found["trail"] = self.found["trail"][0]
        if self.gathered and worker.is_sampler:
            self._keep("gathered", worker.logits_RV[self.places])
        path = Path(self.capture.folder) / f"{self.program.rank}.{sequence}.npz"
        arrays: dict[str, Any] = dict(self.found)
        np.savez(path, **arrays)

    def _watched(self, worker: Tapped, op: Op, run: Run) -> Run:
        ops = worker.program.ops
        starts = next((each for each in ops if each.layer == self.capture.layer), None) is op

        def watched(rows: int) -> None:
            if len(self.index):
                self._before(worker, op, starts=starts and op.layer >= 0)
            self.op = op
            run(rows)
            self.op = None
            if len(self.index):
                self._after(worker, op)

        return watched

    def _keep(self, name: str, rows: npt.NDArray[Any]) -> None:
        """The row's values, or those of every row; `rows` holds one for each row to copy."""
        if len(rows):
            self.found[name] = rows[0].copy() if self.detailed else rows.copy()

    def _before(self, worker: Tapped, op: Op, *, starts: bool) -> None:
        if not self.detailed:
            return
        x = worker.x_RD[self.index]
        if starts:
            self._keep("x_in", x)
        if op.kind == "send":
            self._keep("x_send", x)
        if op.kind == "decode_wire":
            self._keep("wire_in", worker.wire_RB[self.index])
        if op.kind == "head":
            self._keep("x_head", worker.x_RD[self.sampled])
        if op.kind == "attention" and op.layer == self.capture.layer:
            self._keep_history(worker, op.layer)

    def _keep_history(self, worker: Tapped, layer: int) -> None:
        """Keys and values up to the row's position, through the rank's own page table."""
        assert self.capture.position is not None
        count = self.capture.position + 1
        block, table = self.program.profile.kv_block, worker.page_table[self.capture.slot]
        first, stop = self.program.stripes
        for name, cache in (("keys", worker.kv.keys(layer)), ("values", worker.kv.values(layer))):
            blank = blank_row(cache, keys=name == "keys")
            self.found[name] = np.stack(
                [
                    packed_row(cache, int(table[j // block]), j % block, keys=name == "keys")
                    if first <= stripe_of(j // block) < stop
                    else blank
                    for j in range(count)
                ]
            )

    def _after(self, worker: Tapped, op: Op) -> None:
        if op.kind in ("embed", "receive", "decode_wire"):
            self.found["trail"][:, 0] = worker.x_RD[self.index]
        if op.kind == "round_wire" and op.wire_bytes:
            self._keep("wire", worker.wire_RB[self.index])
        if op.kind in ("reduce_down", "round_wire"):
            self.found["trail"][:, op.layer - self.program.layers[0] + 1] = worker.x_RD[self.index]
        if op.kind == "head":
            self._keep("logits", worker.shard_RV[self.places])
        if not self.detailed or op.layer < 0 or op.layer != self.capture.layer:
            return
        merges = self.program.layout.splits_sequence
        attention = "merge_states" if merges else "attention"
        rows = {"qkv": ("q", worker.q_RN), attention: ("attention", worker.a_RN)} | {
            "gate_up": ("ffn", worker.f_RF),
            "reduce_o": ("x_o", worker.x_RD),
            "reduce_down": ("x_down", worker.x_RD),
            "round_wire": ("x_round", worker.x_RD),
        }
        if op.kind in rows:
            name, buffer = rows[op.kind]
            self._keep(name, buffer[self.index])
        if op.kind == "attention" and merges:
            self._keep_own_states("states", worker.comm.exchange("states").send_buffer(0))
            self._keep_exchanged("read", "gather_q", worker.comm.exchange("queries").sources(0))
        if op.kind == "merge_states":
            self._keep_exchanged("read", "gather_states", worker.comm.exchange("states").sources(0))
        if op.kind in ("o_proj", "down_proj"):
            self._keep_nodes(f"nodes_{NODES[op.kind]}", self.nodes.send_buffer(self._parity(op)))
        if op.kind in ("reduce_o", "reduce_down") and self.program.layout.tp > 1:
            self._keep_sources(f"read_{NODES[op.kind]}", self._parity(op))

    def _parity(self, op: Op) -> int:
        """A step begins with the same buffer, and each layer gathers twice."""
        return self.parity ^ (NODES[op.kind] == "down")

    def _keep_nodes(self, name: str, buffer: FloatArray, tp_index: int | None = None) -> None:
        tp_index = self.program.tp_index if tp_index is None else tp_index
        count = self._counts[name.split("_")[1]][tp_index]
        width = self.program.config.hidden
        nodes = buffer[: count * self.rows * width].reshape(count, self.rows, width)
        self.found[name] = nodes[:, self.index[0]].copy()

    def _keep_sources(self, name: str, parity: int) -> None:
        for tp_index, source in enumerate(self.nodes.sources(parity)):
            self._keep_nodes(f"{name}_{tp_index}", source, tp_index)

    def exchanged(self, exchange: Exchange, name: str, run: Callable[[], None]) -> None:
        """An exchange of this rank's, with what it publishes and what it brings."""
        op, parity = self.op, exchange.parity
        wanted = self.detailed and len(self.index) > 0
        if op is not None and op.kind in ("gather_q", "gather_states"):
            here = wanted and op.layer == self.capture.layer
            if here and op.kind == "gather_states":
                self._keep_own_states("published_states", exchange.send_buffer(parity))
            run()
            if here:
                self._keep_exchanged("received", op.kind, exchange.sources(parity))
            return
        nodes = wanted and name == "nodes" and op is not None and op.layer == self.capture.layer
        drawn = wanted and len(self.places) > 0
        logits = drawn and name == "logits"
        if nodes:
            assert op is not None
            kind = NODES[op.kind]
            self._keep_nodes(f"published_{kind}", exchange.send_buffer(parity))
        if logits:
            self._keep_shard("published_logits", exchange.send_buffer(parity))
        if drawn and name == "pairs":
            place = 2 * int(self.places[0])
            self.found["pair"] = exchange.send_buffer(parity)[place : place + 2].copy()
        run()
        self.gathered |= name == "logits" and len(self.places) > 0
        if nodes:
            self._keep_sources(f"received_{kind}", parity)
        if logits:
            first = self.program.tp_index == 0
            for tp_index, source in enumerate(exchange.sources(parity) if first else ()):
                self._keep_shard(f"received_logits_{tp_index}", source, tp_index)

    def _keep_exchanged(self, moment: str, kind: OpKind, sources: Sequence[FloatArray]) -> None:
        """Of queries and states the row that came from every rank."""
        for tp_index, source in enumerate(sources):
            if kind == "gather_states":
                mine = self.program.tp_index
                self.found[f"{moment}_states_{tp_index}"] = self._states(source, tp_index, mine)
            else:
                start, stop = self.program.layout.heads[tp_index]
                width = (stop - start) * self.program.config.head_dim
                queries = source[: self.rows * width].reshape(self.rows, width)
                self.found[f"{moment}_q_{tp_index}"] = queries[self.index[0]].copy()

    def _keep_own_states(self, name: str, buffer: FloatArray) -> None:
        mine, ranks = self.program.tp_index, range(self.program.layout.tp)
        self.found[name] = np.concatenate([self._states(buffer, mine, to) for to in ranks])

    def _states(self, buffer: FloatArray, sender: int, receiver: int) -> npt.NDArray[np.float32]:
        """The row's [heads of the receiver, nodes of the sender, d + 2]; o of empty ones is +0."""
        (op,) = (
            each
            for each in self.program.ops
            if each.kind == "gather_states" and each.layer == self.capture.layer
        )
        start, stop = self.program.layout.heads[receiver]
        count, size = op.sum.nodes_per_rank[sender], self.program.config.head_dim + STATE_HEADER
        floats = (stop - start) * count * size
        first = receiver * self.rows * op.wire_floats + int(self.index[0]) * floats
        return legible_states(buffer[first : first + floats].reshape(stop - start, count, size))

    def _keep_shard(self, name: str, buffer: FloatArray, tp_index: int | None = None) -> None:
        tp_index = self.program.tp_index if tp_index is None else tp_index
        start, stop = self.program.layout.vocab[tp_index]
        place = int(self.places[0]) * (stop - start)
        self.found[name] = buffer[place : place + stop - start].copy()

    def hopped(self, name: str, values: npt.NDArray[Any]) -> None:
        """What `comm.send` was given, or what `comm.receive` brought."""
        width = self.program.hop_row_bytes or self.program.config.hidden
        if self.detailed and len(self.index) and values.size == self.rows * width:
            self._keep(name, values.reshape(self.rows, width)[self.index])


class _TappedExchange:
    """An Exchange that shows the tap what it moves; see comm.base.Exchange."""

    def __init__(self, exchange: Exchange, name: str, tap: Tap) -> None:
        self._exchange, self._name, self._tap = exchange, name, tap
        self.capacity_floats = exchange.capacity_floats

    @property
    def parity(self) -> int:
        """Of the buffers that the next `run` publishes."""
        return self._exchange.parity

    def send_buffer(self, parity: int) -> FloatArray:
        """See Exchange."""
        return self._exchange.send_buffer(parity)

    def sources(self, parity: int) -> list[FloatArray]:
        """See Exchange."""
        return self._exchange.sources(parity)

    def run(self, num_floats: int, wire_floats: int) -> None:
        """See Exchange."""
        exchange = self._exchange
        self._tap.exchanged(exchange, self._name, lambda: exchange.run(num_floats, wire_floats))

    def native(self, row_floats: int, row_wire: int) -> None:
        """See Exchange; what a walk moves could not be looked at."""

    def end(self, status: int, num_floats: int, wire_floats: int) -> None:
        """There is no native part to end."""
        raise AssertionError("no part of a walk")


class TappedComm:
    """A Comm that shows the tap what it moves; see comm.base.Comm."""

    def __init__(self, comm: Comm, tap: Tap) -> None:
        self._comm, self._tap = comm, tap
        self._exchanges: dict[str, _TappedExchange] = {}
        self.kind: CommKind = comm.kind
        self.rank, self.world, self.stage = comm.rank, comm.world, comm.stage
        self.tp_rank, self.tp, self.pp = comm.tp_rank, comm.tp, comm.pp
        self.counters: Counters = comm.counters
        self.tag, self.times = comm.tag, comm.times

    def exchange(self, name: str) -> _TappedExchange:
        """The exchange of that name; always the same object."""
        if name not in self._exchanges:
            self._exchanges[name] = _TappedExchange(self._comm.exchange(name), name, self._tap)
        return self._exchanges[name]

    def send(self, values: npt.NDArray[Any]) -> None:
        """See Comm."""
        self._tap.hopped("hop_out", values)
        self._comm.send(values)

    def receive(self, into: npt.NDArray[Any]) -> None:
        """See Comm."""
        self._comm.receive(into)
        self._tap.hopped("hop_in", into)

    def close(self) -> None:
        """See Comm."""
        self._comm.close()


def legible_states(states: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A copy of states [..., d + 2] as they travel, with M as a float, and +0 for what is not set:
    o of an empty one, and all but l of one that is out of range."""
    found = states.copy()
    found[..., 0] = states[..., 0].view(np.int32)
    found[found[..., 0] == EMPTY_MAX, STATE_HEADER:] = 0
    is_bad = np.isnan(found[..., 1])
    found[is_bad, 0], found[is_bad, STATE_HEADER:] = 0, 0
    return found


def read_capture(folder: Path, rank: int) -> list[Arrays]:
    """What a rank wrote, frame by frame."""
    frames = sorted(folder.glob(f"{rank}.*.npz"), key=lambda path: int(path.name.split(".")[1]))
    found: list[Arrays] = []
    for path in frames:
        with np.load(path) as arrays:
            found.append({name: arrays[name] for name in arrays.files})
    return found
