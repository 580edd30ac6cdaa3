"""``octavo bench engine`` measures what it says, here with the tiny model and few requests."""

from __future__ import annotations

import pytest
from tests.engines.tiny_model import ensure_tiny_model

from octavo.bench.engine import BATCH_REQUESTS, BATCHES, run

pytestmark = pytest.mark.long


def test_all_parts_are_measured_in_an_engine_of_one_process() -> None:
    found = run(pairs=3, prompt_tokens=1024, model=ensure_tiny_model(), in_process=True)
    figures = {name: value for name, value in found.items() if isinstance(value, float)}
    assert 0 < figures["restart_loaded_ms"] < figures["restart_cold_ms"]
    assert 0 < figures["restart_own_hit_ms"] < figures["restart_cold_ms"]
    assert 0 < figures["miss_ratio"] <= figures["miss_ratio_upper95"]
    assert 0.2 < figures["miss_cpu_ratio"] < 5
    # A request to warm up, those that are loaded later, and the batches.
    assert found["scheduler_requests"] == 1 + BATCH_REQUESTS // 2 + BATCHES * BATCH_REQUESTS
    for name in ("scheduler_step_ms", "scheduler_request_ms"):
        assert 0 < figures[f"{name}_p50"] <= figures[f"{name}_p99"] <= figures[f"{name}_max"]
    assert 0 <= figures["idle_share"] <= 1
