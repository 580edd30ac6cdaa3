"""A running node: what it is made of, and how it starts and ends."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Final, Protocol

import grpc
from grpc_health.v1 import health_pb2

from octavo_server.bulk.listener import BulkListener
from octavo_server.cache.page_cache import PageCache
from octavo_server.cache.page_table import PageTable
from octavo_server.rpc.broker import Broker
from octavo_server.rpc.cache_service import NodeFacts
from octavo_server.rpc.sessions import Sessions
from octavo_server.store.ahead import ArenaAhead
from octavo_server.store.io_pool import IoPool
from octavo_server.store.nvme.store import NvmeStore
from octavo_server.supervision import Supervisor
from octavo_server.telemetry.http import HttpPort
from octavo_server.telemetry.snapshot import Snapshot, TierSnapshot

_log = logging.getLogger(__name__)

SERVICES: Final = ("", "octavo.v1.Cache", "octavo.v1.Admin")
STOP_GRACE_S: Final = 1.0
"""Calls under way get this long to end once the queue is drained."""


class HealthStatuses(Protocol):
    """What gRPC's health service answers for each service; its package has no types."""

    async def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        """From now on."""
        ...


@dataclass(slots=True, eq=False)
class Node:
    """The parts of one node, made by the assembly. ``start`` and ``stop`` it once."""

    facts: NodeFacts
    io: IoPool
    store: NvmeStore | None
    cache: PageCache
    sessions: Sessions
    broker: Broker
    grpc_server: grpc.aio.Server
    health: HealthStatuses
    prefault: bool
    bulk: BulkListener | None = None
    supervisor: Supervisor = field(init=False)
    http: HttpPort | None = None
    ready: bool = False
    _started_at: float = field(default_factory=time.monotonic)
    _health_task: asyncio.Future[None] | None = None

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(self._unhealthy)

    async def start(self) -> None:
        """Serves from now on."""
        self.broker.listen()
        self.supervisor.start("broker", self.broker.run())
        if self.bulk is not None:
            self.supervisor.start("bulk port", self.bulk.run())
        self.supervisor.start("deadlines", self.cache.run_deadlines())
        if self.cache.nvme is not None:
            self.supervisor.start("write-behind", self.cache.nvme.run())
        ahead = ArenaAhead(self.cache.memory.arena, self.io, everything=self.prefault)
        self.supervisor.start("prefault", ahead.run())
        await self.grpc_server.start()
        if self.http is not None:
            await self.http.start()
        self.ready = True
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        _log.info("node %s serves (boot %s)", self.facts.node_id, self.facts.boot_id)

    async def stop(self, drain_s: float) -> None:
        """No new work; what is queued becomes durable, within ``drain_s``; then the end."""
        self.sessions.draining = True
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        until_s = asyncio.get_running_loop().time() + drain_s
        await self._drain(until_s)
        await self.grpc_server.stop(STOP_GRACE_S)
        # Puts that were under way were let end, and some of them ended behind the first drain.
        await self._drain(until_s)
        self.ready = False
        self.sessions.close_all()
        await self.broker.close()
        if self.bulk is not None:
            await self.bulk.close()
        await self.supervisor.stop()
        if self.http is not None:
            await self.http.stop()
        await self.cache.close()
        if self.store is not None:
            await self.store.close()
        await self.io.close(STOP_GRACE_S)
        self.cache.memory.arena.close()

    async def _drain(self, until_s: float) -> None:
        if self.cache.nvme is None:
            return
        try:
            async with asyncio.timeout_at(until_s):
                await self.cache.nvme.settle()
        except TimeoutError:
            _log.warning("%d pages are not durable", self.cache.nvme.queue_depth)

    def snapshot(self) -> Snapshot:
        """The node at this moment."""
        cache, store = self.cache, self.store
        counters = dict(cache.counters)
        gauges = {
            "pages": float(cache.table.row_count),
            "sessions": float(len(self.sessions)),
            "attached_sessions": float(self.sessions.attached_count),
            "leases": float(cache.leases.lease_count),
            "holds": float(cache.leases.hold_count),
            "reservations": float(len(cache.reservations)),
            "reserved_bytes": float(cache.reservations.reserved_bytes),
            "kept_pages": float(cache.keeping.page_count),
            "kept_bytes": float(cache.keeping.size_bytes),
            "conversations": float(cache.conversations.count),
            "waiting_conversations": float(cache.conversations.waiting_count),
            "bulk_streams": float(self.bulk.stream_count if self.bulk else 0),
            "bulk_transfers": float(self.bulk.transfer_count if self.bulk else 0),
            "pinned_pages": float((cache.table.pins[: cache.table.high_water] > 0).sum()),
        }
        problems = list(self.supervisor.problems())
        warnings: list[str] = []
        tiers = [self._memory_snapshot()]
        if store is not None and cache.nvme is not None and cache.loader is not None:
            counters |= {f"nvme_{name}": n for name, n in store.counters.as_dict().items()}
            gauges["nvme_queued_pages"] = float(cache.nvme.queue_depth)
            gauges["nvme_loading_units"] = float(cache.loader.depth)
            problems += store.problems()
            warnings += store.warnings()
            tiers.append(self._nvme_snapshot(store))
        return Snapshot(
            node_id=self.facts.node_id,
            boot_id=self.facts.boot_id,
            version=self.facts.version,
            uptime_s=time.monotonic() - self._started_at,
            ready=self.ready and not self.sessions.draining,
            draining=self.sessions.draining,
            tiers=tuple(tiers),
            counters=counters,
            gauges=gauges,
            problems=tuple(problems),
            warnings=tuple(warnings),
        )

    def _memory_snapshot(self) -> TierSnapshot:
        slots, table = self.cache.memory.arena.slots, self.cache.table
        page_bytes, page_count = _content(table, in_memory=True)
        return TierSnapshot(
            "memory", slots.capacity_bytes, slots.used_bytes, page_bytes, page_count
        )

    def _nvme_snapshot(self, store: NvmeStore) -> TierSnapshot:
        page_bytes, page_count = _content(self.cache.table, in_memory=False)
        return TierSnapshot("nvme", store.capacity_bytes, store.used_bytes, page_bytes, page_count)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in SERVICES:
            await self.health.set(service, status)

    def _unhealthy(self) -> None:
        self._health_task = asyncio.ensure_future(
            self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        )


def _content(table: PageTable, *, in_memory: bool) -> tuple[int, int]:
    """Bytes of content, and whole pages, in a tier."""
    rows = table.live_rows()
    masks = table.memory_mask[rows] if in_memory else table.nvme_mask[rows]
    owners, units = table.expanded(rows)
    bits = (units - table.unit_base[rows][owners]).astype("u8")
    here = (masks[owners] >> bits) & 1
    page_bytes = int(table.units.length[units][here != 0].astype("i8").sum())
    return page_bytes, int((masks == table.full_mask[rows]).sum())
