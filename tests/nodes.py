"""Real nodes for tests: a process each, on a Unix socket in a temporary directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

START_S = 20.0


class NodeProcess(AbstractContextManager["NodeProcess"]):
    """``python -m octavo_server`` with the given settings (underscores or dashes alike).

    The socket lies in a directory of its own, for socket paths are short and pytest's are not.
    Leaving the context kills the process.
    """

    def __init__(self, directory: Path, **settings: object) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._runtime = tempfile.TemporaryDirectory(prefix="octavo-test-")
        self.socket = Path(self._runtime.name) / "o.sock"
        self.settings: dict[str, object] = {
            "listen_unix": self.socket,
            "state_dir": directory / "state",
            "memory_bytes": "64MiB",
            "staging_ring_bytes": "16MiB",
            "http": "off",
            "listen_bulk": "127.0.0.1:0",
            "allow_unauthenticated_tcp": "true",
            "nvme_free_space_guard_bytes": "1MiB",
            **settings,
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.log = directory / "node.log"

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> NodeProcess:
        """Starts the process and waits until it serves."""
        arguments = [
            part
            for name, value in self.settings.items()
            for part in (f"--{name.replace('_', '-')}", str(value))
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "octavo_server", *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            )
        deadline = time.monotonic() + START_S
        with grpc.insecure_channel(self.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            while True:
                assert self.process.poll() is None, f"the node ended:\n{self.log.read_text()}"
                try:
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return self
                except grpc.RpcError:
                    pass
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.02)

    def kill(self) -> None:
        """kill -9."""
        self._signal(signal.SIGKILL)
        self._reap()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self._signal(signal.SIGTERM)
        return self.process.wait(timeout=30)

    def memory_kib(self, name: str) -> int:
        """A line of /proc/<pid>/status in KiB, e.g. ``VmRSS`` or ``RssAnon``."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
        raise AssertionError(f"no {name}")

    def http_json(self, address: str, path: str) -> dict[str, object]:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
            parsed: dict[str, object] = json.load(answer)
            return parsed

    def __enter__(self) -> NodeProcess:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            self._signal(signal.SIGKILL)
            self._reap()
        self._runtime.cleanup()

    def _signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def _reap(self) -> None:
        assert self.process is not None
        self.process.wait(timeout=10)
