"""Reading pages from NVMe straight into the arena: one read per unit however many callers wait."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo_proto.keys import digest_seed
from octavo_proto.limits import KEY_BYTES
from octavo_server.cache.arrivals import Arrivals
from octavo_server.cache.counters import Counters
from octavo_server.cache.matching import leading
from octavo_server.cache.memory_tier import MemoryTier
from octavo_server.cache.page_table import NOWHERE, PageTable, Rows
from octavo_server.cache.pins import Pins
from octavo_server.cache.statuses import CORRUPT, MISSING, UNAVAILABLE
from octavo_server.store.arena import rounded_up
from octavo_server.store.nvme.store import NvmeStore
from octavo_server.store.nvme.transfers import BodyToRead, UnitOutcome

LOADS_MAX: Final = 128
"""Units being read at a time. A few times the depth of the device's queue, so that it never
runs dry; what waits behind it holds no memory yet."""

STARTS_MAX: Final = 32
"""Units whose reads are prepared and begun in one step: twice the device's depth. Preparing all
of ``LOADS_MAX`` first would leave the device idle for milliseconds."""

WORK_OFF_INTERVAL_S: Final = 0.002
"""Completions are worked off at most this often. Each time costs about 0.2 ms whatever the
number, and a fast device completes a unit every 0.1 ms; a single load never waits for it."""

_MEASURED_BYTES: Final = 16 << 20


class Loader:
    """Brings units from NVMe to memory and tells ``Arrivals`` of each page that changed."""

    def __init__(
        self,
        table: PageTable,
        memory: MemoryTier,
        store: NvmeStore,
        pins: Pins,
        arrivals: Arrivals,
        counters: Counters,
        fingerprint_of: Callable[[int], bytes],
        quarantine: Callable[[Rows], None],
    ) -> None:
        self._table: Final = table
        self._memory: Final = memory
        self._store: Final = store
        self._pins: Final = pins
        self._arrivals: Final = arrivals
        self._counters: Final = counters
        self._fingerprint_of: Final = fingerprint_of
        self._quarantine: Final = quarantine
        self._waiting: deque[tuple[int, int]] = deque()  # (page row, unit row)
        self._loading: dict[int, int] = {}  # unit row → page row, waiting ones included
        self._reading = 0
        self._starting = False
        self._short_of_room = False
        self._read: list[BodyToRead] = []
        self._work_off_due = False
        self._worked_off_at = 0.0
        self._busy_since = 0.0
        self._busy_bytes = 0
        self.bytes_per_s: float | None = None  # measured over recent loads

    @property
    def depth(self) -> int:
        """Units that wait for their read or are being read."""
        return len(self._loading)

    @property
    def reading(self) -> int:
        """Units that are being read: these have room, and a place to arrive at."""
        return self._reading

    def start(self, rows: Rows, units: NDArray[np.int32]) -> None:
        """Begins to load what is missing of the given units (indices) of pages on NVMe.

        The pages must be pinned by the caller for as long as it waits.
        """
        table = self._table
        bits = np.uint64(1) << units.astype(np.uint64)
        missing = (table.memory_mask[rows][:, None] & bits[None, :]) == 0
        unit_rows = table.unit_rows(rows, units)
        pages = np.broadcast_to(rows[:, None], unit_rows.shape)
        for row, unit_row in zip(pages[missing].tolist(), unit_rows[missing].tolist(), strict=True):
            if unit_row not in self._loading:
                self._loading[unit_row] = row
                self._waiting.append((row, unit_row))
                # A pin of its own: the caller may go away while the device still writes here.
                table.pins[row] += 1
        self.advance()

    def advance(self) -> None:
        """Starts waiting reads as far as depth and room allow. Called when either grew."""
        if self._starting:  # giving up on a page unpins it, which leads back here
            return
        self._starting = True
        try:
            while self._waiting and self._reading < LOADS_MAX and self._start_some():
                pass
        finally:
            self._starting = False

    def _start_some(self) -> bool:
        """Starts reads or gives up on them; False where it takes more room to go on.

        Room is given in the order of asking. Otherwise the small units of many pages could fill
        memory, and wait there for large ones of the same pages that find no room any more.
        """
        count = min(len(self._waiting), LOADS_MAX - self._reading, STARTS_MAX)
        if self._short_of_room:
            count = 1  # what stands first, until that has got its place
        table = self._table
        batch = [self._waiting.popleft() for _ in range(count)]
        # Withdrawn (quarantined, deleted) since it was asked for: nothing to read any more.
        gone = [item for item in batch if table.units.nvme_offset[item[1]] == NOWHERE]
        if gone:
            batch = [item for item in batch if table.units.nvme_offset[item[1]] != NOWHERE]
            self._give_up(gone)
        unit_rows = np.array([unit_row for _, unit_row in batch], dtype=np.int32)
        places = self._memory.place(table.units.length[unit_rows])
        placed = leading(places != NOWHERE)
        self._short_of_room = placed < len(batch)
        behind = places[placed:]
        self._memory.arena.slots.free(behind[behind != NOWHERE])
        self._waiting.extendleft(reversed(batch[placed:]))
        rows = np.array([row for row, _ in batch[:placed]], dtype=np.int32)
        unit_rows, places = unit_rows[:placed], places[:placed]
        table.units.memory_offset[unit_rows] = places
        bodies = self._bodies(rows, unit_rows, places)
        if not self._reading:
            self._busy_since, self._busy_bytes = time.monotonic(), 0
        self._reading += len(bodies)
        if bodies:
            self._store.read(bodies, self._arrived)
        return not self._short_of_room

    def _measure(self, size_bytes: int) -> None:
        """Keeps ``bytes_per_s``: a moving average over spells of at least 16 MiB."""
        self._busy_bytes += size_bytes
        now = time.monotonic()
        if self._busy_bytes >= _MEASURED_BYTES and now > self._busy_since:
            rate = self._busy_bytes / (now - self._busy_since)
            self.bytes_per_s = 0.7 * self.bytes_per_s + 0.3 * rate if self.bytes_per_s else rate
            self._busy_since, self._busy_bytes = now, 0

    def _give_up(self, items: list[tuple[int, int]]) -> None:
        for _, unit_row in items:
            del self._loading[unit_row]
        rows = np.array([row for row, _ in items], dtype=np.int32)
        self._arrivals.failed(rows, MISSING)
        self._pins.unpin(rows)

    def _bodies(
        self, rows: Rows, unit_rows: NDArray[np.int32], places: NDArray[np.int64]
    ) -> list[BodyToRead]:
        """Units to read to ``places``; ``rows`` are their pages."""
        table, units = self._table, self._table.units
        keys = np.column_stack((table.key_low[rows], table.key_high[rows])).tobytes()
        columns = zip(
            unit_rows.tolist(),
            places.tolist(),
            units.nvme_offset[unit_rows].tolist(),
            units.length[unit_rows].tolist(),
            units.digest[unit_rows].tolist(),
            (unit_rows - table.unit_base[rows]).tolist(),
            table.variant[rows].tolist(),
            map(self._fingerprint_of, table.layout[rows].tolist()),
            range(0, len(keys), KEY_BYTES),
            strict=True,
        )
        return [
            BodyToRead(
                offset=offset,
                length=length,
                view=self._memory.arena.view(place, rounded_up(length)),
                seed=digest_seed(keys[key : key + KEY_BYTES], fingerprint, unit, variant, length),
                digest=digest,
                tag=unit_row,
            )
            for unit_row, place, offset, length, digest, unit, variant, fingerprint, key in columns
        ]

    def _arrived(self, bodies: list[BodyToRead]) -> None:
        """Collects what has been read; a burst of single completions is worked off together."""
        self._read += bodies
        if not self._work_off_due:
            self._work_off_due = True
            loop = asyncio.get_running_loop()
            loop.call_at(self._worked_off_at + WORK_OFF_INTERVAL_S, self._work_off)

    def _work_off(self) -> None:
        self._work_off_due = False
        self._worked_off_at = asyncio.get_running_loop().time()
        bodies, self._read = self._read, []
        table = self._table
        self._reading -= len(bodies)
        self._measure(sum(body.length for body in bodies))
        unit_rows = np.array([body.tag for body in bodies], dtype=np.int32)
        rows = np.array([self._loading.pop(int(unit)) for unit in unit_rows], dtype=np.int32)
        good = np.array([body.outcome is UnitOutcome.OK for body in bodies], dtype=np.bool_)
        # Deleted or quarantined while it was read: its slot may have been given to another
        # page by then, and what was found there is no fault of the device.
        gone = ~good & (table.units.nvme_offset[unit_rows] == NOWHERE)
        corrupt = np.array([body.outcome is UnitOutcome.CORRUPT for body in bodies], np.bool_)
        corrupt &= ~gone
        pages, first = np.unique(rows[good], return_inverse=True)
        masks = table.memory_mask[pages]
        bits = np.uint64(1) << (unit_rows[good] - table.unit_base[rows[good]]).astype(np.uint64)
        np.bitwise_or.at(masks, first, bits)
        table.set_memory_mask(pages, masks)
        self._memory.give_back(unit_rows[~good])
        self._counters.add("nvme_loaded_units", int(good.sum()))
        self._counters.add("nvme_load_failed_units", int((~good).sum()))
        self._arrivals.changed(pages)
        self._arrivals.failed(rows[corrupt], CORRUPT)
        self._arrivals.failed(rows[gone], MISSING)
        self._arrivals.failed(rows[~good & ~corrupt & ~gone], UNAVAILABLE)
        if corrupt.any():
            self._quarantine(np.unique(rows[corrupt]))
        self._pins.unpin(rows)
        self.advance()
