"""Tokenizers written as files: what is read back is the same tokenizer, id by id and end by end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_tiny_gguf
from models import ADVERSARIAL_9_3, write_hf_model
from test_checkpoint_gguf import needs_demo
from test_tokenizer import hf_directory
from test_tokenizer_kinds import CORPUS, TEMPLATE, demo_metadata, pieces

from anyshard.checkpoint import open_checkpoint
from anyshard.checkpoint.source import Checkpoint, TokenizerMaterial
from anyshard.errors import CheckpointError
from anyshard.tokenizer import Tokenizer, open_tokenizer, write_tokenizer
from anyshard.tokenizer.build import tokenizer_from_gguf, tokenizer_from_hf

CHAT = [
    {"role": "system", "content": "Say <|im_end|> \r\n and <tool_call>."},
    {"role": "user", "content": "Hi</s> 123\u2581 é"},
]


def of_pre(pre: str, **more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: demo_metadata() | {"tokenizer.ggml.pre": pre} | more


def commands() -> dict[str, Any]:
    """A token that looks like control and is none, and one that is and does not; a template of
    Windows; more ends than one."""
    metadata = demo_metadata()
    tokens = list(metadata["tokenizer.ggml.tokens"])
    types = list(metadata["tokenizer.ggml.token_type"])
    tokens[5], types[5] = "<tool_call>", 4
    tokens[6], types[6] = "no such word", 3
    return metadata | {
        "tokenizer.ggml.tokens": tuple(tokens),
        "tokenizer.ggml.token_type": tuple(types),
        "tokenizer.ggml.eot_token_id": 6,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ eot_token }}\r\n" + str(metadata["tokenizer.chat_template"]),
    }


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "demo": demo_metadata,
    "qwen2": of_pre("qwen2"),
    "llama-bpe": of_pre("llama-bpe"),
    "gpt-2": of_pre("gpt-2"),
    "commands": commands,
    "sentencepiece": lambda: pieces() | {"tokenizer.chat_template": TEMPLATE},
    "no space before": lambda: pieces() | {"tokenizer.ggml.add_space_prefix": False},
    "no template": lambda: {
        key: value for key, value in demo_metadata().items() if key != "tokenizer.chat_template"
    },
}


def checkpoint_of(metadata: dict[str, Any], folder: Path) -> Checkpoint:
    """Of some model with that tokenizer."""
    write_tiny_gguf(folder / "tiny.gguf")
    tiny = open_checkpoint(str(folder / "tiny.gguf"))
    config = tiny.config
    object.__setattr__(config, "vocab", len(metadata["tokenizer.ggml.tokens"]))
    return Checkpoint(
        path=tiny.path,
        config=config,
        sources=tiny.sources,
        tokenizer_material=TokenizerMaterial(label="x", metadata=metadata),
    )


def assert_alike(ours: Tokenizer, again: Tokenizer) -> None:
    for text in CORPUS:
        for special in (False, True):
            ids = ours.encode(text, add_special=special)
            assert ids == again.encode(text, add_special=special)
        assert ours.decode(ids) == again.decode(ids)
    assert (ours.eos_ids, ours.bos_id, ours.add_bos) == (again.eos_ids, again.bos_id, again.add_bos)
    everything = range(ours.vocab)
    assert list(map(ours.token_bytes, everything)) == list(map(again.token_bytes, everything))


@needs_demo
@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_of_metadata_is_the_same_from_its_files(kind: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(KINDS[kind](), tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    ids = write_tokenizer(checkpoint, out)
    ours = open_tokenizer(checkpoint)
    again = tokenizer_from_hf(out, vocab=checkpoint.config.vocab)
    assert set(ids.get("eos_token_id", ())) == ours.eos_ids
    assert_alike(ours, again)
    if "tokenizer.chat_template" in KINDS[kind]():
        messages = CHAT if kind == "demo" else CHAT[1:]
        assert ours.encode_chat(messages) == again.encode_chat(messages)


@needs_demo
def test_files_of_an_hf_directory_are_copied(tmp_path: Path) -> None:
    model = write_hf_model(tmp_path / "model", ADVERSARIAL_9_3, seed=1)
    demo = tokenizer_from_gguf(demo_metadata(), label="demo", vocab=49152)
    hf_directory(model, demo)
    (model / "special_tokens_map.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}\r\n", newline="")
    out = tmp_path / "out"
    out.mkdir()
    ids = write_tokenizer(open_checkpoint(str(model)), out)
    assert ids == {"bos_token_id": 1, "eos_token_id": 0}
    for file in out.iterdir():
        assert file.read_bytes() == (model / file.name).read_bytes()
    wanted = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
              "chat_template.jinja"}  # fmt: skip
    assert wanted <= {file.name for file in out.iterdir()}


def test_a_model_without_a_tokenizer_leaves_none(tmp_path: Path) -> None:
    model = write_hf_model(tmp_path / "model", ADVERSARIAL_9_3, seed=1)
    (model / "generation_config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "out").mkdir()
    write_tokenizer(open_checkpoint(str(model)), tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["generation_config.json"]


def test_a_tokenizer_that_does_not_come_back_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "out").mkdir()
    real = Tokenizer.files

    def other(self: Tokenizer) -> dict[str, str]:
        found = real(self)
        backend = json.loads(found["tokenizer.json"])
        backend["model"]["merges"] = backend["model"]["merges"][:1]
        return found | {"tokenizer.json": json.dumps(backend)}

    calls = iter([other, real])
    monkeypatch.setattr(Tokenizer, "files", lambda self: next(calls)(self))
    with pytest.raises(CheckpointError, match=r"cannot be written as tokenizer\.json"):
        write_tokenizer(open_checkpoint(str(tmp_path / "tiny.gguf")), tmp_path / "out")
