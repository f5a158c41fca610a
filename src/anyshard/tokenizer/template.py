"""Chat templates: the model's own Jinja text, rendered in a sandbox in a process of its own.

A template comes with the model file, so it is a stranger's program. The sandbox keeps it from
attributes and changes. Filters and formats can still make much out of little, already while
it is compiled and in single calls that no Python code can interrupt; so a forked child does
both, under limits of the kernel, and only a bounded text comes back. It knows nothing of
tokens.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache, cached_property
from itertools import starmap
from typing import Any, Final, NoReturn

import jinja2.debug  # noqa: F401 Jinja would import it at the first error, in the child
from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.lexer import get_lexer
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from anyshard.errors import CheckpointError, UserError

__all__ = ["ChatTemplate"]

_MAX_SOURCE: Final = 1 << 20  # characters; the longest known templates have some 20,000
_MAX_TEXT: Final = 4 << 20  # bytes of UTF-8; more than any context holds
_MAX_ERROR: Final = 200  # characters of a template's own words in a message
_MEMORY_MIB: Final = 512
_CPU_S: Final = 2  # a thousand messages take some 10 ms
_DEADLINE_S: Final = 3.0  # of the clock on the wall, for a child that does not even compute

# What the child answers: one of these, 8 bytes of length, and as many bytes of UTF-8.
_TEXT, _SYNTAX, _ERROR, _MEMORY, _LONG = b"TSEML"
_HEAD: Final = 9


class _Sandbox(ImmutableSandboxedEnvironment):
    # Jinja looks it up under a lock each time; a forked child must not wait for one.
    lexer = cached_property(get_lexer)


class _GenerationMark(Extension):
    """`{% generation %}` marks what a model learns from in training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def _sandbox() -> _Sandbox:
    sandbox = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[LoopControlExtension, _GenerationMark],
        optimized=False,
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _raise
    assert sandbox.lexer is not None  # made here, so that no child has to
    return sandbox


class ChatTemplate:
    """One template; `label` names its file in messages."""

    def __init__(
        self, source: str, *, label: str, clock: Callable[[], datetime] = datetime.now
    ) -> None:
        self.source = source
        self._label = label
        self._clock = clock

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        special_tokens: Mapping[str, str],
    ) -> str:
        """The prompt as text; `special_tokens` are bos_token, eos_token and their like.

        Raises: UserError when the template is none, refuses the messages, fails, or takes too
        much time, memory or text.
        Held by: test_tokenizer.py::test_hostile_templates_are_refused_in_bounds.
        """
        if len(self.source) > _MAX_SOURCE:
            raise CheckpointError(
                f"{self._label}: the chat template exceeds {_MAX_SOURCE} characters"
            )
        sandbox = _sandbox()
        variables = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            "strftime_now": lambda layout: self._clock().strftime(layout),
            **special_tokens,
        }
        answer, status = _ask_child(lambda: _attempt(sandbox, self.source, variables))
        whole = len(answer) >= _HEAD and len(answer) == _HEAD + int.from_bytes(answer[1:_HEAD])
        kind = answer[0] if whole else None
        text = answer[_HEAD:].decode("utf-8", "surrogatepass") if whole else ""
        if kind == _TEXT:
            return text
        if kind == _SYNTAX:
            raise CheckpointError(f"{self._label}: {text}")
        if kind == _ERROR:
            why = f"cannot render these messages: {text}"
        elif kind == _MEMORY:
            why = f"takes more than {_MEMORY_MIB} MiB of memory"
        elif kind == _LONG:
            why = f"makes more than {_MAX_TEXT} bytes of text"
        elif status in (None, -signal.SIGXCPU):
            why = f"ran longer than {_CPU_S:.1f} s"
        else:
            why = f"ended its process with status {status}"
        raise UserError(f"{self._label}: the chat template {why}")


