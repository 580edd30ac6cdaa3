"""The documents name what exists, all of it."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from tests.cli.test_serve import serving
from tests.repo.tree import ROOT

from octavo.cli.main import main
from octavo_server.rpc.status import CODES
from octavo_server.settings import Settings
from octavo_server.settings_sources import load_settings


def table_names(heading: str, document: str = "operations.md") -> set[str]:
    """What stands in backquotes in the first column of the first table after ``heading``."""
    text = (ROOT / "docs" / document).read_text()
    table = text[text.index(heading) :]
    rows = re.findall(r"^\|([^|]+)\|", table[: table.index("\n\n", table.index("|---"))], re.M)
    return {name for row in rows for name in re.findall(r"`([A-Za-z_]+)`", row)}


def test_operations_explains_every_setting_and_no_other() -> None:
    assert table_names("| setting |") == set(Settings.model_fields)


def test_operations_explains_every_counter_and_gauge_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = ["--nvme-dir", f"{tmp_path}/nvme", "--nvme-bytes", "64MiB"]
    with serving(tmp_path, *disk) as node:
        assert main(["stats", "--address", node.address, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    counters = table_names("| counter |") | table_names("| NVMe counter |")
    assert counters == set(found["counters"])
    assert table_names("| gauge |") == set(found["gauges"])


def test_protocol_explains_every_error_code_and_no_other() -> None:
    codes = {code.name for code in CODES.values()}
    assert table_names("| code |", "protocol.md") == codes


def test_example_file_is_accepted_also_with_all_of_it_switched_on() -> None:
    path = ROOT / "deploy/octavo.toml"
    assert load_settings({}, {}, path).memory_bytes == 8 << 30
    switched_on = re.sub(r"^# (\w+ = )", r"\1", path.read_text(), flags=re.M)
    found = load_settings(tomllib.loads(switched_on), {})
    assert found.nvme_bytes == 200 << 30
    assert found.state_dir is not None
