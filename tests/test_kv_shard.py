"""--kv-shard on the command line: the same answer, less KV a rank, and auto says what it took."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_files import TINY, write_tiny_gguf
from models import MODELS, write_hf_model
from test_verify import SHORT, Ran

from anyshard.checkpoint import open_checkpoint
from anyshard.cli import main, running
from anyshard.cli.memory import kv_bytes, memory_need
from anyshard.config import KvType
from anyshard.layout import KvShard, plan
from anyshard.ledger import StepShape, wire_cost
from anyshard.loading import profile_of
from anyshard.model import Program, program
from anyshard.verify.grid import Split, full, parse_layouts, quick, sharded

SPLIT = ("-tp", "4", "--comm", "threads", "--chunk", "1")
TEXTS = ("a", "b", "c", "ab", "abc", "aa", "bb", "cc")
PROMPTS = tuple(word for text in TEXTS for word in ("--prompt", text))


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    return str(path)


@pytest.fixture(autouse=True)
def a_clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("ANYSHARD_KV_SHARD", raising=False)
    yield


def answer(capfd: pytest.CaptureFixture[str], tiny: str, *more: str) -> dict[str, Any]:
    command = [
        "generate",
        tiny,
        "--prompt",
        "abcabcabc",
        "-n",
        "60",
        "--ignore-eos",
        "--json",
        *more,
    ]
    code = main(command)
    out, err = capfd.readouterr()
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_answer_is_the_same_and_the_record_says_how(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = answer(capfd, tiny)
    heads = answer(capfd, tiny, *SPLIT)
    asked = answer(capfd, tiny, *SPLIT, "--kv-shard", "sequence")
    monkeypatch.setenv("ANYSHARD_KV_SHARD", "sequence")
    by_variable = answer(capfd, tiny, *SPLIT)
    unsplit = answer(capfd, tiny)
    shards = [each["layout"]["kv_shard"] for each in (whole, heads, asked, by_variable, unsplit)]
    assert shards == ["heads", "heads", "sequence", "sequence", "sequence"]
    for field in ("tokens", "text", "logits_sha256"):
        assert len({json.dumps(each[field]) for each in (whole, heads, asked, by_variable)}) == 1
    assert len(whole["tokens"]) == 60
    blocks = -(-(len("abcabcabc") + 1 + 60) // 32)
    assert sum(asked["kv_bytes"]) == sum(whole["kv_bytes"]) < sum(heads["kv_bytes"])
    assert blocks >= 2 and max(asked["kv_bytes"]) < sum(whole["kv_bytes"])
    assert asked["kv_bytes"] == by_variable["kv_bytes"] and unsplit["kv_bytes"] == whole["kv_bytes"]
    assert all(
        more > less
        for more, less in zip(asked["wire_messages_sent"], heads["wire_messages_sent"], strict=True)
    )


def programs(path: str, kv_shard: KvShard, kv: KvType = "f32", tp: int = 4) -> list[Program]:
    config, profile = open_checkpoint(path).config, profile_of("f32", kv)
    layout = plan(config, tp=tp, kv_shard=kv_shard, leaf=profile.leaf)
    return [program(config, profile, layout, rank) for rank in range(layout.world)]


def needed(path: str, kv_shard: KvShard, *, num_seqs: int = 8) -> int:
    return memory_need(
        open_checkpoint(path),
        programs(path, kv_shard),
        tokens=TINY.context,
        num_seqs=num_seqs,
        chunk=1,
        comm="threads",
    ).total


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the machine one with so many bytes free."""
    return lambda free: monkeypatch.setattr(running, "read_memory", lambda: (1 << 40, free))