def _attempt(sandbox: _Sandbox, source: str, variables: Mapping[str, Any]) -> bytes:
    """The answer, in the child."""
    try:
        raw = sandbox.from_string(source).render(variables).encode("utf-8", "surrogatepass")
        return _answer(_TEXT, raw) if len(raw) <= _MAX_TEXT else _answer(_LONG)
    except MemoryError:
        return _answer(_MEMORY)
    except TemplateSyntaxError as error:
        where = f"line {error.lineno} of the chat template: "
        return _answer(_SYNTAX, (where + _one_line(error, error.message)).encode())
    except Exception as error:  # noqa: BLE001 a stranger's program may raise anything
        return _answer(_ERROR, _one_line(error, str(error)).encode())


def _answer(kind: int, raw: bytes = b"") -> bytes:
    return bytes([kind]) + len(raw).to_bytes(8) + raw


def _one_line(error: Exception, text: str | None) -> str:
    """What an error says, printable and short; its type where it says nothing."""
    start = (text or "")[: _MAX_ERROR + 1].strip()
    if not start:
        return type(error).__name__
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in start)
    return line if len(line) <= _MAX_ERROR else line[: _MAX_ERROR - 1] + "…"


def _ask_child(work: Callable[[], bytes]) -> tuple[bytes, int | None]:
    """What `work` gives in a forked child, perhaps cut short, and how the child ended.

    That is its exit code, a negative signal number, or None where its time was up. The child
    is gone when this returns or raises, also for a KeyboardInterrupt.
    """
    deadline = time.monotonic() + _DEADLINE_S
    reading, writing = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    pids: list[int] = []
    answer = b""
    status: int | None = None
    try:
        # Without signals, so that the child is in its own code before one can come.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with warnings.catch_warnings():  # of threads; the child waits for none of their locks
            warnings.simplefilter("ignore", DeprecationWarning)
            pids.extend(starmap(os.fork, [()]))  # no bytecode, no interrupt, before it is noted
        if pids == [0]:
            _child(work, writing, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(writing)
        writing = -1
        answer, in_time = _read(reading, deadline)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reading)
        if writing >= 0:
            os.close(writing)
        for pid in pids:
            status = _end(pid)
    return answer, status if in_time else None


def _read(reading: int, deadline: float) -> tuple[bytes, bool]:
    """All that comes until the end, and whether that came in time."""
    answer = bytearray()
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(reading, 1 << 16)
        answer += part
        if not part or len(answer) > _HEAD + _MAX_TEXT:
            return bytes(answer), True
    return bytes(answer), False


def _end(pid: int) -> int:
    """Kill the child, unless it has ended, and collect it. Returns its exit code."""
    try:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    finally:
        try:
            status = os.waitpid(pid, 0)[1]
        except ChildProcessError:  # whoever started the front ignores SIGCHLD: the kernel did it
            status = 0
    return os.waitstatus_to_exitcode(status)


def _child(work: Callable[[], bytes], writing: int, mask: set[Any]) -> NoReturn:
    try:
        sys.settrace(None)
        gc.freeze()  # no finalizer of the front's objects may run here
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):  # the front's own
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front has it too, and ends this
        signal.pthread_sigmask(signal.SIG_SETMASK, mask - {signal.SIGXCPU})
        # Nobody shall wait for the end of the front's pipes because of this process.
        for name in os.listdir("/proc/self/fd"):
            if int(name) != writing:
                with suppress(OSError):  # the listing's own
                    os.close(int(name))
        _limit(resource.RLIMIT_CORE, 1)  # no file so small, and 1 keeps it from a crash reporter
        _limit(resource.RLIMIT_CPU, _CPU_S)
        _limit(resource.RLIMIT_AS, _address_space() + (_MEMORY_MIB << 20))
        rest = memoryview(work())
        while rest:
            rest = rest[os.write(writing, rest) :]
        os._exit(0)
    finally:
        os._exit(1)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (soft, hard))


def _address_space() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes <, > and & for HTML; a model was trained on plain JSON.
    return json.dumps(value, ensure_ascii=False, indent=indent)
