"""Pages, bytes and FLOP of keys and values, counted before a run, for every way to split them."""

from __future__ import annotations

import pytest
from grid import the_model
from models import MODELS, write_hf_model

from anyshard.cli import running
from anyshard.cli.flags import SplitFlags, num_bytes
from anyshard.cli.memory import kv_bytes, pages_in
from anyshard.cli.running import Opened, open_model
from anyshard.config import KvType
from anyshard.engine import Engine
from anyshard.epoch import EngineOptions, plan_epoch
from anyshard.errors import LayoutError, OptionError, PromptTooLong
from anyshard.kv import num_local_pages, rank_page_bytes
from anyshard.layout import STRIPE_TREE, KvShard, plan
from anyshard.ledger import step_kv_bytes
from anyshard.loading import profile_of
from anyshard.model import Program, program
from anyshard.ops.kv_pages import page_bytes
from anyshard.request import Request
from anyshard.verify.driver import open_group
from anyshard.verify.grid import parse_layouts, sharded

A9 = "adversarial-9-3"


def parts(
    tp: int = 1, pp: int = 1, kv_shard: KvShard = "heads", kv: KvType = "f32"
) -> list[Program]:
    """The programs of all ranks."""
    config, profile = MODELS[A9], profile_of("f32", kv)
    layout = plan(config, tp=tp, pp=pp, kv_shard=kv_shard, leaf=profile.leaf)
    return [program(config, profile, layout, rank) for rank in range(layout.world)]


def page_of(part: Program) -> int:
    return rank_page_bytes(part.config, part.profile, layers=part.layers, kv_heads=part.kv_heads)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("512M", 512 * 10**6),
        ("2G", 2 * 10**9),
        ("2Gi", 2 << 30),
        ("3KiB", 3072),
        ("3K", 3000),
        ("7B", 7),
        ("1T", 10**12),
        ("1Ti", 1 << 40),
        ("123", 123),
        ("2.5g", 2_500_000_000),
        ("0.5 gib", 1 << 29),
    ],
)
def test_a_size_is_what_it_says(text: str, want: int) -> None:
    assert num_bytes("kv-memory", text) == want


@pytest.mark.parametrize("kv", ["f32", "int8"])
@pytest.mark.parametrize("kv_shard", ["heads", "sequence"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (8, 1), (8, 3)])
def test_kv_memory_holds_what_the_ranks_of_all_stages_keep(
    tp: int, pp: int, kv_shard: KvShard, kv: KvType
) -> None:
    """To the byte: what ranks allocate for so many pages has room, and one byte less has not."""
    each = parts(tp, pp, kv_shard, kv)

    def allocated(pages: int) -> int:
        kept = [num_local_pages(p.stripes, num_pages=pages, sequence_blocks=5) for p in each]
        return sum(page_of(part) * count for part, count in zip(each, kept, strict=True))

    assert pages_in(each, allocated(9)) == 9
    assert pages_in(each, allocated(9) - 1) == 8
    assert pages_in(each, allocated(1)) == 1
    least = allocated(1)
    with pytest.raises(LayoutError, match=rf"{least - 1} bytes holds no page.* {least} bytes"):
        pages_in(each, least - 1)


@pytest.mark.parametrize("blocks", [1, 3, 5, 9, 13])
@pytest.mark.parametrize("tp", [2, 3, 5, 8])
def test_bytes_of_one_sequence_add_up_over_the_ranks(tp: int, blocks: int) -> None:
    each = parts(tp, 1, "sequence")
    whole = [kv_bytes(part, tokens=32 * blocks) for part in each]
    assert sum(whole) == blocks * page_of(each[0])
    assert [kv_bytes(part, tokens=32 * blocks - 31) for part in each] == whole


@pytest.fixture(scope="module")
def nine(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hf_model(tmp_path_factory.mktemp("nine") / "m", MODELS[A9], seed=1))


def opened(path: str, *, tp: int = 2, num_seqs: int = 32, **flags: object) -> Opened:
    asked = {"chunk": 1, "max_model_len": 256, "comm": "threads", "tensor_parallel_size": tp}
    split = SplitFlags(max_num_seqs=num_seqs, **(asked | flags))  # type: ignore[arg-type]
    return open_model(path, split, num_prompts=num_seqs)


