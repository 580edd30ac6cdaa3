"""Commit: from a worker's bytes to visible pages."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from octavo_proto.keys import digest_seed, unit_digest
from octavo_server.cache.page_table import Rows
from octavo_server.cache.reservations import Reservation
from octavo_server.cache.statuses import EXPIRED, REJECTED, STORED
from octavo_server.errors import RequestError
from octavo_server.store.arena import StagingRing, copy_and_digest

if TYPE_CHECKING:
    from octavo_server.cache.page_cache import PageCache


COPY_THREADS: Final = 2
"""Threads that share the copies of one commit. Copying and hashing runs at about 8 GB/s on one
and is limited by the memory from the second or third on; other commits want some too."""

PART_BYTES: Final = 32 << 20
"""What a thread copies before it is made visible. Write-behind starts with the first part, while
the rest is still being copied; a part costs the event loop about 0.3 ms and a thread 4 ms."""


@dataclass(frozen=True, slots=True)
class FilledUnits:
    """Units that lie in a staging ring: columns with one row a unit."""

    positions: NDArray[np.int64]
    units: NDArray[np.int64]
    ring_offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Copy:
    """One unit's way from the ring to its place."""

    source_address: int
    target: memoryview
    target_address: int
    seed: int


async def commit(
    cache: PageCache, reservation: Reservation, filled: FilledUnits, ring: StagingRing
) -> NDArray[np.uint8]:
    """See ``PageCache.commit``.

    Raises:
        RequestError: a row names no page or unit of the reservation's chain, or bytes outside
            of the ring. Nothing was done.
    """
    _check(reservation, filled, ring)
    table = cache.table
    statuses = np.full(len(filled.positions), REJECTED, dtype=np.uint8)
    rows = reservation.rows[filled.positions]
    unit_rows = np.where(rows >= 0, table.unit_base[rows] + filled.units, 0)
    matching = (rows >= 0) & (table.units.length[unit_rows] == filled.lengths)
    candidates = np.flatnonzero(matching)
    bits = np.uint64(1) << filled.units.astype(np.uint64)
    begun = candidates[
        cache.reservations.begin_copy(reservation, filled.positions[candidates], bits[candidates])
    ]
    if len(begun):
        copies = _copies(cache, reservation, filled, begun, ring)
        ring.begin_use()
        # Shielded: whoever asked may go away, but a copy that runs is seen to its end.
        work = asyncio.ensure_future(
            _copy_and_publish(cache, reservation, filled, begun, copies, ring)
        )
        statuses[begun] = await asyncio.shield(work)
    return statuses


async def _copy_and_publish(
    cache: PageCache,
    reservation: Reservation,
    filled: FilledUnits,
    begun: NDArray[np.int64],
    copies: list[_Copy],
    ring: StagingRing,
) -> NDArray[np.uint8]:
    """Copies in parts, two at a time, and publishes each as soon as it is whole."""
    statuses = np.full(len(begun), EXPIRED, dtype=np.uint8)
    parts = deque(_parts(copies))

    async def copy_parts() -> None:
        while parts:
            begin, end = parts.popleft()
            rows = begun[begin:end]
            positions, units = filled.positions[rows], filled.units[rows]
            try:
                digests = await cache.io.run(functools.partial(_perform, copies[begin:end]))
            except BaseException:
                cache.reservations.abandon_copy(reservation, positions, units)
                raise
            complete, stored = cache.reservations.end_copy(reservation, positions, units, digests)
            published(cache, complete, int(stored.sum()), int(filled.lengths[rows][stored].sum()))
            statuses[begin:end][stored] = STORED

    try:
        # All are waited for, also when one fails: nothing may still read the ring.
        ends = await asyncio.gather(
            *(copy_parts() for _ in range(COPY_THREADS)), return_exceptions=True
        )
    finally:
        ring.end_use()
    for begin, end in parts:  # both threads failed: nobody came for these
        rows = begun[begin:end]
        cache.reservations.abandon_copy(reservation, filled.positions[rows], filled.units[rows])
    for error in ends:
        if isinstance(error, BaseException):
            raise error
    return statuses


def published(cache: PageCache, complete: Rows, unit_count: int, size_bytes: int) -> None:
    """Counts what was stored and queues complete pages for NVMe."""
    cache.counters.add("put_units_stored", unit_count)
    cache.counters.add("put_bytes", size_bytes)
    cache.counters.add("put_pages_stored", len(complete))
    if cache.nvme is not None:
        cache.nvme.enqueue(complete)


