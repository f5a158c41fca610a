"""Speculation: one answer, bit for bit, with any drafter and gate; what is counted is what came."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from grid import Loaded, the_model
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from anyshard import engine as engine_module
from anyshard import worker as worker_module
from anyshard.engine import Engine
from anyshard.epoch import EngineOptions
from anyshard.errors import PeerLost
from anyshard.launcher import RankGroup, RankMain
from anyshard.layout import KvShard, plan
from anyshard.request import Request, Sampling
from anyshard.speculate import (
    Drafter,
    FixedGate,
    Gate,
    NgramDrafter,
    NgramStore,
    NgramTable,
    OpenGate,
    OracleDrafter,
    Speculator,
    SurvivalGate,
)
from anyshard.speculate.ngram import TOKEN_BYTES
from anyshard.verify.driver import open_group
from anyshard.verify.naive import rank_body
from anyshard.worker import Worker, rank_main

A9 = "adversarial-9-3"
NEW = 24
GREEDY = Sampling()
NOISY = Sampling(temperature=0.8, top_p=0.95, seed=11)


def prompts_of(vocab: int) -> list[tuple[int, ...]]:
    """Ten, of lengths about a block; some repeat themselves, so that n-grams have what to say."""
    rng = np.random.default_rng(5)
    lengths = (1, 2, 7, 31, 32, 33, 40, 64, 65, 90)
    texts = [tuple(int(t) for t in rng.integers(0, vocab, length)) for length in lengths]
    return [text if index % 3 else (text * 9)[:60] for index, text in enumerate(texts)]


@contextmanager
def group_of(model: Loaded, body: RankMain = rank_main) -> Iterator[RankGroup]:
    group = open_group(model.served, body, forked=False)
    try:
        yield group
    finally:
        group.close()


Answer = tuple[tuple[int, ...], str]  # tokens, and a hash of their logits


def answers(
    group: RankGroup,
    model: Loaded,
    prompts: Sequence[tuple[int, ...]],
    *,
    epoch: int,
    speculator: Speculator | None = None,
    sampling: Sampling = GREEDY,
    stop_ids: frozenset[int] = frozenset(),
    tp: int = 1,
    pp: int = 1,
    kv_shard: KvShard = "heads",
    **options: Any,
) -> list[Answer]:
    usual = {"comm": "threads", "threads": 1, "max_model_len": 160, "max_num_seqs": 4}
    drafts = 0 if speculator is None else speculator.most
    engine = Engine(
        group,
        model.config,
        model.profile,
        plan(
            model.config,
            tp=tp,
            pp=pp,
            wire=model.profile.wire,
            leaf=model.profile.leaf,
            kv_shard=kv_shard,
        ),
        EngineOptions(
            **(usual | options),
            drafts=drafts,
            windows=1 if speculator is None else speculator.windows,
        ),
        cores=2,
        epoch=epoch,
        speculator=speculator,
    )
    found: dict[int, tuple[list[int], Any]] = {}
    for prompt in prompts:
        request = Request(
            prompt=prompt, max_tokens=NEW, sampling=sampling, want_logits=True, stop_ids=stop_ids
        )
        found[engine.submit(request)] = ([], hashlib.sha256())
    for event in engine.run():
        assert event.fault is None and event.token is not None and event.logits is not None
        tokens, digest = found[event.request_id]
        tokens.append(event.token)
        digest.update(event.logits.tobytes())
    assert not engine.batch.busy
    engine.close()
    return [(tuple(tokens), digest.hexdigest()) for tokens, digest in found.values()]


def oracle(known: Sequence[tuple[tuple[int, ...], Answer]], right: float, vocab: int) -> Drafter:
    return OracleDrafter(
        {prompt: tokens for prompt, (tokens, _) in known}, right=right, vocab=vocab
    )


@pytest.mark.parametrize("sampling", [GREEDY, NOISY])
def test_one_answer_with_any_drafter_gate_and_split(sampling: Sampling) -> None:
    model = the_model(A9)
    prompts = prompts_of(model.config.vocab)
    with group_of(model) as group:
        whole = answers(group, model, prompts, epoch=1, sampling=sampling)
        assert len({tokens for tokens, _ in whole}) > 5
        known, vocab = list(zip(prompts, whole, strict=True)), model.config.vocab
        ways: list[tuple[Drafter, Gate, int, dict[str, Any]]] = [
            *((oracle(known, 0.7, vocab), OpenGate(), most, {}) for most in range(1, 9)),
            (oracle(known, 1.0, vocab), OpenGate(), 8, {}),
            (oracle(known, 0.0, vocab), OpenGate(), 5, {}),
            (oracle(known, 0.8, vocab), SurvivalGate(), 8, {}),
            (oracle(known, 0.8, vocab), FixedGate(3), 8, {"max_num_seqs": 1}),
            (oracle(known, 0.6, vocab), OpenGate(), 6, {"chunk": 7, "max_num_seqs": 3}),
            (oracle(known, 0.7, vocab), OpenGate(), 4, {"pp": 2}),
            (oracle(known, 0.7, vocab), OpenGate(), 4, {"pp": 3, "micro_batches": 2}),
            (oracle(known, 0.7, vocab), OpenGate(), 4, {"tp": 2, "kernels": "scalar"}),
            (oracle(known, 0.7, vocab), OpenGate(), 7, {"tp": 3, "pp": 2, "poison": True}),
            (NgramDrafter(vocab), OpenGate(), 5, {}),
            (NgramDrafter(vocab), SurvivalGate(), 8, {"pp": 2}),
        ]
        for epoch, (drafter, gate, most, how) in enumerate(ways, 2):
            speculator = Speculator(drafter, gate, most=most)
            got = answers(
                group, model, prompts, epoch=epoch, speculator=speculator, sampling=sampling, **how
            )
            assert got == whole, (most, how)
            figures = speculator.figures
            assert sum(figures.accepted) + figures.rounds == sum(len(t) for t, _ in whole)
            assert figures.proposed[0] or isinstance(drafter, NgramDrafter)


# --- what would be seen --------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [1, 4])
def test_drafts_are_run_where_other_requests_keep_all_stages_busy(windows: int) -> None:
    """Then no frame with what is certain is ever by itself, so its time is known behind others."""
    model = the_model(A9)
    prompts = prompts_of(model.config.vocab)[:4]
    with group_of(model) as group:
        whole = answers(group, model, prompts, epoch=1)
        known = list(zip(prompts, whole, strict=True))
        drafter = oracle(known, 1.0, model.config.vocab)
        speculator = Speculator(drafter, SurvivalGate(windows), most=6, windows=windows)
        got = answers(group, model, prompts, epoch=2, speculator=speculator, pp=2, micro_batches=2)
        assert got == whole
        assert speculator.figures.drafted_rounds > 0


def run_planted(
    *, right: float = 0.6, most: int = 4, body: RankMain = rank_main
) -> tuple[list[Answer], list[Answer]]:
    """Answers without drafts and, with whatever is planted, with them."""
    model = the_model(A9)
    prompts = prompts_of(model.config.vocab)[3:8]
    with group_of(model, body) as group:
        whole = answers(group, model, prompts, epoch=1, sampling=NOISY)
        drafter = oracle(list(zip(prompts, whole, strict=True)), right, model.config.vocab)
        speculator = Speculator(drafter, OpenGate(), most=most)
        got = answers(group, model, prompts, epoch=2, speculator=speculator, sampling=NOISY)
    return whole, got


class NeverBack(Worker):
    """Goes on behind the rows that it was given, wrong drafts and all: one length for each slot."""

    def _take(self, frame):  # type: ignore[no-untyped-def]
        super()._take(frame)
        ends = self.__dict__.setdefault("ends", {})
        for row, slot in enumerate(frame.rows["slot"].tolist()):
            if frame.rows["position"][row] == 0:
                ends[slot] = 0
            self.positions[row] = ends[slot]
            ends[slot] += 1


def test_rows_of_wrong_drafts_that_are_left_counted_change_the_answer() -> None:
    whole, got = run_planted(body=rank_body(NeverBack))
    assert whole != got
    whole, got = run_planted(body=rank_body(NeverBack), right=1.0, most=1)
    assert whole == got, "nothing goes back where no draft is wrong"


class OneOffset(Worker):
    """Of a frame of drafts the first request's rows are in their place, and say where all others
    are."""

    def _take(self, frame):  # type: ignore[no-untyped-def]
        super()._take(frame)
        rows = len(frame.rows)
        if 1 < rows <= 16 and len(set(frame.rows["slot"].tolist())) > 1:
            first = int(frame.rows["position"][0])
            drafts = [
                row for row in range(1, rows) if self.positions[row] > self.positions[row - 1]
            ]
            for row in drafts:
                self.positions[row] = min(first + 1, int(self.positions[row]))


def test_one_offset_for_all_requests_changes_the_answer() -> None:
    whole, got = run_planted(body=rank_body(OneOffset))
    assert whole != got


def test_a_draft_that_is_taken_unseen_changes_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if equality were not asked for."""
    next_tick = engine_module.next_tick

    def trusted(*arguments: Any, **named: Any) -> Any:
        tick, batch = next_tick(*arguments, **named)
        rows = tuple(replace(row, is_draft=False) for row in tick.rows)
        return replace(tick, rows=rows), batch

    monkeypatch.setattr(engine_module, "next_tick", trusted)
    whole, got = run_planted()
    assert whole != got


