"""How sure the model is of a row: what the gate of speculation goes by, and no token.

Knows nothing of drafts. Legend: V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np

from anyshard.ops.exact import F32

__all__ = ["SPREAD", "UNKNOWN", "Spread", "spread"]

#: A row's spread as it lies in a result.
SPREAD = np.dtype([("entropy", "<f4"), ("margin", "<f4"), ("runner_up", "<i4")])


class Spread(NamedTuple):
    """Of the softmax of a row of logits, without temperature, filters or noise.

    entropy: in nats. margin: of the chances of its best two tokens. runner_up: the likeliest token
    that was not drawn: of a greedy row the second best; of a sampled one the best, unless that was
    drawn; the noise of the draw is not in it. NaN, NaN and -1 are unknown.
    """

    entropy: float
    margin: float
    runner_up: int


UNKNOWN: Final = Spread(math.nan, math.nan, -1)


def spread(module: Any, logits_V: F32, token: int) -> Spread:
    """Of a row of which `token` was drawn. module: a kernel module, native or reference.

    A row of which a logit is not finite is unknown. Held by: test_spread.py.
    """
    entropy, margin, first, second = module.spread(logits_V)
    return Spread(entropy, margin, second if token == first else first)
