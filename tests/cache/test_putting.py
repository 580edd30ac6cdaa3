"""Putting: bytes before visibility, and every way in which a put ends."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.cache.invariants import check_invariants
from tests.cache.running import in_memory
from tests.cache.world import KIB, MIB, ONE, TWO, World, body, chain_of, eventually

from octavo_proto.layout import foreign_layout
from octavo_server.cache.limits import CacheLimits
from octavo_server.cache.statuses import (
    ALREADY_PRESENT,
    EXPIRED,
    GRANTED,
    MISSING,
    NO_ROOM,
    PENDING,
    REJECTED,
    RESERVED,
    STORED,
    TOO_LARGE,
)
from octavo_server.errors import LimitReached, RequestError


def test_bytes_come_before_visibility() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, range(2))
        reservation, statuses = world.reserve(session, chain)
        assert reservation is not None
        assert (statuses == RESERVED).all()
        assert world.present(session, chain) == 0
        filled = world.fill([(0, 0, body(0, 0, 4096))])
        commit = asyncio.ensure_future(world.cache.commit(reservation, filled, world.ring))
        await asyncio.sleep(0)  # the copy runs; nothing is visible yet
        assert world.present(session, chain) == 0
        assert (await commit).tolist() == [STORED]
        assert world.present(session, chain) == 1
        assert world.cache.match(session, chain).pending_count == 1
        got = await world.get(session, chain)
        assert got.statuses == [GRANTED, MISSING]
        assert got.units[0, 0] == body(0, 0, 4096)

    in_memory(test)


def test_a_page_is_present_only_when_both_ranks_have_put_their_units() -> None:
    async def test(world: World) -> None:
        one, two = await world.session(TWO), await world.session(TWO)
        chain = chain_of(one, range(3))
        assert (await world.put(one, chain, range(3), units=[0]) == STORED).all()
        assert world.present(one, chain) == world.present(two, chain) == 0
        statuses = await world.put(two, chain, range(3))
        assert statuses.tolist() == [[ALREADY_PRESENT, STORED]] * 3
        assert world.present(one, chain) == world.present(two, chain) == 3
        got = await world.get(one, chain)
        assert got.units == {
            (page, unit): body(page, unit, 4096) for page in range(3) for unit in range(2)
        }

    in_memory(test)


def test_sessions_put_a_chain_in_turns_and_its_first_gap_ends_it() -> None:
    async def test(world: World) -> None:
        sessions = [await world.session() for _ in range(2)]
        chain, table = chain_of(sessions[0], range(6)), world.cache.table
        made = [
            world.reserve(session, chain, positions=range(turn, 6, 2))
            for turn, session in enumerate(sessions)
        ]
        assert [statuses.tolist() for _, statuses in made] == [[[RESERVED]] * 3] * 2
        even, odd = (reservation for reservation, _ in made)
        assert even is not None
        assert odd is not None
        # A page that is another's turn was not reserved by this one.
        assert await world.commit(odd, [(0, 0, body(0, 0, 4096))]) == [REJECTED]
        turns = [(position, 0, body(position, 0, 4096)) for position in (1, 3, 5)]
        assert await world.commit(odd, turns) == [STORED] * 3
        assert world.present(sessions[1], chain) == 0
        turns = [(position, 0, body(position, 0, 4096)) for position in (0, 2)]
        assert await world.commit(even, turns) == [STORED] * 2
        world.cache.end_session(sessions[0])  # before its last turn
        assert world.present(sessions[1], chain) == 4
        check_invariants(world.cache)
        # The row of the page that nobody put keeps the one behind it in the chain.
        gap, behind = table.find(chain.keys, chain.namespace)[4:]
        assert table.parent[behind] == gap
        assert (await world.put(sessions[1], chain, range(6))).ravel().tolist() == [
            *[ALREADY_PRESENT] * 4,
            STORED,
            ALREADY_PRESENT,
        ]
        assert world.present(sessions[1], chain) == 6
        world.cache.end_session(sessions[1])
        world.evict_all()
        assert world.arena.slots.used_bytes == table.row_count == 0

    in_memory(test)


def test_an_abandoned_reservation_gives_everything_back() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        for end in ("abort", "expiry", "session"):
            chain = chain_of(session, range(8), layout=1)
            reservation, _ = world.reserve(session, chain, length=10_000)
            assert reservation is not None
            await world.commit(reservation, [(0, 0, body(0, 0, 10_000))])
            assert world.arena.slots.used_bytes == 16 * 12 * KIB
            if end == "abort":
                world.cache.reservations.end(reservation)
            elif end == "expiry":
                world.advance(31.0)
                assert world.cache.counters["reservations_expired"] == 1
            else:
                world.cache.end_session(session)
                session = await world.session()
            assert len(world.cache.reservations) == world.cache.reservations.reserved_bytes == 0
            assert world.arena.slots.used_bytes == 12 * KIB  # the one unit that was filled
            check_invariants(world.cache)
            world.evict_all()
            assert world.arena.slots.used_bytes == world.cache.table.row_count == 0

    in_memory(test)


def test_a_commit_after_the_end_is_expired_and_a_second_one_is_rejected() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, range(2))
        reservation, _ = world.reserve(session, chain)
        assert reservation is not None
        unit = (0, 0, body(0, 0, 4096))
        assert await world.commit(reservation, [unit, unit]) == [STORED, REJECTED]
        assert await world.commit(reservation, [unit]) == [REJECTED]
        other = await world.session()
        assert world.cache.reservations.find(other, reservation.reservation_id) is None
        filled = world.fill([(1, 0, body(1, 0, 4096))])
        commit = asyncio.ensure_future(world.cache.commit(reservation, filled, world.ring))
        await asyncio.sleep(0)
        world.advance(31.0)  # it runs out while the copy runs
        assert (await commit).tolist() == [EXPIRED]
        assert world.present(session, chain) == 1
        assert world.arena.slots.used_bytes == 4 * KIB
        assert world.cache.reservations.find(session, reservation.reservation_id) is None

    in_memory(test)


def test_a_commit_must_name_what_was_reserved() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        reservation, _ = world.reserve(session, chain_of(session, range(2)), length=5000)
        assert reservation is not None
        assert await world.commit(reservation, [(0, 0, b"x" * 4999)]) == [REJECTED]
        for position, unit in ((2, 0), (0, 1)):
            with pytest.raises(RequestError, match="must be below"):
                await world.commit(reservation, [(position, unit, b"x" * 5000)])
        filled = world.fill([(0, 0, b"x" * 5000)])
        for offset, message in ((world.ring.size_bytes, "below"), (-1, "beyond")):
            filled.ring_offsets[0] = offset
            with pytest.raises(RequestError, match=message):
                await world.cache.commit(reservation, filled, world.ring)
        assert await world.commit(reservation, [(0, 0, b"x" * 5000)]) == [STORED]
        world.cache.reservations.end(reservation)

    in_memory(test)


def test_a_caller_that_goes_away_during_its_commit_leaks_nothing() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, range(4))
        reservation, _ = world.reserve(session, chain)
        assert reservation is not None
        filled = world.fill([(page, 0, body(page, 0, 4096)) for page in range(4)])
        commit = asyncio.ensure_future(world.cache.commit(reservation, filled, world.ring))
        await asyncio.sleep(0)
        commit.cancel()
        world.ring.close()  # waits for the copy by itself
        world.cache.end_session(session)
        with pytest.raises(asyncio.CancelledError):
            await commit
        await eventually(lambda: not world.cache.table.row_count)
        assert world.arena.slots.used_bytes == 0

    in_memory(test)


def test_finishing_keeps_what_is_being_copied_and_ending_does_not() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        for first, finish, expected in ((0, True, STORED), (10, False, EXPIRED)):
            chain = chain_of(session, range(first, first + 2))
            reservation, _ = world.reserve(session, chain)
            assert reservation is not None
            filled = world.fill([(0, 0, body(first, 0, 4096))])
            commit = asyncio.ensure_future(world.cache.commit(reservation, filled, world.ring))
            await asyncio.sleep(0)  # the copy has begun
            if finish:
                world.cache.reservations.finish(reservation)
            else:
                world.cache.reservations.end(reservation)
            assert (await commit).tolist() == [expected]
            assert world.present(session, chain) == (1 if finish else 0)

    in_memory(test)


def test_sizes_beyond_slab_and_arena_are_answered_page_by_page() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        lengths = np.full((4, 1), 4096, dtype=np.uint32)
        lengths[2] = 64 * KIB + 1
        reservation, statuses = world.reserve(session, chain_of(session, range(4)), length=lengths)
        # Behind a page that can't be put, nothing would be found.
        assert statuses.ravel().tolist() == [RESERVED, RESERVED, TOO_LARGE, NO_ROOM]
        assert reservation is not None
        world.cache.reservations.end(reservation)
        chain = chain_of(session, range(100, 140))
        statuses = await world.put(session, chain, range(100, 140), length=64 * KIB)
        stored = int((statuses == STORED).sum())
        assert stored == 8  # half of the arena may be reserved at a time
        assert (statuses[:stored] == STORED).all()
        assert (statuses[stored:] == NO_ROOM).all()
        assert world.present(session, chain) == stored

    in_memory(test)


def test_other_writers_are_told_to_wait() -> None:
    async def test(world: World) -> None:
        one, two = await world.session(), await world.session()
        reservation, _ = world.reserve(one, chain_of(one, range(2)))
        assert reservation is not None
        none, statuses = world.reserve(two, chain_of(two, range(2)))
        assert none is None
        assert (statuses == PENDING).all()
        assert world.cache.match(two, chain_of(two, range(2))).pending_count == 2
        world.cache.reservations.end(reservation)
        assert (await world.put(two, chain_of(two, range(2)), range(2)) == STORED).all()

    in_memory(test)


def test_a_variant_that_the_session_cannot_read_is_replaced_unless_in_use() -> None:
    async def test(world: World) -> None:
        one = await world.session(variants=[1])
        two = await world.session(variants=[2])
        chain = chain_of(one, range(2))
        await world.put(one, chain, range(2), variant=1)
        assert world.present(two, chain) == 0
        got = await world.get(one, chain, release=False)
        assert (await world.put(two, chain, range(2), variant=2) == REJECTED).all()
        assert world.present(one, chain) == 2
        for lease in got.leases:
            world.cache.leases.release(one, lease.lease_id)
        statuses = await world.put(two, chain, range(2), variant=2, length=5000, version=2)
        assert (statuses == STORED).all()
        assert (world.present(one, chain), world.present(two, chain)) == (0, 2)
        again = await world.get(two, chain)
        assert again.units[1, 0] == body(1, 0, 5000, 2)

    in_memory(test)


def test_a_page_that_was_begun_in_another_variant_starts_anew() -> None:
    async def test(world: World) -> None:
        one = await world.session(TWO, variants=[1])
        two = await world.session(TWO, variants=[2])
        chain = chain_of(one, [5])
        await world.put(one, chain, [5], units=[0], variant=1)
        reservation, statuses = world.reserve(two, chain, units=[1], variant=2)
        assert statuses.tolist() == [[RESERVED]]
        assert reservation is not None
        assert world.reserve(one, chain, variant=1)[1].tolist() == [[PENDING, PENDING]]
        await world.commit(reservation, [(0, 1, body(5, 1, 4096))])
        world.cache.reservations.end(reservation)
        assert world.present(one, chain) == world.present(two, chain) == 0

    in_memory(test)


def test_a_parent_that_is_not_here_is_remembered_with_its_layouts_units() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        # Page 0 is unknown: a row without content stands for it.
        await world.put(session, chain_of(session, [1], layout=1, parent=0), [1])
        neighbour = chain_of(session, [50], layout=1)
        await world.put(session, neighbour, [50])
        await world.put(session, chain_of(session, [0, 1], layout=1), [0, 1])
        assert world.present(session, chain_of(session, [0, 1], layout=1)) == 2
        got = await world.get(session, neighbour)
        assert got.units == {(0, unit): body(50, unit, 4096) for unit in (0, 1)}
        table = world.cache.table
        rows = table.find(chain_of(session, [0, 1]).keys, session.namespaces[0])
        assert table.parent[rows[1]] == rows[0]

    in_memory(test)


def test_a_page_under_another_layouts_key_hurts_nobody() -> None:
    async def test(world: World) -> None:
        big = foreign_layout("big", "hostile", unit_count=64)
        session = await world.session(ONE, big)
        small = chain_of(session, range(4))
        await world.put(session, small, range(4))
        before = (await world.get(session, small)).units
        # The same keys as pages of 64 units: rows of one unit must not be filled as such.
        statuses = await world.put(session, chain_of(session, range(4), layout=1), range(4))
        assert (statuses[0] == REJECTED).all()
        assert not (statuses == STORED).any()
        assert (await world.get(session, small)).units == before
        # A row that is nothing but a parent of the other layout makes way.
        await world.put(session, chain_of(session, [91], parent=90), [91])
        statuses = await world.put(session, chain_of(session, [90], layout=1), [90])
        assert (statuses == STORED).all()
        got = await world.get(session, chain_of(session, [90], layout=1))
        assert got.units == {(0, unit): body(90, unit, 4096) for unit in range(64)}

    in_memory(test, memory_bytes=2 * MIB)


def test_a_chain_that_names_a_key_twice_is_refused() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        with pytest.raises(RequestError, match="pages 0 and 2"):
            world.reserve(session, chain_of(session, [1, 2, 1]))
        with pytest.raises(RequestError, match="parent_key"):
            world.reserve(session, chain_of(session, [1, 2], parent=2))
        assert world.cache.table.row_count == 0

    in_memory(test)


def test_chains_that_continue_a_parent_are_one_chain() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        await world.put(session, chain_of(session, range(3)), range(3))
        await world.put(session, chain_of(session, range(3, 6), parent=2), range(3, 6))
        assert world.present(session, chain_of(session, range(6))) == 6
        table = world.cache.table
        rows = table.find(chain_of(session, range(6)).keys, session.namespaces[0])
        assert table.depth[rows].tolist() == list(range(6))
        assert table.parent[rows].tolist() == [-1, *rows[:-1].tolist()]

    in_memory(test)


def test_unlinked_pages_stand_alone() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        lengths = np.array([[4096], [64 * KIB + 1], [9000]], dtype=np.uint32)
        chain = chain_of(session, range(3), unlinked=True)
        reservation, statuses = world.reserve(session, chain, length=lengths)
        assert statuses.ravel().tolist() == [RESERVED, TOO_LARGE, RESERVED]
        assert reservation is not None
        await world.commit(reservation, [(0, 0, body(0, 0, 4096)), (2, 0, body(2, 0, 9000))])
        world.cache.reservations.end(reservation)
        match = world.cache.match(session, chain)
        assert match.present.tolist() == [True, False, True]
        got = await world.get(session, chain)
        assert got.statuses == [GRANTED, MISSING, GRANTED]
        assert got.units[2, 0] == body(2, 0, 9000)

    in_memory(test)


def test_a_session_reserves_so_often_and_no_more() -> None:
    async def test(world: World) -> None:
        session = await world.session()
        for number in range(3):
            world.reserve(session, chain_of(session, [number]))
        with pytest.raises(LimitReached, match="3 reservations"):
            world.reserve(session, chain_of(session, [3]))
        world.cache.end_session(session)
        assert world.cache.table.row_count == 0

    in_memory(test, limits=CacheLimits(reservations_max=3))
