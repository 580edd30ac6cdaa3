"""Choosing pages to leave a tier. The same rules hold in memory and on NVMe.

Victims are pages that nobody holds, in the policy's order, and only such whose children in
the tier go with them: chains lose their tail first and stay closed. Pages that still wait to
be written to NVMe go last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo_server.cache.page_table import NOWHERE, PageTable, Rows
from octavo_server.eviction.policy import EvictionPolicy
from octavo_server.store.slabs import SlabAllocator, sizes_of_slots

_RANKED_MIN: Final = 256
_RANKED_SHARE: Final = 16
"""A ranking orders 1/16 of the candidates, at least 256: the scan over all pages (about 10 ms
for a million) is then paid once for that many evictions."""

NO_ROWS: Final[Rows] = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class TierColumns:
    """The columns that say what lies in a tier, and those of the tier a page may be left in.

    Arrays of the page table; they stay the same objects when the table grows.
    """

    mask: NDArray[np.uint64]
    children: NDArray[np.int32]
    place: NDArray[np.int64]
    other_mask: NDArray[np.uint64]
    other_children: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Ranking:
    """Victims in order, with the time of last use that each had when ranked."""

    rows: Rows
    touched: NDArray[np.int64]

    def split(self, count: int) -> tuple[_Ranking, _Ranking]:
        """The first ``count`` of them, and the rest."""
        return (
            _Ranking(self.rows[:count], self.touched[:count]),
            _Ranking(self.rows[count:], self.touched[count:]),
        )


_NO_RANKING: Final = _Ranking(NO_ROWS, np.empty(0, dtype=np.int64))


class Reclaimer:
    """Names the pages that leave a tier when a unit needs room; it changes nothing itself."""

    def __init__(
        self,
        table: PageTable,
        columns: TierColumns,
        slots: SlabAllocator,
        policy: EvictionPolicy,
    ) -> None:
        self._table: Final = table
        self._columns: Final = columns
        self._slots: Final = slots
        self._policy: Final = policy
        self._ranked: dict[int, _Ranking] = {}  # slot size → victims yet to be taken, in order

    def victims(self, length: int, count: int) -> Rows:
        """Pages whose leaving gives up to ``count`` slots for units of ``length`` bytes.

        Usually about ``count`` pages, sometimes a whole slab's worth. Empty: nothing can go.
        """
        size_bytes = self._slots.slot_bytes(length)
        for everything in (False, True):
            ranked = self._ranked.pop(size_bytes, _NO_RANKING)
            if not len(ranked.rows):
                ranked = self._rank(size_bytes, everything=everything)
                colder = self._colder_slab(length, ranked.rows)
                if len(colder):
                    return colder
            while len(ranked.rows):
                batch, ranked = ranked.split(count)
                victims = self._free_to_go(batch)
                if len(victims):
                    self._ranked[size_bytes] = ranked
                    return victims
        return NO_ROWS

    def _evictable(self, rows: Rows) -> NDArray[np.bool_]:
        table = self._table
        evictable: NDArray[np.bool_] = (
            (self._columns.mask[rows] != 0)
            & (table.pins[rows] == 0)
            & (table.reserved_mask[rows] == 0)
            & ~table.withdrawn[rows]
        )
        return evictable

    def _stays(self, rows: Rows) -> NDArray[np.bool_]:
        """Whether a page that leaves this tier is still whole in the other one."""
        stays: NDArray[np.bool_] = self._columns.other_mask[rows] == self._table.full_mask[rows]
        return stays

    def _rank(self, size_bytes: int, *, everything: bool) -> _Ranking:
        """Pages with a unit of this slot size that may go, in the policy's order."""
        table = self._table
        rows = table.live_rows()
        rows = rows[self._evictable(rows)]
        owners, units = table.expanded(rows)
        fits = (self._columns.place[units] != NOWHERE) & (
            sizes_of_slots(table.units.length[units]) == size_bytes
        )
        of_size = np.zeros(len(rows), dtype=np.bool_)
        of_size[owners[fits]] = True
        if not everything:
            of_size &= ~table.queued[rows]
        rows = rows[of_size]
        count = len(rows) if everything else max(_RANKED_MIN, len(rows) // _RANKED_SHARE)
        victims = self._policy.first_victims(rows, count)
        return _Ranking(victims, table.touched[victims])

    def _free_to_go(self, ranking: _Ranking) -> Rows:
        """Those that may go now, given that all of these go together."""
        table = self._table
        batch = ranking.rows
        unused = table.touched[batch] == ranking.touched  # neither used since, nor another page
        batch = batch[unused & (table.unit_count[batch] != 0) & self._evictable(batch)]
        while len(batch):
            closed = self._columns.children[batch] == _children_among(table, batch)
            free = closed & (self._stays(batch) | (self._columns.other_children[batch] == 0))
            if free.all():
                break
            batch = np.asarray(batch[free], dtype=np.int32)
        return batch

    def _colder_slab(self, length: int, ranked: Rows) -> Rows:
        """Pages of the coldest slab of another size, if it was used before all of ``ranked``."""
        slots, table = self._slots, self._table
        slabs = slots.slabs_of_other_classes(length)
        if not len(slabs):
            return NO_ROWS
        rows = table.live_rows()
        owners, units = table.expanded(rows)
        places = self._columns.place[units]
        owners, places = owners[places != NOWHERE], places[places != NOWHERE]
        slab_of = places // slots.slab_bytes
        last_used = np.zeros(slots.slab_count, dtype=np.int64)
        np.maximum.at(last_used, slab_of, table.touched[rows[owners]])
        blocked = np.zeros(slots.slab_count, dtype=np.bool_)
        blocked[slab_of[~self._evictable(rows)[owners]]] = True
        slabs = slabs[~blocked[slabs]]
        if not len(slabs):
            return NO_ROWS
        coldest = int(slabs[np.argmin(last_used[slabs])])
        if len(ranked) and table.touched[ranked[0]] <= last_used[coldest]:
            return NO_ROWS
        victims = self._with_dependants(np.unique(rows[owners[slab_of == coldest]]))
        return victims if self._evictable(victims).all() else NO_ROWS

    def _with_dependants(self, rows: Rows) -> Rows:
        """``rows`` and the pages of this tier that would be cut off if these left the node."""
        table = self._table
        here = table.live_rows()
        here = here[self._columns.mask[here] != 0]
        chosen = np.zeros(table.high_water + 1, dtype=np.bool_)  # the last one stands for NO_ROW
        chosen[rows] = True
        frontier = rows
        while len(frontier):
            leaving = np.zeros_like(chosen)
            leaving[frontier[~self._stays(frontier)]] = True
            frontier = here[leaving[table.parent[here]] & ~chosen[here]]
            chosen[frontier] = True
        return np.flatnonzero(chosen[:-1]).astype(np.int32)


def _children_among(table: PageTable, rows: Rows) -> NDArray[np.int64]:
    """For each of ``rows``, how many of the others have it as their parent."""
    parents, counts = np.unique(table.parent[rows], return_counts=True)
    places = np.minimum(np.searchsorted(parents, rows), len(parents) - 1)
    return np.where(parents[places] == rows, counts[places], 0)
