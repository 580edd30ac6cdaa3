"""What ``octavo bench nvme`` makes of the times that it took."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import numpy as np
import pytest

from octavo.bench.local import TOTAL_BYTES
from octavo.bench.nvme import beside, figures_of, in_ms
from octavo.cli.main import main


def test_a_read_is_held_against_the_plain_reads_before_and_after_it() -> None:
    assert beside([0.1, 0.3, 0.2], "ab") == [(0.1, "a"), (0.3, "a"), (0.3, "b"), (0.2, "b")]
    assert beside([0.1], []) == []


def test_a_level_read_is_level_though_times_have_a_long_tail() -> None:
    """The mean of the two plain times would make this ratio 1.12."""
    draw = np.random.default_rng(5).pareto(1.5, 20_001) + 1
    read = beside(draw[::2].tolist(), draw[1::2].tolist())
    assert np.median([plain / arena for plain, arena in read]) == pytest.approx(1, abs=0.03)


def test_a_steady_change_of_pace_leaves_the_read_ratio_at_one() -> None:
    pace = [0.1 * 1.3**step for step in range(19)]  # each time takes 1.3 times the one before
    series = {
        "write_plain": [0.4, 0.4, 0.6],
        "write_durable": [0.5, 0.8],
        "read_plain": pace[::2],
        "read_to_arena": pace[1::2],
        "half_to_arena": [0.1, 0.1, 0.3],
        "to_worker": [0.11, 0.22],
        "half_copy": [0.03, 0.25],
    }
    figures = figures_of(series)
    assert figures["read_ratio"] == pytest.approx((1 / 1.3 + 1.3) / 2)  # 1.03; pairs give 0.77
    assert figures["write_ratio"] == pytest.approx((0.8 + 0.75) / 2)  # of .8, .8, .5, .75
    assert figures["pipeline_ratio"] == pytest.approx((1.1 + 0.88) / 2)  # of 1.1, 1.1, .88, .73
    assert figures["read_ceiling_gbps"] == pytest.approx(
        TOTAL_BYTES / ((pace[8] + pace[10]) / 2) / 1e9
    )


def test_every_single_time_is_in_the_json_and_not_in_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"read_ratio": 0.9375, "series_ms": in_ms({"read_plain": [0.0876543, 0.09]})}
    module = ModuleType("octavo.bench.nvme")
    module.run = lambda *, directory: figures if directory is None else {}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "octavo.bench.nvme", module)
    assert main(["bench", "nvme", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["series_ms"] == {"read_plain": [87.65, 90.0]}
    assert main(["bench", "nvme"]) == 0
    table = capsys.readouterr().out
    assert "0.9375" in table
    assert "series_ms" not in table
