"""The yardstick: the model in plain NumPy float64, one sequence at a time.

Norm, RoPE, softmax and SiLU are float64 too; HF run "in float64" does the first three in float32.
Its own rounding is about 2^-53 a step, so a difference from it is the error of the other side,
HF's or ours. It shares no code with the bodies under test: no tree, no exp2, no RoPE table.

Knows nothing of layouts, caches or batches. The order of its sums is the library's: two hosts may
differ in the last bits, far below the float32 that is measured with it.

Letters: T tokens, P positions asked for, D hidden, H query heads, G KV heads, d head dim, F ffn,
V vocabulary, C rows of a chunk, K keys that the rows see, N and M the two sides of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from anyshard.config import Llama3Scaling, ModelConfig, RopeDivisors
from anyshard.ops.exact import F32

__all__ = ["F64", "Reference64"]

F64 = npt.NDArray[np.float64]

CHUNK = 256  # query rows at a time: scores of 9 heads over 1,500 keys are 28 MB


class Reference64:
    """A decoder in float64 for one sequence.

    `weights` gives a float32 array per canonical name (`ModelConfig.tensor_shapes`), as a
    mapping or as a function such as `Checkpoint.read`. Each is widened when it is used, so a
    function that reads keeps one layer in memory; float64 arrays of float32 values are taken as
    they are, which spares the widening.

    Held by: test_float64.py (against a decoder in 40-digit decimals), test_accuracy.py (HF).
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, F32 | F64] | Callable[[str], F32 | F64]
    ) -> None:
        self.config = config
        self._read = weights if callable(weights) else weights.__getitem__

    def logits(
        self, tokens: Sequence[int], *, positions: Sequence[int] | slice | None = None
    ) -> F64:
        """Logits [P, V] at `positions` (all if None) of the sequence that `tokens` [T] is.

        Row p is what follows token p. At least one token.
        """
        x_TD = self.hidden(tokens)
        if positions is not None:
            x_TD = x_TD[positions if isinstance(positions, slice) else list(positions)]
        return self.head(x_TD)

    def hidden(
        self, tokens: Sequence[int], *, progress: Callable[[int, int], None] | None = None
    ) -> F64:
        """The residual [T, D] after the last layer, for `head`.

        `progress(layers done, layers in all)` is called after each layer.
        """
        x_TD = self.embed(tokens)
        for layer in range(self.config.num_layers):
            q_THd, k_TGd, v_TGd = self.qkv(x_TD, layer)
            x_TD = self.o_proj(x_TD, self.attention(q_THd, k_TGd, v_TGd), layer)
            x_TD = self.down_proj(x_TD, self.ffn(x_TD, layer), layer)
            if progress is not None:
                progress(layer + 1, self.config.num_layers)
        return x_TD

    # One op each, so that an op can be given somebody else's inputs.

    def embed(self, tokens: Sequence[int]) -> F64:
        """The residual [T, D] before the first layer."""
        return self._read("embed")[np.asarray(tokens, np.int64)].astype(np.float64)

    def qkv(self, x_TD: F64, layer: int, *, start: int = 0) -> tuple[F64, F64, F64]:
        """q [T, H, d], k and v [T, G, d] of rows at positions start, start + 1...

        After bias, head norm and RoPE; q without the scale of the scores.
        """
        x_TD = self._norm(x_TD, f"layers.{layer}.attn_norm")
        q_THd, k_TGd, v_TGd = (
            self._linear(x_TD, f"layers.{layer}.{name}", bias=self.config.qkv_bias).reshape(
                len(x_TD), -1, self.config.head_dim
            )
            for name in ("q", "k", "v")
        )
        if self.config.qk_norm:
            q_THd = self._norm(q_THd, f"layers.{layer}.q_norm")
            k_TGd = self._norm(k_TGd, f"layers.{layer}.k_norm")
        cos, sin = self._rotation(start, start + len(x_TD))
        return _rotated(q_THd, cos, sin), _rotated(k_TGd, cos, sin), v_TGd

    def attention(self, q_THd: F64, k_KGd: F64, v_KGd: F64) -> F64:
        """softmax(q k / sqrt(d)) v, [T, H d]; the rows are the last T of the K positions."""
        q_THd = q_THd / np.sqrt(np.float64(self.config.head_dim))
        return _causal_attention(q_THd, k_KGd, v_KGd).reshape(len(q_THd), -1)

    def o_proj(self, x_TD: F64, a_TN: F64, layer: int) -> F64:
        """The residual after attention."""
        return x_TD + self._linear(a_TN, f"layers.{layer}.o", bias=self.config.o_bias)

    def ffn(self, x_TD: F64, layer: int) -> F64:
        """SiLU(gate) up, [T, F]."""
        x_TD = self._norm(x_TD, f"layers.{layer}.mlp_norm")
        bias = self.config.mlp_bias
        gate_TF = self._linear(x_TD, f"layers.{layer}.gate", bias=bias)
        return _silu(gate_TF) * self._linear(x_TD, f"layers.{layer}.up", bias=bias)

    def down_proj(self, x_TD: F64, f_TF: F64, layer: int) -> F64:
        """The residual after the MLP."""
        return x_TD + self._linear(f_TF, f"layers.{layer}.down", bias=self.config.mlp_bias)

    def head(self, x_PD: F64) -> F64:
        """Logits [P, V] of residual rows after the last layer."""
        x_PD = self._norm(x_PD, "norm")
        return self._linear(x_PD, "embed" if self.config.tied else "head")

    def _wide(self, name: str) -> F64:
        return np.asarray(self._read(name), np.float64)

    def _linear(self, x_TM: F64, name: str, *, bias: bool = False) -> F64:
        """x W^T (+ b) for the matrix [N, M] of that name."""
        y_TN: F64 = x_TM @ self._wide(name).T
        return y_TN + self._wide(f"{name}_bias") if bias else y_TN

    def _norm(self, x_TD: F64, name: str) -> F64:
        square = np.mean(np.square(x_TD), axis=-1, keepdims=True)
        return np.asarray(x_TD / np.sqrt(square + self.config.norm_eps) * self._wide(name))

    def _rotation(self, start: int, stop: int) -> tuple[F64, F64]:
        """Cos and sin [T, 1, d/2] of position times theta^(-2i/d), scaled where the model is.

        The angle is relatively exact to 2^-51: at position 2^20 an error of 2^-31, below float32.
        """
        d = self.config.head_dim
        frequency = self.config.rope_theta ** (-np.arange(0, d, 2, dtype=np.float64) / d)
        frequency = _rescaled(frequency, self.config.rope_scaling)
        angle = np.arange(start, stop, dtype=np.float64)[:, None, None] * frequency
        return np.cos(angle), np.sin(angle)


