"""The yardstick: the model in plain NumPy float64, one sequence at a time.

Norm, RoPE, softmax and SiLU are float64 too; HF run "in float64" does the first three in float32.
Its own rounding is about 2^-53 a step, so a difference from it is the error of the other side,
HF's or ours. It shares no code with the bodies under test: no tree, no exp2, no RoPE table.

Knows nothing of layouts, caches or batches. The order of its sums is the library's: two hosts may
differ in the last bits, far below the float32 that is measured with it.

Letters: T tokens, P positions asked for, D hidden, H query heads, G KV heads, d head dim, F ffn,
V vocabulary, C rows of a chunk, K keys that a chunk sees, N and M the two sides of a matrix.
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
    function that reads keeps one layer in memory.

    Held by: test_float64.py (against a decoder in 40-digit decimals), test_accuracy.py (HF).
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, F32] | Callable[[str], F32]
    ) -> None:
        self.config = config
        self._read = weights if callable(weights) else weights.__getitem__

    def logits(
        self, tokens: Sequence[int], *, positions: Sequence[int] | slice | None = None
    ) -> F64:
        """Logits [P, V] at `positions` (all if None) of the sequence that `tokens` [T] is.

        Row p is what follows token p. At least one token.
        """
        x_TD = self._hidden(np.asarray(tokens, np.int64))
        if positions is not None:
            x_TD = x_TD[positions if isinstance(positions, slice) else list(positions)]
        x_PD = self._norm(x_TD, "norm")
        return self._linear(x_PD, "embed" if self.config.tied else "head")

    def _hidden(self, tokens: npt.NDArray[np.int64]) -> F64:
        """The residual [T, D] after the last layer."""
        x_TD = self._read("embed")[tokens].astype(np.float64)
        cos, sin = self._rotation(len(tokens))
        for i in range(self.config.num_layers):
            layer = f"layers.{i}"
            x_TD = x_TD + self._attention(self._norm(x_TD, f"{layer}.attn_norm"), layer, cos, sin)
            x_TD = x_TD + self._mlp(self._norm(x_TD, f"{layer}.mlp_norm"), layer)
        return x_TD

    def _wide(self, name: str) -> F64:
        return np.asarray(self._read(name), np.float64)

    def _linear(self, x_TM: F64, name: str, *, bias: bool = False) -> F64:
        """x W^T (+ b) for the matrix [N, M] of that name."""
        y_TN: F64 = x_TM @ self._wide(name).T
        return y_TN + self._wide(f"{name}_bias") if bias else y_TN

    def _norm(self, x_TD: F64, name: str) -> F64:
        square = np.mean(np.square(x_TD), axis=-1, keepdims=True)
        return np.asarray(x_TD / np.sqrt(square + self.config.norm_eps) * self._wide(name))

    def _rotation(self, num_tokens: int) -> tuple[F64, F64]:
        """Cos and sin [T, 1, d/2] of position times theta^(-2i/d), scaled where the model is.

        The angle is relatively exact to 2^-51: at position 2^20 an error of 2^-31, below float32.
        """
        d = self.config.head_dim
        frequency = self.config.rope_theta ** (-np.arange(0, d, 2, dtype=np.float64) / d)
        frequency = _rescaled(frequency, self.config.rope_scaling)
        angle = np.arange(num_tokens, dtype=np.float64)[:, None, None] * frequency
        return np.cos(angle), np.sin(angle)

    def _attention(self, x_TD: F64, layer: str, cos: F64, sin: F64) -> F64:
        config, d = self.config, self.config.head_dim

        def heads(name: str) -> F64:
            y_TN = self._linear(x_TD, f"{layer}.{name}", bias=config.qkv_bias)
            return y_TN.reshape(len(x_TD), -1, d)

        q_THd, k_TGd = heads("q"), heads("k")
        if config.qk_norm:
            q_THd = self._norm(q_THd, f"{layer}.q_norm")
            k_TGd = self._norm(k_TGd, f"{layer}.k_norm")
        q_THd = _rotated(q_THd, cos, sin) / np.sqrt(np.float64(d))
        k_TGd = _rotated(k_TGd, cos, sin)
        a_THd = _causal_attention(q_THd, k_TGd, heads("v"))
        return self._linear(a_THd.reshape(len(x_TD), -1), f"{layer}.o", bias=config.o_bias)

    def _mlp(self, x_TD: F64, layer: str) -> F64:
        bias = self.config.mlp_bias
        gate_TF = self._linear(x_TD, f"{layer}.gate", bias=bias)
        up_TF = self._linear(x_TD, f"{layer}.up", bias=bias)
        return self._linear(_silu(gate_TF) * up_TF, f"{layer}.down", bias=bias)


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


def _causal_attention(q_THd: F64, k_TGd: F64, v_TGd: F64) -> F64:
    """softmax(q k) v per query head, each row over the keys up to its own; scaled queries."""
    num_tokens, num_heads, _ = q_THd.shape
    per_kv = num_heads // k_TGd.shape[1]
    a_THd = np.empty_like(q_THd)
    for start in range(0, num_tokens, CHUNK):
        stop = min(start + CHUNK, num_tokens)
        visible_CK = np.arange(stop) <= np.arange(start, stop)[:, None]
        for h in range(num_heads):
            s_CK = q_THd[start:stop, h] @ k_TGd[:stop, h // per_kv].T
            s_CK = np.where(visible_CK, s_CK, -np.inf)
            p_CK = np.exp(s_CK - np.max(s_CK, axis=-1, keepdims=True))
            total_C1 = np.sum(p_CK, axis=-1, keepdims=True)
            a_THd[start:stop, h] = (p_CK @ v_TGd[:stop, h // per_kv]) / total_C1
    return a_THd


def _silu(x: F64) -> F64:
    """x / (1 + e^-x), by the side that cannot overflow."""
    e = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, x, x * e) / (1 + e))
