"""The tokenizer: encode, encode a chat, decode, decode as a stream.

Control tokens have a text, such as `<|im_end|>`. In what a user wrote that text is text: it is
cut into ordinary tokens. In a chat only the template's own words become control tokens.
"""

from __future__ import annotations

import codecs
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import tokenizers

from anyshard.errors import UserError
from anyshard.tokenizer.sentencepiece import SPACE, byte_of_piece
from anyshard.tokenizer.template import ChatTemplate

__all__ = ["StreamDecoder", "Tokenizer"]

_ROLES: Final = ("system", "user", "assistant", "tool")
_PRIVATE_USE: Final = range(0xF0000, 0xFFFFE)  # stand-ins for one character of a hidden text


@lru_cache(maxsize=1)
def byte_of_character() -> Mapping[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary, inverted.

    Printable bytes of Latin-1 stand for themselves, the other 68 follow from U+0100 on.
    Source: the vocabulary format of GPT-2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(rest)}


class Tokenizer:
    """Text to ids and back. Safe to use from several threads.

    Attributes: eos_ids (ids that end an answer), bos_id (None if there is none), add_bos (a
    raw prompt starts with it), vocab (of the model; may exceed what the tokenizer names).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        control_ids: Iterable[int],
        eos_ids: Iterable[int],
        bos_id: int | None,
        vocab: int,
        template: ChatTemplate | None,
        special_tokens: Mapping[str, str],
        label: str,
        byte_level: bool = True,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # their text is text, unless a chat asks
        self._backend = backend
        self._lock = threading.Lock()  # encode_chat changes encode_special_tokens for a moment
        self._added = {
            token_id: token.content
            for token_id, token in backend.get_added_tokens_decoder().items()
        }
        texts = sorted(filter(None, self._added.values()), key=len, reverse=True)
        self._added_ids = {text: token_id for token_id, text in self._added.items()}
        alternatives = "|".join(map(re.escape, texts))
        firsts = "".join(sorted({re.escape(text[0]) for text in texts}))
        self._added_pattern = re.compile(alternatives or "(?!)")
        self._added_starts = re.compile(f"(?=[{firsts}])(?={alternatives})" if texts else "(?!)")
        self._control_ids = frozenset(control_ids)
        self._template = template
        self._special_tokens = dict(special_tokens)
        self._label = label
        self._byte_level = byte_level
        self._prefixes_once = _prefixes_once(backend)
        self.vocab = vocab
        self.eos_ids = frozenset(eos_ids)
        self.bos_id = bos_id
        self.add_bos = bos_id is not None and self.encode("", add_special=True)[:1] == [bos_id]

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Ids of raw text; `add_special` puts what the model expects around a prompt (bos).

        Bytes that the vocabulary lacks (SmolLM2: six control characters) are left out, as the
        model's own tokenizer does.

        Raises: UserError for text that is not Unicode, or an id that the model does not have.
        Held by: test_tokenizer.py::test_text_of_control_tokens_is_text.
        """
        return self._encode(text, add_special=add_special, parse_control=False)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation in the model's own format.

        Each message has a `role` and a text `content`. Text of control tokens inside a message
        stays text, also where it would only arise by standing beside the scaffold.

        Raises: UserError without a template, for a message that is none, or when the template
        refuses.
        Held by: test_tokenizer.py::test_chat_content_cannot_forge_a_turn.
        """
        if self._template is None:
            raise UserError(
                f"{self._label}: has no chat template, which chat and generate --chat need; "
                "generate takes raw prompts without --chat"
            )
        _check_messages(messages)
        hidden = self._stand_ins(messages)
        guarded = [self._guard(message, hidden) for message in messages]
        rendered = self._template.render(
            guarded,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self._special_tokens,
        )
        if guarded == list(messages):
            return self._encode(rendered, add_special=False, parse_control=True)
        return self._encode_scaffold(rendered, {ord(new): old for old, new in hidden.items()})

    def files(self) -> dict[str, str]:
        """The texts of files, by name, from which `tokenizer_from_hf` makes this tokenizer again.

        Equal tokenizers have equal files. Held by: test_tokenizer_files.py.
        """
        backend = json.loads(self._backend.to_str())
        for token in backend["added_tokens"]:  # there, special is what is never shown
            token["special"] = token["id"] in self._control_ids
        settings: dict[str, Any] = dict(sorted(self._special_tokens.items()))
        if self._template is not None:
            settings["chat_template"] = self._template.source
        return {
            "tokenizer.json": json.dumps(backend, ensure_ascii=False),
            "tokenizer_config.json": json.dumps(settings, indent=2),
            "generation_config.json": json.dumps(self.special_ids(), indent=2),
        }

    def special_ids(self) -> dict[str, Any]:
        """bos_token_id and eos_token_id as HF's files have them, as far as there are any."""
        ids: dict[str, Any] = {} if self.bos_id is None else {"bos_token_id": self.bos_id}
        return ids | ({"eos_token_id": sorted(self.eos_ids)} if self.eos_ids else {})

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, control tokens left out; bytes that are no UTF-8 become U+FFFD.

        SentencePiece puts a space before a text; it is given back as it stands, because ids that
        continue a prompt must say whether they begin a word.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def stream_decoder(self) -> StreamDecoder:
        """A decoder for ids that come one by one; its parts join to what `decode` gives."""
        return StreamDecoder(self)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one id stands for; none for control tokens and for ids without a text."""
        assert token_id >= 0
        if token_id in self._control_ids:
            return b""
        if token_id in self._added:
            text = self._added[token_id]
            return (text if self._byte_level else text.replace(SPACE, " ")).encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if not self._byte_level:
            byte = byte_of_piece(token)
            return token.replace(SPACE, " ").encode() if byte is None else bytes([byte])
        table = byte_of_character()
        if all(character in table for character in token):
            return bytes(map(table.__getitem__, token))
        return token.encode()

    def token_text(self, token_id: int) -> bytes:
        """As `token_bytes`, and of a control token its name."""
        return self._added.get(token_id, "").encode() or self.token_bytes(token_id)

    def _encode(
        self, text: str, *, add_special: bool, parse_control: bool, prefix: bool = True
    ) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"character {error.start} of the prompt is half a surrogate pair, not text; "
                "UTF-8 input is needed"
            ) from None
        with self._lock:
            self._backend.encode_special_tokens = not parse_control
            if not prefix:
                self._backend.pre_tokenizer.prepend_scheme = "never"
            try:
                encoding = self._backend.encode(text, add_special_tokens=add_special)
            finally:
                self._backend.encode_special_tokens = True
                if not prefix:
                    self._backend.pre_tokenizer.prepend_scheme = "first"
        ids: list[int] = encoding.ids
        if max(ids, default=0) >= self.vocab:
            raise UserError(
                f"{self._label}: the tokenizer gives id {max(ids)}, but the model has "
                f"{self.vocab} tokens; the two do not belong together"
            )
        return ids

    def _stand_ins(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """First character of a control token's text to a character that occurs nowhere."""
        assert self._template is not None
        used = {*repr(messages), *self._template.source}
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        return dict(zip(sorted({text[0] for text in self._added_ids if text}), free, strict=False))

    def _guard(self, value: Any, hidden: Mapping[str, str]) -> Any:
        """`value` with the first character of each control token's text replaced."""
        if isinstance(value, Mapping):
            return {key: self._guard(item, hidden) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guard(item, hidden) for item in value]
        if not isinstance(value, str):
            return value
        starts = {match.start() for match in self._added_starts.finditer(value)}
        for text in self._added_ids:  # one that the scaffold behind the message would complete
            for length in range(1, min(len(text), len(value) + 1)):
                if value.endswith(text[:length]):
                    starts.add(len(value) - length)
        characters = list(value)
        for start in starts:
            characters[start] = hidden[characters[start]]
        return "".join(characters)

    def _encode_scaffold(self, rendered: str, restore: Mapping[int, str]) -> list[int]:
        """Control tokens where the rendered text still shows one; all else is plain text."""
        ids: list[int] = []
        position = 0
        for match in self._added_pattern.finditer(rendered):
            ids += self._plain(rendered[position : match.start()].translate(restore), position)
            ids.append(self._added_ids[match.group()])
            position = match.end()
        return ids + self._plain(rendered[position:].translate(restore), position)

    def _plain(self, text: str, position: int) -> list[int]:
        if not text:
            return []
        if position == 0 or not self._prefixes_once:
            return self._encode(text, add_special=False, parse_control=False)
        return self._encode(text, add_special=False, parse_control=False, prefix=False)


class StreamDecoder:
    """Text as ids arrive: whole characters only, the bytes of a cut one are held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this id completes, possibly none.

        U+FFFD comes out for bytes that no further byte can make a character, and only then.
        """
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is still held back, as U+FFFD; the decoder is then empty again."""
        return self._utf8.decode(b"", final=True)


def _prefixes_once(backend: tokenizers.Tokenizer) -> bool:
    """Whether only the very start of a text gets a space, not each piece between commands."""
    scheme: object = getattr(backend.pre_tokenizer, "prepend_scheme", None)
    return scheme == "first"


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise UserError("a chat needs at least one message")
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise UserError(f"message {index} has the role {role!r}; {', '.join(_ROLES)} exist")
        if not isinstance(content, str):
            raise UserError(f"message {index} has the content {content!r:.40}; text is needed")
