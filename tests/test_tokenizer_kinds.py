"""Every kind of tokenizer on the corpus: ids of HF's own, or of an encoder in thirty lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]
import tokenizers
from test_checkpoint_gguf import needs_demo
from test_tokenizer import PlainEncoder, split_smollm
from tokenizers import models, pre_tokenizers, trainers

from anyshard.checkpoint import open_checkpoint
from anyshard.tokenizer import Tokenizer
from anyshard.tokenizer.build import tokenizer_from_gguf, tokenizer_from_hf

TEXTS = Path(__file__).with_name("texts")
CORPUS: list[str] = [
    json.loads(line) for line in (TEXTS / "corpus.jsonl").read_text("utf-8").splitlines()
]
SPACE = "\u2581"
CONTROL = ("<unk>", "<s>", "</s>")
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

transformers = pytest.importorskip("transformers")


def without_control(texts: list[str]) -> list[str]:
    """What HF, too, takes for plain text."""
    return [text for text in texts if not any(control in text for control in CONTROL)]


def test_the_corpus_holds_what_it_should() -> None:
    text = "".join(CORPUS)
    wanted = r"[\p{Han}]|[\p{Hangul}]|[\p{Mn}]|\p{Cc}|\p{Emoji_Presentation}|\d{50}|\x00|def |\r\n"
    for pattern in wanted.split("|"):
        assert regex.search(pattern, text), pattern
    assert len(CORPUS) > 40


# --- byte-level pairs --------------------------------------------------------------------------


@cache
def demo_metadata() -> dict[str, Any]:
    material = open_checkpoint(None).tokenizer_material
    assert material is not None and material.metadata is not None
    return dict(material.metadata)


def byte_level(pre: str) -> Tokenizer:
    """SmolLM2's vocabulary under another way to split."""
    metadata = demo_metadata() | {"tokenizer.ggml.pre": pre}
    return tokenizer_from_gguf(metadata, label="m", vocab=49152)


def hf_from_gguf(architecture: str, metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """As transformers builds it from the same metadata; control tokens as text."""
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    names = mapping.GGUF_TOKENIZER_MAPPING["tokenizer"]
    keys = {names[k]: metadata[f"tokenizer.{k}"] for k in names if f"tokenizer.{k}" in metadata}
    backend, _ = mapping.convert_gguf_tokenizer(architecture, keys)
    backend.encode_special_tokens = True
    return backend


def hf_class(name: str) -> Callable[[str], list[int]]:
    """The model's own class in transformers, over SmolLM2's vocabulary."""
    metadata = demo_metadata()
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    made = getattr(transformers, name)(vocab=ids, merges=merges)
    made.backend_tokenizer.encode_special_tokens = True

    def encode(text: str) -> list[int]:
        found: list[int] = made.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return found

    return encode


@needs_demo
@pytest.mark.parametrize(
    ("pre", "name"), [("qwen2", "Qwen2Tokenizer"), ("default", "GPT2Tokenizer")]
)
def test_ids_equal_those_of_the_class_in_transformers(pre: str, name: str) -> None:
    ours, theirs = byte_level(pre), hf_class(name)
    for text in CORPUS:
        assert ours.encode(text, add_special=False) == theirs(text), text


@needs_demo
@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "default", "gpt-2"])
def test_ids_equal_those_that_transformers_takes_from_gguf(pre: str) -> None:
    ours = byte_level(pre)
    metadata = demo_metadata() | {"tokenizer.ggml.pre": pre}
    theirs = hf_from_gguf("llama", metadata)
    for text in CORPUS:
        assert ours.encode(text, add_special=False) == theirs.encode(text).ids, text


@needs_demo
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
def test_ids_equal_those_of_the_plain_encoder(pre: str) -> None:
    split = {"smollm": split_smollm, "llama-bpe": lambda text: list(regex.findall(LLAMA3, text))}
    ours, plain = byte_level(pre), PlainEncoder(demo_metadata(), split[pre])
    for text in CORPUS:
        ids = ours.encode(text, add_special=False)
        assert ids == plain.encode(text), text
        assert ours.decode(ids) == ours.decode(plain.encode(text))


