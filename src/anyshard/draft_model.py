"""Drafts of a second model, a small one of the same vocabulary, on one rank of its own.

It is driven by frames, as any rank is. What stands stored of a request is known here as tokens: of
a text that differs from some token on, rows run from there and write over what was stored, and
nothing is copied. A draft is drawn as the request's own tokens are, with the same noise at the same
position, so that two models that agree draw alike. Knows nothing of gates, ticks or texts.
Source: docs/speculation.md. Held by: test_draft_model.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from anyshard.comm.control import PAGE, ROW, FrontControl, Result
from anyshard.config import ModelConfig, Profile
from anyshard.epoch import EngineOptions, plan_epoch, rank_threads
from anyshard.errors import PeerLost
from anyshard.launcher import RankGroup, Start
from anyshard.layout import plan
from anyshard.model import program
from anyshard.ops import choose_body
from anyshard.ops.sampling import entropy
from anyshard.pages import pages_for
from anyshard.request import Sampling
from anyshard.speculate import Draft
from anyshard.worker import ROW_LOGITS, ROW_SAMPLE

__all__ = ["DraftFigures", "ModelDrafter", "draft_rank", "shared"]


class DraftFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of the rank of a draft model so far: frames, rows in them, seconds that they were waited for;
    bytes of its weights and KV."""

    profile: str
    profile_hash: str
    kernels: str
    threads: int
    frames: int
    rows: int
    seconds: float
    weight_bytes: int
    kv_bytes: int

    def text(self) -> str:
        """One line of them."""
        return (
            f"draft model: {self.rows} rows in {self.frames} frames, {self.seconds:.2f} s · "
            f"{self.profile} {self.kernels} x{self.threads}"
        )

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built


@dataclass
class _Slot:
    """Of the rank: tokens that stand stored in it, and what was drawn after each, if anything."""

    number: int
    sampling: Sampling = field(default_factory=Sampling)
    stored: list[int] = field(default_factory=list)
    drawn: list[Draft | None] = field(default_factory=list)

    def forget(self, kept: int) -> None:
        """All but so many tokens."""
        del self.stored[kept:], self.drawn[kept:]


@dataclass
class _Line:
    """A request: its text so far, how its tokens are drawn, where it is stored, None while others
    have all slots; whether the model has failed on it."""

    tokens: list[int]
    sampling: Sampling
    slot: _Slot | None = None
    has_failed: bool = False


def shared(stored: Sequence[int], text: Sequence[int]) -> int:
    """How many tokens they have in common from the start on."""
    pairs = zip(stored, text, strict=False)
    most = min(len(stored), len(text))
    return next((at for at, (old, new) in enumerate(pairs) if old != new), most)


@contextmanager
def draft_rank() -> Iterator[None]:
    """Whoever is lost meanwhile is named as the draft model's. Raises: PeerLost."""
    try:
        yield
    except PeerLost as error:
        lost = PeerLost(f"the draft model's rank is lost: {error}", rank=error.rank)
        for note in getattr(error, "__notes__", ()):
            lost.add_note(note)
        raise lost from error


