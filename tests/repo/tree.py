"""The repository as the tests of this folder see it."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    "octavo_proto": ROOT / "proto/octavo_proto",
    "octavo_server": ROOT / "server/octavo_server",
    "octavo": ROOT / "client/octavo",
}


def tracked_files() -> list[Path]:
    """Files that git knows, or would add: relative to the root, sorted."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return sorted(Path(line) for line in done.stdout.splitlines() if (ROOT / line).is_file())


def module_name(path: Path) -> str:
    """``octavo_server.rpc.cache`` for its file."""
    for package, folder in SOURCES.items():
        if path.is_relative_to(folder):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    raise ValueError(path)


def imported_names(path: Path, *, at_import_only: bool = False) -> Iterator[str]:
    """Dotted names that a file imports; ``at_import_only`` leaves out what functions import."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        if at_import_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if at_import_only and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        pending.extend(ast.iter_child_nodes(node))
