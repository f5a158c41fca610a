"""Windows: frames of drafts behind each other in a pipeline, and what becomes of those that nobody
waits for any more. One answer, bit for bit; no word that is lost or late changes it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from grid import INT8, W8, Loaded, the_model
from msgspec.structs import replace
from test_speculate import (
    A9,
    GREEDY,
    NOISY,
    Answer,
    answers,
    group_of,
    oracle,
    prompts_of,
)

from anyshard import engine as engine_module
from anyshard import flight as flight_module
from anyshard.comm.base import Place, WireSizes
from anyshard.comm.control import FrontControl
from anyshard.comm.link import LinkSpec
from anyshard.comm.region import ControlSizes, EpochRegion, EpochSizes
from anyshard.comm.voids import Voids, publish_void
from anyshard.engine import Engine
from anyshard.epoch import EngineOptions
from anyshard.errors import PeerLost
from anyshard.launcher import RankGroup
from anyshard.layout import plan
from anyshard.request import Request, Sampling
from anyshard.speculate import (
    Drafter,
    FixedGate,
    Gate,
    NgramDrafter,
    OpenGate,
    Speculator,
    SurvivalGate,
)
from anyshard.verify.driver import open_group
from anyshard.verify.naive import rank_body
from anyshard.worker import Worker

DEEP = "deep-10"
FAR = (LinkSpec(delay_s=0.002),) * 2
WILD = (LinkSpec(delay_s=0.0, jitter_s=0.004, stall_s=0.02, stall_share=0.05),) * 2


def windowed(
    known: list[tuple[tuple[int, ...], Answer]],
    vocab: int,
    *,
    right: float | None,
    most: int,
    windows: int,
    gate: str = "none",
) -> Speculator:
    """right None: n-grams."""
    drafter: Drafter = NgramDrafter(vocab) if right is None else oracle(known, right, vocab)
    gates: dict[str, Callable[[], Gate]] = {
        "none": OpenGate,
        "fixed": lambda: FixedGate(most - 1),
        "entropy": lambda: SurvivalGate(windows),
    }
    return Speculator(drafter, gates[gate](), most=most, windows=windows)


#: Drafts right, drafts of a frame, frames, gate, and how to run: with rows in flight from 2 to 32.
WAYS: list[tuple[float | None, int, int, str, dict[str, Any]]] = [
    (0.7, 1, 2, "none", {"pp": 2}),
    (0.7, 1, 4, "none", {"pp": 2}),
    (0.7, 2, 4, "fixed", {"pp": 2}),
    (0.7, 1, 16, "none", {"pp": 2}),
    (0.7, 2, 16, "none", {"pp": 2, "max_num_seqs": 1}),
    (0.7, 4, 8, "none", {"pp": 2, "max_num_seqs": 1}),
    (0.7, 8, 4, "none", {"pp": 2, "max_num_seqs": 2}),
    (1.0, 3, 8, "none", {"pp": 2}),
    (0.0, 3, 8, "none", {"pp": 2}),
    (0.8, 4, 8, "entropy", {"pp": 2}),
    (0.8, 4, 8, "entropy", {"pp": 4, "max_num_seqs": 1}),
    (None, 4, 8, "none", {"pp": 2}),
    (None, 8, 8, "entropy", {"pp": 2, "max_num_seqs": 1}),
    (0.7, 3, 6, "none", {"pp": 1}),
    (0.7, 3, 6, "none", {"pp": 3, "micro_batches": 2}),
    (0.7, 3, 8, "none", {"pp": 4}),
    (0.7, 3, 8, "fixed", {"tp": 2, "pp": 2, "max_num_seqs": 1}),
    (0.7, 3, 8, "none", {"tp": 3, "pp": 2, "poison": True}),
    (0.7, 3, 8, "none", {"tp": 2, "pp": 2, "kv_shard": "sequence"}),
    (0.7, 3, 8, "none", {"pp": 2, "chunk": 7, "max_num_seqs": 3}),
    (0.7, 3, 8, "none", {"pp": 2, "kernels": "scalar", "threads": 2}),
    (0.7, 3, 8, "none", {"pp": 2, "schedule": "fill-drain", "micro_batches": 2}),
    (0.6, 3, 8, "none", {"pp": 2, "max_num_seqs": 1, "links": FAR}),
    (0.6, 3, 8, "none", {"pp": 2, "max_num_seqs": 3, "links": WILD}),
    (0.8, 2, 8, "entropy", {"tp": 2, "pp": 2, "max_num_seqs": 1, "links": WILD}),
]


@pytest.mark.parametrize("sampling", [GREEDY, NOISY])
@pytest.mark.parametrize("name", [DEEP, DEEP + INT8, DEEP + INT8 + W8])
def test_one_answer_with_any_frames_under_way(name: str, sampling: Sampling) -> None:
    model = the_model(name)
    prompts = prompts_of(model.config.vocab)
    void_rows = 0
    with group_of(model) as group:
        whole = answers(group, model, prompts, epoch=1, sampling=sampling)
        known, vocab = list(zip(prompts, whole, strict=True)), model.config.vocab
        for epoch, (right, most, windows, gate, how) in enumerate(WAYS, 2):
            speculator = windowed(known, vocab, right=right, most=most, windows=windows, gate=gate)
            got = answers(
                group, model, prompts, epoch=epoch, speculator=speculator, sampling=sampling, **how
            )
            assert got == whole, (right, most, windows, gate, how)
            figures = speculator.figures
            assert sum(figures.accepted) + figures.rounds == sum(len(t) for t, _ in whole)
            void_rows += figures.void_rows
            if right == 1.0:
                assert not figures.rollbacks and not figures.void_rows
            if gate != "entropy" and right is not None and 0 < right < 1:
                assert figures.rollbacks and sum(figures.accepted[:most]) > figures.rounds // 4
    assert void_rows


@pytest.mark.ranks
@pytest.mark.parametrize("comm", ["shm", pytest.param("torch", marks=pytest.mark.torch)])
def test_processes_go_over_frames_alike(comm: str) -> None:
    if comm == "torch":
        pytest.importorskip("torch")
    model = the_model(A9)
    prompts = prompts_of(model.config.vocab)[3:7]
    group = open_group(model.served, rank_body(Worker), forked=True)
    try:
        whole = answers(group, model, prompts, epoch=1, comm="shm")
        known = list(zip(prompts, whole, strict=True))
        for epoch, shape in enumerate(({"pp": 2}, {"tp": 2, "pp": 2}), 2):
            speculator = windowed(known, model.config.vocab, right=0.5, most=2, windows=8)
            got = answers(
                group, model, prompts, epoch=epoch, speculator=speculator, comm=comm, links=FAR,
                max_num_seqs=1, **shape,
            )  # fmt: skip
            assert got == whole
            assert speculator.figures.void_rows, "some were gone over"
    finally:
        group.close()


# --- words that are lost, late, doubled ----------------------------------------------------------

PROMPTS = slice(3, 8)


class Busy(Worker):
    """Takes its time, so that frames lie before its first stage."""

    def step(self, frame: Any) -> None:
        if self.program.stage == 0 and len(frame.rows) < 16:
            time.sleep(0.001)
        super().step(frame)


def run_with(
    *,
    right: float = 0.6,
    most: int = 3,
    windows: int = 8,
    body: type[Worker] = Busy,
    name: str = A9,
    **options: Any,
) -> tuple[list[Answer], list[Answer], Speculator]:
    """Answers without drafts and, with whatever is planted, with them in windows."""
    model = the_model(name)
    prompts = prompts_of(model.config.vocab)[PROMPTS]
    how = {"pp": 2, "max_num_seqs": 1, "links": FAR} | options
    with group_of(model, rank_body(body)) as group:
        whole = answers(group, model, prompts, epoch=1, sampling=NOISY, pp=how["pp"])
        known = list(zip(prompts, whole, strict=True))
        speculator = windowed(known, model.config.vocab, right=right, most=most, windows=windows)
        got = answers(group, model, prompts, epoch=2, speculator=speculator, sampling=NOISY, **how)
    return whole, got, speculator


def lost(control: FrontControl, sequence: int) -> None:
    """Nobody hears of it."""


class Late:
    """Words come when the next one is said."""

    def __init__(self) -> None:
        self.kept: dict[FrontControl, int] = {}

    def __call__(self, control: FrontControl, sequence: int) -> None:
        before = self.kept.get(control)
        self.kept[control] = sequence
        if before is not None:
            publish_void(control._region, before)


def doubled(control: FrontControl, sequence: int) -> None:
    for _ in range(2):
        publish_void(control._region, sequence)


@pytest.mark.parametrize("shape", [{}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("heard", ["lost", "late", "doubled"])
def test_a_word_that_goes_astray_costs_no_bit(
    heard: str, shape: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"lost": lost, "late": Late(), "doubled": doubled}[heard]
    monkeypatch.setattr(FrontControl, "void", lambda self, sequence: how(self, sequence))
    whole, got, speculator = run_with(**shape)
    assert got == whole
    assert (speculator.figures.void_rows == 0) == (heard == "lost")


def test_a_stage_that_is_slow_costs_no_bit() -> None:
    class Slow(Busy):
        """Its second stage takes its time now and then."""

        def step(self, frame: Any) -> None:
            if self.program.stage and frame.sequence % 7 == 0:
                time.sleep(0.02)
            super().step(frame)

    whole, got, speculator = run_with(body=Slow)
    assert got == whole and speculator.figures.void_rows


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_goes_among_windows_is_named(rank: int) -> None:
    class Gone(Busy):
        def step(self, frame: Any) -> None:
            if self.program.rank == rank and frame.sequence == 12:
                raise PeerLost("it is gone", rank=rank)
            super().step(frame)

    with pytest.raises(PeerLost) as caught:
        run_with(body=Gone)
    assert caught.value.rank == rank


# --- keys and values behind the end --------------------------------------------------------------


class Poisoned(Busy):
    """Whenever a sequence goes back, keys and values from there on are NaN."""

    def _take(self, frame: Any) -> None:
        super()._take(frame)
        seen: dict[int, int] = self.__dict__.setdefault("generations", {})
        rolled: dict[int, int] = self.__dict__.setdefault("rolled", {})
        blocks: dict[int, int] = self.__dict__.setdefault("blocks", {})
        for page in frame.pages:
            blocks[int(page["slot"])] = int(page["block"]) + 1
        for row in frame.rows:
            slot, position, generation = (int(row[n]) for n in ("slot", "position", "generation"))
            if generation > seen.get(slot, 0):
                self._poison(slot, position)
                rolled[slot] = rolled.get(slot, 0) + 1
            seen[slot] = generation

    def _poison(self, slot: int, first: int) -> None:
        block = self.program.profile.kv_block
        for position in range(first, self.__dict__["blocks"][slot] * block):
            page = self.page_table[slot, position // block]
            for layer in range(*self.program.layers):
                self.kv.keys(layer)[page, :, :, position % block] = np.nan
                self.kv.values(layer)[page, :, position % block] = np.nan


def test_what_lies_behind_the_end_is_never_read() -> None:
    poisoned: list[Poisoned] = []

    class Kept(Poisoned):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            poisoned.append(self)

    for options in ({}, {"tp": 2}, {"windows": 1, "pp": 1, "links": ()}):
        poisoned.clear()
        whole, got, _ = run_with(body=Kept, **options)
        assert got == whole
        assert sum(sum(each.__dict__.get("rolled", {}).values()) for each in poisoned) > 20


def test_poison_is_seen_where_a_row_reads_it() -> None:
    class Early(Poisoned):
        """One position too soon: that of the token before, which the next row attends to."""

        def _poison(self, slot: int, first: int) -> None:
            super()._poison(slot, first - 1)

    with pytest.raises(AssertionError, match=r"layers\.0\.attention"):
        run_with(body=Early)


# --- planted bugs --------------------------------------------------------------------------------


def any_generation(self: Any, row: Any, running: Any) -> bool:
    now = running.get(row.slot)
    return now is not None and now.request_id == self.sequences[row.slot].request_id


def test_without_generations_nothing_is_gone_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Position and token are a fence of their own: the answer stands, and the rows are wasted."""
    whole, got, speculator = run_with(right=0.7)
    assert got == whole and speculator.figures.void_rows
    monkeypatch.setattr(flight_module.Flight, "awaited", any_generation)
    whole, got, speculator = run_with(right=0.7)
    assert got == whole and not speculator.figures.void_rows


