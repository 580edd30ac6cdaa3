"""Get: leases for the pages of a chain, as they become readable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from octavo_server.cache.arrivals import Waiter
from octavo_server.cache.chains import ChainView
from octavo_server.cache.leases import Hold, Lease
from octavo_server.cache.matching import is_pending, is_present, leading
from octavo_server.cache.page_table import Rows
from octavo_server.cache.session import Session
from octavo_server.cache.statuses import CORRUPT, EXPIRED, GRANTED, MISSING, PENDING, UNAVAILABLE

if TYPE_CHECKING:
    from octavo_server.cache.page_cache import PageCache

FIRST_GRANTS: Final = 32
"""Pages in a stream's first grant: few, so that the worker's copies start early, while the
rest is still being packed."""


@dataclass(frozen=True, slots=True)
class GetPages:
    """Pages that a session wants to read.

    ``units``: unit indices. ``until_s``: when waiting ends, on the clock of the deadlines.
    With a hold, ``chain`` is the hold's.
    """

    chain: ChainView
    hold: Hold | None
    first_position: int
    units: NDArray[np.int32]
    wait_pending: bool
    until_s: float
    lease_s: float


@dataclass(frozen=True, slots=True)
class Grant:
    """Pages that are readable under one lease."""

    lease: Lease
    positions: NDArray[np.int64]
    rows: Rows


@dataclass(frozen=True, slots=True)
class Outcome:
    """A status for each page from ``first_position`` on."""

    statuses: NDArray[np.uint8]


# What is known of each position while a get runs. Waiting ones are pinned by the get.
_UNWANTED, _LOADING, _BEING_WRITTEN, _SETTLED = range(4)


async def get(
    cache: PageCache, session: Session, request: GetPages
) -> AsyncGenerator[Grant | Outcome]:
    """See ``PageCache.get``."""
    reader = _Reader(cache, session, request)
    try:
        while True:
            for positions in reader.readable():
                grant = reader.grant(positions)
                # A caller that stops reading meanwhile (the stream has the pace of its reader)
                # loses its lease in time; what waits behind it is not kept for it either.
                grant.lease.on_expiry = reader.abandon
                yield grant
                grant.lease.on_expiry = None
                if not reader.waits:
                    break
            if not reader.waits or not await reader.something_new():
                break
        yield reader.outcome()
    finally:
        reader.close()


class _Reader:
    """One get: which pages it waits for, and what became of the others."""

    def __init__(self, cache: PageCache, session: Session, request: GetPages) -> None:
        self._cache = cache
        self._session = session
        self._request = request
        self._waiter = Waiter()
        chain, hold = request.chain, request.hold
        table = cache.table
        rows = hold.rows if hold is not None else table.find(chain.keys, chain.namespace)
        self._rows = rows
        self._wanted = np.bitwise_or.reduce(np.uint64(1) << request.units.astype(np.uint64))
        self._state = np.full(len(rows), _UNWANTED, dtype=np.int8)
        self.statuses = np.full(len(rows), MISSING, dtype=np.uint8)
        self._granted_any = False
        present = is_present(cache, session, chain, rows)
        page_count = len(rows) if chain.unlinked else leading(present)
        cache.policy.touch(rows[:page_count][present[:page_count]])
        first = request.first_position
        wanted = np.flatnonzero(present[first:page_count]) + first
        self._state[wanted] = _LOADING
        if request.wait_pending:
            behind = max(first, page_count)
            pending = is_pending(cache, rows[behind:])
            count = len(pending) if chain.unlinked else leading(pending)
            self._state[behind : behind + count][pending[:count]] = _BEING_WRITTEN
        cache.pins.pin(rows[self._waiting])
        if hold is not None:
            cache.leases.release_hold(session, hold.hold_id)  # its pins are this get's now
        # A page that is being written is waited for even where the wanted units are here: it
        # is present when the units of the other ranks are.
        writing = self._state == _BEING_WRITTEN
        self._subscribed = self._rows[writing | (self._waiting & ~self._in_memory())]
        if len(self._subscribed):
            cache.arrivals.subscribe(self._subscribed, self._waiter)
            self._load()
        cache.counters.add("get_calls")
        in_memory = int((self._in_memory() & (self._state == _LOADING)).sum())
        cache.counters.add("get_pages_memory", in_memory)
        cache.counters.add("get_pages_nvme", len(wanted) - in_memory)

    @property
    def waits(self) -> bool:
        """Whether there is a page that may still come."""
        return bool(self._waiting.any())

    @property
    def _waiting(self) -> NDArray[np.bool_]:
        waiting: NDArray[np.bool_] = (self._state == _LOADING) | (self._state == _BEING_WRITTEN)
        return waiting

    def readable(self) -> Iterator[NDArray[np.int64]]:
        """Positions that can be granted now, in groups for one lease each."""
        positions = np.flatnonzero((self._state == _LOADING) & self._in_memory())
        if not self._granted_any and len(positions) > FIRST_GRANTS:
            yield positions[:FIRST_GRANTS]
            positions = positions[FIRST_GRANTS:]
        if len(positions):
            yield positions

    def grant(self, positions: NDArray[np.int64]) -> Grant:
        """Leases pages; their pins go from this get to the lease."""
        rows = self._rows[positions]
        lease = self._cache.leases.lease(self._session, rows, self._request.lease_s)
        self._state[positions] = _SETTLED
        self.statuses[positions] = GRANTED
        self._granted_any = True
        return Grant(lease, positions, rows)

    async def something_new(self) -> bool:
        """Waits until a page arrived or failed; False when the time is up."""
        event = self._waiter.event
        left_s = self._request.until_s - self._cache.deadlines.now()
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                await event.wait()
        except TimeoutError:
            return False
        event.clear()
        self._note_written()
        self._note_failed()
        return True

    def outcome(self) -> Outcome:
        """The statuses, those of pages that did not come in time included."""
        self.statuses[self._state == _LOADING] = UNAVAILABLE
        self.statuses[self._state == _BEING_WRITTEN] = PENDING
        statuses = self.statuses[self._request.first_position :]
        counts = np.bincount(statuses, minlength=16)
        counters = self._cache.counters
        counters.add("get_pages_missing", int(counts[MISSING] + counts[PENDING]))
        counters.add("get_pages_corrupt", int(counts[CORRUPT]))
        counters.add("get_pages_unavailable", int(counts[UNAVAILABLE]))
        return Outcome(statuses)

    def abandon(self) -> None:
        """Gives up what was not granted: its time is over."""
        self.statuses[self._waiting] = EXPIRED
        self.close()

    def close(self) -> None:
        """Lets go of everything that was not granted."""
        if len(self._subscribed):
            self._cache.arrivals.unsubscribe(self._subscribed, self._waiter)
        rows = self._rows[self._waiting]
        self._state[:] = _SETTLED
        self._cache.pins.unpin(rows)

    def _in_memory(self) -> NDArray[np.bool_]:
        in_memory: NDArray[np.bool_] = (
            self._cache.table.memory_mask[self._rows] & self._wanted
        ) == self._wanted
        return in_memory

    def _load(self) -> None:
        """Starts loading what lies on NVMe only."""
        if self._cache.loader is not None:
            rows = self._rows[(self._state == _LOADING) & ~self._in_memory()]
            self._cache.loader.start(rows, self._request.units)

    def _note_written(self) -> None:
        """Pages that were being written may be present now, or not be written any more."""
        positions = np.flatnonzero(self._state == _BEING_WRITTEN)
        if not len(positions):
            return
        rows = self._rows[positions]
        present = is_present(self._cache, self._session, self._request.chain, rows)
        self._state[positions[present]] = _LOADING
        ended = positions[~present & ~is_pending(self._cache, rows)]
        self._give_up(ended, MISSING)
        self._load()

    def _note_failed(self) -> None:
        failed, self._waiter.failed = self._waiter.failed, {}
        for row, status in failed.items():
            positions = np.flatnonzero((self._rows == row) & (self._state == _LOADING))
            self._give_up(positions[~self._in_memory()[positions]], status)

    def _give_up(self, positions: NDArray[np.int64], status: int) -> None:
        self.statuses[positions] = status
        self._state[positions] = _SETTLED
        self._cache.pins.unpin(self._rows[positions])
