"""Load or recompute, from measured speeds."""

from __future__ import annotations

from math import inf

from octavo.vllm.speed import (
    MEASURED,
    LoadSpeed,
    PrefillSpeed,
    is_worth_loading,
    load_timeout_s,
)


def test_prompts_are_measured_and_decoding_is_not() -> None:
    speed = PrefillSpeed()
    assert speed.tokens_per_s is None
    speed.step_started(8, 10.0)
    speed.step_ended(11.0)
    assert speed.tokens_per_s is None
    speed.step_started(1000, 20.0)
    speed.step_ended(20.5)
    assert speed.tokens_per_s == 2000


def test_one_odd_measurement_does_not_move_the_estimate() -> None:
    speed = LoadSpeed()
    for _each in range(MEASURED - 1):
        speed.loaded(10 << 20, 0.01)
    speed.loaded(10 << 20, 1.0)
    assert speed.bytes_per_s == (10 << 20) / 0.01


def test_steps_that_overlap_end_in_the_order_in_which_they_began() -> None:
    speed = PrefillSpeed()
    speed.step_started(1000, 0.0)
    speed.step_started(64, 0.1)
    speed.step_ended(1.0)
    assert speed.tokens_per_s == 1000
    speed.step_ended(1.1)
    assert speed.tokens_per_s == (1000 + 64) / 2


def test_what_was_not_measured_is_loaded() -> None:
    assert is_worth_loading(100, 1 << 20, 5.0, None, None)
    assert is_worth_loading(1000, 1 << 20, 0.1, 1000.0, None)


def test_a_load_that_takes_longer_than_computing_is_left() -> None:
    # 100 tokens at 10,000/s take 10 ms; 10 MB at 1 GB/s take 10 ms and the calls.
    assert not is_worth_loading(100, 10_000_000, 0.0, 10_000.0, 1e9)
    assert is_worth_loading(100, 1_000_000, 0.0, 10_000.0, 1e9)
    assert not is_worth_loading(100, 1_000_000, 0.1, 10_000.0, 1e9)


def test_a_load_is_waited_for_while_it_may_still_be_worth_it() -> None:
    assert load_timeout_s(100, 1000, 0.0, None, 1e9) == inf
    assert load_timeout_s(1000, 1000, 0.0, 1000.0, 1e9) == 2.5
    assert load_timeout_s(10, 1_000_000_000, 1.0, 1000.0, 1e9) == 4.5
