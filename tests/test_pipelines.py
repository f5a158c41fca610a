"""Schedules, micro-batches and slow links decide when a row is computed, and never its bits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from grid import Loaded, baseline, run_cell, the_model, witness

from anyshard.comm.base import EpochAborted, WireSizes
from anyshard.comm.hops import HOP_HEADER_BYTES, HopTag, open_hop, seal_hop
from anyshard.comm.link import EmulatedLink, LinkSpec, parse_link, parse_links
from anyshard.comm.region import (
    CHANNEL_HOP,
    ControlSizes,
    EpochRegion,
    EpochSizes,
    RegionLayout,
)
from anyshard.comm.shm import Shm
from anyshard.engine import Engine
from anyshard.epoch import EngineOptions, plan_epoch
from anyshard.errors import AnyshardError, OptionError, PeerLost
from anyshard.layout import plan
from anyshard.ledger import StepShape
from anyshard.model import program
from anyshard.request import Request
from anyshard.schedule import MOST_MICRO_BATCHES
from anyshard.verify.cells import BATCH, Cell, first_tokens
from anyshard.verify.driver import open_group
from anyshard.verify.naive import rank_body
from anyshard.worker import Worker

A9 = "adversarial-9-3"
WILD = LinkSpec(delay_s=0.0, jitter_s=0.004, stall_s=0.03, stall_share=0.02)


def cell(*, pp: int, batch: int = BATCH, **kinds: object) -> Cell:
    shape = {"prompt_tokens": 90, "num_tokens": 9, "chunk": 33, "place": "middle"}
    return Cell(axis="pp", pp=pp, batch=batch, **(shape | kinds))  # type: ignore[arg-type]


CELLS = [
    *(cell(pp=2, schedule="fill-drain", micro_batches=many) for many in (1, 2, 4, 8)),
    *(cell(pp=2, micro_batches=many) for many in range(1, 9)),
    *(cell(pp=3, micro_batches=many, links=(WILD,) * 3) for many in (1, 2, 3, 5)),
    cell(pp=3, schedule="fill-drain", micro_batches=4, links=(WILD,) * 3),
    cell(pp=2, batch=1, chunk=7, micro_batches=4, links=(WILD,) * 2),
    cell(pp=2, tp=2, micro_batches=3, links=(WILD,) * 2),
    cell(pp=2, tp=3, kv_shard="sequence", micro_batches=2, links=(WILD,) * 2),
    pytest.param(cell(pp=3, comm="shm", micro_batches=4), marks=pytest.mark.ranks),
    pytest.param(
        cell(pp=2, comm="shm", schedule="fill-drain", micro_batches=8, links=(WILD,) * 2),
        marks=pytest.mark.ranks,
    ),
    *(
        pytest.param(
            cell(pp=pp, comm="torch", schedule=schedule, micro_batches=4, links=(WILD,) * pp),
            marks=[pytest.mark.ranks, pytest.mark.torch, *slow],
        )
        for pp, schedule, slow in (
            (2, "continuous", []),
            (3, "continuous", [pytest.mark.slow]),
            (2, "fill-drain", [pytest.mark.slow]),
        )
    ),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_turns_change_no_bit(cell: Cell) -> None:
    if cell.comm == "torch":
        pytest.importorskip("torch")
    model = the_model(A9)
    outcome = run_cell(model, cell)
    assert outcome.fault is None
    assert outcome.digest == baseline(model, cell).digest
    assert outcome.others == neighbours_alone(model, cell)


def neighbours_alone(model: Loaded, cell: Cell) -> object:
    whole = Cell(axis="batch", batch=cell.batch, place=cell.place, prompt_tokens=cell.prompt_tokens)
    return run_cell(model, replace(whole, num_tokens=cell.num_tokens)).others


def test_an_order_that_rounds_at_cuts_would_be_seen() -> None:
    assert witness(the_model(A9), cell(pp=2, micro_batches=2)) > 0


@contextmanager
def engine_of(options: EngineOptions, *, pp: int, steps: list[StepShape]) -> Iterator[Engine]:
    model = the_model(A9)
    group = open_group(model.served, forked=False)
    try:
        layout = plan(model.config, pp=pp, leaf=model.profile.leaf)
        profile = model.profile
        yield Engine(group, model.config, profile, layout, options, cores=2, steps=steps)
    finally:
        group.close()


def options(**asked: object) -> EngineOptions:
    usual = {"comm": "threads", "threads": 1, "max_model_len": 128, "deadline_s": 30.0}
    return EngineOptions(**(usual | asked))  # type: ignore[arg-type]


def test_chunks_of_one_prompt_are_under_way_together() -> None:
    """Five chunks, of which three are sent before the first has come out."""
    steps: list[StepShape] = []
    link = LinkSpec(delay_s=0.2)
    with engine_of(options(chunk=20, links=(link,) * 2), pp=2, steps=steps) as engine:
        engine.submit(Request(prompt=tuple(range(1, 91)), max_tokens=2))
        events, started = engine.run(), time.monotonic()
        seen = []
        engine._receive = watched(engine, seen)  # type: ignore[method-assign]
        first = next(events)
        assert first.token is not None
        # five chunks of 0.4 s there and back one by one, or three at a time
        assert time.monotonic() - started < 1.5
        assert seen[0] == 3 and len(list(events)) == 1
    assert [step.rows for step in steps] == [20, 20, 20, 20, 10, 1]


def watched(engine: Engine, seen: list[int]):  # type: ignore[no-untyped-def]
    receive = engine._receive

    def receiving():  # type: ignore[no-untyped-def]
        seen.append(len(engine._in_flight))
        return receive()

    return receiving


@pytest.mark.parametrize(("kind", "rounds"), [("fill-drain", [4, 3, 2, 1]), ("continuous", [4, 4])])
def test_rounds_drain_only_where_they_are_to(kind: str, rounds: list[int]) -> None:
    """How many frames are under way whenever a result is waited for, once eight prompts decode."""
    steps: list[StepShape] = []
    asked = options(max_num_seqs=8, micro_batches=4, schedule=kind, chunk=8)
    with engine_of(asked, pp=2, steps=steps) as engine:
        for index in range(8):
            engine.submit(Request(prompt=(index + 1,), max_tokens=12))
        seen: list[int] = []
        engine._receive = watched(engine, seen)  # type: ignore[method-assign]
        assert sum(event.token is not None for event in engine.run()) == 96
    middle = seen[len(seen) // 2 // 4 * 4 :][: len(rounds)]
    assert middle == rounds
    assert {step.rows for step in steps} == {2}


@pytest.mark.parametrize("kind", ["fill-drain", "continuous"])
def test_what_is_cancelled_in_flight_leaves_its_place_to_others(kind: str) -> None:
    """Slots and pages are handed on while frames with rows of the old owner are under way."""
    alone = {}
    for index in range(12):
        request = Request(prompt=tuple(range(index + 1, index + 30)), max_tokens=6)
        with engine_of(options(chunk=8), pp=1, steps=[]) as engine:
            engine.submit(request)
            alone[index] = [event.token for event in engine.run()]
    asked = options(
        max_num_seqs=4, micro_batches=3, schedule=kind, chunk=8, poison=True, links=(WILD,) * 3
    )
    with engine_of(asked, pp=3, steps=[]) as engine:
        for index in range(12):
            engine.submit(Request(prompt=tuple(range(index + 1, index + 30)), max_tokens=6))
        got: dict[int, list[int | None]] = {index: [] for index in range(12)}
        orphans: set[int] = set()

        def cancel(done: int, total: int) -> None:
            """Those with rows under way that have no token yet."""
            for flight in engine._in_flight:
                under_way = {flight.sequences[row.slot].request_id for row in flight.tick.rows}
                for request_id in under_way:
                    if request_id % 3 == 1 and not got[request_id]:
                        orphans.add(request_id)
                        engine.cancel(request_id)

        for event in engine.run(cancel):
            got[event.request_id].append(event.token)
        assert not engine.batch.running and len(engine.batch.free_slots) == 4
    assert len(orphans) > 1
    for index, tokens in got.items():
        assert tokens == (alone[index][: len(tokens)] if index in orphans else alone[index])
        assert index not in orphans or len(tokens) < 2


def test_a_token_that_comes_out_for_one_who_has_gone_is_not_given_to_who_has_its_place() -> None:
    """The last chunk of a cancelled prompt is under way when another request takes its slot."""
    first, second = (Request(prompt=tuple(range(n, n + 20)), max_tokens=4) for n in (1, 300))
    with engine_of(options(chunk=8), pp=1, steps=[]) as engine:
        engine.submit(second)
        alone = [event.token for event in engine.run()]
    with engine_of(options(chunk=8, max_num_seqs=1), pp=2, steps=[]) as engine:
        gone, stays = engine.submit(first), engine.submit(second)
        drawn: list[bool] = []

        def cancel(done: int, total: int) -> None:
            if not drawn:
                drawn.extend(row.sample for each in engine._in_flight for row in each.tick.rows)
                engine.cancel(gone)

        events = list(engine.run(cancel))
    assert any(drawn), "its token was under way"
    assert [(event.request_id, event.token) for event in events] == [(stays, t) for t in alone]


@pytest.mark.parametrize("slow", [0, 1], ids=["to the next stage", "back to the front"])
@pytest.mark.parametrize(
    "comm",
    [
        "threads",
        pytest.param("shm", marks=pytest.mark.ranks),
        pytest.param("torch", marks=[pytest.mark.ranks, pytest.mark.torch]),
    ],
)
def test_a_token_takes_as_long_as_each_link_on_every_wire(comm: str, slow: int) -> None:
    if comm == "torch":
        pytest.importorskip("torch")
    delay_s = 0.03
    links = tuple(LinkSpec(delay_s=delay_s if index == slow else 0.0) for index in (0, 1))
    shape = {"comm": comm, "prompt_tokens": 5, "num_tokens": 8, "links": links}
    outcome = run_cell(the_model(A9), cell(pp=2, batch=1, **shape))
    assert outcome.decode_tokens_per_s < 1 / delay_s


def test_a_link_that_holds_messages_for_longer_than_the_deadline_loses_nobody() -> None:
    link = LinkSpec(delay_s=0.5, rate_bytes_s=10_000)
    asked = options(links=(link,) * 2, deadline_s=0.4, chunk=32)
    with engine_of(asked, pp=2, steps=[]) as engine:
        engine.submit(Request(prompt=tuple(range(1, 40)), max_tokens=2))
        assert [event.fault for event in engine.run()] == [None, None]


def test_prefixes_of_every_length_go_through_stages_alike() -> None:
    model, lengths = the_model(A9), (1, 2, 31, 32, 33, 64, 65, 90)
    found = []
    for each in (cell(pp=1, batch=1), cell(pp=3, batch=1, chunk=7, micro_batches=4)):
        group = open_group(model.served, forked=False)
        try:
            found.append(first_tokens(group, model, each, lengths))
        finally:
            group.close()
    assert found[0] == found[1] and None not in found[0]


@pytest.mark.parametrize("kind", ["continuous", "fill-drain"])
def test_more_stages_than_micro_batches_can_be_numbered_still_run(kind: str) -> None:
    model = the_model(A9)
    deep = replace(model.config, num_layers=40)
    layout = plan(deep, pp=40, leaf=model.profile.leaf)
    parts = [program(deep, model.profile, layout, rank) for rank in range(layout.world)]
    epoch = plan_epoch(parts, options(schedule=kind), body="scalar", threads=1, spin=False)
    assert epoch.schedule.micro_batches == MOST_MICRO_BATCHES
    assert RegionLayout.of(epoch.sizes).total_bytes > 0


# --- hops ---------------------------------------------------------------------------------------


def message(values: np.ndarray, tag: HopTag) -> memoryview:
    header = memoryview(bytearray(64))
    seal_hop(header, values, tag)
    return header


def test_a_hop_is_opened_as_it_was_sealed_and_one_of_an_earlier_epoch_is_dropped() -> None:
    values = np.arange(40, dtype=np.uint8)
    before = time.monotonic_ns()
    header = message(values[:24], HopTag(epoch=5, frame=9))
    here = {"num_bytes": 24, "here": 1, "sender": 0}
    sent = open_hop(header, values, HopTag(5, 9), **here)
    assert sent is not None and before <= sent <= time.monotonic_ns()
    assert open_hop(header, values, HopTag(6, 9), **here) is None


def test_a_hop_between_hosts_was_sent_by_the_clock_of_who_receives_it() -> None:
    """Each knows what the clock of the head is ahead of its own: here the sender's is 7 s behind
    that, and the receiver's, this test's own, 3 s before it."""
    values = np.arange(24, dtype=np.uint8)
    before = time.monotonic_ns()
    header = message(values, HopTag(5, 9, clock_ns=7 * 10**9))
    receiver = HopTag(5, 9, clock_ns=-3 * 10**9)
    sent = open_hop(header, values, receiver, num_bytes=24, here=1, sender=0)
    assert sent is not None
    assert before <= sent - 10 * 10**9 <= time.monotonic_ns()


def test_a_hop_without_rows_is_of_a_void_frame_only_where_one_may_be() -> None:
    values = np.arange(24, dtype=np.uint8)
    header, here = message(values[:0], HopTag(5, 9)), {"num_bytes": 24, "here": 1, "sender": 0}
    may = HopTag(5, 9, may_be_void=True)
    assert open_hop(header, values, may, **here) is not None and may.is_void
    with pytest.raises(
        AnyshardError, match="expects 24 bytes of frame 9 of epoch 5, rank 0 sent 0"
    ):
        open_hop(header, values, HopTag(5, 9), **here)
    with pytest.raises(AnyshardError, match="expects 0 bytes of frame 8 of epoch 5, rank 0 sent 0"):
        open_hop(header, values, HopTag(5, 8, may_be_void=True), **here)
    assert open_hop(message(values, may), values, may, **here) is not None
    assert not may.is_void, "the next one has rows"


@pytest.mark.parametrize(
    ("tag", "num_bytes", "said"),
    [
        (HopTag(5, 8), 24, "rank 1 expects 24 bytes of frame 8 of epoch 5, rank 0 sent 24 bytes"),
        (HopTag(4, 9), 24, "of frame 9 of epoch 4, rank 0 sent 24 bytes of frame 9 of epoch 5"),
        (HopTag(5, 9), 28, "rank 1 expects 28 bytes of frame 9 of epoch 5, rank 0 sent 24 bytes"),
    ],
)
def test_a_hop_that_is_another_is_refused_with_both_values(
    tag: HopTag, num_bytes: int, said: str
) -> None:
    values = np.arange(40, dtype=np.uint8)
    header = message(values[:24], HopTag(epoch=5, frame=9))
    with pytest.raises(AnyshardError, match=said):
        open_hop(header, values, tag, num_bytes=num_bytes, here=1, sender=0)


def test_every_byte_of_a_hop_counts() -> None:
    values = np.arange(24, dtype=np.uint8)
    header = message(values, HopTag(epoch=5, frame=9))
    here = {"num_bytes": 24, "here": 1, "sender": 0}
    said = {
        range(4): r"begins with 0x\w{8}, not 0x31504f48",
        range(4, 8): r"checksum is 0x\w{8}, its header says 0x\w{8}",
        range(8, 32): "rank 1 expects 24 bytes of frame 9 of epoch 5, rank 0 sent",
        range(32, HOP_HEADER_BYTES): r"checksum is 0x\w{8}, its header says",
    }
    for places, words in said.items():
        for place in places:
            header[place] ^= 64
            with pytest.raises(AnyshardError, match=words):
                open_hop(header, values, HopTag(5, 9), **here)
            header[place] ^= 64
    for place in range(24):
        values[place] ^= 64
        with pytest.raises(AnyshardError, match="damaged hop from rank 0, frame 9 of epoch 5"):
            open_hop(header, values, HopTag(5, 9), **here)
        values[place] ^= 64
    assert open_hop(header, values, HopTag(5, 9), **here) is not None


class OneFrameAhead(Worker):
    """Sends rows of a frame as those of the next one: pairing off by one."""

    def step(self, frame):  # type: ignore[no-untyped-def]
        super().step(frame if self.comm.stage else replace(frame, sequence=frame.sequence + 1))


def test_frames_that_are_paired_off_by_one_end_the_epoch_with_both_numbers() -> None:
    model = the_model(A9)
    with pytest.raises(PeerLost, match=r"bytes of frame 1 of epoch 1, rank 0 sent .* of frame 2"):
        run_cell(model, cell(pp=2, batch=1), rank_body=rank_body(OneFrameAhead))


def test_a_hop_that_is_damaged_ends_the_run_and_unchecked_gives_another_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, each = the_model(A9), cell(pp=2, batch=1)

    def damage(header: memoryview, payload: np.ndarray, tag: HopTag) -> None:
        seal_hop(header, payload, tag)
        payload[3] ^= 1 << 5  # of an exponent

    monkeypatch.setattr("anyshard.comm.shm.seal_hop", damage)
    with pytest.raises(PeerLost, match="rank 1 has a damaged hop from rank 0, frame 1 of epoch 1"):
        run_cell(model, each)
    monkeypatch.setattr("anyshard.comm.hops._checksum", lambda header, payload: 0)
    assert run_cell(model, each).digest != baseline(model, each).digest


def test_a_hop_of_an_earlier_epoch_is_dropped_and_let_in_gives_another_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a rank that was stopped, and is not yet dead, sends before the one in its place does."""
    model, each = the_model(A9), cell(pp=2, batch=1)
    send = Shm.send

    def twice(comm: Shm, values: np.ndarray) -> None:
        if comm.tag.frame == 1:
            comm.tag.epoch -= 1
            send(comm, np.flip(values).copy())
            comm.tag.epoch += 1
        send(comm, values)

    monkeypatch.setattr(Shm, "send", twice)
    assert run_cell(model, each).digest == baseline(model, each).digest

    def unfenced(header: memoryview, payload: np.ndarray, tag: HopTag, **here: int) -> int:
        return 0

    monkeypatch.setattr("anyshard.comm.shm.open_hop", unfenced)
    assert run_cell(model, each).digest != baseline(model, each).digest


