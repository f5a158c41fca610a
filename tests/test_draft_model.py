"""Drafts of a second model: one answer, bit for bit, whatever it says; right where it agrees."""

from __future__ import annotations

import itertools
import math
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from grid import INT8, Loaded, the_model
from models import MODELS, plant_overflow, write_hf_model
from test_speculate import A9, GREEDY, NEW, NOISY, Answer, answers, group_of, prompts_of

from anyshard.checkpoint import open_checkpoint
from anyshard.comm.control import FrontControl
from anyshard.draft_model import ModelDrafter, draft_rank
from anyshard.engine import Engine
from anyshard.epoch import EngineOptions
from anyshard.errors import PeerLost
from anyshard.launcher import RankGroup
from anyshard.layout import plan
from anyshard.ops.sampling import entropy
from anyshard.request import Request, Sampling
from anyshard.speculate import FixedGate, Gate, OpenGate, Speculator, SurvivalGate
from anyshard.tokenizer import vocabulary_difference
from anyshard.verify.driver import open_group, served

LENGTH = 160


@cache
def another(seed: int = 8, *, overflows: bool = False) -> Loaded:
    """Of the shape of A9, with weights of its own. overflows: token 5 leaves float32's range."""
    config = replace(MODELS[A9], num_layers=2)

    def change(weights: dict[str, Any]) -> None:
        if overflows:
            plant_overflow(weights, layer_of={5: 0})

    with TemporaryDirectory() as folder:
        path = write_hf_model(Path(folder) / "m", config, seed=seed, change=change)
        return Loaded.of(f"another-{seed}", served(open_checkpoint(str(path))), (1, 2, 3))


def drafter_in(
    group: RankGroup, model: Loaded, *, epoch: int = 1, forked: bool = False, **options: Any
) -> ModelDrafter:
    usual: dict[str, Any] = {"max_model_len": LENGTH, "max_num_seqs": 4, "chunk": 24}
    comm: Any = "shm" if forked else "threads"
    how = EngineOptions(**(usual | {"comm": comm, "threads": 1} | options))
    return ModelDrafter(group, model.config, model.profile, how, epoch=epoch)


