"""--wire-dtype from the command line: its profile, bytes and cuts, one digest for every split."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from models import DEEP_10, write_hf_model

from anyshard.cli import main
from anyshard.loading import profile_of

Capture = pytest.CaptureFixture[str]
RUN = ("--prompt", "One, two, three,", "--max-tokens", "3", "--json", "--comm", "threads")
INT8 = ("--wire-dtype", "int8")
TIMES = {"timings": None}


def generate(capfd: Capture, *flags: str) -> dict[str, Any]:
    """What the demo model says."""
    assert main(["generate", *RUN, *flags]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_model(tmp_path_factory.mktemp("m") / "m", DEEP_10, seed=3, adversarial=True)


def test_int8_is_a_profile_of_its_own_and_a_quarter_of_the_bytes(capfd: Capture) -> None:
    wide, split = generate(capfd), generate(capfd, "-pp", "2")
    assert generate(capfd, "--wire-dtype", "f32") | TIMES == wide | TIMES
    found = generate(capfd, *INT8)
    assert found["profile"] == "f32+w8"
    assert found["profile_hash"] == profile_of("f32", wire="int8").sha256() != wide["profile_hash"]
    assert found["logits_sha256"] != wide["logits_sha256"]
    narrow = generate(capfd, *INT8, "-pp", "2")
    assert narrow["logits_sha256"] == found["logits_sha256"]
    sent, messages = narrow["wire_bytes_sent"][0], narrow["wire_messages_sent"][0]
    assert messages == split["wire_messages_sent"][0]
    rows = (split["wire_bytes_sent"][0] - 40 * messages) // 2304
    assert sent == rows * 612 + 40 * messages


@pytest.mark.parametrize("split", [("-pp", "8"), ("-tp", "2", "--layers", "23,7", "--chunk", "1")])
def test_every_cut_of_the_list_has_its_digest(capfd: Capture, split: tuple[str, ...]) -> None:
    same = generate(capfd, *INT8, *split)
    assert same["logits_sha256"] == generate(capfd, *INT8)["logits_sha256"]
    if split[0] == "-pp":
        assert same["layout"]["layers"] == [4, 4, 4, 3, 4, 4, 4, 3]


def test_the_variable_says_it_too(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYSHARD_WIRE_DTYPE", "int8")
    assert generate(capfd)["profile"] == "f32+w8"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--layers", "22,8"), "the nearest is --layers 23,7"),
        (("-pp", "9"), "so 1 to 8 stages can share them"),
    ],
)
@pytest.mark.parametrize("verb", ["generate", "doctor"])
def test_a_cut_off_the_list_is_refused_with_the_nearest(
    capfd: Capture, verb: str, flags: tuple[str, ...], words: str
) -> None:
    prompt = ("--prompt", "a") if verb == "generate" else ()
    assert main([verb, *prompt, *INT8, *flags]) == 2
    said = capfd.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and not said.out


def test_an_unknown_type_is_refused(capfd: Capture) -> None:
    assert main(["generate", "--prompt", "a", "--wire-dtype", "fp8"]) == 2
    assert '"auto", "f32", "int8"' in capfd.readouterr().err


def test_verify_and_doctor_know_it(model: Path, capfd: Capture) -> None:
    flags = [*INT8, "--json"]
    short = ["--in-process", "--prompt-tokens", "40", "--tokens", "3", "--batch", "1,17"]
    layouts = ["--layouts", "pp3,tp2pp8,layers9+1", "--chunk", "7,all"]
    assert main(["verify", str(model), *flags, *short, *layouts]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["equal"] and report["profile"] == "f32+w8" and not report["vacuous"]
    assert all(cell["witness"]["pp"] > 0 for cell in report["cells"])
    assert main(["doctor", str(model), *flags, "-pp", "8"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["profile"]["name"] == "f32+w8" and found["split"]["pp"] == 8
    assert main(["verify", str(model), *INT8, *short, "--layouts", "layers6+4"]) == 2
    assert "layout layers6+4: --layers 6,4 is not possible" in capfd.readouterr().err


def test_the_quick_grid_runs_on_cuts_of_the_list(model: Path, capfd: Capture) -> None:
    flags = ["--in-process", "--prompt-tokens", "40", "--tokens", "3", *INT8, "--json"]
    assert main(["verify", str(model), *flags]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["equal"] and {"pp2", "pp3", "tp2pp2"} <= {c["cell"] for c in report["cells"]}


def test_against_float64_it_is_reported_and_not_judged(model: Path) -> None:
    from anyshard.accuracy import measure

    run: Any = partial(measure, str(model), tokens=[1, 2, 3, 4, 5] * 8, lengths=[40])
    narrow, wide = run(wire="int8"), run()
    assert narrow.manifest.profile == "f32+w8" and narrow.passed is None
    kl = [report.lengths[0].ours.kl_mean for report in (narrow, wide)]
    assert kl[0] > 100 * abs(kl[1]), "the wire was not in it"
    errors = {(each.layer, each.point): each.relative_error or 0 for each in narrow.ops}
    assert max(errors.values()) < 1e-3, "rounding on the wire is the profile's, and no op's error"


def test_records_of_two_cuts_agree_and_other_profiles_do_not_compare(
    tmp_path: Path, capfd: Capture
) -> None:
    files = [str(tmp_path / name) for name in ("one", "three", "plain")]
    run = ["generate", "--prompt", "a b", "--max-tokens", "2", "--comm", "threads"]
    for file, flags in zip(files, (INT8, (*INT8, "-pp", "3", "-tp", "2"), ()), strict=True):
        assert main([*run, *flags, "--record", file]) == 0
    capfd.readouterr()
    assert main(["compare", files[0], files[1]]) == 0
    assert main(["compare", files[0], files[2]]) == 2
