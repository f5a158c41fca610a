"""Models named by their Hub id: `org/name`, or `org/name:file.gguf` for one GGUF file.

`huggingface_hub` does the work, with its cache and its environment (HF_HOME, HF_HUB_OFFLINE,
HF_TOKEN). Only files that are read are asked for. Knows nothing of what is in them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from anyshard.errors import CheckpointError

__all__ = ["HubId", "download", "parse_hub_id"]

_NAME: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
_HUB_ID: Final = re.compile(rf"({_NAME}/{_NAME})(?::([^:\0]{{1,512}}\.gguf))?")
_PART: Final = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
_MAX_PARTS: Final = 1000

# Weights, configuration and tokenizer, chat template. No .bin (a pickle), no subfolder, and not
# the second copy of all weights that some repositories hold under the name consolidated.
_ALLOWED: Final = ["*.safetensors", "*.json", "*.jinja"]
_IGNORED: Final = ["*/*", "consolidated*"]


@dataclass(frozen=True, kw_only=True)
class HubId:
    """`repository` is `org/name`; `file` a GGUF file in it, or None for an HF model."""

    repository: str
    file: str | None = None

    def __str__(self) -> str:
        return self.repository if self.file is None else f"{self.repository}:{self.file}"


def parse_hub_id(model: str) -> HubId | None:
    """The Hub id that `model` spells, or None."""
    match = _HUB_ID.fullmatch(model)
    if match is None or (match[2] is not None and ".." in match[2].split("/")):
        return None
    return HubId(repository=match[1], file=match[2])


def download(hub_id: HubId) -> Path:
    """The snapshot directory, or the GGUF file, in the Hub cache; fetched if it is not there.

    Without a network, or with HF_HUB_OFFLINE=1, what the cache holds is taken.

    Raises: CheckpointError in one sentence.
    Held by: test_hub.py (a cache made by hand; no network).
    """
    import huggingface_hub  # 0.3 s, which a model on the disk need not wait for
    from huggingface_hub import constants, errors

    try:
        if hub_id.file is None:
            folder = Path(
                huggingface_hub.snapshot_download(
                    hub_id.repository, allow_patterns=_ALLOWED, ignore_patterns=_IGNORED
                )
            )
            return _with_config(hub_id, folder)
        files = [
            Path(huggingface_hub.hf_hub_download(hub_id.repository, name))
            for name in _parts(hub_id.file)
        ]
        return files[0]
    except errors.LocalEntryNotFoundError:
        _refuse_absent(hub_id, offline=constants.is_offline_mode(), cache=constants.HF_HUB_CACHE)
    except errors.GatedRepoError:
        problem = "is gated; accept its terms on the Hub and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        problem = "does not exist on the Hub, or is private (then set HF_TOKEN)"
    except errors.EntryNotFoundError:
        problem = f"holds no file {hub_id.file!r}"
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        problem = f"cannot be fetched ({_first_line(error)})"
    except OSError as error:
        reason = error.strerror or _first_line(error)
        problem = f"cannot be stored in the Hub cache {constants.HF_HUB_CACHE} ({reason})"
    raise CheckpointError(f"Hub model {hub_id.repository!r} {problem}")


def _parts(file: str) -> list[str]:
    """The file, or all parts of a split model; the named one first."""
    match = _PART.fullmatch(file)
    if match is None:
        return [file]
    count = min(int(match[2]), _MAX_PARTS)
    names = [f"{match[1]}-{index + 1:05}-of-{match[2]}.gguf" for index in range(count)]
    return [file, *(name for name in names if name != file)]


def _with_config(hub_id: HubId, folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    raise CheckpointError(
        f"Hub model {hub_id.repository!r} has no config.json ({folder}); if it holds GGUF files, "
        f"name one: {hub_id.repository}:FILE.gguf"
    )


def _refuse_absent(hub_id: HubId, *, offline: bool, cache: str) -> NoReturn:
    reason = (
        "HF_HUB_OFFLINE forbids to fetch it; unset it"
        if offline
        else "the Hub cannot be reached; try again with a network"
    )
    raise CheckpointError(
        f"MODEL {str(hub_id)!r} is neither a directory nor a file here, as a Hub id it is not (or "
        f"not whole) in the cache {cache}, and {reason}, or name a local model"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:200] or type(error).__name__
