"""`anyshard verify`: what it runs, what it sees, what it says and how it ends.

A planted bug in the ranks must end in exit code 4; a cell whose witness is 0 must say that it
shows nothing. Models are the tiny ones of tests/models.py; the demo model is slow.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from grid import the_model
from models import MODELS, plant_overflow, write_hf_model
from test_check import FailsAtTwo
from test_checkpoint_gguf import needs_demo

from anyshard.checkpoint import Checkpoint
from anyshard.cli import main, running
from anyshard.cli.screen import Bar
from anyshard.cli.verify import _wrapped
from anyshard.errors import OptionError
from anyshard.ops import available_bodies
from anyshard.tokenizer import Tokenizer
from anyshard.verify import check, naive
from anyshard.verify.cells import BATCH, Cell
from anyshard.verify.check import Checker, RequestShape, witness_cells
from anyshard.verify.driver import open_group
from anyshard.verify.grid import Lists, Split, cells_of, full, parse_layouts, quick, runnable
from anyshard.verify.naive import rank_of_any_order
from anyshard.verify.prompt import hashed_tokens, text_tokens
from anyshard.verify.result import max_ulp

SHORT = ("--in-process", "--prompt-tokens", "40", "--tokens", "3")
GENERATES = {"THREADS": "2", "CHUNK": "32", "KERNELS": "scalar", "HEADS": "5,4", "LAYERS": "2,1"}
CELL_FIELDS = {
    "cell", "profile_hash", "positions", "vocab", "digest", "elements_differing", "max_ulp",
    "tokens_equal", "verdict", "witness", "first_divergence", "where", "neighbours", "neighbour",
    "fault", "lost",
    "wire_bytes_per_token", "weight_bytes", "kv_bytes", "prefill_tokens_per_s",
    "decode_tokens_per_s", "speed_ratio", "seconds",
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """9 query heads, 3 KV heads, 3 layers; no tokenizer, so it reads hashed ids."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return str(write_hf_model(folder, MODELS["adversarial-9-3"], seed=7, adversarial=True))


class Ran:
    """Exit code and both streams of a command that ran in this process."""

    def __init__(self, capfd: pytest.CaptureFixture[str], *arguments: str) -> None:
        # Ctrl-C leaves both ignored, which processes that later tests start would inherit
        before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.code = main(["verify", *arguments])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self.out, self.err = capfd.readouterr()

    @property
    def record(self) -> dict[str, Any]:
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


def test_every_cell_of_lists_is_equal_and_would_have_shown(
    tiny: str, capfd: pytest.CaptureFixture[str]
) -> None:
    lists = ("--layouts", "tp2,pp3,tp3pp2,heads7+2", "--chunk", "7,all", "--batch", "1,5")
    ran = Ran(capfd, tiny, *SHORT, *lists)
    assert ran.code == 0 and ran.err == ""
    head, unsplit, *rows = ran.out.splitlines()
    assert head.startswith("cell ") and unsplit.startswith("unsplit ")
    assert "16 of 16 cells equal the unsplit run in every bit" in ran.out
    assert len([row for row in rows if " equal " in row]) == 16 + 1
    assert sum("tp3pp2 chunk 7 last of 5" in row for row in rows) == 1
    assert "nothing to show" not in ran.out and "DIFFERS" not in ran.out


def test_json_is_one_object_and_holds_every_field(
    tiny: str, capfd: pytest.CaptureFixture[str]
) -> None:
    lists = ("--layouts", "tp1,tp2pp2", "--threads", "1,2", "--kernels", "auto,reference")
    ran = Ran(
        capfd, tiny, "--json", "--in-process", "--prompt-tokens", "9", "--tokens", "2", *lists
    )
    record = ran.record
    assert ran.code == 0 and record["equal"] and record["vacuous"] == 0
    assert {"summary", "profile_hash", "prompt_tokens", "decode_tokens", "skipped"} <= set(record)
    rows = [record["unsplit"], *record["cells"]]
    assert len(rows) == 9 and all(set(row) == CELL_FIELDS for row in rows)
    assert len({row["digest"] for row in rows}) == 1
    vocab = MODELS["adversarial-9-3"].vocab
    for row in rows:
        assert (row["positions"], row["vocab"]) == (9 + 2, vocab), "every position is compared"
        assert row["elements_differing"] == row["max_ulp"] == 0 and row["tokens_equal"]
    by_name = {row["cell"]: row for row in rows}
    assert by_name["tp1"]["witness"] == {} and by_name["tp1"]["verdict"] == "equal"
    split = by_name["tp2pp2 threads 2 reference"]
    assert set(split["witness"]) == {"tp", "pp", "threads"}
    assert len(split["weight_bytes"]) == len(split["kv_bytes"]) == 4
    assert split["wire_bytes_per_token"] > 0 == by_name["tp1"]["wire_bytes_per_token"]


