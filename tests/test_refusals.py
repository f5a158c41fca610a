"""Every mistake through the command: exit 2, one sentence, nothing on stdout, no traceback.

A cache that cannot be used is no mistake: the same one sentence, and the run goes on.

docs/refusals.md shows the sentences; it is written from these cases and held to them:
`python tests/test_refusals.py` writes it again. The cases of the readers and the configuration
are those of their own tests.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from draft_cases import REFUSED as DRAFTS_REFUSED
from gguf_files import write_tiny_gguf
from gguf_models import write_gguf_model
from models import ADVERSARIAL_9_3, write_hf_model
from quantized import REFUSED as REFUSED_QUANTIZED
from records import empty_record, small_record
from safetensors.numpy import load_file, save_file
from test_bench import REFUSED as BENCH_REFUSED
from test_checkpoint_gguf import HOSTILE as HOSTILE_GGUF
from test_checkpoint_gguf import locked
from test_checkpoint_hf import HOSTILE as HOSTILE_SAFETENSORS
from test_checkpoint_hf import written
from test_config import HF, HF_REFUSED
from test_doctor import LLAMA_70B, sparse_model

from anyshard.cli import app, main, running
from anyshard.cli.variables import OTHER_NAMES, flag_variables
from anyshard.fidelity import Record, tokens_sha256, write_record
from anyshard.request import Sampling

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "refusals.md"
#: Makes the mistake in a folder; returns variables such as A=b, then the arguments after the verb:
#: generate, unless they begin with another.
Build = Callable[[Path], list[str]]
FREE_BYTES = 250_000_000  # of memory, by a variable of that name

LOOP = "{% for i in range(99999) %}"

INTRODUCTION = """# What is refused, and how it is said

A mistake ends in exit code 2 and one sentence on stderr; stdout stays empty and nothing is left
behind. Sizes and offsets in files are checked against the length of the file before anything is
allocated. This page is written from the cases of `tests/test_refusals.py`, which holds it true;
`DIR` stands for a folder.
"""

NOTES_INTRODUCTION = """## The image cache

