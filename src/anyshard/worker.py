"""A rank: binds its program once, then walks it for every frame until the front says stop.

Everything is bound before the first frame: buffers, weights, exchanges. A step passes row
counts and a row table, nothing else. Knows nothing of text, requests or other epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from anyshard.binder import Binder, FaultCode
from anyshard.capture import Capture, Tap
from anyshard.checkpoint.image import WeightImage
from anyshard.comm.base import Comm, CommKind, ExchangeSpec, WireSizes
from anyshard.comm.control import Frame, RankControl
from anyshard.comm.voids import Voids
from anyshard.config import ModelConfig, Profile
from anyshard.kv import KvCache, local_pages, num_local_pages
from anyshard.launcher import Seat
from anyshard.layout import KvShard, Layout
from anyshard.model import Program, program
from anyshard.op import Op
from anyshard.ops import KernelChoice, load_kernels
from anyshard.ops.control_word import set_control_word
from anyshard.ops.digest import KEY_PADDING, U64, digest_keys
from anyshard.ops.exact import F32, I32
from anyshard.ops.rope import rope_table
from anyshard.ops.sampling import sample
from anyshard.ops.spread import SPREAD, UNKNOWN, spread
from anyshard.ops.wire import wire_row_bytes
from anyshard.pages import pages_for
from anyshard.request import Sampling
from anyshard.walk import Run, walks
from anyshard.watch import Watch

__all__ = [
    "ROW_DRAFT",
    "ROW_LOGITS",
    "ROW_SAMPLE",
    "ROW_WHOLE",
    "RankPlan",
    "Served",
    "Worker",
    "buffer_bytes",
    "note_bytes",
    "rank_main",
    "wire_sizes",
]

ROW_SAMPLE = 1  # flag bits of a frame's row: a token is wanted after it,
ROW_LOGITS = 2  # and the logits too;
ROW_WHOLE = 4  # the sampler needs the whole row of logits, not just each rank's best
ROW_DRAFT = 8  # what comes before it may yet turn out to be something else

HEAD = ("head", "digest_logits")  # ops over the rows that are sampled


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the front fixes for all ranks of an epoch; sizes in rows, slots, pages, tokens.

    frames: how many the front has sent and not yet read the result of, at most. voids: some of them
    may be void before they have run (comm/voids.py). tells_spread: the sampler says of every token
    how sure the model was of it (ops/spread.py). trace: ranks write down what they do when.
    capture: what every rank copies to be looked at, nothing as a rule (`capture.py`).
    """

    heads: tuple[tuple[int, int], ...]
    ffn: tuple[tuple[int, int], ...]
    vocab: tuple[tuple[int, int], ...]
    layers: tuple[tuple[int, int], ...]
    kv_shard: KvShard = "heads"
    kernels: KernelChoice
    comm: CommKind
    threads: int
    spin: bool
    rows_max: int
    frames: int = 2
    voids: bool = False
    tells_spread: bool = False
    sampled_max: int
    num_slots: int
    num_pages: int
    max_model_len: int
    profile_sha256: str
    poison: bool = False
    record: bool = False
    trace: bool = False
    capture: Capture | None = None

    @property
    def layout(self) -> Layout:
        """The cuts as a layout."""
        return Layout(
            heads=self.heads,
            ffn=self.ffn,
            vocab=self.vocab,
            layers=self.layers,
            kv_shard=self.kv_shard,
        )


@dataclass(frozen=True)
class Served:
    """What the launcher has loaded and every rank inherits."""

    config: ModelConfig
    profile: Profile
    image: WeightImage


