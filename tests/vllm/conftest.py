"""A real node for the connector's halves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.nodes import NodeProcess


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    """A node with room for everything in a test."""
    with NodeProcess(tmp_path / "node") as started:
        yield started
