"""Memory of the arena comes in huge pages that nobody reserved, ahead of what is put there."""

from __future__ import annotations

import asyncio
import mmap
import os
import platform
import tempfile
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo_server.store import ahead
from octavo_server.store.ahead import AHEAD_BYTES, ArenaAhead
from octavo_server.store.arena import Arena, MappedMemory
from octavo_server.store.huge_pages import make_huge
from octavo_server.store.io_pool import IoPool

MIB = 1 << 20
SHMEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
RELEASE = tuple(int(number) for number in platform.release().split("-")[0].split(".")[:2])

makes_huge = pytest.mark.skipif(
    RELEASE < (6, 1)
    or platform.machine() != "x86_64"
    or not SHMEM.is_file()
    or "[deny]" in SHMEM.read_text(),
    reason="this kernel makes no huge pages of shared memory on request",
)


@contextmanager
def memory_of(size_bytes: int) -> Generator[MappedMemory]:
    memory = MappedMemory("octavo-test", size_bytes, writable=True, seals=0)
    yield memory
    memory.close()


def frames_of(address: int, size_bytes: int) -> NDArray[np.int64]:
    """Numbers of the page frames behind addresses that were touched."""
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(address // mmap.PAGESIZE * 8)
        entries = np.frombuffer(pagemap.read(size_bytes // mmap.PAGESIZE * 8), dtype=np.uint64)
    frames = (entries & np.uint64((1 << 55) - 1)).astype(np.int64)
    if not frames.any():
        pytest.skip("only root sees the numbers of page frames")
    return frames


@makes_huge
def test_what_is_there_already_is_moved_to_memory_that_lies_together() -> None:
    with memory_of(8 * MIB) as memory:
        content = np.random.default_rng(1).integers(0, 256, 8 * MIB, dtype=np.uint8).tobytes()
        memory.view[:] = content
        assert make_huge(memory.fd, 0, 8 * MIB) == 8 * MIB
        assert bytes(memory.view) == content
        steps = np.diff(frames_of(memory.address, 8 * MIB))
        assert (steps != 1).sum() <= 3, "pages within a huge page are neighbours"


@makes_huge
def test_memory_that_nobody_touched_becomes_huge_and_reads_as_zeros() -> None:
    with memory_of(6 * MIB) as memory:
        assert make_huge(memory.fd, 2 * MIB, 4 * MIB) == 4 * MIB
        assert os.fstat(memory.fd).st_blocks * 512 == 4 * MIB
        assert not any(memory.view)


@makes_huge
def test_what_is_no_whole_huge_page_stays_as_it_is() -> None:
    with memory_of(3 * MIB) as memory:
        assert make_huge(memory.fd, 0, 3 * MIB) == 2 * MIB
        assert make_huge(memory.fd, 2 * MIB, MIB) == 0
        with pytest.raises(ValueError, match="no multiple"):
            make_huge(memory.fd, MIB, 2 * MIB)


def test_a_file_that_cannot_have_huge_pages_has_none() -> None:
    with tempfile.TemporaryFile(dir=Path.cwd()) as file:
        file.truncate(2 * MIB)
        assert make_huge(file.fileno(), 0, 2 * MIB) == 0


@asynccontextmanager
async def ahead_of(arena: Arena, *, everything: bool = False) -> AsyncGenerator[ArenaAhead]:
    io = IoPool()
    keeper = ArenaAhead(arena, io, everything=everything)
    task = asyncio.create_task(keeper.run())
    try:
        yield keeper
    finally:
        task.cancel()
        await io.close(5.0)
        arena.close()


async def ready(keeper: ArenaAhead, size_bytes: int) -> None:
    async with asyncio.timeout(10.0):
        while keeper.ready_bytes < size_bytes:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    assert keeper.ready_bytes == size_bytes


def occupied_bytes(arena: Arena) -> int:
    return sum(os.fstat(segment.fd).st_blocks * 512 for segment in arena.segments)


@makes_huge
def test_memory_is_given_ahead_of_the_slabs_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert AHEAD_BYTES == 128 * MIB
    monkeypatch.setattr(ahead, "AHEAD_BYTES", 8 * MIB)
    monkeypatch.setattr(ahead, "STEP_BYTES", 4 * MIB)

    async def run() -> None:
        arena = Arena(32 * MIB, 16 * MIB, 4 * MIB)
        async with ahead_of(arena) as keeper:
            await ready(keeper, 8 * MIB)
            first = arena.slots.allocate(MIB, 2)
            await ready(keeper, 12 * MIB)
            arena.view(0, 5)[:] = b"bytes"
            arena.slots.allocate(MIB, 14)
            await ready(keeper, 24 * MIB)
            arena.slots.free(first)
            arena.slots.allocate(MIB, 2)
            await ready(keeper, 24 * MIB)
            assert occupied_bytes(arena) == 24 * MIB
            arena.slots.allocate(MIB, 16)
            await ready(keeper, 32 * MIB)
            assert bytes(arena.view(0, 5)) == b"bytes"

    asyncio.run(run())


def test_without_huge_pages_memory_is_given_as_it_is_touched() -> None:

    async def run() -> None:
        arena = Arena(8 * MIB, 8 * MIB, MIB, huge_pages=False)
        async with ahead_of(arena) as keeper:
            arena.slots.allocate(MIB, 3)
            await ready(keeper, 0)
            assert occupied_bytes(arena) == 0

    asyncio.run(run())


@pytest.mark.parametrize("huge_pages", [True, False])
def test_prefaulting_gives_everything_at_once(huge_pages: bool) -> None:

    async def run() -> None:
        arena = Arena(5 * MIB, 5 * MIB, MIB, huge_pages=huge_pages)
        async with ahead_of(arena, everything=True) as keeper:
            await ready(keeper, 5 * MIB)
            assert occupied_bytes(arena) == 5 * MIB

    asyncio.run(run())


def test_a_kernel_that_makes_none_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(fd: int, offset: int, size_bytes: int) -> int:
        asked.append(offset)
        return 0

    monkeypatch.setattr("octavo_server.store.arena.make_huge", refuse)

    async def run() -> None:
        arena = Arena(64 * MIB, 64 * MIB, MIB)
        async with ahead_of(arena) as keeper:
            await ready(keeper, 16 * MIB)
            assert asked == [0]
            assert not arena.makes_huge

    asyncio.run(run())
