"""What holds for every test."""

from __future__ import annotations

import shutil

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests that need a GPU where there is none. Asks no library: torch loads slowly."""
    if shutil.which("nvidia-smi") is not None:
        return
    skip = pytest.mark.skip(reason="no NVIDIA driver on this machine")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
