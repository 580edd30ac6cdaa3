"""The benchmark commands: what they print, whatever they measured."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from octavo.cli.bench import show_figures
from octavo.cli.main import main


def test_json_is_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    print("progress")
    show_figures("x", {"get_ratio": 0.9, "units": 640}, as_json=True)
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == {"get_ratio": 0.9, "units": 640}


def test_table_shows_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    show_figures("x", {"get_ratio": 0.91234, "units": 640, "note": "warm"}, as_json=False)
    shown = capsys.readouterr().out
    for expected in ("get_ratio", "0.9123", "640", "warm"):
        assert expected in shown


def test_options_reach_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = ModuleType("octavo.bench.local")
    module.run = lambda *, pairs: {"pairs": pairs}  # type: ignore[attr-defined]
    package = ModuleType("octavo.bench")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "octavo.bench", package)
    monkeypatch.setitem(sys.modules, "octavo.bench.local", module)
    assert main(["bench", "local", "--pairs", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"pairs": 3}


def test_missing_package_of_a_benchmark_is_one_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "octavo.bench.nvme", None)
    assert main(["bench", "nvme"]) == 1
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1
    assert "nvme" in errors