# --- who owns a buffer of a hop ------------------------------------------------------------------

DEPTH, MESSAGES, FLOATS = 3, 9, 5


def hop_buffers(*, receiver: Literal["right", "one buffer", "no acks"]) -> list[list[float]]:
    """What a stage gets that is late for every message, of one that writes the next in the same
    array as soon as it is sent. Planted: all of the ring is one buffer; nobody waits for acks."""
    wires = WireSizes(tp=1, pp=2, hop_bytes=4 * FLOATS, hop_depth=DEPTH)
    control = ControlSizes(rows_max=1, pages_max=1)
    region = EpochRegion.create(EpochSizes(wires=wires, control=control), 5, shared=False)
    sender, late = (Shm(region, rank=rank, deadline_s=5.0, kind="threads") for rank in (0, 1))
    if receiver == "one buffer":
        sender._out_ring = [sender._out_ring[0]] * DEPTH
        late._in_ring = [late._in_ring[0]] * DEPTH
    elif receiver == "no acks":
        sender._acks = late.signals.waiter(CHANNEL_HOP, receivers=(), senders=[], spin_us=0)

    def send_all() -> None:
        values = np.zeros(FLOATS, np.float32)
        with suppress(EpochAborted):
            for number in range(1, MESSAGES + 1):
                sender.tag.frame = number
                values.fill(number)
                sender.send(values)

    sending = threading.Thread(target=send_all)
    sending.start()
    got: list[list[float]] = []
    try:
        for number in range(1, MESSAGES + 1):
            time.sleep(0.02)
            into = np.zeros(FLOATS, np.float32)
            late.tag.frame = number
            late.receive(into)
            got.append(into.tolist())
    finally:
        region.signals(region.front).abort()
        sending.join(5.0)
        assert not sending.is_alive()
    return got


