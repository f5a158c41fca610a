"""Op by op: each output of an engine against float64 on that engine's own inputs of the op.

`OpMeter` is told what an engine's ops wrote, in the order of the program, any number of rows of
one sequence at a time. It computes the same op in float64 from what it was told before and adds
the distance. An error is therefore counted where it is made, and nowhere after.

Letters: T rows told at a time, K positions so far, D hidden, H query heads, G KV heads, d head
dim, F ffn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anyshard.accuracy.figures import Distance
from anyshard.accuracy.report import OpFigures
from anyshard.op import LAYER_POINTS, DigestPoint
from anyshard.ops.exact import F32
from anyshard.ops.float64 import F64, Reference64

__all__ = ["POINTS", "OpMeter"]

#: What is compared, in the order of the program; the digest points.
POINTS: tuple[DigestPoint, ...] = ("embed", *LAYER_POINTS, "logits")


class OpMeter:
    """Distances of one engine's ops over one sequence.

    query_factor: what the engine has multiplied its queries with (the scale of the scores, or 1);
    it is taken out before q is compared, so that two engines' errors of q stand side by side.
    """

    def __init__(self, reference: Reference64, *, query_factor: float) -> None:
        self._reference = reference
        self._query_factor = query_factor
        self._distances: dict[tuple[int, str], Distance] = {}
        self._keys: list[list[F32]] = [[] for _ in range(reference.config.num_layers)]
        self._values: list[list[F32]] = [[] for _ in range(reference.config.num_layers)]
        self._start = self._told = 0
        # inputs of the next ops, as float64
        self._x_TD: F64
        self._q_THd: F64
        self._a_TN: F64
        self._f_TF: F64

    def embed(self, tokens: Sequence[int], x_TD: F32) -> None:
        """The next rows begin: their token ids and the residual before the first layer."""
        self._start, self._told = self._told, self._told + len(tokens)
        self._add(-1, "embed", x_TD, self._reference.embed(tokens))
        self._x_TD = x_TD.astype(np.float64)

    def qkv(self, layer: int, q_TN: F32, k_TN: F32, v_TN: F32) -> None:
        """Queries [T, H d], keys and values [T, G d], after RoPE."""
        d = self._reference.config.head_dim
        plain_q_TN = q_TN.astype(np.float64) / self._query_factor
        true = self._reference.qkv(self._x_TD, layer, start=self._start)
        told: tuple[F32 | F64, ...] = (plain_q_TN, k_TN, v_TN)
        for point, mine, its in zip("qkv", told, true, strict=True):
            self._add(layer, point, mine, its.reshape(len(its), -1))
        self._q_THd = plain_q_TN.reshape(len(q_TN), -1, d)
        self._keys[layer].append(k_TN.reshape(len(k_TN), -1, d).copy())
        self._values[layer].append(v_TN.reshape(len(v_TN), -1, d).copy())

    def attention(self, layer: int, a_TN: F32) -> None:
        """Attention output [T, H d], over the keys and values told so far."""
        keys, values = (
            np.concatenate(kept[layer]).astype(np.float64) for kept in (self._keys, self._values)
        )
        self._add(layer, "attention", a_TN, self._reference.attention(self._q_THd, keys, values))
        self._a_TN = a_TN.astype(np.float64)

    def o_proj(self, layer: int, x_TD: F32) -> None:
        """The residual after attention."""
        self._add(layer, "reduce_o", x_TD, self._reference.o_proj(self._x_TD, self._a_TN, layer))
        self._x_TD = x_TD.astype(np.float64)

    def ffn(self, layer: int, f_TF: F32) -> None:
        """SiLU(gate) up [T, F]."""
        self._add(layer, "ffn", f_TF, self._reference.ffn(self._x_TD, layer))
        self._f_TF = f_TF.astype(np.float64)

    def down_proj(self, layer: int, x_TD: F32) -> None:
        """The residual after the MLP."""
        self._add(
            layer, "reduce_down", x_TD, self._reference.down_proj(self._x_TD, self._f_TF, layer)
        )
        self._x_TD = x_TD.astype(np.float64)

    def round_wire(self, x_TD: F32) -> None:
        """The residual that the next layer reads, where an int8 wire rounds: part of the profile,
        no error of an op."""
        self._x_TD = x_TD.astype(np.float64)

    def logits(self, x_PD: F32, logits_PV: F32) -> None:
        """Logits, and the residual rows after the last layer that they were made of."""
        self._add(-1, "logits", logits_PV, self._reference.head(x_PD.astype(np.float64)))

    def figures(self) -> tuple[OpFigures, ...]:
        """A row for every layer and point, in the order of the program."""
        last = self._reference.config.num_layers

        def place(key: tuple[int, str]) -> tuple[int, int]:
            layer = last if key[1] == "logits" else key[0]
            return layer, POINTS.index(key[1])

        return tuple(
            self._distances[key].figures(key[1], None if key[0] < 0 else key[0])
            for key in sorted(self._distances, key=place)
        )

    def _add(self, layer: int, point: str, mine: F32 | F64, true: F64) -> None:
        self._distances.setdefault((layer, point), Distance()).add(mine, true)
