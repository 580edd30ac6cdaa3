"""The node's memory for pages: sealed shared memory that workers can read and nobody but the
node can write.

The arena is a row of memfd segments of equal size. The node maps each one writable and then
seals it: no descriptor of it can be mapped writable or written to from then on, nor can it
shrink or grow, while the node's own mapping keeps its rights. Offsets here are linear over all
segments; slots never straddle two.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
from typing import Final

from octavo_proto.keys import unit_digest
from octavo_proto.limits import SEGMENTS_MAX
from octavo_server.store.huge_pages import HUGE_BYTES, make_huge
from octavo_server.store.slabs import SLOT_ALIGN_BYTES, SlabAllocator

_log = logging.getLogger(__name__)

F_SEAL_FUTURE_WRITE: Final = 0x0010
"""From <linux/fcntl.h>; Python's fcntl has the other seals only."""

_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23

_libc: Final = ctypes.CDLL(None, use_errno=True)


class MappedMemory:
    """A memfd that the node has mapped, with its address. Closing unmaps it."""

    def __init__(
        self, name: str, size_bytes: int, *, writable: bool, seals: int, flags: int = 0
    ) -> None:
        self.size_bytes: Final = size_bytes
        self.huge: Final = bool(flags & os.MFD_HUGETLB)
        self.fd: Final = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        try:
            os.ftruncate(self.fd, size_bytes)
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self.map: Final = mmap.mmap(self.fd, size_bytes, mmap.MAP_SHARED, protection)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        except OSError:
            os.close(self.fd)
            raise
        self.view: Final = memoryview(self.map)
        self.address: Final = _address_of(self.map, self.fd, writable=writable)

    def close(self) -> None:
        """Unmaps the memory and closes its descriptor. No view of it may be in use."""
        self.view.release()
        try:
            self.map.close()
        except BufferError:  # somebody still holds a view: the mapping goes with the last of them
            _log.warning("a mapping of %d bytes was still in use when closed", self.size_bytes)
        os.close(self.fd)


class Arena:
    """Slots for units in sealed shared memory.

    ``memory_bytes`` is rounded up to whole segments. ``segment_bytes`` must be a multiple of
    ``slab_bytes``.

    Raises:
        OSError: the memory cannot be had, or this kernel has no sealing of future writes
            (Linux 5.1 and up have it).
    """

    def __init__(
        self, memory_bytes: int, segment_bytes: int, slab_bytes: int, *, huge_pages: bool = True
    ) -> None:
        if segment_bytes % slab_bytes:
            raise ValueError(f"segment_bytes {segment_bytes} is no multiple of {slab_bytes}")
        self.segment_bytes: Final = segment_bytes
        segment_count = -(-memory_bytes // segment_bytes)
        if segment_count > SEGMENTS_MAX:
            raise ValueError(f"{segment_count} segments, at most {SEGMENTS_MAX} allowed")
        self.slots: Final = SlabAllocator(segment_count * segment_bytes, slab_bytes)
        seals = F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        self.segments: Final = _segments(segment_bytes, segment_count, seals, huge_pages)
        self.makes_huge = huge_pages and not self.segments[0].huge
        """Whether ``prefault`` makes huge pages of ordinary ones. False once it made none of a
        whole range: this kernel can't, or memory is too scattered for it to be worth more tries.
        """

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all segments."""
        return self.slots.capacity_bytes

    def view(self, offset: int, length: int) -> memoryview:
        """Writable bytes at a linear offset, within one segment."""
        segment, within = divmod(offset, self.segment_bytes)
        return self.segments[segment].view[within : within + length]

    def address(self, offset: int) -> int:
        """Address of a linear offset in this process."""
        segment, within = divmod(offset, self.segment_bytes)
        return self.segments[segment].address + within

    def segment_end(self, offset: int) -> int:
        """Where the segment ends that ``offset`` lies in."""
        return (offset // self.segment_bytes + 1) * self.segment_bytes

    def prefault(self, begin: int, end: int) -> None:
        """Has the kernel give a range within one segment its memory now, in huge pages if it
        can. Blocks; releases the GIL (which ``mmap.madvise`` keeps: the whole node would stand
        still for a second per 2 GB).

        A kernel that can't (Linux before 5.14) gives it as it is used.
        """
        number, within = divmod(begin, self.segment_bytes)
        segment, size_bytes = self.segments[number], end - begin
        if self.makes_huge and within % HUGE_BYTES == 0 and size_bytes >= HUGE_BYTES:
            self.makes_huge = make_huge(segment.fd, within, size_bytes) > 0
            if not self.makes_huge:
                _log.info("the kernel makes no huge pages for the arena: ordinary ones then")
        address = ctypes.c_void_p(segment.address + within)
        if _libc.madvise(address, ctypes.c_size_t(size_bytes), _MADV_POPULATE_WRITE):
            error = ctypes.get_errno()
            _log.warning("memory at %d is not prefaulted: %s", begin, os.strerror(error))

    def close(self) -> None:
        """Unmaps all segments."""
        for segment in self.segments:
            segment.close()


def _segments(size_bytes: int, count: int, seals: int, huge_pages: bool) -> list[MappedMemory]:
    """The arena's segments, in reserved huge pages if the host has enough of them."""

    def mapped(flags: int) -> list[MappedMemory]:
        made: list[MappedMemory] = []
        try:
            for index in range(count):
                name = f"octavo-arena-{index}"
                made.append(MappedMemory(name, size_bytes, writable=True, seals=seals, flags=flags))
        except OSError:
            for segment in made:
                segment.close()
            raise
        return made

    if huge_pages:
        try:
            return mapped(os.MFD_HUGETLB)
        except OSError:  # too few are reserved, or a segment is no multiple of one
            _log.info("no huge pages for the arena: ordinary pages then")
    segments = mapped(0)
    if huge_pages:
        for segment in segments:
            try:
                segment.map.madvise(_MADV_HUGEPAGE)
            except OSError:  # the kernel was built without them
                break
    return segments


class StagingRing:
    """Memory that one session's worker fills and the node only reads.

    It can't shrink under the node's reads. It is never given to another session.
    """

    def __init__(self, size_bytes: int) -> None:
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        self._memory = MappedMemory("octavo-ring", size_bytes, writable=False, seals=seals)
        self.size_bytes: Final = size_bytes
        self.fd: Final = self._memory.fd
        self.address: Final = self._memory.address
        self._users = 0
        self._closing = False

    def begin_use(self) -> None:
        """A copy out of the ring begins: the ring stays until ``end_use``."""
        assert not self._closing, "a ring was used after its session had ended"
        self._users += 1

    def end_use(self) -> None:
        """A copy has ended."""
        self._users -= 1
        if self._closing and not self._users:
            self._memory.close()

    def close(self) -> None:
        """Unmaps the ring, as soon as no copy out of it is in progress."""
        if self._closing:
            return
        self._closing = True
        if not self._users:
            self._memory.close()


def copy_and_digest(source_address: int, target: memoryview, target_address: int, seed: int) -> int:
    """Copies ``len(target)`` bytes and returns the digest of what arrived.

    The digest is of the target, which nobody else can write: a worker that scribbles over its
    ring meanwhile spoils its own unit at most. Releases the GIL.
    """
    ctypes.memmove(target_address, source_address, len(target))
    return unit_digest(target, seed)


def rounded_up(size_bytes: int) -> int:
    """``size_bytes`` rounded up to whole slot alignments."""
    return -(-size_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


def _address_of(mapping: mmap.mmap, fd: int, *, writable: bool) -> int:
    if writable:
        return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    import numpy as np  # a read-only buffer gives its address through numpy only

    return int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
