"""A page cache on a real arena, a real staging ring and a real NVMe store, with a clock of ours."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray
from tests.cache.clock import Clock

from octavo_proto.layout import Layout, foreign_layout
from octavo_server.cache.chains import ChainView
from octavo_server.cache.filling import FilledUnits
from octavo_server.cache.getting import GetPages, Grant
from octavo_server.cache.leases import Hold, Lease
from octavo_server.cache.limits import CacheLimits
from octavo_server.cache.page_cache import PageCache
from octavo_server.cache.registry import Registry
from octavo_server.cache.reservations import Reservation
from octavo_server.cache.reserving import ReservePages
from octavo_server.cache.retaining import NO_WISH, Retention
from octavo_server.cache.session import Session, SessionLayout
from octavo_server.cache.statuses import RESERVED
from octavo_server.eviction.lru import Lru
from octavo_server.store.arena import Arena, StagingRing
from octavo_server.store.file_ops import FileOps
from octavo_server.store.io_pool import IoPool
from octavo_server.store.nvme import NvmeConfig, NvmeStore

KIB: Final = 1 << 10
MIB: Final = 1 << 20
RING_BYTES: Final = 4 * MIB
WAIT_S: Final = 20.0
"""No wait in these tests lasts nearly as long unless something hangs."""

ONE: Final = foreign_layout("one", "test")
TWO: Final = foreign_layout("two", "test-2", unit_count=2)


def key(number: int) -> bytes:
    """A page key."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def keys(numbers: Sequence[int] | range) -> NDArray[np.uint64]:
    """Page keys as a column of shape [pages, 2]."""
    return np.frombuffer(b"".join(map(key, numbers)), dtype="<u8").reshape(-1, 2)


