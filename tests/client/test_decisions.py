"""The client's plain decisions: addresses, errors, breaker, windows, health."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import octavo
from octavo.address import default_address, parse_address
from octavo.breaker import BACKOFF_FIRST_S, BACKOFF_MAX_S, Breaker, BreakerState
from octavo.deadline import CallScope, Deadline, current_scope
from octavo.errors import UNKNOWN_SESSION, error_of
from octavo.status import counts_by_status, known_statuses
from octavo.transfer import cut, page_window, wanted_units
from octavo_proto.v1 import cache_pb2

LAYOUT = octavo.Layout(name="l", model="m", layers=4, kv_heads=2, head_dim=8, layer_parts=4)
FUZZ = settings(max_examples=200, deadline=None, derandomize=True)


@pytest.mark.parametrize(
    ("text", "target", "is_local"),
    [
        ("unix:/run/o.sock", "unix:/run/o.sock", True),
        ("unix:///run/o.sock", "unix:/run/o.sock", True),
        ("localhost:7000", "localhost:7000", False),
        ("[::1]:7000", "[::1]:7000", False),
        ("10.0.0.1:1", "10.0.0.1:1", False),
    ],
)
def test_an_address_says_what_to_dial(text: str, target: str, is_local: bool) -> None:
    address = parse_address(text)
    assert (address.target, address.is_local) == (target, is_local)


@pytest.mark.parametrize(
    "text",
    [
        *("", "unix:", "unix:relative", "unix:/a\nb", "unix:/" + "x" * 107),
        *("host", "host:", ":70", "host:0", "host:65536", "host:7000 ", "host:7000/x"),
        *("http://host:80", "ho st:80"),
    ],
)
def test_an_address_with_stray_characters_is_refused(text: str) -> None:
    with pytest.raises(octavo.InvalidRequest, match="address"):
        parse_address(text)


def test_the_environment_names_the_node_else_the_users_own_socket() -> None:
    assert default_address({"OCTAVO_ADDRESS": "host:1"}) == "host:1"
    assert default_address({"XDG_RUNTIME_DIR": "/run/u"}) == "unix:/run/u/octavo/octavo.sock"
    assert parse_address(default_address({})).is_local


@pytest.mark.parametrize("code", list(grpc.StatusCode), ids=lambda code: code.name)
def test_every_grpc_status_becomes_an_error_of_ours(code: grpc.StatusCode) -> None:
    error = error_of(code, "why")
    assert isinstance(error, octavo.OctavoError)
    assert type(error) is not octavo.OctavoError
    assert "why" in str(error)


@pytest.mark.parametrize("code", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAUTHENTICATED])
def test_only_the_details_tell_a_lost_session(code: grpc.StatusCode) -> None:
    assert type(error_of(code, UNKNOWN_SESSION)) is octavo.SessionLost
    assert type(error_of(code, "something else")) is not octavo.SessionLost


def test_statuses_and_tiers_are_those_of_the_protocol() -> None:
    ours = {f"STATUS_{status.name}": int(status) for status in octavo.Status}
    assert ours | {"STATUS_UNSPECIFIED": 0} == dict(cache_pb2.Status.items())
    tiers = {f"TIER_{tier.name}": int(tier) for tier in octavo.Tier if tier}
    assert tiers | {"TIER_UNSPECIFIED": 0} == dict(cache_pb2.Tier.items())


def test_a_status_from_the_future_counts_as_rejected() -> None:
    column = known_statuses(np.array([1, 0, 200, 14], dtype=np.uint8))
    assert counts_by_status(column) == {
        octavo.Status.STORED: 1,
        octavo.Status.REJECTED: 2,
        octavo.Status.DONE: 1,
    }
    assert octavo.Tier.of(99) is octavo.Tier.UNKNOWN


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_breaker_opens_at_once_and_lets_one_probe_through() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    assert breaker.admit()
    breaker.failed()
    assert not breaker.admit()
    clock.now_s += BACKOFF_FIRST_S
    assert breaker.admit()
    assert not breaker.admit(), "a second caller must not pay as well"
    breaker.succeeded()
    assert breaker.admit()
    assert breaker.state is BreakerState.CLOSED


def test_the_backoff_doubles_up_to_its_bound() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    waits: list[float] = []
    assert breaker.admit()
    for _ in range(6):
        breaker.failed()
        began_s = clock.now_s
        while not breaker.admit():
            clock.now_s += 0.125
        waits.append(clock.now_s - began_s)
    assert waits == [BACKOFF_FIRST_S, 1.0, 2.0, 4.0, BACKOFF_MAX_S, BACKOFF_MAX_S]


def test_concurrent_failures_count_once() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(8):
        breaker.failed()
    clock.now_s += BACKOFF_FIRST_S
    assert breaker.admit()


@FUZZ
@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 150), st.integers(1, 10))
def test_cut_covers_all_rows_once_within_both_bounds(
    lengths: list[int], size_bytes_max: int, rows_max: int
) -> None:
    column = np.array(lengths, dtype=np.int64)
    pieces = list(cut(column, size_bytes_max, rows_max))
    assert [row for begin, end in pieces for row in range(begin, end)] == list(range(len(lengths)))
    for begin, end in pieces:
        assert end - begin <= rows_max
        assert end - begin == 1 or sum(lengths[begin:end]) <= size_bytes_max


def test_units_come_as_mask_set_or_all() -> None:
    assert wanted_units(None, LAYOUT) == (0, 1, 2, 3)
    assert wanted_units(0b1010, LAYOUT) == (1, 3)
    assert wanted_units({2, 0}, LAYOUT) == (0, 2)


@pytest.mark.parametrize("units", [0, -1, 1 << 64, 0b10000, {4}, {-1}, set[int]()])
def test_units_that_the_layout_lacks_are_refused(units: int | set[int]) -> None:
    with pytest.raises(octavo.InvalidRequest):
        wanted_units(units, LAYOUT)


@pytest.mark.parametrize(("first", "count"), [(-1, None), (0, 11), (11, None), (5, 6), (0, -1)])
def test_pages_outside_of_the_chain_are_refused(first: int, count: int | None) -> None:
    with pytest.raises(octavo.InvalidRequest, match="the chain has 10"):
        page_window(10, first, count)


def test_a_passed_deadline_and_a_cancelled_scope_end_the_wait() -> None:
    with pytest.raises(octavo.NodeTimeout):
        Deadline(0.0).require_s()
    scope = CallScope()
    token = current_scope.set(scope)
    try:
        deadline = Deadline(5.0)
        assert deadline.require_s() > 4
        scope.cancel()
        with pytest.raises(octavo.CallCancelled):
            deadline.require_s()
    finally:
        current_scope.reset(token)


def test_a_call_started_after_cancellation_is_cancelled_too() -> None:
    cancelled: list[bool] = []

    class Call:
        def cancel(self) -> None:
            cancelled.append(True)

    scope = CallScope()
    with scope.watching(Call()):
        scope.cancel()
    assert cancelled == [True]
    with pytest.raises(octavo.CallCancelled), scope.watching(Call()):
        pass
    assert cancelled == [True, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layouts": []}, "0 layouts"),
        ({"layouts": [LAYOUT, LAYOUT]}, "same name"),
        ({"namespaces": ()}, "0 namespaces"),
        ({"transport": "carrier pigeon"}, "transport"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"address": "no address"}, "address"),
    ],
)
def test_wrong_arguments_of_a_client_are_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"address": "unix:/x", "layouts": [LAYOUT]} | change
    with pytest.raises(octavo.InvalidRequest, match=message):
        octavo.Client(**arguments)  # type: ignore[arg-type]