@pytest.mark.parametrize("tp", [2, 5, 8, 9])
def test_auto_may_take_the_sequence_at_every_width_that_has_stripes(
    tp: int, nine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = opened(nine, tp=tp, kv_shard="heads").need(256).total - 1
    monkeypatch.setattr(running, "read_memory", lambda: (1 << 40, free))
    taken = opened(nine, tp=tp, kv_shard="auto").for_tokens(256).layout.kv_shard
    assert taken == ("sequence" if tp <= 8 else "heads")


def test_what_neither_way_has_room_for_stays_by_heads(
    nine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "read_memory", lambda: (1 << 40, 1 << 20))
    assert opened(nine).for_tokens(256).layout.kv_shard == "heads"


@pytest.mark.parametrize("kv_shard", ["heads", "sequence"])
def test_kv_memory_caps_what_sequences_in_flight_are_counted_with(kv_shard: str, nine: str) -> None:
    """Three sequences of four pages, on two ranks; five pages are asked for."""
    shape = {"num_seqs": 3, "kv_shard": kv_shard, "max_model_len": 128}
    page = opened(nine, **shape).need(128).kv // 12  # type: ignore[arg-type]
    capped = opened(nine, **shape, kv_memory=str(5 * page))  # type: ignore[arg-type]
    assert (capped.kv_pages, capped.need(128).kv) == (5, 5 * page)


def test_the_smallest_memory_that_is_named_is_that_of_the_way_that_takes_less(nine: str) -> None:
    by_sequence = page_of(parts(2, 1, "sequence")[0])
    assert by_sequence < sum(page_of(part) for part in parts(2))
    with pytest.raises(LayoutError, match=f"32 tokens take {by_sequence} bytes on these ranks"):
        opened(nine, kv_memory=str(by_sequence - 1))
    assert opened(nine, kv_memory=str(by_sequence), max_model_len=32).kv_tokens >= 0


def test_layouts_by_the_sequence_contradict_a_flag_that_says_heads() -> None:
    layouts = parse_layouts("tp2,tp3seq")
    assert sharded(layouts, "auto") == sharded(layouts, None) == layouts
    assert {split.kv_shard for split in sharded(layouts, "sequence")} == {"sequence"}
    with pytest.raises(OptionError, match="--kv-shard heads contradicts a layout"):
        sharded(layouts, "heads")
    assert sharded(layouts[:1], "heads") == layouts[:1]


@pytest.mark.parametrize("kv", ["f32", "int8"])
@pytest.mark.parametrize("tp", [2, 3, 5, 8])
def test_ranks_of_a_split_sequence_share_its_work(tp: int, kv: KvType) -> None:
    """q, k, v and attention add up to the unsplit run's; only merges are more: of each head those
    of all nodes but one, three operations a float of (l, o), and a division."""
    (whole,), each = parts(kv=kv), parts(tp, 1, "sequence", kv)

    def of(kind: str, field: str, part: Program) -> int:
        return sum(getattr(op, field) for op in part.ops if op.kind == kind)

    kinds = [("qkv", "flop"), ("attention", "flop_per_key"), ("attention", "kv_bytes_per_key")]
    for kind, field in kinds:
        shared, alone = sum(of(kind, field, part) for part in each), of(kind, field, whole)
        in_whole_bytes = field == "kv_bytes_per_key" and kv == "int8"  # each rank rounds down
        assert 0 <= alone - shared <= (len(each) * len(whole.ops) if in_whole_bytes else 0), kind
    d, nodes = MODELS[A9].head_dim, sum(len(STRIPE_TREE.cover(part.stripes)) for part in each)
    merged = sum(of("merge_states", "flop", part) for part in each)
    config = MODELS[A9]
    assert merged == config.num_layers * config.num_heads * (3 * (nodes - 1) * (d + 1) + d)
    a_page = 2 * config.num_layers * config.num_kv_heads * page_bytes(kv, d)
    assert step_kv_bytes(whole, keys=32) == a_page


def test_the_limit_of_a_prompt_is_what_the_pages_of_each_rank_hold() -> None:
    """Four pages of three ranks, of which the one that block 3 needs is missing."""
    model = the_model(A9)
    layout = plan(model.config, tp=3, kv_shard="sequence", leaf=model.profile.leaf)
    asked = {"chunk": 64, "max_num_seqs": 3, "max_model_len": 160, "page_order": (0, 1, 2, 4)}
    options = EngineOptions(comm="threads", threads=1, **asked)  # type: ignore[arg-type]
    group = open_group(model.served, forked=False)
    try:
        engine = Engine(group, model.config, model.profile, layout, options, cores=2)
        with pytest.raises(PromptTooLong, match="96"):
            engine.submit(Request(prompt=model.prompt[:96], max_tokens=1))
        engine.close()
    finally:
        group.close()


def test_queries_and_states_have_one_buffer_each() -> None:
    each = parts(3, 1, "sequence")
    options = EngineOptions(max_model_len=64)
    epoch = plan_epoch(each, options, body="scalar", threads=1, spin=False)
    fenced = {spec.name: spec.is_fenced for spec in epoch.sizes.wires.exchanges}
    whole = dict.fromkeys(("nodes", "logits", "pairs"), False)
    assert fenced == whole | {"queries": True, "states": True}
