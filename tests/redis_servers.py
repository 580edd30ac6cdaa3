"""Redis servers for tests: one alone, Sentinel with a replica, a cluster of three, TLS and ACL.

All are processes of the test's own on free ports of loopback, without disk, and end with it.
Where there is no redis-server a test fails: ``make redis`` gets one.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Self

from tests.fetch_redis import find_redis_server

from octavo.bench.redis_servers import HOST, RedisServer, wait_until

SERVICE = "octavo-test"


def program() -> str:
    """What starts a server; see ``find_redis_server``."""
    return find_redis_server()


class SentinelServers:
    """A master, its replica, and three Sentinels that watch them."""

    def __init__(self) -> None:
        self.master = RedisServer(program())
        self.replica = RedisServer(program(), replicaof=(HOST, self.master.port))
        self.sentinels = [_Sentinel(self.master.port) for _ in range(3)]
        self._stack = ExitStack()

    @property
    def address(self) -> str:
        hosts = ",".join(f"{HOST}:{each.port}" for each in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}"

    def master_port(self) -> int:
        """Who is the master, by what the first Sentinel says."""
        with self.sentinels[0].client() as client:
            return int(client.sentinel_get_master_addr_by_name(SERVICE)[1])

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for server in (self.master, self.replica, *self.sentinels):
                stack.enter_context(server)
            wait_until(lambda: all(map(self._is_complete, self.sentinels)), "Sentinels are alone")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @staticmethod
    def _is_complete(sentinel: RedisServer) -> bool:
        with sentinel.client() as client:
            state = client.sentinel_master(SERVICE)
            return (state["num-slaves"], state["num-other-sentinels"]) == (1, 2)


class _Sentinel(RedisServer):
    def __init__(self, master_port: int) -> None:
        super().__init__(program())
        self._configuration = "\n".join(
            (
                f"sentinel monitor {SERVICE} {HOST} {master_port} 2",
                f"sentinel down-after-milliseconds {SERVICE} 500",
                f"sentinel failover-timeout {SERVICE} 3000",
            )
        )

    def arguments(self) -> list[str]:
        # Sentinel writes what it learns into the file that it was started with.
        path = self.folder / "sentinel.conf"
        if not path.exists():
            path.write_text(f"bind {HOST}\nport {self.port}\n{self._configuration}\n")
        return [self.program, str(path), "--sentinel"]