def test_without_any_fence_the_answer_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of frames behind a draft that was wrong count."""
    ahead_tick = engine_module.ahead_tick

    def trusted(*arguments: Any) -> Any:
        tick, batch = ahead_tick(*arguments)
        return replace(tick, rows=tuple(replace(row, is_draft=False) for row in tick.rows)), batch

    monkeypatch.setattr(engine_module, "ahead_tick", trusted)
    whole, got, _ = run_with(right=1.0)
    assert got == whole, "nothing is wrong"
    monkeypatch.setattr(flight_module.Flight, "awaited", any_generation)
    whole, got, _ = run_with(right=0.7)
    assert whole != got


def test_a_frame_that_is_gone_over_though_awaited_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send, count = FrontControl.send_frame, itertools.count()

    def sent(self: FrontControl, *arguments: Any, **named: Any) -> int:
        sequence = send(self, *arguments, **named)
        if self._region.epoch == 2 and next(count) == 12:
            publish_void(self._region, sequence)
        return sequence

    monkeypatch.setattr(FrontControl, "send_frame", sent)
    with pytest.raises(AssertionError, match="somebody waits for a frame that was void"):
        run_with(right=1.0)


def test_ranks_of_a_stage_that_decide_by_themselves_do_not_end_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each looks when it gets there: sooner or later one waits for what another leaves out."""

    def settle(self: Voids, *, is_handed_on: bool) -> None:
        now, slot = int(self.now[0]), int(self.now[1])
        time.sleep(0.001 * self._rank)
        self.words[slot] = now if is_handed_on else self._told[slot]

    monkeypatch.setattr(Voids, "settle", settle)
    with pytest.raises(PeerLost, match=r"floats on the wire|waited 1 s for rank"):
        for _ in range(5):
            run_with(tp=2, deadline_s=1.0)


