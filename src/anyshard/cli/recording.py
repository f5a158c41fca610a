"""What `generate --record` writes: one record of each prompt's run, with a manifest to cite.

Knows where records go and what a machine is called; what they hold is `fidelity/`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from anyshard import __version__
from anyshard.cli.inputs import spare_files, spare_model, spare_streams
from anyshard.cli.machine import Machine, read_machine
from anyshard.errors import OptionError, UserError
from anyshard.files import check_place

if TYPE_CHECKING:
    from anyshard.answer import Answer
    from anyshard.engine import Engine
    from anyshard.request import Request

__all__ = ["Recorder", "record_paths"]


class Outcome(Protocol):
    """How a prompt came out."""

    request: Request
    answer: Answer
    reason: str
    fault: str | None


def record_paths(target: str, num_prompts: int) -> list[Path]:
    """Where the records of so many prompts go: FILE, or FILE with .1, .2, ... before its ending.

    Raises: OptionError if nothing could be written there.
    """
    if not target or target.endswith("/"):
        raise OptionError(f"--record is {target!r}; name a file, such as run.anyd")
    path = Path(target)
    folder = path.parent
    if not folder.is_dir():
        raise OptionError(f"--record {path}: the folder {folder} does not exist; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OptionError(f"--record {path}: the folder {folder} cannot be written to")
    paths = [path]
    if num_prompts > 1:
        paths = [path.with_name(f"{path.stem}.{n}{path.suffix}") for n in range(1, num_prompts + 1)]
    for each in paths:
        if each.is_dir():
            raise OptionError(f"--record {each} is a folder; name a file in it, such as run.anyd")
        try:
            check_place(each)
        except OSError as error:
            raise OptionError(f"--record {each}: {error.strerror}; name another file") from None
    spare_streams("--record", paths)
    return paths


class Recorder:
    """Writes the records of one command.

    `written`: the file of each request that has one by now.

    Raises: OptionError at once if they could not be written.
    """

    def __init__(self, target: str, num_prompts: int) -> None:
        self.paths = record_paths(target, num_prompts)
        self.written: dict[int, Path] = {}
        self._refused: list[UserError] = []
        self._machine: Machine | None = None

    def spare_prompts(self, file: str) -> None:
        """Raises: OptionError if a record would take the place of the file of the prompts."""
        spare_files("--record", self.paths, [Path(file)], "the file of --prompts")

    def spare_model(self, model: Path) -> None:
        """Raises: OptionError if a record would take the place of a file of the model.

        Held by: test_compare.py.
        """
        spare_model("--record", self.paths, model)

    def write(
        self,
        engine: Engine,
        request_id: int,
        outcome: Outcome,
        layout: dict[str, Any],
        *,
        weights_sha256: str,
    ) -> None:
        """The record of one request, at its last event.

        What cannot be written is kept for `refuse_unwritten`: the answers go on.
        """
        import msgspec
        import numpy as np

        from anyshard.fidelity import Manifest, Record, RecordError, tokens_sha256, write_record

        assert weights_sha256, "the loader was not asked for it"
        tokens = outcome.answer.tokens
        digests = engine.digests(request_id, emitted=len(tokens))
        prompt = np.array(outcome.request.prompt, np.int32)
        machine = self._machine = self._machine or read_machine()
        manifest = Manifest(
            anyshard=__version__,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            weights_sha256=weights_sha256,
            model=json.loads(json.dumps(asdict(engine.config))),
            profile=engine.profile.name,
            profile_sha256=engine.profile.sha256(),
            tokens_sha256=tokens_sha256(prompt),
            sampling=outcome.request.sampling,
            max_tokens=outcome.request.max_tokens,
            finish=outcome.reason,
            fault=outcome.fault,
            logits_sha256=outcome.answer.logits_sha256,
            layout=layout | {"chunk": engine.options.chunk},
            machine={
                "architecture": machine.architecture,
                "cpu": machine.cpu,
                "isa": list(machine.isa),
                "cores": machine.cores,
            },
            positions=len(digests.embed),
            layers=engine.config.num_layers,
            prompt_tokens=len(prompt),
            emitted_tokens=len(tokens),
            disagreement=digests.disagreement or msgspec.UNSET,
        )
        record = Record(manifest, prompt, np.array(tokens, np.int32), digests)
        try:
            write_record(record, self.paths[request_id])
        except RecordError as error:
            self._refused.append(error)
        else:
            self.written[request_id] = self.paths[request_id]

    def refuse_unwritten(self) -> None:
        """Once the answers are told. Raises: RecordError, the first of those that `write` kept."""
        if self._refused:
            raise self._refused[0]
