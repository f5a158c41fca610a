"""Whether two tokenizers mean the same by an id: then a token of one model is one of the other."""

from __future__ import annotations

from anyshard.tokenizer.tokenizer import Tokenizer

__all__ = ["vocabulary_difference"]


def vocabulary_difference(one: Tokenizer, other: Tokenizer) -> str:
    """The first thing in which the second differs, said of both in that order; "" if none does:
    how many tokens there are, the text of an id, the ids that begin a text and end an answer.

    Held by: test_draft_model.py.
    """
    if one.vocab != other.vocab:
        return f"its vocabulary has {other.vocab} tokens, that of MODEL {one.vocab}"
    for token_id in range(one.vocab):
        mine, theirs = one.token_text(token_id), other.token_text(token_id)
        if mine != theirs:
            return f"its token {token_id} is {_shown(theirs)}, that of MODEL {_shown(mine)}"
    if one.bos_id != other.bos_id:
        return f"its texts begin with {_id(other.bos_id)}, those of MODEL with {_id(one.bos_id)}"
    mine_end, theirs_end = sorted(one.eos_ids), sorted(other.eos_ids)
    if mine_end != theirs_end:
        return f"its answers end with {_ids(theirs_end)}, those of MODEL with {_ids(mine_end)}"
    return ""


def _shown(text: bytes) -> str:
    return repr(text.decode("utf-8", "backslashreplace")[:40]) if text else "without a text"


def _id(token_id: int | None) -> str:
    return "no token" if token_id is None else f"token {token_id}"


def _ids(token_ids: list[int]) -> str:
    if not token_ids:
        return "no token"
    return f"token{'s' if len(token_ids) > 1 else ''} {', '.join(map(str, token_ids[:8]))}"
