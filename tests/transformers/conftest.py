from __future__ import annotations

from typing import Any

import pytest
from tests.transformers.tiny import make_model


@pytest.fixture(scope="session")
def model() -> Any:
    """One tiny model for all tests: none of them changes its weights."""
    return make_model()
