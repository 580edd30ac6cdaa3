"""A node that is not there: misses within the deadline, loud where somebody asked for it."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import numpy as np
import pytest

import octavo

LAYOUT = octavo.Layout(name="l", model="m", layers=1, kv_heads=1, head_dim=8, dtype="uint8")
UNIT = LAYOUT.raw_unit_bytes(0)


@pytest.fixture
def client(tmp_path: Path) -> octavo.Client:
    return octavo.Client(f"unix:{tmp_path}/none.sock", layouts=[LAYOUT], timeout_s=1.0)


def test_match_get_and_put_are_misses_and_counted(client: octavo.Client) -> None:
    chain = client.chain(range(64))
    buffer = np.zeros(4 * UNIT, dtype=np.uint8)
    assert client.match(chain).page_count == 0
    got = client.get(chain, octavo.BufferSink(buffer, UNIT))
    assert got.page_count == 0
    assert got.counts == {octavo.Status.UNAVAILABLE: 4}
    put = client.put(chain, octavo.BufferSource(buffer, UNIT))
    assert put.counts == {octavo.Status.UNAVAILABLE: 4}
    assert put.failed_pages == 4
    assert client.health.swallowed_count == 3
    assert client.health.last_failure.startswith("miss_match_unavailable")
    assert client.node is None
    assert client.transport_name is None


def test_the_breaker_spares_the_next_calls(client: octavo.Client) -> None:
    chain = client.chain(range(64))
    client.match(chain)
    client.match(chain)
    assert client.health.counters["skipped_match"] == 1
    assert client.health.breaker is octavo.BreakerState.OPEN


def test_what_must_not_fail_silently_raises(client: octavo.Client) -> None:
    chain = client.chain(range(64))
    with pytest.raises(octavo.ConnectError, match=r"none\.sock"):
        client.connect()
    with pytest.raises(octavo.ConnectError):
        client.delete(chain)
    with pytest.raises(octavo.ConnectError):
        client.flush()
    with pytest.raises(octavo.ConnectError):
        client.clear()
    with pytest.raises(octavo.ConnectError):
        client.statistics()
    with pytest.raises(octavo.ConnectError):
        _ = chain.keys


def test_a_listener_that_never_answers_is_a_miss_within_the_deadline(tmp_path: Path) -> None:
    path = tmp_path / "mute.sock"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(path))
        mute.listen(8)
        client = octavo.Client(f"unix:{path}", layouts=[LAYOUT], timeout_s=0.3)
        began_s = time.monotonic()
        assert client.match(client.chain(range(64))).page_count == 0
        assert time.monotonic() - began_s < 2
        assert client.health.counters == {"miss_match_timeout": 1}


def test_an_empty_chain_asks_nobody(client: octavo.Client) -> None:
    chain = client.chain(range(15))  # no full page
    sink = octavo.BufferSink(bytearray(1), UNIT)
    assert client.match(chain).page_count == 0
    assert len(client.get(chain, sink).statuses) == 0
    assert client.delete(chain) == []
    assert client.health.counters == {}


def test_a_closed_client_says_so(client: octavo.Client) -> None:
    client.close()
    with pytest.raises(octavo.ClientClosed):
        client.match(client.chain(range(64)))


def test_unknown_names_are_refused(client: octavo.Client) -> None:
    with pytest.raises(octavo.InvalidRequest, match="layout 'x' is none of l"):
        client.chain((), layout="x")
    with pytest.raises(octavo.InvalidRequest, match="namespace 'x' is none of default"):
        client.chain((), namespace="x")


def test_the_asyncio_face_misses_alike(tmp_path: Path) -> None:
    async def story() -> None:
        address = f"unix:{tmp_path}/none.sock"
        async with octavo.AsyncClient(address, layouts=[LAYOUT], timeout_s=1.0) as client:
            chain = client.chain(range(64))
            assert (await client.match(chain)).page_count == 0
            with pytest.raises(octavo.ConnectError):
                await client.flush()

    asyncio.run(story())


def test_cancelling_a_task_ends_its_call_long_before_the_deadline(tmp_path: Path) -> None:
    path = tmp_path / "mute.sock"

    async def story() -> None:
        client = octavo.AsyncClient(f"unix:{path}", layouts=[LAYOUT], timeout_s=30.0)
        task = asyncio.create_task(client.match(client.chain(range(64))))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.close()

    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(path))
        mute.listen(8)
        began_s = time.monotonic()
        asyncio.run(story())
        assert time.monotonic() - began_s < 5
