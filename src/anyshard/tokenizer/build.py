"""Tokenizers from what models come with: GGUF metadata, or the files of an HF directory.

Knows both layouts and which control tokens end an answer. Everything read here is untrusted;
what is wrong raises CheckpointError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from anyshard.checkpoint.safetensors import read_json_object
from anyshard.errors import CheckpointError
from anyshard.tokenizer.sentencepiece import SPACE, sentencepiece_backend
from anyshard.tokenizer.template import ChatTemplate
from anyshard.tokenizer.tokenizer import Tokenizer

__all__ = ["tokenizer_from_gguf", "tokenizer_from_hf"]

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

# Texts of control tokens that end an answer. A GGUF names one eos, chat models have more.
_END_TEXTS: Final = frozenset(
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>"]
)
# Qwen2 splits words, single digits, punctuation and line ends itself, then maps bytes.
_QWEN2_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# Llama 3 splits like Qwen2, but keeps up to three digits together.
_LLAMA3_PATTERN: Final = _QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
# Names that one way to split goes by in GGUF files.
_PRE_KINDS: Final = {
    **{"smollm": "smollm", "qwen2": "qwen2", "default": "gpt-2", "gpt-2": "gpt-2"},
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), "llama-bpe"),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, label: str, vocab: int) -> Tokenizer:
    """Tokenizer from `tokenizer.ggml.*` keys: model gpt2 (byte-level pairs) or llama.

    Raises: CheckpointError naming the key.
    Held by: test_tokenizer.py::test_demo_ids_equal_an_independent_byte_pair_encoder,
    test_tokenizer_kinds.py.
    """

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    kind = get("model")
    tokens = _strings(get("tokens"), label, "tokenizer.ggml.tokens")
    ids = _ids(tokens, label)
    if kind == "gpt2":
        backend = _byte_level(ids, get("merges"), get("pre"), label)
    elif kind == "llama":
        backend = sentencepiece_backend(
            ids,
            scores=get("scores"),
            types=get("token_type"),
            add_space_prefix=bool(get("add_space_prefix", True)),
            label=label,
        )
    else:
        raise CheckpointError(
            f"{label}: tokenizer.ggml.model is {kind!r:.40}; gpt2 (byte-level pairs) and llama "
            "(SentencePiece pairs) can be read"
        )
    control_ids = _add_tokens(backend, tokens, get("token_type"), label)
    eos_ids = {i for i in control_ids if tokens[i] in _END_TEXTS}
    named = {name: _token_id(get(f"{name}_token_id"), tokens, label, name) for name in _NAMED}
    eos_ids |= {i for name in ("eos", "eot", "eom") if (i := named[name]) is not None}
    bos_id = named["bos"]
    # files of these two kinds that do not say so mean it
    usual = kind == "llama" or _PRE_KINDS.get(str(get("pre"))) == "llama-bpe"
    if get("add_bos_token", usual) and bos_id is not None:
        bos = tokens[bos_id]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, bos_id)]
        )
    texts = {f"{n}_token": tokens[i] for n, i in named.items() if i is not None}
    for name, key in (("unk_token", "unknown"), ("pad_token", "padding")):
        if (index := _token_id(get(f"{key}_token_id"), tokens, label, key)) is not None:
            texts[name] = tokens[index]
    source = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        control_ids=control_ids,
        eos_ids=eos_ids,
        bos_id=bos_id,
        vocab=vocab,
        template=ChatTemplate(source, label=label) if isinstance(source, str) else None,
        special_tokens=texts,
        label=label,
        byte_level=kind == "gpt2",
    )


def _byte_level(ids: dict[str, int], merges: Any, pre: Any, label: str) -> tokenizers.Tokenizer:
    """Byte-pair encoding of text split as `pre` says."""
    kind = _PRE_KINDS.get(pre) if isinstance(pre, str) else None
    if kind is None:
        raise CheckpointError(
            f"{label}: tokenizer.ggml.pre is {pre!r:.40}; {', '.join(sorted(_PRE_KINDS))} can be "
            "read"
        )
    pairs = _pairs(ids, _strings(merges, label, "tokenizer.ggml.merges"), label)
    # Llama 3 takes a word that is a token whole, even where no merges lead to it
    backend = tokenizers.Tokenizer(models.BPE(ids, pairs, ignore_merges=kind == "llama-bpe"))
    splits: list[Any] = []
    if kind == "smollm":
        splits = [pre_tokenizers.Digits(individual_digits=True)]
    elif kind in ("qwen2", "llama-bpe"):
        pattern = _QWEN2_PATTERN if kind == "qwen2" else _LLAMA3_PATTERN
        splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")]
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()
    own_split = kind in ("smollm", "gpt-2")
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_split))
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.ByteLevel()
    return backend


_NAMED: Final = ("bos", "eos", "eot", "eom")
_HF_NAMED: Final = ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "eot", "eom")


def _strings(value: Any, label: str, key: str) -> tuple[str, ...]:
    if not isinstance(value, tuple) or not value or not isinstance(value[0], str):
        raise CheckpointError(f"{label}: {key} is missing or no array of strings")
    return value


def _token_id(value: Any, tokens: tuple[str, ...], label: str, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(tokens):
        raise CheckpointError(
            f"{label}: tokenizer.ggml.{name}_token_id is {value!r:.40}; there are {len(tokens)} "
            "tokens"
        )
    return value


def _ids(tokens: tuple[str, ...], label: str) -> dict[str, int]:
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
        raise CheckpointError(f"{label}: tokenizer.ggml.tokens holds {twice!r:.40} twice")
    return ids


def _pairs(ids: Mapping[str, int], merges: tuple[str, ...], label: str) -> list[tuple[str, str]]:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    for index, (left, right) in enumerate(pairs):
        if left not in ids or right not in ids or left + right not in ids:
            raise CheckpointError(
                f"{label}: item {index} of tokenizer.ggml.merges, {merges[index]!r:.40}, does not "
                "join two tokens into a third"
            )
    return pairs


def _add_tokens(
    backend: tokenizers.Tokenizer, tokens: tuple[str, ...], types: Any, label: str
) -> set[int]:
    """Tell the backend which tokens stand outside the merges; returns the control ids."""
    if types is None:
        types = (1,) * len(tokens)
    if not isinstance(types, tuple) or len(types) != len(tokens):
        raise CheckpointError(
            f"{label}: tokenizer.ggml.token_type does not have one number for each of the "
            f"{len(tokens)} tokens"
        )
    chosen = [i for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED) and tokens[i]]
    backend.add_tokens(
        [
            AddedToken(
                tokens[i],
                normalized=False,
                special=types[i] == _CONTROL or _looks_like_control(tokens[i]),
            )
            for i in chosen
        ]
    )
    return {i for i in chosen if types[i] == _CONTROL}


def _looks_like_control(text: str) -> bool:
    """`<tool_call>` and `[INST]`: files mark some of these as plain words, people as commands."""
    return len(text) > 2 and (text[0], text[-1]) in {("<", ">"), ("[", "]")}


def tokenizer_from_hf(directory: Path, *, vocab: int) -> Tokenizer:
    """From tokenizer.json, with tokenizer_config.json, chat_template.jinja and
    generation_config.json where they exist.

    Raises: CheckpointError naming the file.
    """
    path = directory / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 the library raises nothing more precise
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    byte_level = isinstance(backend.decoder, decoders.ByteLevel)
    if not byte_level and not _is_sentencepiece(backend.decoder):
        raise CheckpointError(
            f"{path}: the decoder is {type(backend.decoder).__name__}; ByteLevel and that of "
            "SentencePiece (Replace, ByteFallback, Fuse) can be read"
        )
    settings = _optional_json(directory / "tokenizer_config.json")
    added = backend.get_added_tokens_decoder()
    control_ids = {i for i, token in added.items() if token.special}
    commands = [t.content for t in added.values() if _looks_like_control(t.content)]
    backend.add_special_tokens(commands)  # known ones keep their ids and lose their magic
    named = {name: _token_text(settings.get(f"{name}_token")) for name in ("bos", "eos")}
    bos_id = backend.token_to_id(named["bos"]) if named["bos"] is not None else None
    eos_ids = _eos_ids(directory, vocab)
    if not eos_ids and named["eos"] is not None:
        eos_ids = {i for i in [backend.token_to_id(named["eos"])] if i is not None}
    return Tokenizer(
        backend,
        control_ids=control_ids,
        eos_ids=eos_ids,
        bos_id=bos_id,
        vocab=vocab,
        template=_hf_template(directory, settings),
        special_tokens=_special_texts(settings),
        label=str(directory),
        byte_level=byte_level,
    )


def _special_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """What a template may name: bos_token, eos_token and their like."""
    texts = {f"{name}_token": _token_text(settings.get(f"{name}_token")) for name in _HF_NAMED}
    return {name: text for name, text in texts.items() if text is not None}


def _is_sentencepiece(decoder: Any) -> bool:
    """Whether it is Replace of U+2581 by a space, ByteFallback, Fuse, and perhaps Strip."""
    try:
        steps = json.loads(decoder.__getstate__())["decoders"]
        kinds = [step["type"] for step in steps]
        replaces_space = (steps[0]["pattern"], steps[0]["content"]) == ({"String": SPACE}, " ")
    except (AttributeError, ValueError, TypeError, KeyError, IndexError):
        return False
    wanted = ["Replace", "ByteFallback", "Fuse"]
    return replaces_space and kinds in (wanted, [*wanted, "Strip"])


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _token_text(value: Any) -> str | None:
    """A token is written as its text, or as an object that holds it as `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_ids(directory: Path, vocab: int) -> set[int]:
    """generation_config.json decides, then config.json; each has one id or a list."""
    found: list[set[int]] = []
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        value = _optional_json(path).get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        for i in listed:
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab:
                raise CheckpointError(
                    f"{path}: eos_token_id is {value!r:.40}; an integer from 0 to {vocab - 1}, "
                    "or a list of such, is needed"
                )
        found.append(set(listed))
    return found[0] or found[1]


def _hf_template(directory: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return ChatTemplate(path.read_text("utf-8"), label=str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from None
    source = settings.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = [entry for entry in source if isinstance(entry, dict)]
        source = next((e.get("template") for e in named if e.get("name") == "default"), None)
    label = str(directory / "tokenizer_config.json")
    return ChatTemplate(source, label=label) if isinstance(source, str) else None
