"""Shard maps: who holds, gets and puts what, and pages that cross TP sizes."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.codec import Codec, codec_of, variants
from octavo.paged import PagedKV, PagedSource
from octavo.shards import Shard, ShardError, ShardMap, tp_sizes, with_parts
from octavo.transfer import Transfer
from octavo_proto.layout import KvKind, Layout, LayoutError, UnitRange, foreign_layout

GQA = Layout(name="gqa", model="m", layers=4, kv_heads=8, head_dim=16)
MLA = Layout(
    name="mla", model="m", kind=KvKind.MLA, layers=6, kv_heads=1, head_dim=512, rope_dim=64
)
LLAMA_70B = Layout(name="70b", model="m", layers=80, kv_heads=8, head_dim=128)
DEEPSEEK = replace(MLA, name="v3", layers=61)
EVEN_MAX = 1.05
"""Largest part of the mean that a rank may put."""


def unevenness(put_bytes: NDArray[np.int64]) -> float:
    return float(put_bytes.max() / put_bytes.mean())


def random_kv(layout: Layout, page_count: int, seed: int) -> torch.Tensor:
    """``[layers, pages, page_tokens, width]`` for MLA, else ``[layers, 2, pages, tokens, ...]``."""
    generator = torch.Generator().manual_seed(seed)
    sides = (page_count, layout.page_tokens)
    shape: tuple[int, ...] = (layout.layers, 2, *sides, layout.kv_heads, layout.head_dim)
    if layout.kind is KvKind.MLA:
        shape = (layout.layers, *sides, layout.head_dim + layout.rope_dim)
    return torch.randn(shape, generator=generator).to(getattr(torch, layout.dtype))


def rank_cache(layout: Layout, kv: torch.Tensor, shard: Shard) -> PagedKV:
    """The engine's cache of one rank: a copy of its part of the whole model's KV."""
    held = shard.held
    part = kv[held.layer_begin : held.layer_end]
    dims = "layer block token latent"
    if layout.kind is not KvKind.MLA:
        part = part[..., held.head_begin : held.head_end, :]
        dims = "layer kv block token head dim"
    return PagedKV(
        layout,
        [part.clone()],
        dims,
        layer_begin=held.layer_begin,
        head_begin=held.head_begin,
    )


def gathered(cache: PagedKV, shard: Shard, unit: int, positions: NDArray[np.int64]) -> torch.Tensor:
    source = PagedSource(cache, range(cache.block_count))
    source.begin(Transfer(cache.layout, 0, cache.block_count, shard.units))
    return source.gather(unit, positions)


def written(
    layout: Layout, kv: torch.Tensor, shards: ShardMap, codec: Codec
) -> dict[tuple[int, int], torch.Tensor]:
    """What a node holds after every rank has put its turn: packed bytes by (page, unit)."""
    node: dict[tuple[int, int], torch.Tensor] = {}
    page_count = kv.shape[1] if layout.kind is KvKind.MLA else kv.shape[2]
    for shard in shards.shards():
        cache = rank_cache(layout, kv, shard)
        positions = shard.put_positions(page_count)
        if not len(positions):
            continue
        for unit in shard.units:
            values = gathered(cache, shard, unit, positions).view(kv.dtype)
            packed = codec.pack(values, layout)
            assert packed.shape[1] == codec.unit_bytes(layout, unit)
            for position, row in zip(positions.tolist(), packed, strict=True):
                assert (position, unit) not in node, "a unit was put twice"
                node[position, unit] = row.clone()
    assert len(node) == page_count * layout.unit_count, "a unit was put by nobody"
    return node


def read(
    layout: Layout, node: dict[tuple[int, int], torch.Tensor], shard: Shard, codec: Codec
) -> list[list[torch.Tensor]]:
    """One rank's cache after getting all pages: views by layer and side, in bits."""
    page_count = len({position for position, _unit in node})
    empty = torch.zeros_like(random_kv(layout, page_count, 0))
    cache = rank_cache(layout, empty, shard)
    blocks = torch.arange(page_count)
    for unit in shard.units:
        packed = torch.stack([node[position, unit] for position in range(page_count)])
        values = codec.unpack(packed, layout, unit).view(cache.bits_dtype)
        for layer, sides in enumerate(cache.page_views(unit)):
            for side, view in enumerate(sides):
                view[blocks, 0] = values[:, layer, side] if len(sides) == 2 else values[:, layer]
    return [sides for unit in shard.units for sides in cache.page_views(unit)]


