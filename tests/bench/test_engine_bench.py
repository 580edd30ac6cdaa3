"""What ``octavo bench engine`` makes of what it measures; the engine itself is tried elsewhere."""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import vllm_child
from octavo.bench.engine_figures import median_upper95, percentiles
from octavo.bench.engine_timing import CallTimes, Times, read_times, timed_methods
from octavo.bench.measuring import IdleShare
from octavo.bench.vllm_child import (
    EngineError,
    NoEngineError,
    VllmChild,
    engine_python,
    process_cpu_s,
)
from octavo.cli.main import main


def test_upper_bound_of_a_median_holds_it_in_nineteen_of_twenty_samples() -> None:
    drawn = random.Random(3)
    held = 0
    for _ in range(200):
        sample = [drawn.lognormvariate(0.0, 0.05) for _ in range(24)]
        upper = median_upper95(sample)
        assert statistics.median(sample) <= upper <= max(sample)
        held += upper >= 1.0
    assert held >= 190


def test_upper_bound_of_equal_ratios_is_that_ratio() -> None:
    assert median_upper95([1.01] * 20) == pytest.approx(1.01)


def test_upper_bound_is_the_same_each_time() -> None:
    sample = [1.0, 1.2, 0.9, 1.1, 1.05]
    assert median_upper95(sample) == median_upper95(sample)


def test_percentiles_are_named_and_absent_where_nothing_was_measured() -> None:
    found = percentiles("step_ms", [float(value) for value in range(101)])
    assert found == {"step_ms_p50": 50.0, "step_ms_p99": 99.0, "step_ms_max": 100.0}
    assert percentiles("step_ms", []) == {}


def test_idle_share_is_a_share() -> None:
    idle = IdleShare()
    sum(range(2_000_000))
    assert 0.0 <= idle.since() <= 1.0


@dataclass
class FakeRequest:
    request_id: str


@dataclass
class FakeStep:
    total_num_scheduled_tokens: int


class Clock:
    """Time passes when a method says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.now_s / 2


class FakeConnector:
    """Methods that take a known time; one calls another."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_new_request(self, request: FakeRequest) -> None:
        self.clock.now_s += 0.001

    def get_num_new_matched_tokens(self, request: FakeRequest, computed: int) -> int:
        self.on_new_request(request)
        self.clock.now_s += 0.002
        return computed

    def request_finished_all_groups(self, request: FakeRequest, blocks: int) -> None:
        self.clock.now_s += 0.004

    def build_connector_meta(self, step: FakeStep) -> None:
        self.clock.now_s += 0.008

    def take_events(self) -> None:
        self.clock.now_s += 0.016
        raise ValueError("no events")

    def _private(self) -> None:
        raise AssertionError


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeConnector, list[dict[str, Any]]]:
    clock = Clock()
    monkeypatch.setattr("octavo.bench.engine_timing.time", clock)
    written: list[dict[str, Any]] = []
    connector = FakeConnector(clock)
    vars(connector).update(timed_methods(CallTimes(written.append), connector, FakeConnector))
    return connector, written


def test_every_public_method_of_a_connector_is_timed_and_no_other() -> None:
    found = timed_methods(CallTimes(lambda _: None), FakeConnector(Clock()), FakeConnector)
    assert set(found) == {
        "on_new_request",
        "get_num_new_matched_tokens",
        "request_finished_all_groups",
        "build_connector_meta",
        "take_events",
    }


def test_time_of_a_call_within_another_counts_once(
    timed: tuple[FakeConnector, list[dict[str, Any]]],
) -> None:
    connector, written = timed
    assert connector.get_num_new_matched_tokens(FakeRequest("a"), 7) == 7
    connector.build_connector_meta(FakeStep(5))
    assert written == [
        {"step_s": pytest.approx(0.011), "cpu_s": pytest.approx(0.0055), "tokens": 5}
    ]


def test_requests_and_steps_are_summed_apart_and_failed_calls_count(
    timed: tuple[FakeConnector, list[dict[str, Any]]],
) -> None:
    connector, written = timed
    for name in ("a", "b"):
        connector.on_new_request(FakeRequest(name))
        connector.get_num_new_matched_tokens(FakeRequest(name), 0)
    connector.build_connector_meta(FakeStep(64))
    with pytest.raises(ValueError, match="no events"):
        connector.take_events()
    connector.request_finished_all_groups(FakeRequest("b"), 0)
    connector.build_connector_meta(FakeStep(0))
    assert written == [
        {"step_s": pytest.approx(0.016), "cpu_s": pytest.approx(0.008), "tokens": 64},
        {"request_s": pytest.approx(0.008), "cpu_s": pytest.approx(0.004)},
        {"step_s": pytest.approx(0.028), "cpu_s": pytest.approx(0.014), "tokens": 0},
    ]


def test_times_are_read_as_milliseconds_of_steps_that_compute_and_steps_that_wait(
    tmp_path: Path,
) -> None:
    lines = [
        {"step_s": 0.001, "cpu_s": 0.0005, "tokens": 9},
        {"request_s": 0.002, "cpu_s": 0.001},
        {"step_s": 0.003, "cpu_s": 0.002, "tokens": 0},
    ]
    file = tmp_path / "times"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_times(file) == Times([1.0], [0.5], [3.0], [2.0], [1.0])


def test_processor_time_of_a_process_group_is_that_of_its_processes() -> None:
    found = Path("/proc/self/stat")
    before = process_cpu_s(found, os.getpgrp())
    used_s = time.process_time()
    while time.process_time() < used_s + 0.1:
        pass
    assert 0.08 <= process_cpu_s(found, os.getpgrp()) - before <= 1.0
    assert process_cpu_s(found, os.getpgrp() + 1) == 0.0
    assert process_cpu_s(Path("/proc/0/stat"), os.getpgrp()) == 0.0


def test_engine_that_does_not_start_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(vllm_child, "engine_python", lambda: Path(sys.executable))
    child = VllmChild(tmp_path / "no-model", tmp_path / "log", in_process=True)
    with child, pytest.raises(EngineError, match=r"(?s)the engine .*(vllm|no-model)"):
        child.start()


def test_bench_without_an_engine_is_one_line_that_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(_: str) -> None:
        return None

    monkeypatch.setattr("importlib.util.find_spec", absent)
    monkeypatch.setattr(vllm_child, "__file__", "/nowhere/client/octavo/bench/vllm_child.py")
    with pytest.raises(NoEngineError):
        engine_python()
    assert main(["bench", "engine"]) == 1
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1
    assert "vLLM" in errors
