"""A run whose steps are watched: allocations of the native module, new NumPy buffers, memory.

    LD_PRELOAD=counts.so python tests/steady.py '{"tp": 2, "steps": 100}'
    python tests/steady.py '{"tp": 2, "steps": 500, "rounds": 20}'

Prints JSON. Of the front and of each rank: what counts.so (tests/standalone) has counted from the
second step that only decodes on; or resident bytes, again and again.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import models
import numpy as np

from anyshard.checkpoint import open_checkpoint
from anyshard.comm.control import Frame
from anyshard.engine import Engine
from anyshard.epoch import EngineOptions
from anyshard.launcher import fork_launcher
from anyshard.layout import plan
from anyshard.loading import loader, profile_of
from anyshard.request import Request, Sampling
from anyshard.speculate import Draft, OpenGate, Speculator
from anyshard.worker import Worker, rank_main

PROMPTS = 3
_SET_HANDLER = 304  # of NumPy's C API


def resident() -> int:
    """Bytes of this process in memory."""
    # exact; statm is counted by each core and added up now and then
    lines = Path("/proc/self/smaps_rollup").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Rss:")) * 1024


class Watch:
    """Counts of this process."""

    def __init__(self) -> None:
        self._counts: Any = ctypes.CDLL(None)

    def start(self) -> None:
        """From here on."""
        import numpy._core._multiarray_umath as umath

        counts, api = self._counts, ctypes.pythonapi
        counts.counts_handler.restype = ctypes.c_void_p
        api.PyCapsule_New.restype, api.PyCapsule_GetPointer.restype = (
            ctypes.py_object,
            ctypes.c_void_p,
        )
        self._name = b"mem_handler"
        handler = api.PyCapsule_New(ctypes.c_void_p(counts.counts_handler()), self._name, None)
        table = api.PyCapsule_GetPointer(ctypes.py_object(umath._ARRAY_API), None)
        slot = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))[_SET_HANDLER]
        set_handler = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(slot)
        self._before = set_handler(handler)
        lines = Path("/proc/self/maps").read_text("ascii").splitlines()
        spans = [line.split()[0].split("-") for line in lines if "/_native." in line]
        first, last = int(spans[0][0], 16), int(spans[-1][1], 16)
        counts.counts_watch(ctypes.c_size_t(first), ctypes.c_size_t(last))

    def stop(self) -> dict[str, int]:
        """What has been counted."""
        found = {
            "native": self._counts.counts_native(),
            "numpy": self._counts.counts_numpy_calls(),
        }
        self._counts.counts_watch(ctypes.c_size_t(0), ctypes.c_size_t(0))
        return found


class Watched(Worker):
    """Watches itself from the second frame of `rows` rows or less on: those in which all prompts of
    a micro-batch decode, with drafts where there are any."""

    rows: int
    steps: int
    folder: Path
    leak: str
    _seen = 0

    def step(self, frame: Frame) -> None:
        """One frame, watched or not."""
        if len(frame.rows) <= self.rows:
            self._seen += 1
            if self._seen == 2:  # a step has been made like those that are watched
                self._watch = Watch()
                self._watch.start()
        if self._seen % 10 == 5 and self.leak == "late" and self.program.rank == 1:
            time.sleep(0.06)  # longer than the first slice of a wait
        super().step(frame)
        if self._seen > 1 and self.leak == "numpy":
            np.zeros(8)
        if self._seen > 1 and self.leak == "native":
            self.kernels.module.Gather(self.leak_words, -1, [0], 0, 0)
        if self._seen == self.steps:
            found = json.dumps(self._watch.stop())
            (self.folder / str(self.program.rank)).write_text(found, "ascii")

    leak_words = np.zeros(16, np.uint32)


class Grown(Worker):
    """Notes its memory when it has made so many steps, again and again."""

    steps: int
    folder: Path
    leak: str
    _seen = 0

    def step(self, frame: Frame) -> None:
        """One frame."""
        super().step(frame)
        self._seen += 1
        if self.leak == "memory":
            self._kept = [*getattr(self, "_kept", []), bytes(1000)]
        if self._seen % self.steps == 0:
            with (self.folder / str(self.program.rank)).open("a", encoding="ascii") as file:
                file.write(f"{resident()}\n")


def main(seat: Any, *, asked: dict[str, Any], folder: Path) -> None:
    """A rank."""
    kind: Any = Grown if "rounds" in asked else Watched
    rows = PROMPTS // asked.get("micro_batches", 1) + asked.get("drafts", 0)
    steps = asked["steps"]
    if "rounds" in asked:  # frames of a round, about
        steps *= asked.get("micro_batches", 1)
    place = {"rows": rows, "steps": steps, "leak": asked.get("leak", ""), "folder": folder}
    rank_main(seat, worker_type=type("Worker", (kind,), place))


class Guesses:
    """Drafts that are wrong, but for one in a thousand."""

    sources: tuple[str, ...] = ("guess",)
    takes_time: bool = False

    def begin(
        self, request_id: int, prompt: Sequence[int], *, sampling: Sampling | None = None
    ) -> None: ...
    def extend(self, request_id: int, tokens: Sequence[int]) -> None: ...
    def end(self, request_id: int) -> None: ...

    def propose(self, request_id: int, most: int, *, after: Sequence[int] = ()) -> list[Draft]:
        return [Draft(17 + len(after) + place, 1.0, 2, "guess") for place in range(most)]


def speculator_of(asked: dict[str, Any]) -> Speculator | None:
    """Every step goes back, if there are drafts."""
    drafts = asked.get("drafts", 0)
    return (
        Speculator(Guesses(), OpenGate(), most=drafts, windows=asked.get("windows", 1))
        if drafts
        else None
    )


def start(asked: dict[str, Any], folder: Path) -> Engine:
    """An engine over an adversarial model, for `PROMPTS` requests at once."""
    name, arithmetic = "adversarial-9-3", asked.get("arithmetic", "f32")
    path = models.write_hf_model(folder / "model", models.MODELS[name], seed=7, adversarial=True)
    kv, wire = asked.get("kv", "f32"), asked.get("wire", "none")
    checkpoint, profile = open_checkpoint(str(path)), profile_of(arithmetic, kv, wire)
    group = fork_launcher(
        loader(checkpoint, threads=1, arithmetic=arithmetic, kv=kv, wire=wire),
        partial(main, asked=asked, folder=folder),
    )
    group.wait_loaded()
    tp, pp = asked.get("tp", 1), asked.get("pp", 1)
    options = EngineOptions(
        max_model_len=asked["steps"] + 64,
        max_num_seqs=PROMPTS,
        micro_batches=asked.get("micro_batches", 1),
        threads=asked.get("threads", 1),
        deadline_s=60,
        drafts=asked.get("drafts", 0),
        windows=asked.get("windows", 1),
        trace_events=asked.get("trace_events", 0),
    )
    layout = plan(
        checkpoint.config,
        tp=tp,
        pp=pp,
        kv_shard=asked.get("kv_shard", "heads"),
        wire=wire,
        leaf=profile.leaf,
    )
    return Engine(
        group,
        checkpoint.config,
        profile,
        layout,
        options,
        cores=2,
        speculator=speculator_of(asked),
    )


def submit(engine: Engine, asked: dict[str, Any]) -> None:
    """`PROMPTS` requests that decode together for the steps asked and a few more."""
    sampling = Sampling(temperature=asked.get("temperature", 0.0), seed=3)
    for number in range(PROMPTS):
        prompt = tuple(range(number, number + 9))
        engine.submit(
            Request(
                prompt=prompt,
                max_tokens=asked["steps"] + 9,
                sampling=sampling,
                want_logits=asked.get("logits", False),
            )
        )


def watch_steps(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Counts of front and ranks."""
    engine, steps = start(asked, folder), asked["steps"]
    submit(engine, asked)
    watch, front, step = Watch(), {}, 0
    for event in engine.run():
        step += event.request_id == 0
        if step == 4 and event.request_id == PROMPTS - 1:
            watch.start()
        if step == steps + 4 and not front:
            front = watch.stop()
    engine.close()
    engine.group.close()
    world = engine.layout.world
    ranks = [json.loads((folder / str(rank)).read_text("ascii")) for rank in range(world)]
    return {"front": front, "ranks": ranks}


def watch_memory(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Resident bytes of front and ranks after every round of `steps` steps."""
    engine = start(asked, folder)
    front = []
    for _ in range(asked["rounds"]):
        submit(engine, asked)
        for _ in engine.run():
            pass
        front.append(resident())
    engine.close()
    engine.group.close()
    places = [folder / str(rank) for rank in range(engine.layout.world)]
    ranks = [[int(n) for n in place.read_text("ascii").split()] for place in places]
    speculator = engine.speculator
    rollbacks = 0 if speculator is None else speculator.figures.rollbacks
    return {"front": front, "ranks": ranks, "rollbacks": rollbacks}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        asked = json.loads(sys.argv[1])
        watched = watch_memory if "rounds" in asked else watch_steps
        sys.stdout.write(json.dumps(watched(asked, Path(place))) + "\n")
