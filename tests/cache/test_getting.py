"""Getting: leases, and waiting for what others write."""

from __future__ import annotations

import asyncio

import pytest
from tests.cache.running import in_memory
from tests.cache.world import TWO, World, body, chain_of

from octavo_server.cache.limits import CacheLimits
from octavo_server.cache.statuses import (
    GRANTED,
    MISSING,
    PENDING,
)
from octavo_server.errors import LimitReached


def test_release_tells_that_a_lease_had_run_out() -> None:
    async def test(world: World) -> None:
        session, other = await world.session(), await world.session()
        chain = chain_of(session, [1])
        await world.put(session, chain, [1])
        leases = world.cache.leases
        first, second = [
            (await world.get(session, chain, lease_s=5.0, release=False)).leases[0]
            for _ in range(2)
        ]
        world.advance(4.0)
        assert leases.renew(session, second.lease_id, 5.0)
        assert not leases.renew(other, second.lease_id, 5.0)
        assert not leases.release(other, second.lease_id)
        world.advance(2.0)
        assert not leases.release(session, first.lease_id)
        assert not leases.renew(session, first.lease_id, 5.0)
        assert leases.release(session, second.lease_id)
        assert not leases.release(session, second.lease_id)
        assert world.cache.counters["leases_expired"] == 1

    in_memory(test)


def test_a_generation_tells_that_a_place_was_given_away() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, [1])
        await world.put(session, chain, [1])
        row = (await world.get(session, chain, release=False, lease_s=1.0)).leases[0].rows
        before = world.cache.table.generation[row].copy()
        world.advance(2.0)
        world.evict_all()
        await world.put(session, chain, [1])
        assert (world.cache.table.generation[row] != before).all()

    in_memory(test)


def test_a_get_waits_for_a_writer_and_delivers_after_its_commit() -> None:
    async def test(world: World) -> None:
        writer, reader = await world.session(), await world.session()
        chain = chain_of(writer, range(3))
        reservation, _ = world.reserve(writer, chain)
        assert reservation is not None
        waiting = asyncio.ensure_future(world.get(reader, chain, wait_pending=True))
        unwilling = await world.get(reader, chain)
        assert unwilling.statuses == [MISSING] * 3
        for page in range(3):
            await asyncio.sleep(0.005)
            assert not waiting.done()
            await world.commit(reservation, [(page, 0, body(page, 0, 4096))])
        world.cache.reservations.end(reservation)
        got = await waiting
        assert got.statuses == [GRANTED] * 3
        assert got.units == {(page, 0): body(page, 0, 4096) for page in range(3)}
        assert len(got.batches) > 1  # each as it came

    in_memory(test)


@pytest.mark.parametrize("how", ["abort", "expiry", "clear"])
def test_a_get_that_waits_hears_when_the_writer_gives_up(how: str) -> None:
    async def test(world: World) -> None:
        writer, reader = await world.session(), await world.session()
        chain = chain_of(writer, range(3))
        reservation, _ = world.reserve(writer, chain)
        assert reservation is not None
        await world.commit(reservation, [(0, 0, body(0, 0, 4096))])
        waiting = asyncio.ensure_future(world.get(reader, chain, first=1, wait_pending=True))
        await asyncio.sleep(0.005)
        if how == "abort":
            world.cache.reservations.end(reservation)
        elif how == "expiry":
            world.advance(31.0)
        else:
            await world.cache.clear(chain.namespace, None)
            world.cache.reservations.end(reservation)
        got = await asyncio.wait_for(waiting, 2.0)
        assert got.statuses == [MISSING, MISSING]

    in_memory(test)


def test_a_get_that_waits_answers_pending_at_its_deadline() -> None:
    async def test(world: World) -> None:
        writer, reader = await world.session(), await world.session()
        chain = chain_of(writer, range(2))
        reservation, _ = world.reserve(writer, chain)
        assert reservation is not None
        got = await world.get(reader, chain, wait_pending=True, wait_s=0.05)
        assert got.statuses == [PENDING, PENDING]
        world.cache.reservations.end(reservation)

    in_memory(test)


def test_a_rank_whose_own_unit_is_here_still_hears_of_the_others() -> None:
    async def test(world: World) -> None:
        zero, one = await world.session(TWO), await world.session(TWO)
        chain = chain_of(zero, [7])
        for outcome in (GRANTED, MISSING):
            await world.put(zero, chain, [7], units=[0])
            reservation, _ = world.reserve(one, chain, units=[1])
            assert reservation is not None
            waiting = asyncio.ensure_future(world.get(zero, chain, units=[0], wait_pending=True))
            await asyncio.sleep(0.005)
            if outcome == GRANTED:
                await world.commit(reservation, [(0, 1, body(7, 1, 4096))])
            world.cache.reservations.end(reservation)
            got = await asyncio.wait_for(waiting, 2.0)
            assert got.statuses == [outcome]
            await world.cache.delete(zero, chain)

    in_memory(test)


def test_the_last_half_writer_to_stop_ends_the_wait_for_a_page() -> None:
    async def test(world: World) -> None:
        zero, one = await world.session(TWO), await world.session(TWO)
        chain = chain_of(zero, [7])
        first, _ = world.reserve(zero, chain, units=[0])
        second, _ = world.reserve(one, chain, units=[1])
        assert first is not None
        assert second is not None
        waiting = asyncio.ensure_future(world.get(zero, chain, wait_pending=True))
        await asyncio.sleep(0.005)
        world.cache.reservations.end(first)
        await asyncio.sleep(0.005)
        assert not waiting.done()  # the other half is still being written
        await world.commit(second, [(0, 1, body(7, 1, 4096))])
        world.cache.reservations.end(second)
        assert (await asyncio.wait_for(waiting, 2.0)).statuses == [MISSING]

    in_memory(test)


def test_a_cancelled_get_lets_go_of_what_it_had_not_granted() -> None:
    async def test(world: World) -> None:
        writer, reader = await world.session(), await world.session()
        chain = chain_of(writer, range(40))
        await world.put(writer, chain_of(writer, range(38)), range(38))
        reservation, _ = world.reserve(writer, chain)
        assert reservation is not None
        waiting = asyncio.ensure_future(world.get(reader, chain, wait_pending=True))
        await asyncio.sleep(0.005)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        world.cache.reservations.end(reservation)
        world.cache.end_session(reader)
        assert not world.cache.table.pins.any()

    in_memory(test)


def test_a_session_leases_so_often_and_no_more() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, [1])
        await world.put(session, chain, [1])
        for _ in range(2):
            await world.get(session, chain, release=False)
        with pytest.raises(LimitReached, match="2 leases"):
            await world.get(session, chain)
        world.cache.end_session(session)
        assert not world.cache.table.pins.any()

    in_memory(test, limits=CacheLimits(leases_max=2))
