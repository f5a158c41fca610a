"""What a command reads is not what it writes: files of a model and of prompts are spared.

Nor does it write one file twice: where stdout and stderr go, no record or report goes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from anyshard.errors import OptionError

__all__ = ["spare_files", "spare_model", "spare_streams"]

STREAMS: Final = ("stdout", "stderr")  # descriptors 1 and 2
_PART_OF: Final = re.compile(r"(.*-)\d{5}(-of-\d{5}\.gguf)", re.DOTALL)


def spare_model(option: str, targets: Iterable[Path], model: Path) -> None:
    """Raises: OptionError if what `option` names would take the place of a file of the model.

    Held by: test_compare.py, test_verify_report.py.
    """
    try:
        spare_files(option, targets, _model_files(model), "a file of the model")
    except OSError as error:
        raise OptionError(f"{model}: cannot be read ({error.strerror})") from None


def spare_files(option: str, targets: Iterable[Path], files: Iterable[Path], what: str) -> None:
    """Raises: OptionError if a target is one of the files, by whatever name or link."""
    there = [(path, found) for path in targets if (found := _identity(path)) is not None]
    read = {_identity(file) for file in files} if there else set()
    for path, identity in there:
        if identity in read:
            raise OptionError(f"{option} {path} is {what}, which would be lost; name another")


def spare_streams(option: str, targets: Iterable[Path]) -> None:
    """Raises: OptionError if a target is the file that stdout or stderr goes to.

    One of the two would be lost: a file is replaced as a whole. Held by: test_cli.py.
    """
    streams = {_place_of(os.fstat(number)): name for number, name in enumerate(STREAMS, start=1)}
    for path in targets:
        identity = _identity(path)
        if identity in streams:
            raise OptionError(f"{option} {path} is where {streams[identity]} goes; name another")


def _model_files(model: Path) -> Iterable[Path]:
    """What may be read of a model: its file, all parts of one, or all of its folder but records,
    which may have been made there before."""
    if model.is_dir():
        return (file for file in model.iterdir() if file.is_file() and not _is_record(file))
    part = _PART_OF.fullmatch(model.name)
    if part is None:
        return (model,)
    begin, end = part.groups()
    return (
        file
        for file in model.parent.iterdir()
        if file.name.startswith(begin) and file.name.endswith(end)
    )


def _is_record(file: Path) -> bool:
    from anyshard.fidelity.record import MAGIC

    with file.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC


def _identity(file: Path) -> tuple[int, int] | None:
    """What all names and links of a file have in common, None if there is none."""
    try:
        return _place_of(file.stat())
    except OSError:
        return None


def _place_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