def wire_sizes(programs: Sequence[Program], plan: RankPlan) -> WireSizes:
    """Capacities of every exchange of an epoch, in floats. programs: of all ranks."""
    layout, config, wire = plan.layout, programs[0].config, programs[0].profile.wire
    hop_bytes = plan.rows_max * wire_row_bytes(wire, config.hidden)
    vocab_rows = max(stop - start for start, stop in layout.vocab)
    nodes_max = max(each.exchange_nodes for each in programs)
    return WireSizes(
        tp=layout.tp,
        pp=layout.pp,
        exchanges=(
            ExchangeSpec(
                name="nodes",
                kind="reduce",
                capacity_floats=nodes_max * plan.rows_max * config.hidden,
            ),
            *(_sequence_exchanges(programs[0], plan) if layout.splits_sequence else ()),
            ExchangeSpec(
                name="logits",
                kind="logits",
                capacity_floats=plan.sampled_max * vocab_rows,
                root_only=True,
            ),
            ExchangeSpec(
                name="pairs",
                kind="pairs",
                capacity_floats=2 * plan.sampled_max,
                root_only=True,
            ),
        ),
        hop_bytes=hop_bytes if layout.pp > 1 else 0,
        hop_depth=plan.frames,
    )


def _sequence_exchanges(part: Program, plan: RankPlan) -> tuple[ExchangeSpec, ...]:
    """One buffer each: before a rank writes it again, in the next layer, all ranks have published
    nodes, and so have read what it held."""
    parts = part.layout.tp * part.row_wire("gather_states")
    return (
        ExchangeSpec(
            name="queries",
            kind="queries",
            capacity_floats=plan.rows_max * part.row_wire("gather_q"),
            is_fenced=True,
        ),
        ExchangeSpec(
            name="states",
            kind="states",
            capacity_floats=plan.rows_max * parts,
            all_to_all=True,
            is_fenced=True,
        ),
    )


def note_bytes(num_slots: int) -> int:
    """Room for the note of a frame, the sampling parameters of all slots, in bytes."""
    return 64 + 192 * num_slots