def test_noise_that_counts_draws_and_not_positions_changes_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream that rejected drafts move on."""
    draw, count = worker_module.sample, 0

    def streamed(module: Any, logits: Any, sampling: Sampling, *, position: int) -> int:
        nonlocal count
        count += 1
        return draw(module, logits, sampling, position=count)

    monkeypatch.setattr(worker_module, "sample", streamed)
    whole, got = run_planted()
    assert whole != got


def test_a_drafter_that_is_told_too_little_costs_acceptance_and_no_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = the_model(A9)
    prompts, vocab = prompts_of(model.config.vocab)[:4], model.config.vocab

    def accepted(epoch: int) -> tuple[list[Answer], int]:
        drafter = oracle(list(zip(prompts, whole, strict=True)), 1.0, vocab)
        speculator = Speculator(drafter, OpenGate(), most=3)
        got = answers(group, model, prompts, epoch=epoch, speculator=speculator, max_num_seqs=1)
        return got, sum(speculator.figures.accepted)

    with group_of(model) as group:
        whole = answers(group, model, prompts, epoch=1)
        got, all_right = accepted(2)
        assert got == whole and all_right == len(prompts) * 17  # of 23
        extend = OracleDrafter.extend
        monkeypatch.setattr(
            OracleDrafter, "extend", lambda self, n, tokens: extend(self, n, tokens[:-1])
        )
        got, few = accepted(3)
        assert got == whole and few < all_right // 4


# --- ends ----------------------------------------------------------------------------------------


def test_an_answer_ends_at_its_stop_token_among_drafts_that_were_right() -> None:
    model = the_model(A9)
    prompts, vocab = prompts_of(model.config.vocab)[3:9], model.config.vocab
    with group_of(model) as group:
        free = answers(group, model, prompts, epoch=1)
        ends = frozenset(tokens[9] for tokens, _ in free)
        whole = answers(group, model, prompts, epoch=2, stop_ids=ends)
        assert any(len(tokens) < NEW for tokens, _ in whole)
        for epoch, most in ((3, 1), (4, 4), (5, 8)):
            drafter = oracle(list(zip(prompts, free, strict=True)), 1.0, vocab)
            speculator = Speculator(drafter, OpenGate(), most=most)
            got = answers(group, model, prompts, epoch=epoch, speculator=speculator, stop_ids=ends)
            assert got == whole


def test_the_rank_group_is_looked_at_though_no_result_keeps_the_front_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow source of drafts finds every result there."""
    model = the_model(A9)
    monkeypatch.setattr(engine_module, "POLL_S", 0.0)
    with group_of(model) as group:

        def lost() -> None:
            raise PeerLost("the launcher has been stopped", rank=0)

        def ready(frame: int, **named: Any) -> Any:
            return wait(frame)

        polled = group.poll
        engine = Engine(
            group,
            model.config,
            model.profile,
            plan(model.config, leaf=model.profile.leaf),
            EngineOptions(comm="threads", threads=1, max_model_len=160, max_num_seqs=1),
            cores=2,
        )
        wait = engine.control.wait_result
        monkeypatch.setattr(engine.control, "wait_result", ready)
        engine.submit(Request(prompt=(1, 2, 3), max_tokens=8))
        events = engine.run()
        assert next(events).token is not None
        monkeypatch.setattr(group, "poll", lost)
        with pytest.raises(PeerLost, match="has been stopped"):
            list(events)
        monkeypatch.setattr(group, "poll", polled)