# --- the words themselves ------------------------------------------------------------------------


def region_of(*, tp: int, pp: int = 1) -> EpochRegion:
    sizes = EpochSizes(
        wires=WireSizes(tp=tp, pp=pp), control=ControlSizes(rows_max=4, pages_max=4, frame_slots=5)
    )
    return EpochRegion.create(sizes, 1, shared=False)


def test_a_word_is_of_one_frame_and_of_no_later_one_in_its_slot() -> None:
    region = region_of(tp=1)
    voids = Voids(region, rank=0, deadline_s=1.0)
    publish_void(region, 7)
    seen = []
    for sequence in (1, 2, 7, 12, (1 << 32) + 2):
        voids.begin(sequence)
        voids.settle(is_handed_on=False)
        seen.append(voids.is_void)
    assert seen == [False, False, True, False, False]
    voids.begin(13)
    voids.settle(is_handed_on=True)
    assert voids.is_void, "the stage before has said so"


def test_a_stage_goes_by_what_its_first_rank_has_seen() -> None:
    region = region_of(tp=3)
    first, *others = (Voids(region, rank=rank, deadline_s=1.0) for rank in range(3))
    for voids in (first, *others):
        voids.begin(4)
    first.settle(is_handed_on=False)
    publish_void(region, 4)  # too late
    for voids in others:
        voids.settle(is_handed_on=False)
        assert not voids.is_void
    for voids in (first, *others):
        voids.begin(5)
    publish_void(region, 5)
    first.settle(is_handed_on=False)
    region.voids()[:] = 0
    for voids in others:
        voids.settle(is_handed_on=False)
        assert voids.is_void


