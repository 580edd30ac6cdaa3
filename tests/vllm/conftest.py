"""Real nodes for the connector's halves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.nodes import NodeProcess
from tests.vllm import engine


@pytest.fixture(scope="session")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node for tests that leave it alone: starting one takes longer than most of them."""
    with NodeProcess(tmp_path_factory.mktemp("vllm") / "node") as started:
        yield started


@pytest.fixture
def node(
    shared_node: NodeProcess, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> NodeProcess:
    """The shared one, on which each test has weights of its own, thus pages of its own."""
    monkeypatch.setattr(engine, "WEIGHTS", str(hash(request.node.nodeid)))
    return shared_node


@pytest.fixture
def mortal_node(tmp_path: Path) -> Iterator[NodeProcess]:
    """A node that the test may stop and kill."""
    with NodeProcess(tmp_path / "node") as started:
        yield started
