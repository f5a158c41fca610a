"""The float64 yardstick against a decoder in 40-digit decimals.

The decimal one is written from the papers' formulas in plain loops: no array, no library
function beyond Decimal's own sqrt, exp and ln.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Context, Decimal, localcontext

import numpy as np
import pytest
from models import ADVERSARIAL_9_3, random_weights
from numpy.typing import NDArray

from anyshard.config import Llama3Scaling, ModelConfig, RopeDivisors
from anyshard.ops.float64 import Reference64

F32 = NDArray[np.float32]

TINY = replace(
    ADVERSARIAL_9_3,
    num_layers=2,
    hidden=12,
    ffn=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab=23,
    context=512,
)
PLAIN = replace(TINY, qkv_bias=False, o_bias=False, mlp_bias=False)
# waves of 6, 30, 141 and 664 positions: kept, on the ramp, on the ramp, eight times slower
WAVES = Llama3Scaling(
    factor=8.0, low_frequency_factor=1.0, high_frequency_factor=16.0, original_context=300
)
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
TOKENS = (3, 22, 0, 7, 7, 11)

# A logit ends a chain of fewer roundings than this, each of 2^-53 of a number about as large as the
# largest logit. 2^-40 in all: float32, which is to be measured, rounds 2^16 times as coarsely.
ROUNDINGS = 1 << 13
BOUND = ROUNDINGS * 2.0**-53

Vector = list[Decimal]


def decimals(values: NDArray[np.floating]) -> list[Decimal]:
    return [Decimal(float(v)) for v in values]


def linear(x: Vector, w_NM: F32, bias: F32 | None) -> Vector:
    y = [sum((a * b for a, b in zip(x, decimals(row), strict=True)), Decimal(0)) for row in w_NM]
    return y if bias is None else [a + b for a, b in zip(y, decimals(bias), strict=True)]


def sine_cosine(angle: Decimal) -> tuple[Decimal, Decimal]:
    """By their series, which for an angle of some radians needs no reduction at 40 digits."""
    sine = cosine = Decimal(0)
    term = Decimal(1)
    for n in range(1, 120):
        if n % 2:
            cosine += term if n % 4 == 1 else -term
        else:
            sine += term if n % 4 == 2 else -term
        term = term * angle / n
    return sine, cosine


class DecimalDecoder:
    """The same model, slowly."""

    def __init__(self, config: ModelConfig, weights: dict[str, F32]) -> None:
        self.config, self.weights = config, weights

    def logits(self, tokens: Sequence[int]) -> list[Vector]:
        c, w = self.config, self.weights
        xs = [decimals(w["embed"][token]) for token in tokens]
        for i in range(c.num_layers):
            normed = [self.norm(x, f"layers.{i}.attn_norm") for x in xs]
            q, k, v = ([self.project(x, i, part) for x in normed] for part in "qkv")
            if c.qk_norm:
                q = [self.norm_heads(row, f"layers.{i}.q_norm") for row in q]
                k = [self.norm_heads(row, f"layers.{i}.k_norm") for row in k]
            q = [self.rotate(row, position) for position, row in enumerate(q)]
            k = [self.rotate(row, position) for position, row in enumerate(k)]
            for position, x in enumerate(xs):
                mixed = [
                    y
                    for h in range(c.num_heads)
                    for y in self.attend(
                        self.head(q[position], h),
                        [self.head(row, h // c.q_per_kv) for row in k[: position + 1]],
                        [self.head(row, h // c.q_per_kv) for row in v[: position + 1]],
                    )
                ]
                o = self.project(mixed, i, "o")
                x[:] = [a + b for a, b in zip(x, o, strict=True)]
            for x in xs:
                m = self.norm(x, f"layers.{i}.mlp_norm")
                gate, up = self.project(m, i, "gate"), self.project(m, i, "up")
                f = [g / (1 + (-g).exp()) * u for g, u in zip(gate, up, strict=True)]
                x[:] = [a + b for a, b in zip(x, self.project(f, i, "down"), strict=True)]
        head = w["embed" if c.tied else "head"]
        return [linear(self.norm(x, "norm"), head, None) for x in xs]

    def project(self, x: Vector, layer: int, part: str) -> Vector:
        name = f"layers.{layer}.{part}"
        return linear(x, self.weights[name], self.weights.get(f"{name}_bias"))

    def norm(self, x: Vector, name: str) -> Vector:
        mean = sum((a * a for a in x), Decimal(0)) / len(x)
        root = (mean + Decimal(self.config.norm_eps)).sqrt()
        return [a / root * w for a, w in zip(x, decimals(self.weights[name]), strict=True)]

    def norm_heads(self, row: Vector, name: str) -> Vector:
        num_heads = len(row) // self.config.head_dim
        return [x for h in range(num_heads) for x in self.norm(self.head(row, h), name)]

    def frequency(self, i: int) -> Decimal:
        """Of pair i, by the published rules; the length of a wave is 2 pi over it."""
        d, scaling = self.config.head_dim, self.config.rope_scaling
        plain = (Decimal(self.config.rope_theta).ln() * (-2 * i) / d).exp()
        if isinstance(scaling, RopeDivisors):
            return plain / Decimal(scaling.divisors[i])
        if scaling is None:
            return plain
        length = 2 * PI / plain
        if length < scaling.original_context / Decimal(scaling.high_frequency_factor):
            return plain
        if length > scaling.original_context / Decimal(scaling.low_frequency_factor):
            return plain / Decimal(scaling.factor)
        low, high = Decimal(scaling.low_frequency_factor), Decimal(scaling.high_frequency_factor)
        smooth = (scaling.original_context / length - low) / (high - low)
        return (1 - smooth) * plain / Decimal(scaling.factor) + smooth * plain

    def head(self, row: Vector, index: int) -> Vector:
        d = self.config.head_dim
        return row[index * d : (index + 1) * d]

    def rotate(self, row: Vector, position: int) -> Vector:
        d = self.config.head_dim
        turned = list(row)
        for first in range(0, len(row), d):
            for i in range(d // 2):
                angle = position * self.frequency(i)
                sine, cosine = sine_cosine(angle)
                a, b = row[first + i], row[first + i + d // 2]
                turned[first + i] = a * cosine - b * sine
                turned[first + i + d // 2] = a * sine + b * cosine
        return turned

    def attend(self, q: Vector, keys: list[Vector], values: list[Vector]) -> Vector:
        root = Decimal(len(q)).sqrt()
        scores = [sum((a * b for a, b in zip(q, key, strict=True)), Decimal(0)) for key in keys]
        e = [(score / root).exp() for score in scores]
        total = sum(e, Decimal(0))
        return [
            sum((p * value[i] for p, value in zip(e, values, strict=True)), Decimal(0)) / total
            for i in range(len(q))
        ]


@pytest.fixture(autouse=True)
def forty_digits() -> Iterator[None]:
    with localcontext(Context(prec=40)):
        yield


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        replace(TINY, tied=True, qkv_bias=True, o_bias=False, mlp_bias=False),
        replace(PLAIN, qk_norm=True, rope_theta=1e6),
        replace(PLAIN, rope_scaling=WAVES, rope_theta=500.0),
        replace(PLAIN, rope_scaling=RopeDivisors(divisors=(1.0, 1.25, 3.5, 8.0))),
    ],
    ids=["llama with biases, own head", "qwen2 biases, tied", "qwen3", "llama 3.1", "divisors"],
)
def test_every_logit_equals_that_of_forty_digits(config: ModelConfig) -> None:
    weights = random_weights(config, seed=5, adversarial=True)
    exact = np.array(DecimalDecoder(config, weights).logits(TOKENS), dtype=np.float64)
    logits = Reference64(config, weights).logits(TOKENS)
    assert logits.dtype == np.float64
    assert np.abs(logits - exact).max() < BOUND * np.abs(exact).max()


def test_rows_asked_for_are_those_of_the_whole_and_chunks_do_not_show() -> None:
    weights = random_weights(TINY, seed=5, adversarial=True)
    tokens = np.random.default_rng(1).integers(0, TINY.vocab, 300).tolist()
    reference = Reference64(TINY, weights.__getitem__)
    whole = reference.logits(tokens)
    some = reference.logits(tokens, positions=[299, 0, 256])
    assert np.abs(some - whole[[299, 0, 256]]).max() < BOUND * np.abs(whole).max()
    # a row sees nothing that comes after it, on either side of a chunk's edge
    for stop in (5, 256, 257):
        prefix = reference.logits(tokens[:stop], positions=slice(stop - 1, None))
        assert np.abs(prefix[0] - whole[stop - 1]).max() < BOUND * np.abs(whole).max()
