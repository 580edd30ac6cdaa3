"""Delete and Clear: gone at once, and only what was meant."""

from __future__ import annotations

import asyncio

import numpy as np
from tests.cache.running import in_memory
from tests.cache.world import KIB, MIB, Got, World, body, chain_of

from octavo_server.cache.statuses import (
    DONE,
    GRANTED,
    MISSING,
    STORED,
)


def test_a_deleted_page_is_not_found_but_stays_while_leased() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        cache = world.cache
        chain = chain_of(session, range(3))
        await world.put(session, chain, range(3))
        got: Got = await world.get(session, chain, release=False)
        hold = cache.hold(session, chain, cache.match(session, chain), 30.0)
        assert hold is not None
        rows = got.leases[0].rows
        assert (await cache.delete(session, chain_of(session, [1, 9]))).tolist() == [DONE, MISSING]
        assert world.present(session, chain) == 1
        assert (await world.get(session, chain)).statuses == [GRANTED, MISSING, MISSING]
        # A hold made before doesn't bring it back either.
        assert (await world.get(session, chain, hold=hold)).statuses[1] == MISSING
        # It can be put again beside the deleted one, and is a link of its chain again.
        assert (await world.put(session, chain, range(3), version=2)).ravel().tolist()[1] == STORED
        assert world.present(session, chain) == 3
        assert world.read(int(rows[1]), 0) == body(1, 0, 4096)
        new_rows = cache.table.find(chain.keys, chain.namespace)
        assert cache.table.parent[new_rows].tolist() == [-1, *new_rows[:2].tolist()]
        assert cache.table.row_count == 4
        for lease in got.leases:
            assert cache.leases.release(session, lease.lease_id)
        assert cache.table.row_count == 3
        assert world.arena.slots.used_bytes == 12 * KIB
        again = await world.get(session, chain)
        assert again.units[1, 0] == body(1, 0, 4096, 2)

    in_memory(test)


def test_a_put_keeps_the_empty_rows_of_its_chain_that_only_a_deleted_page_stood_below() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        cache = world.cache
        chain = chain_of(session, range(4))
        await world.put(session, chain, range(4))
        leased: Got = await world.get(session, chain_of(session, [2]), release=False)
        assert (await cache.delete(session, chain_of(session, [1, 2]))).tolist() == [DONE, DONE]
        assert cache.leases.release(session, leased.leases[0].lease_id)
        # Page 3 is left. Above it the withdrawn row of page 2, and above that the empty one of
        # page 1, which nothing else needs, until now.
        assert cache.table.row_count == 4
        assert (await world.put(session, chain, range(4), version=2))[1:3, 0].tolist() == [
            STORED,
            STORED,
        ]
        assert world.present(session, chain) == 4
        assert cache.table.row_count == 4
        rows = cache.table.find(chain.keys, chain.namespace)
        assert cache.table.parent[rows].tolist() == [-1, *rows[:3].tolist()]
        await cache.clear(session.namespaces[0], None)
        assert cache.table.row_count == 0
        assert world.arena.slots.used_bytes == 0

    in_memory(test)


def test_a_clear_during_a_commit_leaves_nothing_visible() -> None:
    async def test(world: World) -> None:
        session = await world.session(namespaces=("a", "b"))
        kept = chain_of(session, range(4), namespace=1)
        await world.put(session, kept, range(4))
        chain = chain_of(session, range(4))
        await world.put(session, chain_of(session, range(2)), range(2))
        reservation, _ = world.reserve(session, chain)
        assert reservation is not None
        filled = world.fill([(page, 0, body(page, 0, 4096)) for page in (2, 3)])
        commit = asyncio.ensure_future(world.cache.commit(reservation, filled, world.ring))
        await asyncio.sleep(0)
        assert await world.cache.clear(session.namespaces[0], None) == 2
        assert STORED not in (await commit).tolist()
        world.cache.reservations.end(reservation)
        assert world.present(session, chain) == 0
        assert world.present(session, kept) == 4
        assert world.cache.table.row_count == 4

    in_memory(test)


def test_clear_of_one_layout_leaves_the_others() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        one, two = chain_of(session, range(3)), chain_of(session, range(10, 13), layout=1)
        await world.put(session, one, range(3))
        await world.put(session, two, range(10, 13))
        assert await world.cache.clear(one.namespace, one.layout_number) == 3
        assert (world.present(session, one), world.present(session, two)) == (0, 3)
        assert world.cache.counters["deleted_pages"] == 3

    in_memory(test)


def test_namespaces_do_not_see_each_other() -> None:
    async def test(world: World) -> None:
        session = await world.session(namespaces=("a", "b"))
        mine, theirs = chain_of(session, [1]), chain_of(session, [1], namespace=1)
        await world.put(session, mine, [1], version=1)
        assert world.present(session, theirs) == 0
        await world.put(session, theirs, [1], version=2)
        await world.cache.delete(session, mine)
        got = await world.get(session, theirs)
        assert got.units[0, 0] == body(1, 0, 4096, 2)

    in_memory(test)


def test_a_long_chain_is_deleted_and_cleared_without_a_step_per_page() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        numbers = range(4000)
        chain = chain_of(session, numbers)
        await world.put(session, chain, numbers)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        statuses = await world.cache.delete(session, chain)
        took_s = loop.time() - begin
        assert (statuses == DONE).all()
        assert world.cache.table.row_count == 0
        assert took_s < 0.15  # a few ms; 4,000 steps of numpy took about 0.4 s
        assert np.count_nonzero(world.cache.table.child_rows) == 0

    in_memory(test, memory_bytes=64 * MIB, slab_bytes=MIB)
