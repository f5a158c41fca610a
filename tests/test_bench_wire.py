"""`bench wire`: what int8 rows cost, in every format, and where they pay."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest

from anyshard.bench.tables import wire_records, wire_table
from anyshard.bench.wire import LINKS, WireResult, measure_wire
from anyshard.cli import main
from anyshard.ops import load_kernels

Capture = pytest.CaptureFixture[str]
SHORT = ("--hidden", "576,40", "--rows", "1,3", "-r", "2")
RESULT = WireResult(
    hidden=576,
    rows=4,
    threads=1,
    round_ns=200.0,
    encode_ns=300.0,
    decode_ns=100.0,
    samples_encode_ns=(300.0,),
    samples_decode_ns=(100.0,),
)


def test_it_pays_where_the_bytes_saved_take_longer() -> None:
    """1,692 bytes are saved: at 100 Mbit/s 135.36 us, against 0.4 to encode and decode."""
    assert (RESULT.raw_bytes, RESULT.int8_bytes, RESULT.cost_ns) == (2304, 612, 400.0)
    assert [link.bits_s for link in LINKS] == [4e6, 1e8, 1e9, 1e10]
    assert RESULT.gain_ns(LINKS[1]) == pytest.approx(135_360 - 400)
    assert RESULT.pays_below_bits_s == pytest.approx(8 * 1692 / 400e-9)
    assert RESULT.pays_below_alone_bits_s == pytest.approx(8 * 1692 / 1600e-9)
    slow = replace(RESULT, encode_ns=2000.0)
    assert slow.pays_below_bits_s < 1e10 and slow.gain_ns(LINKS[3]) < 0 < slow.gain_ns(LINKS[2])
    ((*_, hundred, _, ten),) = wire_table([slow]).rows
    assert hundred == "yes, 133 µs" and ten == "no, -0.746 µs"
    (record,) = wire_records([slow])
    assert record["pays_at_100_mbit"] and not record["pays_at_10000_mbit"]


@pytest.mark.parametrize("body", ["scalar", "reference", "auto"])
def test_figures_are_of_every_width_and_number_of_rows(body: str) -> None:
    kernels, steps = load_kernels(body, threads=1, spin=False), []  # type: ignore[arg-type]
    found = measure_wire(
        kernels, hidden=40, rows=(1, 5), threads=1, repetitions=3, on_step=lambda: steps.append(1)
    )
    kernels.pool.close()
    assert [each.rows for each in found] == [1, 5] and len(steps) == 6
    for each in found:
        assert min(each.encode_ns, each.decode_ns, each.round_ns) > 0
        assert len(each.samples_encode_ns) == 3
        assert each.encode_ns in each.samples_encode_ns


def test_every_format_has_every_row(capfd: Capture) -> None:
    assert main(["bench", "wire", *SHORT, "--json"]) == 0
    record = json.loads(capfd.readouterr().out)
    assert [(row["hidden"], row["rows"]) for row in record["rows"]] == [
        *((576, 1), (576, 3)),
        *((40, 1), (40, 3)),
    ]
    assert record["rows"][0]["int8_bytes_per_row"] == 612
    assert record["rows"][2]["int8_bytes_per_row"] == 44
    assert main(["bench", "wire", *SHORT, "--csv"]) == 0
    lines = list(csv.DictReader(capfd.readouterr().out.splitlines()))
    assert [line["hidden"] for line in lines] == ["576", "576", "40", "40"]
    assert main(["bench", "wire", *SHORT, "--markdown"]) == 0
    assert capfd.readouterr().out.startswith("| hidden | rows | bytes | in int8 |")
    assert main(["bench", "wire", *SHORT]) == 0
    out = capfd.readouterr().out
    assert "612 (0.266)" in out and "100 Mbit/s" in out and "6 boundaries" in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--hidden", "0"), "--hidden is 0; it can be 1 to 65536"),
        (("--rows", "x"), "--rows has 'x'; whole numbers"),
        (("--threads", "0"), "--threads is 0"),
        (("--json", "--csv"), "are two formats"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    flags: tuple[str, ...], words: str, capfd: Capture
) -> None:
    assert main(["bench", "wire", *flags]) == 2
    assert words in capfd.readouterr().err
