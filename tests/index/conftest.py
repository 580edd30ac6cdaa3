"""One Redis of each form for all tests of this folder; every test has a prefix of its own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from tests.redis_servers import SentinelServers, program

from octavo.bench.redis_servers import RedisClusterServers, RedisServer

_NUMBERS = count()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer(program()) as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisClusterServers]:
    with RedisClusterServers(program()) as cluster:
        yield cluster


@pytest.fixture
def sentinel_servers() -> Iterator[SentinelServers]:
    with SentinelServers() as servers:
        yield servers


@pytest.fixture
def prefix() -> str:
    return f"test{next(_NUMBERS)}"
