"""All that a store needs before it can serve: lock, identity, registry, bodies, live records."""

from __future__ import annotations

import os
from dataclasses import dataclass

from octavo_server.store.file_ops import FileOps
from octavo_server.store.io_pool import IoPool
from octavo_server.store.nvme.bodies import Bodies
from octavo_server.store.nvme.config import NvmeConfig, StoreError
from octavo_server.store.nvme.directory import BODIES_NAME, IDENTITY_NAME, identify, lock_directory
from octavo_server.store.nvme.health import SpaceGuard, StoreCounters
from octavo_server.store.nvme.records import store_seed
from octavo_server.store.nvme.recovery import Recovery, recover
from octavo_server.store.nvme.registry import Registry
from octavo_server.store.slabs import SlabAllocator


@dataclass(frozen=True, slots=True)
class OpenedFiles:
    """What ``open_files`` made. Whoever gets it closes ``bodies``, the log and ``lock_fd``."""

    lock_fd: int
    store_id: bytes
    registry: Registry
    bodies: Bodies
    slabs: SlabAllocator
    recovery: Recovery
    counters: StoreCounters
    guard: SpaceGuard


async def open_files(config: NvmeConfig, io: IoPool, files: FileOps) -> OpenedFiles:
    """Takes the directory for this process and recovers what lies there.

    Raises:
        StoreError: the message says why not and what to do. The directory is free again.
    """
    directory = config.directory
    if not (directory / IDENTITY_NAME).exists():  # refused before anything is made
        _require_a_slab(config.capacity_bytes, config.slab_bytes)
    counters = StoreCounters()
    lock_fd = await io.run(lambda: lock_directory(directory))
    opened_bodies: Bodies | None = None
    try:
        identity = await identify(directory, config.slab_bytes, io, files)
        _require_a_slab(config.capacity_bytes, identity.slab_bytes)
        slabs = SlabAllocator(config.capacity_bytes, identity.slab_bytes)
        store_id = identity.store_id
        registry = Registry(directory, io, files)
        await registry.load()
        bodies = opened_bodies = await io.run(
            lambda: Bodies(directory / BODIES_NAME, slabs.capacity_bytes, files)
        )
        recovery = await io.run(
            lambda: recover(
                directory,
                seed=store_seed(store_id),
                files=files,
                bodies=bodies,
                slabs=slabs,
                layouts=registry.layouts.keys(),
                counters=counters,
            )
        )
        guard = SpaceGuard(config.free_space_guard_bytes)
        guard.looked(*await io.run(bodies.space))
        return OpenedFiles(lock_fd, store_id, registry, bodies, slabs, recovery, counters, guard)
    except BaseException as error:
        if opened_bodies is not None:
            opened_bodies.close()
        os.close(lock_fd)
        if isinstance(error, OSError):
            raise StoreError(f"the NVMe directory {directory} can't be used: {error}") from error
        raise


def _require_a_slab(capacity_bytes: int, slab_bytes: int) -> None:
    if capacity_bytes < slab_bytes:
        raise StoreError(
            f"the NVMe capacity is {capacity_bytes} bytes, must be at least one slab "
            f"({slab_bytes} bytes)"
        )
