"""What lies on NVMe after a restart, and what must not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cache.invariants import check_invariants
from tests.cache.running import Gate, on_nvme
from tests.cache.world import TWO, World, body, chain_of, eventually

from octavo_server.cache.statuses import (
    DONE,
    MISSING,
    STORED,
)


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


def test_page_is_dropped_after_a_restart_when_a_unit_of_it_is_lost(tmp_path: Path) -> None:
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

    on_nvme(tmp_path, test)
