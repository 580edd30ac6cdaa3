"""What the engine tests share. They run in the engines' environment and are skipped elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.reference import Reference
from tests.engines.vllm_engine import VllmEngine
from tests.nodes import NodeProcess

HERE = Path(__file__).parent
TEST_S = 600.0
"""An engine takes from 12 s to a minute to start, and a test starts up to three."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.path.is_relative_to(HERE)]
    absent = importlib.util.find_spec("vllm") is None
    for item in mine:
        item.add_marker(pytest.mark.timeout(TEST_S))
        if absent:
            item.add_marker(pytest.mark.skip(reason="no vLLM here: run `make test-engines`"))


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """What the tiny model answers without any connector, from an engine kept for all tests."""
    with VllmEngine(tmp_path_factory.mktemp("reference")) as engine:
        yield Reference(engine)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    """A node with memory only."""
    with NodeProcess(tmp_path / "node") as running:
        yield running
