"""The environment variables that stand for flags: a misspelt or empty one is refused, not skipped.

The names come from the flags of the verbs. Knows nothing of what a value means. A flag whose
parameter says `show_env_var=False` has no variable: the one of its name is another verb's, where it
means another thing.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from cyclopts.argument import ArgumentCollection
from cyclopts.config import Env

from anyshard.errors import OptionError

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import Argument

__all__ = ["OTHER_NAMES", "PREFIX", "FlagVariables", "check_variables", "flag_variables"]

PREFIX: Final = "ANYSHARD_"
#: Read by the build and its scripts, and no flag of a verb.
OTHER_NAMES: Final = frozenset({"ANYSHARD_NATIVE_REQUIRED", "ANYSHARD_SANITIZED"})


class FlagVariables(Env):
    """A configuration step of cyclopts: reads the variables of the flags that have one.

    Held by: test_verify.py::test_variables_of_generate_are_no_lists.
    """

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """See Env."""
        mine = ArgumentCollection(_with_variable(arguments))  # type: ignore[no-untyped-call]
        super().__call__(app, commands, mine)


def _with_variable(arguments: ArgumentCollection) -> Iterator[Argument]:
    return (each for each in arguments if each.parameter.show_env_var is not False)


def check_variables(
    root: App, app: App, commands: tuple[str, ...], arguments: ArgumentCollection
) -> None:
    """A configuration step of cyclopts, with `root` bound; before the one that reads variables.

    A variable that is a flag of another verb of `root` than this one is left alone.

    Raises: OptionError naming the variable, and the nearest name that exists.
    Held by: test_refusals.py, test_cli.py.
    """
    given = sorted(n for n in os.environ if n.startswith(PREFIX) and n not in OTHER_NAMES)
    here = set(_names(arguments))
    for name in given:
        if name not in here:
            _check_elsewhere(name, root)
        if not os.environ[name]:
            raise OptionError(f"the variable {name} is empty; give it a value, or unset it")


def flag_variables(root: App) -> set[str]:
    """The variables of all flags of all verbs."""
    verbs = [name for name in root if not name.startswith("-")]  # --help, --version
    return {n for verb in verbs for n in _names(root[verb].assemble_argument_collection())}


def _check_elsewhere(name: str, root: App) -> None:
    """Raises: OptionError if no verb has a flag of that name."""
    every = flag_variables(root)
    if name in every:
        return
    nearest = difflib.get_close_matches(name, sorted(every), n=1, cutoff=0.0)
    raise OptionError(
        f"the variable {name} is no flag; the nearest that exists is {nearest[0]}: correct it, or "
        "unset it"
    )


def _names(arguments: ArgumentCollection) -> Iterator[str]:
    """`ANYSHARD_MAX_TOKENS` and `ANYSHARD_N` of --max-tokens, -n.

    Not `ANYSHARD_NO_CACHE` of --no-cache: of true and false, cyclopts would make the opposite.
    """
    for argument in _with_variable(arguments):
        for name in set(argument.names) - set(argument.negatives):
            if not name.startswith("*"):  # a record of flags, not a flag
                yield PREFIX + name.lstrip("-").upper().replace("-", "_").replace(".", "_")
