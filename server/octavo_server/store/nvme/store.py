"""The NVMe store of one node: places, writes, reads and remembers unit bodies.

A unit is written in three steps that a reader of this file should see as such: ``allocate``
gives it a slot, ``write`` brings its body there and then its PUT record into the log, and only
then may anybody be told of it. It goes in three as well: the caller withdraws it, ``forget``
logs that, and only then ``free`` gives the slot to others.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo_proto.layout import Layout
from octavo_server.store.file_ops import FileOps
from octavo_server.store.io_pool import IoPool
from octavo_server.store.nvme.config import NvmeConfig
from octavo_server.store.nvme.health import (
    ReadWatch,
    Room,
    WriteBreaker,
)
from octavo_server.store.nvme.log import GroupCommit
from octavo_server.store.nvme.opening import OpenedFiles, open_files
from octavo_server.store.nvme.records import (
    NO_OFFSET,
    RECORD,
    Kind,
    Records,
    padded_bytes,
    store_seed,
)
from octavo_server.store.nvme.replay import LogEnd
from octavo_server.store.nvme.transfers import (
    BodyToRead,
    BodyToWrite,
    ReadRequest,
    UnitOutcome,
    WriteRequest,
    adjacent_runs,
    runs_to_read,
)
from octavo_server.store.nvme.upkeep import Upkeep
from octavo_server.store.slabs import SlabAllocator, sizes_of_slots

T = TypeVar("T")

ReadSink = Callable[[list[BodyToRead]], None]


class NvmeStore:
    """Made by ``NvmeStore.open``. All methods run on the event loop of its ``IoPool``."""

    def __init__(self, config: NvmeConfig, io: IoPool, files: FileOps, opened: OpenedFiles) -> None:
        self.config: Final = config
        self.store_id: Final = opened.store_id
        self.registry: Final = opened.registry
        self.counters: Final = opened.counters
        self.unit_count = len(opened.recovery.live)
        """Slots in use."""
        self._io = io
        self._lock_fd = opened.lock_fd
        self._bodies = opened.bodies
        self._slabs = opened.slabs
        self._recovered: Records | None = opened.recovery.live
        self._read_lane = io.lane("nvme-read", config.read_depth)
        self._write_lane = io.lane("nvme-write", config.write_depth)
        self._commit = GroupCommit(
            opened.recovery.log,
            io.lane("nvme-log", 1),
            record_count=opened.recovery.log_record_count,
            on_rotated=self._rotated,
            on_result=self._appended,
        )
        self._under_way: set[asyncio.Future[Any]] = set()
        self._reads_in_flight = 0  # calls, those that wait for a thread included
        self._idle: asyncio.Future[None] | None = None
        self._breaker = WriteBreaker()
        self._read_watch = ReadWatch()
        self._guard = opened.guard
        self._loop = asyncio.get_running_loop()
        self._upkeep = Upkeep(
            config.directory,
            io,
            files,
            seed=store_seed(opened.store_id),
            bodies=opened.bodies,
            guard=self._guard,
            counters=opened.counters,
            layouts=opened.registry.layouts,
        )
        self._released = False

    @classmethod
    async def open(cls, config: NvmeConfig, io: IoPool, files: FileOps | None = None) -> NvmeStore:
        """The store in ``config.directory``, made if the directory is empty or missing.

        Raises:
            StoreError: it can't be opened; the message says why and what to do.
        """
        files = files or FileOps()
        return cls(config, io, files, await open_files(config, io, files))

    # What it holds

    @property
    def namespaces(self) -> Mapping[int, str]:
        return self.registry.namespaces

    @property
    def layouts(self) -> Mapping[int, Layout]:
        return self.registry.layouts

    @property
    def slots(self) -> SlabAllocator:
        """Where its slots lie. For reading: slots come from ``allocate`` and go to ``free``."""
        return self._slabs

    @property
    def capacity_bytes(self) -> int:
        return self._slabs.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of slots in use, padding included."""
        return self._slabs.used_bytes

    def take_recovered(self) -> Records:
        """PUT records of an earlier run, oldest first. A second call answers none."""
        recovered, self._recovered = self._recovered, None
        return np.empty(0, dtype=RECORD) if recovered is None else recovered

    async def register_namespace(self, name: str) -> int:
        """See ``Registry.register_namespace``."""
        return await self.registry.register_namespace(name)

    async def register_layout(self, namespace_number: int, layout: Layout) -> int:
        """See ``Registry.register_layout``."""
        return await self.registry.register_layout(namespace_number, layout)

    async def drop_layout(self, number: int) -> None:
        """See ``Registry.drop_layout``. The caller frees the slots; no FORGET is needed."""
        await self.registry.drop_layout(number)

    # Slots

    @property
    def room(self) -> Room:
        """Whether ``allocate`` answers no room for a reason that evicting would not change."""
        if self._breaker.paused:
            return Room.PAUSED
        return Room.GUARDED if self._guard.near_full else Room.AVAILABLE

    def allocate(self, lengths: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Offsets of slots for bodies of ``lengths``; NO_OFFSET where there is no room."""
        self._upkeep.look_at_space()
        offsets = np.full(len(lengths), NO_OFFSET, dtype=np.int64)
        slot_bytes = sizes_of_slots(lengths)
        budget = self._guard.budget_bytes(self._slabs.used_bytes)
        fitting = int(np.searchsorted(np.cumsum(slot_bytes), budget, side="right"))
        admitted = self._breaker.admit(fitting, self._loop.time())
        used_before = self._slabs.used_bytes
        for size_bytes in np.unique(slot_bytes[:admitted]).tolist():
            rows = np.flatnonzero(slot_bytes[:admitted] == size_bytes)
            found = self._slabs.allocate(size_bytes, len(rows))
            offsets[rows[: len(found)]] = found
            self.unit_count += len(found)
        self._guard.begun(self._slabs.used_bytes - used_before)
        return offsets

    def free(self, offsets: NDArray[np.int64]) -> None:
        """Gives slots back. Their units were forgotten, or never written; nobody reads them."""
        self._slabs.free(offsets)
        self.unit_count -= len(offsets)

    # Writing

    async def write(
        self,
        records: Records,
        bodies: Sequence[memoryview],
        still_wanted: Callable[[], NDArray[np.bool_]] | None = None,
    ) -> NDArray[np.bool_]:
        """Writes bodies to the offsets in their records: which of them survive ``kill -9``.

        ``still_wanted`` is asked when the bodies are written: units that were deleted meanwhile
        are not logged. Logged later than the same unit that was put again, they would stand for
        it until they are forgotten, and it would be lost with them.

        ``bodies`` are padded to 4 KiB and must not change until this returns, which it does not
        before the last thread has let go of them, cancelled or not. The slots of units that are
        not stored are the caller's to free.
        """
        return await self._see_through(self._write(records, bodies, still_wanted))

    async def _write(
        self,
        records: Records,
        bodies: Sequence[memoryview],
        still_wanted: Callable[[], NDArray[np.bool_]] | None,
    ) -> NDArray[np.bool_]:
        stored = np.zeros(len(records), dtype=np.bool_)
        if not len(records):
            return stored
        done: asyncio.Future[None] = self._loop.create_future()
        left = len(records)

        def written(requests: list[WriteRequest]) -> None:
            nonlocal left
            for request in requests:
                for unit in request.units:
                    self._note_written(unit, unit.error or request.error)
                    stored[unit.row] = unit.error is None and request.error is None
                left -= len(request.units)
            if not left and not done.done():
                done.set_result(None)

        places = zip(records["offset"].tolist(), records["length"].tolist(), bodies, strict=True)
        units = [
            BodyToWrite(offset, length, view, row)
            for row, (offset, length, view) in enumerate(places)
        ]
        self._write_lane.submit(
            [WriteRequest(self._bodies, run, written) for run in adjacent_runs(units)]
        )
        await done
        if still_wanted is not None:
            stored &= still_wanted()
        if stored.any() and not await self.log_units(records[stored]):
            stored[:] = False
        return stored

    def _note_written(self, unit: BodyToWrite, error: BaseException | None) -> None:
        if error is None:
            self._breaker.succeeded()
            self.counters.units_written += 1
            self.counters.bytes_written += padded_bytes(unit.length)
        else:
            self.counters.write_errors += 1
            self._breaker.failed(error, self._loop.time())

    async def log_units(self, records: Records) -> bool:
        """The last step of a write, for units whose bodies are in their slots: whether they
        survive ``kill -9`` from now on."""
        puts = records.copy()
        puts["kind"] = Kind.PUT
        return await self._commit.append(puts)

    async def forget(self, records: Records, *, deleted: bool = False) -> bool:
        """Logs that units are gone; call it before their slots are freed.

        ``deleted`` for units that somebody asked to be gone, which must never come back: True
        is then answered once that is on the device. After False they may come back after a
        restart; the store tries again by itself with the next append.
        """
        removals = records.copy()
        removals["kind"] = Kind.DELETE if deleted else Kind.FORGET
        if not len(removals):
            return True
        return await self._see_through(self._commit.append(removals, sync=deleted))

    async def flush(self) -> bool:
        """Brings all earlier writes to the device, as far as it takes them: whether it did."""
        if self._under_way:
            await asyncio.wait(set(self._under_way))
        return await self._see_through(self._sync())

    async def _sync(self) -> bool:
        try:
            await self._io.run(self._bodies.sync)
        except OSError as error:
            self.counters.write_errors += 1
            self._breaker.failed(error, self._loop.time())
            return False
        return await self._commit.append(np.empty(0, dtype=RECORD), sync=True)

    # Reading

    def read(self, units: Sequence[BodyToRead], on_done: ReadSink) -> None:
        """Reads and checks units. ``on_done`` gets each of them once, in one call or several.

        Only OK units have sound bytes in their view. As many calls run at once as ``read_depth``
        says; the rest waits in order.
        """

        def done(finished: list[ReadRequest]) -> None:
            read = [unit for request in finished for unit in request.units]
            for request in finished:
                for unit in request.units:
                    self._note_read(unit, unit.error or request.error)
            self._reads_in_flight -= len(finished)
            if not self._reads_in_flight and self._idle is not None and not self._idle.done():
                self._idle.set_result(None)
            on_done(read)

        runs = runs_to_read(units, self.config.read_depth - self._reads_in_flight)
        self._reads_in_flight += len(runs)
        self._read_lane.submit([ReadRequest(self._bodies, run, done) for run in runs])

    def _note_read(self, unit: BodyToRead, error: BaseException | None) -> None:
        counters = self.counters
        if error is not None:
            counters.read_errors += 1
            self._read_watch.errors_in_row += 1
            return
        self._read_watch.errors_in_row = 0
        counters.units_read += 1
        counters.bytes_read += padded_bytes(unit.length)
        counters.corrupt_units += unit.outcome is UnitOutcome.CORRUPT

    # Health

    def problems(self) -> list[str]:
        """Sentences about what makes the store worse than it should be; health shows them."""
        found: list[str] = []
        directory = self.config.directory
        if self._breaker.paused:
            found.append(f"writes to {directory} fail and are paused; a few are tried now and then")
        if self._read_watch.broken:
            found.append(f"reads from {directory} fail ({self.counters.read_errors} so far)")
        if (error := self._upkeep.compaction_error) is not None:
            found.append(f"the log in {directory} can't be compacted: {error}")
        return found

    def warnings(self) -> list[str]:
        """Sentences about what an operator should know, though the store does its job."""
        found: list[str] = []
        directory = self.config.directory
        if not self._bodies.direct:
            found.append(f"{directory} takes no O_DIRECT: units go through the page cache")
        if self._guard.near_full:
            found.append(
                f"the file system of {directory} is nearly full: only room in use is reused"
            )
        if self.counters.frames_damaged:
            found.append(
                f"the log in {directory} was damaged: {self.counters.records_dropped} units dropped"
            )
        return found

    async def close(self) -> None:
        """Waits for what is under way, flushes, and gives the directory back."""
        if self._released:
            return
        await self.flush()
        if self._reads_in_flight:
            self._idle = self._loop.create_future()
            await self._idle
        await self._upkeep.settle()
        await self._io.run(self.release)

    def release(self) -> None:
        """Closes the files without waiting or flushing. Nothing may be under way any more:
        this is for after the end of the ``IoPool``, where ``close`` took too long."""
        if self._released:
            return
        self._released = True
        self._commit.log.close()
        self._bodies.close()
        os.close(self._lock_fd)

    # Behind the scenes

    async def _see_through(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of ``work``; a caller that is cancelled still waits for its end."""
        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                await asyncio.wait([task])
            raise

    def _appended(self, record_count: int, error: BaseException | None) -> None:
        counters = self.counters
        counters.forgets_dropped = self._commit.removals_dropped
        counters.direct_refused = self._bodies.direct_refused
        if error is not None:
            counters.log_errors += 1
            self._breaker.failed(error, self._loop.time())
            return
        counters.log_records += record_count
        if self._upkeep.compaction_due(self._commit.record_count, self.unit_count):
            self._commit.rotate()

    def _rotated(self, number: int, end: LogEnd) -> None:
        self._upkeep.compact(self._commit, number, end)
