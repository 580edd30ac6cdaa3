"""A node with tight bounds, shared by a module's tests, and sessions on it."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from tests.integration.raw import RawSession, assert_nothing_held, assert_serves
from tests.nodes import NodeProcess


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Generator[NodeProcess]:
    with NodeProcess(
        tmp_path_factory.mktemp("node"),
        memory_bytes="16MiB",
        staging_ring_bytes="1MiB",
        lease_s=0.5,
        hold_s=0.5,
        reservation_s=2,
        session_leases_max=4,
        session_holds_max=3,
        session_reservations_max=3,
        sessions_max=24,
    ) as running:
        yield running


@pytest.fixture
def session(node: NodeProcess) -> Generator[RawSession]:
    with RawSession(node.address) as opened:
        yield opened
        opened.close()
    assert_nothing_held(node)
    assert_serves(node, "afterwards")


@pytest.fixture
def attached(node: NodeProcess) -> Generator[RawSession]:
    with RawSession(node.address, attach=True) as opened:
        yield opened
        opened.close()
    assert_nothing_held(node)
    assert_serves(node, "afterwards")
