"""Pages of an engine's cache, packed by profile, through a real node and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.nodes import NodeProcess

from octavo import Client, Layout
from octavo.codec import PROFILES
from octavo.paged import PagedKV, PagedSink, PagedSource
from octavo.transfer import Transfer

BLOCKS = 6
DIMS = "kv block token head dim"


def layout_of(page_tokens: int) -> Layout:
    return Layout(
        name=f"l{page_tokens}",
        model="m",
        layers=2,
        kv_heads=2,
        head_dim=16,
        head_parts=2,
        page_tokens=page_tokens,
    )


LAYOUTS = (layout_of(16), layout_of(32))


def engine(layout: Layout, *, filled: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (2, BLOCKS, 32, 2, 16)
    make = [torch.randn(shape, generator=generator) + 2 for _ in range(layout.layers)]
    return [(kv if filled else torch.zeros(shape)).to(torch.bfloat16) for kv in make]


@pytest.mark.parametrize("transport", ["shm", "bulk", "grpc"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["16", "32"])
def test_a_chain_whose_profile_changed_half_way_reads_back_whole(
    tmp_path: Path, transport: str, layout: Layout
) -> None:
    table, tokens = [4, 0, 5, 2, 1, 3], list(range(BLOCKS * 32))
    source_kv, target_kv = engine(layout, filled=True), engine(layout, filled=False)
    with (
        NodeProcess(tmp_path) as node,
        Client(node.address, layouts=[layout], transport=transport) as client,  # type: ignore[arg-type]
    ):
        chain = client.chain(tokens)
        step = chain.page_count // len(PROFILES)
        for place, profile in enumerate(PROFILES):
            source = PagedSource(PagedKV(layout, source_kv, DIMS), table, profile=profile)
            end = chain.page_count if place == len(PROFILES) - 1 else (place + 1) * step
            put = client.put(chain, source, page_count=end)
            assert put.stored_pages == end - place * step
        got = client.get(chain, PagedSink(PagedKV(layout, target_kv, DIMS), table))
        assert got.page_count == chain.page_count
    for given, back in zip(source_kv, target_kv, strict=True):
        assert torch.equal(given[:, 4, :16], back[:, 4, :16])  # the chain's first 16 tokens
        error = (given.float() - back.float()).abs().max() / given.float().abs().max()
        assert 0 < float(error) < 0.13
        # A sixth of the chain was put as profile "exact": two blocks' worth at most are equal.
        equal = (given == back).flatten(2).all(-1).all(0)
        assert 1 <= int(equal.sum()) <= 2


def test_lengths_and_variants_differ_only_in_a_chains_first_page() -> None:
    for layout, first_variant in zip(LAYOUTS, (1, 36), strict=True):
        cache = PagedKV(layout, engine(layout, filled=True), DIMS)
        source = PagedSource(cache, range(BLOCKS), profile="best")
        source.begin(Transfer(layout, 0, 4, (0, 1)))
        assert source.page_variants().tolist() == [first_variant, 4, 4, 4]
        lengths = source.unit_lengths().tolist()
        assert len(lengths) == 8
        assert lengths[0] == lengths[1] > lengths[2]
        assert len(set(lengths[2:])) == 1
        source.begin(Transfer(layout, 1, 4, (0, 1)))
        assert source.page_variants().tolist() == [4]
        assert source.unit_lengths().tolist() == lengths[2:3]
        source.begin(Transfer(layout, 0, 1, (1,)))
        assert source.page_variants().tolist() == [first_variant]
        assert source.unit_lengths().tolist() == lengths[:1]
