"""Everything that the cache counts along the way, counted again from scratch."""

# pyright: reportPrivateUsage=false
# What is recounted here is private on purpose; the books are balanced in one place.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo_server.cache.page_cache import PageCache
from octavo_server.cache.page_table import NEVER, NO_ROW, NOWHERE, PageTable
from octavo_server.store.slabs import SlabAllocator, sizes_of_slots


def check_invariants(cache: PageCache, *, nvme_idle: bool = True) -> None:
    """Holds between any two awaits while no get runs. ``nvme_idle``: no write and no withdrawal
    is under way, so that the store's slots are those of pages and nothing else.
    """
    table = cache.table
    check_table(table)
    _check_units(cache)
    _check_pins(cache)
    _check_reservations(cache)
    _check_keeping(cache)
    rows = table.live_rows()
    _, units = table.expanded(rows)
    _check_slots(
        cache.memory.arena.slots, table.units.memory_offset[units], table.units.length[units]
    )
    if cache.nvme is not None and nvme_idle:
        store = cache.nvme.store
        _check_slots(store.slots, table.units.nvme_offset[units], table.units.length[units])
        assert store.unit_count == int((table.units.nvme_offset[units] != NOWHERE).sum())


def check_table(table: PageTable) -> None:
    """Links, child counts, the key index, free rows and unit runs."""
    rows = table.live_rows()
    live = np.zeros(table.high_water, dtype=np.bool_)
    live[rows] = True
    free = table._free[: table._free_count]
    assert table.row_count == len(rows)
    assert len(np.unique(free)) == len(free)
    assert not live[free].any()
    assert len(rows) + len(free) == table.high_water
    parents = table.parent[rows]
    linked = parents != NO_ROW
    assert live[parents[linked]].all(), "a parent's row is free"
    assert (table.depth[rows[linked]] == table.depth[parents[linked]] + 1).all()
    for counted, flags in (
        (table.child_rows, np.ones(len(rows), dtype=np.bool_)),
        (table.memory_children, table.memory_mask[rows] != 0),
        (table.nvme_children, table.nvme_mask[rows] != 0),
    ):
        again = np.bincount(parents[linked & flags], minlength=table.high_water)
        assert (counted[rows] == again[rows]).all()
    findable = rows[~table.withdrawn[rows]]
    assert len(table.index) == len(findable)
    found = table.index.find_columns(
        table.key_low[findable], table.key_high[findable], table.namespace[findable]
    )
    assert (found == findable).all(), "a row is not found by its key"
    _, units = table.expanded(rows)
    runs = [
        np.arange(base, base + length)
        for length, bases in table.units._free.items()
        for base in bases
    ]
    everything = np.concatenate([units, *runs]) if len(units) or runs else units
    assert len(np.unique(everything)) == len(everything) == table.units._next


def _check_units(cache: PageCache) -> None:
    table = cache.table
    rows = table.live_rows()
    owners, units = table.expanded(rows)
    pages = rows[owners]
    bits = np.uint64(1) << (units - table.unit_base[pages]).astype(np.uint64)
    in_memory = (table.memory_mask[pages] & bits) != 0
    reserved = (table.reserved_mask[pages] & bits) != 0
    placed = table.units.memory_offset[units] != NOWHERE
    loading = np.isin(units, list(cache.loader._loading)) if cache.loader is not None else False
    assert not (in_memory & reserved).any()
    assert placed[in_memory | reserved].all(), "a unit in memory has no place"
    assert (in_memory | reserved | loading)[placed].all(), "a place that nobody will give back"
    on_nvme = (table.nvme_mask[pages] & bits) != 0
    assert (on_nvme == (table.units.nvme_offset[units] != NOWHERE)).all()
    whole = table.nvme_mask[rows] == table.full_mask[rows]
    assert (whole | (table.nvme_mask[rows] == 0)).all(), "a page lies on NVMe in part"
    for mask in (table.memory_mask, table.nvme_mask, table.reserved_mask):
        assert not (mask[rows] & ~table.full_mask[rows]).any()
    children = table.child_rows[rows] != 0
    kept = (table.memory_mask[rows] | table.nvme_mask[rows] | table.reserved_mask[rows]) != 0
    assert (kept | children | (table.pins[rows] != 0)).all(), "a row that nothing needs"
    settled = ~(table.withdrawn[rows] & (table.pins[rows] == 0) & (table.reserved_mask[rows] == 0))
    assert (settled | ~kept).all(), "a withdrawn page kept its places"


def _check_slots(
    slots: SlabAllocator, offsets: NDArray[np.int64], lengths: NDArray[np.uint32]
) -> None:
    placed = offsets != NOWHERE
    offsets, sizes = offsets[placed], sizes_of_slots(lengths[placed])
    assert slots.used_bytes == int(sizes.sum())
    order = np.argsort(offsets)
    assert (offsets[order][:-1] + sizes[order][:-1] <= offsets[order][1:]).all(), "slots overlap"


def _check_pins(cache: PageCache) -> None:
    again = np.zeros(cache.table.high_water, dtype=np.int64)
    for lease in cache.leases._leases.values():
        np.add.at(again, lease.rows, 1)
    for hold in cache.leases._holds.values():
        np.add.at(again, hold.pinned, 1)
    if cache.loader is not None:
        for row in cache.loader._loading.values():
            again[row] += 1
    if cache.nvme is not None:
        for batch in cache.nvme._writes.values():
            np.add.at(again, batch, 1)
    rows = cache.table.live_rows()
    assert (cache.table.pins[rows] == again[rows]).all()
    assert not np.delete(again, rows).any(), "somebody needs a row that is free"


def _check_keeping(cache: PageCache) -> None:
    table, keeping = cache.table, cache.keeping
    rows = table.live_rows()
    kept = rows[table.kept[rows]]
    assert np.isin(kept, keeping._rows).all(), "a page is kept, and nobody knows until when"
    assert table.any_kept or not len(kept)
    assert keeping.size_bytes <= keeping.bytes_max
    moments = table.expires_ms[rows[~table.withdrawn[rows]]]
    assert cache.lifetimes.in_use or (moments == NEVER).all(), "a page expires and nobody looks"


def _check_reservations(cache: PageCache) -> None:
    """While no copy of an ended reservation is under way."""
    table = cache.table
    again = np.zeros(table.high_water, dtype=np.uint64)
    reserved_bytes = 0
    for reservation in cache.reservations._reservations.values():
        taken = reservation.open_mask | reservation.copying_mask
        used = np.flatnonzero(taken)
        rows = reservation.rows[used]
        assert not (again[rows] & taken[used]).any(), "a unit is reserved twice"
        again[rows] |= taken[used]
        owners, units = table.expanded(rows)
        bits = np.uint64(1) << (units - table.unit_base[rows][owners]).astype(np.uint64)
        mine = (taken[used][owners] & bits) != 0
        size_bytes = int(sizes_of_slots(table.units.length[units[mine]]).sum())
        assert reservation.reserved_bytes == size_bytes
        reserved_bytes += size_bytes
    rows = table.live_rows()
    assert (table.reserved_mask[rows] == again[rows]).all()
    assert cache.reservations.reserved_bytes == reserved_bytes
