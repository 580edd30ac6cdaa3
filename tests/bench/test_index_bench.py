"""The index's benchmark, small: it measures what it says on a real Redis and a real cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.redis_servers import program

from octavo.cli.main import main

FIGURES = {
    "largest_hash_fields",
    "bytes_per_page",
    "publish_pages_per_s",
    "publish_cpu_us_per_page",
    "publish_redis_cpu_us_per_page",
    "publish_ceiling_pages_per_s",
    "match_640_ms",
    "match_640_exact_ms",
    "match_640_exact_ceiling_ms",
    "match_640_miss_ms",
    "match_8192_ms",
    "match_8192_exact_ms",
    "match_8192_exact_ceiling_ms",
    "match_8192_miss_ms",
    "compare_all_s",
}


def test_index_bench_measures_one_server_and_a_cluster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        "bench",
        "index",
        "--json",
        "--pages",
        "40000",
        "--repeats",
        "3",
        "--redis-server",
        program(),
    ]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) == FIGURES | {"pages", "chains", "cluster", "idle_share"}
    assert set(found["cluster"]) == FIGURES
    for figures in (found, found["cluster"]):
        # What does not depend on how busy the machine is.
        assert 20 <= figures["largest_hash_fields"] <= 128
        assert 16 <= figures["bytes_per_page"] <= 60
        assert figures["publish_ceiling_pages_per_s"] > figures["publish_pages_per_s"] > 0


def test_index_bench_without_a_server_says_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["bench", "index", "--redis-server", str(tmp_path / "none")]
    assert main(arguments) != 0
    assert "no redis-server" in capsys.readouterr().err