def buffer_bytes(part: Program, plan: RankPlan) -> int:
    """What `_allocate` takes for a rank besides KV; its buffers grow with rows, slots and tokens.

    Held by: test_admission.py::test_what_is_counted_is_what_ranks_allocate.
    """
    config = part.config
    head_floats = (part.heads[1] - part.heads[0]) * config.head_dim * 2  # q and a
    if part.layout.splits_sequence:
        head_floats //= 2  # q is the buffer of an exchange
    row_floats = config.hidden + head_floats + part.ffn[1] - part.ffn[0]
    row_ints, slot_ints = 5, 1  # token, position, slot, fault, drawn token; sampled row
    vocab = part.vocab[1] - part.vocab[0]
    if part.rank == part.layout.sampler and part.layout.tp > 1:
        vocab += config.vocab
    blocks = -(-plan.max_model_len // part.profile.kv_block)
    digest_words = plan.rows_max * part.record_columns if plan.record else 0
    page_ints = plan.num_pages if part.layout.splits_sequence else 0
    spreads = plan.rows_max + 1 if plan.tells_spread else 0
    return (
        plan.rows_max * part.hop_row_bytes
        + 8 * digest_words
        + SPREAD.itemsize * spreads
        + 4
        * (
            plan.rows_max * (row_floats + row_ints)
            + plan.sampled_max * (vocab + slot_ints)
            + plan.num_slots * blocks
            + page_ints
            + plan.max_model_len * config.head_dim  # cos and sin
            + _num_keys(config, plan)
        )
    )


def _num_keys(config: ModelConfig, plan: RankPlan) -> int:
    """Of the digest of the widest output."""
    widest = max(config.hidden, config.num_heads * config.head_dim, config.ffn, config.vocab)
    return widest + KEY_PADDING if plan.record else 0


class Worker:
    """One rank of one epoch. Tests derive from it to plant bugs and naive orders."""

    binder_type: type[Binder] = Binder

    def __init__(
        self,
        served: Served,
        plan: RankPlan,
        *,
        rank: int,
        comm: Comm,
        control: RankControl,
        voids: Voids | None = None,
    ) -> None:
        self.voids = voids
        self.config, self.plan, self.control = served.config, plan, control
        self.tap: Tap | None = None
        if plan.capture is not None:
            right = program(served.config, served.profile, plan.layout, rank)
            self.tap = Tap(plan.capture, right, comm, sample_flag=ROW_SAMPLE, head=HEAD)
        self.comm: Comm = comm if self.tap is None else self.tap.comm
        self.program = self.build_program(served, rank)
        self.kernels = load_kernels(plan.kernels, threads=plan.threads, spin=plan.spin)
        self.image = served.image
        self.sampling: dict[int, Sampling] = {}
        self._allocate(served.profile)
        binder = self.binder_type(self)
        self.body = [binder.bind(op) for op in self.program.ops if not _is_head(op)]
        self.head = [binder.bind(op) for op in self.program.ops if op.kind in HEAD]
        control.status.set(weight_bytes=self.program.weight_bytes, kv_bytes=self.kv.bytes)

    def build_program(self, served: Served, rank: int) -> Program:
        """The ops of this rank."""
        return program(
            served.config,
            served.profile,
            self.plan.layout,
            rank,
            storage=served.image.storage,
            record=self.plan.record,
        )

    def _allocate(self, profile: Profile) -> None:
        """Every buffer of the token loop, once."""
        config, plan, here = self.config, self.plan, self.program
        rows = plan.rows_max
        num_heads = here.heads[1] - here.heads[0]
        self.x_RD = np.zeros((rows, config.hidden), np.float32)
        self.wire_RB = np.zeros((rows, here.hop_row_bytes), np.uint8)
        self.a_RN = np.zeros((rows, num_heads * config.head_dim), np.float32)
        self.q_RN = np.zeros_like(self.a_RN)
        if here.layout.splits_sequence:  # written where the others read it
            self.q_RN = self.query_sources()[here.tp_index]
        self.f_RF = np.zeros((rows, here.ffn[1] - here.ffn[0]), np.float32)
        self.shard_RV = np.zeros((plan.sampled_max, here.vocab[1] - here.vocab[0]), np.float32)
        self.is_sampler = here.rank == here.layout.sampler
        whole = self.is_sampler and here.layout.tp > 1
        self.logits_RV = (
            np.zeros((plan.sampled_max, config.vocab), np.float32) if whole else self.shard_RV
        )
        self.tokens = np.zeros(rows, np.int32)
        self.positions = np.zeros(rows, np.int32)
        self.row_slot = np.zeros(rows, np.int32)
        self.row_fault = np.zeros(rows, np.int32)
        self.sample_rows = np.zeros(plan.sampled_max, np.int32)
        self.drawn = np.zeros(rows, np.int32)
        self.spreads = np.zeros(rows if plan.tells_spread else 0, SPREAD)
        self.unknown = np.array([UNKNOWN] * plan.tells_spread, SPREAD)
        blocks = pages_for(plan.max_model_len, block=profile.kv_block)
        self.page_table = np.zeros((plan.num_slots, blocks), np.int32)
        pages = {"num_pages": plan.num_pages, "sequence_blocks": blocks}
        self.local_pages: I32 | None = None  # a rank of many sees its own pages only
        if here.layout.splits_sequence:
            self.local_pages = local_pages(here.stripes, **pages)
            self.page_table.fill(-1)
        self.cos, self.sin = rope_table(
            plan.max_model_len, config.head_dim, config.rope_theta, config.rope_scaling
        )
        self.digest_keys = digest_keys(_num_keys(config, plan))
        self.digests = np.zeros((rows, here.record_columns if plan.record else 0), np.uint64)
        self.kv = KvCache(
            config,
            profile,
            layers=here.layers,
            kv_heads=here.kv_heads,
            num_pages=(
                plan.num_pages
                if self.local_pages is None
                else num_local_pages(here.stripes, **pages)
            ),
            poison=plan.poison,
        )

    def query_sources(self) -> list[F32]:
        """[R, H*d here] of each TP rank, where the exchange of queries brings them."""
        sources, rows = self.comm.exchange("queries").sources(0), self.plan.rows_max
        widths = [(stop - start) * self.config.head_dim for start, stop in self.plan.heads]
        return [
            source[: rows * width].reshape(rows, width)
            for source, width in zip(sources, widths, strict=True)
        ]

    def serve(self) -> None:
        """Walk frames until the front says stop."""
        step: Callable[[Frame], None] = self.step
        if self.tap is None:
            operations = self.control.status.operations
            self.body = self._walked_body(operations)
            self.head = walks(self.head, operations, self.voids)
        else:
            step = self.tap.around(self)
        next_frame: Callable[[], Frame | None] = self.control.next_frame
        if self.plan.trace:
            watch = Watch(self.control, self.comm)
            self.body = watch.over(self.body, [op.kind for op in self.program.ops])
            self._sample = watch.drawing(self._sample)  # type: ignore[method-assign, assignment]
            next_frame = watch.next_frame
        while (frame := next_frame()) is not None:
            step(frame)

    def _walked_body(self, operations: U64) -> list[Run]:
        """The body as walks; the ops of a void frame are left out, but its hops are made."""
        voids, body, tag = self.voids, self.body, self.comm.tag
        if voids is None:
            return walks(body, operations)
        tag.may_be_void = True
        receives = self.program.ops[0].kind == "receive"
        sends = self.program.ops[-1].kind == "send"
        receive, send = body[0], body[-1]

        def arrive(rows: int) -> None:
            tag.is_void = False
            if receives:
                receive(rows)
            voids.settle(is_handed_on=tag.is_void)

        def leave(rows: int) -> None:
            tag.is_void = voids.is_void
            send(rows)

        inner = body[int(receives) : len(body) - int(sends)]
        return [arrive, *walks(inner, operations, voids), *([leave] if sends else [])]

    def step(self, frame: Frame) -> None:
        """One frame through this rank's ops; the sampler answers. Makes no array but views: held by
        test_steady.py."""
        rows = len(frame.rows)
        self._take(frame)
        self.comm.tag.frame = frame.sequence
        status = self.control.status
        if self.voids is not None:
            self.voids.begin(frame.sequence)
        for run in self.body:
            run(rows)
            status.beat()
        logits: list[F32] = []
        if self.program.stage == self.plan.layout.pp - 1:
            logits = self._sample(frame.rows["flags"].tolist())
        faults = self.row_fault[:rows]
        is_void = self.voids is not None and self.voids.is_void
        if self.is_sampler:  # first: the front goes on, and looks at the rest when all have ended
            self.control.post_result(
                frame.sequence,
                self.drawn[:rows],
                faults,
                () if is_void else logits,
                spreads=self.spreads[:rows] if self.plan.tells_spread else None,
                is_void=is_void,
            )
        if is_void:
            status.spare(self.comm.times.spared_bytes)
        elif any(faults.tolist()):
            self._tell_fault(frame)
        status.report(self.comm.counters)
        if self.plan.record:
            self.digests[:rows, -1] = faults
            self.control.post_digests(frame.sequence, self.digests[:rows])

    def _tell_fault(self, frame: Frame) -> None:
        """Of rows that are certain, the earliest; a draft's row that was right runs once more."""
        pairs = zip(self.row_fault.tolist(), frame.rows["flags"].tolist(), strict=False)
        if codes := [code for code, flags in pairs if code and not flags & ROW_DRAFT]:
            self.control.status.fault(sequence=frame.sequence, code=min(codes))

    def _take(self, frame: Frame) -> None:
        """Row table, page table and sampling parameters of a frame, into the bound arrays."""
        rows = len(frame.rows)
        self.tokens[:rows] = frame.rows["token"]
        self.positions[:rows] = frame.rows["position"]
        self.row_slot[:rows] = frame.rows["slot"]
        self.row_fault[:rows].fill(0)
        self.drawn[:rows].fill(-1)
        self.spreads[:rows] = self.unknown
        if len(frame.pages):
            pages = frame.pages["page"]
            mine = pages if self.local_pages is None else self.local_pages[pages]
            self.page_table[frame.pages["slot"], frame.pages["block"]] = mine
        if frame.note:
            self.sampling |= msgspec.msgpack.decode(frame.note, type=dict[int, Sampling])

    def _sample(self, flags: list[int]) -> list[F32]:
        """Run the head over the rows that want it and draw their tokens (on the sampler).

        Returns the logit rows that are wanted, in row order: views.
        """
        sampled = [row for row, flag in enumerate(flags) if flag & ROW_SAMPLE]
        if not sampled:
            return []
        count = len(sampled)
        for index, row in enumerate(sampled):
            self.sample_rows[index] = row
        for run in self.head:
            run(count)
        if self.voids is not None and self.voids.is_void:
            return []
        slots = [int(self.row_slot[row]) for row in sampled]
        samplings = [self.sampling.get(slot, Sampling()) for slot in slots]
        wanted = [index for index, row in enumerate(sampled) if flags[row] & ROW_LOGITS]
        whole = bool(wanted) or any(flags[row] & ROW_WHOLE for row in sampled)
        if self.comm.tp > 1 and not whole:
            assert all(sampling.greedy for sampling in samplings)
            self._exchange_pairs(sampled)
            return []
        if self.comm.tp > 1:
            self._gather_logits(count)
        if not self.is_sampler:
            return []
        for index, row in enumerate(sampled):
            token = sample(
                self.kernels.module,
                self.logits_RV[index],
                samplings[index],
                position=int(self.positions[row]) + 1,
            )
            self._draw(row, token)
            if self.plan.tells_spread:
                self.spreads[row] = spread(self.kernels.module, self.logits_RV[index], token)
        return [self.logits_RV[index] for index in wanted]

    def _draw(self, row: int, token: int) -> None:
        """Keep the token of a row; -1: its logits are not finite."""
        self.drawn[row] = token
        if token < 0 and self.row_fault[row] == 0:
            self.row_fault[row] = FaultCode.head(self.config.num_layers)

    def _gather_logits(self, count: int) -> None:
        exchange = self.comm.exchange("logits")
        parity, mine = exchange.parity, self.shard_RV[:count].size
        spans = self.plan.layout.vocab
        exchange.send_buffer(parity)[:mine] = self.shard_RV[:count].reshape(-1)
        exchange.run(mine, count * max(stop - start for start, stop in spans))
        if self.is_sampler:
            for (start, stop), source in zip(spans, exchange.sources(parity), strict=True):
                shard = source[: count * (stop - start)].reshape(count, stop - start)
                self.logits_RV[:count, start:stop] = shard

    def _exchange_pairs(self, sampled: list[int]) -> None:
        """Greedy rows that nobody wants logits of: only (value, id) of each rank's best travel, so
        that their spread is unknown."""
        exchange = self.comm.exchange("pairs")
        parity, count = exchange.parity, len(sampled)
        mine = exchange.send_buffer(parity)
        ids = mine.view(np.int32)
        for index in range(count):
            mine[2 * index], ids[2 * index + 1] = self._best_here(index)
        exchange.run(2 * count, 2 * count)
        if not self.is_sampler:
            return
        sources = exchange.sources(parity)
        for index, row in enumerate(sampled):
            values = [float(source[2 * index]) for source in sources]
            # ranks hold ascending ids: the first wins a tie; a NaN wins over all
            winner = next((i for i, value in enumerate(values) if value != value), None)
            if winner is None:
                winner = values.index(max(values))
            token = int(sources[winner].view(np.int32)[2 * index + 1])
            self._draw(row, token if math.isfinite(values[winner]) else -1)

    def _best_here(self, index: int) -> tuple[float, int]:
        """The best value of a row's logits here, and its token id."""
        shard = self.shard_RV[index]
        if not len(shard):
            return -math.inf, 0
        best, value = self.kernels.module.argmax(shard)
        return value, self.program.vocab[0] + max(best, 0)


def _is_head(op: Op) -> bool:
    return op.kind in (*HEAD, "gather_logits")


def rank_main(seat: Seat, *, worker_type: type[Worker] = Worker) -> None:
    """What the launcher runs in a rank: bind, check the profile, serve."""
    served, plan = seat.state, msgspec.msgpack.decode(seat.start.payload, type=RankPlan)
    assert isinstance(served, Served)
    have = served.profile.sha256()
    assert have == plan.profile_sha256, (
        f"profile {have[:12]} here, {plan.profile_sha256[:12]} asked"
    )
    comm = seat.comm(plan.comm)
    set_control_word()  # after the last import: a Comm may bring torch
    try:
        voids = None
        if plan.voids:
            voids = Voids(seat.region, rank=seat.rank, deadline_s=seat.start.deadline_s)
        worker = worker_type(
            served, plan, rank=seat.rank, comm=comm, control=seat.control, voids=voids
        )
        worker.serve()
    finally:
        comm.close()
