"""`anyshard chat`: a conversation that keeps what the ranks have stored of earlier turns.

Every turn is a whole request; the engine runs only the tokens that its session has not stored.
Answers go to stdout, everything else to stderr. Knows nothing of ranks or pages.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from anyshard.cli.conversation import Conversation, load_conversation, save_conversation
from anyshard.cli.drafting import speculation_json
from anyshard.cli.flags import HostFlags, SamplingFlags, SpeculationFlags, SplitFlags, Text
from anyshard.cli.hosts import from_torchrun
from anyshard.cli.member import run_member
from anyshard.cli.running import (
    Loading,
    open_model,
    rank_group,
    start_engine,
    wait_loaded,
)
from anyshard.cli.screen import Bar, Lines, tell
from anyshard.comm.link import emulated_text
from anyshard.errors import OptionError, PeerLost, UserError

if TYPE_CHECKING:
    from anyshard.answer import Answer
    from anyshard.engine import Engine, Timings
    from anyshard.request import Request
    from anyshard.tokenizer import Tokenizer

__all__ = ["chat"]

DEFAULT_MAX_TOKENS: Final = 1024
DEFAULT_LIMIT: Final = 4096
SESSION: Final = 0

HELP: Final = """\
/reset         forget what was said; the system text stays
/system TEXT   set the system text, from the next question on; without TEXT, remove it
/save FILE     write the conversation to FILE
/load FILE     go on with the conversation in FILE
/exit          leave, as Ctrl-D does; Ctrl-C at the prompt, twice, with exit code 130
Ctrl-C stops an answer. A question that begins with / is typed with a space before it."""


def chat(
    model: str | None = None,
    /,
    *,
    system: Annotated[str | None, Text] = None,
    sampling: SamplingFlags = SamplingFlags(),
    split: SplitFlags = SplitFlags(),
    hosts: HostFlags = HostFlags(),
    speculation: SpeculationFlags = SpeculationFlags(),
    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Talk with a model, on any split of it; /help lists what can be typed besides questions.

    Parameters
    ----------
    model
        A .gguf file, a Hugging Face directory, or a Hub id (ORG/NAME, ORG/NAME:FILE.gguf);
        without it the demo model, SmolLM2-135M.
    system
        System text, the first message of the conversation.
    json_output
        Print one JSON object for each answer, with tokens, digest and prefill counts.
    """
    hosts = from_torchrun(hosts)
    if hosts.node_rank:
        return run_member(model, split, hosts)
    return _Chat(model, system, sampling, split, hosts, speculation, as_json=json_output).run()


class _Interrupts:
    """Ctrl-C: during an answer a wish to stop it, otherwise KeyboardInterrupt."""

    def __init__(self) -> None:
        self._answering = False
        self.pressed = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """For the time of an answer."""
        self.pressed, self._answering = False, True
        try:
            yield
        finally:
            self._answering = False

    def __call__(self, signum: int, frame: object) -> None:
        if not self._answering:
            raise KeyboardInterrupt
        self.pressed = True


