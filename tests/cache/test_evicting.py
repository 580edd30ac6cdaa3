"""Who leaves memory when room is needed, and who stays."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.cache.running import Gate, crowd, in_memory, on_nvme
from tests.cache.world import KIB, MIB, TWO, World, body, chain_of, eventually

from octavo_server.cache.chains import ChainView
from octavo_server.cache.statuses import (
    GRANTED,
    NO_ROOM,
    STORED,
)


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


async def heads_that_are_larger(world: World, hot_count: int) -> tuple[ChainView, list[ChainView]]:
    """Fills an arena of four slabs with a chain, whose first page takes one of them, and hot
    pages of their own, one in each of the other slabs at least."""
    session = await world.session()
    await world.put(session, chain_of(session, [0]), [0], length=60 * KIB)
    hot: list[ChainView] = []
    whole = chain_of(session, range(49 - hot_count))
    for last in range(1, len(whole)):
        await world.put(session, chain_of(session, range(last + 1)), range(last + 1))
        if last % (48 // hot_count) == 1 and len(hot) < hot_count:
            hot.append(chain_of(session, [1000 + last]))
            await world.put(session, hot[-1], [1000 + last])
    assert len(hot) == hot_count
    assert world.arena.slots.unassigned_bytes == 0
    return whole, hot


def test_a_larger_head_finds_room_though_all_like_it_have_children() -> None:
    async def test(world: World) -> None:
        chain, hot = await heads_that_are_larger(world, 6)
        session = await world.session()
        for page in hot:
            await world.get(session, page)
        new = chain_of(session, [500])
        assert (await world.put(session, new, [500], length=60 * KIB)).tolist() == [[STORED]]
        # Without NVMe a head that goes takes its chain along. Nobody else had to go.
        assert world.present(session, chain) == 0
        assert world.cache.table.row_count == len(hot) + 1
        assert all(world.present(session, page) for page in hot)

    in_memory(test, memory_bytes=256 * KIB)


def test_a_larger_head_that_stays_on_nvme_leaves_memory_alone(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        chain, hot = await heads_that_are_larger(world, 6)
        session = await world.session()
        await world.settled()
        for page in hot:
            await world.get(session, page)
        evicted = world.cache.counters["memory_evicted_pages"]
        new = chain_of(session, [500])
        assert (await world.put(session, new, [500], length=60 * KIB)).tolist() == [[STORED]]
        assert world.cache.counters["memory_evicted_pages"] == evicted + 1
        assert world.present(session, chain) == len(chain)
        await world.settled()
        # And back, beside the children that are in memory still, in the place of the other one.
        got = await world.get(session, chain)
        assert got.statuses == [GRANTED] * len(chain)
        assert got.units[0, 0] == body(0, 0, 60 * KIB)

    on_nvme(tmp_path, test, memory_bytes=256 * KIB)


def test_a_larger_head_does_not_cut_off_what_is_leased() -> None:
    async def test(world: World) -> None:
        chain, hot = await heads_that_are_larger(world, 6)
        session = await world.session()
        held = await world.get(session, chain, release=False)
        for page in hot:
            await world.get(session, page)
        new = chain_of(session, [500])
        refused = await world.put(session, new, [500], length=60 * KIB)
        assert refused.tolist() == [[NO_ROOM]]
        for lease in held.leases:
            world.cache.leases.release(session, lease.lease_id)
        assert (await world.put(session, new, [500], length=60 * KIB)).tolist() == [[STORED]]

    in_memory(test, memory_bytes=256 * KIB)


def test_a_slab_with_a_page_on_its_way_into_memory_is_passed_over(tmp_path: Path) -> None:
    gate = Gate()

    async def test(world: World) -> None:
        session = await world.session()
        await world.put(session, chain_of(session, [0]), [0])
        await world.settled()
        world.evict_all()
        await crowd(world, 100, 15)  # with the loaded page, the first slab is full
        gate.shut("preadv")
        loading = asyncio.ensure_future(world.get(session, chain_of(session, [0])))
        await eventually(lambda: gate.waiting > 0)
        for first in (200, 300):
            assert await crowd(world, first, 24) == 24  # the other three slabs
        assert world.cache.nvme is not None
        await world.cache.nvme.settle()
        assert world.arena.slots.unassigned_bytes == 0
        assert await crowd(world, 400, 2, 60 * KIB) == 2
        assert world.cache.counters["nvme_load_failed_units"] == 0
        gate.open()
        assert (await loading).units[0, 0] == body(0, 0, 4096)

    on_nvme(tmp_path, test, memory_bytes=256 * KIB, files=gate.files)


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