def test_the_first_rank_of_a_stage_is_waited_for_no_longer_than_the_deadline() -> None:
    region = region_of(tp=2)
    voids = Voids(region, rank=1, deadline_s=0.2)
    voids.begin(1)
    with pytest.raises(PeerLost, match=r"rank 1 waited 0\.2 s for rank 0 in a word on whether"):
        voids.settle(is_handed_on=False)


def test_a_stage_over_several_hosts_goes_by_the_stage_before_it_alone() -> None:
    """Its ranks share no mapping, in which one could say what it has seen."""
    wires = WireSizes(tp=2, pp=2, hosts=(1, 0, 1, 1))
    control = ControlSizes(rows_max=4, pages_max=4, frame_slots=5)
    for rank, host, waits in ((0, 1, False), (1, 0, False), (3, 1, True)):
        region = EpochRegion.create(
            EpochSizes(wires=wires, control=control), 1, shared=False, place=Place(host=host)
        )
        voids = Voids(region, rank=rank, deadline_s=30.0)
        assert (voids._waiter is not None) == waits
        for sequence, is_handed_on in ((4, True), *([] if waits else [(5, False)])):
            publish_void(region, sequence)
            voids.begin(sequence)
            voids.settle(is_handed_on=is_handed_on)
            assert voids.is_void == is_handed_on