@contextmanager
def drafting(model: Loaded, *, forked: bool = False, **options: Any) -> Iterator[ModelDrafter]:
    group = open_group(model.served, forked=forked)
    try:
        yield drafter_in(group, model, forked=forked, **options)
    finally:
        group.close()


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, NOISY, pytest.param(Sampling(temperature=0.8, seed=5), marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", [A9, A9 + INT8])
def test_a_model_that_drafts_for_itself_is_always_right(name: str, sampling: Sampling) -> None:
    model = the_model(name)
    prompts = prompts_of(model.config.vocab)
    ways: list[tuple[Gate, int, int, dict[str, Any]]] = [
        (OpenGate(), 4, 1, {}),
        (OpenGate(), 1, 1, {"max_num_seqs": 1}),
        (OpenGate(), 8, 1, {"tp": 3, "max_num_seqs": 2}),
        (FixedGate(3), 5, 1, {"chunk": 7}),
        (SurvivalGate(), 6, 1, {}),
        (OpenGate(), 1, 2, {"pp": 2}),
        (OpenGate(), 3, 4, {"pp": 2, "max_num_seqs": 1}),
        (OpenGate(), 2, 16, {"pp": 3, "max_num_seqs": 2}),
        (SurvivalGate(8), 4, 8, {"pp": 2, "max_num_seqs": 1}),
    ]
    with group_of(model) as group, group_of(model) as own:
        whole = answers(group, model, prompts, epoch=1, sampling=sampling)
        assert len({tokens for tokens, _ in whole}) > 5
        for epoch, (gate, most, windows, how) in enumerate(ways, 2):
            drafter = drafter_in(own, model, epoch=epoch, kernels="scalar")
            speculator = Speculator(drafter, gate, most=most, windows=windows)
            got = answers(
                group, model, prompts, epoch=epoch, speculator=speculator, sampling=sampling, **how
            )
            assert got == whole, (most, windows, how)
            figures, drafts = speculator.figures, drafter.figures
            assert figures.accepted == figures.proposed and not figures.rollbacks
            assert sum(figures.accepted) + figures.rounds == sum(len(t) for t, _ in whole)
            if how.get("max_num_seqs") == 1 and isinstance(gate, OpenGate):
                assert sum(figures.accepted) >= (NEW - 2) * len(prompts) * most // (most + 1)
            elif isinstance(gate, OpenGate):  # all share a frame's
                assert sum(figures.accepted) > figures.rounds // 4
            assert drafts.frames <= len(prompts) * (NEW + 4), "none was drawn twice"
            assert drafts.rows <= sum(map(len, prompts)) + len(prompts) * NEW


def run_with(
    model: Loaded, drafter_of: Loaded, *, sampling: Sampling = NOISY, most: int = 3, **how: Any
) -> tuple[list[Answer], list[Answer], Speculator]:
    """Answers without drafts, and with those of another."""
    prompts = prompts_of(model.config.vocab)[3:9]
    windows = how.pop("windows", 1)
    with group_of(model) as group, drafting(drafter_of) as drafter:
        whole = answers(group, model, prompts, epoch=1, sampling=sampling)
        speculator = Speculator(drafter, OpenGate(), most=most, windows=windows)
        got = answers(
            group, model, prompts, epoch=2, speculator=speculator, sampling=sampling, **how
        )
    return whole, got, speculator


@pytest.mark.parametrize("how", [{}, {"max_num_seqs": 1}, {"pp": 2, "windows": 6}], ids=str)
@pytest.mark.parametrize("sampling", [GREEDY, NOISY])
def test_a_model_that_knows_nothing_costs_no_bit(sampling: Sampling, how: dict[str, Any]) -> None:
    whole, got, speculator = run_with(the_model(A9), another(), sampling=sampling, **how)
    assert got == whole
    figures = speculator.figures
    assert sum(figures.accepted) < sum(figures.proposed) // 8 and figures.rollbacks > NEW


@pytest.mark.parametrize("how", [{}, {"pp": 2, "windows": 6, "max_num_seqs": 1}], ids=str)
def test_what_is_stored_of_wrong_drafts_is_run_again(how: dict[str, Any]) -> None:
    """The draft model is the model; what it is drawn with is not, so that some drafts are wrong,
    and what follows these must be drafted from the text that came instead."""
    model, right = the_model(A9), []

    class Cold(ModelDrafter):
        def begin(self, request_id: int, prompt: Sequence[int], **named: Any) -> None:
            super().begin(request_id, prompt, sampling=GREEDY)

        def propose(self, request_id: int, most: int, *, after: Sequence[int] = ()) -> list[Any]:
            found = super().propose(request_id, most, after=after)
            slot = self._lines[request_id].slot
            text = [*self._lines[request_id].tokens, *after, *(each.token for each in found[:-1])]
            assert not found or slot.stored[: len(text)] == text
            right.append(slot)
            return found

    prompts = prompts_of(model.config.vocab)[3:9]
    hot = Sampling(temperature=0.6, seed=2)
    windows = how.get("windows", 1)
    how = {key: value for key, value in how.items() if key != "windows"}
    with group_of(model) as group, group_of(model) as own:
        whole = answers(group, model, prompts, epoch=1, sampling=hot)
        options = EngineOptions(
            comm="threads", threads=1, max_model_len=LENGTH, max_num_seqs=4, poison=True
        )
        drafter = Cold(own, model.config, model.profile, options)
        speculator = Speculator(drafter, OpenGate(), most=3, windows=windows)
        got = answers(group, model, prompts, epoch=2, speculator=speculator, sampling=hot, **how)
    figures = speculator.figures
    assert got == whole and right
    assert figures.rollbacks > 5
    assert sum(figures.accepted[:3]) > sum(figures.proposed[:3]) // 3, "most are the likeliest"


# --- what would be seen --------------------------------------------------------------------------


def test_state_that_is_kept_one_token_too_far_costs_acceptance_and_no_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = the_model(A9)
    whole, got, speculator = run_with(model, model, max_num_seqs=1)
    figures = speculator.figures
    assert got == whole and figures.accepted == figures.proposed
    run = ModelDrafter._run

    def too_far(self: ModelDrafter, slot: Any, text: list[int], kept: int) -> bool:
        if 0 < kept < len(text) - 1:
            slot.forget(kept)
            slot.stored.append(text[kept])
            slot.drawn.append(None)
            kept += 1
        return run(self, slot, text, kept)

    monkeypatch.setattr(ModelDrafter, "_run", too_far)
    whole, got, speculator = run_with(model, model, max_num_seqs=1)
    figures = speculator.figures
    assert got == whole and figures.rollbacks > 12
    assert sum(figures.accepted) < sum(figures.proposed) * 3 // 4


def test_other_noise_than_that_of_the_request_costs_acceptance_and_no_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = Speculator.begin
    monkeypatch.setattr(
        Speculator,
        "begin",
        lambda self, number, prompt, **_: begin(self, number, prompt, sampling=GREEDY),
    )
    hot = Sampling(temperature=3.0, seed=2)
    whole, got, speculator = run_with(the_model(A9), the_model(A9), sampling=hot)
    figures = speculator.figures
    assert got == whole and sum(figures.accepted) < sum(figures.proposed) // 2


# --- its own slots -------------------------------------------------------------------------------


class Counted:
    """Rows of the frames that a drafter sends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[list[tuple[int, int, int]]] = []
        send = FrontControl.send_frame

        def counted(control: FrontControl, rows: Any, *rest: Any) -> int:
            self.rows.append([(int(r["slot"]), int(r["position"]), int(r["token"])) for r in rows])
            return send(control, rows, *rest)

        monkeypatch.setattr(FrontControl, "send_frame", counted)

    def taken(self) -> list[list[tuple[int, int, int]]]:
        found, self.rows = self.rows, []
        return found


def test_a_frame_has_what_is_lacking_and_the_row_of_a_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, counted = the_model(A9), Counted(monkeypatch)
    prompt = prompts_of(model.config.vocab)[5]  # 33 tokens
    with drafting(model, max_num_seqs=2) as drafter:
        drafter.begin(7, prompt)
        assert not counted.taken()
        a, b, c = (each.token for each in drafter.propose(7, 3))
        chunks = [[position for _, position, _ in rows] for rows in counted.taken()]
        assert chunks == [[*range(24)], [*range(24, 33)], [33], [34]]
        assert [each.token for each in drafter.propose(7, 3)] == [a, b, c]
        assert drafter.propose(7, 0) == [] and not counted.taken(), "it is known"
        (d,) = drafter.propose(7, 1, after=(a, b, c))
        assert counted.taken() == [[(0, 35, c)]]
        drafter.extend(7, (a, b, 3))
        drafter.propose(7, 1)
        assert counted.taken() == [[(0, 35, 3)]] or c == 3
        drafter.propose(7, 1, after=(9, 9))
        assert counted.taken() == [[(0, 36, 9), (0, 37, 9)]]
        drafter.begin(8, prompt[:20])
        drafter.propose(8, 1)
        assert counted.taken() == [[(1, p, t) for p, t in enumerate(prompt[:20])]]
        drafter.end(7)
        drafter.begin(9, (*prompt, a, 8), sampling=NOISY)
        drafter.propose(9, 1)
        assert counted.taken() == [[(0, 34, 8)]], "what was stored goes on"
        assert d.source == "model" and d.match == 0
        figures = drafter.figures
        assert (figures.frames, figures.rows) == (9, 60)
        assert figures.weight_bytes > 0 and figures.kv_bytes > 0 and figures.seconds > 0
        assert "f32" in figures.text() and figures.as_json()["threads"] == 1


def test_a_slot_goes_to_who_begins_like_it_and_keeps_no_draft_that_was_drawn_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, counted = the_model(A9), Counted(monkeypatch)
    one, other = (prompts_of(model.config.vocab)[number] for number in (4, 5))
    with drafting(model, max_num_seqs=2) as drafter:
        drafter.begin(1, one)
        drafter.begin(2, other)
        (cold,), (known,) = drafter.propose(1, 1), drafter.propose(2, 1)
        drafter.end(1)
        drafter.end(2)
        counted.taken()
        drafter.begin(3, other)
        assert drafter.propose(3, 1) == [known] and not counted.taken()
        drafter.begin(4, one, sampling=Sampling(temperature=3.0, seed=2))
        (hot,) = drafter.propose(4, 1)
        assert counted.taken() == [[(0, len(one) - 1, one[-1])]], "it is drawn once more"
        assert hot.entropy > cold.entropy and drafter.propose(4, 1) == [hot]
        assert hot.chance == pytest.approx(math.exp(-hot.entropy))
        drafter.end(4)
        drafter.begin(5, one, sampling=Sampling(temperature=3.0, seed=3))
        (other_noise,) = drafter.propose(5, 1)
        assert len(counted.taken()) == 1 and other_noise.token != hot.token
        assert other_noise.entropy == hot.entropy


def test_drafts_end_where_its_context_ends() -> None:
    model = the_model(A9)
    with drafting(model, max_model_len=40) as drafter:
        drafter.begin(1, list(range(38)))
        assert len(drafter.propose(1, 8)) == 3  # after 38, 39 and 40 tokens
        assert not drafter.propose(1, 8, after=(1, 2, 3))
        drafter.end(1)
        drafter.begin(2, list(range(50)))
        assert not drafter.propose(2, 8)


def test_a_request_without_a_slot_waits_for_one_without_drafts() -> None:
    model = the_model(A9)
    prompts = prompts_of(model.config.vocab)[:5]
    with group_of(model) as group, drafting(model, max_num_seqs=2) as drafter:
        whole = answers(group, model, prompts, epoch=1, sampling=NOISY)
        speculator = Speculator(drafter, OpenGate(), most=8)
        got = answers(group, model, prompts, epoch=2, speculator=speculator, sampling=NOISY)
        assert got == whole
        figures = speculator.figures
        assert sum(figures.proposed) > 20 and figures.accepted == figures.proposed
        for number, prompt in enumerate(prompts[:4]):
            drafter.begin(number, prompt, sampling=NOISY)
        assert [len(drafter.propose(n, 2)) for n in range(4)] == [2, 2, 0, 0]
        drafter.end(3)
        drafter.end(0)
        assert [draft.token for draft in drafter.propose(2, 2)] == list(whole[2][0][:2])
        drafter.end(1)
        drafter.end(2)


def test_a_text_that_it_fails_on_has_no_drafts() -> None:
    model = another(9, overflows=True)
    with drafting(model) as drafter:
        drafter.begin(1, [1, 2, 5, 3])
        assert not drafter.propose(1, 3)
        frames = drafter.figures.frames
        assert not drafter.propose(1, 3, after=(4,)) and drafter.figures.frames == frames
        drafter.end(1)
        drafter.begin(2, [1, 2, 3])
        assert len(drafter.propose(2, 3)) == 3
    whole, got, _ = run_with(the_model(A9), model)
    assert got == whole


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 4.0, 1e-300])
def test_entropy_is_that_of_the_softmax(temperature: float) -> None:
    logits = np.random.default_rng(3).normal(0, 3, 500).astype(np.float32)
    logits[7] = 30.0
    scaled = logits.astype(np.float64) / max(temperature or 1.0, 1e-3)
    shares = np.exp(scaled - scaled.max())
    shares /= shares.sum()
    known = -sum(float(p) * math.log(p) for p in shares if p > 0)
    assert entropy(logits, temperature=temperature) == pytest.approx(known, abs=1e-9)
    flat = np.zeros(1009, np.float32)
    assert entropy(flat, temperature=temperature) == pytest.approx(math.log(1009))


def test_seconds_are_of_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    model, clock = the_model(A9), itertools.count()
    with drafting(model) as drafter:
        drafter.begin(1, prompts_of(model.config.vocab)[5])
        monkeypatch.setattr("anyshard.draft_model.time", SimpleNamespace(monotonic=clock.__next__))
        drafter.propose(1, 3)
        drafter.propose(1, 1, after=(1, 2))
        figures = drafter.figures
    assert figures.seconds == figures.frames == 5


def test_vocabularies_are_compared_to_the_last_id_and_what_differs_is_said_of_both() -> None:
    def tokens(*texts: bytes, bos: int | None = 0, eos: Sequence[int] = (1,)) -> Any:
        return SimpleNamespace(
            vocab=len(texts), token_text=texts.__getitem__, bos_id=bos, eos_ids=frozenset(eos)
        )

    model = tokens(b"a", b"b", b"c")
    for other, difference in (
        (tokens(b"a", b"b", b"c"), ""),
        (tokens(b"a", b"b"), "its vocabulary has 2 tokens, that of MODEL 3"),
        (tokens(b"z", b"b", b"c"), "its token 0 is 'z', that of MODEL 'a'"),
        (tokens(b"a", b"b", b""), "its token 2 is without a text, that of MODEL 'c'"),
        (
            tokens(b"a", b"b", b"c", bos=None),
            "its texts begin with no token, those of MODEL with token 0",
        ),
        (
            tokens(b"a", b"b", b"c", eos=(2, 1)),
            "its answers end with tokens 1, 2, those of MODEL with token 1",
        ),
        (
            tokens(b"a", b"b", b"c", eos=()),
            "its answers end with no token, those of MODEL with token 1",
        ),
    ):
        assert vocabulary_difference(model, other) == difference


# --- requests ------------------------------------------------------------------------------------


def engine_with(group: RankGroup, model: Loaded, speculator: Speculator | None) -> Engine:
    most = 0 if speculator is None else speculator.most
    return Engine(
        group,
        model.config,
        model.profile,
        plan(model.config, leaf=model.profile.leaf),
        EngineOptions(comm="threads", threads=1, max_model_len=LENGTH, max_num_seqs=2, drafts=most),
        cores=2,
        epoch=1 if speculator is None else 2,
        speculator=speculator,
    )


def test_a_request_that_is_cancelled_leaves_its_slot_to_others() -> None:
    model = the_model(A9)
    prompts = prompts_of(model.config.vocab)[3:7]
    with group_of(model) as group, drafting(model, max_num_seqs=2) as drafter:
        whole = answers(group, model, prompts, epoch=1, max_num_seqs=2)
        speculator = Speculator(drafter, OpenGate(), most=4)
        engine = engine_with(group, model, speculator)
        said: dict[int, list[int]] = {
            engine.submit(Request(prompt=prompt, max_tokens=NEW)): [] for prompt in prompts
        }
        for event in engine.run():
            assert event.token is not None
            said[event.request_id].append(event.token)
            if event.request_id == 1 and len(said[1]) == 3:
                engine.cancel(1)
        assert tuple(said[1]) == whole[1][0][:3]
        for number in (0, 2, 3):
            assert tuple(said[number]) == whole[number][0]
        figures = speculator.figures
        assert not figures.rollbacks and len(drafter._free) == 2
        engine.close()


def test_a_session_goes_on_from_what_the_draft_model_has_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = the_model(A9)
    first = prompts_of(model.config.vocab)[4]

    def talk(engine: Engine) -> list[tuple[int, ...]]:
        text, found = first, []
        for turn in range(3):
            engine.submit(Request(prompt=text, max_tokens=9, sampling=NOISY, session=0))
            tokens = tuple(event.token for event in engine.run() if event.token is not None)
            found.append(tokens)
            text = (*text, *tokens, turn, 40 + turn)
        return found

    with group_of(model) as group, drafting(model, max_num_seqs=1) as drafter:
        engine = engine_with(group, model, None)
        whole = talk(engine)
        engine.close()
        speculator = Speculator(drafter, OpenGate(), most=3)
        engine = engine_with(group, model, speculator)
        assert talk(engine) == whole
        engine.close()
        figures = speculator.figures
        assert figures.accepted == figures.proposed and sum(figures.accepted) > 3 * 4
        assert drafter.figures.rows <= len(first) + 3 * (9 + 2), "no turn was read again"


# --- loss ----------------------------------------------------------------------------------------


def test_what_a_lost_rank_has_said_goes_with_its_loss() -> None:
    lost = PeerLost("rank 0 was killed", rank=0)
    lost.add_note("its last words")
    named = "the draft model's rank is lost: rank 0"
    with pytest.raises(PeerLost, match=named) as caught, draft_rank():
        raise lost
    assert caught.value.__notes__ == ["its last words"]


@pytest.mark.ranks
def test_a_rank_that_is_lost_is_named_as_the_draft_models() -> None:
    model = the_model(A9)
    prompts = prompts_of(model.config.vocab)[3:6]
    own = open_group(model.served, forked=True)
    try:
        drafter = drafter_in(own, model, forked=True)
        with group_of(model) as group:
            whole = answers(group, model, prompts, epoch=1)
            speculator = Speculator(drafter, OpenGate(), most=3)
            assert answers(group, model, prompts, epoch=2, speculator=speculator) == whole
            assert speculator.figures.accepted == speculator.figures.proposed
            os.kill(own.pids[0], signal.SIGKILL)
            prompts = prompts_of(model.config.vocab)[7:8]  # another one, of which nothing is known
            with pytest.raises(PeerLost, match="the draft model's rank is lost: rank 0 was killed"):
                answers(group, model, prompts, epoch=3, speculator=speculator)
    finally:
        own.close()
