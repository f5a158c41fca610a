"""Text that streams whole: stop strings held back, digests over rows in order."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from anyshard.answer import Answer


class Letters:
    """A decoder whose token ids are code points."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def finish(self) -> str:
        return ""


def run(text: str, *stop: str) -> tuple[list[str], Answer]:
    answer = Answer(Letters(), stop=stop, stop_ids=frozenset({0}))
    shown = []
    for letter in text:
        shown.append(answer.push(ord(letter), None))
        if answer.stopped:
            return shown, answer
    return [*shown, answer.finish()], answer


def test_without_stop_strings_every_token_shows_at_once() -> None:
    shown, answer = run("abc")
    assert shown == ["a", "b", "c", ""] and answer.text == "abc"


@pytest.mark.parametrize(
    ("text", "stop", "want"),
    [
        ("hello END more", ("END",), "hello "),
        ("aab", ("ab",), "a"),
        ("ENE", ("END",), "ENE"),
        ("xyzzy", ("zzy", "yz"), "x"),
        ("END", ("END",), ""),
        ("EEND", ("END",), "E"),
    ],
)
def test_a_stop_string_ends_the_answer_and_never_shows(
    text: str, stop: tuple[str, ...], want: str
) -> None:
    shown, answer = run(text, *stop)
    assert "".join(shown) == answer.text == want
    assert answer.stopped == any(s in text for s in stop)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    shown, _ = run("aEN!", "END")
    assert shown == ["a", "", "", "EN!", ""]


def test_a_stop_token_counts_in_tokens_and_digest_but_has_no_text() -> None:
    answer = Answer(Letters(), stop=(), stop_ids=frozenset({0}))
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert answer.push(65, rows[0]) == "A"
    assert answer.push(0, rows[1]) == ""
    assert answer.tokens == [65, 0] and answer.text == "A"
    assert answer.logits_sha256 == hashlib.sha256(rows.astype("<f4").tobytes()).hexdigest()
