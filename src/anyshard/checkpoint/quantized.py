"""The directory that `anyshard quantize` writes: its layout, and how it is opened untrusted.

`model.safetensors` holds the weights as int8 arithmetic takes them, so that the file can be the
weight image; docs/quantize.md is the one description of it. Where each tensor lies follows from
the configuration alone: a file is right or refused, and no length or place is taken from it.
Knows nothing of how the blocks are made, nor of tokenizers but where their files are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

from anyshard.checkpoint.safetensors import SafeFile, parse_json_object, read_whole
from anyshard.checkpoint.source import (
    BlockFile,
    Checkpoint,
    TensorSource,
    TokenizerMaterial,
    check_depth,
)
from anyshard.config import ModelConfig, RopeDivisors, config_from_hf, config_to_hf
from anyshard.errors import CheckpointError
from anyshard.ops.storage import panel_shape

__all__ = [
    "DATA_ALIGNMENT",
    "FORMAT",
    "WEIGHTS",
    "Place",
    "config_fields",
    "config_of_fields",
    "is_quantized",
    "open_quantized",
    "places",
]

FORMAT: Final = "anyshard-int8-1"
WEIGHTS: Final = "model.safetensors"
DATA_ALIGNMENT: Final = 4096
_MARK: Final = b'"anyshard-int8-'  # of any version
_HEAD_BYTES: Final = 1 << 16  # where it says so: the metadata comes first
_BIASES: Final = ("qkv_bias", "o_bias", "mlp_bias")


@dataclass(frozen=True, kw_only=True)
class Place:
    """One tensor of the file: `start` counts from where the data begins."""

    name: str
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    group: int
    start: int

    @property
    def is_matrix(self) -> bool:
        """Stored as int8 blocks; a vector as float32."""
        return len(self.shape) == 2

    @property
    def bytes(self) -> int:
        """Bytes that it takes."""
        return prod(self.stored_shape) * (1 if self.is_matrix else 4)


def places(config: ModelConfig) -> dict[str, Place]:
    """Every tensor in the order of the file: the matrices, then the vectors, without holes.

    Blocks have 544 bytes, so every matrix begins at a multiple of 32, every vector of 4.
    Held by: test_quantized.py::test_the_layout_is_as_documented.
    """
    shapes = config.tensor_shapes()
    found: dict[str, Place] = {}
    start = 0
    for name in sorted(shapes, key=lambda name: len(shapes[name]) == 1):
        shape = shapes[name]
        group = config.head_dim if name.rsplit(".", 1)[-1] == "o" else 0
        stored = panel_shape("int8", shape[0], shape[1], group) if len(shape) == 2 else shape
        found[name] = Place(name=name, shape=shape, stored_shape=stored, group=group, start=start)
        start += found[name].bytes
    return found


def is_quantized(directory: Path) -> bool:
    """Whether weights or configuration there call themselves what `quantize` writes.

    Of any version, and also where one of the two is damaged. Raises: OSError.
    """
    for name, skipped in ((WEIGHTS, 8), ("config.json", 0)):
        path = directory / name
        if path.is_file():
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
            if _MARK in head[skipped:]:
                return True
    return False


def open_quantized(directory: Path) -> Checkpoint:
    """A checkpoint from config.json and the blocks of model.safetensors.

    Raises: CheckpointError naming the file and the field or tensor.
    Held by: test_quantized.py, test_quantized_damage.py.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory}: has no config.json")
    config = parse_json_object(path, config_of_fields)
    weights = directory / WEIGHTS
    if not weights.is_file():
        raise CheckpointError(f"{directory}: has no {WEIGHTS}")
    blocks = BlockFile.of(weights)  # first: a file that is put in its place later is noticed
    file = read_whole(weights, blocks=True)
    label = str(weights)
    if file.metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"{label}: its format is {file.metadata.get('format')!r:.40}, and {FORMAT} can be "
            "read; another version of anyshard wrote it"
        )
    check_depth(config, len(file.tensors), label=label)
    material = None
    if (directory / "tokenizer.json").is_file():
        material = TokenizerMaterial(label=str(directory), directory=directory)
    return Checkpoint(
        path=directory,
        config=config,
        sources=_sources(config, file, label),
        tokenizer_material=material,
        blocks=blocks,
    )


