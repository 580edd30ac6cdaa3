"""When writes pause, and what the free-space guard lets through. No files, no clock."""

from __future__ import annotations

import errno

from octavo_server.store.nvme.health import (
    PROBE_UNITS,
    READ_ERRORS_MAX,
    RETRY_S,
    WRITE_ERRORS_MAX,
    ReadWatch,
    SpaceGuard,
    WriteBreaker,
)

EIO = OSError(errno.EIO, "")


def test_scattered_write_errors_do_not_pause_writes() -> None:
    breaker = WriteBreaker()
    for _ in range(10 * WRITE_ERRORS_MAX):
        breaker.failed(EIO, 0.0)
        breaker.succeeded()
    assert breaker.admit(5, 0.0) == 5


def test_consecutive_write_errors_pause_writes_until_a_probe_succeeds() -> None:
    breaker = WriteBreaker()
    for _ in range(WRITE_ERRORS_MAX - 1):
        breaker.failed(EIO, 0.0)
    assert breaker.admit(5, 0.0) == 5
    breaker.failed(EIO, 0.0)
    assert breaker.paused
    assert breaker.admit(5, RETRY_S - 0.1) == 0
    assert breaker.admit(500, RETRY_S) == PROBE_UNITS
    assert breaker.admit(5, RETRY_S + 0.1) == 0
    breaker.failed(EIO, RETRY_S + 0.2)
    assert breaker.admit(5, 2 * RETRY_S) == 0
    assert breaker.admit(5, 2 * RETRY_S + 0.2) == 5
    breaker.succeeded()
    assert breaker.admit(5, 2 * RETRY_S + 0.3) == 5


def test_a_read_only_device_pauses_writes_at_once() -> None:
    breaker = WriteBreaker()
    breaker.failed(OSError(errno.EROFS, ""), 0.0)
    assert breaker.paused


def test_a_probe_that_nobody_writes_is_given_again() -> None:
    breaker = WriteBreaker()
    breaker.failed(OSError(errno.EROFS, ""), 0.0)
    assert breaker.admit(1, RETRY_S) == 1
    assert breaker.admit(1, 2 * RETRY_S) == 1


def test_reads_count_as_broken_after_consecutive_errors_only() -> None:
    watch = ReadWatch()
    watch.errors_in_row = READ_ERRORS_MAX - 1
    assert not watch.broken
    watch.errors_in_row += 1
    assert watch.broken


def test_the_guard_lets_through_what_is_free_above_it() -> None:
    guard = SpaceGuard(100)
    guard.looked(free_bytes=150, occupied_bytes=0)
    assert guard.budget_bytes(0) == 50
    guard.begun(30)
    assert guard.budget_bytes(0) == 20
    guard.begun(30)
    assert guard.budget_bytes(0) == 0
    assert not guard.near_full


def test_below_the_guard_only_room_that_the_file_occupies_is_given_again() -> None:
    guard = SpaceGuard(100)
    guard.looked(free_bytes=99, occupied_bytes=500)
    assert guard.near_full
    assert guard.budget_bytes(used_bytes=450) == 50
    assert guard.budget_bytes(used_bytes=500) == 0
    guard.looked(free_bytes=49, occupied_bytes=500)
    assert guard.budget_bytes(used_bytes=0) == 0
