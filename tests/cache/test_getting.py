"""Getting: leases, holds, waiting for writers, and what each of them keeps in place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from tests.cache.invariants import check_invariants
from tests.cache.world import KIB, MIB, TWO, Got, World, body, chain_of

from octavo_server.cache.leases import Hold
from octavo_server.cache.limits import CacheLimits
from octavo_server.cache.statuses import (
    DONE,
    GRANTED,
    MISSING,
    NO_ROOM,
    PENDING,
    STORED,
)
from octavo_server.errors import LimitReached


def in_memory(test: Callable[[World], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """Runs a test on a cache without NVMe, and balances the books at its end."""

    async def run() -> None:
        async with World(None, **settings) as world:
            await test(world)
            check_invariants(world.cache)

    asyncio.run(run())


async def crowd(world: World, first: int, page_count: int, length: int = 4096) -> int:
    """Puts pages that have nothing to do with each other: how many were stored."""
    session = await world.session()
    stored = 0
    per_put = max(1, MIB // 4 // length)
    for begin in range(first, first + page_count, per_put):
        numbers = range(begin, min(begin + per_put, first + page_count))
        chain = chain_of(session, numbers, unlinked=True)
        statuses = await world.put(session, chain, numbers, length=length)
        stored += int((statuses == STORED).sum())
    world.cache.end_session(session)
    return stored


def test_a_leased_slot_is_not_reused() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, range(4))
        await world.put(session, chain, range(4))
        got = await world.get(session, chain, release=False)
        rows = got.leases[0].rows
        assert await crowd(world, 100, 600) == 600  # more than twice the arena
        for position, row in enumerate(rows.tolist()):
            assert world.read(row, 0) == body(position, 0, 4096)
        assert world.present(session, chain) == 4
        assert world.cache.leases.release(session, got.leases[0].lease_id)
        await crowd(world, 1000, 300)
        assert world.present(session, chain) == 0

    in_memory(test)


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


def test_probes_neither_lease_nor_touch_nor_starve_eviction() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, range(8))
        await world.put(session, chain, range(8))
        table = world.cache.table
        touched = table.touched[: table.high_water].copy()
        for _ in range(50):
            assert world.present(session, chain) == 8
        assert (table.touched[: table.high_water] == touched).all()
        assert world.cache.leases.lease_count == world.cache.leases.hold_count == 0
        probed = 0
        for number in range(100, 700):
            assert await crowd(world, number, 1) == 1
            probed = world.present(session, chain)
        assert probed == 0  # probing did not keep it

    in_memory(test)


def test_a_chain_loses_its_tail_before_its_head() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, range(64))
        await world.put(session, chain, range(64))
        lengths: list[int] = []
        for number in range(1000, 1300):
            await crowd(world, number, 1)
            present = world.present(session, chain)
            rows = world.cache.table.find(chain.keys, chain.namespace)
            here = world.cache.table.memory_mask[rows[rows >= 0]] != 0
            assert int(here.sum()) == present, "a page without the one before it"
            lengths.append(present)
        assert lengths == sorted(lengths, reverse=True)
        assert {0, 64} < set(lengths)

    in_memory(test)


def test_a_chain_in_use_is_not_evicted_while_idle_ones_are() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        used, idle = chain_of(session, range(32)), chain_of(session, range(100, 132))
        await world.put(session, used, range(32))
        await world.put(session, idle, range(100, 132))
        got = await world.get(session, used, first=30, release=False)  # its tail only
        await crowd(world, 1000, 600)
        assert world.present(session, used) == 32  # what lies above a page in use stays
        assert world.present(session, idle) == 0
        world.cache.leases.release(session, got.leases[0].lease_id)

    in_memory(test)


def test_a_page_that_is_half_written_is_not_evicted() -> None:
    async def test(world: World) -> None:
        zero, one = await world.session(TWO), await world.session(TWO)
        chain = chain_of(zero, [7])
        await world.put(zero, chain, [7], units=[0])
        reservation, _ = world.reserve(one, chain, units=[1])
        assert reservation is not None
        await crowd(world, 100, 600)
        assert await world.commit(reservation, [(0, 1, body(7, 1, 4096))]) == [STORED]
        world.cache.reservations.end(reservation)
        got = await world.get(one, chain)
        assert got.units == {(0, unit): body(7, unit, 4096) for unit in (0, 1)}

    in_memory(test)


def test_what_is_used_stays_longer() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, range(8))
        await world.put(session, chain, range(8))
        for number in range(100, 400):
            await crowd(world, number, 1)
            got = await world.get(session, chain)
            assert got.statuses == [GRANTED] * 8, f"gone after {number}"

    in_memory(test)


def test_puts_take_no_more_victims_than_their_units_need() -> None:
    async def test(world: World) -> None:
        session = await world.session(TWO)
        for number in range(128):  # fills the arena: 256 slots of 4 KiB
            await world.put(session, chain_of(session, [number]), [number])
        assert world.arena.slots.used_bytes == MIB
        await world.put(session, chain_of(session, range(500, 520)), range(500, 520))
        assert world.cache.counters["memory_evicted_pages"] == 20
        assert world.arena.slots.used_bytes == MIB

    in_memory(test)


def test_a_slab_of_another_size_is_taken_when_it_is_colder() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        assert await crowd(world, 0, 256) == 256  # all slabs hold slots of 4 KiB
        assert await crowd(world, 1000, 4, 32 * KIB) == 4
        assert world.present(session, chain_of(session, [63])) == 0  # the first put's tail
        assert world.present(session, chain_of(session, [255])) == 1
        large = chain_of(session, [1000])
        for number in range(2000, 2300):
            await crowd(world, number, 1)
            await world.get(session, large)  # warm: slabs of 4 KiB slots are colder
        assert world.present(session, large) == 1
        assert await crowd(world, 3000, 40, 60 * KIB) == 40

    in_memory(test)


def test_a_colder_slab_in_use_is_passed_over() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        await crowd(world, 0, 256)
        held = await world.get(session, chain_of(session, [0]), release=False)  # of slab 0
        for number in range(1, 256):  # slab 0 is the coldest still, as are all the others
            await world.get(session, chain_of(session, [number]))
        assert await crowd(world, 1000, 12, 64 * KIB) == 12
        assert world.present(session, chain_of(session, [0])) == 1
        world.cache.leases.release(session, held.leases[0].lease_id)

    in_memory(test)


def test_no_room_where_everything_is_leased_and_room_again_after_release() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        chains = [chain_of(session, range(n * 64, n * 64 + 64)) for n in range(4)]
        for number, chain in enumerate(chains):
            await world.put(session, chain, range(number * 64, number * 64 + 64))
        leases = [(await world.get(session, chain, release=False)).leases for chain in chains]
        new = chain_of(session, [999])
        assert (await world.put(session, new, [999])).tolist() == [[NO_ROOM]]
        assert world.cache.table.row_count == 256  # and no row was left behind
        for lease in leases[0]:
            world.cache.leases.release(session, lease.lease_id)
        assert (await world.put(session, new, [999])).tolist() == [[STORED]]
        world.cache.end_session(session)

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