These are no refusals: the run goes on, and stderr has one note.
"""


def model_file(content: bytes) -> Build:
    def build(folder: Path) -> list[str]:
        (folder / "model.gguf").write_bytes(content)
        return [str(folder / "model.gguf"), "--prompt", "x"]

    return build


def model_directory(change: Callable[[Path], None]) -> Build:
    """A whole HF directory, then spoilt."""

    def build(folder: Path) -> list[str]:
        directory = write_hf_model(folder / "model", ADVERSARIAL_9_3, seed=1)
        change(directory)
        return [str(directory), "--prompt", "x"]

    return build


def configured(**changes: Any) -> Build:
    def build(folder: Path) -> list[str]:
        (folder / "config.json").write_text(json.dumps(HF | changes))
        return [str(folder), "--prompt", "x"]

    return build


def hostile_safetensors(header: Any, payload: int) -> Build:
    def change(directory: Path) -> None:
        written(directory, header, payload).rename(directory / "model.safetensors")

    return model_directory(change)


def rewritten(**changes: Any) -> Build:
    """Tensors replaced or (None) left out, dots in names written as __."""

    def change(directory: Path) -> None:
        path = directory / "model.safetensors"
        tensors: dict[str, Any] = load_file(path)
        tensors |= {name.replace("__", "."): value for name, value in changes.items()}
        save_file({n: t for n, t in tensors.items() if t is not None}, path)

    return model_directory(change)


def cut(directory: Path) -> None:
    os.truncate(directory / "model.safetensors", 5000)


def deepened(directory: Path) -> None:
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | {"num_hidden_layers": 1 << 27}
    path.write_text(json.dumps(raw))


def tiny_gguf(*arguments: str) -> Build:
    """A sound little GGUF model with a tokenizer, and what is asked of it."""

    def build(folder: Path) -> list[str]:
        write_tiny_gguf(folder / "tiny.gguf")
        return [str(folder / "tiny.gguf"), *arguments]

    return build


def templated(source: str) -> Build:
    def build(folder: Path) -> list[str]:
        write_tiny_gguf(folder / "tiny.gguf", template=source)
        return [str(folder / "tiny.gguf"), "--chat", "--prompt", "x"]

    return build


def gguf_with(**metadata: object) -> Build:
    def build(folder: Path) -> list[str]:
        named = {key.replace("__", "."): value for key, value in metadata.items()}
        write_gguf_model(folder / "model.gguf", ADVERSARIAL_9_3, metadata=named)
        return [str(folder / "model.gguf"), "--prompt", "x"]

    return build


def prompts(content: bytes) -> Build:
    def build(folder: Path) -> list[str]:
        (folder / "prompts.jsonl").write_bytes(content)
        write_tiny_gguf(folder / "tiny.gguf")
        return [str(folder / "tiny.gguf"), "--prompts", str(folder / "prompts.jsonl")]

    return build


def split_without_a_part(folder: Path) -> list[str]:
    write_gguf_model(folder / "m.gguf", ADVERSARIAL_9_3, split_tensors=20)
    (folder / "m-00002-of-00003.gguf").unlink()
    return [str(folder / "m-00001-of-00003.gguf"), "--prompt", "x"]


def renamed_part(folder: Path) -> list[str]:
    write_gguf_model(folder / "m.gguf", ADVERSARIAL_9_3, split_tensors=20)
    shutil.move(folder / "m-00001-of-00003.gguf", folder / "model.gguf")
    return [str(folder / "model.gguf"), "--prompt", "x"]


def compared(spoil: Callable[[bytes], bytes] | None = None) -> Build:
    """A sound record and one that is spoilt, or (None) is not there."""

    def build(folder: Path) -> list[str]:
        a, b = folder / "a.anyd", folder / "b.anyd"
        write_record(small_record(), a)
        if spoil is not None:
            b.write_bytes(spoil(a.read_bytes()))
        return ["compare", str(a), str(b)]

    return build


def compared_with(
    make: Callable[..., Record] = small_record, prompt: list[int] | None = None, **changes: Any
) -> Build:
    """A record and one of another run."""

    def build(folder: Path) -> list[str]:
        a, b = folder / "a.anyd", folder / "b.anyd"
        write_record(make(), a)
        ids = np.array(prompt or [5, 6, 7], np.int32)
        other = make(tokens_sha256=tokens_sha256(ids), **changes)
        write_record(replace(other, prompt=ids), b)
        return ["compare", str(a), str(b)]

    return build


def plain(*arguments: str) -> Build:
    return lambda folder: [a.replace("DIR", str(folder)) for a in arguments]


def in_a_circle(folder: Path) -> list[str]:
    (folder / "a.gguf").symlink_to("b.gguf")
    (folder / "b.gguf").symlink_to("a.gguf")
    return [str(folder / "a.gguf"), "--prompt", "x"]


def link_to_nothing(folder: Path) -> list[str]:
    (folder / "a.gguf").symlink_to("b.gguf")
    return [str(folder / "a.gguf"), "--prompt", "x"]


def one_file_of_several(folder: Path) -> list[str]:
    (folder / "model.safetensors").write_bytes(b"")
    return [str(folder / "model.safetensors"), "--prompt", "x"]


def with_variable(name: str, value: str) -> Build:
    return lambda folder: [f"{name}={value}", *tiny_gguf("--prompt", "x")(folder)]


def long_prompts(*arguments: str) -> Build:
    """Three hundred sequences, and 250 MB of free memory."""

    def build(folder: Path) -> list[str]:
        directory = write_hf_model(folder / "model", replace(ADVERSARIAL_9_3, context=8192), seed=1)
        (folder / "prompts.jsonl").write_text('"x"\n' * 300)
        prompts = ["--prompts", str(folder / "prompts.jsonl")]
        return [f"FREE_BYTES={FREE_BYTES}", str(directory), *prompts, *arguments]

    return build


def llama_of_282_gb(folder: Path) -> list[str]:
    directory = sparse_model(folder / "llama70b", LLAMA_70B)
    return [f"FREE_BYTES={FREE_BYTES}", str(directory), "--prompt", "x"]


def nan_in_a_weight(folder: Path) -> list[str]:
    write_tiny_gguf(folder / "tiny.gguf")
    content = bytearray((folder / "tiny.gguf").read_bytes())
    content[-64:-60] = struct.pack("<f", float("nan"))  # in the last tensor of the file
    (folder / "tiny.gguf").write_bytes(content)
    return [str(folder / "tiny.gguf"), "--prompt", "x"]


SECTIONS: dict[str, dict[str, tuple[Build, str]]] = {
    "GGUF files": {
        name: (model_file(content), words) for name, (content, words) in HOSTILE_GGUF.items()
    }
    | {
        "a part of a split model is missing": (split_without_a_part, "part 2 of 3 does not exist"),
        "a part of a split model was renamed": (renamed_part, "is one of 3 parts"),
        "sliding window": (gguf_with(llama__attention__sliding_window=64), "sliding windows"),
        "mixture of experts": (gguf_with(llama__expert_count=8), "mixtures of experts"),
        "positions scaled": (gguf_with(llama__rope__scaling__type="yarn"), "'yarn' is not"),
        "a weight is NaN": (nan_in_a_weight, "holds a NaN or an infinity"),
    },
    "safetensors files": {
        name: (hostile_safetensors(header, payload), words)
        for name, (header, payload, words) in HOSTILE_SAFETENSORS.items()
    }
    | {
        "the file ends in the middle": (model_directory(cut), "the header needs"),
        "a tensor is missing": (
            rewritten(model__norm__weight=None),
            "'model.norm.weight' is missing",
        ),
        "a tensor is left over": (
            rewritten(model__extra__weight=np.ones(3, np.float32)),
            "has no place in this model",
        ),
        "a tensor has another shape than the configuration says": (
            rewritten(model__norm__weight=np.ones(3, np.float32)),
            "has shape (3,)",
        ),
        "more layers than tensors": (
            model_directory(deepened),
            "134217728 layers, but the file holds",
        ),
        "no weights": (
            model_directory(lambda d: (d / "model.safetensors").unlink()), "has neither model.safet"
        ),
        "weights in pickles only": (
            model_directory(
                lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin") and None
            ),
            "are programs and are not read",
        ),
        "no config.json": (
            model_directory(lambda d: (d / "config.json").unlink()), "has no config.json"
        ),
    },
    "config.json": {
        json.dumps(change)[1:-1]: (configured(**change), words.lstrip("^"))
        for change, words in HF_REFUSED
        if len(json.dumps(change)) < 90
    },
    "Quantised models": REFUSED_QUANTIZED,
    "Tokenizers and templates": {
        "no tokenizer": (model_directory(lambda d: None), "comes without a tokenizer"),
        "a template that is no template": (
            templated("{% for m in messages %}"), "line 1 of the chat template"
        ),
        "a template that refuses": (
            templated("{{ raise_exception('roles must alternate') }}"),
            "cannot render these messages: roles must alternate",
        ),
        "a template without end": (
            templated(LOOP + LOOP + "{% endfor %}{% endfor %}"),
            "ran longer than 2.0 s",
        ),
        "no template for --chat": (tiny_gguf("--prompt", "x", "--chat"), "has no chat template"),
    },
    "MODEL": {
        "not there": (plain("DIR/no.gguf", "--prompt", "x"), "neither a directory nor"),
        "a Hub id, offline": (plain("org/absent-model", "--prompt", "x"), "HF_HUB_OFFLINE forbids"),
        "empty": (plain("", "--prompt", "x"), "MODEL is empty"),
        "a safetensors file": (one_file_of_several, "name its directory"),
        "an empty directory": (plain("DIR", "--prompt", "x"), "has no config.json"),
        "a symbolic link that leads in a circle": (in_a_circle, "to 'b.gguf', a loop;"),
        "a symbolic link to nothing": (link_to_nothing, "to 'b.gguf', which does not exist"),
    },
    "Memory": {
        "KV of all sequences is more than there is": (
            long_prompts("--max-model-len", "8192", "--max-num-seqs", "300"),
            "lower --max-model-len or --max-num-seqs",
        ),
        "buffers are more than there is": (
            long_prompts("--max-model-len", "8192", "--max-num-seqs", "1", "--chunk", "8192"),
            "lower --max-model-len or --chunk",
        ),
        "the model alone is more than there is": (
            llama_of_282_gb,
            "; end other programs, or take a smaller model",
        ),
        "the processes of many ranks": (long_prompts("-tp", "9"), "; take fewer ranks"),
    },
    "Prompts and flags": {
        "a line that is not UTF-8": (prompts(b'"fine"\n"a\xff"\n'), "line 2 is not UTF-8"),
        "a file that is not UTF-8": (prompts('"fine"\n'.encode("utf-16")), "line 1 is not UTF-8"),
        "a line that is not JSON": (prompts(b'"fine"\n{\n'), "line 2"),
        "an unknown field": (prompts(b'{"prompt": "a", "temp": 1}\n'), "unknown field 'temp'"),
        "an unknown flag": (tiny_gguf("--prompt", "x", "--no-such-flag"), "--no-such-flag"),
        "more ranks than heads": (tiny_gguf("--prompt", "x", "-tp", "5"), "4 query heads"),
        "a shard that is none": (tiny_gguf("--prompt", "x", "--kv-shard", "rows"), "--kv-shard"),
        "a sequence in nine": (long_prompts("-tp", "9", "--kv-shard=sequence"), "with 9 ranks"),
        "more stages than layers": (tiny_gguf("--prompt", "x", "-pp", "2"), "1 layer"),
        "an empty prompt": (tiny_gguf("--prompt", ""), "empty"),
        "an answer beyond the context": (
            tiny_gguf("--prompt", "abc", "--max-tokens", "500"),
            "the context holds 128",
        ),
    },
    "Variables": {
        "misspelt": (with_variable("ANYSHARD_MAX_TOKNS", "3"), "nearest that exists is ANYSHARD_M"),
        "like no flag": (with_variable("ANYSHARD_QQ", "3"), "ANYSHARD_QQ is no flag"),
        "a flag that takes something away": (
            with_variable("ANYSHARD_NO_CACHE", "true"),
            "the nearest that exists is ANYSHARD_CACHE",
        ),
        "empty": (with_variable("ANYSHARD_THREADS", ""), "ANYSHARD_THREADS is empty"),
        "an unknown value": (with_variable("ANYSHARD_KERNELS", "fast"), "fast"),
        "a value out of range": (with_variable("ANYSHARD_TP", "0"), "is 0"),
    },
    "Records": {
        "a folder that is not there": (
            tiny_gguf("--prompt", "x", "--record", "absent/run.anyd"),
            "the folder absent does not exist",
        ),
        "a folder in the place of a file": (
            tiny_gguf("--prompt", "x", "--record", "."),
            "is a folder; name a file in it",
        ),
        "no file of that name": (compared(), "b.anyd: cannot be read"),
        "another format": (compared(lambda whole: b"{}"), "is no record"),
        "a newer version": (compared(lambda whole: whole[:8] + b"\2" + whole[9:]), "of version 2,"),
        "cut short": (compared(lambda whole: whole[:-100]), "it is cut short"),
        "a byte that is another": (
            compared(lambda whole: whole[:-50] + b"\xff" + whole[-49:]), "the file is damaged"
        ),
        "other weights": (compared_with(weights_sha256="d" * 64), "other weights: sha256 aaa"),
        "another model": (compared_with(model={"num_layers": 2, "hidden": 96}), "hidden is 64 and"),
        "another prompt": (compared_with(prompt=[5, 6, 8]), "other prompt tokens"),
        "another profile": (compared_with(profile_sha256="e" * 64), "other profiles"),
        "another seed": (
            compared_with(sampling=Sampling(temperature=1, seed=7)),
            "other sampling: temperature is 0.0 and 1.0; other sampling: seed is 0 and 7",
        ),
        "nothing in common": (compared_with(empty_record), "no position ran in both; they have 0"),
    },
    "Drafts": DRAFTS_REFUSED,
    "Benchmarks": BENCH_REFUSED,
}  # fmt: skip


def cached_tiny(folder: Path) -> list[str]:
    write_tiny_gguf(folder / "tiny.gguf", types={"layers.0.gate": "Q4_0"})
    return [str(folder / "tiny.gguf"), "--prompt", "abc", "--max-tokens", "1", "--ignore-eos"]


def a_file_in_the_way(folder: Path) -> None:
    (folder / "anyshard").write_text("")


def open_to_others(folder: Path) -> None:
    (folder / "anyshard" / "images").mkdir(parents=True)
    (folder / "anyshard" / "images").chmod(0o777)


def full(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("anyshard.checkpoint.cache._free_bytes", lambda place: 64 << 10)


def fills_up(folder: Path, patch: pytest.MonkeyPatch) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr("os.fsync", fsync)


def read_only(folder: Path, patch: pytest.MonkeyPatch) -> None:
    def rename(source: Path, target: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    patch.setattr("os.rename", rename)


def homeless(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.delenv("XDG_CACHE_HOME")
    patch.delenv("HOME", raising=False)


NOTES: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], None], str]] = {
    "the disk is too full to begin": (full, "no space left in DIR/anyshard/images ("),
    "the disk fills up while it is written": (fills_up, "no space left in DIR/anyshard/images;"),
    "the disk is read-only": (read_only, "DIR/anyshard/images is read-only"),
    "a file in its place": (lambda d, _: a_file_in_the_way(d), "(Not a directory)"),
    "a folder in which others may write": (lambda d, _: open_to_others(d), "others may write in"),
    "no home": (homeless, "neither XDG_CACHE_HOME nor HOME names a folder"),
}  # test_cache_command.py has the first three on disks that are so
CASES = {
    f"{section}: {name}": case
    for section, cases in SECTIONS.items()
    for name, case in cases.items()
}


def noted(name: str, folder: Path) -> tuple[int, str, str]:
    """`said` of a sound model, with something wrong with the cache; stderr is the note alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        NOTES[name][0](folder, patch)
        code, out, err = said(cached_tiny, folder)
    notes = [line for line in err.splitlines(keepends=True) if line.startswith("note: ")]
    return code, out, "".join(notes)


