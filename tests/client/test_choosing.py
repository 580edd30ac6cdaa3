"""Which transport a client takes when it is left to choose, on a real node."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import NoReturn

import pytest
from tests.client.contract import client_of, stored_prompt
from tests.nodes import NodeProcess

import octavo
from octavo.transport.broker import BrokerLink


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Generator[NodeProcess]:
    directory: Path = tmp_path_factory.mktemp("node")
    with NodeProcess(directory) as process:
        yield process


def test_auto_takes_streams_where_shared_memory_cannot_be_mapped(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(shared: object, timeout_s: float) -> BrokerLink:
        raise octavo.ConnectError("another container's /run")

    monkeypatch.setattr("octavo.session.BrokerLink", no_memory)
    with client_of(node.address, "auto") as client:
        client.connect()
        assert client.transport_name == "bulk"
        stored_prompt(client, 32, 4)


def test_auto_takes_grpc_where_nothing_else_is_to_be_had(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_where: object) -> NoReturn:
        raise octavo.ConnectError("behind a firewall")

    monkeypatch.setattr("octavo.session.BrokerLink", nothing)
    monkeypatch.setattr("octavo.session.BulkSocket", nothing)
    with client_of(node.address, "auto") as client:
        client.connect()
        assert client.transport_name == "grpc"
        assert client.health.counters["bulk_unreachable"] == 1
        stored_prompt(client, 33, 4)
    with client_of(node.address, "bulk") as client, pytest.raises(octavo.ConnectError):
        client.connect()


def test_auto_takes_shared_memory_on_this_host(node: NodeProcess) -> None:
    with client_of(node.address, "auto") as client:
        client.connect()
        assert client.transport_name == "shm"
