"""The committed stubs are what the ``.proto`` files say."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

import pytest
from tests.repo import stubs


def stub_files(folder: Path) -> dict[str, str]:
    return {
        path.name: path.read_text()
        for path in sorted(folder.iterdir())
        if "_pb2" in path.name and path.suffix in (".py", ".pyi")
    }


@pytest.mark.skipif(
    importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed"
)
def test_committed_stubs_equal_regenerated_ones(tmp_path: Path) -> None:
    wanted = "1.76.0"
    assert metadata.version("grpcio-tools") == wanted, "newer tools make stubs that need protobuf 7"
    stubs.generate(tmp_path)
    committed = stub_files(stubs.ROOT / "proto" / stubs.PACKAGE)
    regenerated = stub_files(tmp_path / stubs.PACKAGE)
    assert sorted(committed) == sorted(regenerated)
    different = [name for name in committed if committed[name] != regenerated[name]]
    assert different == [], "run `make stubs`"
