"""A store, its pool, and pages to put into it."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo_proto.keys import digest_seed, unit_digest
from octavo_proto.layout import Layout
from octavo_server.store.file_ops import FileOps
from octavo_server.store.io_pool import IoPool
from octavo_server.store.nvme import (
    RECORD,
    BodyToRead,
    NvmeConfig,
    NvmeStore,
    UnitOutcome,
)
from octavo_server.store.nvme.records import Records, padded_bytes

LAYOUT = Layout(name="tiny", model="m", layers=1, kv_heads=1, head_dim=8)
SLAB_BYTES = 1 << 20
CAPACITY_BYTES = 16 << 20
CLOSE_TIMEOUT_S = 10.0


class Bench:
    """Puts and gets units of a store the way a node does."""

    def __init__(self, store: NvmeStore, namespace: int, layout: int) -> None:
        self.store = store
        self.namespace = namespace
        self.layout = layout

    def records(self, seeds: Sequence[int], length: int) -> Records:
        """Records of units whose keys and bodies follow from ``seeds``; no offsets yet."""
        records = np.zeros(len(seeds), dtype=RECORD)
        records["namespace"] = self.namespace
        records["layout"] = self.layout
        records["unit_count"] = 1
        records["length"] = length
        for row, seed in enumerate(seeds):
            records["key"][row] = key_of(seed)
            records["digest"][row] = unit_digest(body_of(seed, length), seed_of(seed, length))
        return records

    async def put(
        self, seeds: Sequence[int], length: int = 5000
    ) -> tuple[Records, NDArray[np.bool_]]:
        """Allocates and writes; answers the records and which were stored."""
        records = self.records(seeds, length)
        offsets = self.store.allocate(records["length"])
        placed = offsets >= 0
        records["offset"] = offsets
        bodies = [aligned(body_of(seed, length)) for seed in np.asarray(seeds)[placed].tolist()]
        stored = np.zeros(len(seeds), dtype=np.bool_)
        stored[placed] = await self.store.write(records[placed], bodies)
        return records, stored

    async def remove(self, records: Records, *, deleted: bool = False) -> bool:
        logged = await self.store.forget(records, deleted=deleted)
        self.store.free(records["offset"].astype(np.int64))
        return logged

    async def get(self, records: Records) -> list[UnitOutcome]:
        return await get(self.store, records)


async def get(store: NvmeStore, records: Records) -> list[UnitOutcome]:
    """Reads units; an OK unit's bytes must be its own."""
    outcomes: dict[int, UnitOutcome] = {}
    everything = asyncio.Event()

    def done(read: list[BodyToRead]) -> None:
        for unit in read:
            assert isinstance(unit.tag, int)
            assert unit.tag not in outcomes
            outcomes[unit.tag] = unit.outcome
        if len(outcomes) == len(records):
            everything.set()

    units = [
        BodyToRead(
            offset=int(record["offset"]),
            length=int(record["length"]),
            view=aligned(b"", padded_bytes(int(record["length"]))),
            seed=seed_of(int(record["key"][0]), int(record["length"])),
            digest=int(record["digest"]),
            tag=row,
        )
        for row, record in enumerate(records)
    ]
    store.read(units, done)
    if units:
        await asyncio.wait_for(everything.wait(), CLOSE_TIMEOUT_S)
    for row, unit in enumerate(units):
        if outcomes[row] is UnitOutcome.OK:
            seed = int(records["key"][row][0])
            assert unit.view[: unit.length] == body_of(seed, unit.length)
    return [outcomes[row] for row in range(len(records))]


async def eventually(holds: Callable[[], bool]) -> None:
    """Returns once ``holds``; raises TimeoutError if that takes too long."""
    async with asyncio.timeout(CLOSE_TIMEOUT_S):
        while not holds():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.002)


def key_of(seed: int) -> tuple[int, int]:
    return seed, seed * 7 + 1


def seed_of(seed: int, length: int) -> int:
    key = np.array(key_of(seed), dtype="<u8").tobytes()
    return digest_seed(key, LAYOUT.fingerprint(), 0, 0, length)


def body_of(seed: int, length: int) -> bytes:
    pattern = np.random.default_rng(seed).bytes(min(length, 512))
    return (pattern * (length // len(pattern) + 1))[:length]


def aligned(body: bytes, size_bytes: int | None = None) -> memoryview:
    """``body`` at the start of a buffer of whole memory pages."""
    view = memoryview(mmap.mmap(-1, size_bytes or padded_bytes(len(body))))
    view[: len(body)] = body
    return view


@asynccontextmanager
async def opened(
    directory: Path,
    files: FileOps | None = None,
    *,
    capacity_bytes: int = CAPACITY_BYTES,
    slab_bytes: int = SLAB_BYTES,
    guard_bytes: int = 0,
    abandon: bool = False,
) -> AsyncGenerator[Bench]:
    """An open store with one namespace and one layout; ``abandon`` leaves it as a kill would."""
    io = IoPool(threads=4)
    config = NvmeConfig(
        directory=directory,
        capacity_bytes=capacity_bytes,
        slab_bytes=slab_bytes,
        free_space_guard_bytes=guard_bytes,
        read_depth=4,
        write_depth=4,
    )
    store: NvmeStore | None = None
    try:
        store = await NvmeStore.open(config, io, files)
        namespace = await store.register_namespace("tests")
        yield Bench(store, namespace, await store.register_layout(namespace, LAYOUT))
        if not abandon:
            await store.close()
    finally:
        await io.close(CLOSE_TIMEOUT_S)
        if store is not None:
            store.release()
