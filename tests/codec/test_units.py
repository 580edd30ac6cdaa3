"""Ranks of different tensor parallelism share pages: statistics stay within a unit."""

from __future__ import annotations

import pytest
import torch
from tests.codec.kv import gqa, mla, units

from octavo import Layout
from octavo.codec import Codec, codec_by_name, codec_names, codec_of
from octavo.codec.base import unit_shape

NAMES = codec_names()


def heads_of(layout: Layout, rank: int, ranks: int) -> range:
    """KV heads that a rank of so many holds."""
    share = layout.kv_heads // ranks
    return range(rank * share, (rank + 1) * share)


def units_of(layout: Layout, heads: range) -> list[int]:
    """Units whose heads are all among those."""
    return [
        unit
        for unit in range(layout.unit_count)
        if set(range(layout.unit_range(unit).head_begin, layout.unit_range(unit).head_end))
        <= set(heads)
    ]


def written(
    codec: Codec, layout: Layout, whole: torch.Tensor, ranks: int
) -> dict[int, torch.Tensor]:
    """Packed units, put by ranks of which each sees its own heads alone."""
    store: dict[int, torch.Tensor] = {}
    for rank in range(ranks):
        heads = heads_of(layout, rank, ranks)
        local = whole[..., heads.start : heads.stop, :].clone()
        for unit in units_of(layout, heads):
            part = layout.unit_range(unit)
            mine = local[..., part.head_begin - heads.start : part.head_end - heads.start, :]
            store[unit] = codec.pack(mine, layout)
    return store


def read(codec: Codec, layout: Layout, store: dict[int, torch.Tensor], ranks: int) -> torch.Tensor:
    """What ranks put together from the units they want; heads side by side."""
    by_rank: list[torch.Tensor] = []
    for rank in range(ranks):
        wanted = units_of(layout, heads_of(layout, rank, ranks))
        by_rank.append(torch.cat([codec.unpack(store[u], layout, u) for u in wanted], dim=-2))
    return torch.cat(by_rank, dim=-2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("writers", [1, 2, 4, 8])
def test_pages_written_at_one_tp_are_read_at_every_other(name: str, writers: int) -> None:
    layout = gqa(kv_heads=8, head_dim=16, head_parts=8)
    whole = torch.cat([units(layout, 3, unit=unit, seed=unit) for unit in range(8)], dim=-2)
    codec = codec_by_name(name)
    store = written(codec, layout, whole, writers)
    assert sorted(store) == list(range(8))
    reference = read(codec, layout, store, 1)
    for readers in (2, 4, 8):
        assert torch.equal(read(codec, layout, store, readers), reference)
    for unit, packed in written(codec, layout, whole, 8).items():
        assert torch.equal(store[unit], packed), f"unit {unit} depends on who wrote it"


@pytest.mark.parametrize("name", NAMES)
def test_units_of_tp_4_are_read_at_tp_2_and_not_cut_at_tp_8(name: str) -> None:
    layout = gqa(kv_heads=8, head_dim=16, head_parts=4)
    assert units_of(layout, heads_of(layout, 0, 2)) == [0, 1]
    assert units_of(layout, heads_of(layout, 0, 8)) == []  # half of unit 0: ask for a finer layout
    whole = torch.cat([units(layout, 2, unit=unit, seed=unit) for unit in range(4)], dim=-2)
    codec = codec_by_name(name)
    store = written(codec, layout, whole, 4)
    assert torch.equal(read(codec, layout, store, 2), read(codec, layout, store, 4))


@pytest.mark.parametrize("name", NAMES)
def test_a_head_gone_wild_costs_the_others_nothing(name: str) -> None:
    """Even within a unit: K's statistics are per channel, V's per token and head."""
    layout = gqa(kv_heads=4, head_dim=16)
    codec = codec_by_name(name)
    calm = units(layout, 2)
    wild = calm.clone()
    wild[..., 2, :] *= 1000
    one = codec.unpack(codec.pack(calm, layout), layout, 0)
    other = codec.unpack(codec.pack(wild, layout), layout, 0)
    for head in (0, 1, 3):
        assert torch.equal(one[..., head, :], other[..., head, :])


@pytest.mark.parametrize("name", NAMES)
def test_pipeline_stages_and_one_stage_write_the_same_bytes(name: str) -> None:
    staged = gqa(layers=6, layer_parts=3)
    codec = codec_by_name(name)
    layers = [units(staged, 2, unit=unit, seed=unit) for unit in range(3)]
    for unit, values in enumerate(layers):
        assert values.shape[1:] == unit_shape(staged, unit)
        packed = codec.pack(torch.cat(layers, dim=1)[:, 2 * unit : 2 * unit + 2], staged)
        assert torch.equal(packed, codec.pack(values, staged))


@pytest.mark.parametrize("name", NAMES)
def test_mla_pages_written_by_ranks_in_turn_are_those_of_one_rank(name: str) -> None:
    """Rank r writes pages i mod tp == r; every rank reads them all."""
    layout = mla(page_tokens=32)
    codec = codec_by_name(name)
    pages = units(layout, 8)
    alone = codec.pack(pages, layout)
    for ranks in (2, 4, 8):
        for rank in range(ranks):
            turn = codec.pack(pages[rank::ranks], layout)
            assert torch.equal(turn, alone[rank::ranks])
    assert codec_of(codec.variant).unpack(alone, layout, 0).shape == pages.shape