def assert_same_cache(
    layout: Layout, kv: torch.Tensor, shard: Shard, got: list[list[torch.Tensor]]
) -> None:
    """Bit for bit what the rank would hold had it computed ``kv`` itself."""
    cache = rank_cache(layout, kv, shard)
    expected = [sides for unit in shard.units for sides in cache.page_views(unit)]
    for wanted, found in zip(expected, got, strict=True):
        for want, have in zip(wanted, found, strict=True):
            assert torch.equal(want, have)


def unpacked_kv(
    layout: Layout, node: dict[tuple[int, int], torch.Tensor], codec: Codec
) -> torch.Tensor:
    """The whole model's KV as one rank that holds everything reads it."""
    page_count = len({position for position, _unit in node})
    kv = torch.zeros_like(random_kv(layout, page_count, 0))
    for unit in range(layout.unit_count):
        part = layout.unit_range(unit)
        packed = torch.stack([node[position, unit] for position in range(page_count)])
        values = codec.unpack(packed, layout, unit)
        layers = slice(part.layer_begin, part.layer_end)
        if layout.kind is KvKind.MLA:
            kv[layers] = values.transpose(0, 1)
        else:
            heads = slice(part.head_begin, part.head_end)
            kv[layers, :, :, :, heads] = values.permute(1, 2, 0, 3, 4, 5)
    return kv


def codecs_for(layout: Layout) -> list[Codec]:
    """Those of this client that can pack the layout's units."""
    found: list[Codec] = []
    for variant in variants():
        codec = codec_of(variant)
        with suppress(LayoutError):  # no format for such pages
            codec.unit_bytes(layout, 0)
            found.append(codec)
    return found


@pytest.mark.parametrize("codec", codecs_for(GQA), ids=lambda codec: codec.name)
def test_pages_put_at_tp_4_are_got_at_other_sizes(codec: Codec) -> None:
    layout = with_parts(GQA, tp=[1, 2, 4, 8, 16], pp=[1, 2, 4])
    kv = random_kv(layout, 3, seed=4)
    node = written(layout, kv, ShardMap(layout, 4), codec)
    whole = unpacked_kv(layout, node, codec)
    if codec.name == "raw":
        assert torch.equal(whole.view(torch.int16), kv.view(torch.int16))
    for tp, pp in [(1, 1), (2, 1), (8, 1), (16, 1), (4, 4)]:
        for shard in ShardMap(layout, tp, pp).shards():
            assert_same_cache(layout, whole, shard, read(layout, node, shard, codec))


