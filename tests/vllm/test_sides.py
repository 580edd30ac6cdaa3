"""Who imports what."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import octavo
import octavo_proto

OURS = [Path(octavo.__file__).parent, Path(octavo_proto.__file__).parent]


@pytest.mark.parametrize("module", ["octavo", "octavo.vllm", "octavo.vllm.scheduler"])
def test_neither_vllm_nor_numba_is_imported(module: str) -> None:
    """vLLM in one process fails to start if numba was imported before it."""
    code = (
        f"import sys, {module}\n"
        "bad = [name for name in ('vllm', 'numba', 'llvmlite') if name in sys.modules]\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_no_module_names_numba_or_llvmlite() -> None:
    files = [path for folder in OURS for path in folder.rglob("*.py")]
    imported = {
        name.partition(".")[0]
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert {"grpc", "numpy", "torch", "vllm"} <= imported, "looked in the wrong place"
    assert not {"numba", "llvmlite"} & imported


def test_only_whoever_asks_for_the_connector_needs_vllm() -> None:
    import octavo.vllm

    with pytest.raises(AttributeError, match="no attribute 'Connector'"):
        _ = octavo.vllm.Connector
