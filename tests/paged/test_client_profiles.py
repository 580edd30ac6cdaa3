"""A client is told once how its namespaces are packed, and everything that packs follows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator

import numpy as np
import pytest
import torch
from tests.nodes import NodeProcess

from octavo import AsyncClient, Chain, Client, InvalidRequest, KvKind, Layout, foreign_layout
from octavo.codec import UnknownCodec
from octavo.paged import PagedKV, PagedSink, PagedSource
from octavo.shards import ShardMap

PAGES = 6
DIMS = "kv block token head dim"
LAYOUT = Layout(name="l", model="m", layers=2, kv_heads=2, head_dim=16, head_parts=2)
MLA = Layout(
    name="mla", model="m", kind=KvKind.MLA, layers=2, kv_heads=1, head_dim=128, rope_dim=16
)
TABLE = [4, 0, 5, 2, 1, 3]
TOKENS = range(PAGES * 16)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Generator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("node")) as process:
        yield process


def engine(seed: int | None) -> list[torch.Tensor]:
    """K and V by layer; None: still empty."""
    shape = (2, PAGES, 16, 2, 16)
    if seed is None:
        return [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2)]
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator) + 2 for _ in range(2)]
    return [kv.to(torch.bfloat16) for kv in made]


def source(kv: list[torch.Tensor], profile: str | None = None) -> PagedSource:
    return PagedSource(PagedKV(LAYOUT, kv, DIMS), TABLE, profile)


class Variants:
    """A sink that notes how each page came packed."""

    def __init__(self) -> None:
        self._by_page: dict[int, set[int]] = {}

    def accept(self, position: int, unit: int, variant: int, view: memoryview) -> None:
        self._by_page.setdefault(position, set()).add(variant)

    def of(self, client: Client, chain: Chain) -> list[int]:
        assert client.get(chain, self).page_count == chain.page_count
        assert all(len(variants) == 1 for variants in self._by_page.values())
        return [min(self._by_page[page]) for page in range(chain.page_count)]


def got(client: Client, chain: Chain) -> list[torch.Tensor]:
    back = engine(None)
    sink = PagedSink(PagedKV(LAYOUT, back, DIMS), TABLE)
    assert client.get(chain, sink).page_count == chain.page_count
    return back


@pytest.mark.parametrize("transport", ["shm", "bulk", "grpc"])
def test_a_profile_is_changed_and_what_was_put_before_stays(
    node: NodeProcess, transport: str
) -> None:
    kv, half = engine(1), PAGES // 2 * 16
    place = {"layouts": [LAYOUT], "transport": transport}
    with Client(node.address, **place, profile="exact") as client:  # type: ignore[arg-type]
        client.clear()
        chain = client.chain(TOKENS[:half])
        assert client.put(chain, source(kv)).stored_pages == PAGES // 2
    with Client(node.address, **place, profile="best") as client:  # type: ignore[arg-type]
        chain = client.chain(TOKENS)
        put = client.put(chain, source(kv))
        assert (put.present_pages, put.stored_pages) == (PAGES // 2, PAGES // 2)
        assert Variants().of(client, chain) == [1, 1, 1, 4, 4, 4]
        other = client.chain(range(1000, 1000 + PAGES * 16))
        client.put(other, source(kv))
        assert Variants().of(client, other) == [1, 4, 4, 4, 4, 4]  # the first 16 tokens are raw
        back = got(client, chain)
    # And a client of the old profile reads the new pages.
    with Client(node.address, **place, profile="exact") as client:  # type: ignore[arg-type]
        assert all(map(torch.equal, back, got(client, client.chain(TOKENS))))
    for given, read in zip(kv, back, strict=True):
        exact, packed = TABLE[: PAGES // 2], TABLE[PAGES // 2 :]
        assert torch.equal(given[:, exact], read[:, exact])
        error = (given.float() - read.float())[:, packed].abs().max()
        assert 0 < float(error) < 0.05


def test_each_namespace_has_its_own_profile_or_the_clients(node: NodeProcess) -> None:
    spaces = ("default", "tenant-a", "tenant-b")
    with Client(
        node.address,
        layouts=[LAYOUT],
        namespaces=spaces,
        profile="best",
        profiles={"tenant-a": "code", "tenant-b": "int5"},
    ) as client:
        found: list[int] = []
        for space in spaces:
            client.clear(space)
            chain = client.chain(TOKENS, namespace=space)
            client.put(chain, source(engine(2)))
            variants = Variants().of(client, chain)
            assert variants == [1, *variants[1:2] * 5]
            found += variants[1:2]
        assert found == [4, 3, 6]
        # A source that was told otherwise does as it was told.
        chain = client.chain(range(2000, 2048), namespace="tenant-a")
        client.put(chain, source(engine(2), profile="general"))
        assert Variants().of(client, chain) == [1, 2, 2]
        # One source may be put through clients of several profiles, one after the other.
        shared = source(engine(2))
        for space, variant in zip(spaces, found, strict=True):
            chain = client.chain(range(3000, 3048), namespace=space)
            client.put(chain, shared)
            assert Variants().of(client, chain) == [1, variant, variant]


def test_without_a_profile_nothing_is_packed(node: NodeProcess) -> None:
    with Client(node.address, layouts=[LAYOUT]) as client:
        client.clear()
        chain = client.chain(TOKENS)
        client.put(chain, source(engine(3)))
        assert Variants().of(client, chain) == [1] * PAGES
        assert all(map(torch.equal, engine(3), got(client, chain)))


def test_the_asyncio_face_follows_its_profiles(node: NodeProcess) -> None:
    async def story() -> None:
        async with AsyncClient(
            node.address,
            layouts=[LAYOUT],
            namespaces=["async", "exact"],
            profile="dense",
            profiles={"exact": "exact"},
        ) as face:
            for space, variant in (("async", 6), ("exact", 1)):
                chain = face.chain(TOKENS, namespace=space)
                await face.put(chain, source(engine(4)))
                assert Variants().of(face.core, chain) == [1, *[variant] * 5]

    asyncio.run(story())


@pytest.mark.parametrize("face", [Client, AsyncClient])
def test_profiles_that_cannot_be_are_refused_with_those_that_can(
    face: type[Client] | type[AsyncClient],
) -> None:
    layouts = [LAYOUT, foreign_layout("foreign", "lmcache")]
    known = "general, code, math, exact, best, dense.*raw, fp8_e5m2, fp8_e4m3, int8, int6, int5"
    with pytest.raises(UnknownCodec, match=f"'fast' is neither a profile .{known}"):
        face(layouts=layouts, profile="fast")
    with pytest.raises(UnknownCodec, match=f"'turbo' is neither a profile .{known}"):
        face(layouts=layouts, profiles={"default": "turbo"})
    with pytest.raises(InvalidRequest, match="namespace 'defualt', which is none of default"):
        face(layouts=layouts, profiles={"defualt": "best"})
    with pytest.raises(InvalidRequest, match=r"'best' packs layout 'l' with variant 4 \(int8\)"):
        face(layouts=layouts, profile="best", variants=[1, 2])
    face(layouts=layouts, profile="best", variants=[1, 4])
    face(layouts=layouts, variants=[512])  # what it puts and gets is its own affair


@pytest.mark.parametrize("profile", ["exact", "best"])
def test_latents_put_by_ranks_in_turn_are_got_whole(node: NodeProcess, profile: str) -> None:
    """From the shard map to the node: each rank puts its turns out of a cache that all have."""
    generator = torch.Generator().manual_seed(5)
    latents = torch.randn((2, PAGES + 1, 16, 144), generator=generator).to(torch.bfloat16)
    dims, table, space = "layer block token latent", [6, *TABLE], f"mla-{profile}"
    tokens = range((PAGES + 1) * 16)
    shards, stored = ShardMap(MLA, tp=3), [0, 0, 0]

    def rank(turn: int) -> None:
        shard = shards.shard(turn)
        with Client(
            node.address, layouts=[MLA], namespaces=[space], profiles={space: profile}
        ) as client:
            chain = client.chain(tokens)
            held = PagedSource(PagedKV(MLA, [latents.clone()], dims), table)
            turns = shard.put_positions(chain.page_count)
            stored[turn] = client.put(chain, held, units=shard.units, positions=turns).stored_pages

    ranks = [threading.Thread(target=rank, args=(turn,)) for turn in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert stored == [3, 2, 2]
    back = torch.zeros_like(latents)
    with Client(node.address, layouts=[MLA], namespaces=[space]) as client:
        chain = client.chain(tokens)
        got_all = client.get(chain, PagedSink(PagedKV(MLA, [back], dims), table))
        assert got_all.page_count == PAGES + 1
        packed = 1 if profile == "exact" else 4
        assert Variants().of(client, chain) == [1, *[packed] * PAGES]
    assert torch.equal(back[:, 6], latents[:, 6])  # the chain's first 16 tokens
    error = float((back.float() - latents.float()).abs().max())
    assert error == 0 if profile == "exact" else 0 < error < 0.05
    assert np.isfinite(error)
