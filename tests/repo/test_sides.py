"""Who may import whom, and what must stay unloaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.repo.tree import ROOT, SOURCES, imported_names, module_name

ENGINES = ("torch", "transformers", "vllm", "sglang", "triton", "lmcache")


def python_files(package: str) -> list[Path]:
    files = sorted(SOURCES[package].rglob("*.py"))
    assert files, package
    return [path for path in files if "_pb2" not in path.name]


def loaded_after(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize("package", sorted(SOURCES))
def test_sides_meet_only_in_the_protocol(package: str) -> None:
    foreign = {
        "octavo_proto": {"octavo", "octavo_server"},
        "octavo_server": {"octavo"},
        "octavo": {"octavo_server"},
    }[package]
    # The command line starts nodes, and the benchmarks measure them.
    lazily_allowed = (SOURCES["octavo"] / "cli", SOURCES["octavo"] / "bench")
    for path in python_files(package):
        lazy = any(path.is_relative_to(folder) for folder in lazily_allowed)
        tops = {name.partition(".")[0] for name in imported_names(path, at_import_only=lazy)}
        assert not tops & foreign, f"{path.relative_to(ROOT)} imports {sorted(tops & foreign)}"


@pytest.mark.parametrize("package", ["octavo_server", "octavo_proto"])
def test_node_never_imports_an_engine(package: str) -> None:
    for path in python_files(package):
        tops = {name.partition(".")[0] for name in imported_names(path)}
        assert not tops & set(ENGINES), path.relative_to(ROOT)


def test_whole_node_loads_no_engine() -> None:
    modules = [
        module_name(path) for path in python_files("octavo_server") if path.name != "__main__.py"
    ]
    loaded = loaded_after("\n".join(f"import {name}" for name in modules))
    assert "octavo_server" in loaded
    assert not loaded & {*ENGINES, "octavo", "rich", "typer"}


def test_client_loads_no_engine_and_no_server() -> None:
    loaded = loaded_after("import octavo")
    assert "octavo" in loaded
    assert not loaded & {*ENGINES, "octavo_server", "rich", "typer", "pydantic", "aiohttp"}


def test_serve_command_loads_neither_typer_nor_rich() -> None:
    loaded = loaded_after(
        "from octavo.cli.main import main\nassert main(['serve', '--memory-bytes', 'x']) == 2"
    )
    assert "octavo_server" in loaded
    assert not loaded & {*ENGINES, "rich", "typer"}
