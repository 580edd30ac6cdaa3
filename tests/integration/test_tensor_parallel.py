"""Ranks of one model put their units into a node; ranks of another TP size get theirs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests.nodes import NodeProcess

import octavo
from octavo import Status
from octavo.paged import PagedKV, PagedSink, PagedSource
from octavo.shards import Shard, ShardMap, with_parts

PAGES = 6
TABLE = range(PAGES)
TOKENS = range(PAGES * 16)
GQA = with_parts(
    octavo.Layout(name="gqa", model="m", layers=4, kv_heads=8, head_dim=32), tp=[2, 4, 8], pp=[2]
)
MLA = octavo.Layout(
    name="mla", model="m", kind=octavo.KvKind.MLA, layers=3, kv_heads=1, head_dim=512, rope_dim=64
)


def rank_cache(kv: torch.Tensor, shard: Shard) -> tuple[PagedKV, torch.Tensor]:
    """A rank's own copy of its part of ``kv`` ``[layer, 2, page, token, head, dim]``."""
    held = shard.held
    part = kv[held.layer_begin : held.layer_end, ..., held.head_begin : held.head_end, :].clone()
    dims = "layer kv block token head dim"
    cache = PagedKV(GQA, [part], dims, layer_begin=held.layer_begin, head_begin=held.head_begin)
    return cache, part


@pytest.mark.parametrize("profile", ["exact", "code", "best"])
def test_pages_put_at_tp_4_are_got_at_tp_2_and_8_and_by_stages(
    tmp_path: Path, profile: str
) -> None:
    kv = torch.randn((4, 2, PAGES, 16, 8, 32)).to(torch.bfloat16)
    with NodeProcess(tmp_path) as node, ExitStack() as open_clients:
        for shard in ShardMap(GQA, 4).shards():
            client = open_clients.enter_context(octavo.Client(node.address, layouts=[GQA]))
            chain = client.chain(TOKENS)
            assert client.match(chain).page_count == 0, "a page was visible in part"
            source = PagedSource(rank_cache(kv, shard)[0], TABLE, profile=profile)
            result = client.put(chain, source, units=shard.units)
            assert set(result.statuses) == {Status.STORED}
        whole = kv if profile == "exact" else None
        for tp, pp in ((1, 1), (2, 1), (8, 1), (2, 2)):
            for shard in ShardMap(GQA, tp, pp).shards():
                cache, part = rank_cache(torch.zeros_like(kv), shard)
                with octavo.Client(node.address, layouts=[GQA]) as client:
                    chain = client.chain(TOKENS)
                    got = client.get(chain, PagedSink(cache, TABLE), units=shard.units)
                assert got.page_count == PAGES
                if whole is None:
                    whole = part  # what a single rank reads is what all others must read
                    assert (whole - kv).abs().max() < 0.5
                assert torch.equal(part, rank_cache(whole, shard)[1])


def test_mla_ranks_put_in_turn_and_each_gets_all(tmp_path: Path) -> None:
    latents = torch.randn((3, PAGES, 16, 576)).to(torch.bfloat16)
    dims = "layer block token latent"
    with NodeProcess(tmp_path) as node, ExitStack() as open_clients:
        for shard in ShardMap(MLA, 4).shards():
            client = open_clients.enter_context(octavo.Client(node.address, layouts=[MLA]))
            chain = client.chain(TOKENS)
            source = PagedSource(PagedKV(MLA, [latents], dims), TABLE)
            for position in shard.put_positions(PAGES).tolist():
                result = client.put(chain, source, first_page=position, page_count=1)
                assert set(result.statuses) == {Status.STORED}
        for shard in ShardMap(MLA, 2).shards():
            mine = torch.zeros_like(latents)
            with octavo.Client(node.address, layouts=[MLA]) as client:
                chain = client.chain(TOKENS)
                sink = PagedSink(PagedKV(MLA, [mine], dims), TABLE)
                assert client.get(chain, sink, units=shard.units).page_count == PAGES
            assert torch.equal(mine, latents)
