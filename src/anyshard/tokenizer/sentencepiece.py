"""SentencePiece byte-pair vocabularies (`llama` in GGUF) as a `tokenizers` backend.

SentencePiece stores pieces with scores and joins the neighbours whose piece scores best; the
backend wants merges by rank. Spaces are written U+2581, one stands before the text, and what no
piece covers falls back to bytes, pieces `<0x00>` to `<0xFF>`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models, normalizers

from anyshard.errors import CheckpointError

__all__ = ["SPACE", "byte_of_piece", "sentencepiece_backend"]

SPACE: Final = "\u2581"
_NORMAL, _UNKNOWN = 1, 2  # values of tokenizer.ggml.token_type
_MAX_PIECE: Final = 256  # characters; all cuts of one are tried, and known ones have some 50


def sentencepiece_backend(
    ids: dict[str, int],
    *,
    scores: Any,
    types: Any,
    add_space_prefix: bool,
    label: str,
) -> tokenizers.Tokenizer:
    """A backend for pieces by id, one score and one type each; unknown is the piece of type 2.

    Raises: CheckpointError naming the key.
    Held by: test_tokenizer_kinds.py (an independent encoder, and HF's from the same pieces).
    """
    pieces = list(ids)
    scores = _numbers(scores, float, pieces, label, "scores")
    types = _numbers(types, int, pieces, label, "token_type")
    unknown = next((p for p, kind in zip(pieces, types, strict=True) if kind == _UNKNOWN), None)
    model = models.BPE(
        ids,
        _merges(pieces, scores, types, label),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    prefix = [normalizers.Prepend(SPACE)] if add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, spaces])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def byte_of_piece(piece: str) -> int | None:
    """200 for `<0xC8>`, None for any other piece."""
    if len(piece) != 6 or not piece.startswith("<0x") or piece[5] != ">":
        return None
    try:
        return int(piece[3:5], 16)
    except ValueError:
        return None


def _numbers(
    values: Any, kind: type[float] | type[int], pieces: Sequence[str], label: str, key: str
) -> Sequence[Any]:
    sound = (
        isinstance(values, tuple)
        and len(values) == len(pieces)
        and all(isinstance(v, kind) and not isinstance(v, bool) for v in values)
        and all(map(math.isfinite, values))
    )
    if not sound:
        raise CheckpointError(
            f"{label}: tokenizer.ggml.{key} does not have one number for each of the "
            f"{len(pieces)} tokens"
        )
    result: Sequence[Any] = values
    return result


def _merges(
    pieces: Sequence[str], scores: Sequence[float], types: Sequence[int], label: str
) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third; the better the third the earlier.

    Among ways to one piece the longer left part comes first, which is the leftmost pair where a
    run of one character could be joined at two places.
    """
    normal = {p: i for i, p in enumerate(pieces) if types[i] == _NORMAL}
    found: list[tuple[float, int, int, str, str]] = []
    for piece, index in normal.items():
        if len(piece) > _MAX_PIECE:
            raise CheckpointError(
                f"{label}: item {index} of tokenizer.ggml.tokens has {len(piece)} characters; "
                f"at most {_MAX_PIECE} are accepted"
            )
        for cut in range(len(piece) - 1, 0, -1):
            left, right = piece[:cut], piece[cut:]
            if left in normal and right in normal:
                found.append((-scores[index], -cut, index, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
