"""Links that cut, stall, delay, spoil, lose and invent bytes: right bytes or a miss within the
deadline, and nothing left on the node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.client.contract import LAYOUT, UNIT, UNITS, buffer_for, content, prompt, sink_for
from tests.fakes.faulty_proxy import Fault, FaultyProxy, Kind
from tests.integration.raw import (
    assert_no_leaked_slots,
    assert_nothing_held,
    statistics,
    wait_until,
)
from tests.nodes import NodeProcess

import octavo
from octavo import Status
from octavo.transport.bulk_socket import BulkSocket

PAGES = 700
"""11 MiB: two parts."""

ROWS = PAGES * UNITS
AMIDST = 40_000
"""Bytes into a stream: within the first part's units, whichever side sends."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Generator[NodeProcess]:
    directory: Path = tmp_path_factory.mktemp("node")
    with NodeProcess(directory, lease_s=1, reservation_s=1) as process:
        yield process


@pytest.fixture
def proxy(node: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Between every bulk stream that this test opens and the node."""
    with FaultyProxy(0) as made:

        def through_proxy(host: str, port: int, ticket: bytes, timeout_s: float) -> BulkSocket:
            made.target_port = port
            return BulkSocket(host, made.port, ticket, timeout_s)

        monkeypatch.setattr("octavo.session.BulkSocket", through_proxy)
        yield made
    assert_nothing_held(node)
    assert_no_leaked_slots(node)
    assert statistics(node).gauges["bulk_transfers"] == 0
    assert "Traceback" not in node.log.read_text()


@contextmanager
def bulk_client(node: NodeProcess, timeout_s: float = 10.0) -> Generator[octavo.Client]:
    with octavo.Client(
        node.address, layouts=[LAYOUT], transport="bulk", timeout_s=timeout_s
    ) as client:
        yield client


@pytest.fixture
def stored(node: NodeProcess) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Bytes of a prompt that was put past the proxy."""
    data = content(1, PAGES)
    with octavo.Client(node.address, layouts=[LAYOUT], transport="shm") as client:
        chain = client.chain(prompt(1, PAGES))
        assert client.put(chain, octavo.BufferSource(data, UNIT)).stored_pages == PAGES
    return data


Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def get(client: octavo.Client, data: Bytes) -> octavo.GetResult:
    """A get whose ``DONE`` pages are right."""
    buffer = buffer_for(PAGES)
    got = client.get(client.chain(prompt(1, PAGES)), sink_for(buffer))
    right = buffer.reshape(PAGES, -1) == data.reshape(PAGES, -1)
    assert right.all(axis=1)[got.statuses == Status.DONE].all(), "a wrong byte was served"
    return got


def test_one_flipped_bit_costs_one_page(
    node: NodeProcess, proxy: FaultyProxy, stored: Bytes
) -> None:
    proxy.to_client = Fault(Kind.FLIP, AMIDST, times=1)
    with bulk_client(node) as client:
        got = get(client, stored)
        assert got.counts == {Status.DONE: PAGES - 1, Status.CORRUPT: 1}
        assert client.health.counters["bulk_digest_mismatch"] == 1
        assert get(client, stored).counts == {Status.DONE: PAGES}


def test_a_bit_flipped_on_the_way_in_is_never_stored(node: NodeProcess, proxy: FaultyProxy) -> None:
    proxy.to_node = Fault(Kind.FLIP, AMIDST, times=1)
    corrupt = statistics(node).counters["bulk_units_corrupt"]
    data = content(1, PAGES)
    with bulk_client(node) as client:
        chain = client.chain(prompt(1, PAGES))
        put = client.put(chain, octavo.BufferSource(data, UNIT))
        assert put.counts == {Status.STORED: ROWS - 1, Status.REJECTED: 1}
        assert statistics(node).counters["bulk_units_corrupt"] == corrupt + 1
        assert client.put(chain, octavo.BufferSource(data, UNIT)).counts == {
            Status.STORED: 1,
            Status.ALREADY_PRESENT: ROWS - 1,
        }
        assert get(client, data).counts == {Status.DONE: PAGES}


def test_a_stream_cut_in_the_middle_of_a_get_is_replaced(
    node: NodeProcess, proxy: FaultyProxy, stored: Bytes
) -> None:
    proxy.to_client = Fault(Kind.CUT, AMIDST, times=1)
    with bulk_client(node) as client:
        assert get(client, stored).counts == {Status.DONE: PAGES}
        assert client.health.counters["bulk_stream_broke"] == 1
        assert client.health.swallowed_count == 0


def test_streams_that_are_always_cut_cost_misses_at_most(
    node: NodeProcess, proxy: FaultyProxy, stored: Bytes
) -> None:
    proxy.to_client = Fault(Kind.CUT, AMIDST)
    with bulk_client(node) as client:
        for _ in range(4):
            assert set(get(client, stored).counts) <= {Status.DONE, Status.UNAVAILABLE}


@pytest.mark.parametrize("kind", [Kind.CUT, Kind.DROP, Kind.INSERT])
def test_a_put_over_a_link_that_breaks_stores_what_arrived_whole(
    node: NodeProcess, proxy: FaultyProxy, kind: Kind
) -> None:
    proxy.to_node = Fault(kind, AMIDST, times=1)
    data = content(1, PAGES)
    with bulk_client(node, timeout_s=2.0) as client:
        chain = client.chain(prompt(1, PAGES))
        began_s = time.monotonic()
        put = client.put(chain, octavo.BufferSource(data, UNIT))
        assert time.monotonic() - began_s < 2.5
        assert set(put.counts) <= {Status.STORED, Status.UNAVAILABLE, Status.REJECTED}
        assert put.counts.get(Status.STORED, 0) < ROWS
        proxy.to_node = None
        wait_until("the rest is free again", lambda: client.match(chain).pending_count == 0)
        again = client.put(chain, octavo.BufferSource(data, UNIT))
        assert set(again.counts) <= {Status.STORED, Status.ALREADY_PRESENT}
        assert get(client, data).counts == {Status.DONE: PAGES}


@pytest.mark.parametrize("kind", [Kind.DROP, Kind.INSERT, Kind.STALL])
def test_a_get_over_a_link_that_lies_about_lengths_is_a_miss_in_time(
    node: NodeProcess, proxy: FaultyProxy, stored: Bytes, kind: Kind
) -> None:
    proxy.to_client = Fault(kind, AMIDST)
    with bulk_client(node, timeout_s=1.5) as client:
        for _ in range(2):
            began_s = time.monotonic()
            get(client, stored)
            assert time.monotonic() - began_s < 2.0
        proxy.to_client = None
        proxy.cut()
        # By streams that are whole again, or through gRPC meanwhile.
        wait_until("served again", lambda: get(client, stored).page_count == PAGES, within_s=15)


def test_a_slow_link_is_slow_and_right(
    node: NodeProcess, proxy: FaultyProxy, stored: Bytes
) -> None:
    proxy.delay_s = 0.01
    with bulk_client(node) as client:
        assert get(client, stored).counts == {Status.DONE: PAGES}


def test_without_a_bulk_port_grpc_carries_the_bytes(
    node: NodeProcess, proxy: FaultyProxy, stored: Bytes
) -> None:
    with bulk_client(node) as client:
        assert get(client, stored).counts == {Status.DONE: PAGES}
        proxy.stop()
        assert get(client, stored).counts == {Status.DONE: PAGES}
        assert client.health.counters["bulk_fell_back"] == 1
        data = content(2, 4)
        put = client.put(client.chain(prompt(2, 4)), octavo.BufferSource(data, UNIT))
        assert put.stored_pages == 4
    with bulk_client(node) as client, pytest.raises(octavo.ConnectError):
        client.connect()


def test_a_get_cancelled_in_the_middle_ends_at_once_and_writes_no_more(
    node: NodeProcess, proxy: FaultyProxy, stored: Bytes
) -> None:
    proxy.to_client = Fault(Kind.STALL, AMIDST)

    async def story() -> Bytes:
        async with octavo.AsyncClient(
            node.address, layouts=[LAYOUT], transport="bulk", timeout_s=20
        ) as client:
            buffer = buffer_for(PAGES)
            chain = client.chain(prompt(1, PAGES))
            task = asyncio.create_task(client.get(chain, sink_for(buffer)))
            await asyncio.sleep(0.4)
            began_s = time.monotonic()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert time.monotonic() - began_s < 2
            return buffer

    buffer = asyncio.run(story())
    then = buffer.copy()
    time.sleep(0.3)
    assert np.array_equal(buffer, then)


def test_one_stream_is_enough_where_others_cannot_be_opened(
    node: NodeProcess, proxy: FaultyProxy, stored: Bytes
) -> None:
    with bulk_client(node) as client:
        client.connect()
        proxy.refuse()
        for _ in range(3):
            assert get(client, stored).counts == {Status.DONE: PAGES}
        assert "bulk_fell_back" not in client.health.counters
        assert proxy.connection_count == 1


def test_a_link_that_carries_nothing_is_left_alone_for_a_while(
    node: NodeProcess, proxy: FaultyProxy, stored: Bytes
) -> None:
    proxy.to_client = Fault(Kind.STALL, after_bytes=10)  # the welcome passes
    with bulk_client(node, timeout_s=1.0) as client:
        assert get(client, stored).counts == {Status.UNAVAILABLE: PAGES}
        assert get(client, stored).counts == {Status.DONE: PAGES}
        assert client.health.counters["bulk_fell_back"] == 1
