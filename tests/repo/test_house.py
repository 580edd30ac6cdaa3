"""How the repository itself must look."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.repo.tree import ROOT, tracked_files

TOP_LEVEL = {
    *("proto", "server", "client", "deploy", "tests", "docs", ".ci"),
    *("pyproject.toml", "constraints.txt", "docker-compose.yml", "Makefile"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
}
TEXT_SUFFIXES = {"", ".md", ".py", ".pyi", ".proto", ".toml", ".txt", ".yml", ".yaml", ".json"}
FILE_LINES_MAX = 400

# Brackets around a letter keep this file from containing what it forbids.
FORBIDDEN = re.compile(
    r"/wor[k]/|/tm[p]/(bash|brief|issue)|\.\./share[d]|/roo[t]/|/hom[e]/[a-z]"
    r"|pypi\.or[g]|--extra-inde[x]-url"
)
# These look for the reference traces, and skip where they are absent.
MAY_LOOK_BESIDE_THE_REPOSITORY = ("tests/", "client/octavo/bench/")

tracked = [path for path in tracked_files() if path.suffix in TEXT_SUFFIXES]


def test_top_level_has_only_what_was_agreed() -> None:
    tops = {path.parts[0] for path in tracked_files()}
    assert {name for name in tops if not name.startswith(".")} <= TOP_LEVEL
    assert {name for name in tops if name.startswith(".")} <= {".ci", ".gitignore", ".dockerignore"}


@pytest.mark.parametrize("root", ["proto", "server", "client"])
def test_source_roots_are_no_packages(root: str) -> None:
    assert not (ROOT / root / "__init__.py").exists()


def test_no_file_names_a_machine_of_ours() -> None:
    for path in tracked:
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            found = FORBIDDEN.search(line)
            if found and ".." in found[0] and str(path).startswith(MAY_LOOK_BESIDE_THE_REPOSITORY):
                continue
            assert not found, f"{path}:{number}: {line.strip()[:120]}"


def test_files_fit_in_a_head() -> None:
    for path in tracked:
        if path.suffix == ".py" and "_pb2" not in path.name:
            lines = len((ROOT / path).read_text().splitlines())
            assert lines <= FILE_LINES_MAX, f"{path} has {lines} lines: look for the seam"


def test_nothing_is_called_utils() -> None:
    vague = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    assert not [path for path in tracked if path.name in vague]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/decisions").glob("[0-9]*.md")), ids=lambda path: path.stem
)
def test_decision_records_give_context_options_choice_and_price(path: Path) -> None:
    headings = re.findall(r"^## (.+)$", path.read_text(), re.MULTILINE)
    assert headings == ["Context", "Options", "Choice", "What it gives up"]


def test_decision_records_are_numbered_without_gaps() -> None:
    numbers = [int(path.name[:4]) for path in sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))
    assert numbers


def test_links_between_documents_lead_somewhere() -> None:
    for path in tracked:
        if path.suffix == ".md":
            for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / path).read_text()):
                assert ((ROOT / path).parent / target).exists(), f"{path} links to {target}"


def test_readme_names_only_commands_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named_targets = set(re.findall(r"\bmake ([a-z-]+)", text))
    assert named_targets <= targets
    assert {"demo", "test"} <= named_targets
    from octavo.cli.app import app

    commands = {
        command.name or command.callback.__name__
        for command in app.registered_commands
        if command.callback is not None
    }
    commands |= {str(group.name) for group in app.registered_groups}
    named = set(re.findall(r"(?:bin/|`)octavo ([a-z]+)", text))
    assert named
    assert named <= commands