@pytest.mark.parametrize("is_final", [True, False])
def test_auto_takes_the_sequence_where_heads_have_no_room_and_says_why(
    is_final: bool,
    tiny: str,
    have: Callable[[int], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    heads, sequence = needed(tiny, "heads"), needed(tiny, "sequence")
    assert sequence < heads, "the model shows nothing"
    command = ["generate", tiny, *SPLIT, *PROMPTS, "--json"]
    command += ["--max-model-len", "128", "--max-tokens", "2"] if is_final else ["-n", "120"]
    have(heads)
    assert main(command) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["layout"]["kv_shard"] == "heads" and "KV" not in err
    have(heads - 1)
    assert main(command) == 0
    out, err = capfd.readouterr()
    record = json.loads(out)
    assert record["layout"]["kv_shard"] == "sequence"
    (note,) = [line for line in err.splitlines() if "by the sequence" in line]
    figures = re.fullmatch(
        r"note: KV is split by the sequence \((.*) of KV on the fullest rank, (\d+) messages and "
        r"(.*) a token\), since by heads \((.*) of KV on the fullest rank, (\d+) messages and "
        r"(.*) a token\) it has no room",
        note,
    )
    assert figures is not None, note
    step = StepShape(rows=1, sampled=1, gather_logits=False)
    for group, kv_shard in ((2, "sequence"), (5, "heads")):
        each = programs(tiny, kv_shard)  # type: ignore[arg-type]
        assert int(figures[group]) == sum(wire_cost(part, [step]).messages for part in each)
    fullest = max(kv_bytes(part, tokens=128) for part in programs(tiny, "sequence")) * 8
    assert figures[1] == running.size_text(fullest)
    assert max(record["kv_bytes"]) == fullest
    assert main([*command, "--kv-shard", "heads"]) == 2
    assert "of memory are needed" in capfd.readouterr().err
    have(sequence - 1)
    assert main(command) == 2
    assert "of memory are needed" in capfd.readouterr().err


def test_a_refusal_names_ways_to_keep_less_with_their_bytes(
    tiny: str, have: Callable[[int], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """int8 where keys and values are float32, the sequence where heads were asked for."""
    have(needed(tiny, "heads") - 1)
    command = ["generate", tiny, *SPLIT, *PROMPTS, "--max-model-len", "128", "--kv-shard", "heads"]
    held = {
        (kv_shard, kv): 8 * sum(kv_bytes(each, tokens=128) for each in programs(tiny, kv_shard, kv))
        for kv_shard, kv in (("heads", "int8"), ("sequence", "f32"), ("sequence", "int8"))
    }
    size = {way: running.size_text(count) for way, count in held.items()}
    assert main(command) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert (
        f"take --kv-cache-dtype int8 (KV {size['heads', 'int8']}) or --kv-shard sequence "
        f"(KV {size['sequence', 'f32']}), end other programs"
    ) in said
    have(100 << 20)  # of which processes take more
    assert main(command) == 2
    assert "take --kv" not in capfd.readouterr().err
    have(needed(tiny, "sequence") - 1)
    for way in ("auto", "sequence"):
        assert main([*command[:-1], way]) == 2
        said = capfd.readouterr().err
        shown = size["sequence" if way == "sequence" else "heads", "int8"]
        assert f", take --kv-cache-dtype int8 (KV {shown}), end" in said, said
    assert main([*command, "--kv-cache-dtype", "int8"]) in (0, 2)
    assert "--kv-cache-dtype" not in capfd.readouterr().err


def test_one_rank_has_nothing_to_choose(
    tiny: str, have: Callable[[int], None], capfd: pytest.CaptureFixture[str]
) -> None:
    have(1 << 20)
    command = ["generate", tiny, "--prompt", "a", "--max-model-len", "128", "--comm", "threads"]
    assert main(command) == 2
    assert "by the sequence" not in capfd.readouterr().err


def test_more_than_eight_ranks_are_refused_in_a_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(write_hf_model(tmp_path / "m", MODELS["adversarial-9-3"], seed=1))
    assert main(["doctor", path, "-tp", "9", "--kv-shard", "sequence"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "--kv-shard sequence is not possible with 9 ranks" in err and "--kv-shard heads" in err
    assert main(["doctor", path, "-tp", "9", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["split"]["kv_shard"] == "heads"


def test_doctor_shows_whose_blocks_are_whose(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(write_hf_model(tmp_path / "m", MODELS["adversarial-9-3"], seed=1))
    command = ["doctor", path, "-tp", "4", "--kv-shard", "sequence"]
    assert main([*command, "--json"]) == 0
    split = json.loads(capfd.readouterr().out)["split"]
    assert split["kv_shard"] == "sequence"
    assert [rank["stripes"] for rank in split["ranks"]] == [[0, 2], [2, 4], [4, 6], [6, 8]]
    assert {tuple(rank["kv_heads"]) for rank in split["ranks"]} == {(0, 3)}
    assert len({rank["kv_bytes_per_1k_tokens"] for rank in split["ranks"]}) == 1
    assert main(command) == 0
    out = capfd.readouterr().out
    assert "keys and values by sequence" in out and re.search(r"KV heads +stripes +ffn", out)
    assert main(command[:-2]) == 0
    out = capfd.readouterr().out
    assert "keys and values by heads" in out and "stripes" not in out


# --- verify and bench ---------------------------------------------------------------------------


def test_a_layouts_name_may_end_in_seq() -> None:
    assert parse_layouts("tp3pp2seq,heads7+2seq,tp2") == (
        Split(tp=3, pp=2, kv_shard="sequence"),
        Split(heads=(7, 2), kv_shard="sequence"),
        Split(tp=2),
    )
    assert sharded(parse_layouts("tp2,pp2seq"), "sequence") == parse_layouts("tp2seq,pp2seq")


def test_named_grids_have_such_cells() -> None:
    config = MODELS["adversarial-9-3"]
    for grid, widths in ((quick, {2, 3}), (full, {2, 3, 4, 5, 8})):
        cells = [cell for cell in grid(config) if cell.kv_shard == "sequence"]
        assert {cell.tp for cell in cells} == widths
        assert all(cell.name.split()[0].endswith("seq") for cell in cells)


@pytest.fixture(scope="module")
def nine(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "nine"
    return str(write_hf_model(folder, MODELS["adversarial-9-3"], seed=7, adversarial=True))


def test_verify_compares_such_layouts(nine: str, capfd: pytest.CaptureFixture[str]) -> None:
    wide = ("--prompt-tokens", "250", "--tokens", "3", "--in-process", "--json")
    ran = Ran(capfd, nine, *wide, "--layouts", "tp4,tp4seq,tp3pp2seq")
    assert ran.code == 0
    cells = ran.record["cells"]
    assert [cell["cell"] for cell in cells] == ["tp4", "tp4seq", "tp3pp2seq"]
    assert {cell["verdict"] for cell in cells} == {"equal"}
    assert len({cell["digest"] for cell in cells}) == 1
    heads, sequence, _ = cells
    assert max(sequence["kv_bytes"]) < max(heads["kv_bytes"])
    assert sequence["wire_bytes_per_token"] > heads["wire_bytes_per_token"]
    assert sequence["witness"]["tp"] > 0
    again = Ran(capfd, nine, *wide, "--layouts", "tp4", "--kv-shard", "sequence")
    assert again.record["cells"][0]["cell"] == "tp4seq"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layouts", "seq"), "--layouts has 'seq'; a layout is tp2"),
        (("--layouts", "tp2seqseq"), "--layouts has 'tp2seqseq'; a layout is tp2"),
        (("--layouts", "seqtp2"), "--layouts has 'seqtp2'; a layout is"),
        (("--layouts", "tp9seq"), "layout tp9seq: --kv-shard sequence is not possible with 9"),
        (("--grid", "quick", "--kv-shard", "sequence"), "and --kv-shard makes another"),
        (("--layouts", "pp2tp2seq"), "tp or heads come first: tp2pp2seq"),
    ],
)
def test_what_is_no_such_layout_is_refused(
    arguments: tuple[str, ...], message: str, nine: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", nine, *SHORT, *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


@pytest.mark.ranks
def test_bench_measures_such_layouts(nine: str, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["bench", nine, "--prompt-tokens", "40", "--gen-tokens", "2", "--repetitions", "2"]
    for more in (("--layouts", "tp2seq"), ("-tp", "2", "--kv-shard", "sequence")):
        assert main([*command, *more, "--json"]) == 0
        rows = json.loads(capfd.readouterr().out)["rows"]
        assert {row["layout"] for row in rows} == {"tp2seq"}
