"""Builds a node from its settings, by hand, top to bottom, and runs it."""

# gRPC's health and reflection packages have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import logging
import secrets
import signal
from typing import Final

import grpc
import uvloop
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health import aio as health_aio  # pyright: ignore[reportAttributeAccessIssue]
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from octavo_proto import limits
from octavo_proto.v1 import admin_pb2_grpc, cache_pb2_grpc
from octavo_server.bulk.listener import BulkListener
from octavo_server.bulk.tickets import Tickets
from octavo_server.cache.limits import CacheLimits
from octavo_server.cache.page_cache import PageCache
from octavo_server.cache.registry import Registry
from octavo_server.eviction.lru import Lru
from octavo_server.node import SERVICES, Node
from octavo_server.places import PlaceError
from octavo_server.rpc.admin_service import AdminService
from octavo_server.rpc.broker import Broker, broker_path
from octavo_server.rpc.cache_service import CacheService, NodeFacts
from octavo_server.rpc.decoding import checked_server
from octavo_server.rpc.sessions import Sessions
from octavo_server.settings import Settings
from octavo_server.sizing import ArenaShape, arena_shape, nvme_slab_bytes
from octavo_server.store.arena import Arena
from octavo_server.store.io_pool import IoPool
from octavo_server.store.nvme.config import NvmeConfig, StoreError
from octavo_server.store.nvme.store import NvmeStore
from octavo_server.telemetry.http import HttpPort
from octavo_server.tenancy.master_key import load_master_key, namespace_key

_log = logging.getLogger(__name__)

EXIT_REFUSED: Final = 2
"""The node did not start because of its settings or surroundings."""

FEATURES: Final = ("shm", "inline", "positions", "retention", "hints")
"""What every node of this version can do beyond the protocol's core."""

_GRPC_OPTIONS: Final = (
    ("grpc.max_receive_message_length", limits.MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", limits.MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second node on it
    ("grpc.max_concurrent_streams", 1024),
)


async def build(settings: Settings) -> Node:
    """The node that ``settings`` describe, not started yet.

    Raises:
        PlaceError, StoreError: a file or directory is not what it must be.
        OSError: memory or an address can't be had.
    """
    master_key = load_master_key(settings.master_key_path)
    shape = arena_shape(settings.memory_bytes, settings.segment_bytes, settings.slab_bytes)
    io = IoPool(settings.io_threads)
    store = await _open_store(settings, shape, io)
    arena = Arena(
        shape.memory_bytes,
        shape.segment_bytes,
        shape.slab_bytes,
        huge_pages=settings.huge_pages == "auto",
    )
    cache = PageCache(
        arena=arena,
        store=store,
        registry=Registry(store),
        policy_of=Lru,
        io=io,
        limits=CacheLimits(
            lease_s=settings.lease_s,
            hold_s=settings.hold_s,
            reservation_s=settings.reservation_s,
            leases_max=settings.session_leases_max,
            holds_max=settings.session_holds_max,
            reservations_max=settings.session_reservations_max,
            pin_share_max=settings.pin_share,
        ),
    )
    sessions = Sessions(
        cache,
        lambda name: namespace_key(master_key, name),
        sessions_max=settings.sessions_max,
        idle_s=settings.session_idle_s,
        ring_bytes=settings.staging_ring_bytes,
    )
    broker = Broker(broker_path(settings.listen_unix), arena, sessions)
    bulk = _bulk_listener(settings, cache, sessions)
    facts = NodeFacts(
        node_id=settings.node_id,
        boot_id=secrets.token_hex(8),
        version=importlib.metadata.version("octavo"),
        features=(
            *FEATURES,
            *(("nvme",) if store is not None else ()),
            *(("bulk",) if bulk is not None else ()),
        ),
        broker_path=str(broker.path),
    )
    server = grpc.aio.server(options=_GRPC_OPTIONS)
    health = health_aio.HealthServicer()
    node = Node(
        facts=facts,
        io=io,
        store=store,
        cache=cache,
        sessions=sessions,
        broker=broker,
        grpc_server=server,
        health=health,
        prefault=settings.prefault,
        bulk=bulk,
    )
    checked = checked_server(server)
    service = CacheService(cache, sessions, facts, None if bulk is None else bulk.port)
    cache_pb2_grpc.add_CacheServicer_to_server(service, checked)
    admin_pb2_grpc.add_AdminServicer_to_server(AdminService(node.snapshot), checked)
    health_pb2_grpc.add_HealthServicer_to_server(health, checked)
    reflected = (*SERVICES[1:], HEALTH_SERVICE, reflection.SERVICE_NAME)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
        reflection.aio.ReflectionServicer(reflected), checked
    )
    _bind(server, settings)
    if settings.http_address is not None:
        node.http = HttpPort(settings.http_address, node.snapshot)
    return node


def _bulk_listener(settings: Settings, cache: PageCache, sessions: Sessions) -> BulkListener | None:
    if settings.bulk_address is None:
        return None
    listener = BulkListener(
        settings.bulk_address,
        cache,
        Tickets(cache.deadlines),
        on_use=sessions.keep,
    )
    sessions.on_close = listener.hang_up
    return listener


def serve(settings: Settings) -> int:
    """Runs a node until SIGTERM or SIGINT; returns the process's exit code."""
    try:
        uvloop.run(_serve(settings))
    except (PlaceError, StoreError, OSError, RuntimeError) as error:
        _log.error("the node can't start: %s", error)
        return EXIT_REFUSED
    return 0


async def _serve(settings: Settings) -> None:
    node = await build(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await node.start()
    # What start-up made stays for good: keep the collector from walking it again and again.
    gc.collect()
    gc.freeze()
    await stop.wait()
    _log.info("stopping")
    await node.stop(settings.drain_s)


async def _open_store(settings: Settings, shape: ArenaShape, io: IoPool) -> NvmeStore | None:
    if settings.nvme_dir is None or settings.nvme_bytes is None:
        return None
    return await NvmeStore.open(
        NvmeConfig(
            directory=settings.nvme_dir,
            capacity_bytes=settings.nvme_bytes,
            slab_bytes=nvme_slab_bytes(settings.nvme_bytes, shape.slab_bytes),
            free_space_guard_bytes=settings.nvme_free_space_guard_bytes,
        ),
        io,
    )


def _bind(server: grpc.aio.Server, settings: Settings) -> None:
    server.add_insecure_port(f"unix:{settings.listen_unix}")
    if settings.tcp_address is not None:
        server.add_insecure_port(str(settings.tcp_address))
