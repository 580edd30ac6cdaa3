"""Loading from NVMe: once for all who wait, in order, in bounded room."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.cache.invariants import check_invariants
from tests.cache.running import Gate, on_nvme
from tests.cache.world import KIB, MIB, World, body, chain_of, eventually

from octavo_server.cache.loader import LOADS_MAX, STARTS_MAX
from octavo_server.cache.statuses import (
    GRANTED,
    MISSING,
    UNAVAILABLE,
)
from octavo_server.store.nvme import BodyToRead, NvmeStore
from octavo_server.store.nvme.store import ReadSink


def test_one_load_serves_every_get_that_waits(tmp_path: Path) -> None:
    gate = Gate()

    async def test(world: World) -> None:
        session, other = await world.session(), await world.session()
        numbers = range(10)
        await world.put(session, chain_of(session, numbers), numbers)
        await world.cache.flush(session.namespaces)
        world.evict_all()
        assert world.store is not None
        gate.shut("preadv")
        gets = [
            asyncio.ensure_future(world.get(who, chain_of(who, numbers)))
            for who in (session, other, session)
        ]
        await eventually(lambda: gate.waiting > 0)
        gate.open()
        for got in await asyncio.gather(*gets):
            assert got.statuses == [GRANTED] * 10
            assert got.units[9, 0] == body(9, 0, 4096)
        assert world.store.counters.units_read == 10

    on_nvme(tmp_path, test, files=gate.files)


def test_grants_stream_while_later_pages_still_load(tmp_path: Path) -> None:
    gate = Gate()

    async def test(world: World) -> None:
        session = await world.session()
        numbers = range(20)
        chain = chain_of(session, numbers)
        await world.put(session, chain, numbers)
        await world.cache.flush(session.namespaces)
        world.evict_all()
        await world.get(session, chain_of(session, range(5)))  # these are in memory again
        gate.shut("preadv")
        stream = world.get(session, chain)
        got = asyncio.ensure_future(stream)
        await eventually(lambda: gate.waiting > 0)
        assert world.cache.counters["leases_granted"] >= 2  # the first five, while others load
        assert not got.done()
        gate.open()
        assert (await got).statuses == [GRANTED] * 20
        assert got.result().batches[0] == 5

    on_nvme(tmp_path, test, files=gate.files)


def test_more_pages_than_memory_stream_through_it(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        session = await world.session()
        numbers = range(3 * LOADS_MAX)  # the arena holds 256
        chain = chain_of(session, numbers)
        for end in range(64, len(numbers) + 1, 64):
            await world.put(session, chain_of(session, range(end)), range(end))
            await world.cache.flush(session.namespaces)
        got = await world.get(session, chain)  # releases each lease when it has copied
        assert got.statuses == [GRANTED] * len(numbers)
        assert all(got.units[page, 0] == body(page, 0, 4096) for page in numbers)

    on_nvme(tmp_path, test)


def test_reads_begin_in_steps_while_the_rest_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    steps: list[int] = []
    read = NvmeStore.read

    def counted(store: NvmeStore, units: Sequence[BodyToRead], on_done: ReadSink) -> None:
        steps.append(len(units))
        read(store, units, on_done)

    monkeypatch.setattr(NvmeStore, "read", counted)

    async def test(world: World) -> None:
        session = await world.session()
        numbers = range(LOADS_MAX + 10)
        chain = chain_of(session, numbers)
        for end in (LOADS_MAX, len(numbers)):  # as much as the ring takes
            await world.put(session, chain_of(session, range(end)), range(end))
        await world.cache.flush(session.namespaces)
        world.evict_all()
        gate.shut("preadv")
        got = asyncio.ensure_future(world.get(session, chain))
        await eventually(lambda: gate.waiting > 0)
        assert steps == [STARTS_MAX] * (LOADS_MAX // STARTS_MAX)
        gate.open()
        assert (await got).statuses == [GRANTED] * len(numbers)
        assert sum(steps) == len(numbers)

    on_nvme(tmp_path, test, files=gate.files)


def test_a_load_that_waits_for_room_starts_when_a_reservation_ends(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        session = await world.session()
        await world.put(session, chain_of(session, [0]), [0])
        await world.cache.flush(session.namespaces)
        world.evict_all()
        reservations = [
            world.reserve(session, chain_of(session, range(n * 100, n * 100 + 64)))[0]
            for n in (1, 2)
        ]
        held = chain_of(session, range(1000, 1128))
        for end in (64, 128):  # the other half of the arena
            part = range(1000, 1000 + end)
            world.cache.reservations.end(reservations[0]) if reservations[0] else None
            await world.put(session, chain_of(session, part), part)
            reservations[0] = world.reserve(session, chain_of(session, range(100, 164)))[0]
        leased = await world.get(session, held, release=False)
        assert world.arena.slots.used_bytes == MIB
        loading = asyncio.ensure_future(world.get(session, chain_of(session, [0])))
        await asyncio.sleep(0.02)
        assert not loading.done()
        assert reservations[1] is not None
        world.cache.reservations.end(reservations[1])  # nothing is unpinned by it
        got = await asyncio.wait_for(loading, 2.0)
        assert got.units[0, 0] == body(0, 0, 4096)
        assert leased.statuses == [GRANTED] * 128
        world.cache.end_session(session)

    on_nvme(tmp_path, test)


def test_giving_up_on_a_long_queue_of_loads_takes_no_deep_stack(tmp_path: Path) -> None:
    gate = Gate()

    async def test(world: World) -> None:
        session = await world.session()
        page_count = 4000
        numbers = range(page_count)
        chain = chain_of(session, numbers)
        await world.put(session, chain, numbers)
        await world.cache.flush(session.namespaces)
        world.evict_all()
        gate.shut("preadv")
        loading = asyncio.ensure_future(world.get(session, chain))
        await eventually(lambda: gate.waiting > 0)
        await world.cache.delete(session, chain)
        gate.open()
        got = await loading
        assert set(got.statuses) <= {MISSING, GRANTED}
        assert got.statuses.count(MISSING) >= page_count - 2 * LOADS_MAX

    on_nvme(
        tmp_path,
        test,
        files=gate.files,
        memory_bytes=64 * MIB,
        slab_bytes=MIB,
        nvme_bytes=64 * MIB,
    )


def test_a_hold_loads_ahead_of_its_get(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, range(8))
        await world.put(session, chain, range(8))
        await world.cache.flush(session.namespaces)
        world.evict_all()
        match = world.cache.match(session, chain)
        hold = world.cache.hold(session, chain, match, 30.0)
        assert hold is not None
        await world.settled()
        assert world.cache.match(session, chain).in_memory.all()
        got = await world.get(session, chain, hold=hold)
        assert got.batches == [8]

    on_nvme(tmp_path, test)


def test_an_abandoned_get_still_loads_into_places_of_its_own(tmp_path: Path) -> None:
    gate = Gate()

    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, range(8))
        await world.put(session, chain, range(8))
        await world.cache.flush(session.namespaces)
        world.evict_all()
        gate.shut("preadv")
        loading = asyncio.ensure_future(world.get(session, chain))
        await eventually(lambda: gate.waiting > 0)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        # The device writes there still: nobody else may get these places.
        assert world.arena.slots.used_bytes == 8 * 4 * KIB
        check_invariants(world.cache)
        gate.open()
        await world.settled()
        assert (await world.get(session, chain)).statuses == [GRANTED] * 8

    on_nvme(tmp_path, test, files=gate.files)


def test_an_endless_wait_does_not_exist(tmp_path: Path) -> None:
    gate = Gate()

    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, [0])
        await world.put(session, chain, [0])
        await world.cache.flush(session.namespaces)
        world.evict_all()
        gate.shut("preadv")
        got = await world.get(session, chain, wait_s=0.05)
        assert got.statuses == [UNAVAILABLE]
        gate.open()

    on_nvme(tmp_path, test, files=gate.files)
