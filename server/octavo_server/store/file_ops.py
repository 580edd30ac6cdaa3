"""The system calls of the NVMe store, in one place so that tests can make any of them fail."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

Buffer = bytes | bytearray | memoryview


class FileOps:
    """Plain calls: no retries, no state. Every method may raise OSError, from any thread."""

    def open(self, path: Path, flags: int) -> int:
        """A descriptor that children do not inherit; new files belong to this user alone."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        """Bytes read; fewer than asked for is no error, 0 is the end of the file."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Bytes written; fewer than asked for is no error."""
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def truncate(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def size_bytes(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def occupied_bytes(self, fd: int) -> int:
        """Bytes that the file takes on the device: less than its size where it has holes."""
        return os.fstat(fd).st_blocks * 512

    def free_bytes(self, fd: int) -> int:
        """Bytes that this user may still write to the file system of ``fd``."""
        status = os.fstatvfs(fd)
        return status.f_bavail * status.f_frsize

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def sync_directory(self, path: Path) -> None:
        """Makes names created, renamed or removed in ``path`` survive a power loss."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def read_fully(files: FileOps, fd: int, view: memoryview, offset: int) -> int:
    """Reads until ``view`` is full or the file ends; answers the bytes read. Raises OSError."""
    done = 0
    while done < len(view):
        count = files.preadv(fd, [view[done:] if done else view], offset + done)
        if count <= 0:
            break
        done += count
    return done


def write_fully(files: FileOps, fd: int, view: memoryview, offset: int) -> None:
    """Writes all of ``view``, going on after short writes. Raises OSError."""
    done = 0
    while done < len(view):
        count = files.pwritev(fd, [view[done:] if done else view], offset + done)
        if count <= 0:
            raise OSError(5, "the device took no bytes and gave no reason")
        done += count
