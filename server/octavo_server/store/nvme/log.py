"""The metadata log: one file that grows by frames, and the group commit in front of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from octavo_server.store.file_ops import FileOps, write_fully
from octavo_server.store.io_pool import Lane, Operation
from octavo_server.store.nvme.directory import numbered_path
from octavo_server.store.nvme.records import (
    FRAME_RECORDS_MAX,
    RECORD,
    FileKind,
    FrameHeader,
    Kind,
    Records,
    count_deletes,
    encode_frame,
)
from octavo_server.store.nvme.replay import LogEnd

REMOVALS_WAITING_MAX: Final = 65_536
"""FORGETs kept for another try after the log refused them (6 MiB). Those beyond are dropped:
their units can come back after a restart and cost a read that fails its check."""

_NO_RECORDS: Final = np.empty(0, dtype=RECORD)


class LogFile:
    """``log-<number>.oct``, open for appending. Blocking; one thread at a time."""

    def __init__(
        self,
        directory: Path,
        number: int,
        *,
        seed: int,
        end: LogEnd,
        size_bytes: int,
        files: FileOps,
    ) -> None:
        """Opens or makes the file and cuts it to ``size_bytes``. Raises OSError."""
        self.number: Final = number
        self.end = end
        self._directory = directory
        self._seed = seed
        self._size_bytes = size_bytes
        self._files = files
        self._fd = files.open(
            numbered_path(directory, FileKind.LOG, number), os.O_RDWR | os.O_CREAT
        )
        self._must_cut = True

    def append(self, records: Records) -> None:
        """Appends ``records`` and numbers them. They survive the process once this returns.

        Raises:
            OSError: none of them is in the log, and it is as good as before.
        """
        first = self.end.next_sequence
        records["sequence"] = np.arange(first, first + len(records), dtype=np.uint64)
        deletes = self.end.delete_count
        frames: list[bytes] = []
        for begin in range(0, len(records), FRAME_RECORDS_MAX):
            part = records[begin : begin + FRAME_RECORDS_MAX]
            header = FrameHeader(FileKind.LOG, self.number, len(part), first + begin, deletes)
            frames.append(encode_frame(header, part, self._seed))
            deletes += count_deletes(part)
        data = b"".join(frames)
        self._cut()
        self._must_cut = True
        write_fully(self._files, self._fd, memoryview(data), self._size_bytes)
        self._must_cut = False
        self._size_bytes += len(data)
        self.end = LogEnd(first + len(records), deletes)

    def sync(self) -> None:
        """Raises OSError."""
        self._files.fdatasync(self._fd)

    def successor(self) -> LogFile:
        """The next log, empty; this one is synced and closed. Raises OSError, changing nothing."""
        self.sync()
        log = LogFile(
            self._directory,
            self.number + 1,
            seed=self._seed,
            end=self.end,
            size_bytes=0,
            files=self._files,
        )
        self.close()
        return log

    def close(self) -> None:
        """Cuts off what a failed append left, if the device lets it, and closes the file."""
        with suppress(OSError):  # replay cuts it off as well
            self._cut()
        self._files.close(self._fd)

    def _cut(self) -> None:
        if self._must_cut:
            self._files.truncate(self._fd, self._size_bytes)
            self._must_cut = False


@dataclass(slots=True)
class _Entry:
    records: Records
    sync: bool
    done: asyncio.Future[bool]


class _Append(Operation):
    """One group commit. ``rotate`` switches to the next log first."""

    __slots__ = ("commit", "entries", "rotate", "rotate_error", "rotated_end", "waiting")

    def __init__(
        self, commit: GroupCommit, entries: list[_Entry], waiting: list[Records], rotate: bool
    ) -> None:
        super().__init__(commit.appended)
        self.commit = commit
        self.entries = entries
        self.waiting = waiting
        self.rotate = rotate
        self.rotate_error: OSError | None = None
        self.rotated_end: LogEnd | None = None

    def perform(self) -> None:
        commit = self.commit
        if self.rotate:
            try:
                end = commit.log.end
                commit.log = commit.log.successor()
                self.rotated_end = end
            except OSError as error:
                self.rotate_error = error
        parts = [*self.waiting, *(entry.records for entry in self.entries)]
        records = np.concatenate(parts) if parts else _NO_RECORDS
        if len(records):
            commit.log.append(records)
        if any(entry.sync for entry in self.entries):
            commit.log.sync()


class GroupCommit:
    """Appends to the log for many callers: one write for all who came during the last one.

    The lane must have depth 1: appends happen in the order in which they were asked for.
    """

    def __init__(
        self,
        log: LogFile,
        lane: Lane,
        *,
        record_count: int,
        on_rotated: Callable[[int, LogEnd], None],
        on_result: Callable[[int, BaseException | None], None],
    ) -> None:
        """``on_rotated(new_number, end_of_the_old)`` and ``on_result(records, error)`` are
        called on the event loop."""
        assert lane.depth == 1
        self.log = log
        self.record_count = record_count
        """Records in logs that no snapshot covers yet."""
        self.removals_dropped = 0
        self._lane = lane
        self._on_rotated = on_rotated
        self._on_result = on_result
        self._entries: list[_Entry] = []
        self._waiting: list[Records] = []
        self._waiting_count = 0
        self._busy = False
        self._rotate = False

    def rotate(self) -> None:
        """Switches to a new log with the next append."""
        self._rotate = True

    async def append(self, records: Records, *, sync: bool = False) -> bool:
        """True once ``records`` are in the log; with ``sync``, and on the device.

        The array belongs to the log from now on.
        """
        entry = _Entry(records, sync, asyncio.get_running_loop().create_future())
        self._entries.append(entry)
        self._next()
        return await entry.done

    def _next(self) -> None:
        if self._busy or not self._entries:
            return
        self._busy = True
        operation = _Append(self, self._entries, self._waiting, self._rotate)
        self._entries, self._waiting, self._waiting_count = [], [], 0
        self._rotate = False
        self._lane.submit([operation])

    def appended(self, operations: list[_Append]) -> None:
        """Sink of the appends."""
        for operation in operations:
            self._busy = False
            error = operation.error
            parts = [*operation.waiting, *(entry.records for entry in operation.entries)]
            if error is None:
                self.record_count += sum(len(part) for part in parts)
            else:
                self._keep_removals(parts)
            # The rotation first: its compaction is under way when the result is looked at, so
            # that no second one is asked for.
            if operation.rotated_end is not None:
                self._on_rotated(self.log.number, operation.rotated_end)
            if operation.rotate_error is not None:
                self._on_result(0, operation.rotate_error)
            self._on_result(sum(len(part) for part in parts), error)
            for entry in operation.entries:
                if not entry.done.done():
                    entry.done.set_result(error is None)
        self._next()

    def _keep_removals(self, parts: list[Records]) -> None:
        """Removals go first into the next append: their slots may be in other hands by then."""
        for part in parts:
            removals = part[part["kind"] != Kind.PUT]
            fitting = removals[: REMOVALS_WAITING_MAX - self._waiting_count]
            self.removals_dropped += len(removals) - len(fitting)
            if len(fitting):
                self._waiting.append(fitting)
                self._waiting_count += len(fitting)
