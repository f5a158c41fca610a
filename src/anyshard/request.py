"""What a user asks of the engine: a prompt in tokens, how to sample, when to stop.

Frozen records that check their own ranges. Knows nothing of text, ranks or batches.
"""

from __future__ import annotations

import math

import msgspec

from anyshard.errors import OptionError

__all__ = ["Request", "Sampling"]


def _require(ok: bool, name: str, value: float, possible: str) -> None:
    if not ok or not math.isfinite(value):
        raise OptionError(f"--{name} is {value}; it can be {possible}")


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How one token is drawn; the same for every position of a request.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 mean no filter. The noise is keyed by
    (seed, position, token id, choice, stream), never by the order of calls.
    Source: docs/numerics.md, Sampling. Held by: test_sampling.py.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    stream: int = 0

    def __post_init__(self) -> None:
        _require(0.0 <= self.temperature <= 100.0, "temperature", self.temperature, "0 to 100")
        _require(0 <= self.top_k <= 1 << 30, "top-k", self.top_k, "0 (off) to 2^30")
        _require(0.0 < self.top_p <= 1.0, "top-p", self.top_p, "above 0, up to 1 (off)")
        _require(0.0 <= self.min_p <= 1.0, "min-p", self.min_p, "0 (off) to 1")
        _require(0 <= self.seed < 1 << 64, "seed", self.seed, "0 to 2^64-1")

    @property
    def greedy(self) -> bool:
        """No noise and so no need of any filter: the largest logit is always allowed."""
        return self.temperature == 0.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt (token ids) to continue by at most `max_tokens`.

    stop_ids end the answer, and are part of its tokens. want_logits asks for the logit row of
    every emitted token (the first one's is the row of the last prompt token), prompt_logits for
    those of that many prompt tokens before the last. Requests of one `session` (a number of the
    caller's) continue each other: keys and values of the tokens that they share from the start on
    are computed once.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    want_logits: bool = False
    prompt_logits: int = 0
    session: int | None = None

    def wants_row(self, position: int) -> bool:
        """Whether the logits of a prompt position before the last are asked for."""
        last = len(self.prompt) - 1
        return last - self.prompt_logits <= position < last

    @property
    def needs_logits(self) -> bool:
        """Whether the sampler must see whole rows: for the caller, for noise or for a filter."""
        return self.want_logits or self.prompt_logits > 0 or not self.sampling.greedy

    def __post_init__(self) -> None:
        if not self.prompt:
            raise OptionError("the prompt is empty; give at least one token of text")
        assert self.prompt_logits == 0 or (self.want_logits and self.session is None)
        assert 0 <= self.prompt_logits < len(self.prompt)
        _require(1 <= self.max_tokens <= 1 << 24, "max-tokens", self.max_tokens, "1 and up")
