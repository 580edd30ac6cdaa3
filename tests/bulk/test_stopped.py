"""Processes that are stopped or killed in the middle of transfers over streams."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from tests.client.contract import (
    UNIT,
    UNITS,
    buffer_for,
    client_of,
    content,
    prompt,
    sink_for,
    stored_prompt,
)
from tests.integration.raw import (
    assert_no_leaked_slots,
    assert_nothing_held,
    statistics,
    wait_until,
)
from tests.nodes import NodeProcess

import octavo
from octavo import Status

PAGES = 2000
"""31 MiB: more than the kernel keeps of what was sent and not read."""

ROOT = Path(__file__).parents[2]


@pytest.fixture
def node(tmp_path: Path) -> Generator[NodeProcess]:
    with NodeProcess(tmp_path, session_idle_s=2) as running:
        yield running
        wait_until("no transfer", lambda: statistics(running).gauges["bulk_transfers"] == 0)
        assert_nothing_held(running)
        assert_no_leaked_slots(running)
        assert "Traceback" not in running.log.read_text()


class PausingSink:
    """Stops the node when the first unit comes; compares every unit."""

    def __init__(self, node: NodeProcess, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        self._node = node
        self._units = data.reshape(-1, UNITS, UNIT)
        self.unit_count = 0

    def accept(self, position: int, unit: int, variant: int, view: memoryview) -> None:
        if self.unit_count == 0:
            self._node.pause()
        self.unit_count += 1
        assert bytes(view) == self._units[position, unit].tobytes()


def test_a_node_stopped_in_the_middle_of_a_get_costs_misses_by_the_deadline(
    node: NodeProcess,
) -> None:
    with client_of(node.address, "bulk", timeout_s=2.0) as client:
        chain, data = stored_prompt(client, 30, PAGES)
        sink = PausingSink(node, data)
        began_s = time.monotonic()
        try:
            got = client.get(chain, sink)
            assert time.monotonic() - began_s < 3
        finally:
            node.resume()
        assert set(got.counts) == {Status.DONE, Status.UNAVAILABLE}
        buffer = buffer_for(PAGES)
        wait_until(
            "served again", lambda: client.get(chain, sink_for(buffer)).page_count == PAGES, 10
        )
        assert np.array_equal(buffer, data)


def test_a_node_stopped_in_the_middle_of_a_put_stores_what_it_has_or_nothing(
    node: NodeProcess,
) -> None:
    data = content(30, PAGES)
    units = data.reshape(-1, UNITS, UNIT)

    class Source:
        def unit_bytes(self, position: int, unit: int) -> int:
            return UNIT

        def variant(self, position: int) -> int:
            return 1

        def fill(self, position: int, unit: int, view: memoryview) -> int | None:
            if (position, unit) == (PAGES // 2, 0):
                node.pause()
            view[:] = units[position, unit].tobytes()
            return UNIT

    with client_of(node.address, "bulk", timeout_s=2.0) as client:
        chain = client.chain(prompt(30, PAGES))
        began_s = time.monotonic()
        try:
            put = client.put(chain, Source())
            assert time.monotonic() - began_s < 3
        finally:
            node.resume()
        assert put.counts.get(Status.UNAVAILABLE, 0) > 0
        source = octavo.BufferSource(data, UNIT)
        wait_until("all is put", lambda: client.put(chain, source).failed_pages == 0, 20)
        buffer = buffer_for(PAGES)
        assert client.get(chain, sink_for(buffer)).page_count == PAGES
        assert np.array_equal(buffer, data)


def test_a_worker_that_is_stopped_and_then_killed_hurts_no_other_and_leaves_nothing(
    node: NodeProcess,
) -> None:
    with client_of(node.address, "bulk") as client:
        chain, data = stored_prompt(client, 30, PAGES)
        command = [sys.executable, "-m", "tests.client.workers", "get-on", node.address, "bulk"]
        with subprocess.Popen(command, cwd=ROOT) as worker:
            sent = statistics(node).counters["bulk_sent_bytes"]
            wait_until(
                "it gets", lambda: statistics(node).counters["bulk_sent_bytes"] > sent + 10**8, 20
            )
            worker.send_signal(signal.SIGSTOP)
            buffer = buffer_for(PAGES)
            assert client.get(chain, sink_for(buffer)).page_count == PAGES
            assert np.array_equal(buffer, data)
            worker.kill()
        wait_until("its transfers ended", lambda: statistics(node).gauges["bulk_transfers"] == 0)
