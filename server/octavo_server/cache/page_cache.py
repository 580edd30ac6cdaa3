"""The whole story: how a node matches, reads, fills and forgets pages.

A page is a row of the page table. To *put* one, a session reserves it (its units get places
that nobody can see), fills the places, and commits: the bytes are there before the page is.
A complete page is found by its key, and is queued for NVMe at once. To *get* one, a session
leases it: pages in memory are granted now, those on NVMe are loaded first, those being written
may be waited for. A leased page keeps its place. When room is needed, pages that nobody holds
leave memory, and leave the node unless they lie on NVMe too; chains go from their tail.

Everything here runs on the event loop and only moves numbers; bytes move in threads. Between
two awaits the columns agree with each other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo_server.cache import filling, getting, matching, removing, reserving, retaining
from octavo_server.cache.arrivals import Arrivals
from octavo_server.cache.chains import ChainView
from octavo_server.cache.counters import Counters
from octavo_server.cache.deadlines import Deadlines
from octavo_server.cache.hints import Conversations
from octavo_server.cache.keeping import Keeping, TierSlabs
from octavo_server.cache.leases import Hold, Leases
from octavo_server.cache.lifetimes import Lifetimes
from octavo_server.cache.limits import CacheLimits
from octavo_server.cache.loader import Loader
from octavo_server.cache.memory_tier import MemoryTier
from octavo_server.cache.nvme_tier import NvmeTier
from octavo_server.cache.page_table import PageTable
from octavo_server.cache.pins import Pins
from octavo_server.cache.recovering import recover_pages
from octavo_server.cache.registry import Registry
from octavo_server.cache.reservations import Reservation, Reservations
from octavo_server.cache.session import Session
from octavo_server.eviction.policy import EvictionPolicy
from octavo_server.store.arena import Arena, StagingRing
from octavo_server.store.io_pool import IoPool
from octavo_server.store.nvme.store import NvmeStore


@dataclass(frozen=True, slots=True)
class FlushAnswer:
    """What a flush left: pages in memory that would, and would not, survive ``kill -9``."""

    durable_pages: int
    volatile_pages: int


class PageCache:
    """The pages of one node. Made by the assembly; ``close`` ends its transfers."""

    def __init__(
        self,
        arena: Arena,
        store: NvmeStore | None,
        registry: Registry,
        policy_of: Callable[[PageTable], EvictionPolicy],
        io: IoPool,
        limits: CacheLimits,
        now: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.limits: Final = limits
        self.registry: Final = registry
        self.counters: Final = Counters()
        self.table: Final = PageTable()
        self.deadlines: Final = Deadlines(now)
        self.arrivals: Final = Arrivals()
        self.io: Final = io
        self.policy: Final = policy_of(self.table)
        self.pins: Final = Pins(self.table)
        self.lifetimes: Final = Lifetimes(self.table, wall_s)
        units = self.table.units
        tiers = [TierSlabs(units.memory_offset, arena.slots)]
        if store is not None:
            tiers.append(TierSlabs(units.nvme_offset, store.slots))
        self.keeping: Final = Keeping(self.table, tiers, limits.pin_share_max, now)
        self.conversations: Final = Conversations(now, self.counters)
        self.memory: Final = MemoryTier(self.table, arena, self.policy, self.counters)
        self.leases: Final = Leases(self.pins, self.deadlines, limits, self.counters)
        self.reservations: Final = Reservations(
            self.table,
            self.memory,
            self.pins,
            self.arrivals,
            self.deadlines,
            limits,
            self.counters,
        )
        self.nvme: NvmeTier | None = None
        self.loader: Loader | None = None
        if store is not None:
            self.nvme = NvmeTier(
                self.table, self.memory, store, self.policy, self.pins, self.counters
            )
            self.loader = Loader(
                self.table,
                self.memory,
                store,
                self.pins,
                self.arrivals,
                self.counters,
                registry.fingerprint,
                lambda rows: removing.quarantine(self, rows),
            )
            recover_pages(self, store.take_recovered())
            self.pins.on_room = self.loader.advance
        self.pins.on_last_unpin = lambda rows: removing.let_go(self, rows)

    # Reading

    def match(self, session: Session, chain: ChainView) -> matching.Match:
        """The longest present prefix. Leases nothing and touches nothing."""
        return matching.match(self, session, chain)

    def hold(
        self,
        session: Session,
        chain: ChainView,
        match: matching.Match,
        duration_s: float,
    ) -> Hold | None:
        """Pins what matched and starts loading what of it lies on NVMe; None if nothing can be
        held. Raises LimitReached.
        """
        return matching.hold(self, session, chain, match, duration_s)

    def get(
        self, session: Session, request: getting.GetPages
    ) -> AsyncGenerator[getting.Grant | getting.Outcome]:
        """Grants as pages become readable; the last item is the outcome, a status a page."""
        return getting.get(self, session, request)

    # Writing

    def reserve(
        self, session: Session, request: reserving.ReservePages
    ) -> tuple[Reservation | None, NDArray[np.uint8]]:
        """The right to fill what is missing of a chain, and a status for each unit asked for."""
        return reserving.reserve(self, session, request)

    async def commit(
        self, reservation: Reservation, units: filling.FilledUnits, ring: StagingRing
    ) -> NDArray[np.uint8]:
        """Copies units from the session's ring and makes them visible; a status for each."""
        return await filling.commit(self, reservation, units, ring)

    def begin_fill(
        self, reservation: Reservation, position: int, unit: int
    ) -> filling.InlineFill | None:
        """A reserved unit to be filled piece by piece; None if it is not to be had."""
        return filling.begin(self, reservation, position, unit)

    # Staying

    def pin_offered(self, request: reserving.ReservePages) -> int:
        """Pins what was just reserved, or was there, if that is wished; how many pages had no room
        in what pins may keep."""
        return retaining.pin_offered(self, request.chain, request.positions, request.wish)

    def retain(
        self, session: Session, chain: ChainView, wish: retaining.Retention, *, unpin: bool = False
    ) -> NDArray[np.uint8]:
        """Pins present pages, ends their pins, lets them expire later; a status for each."""
        return retaining.retain(self, session, chain, wish, unpin=unpin)

    # Forgetting

    async def delete(self, session: Session, chain: ChainView) -> NDArray[np.uint8]:
        """Removes pages from every tier; durable when it returns. A status for each."""
        return await removing.delete(self, session, chain)

    async def clear(self, namespace: int, layout: int | None) -> int:
        """Removes a namespace's pages, or one layout's. They are gone at once, and durably when
        it returns. How many there were.
        """
        return await removing.clear(self, namespace, layout)

    def end_session(self, session: Session) -> None:
        """Ends all that a session holds."""
        session.closed = True
        self.leases.end_session(session)
        self.reservations.end_session(session)

    # Durability

    async def flush(self, namespaces: tuple[int, ...]) -> FlushAnswer:
        """Waits until what was put before is durable or given up."""
        synced = True
        if self.nvme is not None:
            await self.nvme.settle()
            synced = await self.nvme.store.flush()
        table = self.table
        rows = table.live_rows()
        rows = rows[np.isin(table.namespace[rows], namespaces) & ~table.withdrawn[rows]]
        full = table.full_mask[rows]
        durable = (table.nvme_mask[rows] == full) & synced
        in_memory = table.memory_mask[rows] == full
        return FlushAnswer(int((in_memory & durable).sum()), int((in_memory & ~durable).sum()))

    async def close(self) -> None:
        """Ends transfers under way. The store and the arena are the assembly's to close."""
        if self.nvme is not None:
            await self.nvme.close()

    def run_due(self) -> None:
        """Ends what has run out by now. To be called a few times a second."""
        self.deadlines.run_due()
        self.keeping.run_due()
        removing.expire(self, self.lifetimes.take_due())

    async def run_deadlines(self) -> None:
        """Expires leases, holds, reservations, sessions, pins and pages until cancelled."""
        while True:
            self.run_due()
            await asyncio.sleep(0.05)
