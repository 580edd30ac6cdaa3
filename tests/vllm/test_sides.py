"""Who imports what."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["octavo", "octavo.vllm", "octavo.vllm.scheduler"])
def test_neither_vllm_nor_numba_is_imported(module: str) -> None:
    """vLLM in one process fails to start if numba was imported before it."""
    code = (
        f"import sys, {module}\n"
        "bad = [name for name in ('vllm', 'numba', 'llvmlite') if name in sys.modules]\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_only_whoever_asks_for_the_connector_needs_vllm() -> None:
    import octavo.vllm

    with pytest.raises(AttributeError, match="no attribute 'Connector'"):
        _ = octavo.vllm.Connector
