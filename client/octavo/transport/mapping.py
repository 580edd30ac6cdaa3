"""The node's memory in this process: arena segments to read, a staging ring to write."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo.errors import SessionLost
from octavo.memory import region_of


class SharedMappings:
    """Arena segments (read-only) and staging ring (writable), addressed by number.

    ``close`` may come at any moment, from the thread that sees the node hang up. Memory that a
    copy is using is unmapped by the last copy to end: unmapping it under a ``memmove`` would
    kill the process.
    """

    def __init__(self, segment_bytes: int, segment_fds: Sequence[int], ring_fd: int) -> None:
        """Maps all; the caller keeps the descriptors and closes them."""
        self.segment_bytes: Final = segment_bytes
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False
        self._maps: list[mmap.mmap] = []
        bases: list[int] = []
        try:
            for fd in segment_fds:
                if os.fstat(fd).st_size < segment_bytes:
                    raise SessionLost("an arena segment is shorter than announced")
                segment = mmap.mmap(fd, segment_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
                self._maps.append(segment)
                bases.append(_address_of(segment))
            self.ring_bytes: Final = os.fstat(ring_fd).st_size
            ring = mmap.mmap(
                ring_fd, self.ring_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
            )
            self._maps.append(ring)
            self.ring_address: Final = _address_of(ring)
        except BaseException:
            self.close()
            raise
        self.segment_addresses: Final[NDArray[np.int64]] = np.array(bases, dtype=np.int64)

    @property
    def closed(self) -> bool:
        return self._closed

    @contextmanager
    def in_use(self) -> Generator[None]:
        """Keeps everything mapped while the block runs.

        Raises:
            SessionLost: it is to be unmapped, or is.
        """
        with self._lock:
            if self._closed:
                raise SessionLost("the node's memory was withdrawn")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._closed and self._users == 0:
                    self._unmap()

    def close(self) -> None:
        """Unmaps now, or as soon as the last copy in progress ends."""
        with self._lock:
            self._closed = True
            if self._users == 0:
                self._unmap()

    def unmap_after_fork(self) -> None:
        """Unmaps in a forked child, where no other thread uses the memory or holds the lock."""
        self._closed = True
        self._unmap()

    def _unmap(self) -> None:
        while self._maps:
            self._maps.pop().close()


def _address_of(mapping: mmap.mmap) -> int:
    # The view behind the region ends here; a view that stayed would make unmapping fail.
    return region_of(mapping).address
