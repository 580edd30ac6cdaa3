"""``octavo bench bulk`` on a real node: every figure is there, each beside its ceiling."""

from __future__ import annotations

import json

import pytest

from octavo.cli.main import main


def test_every_figure_stands_beside_its_ceiling(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "bulk", "--pairs", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    for what in ("get", "put"):
        ratio = figures[f"{what}_gbps"] / figures[f"{what}_ceiling_gbps"]
        assert figures[f"{what}_ratio"] == pytest.approx(ratio)
        assert figures[f"grpc_{what}_gbps"] > 0
    assert (figures["units"], figures["unit_bytes"]) == (640, 327_680)