@pytest.mark.parametrize("codec", codecs_for(MLA), ids=lambda codec: codec.name)
def test_mla_pages_put_by_ranks_in_turn_are_got_by_every_rank(codec: Codec) -> None:
    layout = with_parts(MLA, tp=[4, 8], pp=[1, 2])
    kv = random_kv(layout, 9, seed=7)
    node = written(layout, kv, ShardMap(layout, 4), codec)
    whole = unpacked_kv(layout, node, codec)
    for shard in ShardMap(layout, 8, 2).shards():
        assert_same_cache(layout, whole, shard, read(layout, node, shard, codec))


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.data())
def test_bytes_put_at_one_size_are_the_bytes_put_at_any_other(data: st.DataObject) -> None:
    kv_heads = data.draw(st.sampled_from([1, 2, 3, 4, 6]))
    layers = data.draw(st.integers(1, 5))
    layout = Layout(
        name="l",
        model="m",
        layers=layers,
        kv_heads=kv_heads,
        head_dim=8,
        dtype=data.draw(st.sampled_from(["bfloat16", "float16", "float32"])),
    )
    sizes = [tp for tp in range(1, 13) if kv_heads % tp == 0 or tp % kv_heads == 0]
    tps = data.draw(st.lists(st.sampled_from(sizes), min_size=2, max_size=3))
    pps = data.draw(st.lists(st.integers(1, min(layers, 3)), min_size=1, max_size=2))
    layout = with_parts(layout, tp=tps, pp=pps)
    kv = random_kv(layout, data.draw(st.integers(1, 6)), seed=data.draw(st.integers(0, 9)))
    maps = [ShardMap(layout, tp, pp) for tp in tps for pp in pps]
    codec = codec_of(1)
    nodes = [written(layout, kv, shards, codec) for shards in maps]
    for other in nodes[1:]:
        assert other.keys() == nodes[0].keys()
        assert all(torch.equal(other[row], nodes[0][row]) for row in other)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    kv_heads=st.integers(1, 12),
    layers=st.integers(1, 80),
    tp=st.integers(1, 24),
    pp=st.integers(1, 6),
)
def test_each_page_of_each_unit_has_one_writer(
    kv_heads: int, layers: int, tp: int, pp: int
) -> None:
    layout = Layout(name="l", model="m", layers=layers, kv_heads=kv_heads, head_dim=8)
    try:
        layout = with_parts(layout, tp=[tp], pp=[pp])
    except ShardError:
        too_many = min(tp, kv_heads) * pp > 64
        assert pp > layers or (kv_heads % tp and tp % kv_heads) or too_many
        return
    writers: Counter[tuple[int, int]] = Counter()
    for shard in ShardMap(layout, tp, pp).shards():
        positions = shard.put_positions(30, first_page=3).tolist()
        assert positions == [position for position in range(3, 33) if shard.puts(position)]
        writers.update(product(positions, shard.units))
        held = shard.held
        assert sum(map(area, map(layout.unit_range, shard.units))) == area(held)
    assert set(writers) == set(product(range(3, 33), range(layout.unit_count)))
    assert set(writers.values()) == {1}


def area(part: UnitRange) -> int:
    return (part.layer_end - part.layer_begin) * (part.head_end - part.head_begin)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("layout", [LLAMA_70B, DEEPSEEK], ids=lambda layout: layout.name)
def test_bytes_over_ranks_are_even(layout: Layout, tp: int, pp: int) -> None:
    shards = ShardMap(with_parts(layout, tp=[tp], pp=[pp]), tp, pp)
    put_bytes = shards.put_bytes(page_count=1024)
    assert int(put_bytes.sum()) == 1024 * layout.raw_page_bytes
    assert unevenness(put_bytes) <= EVEN_MAX


def test_a_raw_first_page_does_not_tip_the_balance() -> None:
    shards = ShardMap(DEEPSEEK, 8)

    def unit_bytes(position: int, unit: int) -> int:
        raw = DEEPSEEK.raw_unit_bytes(unit)
        return raw if position == 0 else raw * 656 // 1152

    assert unevenness(shards.put_bytes(1024, unit_bytes)) <= EVEN_MAX


def test_mla_rank_puts_pages_of_its_residue() -> None:
    shards = ShardMap(MLA, 4)
    for rank in range(4):
        shard = shards.shard(rank)
        assert shard.put_positions(10).tolist() == [i for i in range(10) if i % 4 == rank]
        assert shard.units == (0,)


def test_replicas_of_a_head_share_its_pages() -> None:
    shards = ShardMap(with_parts(GQA, tp=[16]), 16)
    first, second = shards.shard(6), shards.shard(7)
    assert first.units == second.units == (3,)
    assert [(s.held.head_begin, s.held.head_end) for s in (first, second)] == [(3, 4), (3, 4)]
    assert first.put_positions(4).tolist() == [0, 2]
    assert second.put_positions(4).tolist() == [1, 3]


