"""`anyshard verify --against`: what it prints and refuses. The figures: test_accuracy*.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
from models import MODELS, write_hf_model
from test_accuracy_figures import report
from test_checkpoint_gguf import needs_demo

from anyshard import accuracy
from anyshard.accuracy.measure import Against as measured
from anyshard.cli import main
from anyshard.cli.correctness import Against as offered


def test_the_command_offers_what_can_be_measured() -> None:
    """Written twice: what measures is heavy, and imported after the command line is known."""
    assert get_args(offered) == get_args(measured)


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence of a command that ends with 2 and prints nothing else."""
    assert main(["verify", *arguments]) == 2
    shown = capfd.readouterr()
    assert shown.out == "" and len(shown.err.strip().splitlines()) == 1
    return shown.err


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--report", "out.html"), "--report"),
        (("--in-process",), "--in-process"),
        (("--prompt-tokens", "9"), "--prompt-tokens"),
        (("--tokens", "9"), "--tokens"),
        (("--deadline", "30"), "--deadline"),
        (("--layouts", "tp2"), "--layouts"),
        (("--grid", "full"), "--grid"),
    ],
)
def test_flags_of_the_grid_have_no_place(
    flags: tuple[str, ...], word: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert f"runs no cells, so {word} has no place" in refused(
        capfd, "--against", "float64", *flags
    )


@pytest.mark.parametrize(("ours", "hf", "code"), [(2.1, 1.0, 4), (2.0, 1.0, 0), (9.0, None, 0)])
def test_the_verdict_is_the_exit_code(
    ours: float,
    hf: float | None,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(accuracy, "measure", lambda *_, **__: report(ours, hf))
    for more in ((), ("--json",)):
        assert main(["verify", "--against", "float64" if hf is None else "hf", *more]) == code
        assert capfd.readouterr().out


def test_a_model_that_reads_no_text_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = MODELS["adversarial-9-3"]
    path = str(write_hf_model(tmp_path / "m", config, seed=7, adversarial=True))
    assert "tokenizer" in refused(capfd, path, "--against", "float64")


@needs_demo
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(900)
@pytest.mark.parametrize("against", ["float64", "hf"])
def test_the_demo_model_is_accurate(against: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--against", against, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["passed"] is (True if against == "hf" else None)
    assert [figures["length"] for figures in found["lengths"]] == [64, 512, 1500]
    assert {op["point"] for op in found["ops"]} >= {"q", "attention", "ffn", "logits"}
