"""What benchmarks/kl.py reads of llama-perplexity, and when it says that int8 is too far off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from benchmark_modules import benchmark

SAID = """
====== Perplexity statistics ======
Mean PPL(Q)                   :  38.699998 ±   1.500000
Mean PPL(base)                :  38.488000 ±   1.490000
====== KL divergence statistics ======
Mean    KLD:   0.004680 ±   0.000120
Maximum KLD:   0.120000
99.9%   KLD:   0.042000
99.0%   KLD:   0.021000
"""


@pytest.fixture
def kl() -> Iterator[ModuleType]:
    with benchmark("kl") as module:
        yield module


def test_figures_are_read_from_what_it_says(kl: ModuleType) -> None:
    assert kl.figures(SAID) == {
        "mean": 0.00468,
        "p99.9": 0.042,
        "max": 0.12,
        "perplexity": 38.699998,
        "of_float": 38.488,
    }
    with pytest.raises(SystemExit, match="did not say max"):
        kl.figures(SAID.replace("Maximum KLD", "Most KLD"))


def test_tokens_are_read_from_the_head_of_its_file(kl: ModuleType, tmp_path: Path) -> None:
    tokens = np.arange(2 * kl.CHUNK, dtype=np.int32)
    head = np.array([kl.CHUNK, 49152, 2], np.int32)
    (tmp_path / "base").write_bytes(b"_logits_" + head.tobytes() + tokens.tobytes() + b"logits")
    assert kl.base_tokens(tmp_path / "base") == tokens.tolist()


@pytest.mark.parametrize(("mean", "code"), [(0.005, 0), (0.0052, 4)])
def test_more_than_a_tenth_above_q8_0_is_a_broken_claim(
    kl: ModuleType,
    mean: float,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine = kl.figures(SAID) | {"mean": mean, "positions": 3060}
    monkeypatch.setattr("sys.argv", ["kl.py"])
    monkeypatch.setattr(kl.llama, "build", lambda *_: SimpleNamespace(commit="0c1e570abc"))
    monkeypatch.setattr(kl.llama, "model_files", lambda *_: {})
    monkeypatch.setattr(kl, "theirs", lambda *_: kl.figures(SAID))
    monkeypatch.setattr(kl, "ours", lambda tokens: mine)
    assert kl.main() == code
    printed = capsys.readouterr().out
    assert f"mean KL {mean / 0.00468:.2f} of Q8_0's, at most 1.1 is asked" in printed
    assert "llama.cpp 0c1e570;" in printed
