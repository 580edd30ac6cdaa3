"""What the codecs were built to reach, on the default model and all committed texts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from octavo.demo.checkpoint import ensure_checkpoint
from octavo.quality.run import Request, run_quality

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

CODECS = ("cast_e5m2", "cast_e4m3", "fp8_e5m2", "fp8_e4m3", "int8", "int6", "int5")


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    ensure_checkpoint(print)  # like every other set-up of ours; CI must not skip these
    request = Request(
        model=None,
        texts=(),
        codecs=CODECS,
        prefix_tokens=1024,
        score_tokens=512,
        rounds=1,
        page_tokens=16,
    )
    return run_quality(request, plot=None, to_stderr=True)


@pytest.mark.parametrize(
    ("codec", "cast", "ratio_max"),
    [
        ("fp8_e5m2", "cast_e5m2", 0.5),
        ("fp8_e4m3", "cast_e4m3", 0.35),
        ("int8", "cast_e4m3", 0.02),
        ("int6", "cast_e4m3", 0.15),
        ("int5", "cast_e4m3", 0.45),
    ],
)
def test_kl_is_a_small_part_of_a_plain_casts(
    figures: dict[str, Any], codec: str, cast: str, ratio_max: float
) -> None:
    assert figures["codecs"][codec]["kl"] <= ratio_max * figures["codecs"][cast]["kl"]


@pytest.mark.parametrize("codec", [name for name in CODECS if not name.startswith("cast")])
def test_perplexity_stays(figures: dict[str, Any], codec: str) -> None:
    change = figures["codecs"][codec]["dppl_pct"]
    assert math.isfinite(change)
    assert abs(change) < 0.5
