"""Puts of more than a node reserves at a time, or holds at all."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from tests.client.contract import (
    UNIT,
    UNITS,
    buffer_for,
    client_of,
    content,
    prompt,
    sink_for,
)
from tests.nodes import NodeProcess

import octavo
from octavo import Status


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Generator[NodeProcess]:
    directory: Path = tmp_path_factory.mktemp("node")
    with NodeProcess(directory, memory_bytes="64MiB", staging_ring_bytes="1MiB") as process:
        yield process


@pytest.fixture(params=["shm", "grpc"])
def client(node: NodeProcess, request: pytest.FixtureRequest) -> Iterator[octavo.Client]:
    with client_of(node.address, request.param) as made:
        made.connect()
        made.clear()
        yield made


def test_a_chain_larger_than_what_may_be_reserved_goes_in_rounds(client: octavo.Client) -> None:
    # Of 64 MiB reservations may take half at a time.
    page_count = (40 << 20) // (UNIT * UNITS)
    chain = client.chain(prompt(77, page_count))
    data = content(77, page_count)
    put = client.put(chain, octavo.BufferSource(data, UNIT), timeout_s=30)
    assert set(put.counts) == {Status.STORED}
    back = buffer_for(page_count)
    got = client.get(chain, sink_for(back), timeout_s=30)
    assert got.page_count == page_count
    assert (back == data).all()


def test_a_chain_larger_than_memory_stores_its_head(client: octavo.Client) -> None:
    page_count = (70 << 20) // (UNIT * UNITS)
    chain = client.chain(prompt(78, page_count))
    put = client.put(chain, octavo.BufferSource(content(78, page_count), UNIT), timeout_s=30)
    stored = client.match(chain).page_count
    assert 0.9 * page_count * 64 / 70 < stored < page_count
    assert put.counts == {
        Status.STORED: stored * UNITS,
        Status.NO_ROOM: (page_count - stored) * UNITS,
    }