class ModelDrafter:
    """Drafts of a model whose one rank is an epoch of `group`; see Drafter.

    options: its threads, chunk, and how many requests of how many tokens it follows at once; others
    wait without drafts, and behind so many tokens drafts end. A slot whose request is over stays
    stored for the next one that begins alike.

    Raises: PeerLost, here and where it is asked, when its rank is lost.
    """

    sources: tuple[str, ...] = ("model",)
    takes_time: bool = True

    def __init__(
        self,
        group: RankGroup,
        config: ModelConfig,
        profile: Profile,
        options: EngineOptions,
        *,
        epoch: int = 1,
    ) -> None:
        self._group, self._profile, self._options = group, profile, options
        self._body = choose_body(options.kernels)
        self._threads = rank_threads(self._body, options.threads or 1, cores=1, ranks=1)
        layout = plan(config, wire=profile.wire, leaf=profile.leaf)
        sizes = plan_epoch(
            [program(config, profile, layout, 0)],
            options,
            body=self._body,
            threads=self._threads,
            spin=False,
        )
        blocks = pages_for(options.max_model_len, block=profile.kv_block)
        self._pages: Any = np.array(  # with the first frame
            [
                (slot, block, slot * blocks + block)
                for slot in range(options.max_num_seqs)
                for block in range(blocks)
            ],
            PAGE,
        )
        self._rows = np.zeros(sizes.limits.rows_max, ROW)  # of a frame
        self._news: dict[int, Sampling] = {}  # of slots, that the rank is yet to hear
        self._free = [_Slot(number) for number in range(options.max_num_seqs)]  # longest so, first
        self._lines: dict[int, _Line] = {}
        self._num_frames, self._num_rows, self._seconds = 0, 0, 0.0
        with draft_rank():
            self._control: FrontControl = group.start(
                Start(
                    epoch=epoch,
                    payload=msgspec.msgpack.encode(sizes.ranks),
                    sizes=sizes.sizes,
                    deadline_s=options.deadline_s,
                )
            )

    def begin(
        self, request_id: int, prompt: Sequence[int], *, sampling: Sampling | None = None
    ) -> None:
        """See Drafter; nothing runs yet."""
        self._lines[request_id] = _Line(list(prompt), sampling or Sampling())
        self._seat(self._lines[request_id])

    def _seat(self, line: _Line) -> _Slot | None:
        """Where it is stored, from now on if a slot is free: of those the one most like it."""
        if line.slot is None and self._free:
            slot = max(self._free, key=lambda each: shared(each.stored, line.tokens))
            self._free.remove(slot)
            if slot.sampling != line.sampling:
                slot.sampling, slot.drawn = line.sampling, [None] * len(slot.stored)
                self._news[slot.number] = line.sampling
            line.slot = slot
        return line.slot

    def extend(self, request_id: int, tokens: Sequence[int]) -> None:
        """See Drafter."""
        self._lines[request_id].tokens += tokens

    def propose(self, request_id: int, most: int, *, after: Sequence[int] = ()) -> list[Draft]:
        """See Drafter: a frame for each draft that is not known yet, the first one with all that
        the rank lacks of the text. None of a text that the model has failed on, or while
        others have all slots."""
        line, found = self._lines[request_id], list[Draft]()
        slot, text = self._seat(line), [*line.tokens, *after]
        if slot is None:
            return []
        kept = shared(slot.stored, text)
        while len(found) < most and len(text) <= self._options.max_model_len:
            if kept < len(text) or slot.drawn[kept - 1] is None:
                if line.has_failed or not self._run(slot, text, kept):
                    line.has_failed = True
                    break
                kept = len(text)
            draft = slot.drawn[kept - 1]
            assert draft is not None
            found.append(draft)
            text.append(draft.token)
            kept += slot.stored[kept : kept + 1] == [draft.token]
        return found

    def end(self, request_id: int) -> None:
        """See Drafter."""
        if (slot := self._lines.pop(request_id).slot) is not None:
            self._free.append(slot)

    @property
    def profile_text(self) -> str:
        """Its profile, kernels and threads."""
        return f"{self._profile.name} {self._body} x{self._threads}"

    @property
    def figures(self) -> DraftFigures:
        """So far, whether the rank is still there or not."""
        view = self._control.statuses(settled=False)[0]
        return DraftFigures(
            profile=self._profile.name,
            profile_hash=self._profile.sha256(),
            kernels=self._body,
            threads=self._threads,
            frames=self._num_frames,
            rows=self._num_rows,
            seconds=round(self._seconds, 4),
            weight_bytes=view.weight_bytes,
            kv_bytes=view.kv_bytes,
        )

    def _run(self, slot: _Slot, text: Sequence[int], kept: int) -> bool:
        """Store a text of which so many tokens are, and draw what comes after it. False, and
        nothing is stored, if a value has left the range of float32."""
        first, chunk = min(kept, len(text) - 1), self._options.chunk
        slot.forget(first)
        for start in range(first, len(text), chunk):
            tokens = text[start : start + chunk]
            is_last = start + chunk >= len(text)
            result = self._frame(slot, start, tokens, is_last=is_last)
            if any(result.faults):
                slot.forget(0)
                return False
            slot.stored += tokens
            slot.drawn += [None] * len(tokens)
        assert result.logits is not None
        nats = entropy(result.logits[0], temperature=slot.sampling.temperature)
        slot.drawn[-1] = Draft(result.tokens[-1], nats, 0, "model", chance=math.exp(-nats))
        return True

    def _frame(self, slot: _Slot, start: int, tokens: Sequence[int], *, is_last: bool) -> Result:
        """Run tokens of a slot from position `start` on; of the last ones a token is drawn."""
        rows = self._rows[: len(tokens)]
        rows["slot"], rows["token"] = slot.number, tokens
        rows["position"] = np.arange(start, start + len(tokens))
        rows["flags"] = 0
        rows["flags"][-1] = ROW_SAMPLE | ROW_LOGITS if is_last else 0
        note = msgspec.msgpack.encode(self._news) if self._news else b""
        begun_s = time.monotonic()
        with draft_rank():
            frame = self._control.send_frame(rows, self._pages, note)
            result = self._control.wait_result(frame, poll=self._group.poll)
        self._pages, self._news = None, {}
        self._num_frames += 1
        self._num_rows += len(tokens)
        self._seconds += time.monotonic() - begun_s
        return result