def test_units_of_a_rank_fit_its_cache() -> None:
    layout = with_parts(LLAMA_70B, tp=[4, 8], pp=[2])
    shard = ShardMap(layout, 4, 2).shard(1, 1)
    held = shard.held
    assert (held.layer_begin, held.layer_end, held.head_begin, held.head_end) == (40, 80, 2, 4)
    assert [layout.unit_range(unit).head_begin for unit in shard.units] == [2, 3]


@pytest.mark.parametrize(
    ("kv_heads", "tps", "pps", "parts"),
    [
        (8, [1], [1], (1, 1)),
        (8, [4], [1], (1, 4)),
        (8, [1, 2, 4, 8, 16], [1], (1, 8)),
        (8, [2, 4], [2, 4], (4, 4)),
        (3, [1, 3, 6], [1], (1, 3)),
        (10, [2, 5], [1], (1, 8)),
        (1, [1, 8, 64], [1], (1, 1)),
    ],
)
def test_a_layout_is_cut_into_the_fewest_units_that_serve(
    kv_heads: int, tps: list[int], pps: list[int], parts: tuple[int, int]
) -> None:
    layout = with_parts(replace(LLAMA_70B, kv_heads=kv_heads), tp=tps, pp=pps)
    assert (layout.layer_parts, layout.head_parts) == parts
    assert set(tps) <= set(tp_sizes(layout))


def test_tp_sizes_of_a_layout() -> None:
    assert tp_sizes(replace(GQA, head_parts=4), 64) == (1, 2, 4)
    assert tp_sizes(replace(GQA, head_parts=8), 64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert tp_sizes(replace(GQA, head_parts=1), 64) == (1,)
    assert tp_sizes(MLA, 3) == (1, 2, 3)


def test_stages_of_an_engine_of_its_own_mind_need_layers_cut_finely() -> None:
    stage_layers = [15, 15, 16, 15]
    with pytest.raises(ShardError, match="would cut units"):
        ShardMap(with_parts(DEEPSEEK, tp=[8], pp=[4]), 8, 4, stage_layers=stage_layers)
    fine = with_parts(DEEPSEEK, tp=[8], pp=[4], fine_layers=True)
    assert fine.layer_parts == 61
    shards = ShardMap(fine, 8, 4, stage_layers=stage_layers)
    assert shards.shard(0, 2).units == tuple(range(30, 46))
    assert unevenness(shards.put_bytes(1024)) <= EVEN_MAX


@pytest.mark.parametrize(
    ("layout", "tp", "pp", "message"),
    [
        (replace(GQA, head_parts=4), 8, 1, r"allow tp 1, 2, 4"),
        (GQA, 3, 1, "divisor or a multiple of the 8"),
        (GQA, 0, 1, "tp is 0"),
        (GQA, 4096, 1, "1 to 1024"),
        (GQA, 1, 5, "pp is 5"),
        (GQA, 1, 0, "pp is 0"),
        (GQA, 1, 2, r"parts of layers begin at \[0\]"),
        (foreign_layout("f", "lmcache"), 1, 1, "foreign"),
    ],
)
def test_what_cannot_be_split_is_refused_with_what_can(
    layout: Layout, tp: int, pp: int, message: str
) -> None:
    with pytest.raises(ShardError, match=message):
        ShardMap(layout, tp, pp)


def test_a_rank_that_does_not_exist_is_refused() -> None:
    shards = ShardMap(replace(GQA, head_parts=2), 2)
    for rank, stage in ((2, 0), (-1, 0), (0, 1)):
        with pytest.raises(ShardError, match="there are tp 2 and pp 1"):
            shards.shard(rank, stage)


@pytest.mark.parametrize("stage_layers", [[4], [2, 3], [0, 4], [1, 1, 2]])
def test_stage_layers_must_add_up(stage_layers: list[int]) -> None:
    with pytest.raises(ShardError, match="add up to 4"):
        ShardMap(GQA, 1, 2, stage_layers=stage_layers)


def test_more_units_than_a_mask_holds_are_refused() -> None:
    with pytest.raises(ShardError, match="more than 64 units"):
        with_parts(replace(LLAMA_70B, kv_heads=32), tp=[32], pp=[4])
