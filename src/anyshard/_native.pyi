"""The native core: the ops of a step in C++, with the bits of their twins in `ops.reference`.

Every op is bound once to its arrays: the constructor checks dtype, shape and contiguity
(ValueError, one sentence) and keeps the arrays alive; `run` checks the row count and every index
it will follow (ValueError), releases the GIL and allocates nothing.

Shapes: R rows_max, D hidden, H query heads here, G KV heads here, d head dim (a multiple of 8,
at most 256), F ffn here, N outputs, K inputs, V vocabulary rows here, P pages, S slots, B blocks
of a slot, C positions, L leaves. Panels are [ceil(N/8), K, 8] of float32, float16 or uint16
(bfloat16), or Q8_0 blocks [ceil(N/16), K/32, 544] of uint8 (`ops.storage` has the layout); every
matrix of an op may have its own. Values are widened to float32 exactly, so the storage changes no
bit. The stride of the first dimension is free, so a cut of k is a view (Q8_0: of whole blocks;
leaves are multiples of 32 then). None for panels stands for zero outputs.

`leaf_lengths` [L] (each at least 1) and `merges` [L] are the post-order program of a sum: after
leaf i, merges[i] times left + right; L - sum(merges) nodes are left.

Held by: tests/test_native_*.py.
"""

from collections.abc import Sequence
from typing import Literal, final

import numpy as np
import numpy.typing as npt

from anyshard.ops.kv_pages import Pages

__all__ = [
    "Attention",
    "AttentionStates",
    "Bound",
    "DecodeWire",
    "Digest",
    "DigestKv",
    "Embed",
    "Exchange",
    "GateUp",
    "Gather",
    "Head",
    "MergeStates",
    "Op",
    "Pool",
    "Qkv",
    "Reduce",
    "RoundWire",
    "RowLinear",
    "Walk",
    "argmax",
    "available_bodies",
    "digest_panels",
    "exp_into",
    "gumbel_argmax",
    "pack_panels",
    "read_streams",
    "shm_abort",
    "shm_publish",
    "sources_sha256",
    "spread",
]

Body = Literal["vnni", "avx2", "scalar"]
PackType = Literal["F32", "F16", "BF16", "Q8_0", "Q4_1"]
F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Panels = npt.NDArray[np.float32 | np.float16 | np.uint16 | np.uint8 | np.int8]

sources_sha256: str
"""Of the sources that it was built from, as cli/stale.py computes it."""

def available_bodies() -> list[str]:
    """Bodies that this CPU can run, the fastest first; "scalar" is always there."""

@final
class Pool:
    """Threads that run ops together; 1 computes on the caller. No result depends on them.

    spin: wait for work in a short loop before sleeping; not when threads outnumber cores.
    Make it after forking: threads do not survive a fork.
    """

    def __init__(self, threads: int, body: str, spin: bool) -> None: ...
    @property
    def threads(self) -> int:
        """Threads, the caller included."""

    @property
    def body(self) -> str:
        """Which kernels run."""

    def close(self) -> None:
        """End the threads; a later `run` on this pool raises RuntimeError."""

class Bound:
    """A call of a step, as a Walk makes it."""

class Op(Bound):
    """One that computes."""

    def run(self, rows: int) -> None:
        """So many rows."""

@final
class Embed(Op):
    """out[row] = embedding row tokens[row]. panels [V/8, D, 8], tokens [R], out [R, D]."""

    def __init__(
        self, pool: Pool, panels: Panels | None, vocab: int, tokens: I32, out: F32
    ) -> None: ...
    def run(self, rows: int) -> None:
        """Fill out[:rows]."""

@final
class Qkv(Op):
    """Norm, q/k/v with bias, RoPE, q scaled once, k and v stored in their pages.

    x [R, D], norm_weight [D], q_out [R, H*d], cos and sin [C, d/2], k_cache and v_cache [P, G, ..]
    of one type as ops/kv_pages.py lays it out, page_table [S, B], row_slot, positions and
    row_fault [R]; biases as wide as their outputs or None; q_norm and k_norm [d] norm each head
    before RoPE, or None. Of a row whose block is not of stripes first_stripe:stop_stripe only q is
    computed.
    """

    def __init__(
        self,
        pool: Pool,
        x: F32,
        norm_weight: F32,
        eps: float,
        q_panels: Panels | None,
        k_panels: Panels | None,
        v_panels: Panels | None,
        q_bias: F32 | None,
        k_bias: F32 | None,
        v_bias: F32 | None,
        q_norm: F32 | None,
        k_norm: F32 | None,
        leaf_lengths: I32,
        merges: I32,
        head_dim: int,
        q_scale: float,
        cos: F32,
        sin: F32,
        positions: I32,
        q_out: F32,
        k_cache: Pages,
        v_cache: Pages,
        page_table: I32,
        row_slot: I32,
        row_fault: I32,
        fault_code: int,
        first_stripe: int = 0,
        stop_stripe: int = 8,
    ) -> None: ...
    def run(self, rows: int) -> None:
        """Rows of this step; their k and v are in the cache when it returns."""