class InlineFill:
    """A reserved unit that is filled piece by piece. End it with ``commit`` or ``abandon``."""

    def __init__(
        self, cache: PageCache, reservation: Reservation, position: int, unit: int
    ) -> None:
        self._cache = cache
        self._reservation = reservation
        self._positions = np.array([position])
        self._units = np.array([unit])
        row = int(reservation.rows[position])
        unit_row = int(cache.table.unit_base[row]) + unit
        self.length = int(cache.table.units.length[unit_row])
        self._seed = seed_of(cache, reservation, row, unit, self.length)
        place = int(cache.table.units.memory_offset[unit_row])
        self._view = cache.memory.arena.view(place, self.length)
        self.filled = 0
        self._over = False
        # A client that stalls in the middle of a unit keeps its place no longer than its
        # reservation lasts.
        reservation.abandon_fills.add(self.abandon)

    def append(self, data: bytes) -> None:
        """The next piece. The caller has checked that it fits."""
        if not self._over:
            self._view[self.filled : self.filled + len(data)] = data
        self.filled += len(data)

    def commit(self) -> int:
        """Makes the unit visible; its status."""
        if self._over:
            return EXPIRED
        digest = np.array([unit_digest(self._view, self._seed)], dtype=np.uint64)
        self._end()
        complete, stored = self._cache.reservations.end_copy(
            self._reservation, self._positions, self._units, digest
        )
        published(self._cache, complete, int(stored.sum()), self.length if stored[0] else 0)
        return STORED if stored[0] else EXPIRED

    def abandon(self) -> None:
        """Gives the unit up, and its place with it."""
        if self._over:
            return
        self._end()
        self._cache.reservations.abandon_copy(self._reservation, self._positions, self._units)

    def _end(self) -> None:
        self._over = True
        self._reservation.abandon_fills.discard(self.abandon)
        self._view.release()


def begin(
    cache: PageCache, reservation: Reservation, position: int, unit: int
) -> InlineFill | None:
    """See ``PageCache.begin_fill``.

    Raises:
        RequestError: there is no such page or unit in the reservation's chain.
    """
    if position >= len(reservation.rows) or unit >= reservation.layout.layout.unit_count:
        raise RequestError(
            f"page {position}, unit {unit}: the reserved chain has {len(reservation.rows)} pages "
            f"of {reservation.layout.layout.unit_count} units"
        )
    bit = np.array([1 << unit], dtype=np.uint64)
    if not cache.reservations.begin_copy(reservation, np.array([position]), bit)[0]:
        return None
    return InlineFill(cache, reservation, position, unit)


def _check(reservation: Reservation, filled: FilledUnits, ring: StagingRing) -> None:
    page_count, unit_count = len(reservation.rows), reservation.layout.layout.unit_count
    for name, column, bound in (
        ("positions", filled.positions, page_count),
        ("units", filled.units, unit_count),
        # Both, for a 64-bit offset may be negative here, and its sum with a length in range.
        ("ring_offsets", filled.ring_offsets, ring.size_bytes),
        ("ring_offsets + lengths", filled.ring_offsets + filled.lengths, ring.size_bytes + 1),
    ):
        if len(column) and int(column.max()) >= bound:
            row = int(np.argmax(column))
            raise RequestError(f"{name}: row {row} is {int(column[row])}, must be below {bound}")
        if len(column) and int(column.min()) < 0:
            raise RequestError(f"{name}: row {int(np.argmin(column))} is beyond any offset")


def _copies(
    cache: PageCache,
    reservation: Reservation,
    filled: FilledUnits,
    begun: NDArray[np.int64],
    ring: StagingRing,
) -> list[_Copy]:
    table, arena = cache.table, cache.memory.arena
    rows = reservation.rows[filled.positions[begun]]
    units = filled.units[begun]
    places = table.units.memory_offset[table.unit_base[rows] + units].tolist()
    sources = (filled.ring_offsets[begun] + ring.address).tolist()
    lengths = filled.lengths[begun].tolist()
    return [
        _Copy(
            source,
            arena.view(place, length),
            arena.address(place),
            seed_of(cache, reservation, row, unit, length),
        )
        for row, unit, place, source, length in zip(
            rows.tolist(), units.tolist(), places, sources, lengths, strict=True
        )
    ]


def seed_of(cache: PageCache, reservation: Reservation, row: int, unit: int, length: int) -> int:
    table = cache.table
    key = table.key_low[row].tobytes() + table.key_high[row].tobytes()
    variant = int(table.variant[row])
    return digest_seed(key, reservation.layout.fingerprint, unit, variant, length)


def _parts(copies: list[_Copy]) -> list[tuple[int, int]]:
    """Half-open ranges of copies that are ``PART_BYTES`` long, or a single unit."""
    parts: list[tuple[int, int]] = []
    begin = size_bytes = 0
    for index, copy in enumerate(copies):
        if size_bytes and size_bytes + len(copy.target) > PART_BYTES:
            parts.append((begin, index))
            begin, size_bytes = index, 0
        size_bytes += len(copy.target)
    parts.append((begin, len(copies)))
    return parts


def _perform(copies: list[_Copy]) -> NDArray[np.uint64]:
    """Runs in a thread; the GIL is free while bytes move."""
    digests = np.empty(len(copies), dtype=np.uint64)
    for index, copy in enumerate(copies):
        digests[index] = copy_and_digest(
            copy.source_address, copy.target, copy.target_address, copy.seed
        )
        copy.target.release()
    return digests
