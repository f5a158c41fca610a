"""Records of what left the range of float32, of prompt logits, and how many are held at a time.

The model has two tokens that overflow in the MLP of a layer; the norm after it finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
import pytest
from models import ADVERSARIAL_9_3, plant_overflow, write_hf_model
from records import small_record

from anyshard.checkpoint import open_checkpoint
from anyshard.engine import Engine
from anyshard.epoch import EngineOptions
from anyshard.fidelity import Record, RunDigests, compare_records
from anyshard.layout import plan
from anyshard.request import Request
from anyshard.verify.driver import open_group, served
from anyshard.verify.prompt import hashed_tokens
from anyshard.worker import Served

FIRST, SECOND = 1001, 1002  # overflow in layer 0, in layer 1
VOCAB = ADVERSARIAL_9_3.vocab


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("faulting")
    plant = partial(plant_overflow, layer_of={FIRST: 0, SECOND: 1})
    write_hf_model(folder, ADVERSARIAL_9_3, seed=11, change=plant)
    return served(open_checkpoint(str(folder)))


def ordinary(count: int, *, seed: int) -> tuple[int, ...]:
    return tuple(t for t in hashed_tokens(count, VOCAB, seed=seed) if t not in (FIRST, SECOND))


def recorded(
    model: Served,
    requests: Sequence[Request],
    *,
    tp: int = 1,
    pp: int = 1,
    chunk: int = 64,
    slots: int | None = None,
    held: list[int] | None = None,
) -> list[Record]:
    """The record of each request, taken at its last event; held: how many there were at each."""
    config, profile = model.config, model.profile
    group = open_group(model, forked=False)
    try:
        options = EngineOptions(
            comm="threads",
            threads=1,
            chunk=chunk,
            max_num_seqs=slots or len(requests),
            max_model_len=64,
            prompt_logits=sum(request.prompt_logits for request in requests),
            record=True,
        )
        layout = plan(config, tp=tp, pp=pp, leaf=profile.leaf)
        engine = Engine(group, config, profile, layout, options, cores=2)
        ids = [engine.submit(request) for request in requests]
        assert ids == list(range(len(requests)))
        tokens: list[list[int]] = [[] for _ in requests]
        found: dict[int, Record] = {}
        for event in engine.run():
            number = event.request_id
            tokens[number] += [] if event.token is None else [event.token]
            if held is not None:
                assert engine._log is not None
                held.append(len(engine._log._runs))
            if event.finish is None:
                continue
            run = engine.digests(number, emitted=len(tokens[number]))
            num_run, last = len(run.embed), len(requests[number].prompt) + len(tokens[number]) - 1
            assert num_run == last if tokens[number] else num_run <= last, "read_record demands it"
            manifest = msgspec.structs.replace(
                small_record().manifest,
                fault=event.fault,
                finish=event.finish,
                positions=len(run.embed),
                layers=config.num_layers,
                prompt_tokens=len(requests[number].prompt),
                emitted_tokens=len(tokens[number]),
            )
            prompt = np.array(requests[number].prompt, np.int32)
            found[number] = Record(manifest, prompt, np.array(tokens[number], np.int32), run)
        engine.close()
    finally:
        group.close()
    return [found[number] for number in ids]


def request(prompt: Sequence[int], *, prompt_logits: int = 0) -> Request:
    return Request(
        prompt=tuple(prompt), max_tokens=3, want_logits=True, prompt_logits=prompt_logits
    )


SPLITS = [(1, 1, 64), (1, 1, 1), (1, 1, 7), (3, 1, 5), (2, 3, 64), (1, 2, 8), (1, 3, 4), (2, 2, 1)]


@pytest.mark.parametrize(("tp", "pp", "chunk"), SPLITS)
def test_a_fault_is_recorded_at_its_row_and_op_whatever_the_chunk(
    model: Served, tp: int, pp: int, chunk: int
) -> None:
    """A later row of the same step fails in an earlier op, and so does another request."""
    late, early = [*ordinary(5, seed=1), SECOND], [*ordinary(2, seed=2), FIRST]
    prompt = [*late, *early, *ordinary(20, seed=3)]
    both = [request(prompt), request([*early, *late])]
    first, second = recorded(model, both, tp=tp, pp=pp, chunk=chunk)
    assert (first.manifest.positions, first.manifest.fault) == (5, "layers.2.qkv")
    assert (second.manifest.positions, second.manifest.fault) == (2, "layers.1.qkv")
    (alone,) = recorded(model, both[:1])
    found = compare_records(alone, first)
    assert found.equal and found.positions == 5 and found.digests > 0
    assert (first.digests.layers != 0).all()


def test_two_runs_that_failed_in_different_places_differ() -> None:
    """None of it shows in what both have recorded."""

    def failed(positions: int, fault: str | None) -> Record:
        whole = small_record(fault=fault, positions=positions, emitted_tokens=0)
        of = whole.digests
        kept = RunDigests(of.embed[:positions], of.layers[:positions], of.logits[:0])
        return Record(whole.manifest, whole.prompt, whole.tokens[:0], kept)

    at_0, at_2 = failed(0, "layers.0.qkv"), failed(2, "layers.0.qkv")
    elsewhere = failed(0, "layers.1.attention")
    for one, other, place in ((at_0, at_2, 0), (at_2, at_0, 0), (at_0, elsewhere, 0)):
        found = compare_records(one, other)
        assert not found.equal and found.first is not None
        assert (found.first.op, found.first.position) == ("fault", place)
    assert compare_records(at_2, at_2).equal
    for none in (at_0, elsewhere):
        said = "no position ran in both; they have 0 and 0"
        assert compare_records(none, none).incomparable == (said,)
    ended = failed(2, None)  # a run that was over before says nothing of the fault
    assert compare_records(at_2, ended).equal and not compare_records(at_0, ended).equal


@pytest.mark.parametrize("chunk", [3, 64])
def test_logits_of_the_prompt_that_are_asked_for_change_no_record(
    model: Served, chunk: int
) -> None:
    prompts = [ordinary(9, seed=4), ordinary(12, seed=5)]
    plain = recorded(model, [request(prompt) for prompt in prompts], chunk=chunk)
    asked = [request(prompts[0], prompt_logits=6), request(prompts[1], prompt_logits=2)]
    for one, other in zip(plain, recorded(model, asked, chunk=chunk), strict=True):
        found = compare_records(one, other)
        assert found.equal and found.tokens == 3


def test_no_more_records_are_held_than_sequences_run(model: Served) -> None:
    held: list[int] = []
    requests = [request(ordinary(4 + n, seed=n)) for n in range(7)]
    assert len(recorded(model, requests, slots=2, held=held)) == 7
    assert max(held) == 2
