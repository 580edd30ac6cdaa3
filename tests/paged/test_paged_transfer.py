"""Gather and scatter against a plain reference, over shapes, role orders and strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.paged.engines import Engine, engines

from octavo import Layout, Rows, Transfer, TransferError
from octavo.paged import PagedKV, PagedKVError, PagedSink, PagedSource

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
FUZZ = settings(max_examples=120, deadline=None, derandomize=True)


def rows_at(transfer: Transfer, lengths: list[int], spread: int) -> tuple[Rows, np.ndarray]:
    """All rows of a transfer, ``spread`` bytes apart in a buffer (returned, to keep it alive)."""
    numbers = np.arange(transfer.row_count, dtype=np.int64)
    sizes = np.array(lengths, dtype=np.int64)
    room = sizes + spread
    buffer = np.zeros(int(room.sum()) + 64, dtype=np.uint8)
    rows = Rows(
        rows=numbers,
        positions=transfer.positions_of(numbers),
        units=transfer.units_of(numbers),
        variants=np.ones(len(numbers), dtype=np.uint16),
        lengths=sizes,
        addresses=buffer.ctypes.data + np.cumsum(room) - room,
    )
    return rows, buffer


def bytes_of(rows: Rows, buffer: np.ndarray, row: int) -> bytes:
    begin = int(rows.addresses[row]) - buffer.ctypes.data
    return buffer[begin : begin + int(rows.lengths[row])].tobytes()


@FUZZ
@given(engines(), st.data())
def test_gathered_bytes_are_the_canonical_ones(
    made: tuple[Engine, int], data: st.DataObject
) -> None:
    engine, block_tokens = made
    cache = engine.paged()
    table = data.draw(st.permutations(range(cache.block_count)))
    pages = len(table) * cache.pages_per_block
    first = data.draw(st.integers(0, pages - 1))
    units = tuple(range(engine.layout.unit_count))
    transfer = Transfer(engine.layout, first, pages - first, units)
    source = PagedSource(cache, table)
    source.begin(transfer)
    lengths = np.broadcast_to(source.unit_lengths(), (transfer.row_count,)).tolist()
    rows, buffer = rows_at(transfer, lengths, data.draw(st.sampled_from([0, 3, 64])))
    source.fill_rows(rows)
    for row in range(len(rows)):
        expected = engine.page_bytes(
            int(rows.units[row]), list(table), block_tokens, int(rows.positions[row])
        )
        assert bytes_of(rows, buffer, row) == expected


@FUZZ
@given(engines(), st.data())
def test_scatter_restores_what_gather_took_and_nothing_else(
    made: tuple[Engine, int], data: st.DataObject
) -> None:
    engine, block_tokens = made
    cache = engine.paged()
    table = list(data.draw(st.permutations(range(cache.block_count))))
    pages = len(table) * cache.pages_per_block
    units = tuple(range(engine.layout.unit_count))
    first = data.draw(st.integers(0, pages - 1))
    transfer = Transfer(engine.layout, first, pages - first, units)
    source, sink = PagedSource(cache, table), PagedSink(cache, table)
    source.begin(transfer)
    lengths = np.broadcast_to(source.unit_lengths(), (transfer.row_count,)).tolist()
    rows, _buffer = rows_at(transfer, lengths, data.draw(st.sampled_from([0, 3, 64])))
    source.fill_rows(rows)
    before = {
        (unit, page): engine.page_bytes(unit, table, block_tokens, page)
        for unit in units
        for page in range(pages)
    }
    for tensor in engine.tensors + (engine.values or []):
        tensor.view(BITS[tensor.element_size()]).fill_(7)
    wiped = {
        (unit, page): engine.page_bytes(unit, table, block_tokens, page)
        for unit in units
        for page in range(pages)
    }
    sink.begin(transfer)
    sink.accept_rows(rows)
    for (unit, page), expected in before.items():
        wanted = expected if page >= first else wiped[unit, page]
        assert engine.page_bytes(unit, table, block_tokens, page) == wanted


LAYOUT = Layout(name="l", model="m", layers=2, kv_heads=2, head_dim=4, dtype="float32")


def kv(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("tensors", "dims", "message"),
    [
        ([kv(2, 3, 16, 2, 4)], "kv block token head color", "roles are"),
        ([kv(2, 3, 16, 2, 4)], "kv kv token head dim", "each once"),
        ([kv(2, 3, 16, 2, 4)], "kv block token head latent", "needs"),
        ([kv(3, 16, 2, 4)], "block token head dim", "needs"),
        ([kv(2, 3, 16, 2)], "kv block token head dim", "4 dimensions"),
        ([kv(3, 3, 16, 2, 4)], "kv block token head dim", "kv is 3"),
        ([kv(3, 16, 2, 7)], "block token head kv_dim", "must be even"),
        ([kv(2, 3, 16, 2, 5)], "kv block token head dim", "dim is 5"),
        ([kv(2, 3, 16, 3, 4)], "kv block token head dim", "head: 3"),
        ([kv(2, 3, 24, 2, 4)], "kv block token head dim", "multiple of page_tokens"),
        ([kv(2, 3, 8, 2, 4)], "kv block token head dim", "multiple of page_tokens"),
        ([kv(2, 3, 16, 2, 4)] * 3, "kv block token head dim", "layer: 3"),
        ([kv(2, 3, 16, 2, 4), kv(2, 4, 16, 2, 4)], "kv block token head dim", "layer 1"),
        ([kv(2, 3, 16, 2, 4, dtype=torch.float16)], "kv block token head dim", "dtype"),
        ([], "kv block token head dim", "no tensors"),
    ],
)
def test_a_cache_that_does_not_fit_the_layout_is_refused_by_dimension(
    tensors: list[torch.Tensor], dims: str, message: str
) -> None:
    with pytest.raises(PagedKVError, match=message):
        PagedKV(LAYOUT, tensors, dims)


def whole_cache() -> PagedKV:
    return PagedKV(LAYOUT, [kv(2, 3, 32, 2, 4) for _ in range(2)], "kv block token head dim")


@pytest.mark.parametrize(("table", "message"), [([0, 3], "block 3"), ([-1], "block -1")])
def test_a_block_outside_of_the_cache_is_refused(table: list[int], message: str) -> None:
    with pytest.raises(PagedKVError, match=message):
        PagedSource(whole_cache(), table)


def test_a_block_table_that_is_too_short_is_refused_before_anything_moves() -> None:
    sink = PagedSink(whole_cache(), [0, 1])
    sink.begin(Transfer(LAYOUT, 0, 4, (0,)))
    with pytest.raises(PagedKVError, match="covers 4"):
        sink.begin(Transfer(LAYOUT, 0, 5, (0,)))


def test_another_layout_than_the_caches_is_refused() -> None:
    other = Layout(name="o", model="m", layers=2, kv_heads=2, head_dim=8, dtype="float32")
    with pytest.raises(PagedKVError, match="layout"):
        PagedSink(whole_cache(), [0]).begin(Transfer(other, 0, 1, (0,)))


def test_a_unit_of_the_wrong_size_is_not_scattered() -> None:
    sink = PagedSink(whole_cache(), [0, 1])
    transfer = Transfer(LAYOUT, 0, 1, (0,))
    sink.begin(transfer)
    rows, _buffer = rows_at(transfer, [LAYOUT.raw_unit_bytes(0) - 4], 0)
    with pytest.raises(TransferError, match="codec raw makes"):
        sink.accept_rows(rows)


def test_a_rank_moves_the_units_it_holds_and_refuses_others() -> None:
    layout = Layout(
        name="l", model="m", layers=2, kv_heads=4, head_dim=4, dtype="float32", head_parts=2
    )
    local = [torch.randn(2, 3, 16, 2, 4) for _ in range(2)]
    rank_1 = PagedKV(layout, local, "kv block token head dim", head_begin=2)
    source = PagedSource(rank_1, [2, 0])
    source.begin(Transfer(layout, 0, 2, (1,)))
    taken = source.gather(1, np.array([0]))
    assert torch.equal(taken[0, 1, 0].view(torch.float32), local[1][0, 2])
    with pytest.raises(PagedKVError, match="heads of unit 0"):
        source.begin(Transfer(layout, 0, 2, (0,)))
