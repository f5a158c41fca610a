"""The exception tree. Every refusal carries its numbers and the nearest thing that works.

AnyshardError
├── UserError                 exit code 2: what was asked, what is possible, what to do
│   ├── CheckpointError       a file that is missing, cut short, or not what it claims to be
│   ├── LayoutError           a split that the model or the machine cannot take
│   ├── PromptTooLong         prompt + answer over the context length
│   ├── OptionError           a flag out of range
│   └── TraceError            a file of events that is none
├── PlanRefused               exit code 3
├── DifferenceFound           exit code 4
└── PeerLost                  exit code 5: a rank died or stopped and was not recovered

Knows nothing of exit codes' callers: only `cli.py` turns an exception into an exit.
"""

from __future__ import annotations

__all__ = [
    "AnyshardError",
    "CheckpointError",
    "DifferenceFound",
    "LayoutError",
    "OptionError",
    "PeerLost",
    "PlanRefused",
    "PromptTooLong",
    "TraceError",
    "UserError",
]


class AnyshardError(Exception):
    """Base of everything the package raises on purpose."""

    exit_code = 1


class UserError(AnyshardError):
    """The request cannot be served as asked; the message says what can."""

    exit_code = 2


class CheckpointError(UserError):
    """A model file is missing, truncated, malformed or of an unknown kind."""


class LayoutError(UserError):
    """A width, depth or cut that does not fit the model."""


class OptionError(UserError):
    """A flag or sampling parameter out of its range."""


class TraceError(UserError):
    """A file of what ranks did when that cannot be read, or is none."""


class PromptTooLong(UserError):
    """Prompt plus requested tokens exceed the context length, all in tokens.

    remedy: what to do, by the names of the caller's flags. holder: what the limit is of.
    """

    def __init__(
        self,
        *,
        prompt_tokens: int,
        max_tokens: int,
        limit: int,
        remedy: str = "shorten the prompt or lower --max-tokens",
        holder: str = "the context holds",
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and {max_tokens} more were asked for, "
            f"but {holder} {limit}; {remedy}"
        )


class PlanRefused(AnyshardError):
    """The planner refuses a layout that loses, with the numbers."""

    exit_code = 3


class DifferenceFound(AnyshardError):
    """Two runs that should have the same bits do not."""

    exit_code = 4


class PeerLost(AnyshardError):
    """A rank died or missed its deadline; `rank` is None when the launcher itself went."""

    exit_code = 5

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(message)
