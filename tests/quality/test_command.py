"""``octavo quality`` from the command line, on a toy model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main

SMALL = ["--prefix", "64", "--score", "24", "--codecs", "cast_bf16,cast_e4m3,cast_e5m2"]


def run_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["quality", *arguments, "--json"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1, "tables go to stderr"
    found: dict[str, Any] = json.loads(out)
    return found


def test_json_has_four_figures_a_codec(
    toy_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_json(["--model", str(toy_folder), "--texts", "chat", *SMALL], capsys)
    assert list(found["codecs"]) == ["cast_bf16", "cast_e4m3", "cast_e5m2"]
    for figures in found["codecs"].values():
        assert set(figures) == {"kl", "dppl_pct", "top1_pct", "bytes_ratio"}
    assert found["codecs"]["cast_e4m3"]["bytes_ratio"] == (16 + 48 / 2) / 64
    assert found["kl_over_cast_e4m3"]["cast_e4m3"] == 1
    assert list(found["texts"]) == ["chat"]
    assert found["model"] == toy_folder.name
    assert "rounds" not in found


def test_rounds_are_told_beside_one_round(
    toy_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(toy_folder), "--texts", "chat", "--rounds", "3", *SMALL]
    found = run_json(arguments, capsys)
    assert found["rounds"]["count"] == 3
    assert found["rounds"]["codecs"]["cast_e4m3"] == {
        "kl": found["codecs"]["cast_e4m3"]["kl"],
        "kl_over_one_round": 1,
        "same_bits": True,
    }


def test_tables_are_for_people_and_the_plot_is_drawn(
    toy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "quality.svg"
    arguments = ["--model", str(toy_folder), "--texts", "chat", "--plot", str(plot), *SMALL]
    assert main(["quality", *arguments]) == 0
    shown = capsys.readouterr().out
    for expected in ("cast_e4m3", "top-1", "KL by text", "chat", "0.625"):
        assert expected in shown
    assert plot.read_text().startswith("<?xml")
    first = plot.read_bytes()
    assert main(["quality", *arguments]) == 0
    assert plot.read_bytes() == first, "the same figures draw the same file"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--codecs", "int7"], "no codec 'int7'"),
        (["--texts", "poem"], "no file poem"),
        (["--prefix", "100"], "must be a multiple of 16"),
        (["--prefix", "9008"], "the model takes 8192"),
        (["--plot", "picture.gif"], "must end in"),
        (["--plot", "no/such/folder.svg"], "no such folder"),
        (["--model", "no-such-model"], "no-such-model"),
    ],
)
def test_wrong_requests_are_one_line_and_exit_2(
    toy_folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quality", "--model", str(toy_folder), *arguments]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert len(errors.splitlines()) == 1


def test_missing_matplotlib_is_one_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "octavo.quality.plot", raising=False)
    assert main(["quality", "--plot", "x.svg"]) == 1
    errors = capsys.readouterr().err
    assert "pip install 'octavo[plots]'" in errors
    assert len(errors.splitlines()) == 1


def test_help_gives_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quality", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Examples:" in shown
    assert "octavo quality --model" in shown
