"""The cache over NVMe: warm restarts, loads, failing devices, and deletes that stay deleted."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cache.invariants import check_invariants
from tests.cache.world import KIB, MIB, TWO, World, body, chain_of, eventually
from tests.fakes.faulty_files import FaultyFiles, always

from octavo_server.cache.loader import LOADS_MAX
from octavo_server.cache.session import Session
from octavo_server.cache.statuses import (
    CORRUPT,
    DONE,
    GRANTED,
    MISSING,
    STORED,
    UNAVAILABLE,
)
from octavo_server.errors import Unavailable
from octavo_server.store.file_ops import FileOps

BODIES = "bodies.dat"


def on_nvme(
    directory: Path, test: Callable[[World], Coroutine[Any, Any, None]], **settings: Any
) -> None:
    """Runs a test on a cache with an NVMe store, and balances the books at its end."""

    async def run() -> None:
        async with World(directory / "nvme", **settings) as world:
            await test(world)
            await world.settled()
            check_invariants(world.cache)

    asyncio.run(run())


class Gate:
    """Lets a call on the bodies file wait in its thread until it is opened."""

    def __init__(self) -> None:
        self.files = FaultyFiles()
        self._open = threading.Event()
        self.waiting = 0

    def shut(self, call: str) -> None:
        self._open.clear()

        def fault(name: str) -> int | None:
            if name == BODIES:
                self.waiting += 1
                self._open.wait(10)
            return None

        self.files.faults[call] = fault

    def open(self) -> None:
        self.files.faults.clear()
        self._open.set()


def spoil(world: World, session: Session, number: int, unit: int = 0, layout: int = 0) -> None:
    """Flips a byte of a unit on the device."""
    assert world.store is not None
    table = world.cache.table
    row = table.find(chain_of(session, [number], layout=layout).keys, session.namespaces[0])[0]
    offset = int(table.units.nvme_offset[int(table.unit_base[row]) + unit])
    assert offset >= 0
    with (world.store.config.directory / BODIES).open("r+b") as bodies:
        bodies.seek(offset + 100)
        byte = bodies.read(1)[0]
        bodies.seek(offset + 100)
        bodies.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("killed", [False, True])
def test_a_restart_is_warm_and_exact(tmp_path: Path, killed: bool) -> None:
    async def test(world: World) -> None:
        session = await world.session()
        numbers = range(20)
        await world.put(session, chain_of(session, numbers), numbers, length=5000)
        await world.put(session, chain_of(session, range(50, 55), layout=1), range(50, 55))
        assert await world.cache.flush(session.namespaces) == await world.cache.flush(
            session.namespaces
        )
        answer = await world.cache.flush(session.namespaces)
        assert (answer.durable_pages, answer.volatile_pages) == (25, 0)
        assert world.store is not None
        used_bytes = world.store.used_bytes
        await world.reopen(killed=killed)
        check_invariants(world.cache)
        assert world.store.used_bytes == used_bytes
        assert world.cache.counters["recovered_pages"] == 25
        session = await world.session()
        chain = chain_of(session, numbers)
        match = world.cache.match(session, chain)
        assert match.page_count == 20
        assert not match.in_memory.any()
        got = await world.get(session, chain)
        assert got.units == {(page, 0): body(page, 0, 5000) for page in numbers}
        table = world.cache.table
        rows = table.find(chain.keys, chain.namespace)
        assert table.parent[rows].tolist() == [-1, *rows[:-1].tolist()]

    on_nvme(tmp_path, test)


def test_a_restart_keeps_the_order_of_use_with_the_tail_first(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        session = await world.session()
        for first in (0, 100, 200):
            numbers = range(first, first + 10)
            await world.put(session, chain_of(session, numbers), numbers)
            await world.cache.flush(session.namespaces)
        # The first chain grew last: it is the youngest, its head included.
        await world.put(session, chain_of(session, range(12)), range(12))
        await world.cache.flush(session.namespaces)
        await world.reopen()
        session = await world.session()
        table = world.cache.table
        rows = table.live_rows()
        order = table.key_low[rows[np.argsort(table.touched[rows])]].tolist()
        expected = [*range(109, 99, -1), *range(209, 199, -1), *range(11, -1, -1)]
        keys = [int(chain_of(session, [number]).keys[0, 0]) for number in expected]
        assert order == keys

    on_nvme(tmp_path, test)


def test_what_leaves_memory_comes_back_from_nvme(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        session = await world.session()
        chains = [range(n * 32, n * 32 + 32) for n in range(16)]  # twice the arena
        for numbers in chains:
            await world.put(session, chain_of(session, numbers), numbers)
            await world.cache.flush(session.namespaces)
        assert world.cache.counters["memory_evicted_pages"] >= 256
        assert world.cache.counters["memory_evicted_before_durable_pages"] == 0
        for numbers in chains:
            got = await world.get(session, chain_of(session, numbers))
            assert got.statuses == [GRANTED] * 32
            assert [got.units[page, 0] for page in range(32)] == [
                body(number, 0, 4096) for number in numbers
            ]

    on_nvme(tmp_path, test)


def test_nvme_loses_tails_first_and_never_more_than_it_must(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        session = await world.session()
        for first in range(0, 640, 32):
            numbers = range(first, first + 32)
            await world.put(session, chain_of(session, numbers), numbers)
            await world.cache.flush(session.namespaces)
        await world.settled()
        world.evict_all()
        table = world.cache.table
        presents = [
            world.present(session, chain_of(session, range(first, first + 32)))
            for first in range(0, 640, 32)
        ]
        assert sum(presents) == table.row_count == int((table.nvme_mask != 0).sum())
        assert sum(presents) >= 256 - 32
        assert presents[-1] == 32

    on_nvme(tmp_path, test, nvme_bytes=MIB)


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
        first = asyncio.ensure_future(world.get(session, chain, units=[0]))
        gate.shut("preadv")
        second = asyncio.ensure_future(world.get(session, chain, units=[1]))
        await eventually(lambda: gate.waiting == 2)
        # Let unit 0 arrive before unit 1: each read waits for its own turn.
        gate.open()
        assert (await first).statuses == [CORRUPT]
        await second
        reservation, statuses = world.reserve(session, chain)
        assert reservation is not None
        assert len(statuses[0]) == 2
        await world.commit(reservation, [(0, unit, body(0, unit, 4096, 2)) for unit in (0, 1)])
        world.cache.reservations.end(reservation)
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


@pytest.mark.parametrize("what", ["delete", "clear"])
def test_what_is_deleted_while_it_is_written_stays_deleted(tmp_path: Path, what: str) -> None:
    gate = Gate()

    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, range(3))
        gate.shut("pwritev")
        await world.put(session, chain, range(3))
        await eventually(lambda: gate.waiting > 0)
        if what == "delete":
            removed: asyncio.Future[Any] = asyncio.ensure_future(world.cache.delete(session, chain))
        else:
            removed = asyncio.ensure_future(world.cache.clear(chain.namespace, None))
        await asyncio.sleep(0.01)
        assert world.present(session, chain) == 0  # at once
        assert not removed.done()  # durably only when the write has come and gone
        gate.open()
        await removed
        await world.reopen(killed=True)
        session = await world.session()
        assert world.present(session, chain_of(session, range(3))) == 0
        assert world.cache.table.row_count == 0

    on_nvme(tmp_path, test, files=gate.files)


def test_what_is_deleted_stays_deleted_after_a_kill(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, range(6))
        await world.put(session, chain, range(6))
        await world.cache.flush(session.namespaces)
        await world.cache.delete(session, chain_of(session, [2, 3]))
        await world.reopen(killed=True)
        session = await world.session()
        assert world.present(session, chain_of(session, range(6))) == 2
        assert world.cache.table.row_count == 4
        assert await world.cache.clear(chain.namespace, None) == 4
        await world.reopen(killed=True)
        assert world.cache.table.row_count == 0
        assert world.store is not None
        assert world.store.used_bytes == 0

    on_nvme(tmp_path, test)


def test_a_page_put_again_after_its_delete_survives(tmp_path: Path) -> None:
    gate = Gate()

    async def test(world: World) -> None:
        session = await world.session()
        chain = chain_of(session, range(3))
        gate.shut("pwritev")
        await world.put(session, chain, range(3))
        await eventually(lambda: gate.waiting > 0)
        removed = asyncio.ensure_future(world.cache.delete(session, chain))
        await asyncio.sleep(0)
        assert (await world.put(session, chain, range(3), version=2) == STORED).all()
        gate.open()
        assert (await removed).tolist() == [DONE] * 3
        await world.cache.flush(session.namespaces)
        await world.reopen(killed=True)
        session = await world.session()
        got = await world.get(session, chain_of(session, range(3)))
        assert got.units == {(page, 0): body(page, 0, 4096, 2) for page in range(3)}

    on_nvme(tmp_path, test, files=gate.files)


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


def test_a_queue_that_does_not_move_stays_bounded(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        session = await world.session()
        assert world.cache.nvme is not None
        for first in range(0, 64 * 200, 64):  # nothing is written: the device hangs
            numbers = range(first, first + 64)
            await world.put(session, chain_of(session, numbers), numbers)
        assert world.cache.nvme.queue_depth <= 2 * 256 + 4096 + 64
        world.start_writing()
        await world.cache.flush(session.namespaces)
        assert world.cache.nvme.queue_depth == 0
        answer = await world.cache.flush(session.namespaces)
        assert (answer.durable_pages, answer.volatile_pages) == (256, 0)

    on_nvme(tmp_path, test, write_behind=False)


def test_pages_in_the_queue_leave_memory_last(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        session = await world.session()
        old = chain_of(session, range(64))
        await world.put(session, old, range(64))
        world.start_writing()
        await world.cache.flush(session.namespaces)
        await world.get(session, old)
        await world.close()  # and from here on nothing is written
        world._write_behind = False  # pyright: ignore[reportPrivateUsage]
        await world.open()
        session = await world.session()
        old = chain_of(session, range(64))
        waiting = range(1000, 1128)
        await world.put(session, chain_of(session, waiting), waiting)
        await world.get(session, old)  # younger, but durable
        more = range(2000, 2100)
        await world.put(session, chain_of(session, more), more)
        assert world.cache.counters["memory_evicted_pages"] > 0
        assert world.cache.counters["memory_evicted_before_durable_pages"] == 0
        world.start_writing()

    on_nvme(tmp_path, test, write_behind=False)


def test_page_is_dropped_after_a_restart_when_a_unit_of_it_is_lost(tmp_path: Path) -> None:
    files = FileOps()

    async def test(world: World) -> None:
        session = await world.session(TWO)
        await world.put(session, chain_of(session, range(4)), range(4))
        await world.cache.flush(session.namespaces)
        assert world.cache.nvme is not None
        assert world.store is not None
        rows = world.cache.table.find(chain_of(session, [2]).keys, session.namespaces[0])
        records = world.cache.nvme._records(rows)  # pyright: ignore[reportPrivateUsage]
        await world.store.forget(records[:1])  # as if the log had lost a record of unit 0
        await world.reopen(killed=True)
        assert world.cache.counters["recovered_pages"] == 3
        assert world.cache.counters["recovered_dropped_pages"] == 1
        await world.settled()
        check_invariants(world.cache)
        session = await world.session(TWO)
        assert world.present(session, chain_of(session, range(4))) == 2
        assert (await world.put(session, chain_of(session, range(4)), range(4)) != MISSING).all()
        assert world.present(session, chain_of(session, range(4))) == 4

    on_nvme(tmp_path, test, files=files)


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
