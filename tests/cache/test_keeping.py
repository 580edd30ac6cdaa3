"""Pages that requests have pinned: not evicted, for a time, and not more than may be."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
from tests.cache.invariants import check_invariants
from tests.cache.world import KIB, World, body, chain_of, keys

from octavo_server.cache.limits import CacheLimits
from octavo_server.cache.retaining import Retention
from octavo_server.cache.statuses import DONE, QUOTA_EXCEEDED, STORED

PAGES = 16
"""That the arena of these tests has room for."""

TEN_S = Retention(pin_s=10.0)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def small(directory: Path | None = None, share: float = 0.25) -> World:
    """Room for 16 pages in memory and, with a directory, for 16 on NVMe."""
    return World(
        directory,
        memory_bytes=PAGES * 4 * KIB,
        slab_bytes=16 * KIB,
        nvme_bytes=PAGES * 4 * KIB,
        limits=CacheLimits(pin_share_max=share, reserved_share_max=1.0),
    )


async def flood(world: World, first: int) -> None:
    """Puts one page after another, as many as there is room for."""
    session = await world.session()
    for number in range(first, first + PAGES):
        statuses = await world.put(session, chain_of(session, [number]), [number])
        assert statuses.ravel().tolist() == [STORED]
        if world.store is not None:
            await world.settled()


def test_pinned_pages_stay_until_their_time_is_over(tmp_path: Path) -> None:
    async def test(directory: Path | None) -> None:
        async with small(directory) as world:
            session = await world.session()
            pinned, plain = chain_of(session, range(4)), chain_of(session, range(10, 14))
            reservation, _ = world.reserve(session, pinned)
            assert reservation is not None
            bodies = [(page, 0, body(page, 0, 4096)) for page in range(4)]
            await world.commit(reservation, bodies)
            await world.put(session, plain, range(10, 14))
            assert world.cache.retain(session, pinned, TEN_S).tolist() == [DONE] * 4
            await flood(world, 100)
            assert world.present(session, pinned) == 4
            assert (await world.get(session, pinned)).units[3, 0] == body(3, 0, 4096)
            rows = world.cache.table.find(pinned.keys, pinned.namespace)
            assert (world.cache.table.memory_mask[rows] != 0).all()
            assert world.present(session, plain) == 0
            world.advance(10.0)
            await flood(world, 200)
            assert world.present(session, pinned) == 0
            await world.settled()
            check_invariants(world.cache)

    run(test(None))
    run(test(tmp_path / "nvme"))


def test_a_put_pins_what_it_stores_and_what_was_there() -> None:
    async def test() -> None:
        async with small() as world:
            session = await world.session()
            await world.put(session, chain_of(session, range(2)), range(2))
            chain = chain_of(session, range(3))
            await world.put(session, chain, range(3), wish=TEN_S)
            assert world.unpinned == 0
            await flood(world, 100)
            assert world.present(session, chain) == 3

    run(test())


def test_what_pins_may_keep_is_bounded_heads_first_and_the_put_goes_on() -> None:
    async def test() -> None:
        async with small(share=0.25) as world:  # 4 of 16 pages
            session = await world.session()
            chain = chain_of(session, range(6))
            statuses = await world.put(session, chain, range(6), wish=TEN_S)
            assert statuses.ravel().tolist() == [STORED] * 6
            assert world.unpinned == 2
            assert world.cache.keeping.page_count == 4
            assert world.cache.keeping.size_bytes == world.cache.keeping.bytes_max == 16 * KIB
            assert world.cache.counters["pin_granted_pages"] == 4
            assert world.cache.counters["pin_refused_pages"] == 2
            again = world.cache.retain(session, chain, TEN_S)
            assert again.tolist() == [DONE] * 4 + [QUOTA_EXCEEDED] * 2
            await flood(world, 100)
            assert world.present(session, chain) == 4
            world.advance(10.0)
            other = chain_of(session, [115])
            assert world.cache.retain(session, other, TEN_S).tolist() == [DONE]

    run(test())


def test_pins_leave_slabs_for_pages_of_another_size() -> None:
    """A small page in each slab, and no page of another size would find room for as long."""

    async def test() -> None:
        async with small(share=0.5) as world:  # 4 slabs of 4 pages
            session = await world.session()
            for number in range(PAGES):
                await world.put(session, chain_of(session, [number]), [number])
            table = world.cache.table
            slabs = table.units.memory_offset[: table.high_water] // (16 * KIB)
            statuses: list[int] = []
            for slab in range(4):
                row = int(np.argmax(slabs == slab))
                number = next(n for n in range(PAGES) if keys([n])[0, 0] == table.key_low[row])
                chain = chain_of(session, [number])
                statuses += world.cache.retain(session, chain, TEN_S).tolist()
            assert statuses == [DONE, DONE, QUOTA_EXCEEDED, QUOTA_EXCEEDED]
            large = chain_of(session, [500])
            stored = await world.put(session, large, [500], length=16 * KIB)
            assert stored.ravel().tolist() == [STORED]

    run(test())


def test_pins_that_end_make_room_for_others() -> None:
    async def test() -> None:
        async with small(share=0.125) as world:  # 2 pages
            session = await world.session()
            first, second = chain_of(session, range(2)), chain_of(session, range(10, 12))
            await world.put(session, first, range(2), wish=TEN_S)
            await world.put(session, second, range(10, 12))
            refused = world.cache.retain(session, second, TEN_S)
            assert refused.tolist() == [QUOTA_EXCEEDED] * 2
            unpinned = world.cache.retain(session, first, Retention(), unpin=True)
            assert unpinned.tolist() == [DONE] * 2
            assert world.cache.retain(session, second, TEN_S).tolist() == [DONE] * 2
            await world.cache.delete(session, second)
            assert world.cache.keeping.page_count == 0
            # A page that is put anew was not pinned by whoever pinned the deleted one.
            await world.put(session, second, range(10, 12))
            assert world.cache.keeping.page_count == 0
            assert world.cache.retain(session, first, TEN_S).tolist() == [DONE] * 2

    run(test())


def test_the_longest_pin_holds() -> None:
    async def test() -> None:
        async with small() as world:
            session = await world.session()
            chain = chain_of(session, range(2))
            await world.put(session, chain, range(2), wish=Retention(pin_s=100.0))
            world.cache.retain(session, chain, Retention(pin_s=5.0))
            world.advance(99.0)
            assert world.cache.keeping.page_count == 2
            world.advance(1.0)
            assert world.cache.keeping.page_count == 0
            assert not world.cache.table.any_kept

    run(test())


def test_pages_expire_although_they_are_pinned() -> None:
    async def test() -> None:
        async with small() as world:
            session = await world.session()
            chain = chain_of(session, range(2))
            await world.put(session, chain, range(2), wish=Retention(ttl_s=5.0, pin_s=100.0))
            world.advance(6.0)
            assert world.present(session, chain) == 0
            assert world.cache.keeping.size_bytes == 0
            check_invariants(world.cache)

    run(test())


def test_pins_of_a_whole_arena_leave_room_for_what_is_put() -> None:
    """However much is pinned in turn: the share holds, and a put finds its room."""

    async def test() -> None:
        async with small(share=0.5) as world:
            session = await world.session()
            for first in range(0, 160, 8):
                chain = chain_of(session, range(first, first + 8))
                statuses = await world.put(session, chain, range(first, first + 8), wish=TEN_S)
                assert statuses.ravel().tolist() == [STORED] * 8
                assert world.cache.keeping.size_bytes <= world.cache.keeping.bytes_max
                world.advance(1.0)

    run(test())