def body(number: int, unit: int, length: int, version: int = 0) -> bytes:
    """The bytes of a unit: no two units, nor two versions of one, have the same."""
    seed = hashlib.blake2b(repr((number, unit, version)).encode(), digest_size=32).digest()
    return (seed * (length // 32 + 1))[:length]


@dataclass(slots=True)
class Got:
    """What a get brought: bytes by (position, unit), a status a page, and the leases."""

    statuses: list[int] = field(default_factory=list[int])
    units: dict[tuple[int, int], bytes] = field(default_factory=dict[tuple[int, int], bytes])
    leases: list[Lease] = field(default_factory=list[Lease])
    batches: list[int] = field(default_factory=list[int])


class World:
    """One node's cache. ``async with`` opens and closes it; ``reopen`` restarts it."""

    def __init__(
        self,
        directory: Path | None,
        *,
        memory_bytes: int = MIB,
        slab_bytes: int = 64 * KIB,
        nvme_bytes: int = 4 * MIB,
        limits: CacheLimits | None = None,
        files: FileOps | None = None,
        write_behind: bool = True,
    ) -> None:
        self.clock = Clock()
        self._directory = directory
        self._memory_bytes, self._slab_bytes = memory_bytes, slab_bytes
        self._nvme_bytes = nvme_bytes
        self._limits = limits or CacheLimits()
        self._files = files
        self._write_behind = write_behind
        self._writer: asyncio.Task[None] | None = None
        self.unpinned = 0
        """Pages of the last reserve that were to be pinned and were not."""

    async def open(self) -> None:
        self.io = IoPool(4)
        self.store: NvmeStore | None = None
        if self._directory is not None:
            config = NvmeConfig(
                directory=self._directory,
                capacity_bytes=self._nvme_bytes,
                slab_bytes=self._slab_bytes,
                free_space_guard_bytes=0,
            )
            self.store = await NvmeStore.open(config, self.io, self._files)
        self.arena = Arena(
            self._memory_bytes, self._memory_bytes, self._slab_bytes, huge_pages=False
        )
        self.ring = StagingRing(RING_BYTES)
        self.ring_map = mmap.mmap(self.ring.fd, RING_BYTES)  # as the worker has it
        self.cache = PageCache(
            self.arena,
            self.store,
            Registry(self.store),
            Lru,
            self.io,
            self._limits,
            self.clock,
            self.clock,
        )
        self._sessions = 0
        if self._write_behind:
            self.start_writing()

    def start_writing(self) -> None:
        """Runs the write-behind, which begins with what is queued."""
        if self.cache.nvme is not None:
            self._writer = asyncio.create_task(self.cache.nvme.run())

    async def close(self, *, killed: bool = False) -> None:
        """Ends it as a node ends, or as ``kill -9`` would: what was not written is not."""
        if self._writer is not None:
            self._writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._writer
            self._writer = None
        if not killed:
            await self.cache.close()
            if self.store is not None:
                await self.store.close()
        await self.io.close(5.0)
        if killed and self.store is not None:
            await self.cache.close()  # its tasks see ECANCELED
            self.store.release()
        self.ring.close()
        self.ring_map.close()
        self.arena.close()

    async def reopen(self, *, killed: bool = False) -> None:
        """Another process on the same directory."""
        await self.close(killed=killed)
        await self.open()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            await self.close()

    def advance(self, seconds: float) -> None:
        """Lets time pass, and what is due run out."""
        self.clock.now_s += seconds
        self.cache.run_due()

    async def settled(self, *, crowded: bool = False) -> None:
        """Nothing is on its way any more. ``crowded``: loads may still wait for room."""
        loader = self.cache.loader
        async with asyncio.timeout(WAIT_S):
            if self.cache.nvme is not None:
                await self.cache.nvme.settle()
                await self.cache.nvme.close()
            if loader is not None:
                await eventually(lambda: not (loader.reading if crowded else loader.depth))

    async def session(
        self,
        *layouts: Layout,
        namespaces: Sequence[str] = ("default",),
        variants: Sequence[int] | None = None,
    ) -> Session:
        """An open session. Without layouts it has ONE and TWO."""
        registry = self.cache.registry
        numbers = [await registry.namespace(name) for name in namespaces]
        entries: list[SessionLayout] = []
        for layout in layouts or (ONE, TWO):
            known = {number: await registry.layout(number, layout) for number in numbers}
            entries.append(
                SessionLayout(
                    {number: entry.number for number, entry in known.items()},
                    layout,
                    layout.fingerprint(),
                )
            )
        self._sessions += 1
        return Session(
            session_id=self._sessions.to_bytes(16, "little"),
            client="test",
            namespaces=tuple(numbers),
            layouts=tuple(entries),
            variants=None if variants is None else np.array(variants, dtype=np.uint16),
        )

    # What a worker does

    def reserve(
        self,
        session: Session,
        chain: ChainView,
        *,
        length: int | NDArray[np.uint32] = 4096,
        units: Sequence[int] | None = None,
        positions: Sequence[int] | None = None,
        variant: int = 1,
        duration_s: float = 30.0,
        wish: Retention = NO_WISH,
    ) -> tuple[Reservation | None, NDArray[np.uint8]]:
        """Statuses have shape [pages, units]; the pages are those at ``positions``, or all."""
        chosen = units_of(chain, units)
        pages = np.array(range(len(chain)) if positions is None else positions, dtype=np.int64)
        lengths = np.broadcast_to(np.asarray(length, dtype=np.uint32), (len(pages), len(chosen)))
        request = ReservePages(
            chain=chain,
            positions=pages,
            units=chosen,
            lengths=lengths,
            variants=np.full(len(pages), variant, dtype=np.uint16),
            duration_s=duration_s,
            wish=wish,
        )
        answer = self.cache.reserve(session, request)
        self.unpinned = self.cache.pin_offered(request)
        return answer

    def fill(self, bodies: Sequence[tuple[int, int, bytes]]) -> FilledUnits:
        """Lays (position, unit, bytes) into the ring."""
        offset = 0
        offsets: list[int] = []
        for _, _, data in bodies:
            self.ring_map[offset : offset + len(data)] = data
            offsets.append(offset)
            offset += -(-len(data) // 4096) * 4096
        return FilledUnits(
            positions=np.array([position for position, _, _ in bodies], dtype=np.int64),
            units=np.array([unit for _, unit, _ in bodies], dtype=np.int64),
            ring_offsets=np.array(offsets, dtype=np.int64),
            lengths=np.array([len(data) for _, _, data in bodies], dtype=np.int64),
        )

    async def commit(
        self, reservation: Reservation, bodies: Sequence[tuple[int, int, bytes]]
    ) -> list[int]:
        """A status for each."""
        statuses = await self.cache.commit(reservation, self.fill(bodies), self.ring)
        return [int(status) for status in statuses]

    async def put(
        self,
        session: Session,
        chain: ChainView,
        numbers: Sequence[int] | range,
        *,
        length: int = 4096,
        units: Sequence[int] | None = None,
        variant: int = 1,
        version: int = 0,
        wish: Retention = NO_WISH,
    ) -> NDArray[np.uint8]:
        """Reserves, fills, commits and ends; the statuses of the reserve, with the commit's."""
        reservation, statuses = self.reserve(
            session, chain, length=length, units=units, variant=variant, wish=wish
        )
        if reservation is None:
            return statuses
        chosen = units_of(chain, units)
        pages, columns = np.nonzero(statuses == RESERVED)
        wanted = [
            (int(page), int(chosen[column]))
            for page, column in zip(pages.tolist(), columns.tolist(), strict=True)
        ]
        per_commit = max(1, RING_BYTES // (-(-length // 4096) * 4096))
        done: list[int] = []
        for begin in range(0, len(wanted), per_commit):
            done += await self.commit(
                reservation,
                [
                    (position, unit, body(numbers[position], unit, length, version))
                    for position, unit in wanted[begin : begin + per_commit]
                ],
            )
        self.cache.reservations.end(reservation)
        statuses = statuses.copy()
        statuses[pages, columns] = done
        return statuses

    async def get(
        self,
        session: Session,
        chain: ChainView,
        *,
        hold: Hold | None = None,
        first: int = 0,
        units: Sequence[int] | None = None,
        wait_pending: bool = False,
        wait_s: float = 10.0,
        lease_s: float = 10.0,
        release: bool = True,
    ) -> Got:
        """Runs a get to its end and copies what was granted."""
        chain = hold.chain if hold is not None else chain
        chosen = units_of(chain, units)
        request = GetPages(
            chain=chain,
            hold=hold,
            first_position=first,
            units=chosen,
            wait_pending=wait_pending,
            until_s=self.clock() + wait_s,
            lease_s=lease_s,
        )
        got = Got()
        async for item in self.cache.get(session, request):
            if not isinstance(item, Grant):
                got.statuses = [int(status) for status in item.statuses]
                continue
            got.batches.append(len(item.rows))
            for position, row in zip(item.positions.tolist(), item.rows.tolist(), strict=True):
                for unit in chosen.tolist():
                    got.units[position, unit] = self.read(row, unit)
            got.leases.append(item.lease)
            if release:
                assert self.cache.leases.release(session, item.lease.lease_id)
        return got

    def read(self, row: int, unit: int) -> bytes:
        """Bytes of a unit as they lie in the arena now."""
        columns = self.cache.table.units
        unit_row = int(self.cache.table.unit_base[row]) + unit
        place, length = int(columns.memory_offset[unit_row]), int(columns.length[unit_row])
        assert place >= 0, "a granted unit has no place"
        return bytes(self.arena.view(place, length))

    def present(self, session: Session, chain: ChainView) -> int:
        """Pages of the longest present prefix."""
        return self.cache.match(session, chain).page_count

    def evict_all(self) -> None:
        """Drops from memory what nobody needs, as pressure would."""
        table = self.cache.table
        rows = table.live_rows()
        idle = (table.pins[rows] == 0) & (table.reserved_mask[rows] == 0) & ~table.kept[rows]
        self.cache.memory.evict(rows[idle & (table.memory_mask[rows] != 0)])


async def eventually(holds: Callable[[], bool]) -> None:
    """Waits until it holds; TimeoutError if it never does."""
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 - nothing tells of what is waited for here
            await asyncio.sleep(0.001)


def units_of(chain: ChainView, units: Sequence[int] | None) -> NDArray[np.int32]:
    """Unit indices; None means all."""
    if units is None:
        return np.arange(chain.layout.layout.unit_count, dtype=np.int32)
    return np.array(units, dtype=np.int32)


def chain_of(
    session: Session,
    numbers: Sequence[int] | range,
    *,
    layout: int = 0,
    namespace: int = 0,
    parent: int | None = None,
    unlinked: bool = False,
) -> ChainView:
    """A chain of the pages that ``numbers`` stand for."""
    return ChainView(
        namespace=session.namespaces[namespace],
        layout=session.layouts[layout],
        keys=keys(numbers),
        parent=None if parent is None else keys([parent]),
        unlinked=unlinked,
    )
