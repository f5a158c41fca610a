"""One answer on its way to a user: text that streams whole, stop strings, and the logits digest.

Knows the tokenizer's stream decoder and nothing of engines or terminals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from anyshard.ops.exact import F32

__all__ = ["Answer", "StreamDecoder"]


class StreamDecoder(Protocol):
    """Turns token ids into text, holding back the bytes of an unfinished character."""

    def push(self, token_id: int) -> str:
        """Text that became whole with this token."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


class Answer:
    """Grows by tokens; says which text can be shown now.

    A stop string ends the answer and is not shown; text that could be the beginning of one is
    held back until it is clear. Held by: test_answer.py.
    """

    def __init__(
        self, decoder: StreamDecoder | None, *, stop: Sequence[str], stop_ids: frozenset[int]
    ) -> None:
        self._decoder, self._stop, self._stop_ids = decoder, tuple(stop), stop_ids
        self._digest = hashlib.sha256()
        self._held = ""
        self.tokens: list[int] = []
        self.text = ""
        self.stopped = False

    def push(self, token: int, logits_V: F32 | None) -> str:
        """Take a token and the logit row it was drawn from; returns text to show."""
        assert not self.stopped
        self.tokens.append(token)
        if logits_V is not None:
            self._digest.update(np.ascontiguousarray(logits_V, "<f4").data)
        if self._decoder is None or token in self._stop_ids:
            return ""
        return self._show(self._decoder.push(token), final=False)

    def finish(self) -> str:
        """End of tokens; returns the text still held back."""
        if self._decoder is None or self.stopped:
            return ""
        return self._show(self._decoder.finish(), final=True)

    @property
    def logits_sha256(self) -> str:
        """sha256 over the float32 little-endian logit rows of the emitted tokens, in order."""
        return self._digest.hexdigest()

    def _show(self, new: str, *, final: bool) -> str:
        pending = self._held + new
        places = [place for stop in self._stop if (place := pending.find(stop)) >= 0]
        if places:
            self.stopped = True
            shown, self._held = pending[: min(places)], ""
        else:
            keep = 0 if final else max((_overlap(pending, stop) for stop in self._stop), default=0)
            shown, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self.text += shown
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