def command(arguments: list[str]) -> list[str]:
    """The whole command line: of generate, if no other verb is named."""
    if arguments[0] in ("bench", "compare", "quantize"):
        return arguments
    return ["generate", *arguments, "--comm", "threads"]


def said(build: Build, folder: Path) -> tuple[int, str, str]:
    """(exit code, stdout, stderr with the folder as DIR) of the command."""
    out, err = StringIO(), StringIO()
    before = signal.getsignal(signal.SIGTERM)
    arguments = build(folder)
    try:
        with pytest.MonkeyPatch.context() as patch:
            while arguments and re.match("[A-Z_]+=", arguments[0]):
                patch.setenv(*arguments.pop(0).split("=", 1))
            free = os.environ.get("FREE_BYTES")
            if free is not None:
                patch.setattr(running, "read_memory", lambda: (1 << 40, int(free)))
            with redirect_stdout(out), redirect_stderr(err):
                code = main(command(arguments))
    finally:
        signal.signal(signal.SIGTERM, before)
    return code, out.getvalue(), err.getvalue().replace(str(folder), "DIR")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "DIR/hub")


@pytest.fixture(scope="module")
def documented() -> Iterator[str]:
    yield DOCUMENT.read_text("utf-8")


def row(name: str, sentence: str) -> str:
    """One line of the table; what a library says about JSON is left out."""
    text = re.sub(r"not valid JSON \(.*\)", "not valid JSON (…)", sentence.strip())
    shown = text.removeprefix("anyshard: ").removeprefix("note: ").replace("|", "\\|")
    return f"| {name.replace('|', chr(92) + '|')} | {shown} |"


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_sentence_and_exit_2(name: str, tmp_path: Path, documented: str) -> None:
    build, words = CASES[name]
    code, out, err = said(build, tmp_path)
    assert (code, out) == (2, ""), err
    assert re.search(words, err) or words in err, err
    assert err.startswith("anyshard: ") and err.count("\n") == 1
    assert "Traceback" not in err
    assert row(name.split(": ", 1)[1], err) in documented.splitlines()


