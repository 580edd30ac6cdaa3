"""Holds: what a match found stays until it is used, and within bounds."""

from __future__ import annotations

import pytest
from tests.cache.running import crowd, in_memory
from tests.cache.world import TWO, World, chain_of

from octavo_server.cache.leases import Hold
from octavo_server.cache.limits import CacheLimits
from octavo_server.cache.statuses import (
    GRANTED,
    MISSING,
)
from octavo_server.errors import LimitReached


def test_a_hold_keeps_what_matched_until_it_is_used_or_runs_out() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, range(16))
        await world.put(session, chain, range(16))
        cache = world.cache
        hold = cache.hold(session, chain, cache.match(session, chain), 30.0)
        assert hold is not None
        await crowd(world, 100, 600)
        got = await world.get(session, chain, hold=hold)
        assert got.statuses == [GRANTED] * 16
        assert not cache.leases.release_hold(session, hold.hold_id)  # the get has used it up
        hold = cache.hold(session, chain, cache.match(session, chain), 30.0)
        assert hold is not None
        world.advance(20.0)
        assert cache.leases.renew_hold(session, hold.hold_id, 30.0)
        world.advance(20.0)
        assert cache.leases.find_hold(session, hold.hold_id) is hold
        assert cache.leases.find_hold(await world.session(), hold.hold_id) is None
        world.advance(20.0)
        assert cache.leases.find_hold(session, hold.hold_id) is None
        assert cache.counters["holds_expired"] == 1
        await crowd(world, 1000, 600)
        assert world.present(session, chain) == 0

    in_memory(test)


def test_holds_are_bounded_by_the_sessions_credit() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        cache = world.cache
        chains = [chain_of(session, range(n * 50, n * 50 + 50)) for n in range(3)]
        holds: list[Hold | None] = []
        for number, chain in enumerate(chains):
            await world.put(session, chain, range(number * 50, number * 50 + 50))
            holds.append(cache.hold(session, chain, cache.match(session, chain), 30.0))
        # A quarter of 256 slots of 4 KiB: 64 pages.
        assert [len(hold.pinned) if hold else 0 for hold in holds] == [50, 14, 0]
        partly = holds[1]
        assert partly is not None
        got = await world.get(session, chains[1], hold=partly)
        assert got.statuses == [GRANTED] * 14 + [MISSING] * 36
        cache.end_session(session)
        assert not cache.table.pins.any()

    in_memory(test)


def test_a_session_holds_so_often_and_no_more() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, [1])
        await world.put(session, chain, [1])
        for _ in range(2):
            assert world.cache.hold(session, chain, world.cache.match(session, chain), 30.0)
        with pytest.raises(LimitReached, match="2 holds"):
            world.cache.hold(session, chain, world.cache.match(session, chain), 30.0)
        world.cache.end_session(session)
        assert not world.cache.table.pins.any()

    in_memory(test, limits=CacheLimits(holds_max=2))


def test_an_unlinked_hold_pins_present_pages_only() -> None:
    async def test(world: World) -> None:
        session = await world.session(TWO)
        await world.put(session, chain_of(session, [0, 2], unlinked=True), [0, 2])
        await world.put(session, chain_of(session, [1]), [1], units=[0])  # half of it
        chain = chain_of(session, range(4), unlinked=True)
        cache = world.cache
        hold = cache.hold(session, chain, cache.match(session, chain), 30.0)
        assert hold is not None
        assert (hold.rows >= 0).tolist() == [True, False, True, False]
        got = await world.get(session, chain, hold=hold)
        assert got.statuses == [GRANTED, MISSING, GRANTED, MISSING]

    in_memory(test)
