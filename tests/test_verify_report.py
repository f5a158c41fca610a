"""`anyshard verify --report`: one page, where it goes, and what it must not replace."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import mutants
import pytest
from gguf_models import write_gguf_model
from models import MODELS, write_hf_model
from test_verify import SHORT, Ran

from anyshard.verify import naive


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """9 query heads, 3 KV heads, 3 layers."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return str(write_hf_model(folder, MODELS["adversarial-9-3"], seed=7, adversarial=True))


class Checked(HTMLParser):
    """Tags in order and nesting; every text and attribute as a browser reads it."""

    VOID = frozenset({"meta", "br", "link"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {name for name, _ in attrs} & {"src", "href", "onload", "onclick"}
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_report_is_one_page_that_escapes_what_it_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = '<script>alert(1)</script>&"x'.replace("/", "_")
    config = MODELS["adversarial-9-3"]
    model = str(write_hf_model(tmp_path / name, config, seed=7, adversarial=True))
    monkeypatch.setitem(naive.ORDERS, "written", mutants.MissingNode)
    target = tmp_path / "out.html"
    arguments = (*SHORT, "--layouts", "tp2,pp2", "--report", str(target))
    assert Ran(capfd, model, *arguments).code == 4
    page = target.read_text("utf-8")
    found = Checked(page)
    assert "script" not in found.tags and name in "".join(found.texts)
    assert page.startswith("<!DOCTYPE html>") and "http" not in page and "url(" not in page
    first = page.index('<p class="summary differs">1 of 2 cells DIFFER')
    assert first < page.index("<table>"), "the sentence comes before the table"
    assert found.tags.count("tr") == 1 + 1 + 2 + 1
    assert page.count("became 0x") + page.count("became -0x") == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_report_is_refused_before_anything_runs(
    tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pipe, loop = tmp_path / "pipe", tmp_path / "loop"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    for target, word in {
        pipe: "is no regular file",
        loop: "cannot be written",
        tmp_path: "name a file in a folder",
        tmp_path / ("n" * 300): "cannot be written",
    }.items():
        ran = Ran(capfd, tiny, *SHORT, "--layouts", "tp2", "--report", str(target))
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1) and word in ran.err
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_report_does_not_go_where_a_stream_goes(stream: str, tiny: str, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    command = [sys.executable, "-m", "anyshard.cli", "verify", tiny, *SHORT, "--report", str(page)]
    with page.open("wb") as file:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: file}
        done = subprocess.run(command, **streams, timeout=100, check=False)
    said = f"anyshard: --report {page} is where {stream} goes; name another\n"
    shown = {"stdout": done.stderr, "stderr": page.read_bytes()}[stream]
    assert (done.returncode, shown) == (2, said.encode())


def test_a_report_takes_no_file_of_the_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = MODELS["adversarial-9-3"]
    model = write_hf_model(tmp_path / "model", config, seed=7, adversarial=True)
    link, hard = tmp_path / "link.html", tmp_path / "hard.html"
    link.symlink_to(model / "config.json")
    hard.hardlink_to(model / "model.safetensors")
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    for target in (model / "config.json", link, hard):
        ran = Ran(capfd, str(model), *SHORT, "--layouts", "tp2", "--report", str(target))
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert "is a file of the model, which would be lost; name another" in ran.err
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before


def test_a_report_takes_no_part_of_a_model_in_several_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whichever of them was named, and by whatever name."""
    write_gguf_model(tmp_path / "m.gguf", MODELS["adversarial-9-3"], split_tensors=20)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 3
    second = tmp_path / "second.html"
    second.hardlink_to(parts[1])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for named, target in ((0, parts[2]), (2, parts[0]), (0, second), (1, parts[1])):
        model = str(parts[named])
        ran = Ran(capfd, model, *SHORT, "--layouts", "tp2", "--report", str(target))
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert "is a file of the model, which would be lost; name another" in ran.err
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_name_that_is_no_utf8_has_a_report(
    tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / os.fsdecode(b"m\xffodel")
    odd.symlink_to(tiny)
    page = tmp_path / "out.html"
    assert Ran(capfd, str(odd), *SHORT, "--layouts", "tp2", "--report", str(page)).code == 0
    assert "m\\udcffodel" in page.read_text("utf-8")


def test_a_report_goes_where_a_link_leads(
    tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "out.html", tmp_path / "link.html"
    link.symlink_to(target)
    assert Ran(capfd, tiny, *SHORT, "--layouts", "tp2", "--report", str(link)).code == 0
    assert link.is_symlink() and target.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["out.html"]


@pytest.mark.parametrize("differs", [False, True])
def test_a_report_that_fails_hides_no_verdict(
    differs: bool,
    tiny: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if differs:
        monkeypatch.setitem(naive.ORDERS, "written", mutants.MissingNode)

    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    ran = Ran(
        capfd, tiny, *SHORT, "--layouts", "tp2", "--json", "--report", str(tmp_path / "out.html")
    )
    assert ran.code == (4 if differs else 2) and ran.record["equal"] is not differs
    assert "out.html cannot be written: " in ran.err and ran.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "nothing half-written"
