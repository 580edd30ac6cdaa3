"""How a test of the cache is run: on a world of its own, with the books balanced at its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from tests.cache.invariants import check_invariants
from tests.cache.world import MIB, World, chain_of
from tests.fakes.faulty_files import FaultyFiles

from octavo_server.cache.session import Session
from octavo_server.cache.statuses import (
    STORED,
)

BODIES = "bodies.dat"


def in_memory(test: Callable[[World], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """Runs a test on a cache without NVMe, and balances the books at its end."""

    async def run() -> None:
        async with World(None, **settings) as world:
            await test(world)
            check_invariants(world.cache)

    asyncio.run(run())


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


class Gate:
    """Lets a call on the bodies file wait in its thread until it is opened."""

    def __init__(self) -> None:
        self.files = FaultyFiles()
        self._open = threading.Event()
        self.waiting = 0

    def shut(self, call: str, count: int = 1_000_000) -> None:
        """The next ``count`` calls wait."""
        self._open.clear()
        left = self.waiting + count

        def fault(name: str) -> int | None:
            if name == BODIES and self.waiting < left:
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