def test_all_of_a_long_request_is_run(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Its neighbours too, whose prompts are shorter and whose answers are as long."""
    lists = ("--layouts", "tp1,tp2", "--batch", "1,3")
    ran = Ran(
        capfd, tiny, "--in-process", "--prompt-tokens", "400", "--tokens", "60", *lists, "--json"
    )
    record = ran.record
    assert ran.code == 0 and (record["prompt_tokens"], record["decode_tokens"]) == (400, 60)
    assert {row["positions"] for row in (record["unsplit"], *record["cells"])} == {400 + 60}


@pytest.mark.parametrize("body", available_bodies()[:1])
def test_the_body_that_auto_takes_is_not_held_against_itself(
    body: str, tiny: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ran = Ran(capfd, tiny, *SHORT, "--kernels", body)
    assert ran.code == 2 and ran.out == "" and ran.err.count("\n") == 1
    assert f"--kernels: {body} is what auto takes here, so it is the unsplit run" in ran.err
    mixed = Ran(capfd, tiny, *SHORT, "--layouts", "tp1,tp2", "--kernels", f"auto,{body}", "--json")
    assert mixed.code == 0
    assert [cell["cell"] for cell in mixed.record["cells"]] == ["tp1", "tp2", f"tp2 {body}"]
    assert [each["cell"] for each in mixed.record["skipped"]] == [f"tp1 {body}"]


def test_a_lost_cell_is_told_and_the_others_are_compared(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exit code 4: it is no pass; 5 only where no cell could be compared."""
    monkeypatch.setitem(naive.ORDERS, "written", FailsAtTwo)
    page = tmp_path / "out.html"
    ran = Ran(capfd, tiny, *SHORT, "--layouts", "tp2,tp3", "--report", str(page))
    assert ran.code == 4
    assert "1 of 2 cells LOST ranks; 1 of 2 cells equal the unsplit run" in ran.out
    assert "  ranks were lost: rank " in ran.out and "a planted failure" in ran.out
    assert ran.err.startswith("anyshard: cell tp2: ranks were lost: rank ")
    assert '<span class="lost">lost</span>' in page.read_text("utf-8")
    alone = Ran(capfd, tiny, *SHORT, "--layouts", "tp2", "--json")
    assert alone.code == 5 and alone.record["lost"] == 1 and not alone.record["equal"]
    assert alone.record["cells"][0]["verdict"] == "lost"


def test_rows_are_shown_whatever_ends_the_grid(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a bar, where rows are kept until it goes."""
    ordinary = check.run_cell

    def run(group: Any, model: Any, cell: Cell, **rest: Any) -> Any:
        if cell.tp == 3:
            raise KeyboardInterrupt
        return ordinary(group, model, cell, **rest)

    monkeypatch.setattr(check, "run_cell", run)
    monkeypatch.setattr(Bar, "shown", True)
    ran = Ran(capfd, tiny, *SHORT, "--layouts", "tp2,tp3")
    assert ran.code == 130
    assert [line.split()[0] for line in ran.out.splitlines()] == ["cell", "unsplit", "tp2"]


def test_an_unsplit_run_that_fails_is_no_pass(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = MODELS["adversarial-9-3"]
    (first,) = hashed_tokens(1, config.vocab, seed=0)
    overflow = partial(plant_overflow, layer_of={first: 1})
    model = write_hf_model(tmp_path / "model", config, seed=7, adversarial=True, change=overflow)
    ran = Ran(capfd, str(model), *SHORT, "--layouts", "tp2")
    assert ran.code == 1
    assert "nothing to compare: a value left the range of float32 in layers.2." in ran.err


def test_a_cell_that_has_no_room_is_refused_before_anything_is_loaded(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "read_memory", lambda: (1 << 40, 3 * 10**8))
    assert Ran(capfd, tiny, *SHORT, "--layouts", "tp2").code == 0
    ran = Ran(capfd, tiny, *SHORT, "--layouts", "tp2", "--batch", "1,1000")
    assert (ran.code, ran.out) == (2, "")
    assert re.search(
        r"cell tp2 last of 1000: \d+ MB of memory are needed and 300 MB are free", ran.err
    )


def test_a_witness_of_zero_is_marked_and_no_pass(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """All scores of this model are in the thousands: a restarted softmax leaves no trace."""
    config = MODELS["adversarial-head-80"]
    model = write_hf_model(tmp_path / "model", config, seed=7, adversarial=True)
    ran = Ran(capfd, str(model), "--in-process", "--prompt-tokens", "307", "--chunk", "300,7")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert [line.endswith("nothing to show") for line in lines if "chunk" in line[:12]] == [
        True,
        False,
    ]
    assert "1 of 2 cells equal the unsplit run in every bit; 1 cell had nothing to show" in ran.out


@pytest.mark.ranks
def test_forked_ranks_share_one_launcher_and_report_the_same(tiny: str) -> None:
    arguments = ("--prompt-tokens", "40", "--tokens", "3", "--layouts", "tp2,tp3pp2", "--json")
    found = []
    for more in ((), ("--in-process",)):
        command = [sys.executable, "-m", "anyshard.cli", "verify", tiny, *arguments, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        found.append([(c["cell"], c["digest"], c["witness"]) for c in record["cells"]])
    assert found[0] == found[1]


def test_a_run_loads_the_weights_once(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from anyshard import loading

    loads: list[str] = []
    loader = loading.loader

    def counting(checkpoint: Checkpoint, **options: Any) -> Any:
        load = loader(checkpoint, **options)

        def counted(progress: Any) -> Any:
            loads.append(str(checkpoint.path))
            return load(progress)

        return counted

    monkeypatch.setattr(loading, "loader", counting)
    assert Ran(capfd, tiny, *SHORT, "--layouts", "tp2,pp2", "--chunk", "7,all").code == 0
    assert loads == [tiny]


REFUSED = {
    ("--layouts", "tp2,xp3"): "--layouts has 'xp3'; a layout is tp2, pp3, tp3pp2",
    ("--layouts", ""): "--layouts has ''; a layout is",
    ("--layouts", "tp0"): "counts begin at 1",
    ("--layouts", "tp２"): "--layouts has 'tp２'; a layout is",
    ("--layouts", "pp2tp2"): "--layouts has 'pp2tp2'; tp or heads come first: tp2pp2",
    ("--layouts", "layers3+0"): "--layers 3,0 has a part of 0: each of the parts needs at least 1",
    ("--layouts", "layers2+2"): "--layers 2,2 does not add up: the model has 3 layers",
    ("--layouts", "tp10"): "layout tp10: ",
    ("--layouts", "pp4"): "layout pp4: ",
    ("--layouts", "heads5+5"): "layout heads5+5: ",
    ("--layouts", "tp9999999"): "--layouts has 'tp9999999'",
    (
        "--layouts",
        "heads" + "+".join("1" * 99),
    ): f"layout heads1{'+1' * 17}: --heads {'1,' * 20} does not add up",
    ("--heads", "5,five"): "--heads is '5,five'",
    ("--batch", "1,many"): "--batch has 'many'; whole numbers",
    ("--batch", ""): "--batch has ''; whole numbers",
    ("--batch", "１７"): "--batch has '１７'; whole numbers",
    ("--batch", "0"): "--batch is 0; it can be 1 to 1024",
    ("--chunk", "7,some"): "--chunk has 'some'; whole numbers such as 1,17 are needed, or all",
    ("--chunk", ""): "--chunk has ''; whole numbers",
    ("--threads", "1,999"): "--threads is 999; it can be 1 to 256",
    (
        "--kernels",
        "auto,fast",
    ): "--kernels has 'fast'; it can hold auto, vnni, avx2, scalar, reference",
    ("--kernels", ""): "--kernels has ''; it can hold auto",
    ("--grid", "quick", "--chunk", "7"): "--grid quick is a fixed set of cells and --chunk makes",
    ("--prompt-tokens", "0"): "--prompt-tokens is 0; it can be 1 to 65536",
    ("--prompt-tokens", "510"): "the context holds 512; lower --prompt-tokens or --tokens",
    ("--deadline", "0"): "--deadline is 0.0; it can be 0.1 to 86400",
    ("--tokens", "0"): "--tokens is 0; it can be 1 to 4096",
    ("--batch", ",".join(["1"] * 1001)): "these lists make 1001 cells; at most 1000",
    ("--report", "nowhere/at/all.html"): "name a file in a folder that exists",
    ("--report", ""): "--report is ''; name a file, such as verify.html",
    ("--report", "/proc/x.html"): "the folder /proc takes no files (",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=lambda value: " ".join(value)[:40])
def test_a_mistake_is_one_sentence_and_exit_2(
    arguments: Sequence[str], tiny: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ran = Ran(capfd, tiny, "--in-process", *arguments)
    assert ran.code == 2 and ran.out == ""
    assert REFUSED[tuple(arguments)] in ran.err
    assert ran.err.count("\n") == 1


def test_variables_of_generate_are_no_lists(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads for `generate` must not make one cell of the grid's fourteen."""
    for name, value in GENERATES.items():
        monkeypatch.setenv(f"ANYSHARD_{name}", value)
    monkeypatch.setattr(
        "anyshard.verify.grid.quick",
        lambda config, wire: [Cell(axis="tp", tp=tp) for tp in (2, 3)],
    )
    for arguments in ((), ("--grid", "quick")):
        ran = Ran(capfd, tiny, *SHORT, "--json", *arguments)
        assert ran.code == 0, ran.err
        assert [cell["cell"] for cell in ran.record["cells"]] == ["tp2", "tp3"]
    monkeypatch.setenv("ANYSHARD_LAYOUTS", "pp2")
    ran = Ran(capfd, tiny, *SHORT, "--json")
    assert [cell["cell"] for cell in ran.record["cells"]] == ["pp2"], "it is no other verb's"


@pytest.mark.parametrize("report", [False, True])
def test_a_reader_that_leaves_is_no_pass(report: bool, tiny: str, tmp_path: Path) -> None:
    """Unless there is another: a report is written, and the verdict is the exit code."""
    page = tmp_path / "out.html"
    more = ("--report", str(page)) if report else ()
    command = [sys.executable, "-m", "anyshard.cli", "verify", tiny, *SHORT, "--layouts", "tp2"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*command, *more], stdout=writer, stderr=subprocess.PIPE, timeout=100, check=False
        )
    finally:
        os.close(writer)
    assert done.stderr == b""
    assert done.returncode == (0 if report else 128 + signal.SIGPIPE)
    assert page.exists() == report


def test_a_closed_stdout_hides_no_verdict(tiny: str) -> None:
    command = [sys.executable, "-m", "anyshard.cli", "verify", tiny, *SHORT, "--layouts", "tp2"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command],
        stderr=subprocess.PIPE,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("report", [False, True])
def test_a_stdout_that_takes_no_more_is_named(report: bool, tiny: str, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    more = ("--report", str(page)) if report else ()
    command = [sys.executable, "-m", "anyshard.cli", "verify", tiny, *SHORT, "--layouts", "tp2"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*command, *more], stdout=full, stderr=subprocess.PIPE, timeout=100, check=False
        )
    said = b"anyshard: stdout cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)
    assert page.exists() == report


def test_rows_are_aligned_however_many_axes_a_cell_has(
    tiny: str, capfd: pytest.CaptureFixture[str]
) -> None:
    lists = ("--layouts", "pp2,tp3pp2", "--chunk", "7,all", "--batch", "2", "--threads", "2")
    head, *rows = Ran(capfd, tiny, *SHORT, *lists).out.split("\n\n")[0].splitlines()
    end = head.index("wire B/tok") + len("wire B/tok")
    assert len(rows) == 5
    assert all(row[end - 1].isdigit() and row[end : end + 2] == "  " for row in rows)


def test_the_bar_names_the_cell_it_is_at(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(Bar, "update", lambda bar, done, total, doing="": told.append(doing))
    Ran(capfd, tiny, *SHORT, "--layouts", "tp2,pp2")
    assert list(dict.fromkeys(each for each in told if each)) == ["unsplit", "tp2", "pp2"]


def test_the_last_line_breaks_between_its_parts() -> None:
    parts = ("a model", "f32 00", "9 tokens")
    assert _wrapped(parts, width=80) == "a model · f32 00 · 9 tokens"
    assert _wrapped(parts, width=18) == "a model · f32 00\n9 tokens"
    assert _wrapped(parts, width=3) == "a model\nf32 00\n9 tokens"


def test_a_short_cell_has_a_note(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell(axis="body", kernels="reference", prompt_tokens=6, num_tokens=2, is_short=True)
    for cells, count in (([cell], 1), ([Cell(axis="tp", tp=2)], 0)):
        monkeypatch.setattr("anyshard.verify.grid.quick", lambda config, wire, cells=cells: cells)
        ran = Ran(capfd, tiny, *SHORT)
        assert (ran.code, ran.out.count("against an unsplit run as short")) == (0, count)


def test_max_ulp_counts_floats() -> None:
    one = np.array([1, -1, 0], np.float32)
    assert max_ulp(one, one) == 0
    assert max_ulp(one, np.nextafter(one, np.float32(2), dtype=np.float32)) == 1
    assert max_ulp(np.array([-0.0], np.float32), np.array([0.0], np.float32)) == 1
    smallest = np.nextafter(np.float32(0), np.float32(1))
    assert max_ulp(np.array([-smallest]), np.array([smallest])) == 3
    assert max_ulp(np.array([1], np.float32), np.array([2], np.float32)) == 1 << 23


def test_a_cell_has_a_witness_for_every_axis_that_it_splits_and_no_other() -> None:
    cell = Cell(
        axis="mixed", tp=2, layers=(1, 2), chunk=7, threads=2, batch=BATCH, prompt_tokens=40
    )
    alone = witness_cells(cell)
    assert {axis: (each.split, each.chunk < 40) for axis, each in alone.items()} == {
        "tp": ("tp2", False),
        "pp": ("layers1+2", False),
        "chunk": ("tp1", True),
        "threads": ("tp1", False),
        "batch": ("tp1", False),
    }
    assert witness_cells(Cell(axis="body", kernels="scalar", shuffled=True, poison=True)) == {}
    assert witness_cells(Cell(axis="base", chunk=40, prompt_tokens=40)) == {}, "it is one chunk"
    long = witness_cells(Cell(axis="chunk", chunk=256, prompt_tokens=300))["chunk"]
    assert long.prompt_tokens == 263, "cut short, but not below two chunks"


def test_a_chunk_that_cuts_nothing_has_nothing_to_show(
    tiny: str, capfd: pytest.CaptureFixture[str]
) -> None:
    short = ("--in-process", "--prompt-tokens", "7", "--tokens", "2", "--json")
    ran = Ran(capfd, tiny, *short, "--layouts", "tp1,tp2", "--chunk", "6,7,all")
    assert ran.code == 0
    verdicts = {cell["cell"]: cell["verdict"] for cell in ran.record["cells"]}
    assert verdicts == {
        "tp1 chunk 6": "equal", "tp1 chunk 7": "vacuous", "tp1": "equal",
        "tp2 chunk 6": "equal", "tp2 chunk 7": "equal", "tp2": "equal",
    }  # fmt: skip
    assert (ran.record["vacuous"], ran.record["partly_vacuous"]) == (1, 1), "tp2 has its witness"
    shown = Ran(capfd, tiny, *short[:-1], "--layouts", "tp2", "--chunk", "6,7").out
    marks = [line.endswith("  chunk: nothing to show") for line in shown.splitlines()]
    assert marks.count(True) == 1
    assert "2 of 2 cells equal the unsplit run in every bit; in 1 of them one axis had" in shown


def test_a_tokenizer_that_has_nothing_for_the_text_leaves_hashed_ids() -> None:
    class Mute:
        vocab = 50

        def encode(self, text: str, *, add_special: bool) -> list[int]:
            return [1] if add_special else []

    assert text_tokens(cast(Tokenizer, Mute()), 9) == hashed_tokens(9, 50, seed=0)


def test_layouts_are_written_as_they_are_shown() -> None:
    text = "tp2,pp3,tp3pp2,heads7+2,layers22+8,heads5+4pp2,tp2layers1+29,tp1"
    cells = cells_of(Lists(splits=parse_layouts(text)))
    assert [cell.name for cell in cells] == text.split(",")
    assert parse_layouts("pp1") == (Split(),)
    for wrong in ("", "tp", "2", "pp2tp2", "tp2 pp2", "heads7,2x", "tp-1", "heads+2", "tp2pp"):
        with pytest.raises(OptionError):
            parse_layouts(wrong)


def test_lists_are_counted_before_they_are_crossed() -> None:
    many = Lists(batches=(1,) * 5000, chunks=(None,) * 5000, threads=(1,) * 5000)
    with pytest.raises(OptionError, match="these lists make 125000000000 cells; at most 1000"):
        cells_of(many)


def test_named_grids_fit_every_small_model() -> None:
    for heads, deep in itertools.product((1, 2, 3, 4, 5, 9), (1, 2, 3, 4)):
        config = replace(
            MODELS["adversarial-9-3"], num_heads=heads, num_kv_heads=1, num_layers=deep
        )
        for grid in (quick, full):
            cells = grid(config)
            assert len({cell.name for cell in cells}) == len(cells), "no cell twice"
            assert all(cell.tp <= heads and cell.pp <= deep for cell in cells)


def test_named_grids_are_as_large_as_they_say() -> None:
    model = the_model("adversarial-9-3")
    for grid in (quick, full):
        cells = grid(model.config)
        assert len({cell.name for cell in cells}) == len(cells), "no cell twice"
        assert all(cell.layout(model) for cell in cells)
    assert max(cell.tp for cell in quick(model.config)) == 4
    assert max(cell.pp for cell in quick(model.config)) == 3
    here, skipped = runnable(full(model.config), forked=False)
    assert {cell.comm for cell in here} == {"auto"}
    assert all("torch" in name for name, reason in skipped if "--in-process" in reason)


def test_a_bar_is_told_of_every_run() -> None:
    model = the_model("adversarial-9-3")
    cells = cells_of(Lists(splits=(Split(tp=2), Split(tp=3)), chunks=(None, 7)))
    ticks: list[None] = []
    group = open_group(model.served, rank_of_any_order, forked=False)
    try:
        shape = RequestShape(prompt_tokens=30, decode_tokens=2)
        checker = Checker(group, model, shape, on_step=lambda: ticks.append(None))
        checker.baseline()
        assert {checker.check(cell).verdict for cell in cells} == {"equal"}
    finally:
        group.close()
    assert len(ticks) == checker.steps(cells) == 4 + 1 + 3 + 2


def test_positions_that_do_not_fit_into_memory_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "COMPARED_BYTES", 4 * 1000 * 50)
    shape = RequestShape(prompt_tokens=300, decode_tokens=8)
    assert shape.of(Cell(axis="base"), 1000).prompt_logits == 50 - 9
    assert shape.of(Cell(axis="base"), 1 << 20).prompt_logits == 0


@needs_demo
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(3600)
def test_full_grid_of_the_demo_model_is_equal_and_would_have_shown(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "anyshard.cli", "verify", "--grid", "full", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3500, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    record = json.loads(done.stdout)
    assert record["equal"] and record["vacuous"] == 0, record["summary"]
    assert len(record["cells"]) >= 60
    axes = {axis for cell in record["cells"] for axis in cell["witness"]}
    assert axes == {"tp", "pp", "chunk", "threads", "batch"}


@needs_demo
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_quick_grid_of_the_demo_model_is_equal() -> None:
    command = [sys.executable, "-m", "anyshard.cli", "verify", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["equal"] and record["vacuous"] == 0, record["summary"]
    assert len(record["cells"]) >= 14 - (len(available_bodies()) < 3)
    assert record["unsplit"]["positions"] == 308
    assert (
        len({cell["digest"] for cell in record["cells"][:14] if "scalar" not in cell["cell"]}) == 1
    )