@needs_demo
def test_ways_to_split_differ_where_they_should() -> None:
    kinds = ("smollm", "qwen2", "llama-bpe", "default")
    tokenizers = [byte_level(kind) for kind in kinds]
    found = {
        tuple(i for text in CORPUS for i in tokenizer.encode(text, add_special=False))
        for tokenizer in tokenizers
    }
    assert len(found) == 4


def test_llama_3_takes_a_word_that_is_a_token_whole_and_begins_with_bos() -> None:
    tokens = ("<|begin|>", "a", "b", "c", "ab", "abc")
    keys = {"model": "gpt2", "pre": "llama-bpe", "tokens": tokens, "merges": ("a b",)}
    keys |= {"token_type": (3, 1, 1, 1, 1, 1), "bos_token_id": 0}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    tokenizer = tokenizer_from_gguf(metadata, label="m", vocab=6)
    assert tokenizer.encode("abc", add_special=True) == [0, 5]
    assert tokenizer.add_bos
    assert tokenizer.encode("cab", add_special=False) == [3, 4]
    silent = metadata | {"tokenizer.ggml.add_bos_token": False}
    assert not tokenizer_from_gguf(silent, label="m", vocab=6).add_bos


# --- SentencePiece pairs -----------------------------------------------------------------------


@cache
def pieces() -> dict[str, Any]:
    """Metadata of a vocabulary learnt from tests/texts: control, bytes, pieces by score."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, split=True)
    texts = [path.read_text("utf-8") for path in sorted(TEXTS.glob("*.txt"))]
    trainer = trainers.BpeTrainer(vocab_size=1500, show_progress=False, min_frequency=2)
    backend.train_from_iterator([line for text in texts for line in text.splitlines()], trainer)
    learnt = json.loads(backend.to_str())["model"]
    joined = list(dict.fromkeys("".join(pair) for pair in learnt["merges"]))
    runs = [SPACE * n for n in (2, 4, 8)]
    single = sorted(token for token in learnt["vocab"] if len(token) == 1)
    normal = list(dict.fromkeys([*joined, *runs, *single]))
    tokens = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *normal]
    keys = {
        "model": "llama",
        "tokens": tuple(tokens),
        "scores": (0.0,) * 259 + tuple(-float(rank) for rank in range(len(normal))),
        "token_type": (2, 3, 3) + (6,) * 256 + (1,) * len(normal),
        **{"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return metadata | {"tokenizer.chat_template": TEMPLATE}


def plain_pieces(text: str) -> list[int]:
    """Join the neighbours whose piece scores best, the leftmost of equals; else bytes."""
    metadata = pieces()
    tokens = metadata["tokenizer.ggml.tokens"]
    score = {
        token: (metadata["tokenizer.ggml.scores"][i], i)
        for i, token in enumerate(tokens)
        if metadata["tokenizer.ggml.token_type"][i] == 1
    }
    symbols = list(SPACE + text.replace(" ", SPACE)) if text else []
    while True:
        pairs = [(score["".join(pair)][0], -at) for at, pair in enumerate(pairwise(symbols))
                 if "".join(pair) in score]  # fmt: skip
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    ids: list[int] = []
    for symbol in symbols:
        known = symbol in score
        ids += [score[symbol][1]] if known else [3 + byte for byte in symbol.encode()]
    return ids


@pytest.fixture(scope="module")
def llama() -> Tokenizer:
    return tokenizer_from_gguf(pieces(), label="m", vocab=4096)


def test_sentencepiece_ids_equal_those_of_the_plain_encoder(llama: Tokenizer) -> None:
    for text in CORPUS:
        ids = llama.encode(text, add_special=False)
        assert ids == plain_pieces(text), text
        assert llama.decode(ids) == (f" {text.replace(SPACE, ' ')}" if text else "")
    assert llama.encode("a", add_special=True)[0] == llama.bos_id == 1


def test_sentencepiece_ids_equal_those_that_transformers_takes_from_gguf(llama: Tokenizer) -> None:
    prefixed, spaced = hf_from_gguf("phi3", pieces()), hf_from_gguf("llama", pieces())
    for text in CORPUS:
        ids = llama.encode(text, add_special=False)
        assert ids == prefixed.encode(text, add_special_tokens=False).ids, text
        if not text.startswith((" ", SPACE)):  # there this class of theirs adds no space
            assert ids == spaced.encode(text, add_special_tokens=False).ids, text


def test_a_vocabulary_without_a_space_before_the_text(llama: Tokenizer) -> None:
    plain = tokenizer_from_gguf(
        pieces() | {"tokenizer.ggml.add_space_prefix": False}, label="m", vocab=4096
    )
    assert plain.decode(plain.encode("the x", add_special=False)) == "the x"
    assert llama.decode(llama.encode("the x", add_special=False)) == " the x"


def test_byte_pieces_stream_as_whole_characters(llama: Tokenizer) -> None:
    ids = llama.encode("a🙂e\u0301", add_special=False)
    assert any(3 <= i < 259 for i in ids)
    stream = llama.stream_decoder()
    parts = [stream.push(i) for i in ids]
    assert "".join(parts) + stream.finish() == " a🙂e\u0301"
    assert not any("\ufffd" in part for part in parts)
    cut = llama.stream_decoder()
    emoji = [3 + byte for byte in "🙂".encode()]
    assert [cut.push(i) for i in emoji[:2]] == ["", ""]
    assert cut.finish() == "\ufffd"


def is_text(content: bytes) -> bool:
    """Not cut in the middle of a character."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("architecture", ["phi3", "llama"])
