"""`anyshard bench`: which rows, in which form, with which bytes beside them; how it ends.

Speeds are not judged here: the machine of a test is busy.
"""

from __future__ import annotations

import csv
import io
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf_files import write_tiny_gguf
from models import MODELS, write_hf_model
from native_cases import needs_native

from anyshard.bench import bandwidth, rows
from anyshard.bench.bandwidth import open_probe, probe_bytes
from anyshard.bench.rows import Row, SpeedTest, spread
from anyshard.bench.tables import row_records, speed_table
from anyshard.checkpoint import build_image, open_checkpoint
from anyshard.cli import main, running
from anyshard.engine import Event
from anyshard.errors import AnyshardError
from anyshard.layout import plan
from anyshard.ledger import step_kv_bytes, step_weight_bytes
from anyshard.loading import f32_profile
from anyshard.model import program
from anyshard.request import Request

SMALL = 1 << 22  # bytes of the probe
ROW_FIELDS = {
    "test", "prompt_tokens", "gen_tokens", "layout", "tp", "pp", "threads", "comm", "kernels",
    "profile", "tokens_per_s", "tokens_per_s_sd", "tokens_per_s_least", "tokens_per_s_most",
    "weight_bytes_per_token", "kv_bytes_per_token", "memory_share", "samples_tokens_per_s",
    "samples_memory_bytes_per_s",
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """9 query heads, 3 KV heads, 3 layers; no tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return str(write_hf_model(folder, MODELS["adversarial-9-3"], seed=7, adversarial=True))


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "probe_bytes", lambda: SMALL)


def short(prompt: str = "9", gen: str = "3") -> tuple[str, ...]:
    return ("--comm", "threads", "-r", "2", "-p", prompt, "-n", gen)


SHORT = short()


class Ran:
    """Exit code and both streams of a command that ran in this process."""

    def __init__(self, capfd: pytest.CaptureFixture[str], *arguments: str) -> None:
        before = signal.getsignal(signal.SIGTERM)
        try:
            self.code = main(["bench", *arguments])
        finally:
            signal.signal(signal.SIGTERM, before)
        self.out, self.err = capfd.readouterr()

    @property
    def record(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


def asked(*arguments: str) -> Callable[[Path], list[str]]:
    """Of a sound little model in a folder: 4 query heads, a context of 128."""

    def build(folder: Path) -> list[str]:
        write_tiny_gguf(folder / "tiny.gguf")
        return ["bench", str(folder / "tiny.gguf"), *arguments]

    return build


def of_blocks(*arguments: str) -> Callable[[Path], list[str]]:
    return lambda folder: ["bench", "blocks", *arguments]


#: What is wrong: the command line in a folder, words of the refusal. For test_refusals.py.
REFUSED = {
    "a layout that is none": (asked("--layouts", "tp1,2x2"), "--layouts has '2x2'"),
    "a layout that the model cannot take": (
        asked("-p", "9", "--layouts", "tp1,tp5"),
        "layout tp5: --tensor-parallel-size 5 is not possible",
    ),
    "layouts said twice": (asked("--layouts", "tp1", "-tp", "2"), "and so does -tp; drop one"),
    "a layout and a cut": (asked("--layouts", "tp1", "--heads", "3,1"), "so does --heads; drop"),
    "a prompt beyond the context": (asked("-p", "256"), "lower --prompt-tokens"),
    "tokens beyond the context": (asked("-p", "0", "-n", "128"), "lower --gen-tokens"),
    "tokens beyond the limit": (
        asked("-p", "9", "-n", "64", "--max-model-len", "32"),
        "the context holds 32; lower --gen-tokens",
    ),
    "a prompt of no length": (asked("-p", "-3"), "it can be 0 to 1048576"),
    "nothing to measure": (asked("-p", "0", "-n", "0"), "give one of them a length"),
    "no repetition": (asked("-r", "0"), "--repetitions is 0; it can be 1 to 1000"),
    "no list of numbers": (asked("-t", "1,two"), "--threads has 'two'; whole numbers"),
    "too many threads": (asked("-t", "1,999"), "--threads is 999; it can be 1 to 256"),
    "two formats": (asked("--json", "--csv"), "--json and --csv are two formats"),
    "no such kernels": (asked("--kernels", "sse"), "see anyshard bench --help"),
    "a block of no whole leaves": (of_blocks("--hidden", "100"), "a multiple of 64"),
    "a block that is too narrow": (of_blocks("--ffn", "64"), "--ffn is 64; it can be 512 to"),
    "a block of too many rows": (of_blocks("--rows", "1,4096"), "it can be 1 to 1024"),
    "a block of a model": (of_blocks("model.gguf"), "see anyshard bench --help"),
}


def row(kind: Any = "tg", **changes: Any) -> Row:
    usual: dict[str, Any] = {
        "test": SpeedTest(kind, 64),
        "layout": "tp1",
        "tp": 1,
        "pp": 1,
        "threads": 2,
        "comm": "solo",
        "kernels": "avx2",
        "profile": "f32",
        "rates": (10.0, 20.0, 12.0),
        "reads": (2e9, 5e9, 3e9),
        "weight_bytes": 1e8,
        "kv_bytes": 2.5e7,
    }
    return Row(**usual | changes)


def test_layouts_and_threads_are_crossed_and_every_test_is_run(
    tiny: str, capfd: pytest.CaptureFixture[str]
) -> None:
    lists = ("--layouts", "tp1,tp2pp2,heads7+2", "-t", "1,2")
    record = Ran(capfd, tiny, *short(gen="3,4"), "--json", *lists).record
    rows = record["rows"]
    assert all(set(each) == ROW_FIELDS for each in rows)
    assert [(each["layout"], each["threads"], each["test"]) for each in rows] == [
        (layout, threads, test)
        for layout in ("tp1", "tp2pp2", "heads7+2")
        for threads in (1, 2)
        for test in ("pp9", "tg3", "tg4")
    ]
    assert {"anyshard", "model", "profile", "profile_hash", "repetitions", "machine"} <= set(record)
    assert record["profile_hash"] == f32_profile().sha256()
    for each in rows:
        assert len(each["samples_tokens_per_s"]) == 2 and min(each["samples_tokens_per_s"]) > 0
        assert each["comm"] == ("solo" if each["layout"] == "tp1" else "threads")


def test_bytes_of_a_token_are_the_ledgers(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Weights as the image holds them: all of them once in a step; KV by the keys that are seen."""
    lists = ("--layouts", "tp1,tp3", "--chunk", "4")
    rows = Ran(capfd, tiny, *SHORT, "--json", *lists).record["rows"]
    checkpoint, profile = open_checkpoint(tiny), f32_profile()
    storage = build_image(checkpoint, threads=1).storage
    for tp, (pp, tg) in zip((1, 3), (rows[:2], rows[2:]), strict=True):
        layout = plan(checkpoint.config, tp=tp, leaf=profile.leaf)
        programs = [
            program(checkpoint.config, profile, layout, rank, storage=storage) for rank in range(tp)
        ]
        weights = sum(step_weight_bytes(each) for each in programs)
        assert tg["weight_bytes_per_token"] == weights
        assert pp["weight_bytes_per_token"] == weights * 3 / 9, "three steps of four rows at most"
        keys = 2 + 3 + 4  # after the prompt's one token
        kv = sum(step_kv_bytes(each, keys=keys) for each in programs)
        assert tg["kv_bytes_per_token"] == kv / 3 and pp["kv_bytes_per_token"] == 0
        config = checkpoint.config
        key_bytes = 8 * config.num_layers * config.head_dim
        assert kv == keys * key_bytes * sum(
            stop - start for start, stop in (each.kv_heads for each in programs)
        )


@needs_native
def test_memory_is_read_in_the_same_run(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    pp, tg = Ran(capfd, tiny, *SHORT, "--json").record["rows"]
    assert pp["memory_share"] is None and pp["samples_memory_bytes_per_s"] == []
    assert len(tg["samples_memory_bytes_per_s"]) == 2 and tg["memory_share"] > 0


def test_without_native_kernels_there_is_no_share(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "native_module", lambda: None)
    ran = Ran(capfd, tiny, *short("0"))
    assert ran.code == 0 and "the speed of memory was not measured" in ran.out
    assert Ran(capfd, tiny, *SHORT, "--json").record["rows"][1]["memory_share"] is None


def test_a_person_reads_a_table(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capfd, tiny, *SHORT, "-tp", "2", "-t", "1")
    assert ran.code == 0 and ran.err == ""
    lines = ran.out.splitlines()
    assert lines[0].startswith(f"{tiny} · f32 ")
    assert lines[2].split()[:5] == ["test", "layout", "threads", "profile", "tok/s"]
    assert [line.split()[:4] for line in lines[3:5]] == [
        ["pp9", "tp2", "1", "f32"],
        ["tg3", "tp2", "1", "f32"],
    ]
    assert "median ± sd of 2 after a warm-up" in ran.out


def test_csv_and_markdown_have_the_same_rows(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    listed = list(csv.DictReader(io.StringIO(Ran(capfd, tiny, *SHORT, "--csv").out)))
    assert [each["test"] for each in listed] == ["pp9", "tg3"]
    assert set(listed[0]) == ROW_FIELDS
    assert len(listed[0]["samples_tokens_per_s"].split()) == 2
    pasted = Ran(capfd, tiny, *SHORT, "--markdown").out.splitlines()
    assert pasted[0].startswith("| test | layout |") and set(pasted[1]) <= set("|-: ")
    assert [line.split()[1] for line in pasted[2:4]] == ["pp9", "tg3"]
    assert pasted[4] == "" and "cores" in pasted[5]


def test_the_clock_stands_while_memory_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token takes 0.15 s, a reading 100 s; two tokens are over 0.2 s: every second one reads."""
    now = 0.0

    class Engine:
        config = MODELS["adversarial-9-3"]

        def submit(self, request: Request) -> None:
            self.tokens = request.max_tokens

        def run(self) -> Iterator[Event]:
            nonlocal now
            for index in range(self.tokens):
                now += 0.15
                yield Event(0, index, None, None)

    def read() -> float:
        nonlocal now
        now += 100
        return 5.0

    monkeypatch.setattr(rows.time, "perf_counter", lambda: now)
    engine: Any = Engine()
    seconds, reads = rows._run(engine, SpeedTest("tg", 6), read)
    assert (round(seconds, 6), reads) == (0.9, [5.0] * 5), "before, after, and thrice between"
    seconds, reads = rows._run(engine, SpeedTest("pp", 6), None)
    assert (round(seconds, 6), reads) == (0.15, [])


def test_a_value_out_of_range_ends_the_run() -> None:
    fault = Event(0, None, None, "fault", fault="layers.1.gate_up")
    with pytest.raises(AnyshardError, match=r"left the range of float32 in layers\.1\.gate_up"):
        list(rows._sound(iter([fault])))


@pytest.mark.parametrize(
    ("tp", "pp", "threads", "readers"), [(1, 2, 2, 2), (2, 2, 1, 2), (3, 1, 2, 6), (3, 1, 3, 8)]
)
def test_memory_is_read_by_as_many_threads_as_compute_at_once(
    tp: int, pp: int, threads: int, readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one stage, on at most all cores."""
    model = MODELS["adversarial-9-3"]
    engine: Any = SimpleNamespace(
        layout=plan(model, tp=tp, pp=pp, leaf=64),
        threads=threads,
        cores=8,
        comm="threads",
        body="avx2",
        profile=f32_profile(),
        programs=[],
        control=SimpleNamespace(statuses=list),
    )
    probe: Any = SimpleNamespace(rate=float)
    monkeypatch.setattr(rows, "_run", lambda engine, test, read: (1.0, [read()]))
    found = rows.measure(
        engine, SpeedTest("tg", 4), layout="", repetitions=1, probe=probe, on_step=list
    )
    assert found.reads == (readers,)


def test_a_share_is_a_ratio_within_one_repetition() -> None:
    """10 · 125 MB of 2 GB/s, 20 of 5, 12 of 3: 0.625, 0.5 and 0.5."""
    assert row().share == 0.5
    assert row(reads=()).share is None
    assert row().speed == spread((10.0, 20.0, 12.0))
    assert (row().speed.median, row().speed.least, row().speed.most) == (12.0, 10.0, 20.0)
    assert spread((3.0,)).sd == 0.0 and spread((1.0, 3.0)).sd == 2**0.5
    cells = speed_table([row()]).rows[0]
    assert cells == ("tg64", "tp1", "2", "f32", "12.0 ± 5.3", "125.0", "1.5", "50% of 3.0")
    assert speed_table([row("pp", reads=())]).rows[0][-2:] == ("–", "–")
    assert set(row_records([row()])[0]) == ROW_FIELDS


@pytest.mark.parametrize(
    ("sizes", "num_bytes"),
    [
        ((), 256 << 20),
        (("32K", "32768K"), 256 << 20),
        (("335872K",), 656 << 20),
        (("4194304K",), 1 << 30),
    ],
)
def test_the_probe_is_larger_than_the_caches(
    sizes: Sequence[str], num_bytes: int, tmp_path: Path
) -> None:
    for index, size in enumerate(sizes):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(f"{size}\n")
    assert probe_bytes(tmp_path) == num_bytes


@pytest.mark.parametrize("fast", bandwidth.STREAMS)
def test_the_faster_way_to_read_counts(fast: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is: it takes a millisecond, the other two."""
    clock = [0.0]

    class Module:
        def read_streams(self, pool: Any, words: Any, streams: int) -> int:
            clock[0] += 0.001 if streams == fast else 0.002
            return 0

    probe = bandwidth.ReadProbe(SMALL)
    probe._pools[3] = (Module(), None)
    monkeypatch.setattr("anyshard.bench.bandwidth.time.perf_counter", lambda: clock[0])
    assert round(probe.rate(3)) == SMALL * 1000


@needs_native
def test_a_probe_takes_no_more_than_half_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bandwidth, "free_memory", lambda: 2 * SMALL - 1)
    assert open_probe() is None
    monkeypatch.setattr(bandwidth, "free_memory", lambda: 2 * SMALL)
    probe = open_probe()
    assert probe is not None and probe.bytes == SMALL
    assert probe.rate(1) > 0 and probe.rate(2) > 0
    probe.close()


def test_numbers_of_generate_are_no_lists(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ANYSHARD_P is a text and ANYSHARD_N an answer's length; -tp means the same everywhere."""
    for name, value in {"P": "a text", "N": "7", "THREADS": "2", "TP": "2"}.items():
        monkeypatch.setenv(f"ANYSHARD_{name}", value)
    rows = Ran(capfd, tiny, *SHORT, "--json", "-t", "1").record["rows"]
    assert [(each["test"], each["layout"]) for each in rows] == [("pp9", "tp2"), ("tg3", "tp2")]


def test_a_layout_that_has_no_room_is_refused_before_anything_is_loaded(
    tiny: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "read_memory", lambda: (1 << 40, 500 << 20))
    monkeypatch.setattr("anyshard.loading.loader", None)
    ran = Ran(capfd, tiny, *SHORT, "--layouts", "tp1,tp9")
    assert (ran.code, ran.out) == (2, "")
    assert "layout tp9: " in ran.err and "524 MB are free" in ran.err


@pytest.mark.ranks
def test_forked_ranks_of_several_layouts_share_one_launcher(
    tiny: str, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ("-p", "9", "-n", "3", "-r", "1", "--layouts", "tp1,tp2", "-t", "1")
    rows = Ran(capfd, tiny, "--json", *arguments).record["rows"]
    assert [each["comm"] for each in rows] == ["solo", "solo", "shm", "shm"]
