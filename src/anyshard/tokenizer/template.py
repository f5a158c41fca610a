"""Chat templates: the model's own Jinja text, rendered in a sandbox.

A template comes with the model file, so it is a stranger's program. The sandbox keeps it from
attributes and changes; a deadline ends its loops; products of text are bounded. It knows
nothing of tokens.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import FrameType
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from anyshard.errors import CheckpointError, UserError

__all__ = ["ChatTemplate"]

_MAX_SOURCE: Final = 1 << 20  # characters; the longest known templates have some 20,000
_MAX_PRODUCT: Final = 1 << 20  # characters or items that `*` may make, and bits of `**`
_DEADLINE_S: Final = 2.0  # a thousand messages take some 10 ms


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with the two operators that make much out of little bounded."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**":
            bits = left.bit_length() if isinstance(left, int) else 64
            if not numbers or bits * abs(right) > _MAX_PRODUCT:
                raise TemplateError("the template raises to too high a power")
        elif not numbers:
            things, times = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(times, int) and len(things) * times > _MAX_PRODUCT:
                raise TemplateError("the template repeats a text too often")
        return super().call_binop(context, operator, left, right)


class _GenerationMark(Extension):
    """`{% generation %}` marks what a model learns from in training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One template; `label` names its file in messages."""

    def __init__(
        self, source: str, *, label: str, clock: Callable[[], datetime] = datetime.now
    ) -> None:
        self.source = source
        self._label = label
        self._clock = clock

    @cached_property
    def _compiled(self) -> Template:
        """Compiled at first use, so that a bad template spoils chats only."""
        if len(self.source) > _MAX_SOURCE:
            raise CheckpointError(f"{self._label}: the chat template exceeds {_MAX_SOURCE} bytes")
        sandbox = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationMark],
        )
        sandbox.filters["tojson"] = _to_json
        sandbox.globals["raise_exception"] = _raise
        sandbox.globals["strftime_now"] = lambda layout: self._clock().strftime(layout)
        try:
            return sandbox.from_string(self.source)
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"{self._label}: line {error.lineno} of the chat template: {error.message}"
            ) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        special_tokens: Mapping[str, str],
    ) -> str:
        """The prompt as text; `special_tokens` are bos_token, eos_token and their like.

        Raises: UserError when the template is none, refuses the messages, fails or takes too
        long.
        """
        template = self._compiled
        deadline = _Deadline(_DEADLINE_S)
        before = sys.gettrace()
        try:
            sys.settrace(deadline)
            return template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **special_tokens,
            )
        except _TooSlow:
            raise UserError(
                f"{self._label}: the chat template ran longer than {_DEADLINE_S} s"
            ) from None
        except Exception as error:  # noqa: BLE001 a stranger's program may raise anything
            raise UserError(
                f"{self._label}: the chat template cannot render these messages: {error}"
            ) from None
        finally:
            sys.settrace(before)


class _TooSlow(BaseException):
    """Not an Exception, so that nothing on the way takes it for a template's own failure."""


class _Deadline:
    """A trace function: called at every line of the rendering thread, raises when time is up."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def __call__(self, frame: FrameType, event: str, argument: Any) -> _Deadline:
        if time.monotonic() > self._end:
            raise _TooSlow
        return self


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes <, > and & for HTML; a model was trained on plain JSON.
    return json.dumps(value, ensure_ascii=False, indent=indent)
