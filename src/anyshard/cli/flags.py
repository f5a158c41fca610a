"""The flags that verbs share, as records: their names, their ranges, what they mean.

Knows nothing of models; a value that no model could take is refused here.
"""

from __future__ import annotations

import codecs
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from anyshard.comm.link import LinkSpec, parse_link, parse_links
from anyshard.config import KvType, WireType
from anyshard.errors import OptionError
from anyshard.request import Sampling
from anyshard.schedule import MOST_FRAMES, MOST_MICRO_BATCHES, Schedule

__all__ = [
    "NO_DRAFTS",
    "ONE_HOST",
    "BenchFlags",
    "HostFlags",
    "PromptFlags",
    "SamplingFlags",
    "SpeculationFlags",
    "SplitFlags",
    "in_range",
    "num_bytes",
    "whole_numbers",
]


MAX_PROMPTS_BYTES = 1 << 26
NUMBER = re.compile(r"[-+]?[0-9]{1,18}")  # int() takes digits of every script


def _one_item(type_: Any, value: str, delimiter: str | None = None) -> list[str]:
    """An environment variable holds one text, spaces and all."""
    return [value]


Text = Parameter(negative="", allow_leading_hyphen=True, env_var_split=_one_item)
Flag = Parameter(negative="")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SplitFlags:
    """How the model is split and run; only --quantization and the two -dtype flags change bits."""

    tensor_parallel_size: Annotated[
        int | None, Parameter(name=["--tensor-parallel-size", "-tp", "--tp"])
    ] = None
    "Ranks that share each layer, 1 to the number of query heads."
    pipeline_parallel_size: Annotated[
        int | None, Parameter(name=["--pipeline-parallel-size", "-pp", "--pp"])
    ] = None
    "Stages that share the layers, 1 to the number of layers."
    heads: str | None = None
    "Query heads of each rank, such as 5,4; implies -tp."
    layers: str | None = None
    "Layers of each stage, such as 22,8; implies -pp. With -pp, auto and auto:prefill measure."
    kv_shard: Literal["auto", "heads", "sequence"] = "auto"
    "Keys and values of each rank: of its heads, or of its blocks of the sequence (less memory)."
    threads: int | None = None
    "Threads per rank; by default cores divided by ranks, at least 1."
    chunk: int | None = None
    "Most rows of one prompt in a step; 256, or 64 where stages take turns."
    schedule: Literal["continuous", "fill-drain"] = "continuous"
    "How micro-batches take turns in a pipeline: never drained, or a round at a time."
    micro_batches: int | None = None
    "Groups of sequences that take turns in a pipeline; by default as many as stages."
    comm: Literal["auto", "shm", "torch", "threads"] = "auto"
    "Ranks as processes over shared memory (auto, shm) or Gloo (torch), or as threads."
    kernels: Literal["auto", "vnni", "avx2", "scalar", "reference"] = "auto"
    "Kernel bodies; all have the same bits. auto takes the fastest here."
    quantization: Literal["auto", "none", "int8"] = "auto"
    "Arithmetic: float32 (none), or blocks of int8; auto takes int8 for files that are quantised."
    kv_cache_dtype: Literal["auto", "f32", "int8"] = "auto"
    "Keys and values as float32 (auto, f32), or as int8 with a scale for every 32 dims of each."
    wire_dtype: Literal["auto", "f32", "int8"] = "auto"
    "Rows between stages as float32 (auto, f32), or in a quarter of the bytes; rounds in any split."
    kv_memory: str | None = None
    "Memory for keys and values of all ranks, such as 2G; else what prompts and answers may need."
    max_model_len: int | None = None
    "Tokens that prompt and answer may hold together; by default what is asked for (chat: 4096)."
    max_num_seqs: int | None = None
    "Prompts in flight at once, 32 by default; doctor counts the KV of one unless it is given."
    emulate_link: str | None = None
    "Slow the hops between stages, such as 10ms,100mbit,jitter=1ms,stall=200ms@0.1%; or a file."
    deadline: float = 10.0
    "Seconds without a sign of life after which a rank counts as lost."
    cache: bool = True
    "Keep packed weights in the user's cache where that makes the next load faster."

    def __post_init__(self) -> None:
        in_range("tensor-parallel-size", self.tensor_parallel_size, 1, 1 << 16)
        in_range("pipeline-parallel-size", self.pipeline_parallel_size, 1, 1 << 16)
        in_range("threads", self.threads, 1, 256)
        in_range("chunk", self.chunk, 1, 1 << 16)
        in_range("micro-batches", self.micro_batches, 1, MOST_MICRO_BATCHES)
        in_range("max-model-len", self.max_model_len, 2, 1 << 24)
        in_range("max-num-seqs", self.max_num_seqs, 1, 4096)
        in_range("deadline", self.deadline, 0.1, 86400.0)
        assert self.kv_memory_bytes is None or self.kv_memory_bytes > 0
        self.links(None)
        if self.balance is not None and (self.pipeline_parallel_size or 1) < 2:
            raise OptionError(f"--layers {self.layers} needs -pp, the number of stages, 2 or more")
        for flag, asked, cut in (
            ("-tp", self.tensor_parallel_size, self.head_counts),
            ("-pp", self.pipeline_parallel_size, None if self.balance else self.layer_counts),
        ):
            if asked is not None and cut is not None and asked != len(cut):
                name = "--heads" if flag == "-tp" else "--layers"
                raise OptionError(
                    f"{flag} {asked} contradicts {name}, which has {len(cut)} parts; drop one"
                )
        if self.comm == "torch" and importlib.util.find_spec("torch") is None:
            raise OptionError(
                "--comm torch needs torch, which is not installed; run make setup in the clone, "
                "or leave --comm out"
            )

    @property
    def kv(self) -> KvType:
        """The type of keys and values that --kv-cache-dtype means."""
        return "int8" if self.kv_cache_dtype == "int8" else "f32"

    @property
    def wire(self) -> WireType:
        """The wire of the profile that --wire-dtype means."""
        return "int8" if self.wire_dtype == "int8" else "none"

    @property
    def kv_memory_bytes(self) -> int | None:
        """--kv-memory as a number. Raises: OptionError."""
        return None if self.kv_memory is None else num_bytes("kv-memory", self.kv_memory)

    def links(self, stages: int | None) -> tuple[LinkSpec, ...]:
        """--emulate-link for so many stages, if they are known: none, or as many.

        Raises: OptionError.
        """
        text, name = self.emulate_link, "--emulate-link"
        if text is None:
            return ()
        if text[:1].isdigit() and not os.path.exists(text):
            found = (parse_link(text, name=name),) * (stages or 1)
        else:
            found = _links_file(text, stages=stages)
        return found

    @property
    def head_counts(self) -> tuple[int, ...] | None:
        """--heads as numbers."""
        return _counts(self.heads, "--heads")

    @property
    def balance(self) -> Literal["decode", "prefill"] | None:
        """What --layers auto is measured for."""
        names: dict[str | None, Literal["decode", "prefill"]] = {
            "auto": "decode",
            "auto:decode": "decode",
            "auto:prefill": "prefill",
        }
        return names.get(self.layers)

    @property
    def layer_counts(self) -> tuple[int, ...] | None:
        """--layers as numbers. Raises: OptionError for what is none, also auto."""
        if self.balance is not None:
            raise OptionError(
                f"--layers {self.layers} is measured by generate and chat; numbers such as 22,8 "
                "are needed here"
            )
        return _counts(self.layers, "--layers")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class HostFlags:
    """Which hosts share the model; the same command runs on each. Under torchrun it says all."""

    nnodes: int | None = None
    "Hosts that share the model, 1 to the number of ranks."
    node_rank: int | None = None
    "Number of this host; 0, the head, takes the prompts, prints the answers, has the last stage."
    master_addr: str | None = None
    "Address of host 0, as the others reach it; nothing listens at any other."
    master_port: int = 29500
    "Port at which host 0 waits for the others."
    join_timeout: float = 300.0
    "Seconds to wait for hosts that are yet to start."

    def __post_init__(self) -> None:
        in_range("nnodes", self.nnodes, 1, 1 << 10)
        in_range("master-port", self.master_port, 1, 65535)
        in_range("join-timeout", self.join_timeout, 0.1, 86400.0)
        if self.num_hosts == 1:
            given = {"--node-rank": self.node_rank, "--master-addr": self.master_addr}
            for flag, value in given.items():
                if value is not None:
                    raise OptionError(f"{flag} is {value}, of one host only; give --nnodes as well")
            return
        in_range("node-rank", self.node_rank, 0, self.num_hosts - 1)
        if self.node_rank is None or self.master_addr is None:
            raise OptionError(
                f"--nnodes {self.nnodes} needs --node-rank, 0 to {self.num_hosts - 1}, and "
                "--master-addr, the address of host 0"
            )

    @property
    def num_hosts(self) -> int:
        """--nnodes, or 1."""
        return self.nnodes or 1


