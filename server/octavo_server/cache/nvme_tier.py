"""The NVMe tier as the cache sees it: write-behind, withdrawal and making room.

Every complete page is queued for NVMe at once and written in the order of its arrival, a few
batches at a time. A page keeps its place in memory while it is being written. The queue is
bounded by what memory holds: it is a column of the page table and a list of row numbers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo_server.cache.counters import Counters
from octavo_server.cache.lifetimes import moments_to_store, stored_moments
from octavo_server.cache.memory_tier import MemoryTier
from octavo_server.cache.page_table import NOWHERE, PageTable, Rows
from octavo_server.cache.pins import Pins
from octavo_server.cache.reclaim import NO_ROWS, Reclaimer, TierColumns
from octavo_server.eviction.policy import EvictionPolicy
from octavo_server.store.arena import rounded_up
from octavo_server.store.nvme.health import Room
from octavo_server.store.nvme.records import RECORD, Kind, Records
from octavo_server.store.nvme.store import NvmeStore

_log = logging.getLogger(__name__)

T = TypeVar("T")

_BATCH_UNITS: Final = 32
_BATCHES_MAX: Final = 4
"""Units a write batch, and batches at a time: enough to keep a device's queue full while the
log is appended to; more would only pin more memory."""

_STALE_MAX: Final = 4096
"""Queued rows beyond twice the pages there are, from which stale ones are taken out."""

RETRY_S: Final = 10.0
"""How long after a failed write the page is queued again, if the store takes writes by then."""


class NvmeTier:
    """Writes pages behind their puts and takes them off the device again."""

    def __init__(
        self,
        table: PageTable,
        memory: MemoryTier,
        store: NvmeStore,
        policy: EvictionPolicy,
        pins: Pins,
        counters: Counters,
    ) -> None:
        self.store: Final = store
        self._table: Final = table
        self._memory: Final = memory
        self._pins: Final = pins
        self._counters: Final = counters
        columns = TierColumns(
            mask=table.nvme_mask,
            children=table.nvme_children,
            place=table.units.nvme_offset,
            other_mask=table.memory_mask,
            other_children=table.memory_children,
        )
        self._reclaimer: Final = Reclaimer(table, columns, store.slots, policy)
        self._queue: deque[Rows] = deque()
        self._queued_total = 0  # rows ever queued; with the next one a moment of the queue
        self._settled_total = 0  # rows that left the queue, whatever became of them
        self._in_flight = 0
        self._left_behind = False  # a page in memory was not written, for whatever reason
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writes: dict[asyncio.Task[None], Rows] = {}

    @property
    def queue_depth(self) -> int:
        """Pages that wait or are being written."""
        return self._queued_total - self._settled_total

    def enqueue(self, rows: Rows) -> None:
        """Pages to write, complete in memory. Those on NVMe or in the queue already are left."""
        table = self._table
        rows = rows[~table.queued[rows] & (table.nvme_mask[rows] == 0) & ~table.withdrawn[rows]]
        if not len(rows):
            return
        table.queued[rows] = True
        self._queue.append(rows)
        self._queued_total += len(rows)
        if self.queue_depth > 2 * table.row_count + _STALE_MAX:
            self._drop_stale()
        self._wake.set()

    async def run(self) -> None:
        """Writes what is queued until cancelled. Its end is a fault of the node."""
        while True:
            try:
                async with asyncio.timeout(RETRY_S if self._left_behind else None):
                    await self._wake.wait()
            except TimeoutError:
                self._queue_what_was_left_behind()
            self._wake.clear()
            while self._queue and self._in_flight < _BATCHES_MAX:
                rows, taken = self._next_batch()
                self._in_flight += 1
                self._writes[self._start(self._write(rows, taken))] = rows

    def _queue_what_was_left_behind(self) -> None:
        """Pages whose write failed and that are still in memory get another try."""
        if self.store.room is not Room.AVAILABLE:
            return
        self._left_behind = False
        table = self._table
        rows = table.live_rows()
        self.enqueue(rows[table.memory_mask[rows] == table.full_mask[rows]])

    async def settle(self) -> None:
        """Waits until everything queued before this call was written or given up."""
        moment = self._queued_total
        # Batches end out of order, so the count alone may include rows queued after the call;
        # waiting for a moment at which nothing older is left needs the queue to have run past
        # it, and every batch in flight then to have ended once.
        while self._settled_total < moment:
            self._settled.clear()
            await self._settled.wait()
        pending = [task for task in self._tasks if not task.done()]
        if pending:
            await asyncio.wait(pending)

    def withdraw(self, rows: Rows, *, deleted: bool = False) -> asyncio.Task[bool] | None:
        """Takes pages off NVMe: from now on they are not found there.

        Their slots are free again when the log says so too; then the task ends. A read that is
        under way may find other bytes there by then, and fails its check. ``deleted``: somebody
        asked for it, and it must be true after a crash as well.
        """
        table = self._table
        rows = rows[table.nvme_mask[rows] != 0]
        if not len(rows):
            return None
        records = self._records(rows)
        _, units = table.expanded(rows)
        table.set_nvme_mask(rows, np.zeros(len(rows), dtype=np.uint64))
        table.units.nvme_offset[units] = NOWHERE
        return self._start(self._forget(records, deleted=deleted))

    def log_again(self, rows: Rows) -> None:
        """Writes down what changed about pages on NVMe; their bodies stay where they are.

        If the device does not take it, what it knew before holds after a restart.
        """
        if len(rows):
            self._start(self.store.log_units(self._records(rows)))

    def writes_of(self, rows: Rows) -> tuple[asyncio.Task[None], ...]:
        """Writes under way that any of these pages are part of."""
        return tuple(task for task, batch in self._writes.items() if np.isin(batch, rows).any())

    def forget_records(self, records: Records) -> None:
        """Takes units off NVMe that no row stands for."""
        self._start(self._forget(records))

    async def close(self) -> None:
        """Waits for writes and withdrawals under way."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _start(self, coroutine: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("an NVMe transfer failed unexpectedly", exc_info=task.exception())

    def _drop_stale(self) -> None:
        """Takes out of the queue what was evicted while it waited: a device that hangs must not
        let it grow with each put."""
        waiting = np.concatenate(list(self._queue))
        _, first = np.unique(waiting, return_index=True)
        kept = waiting[np.sort(first)]
        kept = kept[self._table.queued[kept]]
        self._queue = deque([kept] if len(kept) else [])
        self._settled_total += len(waiting) - len(kept)
        self._settled.set()

    def _next_batch(self) -> tuple[Rows, int]:
        """Rows to write now, and how many left the queue for them."""
        table = self._table
        chosen: list[Rows] = []
        unit_count = taken = 0
        while self._queue and unit_count < _BATCH_UNITS:
            rows = self._queue.popleft()
            room = max(1, (_BATCH_UNITS - unit_count) // max(1, int(table.unit_count[rows[0]])))
            if len(rows) > room:
                self._queue.appendleft(rows[room:])
                rows = rows[:room]
            taken += len(rows)
            # A row may have been evicted, withdrawn or even reused since it was queued.
            rows = rows[
                table.queued[rows]
                & ~table.withdrawn[rows]
                & (table.unit_count[rows] != 0)
                & (table.memory_mask[rows] == table.full_mask[rows])
                & (table.nvme_mask[rows] == 0)
            ]
            # Each once and in the order of the chain: it lies so on the device, and is read with
            # few calls.
            _, first = np.unique(rows, return_index=True)
            rows = rows[np.sort(first)]
            table.queued[rows] = False
            unit_count += int(table.unit_count[rows].sum())
            chosen.append(rows)
        self._pins.pin(batch := np.concatenate(chosen) if chosen else NO_ROWS)
        return batch, taken

    async def _write(self, rows: Rows, taken: int) -> None:
        try:
            await self._write_pinned(rows)
        finally:
            task = asyncio.current_task()
            assert task is not None
            del self._writes[task]
            self._pins.unpin(rows)
            self._in_flight -= 1
            self._settled_total += taken
            self._settled.set()
            self._wake.set()

    async def _write_pinned(self, rows: Rows) -> None:
        table, store = self._table, self.store
        owners, units = table.expanded(rows)
        lengths = table.units.length[units]
        offsets = await self._place(lengths)
        # A page is written whole or not at all.
        unplaced = np.zeros(len(rows), dtype=np.bool_)
        unplaced[owners[offsets == NOWHERE]] = True
        store.free(offsets[unplaced[owners] & (offsets != NOWHERE)])
        keep = ~unplaced[owners]
        owners, units, offsets, lengths = owners[keep], units[keep], offsets[keep], lengths[keep]
        failed = unplaced
        if len(units):
            records = self._records_of(rows, owners, units, offsets)
            places = table.units.memory_offset[units].tolist()
            bodies = [
                self._memory.arena.view(place, rounded_up(length))
                for place, length in zip(places, lengths.tolist(), strict=True)
            ]
            written = await store.write(records, bodies, lambda: ~table.withdrawn[rows][owners])
            missed = unplaced.copy()
            missed[owners[~written]] = True
            # Withdrawn while it was written: it must not come back with a restart.
            failed, gone = missed & ~table.withdrawn[rows], missed | table.withdrawn[rows]
            table.units.nvme_offset[units] = np.where(gone[owners], NOWHERE, offsets)
            kept = rows[~gone]
            table.set_nvme_mask(kept, table.full_mask[kept])
            told = stored_moments(records["expires_ms"])
            late = told != table.expires_ms[rows[owners]]  # wished otherwise while it was written
            self.log_again(np.unique(rows[owners[late & ~gone[owners]]]))
            spoiled = gone[owners]
            if spoiled.any():
                logged = records[spoiled & written]
                store.free(offsets[spoiled & ~written])
                await self._forget(logged)
        self._counters.add("nvme_written_pages", int((~failed).sum()))
        self._counters.add("nvme_write_failed_pages", int(failed.sum()))
        self._left_behind |= bool(failed.any())

    async def _place(self, lengths: NDArray[np.uint32]) -> NDArray[np.int64]:
        """A slot for each unit, evicting others as needed; NOWHERE where there is no room."""
        offsets = self.store.allocate(lengths)
        while (offsets == NOWHERE).any() and self.store.room is Room.AVAILABLE:
            missing = np.flatnonzero(offsets == NOWHERE)
            victims = self._reclaimer.victims(int(lengths[missing[0]]), len(missing))
            if not len(victims):
                break
            assert not self._table.kept[victims].any(), "a pinned page was about to be evicted"
            self._counters.add("nvme_evicted_pages", len(victims))
            forgotten = self.withdraw(victims)
            self._table.drop_unused(victims)
            if forgotten is not None:
                await asyncio.shield(forgotten)
            offsets[missing] = self.store.allocate(lengths[missing])
        return offsets

    async def _forget(self, records: Records, *, deleted: bool = False) -> bool:
        """Withdraw before free, in the log too. Whether the log has it; if not, the store tries
        again with whatever it logs next, and until then a restart may bring the units back."""
        logged = True
        if len(records):
            logged = await self.store.forget(records, deleted=deleted)
            self.store.free(records["offset"].astype(np.int64))
        return logged

    def _records(self, rows: Rows) -> Records:
        owners, units = self._table.expanded(rows)
        return self._records_of(rows, owners, units, self._table.units.nvme_offset[units])

    def _records_of(
        self,
        rows: Rows,
        owners: NDArray[np.int64],
        units: NDArray[np.int32],
        offsets: NDArray[np.int64],
    ) -> Records:
        table = self._table
        pages = rows[owners]
        records = np.zeros(len(units), dtype=RECORD)
        records["kind"] = Kind.PUT
        records["unit"] = units - table.unit_base[pages]
        records["unit_count"] = table.unit_count[pages]
        records["variant"] = table.variant[pages]
        records["layout"] = table.layout[pages]
        records["namespace"] = table.namespace[pages]
        records["position"] = table.depth[pages]
        records["key"][:, 0] = table.key_low[pages]
        records["key"][:, 1] = table.key_high[pages]
        parents = table.parent[pages]
        linked = parents >= 0
        records["parent"][linked, 0] = table.key_low[parents[linked]]
        records["parent"][linked, 1] = table.key_high[parents[linked]]
        records["expires_ms"] = moments_to_store(table.expires_ms[pages])
        records["offset"] = offsets
        records["length"] = table.units.length[units]
        records["digest"] = table.units.digest[units]
        return records