def test_a_request_that_is_cancelled_among_drafts_says_no_more() -> None:
    model = the_model(A9)
    prompt, vocab = prompts_of(model.config.vocab)[4], model.config.vocab
    with group_of(model) as group:
        whole = answers(group, model, [prompt], epoch=1)
        speculator = Speculator(oracle([(prompt, whole[0])], 1.0, vocab), OpenGate(), most=6)
        engine = Engine(
            group,
            model.config,
            model.profile,
            plan(model.config, leaf=model.profile.leaf),
            EngineOptions(comm="threads", threads=1, max_model_len=160, max_num_seqs=2, drafts=6),
            cores=2,
            epoch=2,
            speculator=speculator,
        )
        first = engine.submit(Request(prompt=prompt, max_tokens=NEW))
        tokens = []
        for event in engine.run():
            tokens.append(event.token)
            if len(tokens) == 4:  # of seven that one step has brought
                engine.cancel(first)
        assert tuple(tokens) == whole[0][0][:4]
        second = engine.submit(Request(prompt=prompt, max_tokens=NEW))
        events = list(engine.run())
        assert {event.request_id for event in events} == {second}
        assert tuple(event.token for event in events) == whole[0][0]
        engine.close()


# --- n-grams -------------------------------------------------------------------------------------