def _sources(config: ModelConfig, file: SafeFile, label: str) -> dict[str, TensorSource]:
    """In canonical order, each where it must be."""
    if file.data_start % DATA_ALIGNMENT:
        raise CheckpointError(
            f"{label}: the data begins at byte {file.data_start}; a multiple of {DATA_ALIGNMENT} "
            "is needed"
        )
    wanted = places(config)
    for name in file.tensors:
        if name not in wanted:
            raise CheckpointError(
                f"{label}: tensor {name!r:.80} has no place in this model; leaving it out would "
                "change the answers"
            )
    for name, place in wanted.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"{label}: tensor {name!r} is missing; its shape would be {place.stored_shape}"
            )
        kind = "INT8" if place.is_matrix else "F32"
        if (tensor.type, tensor.shape) != (kind, place.stored_shape):
            is_a, needs_a = ("I8" if each == "INT8" else each for each in (tensor.type, kind))
            raise CheckpointError(
                f"{label}: tensor {name!r} is {is_a} of shape {tensor.shape}; the configuration "
                f"needs {needs_a} of {place.stored_shape}"
            )
        start = file.offsets[name] - file.data_start
        if start != place.start:
            raise CheckpointError(
                f"{label}: tensor {name!r} starts at byte {start} of the data; its place is "
                f"{place.start}"
            )
    return {
        name: TensorSource(
            name=name,
            file_name=name,
            shape=shape,
            type=file.tensors[name].type,
            raw=file.tensors[name].raw,
            group=wanted[name].group,
            offset=file.offsets[name],
        )
        for name, shape in config.tensor_shapes().items()
    }


def config_fields(config: ModelConfig) -> dict[str, Any]:
    """config.json of a quantised model, from which `config_of_fields` gives `config` again.

    The fields of HF; what HF has none for stands in `quantization_config`, with the format as
    its method, so that programs which do not know it refuse the directory.
    """
    scaling = config.rope_scaling
    own: dict[str, Any] = {"quant_method": FORMAT}
    own |= {name: getattr(config, name) for name in _BIASES}
    own["rope_divisors"] = list(scaling.divisors) if isinstance(scaling, RopeDivisors) else None
    return config_to_hf(config) | {"quantization_config": own}


def config_of_fields(raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration in the config.json of a quantised model.

    Raises: CheckpointError naming the field that decided.
    Held by: test_quantized.py::test_every_configuration_comes_back.
    """
    fields = dict(raw)
    own = fields.pop("quantization_config", None)
    keys = {"quant_method", "rope_divisors", *_BIASES}
    if not isinstance(own, dict) or own.get("quant_method") != FORMAT or set(own) != keys:
        raise CheckpointError(
            f"quantization_config is {own!r:.60}; the weights are {FORMAT}, which needs an object "
            f"of {', '.join(sorted(keys))}"
        )
    config = config_from_hf(fields)
    for name in _BIASES:
        if not isinstance(own[name], bool):
            raise CheckpointError(
                f"quantization_config.{name} is {own[name]!r:.40}; true or false is needed"
            )
        config = replace(config, **{name: own[name]})
    if own["rope_divisors"] is None:
        return config
    return replace(config, rope_scaling=_divisors(own["rope_divisors"], config))


def _divisors(values: Any, config: ModelConfig) -> RopeDivisors:
    field = "quantization_config.rope_divisors"
    if config.rope_scaling is not None:
        raise CheckpointError(f"{field} and rope_scaling are both set; one rotation is possible")
    half = config.head_dim // 2
    sound = isinstance(values, list) and len(values) == half
    if not sound or not all(isinstance(v, float) and math.isfinite(v) and v > 0 for v in values):
        raise CheckpointError(
            f"{field} is {values!r:.60}; null, or {half} finite numbers above 0 are needed"
        )
    return RopeDivisors(divisors=tuple(values))