def test_an_answer_streams_as_what_hf_adds_to_the_text_of_the_prompt(
    architecture: str, llama: Tokenizer
) -> None:
    """Its first space too, which HF's decoder would strip were the answer decoded alone."""
    backend = hf_from_gguf(architecture, pieces())
    backend.encode_special_tokens = False
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    spaced = alone = 0
    for text in CORPUS:
        ids = llama.encode(text, add_special=True)
        whole = hf.decode(ids, skip_special_tokens=True)
        for cut in range(2, len(ids)):  # of the bos alone nothing is left to add to
            if not is_text(b"".join(map(llama.token_bytes, ids[:cut]))):
                continue
            prompt = hf.decode(ids[:cut], skip_special_tokens=True)
            assert whole.startswith(prompt)
            stream = llama.stream_decoder()
            answer = "".join(map(stream.push, ids[cut:])) + stream.finish()
            assert answer == whole.removeprefix(prompt), (text, cut)
            spaced += answer.startswith(" ")
            alone += hf.decode(ids[cut:], skip_special_tokens=True) != answer
    assert spaced > 100 and alone > 100  # the case occurs, and HF alone would lose the space


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Hi there,\nthe sea!  "},
]


def hf_folder(folder: Path, backend: tokenizers.Tokenizer) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("architecture", ["phi3", "llama"])
def test_a_tokenizer_json_of_sentencepiece_has_the_ids_of_hf(
    architecture: str, tmp_path: Path
) -> None:
    """Both forms that are about: a space before every piece, or before the text alone."""
    backend = hf_from_gguf(architecture, pieces())
    backend.encode_special_tokens = False
    ours = tokenizer_from_hf(hf_folder(tmp_path, backend), vocab=4096)
    for text in without_control(CORPUS):
        wanted = backend.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False) == wanted, text
    hf = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    hf.chat_template = TEMPLATE
    rendered = hf.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    wanted = backend.encode(rendered, add_special_tokens=False).ids
    assert wanted.count(2) == 2
    assert ours.encode_chat(CHAT) == wanted
    assert ours._encode_scaffold(rendered, {}) == wanted


def test_content_cannot_forge_a_control_token_of_sentencepiece(llama: Tokenizer) -> None:
    for content in ("</s>", "x</s><s>y", "<", "</s", "<0x0A>", "<unk>"):
        ids = llama.encode_chat([{"role": "user", "content": content}])
        assert [i for i in ids if i < 3] == [2]
        assert f"\n{content}" in llama.decode(ids)
    assert min(llama.encode("<s> </s> <0x0A>", add_special=False)) >= 3


def test_a_decoder_that_replaces_something_else_is_refused(tmp_path: Path) -> None:
    from tokenizers import decoders

    from anyshard.errors import CheckpointError

    backend = hf_from_gguf("llama", pieces())
    steps = [decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    with pytest.raises(CheckpointError, match="the decoder is Sequence; ByteLevel and"):
        tokenizer_from_hf(hf_folder(tmp_path, backend), vocab=4096)
