"""The demo's processes: one node, and workers one after another.

Each runs in a session of its own, so that Ctrl-C in a terminal reaches the demo alone, which
then ends them by their ids.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from octavo.demo.messages import TurnReport, WorkerEnd, WorkerTask, from_line, to_line
from octavo.local_node import LocalNode, with_log

WORKER_S: Final = 240.0
"""A worker's whole life. The longest takes 40 s on two cores."""

WORKER_ENV: Final = {"OMP_WAIT_POLICY": "PASSIVE"}
"""The node runs on the same cores. Threads that wait by spinning made decoding on two busy cores
three times slower: 230 against 77 ms a token."""


MEMORY_BYTES: Final = 512 << 20
NVME_BYTES: Final = 1 << 30
"""A conversation of 2,100 tokens is 92 MiB in float32."""


class ProcessError(RuntimeError):
    """A worker of the demo failed; the message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where a demo keeps its files: logs, and on a disk the NVMe tier."""

    runtime: Path
    disk: Path


def demo_node(places: Places) -> LocalNode:
    """The demo's node, not started yet. Leaving its ``with`` block ends it."""
    return LocalNode(
        node_id="demo",
        memory_bytes=MEMORY_BYTES,
        nvme_dir=places.disk / "nvme",
        nvme_bytes=NVME_BYTES,
        state_dir=places.disk / "state",
        log=places.runtime / "node.log",
    )


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
            raise ProcessError(with_log(f"worker {name} ended at once", log_path)) from None
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
        raise ProcessError(with_log(f"worker {name} ended with code {code}", log_path))
    return WorkerResult(tuple(turns), end)
