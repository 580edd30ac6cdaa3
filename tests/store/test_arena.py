"""Shared memory that nobody but the node can write, and rings that cannot shrink."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo_proto.keys import unit_digest
from octavo_proto.limits import SEGMENTS_MAX
from octavo_server.store.arena import (
    Arena,
    StagingRing,
    copy_and_digest,
    rounded_up,
)

MIB = 1 << 20
_PUNCH_HOLE = 0x03  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_MADV_REMOVE = 9

libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(4 * MIB, MIB, 256 << 10, huge_pages=False)
    yield arena
    arena.close()


def test_a_worker_can_read_a_segment_and_not_write_it(arena: Arena) -> None:
    """What a hostile worker tries, on descriptors as the broker hands them out and reopened."""
    arena.view(MIB, 5)[:] = b"bytes"
    segment = arena.segments[1]
    reopened = os.open(f"/proc/self/fd/{segment.fd}", os.O_RDWR)
    duplicate = os.dup(segment.fd)
    try:
        for fd in (reopened, duplicate):
            with mmap.mmap(fd, MIB, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
                assert mapped[:5] == b"bytes"
                assert libc.mprotect(
                    ctypes.c_void_p(_address(mapped)), ctypes.c_size_t(MIB), mmap.PROT_WRITE
                )
                with pytest.raises(OSError, match=r"Permission denied|Invalid argument"):
                    mapped.madvise(_MADV_REMOVE)
            with pytest.raises(PermissionError):
                mmap.mmap(fd, MIB, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"evil", 0)
            for size in (0, MIB // 2, 2 * MIB):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, size)
            assert libc.fallocate(fd, _PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(MIB)) == -1
            with pytest.raises(PermissionError):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(reopened)
        os.close(duplicate)
    assert bytes(arena.view(MIB, 5)) == b"bytes"
    arena.view(MIB, 5)[:] = b"later"  # the node still can
    assert bytes(arena.view(MIB, 5)) == b"later"


def _address(mapped: mmap.mmap) -> int:
    import numpy as np

    return int(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)


def test_a_ring_is_the_workers_to_fill_and_cannot_shrink() -> None:
    ring = StagingRing(MIB)
    reopened = os.open(f"/proc/self/fd/{ring.fd}", os.O_RDWR)
    with mmap.mmap(reopened, MIB) as mapped:
        mapped[100:105] = b"bytes"
        assert ctypes.string_at(ring.address + 100, 5) == b"bytes"
        for size in (0, MIB // 2, 2 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(reopened, size)
        # A hole reads as zeros: the node's reads never fault.
        assert libc.fallocate(reopened, _PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(MIB)) == 0
        assert ctypes.string_at(ring.address + 100, 5) == bytes(5)
    os.close(reopened)
    ring.close()


def test_a_ring_in_use_is_unmapped_after_its_last_copy() -> None:
    ring = StagingRing(MIB)
    ring.begin_use()
    ring.begin_use()
    ring.close()
    ring.close()
    ring.end_use()
    assert ctypes.string_at(ring.address, 1) == b"\0"
    os.fstat(ring.fd)
    ring.end_use()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ring.fd)
    with pytest.raises(AssertionError, match="session had ended"):
        ring.begin_use()


def test_offsets_are_linear_over_segments_and_slots_never_straddle(arena: Arena) -> None:
    assert arena.capacity_bytes == 4 * MIB
    offsets = arena.slots.allocate(100 << 10, 1000)
    assert len(offsets) == 32
    for number, offset in enumerate(offsets.tolist()):
        view = arena.view(offset, 100 << 10)
        assert len(view) == 100 << 10
        view[:1] = bytes([number])
        assert ctypes.string_at(arena.address(offset), 1) == bytes([number])
    assert [arena.view(offset, 1)[0] for offset in offsets.tolist()] == list(range(32))


def test_the_digest_is_of_what_arrived(arena: Arena) -> None:
    source = ctypes.create_string_buffer(os.urandom(5000), 5000)
    target = arena.view(8192, 5000)
    digest = copy_and_digest(ctypes.addressof(source), target, arena.address(8192), 7)
    assert bytes(target) == source.raw
    assert digest == unit_digest(source.raw, 7)
    target.release()


def test_arenas_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="no multiple"):
        Arena(MIB, MIB, 3 * 4096 * 5)
    with pytest.raises(ValueError, match=f"at most {SEGMENTS_MAX}"):
        Arena((SEGMENTS_MAX + 1) * MIB, MIB, MIB)
    assert rounded_up(1) == rounded_up(4096) == 4096


def test_prefaulting_lets_the_event_loop_go_on() -> None:
    arena = Arena(192 * MIB, 192 * MIB, MIB, huge_pages=False)
    ticks = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal ticks
        while not done.wait(0.001):
            ticks += 1

    watcher = threading.Thread(target=watch)
    watcher.start()
    before = ticks
    arena.prefault(0, 192 * MIB)  # about 100 ms
    ticked = ticks - before
    done.set()
    watcher.join()
    occupied = os.fstat(arena.segments[0].fd).st_blocks * 512
    arena.close()
    assert occupied == 192 * MIB
    assert ticked > 3, "the GIL was held"


def test_closing_with_a_view_in_use_is_survived() -> None:
    arena = Arena(MIB, MIB, 256 << 10, huge_pages=False)
    view = arena.view(0, 10)
    arena.close()
    assert bytes(view) == bytes(10)
    view.release()


def test_an_arena_without_huge_pages_to_be_had_uses_ordinary_ones() -> None:
    size_bytes = 6 * MIB + 4096 * 3  # no multiple of any huge page
    arena = Arena(size_bytes, size_bytes, 4096 * 3, huge_pages=True)
    arena.view(0, 4)[:] = b"page"
    assert bytes(arena.view(0, 4)) == b"page"
    arena.close()


def test_reserved_huge_pages_are_used_and_stay_sealed() -> None:
    def free_pages() -> int:
        lines = Path("/proc/meminfo").read_text().splitlines()
        values = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return values.get("HugePages_Free", 0) - values.get("HugePages_Rsvd", 0)

    before = free_pages()
    if before < 2:
        pytest.skip("this host has reserved no huge pages (sysctl vm.nr_hugepages)")
    arena = Arena(2 * MIB, 2 * MIB, MIB, huge_pages=True)
    assert free_pages() == before - 1
    arena.view(0, 4)[:] = b"page"
    descriptor = os.open(f"/proc/self/fd/{arena.segments[0].fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 2 * MIB)
    os.close(descriptor)
    arena.close()
    assert free_pages() == before
