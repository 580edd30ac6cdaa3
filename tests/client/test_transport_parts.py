"""Parts of the transports that need no node: ring, mappings, ledger, inline pieces, header."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import threading
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import octavo
from octavo.deadline import Deadline
from octavo.delivery import DeliveryLedger
from octavo.memory import view_at
from octavo.transfer import Transfer
from octavo.transport.assembly import UNITS_OPEN_MAX, Assembler, Unit
from octavo.transport.base import GetOrder
from octavo.transport.broker import HEADER, MAGIC, parse_header
from octavo.transport.inline import digest_is_right
from octavo.transport.mapping import SharedMappings
from octavo.transport.ring import Ring, RingState, Span, aligned
from octavo_proto.keys import digest_seed, unit_digest
from octavo_proto.limits import SEGMENTS_MAX
from octavo_proto.v1 import cache_pb2

LAYOUT = octavo.Layout(name="l", model="m", layers=4, kv_heads=1, head_dim=8, layer_parts=4)
FUZZ = settings(max_examples=200, deadline=None, derandomize=True)
RING_BYTES = 1024


@FUZZ
@given(st.lists(st.one_of(st.integers(1, 700), st.integers(-8, -1)), max_size=60))
def test_live_spans_never_overlap_and_all_room_comes_back(steps: list[int]) -> None:
    """Positive: take so many bytes; negative: give back one of the live spans."""
    state = RingState(RING_BYTES)
    live: list[Span] = []
    for step in steps:
        if step > 0:
            span = state.take(step)
            if span is None:
                assert live, "an empty ring has room for anything that fits at all"
                continue
            assert span.offset % 64 == 0
            assert span.offset + span.size_bytes <= RING_BYTES
            for other in live:
                apart = (
                    span.offset + span.size_bytes <= other.offset
                    or other.offset + other.size_bytes <= span.offset
                )
                assert apart
            live.append(span)
        elif live:
            state.give_back(live.pop(-step % len(live)))
    for span in live:
        state.give_back(span)
    assert state.used_bytes == 0
    assert state.take(RING_BYTES) is not None


def test_a_span_freed_out_of_order_is_not_reused_before_older_ones() -> None:
    state = RingState(RING_BYTES)
    first, second = state.take(512), state.take(512)
    assert first is not None
    assert second is not None
    state.give_back(second)
    assert state.take(64) is None
    state.give_back(first)
    assert state.take(64) is not None


def test_a_full_ring_makes_the_next_put_wait_until_a_commit_answers() -> None:
    ring = Ring(RING_BYTES)
    span = ring.take(RING_BYTES, Deadline(1))
    timer = threading.Timer(0.05, ring.give_back, [span])
    timer.start()
    assert ring.take(64, Deadline(5)).offset == 0
    timer.join()


def test_waiting_for_ring_room_ends_with_the_deadline_or_the_ring() -> None:
    ring = Ring(RING_BYTES)
    ring.take(RING_BYTES, Deadline(1))
    with pytest.raises(octavo.NodeTimeout):
        ring.take(64, Deadline(0.02))
    timer = threading.Timer(0.05, ring.close)
    timer.start()
    with pytest.raises(octavo.SessionLost):
        ring.take(64, Deadline(5))
    timer.join()


def test_room_is_rounded_up_to_cache_lines() -> None:
    assert [aligned(size) for size in (1, 64, 65)] == [64, 64, 128]


@contextmanager
def memfd(size_bytes: int, fill: bytes = b"") -> Generator[int]:
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, size_bytes)
        os.pwrite(fd, fill, 0)
        yield fd
    finally:
        os.close(fd)


def mapped_bytes(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= address < end:
                return True
    return False


def test_memory_in_use_is_unmapped_only_after_the_last_copy() -> None:
    with memfd(8192, b"segment") as segment, memfd(4096) as ring:
        mappings = SharedMappings(8192, [segment], ring)
    address = int(mappings.segment_addresses[0])
    with mappings.in_use():
        mappings.close()
        assert bytes(view_at(address, 7)) == b"segment", "still mapped under the copy"
        with pytest.raises(octavo.SessionLost), mappings.in_use():
            pass
    assert not mapped_bytes(address)
    mappings.close()


def test_a_segment_shorter_than_announced_is_refused() -> None:
    with (
        memfd(4096) as segment,
        memfd(4096) as ring,
        pytest.raises(octavo.SessionLost, match="shorter"),
    ):
        SharedMappings(8192, [segment], ring)


@pytest.mark.parametrize(
    "header",
    [
        (MAGIC + 1, 1, 4096, 4096, 0),
        (MAGIC, 0, 4096, 4096, 0),
        (MAGIC, SEGMENTS_MAX + 1, 4096, 4096, 0),
        (MAGIC, 1, 0, 4096, 0),
        (MAGIC, 1, 4096, 0, 0),
    ],
)
def test_a_senseless_broker_header_is_refused(header: tuple[int, ...]) -> None:
    with pytest.raises(octavo.ConnectError):
        parse_header(HEADER.pack(*header))


def ledger_rows(ledger: DeliveryLedger, pairs: list[tuple[int, int]]) -> np.ndarray:
    positions = np.array([page for page, _ in pairs], dtype=np.int64)
    units = np.array([unit for _, unit in pairs], dtype=np.uint8)
    rows, wanted = ledger.rows_of(positions, units)
    return rows[wanted]


def outcome(*statuses: octavo.Status) -> np.ndarray:
    return np.array(statuses, dtype=np.uint8)


GRANTED = octavo.Status.GRANTED


def test_a_page_counts_only_with_all_its_units() -> None:
    ledger = DeliveryLedger(Transfer(LAYOUT, 5, 2, (1, 3)))
    ledger.good(ledger_rows(ledger, [(5, 1), (5, 3), (6, 1)]))
    ledger.close(outcome(GRANTED, GRANTED))
    assert ledger.statuses().tolist() == [octavo.Status.DONE, octavo.Status.UNAVAILABLE]


def test_the_same_unit_twice_does_not_make_a_page() -> None:
    ledger = DeliveryLedger(Transfer(LAYOUT, 0, 1, (0, 1)))
    ledger.good(ledger_rows(ledger, [(0, 0), (0, 0)]))
    ledger.close(outcome(GRANTED))
    assert ledger.statuses().tolist() == [octavo.Status.UNAVAILABLE]


def test_units_that_nobody_asked_for_are_counted_and_left_out() -> None:
    ledger = DeliveryLedger(Transfer(LAYOUT, 5, 2, (1,)))
    assert len(ledger_rows(ledger, [(4, 1), (7, 1), (5, 0), (5, 200), (6, 1)])) == 1
    assert ledger.unwanted_count == 4


def test_an_expired_lease_takes_the_page_back() -> None:
    ledger = DeliveryLedger(Transfer(LAYOUT, 0, 2, (0, 1)))
    rows = ledger_rows(ledger, [(0, 0), (0, 1), (1, 0), (1, 1)])
    ledger.good(rows[:3])
    ledger.expired(rows[3:])
    ledger.close(outcome(GRANTED, GRANTED))
    assert ledger.statuses().tolist() == [octavo.Status.DONE, octavo.Status.EXPIRED]


def test_without_the_nodes_account_only_what_arrived_counts() -> None:
    ledger = DeliveryLedger(Transfer(LAYOUT, 0, 3, (0,)))
    ledger.good(ledger_rows(ledger, [(0, 0)]))
    assert ledger.statuses().tolist() == [
        octavo.Status.DONE,
        octavo.Status.UNAVAILABLE,
        octavo.Status.UNAVAILABLE,
    ]


def test_an_account_that_is_too_short_means_missing() -> None:
    ledger = DeliveryLedger(Transfer(LAYOUT, 0, 3, (0,)))
    ledger.close(outcome(octavo.Status.CORRUPT))
    missing = octavo.Status.MISSING
    assert ledger.statuses().tolist() == [octavo.Status.CORRUPT, missing, missing]


def pieces_of(data: bytes, cuts: list[int], position: int) -> list[cache_pb2.InlineData]:
    edges = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    return [
        cache_pb2.InlineData(
            position=position,
            unit=2,
            variant=1,
            length=len(data),
            offset=begin,
            data=data[begin:end],
            digest=position,
            last=end == len(data),
        )
        for begin, end in itertools.pairwise(edges)
    ]


@FUZZ
@given(
    st.lists(
        st.tuples(st.binary(min_size=1, max_size=50), st.lists(st.integers(0, 99), max_size=4)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 2**16),
)
def test_interleaved_pieces_become_the_units_they_were(
    units: list[tuple[bytes, list[int]]], seed: int
) -> None:
    order = random.Random(seed)
    streams = [pieces_of(data, cuts, page) for page, (data, cuts) in enumerate(units)]
    assembler = Assembler()
    arrived: dict[int, bytes] = {}
    while any(streams):
        stream = order.choice([stream for stream in streams if stream])
        unit = assembler.add(stream.pop(0))
        if unit is not None:
            arrived[unit.position] = bytes(unit.data)
            assert unit.digest == unit.position
    assert arrived == {page: data for page, (data, _) in enumerate(units)}


@pytest.mark.parametrize(
    "change",
    [{"offset": 3}, {"offset": 5}, {"length": 9}, {"data": b"123456789"}, {"last": True}],
)
def test_pieces_that_do_not_continue_are_refused(change: dict[str, object]) -> None:
    assembler = Assembler()
    assembler.add(cache_pb2.InlineData(length=10, data=b"1234"))
    piece = {"length": 10, "offset": 4, "data": b"567", "last": False} | change
    with pytest.raises(octavo.NodeFailed, match="do not continue"):
        assembler.add(cache_pb2.InlineData(**piece))  # type: ignore[arg-type]


def test_units_left_open_are_bounded() -> None:
    assembler = Assembler()
    for position in range(UNITS_OPEN_MAX):
        assembler.add(cache_pb2.InlineData(position=position, length=10, data=b"1"))
    with pytest.raises(octavo.NodeFailed):
        assembler.add(cache_pb2.InlineData(position=UNITS_OPEN_MAX, length=10, data=b"1"))


KEYS = bytes(range(32))


def order_of() -> GetOrder:
    return GetOrder(
        session_id=b"",
        chain=cache_pb2.Chain(keys=KEYS),
        hold_id=0,
        transfer=Transfer(LAYOUT, 0, 2, (0, 1)),
        fingerprint=LAYOUT.fingerprint(),
        wait_pending=False,
        deadline=Deadline(1),
    )


def inline_unit(**change: object) -> Unit:
    data = b"the bytes of page 1, unit 1"
    seed = digest_seed(KEYS[16:], LAYOUT.fingerprint(), 1, 7, len(data))
    unit = Unit(position=1, unit=1, variant=7, data=data, digest=unit_digest(data, seed))
    return dataclasses.replace(unit, **change)  # type: ignore[arg-type]


def test_inline_bytes_are_checked_against_what_they_are_said_to_be() -> None:
    assert digest_is_right(inline_unit(), order_of())


@pytest.mark.parametrize(
    "change",
    [
        {"data": b"the bytes of page 1, unit 2"},
        {"data": b"the bytes of page 1, unit 1 "},
        {"position": 0},
        {"position": 2},
        {"unit": 0},
        {"variant": 1},
        {"digest": 0},
    ],
)
def test_inline_bytes_of_anything_else_are_corrupt(change: dict[str, object]) -> None:
    assert not digest_is_right(inline_unit(**change), order_of())
