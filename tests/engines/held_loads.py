"""Loads that stop half-way while a test does harm. Injects faults, and is otherwise Octavo's own.

Engines take ``HeldLoadsConnector`` from here. As long as the test keeps loads armed, each one
stops once it has copied half of what it got: the rest is still to be written, and none of it is
known to have been whole.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any, Final

from octavo.transfer import Rows, RowSink, Transfer
from octavo.transport.base import GetOrder, GetReport
from octavo.transport.shm import ShmTransport

FOLDER_VARIABLE: Final = "OCTAVO_TEST_HELD_LOADS"
HELD_S: Final = 60.0
"""A load goes on by itself after this, so that a test that failed leaves no engine hanging."""


class HeldLoads:
    """The test's side: files in a folder that the engine's processes watch."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._armed = folder / "armed"
        self.held = folder / "held"
        """There is such a file once a load has stopped."""
        self.environment: Final = {FOLDER_VARIABLE: str(folder)}

    def arm(self) -> None:
        self._armed.touch()

    def wait(self) -> None:
        """Waits until a load has stopped."""
        deadline = time.monotonic() + HELD_S
        while not self.held.exists():
            assert time.monotonic() < deadline, "no load began"
            time.sleep(0.01)

    def release(self) -> None:
        self._armed.unlink()


def connector_of(plain: dict[str, Any]) -> dict[str, Any]:
    """A connector's configuration with held loads."""
    return {
        **plain,
        "kv_connector": "HeldLoadsConnector",
        "kv_connector_module_path": "tests.engines.held_loads",
    }


class _HeldSink:
    """Hands on what comes, and stops in the middle of it."""

    def __init__(self, sink: RowSink, folder: Path) -> None:
        self._sink = sink
        self._folder = folder

    def begin(self, transfer: Transfer) -> None:
        self._sink.begin(transfer)

    def accept_rows(self, rows: Rows) -> None:
        half = len(rows) // 2
        self._sink.accept_rows(rows.take(0, half))
        deadline = time.monotonic() + HELD_S
        while (self._folder / "armed").exists() and time.monotonic() < deadline:
            (self._folder / "held").touch()
            time.sleep(0.01)
        self._sink.accept_rows(rows.take(half, len(rows)))


def _hold_loads_of_this_process(folder: Path) -> None:
    get = ShmTransport.get

    def held_get(self: ShmTransport, order: GetOrder, sink: RowSink) -> GetReport:
        return get(self, order, _HeldSink(sink, folder))

    ShmTransport.get = held_get  # type: ignore[method-assign]


@functools.cache
def _held_connector() -> type:
    from octavo.vllm import OctavoConnector

    _hold_loads_of_this_process(Path(os.environ[FOLDER_VARIABLE]))
    return type("HeldLoadsConnector", (OctavoConnector,), {})


def __getattr__(name: str) -> Any:
    # Made when vLLM asks for it: the test's own process need not import vLLM.
    if name == "HeldLoadsConnector":
        return _held_connector()
    raise AttributeError(name)
