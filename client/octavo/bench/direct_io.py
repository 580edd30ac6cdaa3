"""Plain O_DIRECT I/O by threads: the ceiling that the NVMe tier is measured against."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


class DirectFile:
    """``count`` pieces of ``piece_bytes`` (a multiple of 4 KiB) in one file."""

    def __init__(self, path: Path, piece_bytes: int, count: int) -> None:
        self._piece_bytes = piece_bytes
        self._count = count
        self._buffer = mmap.mmap(-1, piece_bytes * count)  # page aligned, as O_DIRECT wants it
        # As good as the arena's memory: what lies scattered in single pages is read more slowly.
        with contextlib.suppress(OSError):  # a kernel that was built without huge pages
            self._buffer.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._buffer)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.ftruncate(self._fd, piece_bytes * count)
        self._pool: ThreadPoolExecutor | None = None
        self._pool_depth = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        os.close(self._fd)

    def fill(self, data: NDArray[Any]) -> None:
        """What ``write_all`` writes: ``data`` over and over."""
        content = np.frombuffer(self._buffer, dtype=np.uint8)
        content[:] = np.resize(data.ravel(), len(content))

    def write_all(self, depth: int) -> None:
        """Writes all pieces, ``depth`` at a time, and syncs."""
        self._each(lambda piece: os.pwritev(self._fd, [piece[1]], piece[0]), self._count, depth)
        os.fdatasync(self._fd)

    def read_some(self, count: int, depth: int) -> None:
        """Reads the first ``count`` pieces, ``depth`` at a time."""
        self._each(lambda piece: os.preadv(self._fd, [piece[1]], piece[0]), count, depth)

    def _each(
        self, transfer: Callable[[tuple[int, memoryview]], int], count: int, depth: int
    ) -> None:
        if self._pool is None or self._pool_depth != depth:
            self._pool, self._pool_depth = ThreadPoolExecutor(depth), depth
        size = self._piece_bytes
        pieces = [
            (index * size, self._view[index * size : (index + 1) * size]) for index in range(count)
        ]
        moved = list(self._pool.map(transfer, pieces))
        if any(count != size for count in moved):
            raise OSError("a plain transfer was short")
