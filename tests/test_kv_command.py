"""--kv-cache-dtype from the command line: its profile, its bytes, one digest for every split."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import ADVERSARIAL_9_3, write_hf_model

from anyshard.checkpoint.cache import load_image
from anyshard.cli import main, running
from anyshard.cli.doctor import doctor
from anyshard.cli.flags import SplitFlags
from anyshard.cli.machine import read_machine
from anyshard.cli.running import open_model
from anyshard.config import KvType
from anyshard.host import size_text
from anyshard.loading import profile_of

Capture = pytest.CaptureFixture[str]
RUN = ("--prompt", "One, two, three,", "--max-tokens", "5", "--json", "--comm", "threads")


def generate(capfd: Capture, *flags: str) -> dict[str, Any]:
    """What the demo model says."""
    assert main(["generate", *RUN, *flags]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_model(tmp_path_factory.mktemp("m") / "m", ADVERSARIAL_9_3, seed=3)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_int8_is_a_profile_of_its_own_and_a_quarter_of_the_bytes(
    capfd: Capture, quantization: str
) -> None:
    arithmetic: Any = "int8" if quantization == "int8" else "f32"
    flags = ("--quantization", quantization)
    wide = generate(capfd, *flags)
    assert generate(capfd, *flags, "--kv-cache-dtype", "f32") | TIMES == wide | TIMES
    found = generate(capfd, *flags, "--kv-cache-dtype", "int8")
    assert found["profile"] == f"{arithmetic}+kv8"
    assert found["profile_hash"] == profile_of(arithmetic, "int8").sha256()
    assert found["profile_hash"] != wide["profile_hash"]
    assert found["logits_sha256"] != wide["logits_sha256"]
    assert found["kv_bytes"][0] * 64 == wide["kv_bytes"][0] * 17  # (64 + 4) / 256
    for split in (("-tp", "2"), ("-tp", "5", "-pp", "2", "--chunk", "1")):
        same = generate(capfd, *flags, "--kv-cache-dtype", "int8", *split)
        assert same["logits_sha256"] == found["logits_sha256"]


TIMES = {"timings": None}


def test_the_variable_says_it_too(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYSHARD_KV_CACHE_DTYPE", "int8")
    assert generate(capfd)["profile"].endswith("+kv8")


def test_verify_and_doctor_know_it(model: Path, capfd: Capture) -> None:
    flags = ["--kv-cache-dtype", "int8", "--json"]
    short = ["--in-process", "--prompt-tokens", "40", "--tokens", "3", "--batch", "1,17"]
    layouts = ["--layouts", "tp3,tp9pp3", "--chunk", "1,33,all"]
    assert main(["verify", str(model), *flags, *short, *layouts]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["equal"] and report["profile"] == "f32+kv8" and not report["vacuous"]
    assert main(["doctor", str(model), *flags]) == 0
    narrow = json.loads(capfd.readouterr().out)
    assert main(["doctor", str(model), "--json"]) == 0
    wide = json.loads(capfd.readouterr().out)
    assert narrow["profile"]["name"] == "f32+kv8"
    # heads of 16: two bytes of scale beside 16
    assert narrow["memory"]["kv"] * 64 == wide["memory"]["kv"] * 18


def test_against_float64_it_is_reported_and_not_judged(capfd: Capture, model: Path) -> None:
    from anyshard.accuracy import measure

    report = measure(str(model), tokens=[1, 2, 3, 4, 5] * 8, lengths=[40], kv="int8")
    assert report.manifest.profile == "f32+kv8" and report.passed is None
    found = {each.point: each.relative_error or 0 for each in report.ops}
    assert found["v"] > 1e-3, "int8 was not in it"
    assert found["attention"] < 1e-4, "queries and weights of 16 bits are all that is lost"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_int8_adds_little_to_what_float32_is_off() -> None:
    """Mean KL of the demo model from float64: 3.6e-4 at 256 tokens, 4.4e-4 at 1,500; f32 2e-12."""
    from anyshard.accuracy import measure

    kinds: tuple[KvType, ...] = ("f32", "int8")
    wide, narrow = (measure(None, lengths=[256], kv=kv).lengths[0].ours.kl_mean for kv in kinds)
    assert 0 <= wide < 1e-9, wide
    assert wide < narrow <= wide + 1e-3, (wide, narrow)


def test_an_unknown_type_is_refused(capfd: Capture) -> None:
    assert main(["generate", "--prompt", "a", "--kv-cache-dtype", "fp8"]) == 2
    assert '"auto", "f32", "int8"' in capfd.readouterr().err


# --- --kv-memory --------------------------------------------------------------------------------

PAGE = 32 * 3 * 64 * 2 * 4 * 30  # bytes of 32 tokens of the demo model: 3 KV heads of 64


@pytest.mark.parametrize(
    ("flags", "page"),
    [((), PAGE), (("--kv-cache-dtype", "int8"), PAGE * 17 // 64), (("-tp", "2"), PAGE * 4 // 3)],
)
def test_as_many_pages_as_fit_are_allocated(
    capfd: Capture, flags: tuple[str, ...], page: int
) -> None:
    """Two ranks both hold KV head 1 of 0, 1, 2."""
    run = [
        "generate",
        "--prompt",
        "a b c",
        "-n",
        "40",
        "--ignore-eos",
        "--json",
        "--comm",
        "threads",
    ]
    assert main([*run, *flags]) == 0
    whole = json.loads(capfd.readouterr().out)
    prompts = ["--prompt", "d e f g", "--prompt", "h", "--max-num-seqs", "3"]
    memory = ["--kv-memory", str(page * 3 + page - 1), "--max-model-len", "64"]
    assert main([*run, *prompts, *flags, *memory]) == 0
    found = json.loads(capfd.readouterr().out)
    assert sum(found["kv_bytes"]) == 3 * page
    first = found["results"][0]
    assert (first["logits_sha256"], first["tokens"]) == (whole["logits_sha256"], whole["tokens"])
    assert [len(each["tokens"]) for each in found["results"]] == [40, 40, 40]


def test_the_start_says_how_many_tokens_fit(capfd: Capture) -> None:
    run = ["generate", "--prompt", "a b c", "-n", "4", "--comm", "threads"]
    assert main([*run, "--kv-memory", f"{PAGE * 9}", "--max-model-len", "288"]) == 0
    assert "· room for 288 tokens" in capfd.readouterr().err
    assert main([*run, "--kv-memory", " 0.5 gib "]) == 0
    said = capfd.readouterr().err
    assert "· room for 32 tokens" in said  # no more than is needed
    holds = (1 << 29) // PAGE * 32
    assert f"note: --kv-memory  0.5 gib  has room for {holds} tokens; 1 at once of up to 32" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--kv-memory", "3x"), "--kv-memory is '3x'; a size such as 512M, 2.5G or 2Gi"),
        (("--kv-memory", "0.0001k"), "--kv-memory is '0.0001k'; a size such as"),
        (("--kv-memory", "٣G"), "a size such as"),
        (("--kv-memory", "0"), "--kv-memory is '0'; a size such as"),
        (("--kv-memory", str(PAGE - 1)), "holds no page: 32 tokens take"),
        (
            ("--kv-memory", str(PAGE * 2), "--max-model-len", "65"),
            f"--max-model-len is 65, but --kv-memory {PAGE * 2} has room for 64 tokens",
        ),
        (
            ("--kv-memory", str(PAGE * 2), "-n", "90"),
            f"and 90 more were asked for, but --kv-memory {PAGE * 2} has room for 64; shorten",
        ),
        (("--kv-memory", str(PAGE * 2), "-n", "90"), "or raise --kv-memory"),
    ],
)
def test_more_than_fits_is_refused_before_anything_is_loaded(
    capfd: Capture, flags: tuple[str, ...], said: str
) -> None:
    assert main(["generate", "--prompt", "a b c", *flags]) == 2
    refused = capfd.readouterr().err
    assert said in refused and refused.count("\n") == 1


def test_doctor_counts_what_kv_memory_takes(capfd: Capture) -> None:
    for flags, pages in ((("--kv-memory", str(PAGE * 4)), 4), (("--kv-memory", "1T"), 5), ((), 5)):
        limit = ["--max-model-len", str(32 * pages)]
        assert main(["doctor", "--json", *limit, *flags]) == 0
        facts = json.loads(capfd.readouterr().out)
        assert facts["memory"]["kv"] == PAGE * pages
    assert main(["doctor", "--max-model-len", "160", "--kv-memory", str(PAGE * 4)]) == 2
    assert "has room for 128 tokens" in capfd.readouterr().err


def test_auto_splits_by_the_sequence_where_kv_memory_has_room_only_then(capfd: Capture) -> None:
    """Two ranks of 9/3 heads hold 4 KV heads between them by heads, 3 by the sequence."""
    run = ["generate", "--prompt", "a b c", "-n", "90", "--ignore-eos", "--comm", "threads"]
    memory = ["-tp", "2", "--kv-memory", str(PAGE * 3 + 10)]
    assert main([*run, *memory, "--json"]) == 0
    said = capfd.readouterr()
    found = json.loads(said.out)
    assert found["layout"]["kv_shard"] == "sequence" and sum(found["kv_bytes"]) == PAGE * 3
    assert "KV is split by the sequence (2.9 MB of KV on the fullest rank, " in said.err
    assert f"by heads --kv-memory {PAGE * 3 + 10} has room for 64 of 96 tokens" in said.err
    assert main([*run, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["logits_sha256"] == found["logits_sha256"]
    assert main([*run, *memory, "--kv-shard", "heads"]) == 2
    assert f"but --kv-memory {PAGE * 3 + 10} has room for 64" in capfd.readouterr().err
    assert main([*run, "-tp", "2", "--kv-memory", str(PAGE * 4), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["layout"]["kv_shard"] == "heads"
    assert main(["doctor", "--json", *memory, "--max-model-len", "96"]) == 0
    assert json.loads(capfd.readouterr().out)["split"]["kv_shard"] == "sequence"


@pytest.fixture
def band() -> tuple[int, int]:
    """Bytes that 96 tokens take on two ranks by heads, whose KV --kv-memory caps at 64 tokens, and
    by the sequence, of which it holds 96; in between neither way has room for all of them."""
    split: Any = {"quantization": "none", "tensor_parallel_size": 2}
    split["kv_memory"] = str(PAGE * 3 + 10)
    heads, sequence = (
        open_model(None, SplitFlags(kv_shard=kind, **split), num_prompts=1)
        for kind in ("heads", "sequence")
    )
    return heads.need(96).total, sequence.need(96).total


@pytest.mark.ranks
def test_where_neither_way_has_room_both_reasons_are_told_and_nothing_is_loaded(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch, band: tuple[int, int], tmp_path: Path
) -> None:
    heads, sequence = band
    assert heads < sequence, "there is no such band"
    loaded = tmp_path / "loaded"

    def note_and_load(*arguments: object, **options: object) -> object:
        loaded.touch()
        return load_image(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("anyshard.loading.load_image", note_and_load)
    run = ["generate", "--prompt", "a b c", "--ignore-eos", "--json"]
    run += ["-tp", "2", "--kv-memory", str(PAGE * 3 + 10)]
    needed = size_text(sequence)
    for free in (heads, sequence - 1):
        monkeypatch.setattr(running, "read_memory", lambda free=free: (1 << 40, free))
        want = (
            f"96 tokens have no room: --kv-memory {PAGE * 3 + 10} holds 64 on these ranks by "
            f"heads, and by the sequence {needed} of memory are needed and {size_text(free)} are "
            "free; raise --kv-memory, lower --max-tokens or --max-model-len, or end other programs"
        )
        for limit in (["-n", "90"], ["--max-model-len", "96"]):
            assert main([*run, *limit]) == 2
            out, err = capfd.readouterr()
            assert (out, err) == ("", f"anyshard: {want}\n")
        machine = replace(read_machine(), memory_free=free)
        monkeypatch.setattr(sys.modules[doctor.__module__], "read_machine", lambda m=machine: m)
        assert main(["doctor", *run[5:], "--max-model-len", "96"]) == 2
        out, err = capfd.readouterr()
        assert err == f"anyshard: {want}\n" and "no room in --kv-memory" in out
    assert not loaded.exists()
    assert main([*run, "-n", "60", "--comm", "threads"]) == 0
    assert json.loads(capfd.readouterr().out)["layout"]["kv_shard"] == "heads"
    monkeypatch.setattr(running, "read_memory", lambda: (1 << 40, sequence))
    assert main([*run, "-n", "90", "--comm", "threads"]) == 0
    assert json.loads(capfd.readouterr().out)["layout"]["kv_shard"] == "sequence"
    assert loaded.exists()
