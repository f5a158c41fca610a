"""A request whose numbers leave float32 ends alone: its neighbours keep their bits.

The model has two tokens that overflow, each found by an op of its own (models.plant_overflow).
The same from the command line: test_cli.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
from models import ADVERSARIAL_9_3, plant_overflow, write_hf_model

from anyshard.checkpoint import open_checkpoint
from anyshard.comm.control import Frame
from anyshard.engine import Engine, Event
from anyshard.epoch import EngineOptions
from anyshard.launcher import RankMain
from anyshard.layout import KvShard, plan
from anyshard.ops.exact import F32
from anyshard.request import Request
from anyshard.speculate import OpenGate, OracleDrafter, Speculator
from anyshard.verify.driver import open_group, served
from anyshard.verify.naive import rank_body
from anyshard.verify.prompt import hashed_tokens
from anyshard.worker import ROW_SAMPLE, Served, Worker, rank_main

EARLY, LATE = 1001, 1002  # token ids, and what names the fault of each
NAME_OF = {EARLY: "layers.1.qkv", LATE: "head"}
VOCAB = ADVERSARIAL_9_3.vocab
LAYOUTS = [
    *((tp, pp, "heads") for tp, pp in ((1, 1), (3, 1), (1, 3), (2, 2))),
    *((tp, pp, "sequence") for tp, pp in ((4, 1), (2, 2))),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("faulting")
    plant = partial(plant_overflow, layer_of={EARLY: 0, LATE: ADVERSARIAL_9_3.num_layers - 1})
    write_hf_model(folder, ADVERSARIAL_9_3, seed=11, change=plant)
    return served(open_checkpoint(str(folder)))


def prompt(count: int, *, seed: int, last: int | None = None) -> tuple[int, ...]:
    """Ordinary tokens, and `last` behind them."""
    ordinary = tuple(t for t in hashed_tokens(count, VOCAB, seed=seed) if t not in NAME_OF)
    return ordinary if last is None else (*ordinary, last)


def run(
    model: Served,
    prompts: Sequence[tuple[int, ...]],
    *,
    tp: int = 1,
    pp: int = 1,
    kv_shard: KvShard = "heads",
    slots: int | None = None,
    micro_batches: int | None = None,
    chunk: int = 16,
    want_logits: bool = True,
    body: RankMain = rank_main,
    speculator: Speculator | None = None,
) -> list[list[Event]]:
    """The events of each prompt, six tokens long, in one epoch; slots: how many run at once."""
    group = open_group(model, forked=False, rank_body=body)
    try:
        engine = Engine(
            group,
            model.config,
            model.profile,
            plan(model.config, tp=tp, pp=pp, kv_shard=kv_shard, leaf=model.profile.leaf),
            EngineOptions(
                comm="threads",
                threads=1,
                chunk=chunk,
                micro_batches=micro_batches,
                max_num_seqs=slots or len(prompts),
                max_model_len=64,
                poison=True,
                drafts=0 if speculator is None else speculator.most,
                windows=1 if speculator is None else speculator.windows,
            ),
            cores=2,
            speculator=speculator,
        )
        requests = [Request(prompt=p, max_tokens=6, want_logits=want_logits) for p in prompts]
        found: dict[int, list[Event]] = {engine.submit(request): [] for request in requests}
        for event in engine.run():
            found[event.request_id].append(event)
        assert not engine.batch.running and not engine.batch.waiting
        engine.close()
    finally:
        group.close()
    return list(found.values())


def bits(events: Sequence[Event]) -> list[bytes]:
    """Of the logits, one entry a token."""
    assert all(event.fault is None and event.logits is not None for event in events)
    return [event.logits.tobytes() for event in events if event.logits is not None]


@pytest.mark.parametrize(("tp", "pp", "kv_shard"), LAYOUTS)
@pytest.mark.parametrize("token", NAME_OF)
def test_the_neighbours_of_a_fault_keep_their_bits(
    model: Served, token: int, tp: int, pp: int, kv_shard: KvShard
) -> None:
    prompts = [prompt(21, seed=1), prompt(18, seed=2, last=token), prompt(30, seed=3)]
    first, failed, third = run(model, prompts, tp=tp, pp=pp, kv_shard=kv_shard)
    assert [(e.token, e.finish, e.fault) for e in failed] == [(None, "fault", NAME_OF[token])]
    for index, events in ((0, first), (2, third)):
        (alone,) = run(model, [prompts[index]])
        assert len(events) == 6 and events[-1].finish == "length"
        assert bits(events) == bits(alone)
    assert len({*bits(first), *bits(third)}) == 12


@pytest.mark.parametrize(("tp", "pp", "kv_shard"), LAYOUTS)
def test_each_fault_of_an_epoch_has_its_own_name(
    model: Served, tp: int, pp: int, kv_shard: KvShard
) -> None:
    """In one slot after another, the later op first and last; what ran before leaves no trace."""
    order = (LATE, EARLY, None, LATE)
    prompts = [prompt(9, seed=4 + i, last=token) for i, token in enumerate(order)]
    found = run(model, prompts, tp=tp, pp=pp, kv_shard=kv_shard, slots=1)
    for events, token in zip(found, order, strict=True):
        if token is None:
            assert bits(events) == bits(run(model, [prompts[2]])[0])
        else:
            assert [(e.token, e.finish, e.fault) for e in events] == [
                (None, "fault", NAME_OF[token])
            ]


def test_a_fault_in_an_earlier_chunk_ends_the_request_before_its_first_token(
    model: Served,
) -> None:
    bad = (*prompt(5, seed=8), EARLY, *prompt(40, seed=9))
    failed, fine = run(model, [bad, prompt(12, seed=10)], tp=2, chunk=7)
    assert [(e.token, e.fault) for e in failed] == [(None, NAME_OF[EARLY])]
    assert len(bits(fine)) == 6


@pytest.mark.parametrize(("tp", "pp", "kv_shard"), LAYOUTS)
def test_requests_that_fail_in_one_step_are_named_by_the_earliest_op(
    model: Served, tp: int, pp: int, kv_shard: KvShard
) -> None:
    prompts = [prompt(5, seed=15, last=LATE), prompt(6, seed=16, last=EARLY)]
    split = {"tp": tp, "pp": pp, "kv_shard": kv_shard, "chunk": 32}
    for failed in run(model, prompts, micro_batches=1, **split):  # type: ignore[arg-type]
        assert [event.fault for event in failed] == [NAME_OF[EARLY]]


@pytest.mark.parametrize("pp", [2, 3])
def test_frames_that_are_under_way_together_keep_their_faults_apart(model: Served, pp: int) -> None:
    """One prompt fails on the first stage in its first chunk, with more of them behind it; another
    on the last, in a frame of its own where there are as many micro-batches."""
    late, early = prompt(20, seed=15, last=LATE), prompt(9, seed=16, last=EARLY)
    prompts = [late, (*early, *prompt(22, seed=18)), prompt(30, seed=19)]
    (fine,) = run(model, prompts[2:])
    for many in (1, 2, 3, 5):
        first, second, third = run(model, prompts, pp=pp, chunk=11, micro_batches=many)
        assert [event.fault for event in second] == [NAME_OF[EARLY]]
        (failed,) = first
        assert failed.token is None
        assert failed.fault in ([NAME_OF[LATE]] if many > 2 else NAME_OF.values())
        assert bits(third) == bits(fine)


def drafting(
    prompts: Sequence[tuple[int, ...]], answers: Sequence[tuple[int, ...]], windows: int
) -> Speculator:
    """Drafts that are given, three in a frame."""
    drafter = OracleDrafter(dict(zip(prompts, answers, strict=True)), right=1.0, vocab=VOCAB)
    return Speculator(drafter, OpenGate(), most=3, windows=windows)


@pytest.mark.parametrize("windows", [1, 4])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (3, 1), (2, 2)])
def test_a_wrong_draft_that_fails_changes_no_other_ones_name(
    model: Served, tp: int, pp: int, windows: int
) -> None:
    """It would be the earliest of its step."""
    prompts = [prompt(5, seed=15), prompt(40, seed=16, last=LATE)]
    split = {"tp": tp, "pp": pp, "chunk": 11, "micro_batches": 1}
    fine, failed = run(model, prompts, **split)  # type: ignore[arg-type]
    wrong = drafting(prompts, [(EARLY,) * 6, ()], windows)
    alike, alone = run(model, prompts, **split, speculator=wrong)  # type: ignore[arg-type]
    assert [event.fault for event in alone] == [event.fault for event in failed] == [NAME_OF[LATE]]
    assert bits(alike) == bits(fine) and wrong.figures.rollbacks > 0


class Fateful(Worker):
    """Draws EARLY after position 12, which fails when it runs."""

    def _sample(self, flags: list[int]) -> list[F32]:
        logits = super()._sample(flags)
        for row in range(len(flags)):
            if flags[row] & ROW_SAMPLE and self.positions[row] == 12:
                self.drawn[row] = EARLY
        return logits


@pytest.mark.parametrize("windows", [1, 4])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (3, 1), (1, 3), (2, 2)])
def test_a_draft_that_was_right_and_fails_is_named_as_without_drafts(
    model: Served, tp: int, pp: int, windows: int
) -> None:
    prompts, body = [prompt(11, seed=15), prompt(30, seed=16)], rank_body(Fateful)
    plain = run(model, prompts, tp=tp, pp=pp, body=body)
    assert [event.fault for event in plain[0]] == [None] * 3 + [NAME_OF[EARLY]]
    answers = [tuple(event.token or 0 for event in each) for each in plain]
    answers[0] = (*answers[0][:3], 3, 4)
    right = drafting(prompts, answers, windows)
    drafted = run(model, prompts, tp=tp, pp=pp, body=body, speculator=right)
    for events, expected in zip(drafted, plain, strict=True):
        assert [(e.token, e.finish, e.fault) for e in events] == [
            (e.token, e.finish, e.fault) for e in expected
        ]
    assert bits(drafted[0][:-1]) == bits(plain[0][:-1]) and bits(drafted[1]) == bits(plain[1])
    assert sum(right.figures.accepted) >= 5, "also EARLY itself was"


class LateBooks(Worker):
    """Says of a fault when the sampler has answered long ago."""

    def step(self, frame: Frame) -> None:
        status, late = self.control.status, type(self).late
        with pytest.MonkeyPatch.context() as patch:
            if not self.is_sampler:
                patch.setattr(status, "fault", partial(late, status.fault))
            super().step(frame)

    @staticmethod
    def late(fault: Callable[..., None], **what: int) -> None:
        time.sleep(0.2)
        fault(**what)


def test_a_fault_is_named_by_the_rank_that_is_the_last_to_say_so(model: Served) -> None:
    (failed,) = run(model, [prompt(9, seed=14, last=EARLY)], pp=3, body=rank_body(LateBooks))
    assert [event.fault for event in failed] == [NAME_OF[EARLY]]


class OneBadLogit(Worker):
    """The last logit of a rank is NaN once, when sequences have three tokens more."""

    where = 0

    def _sample(self, flags: list[int]) -> list[F32]:
        self.is_turn = len(flags) == 2 and int(self.positions[0]) == 11
        return super()._sample(flags)

    def _spoil(self) -> None:
        if self.is_turn and self.program.tp_index == self.where:
            self.shard_RV[0, -1] = np.nan

    def _exchange_pairs(self, sampled: list[int]) -> None:
        self._spoil()
        super()._exchange_pairs(sampled)

    def _gather_logits(self, count: int) -> None:
        self._spoil()
        super()._gather_logits(count)


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("want_logits", [False, True])
def test_a_logit_that_is_no_number_is_a_fault_whichever_rank_has_it(
    model: Served, want_logits: bool, where: int
) -> None:
    prompts = [prompt(9, seed=12), prompt(9, seed=13)]
    assert [len(each) for each in prompts] == [9, 9]
    body = rank_body(type("Bad", (OneBadLogit,), {"where": where}))
    failed, fine = run(model, prompts, tp=3, want_logits=want_logits, body=body)
    assert [event.fault for event in failed] == [None, None, None, "head"]
    alone = run(model, prompts[1:], want_logits=want_logits)[0]
    assert [event.token for event in fine] == [event.token for event in alone]
