"""Transfers that stop half-way while a test does harm. Injects faults, and is otherwise Octavo's
own.

Engines take ``HeldConnector`` from here. As long as the test keeps a stop armed, each transfer
that comes to it waits there.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from octavo.transfer import Rows, RowSink, RowSource, Transfer
from octavo.transport.base import GetOrder, GetReport, PutOrder, PutReport
from octavo.transport.shm import ShmTransport

FOLDER_VARIABLE: Final = "OCTAVO_TEST_HELD_TRANSFERS"
HELD_S: Final = 60.0
"""A transfer goes on by itself after this, so that a test that failed leaves no engine hanging."""


class Stop:
    """A place where transfers stop: files in a folder that test and engines share."""

    def __init__(self, folder: Path, name: str) -> None:
        self._armed = folder / f"{name}-armed"
        self.held = folder / f"{name}-held"
        """There is such a file once a transfer has stopped."""

    def arm(self) -> None:
        self.held.unlink(missing_ok=True)
        self._armed.touch()

    def wait(self) -> None:
        """Waits until a transfer has stopped."""
        deadline = time.monotonic() + HELD_S
        while not self.held.exists():
            assert time.monotonic() < deadline, "no transfer came here"
            time.sleep(0.01)

    def release(self) -> None:
        self._armed.unlink()

    def pass_by(self) -> None:
        """A transfer is here, in an engine's process: it waits if the stop is armed."""
        deadline = time.monotonic() + HELD_S
        while self._armed.exists() and time.monotonic() < deadline:
            self.held.touch()
            time.sleep(0.01)


class HeldTransfers:
    """The stops there are."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.environment: Final = {FOLDER_VARIABLE: str(folder)}
        self.load: Final = Stop(folder, "load")
        """A load has copied half of what it got: the rest is still to be written, and none of
        it is known to have been whole."""
        self.save: Final = Stop(folder, "save")
        """A save is about to begin: the node knows nothing of its pages."""
        self.fill: Final = Stop(folder, "fill")
        """The pages of a save are reserved, and nothing is in them."""


def connector_of(plain: dict[str, Any]) -> dict[str, Any]:
    """A connector's configuration with held transfers."""
    return {
        **plain,
        "kv_connector": "HeldConnector",
        "kv_connector_module_path": "tests.engines.held_transfers",
    }


class _HeldSink:
    """Hands on what comes, and stops in the middle of it."""

    def __init__(self, sink: RowSink, stop: Stop) -> None:
        self._sink = sink
        self._stop = stop

    def begin(self, transfer: Transfer) -> None:
        self._sink.begin(transfer)

    def accept_rows(self, rows: Rows) -> None:
        half = len(rows) // 2
        self._sink.accept_rows(rows.take(0, half))
        self._stop.pass_by()
        self._sink.accept_rows(rows.take(half, len(rows)))


class _HeldSource:
    """Stops before it fills what was reserved."""

    def __init__(self, source: RowSource, stop: Stop) -> None:
        self._source = source
        self._stop = stop

    def begin(self, transfer: Transfer) -> None:
        self._source.begin(transfer)

    def unit_lengths(self) -> NDArray[np.uint32]:
        return self._source.unit_lengths()

    def page_variants(self) -> NDArray[np.uint16]:
        return self._source.page_variants()

    def fill_rows(self, rows: Rows) -> None:
        self._stop.pass_by()
        self._source.fill_rows(rows)


def _hold_transfers_of_this_process(held: HeldTransfers) -> None:
    get, put = ShmTransport.get, ShmTransport.put

    def held_get(self: ShmTransport, order: GetOrder, sink: RowSink) -> GetReport:
        return get(self, order, _HeldSink(sink, held.load))

    def held_put(self: ShmTransport, order: PutOrder, source: RowSource) -> PutReport:
        held.save.pass_by()
        return put(self, order, _HeldSource(source, held.fill))

    ShmTransport.get = held_get  # type: ignore[method-assign]
    ShmTransport.put = held_put  # type: ignore[method-assign]


@functools.cache
def _held_connector() -> type:
    from octavo.vllm import OctavoConnector

    _hold_transfers_of_this_process(HeldTransfers(Path(os.environ[FOLDER_VARIABLE])))
    return type("HeldConnector", (OctavoConnector,), {})


def __getattr__(name: str) -> Any:
    # Made when vLLM asks for it: the test's own process need not import vLLM.
    if name == "HeldConnector":
        return _held_connector()
    raise AttributeError(name)