def test_a_late_receiver_finds_every_message_as_it_was_sent() -> None:
    """A sender is ahead by the ring at most, and waits before it writes a buffer that is owned by
    who has not read it."""
    want = [[float(number)] * FLOATS for number in range(1, MESSAGES + 1)]
    assert hop_buffers(receiver="right") == want


@pytest.mark.parametrize("planted", ["one buffer", "no acks"])
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_buffer_that_is_written_before_it_is_read_is_noticed(
    planted: Literal["one buffer", "no acks"], is_checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its header; without that, rows of another frame would be taken for this one's."""
    if is_checked:
        with pytest.raises(AnyshardError, match=r"of frame \d of epoch 5, rank 0 sent .* of frame"):
            hop_buffers(receiver=planted)
        return
    monkeypatch.setattr("anyshard.comm.shm.open_hop", lambda *_, **__: 0)
    assert hop_buffers(receiver=planted)[0] != [1.0] * FLOATS


# --- links --------------------------------------------------------------------------------------


def test_a_link_is_as_slow_as_it_says_and_keeps_the_order() -> None:
    link = EmulatedLink(LinkSpec(delay_s=0.01, rate_bytes_s=1000.0), seed=0)
    assert link.due_s(5.0, 100) == pytest.approx(5.11, abs=1e-12)
    # the second was sent while the link was taken
    assert link.due_s(5.05, 100) == pytest.approx(5.21, abs=1e-12)
    assert link.due_s(9.0, 0) == pytest.approx(9.01, abs=1e-12)
    wild = [EmulatedLink(WILD, seed=3) for _ in range(2)]
    close = EmulatedLink(WILD, seed=4)
    dense = [close.due_s(n * 1e-4, 10) for n in range(2000)]
    assert dense == sorted(dense) and len(set(dense)) < 2000, "some are held up by the one before"
    times = [[each.due_s(n * 0.1, 10) for n in range(2000)] for each in wild]
    assert times[0] == times[1] == sorted(times[0])
    late = np.array(times[0]) - np.arange(2000) * 0.1  # nothing is held up by the one before
    stalled = late > 0.02
    assert 20 <= stalled.sum() <= 60, "one in fifty"
    assert late[stalled].min() >= 0.03 and 0.0035 < late[~stalled].max() <= 0.004


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("10ms", LinkSpec(delay_s=0.01)),
        ("0us,100mbit", LinkSpec(delay_s=0.0, rate_bytes_s=12.5e6)),
        (
            "1.5s, 4mbit, jitter=1ms, stall=200ms@0.1%",
            LinkSpec(delay_s=1.5, rate_bytes_s=5e5, jitter_s=1e-3, stall_s=0.2, stall_share=0.001),
        ),
    ],
)
def test_a_link_is_read_as_it_is_written(text: str, spec: LinkSpec) -> None:
    assert parse_link(text) == spec
    assert parse_links([text, "", "1us"], stages=2, name="f")[0] == spec


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("10", "has '10', which is no time; a link is a time, 10ms, and if wanted more"),
        ("10ms,0mbit", "a rate of 0; leave it out"),
        ("10ms,fast", "has 'fast'; a link is a time, 10ms, and if wanted more"),
        ("10ms,1mbit,1mbit", "has '1mbit'"),
        ("10ms,jitter=", "has 'jitter='"),
        ("10ms,stall=1ms", "has 'stall=1ms'"),
        ("-1ms", "has '-1ms'"),
        ("", "has ''"),
    ],
)
def test_a_link_that_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        parse_link(text)
    with pytest.raises(OptionError, match="2 links; with -pp 3 give 3, one to each next stage and"):
        parse_links(["1ms", "1ms"], stages=3, name="--emulate-link f")
