"""Clients of redis-py for each form of Redis.

They neither retry nor wait: who asks has a deadline, and decides whether to ask again. RESP2,
which every Redis and Valkey speaks alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from octavo_server.addresses import HostPort
from octavo_server.index.redis_settings import Form, RedisSettings, Tls


def make_client(settings: RedisSettings, also: Sequence[HostPort] = ()) -> Any:
    """A client of one server, of Sentinel's current master, or of a cluster. Connects to none.

    ``also`` are servers known to be of the cluster, beside those in the settings.
    """
    timeout_s = max(settings.match_timeout_s, settings.write_timeout_s)
    options: dict[str, Any] = {
        "username": settings.username,
        "password": settings.password,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        **_tls_options(settings.tls),
    }
    if settings.form is Form.CLUSTER:
        addresses = (*settings.addresses, *also)
        return RedisCluster(
            startup_nodes=[ClusterNode(each.host, each.port) for each in addresses],
            require_full_coverage=False,
            max_connections=settings.calls_max,
            **options,
        )
    options["db"] = settings.database
    if settings.form is Form.SENTINEL:
        assert settings.service is not None
        make_sentinel: Any = Sentinel
        sentinel = make_sentinel(
            [(each.host, each.port) for each in settings.addresses],
            sentinel_kwargs={
                **options,
                "db": 0,
                "username": settings.sentinel_username,
                "password": settings.sentinel_password,
            },
        )
        return sentinel.master_for(settings.service, **options)
    if settings.socket_path is not None:
        return Redis(unix_socket_path=str(settings.socket_path), **options)
    (address,) = settings.addresses
    return Redis(host=address.host, port=address.port, **options)


def _tls_options(tls: Tls | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        "ssl": True,
        "ssl_ca_certs": _text(tls.ca_file),
        "ssl_certfile": _text(tls.certificate_file),
        "ssl_keyfile": _text(tls.key_file),
        "ssl_check_hostname": tls.check_host_name,
    }


def _text(path: object) -> str | None:
    return None if path is None else str(path)