def test_the_posterior_is_that_of_witten_and_bell() -> None:
    table = NgramTable(100)
    for token in (1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2):
        table.append(token)
    mass, rest, match = table.after([1, 2])
    # after 2: 3, 3, 4; after 1 2 the same; so 3 has (2 + 2 (2/5)) / 5, in two orders
    one = {3: 2 / 5, 4: 1 / 5}
    two = {token: count / 5 + 2 / 5 * one[token] for token, count in ((3, 2), (4, 1))}
    assert match == 2 and mass == pytest.approx(two) and rest == pytest.approx(4 / 25)
    assert sum(mass.values()) + rest == pytest.approx(1.0)
    drafts = table.propose(3)
    assert [draft.token for draft in drafts] == [3, 1, 2]
    assert [draft.second for draft in drafts] == [4, -1, -1], "nothing else has followed"
    known = -sum(each * math.log(each) for each in two.values())
    assert drafts[0].entropy == pytest.approx(known - 4 / 25 * math.log(4 / 25 / 100))
    seen_once = NgramTable(100)
    for token in (5, 6, 7, 5, 6):
        seen_once.append(token)
    mass, rest, _ = seen_once.after([5, 6])
    assert mass[7] < 0.8, "what was seen once is not certain"


@given(st.lists(st.integers(0, 3), max_size=60))
def test_a_table_knows_what_followed_the_longest_end_that_was_seen(text: list[int]) -> None:
    table = NgramTable(4)
    for token in text:
        table.append(token)
    mass, rest, match = table.after(text)
    longest = max(
        (
            order
            for order in range(1, min(8, len(text)) + 1)
            if any(text[at : at + order] == text[-order:] for at in range(len(text) - order))
        ),
        default=0,
    )
    assert match == longest
    assert sum(mass.values()) + rest == pytest.approx(1.0)
    for draft in table.propose(5):
        assert draft.entropy >= -1e-12 and draft.match >= 2


def test_a_table_takes_no_more_than_is_counted_for_it() -> None:
    rng = np.random.default_rng(3)
    text = [int(token) for token in rng.integers(0, 49152, 8192)]
    table = NgramTable(49152)
    for token in text:
        table.append(token)
    held = sum(map(sys.getsizeof, table._followers))  # of lists reused, no allocation would tell
    for contexts in table._followers:
        held += sum(map(sys.getsizeof, contexts))
        held += sum(sys.getsizeof(each) for each in contexts.values() if isinstance(each, dict))
    assert 0.5 < held / (TOKEN_BYTES * len(text)) < 1


def test_a_store_learns_when_a_request_is_over_and_never_grows() -> None:
    store = NgramStore(64)
    text = list(range(20))
    drafter = NgramDrafter(1000, store=store)
    drafter.begin(1, text)
    assert store.propose(text[:9], 3, vocab=1000) == []
    drafter.end(1)
    big = NgramStore(1 << 12)
    big.add(text)
    assert [draft.token for draft in big.propose(text[:9], 4, vocab=1000)] == [9, 10, 11, 12]
    for number in range(500):
        store.add([number * 31 % 997 for number in range(number, number + 30)])
    assert len(store._keys) == len(store._tokens) == len(store._counts) == 64
    drafter.begin(2, [500])
    assert drafter.propose(2, 4) == [], "what nobody has said has no drafts"
