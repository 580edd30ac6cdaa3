"""A device that fails or lies costs misses, never wrong bytes."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest
from tests.cache.invariants import check_invariants
from tests.cache.running import BODIES, Gate, on_nvme, spoil
from tests.cache.world import TWO, World, body, chain_of, eventually
from tests.fakes.faulty_files import FaultyFiles, always

from octavo_server.cache.statuses import (
    CORRUPT,
    DONE,
    GRANTED,
    MISSING,
    STORED,
    UNAVAILABLE,
)
from octavo_server.errors import Unavailable


def test_a_corrupt_page_is_never_served_and_can_be_put_again(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, range(3))
        await world.put(session, chain, range(3))
        await world.cache.flush(session.namespaces)
        world.evict_all()
        spoil(world, session, 1)
        got = await world.get(session, chain)
        assert got.statuses == [GRANTED, CORRUPT, GRANTED]
        assert world.cache.counters["quarantined_pages"] == 1
        assert (await world.get(session, chain)).statuses == [GRANTED, MISSING, MISSING]
        await world.settled()
        check_invariants(world.cache)
        statuses = await world.put(session, chain, range(3), version=2)
        assert statuses.ravel().tolist()[1] == STORED
        got = await world.get(session, chain)
        assert got.statuses == [GRANTED] * 3
        assert got.units[1, 0] == body(1, 0, 4096, 2)
        await world.cache.flush(session.namespaces)
        await world.reopen(killed=True)
        session = await world.session()
        got = await world.get(session, chain_of(session, range(3)))
        assert got.units[1, 0] == body(1, 0, 4096, 2)

    on_nvme(tmp_path, test)


def test_a_bad_block_among_pages_read_together_costs_its_page_alone(tmp_path: Path) -> None:
    files = FaultyFiles()

    async def test(world: World) -> None:
        session = await world.session()
        numbers = range(100)
        chain = chain_of(session, numbers)
        await world.put(session, chain, numbers)
        await world.cache.flush(session.namespaces)
        world.evict_all()
        table = world.cache.table
        row = table.find(chain.keys, chain.namespace)[70]
        files.bad_offsets = {int(table.units.nvme_offset[int(table.unit_base[row])])}
        before = files.calls["preadv"]
        got = await world.get(session, chain)
        assert got.statuses == [UNAVAILABLE if n == 70 else GRANTED for n in numbers]
        assert all(got.units[n, 0] == body(n, 0, 4096) for n in numbers if n != 70)
        assert files.calls["preadv"] - before < 90  # together, but for those around the block
        assert world.cache.counters["nvme_load_failed_units"] == 1
        assert world.cache.counters["quarantined_pages"] == 0
        files.bad_offsets = set()
        assert (await world.get(session, chain)).statuses == [GRANTED] * 100

    on_nvme(tmp_path, test, files=files)


def test_a_put_during_a_quarantine_does_not_meet_the_old_units(tmp_path: Path) -> None:
    """Unit 0 turns out corrupt while unit 1 is still being read; somebody puts the page again."""
    gate = Gate()

    async def test(world: World) -> None:
        session = await world.session(TWO)
        chain = chain_of(session, [0])
        await world.put(session, chain, [0])
        await world.cache.flush(session.namespaces)
        world.evict_all()
        spoil(world, session, 0, unit=0)
        gate.shut("preadv", count=1)
        second = asyncio.ensure_future(world.get(session, chain, units=[1]))
        await eventually(lambda: gate.waiting == 1)
        assert (await world.get(session, chain, units=[0])).statuses == [CORRUPT]
        reservation, statuses = world.reserve(session, chain)
        assert reservation is not None
        assert len(statuses[0]) == 2
        await world.commit(reservation, [(0, unit, body(0, unit, 4096, 2)) for unit in (0, 1)])
        world.cache.reservations.end(reservation)
        gate.open()
        old = await second
        assert old.units in ({}, {(0, 1): body(0, 1, 4096)})
        await world.settled()
        check_invariants(world.cache)
        got = await world.get(session, chain)
        assert got.units == {(0, unit): body(0, unit, 4096, 2) for unit in (0, 1)}

    on_nvme(tmp_path, test, files=gate.files)


def test_reads_that_fail_are_unavailable_and_the_page_stays(tmp_path: Path) -> None:
    files = FaultyFiles()

    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, range(3))
        await world.put(session, chain, range(3))
        await world.cache.flush(session.namespaces)
        world.evict_all()
        files.faults["preadv"] = always(errno.EIO, BODIES)
        got = await world.get(session, chain)
        assert got.statuses == [UNAVAILABLE] * 3
        assert world.cache.counters["nvme_load_failed_units"] == 3
        assert world.arena.slots.used_bytes == 0
        check_invariants(world.cache)
        files.faults.clear()
        assert (await world.get(session, chain)).statuses == [GRANTED] * 3

    on_nvme(tmp_path, test, files=files)


def test_writes_that_fail_leave_pages_in_memory_and_are_counted(tmp_path: Path) -> None:
    files = FaultyFiles()

    async def test(world: World) -> None:
        session = await world.session()
        files.faults["pwritev"] = always(errno.EIO, BODIES)
        chain = chain_of(session, range(4))
        await world.put(session, chain, range(4))
        answer = await world.cache.flush(session.namespaces)
        assert (answer.durable_pages, answer.volatile_pages) == (0, 4)
        assert world.cache.counters["nvme_write_failed_pages"] == 4
        assert world.store is not None
        assert world.store.used_bytes == 0
        assert (await world.get(session, chain)).statuses == [GRANTED] * 4

    on_nvme(tmp_path, test, files=files)


def test_pages_are_written_after_all_when_the_device_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo_server.cache.nvme_tier.RETRY_S", 0.05)
    files = FaultyFiles()

    async def test(world: World) -> None:
        session = await world.session()
        files.faults["pwritev"] = always(errno.EIO, BODIES)
        await world.put(session, chain_of(session, range(4)), range(4))
        assert (await world.cache.flush(session.namespaces)).durable_pages == 0
        files.faults.clear()
        nvme_mask = world.cache.table.nvme_mask
        await eventually(lambda: int((nvme_mask != 0).sum()) == 4)
        assert (await world.cache.flush(session.namespaces)).volatile_pages == 0

    on_nvme(tmp_path, test, files=files)


def test_pages_that_could_not_be_written_never_fill_memory_for_good(tmp_path: Path) -> None:
    """Heads that are only in memory, with children that are only on NVMe, may be cut off."""
    files = FaultyFiles()

    async def test(world: World) -> None:
        session = await world.session()
        for number in range(0, 512, 2):
            files.faults["pwritev"] = always(errno.EIO, BODIES)
            await world.put(session, chain_of(session, [number]), [number])
            await world.settled()
            files.faults.clear()
            child = chain_of(session, [number + 1], parent=number)
            await world.put(session, child, [number + 1])
            await world.settled()
        chain = chain_of(session, range(1000, 1064))
        assert (await world.put(session, chain, range(1000, 1064)) == STORED).all()

    on_nvme(tmp_path, test, files=files)


def test_a_delete_during_a_load_is_a_miss_and_no_fault_of_the_device(tmp_path: Path) -> None:
    gate = Gate()

    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, range(2))
        await world.put(session, chain, range(2))
        await world.cache.flush(session.namespaces)
        world.evict_all()
        gate.shut("preadv")
        loading = asyncio.ensure_future(world.get(session, chain))
        await eventually(lambda: gate.waiting > 0)
        assert (await world.cache.delete(session, chain)).tolist() == [DONE, DONE]
        # Others take the slots and write them before the read gets there.
        for number in range(100, 140):
            await world.put(session, chain_of(session, [number]), [number])
        await world.cache.flush(session.namespaces)
        gate.open()
        got = await loading
        assert all(status in (MISSING, GRANTED) for status in got.statuses)
        for (page, unit), data in got.units.items():
            assert data == body(page, unit, 4096)
        assert world.cache.counters["quarantined_pages"] == 0

    on_nvme(tmp_path, test, files=gate.files)


def test_a_delete_that_the_device_does_not_take_says_so_and_is_tried_again(tmp_path: Path) -> None:
    files = FaultyFiles()

    async def test(world: World) -> None:
        session = await world.session()
        chain, other = chain_of(session, range(3)), chain_of(session, range(10, 11))
        await world.put(session, chain, range(3))
        await world.cache.flush(session.namespaces)
        files.faults["pwritev"] = always(errno.EIO, "log-")
        with pytest.raises(Unavailable, match="3 pages are removed, but the NVMe device did not"):
            await world.cache.delete(session, chain)
        assert world.present(session, chain) == 0
        files.faults.clear()
        await world.put(session, other, range(10, 11))
        await world.cache.flush(session.namespaces)
        await world.reopen(killed=True)
        session = await world.session()
        assert world.present(session, chain_of(session, range(3))) == 0
        assert world.present(session, chain_of(session, range(10, 11))) == 1

    on_nvme(tmp_path, test, files=files)