def test_the_table_has_a_row_for_each_case_and_no_other(documented: str) -> None:
    rows = [line for line in documented.splitlines() if line.startswith("| ")]
    assert len(rows) - 2 * (len(SECTIONS) + 1) == len(CASES) + len(NOTES)


@pytest.mark.parametrize("name", NOTES)
def test_a_cache_that_cannot_be_used_is_one_sentence_and_an_answer(
    name: str, tmp_path: Path, documented: str
) -> None:
    code, out, note = noted(name, tmp_path)
    assert code == 0 and out and note.count("\n") == 1
    assert NOTES[name][1] in note and note.endswith("; --no-cache stops trying\n")
    assert row(name, note) in documented.splitlines()
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".part", ".image")]


def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    with locked(tmp_path):
        code, out, err = said(plain(str(tmp_path / "tiny.gguf"), "--prompt", "x"), tmp_path)
    assert (code, out) == (2, "") and "Permission denied" in err


def test_every_variable_that_the_repository_reads_is_known() -> None:
    """Those of the build and its scripts are listed; those of flags come from the flags."""
    root = DOCUMENT.parent.parent
    read = re.compile(r"(?:[\"'.]|ENV\{|export )(ANYSHARD_[A-Z_]+)\b")
    files = [root / "pyproject.toml", root / "CMakeLists.txt", root / "Makefile"]
    for folder in ("scripts", "cmake", "benchmarks", ".ci"):
        files += [path for path in (root / folder).rglob("*") if path.suffix in (".py", "")]
    texts = [path.read_text("utf-8") for path in files if path.is_file()]
    found = {name for text in texts for name in read.findall(text)}
    cmakes_own = set(re.findall(r"(?:option|set)\((ANYSHARD_[A-Z_]+)", texts[1]))
    assert found - cmakes_own - flag_variables(app) == OTHER_NAMES


