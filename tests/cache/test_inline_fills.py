"""Units that come piece by piece, and clients that stop in the middle of one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.cache.running import in_memory
from tests.cache.world import KIB, World, body, chain_of

from octavo_server.cache.statuses import (
    EXPIRED,
    STORED,
)
from octavo_server.errors import RequestError


def test_inline_fills_become_visible_when_they_are_whole(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, range(2))
        reservation, _ = world.reserve(session, chain, length=5000)
        assert reservation is not None
        data = body(0, 0, 5000)
        fill = world.cache.begin_fill(reservation, 0, 0)
        assert fill is not None
        assert world.cache.begin_fill(reservation, 0, 0) is None
        fill.append(data[:3000])
        assert world.present(session, chain) == 0
        fill.append(data[3000:])
        assert fill.commit() == STORED
        assert world.present(session, chain) == 1
        assert (await world.get(session, chain)).units[0, 0] == data
        second = world.cache.begin_fill(reservation, 1, 0)
        assert second is not None
        world.cache.reservations.end(reservation)
        second.append(b"x" * 5000)
        assert second.commit() == EXPIRED
        assert world.arena.slots.used_bytes == 8 * KIB
        with pytest.raises(RequestError, match="the reserved chain has 2 pages"):
            world.cache.begin_fill(reservation, 2, 0)

    in_memory(test)


@pytest.mark.parametrize("finished", [False, True])
def test_a_client_that_stalls_within_a_unit_keeps_nothing_beyond_its_time(finished: bool) -> None:
    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, range(2))
        reservation, _ = world.reserve(session, chain, length=5000)
        assert reservation is not None
        fill = world.cache.begin_fill(reservation, 0, 0)
        assert fill is not None
        fill.append(b"x" * 1000)
        if finished:  # another call has said that nothing more will come
            world.cache.reservations.finish(reservation)
            assert world.arena.slots.used_bytes == 8 * KIB
        world.advance(31.0)
        assert world.arena.slots.used_bytes == world.cache.table.row_count == 0
        statuses = await world.put(session, chain, range(2), length=5000)
        assert (statuses == STORED).all()
        fill.append(b"x" * 4000)  # it wakes up, and hurts nobody
        assert fill.commit() == EXPIRED
        fill.abandon()
        assert (await world.get(session, chain)).units[0, 0] == body(0, 0, 5000)

    in_memory(test)


def test_a_finished_reservation_still_stores_what_is_being_filled() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, range(2))
        reservation, _ = world.reserve(session, chain)
        assert reservation is not None
        fill = world.cache.begin_fill(reservation, 1, 0)
        assert fill is not None
        filled = world.fill([(0, 0, body(0, 0, 4096))])
        commit = asyncio.ensure_future(world.cache.commit(reservation, filled, world.ring))
        await asyncio.sleep(0)
        world.cache.reservations.finish(reservation)
        assert (await commit).tolist() == [STORED]
        fill.append(body(1, 0, 4096))
        assert fill.commit() == STORED
        assert world.present(session, chain) == 2
        world.advance(100.0)
        assert world.cache.counters["reservations_expired"] == 0

    in_memory(test)
