"""What a verified model reads: a text that ships with the package, or hashed token ids."""

from __future__ import annotations

import hashlib

from anyshard.tokenizer import Tokenizer

__all__ = ["TEXT", "hashed_tokens", "text_tokens"]

TEXT = """
A lighthouse keeper kept two books. In the first he wrote what he had seen: the ships, the hour,
the wind, the colour of the water. In the second he wrote what he had been told: that the company
would send oil in spring, that the harbour would be widened, that a cousin in the north had bought
a boat. For many years nobody asked for either book. Then a storm took the breakwater, and a man
from the insurance came up the stairs and asked which ships had passed on the night of the ninth.
The keeper opened the first book and read it out, line by line, and the man wrote it all down. He
asked next whether the company had known that the breakwater was weak. The keeper opened the second
book, read what stood there, closed it again and said that he had been told so, but had not seen
it. The man put away his pen. He said that in thirty years he had never met a witness who kept the
two apart, and that most people, when they were asked what they knew, answered with what they had
heard, and when they were asked what they had heard, answered with what they would have liked. The
keeper thought about that for a while. He said it was easy enough with two books, and hard with
one, and that the whole of his art was to have bought the second. Then he asked the man whether he
wanted tea, because the wind had turned and the boat would not come back for him before evening,
and they sat by the lamp and talked about boats until it was dark. When the man had gone the keeper
wrote in the first book that a visitor had come, and in the second that he had seemed content.
"""


def text_tokens(tokenizer: Tokenizer, count: int) -> tuple[int, ...]:
    """The first `count` tokens of TEXT, which is read again from its start where it ends.

    Hashed ids, if the tokenizer makes no token of it. Held by: test_verify.py.
    """
    once = tuple(tokenizer.encode(TEXT, add_special=True))
    again = tuple(tokenizer.encode(TEXT, add_special=False))
    if not again:
        return hashed_tokens(count, tokenizer.vocab, seed=0)
    repeats = -(-max(0, count - len(once)) // len(again))
    return (once + again * repeats)[:count]


def hashed_tokens(count: int, vocab: int, *, seed: int) -> tuple[int, ...]:
    """`count` token ids below `vocab` that only integers decide."""
    return tuple(
        int.from_bytes(hashlib.sha256(f"{seed} {i}".encode()).digest()[:4]) % vocab
        for i in range(count)
    )