# --- sessions and ends ---------------------------------------------------------------------------


def engine_of(group: RankGroup, model: Loaded, speculator: Speculator | None, epoch: int) -> Engine:
    return Engine(
        group,
        model.config,
        model.profile,
        plan(model.config, pp=2, leaf=model.profile.leaf),
        EngineOptions(
            comm="threads",
            threads=1,
            max_model_len=200,
            max_num_seqs=2,
            links=FAR,
            drafts=0 if speculator is None else speculator.most,
            windows=1 if speculator is None else speculator.windows,
        ),
        cores=2,
        epoch=epoch,
        speculator=speculator,
    )


def test_a_session_goes_on_behind_frames_that_were_gone_over() -> None:
    """The answer ends while frames of it are under way, by its length or since it is cancelled."""
    model = the_model(A9)
    prompts, vocab = prompts_of(model.config.vocab), model.config.vocab

    def conversation(speculator: Speculator | None, epoch: int, *, cut: bool) -> list[list[int]]:
        engine, said = engine_of(group, model, speculator, epoch), []
        text: tuple[int, ...] = ()
        for turn in range(3):
            text += prompts[4 + turn][:20]
            request = engine.submit(Request(prompt=text, max_tokens=12, session=1))
            tokens: list[int] = []
            for event in engine.run():
                assert event.token is not None
                tokens.append(event.token)
                if cut and len(tokens) == 7:
                    engine.cancel(request)
            said.append(tokens)
            text += tuple(tokens)
        engine.close()
        return said

    with group_of(model) as group:
        for epoch, cut in ((1, False), (11, True)):
            whole = conversation(None, epoch, cut=cut)
            for number, windows in enumerate((1, 6), 1):
                known, at = {}, ()
                for turn, tokens in enumerate(whole):
                    at += prompts[4 + turn][:20]
                    known[at] = tuple(tokens) + (5,) * 20  # wrong behind the end
                    at += tuple(tokens)
                drafter = oracle([], 0.8, vocab)
                drafter._answers = known  # type: ignore[attr-defined]
                speculator = Speculator(drafter, OpenGate(), most=3, windows=windows)
                assert conversation(speculator, epoch + number, cut=cut) == whole
                assert sum(speculator.figures.accepted) > 5