class _Chat:
    """One conversation from the first line to the last."""

    engine: Engine
    tokenizer: Tokenizer

    def __init__(
        self,
        model: str | None,
        system: str | None,
        sampling: SamplingFlags,
        split: SplitFlags,
        hosts: HostFlags,
        speculation: SpeculationFlags,
        *,
        as_json: bool,
    ) -> None:
        self.hosts, self.speculation = hosts, speculation
        self.model, self.flags, self.split, self.as_json = model, sampling, split, as_json
        self.sampling = sampling.sampling()
        self.said = Conversation(system=system)
        self.file: str | None = None  # of the last /save or /load
        self.refused = False
        self.interrupts = _Interrupts()

    def run(self) -> int:
        """Talk until the input ends.

        Returns the exit code: 2 if a line from a pipe was refused. Raises: UserError, PeerLost.
        """
        opened = open_model(
            self.model,
            self.split,
            num_prompts=1,
            default_len=DEFAULT_LIMIT,
            hosts=self.hosts,
            speculation=self.speculation,
        )
        with rank_group(opened) as loading:
            self._start(loading)
            signal.signal(signal.SIGINT, self.interrupts)
            try:
                return self._talk()
            except PeerLost as error:
                error.add_note(self._rescue())
                raise

    def _start(self, loading: Loading) -> None:
        from anyshard.tokenizer import open_tokenizer

        opened = loading.opened
        self.context = opened.config.context
        self.limit = opened.limit
        self.tokenizer = open_tokenizer(opened.checkpoint)
        self._encode(self.said, "a question")  # a template that takes none is known before the wait
        wait_loaded(loading, limit=self.limit, tokenizer=self.tokenizer)
        self.engine = start_engine(loading, limit=self.limit)

    def _talk(self) -> int:
        lines = Lines("> ")
        if lines.is_terminal:
            links = emulated_text(self.engine.options.links)
            room = f"room for {self.limit} tokens"
            _note(f"{links}{self.engine.layout.describe()} · {room} · /help")
        leaving = False
        while True:
            try:
                line = lines.read()
                if line is None or line.strip() == "/exit":
                    break
                self._take(line)
                leaving = False
            except KeyboardInterrupt:
                if leaving or not lines.is_terminal:
                    raise
                leaving = True
                _note("\nCtrl-C again, or Ctrl-D, leaves")
            except UserError as error:
                self.refused = True
                _note(f"anyshard: {error}")
        self.engine.close()
        return UserError.exit_code if self.refused and not lines.is_terminal else 0

    def _take(self, line: str) -> None:
        """A line as it was typed: a command, a question, or nothing."""
        if line.startswith("/"):
            self._command(*line.strip().partition(" ")[::2])
        elif line.strip():
            self._ask(line.strip())

    def _command(self, name: str, argument: str) -> None:
        argument = argument.strip()
        if name in ("/save", "/load") and not argument:
            raise OptionError(f"{name} needs the name of a file")
        if name in ("/reset", "/help", "/exit") and argument:
            raise OptionError(f"{name} takes nothing behind it")
        match name:
            case "/reset":
                self.said = Conversation(system=self.said.system)
                _note("the conversation begins anew")
            case "/system":
                self._replace(replace(self.said, system=argument or None))
                _note("the system text is " + ("set" if argument else "removed"))
            case "/save":
                save_conversation(self.said, argument)
                self.file = argument
                _note(f"{argument}: {len(self.said.turns)} turns saved")
            case "/load":
                self._replace(load_conversation(argument))
                self.file = argument
                _note(f"{argument}: {len(self.said.turns)} turns loaded")
            case "/help":
                _note(HELP)
            case _:
                raise OptionError(f"there is no {name:.40}; /help lists what there is")

    def _replace(self, conversation: Conversation) -> None:
        """Go on with another history. Raises: UserError if it does not fit, and changes nothing."""
        self._encode(conversation, "a question")
        self.said = conversation

    def _encode(self, conversation: Conversation, question: str) -> tuple[int, ...]:
        """Token ids of the conversation and a new question; there is room for an answer."""
        prompt = tuple(self.tokenizer.encode_chat(conversation.asking(question)))
        if len(prompt) >= self.limit:
            memory = "a larger --kv-memory and " if self.split.kv_memory else ""
            more = (
                f"{memory}a --max-model-len of up to {self.context} would hold more"
                if self.limit < self.context
                else "that is the model's context"
            )
            raise UserError(
                f"the conversation would have {len(prompt)} tokens before the answer, and there "
                f"is room for {self.limit} ({more}); /save FILE keeps it as it is, /reset begins "
                "anew"
            )
        return prompt

    def _ask(self, question: str) -> None:
        from anyshard.answer import Answer
        from anyshard.request import Request

        prompt = self._encode(self.said, question)
        wanted = self.flags.max_tokens or DEFAULT_MAX_TOKENS
        request = Request(
            prompt=prompt,
            max_tokens=min(wanted, self.limit - len(prompt)),
            sampling=self.sampling,
            stop_ids=frozenset() if self.flags.ignore_eos else self.tokenizer.eos_ids,
            want_logits=self.as_json,
            session=SESSION,
        )
        answer = Answer(
            self.tokenizer.stream_decoder(),
            stop=self.flags.stop or (),
            stop_ids=request.stop_ids,
        )
        before, start = replace(self.engine.timings), time.monotonic()
        with self.interrupts.held():
            reason, first_token_s = self._stream(request, answer)
        spent = _since(before, self.engine.timings)
        if reason == "interrupted" and not answer.text:
            reason = "dropped"
        if reason not in ("fault", "dropped"):
            self.said = self.said.answered(question, answer.text)
        if self.as_json:
            turn = _turn_json(request, answer, reason, spent)
            tell(json.dumps(turn | speculation_json(self.engine)))
        self._figures(request, spent, first_token_s - start if answer.tokens else None)
        remark = self._remark(reason, request, wanted)
        if remark:
            _note(remark)

    def _stream(self, request: Request, answer: Answer) -> tuple[str, float]:
        """Show an answer as it comes; returns why it ended and when its first token came."""
        engine, reason, self.fault = self.engine, "interrupted", ""
        first_token_s = time.monotonic()
        request_id = engine.submit(request)

        def read(done: int, total: int) -> None:
            bar.update(done, total)
            if self.interrupts.pressed:
                engine.cancel(request_id)

        with Bar("reading") as bar:
            for event in engine.run(read):
                if not answer.tokens:
                    first_token_s = time.monotonic()
                shown = "" if event.token is None else answer.push(event.token, event.logits)
                reason, self.fault = event.finish or reason, event.fault or ""
                if answer.stopped:
                    reason = "stop"
                if answer.stopped or self.interrupts.pressed:
                    engine.cancel(request_id)
                self._show(shown)
        self._show(answer.finish())
        if not self.as_json:
            tell("")
        return reason, first_token_s

    def _show(self, text: str) -> None:
        if not self.as_json:
            tell(text, end="")

    def _figures(self, request: Request, spent: Timings, first_token_s: float | None) -> None:
        parts = [
            f"prefill {spent.prefill_tokens} new tok of {len(request.prompt)} "
            f"{_rate(spent.prefill_tokens, spent.prefill_s):.1f} tok/s"
        ]
        if spent.decode_tokens:
            rate = _rate(spent.decode_tokens, spent.decode_s)
            parts.append(f"decode {spent.decode_tokens} tok {rate:.1f} tok/s")
        if first_token_s is not None:
            parts.append(f"first token {first_token_s:.2f} s")
        _note(" · ".join(parts))
        if self.engine.speculator is not None:
            _note(f"{self.engine.speculator.figures.text()}, so far")

    def _remark(self, reason: str, request: Request, wanted: int) -> str:
        """What a person should know about how an answer ended."""
        match reason:
            case "fault":
                return (
                    f"anyshard: a value left the range of float32 in {self.fault}; the question "
                    "is dropped"
                )
            case "dropped":
                return "stopped before a word; the question is dropped"
            case "interrupted":
                return "stopped; what there is of the answer stays in the conversation"
            case "length" if request.max_tokens < wanted:
                return f"the conversation is full, {self.limit} tokens; /reset begins anew"
            case "length":
                return f"cut after {wanted} tokens; --max-tokens allows more"
            case _:
                return ""

    def _rescue(self) -> str:
        """After a loss, write the conversation where the user has named a place for it."""
        if self.file is None:
            return "the conversation ends here; one that is saved or loaded is written to its file"
        try:
            save_conversation(self.said, self.file)
        except OptionError as error:
            return str(error)
        return f"the conversation, {len(self.said.turns)} turns, is in {self.file}"


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _rate(count: int, seconds: float) -> float:
    return count / max(seconds, 1e-9)


def _since(before: Timings, now: Timings) -> Timings:
    return replace(
        now,
        prefill_s=now.prefill_s - before.prefill_s,
        prefill_tokens=now.prefill_tokens - before.prefill_tokens,
        decode_s=now.decode_s - before.decode_s,
        decode_tokens=now.decode_tokens - before.decode_tokens,
    )


def _turn_json(request: Request, answer: Answer, reason: str, spent: Timings) -> dict[str, object]:
    """prefill_tokens: those of the prompt that ran; the rest were stored."""
    return {
        "text": answer.text,
        "prompt_tokens": len(request.prompt),
        "prefill_tokens": spent.prefill_tokens,
        "tokens": answer.tokens,
        "finish_reason": reason,
        "logits_sha256": answer.logits_sha256,
        "timings": {
            "prefill_tokens_per_s": round(_rate(spent.prefill_tokens, spent.prefill_s), 2),
            "decode_tokens_per_s": round(_rate(spent.decode_tokens, spent.decode_s), 2),
        },
    }
