"""A request whose numbers leave float32 ends alone: its neighbours keep their bits.

The model has two tokens that overflow, each found by an op of its own (models.plant_overflow).
The same from the command line: test_cli.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from models import ADVERSARIAL_9_3, plant_overflow, write_hf_model

from anyshard.checkpoint import open_checkpoint
from anyshard.engine import Engine, EngineOptions, Event
from anyshard.layout import plan
from anyshard.request import Request
from anyshard.verify.driver import open_group, served
from anyshard.verify.prompt import hashed_tokens
from anyshard.worker import Served

EARLY, LATE = 1001, 1002  # token ids, and what names the fault of each
NAME_OF = {EARLY: "layers.1.qkv", LATE: "head"}
VOCAB = ADVERSARIAL_9_3.vocab
LAYOUTS = [(1, 1), (3, 1), (1, 3), (2, 2)]


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
    slots: int | None = None,
    chunk: int = 16,
) -> list[list[Event]]:
    """The events of each prompt, six tokens long, in one epoch; slots: how many run at once."""
    group = open_group(model, forked=False)
    try:
        engine = Engine(
            group,
            model.config,
            model.profile,
            plan(model.config, tp=tp, pp=pp, leaf=model.profile.leaf),
            EngineOptions(
                comm="threads",
                threads=1,
                chunk=chunk,
                max_num_seqs=slots or len(prompts),
                max_model_len=64,
                poison=True,
            ),
            cores=2,
        )
        requests = [Request(prompt=p, max_tokens=6, want_logits=True) for p in prompts]
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


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
@pytest.mark.parametrize("token", NAME_OF)
def test_the_neighbours_of_a_fault_keep_their_bits(
    model: Served, token: int, tp: int, pp: int
) -> None:
    prompts = [prompt(21, seed=1), prompt(18, seed=2, last=token), prompt(30, seed=3)]
    first, failed, third = run(model, prompts, tp=tp, pp=pp)
    assert [(e.token, e.finish, e.fault) for e in failed] == [(None, "fault", NAME_OF[token])]
    for index, events in ((0, first), (2, third)):
        (alone,) = run(model, [prompts[index]])
        assert len(events) == 6 and events[-1].finish == "length"
        assert bits(events) == bits(alone)
    assert len({*bits(first), *bits(third)}) == 12


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_each_fault_of_an_epoch_has_its_own_name(model: Served, tp: int, pp: int) -> None:
    """In one slot after another, the later op first and last; what ran before leaves no trace."""
    order = (LATE, EARLY, None, LATE)
    prompts = [prompt(9, seed=4 + i, last=token) for i, token in enumerate(order)]
    found = run(model, prompts, tp=tp, pp=pp, slots=1)
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
