"""A node as far as the index sees it: index, publisher, heartbeat and sweeper, all running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from tests.index.pages import holder

from octavo_server.index.changes import NO_CHANGES, Changes
from octavo_server.index.entries import Keys, shards_of
from octavo_server.index.heartbeat import Heartbeat
from octavo_server.index.holders import Holder, HolderRegistry, LeaseTerms
from octavo_server.index.near_cache import NearCache
from octavo_server.index.publisher import Publisher, PublisherConfig
from octavo_server.index.redis_index import RedisIndex
from octavo_server.index.redis_settings import RedisSettings

LEASE = LeaseTerms(lease_s=3, keep_s=30)


class ClusterNode:
    """Holds whole pages; ``keys`` is all that it has."""

    def __init__(self, name: str, settings: RedisSettings) -> None:
        self.holder = holder(name)
        self.settings = settings
        self.index = RedisIndex(settings, near=NearCache(entries_max=0), view_age_s=0.1)
        self.keys: Keys = NO_CHANGES.keys
        self.publisher = Publisher(self.index, self, PublisherConfig(check_s=0.1, full_pause_s=0.2))
        self._loop = asyncio.get_running_loop()
        self.heartbeat = Heartbeat(
            self._open_registry, [(self.holder, LEASE)], self._on_id, lambda _: None
        )
        self.ids: list[int] = []

    def held(self, shard: int) -> Changes:
        return Changes.published(self.keys[shards_of(self.keys) == shard])

    def put(self, keys: Keys) -> None:
        self.keys = keys
        self.publisher.note(Changes.published(keys))

    async def found(self, keys: Keys) -> int:
        """Pages of the chain that somebody holds, looked up from here."""
        return (await self.index.match(keys, exact=True)).page_count

    def _on_id(self, holder_: Holder, holder_id: int) -> None:
        self.ids.append(holder_id)
        self._loop.call_soon_threadsafe(self.publisher.adopt, holder_id)

    @asynccontextmanager
    async def _open_registry(self) -> AsyncGenerator[HolderRegistry]:
        index = RedisIndex(self.settings)
        yield index.registry
        await index.close()


@asynccontextmanager
async def running_node(name: str, settings: RedisSettings) -> AsyncGenerator[ClusterNode]:
    """Starts it; at the end it goes without leaving, as a process that is killed."""
    node = ClusterNode(name, settings)
    publishing = asyncio.create_task(node.publisher.run())
    node.heartbeat.start()
    try:
        yield node
    finally:
        await asyncio.to_thread(node.heartbeat.stop, leave=False)
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        await node.index.close()
