"""Long-context truth: a sentence hidden in a long text is found, alike in every layout.

SmolLM2 holds 8,192 tokens. Each case runs the command as a user does, and asks for the hidden
number; layouts must agree in every bit, and the answer must be right.
"""

from __future__ import annotations

import contextlib
import io
import json
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from anyshard.cli import main
from anyshard.layout import even_spans
from anyshard.stripes import STRIPES, blocks_of

TEXT = Path(__file__).parent / "texts" / "english.txt"
NEEDLE = "The secret number of the lighthouse is 4821. "
QUESTION = "What is the secret number of the lighthouse?"
#: characters of the text around the needle, by the tokens that the prompt comes to
LENGTHS = {416: 1_500, 1_932: 8_000, 8_029: 34_000}
SPLITS: tuple[tuple[str, ...], ...] = (
    ("-tp", "2"),
    ("-tp", "2", "--kv-shard", "sequence"),
    ("-tp", "3", "-pp", "2", "--kv-shard", "sequence", "--chunk", "100"),
    ("-tp", "5", "--kv-shard", "heads"),
    ("-tp", "8", "--kv-shard", "sequence"),
)


def hidden(characters: int, place: float) -> str:
    """A prompt with the needle behind that share of the text."""
    text = TEXT.read_text("utf-8")
    body = (text * (characters // len(text) + 1))[:characters]
    cut = body.rfind(". ", 0, int(characters * place)) + 2
    return (
        f"Read the text and answer the question.\n\n{body[:cut]}{NEEDLE}{body[cut:]}\n\n{QUESTION}"
    )


@cache
def unsplit(tokens: int, place: float, kv: str) -> dict[str, Any]:
    return answer(tokens, place, kv)


def answer(tokens: int, place: float, kv: str, *split: str) -> dict[str, Any]:
    said = io.StringIO()
    prompt = hidden(LENGTHS[tokens], place)
    run = ["generate", "--chat", "--prompt", prompt, "-n", "16", "--json", "--comm", "threads"]
    profile = ["--quantization", "int8", "--kv-cache-dtype", kv]
    with contextlib.redirect_stdout(said):
        assert main([*run, *profile, *split]) == 0
    found: dict[str, Any] = json.loads(said.getvalue())
    assert found["prompt_tokens"] == tokens
    return found


def slow(tokens: int) -> Any:
    marks = [pytest.mark.slow, pytest.mark.timeout(1800)] if tokens > 500 else []
    return pytest.param(tokens, marks=marks)


@pytest.mark.parametrize("kv", ["f32", "int8"])
@pytest.mark.parametrize("tokens", [slow(tokens) for tokens in LENGTHS])
def test_what_is_hidden_is_found(tokens: int, kv: str) -> None:
    for place in (0.3, 0.8):
        assert unsplit(tokens, place, kv)["text"] == NEEDLE.strip()


@pytest.mark.parametrize("split", SPLITS, ids=" ".join)
@pytest.mark.parametrize("kv", ["f32", "int8"])
@pytest.mark.parametrize("tokens", [slow(tokens) for tokens in LENGTHS])
def test_every_layout_finds_it_alike(tokens: int, kv: str, split: tuple[str, ...]) -> None:
    found, whole = answer(tokens, 0.3, kv, *split), unsplit(tokens, 0.3, kv)
    assert found["text"] == NEEDLE.strip()
    assert found["logits_sha256"] == whole["logits_sha256"]
    shape = found["layout"]
    assert shape["kv_shard"] == ("sequence" if "sequence" in split else "heads")
    if "sequence" in split:  # a rank keeps its stripes' blocks of its stage's layers, no more
        blocks, (all_layers,) = -(-(tokens + 16) // 32), whole["layout"]["layers"]
        for rank, held in enumerate(found["kv_bytes"]):
            stage, index = divmod(rank, shape["tp"])
            kept = blocks_of(even_spans(STRIPES, shape["tp"])[index], blocks)
            share = Fraction(kept * shape["layers"][stage], blocks * all_layers)
            assert held == whole["kv_bytes"][0] * share, rank