@final
class Attention(Op):
    """Each row attends to keys 0..position of its slot. q and out [R, H*d], kv_head_of [H]."""

    def __init__(
        self,
        pool: Pool,
        q: F32,
        k_cache: Pages,
        v_cache: Pages,
        page_table: I32,
        row_slot: I32,
        positions: I32,
        head_dim: int,
        kv_head_of: I32,
        out: F32,
        row_fault: I32,
        fault_code: int,
    ) -> None: ...
    def run(self, rows: int) -> None:
        """Fill out[:rows]; a head with a score outside +-2^20 gets NaN and its row a fault."""

@final
class AttentionStates(Op):
    """States of the nodes that cover stripes first_stripe:stop_stripe, of the heads of all ranks.

    queries: [R, H*d here] of each TP rank; kv_head_of [H of all]. out: at least a part of R *
    part_floats floats for each rank.
    """

    def __init__(
        self,
        pool: Pool,
        queries: Sequence[F32],
        k_cache: Pages,
        v_cache: Pages,
        page_table: I32,
        row_slot: I32,
        positions: I32,
        head_dim: int,
        kv_head_of: I32,
        first_stripe: int,
        stop_stripe: int,
        part_floats: int,
        out: F32,
    ) -> None: ...
    def run(self, rows: int) -> None:
        """Part r, from r * rows * part_floats on, is [rows][heads of rank r][nodes][d + 2]: M as
        int bits, l (NaN: a score was outside +-2^20), o (not set where M is -2^30: empty)."""

@final
class MergeStates(Op):
    """out [R, H*d] = the merge of all ranks' nodes of the heads of rank `mine`, o / l.

    sources: one flat array a rank, in rank order, as AttentionStates writes it; merges: over the
    nodes of all of them.
    """

    def __init__(
        self,
        pool: Pool,
        sources: Sequence[F32],
        nodes_per_source: Sequence[int],
        merges: I32,
        mine: int,
        part_floats: int,
        head_dim: int,
        out: F32,
        row_fault: I32,
        fault_code: int,
    ) -> None: ...
    def run(self, rows: int) -> None:
        """Fill out[:rows]; a head with a score outside +-2^20 gets NaN and its row a fault."""

@final
class RowLinear(Op):
    """This rank's nodes of a row-parallel linear. a [R, K], out: at least nodes*R*N floats."""

    def __init__(
        self,
        pool: Pool,
        a: F32,
        panels: Panels | None,
        num_outputs: int,
        leaf_lengths: I32,
        merges: I32,
        out: F32,
    ) -> None: ...
    def run(self, rows: int) -> None:
        """Write [nodes][rows][N], packed for these rows, to the front of out."""

@final
class Reduce(Op):
    """x += merged nodes of all ranks (+ bias). sources: one flat array a rank, in rank order."""

    def __init__(
        self,
        pool: Pool,
        sources: Sequence[F32],
        nodes_per_source: Sequence[int],
        merges: I32,
        bias: F32 | None,
        x: F32,
        num_outputs: int,
    ) -> None: ...
    def run(self, rows: int) -> None:
        """Node j of a source is at [(j * rows + row) * N + n]."""

@final
class RoundWire(Op):
    """Rows of x [R, D] become what an int8 wire makes of them (ops/wire.py); wire [R, B]: gets
    their bytes, or None."""

    def __init__(self, pool: Pool, x: F32, wire: U8 | None = None) -> None: ...
    def run(self, rows: int) -> None:
        """Round x[:rows]."""

@final
class DecodeWire(Op):
    """Rows of x [R, D] from what an int8 wire has brought [R, B]."""

    def __init__(self, pool: Pool, wire: U8, x: F32) -> None: ...
    def run(self, rows: int) -> None:
        """Fill x[:rows]."""

@final
class GateUp(Op):
    """Norm, gate and up projections with bias, out = SiLU(gate) * up. x [R, D], out [R, F]."""

    def __init__(
        self,
        pool: Pool,
        x: F32,
        norm_weight: F32,
        eps: float,
        gate_panels: Panels | None,
        up_panels: Panels | None,
        num_outputs: int,
        gate_bias: F32 | None,
        up_bias: F32 | None,
        leaf_lengths: I32,
        merges: I32,
        out: F32,
        row_fault: I32,
        fault_code: int,
    ) -> None: ...
    def run(self, rows: int) -> None:
        """Fill out[:rows]."""

@final
class Head(Op):
    """Logits of sampled rows: out[i] = head(norm(x[sample_rows[i]])). out [R, V]."""

    def __init__(
        self,
        pool: Pool,
        x: F32,
        sample_rows: I32,
        norm_weight: F32,
        eps: float,
        panels: Panels | None,
        num_outputs: int,
        bias: F32 | None,
        leaf_lengths: I32,
        merges: I32,
        out: F32,
        row_fault: I32,
        fault_code: int,
    ) -> None: ...
    def run(self, rows: int) -> None:
        """Fill out[:rows], of as many sampled rows."""

