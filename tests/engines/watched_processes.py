"""Which process of an engine forks, and which makes a gRPC channel, in the order of events.

Engines take ``WatchedConnector`` from here: Octavo's own, beside something that takes notes.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, Final

import grpc

FILE_VARIABLE: Final = "OCTAVO_TEST_WATCHED_PROCESSES"


class Notes:
    """The test's side."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()
        self.environment: Final = {FILE_VARIABLE: str(path)}

    def read(self) -> list[tuple[str, int]]:
        """(what happened, in which process), in order. ``import``, ``fork`` and ``channel``."""
        lines = self._path.read_text().splitlines()
        return [(what, int(pid)) for what, pid in (line.split() for line in lines)]


def connector_of(plain: dict[str, Any]) -> dict[str, Any]:
    return {
        **plain,
        "kv_connector": "WatchedConnector",
        "kv_connector_module_path": "tests.engines.watched_processes",
    }


def _note(what: str) -> None:
    # One short write to a file opened for appending: processes do not mix their lines.
    with Path(os.environ[FILE_VARIABLE]).open("a") as file:
        file.write(f"{what} {os.getpid()}\n")


def _watch_this_process() -> None:
    make_channel = grpc.insecure_channel

    def noted_channel(*arguments: Any, **named: Any) -> grpc.Channel:
        _note("channel")
        return make_channel(*arguments, **named)

    grpc.insecure_channel = noted_channel
    os.register_at_fork(before=lambda: _note("fork"))
    _note("import")


@functools.cache
def _watched_connector() -> type:
    from octavo.vllm import OctavoConnector

    _watch_this_process()
    return type("WatchedConnector", (OctavoConnector,), {})


def __getattr__(name: str) -> Any:
    if name == "WatchedConnector":
        return _watched_connector()
    raise AttributeError(name)
