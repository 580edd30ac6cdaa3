"""The examples of docs/engines/vllm.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
_FENCE: Final = re.compile(r"^```(\w*)\n(.+?)^```$", re.DOTALL | re.MULTILINE)
EXAMPLES: Final = _FENCE.findall((ROOT / "docs" / "engines" / "vllm.md").read_text())
"""(language, text) of each, in order."""


def examples(language: str) -> list[str]:
    return [text for its_language, text in EXAMPLES if its_language == language]


def program() -> str:
    """The Python example."""
    (text,) = examples("python")
    return text


def transfer_config() -> str:
    """The JSON that ``--kv-transfer-config`` takes."""
    (text,) = (each for each in examples("json") if "kv_role" in each)
    return text


def settings() -> str:
    """The JSON of ``kv_connector_extra_config``."""
    (text,) = (each for each in examples("json") if "kv_role" not in each)
    return text