@final
class Digest(Op):
    """out[row, columns[i]] = digest of sources[i][row], from index firsts[i] on. out [R, P]."""

    def __init__(
        self,
        pool: Pool,
        sources: Sequence[F32],
        firsts: Sequence[int],
        columns: Sequence[int],
        keys: I32,
        out: U64,
    ) -> None: ...
    def run(self, rows: int) -> None:
        """Fill the columns of out[:rows]."""

@final
class DigestKv(Op):
    """Digests of stored k and v of heads first_head:stop_head, into column and column + 1; 0 of a
    row whose block is not of stripes first_stripe:stop_stripe."""

    def __init__(
        self,
        pool: Pool,
        k_cache: Pages,
        v_cache: Pages,
        page_table: I32,
        row_slot: I32,
        positions: I32,
        first_head: int,
        stop_head: int,
        first: int,
        column: int,
        keys: I32,
        out: U64,
        first_stripe: int = 0,
        stop_stripe: int = 8,
    ) -> None: ...
    def run(self, rows: int) -> None:
        """Fill both columns of out[:rows]."""

def digest_panels(pool: Pool, panels: Panels, keys: I32, num_inputs: int, out: U64) -> None:
    """out[n] = digest of the widened inputs of output n, index 0 on."""

def argmax(logits: F32, *, body: str = "") -> tuple[int, float]:
    """(id, value) of the largest logit, the lowest id on ties.

    The id is -1 if a logit is NaN or the largest is infinite. body: "" is the best one here.
    """

def exp_into(x: F32, out: F32, *, body: str = "") -> None:
    """out = e^x for x <= 0, element by element; out may be x."""

def gumbel_argmax(
    logits: F32,
    temperature: float,
    key: int,
    position: int,
    choice: int,
    stream: int,
    mask: U8 | None = None,
    *,
    body: str = "",
) -> int:
    """argmax over ids with mask != 0 of logit + temperature * G(key, position, choice, stream, id).

    -1 if an allowed score is NaN, or none is finite.
    """

def spread(logits: F32, *, body: str = "") -> tuple[float, float, int, int]:
    """(entropy, margin, first, second) of a row: see `ops.draw.spread`, of which it keeps no bits.

    Held by: test_native_spread.py.
    """

def pack_panels(
    pool: Pool,
    panels: Panels,
    source: U8,
    type: str,
    num_rows: int,
    num_columns: int,
    row_map: I32 | None = None,
    group: int = 0,
) -> bool:
    """Pack raw rows; whether all values are finite.

    Into float32 panels, widened as the `gguf` package does; or as they are, F16 into float16,
    BF16 into uint16, Q8_0 into blocks; or any into int8, quantised in blocks that begin anew after
    every `group` columns (0: never). Row n of the panels is raw row row_map[n]; lanes past
    num_rows are +0.
    """

def read_streams(pool: Pool, words: U64, streams: int) -> int:
    """The exclusive or of all words, read by each thread in `streams` (1 to 16) panels at a time.

    Its time is what memory gives to such reading; its result shows that all was read.
    """

@final
class Gather:
    """A wait on other ranks' lines in shared memory; see comm/signals.py."""

    def __init__(
        self, words: U32, mine: int, peers: Sequence[int], abort_index: int, spin_us: int
    ) -> None: ...
    def run(self, value: int, timeout_us: int) -> int:
        """Publish value on my line, then wait for the peers'."""

    def wait(self, value: int, timeout_us: int) -> int:
        """0 reached, -1 aborted, 1 + i: peer i is late."""

@final
class Exchange(Bound):
    """An exchange as comm/shm.py makes it, of `row_floats` a row, `row_wire` with the padding.

    step [1]: of the last one, shared with comm/shm.py. even_sizes, odd_sizes: the words in which
    ranks say what they publish, of either parity, at `places`. sent [2]: bytes and messages, any
    stride. No array is converted.
    """

    def __init__(
        self,
        gather: Gather,
        step: U32,
        even_sizes: U32,
        odd_sizes: U32,
        places: Sequence[int],
        sent: npt.NDArray[np.int64],
        row_floats: int,
        row_wire: int,
        capacity_floats: int,
        messages: int,
        tp_rank: int,
        slice_us: int,
    ) -> None: ...

@final
class Walk:
    """Calls made one after the other, each of which adds 1 to operations[0]."""

    def __init__(self, calls: tuple[Bound, ...], operations: U64) -> None: ...
    def run(self, rows: int, first: int) -> int:
        """Calls from number `first` on; the number of one that does not go on, which is to be
        ended before the next, or how many there are."""

    def heed(self, words: U32, now: U32) -> None:
        """From now on begin no call while words[now[1]] == now[0] (comm/voids.py)."""

    @property
    def status(self) -> int:
        """How that wait stands, as Gather.run says it; 0 where sizes differ; -3: that call was not
        begun."""

def shm_publish(words: U32, index: int, value: int) -> None:
    """Store value on a line and wake its sleepers."""

def shm_abort(words: U32, abort_index: int) -> None:
    """Set the abort word and wake every line."""