_CUTS = ("tensor_parallel_size", "pipeline_parallel_size", "heads", "layers")
#: Without a variable: ANYSHARD_THREADS is one number, ANYSHARD_LAYOUTS is `verify`'s.
Layouts = Annotated[str | None, Parameter(show_env_var=False)]
Threads = Annotated[str | None, Parameter(name=["--threads", "-t"], show_env_var=False)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BenchFlags(SplitFlags):
    """The split, and lists of splits and threads that are crossed."""

    layouts: Layouts = None
    "Splits: tp1,tp2,pp2,tp2pp2, or cuts of your own: heads7+2,layers22+8."
    threads: Threads = None  # type: ignore[assignment]
    "Threads per rank, such as 1,2; by default cores divided by ranks, at least 1."

    def __post_init__(self) -> None:
        self.split()

    def split(self) -> SplitFlags:
        """All but the lists, checked. Raises: OptionError naming the flag."""
        mine = {each.name: getattr(self, each.name) for each in fields(SplitFlags)}
        given = [name for name in _CUTS if mine[name] is not None]
        if self.layouts is not None and given:
            flag = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp"}
            name = flag.get(given[0], f"--{given[0]}")
            raise OptionError(f"--layouts says which splits are run, and so does {name}; drop one")
        return SplitFlags(**mine | {"threads": None})

    def thread_counts(self) -> tuple[int | None, ...]:
        """As numbers; None is what the cores give. Raises: OptionError."""
        return (None,) if self.threads is None else whole_numbers("threads", self.threads, 1, 256)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How tokens are drawn, and when an answer ends."""

    max_tokens: Annotated[int | None, Parameter(name=["--max-tokens", "-n"])] = None
    "Longest answer in tokens; 128 (chat: 1024), or what the context leaves if that is less."
    temperature: float = 0.0
    "0 is greedy; above it, the noise is drawn from --seed, position and token id."
    top_k: int = 0
    "Sample among the k best tokens; 0 is all."
    top_p: float = 1.0
    "Sample among the best tokens that hold this share of probability; 1 is all."
    min_p: float = 0.0
    "Drop tokens below this share of the best one's probability; 0 drops none."
    seed: int = 0
    "Key of the sampling noise, 0 to 2^64-1."
    stop: Annotated[list[str] | None, Text] = None
    "Text that ends the answer and is not shown; repeat for several."
    ignore_eos: Annotated[bool, Flag] = False
    "Go on past the model's end-of-text tokens."

    def __post_init__(self) -> None:
        in_range("max-tokens", self.max_tokens, 1, 1 << 24)
        if any(not text for text in self.stop or ()):
            raise OptionError("--stop is empty; give the text that should end the answer")

    @property
    def idle(self) -> list[str]:
        """Flags that were given and do nothing at temperature 0."""
        given = {
            "--top-k": self.top_k != 0,
            "--top-p": self.top_p != 1.0,
            "--min-p": self.min_p != 0.0,
            "--seed": self.seed != 0,
        }
        return [name for name, is_given in given.items() if is_given and self.temperature == 0.0]

    def sampling(self) -> Sampling:
        """The record that travels to the sampler. Raises: OptionError naming the flag."""
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SpeculationFlags:
    """Tokens that are likely to come next, run beside the certain one; they change no bit."""

    speculate: str = "off"
    "Draft tokens from texts so far (ngram, auto), by a small model (model:PATH), or not (off)."
    draft_threads: int = 1
    "Threads of the draft model's rank."
    draft_max: int = 8
    "Most drafts in a frame."
    draft_windows: int | None = None
    "Frames of drafts under way behind each other: of several stages 16, of one 1, which waits."
    gate: str = "entropy"
    "Drafts that are run: those worth their rows (entropy), the first K (fixed:K), or all (none)."

    def __post_init__(self) -> None:
        in_range("draft-max", self.draft_max, 1, 64)
        in_range("draft-threads", self.draft_threads, 1, 256)
        assert self.draft_model is None or self.drafts
        if self.draft_windows is not None:
            in_range("draft-windows", self.draft_windows, 1, MOST_MICRO_BATCHES)
        assert self.fixed is None or self.fixed >= 0

    @property
    def idle(self) -> list[str]:
        """Flags that were given and do nothing without --speculate, or without a draft model."""
        if self.drafts:
            has_idle = self.draft_threads != 1 and self.draft_model is None
            return ["--draft-threads"] if has_idle else []
        given = {
            "--draft-max": self.draft_max != 8,
            "--draft-threads": self.draft_threads != 1,
            "--draft-windows": self.draft_windows is not None,
            "--gate": self.gate != "entropy",
        }
        return [name for name, is_given in given.items() if is_given]

    @property
    def draft_model(self) -> str | None:
        """PATH of --speculate model:PATH. Raises: OptionError."""
        kind, _, path = self.speculate.partition(":")
        if kind == "model":
            if not path:
                raise OptionError(
                    f"--speculate {self.speculate} names no model; give model:PATH, a .gguf file, "
                    "a Hugging Face directory, or a Hub id"
                )
            return os.path.expanduser(path)
        if self.speculate not in ("off", "auto", "ngram"):
            is_path = "/" in self.speculate or self.speculate.endswith(".gguf")
            hint = "; for a draft model write model: before it" if is_path else ""
            raise OptionError(
                f"--speculate is {self.speculate[:40]!r}; it can be off, auto, ngram, or "
                f"model:PATH{hint}"
            )
        return None

    @property
    def drafts(self) -> int:
        """Rows of drafts that a step has room for."""
        return 0 if self.speculate == "off" else self.draft_max

    def windows(self, schedule: Schedule) -> int:
        """Frames of one request that may be under way, beside those of a schedule.

        Raises: OptionError if they are more than can be numbered.
        """
        if not self.drafts:
            return 1
        most = MOST_FRAMES - schedule.in_flight
        if self.draft_windows is None:
            return 1 if schedule.stages == 1 else min(16, most)
        if self.draft_windows > most:
            raise OptionError(
                f"--draft-windows is {self.draft_windows}; beside {schedule.in_flight} frames "
                f"of the schedule {most} are possible; lower it, or --micro-batches"
            )
        return self.draft_windows

    @property
    def fixed(self) -> int | None:
        """K of --gate fixed:K. Raises: OptionError."""
        name, _, number = self.gate.partition(":")
        if self.gate in ("entropy", "none"):
            return None
        if name != "fixed" or not NUMBER.fullmatch(number):
            raise OptionError(
                f"--gate is {self.gate[:40]!r}; it can be entropy, none, or fixed:K such as fixed:3"
            )
        if int(number) < 0:
            raise OptionError(f"--gate is {self.gate[:40]!r}; K can be 0 to {self.draft_max}")
        if int(number) > self.draft_max:
            raise OptionError(
                f"--gate {self.gate} is more than --draft-max {self.draft_max}; raise that, or "
                f"take fixed:{self.draft_max} at most"
            )
        return int(number)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PromptFlags:
    """Where the text comes from."""

    prompt: Annotated[list[str] | None, Parameter(name=["--prompt", "-p"]), Text] = None
    "Text to continue; repeat it for a batch."
    prompts: str | None = None
    'A JSON-lines file of prompts: strings, or objects with "prompt" and "max_tokens".'
    chat: Annotated[bool, Flag] = False
    "Wrap each prompt as a user message in the model's chat template."

    def read(self) -> tuple[tuple[str, int | None], ...]:
        """(text, max_tokens or None) of every prompt.

        Raises: OptionError naming the file and line, or the empty prompt.
        """
        texts: list[tuple[str, int | None]] = [(text, None) for text in self.prompt or ()]
        if self.prompts is not None:
            texts += list(_prompts_file(self.prompts))
        if not texts:
            empty = f"--prompts {self.prompts} holds no line; " if self.prompts else "no prompt; "
            raise OptionError(empty + "give --prompt TEXT or --prompts FILE.jsonl")
        for index, (text, _) in enumerate(texts):
            if not text:
                raise OptionError(f"prompt {index + 1} is empty; give at least one token of text")
        return tuple(texts)


def in_range(name: str, value: float | None, least: float, most: float) -> None:
    """Raises: OptionError with the value and what is possible, unless None or in range."""
    if value is not None and not least <= value <= most:
        raise OptionError(f"--{name} is {value}; it can be {least} to {most}")


_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?(?:([KMGT])(I?))?B?")


def num_bytes(name: str, text: str) -> int:
    """`512M` (million), `2.5Gi` (2^30) or plain bytes, in either case.

    Raises: OptionError, also for less than a byte.
    """
    found = _SIZE.fullmatch(text.strip().upper()) if text.isascii() else None
    size = 0
    if found is not None:
        power = " KMGT".index(found[2] or " ")
        size = int(Fraction(found[1]) * (1024 if found[3] else 1000) ** power)
    if not size:
        raise OptionError(f"--{name} is {text[:40]!r}; a size such as 512M, 2.5G or 2Gi is needed")
    return size


def whole_numbers(
    name: str, text: str, least: int, most: int, *, more: str = ""
) -> tuple[int, ...]:
    """`1,17` as numbers in that range; `more`: what else it can be. Raises: OptionError."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not NUMBER.fullmatch(part):
            raise OptionError(
                f"--{name} has {part[:40]!r}; whole numbers such as 1,17 are needed{more}"
            )
    numbers = tuple(int(part) for part in parts)
    for number in numbers:
        in_range(name, number, least, most)
    return numbers


def _counts(text: str | None, flag: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"{flag} is {text!r}; whole numbers such as 5,4 are needed") from None


def _links_file(path: str, *, stages: int | None) -> tuple[LinkSpec, ...]:
    name = f"--emulate-link {path[:60]}"
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise OptionError(
            f"{name} cannot be read: {why}; a link is 10ms,100mbit, or a file with one a line"
        ) from None
    return parse_links(lines, stages=stages, name=name)


def _prompts_file(path: str) -> Iterator[tuple[str, int | None]]:
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_PROMPTS_BYTES + 1)
        if len(content) > MAX_PROMPTS_BYTES:
            raise ValueError(f"it holds more than {MAX_PROMPTS_BYTES} bytes")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise OptionError(f"--prompts {path} cannot be read: {why}") from None
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        place = f"--prompts {path} line {number}"
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            wrong = line[error.start]
            raise OptionError(
                f"{place} is not UTF-8: byte {error.start + 1} of the line is 0x{wrong:02x}; save "
                "the file as UTF-8"
            ) from None
        if text.strip():
            yield _prompt_of(text, place)


def _prompt_of(line: str, place: str) -> tuple[str, int | None]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise OptionError(
            f'{place} is not JSON; a line is a string, or an object with "prompt"'
        ) from None
    if isinstance(entry, str):
        entry = {"prompt": entry}
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise OptionError(f'{place}: a string or an object with "prompt" is needed')
    unknown: Sequence[str] = sorted(set(entry) - {"prompt", "max_tokens"})
    if unknown:
        raise OptionError(f"{place}: unknown field {unknown[0]!r}")
    limit = entry.get("max_tokens")
    if limit is not None and (type(limit) is not int or not 1 <= limit <= 1 << 24):
        raise OptionError(f"{place}: max_tokens is {limit!r}; it can be 1 to {1 << 24}")
    return entry["prompt"], limit


ONE_HOST = HostFlags()
NO_DRAFTS = SpeculationFlags()
