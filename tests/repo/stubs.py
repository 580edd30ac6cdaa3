"""Generates the protocol's stubs: ``python tests/repo/stubs.py FOLDER`` (``make stubs``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path("octavo_proto/v1")


def generate(into: Path) -> None:
    """Writes the four stubs of each ``.proto`` file below ``into``."""
    protos = sorted((ROOT / "proto" / PACKAGE).glob("*.proto"))
    # The plug-ins lie beside this interpreter, which need not be on PATH.
    scripts = Path(sys.executable).parent
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
            f"-I{ROOT / 'proto'}",
            f"--python_out={into}",
            f"--grpc_python_out={into}",
            f"--mypy_out=quiet:{into}",
            f"--mypy_grpc_out=quiet:{into}",
            *(str(proto) for proto in protos),
        ],
        check=True,
    )


if __name__ == "__main__":
    generate(Path(sys.argv[1]).resolve())
