"""A conversation as data, and as a file that is whole or not there.

Frozen; every change makes a new one. Knows nothing of tokens, engines or terminals.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from anyshard.errors import OptionError
from anyshard.files import replace_file

__all__ = ["Conversation", "load_conversation", "save_conversation"]

_FORMAT: Final = "anyshard conversation 1"
_MAX_BYTES: Final = 16 << 20  # some four million tokens, more than any context


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What was said: the system text, if any, and (question, answer) pairs."""

    system: str | None = None
    turns: tuple[tuple[str, str], ...] = ()

    def asking(self, question: str) -> list[dict[str, str]]:
        """The messages of a chat template, with a new question at the end."""
        return [*self.messages(), {"role": "user", "content": question}]

    def answered(self, question: str, answer: str) -> Conversation:
        """With one more turn."""
        return replace(self, turns=(*self.turns, (question, answer)))

    def messages(self) -> list[dict[str, str]]:
        """All that was said, in the form of chat templates."""
        found = [] if self.system is None else [{"role": "system", "content": self.system}]
        for question, answer in self.turns:
            found += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        return found


def save_conversation(conversation: Conversation, path: str) -> None:
    """Write JSON to `path`: either all of it is there afterwards, or what was there before.

    Raises: OptionError saying why it cannot be written.
    Held by: test_chat.py::test_a_file_is_replaced_whole_or_not_at_all.
    """
    content = {"format": _FORMAT, "messages": conversation.messages()}
    text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    try:
        target = Path(path).expanduser()
        if target.is_dir():
            raise OptionError(f"{path} is a directory; name a file")
        replace_file(target, text.encode())
    except (OSError, ValueError, RuntimeError) as error:
        raise OptionError(f"{path} cannot be written: {_reason(error)}") from None


def load_conversation(path: str) -> Conversation:
    """Read what `save_conversation` wrote, or was written by hand in its form.

    Raises: OptionError naming the file and what is wrong with it.
    Held by: test_chat.py::test_a_file_that_is_no_conversation_is_refused.
    """
    try:
        with open(Path(path).expanduser(), "rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        raise OptionError(f"{path} cannot be read: {_reason(error)}") from None
    if len(raw) > _MAX_BYTES:
        raise OptionError(f"{path} is larger than {_MAX_BYTES >> 20} MiB, too long to talk about")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        raise OptionError(f"{path} is not JSON, so no saved conversation") from None
    if not isinstance(content, Mapping) or content.get("format") != _FORMAT:
        raise OptionError(f'{path} is no saved conversation: "format" is not {_FORMAT!r}')
    return _of_messages(content.get("messages"), path)


def _of_messages(messages: Any, path: str) -> Conversation:
    if not isinstance(messages, list):
        raise OptionError(f'{path}: "messages" is not a list')
    for index, message in enumerate(messages):
        whole = isinstance(message, Mapping) and set(message) == {"role", "content"}
        if not whole or not isinstance(message["content"], str):
            raise OptionError(f'{path}: message {index} is not a "role" and a text "content"')
    system = None
    if messages and messages[0]["role"] == "system":
        system = messages[0]["content"]
    rest = messages if system is None else messages[1:]
    for index, message in enumerate(rest):
        expected = ("user", "assistant")[index % 2]
        if message["role"] != expected:
            place = index + len(messages) - len(rest)
            raise OptionError(
                f"{path}: message {place} has the role {message['role']!r:.40}; it is the turn of "
                f"{expected!r}"
            )
    if len(rest) % 2:
        raise OptionError(f"{path}: the last question has no answer")
    texts = [message["content"] for message in rest]
    turns = tuple(zip(texts[::2], texts[1::2], strict=True))
    return Conversation(system=system, turns=turns)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
