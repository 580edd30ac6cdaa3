"""The NVMe tier behind memory: what goes there, in what order, and what leaves it."""

from __future__ import annotations

from pathlib import Path

from tests.cache.running import on_nvme
from tests.cache.world import MIB, World, body, chain_of

from octavo_server.cache.statuses import (
    GRANTED,
)


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
