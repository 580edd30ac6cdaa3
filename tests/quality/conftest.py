from __future__ import annotations

from pathlib import Path

import pytest
from tests.demo.toy import make_checkpoint


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three layers whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("toy")
    toy = make_checkpoint()
    toy.model.save_pretrained(folder)
    toy.tokenizer.save_pretrained(folder)
    return folder
