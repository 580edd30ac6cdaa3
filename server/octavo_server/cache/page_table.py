"""Every page this node knows, as columns: one row a page, one row a unit.

A row is made when a page is first reserved (or recovered) and goes when nothing of it is left
and no row calls it its parent. Rows are numbers; whole chains are read and changed with a few
numpy operations. This module keeps the columns consistent with each other (links, child
counts, the key index, free rows); what the states mean for reading and eviction is decided by
its users.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from octavo_server.cache.key_index import KeyIndex
from octavo_server.cache.lineage import children_among, with_ancestors

Rows = NDArray[np.int32]

NO_ROW: Final = -1
NOWHERE: Final = -1
NEVER: Final = 2**63 - 1
"""In ``expires_ms``."""

_GROWTH: Final = 1.2
"""Columns grow by this factor: memory over-committed by at most a fifth, copies amortised."""
_CAPACITY_MIN: Final = 4096


class _Columns:
    """Named one-dimensional arrays of equal length that grow together."""

    def __init__(self, dtypes: dict[str, str]) -> None:
        self.capacity = 0
        self._dtypes = dtypes
        for name, dtype in dtypes.items():
            setattr(self, name, np.zeros(0, dtype=dtype))

    def grow(self, capacity: int) -> None:
        for name in self._dtypes:
            column: NDArray[Any] = getattr(self, name)
            # In place (realloc), so that growing needs no second copy of the column.
            column.resize(capacity, refcheck=False)
        self.capacity = capacity


class UnitColumns(_Columns):
    """One row a unit. A page's units are consecutive rows from its ``unit_base``.

    A place is NOWHERE while the unit has none: it may have one before its bit is set in the
    page's mask (reserved, loading, being written), never the other way round.
    """

    memory_offset: NDArray[np.int64]
    nvme_offset: NDArray[np.int64]
    digest: NDArray[np.uint64]
    length: NDArray[np.uint32]

    def __init__(self) -> None:
        super().__init__(
            {"memory_offset": "i8", "nvme_offset": "i8", "digest": "u8", "length": "u4"}
        )
        self._next = 0
        self._free: dict[int, list[int]] = {}  # run length → bases of free runs
        self.grow(_CAPACITY_MIN)

    def allocate(self, unit_count: int, page_count: int) -> Rows:
        """First unit rows of ``page_count`` pages of ``unit_count`` units each."""
        free = self._free.get(unit_count, [])
        reused = free[max(0, len(free) - page_count) :]
        del free[len(free) - len(reused) :]
        fresh = page_count - len(reused)
        if self._next + fresh * unit_count > self.capacity:
            wanted = self._next + fresh * unit_count
            self.grow(max(wanted, int(self.capacity * _GROWTH)))
        bases = np.arange(fresh, dtype=np.int32) * unit_count + self._next
        self._next += fresh * unit_count
        bases = np.concatenate([np.array(reused, dtype=np.int32), bases.astype(np.int32)])
        rows = (bases[:, None] + np.arange(unit_count, dtype=np.int32)[None, :]).ravel()
        self.memory_offset[rows] = NOWHERE
        self.nvme_offset[rows] = NOWHERE
        self.length[rows] = 0
        return bases

    def free(self, bases: Rows, unit_counts: NDArray[np.uint8]) -> None:
        for unit_count in np.unique(unit_counts).tolist():
            self._free.setdefault(unit_count, []).extend(bases[unit_counts == unit_count].tolist())


class PageTable(_Columns):
    """One row a page. Masks have a bit for each unit.

    ======================  =====================================================================
    key_low, key_high       the page key
    namespace, layout       registry numbers
    variant                 how its units are packed
    parent                  row of the page before it, or NO_ROW
    depth                   position in its chain as the putting session gave it
    child_rows              rows whose parent this is
    memory_children         of these, how many have a unit in memory
    nvme_children           of these, how many have a unit on NVMe
    unit_base, unit_count   its rows in ``units``
    full_mask               mask with all its units
    memory_mask             units readable in memory
    nvme_mask               units durable on NVMe
    reserved_mask           units that a session has the right to fill now
    pins                    leases, holds and transfers that need the row's places to stay
    generation              counts how often its memory was given away
    touched                 when it was last used, in ticks of the eviction policy's clock
    expires_ms              when it expires, in milliseconds since 1970, or NEVER
    kept                    a request has pinned it: it is not evicted
    withdrawn               no longer found by key; waits for its last pin
    queued                  waits in the write-behind queue
    ======================  =====================================================================
    """

    key_low: NDArray[np.uint64]
    key_high: NDArray[np.uint64]
    namespace: NDArray[np.int32]
    layout: NDArray[np.int32]
    variant: NDArray[np.uint16]
    parent: NDArray[np.int32]
    depth: NDArray[np.uint32]
    child_rows: NDArray[np.int32]
    memory_children: NDArray[np.int32]
    nvme_children: NDArray[np.int32]
    unit_base: NDArray[np.int32]
    unit_count: NDArray[np.uint8]
    full_mask: NDArray[np.uint64]
    memory_mask: NDArray[np.uint64]
    nvme_mask: NDArray[np.uint64]
    reserved_mask: NDArray[np.uint64]
    pins: NDArray[np.int32]
    generation: NDArray[np.uint32]
    touched: NDArray[np.int64]
    expires_ms: NDArray[np.int64]
    kept: NDArray[np.bool_]
    withdrawn: NDArray[np.bool_]
    queued: NDArray[np.bool_]

    def __init__(self) -> None:
        super().__init__(
            {
                "key_low": "u8",
                "key_high": "u8",
                "namespace": "i4",
                "layout": "i4",
                "variant": "u2",
                "parent": "i4",
                "depth": "u4",
                "child_rows": "i4",
                "memory_children": "i4",
                "nvme_children": "i4",
                "unit_base": "i4",
                "unit_count": "u1",
                "full_mask": "u8",
                "memory_mask": "u8",
                "nvme_mask": "u8",
                "reserved_mask": "u8",
                "pins": "i4",
                "generation": "u4",
                "touched": "i8",
                "expires_ms": "i8",
                "kept": "?",
                "withdrawn": "?",
                "queued": "?",
            }
        )
        self.units = UnitColumns()
        self.index = KeyIndex(self)
        self.any_kept = False  # whether any row may be kept
        self.row_count = 0  # rows that are in use
        self.high_water = 0  # rows ever used: a scan of columns[:high_water] sees every row
        self._free = np.empty(0, dtype=np.int32)
        self._free_count = 0
        self.grow(_CAPACITY_MIN)  # so that NO_ROW is an index too, whose content means nothing

    def find(self, keys: NDArray[np.uint64], namespace: int) -> Rows:
        """Rows of ``keys`` (shape [n, 2]) in ``namespace``; NO_ROW where there is none."""
        return self.index.find(keys, namespace)

    def add(
        self,
        keys: NDArray[np.uint64],
        namespace: NDArray[np.int32] | int,
        layout: NDArray[np.int32] | int,
        unit_count: int,
        depth: NDArray[np.uint32],
    ) -> Rows:
        """New rows for keys that have none and differ from each other; no parents yet."""
        rows = self._take_rows(len(keys))
        self.key_low[rows] = keys[:, 0]
        self.key_high[rows] = keys[:, 1]
        self.namespace[rows] = namespace
        self.layout[rows] = layout
        self.depth[rows] = depth
        self.parent[rows] = NO_ROW
        self.unit_count[rows] = unit_count
        self.unit_base[rows] = self.units.allocate(unit_count, len(rows))
        self.full_mask[rows] = np.uint64((1 << unit_count) - 1)
        for column in (self.child_rows, self.memory_children, self.nvme_children, self.pins):
            column[rows] = 0
        for mask in (self.memory_mask, self.nvme_mask, self.reserved_mask):
            mask[rows] = 0
        self.variant[rows] = 0
        self.touched[rows] = 0
        self.expires_ms[rows] = NEVER
        self.kept[rows] = False
        self.withdrawn[rows] = False
        self.queued[rows] = False
        self.index.insert(rows)
        return rows

    def link(self, rows: Rows, parents: Rows) -> None:
        """Gives rows without a parent theirs (NO_ROW leaves a row without)."""
        linked = parents != NO_ROW
        rows, parents = rows[linked], parents[linked]
        self.parent[rows] = parents
        np.add.at(self.child_rows, parents, 1)
        np.add.at(self.memory_children, parents, (self.memory_mask[rows] != 0).astype(np.int32))
        np.add.at(self.nvme_children, parents, (self.nvme_mask[rows] != 0).astype(np.int32))

    def unlink(self, rows: Rows) -> Rows:
        """Takes their parents from rows that have one.

        Returns the parents. They are for the caller to ``drop_unused``, as soon as it needs no
        row any more that may go with them: their own parents do, up to the next one in use.
        """
        parents = self.parent[rows]
        np.subtract.at(self.child_rows, parents, 1)
        np.subtract.at(self.memory_children, parents[self.memory_mask[rows] != 0], 1)
        np.subtract.at(self.nvme_children, parents[self.nvme_mask[rows] != 0], 1)
        self.parent[rows] = NO_ROW
        return parents

    def set_memory_mask(self, rows: Rows, masks: NDArray[np.uint64]) -> None:
        """Changes which units are in memory, and the parents' counts with it."""
        self._set_mask(self.memory_mask, self.memory_children, rows, masks)

    def set_nvme_mask(self, rows: Rows, masks: NDArray[np.uint64]) -> None:
        """Changes which units are on NVMe, and the parents' counts with it."""
        self._set_mask(self.nvme_mask, self.nvme_children, rows, masks)

    def withdraw(self, rows: Rows) -> None:
        """From now on no look-up finds these rows. Their places are the caller's to free."""
        rows = np.unique(rows[~self.withdrawn[rows]])
        self.index.remove(rows)
        self.withdrawn[rows] = True

    def drop_unused(self, rows: Rows) -> None:
        """Gives back those of ``rows`` of which nothing is left, and parents that follow."""
        while len(rows):
            rows = np.unique(rows)
            rows = rows[
                ~self.is_begun(rows) & (self.pins[rows] == 0) & (self.unit_count[rows] != 0)
            ]
            # Whole chains go at once: a row may go with all of its children.
            parents = self.parent[rows]
            needed = self.child_rows[rows] != children_among(rows, parents)
            rows = rows[~with_ancestors(rows, parents, needed)]
            self.index.remove(rows[~self.withdrawn[rows]])
            self.units.free(self.unit_base[rows], self.unit_count[rows])
            self.unit_count[rows] = 0  # marks a free row
            parents = self.parent[rows]
            parents = parents[parents != NO_ROW]
            np.subtract.at(self.child_rows, parents, 1)
            self._give_rows(rows)
            rows = parents

    def is_begun(self, rows: Rows) -> NDArray[np.bool_]:
        """Whether each page has units in a tier, or such as a session may fill now."""
        begun: NDArray[np.bool_] = (
            self.memory_mask[rows] | self.nvme_mask[rows] | self.reserved_mask[rows]
        ) != 0
        return begun

    def unit_rows(self, rows: Rows, units: NDArray[np.int32]) -> NDArray[np.int32]:
        """Rows in ``units`` of the given units of each page: shape [pages, units]."""
        return self.unit_base[rows][:, None] + units[None, :]

    def expanded(self, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Every unit of the given pages: index into ``rows``, and row in ``units``."""
        counts = self.unit_count[rows].astype(np.int64)
        if (counts == 1).all():
            return np.arange(len(rows)), self.unit_base[rows]
        owners = np.repeat(np.arange(len(rows)), counts)
        starts = np.cumsum(counts) - counts
        within = np.arange(len(owners)) - starts[owners]
        return owners, (self.unit_base[rows][owners] + within).astype(np.int32)

    def live_rows(self) -> Rows:
        """Rows that are in use."""
        return np.flatnonzero(self.unit_count[: self.high_water]).astype(np.int32)

    def _set_mask(
        self,
        column: NDArray[np.uint64],
        children: NDArray[np.int32],
        rows: Rows,
        masks: NDArray[np.uint64],
    ) -> None:
        change = (masks != 0).astype(np.int32) - (column[rows] != 0).astype(np.int32)
        column[rows] = masks
        parents = self.parent[rows]
        counted = (change != 0) & (parents != NO_ROW)
        np.add.at(children, parents[counted], change[counted])

    def _take_rows(self, count: int) -> Rows:
        reused = self._free[max(0, self._free_count - count) : self._free_count].copy()
        self._free_count -= len(reused)
        fresh = count - len(reused)
        if self.high_water + fresh > self.capacity:
            wanted = self.high_water + fresh
            self.grow(max(wanted, int(self.capacity * _GROWTH)))
        rows = np.arange(self.high_water, self.high_water + fresh, dtype=np.int32)
        self.high_water += fresh
        self.row_count += count
        return np.concatenate([reused, rows])

    def _give_rows(self, rows: Rows) -> None:
        needed = self._free_count + len(rows)
        if needed > len(self._free):
            self._free = np.concatenate(
                [self._free[: self._free_count], np.empty(needed, dtype=np.int32)]
            )
        self._free[self._free_count : needed] = rows
        self._free_count = needed
        self.row_count -= len(rows)
