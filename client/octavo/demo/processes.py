"""The demo's processes: one node, and workers one after another.

Each runs in a session of its own, so that Ctrl-C in a terminal reaches the demo alone, which
then ends them by their ids.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from octavo.client import Client
from octavo.demo.messages import TurnReport, WorkerEnd, WorkerTask, from_line, to_line
from octavo.errors import OctavoError
from octavo_proto.layout import foreign_layout

NODE_START_S: Final = 20.0
NODE_STOP_S: Final = 15.0
"""Above the node's own deadline for making queued pages durable."""

WORKER_S: Final = 240.0
"""A worker's whole life. The longest takes 40 s on two cores."""

WORKER_ENV: Final = {"OMP_WAIT_POLICY": "PASSIVE"}
"""The node runs on the same cores. Threads that wait by spinning made decoding on two busy cores
three times slower: 230 against 77 ms a token."""

POLL_S: Final = 0.02
LOG_LINES: Final = 12

MEMORY_BYTES: Final = 512 << 20
NVME_BYTES: Final = 1 << 30
"""A conversation of 2,100 tokens is 92 MiB in float32."""


class ProcessError(RuntimeError):
    """A process of the demo failed; the message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where a demo keeps its files. The socket's path must be short, the NVMe tier on a disk."""

    runtime: Path
    disk: Path

    @property
    def socket(self) -> Path:
        return self.runtime / "octavo.sock"


class Node:
    """``python -m octavo_server`` as a child. Leaving the ``with`` block ends it."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._log = places.runtime / "node.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()

    @property
    def address(self) -> str:
        """As a client takes it."""
        return f"unix:{self._places.socket}"

    @property
    def pid(self) -> int | None:
        """The process, while it runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> float:
        """Starts the node and waits until it opens sessions. Seconds that took.

        Raises:
            ProcessError: it ended, or did not serve in time.
        """
        begin = time.perf_counter()
        # Settings of another node in this shell are not meant for this one.
        env = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "octavo_server", *self._flags()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        while True:
            if self._process.poll() is not None:
                raise ProcessError(_with_log("the node ended while it started", self._log))
            try:
                with self.client() as client:
                    client.connect()
                return time.perf_counter() - begin
            except OctavoError as error:
                if time.perf_counter() - begin > NODE_START_S:
                    message = f"the node does not serve after {NODE_START_S:.0f} s ({error})"
                    raise ProcessError(_with_log(message, self._log)) from None
            time.sleep(POLL_S)

    def client(self) -> Client:
        """A client that watches the node: it moves no pages."""
        watching = foreign_layout("demo-watch", "octavo-demo")
        return Client(self.address, layouts=[watching], transport="grpc")

    def kill(self) -> None:
        """``kill -9``. Harmless when it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when its deadline has passed.

        Raises:
            ProcessError: it ended with another code than 0.
        """
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            code = process.wait(NODE_STOP_S)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        if code != 0:
            how = "did not end in time" if code is None else f"ended with code {code}"
            raise ProcessError(_with_log(f"the node {how} after SIGTERM", self._log))

    def _flags(self) -> list[str]:
        disk = self._places.disk
        flags = {
            "node-id": "demo",
            "listen-unix": self._places.socket,
            "http": "off",
            "memory-bytes": MEMORY_BYTES,
            "nvme-dir": disk / "nvme",
            "nvme-bytes": NVME_BYTES,
            "state-dir": disk / "state",
        }
        return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """All that a worker did."""

    turns: tuple[TurnReport, ...]
    end: WorkerEnd


def run_worker(
    name: str, task: WorkerTask, places: Places, on_turn: Callable[[TurnReport], None]
) -> WorkerResult:
    """Runs a worker from start to end, in a process of its own.

    Raises:
        ProcessError: it failed, or took longer than ``WORKER_S``.
    """
    log_path = places.runtime / f"worker-{name}.log"
    turns: list[TurnReport] = []
    end: WorkerEnd | None = None
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "octavo.demo.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **WORKER_ENV},
            start_new_session=True,
        )
    watchdog = threading.Timer(WORKER_S, process.kill)
    try:
        watchdog.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(to_line(task))
            process.stdin.close()
        except BrokenPipeError:
            raise ProcessError(_with_log(f"worker {name} ended at once", log_path)) from None
        for line in process.stdout:
            match from_line(line):
                case TurnReport() as turn:
                    turns.append(turn)
                    on_turn(turn)
                case WorkerEnd() as message:
                    end = message
                case WorkerTask():
                    raise ProcessError(f"worker {name} sent a task")
        code = process.wait()
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
    if code != 0 or end is None:
        raise ProcessError(_with_log(f"worker {name} ended with code {code}", log_path))
    return WorkerResult(tuple(turns), end)


def _with_log(message: str, log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]
    return "\n".join([message, *(f"  | {line}" for line in lines)])