def _rescaled(frequency: F64, scaling: Llama3Scaling | RopeDivisors | None) -> F64:
    """Inverse frequencies, scaled as the model says; Llama 3.1's rule by wave lengths."""
    if scaling is None:
        return frequency
    if isinstance(scaling, RopeDivisors):
        return frequency / np.array(scaling.divisors, np.float64)
    length = 2 * np.pi / frequency
    longest = scaling.original_context / scaling.low_frequency_factor
    shortest = scaling.original_context / scaling.high_frequency_factor
    share = (scaling.original_context / length - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    between = (1 - share) * frequency / scaling.factor + share * frequency
    slower = np.where(length > longest, frequency / scaling.factor, between)
    return np.asarray(np.where(length < shortest, frequency, slower))


def _rotated(x_THd: F64, cos: F64, sin: F64) -> F64:
    """Pairs (i, i + d/2) turned by their angle."""
    low, high = np.split(x_THd, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _causal_attention(q_THd: F64, k_KGd: F64, v_KGd: F64) -> F64:
    """softmax(q k) v per query head, each row over the keys up to its own; scaled queries."""
    num_tokens, num_heads, _ = q_THd.shape
    past = len(k_KGd) - num_tokens
    per_kv = num_heads // k_KGd.shape[1]
    a_THd = np.empty_like(q_THd)
    for start in range(0, num_tokens, CHUNK):
        stop = min(start + CHUNK, num_tokens)
        seen = past + stop
        visible_CK = np.arange(seen) <= np.arange(past + start, seen)[:, None]
        for h in range(num_heads):
            s_CK = q_THd[start:stop, h] @ k_KGd[:seen, h // per_kv].T
            s_CK = np.where(visible_CK, s_CK, -np.inf)
            p_CK = np.exp(s_CK - np.max(s_CK, axis=-1, keepdims=True))
            total_C1 = np.sum(p_CK, axis=-1, keepdims=True)
            a_THd[start:stop, h] = (p_CK @ v_KGd[:seen, h // per_kv]) / total_C1
    return a_THd


def _silu(x: F64) -> F64:
    """x / (1 + e^-x), by the side that cannot overflow."""
    e = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, x, x * e) / (1 + e))
