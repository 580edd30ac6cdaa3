"""Sinks and sources: every byte where it belongs, and nothing beyond."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import octavo
from octavo.memory import WORDWISE_BYTES_MIN, copy_extents, merge_extents, region_of
from octavo.sinks import row_sink, row_source
from octavo.transfer import Rows, Transfer

UNIT = 64
LAYOUT = octavo.Layout(
    name="l", model="m", layers=4, kv_heads=1, head_dim=2, dtype="uint8", layer_parts=4
)
FUZZ = settings(max_examples=150, deadline=None, derandomize=True)


def rows_of(transfer: Transfer, buffer: NDArray[np.uint8], order: list[int]) -> Rows:
    numbers = np.array(order, dtype=np.int64)
    return Rows(
        rows=numbers,
        positions=transfer.positions_of(numbers),
        units=transfer.units_of(numbers),
        variants=np.ones(len(order), dtype=np.uint16),
        lengths=np.full(len(order), UNIT, dtype=np.int64),
        addresses=buffer.ctypes.data + np.arange(len(order), dtype=np.int64) * UNIT,
    )


def pattern(row_count: int) -> NDArray[np.uint8]:
    generator = np.random.default_rng(row_count)
    return generator.integers(0, 256, row_count * UNIT, dtype=np.uint8)


@FUZZ
@given(st.data(), st.integers(1, 5), st.sets(st.integers(0, 3), min_size=1), st.booleans())
def test_a_unit_lands_in_the_row_of_its_page_and_rank(
    data: st.DataObject, page_count: int, units: set[int], mapped: bool
) -> None:
    transfer = Transfer(LAYOUT, 7, page_count, tuple(sorted(units)))
    order = data.draw(st.permutations(range(transfer.row_count)))
    arena = pattern(transfer.row_count)
    mapping = data.draw(st.permutations(range(page_count + 2)))[:page_count] if mapped else None
    page_room = page_count + 2 if mapped else page_count
    target = np.zeros(page_room * len(units) * UNIT, dtype=np.uint8)
    sink = octavo.BufferSink(target, UNIT, rows=mapping)
    sink.begin(transfer)
    for piece in rows_of(transfer, arena, list(order)).slices(3 * UNIT):
        sink.accept_rows(piece)
    expected = np.zeros_like(target)
    for place, row in enumerate(order):
        page, rank = divmod(row, len(units))
        goes_to = (mapping[page] if mapping else page) * len(units) + rank
        expected[goes_to * UNIT : (goes_to + 1) * UNIT] = arena[place * UNIT : (place + 1) * UNIT]
    assert np.array_equal(target, expected)
    assert (sink.lengths == UNIT).all()

    source = octavo.BufferSource(target, UNIT, rows=mapping)
    source.begin(transfer)
    back = np.zeros_like(arena)
    source.fill_rows(rows_of(transfer, back, list(order)))
    assert np.array_equal(back, arena)


@FUZZ
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=20))
def test_merged_extents_copy_the_same_bytes(pairs: list[tuple[int, int]]) -> None:
    source, step = pattern(31), 8
    sources = np.array([a for a, _ in pairs], dtype=np.int64) * step
    targets = np.array([b for _, b in pairs], dtype=np.int64) * step
    lengths = np.full(len(pairs), step, dtype=np.int64)
    expected, merged = np.zeros(256, dtype=np.uint8), np.zeros(256, dtype=np.uint8)
    for a, b in zip(sources.tolist(), targets.tolist(), strict=True):
        expected[b : b + step] = source[a : a + step]
    copy_extents(merged.ctypes.data + targets, source.ctypes.data + sources, lengths)
    assert np.array_equal(merged, expected)


@FUZZ
@given(
    st.lists(st.integers(0, 15), min_size=1, max_size=8, unique=True),
    st.sampled_from([0, 1, 8, 16]),
    st.sampled_from([0, 4, 8]),
    st.sampled_from([0, 3, 8]),
)
def test_long_extents_are_copied_whole_whatever_their_alignment(
    places: list[int], source_skew: int, target_skew: int, shorter: int
) -> None:
    size = WORDWISE_BYTES_MIN - shorter
    source = np.random.default_rng(1).integers(0, 256, 17 * WORDWISE_BYTES_MIN, dtype=np.uint8)
    target = np.zeros_like(source)
    starts = np.array(places, dtype=np.int64) * WORDWISE_BYTES_MIN
    goals = starts[::-1] + target_skew
    expected = target.copy()
    for start, goal in zip((starts + source_skew).tolist(), goals.tolist(), strict=True):
        expected[goal : goal + size] = source[start : start + size]
    copy_extents(
        target.ctypes.data + goals,
        source.ctypes.data + starts + source_skew,
        np.full(len(places), size, dtype=np.int64),
    )
    assert np.array_equal(target, expected)


def test_neighbours_on_both_sides_become_one_extent() -> None:
    places = np.array([0, 8, 16, 40], dtype=np.int64)
    lengths = np.full(4, 8, dtype=np.int64)
    targets, sources, sizes = merge_extents(places + 1000, places, lengths)
    assert targets.tolist() == [1000, 1040]
    assert sources.tolist() == [0, 40]
    assert sizes.tolist() == [24, 8]


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(256),
        lambda: memoryview(bytearray(256)),
        lambda: np.zeros((4, 64), dtype=np.uint8),
        lambda: torch.zeros(64, dtype=torch.int32),
        lambda: torch.zeros(128, dtype=torch.bfloat16),
    ],
)
def test_any_contiguous_buffer_has_a_region(make: Callable[[], object]) -> None:
    buffer = make()
    region = region_of(buffer)
    assert region.size_bytes == 256
    assert region.is_writable
    assert region.address > 0


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros((4, 64), dtype=np.uint8)[:, ::2],
        torch.zeros(8, 8).t(),
        torch.zeros(4, device="meta"),
        "text",
        7,
        (0, 16),
    ],
)
def test_what_has_no_contiguous_memory_is_refused(buffer: object) -> None:
    with pytest.raises(octavo.InvalidRequest):
        region_of(buffer)


def test_a_sink_must_be_writable_and_large_enough() -> None:
    with pytest.raises(octavo.InvalidRequest, match="writable"):
        octavo.BufferSink(b"x" * UNIT, UNIT)
    sink = octavo.BufferSink(bytearray(4 * UNIT - 1), UNIT)
    with pytest.raises(octavo.InvalidRequest, match=f"needs {4 * UNIT}"):
        sink.begin(Transfer(LAYOUT, 0, 4, (0,)))
    with pytest.raises(octavo.InvalidRequest, match="negative"):
        octavo.BufferSink(bytearray(UNIT), UNIT, rows=[-1]).begin(Transfer(LAYOUT, 0, 1, (0,)))
    with pytest.raises(octavo.InvalidRequest, match="maps 1 pages"):
        octavo.BufferSink(bytearray(UNIT), UNIT, rows=[0]).begin(Transfer(LAYOUT, 0, 2, (0,)))


def test_a_unit_larger_than_its_row_is_not_copied() -> None:
    target = bytearray(4 * UNIT)
    sink = octavo.BufferSink(target, UNIT // 2)
    transfer = Transfer(LAYOUT, 0, 1, (0,))
    sink.begin(transfer)
    with pytest.raises(octavo.TransferError, match="rows of 32"):
        sink.accept_rows(rows_of(transfer, pattern(1), [0]))
    assert target == bytearray(4 * UNIT)


def test_a_source_must_have_the_layouts_unit_size() -> None:
    source = octavo.BufferSource(bytearray(4 * UNIT), UNIT - 1)
    with pytest.raises(octavo.InvalidRequest, match="codec raw"):
        source.begin(Transfer(LAYOUT, 0, 1, (0,)))


class OneByOne:
    """A sink and source that moves one unit at a time, and misbehaves on request."""

    def __init__(self) -> None:
        self.units: dict[tuple[int, int], bytes] = {}
        self.keep: list[memoryview] | None = None
        self.wrote: int | None = None

    def accept(self, position: int, unit: int, variant: int, view: memoryview) -> None:
        assert view.readonly
        self.units[position, unit] = bytes(view)
        if self.keep is not None:
            self.keep.append(np.frombuffer(view, dtype=np.uint8).data)

    def unit_bytes(self, position: int, unit: int) -> int:
        return UNIT

    def variant(self, position: int) -> int:
        return 1

    def fill(self, position: int, unit: int, view: memoryview) -> int | None:
        view[:] = self.units[position, unit]
        return self.wrote


def test_units_pass_one_by_one_through_plain_sinks_and_sources() -> None:
    transfer = Transfer(LAYOUT, 3, 2, (1, 2))
    arena, plain = pattern(4), OneByOne()
    sink = row_sink(plain)
    sink.begin(transfer)
    sink.accept_rows(rows_of(transfer, arena, [0, 1, 2, 3]))
    assert sorted(plain.units) == [(3, 1), (3, 2), (4, 1), (4, 2)]
    source = row_source(plain)
    source.begin(transfer)
    assert source.unit_lengths().tolist() == [UNIT] * 4
    assert source.page_variants().tolist() == [1, 1]
    back = np.zeros_like(arena)
    source.fill_rows(rows_of(transfer, back, [0, 1, 2, 3]))
    assert np.array_equal(back, arena)


def test_a_view_that_outlives_the_call_is_an_error() -> None:
    transfer, plain = Transfer(LAYOUT, 0, 1, (0,)), OneByOne()
    plain.keep = []
    sink = row_sink(plain)
    with pytest.raises(octavo.TransferError, match="kept a view"):
        sink.accept_rows(rows_of(transfer, pattern(1), [0]))


def test_a_source_that_writes_too_little_ends_the_put() -> None:
    transfer, plain = Transfer(LAYOUT, 0, 1, (0,)), OneByOne()
    plain.units[0, 0] = bytes(UNIT)
    plain.wrote = UNIT - 1
    with pytest.raises(octavo.TransferError, match="wrote 63 of 64"):
        row_source(plain).fill_rows(rows_of(transfer, pattern(1), [0]))