def test_slots_that_are_used_again_at_once_get_nothing_of_the_frames_before() -> None:
    """Many short answers in two slots, each cancelled at its own token or at one of the other's,
    while others wait for the place, which they have before the frames under way are back."""
    model = the_model(A9)
    prompts, vocab = prompts_of(model.config.vocab), model.config.vocab
    with group_of(model) as group:
        whole = answers(group, model, prompts, epoch=1)
        known = list(zip(prompts, whole, strict=True))
        speculator = windowed(known, vocab, right=0.5, most=3, windows=8)
        engine = engine_of(group, model, speculator, 2)
        said: dict[int, list[int | None]] = {
            engine.submit(Request(prompt=prompts[number % len(prompts)], max_tokens=20)): []
            for number in range(60)
        }
        due: set[int] = set()
        for event in engine.run():
            number, tokens = event.request_id, said[event.request_id]
            for other in due - {number}:
                engine.cancel(other)
            tokens.append(event.token)
            if len(tokens) == 1 + number % 9:
                due.add(number)
                if number % 2:
                    engine.cancel(number)
        for number, tokens in said.items():
            least, answer = 1 + number % 9, whole[number % len(prompts)][0]
            assert tuple(tokens) == answer[: len(tokens)], number
            assert len(tokens) == least or (len(tokens) > least and not number % 2)
        engine.close()
        assert not engine._in_flight and not engine._void


def test_a_prompt_whose_last_chunk_is_one_token_is_not_drafted_for_too_soon() -> None:
    model = the_model(A9)
    prompts = [tuple(range(1, 1 + length)) for length in (9, 17, 25)]
    with group_of(model) as group:
        whole = answers(group, model, prompts, epoch=1)
        known = list(zip(prompts, whole, strict=True))
        for epoch, right in ((2, None), (3, 0.7)):
            speculator = windowed(known, model.config.vocab, right=right, most=3, windows=8)
            got = answers(
                group, model, prompts, epoch=epoch, speculator=speculator, chunk=8, pp=2, links=FAR
            )
            assert got == whole


def test_rows_of_another_request_pass_drafts_by() -> None:
    """What is certain has places of its own, whatever is under way."""
    model = the_model(A9)
    sizes = []
    for windows in (1, 16):
        options = EngineOptions(max_model_len=64, drafts=4, windows=windows, micro_batches=3)
        from anyshard.epoch import plan_epoch
        from anyshard.model import program

        layout = plan(model.config, pp=2, leaf=model.profile.leaf)
        programs = [program(model.config, model.profile, layout, rank) for rank in range(2)]
        made = plan_epoch(programs, options, body="scalar", threads=1, spin=False)
        sizes.append((made.ranks.frames, made.ranks.voids, made.schedule.in_flight))
    assert sizes == [(5, False, 4), (20, True, 4)]


def test_batch_numbers_generations() -> None:
    from anyshard.batch import Batch, Limits, apply, next_tick
    from anyshard.pages import PagePool

    limits = Limits(rows_max=9, chunk=4, num_slots=2, block=32, drafts=4)
    pool = PagePool.of(range(4))
    batch = Batch(
        waiting=((1, Request(prompt=(1, 2), max_tokens=9)),),
        running=(),
        free_slots=(0, 1),
        pool=pool,
    )
    _, batch = next_tick(batch, limits)
    batch = apply(batch, {0: (3,)}, frozenset())
    tick, batch = next_tick(batch, limits, drafts={0: (4, 5, 6)})
    assert [row.position for row in tick.rows] == [2, 3, 4, 5]
    first = apply(batch, {0: (4, 9)}, frozenset()).running[0]
    assert (first.tokens, first.computed) == ((1, 2, 3, 4, 9), 4)
    assert (first.drafted, first.generation) == ((), 1)
    part = apply(batch, {0: (4,)}, frozenset()).running[0]
    assert (part.computed, part.drafted, part.generation) == (4, (5, 6), 0)
    whole = apply(batch, {0: (4, 5, 6, 7)}, frozenset()).running[0]
    assert (whole.computed, whole.drafted, whole.generation, whole.unrun) == (6, (), 0, 1)
    session = replace(batch.running[0].request, session=4)
    resting = apply(
        replace(batch, running=(replace(batch.running[0], request=session),)),
        {0: (4, 5)},
        frozenset({0}),
    ).resting[0]
    assert resting.computed == 4, "the row of the last one may have been left out"
