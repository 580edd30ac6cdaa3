"""Redis servers for measurements and tests: processes of our own, on loopback, without disk."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self, cast

HOST: Final = "127.0.0.1"
SLOTS: Final = 16_384
START_S: Final = 15.0
_STOP_S: Final = 10.0
_NAMES: Final = ("redis-server", "valkey-server")
FETCHED: Final = Path(".cache/redis/bin/redis-server")
"""What ``make redis`` fetches, in the checkout."""


class NoRedisServerError(Exception):
    """There is no redis-server to start."""


def redis_server_program(given: Path | None = None, checkout: Path = Path()) -> str:
    """What starts a server: the one given, one on PATH, or what ``make redis`` fetched.

    ``checkout`` is where that was; the working directory unless it is given.

    Raises:
        NoRedisServerError: there is none.
    """
    candidates = [str(given)] if given else [*_NAMES, str((checkout / FETCHED).absolute())]
    for candidate in candidates:
        found = shutil.which(candidate)
        if found:
            return found
    raise NoRedisServerError(
        f"no redis-server: {given} is none"
        if given
        else "no redis-server on PATH: install Redis or Valkey, or run `make redis` in the checkout"
    )


def free_port() -> int:
    """A TCP port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """One process. Leaving the context kills it; it is not asked."""

    def __init__(self, program: str, **options: object) -> None:
        """``options`` are Redis' own, with underscores; several values as a tuple."""
        self.port = free_port()
        self.program = program
        self.options: dict[str, object] = {"save": "", "appendonly": "no", **options}
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-redis-")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        """The server's working directory."""
        return Path(self._folder.name)

    @property
    def address(self) -> str:
        return f"redis://{HOST}:{self.port}"

    def arguments(self) -> list[str]:
        """The command line."""
        found = [self.program, "--bind", HOST, "--port", str(self.port), "--dir", str(self.folder)]
        for name, value in self.options.items():
            found.append(f"--{name.replace('_', '-')}")
            found += (
                map(str, cast("tuple[object, ...]", value))
                if isinstance(value, tuple)
                else [str(value)]
            )
        return found

    def start(self) -> Self:
        """Starts the process and waits until it answers."""
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self.arguments(), stdout=log, stderr=log)
        wait_until(self._answers, f"redis-server: {(self.folder / 'log').read_text()[-2000:]}")
        return self

    def client(self, **options: Any) -> Any:
        """A blocking client of redis-py."""
        from redis import Redis

        return Redis(host=HOST, port=self.port, protocol=2, socket_timeout=5, **options)

    def kill(self) -> None:
        """kill -9."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(_STOP_S)

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def _answers(self) -> bool:
        from redis.exceptions import RedisError

        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError((self.folder / "log").read_text()[-2000:])
        try:
            with self.client() as client:
                return bool(client.ping())
        except (OSError, RedisError) as error:
            # It wants credentials, or TLS: so it is there.
            return "NOAUTH" in str(error) or "closed by server" in str(error)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self._folder.cleanup()


class RedisClusterServers:
    """A cluster of servers without replicas, each with its part of the slots."""

    def __init__(self, program: str, size: int = 3, **options: object) -> None:
        self.servers = [
            RedisServer(
                program,
                cluster_enabled="yes",
                cluster_node_timeout=2000,
                cluster_port=free_port(),
                **options,
            )
            for _ in range(size)
        ]
        self._stack = ExitStack()

    @property
    def address(self) -> str:
        return "redis+cluster://" + ",".join(f"{HOST}:{each.port}" for each in self.servers)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server)
            self._join()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _join(self) -> None:
        cuts = [SLOTS * at // len(self.servers) for at in range(len(self.servers) + 1)]
        first = self.servers[0]
        for at, server in enumerate(self.servers):
            with server.client() as client:
                client.execute_command("CLUSTER ADDSLOTSRANGE", cuts[at], cuts[at + 1] - 1)
                client.execute_command(
                    "CLUSTER MEET", HOST, first.port, first.options["cluster_port"]
                )
        wait_until(lambda: all(map(self._is_whole, self.servers)), "the cluster does not form")

    def _is_whole(self, server: RedisServer) -> bool:
        with server.client() as client:
            info: dict[str, str] = client.execute_command("CLUSTER INFO")
            known = int(info["cluster_known_nodes"])
            return known == len(self.servers) and info["cluster_state"] == "ok"


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    """Raises RuntimeError with ``otherwise`` if ``condition`` does not come true in time."""
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(otherwise)
        time.sleep(0.02)