@pytest.mark.parametrize("name", sorted(OTHER_NAMES | {"ANYSHARD_SYSTEM", "ANYSHARD_TP"}))
def test_variables_of_the_build_and_of_other_verbs_are_left_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`doctor` has no --system."""
    write_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["doctor", str(tmp_path / "tiny.gguf")]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("verb", ["generate", "chat", "bench", "doctor"])
def test_every_verb_refuses_a_misspelt_variable(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANYSHARD_SISTEM", "1")
    assert main([verb]) == 2
    assert "ANYSHARD_SYSTEM" in capsys.readouterr().err


def document() -> str:
    parts = [INTRODUCTION]
    for section, cases in SECTIONS.items():
        parts.append(f"\n## {section}\n\n| what is wrong | what is said |\n| --- | --- |\n")
        for name, (build, _) in cases.items():
            with TemporaryDirectory() as folder:
                parts.append(row(name, said(build, Path(folder))[2]) + "\n")
    parts.append(f"\n{NOTES_INTRODUCTION}\n| what is wrong | what is said |\n| --- | --- |\n")
    for name in NOTES:
        with TemporaryDirectory() as folder:
            parts.append(row(name, noted(name, Path(folder))[2]) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE, constants.HF_HUB_CACHE = True, "DIR/hub"
    os.environ["ANYSHARD_QUANTIZATION"] = "none"  # as conftest.py has it
    text = document()
    DOCUMENT.write_text(text, "utf-8")
    sys.stderr.write(f"{DOCUMENT}: {text.count(chr(10))} lines\n")
