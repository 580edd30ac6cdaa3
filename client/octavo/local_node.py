"""A node of one's own on this host, as a child process: for demos, benchmarks and trying out."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from octavo.client import Client
from octavo.errors import OctavoError
from octavo_proto.layout import foreign_layout

START_S: Final = 20.0
STOP_S: Final = 15.0
"""Above the node's own deadline for making queued pages durable."""

POLL_S: Final = 0.005
LOG_LINES: Final = 12


class LocalNodeError(RuntimeError):
    """The node did not start or stop as it should; the message ends with its log's last lines."""


class LocalNode:
    """``python -m octavo_server`` with the given settings. Leaving the ``with`` block ends it.

    The socket lies in a private temporary directory; other settings are those of
    ``octavo serve``, by name.
    """

    def __init__(
        self,
        *,
        command: Sequence[str] = (sys.executable, "-m", "octavo_server"),
        log: Path | None = None,
        **settings: object,
    ) -> None:
        self._command = command
        self._runtime = tempfile.TemporaryDirectory(prefix="octavo-")
        self.runtime: Final = Path(self._runtime.name)
        self.log: Final = log or self.runtime / "node.log"
        self._settings = {
            "node_id": "local",
            "listen_unix": self.runtime / "octavo.sock",
            "state_dir": self.runtime / "state",
            "http": "off",
            **settings,
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """As a client takes it."""
        return f"unix:{self._settings['listen_unix']}"

    @property
    def pid(self) -> int:
        """The running process."""
        assert self._process is not None, "the node does not run"
        return self._process.pid

    def start(self) -> float:
        """Starts the node and waits until it opens sessions. Seconds that took.

        Raises:
            LocalNodeError: it ended, or did not serve in time.
        """
        begin = time.perf_counter()
        self.launch()
        while True:
            self.require_running()
            try:
                with self.client() as client:
                    client.connect()
                return time.perf_counter() - begin
            except OctavoError as error:
                if time.perf_counter() - begin > START_S:
                    message = f"the node does not serve after {START_S:.0f} s ({error})"
                    raise self._error(message) from None
            time.sleep(POLL_S)

    def launch(self) -> None:
        """Starts the process and returns at once."""
        # Settings of another node in this shell are not meant for this one.
        env = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
        flags = [
            part
            for name, value in self._settings.items()
            for part in (f"--{name.replace('_', '-')}", str(value))
        ]
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C in a terminal reaches the parent alone, which then
            # ends the node by its id.
            self._process = subprocess.Popen(
                [*self._command, *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )

    def require_running(self) -> None:
        """Raises LocalNodeError if the process has ended by itself."""
        if self._process is None or self._process.poll() is not None:
            raise self._error("the node ended while it started")

    def client(self) -> Client:
        """A client that watches the node: it moves no pages."""
        watching = foreign_layout("watch", "octavo-watch")
        return Client(self.address, layouts=[watching], transport="grpc")

    def memory_bytes(self, name: str) -> int:
        """A line of the kernel's status of the process in bytes, e.g. ``VmRSS``, ``RssAnon``."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
        raise KeyError(name)

    def kill(self) -> None:
        """``kill -9``. Harmless when it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when its deadline has passed.

        Raises:
            LocalNodeError: it ended with another code than 0.
        """
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            code = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        if code != 0:
            how = "did not end in time" if code is None else f"ended with code {code}"
            raise self._error(f"the node {how} after SIGTERM")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()
        self._runtime.cleanup()

    def _error(self, message: str) -> LocalNodeError:
        return LocalNodeError(with_log(message, self.log))


def with_log(message: str, log: Path, line_count: int = LOG_LINES) -> str:
    """The message, and the last lines of a process's log."""
    lines = log.read_text(errors="replace").strip().splitlines()[-line_count:]
    return "\n".join([message, *(f"  | {line}" for line in lines)])
