"""Ops that run elsewhere: calls written to a file, and the answers read back into the arrays.

A test of golden vectors takes a *module* and calls its ops. `Recorder` is a module that computes
nothing and keeps the calls; `write_calls` makes the file that tests/standalone/driver.cpp runs, on
whatever CPU that was compiled for; `Player` is a module whose ops give the driver's answers.

File of calls, little endian, a count is a uint64 and a text a count and its bytes: the text
`anyshard calls 1` (no count), the count of calls; of a call its name and arguments (a count of
them). An argument is a byte and what it stands for: `n` None, `i` int64, `d` float64, `s` text, `l`
a list (count), `a` an array: format (a byte), item bytes, dimensions (count), shape and strides
(int64 each), the bytes from its first element to its last.
File of answers, of each call: int64 and float32 that a function returns, the count of arrays that
were written, and of those their number in the call, count of bytes, bytes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Player", "Recorder", "read_answers", "write_calls"]

MAGIC = b"anyshard calls 1"
OPS = (
    "Attention", "AttentionStates", "DecodeWire", "Digest", "DigestKv", "Embed", "GateUp", "Head",
    "MergeStates", "Qkv", "Reduce", "RoundWire", "RowLinear",
)  # fmt: skip
FUNCTIONS = ("argmax", "digest_panels", "exp_into", "gumbel_argmax", "pack_panels")
OF_POOL = ("digest_panels", "pack_panels")  # functions whose first argument is the pool

Handler = Callable[[str, tuple[Any, ...]], Any]


@dataclass(frozen=True)
class Answer:
    """What one call returned, and the arrays that it wrote: (their number, their bytes)."""

    index: int
    value: float
    arrays: tuple[tuple[int, bytes], ...]


class _Module:
    """The names of the native module, each handing its call to `_handle`."""

    def __init__(self, handle: Handler) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        if name in OPS:
            return lambda _pool, *arguments: _Op(name, arguments, self._handle)
        if name in FUNCTIONS:
            skip = 1 if name in OF_POOL else 0
            return lambda *arguments, body="": self._handle(name, arguments[skip:])
        raise AttributeError(name)


class _Op:
    def __init__(self, name: str, arguments: tuple[Any, ...], handle: Handler) -> None:
        self._name, self._arguments, self._handle = name, arguments, handle

    def run(self, rows: int) -> None:
        self._handle(self._name, (*self._arguments, rows))


class Recorder(_Module):
    """Keeps calls as they stand when they are made; functions return zeros."""

    def __init__(self) -> None:
        super().__init__(self._keep)
        self.calls: list[bytes] = []

    def _keep(self, name: str, arguments: tuple[Any, ...]) -> Any:
        self.calls.append(encode(name, arguments))
        return returned(name, Answer(0, 0.0, ()))


class Player(_Module):
    """Gives the answers to the same calls, made again in the same order.

    Raises: ValueError where a call is not the one recorded, as when an input was made of an answer.
    """

    def __init__(self, calls: list[bytes], answers: list[Answer]) -> None:
        super().__init__(self._play)
        assert len(calls) == len(answers)
        self._rest = list(zip(calls, answers, strict=True))[::-1]

    def _play(self, name: str, arguments: tuple[Any, ...]) -> Any:
        call, answer = self._rest.pop()
        if encode(name, arguments) != call:
            raise ValueError(f"this call of {name} is not the one that was recorded")
        arrays = list(arrays_of(arguments))
        for number, content in answer.arrays:
            ctypes.memmove(arrays[number].ctypes.data, content, len(content))
        return returned(name, answer)


def returned(name: str, answer: Answer) -> Any:
    """What the native function of that name returns; None for an op."""
    match name:
        case "argmax":
            return answer.index, answer.value
        case "gumbel_argmax":
            return answer.index
        case "pack_panels":
            return bool(answer.index)
        case _:
            return None


def arrays_of(arguments: Any) -> Iterator[Any]:
    """The arrays among arguments, in the order of the file."""
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from arrays_of(argument)


def span_bytes(array: np.ndarray[Any, Any]) -> int:
    """Bytes from the first element to the end of the last."""
    if array.size == 0:
        return 0
    steps = zip(array.shape, array.strides, strict=True)
    return sum((size - 1) * stride for size, stride in steps) + array.itemsize


def encode(name: str, arguments: tuple[Any, ...]) -> bytes:
    """A call as it stands in the file."""
    return text(name) + struct.pack("<Q", len(arguments)) + b"".join(map(encode_one, arguments))


def text(value: str) -> bytes:
    """A count and the bytes."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def encode_one(value: Any) -> bytes:
    """One argument."""
    if value is None:
        return b"n"
    if isinstance(value, str):
        return b"s" + text(value)
    if isinstance(value, np.ndarray):
        counts = (value.itemsize, value.ndim, *value.shape, *value.strides, span_bytes(value))
        content = ctypes.string_at(value.ctypes.data, span_bytes(value))
        return b"a" + value.dtype.char.encode() + struct.pack(f"<{len(counts)}q", *counts) + content
    if isinstance(value, list | tuple):
        return b"l" + struct.pack("<Q", len(value)) + b"".join(map(encode_one, value))
    if isinstance(value, float | np.floating):
        return b"d" + struct.pack("<d", value)
    return b"i" + struct.pack("<Q", int(value) & (1 << 64) - 1)


def write_calls(path: Path, calls: list[bytes]) -> None:
    """The driver's input."""
    path.write_bytes(MAGIC + struct.pack("<Q", len(calls)) + b"".join(calls))


def read_answers(path: Path, num_calls: int) -> list[Answer]:
    """The driver's output.

    Raises: ValueError if it does not hold just so many answers.
    """
    content, place = path.read_bytes(), 0

    def take(layout: str) -> tuple[Any, ...]:
        nonlocal place
        place += struct.calcsize(layout)
        if place > len(content):
            raise ValueError(f"{path} ends early")
        return struct.unpack_from(layout, content, place - struct.calcsize(layout))

    found = []
    for _ in range(num_calls):
        index, value, num_arrays = take("<qfQ")
        arrays = []
        for _ in range(num_arrays):
            number, num_bytes = take("<QQ")
            arrays.append((number, take(f"<{num_bytes}s")[0]))
        found.append(Answer(index, value, tuple(arrays)))
    if place != len(content):
        raise ValueError(f"{path} holds more than {num_calls} answers")
    return found
