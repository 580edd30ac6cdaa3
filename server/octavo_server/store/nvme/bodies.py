"""Unit bodies: one sparse file, read and written by threads, past the page cache if possible."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final

import xxhash

from octavo_server.store.file_ops import FileOps, read_fully, write_fully
from octavo_server.store.io_pool import Operation
from octavo_server.store.nvme.records import BODY_ALIGN_BYTES, padded_bytes


class UnitOutcome(Enum):
    """What became of a read."""

    OK = "ok"
    CORRUPT = "corrupt"
    """The bytes are not those that were put, and never will be: forget the unit."""
    FAILED = "failed"
    """The device failed; what lies there may be sound."""


def _unsent(_: list[Any]) -> None:
    raise AssertionError("a read request was performed without being submitted")


class ReadRequest(Operation):
    """One unit to read into ``view``, which has room for ``length`` padded to 4 KiB.

    ``seed`` and ``digest`` are those of ``octavo_proto.keys.digest_seed`` and ``unit_digest``.
    ``tag`` is the caller's. The request owns ``view`` until its completion is delivered.
    """

    __slots__ = ("bodies", "digest", "length", "offset", "outcome", "seed", "tag", "view")

    bodies: Bodies

    def __init__(
        self, *, offset: int, length: int, view: memoryview, seed: int, digest: int, tag: object
    ) -> None:
        super().__init__(_unsent)
        self.offset = offset
        self.length = length
        self.view = view
        self.seed = seed
        self.digest = digest
        self.tag = tag
        self.outcome = UnitOutcome.FAILED

    def perform(self) -> None:
        view, length = self.view, self.length
        if self.bodies.read(view, self.offset, length) < length:
            self.outcome = UnitOutcome.CORRUPT  # the file was cut: those bytes are gone
            return
        body = view if len(view) == length else view[:length]
        sound = xxhash.xxh3_64_intdigest(body, seed=self.seed) == self.digest
        self.outcome = UnitOutcome.OK if sound else UnitOutcome.CORRUPT


TOGETHER_BYTES_MAX: Final = 1 << 20
"""Adjacent units up to this size are written with one call: a third of the calls for units of
320 KiB, and of the hand-overs between threads that come with each."""


class BodyToWrite:
    """One unit: ``view`` holds ``length`` bytes, padded to 4 KiB; ``error``: what went wrong."""

    __slots__ = ("error", "length", "offset", "row", "view")

    def __init__(self, offset: int, length: int, view: memoryview, row: int) -> None:
        self.offset = offset
        self.length = length
        self.view = view
        self.row = row
        self.error: BaseException | None = None


class WriteRequest(Operation):
    """Units to write that lie one behind the other on the device, or a single one."""

    __slots__ = ("bodies", "units")

    def __init__(
        self,
        bodies: Bodies,
        units: Sequence[BodyToWrite],
        sink: Callable[[list[WriteRequest]], None],
    ) -> None:
        super().__init__(sink)
        self.bodies = bodies
        self.units = units

    def perform(self) -> None:
        if len(self.units) > 1 and self.bodies.write_together(self.units):
            return
        for unit in self.units:
            try:
                self.bodies.write(unit.view, unit.offset, unit.length)
            except OSError as error:
                unit.error = error


def adjacent_runs(units: Sequence[BodyToWrite]) -> list[list[BodyToWrite]]:
    """The units in their order, those together that one call may write."""
    runs: list[list[BodyToWrite]] = []
    end = size_bytes = -1
    for unit in units:
        padded = padded_bytes(unit.length)
        if unit.offset != end or size_bytes + padded > TOGETHER_BYTES_MAX or not runs:
            runs.append([])
            size_bytes = 0
        runs[-1].append(unit)
        size_bytes += padded
        end = unit.offset + padded
    return runs


class Bodies:
    """``bodies.dat``. Reads and writes may run in any number of threads at once.

    Where the file system refuses O_DIRECT, I/O goes through the page cache and ``direct`` is
    False. A single call that O_DIRECT refuses (an unaligned buffer, the rest of a short
    transfer) goes through the page cache too and is counted; the kernel keeps both ways
    coherent within one file.
    """

    def __init__(self, path: Path, capacity_bytes: int, files: FileOps) -> None:
        """Opens or makes the file and gives it its size. Raises OSError."""
        self.capacity_bytes: Final = capacity_bytes
        self.direct_refused = 0
        self._files = files
        self._buffered_fd = files.open(path, os.O_RDWR | os.O_CREAT)
        self._fd = self._buffered_fd
        try:
            self.found_bytes: Final = files.size_bytes(self._buffered_fd)
            if self.found_bytes != capacity_bytes:
                files.truncate(self._buffered_fd, capacity_bytes)
            direct_fd = _open_direct(path, files)
            if direct_fd is not None:
                self._fd = direct_fd
        except OSError:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        return self._fd != self._buffered_fd

    def read(self, view: memoryview, offset: int, length: int) -> int:
        """Reads ``length`` bytes, padded, into ``view``: bytes read. Raises OSError."""
        size_bytes = padded_bytes(length)
        target = view if len(view) == size_bytes else view[:size_bytes]
        try:
            return read_fully(self._files, self._fd, target, offset)
        except OSError as error:
            self._require_refused(error)
        return read_fully(self._files, self._buffered_fd, target, offset)

    def write(self, view: memoryview, offset: int, length: int) -> None:
        """Writes ``length`` bytes of ``view``, padded, at ``offset``. Raises OSError."""
        size_bytes = padded_bytes(length)
        source = view if len(view) == size_bytes else view[:size_bytes]
        if len(source) != size_bytes or offset + size_bytes > self.capacity_bytes:
            raise OSError(errno.EFAULT, f"a body of {length} bytes does not fit at {offset}")
        try:
            write_fully(self._files, self._fd, source, offset)
        except OSError as error:
            self._require_refused(error)
        else:
            return
        write_fully(self._files, self._buffered_fd, source, offset)

    def write_together(self, units: Sequence[BodyToWrite]) -> bool:
        """Writes adjacent units with one call. False where it did not take them all: then nothing
        is known of any of them, and each is to be written by itself.
        """
        first = units[0].offset
        views = [unit.view[: padded_bytes(unit.length)] for unit in units]
        size_bytes = sum(len(view) for view in views)
        if first + size_bytes > self.capacity_bytes:
            return False
        try:
            return self._files.pwritev(self._fd, views, first) == size_bytes
        except OSError:
            return False

    def sync(self) -> None:
        self._files.fdatasync(self._buffered_fd)

    def space(self) -> tuple[int, int]:
        """Free bytes of the file system, and bytes that the file occupies. Raises OSError."""
        fd = self._buffered_fd
        return self._files.free_bytes(fd), self._files.occupied_bytes(fd)

    def close(self) -> None:
        if self._fd != self._buffered_fd:
            self._files.close(self._fd)
        self._files.close(self._buffered_fd)

    def _require_refused(self, error: OSError) -> None:
        """Raises ``error`` again unless it is O_DIRECT's refusal, which is worth another try."""
        if error.errno != errno.EINVAL or not self.direct:
            raise error
        self.direct_refused += 1  # threads may lose a count to each other, never the fact


def _open_direct(path: Path, files: FileOps) -> int | None:
    """A descriptor that goes past the page cache, or None where the file system has none.

    Some file systems refuse at open, some at the first transfer. Only a read is tried: a write
    would need room, and a node must be able to start on a full disk. Raises OSError.
    """
    fd: int | None = None
    try:
        fd = files.open(path, os.O_RDWR | os.O_DIRECT)
        files.preadv(fd, [memoryview(mmap.mmap(-1, BODY_ALIGN_BYTES))], 0)
    except OSError as error:
        if fd is not None:
            files.close(fd)
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return None
    return fd
