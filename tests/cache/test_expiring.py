"""Pages with a time to live: found until then, and never again, whatever happened meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cache.invariants import check_invariants
from tests.cache.world import KIB, TWO, WAIT_S, World, body, chain_of

from octavo_server.cache.page_table import NEVER
from octavo_server.cache.retaining import Retention
from octavo_server.cache.statuses import (
    ALREADY_PRESENT,
    DONE,
    EXPIRED,
    GRANTED,
    MISSING,
    RESERVED,
    STORED,
)

MINUTE = Retention(ttl_s=60.0)
HOUR = Retention(ttl_s=3600.0)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def later(world: World, seconds: float) -> None:
    """Time passes, and nobody looks yet what has expired."""
    world.clock.now_s += seconds


def test_a_page_is_found_until_its_time_is_over_and_not_a_moment_longer() -> None:
    async def test() -> None:
        async with World(None) as world:
            session = await world.session()
            chain = chain_of(session, range(4))
            await world.put(session, chain, range(4), wish=MINUTE)
            later(world, 59.999)
            assert world.present(session, chain) == 4
            assert (await world.get(session, chain)).statuses == [GRANTED] * 4
            later(world, 0.001)
            assert world.present(session, chain) == 0
            assert (await world.get(session, chain)).statuses == [MISSING] * 4
            assert world.cache.memory.arena.slots.used_bytes > 0  # found by nobody, and still here
            world.advance(1.0)
            assert world.cache.memory.arena.slots.used_bytes == 0
            assert world.cache.counters["expired_pages"] == 4
            assert world.cache.table.row_count == 0
            assert not world.cache.lifetimes.in_use
            check_invariants(world.cache)

    run(test())


def test_a_tail_with_a_shorter_time_goes_alone() -> None:
    async def test() -> None:
        async with World(None) as world:
            session = await world.session()
            head, whole = chain_of(session, range(2)), chain_of(session, range(5))
            await world.put(session, head, range(2))
            reservation, _ = world.reserve(session, whole, positions=[2, 3, 4], wish=MINUTE)
            assert reservation is not None
            bodies = [(page, 0, body(page, 0, 4096)) for page in (2, 3, 4)]
            assert await world.commit(reservation, bodies) == [STORED] * 3
            world.cache.reservations.end(reservation)
            assert world.present(session, whole) == 5
            world.advance(61.0)
            assert world.present(session, whole) == 2
            assert world.cache.table.row_count == 2
            check_invariants(world.cache)

    run(test())


@pytest.mark.parametrize("swept", [False, True])
def test_what_has_expired_can_be_put_again(swept: bool) -> None:
    async def test() -> None:
        async with World(None) as world:
            session = await world.session()
            chain = chain_of(session, range(3))
            await world.put(session, chain, range(3), wish=MINUTE)
            if swept:
                world.advance(60.0)
            else:
                later(world, 60.0)
            statuses = await world.put(session, chain, range(3), version=1)
            assert statuses.ravel().tolist() == [STORED] * 3
            got = await world.get(session, chain)
            assert got.units[2, 0] == body(2, 0, 4096, 1)
            world.advance(1e6)
            assert world.present(session, chain) == 3  # put for ever the second time
            check_invariants(world.cache)

    run(test())


@pytest.mark.parametrize(
    ("first", "second", "found_after_s", "gone_after_s"),
    [
        (MINUTE, HOUR, 3599.0, 3600.0),
        (HOUR, MINUTE, 3599.0, 3600.0),
        (MINUTE, Retention(), 1e7, None),
        (Retention(), MINUTE, 1e7, None),
    ],
)
@pytest.mark.parametrize("restarted", [False, True])
def test_the_longest_wish_holds_also_after_a_restart(
    tmp_path: Path,
    first: Retention,
    second: Retention,
    found_after_s: float,
    gone_after_s: float | None,
    restarted: bool,
) -> None:
    async def test() -> None:
        async with World(tmp_path / "nvme") as world:
            session = await world.session()
            chain = chain_of(session, range(3))
            await world.put(session, chain, range(3), wish=first)
            await world.settled()
            statuses = await world.put(session, chain, range(3), wish=second)
            assert statuses.ravel().tolist() == [ALREADY_PRESENT] * 3
            await world.settled()
            if restarted:
                await world.reopen(killed=True)
                session = await world.session()
            world.advance(found_after_s)
            assert world.present(session, chain) == 3
            if gone_after_s is not None:
                world.advance(gone_after_s - found_after_s)
                assert world.present(session, chain) == 0

    run(test())


def test_a_wish_that_comes_while_a_page_is_written_reaches_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with World(tmp_path / "nvme") as world:
            session = await world.session()
            chain = chain_of(session, range(3))
            store, begun, may_go_on = world.store, asyncio.Event(), asyncio.Event()
            assert store is not None
            write = store.write

            async def held_up(*arguments: Any) -> Any:
                begun.set()
                await may_go_on.wait()
                return await write(*arguments)

            monkeypatch.setattr(store, "write", held_up)
            await world.put(session, chain, range(3), wish=MINUTE)
            async with asyncio.timeout(WAIT_S):
                await begun.wait()
            await world.put(session, chain, range(3), wish=HOUR)
            may_go_on.set()
            await world.settled()
            await world.reopen(killed=True)
            session = await world.session()
            world.advance(3000.0)
            assert world.present(session, chain) == 3

    run(test())


def test_what_expired_while_the_node_was_down_does_not_come_back(tmp_path: Path) -> None:
    async def test() -> None:
        async with World(tmp_path / "nvme") as world:
            session = await world.session(TWO)
            gone, stays = chain_of(session, range(3)), chain_of(session, range(10, 13))
            await world.put(session, gone, range(3), wish=MINUTE)
            await world.put(session, stays, range(10, 13), wish=HOUR)
            await world.settled()
            await world.close(killed=True)
            later(world, 60.0)
            await world.open()
            session = await world.session(TWO)
            assert world.present(session, gone) == 0
            assert world.present(session, stays) == 3
            assert world.cache.counters["expired_pages"] == 3
            assert world.cache.counters["recovered_dropped_pages"] == 0
            await world.settled()
            check_invariants(world.cache)  # their slots on the device are free again
            world.advance(3540.0)
            assert world.present(session, stays) == 0

    run(test())


def test_a_node_starts_although_all_of_its_pages_expired_while_it_was_down(tmp_path: Path) -> None:
    async def test() -> None:
        async with World(tmp_path / "nvme") as world:
            session = await world.session()
            await world.put(session, chain_of(session, range(3)), range(3), wish=MINUTE)
            await world.settled()
            await world.close()
            later(world, 61.0)
            await world.open()
            assert world.cache.counters["expired_pages"] == 3
            assert world.cache.table.row_count == 0
            await world.settled()
            assert world.store is not None
            assert world.store.used_bytes == 0
            check_invariants(world.cache)

    run(test())


def test_expired_pages_leave_the_device_too(tmp_path: Path) -> None:
    async def test() -> None:
        async with World(tmp_path / "nvme") as world:
            session = await world.session()
            chain = chain_of(session, range(4))
            await world.put(session, chain, range(4), wish=MINUTE)
            await world.settled()
            world.evict_all()
            assert world.store is not None
            assert world.store.used_bytes > 0
            world.advance(61.0)
            await world.settled()
            assert world.store.used_bytes == 0
            check_invariants(world.cache)

    run(test())


def test_a_lease_outlives_the_page_it_reads_but_no_later_get_does() -> None:
    async def test() -> None:
        async with World(None) as world:
            session = await world.session()
            chain = chain_of(session, [0])
            await world.put(session, chain, [0], wish=Retention(ttl_s=5.0))
            hold = world.cache.hold(session, chain, world.cache.match(session, chain), 30.0)
            lease = (await world.get(session, chain, release=False)).leases[0]
            row = int(lease.rows[0])
            world.advance(6.0)
            assert world.read(row, 0) == body(0, 0, 4096)
            assert (await world.get(session, chain)).statuses == [MISSING]
            assert (await world.get(session, chain, hold=hold)).statuses == [MISSING]
            assert world.cache.leases.release(session, lease.lease_id)
            assert world.cache.memory.arena.slots.used_bytes == 0
            check_invariants(world.cache)

    run(test())


def test_a_put_that_outlasts_its_pages_stores_nothing() -> None:
    async def test() -> None:
        async with World(None) as world:
            session = await world.session()
            chain = chain_of(session, [0])
            reservation, statuses = world.reserve(session, chain, wish=Retention(ttl_s=5.0))
            assert reservation is not None
            assert statuses.ravel().tolist() == [RESERVED]
            world.advance(6.0)
            assert await world.commit(reservation, [(0, 0, body(0, 0, 4096))]) == [EXPIRED]
            world.cache.reservations.end(reservation)
            assert world.present(session, chain) == 0
            assert world.cache.table.row_count == 0
            check_invariants(world.cache)

    run(test())


def test_retain_prolongs_what_is_present_and_shortens_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with World(tmp_path / "nvme") as world:
            session = await world.session()
            chain = chain_of(session, range(3))
            await world.put(session, chain_of(session, range(2)), range(2), wish=MINUTE)
            await world.settled()
            later(world, 30.0)
            for wish in (MINUTE, Retention(ttl_s=1.0), Retention(pin_s=1.0)):
                statuses = world.cache.retain(session, chain, wish)
                assert statuses.tolist() == [DONE, DONE, MISSING]
            await world.settled()
            await world.reopen(killed=True)
            session = await world.session()
            later(world, 59.0)
            assert world.present(session, chain) == 2
            later(world, 1.0)
            assert world.present(session, chain) == 0
            assert world.cache.retain(session, chain, HOUR).tolist() == [MISSING] * 3

    run(test())


def test_pages_without_a_time_are_not_looked_at() -> None:
    async def test() -> None:
        async with World(None, memory_bytes=256 * KIB) as world:
            session = await world.session()
            await world.put(session, chain_of(session, range(8)), range(8))
            assert not world.cache.lifetimes.in_use
            assert (world.cache.table.expires_ms[world.cache.table.live_rows()] == NEVER).all()

            def fail(_rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
                raise AssertionError("asked although nothing can have expired")

            world.cache.lifetimes.expired = fail  # type: ignore[method-assign, assignment]
            assert world.present(session, chain_of(session, range(8))) == 8

    run(test())
