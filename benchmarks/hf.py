"""SmolLM2-135M in float32: decode and prefill beside HF transformers, and the first token.

    python benchmarks/hf.py [--rounds 7] [--json FILE] [--quick]

Every arm is a process that stays warm and gets its commands by pipe; a round runs all arms once,
one at a time, in an order that turns from round to round, so that a slow minute of the machine
hits all alike. HF has an environment of its own, which `make bench` makes. Both sides get the
same token ids and the same weights, and give greedy tokens, which are compared.

decode: tokens 2 to 128 after a prompt of 16, batch of one. prefill: a prompt of 256 up to its first
token. first token: wall clock of the whole command `anyshard generate`, to its first byte.

Exits 4 where a row is slower than HF or the first token takes longer than 3 s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from anyshard.checkpoint import Checkpoint, open_checkpoint
from anyshard.checkpoint.names import hf_name
from anyshard.config import ModelConfig
from anyshard.tokenizer import open_tokenizer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TEXT = ROOT / "tests" / "texts" / "english.txt"
PAUSE_S = 0.3  # between arms: the threads of the last one stop spinning
FIRST_TOKEN_S = 3.0  # bound on the first token of the command, warm
CLAIM_BROKEN = 4  # exit code
QUESTION = "What is the capital of France?"


@dataclass(frozen=True)
class Task:
    """What an arm is asked: a prompt of so many tokens, so many new ones; which are counted."""

    name: str
    prompt: int
    new: int

    def rate(self, answer: dict[str, Any]) -> float:
        """Tokens/s."""
        if self.name == "prefill":
            return self.prompt / float(answer["first_s"])
        return (self.new - 1) / float(answer["rest_s"])


@dataclass
class Arm:
    """One way to run, in its own process; `threads` is told to HF with each command."""

    name: str
    process: subprocess.Popen[str]
    threads: int
    ready: dict[str, str] = field(default_factory=dict)

    def ask(self, prompt: list[int], num_tokens: int, **more: int) -> dict[str, Any]:
        """Run once; `more`: what that arm alone understands."""
        asked = {"threads": self.threads, "prompt": prompt, "num_tokens": num_tokens, **more}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        """The next line of the arm; ends the benchmark if there is none."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the arm {self.name!r} ended with code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def peer_environment(folder: Path) -> Path:
    """The Python of HF's own environment; ends the benchmark if it is not there."""
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        sys.exit(f"{folder} is not there or not finished; `make bench` makes it (1.2 GB)")
    return python


def write_weights(checkpoint: Checkpoint, directory: Path) -> None:
    """The model as an HF directory: the float32 values that anyshard computes with."""
    (directory / "config.json").write_text(json.dumps(raw_config(checkpoint.config)))
    shapes = {hf_name(name): shape for name, shape in checkpoint.config.tensor_shapes().items()}
    with (directory / "model.safetensors").open("wb") as file:
        file.write(safetensors_header(shapes))
        for name in checkpoint.config.tensor_shapes():
            file.write(checkpoint.read(name).tobytes())


def raw_config(c: ModelConfig) -> dict[str, object]:
    """`config.json` of a Llama, as transformers reads it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": c.hidden,
        "intermediate_size": c.ffn,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab,
        "max_position_embeddings": c.context,
        "rms_norm_eps": c.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "tie_word_embeddings": c.tied,
    }


def safetensors_header(
    shapes: dict[str, tuple[int, ...]], *, dtype: str = "F32", item_bytes: int = 4
) -> bytes:
    """Length and JSON of a file that holds tensors of these shapes, in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + item_bytes * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def start_arms(peer: Path, weights: Path) -> list[Arm]:
    """HF is one process for both thread counts; anyshard one for each way to split."""
    hf = start([str(peer), str(HERE / "arm_hf.py"), str(weights)])
    arms = [Arm("HF, 1 thread", hf, 1), Arm("HF, 2 threads", hf, 2)]
    for name, tp, threads in (
        ("anyshard, 1 thread", 1, 1),
        ("anyshard, 2 threads", 1, 2),
        ("anyshard, -tp 2", 2, 1),
    ):
        ours = start([sys.executable, str(HERE / "arm_anyshard.py"), str(tp), str(threads)])
        arms.append(Arm(name, ours, threads))
    for arm in arms:
        shared = [other for other in arms if other.process is arm.process and other.ready]
        arm.ready = shared[0].ready if shared else arm.read()["ready"]
    return arms


