"""A conversation continued on stored keys and values has the bits of one computed afresh."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from grid import Loaded, the_model

from anyshard.comm.control import Result
from anyshard.engine import Engine
from anyshard.epoch import EngineOptions
from anyshard.layout import KvShard, plan
from anyshard.request import Request, Sampling
from anyshard.verify.cells import shuffled_pages
from anyshard.verify.driver import open_group
from anyshard.verify.prompt import hashed_tokens

NAME = "adversarial-9-3"
LENGTH = 160


@contextmanager
def engine_of(
    model: Loaded,
    *,
    tp: int = 1,
    pp: int = 1,
    kv_shard: KvShard = "heads",
    slots: int = 2,
    chunk: int = 48,
) -> Iterator[Engine]:
    served = model.served
    group = open_group(served, forked=False)
    try:
        engine = Engine(
            group,
            served.config,
            served.profile,
            plan(served.config, tp=tp, pp=pp, kv_shard=kv_shard, leaf=served.profile.leaf),
            EngineOptions(
                comm="threads",
                threads=1,
                chunk=chunk,
                max_num_seqs=slots,
                max_model_len=LENGTH,
                deadline_s=60.0,
                page_order=shuffled_pages(slots * LENGTH // 32),
                poison=True,
            ),
            cores=2,
        )
        yield engine
        engine.close()
    finally:
        group.close()


def request(prompt: tuple[int, ...], *, session: int | None, heat: float = 0.0) -> Request:
    return Request(
        prompt=prompt,
        max_tokens=6,
        sampling=Sampling(temperature=heat, seed=3),
        want_logits=True,
        session=session,
    )


def answer(engine: Engine, asked: Request) -> tuple[tuple[int, ...], str, int]:
    """Tokens, digest of the logit rows, and how many prompt tokens ran."""
    before = engine.timings.prefill_tokens
    digest, tokens = hashlib.sha256(), []
    engine.submit(asked)
    for event in engine.run():
        assert event.token is not None and event.logits is not None
        digest.update(event.logits.astype("<f4").tobytes())
        tokens.append(event.token)
    return tuple(tokens), digest.hexdigest(), engine.timings.prefill_tokens - before


@pytest.mark.parametrize(
    ("tp", "pp", "kv_shard"),
    [
        *((tp, pp, "heads") for tp, pp in ((1, 1), (2, 1), (1, 2), (3, 2))),
        *((tp, pp, "sequence") for tp, pp in ((2, 1), (3, 2), (8, 1))),
    ],
)
def test_later_turns_have_the_bits_of_a_fresh_run_and_read_only_what_is_new(
    tp: int, pp: int, kv_shard: KvShard
) -> None:
    model = the_model(NAME)
    first = model.prompt[:70]
    news = hashed_tokens(12, model.config.vocab, seed=5)
    with engine_of(model, tp=tp, pp=pp, kv_shard=kv_shard) as engine:
        said, _, ran = answer(engine, request(first, session=1))
        assert ran == 70
        second = (*first, *said, *news)
        turns = [
            (second, 1 + len(news)),  # the answer's last token never ran
            ((*second[:40], *news, *second[40:60]), len(news) + 20),  # changed in the middle
            (second[:33], 1),  # shorter
            (second, len(second) - 33),  # what stood further on is gone
        ]
        continued = [answer(engine, request(turn, session=1, heat=0.8)) for turn, _ in turns]
    for (turn, new), got in zip(turns, continued, strict=True):
        assert got[2] == new
        with engine_of(model) as engine:
            fresh = answer(engine, request(turn, session=None, heat=0.8))
        assert got[:2] == fresh[:2]


def test_the_bar_counts_only_what_has_to_run() -> None:
    model = the_model(NAME)
    with engine_of(model) as engine:
        said, _, _ = answer(engine, request(model.prompt[:70], session=1))
        heard: list[tuple[int, int]] = []
        engine.submit(request((*model.prompt[:70], *said, *model.prompt[:60]), session=1))
        list(engine.run(lambda done, total: heard.append((done, total))))
    assert heard == [(48, 61), (61, 61)]


def test_a_cancelled_answer_leaves_what_it_has_stored() -> None:
    model = the_model(NAME)
    with engine_of(model) as engine:
        first = engine.submit(request(model.prompt[:100], session=1))
        list(engine.run(lambda done, total: engine.cancel(first)))
        assert engine.timings.prefill_tokens == 48
        _, digest, ran = answer(engine, request(model.prompt[:100], session=1))
        assert ran == 52
        assert digest == answer(engine, request(model.prompt[:100], session=None))[1]


def test_what_is_queued_counts_in_the_bar_and_is_cancelled_like_the_rest() -> None:
    """Two slots, nine requests: the ticks see few of them at a time."""
    model = the_model(NAME)
    with engine_of(model) as engine:
        ids = [engine.submit(request(model.prompt[:9], session=None)) for _ in range(9)]
        engine.cancel(ids[7])
        heard: list[tuple[int, int]] = []
        ended, waits = [], []
        for event in engine.run(lambda done, total: heard.append((done, total))):
            waits.append(len(engine.batch.waiting))
            if event.finish is not None:
                ended.append(event.request_id)
            if event.request_id == ids[0]:
                engine.cancel(ids[8])  # it waits in the queue
        assert ended == ids[:7]
        assert heard[0] == (18, 72) and heard[-1] == (63, 63)
        assert max(waits) <= 2
        assert not engine.batch.busy and engine.batch.unread == 0


def test_an_ended_session_is_computed_again() -> None:
    model = the_model(NAME)
    with engine_of(model) as engine:
        answer(engine, request(model.prompt[:40], session=1))
        engine.end_session(1)
        assert not engine.batch.resting and len(engine.batch.free_slots) == 2
        assert answer(engine, request(model.prompt[:40], session=1))[2] == 40


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_a_session_that_was_cancelled_while_chunks_were_under_way_goes_on_from_what_is_certain(
    pp: int,
) -> None:
    model = the_model(NAME)
    prompt = model.prompt[:90]
    with engine_of(model) as engine:
        fresh = answer(engine, request(prompt, session=None))
    with engine_of(model, pp=pp, chunk=16) as engine:
        first = engine.submit(request(prompt, session=1))
        under_way: list[int] = []

        def cancel(done: int, total: int) -> None:
            if not under_way:
                rows = [row.position for each in engine._in_flight for row in each.tick.rows]
                under_way.extend(rows)
                engine.cancel(first)

        assert list(engine.run(cancel)) == []
        (rests,) = engine.batch.resting
        assert rests.computed == 16
        got = answer(engine, request(prompt, session=1))
        assert got[:2] == fresh[:2] and got[2] == 90 - rests.computed
    assert bool(under_way) == (pp > 1)


def test_a_session_that_failed_is_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    model = the_model(NAME)
    with engine_of(model) as engine:
        receive = engine._receive

        def failing() -> tuple[Any, Result, list[int]]:
            flight, result, codes = receive()
            result.faults[0] = 1
            return flight, result, codes

        monkeypatch.setattr(engine, "_receive", failing)
        engine.submit(request(model.prompt[:20], session=1))
        assert [event.finish for event in engine.run()] == ["fault"]
        assert not engine.batch.resting and len(engine.batch.free_slots) == 2
