"""`anyshard verify` over ranks that have a bug: exit code, row, and the place that is named.

Every bug of tests/mutants beside the scoreboard's verdict: test_mutants.py.
"""

from __future__ import annotations

import mutants
import pytest
from models import MODELS, write_hf_model
from test_check import FirstTurnedBack
from test_verify import SHORT, Ran

from anyshard.verify import naive
from anyshard.verify.cells import Cell


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """9 query heads, 3 KV heads, 3 layers."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return str(write_hf_model(folder, MODELS["adversarial-9-3"], seed=7, adversarial=True))


def test_a_planted_bug_ends_in_exit_4_and_shows_where(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is never added: it needs two ranks, so pp2 and the unsplit run stay right."""
    monkeypatch.setitem(naive.ORDERS, "written", mutants.MissingNode)
    ran = Ran(capfd, tiny, *SHORT, "--layouts", "tp2,pp2", "--json")
    assert ran.code == 4
    wide, deep = ran.record["cells"]
    assert deep["verdict"] == "equal" and deep["first_divergence"] is None
    assert wide["verdict"] == "differs" and wide["elements_differing"] > 0 < wide["max_ulp"]
    found = wide["first_divergence"]
    assert found["position"] == 0, "the bug is in every row"
    assert float.fromhex(found["cell"]) != float.fromhex(found["unsplit"])
    assert wide["where"].startswith("layers.0.")
    assert " on rank 0 (tp 0, stage 0), position 0: " in wide["where"], wide["where"]
    shown = Ran(capfd, tiny, *SHORT, "--layouts", "tp2,pp2")
    assert shown.code == 4
    assert "1 of 2 cells DIFFER; 1 of 2 cells equal" in shown.out
    assert f"position 0, id {found['token_id']}: {found['unsplit']} became" in shown.out


def test_a_bug_that_only_prompt_rows_show_is_seen(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first row of a chunk misses its own key: at the chunk's edge, and not before."""
    monkeypatch.setitem(naive.ORDERS, "written", mutants.ChunkEdge)
    ran = Ran(capfd, tiny, *SHORT, "--chunk", "16", "--json")
    assert ran.code == 4
    assert ran.record["cells"][0]["first_divergence"]["position"] == 16


def test_a_fault_in_a_cell_is_a_difference(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(naive.ORDERS, "written", mutants.Unmasked)
    monkeypatch.setattr(
        "anyshard.verify.grid.quick",
        lambda config, wire: [Cell(axis="pages", poison=True, prompt_tokens=9, is_short=True)],
    )
    ran = Ran(capfd, tiny, *SHORT, "--json")
    (cell,) = ran.record["cells"]
    assert ran.code == 4 and cell["verdict"] == "differs"
    assert cell["fault"].startswith("layers.0.")
    assert cell["first_divergence"] is None and cell["where"].startswith(
        "layers.0.attention on rank 0 (tp 0, stage 0), position 0: "
    ), cell["where"]


def test_a_neighbour_that_is_wrong_in_every_batch_is_seen_and_placed(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that is compared is another one, and every cell that has the batch is wrong."""
    monkeypatch.setitem(naive.ORDERS, "written", FirstTurnedBack)
    ran = Ran(capfd, tiny, *SHORT, "--layouts", "tp1,tp2", "--batch", "1,3", "--json")
    assert ran.code == 4
    verdicts = {cell["cell"]: cell["verdict"] for cell in ran.record["cells"]}
    assert verdicts == {
        "tp1": "equal", "tp1 last of 3": "differs", "tp2": "equal", "tp2 last of 3": "differs",
    }  # fmt: skip
    for cell in ran.record["cells"][1::2]:
        assert cell["elements_differing"] == 0 and cell["tokens_equal"]
        assert cell["first_divergence"] is None and cell["neighbour"] == 1
        assert cell["where"].startswith("layers.0.qkv on rank 0 (tp 0, stage 0), position ")
    shown = Ran(capfd, tiny, *SHORT, "--batch", "3")
    assert "the first is neighbour 1, of 11 prompt tokens; layers.0.qkv on rank 0" in shown.out


def test_a_wrong_token_is_seen_where_nobody_asks_for_logits(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank has the ids of its own rows: in `chat`, and in no run that gathers logits."""
    monkeypatch.setitem(naive.ORDERS, "written", mutants.LocalIds)
    ran = Ran(capfd, tiny, *SHORT, "--layouts", "tp2,pp2", "--json")
    wide, deep = ran.record["cells"]
    assert ran.code == 4 and deep["verdict"] == "equal"
    assert wide["elements_differing"] == 0 and wide["tokens_equal"] is False
    found = wide["first_divergence"]
    assert found["what"] == "pair" and int(found["cell"]) < int(found["unsplit"])
    assert wide["where"].startswith("sample on rank 1 (tp 1, stage 0), position "), wide["where"]
    assert f"vocabulary id {found['unsplit']}, it sent id {found['cell']}" in wide["where"]
