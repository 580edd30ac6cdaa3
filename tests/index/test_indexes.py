"""Every index keeps the contract: in this process, on one Redis, on a cluster of three."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.index.index_contract import IndexContract, OpenIndex

from octavo.bench.redis_servers import RedisClusterServers, RedisServer
from octavo_server.index.local_index import LocalIndex
from octavo_server.index.near_cache import NearCache
from octavo_server.index.prefix_index import PrefixIndex
from octavo_server.index.redis_index import RedisIndex
from octavo_server.index.redis_settings import RedisSettings, parse_redis_address


def settings_for(address: str, prefix: str) -> RedisSettings:
    """As a node has them, with patience for a busy machine."""
    return replace(
        parse_redis_address(address), prefix=prefix, match_timeout_s=10, write_timeout_s=10
    )


def open_redis_index(settings: RedisSettings) -> PrefixIndex:
    """Reads anew each time, so that what it says is what Redis has."""
    return RedisIndex(settings, near=NearCache(entries_max=0), view_age_s=0.02)


class TestLocalIndex(IndexContract):
    @pytest.fixture
    def open_index(self) -> OpenIndex:
        index = LocalIndex()
        return lambda: index


class TestRedisIndex(IndexContract):
    @pytest.fixture
    def open_index(self, redis_server: RedisServer, prefix: str) -> OpenIndex:
        settings = settings_for(redis_server.address, prefix)
        return lambda: open_redis_index(settings)


class TestRedisClusterIndex(IndexContract):
    @pytest.fixture
    def open_index(self, redis_cluster: RedisClusterServers, prefix: str) -> OpenIndex:
        settings = settings_for(redis_cluster.address, prefix)
        return lambda: open_redis_index(settings)
