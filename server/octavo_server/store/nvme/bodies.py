"""Unit bodies: one sparse file, read and written by threads, past the page cache if possible."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from octavo_server.store.file_ops import FileOps, read_fully, write_fully
from octavo_server.store.nvme.records import BODY_ALIGN_BYTES, padded_bytes


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
        target = _padded(view, length)
        try:
            return read_fully(self._files, self._fd, target, offset)
        except OSError as error:
            self._require_refused(error)
        return read_fully(self._files, self._buffered_fd, target, offset)

    def write(self, view: memoryview, offset: int, length: int) -> None:
        """Writes ``length`` bytes of ``view``, padded, at ``offset``. Raises OSError."""
        size_bytes = padded_bytes(length)
        source = _padded(view, length)
        if len(source) != size_bytes or offset + size_bytes > self.capacity_bytes:
            raise OSError(errno.EFAULT, f"a body of {length} bytes does not fit at {offset}")
        try:
            write_fully(self._files, self._fd, source, offset)
        except OSError as error:
            self._require_refused(error)
        else:
            return
        write_fully(self._files, self._buffered_fd, source, offset)

    def read_together(self, views: Sequence[memoryview], offset: int) -> bool:
        """Fills padded views, one behind the other, from ``offset`` on with one call. False where
        it did not fill them all: then nothing is known of any of them.
        """
        try:
            return self._files.preadv(self._fd, views, offset) == _size_bytes(views)
        except OSError:
            return False

    def write_together(self, views: Sequence[memoryview], offset: int) -> bool:
        """Writes padded views, one behind the other, from ``offset`` on with one call. False where
        it did not take them all: then nothing is known of any of them.
        """
        size_bytes = _size_bytes(views)
        if offset + size_bytes > self.capacity_bytes:
            return False
        try:
            return self._files.pwritev(self._fd, views, offset) == size_bytes
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


def _padded(view: memoryview, length: int) -> memoryview:
    size_bytes = padded_bytes(length)
    return view if len(view) == size_bytes else view[:size_bytes]


def _size_bytes(views: Sequence[memoryview]) -> int:
    return sum(len(view) for view in views)
