"""`anyshard quantize`: weights as int8 blocks, written once, mapped by every run after.

Knows folders, disks and what is said; the formats are `checkpoint`'s and `tokenizer`'s.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from anyshard.cli.screen import Bar
from anyshard.errors import OptionError
from anyshard.files import check_folder_place, whole_folder
from anyshard.host import size_text

if TYPE_CHECKING:
    from anyshard.checkpoint import Checkpoint

__all__ = ["quantize"]


def quantize(
    model: Annotated[str | None, Parameter(show_env_var=False)] = None,
    out: Annotated[str | None, Parameter(show_env_var=False)] = None,
    /,
    *,
    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Write a model's weights as int8 blocks, for runs that map them: MODEL OUT, or only OUT.

    OUT runs like MODEL with --quantization int8, with the same bits, and packs nothing at load.

    Parameters
    ----------
    model
        A .gguf file, a Hugging Face directory, or a Hub id (ORG/NAME, ORG/NAME:FILE.gguf);
        without it the demo model, SmolLM2-135M.
    out
        The folder to write, new or empty: model.safetensors, config.json, the tokenizer.
    json_output
        Print one JSON object, with sizes and hashes.
    """
    # the variable of every verb's MODEL; here MODEL comes first and has none of its own
    name = os.environ.get("ANYSHARD_MODEL") if out is None else model
    target = model if out is None else out
    if model is None or not target:
        raise OptionError("OUT is missing; name a new folder: anyshard quantize [MODEL] OUT")
    if out is None and _is_something(Path(model)):
        raise OptionError(f"OUT is missing: {model} exists; name it, and then a new folder")
    start_s = time.monotonic()
    try:
        place = check_folder_place(Path(target))
        facts = _write(name, place)
    except OSError as error:
        raise OptionError(f"OUT {target} cannot be written: {error.strerror or error}") from None
    facts |= {"out": target, "seconds": round(time.monotonic() - start_s, 3)}
    print(json.dumps(facts) if json_output else _text(facts))
    return 0


def _is_something(path: Path) -> bool:
    """Rather a MODEL than a place for one."""
    with contextlib.suppress(OSError):
        return path.exists() and not (path.is_dir() and not any(path.iterdir()))
    return False


def _write(name: str | None, place: Path) -> dict[str, Any]:
    """Write all of it; returns what can be said of it. Raises: UserError, OSError."""
    from anyshard.checkpoint import open_checkpoint, write_config, write_weights
    from anyshard.loading import profile_of
    from anyshard.tokenizer import write_tokenizer

    checkpoint = open_checkpoint(name)
    _check_room(checkpoint, place)
    with whole_folder(place) as folder:
        ids = write_tokenizer(checkpoint, folder)
        write_config(checkpoint, folder, ids)
        with Bar("quantising") as bar:
            written = write_weights(
                checkpoint,
                folder,
                threads=len(os.sched_getaffinity(0)),
                progress=bar.update,
            )
        files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    profile = profile_of("int8")
    return {
        "model": str(checkpoint.path),
        "files": files,
        "weights": asdict(written),
        "model_weight_bytes": sum(source.raw.nbytes for source in checkpoint.sources.values()),
        "profile": profile.name,
        "profile_hash": profile.sha256(),
    }


def _check_room(checkpoint: Checkpoint, place: Path) -> None:
    """Raises: OptionError with both numbers where the disk cannot hold the weights."""
    from anyshard.checkpoint import weights_bytes

    status = os.statvfs(place.parent)
    free, needed = status.f_bavail * status.f_frsize, weights_bytes(checkpoint)
    if needed > free:
        raise OptionError(
            f"OUT {place} needs {size_text(needed)}, and {size_text(free)} are free there; make "
            "room, or name another place"
        )


def _text(facts: dict[str, Any]) -> str:
    weights = facts["weights"]
    lines = [
        f"{facts['out']}: {size_text(weights['bytes'])} of int8 blocks, from "
        f"{size_text(facts['model_weight_bytes'])} in {facts['model']}, in "
        f"{facts['seconds']:.1f} s",
        f"data sha256 {weights['data_sha256']}",
    ]
    if "tokenizer.json" not in facts["files"]:
        lines.append("the model came without a tokenizer: put its tokenizer.json there")
    return "\n".join([*lines, f"anyshard generate {facts['out']} --prompt TEXT"])