# ours beside the peer that has as many cores
PAIRS = (
    ("anyshard, 1 thread", "HF, 1 thread"),
    ("anyshard, 2 threads", "HF, 2 threads"),
    ("anyshard, -tp 2", "HF, 2 threads"),
)


def measure(
    arms: list[Arm], tasks: list[Task], tokens: list[int], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Tokens/s by task and arm, one per round; the first round warms up and is dropped."""
    rates: dict[str, dict[str, list[float]]] = {t.name: {a.name: [] for a in arms} for t in tasks}
    for round_ in range(rounds + 1):
        turn = round_ % len(arms)
        for task in tasks:
            answers = {}
            for arm in arms[turn:] + arms[:turn]:
                time.sleep(PAUSE_S)
                answers[arm.name] = arm.ask(tokens[: task.prompt], task.new)
                if round_:
                    rates[task.name][arm.name].append(task.rate(answers[arm.name]))
            report_agreement(task, {name: a["tokens"] for name, a in answers.items()})
        print(f"round {round_} of {rounds}", file=sys.stderr, flush=True)
    return rates


def report_agreement(task: Task, tokens: dict[str, list[int]]) -> None:
    """Our arms must give equal tokens; HF's may part from them at a near tie, which is said."""
    ours = [t for name, t in tokens.items() if name.startswith("anyshard")]
    assert all(t == ours[0] for t in ours), "arms of anyshard differ"
    for name, t in tokens.items():
        if t != ours[0]:
            at = next(i for i, (a, b) in enumerate(zip(t, ours[0], strict=True)) if a != b)
            print(f"{task.name}: {name} chose another token at {at}", file=sys.stderr)


def first_byte_s(*flags: str) -> float:
    """Seconds from the start of the command to the first byte of the answer."""
    anyshard = str(Path(sys.executable).with_name("anyshard"))  # as installed by make setup
    command = [anyshard, "generate", "--chat", "--prompt", QUESTION, "--max-tokens", "8", *flags]
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        found = os.read(process.stdout.fileno(), 1)
        seconds = time.perf_counter() - begun
        process.stdout.read()
    if process.returncode or not found:
        sys.exit(f"{' '.join(command[1:])} ended with code {process.returncode}")
    return seconds


def cpu() -> str:
    """Its name, or its architecture where the kernel has none."""
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return models[0].split(":")[1].strip() if models else platform.machine()


def machine(arms: list[Arm], load: float) -> dict[str, Any]:
    """Where this ran; `load` is the load average before it began."""
    versions = {key: value for arm in arms for key, value in arm.ready.items()}
    return {
        "date": date.today().isoformat(),
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": round(load, 2),
        **versions,
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": median(values), "least": min(values), "most": max(values)}


def results(rates: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """A row per task and pair; the ratio is the median of the ratios within a round."""
    rows = []
    for task, by_arm in rates.items():
        for ours, peer in PAIRS:
            ratios = [a / b for a, b in zip(by_arm[ours], by_arm[peer], strict=True)]
            rows.append(
                {
                    "task": task,
                    "arm": ours,
                    "peer": peer,
                    "ours": spread(by_arm[ours]),
                    "theirs": spread(by_arm[peer]),
                    "ratio": spread(ratios),
                }
            )
    return rows


def shown(s: dict[str, float], form: str) -> str:
    """`2.20 (2.11–2.31)`."""
    return f"{s['median']:{form}} ({s['least']:{form}}–{s['most']:{form}})"


def measured(where: dict[str, Any], *, rounds: int, command: str) -> str:
    """The line below a table: how often, where and when."""
    return (
        f"Median (least–most) of {rounds} interleaved rounds; {where['cpu']}, {where['cores']} "
        f"cores, Linux {where['kernel']}; kernels {where['body']}; load {where['load_before']} "
        f"before; {where['date']}; `{command}`."
    )


def flags(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """What every benchmark takes."""
    parser = argparse.ArgumentParser(description=str(doc).partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="measured, after one warm-up")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    return parser


def table(found: dict[str, Any]) -> str:
    """Markdown, with the machine and the date below."""

    lines = [
        "| SmolLM2-135M, f32, batch 1 | anyshard tok/s | HF tok/s | ratio |",
        "| --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        name = f"{row['task']}, {row['arm'].removeprefix('anyshard, ')}"
        beside = f"{shown(row['theirs'], '.1f')}, {row['peer'].removeprefix('HF, ')}"
        lines.append(
            f"| {name} | {shown(row['ours'], '.1f')} | {beside} | {shown(row['ratio'], '.2f')} |"
        )
    lines += [
        "",
        *(
            f"First token of the command, warm{flags and ', ' + flags}: {shown(s, '.2f')} s."
            for flags, s in found["first_token_s"].items()
        ),
        "",
        "Median (least–most) of {rounds} interleaved rounds; {cpu}, {cores} cores, Linux {kernel}; "
        "torch {torch}, transformers {transformers}; kernels {body}; load {load_before} before; "
        "{date}; `python benchmarks/hf.py`.".format(rounds=found["rounds"], **found["machine"]),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = flags(__doc__, rounds=7)
    parser.add_argument("--quick", action="store_true", help="one short round: does it run?")
    parser.add_argument("--peer-environment", type=Path, default=ROOT / ".venv-bench")
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    rounds = 1 if asked.quick else asked.rounds
    new, prompt = (8, 64) if asked.quick else (128, 256)
    tasks = [Task("decode", 16, new), Task("prefill", prompt, 1)]
    peer = peer_environment(asked.peer_environment)
    checkpoint = open_checkpoint(None)
    tokens = open_tokenizer(checkpoint).encode(TEXT.read_text("utf-8"), add_special=True)
    with tempfile.TemporaryDirectory() as directory:
        write_weights(checkpoint, Path(directory))
        arms = start_arms(peer, Path(directory))
        where = machine(arms, load)
        rates = measure(arms, tasks, tokens, rounds)
        for process in {arm.process for arm in arms}:
            process.communicate()  # closes its stdin; it leaves
    commands = {flags: first_token(flags, rounds) for flags in ("", "-tp 2")}
    found = {
        "machine": where,
        "rounds": rounds,
        "rows": results(rates),
        "first_token_s": commands,
        "rates": rates,
    }
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    missed = broken_claims(found)
    print("\n".join(missed) or "every claim held", file=sys.stderr)
    sys.exit(CLAIM_BROKEN if missed else 0)


def broken_claims(found: dict[str, Any]) -> list[str]:
    """What the README claims and this run did not show, by medians."""
    slower = [
        f"{row['task']}: {row['arm']} is {row['ratio']['median']:.2f}x {row['peer']}"
        for row in found["rows"]
        if row["ratio"]["median"] < 1
    ]
    late = [
        f"first token after {s['median']:.2f} s {flags}, {FIRST_TOKEN_S:g} s are claimed"
        for flags, s in found["first_token_s"].items()
        if s["median"] > FIRST_TOKEN_S
    ]
    return slower + late


def first_token(flags: str, rounds: int) -> dict[str, float]:
    """Spread over `rounds` runs of the command, after one that warms the page cache."""
    return spread([first_byte_s(*flags.split()) for _ in range(rounds + 1)][1:])


if __name__ == "__main__":
    main()
