"""The engine's counters must say what its answers say."""

from __future__ import annotations

import pytest

from octavo.bench.rag.rates import RateError, ServedTurn
from octavo.bench.rag.sources import Sources, connector_counts, read_sources

BY_SOURCE = "vllm:prompt_tokens_by_source/"
BY_TIER = "vllm:prompt_tokens_cached_by_source/"
BEFORE = {f"{BY_SOURCE}local_compute": 100.0, f"{BY_SOURCE}local_cache_hit": 10.0}
AFTER = {
    f"{BY_SOURCE}local_compute": 136.0,
    f"{BY_SOURCE}local_cache_hit": 42.0,
    f"{BY_SOURCE}external_kv_transfer": 96.0,
    f"{BY_TIER}host": 64.0,
    f"{BY_TIER}disk": 32.0,
}


def turn(prompt_tokens: int, cached_tokens: int) -> ServedTurn:
    return ServedTurn(
        session=0,
        prompt=range(prompt_tokens),
        answer=(1,),
        cached_tokens=cached_tokens,
        issued_s=0.0,
        first_token_s=1.0,
        ended_s=1.0,
    )


# 164 tokens, of which 128 were cached: 32 by the engine, 96 by the node.
TURNS = [turn(100, 64), turn(64, 64)]


def test_tokens_since_the_first_reading_are_told_by_source() -> None:
    assert read_sources(BEFORE, AFTER, TURNS, 32) == Sources(
        engine=32, memory=64, nvme=32, other_tier=0, computed=36, failed=0
    )


def test_failed_loads_are_computed_tokens() -> None:
    after = {**AFTER, "vllm:octavo_load_failed_pages": 2.0}
    found = read_sources(BEFORE, after, TURNS, 32)
    assert (found.failed, found.computed) == (64, 100)


def test_version_that_does_not_tell_tiers_leaves_them_open() -> None:
    after = {name: value for name, value in AFTER.items() if not name.startswith(BY_TIER)}
    found = read_sources(BEFORE, after, TURNS, 32)
    assert (found.memory, found.nvme, found.other_tier) == (0, 0, 96)


def test_counters_that_contradict_the_answers_end_the_run() -> None:
    with pytest.raises(RateError, match="computed 36 tokens and had 128, by its answers 37"):
        read_sources(BEFORE, AFTER, [turn(101, 64), turn(64, 64)], 32)


def test_preempted_requests_end_the_run() -> None:
    with pytest.raises(RateError, match="preempted 1 requests"):
        read_sources(BEFORE, {**AFTER, "vllm:num_preemptions": 1.0}, TURNS, 32)


def test_connector_tells_what_it_counted() -> None:
    before = {"vllm:octavo_matches": 1.0, "vllm:octavo_saved_pages": 3.0}
    after = {"vllm:octavo_matches": 5.0, "vllm:octavo_saved_pages": 3.0, "vllm:x": 9.0}
    assert connector_counts(before, after) == {"matches": 4}
