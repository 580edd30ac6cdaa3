"""Choosing pages to leave a tier. The same rules hold in memory and on NVMe.

Victims are pages that nobody holds and no request has pinned, in the policy's order: those whose
children in the tier go with them first, so that chains lose their tail before their head. Where
units differ in size, the heads may be all that have the size wanted; then they go, too. A page
that leaves the node takes the pages below it along: chains stay closed. Pages that still wait to
be written to NVMe go after all others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo_server.cache.lineage import children_among, with_ancestors, with_descendants
from octavo_server.cache.page_table import NO_ROW, NOWHERE, PageTable, Rows
from octavo_server.eviction.policy import EvictionPolicy
from octavo_server.store.slabs import SlabAllocator, sizes_of_slots

_RANKED_MIN: Final = 256
_RANKED_SHARE: Final = 16
"""A ranking orders 1/16 of the candidates, at least 256: the scan over all pages (about 60 ms
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


class _Reach(Enum):
    """Which pages may be named as victims, each more than the one before."""

    TAILS = auto()
    """Those that don't wait to be written to NVMe and have no children left in the tier."""
    WRITTEN = auto()
    """Those with children there as well, if they stay in the other tier, or their children can
    go with them."""
    ALL = auto()
    """Those that wait as well: what is lost is lost before it was durable."""
    CUTTING = auto()
    """Those, too, that are the only link to other pages (to such as failed writes leave behind on
    NVMe, or to such as somebody holds): better these become unreachable than that nothing can be
    put any more."""


_DURABLE_FIRST: Final = (_Reach.TAILS, _Reach.WRITTEN)
"""Reaches in which what still waits to be written stays."""

_PASSES: Final = (_DURABLE_FIRST, (_Reach.ALL,), (_Reach.CUTTING,))
"""Reaches that differ only in who of the same ranking may go: they are tried on one."""


@dataclass(frozen=True, slots=True)
class _Ranking:
    """Victims in order, with the time of last use that each had when ranked, and how many
    slots of the wanted size each gives. ``reach``: the rule they were ranked by.
    """

    reach: _Reach
    rows: Rows
    touched: NDArray[np.int64]
    slot_counts: NDArray[np.int64]

    def split(self, slot_count: int) -> tuple[_Ranking, _Ranking]:
        """As many as give ``slot_count`` slots, and the rest."""
        sums = np.cumsum(self.slot_counts[:slot_count])
        count = int(np.searchsorted(sums, slot_count)) + 1
        return (
            replace(
                self,
                rows=self.rows[:count],
                touched=self.touched[:count],
                slot_counts=self.slot_counts[:count],
            ),
            replace(
                self,
                rows=self.rows[count:],
                touched=self.touched[count:],
                slot_counts=self.slot_counts[count:],
            ),
        )


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

        Usually just as many as that takes, sometimes a whole slab's worth. Empty: nothing
        can go.
        """
        size_bytes = self._slots.slot_bytes(length)
        ranked = self._ranked.pop(size_bytes, None)
        if ranked is not None and len(victims := self._next(ranked, count, size_bytes)):
            return victims
        for reaches in _PASSES:
            ranked = self._rank(size_bytes, reaches[0], count)
            colder = self._coldest_slab(length, reaches[0], ranked.rows)
            if len(colder):
                return colder
            for reach in reaches:
                victims = self._next(replace(ranked, reach=reach), count, size_bytes)
                if len(victims):
                    return victims
        # No page of this size can go, so it is not asked which slab was used before it.
        return self._coldest_slab(length, _Reach.CUTTING, NO_ROWS)

    def _next(self, ranked: _Ranking, count: int, size_bytes: int) -> Rows:
        """The first of a ranking that may go now; what is behind them is kept for the next call."""
        while len(ranked.rows):
            batch, ranked = ranked.split(count)
            if len(victims := self._free_to_go(batch)):
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
        if table.any_kept:
            evictable &= ~table.kept[rows]
        return evictable

    def _stays(self, rows: Rows) -> NDArray[np.bool_]:
        """Whether a page that leaves this tier is still whole in the other one."""
        stays: NDArray[np.bool_] = self._columns.other_mask[rows] == self._table.full_mask[rows]
        return stays

    def _rank(self, size_bytes: int, reach: _Reach, wanted: int) -> _Ranking:
        """Pages with a unit of this slot size that may go, in the policy's order; ``wanted`` of
        them if there are as many."""
        table = self._table
        rows = table.live_rows()
        rows = rows[self._evictable(rows)]
        if reach in _DURABLE_FIRST:
            rows = rows[~table.queued[rows]]
        owners, units = table.expanded(rows)
        fits = (self._columns.place[units] != NOWHERE) & (
            sizes_of_slots(table.units.length[units]) == size_bytes
        )
        slot_counts = np.zeros(table.high_water, dtype=np.int64)
        slot_counts[rows] = np.bincount(owners[fits], minlength=len(rows))
        rows = rows[slot_counts[rows] != 0]
        few = max(_RANKED_MIN, wanted, len(rows) // _RANKED_SHARE)
        victims = self._policy.first_victims(rows, few if reach in _DURABLE_FIRST else len(rows))
        return _Ranking(reach, victims, table.touched[victims], slot_counts[victims])

    def _free_to_go(self, ranking: _Ranking) -> Rows:
        """Those that may go now, with what has to go with them."""
        table = self._table
        batch = ranking.rows
        unused = table.touched[batch] == ranking.touched  # neither used since, nor another page
        batch = batch[unused & (table.unit_count[batch] != 0) & self._evictable(batch)]
        if not len(batch):
            return NO_ROWS
        if ranking.reach is not _Reach.TAILS:
            staying: Rows = batch[self._stays(batch)]
            if len(staying):  # mostly all of them, and then no other page needs a look
                return staying
            return self._with_dependants(batch[~self._blocked(ranking.reach)[batch]], ranking.reach)
        parents = table.parent[batch]
        needed = self._columns.children[batch] != children_among(batch, parents)
        needed |= ~self._stays(batch) & (self._columns.other_children[batch] != 0)
        return np.asarray(batch[~with_ancestors(batch, parents, needed)])

    def _coldest_slab(self, length: int, reach: _Reach, ranked: Rows) -> Rows:
        """The pages of a slab of another size, if it was used before all of ``ranked``, with what
        has to go with them; the coldest slab of which all of these can go.
        """
        slots, table = self._slots, self._table
        rows = table.live_rows()
        owners, units = table.expanded(rows)
        places = self._columns.place[units]
        owners, places = owners[places != NOWHERE], places[places != NOWHERE]
        slab_of = places // slots.slab_bytes
        last_used = np.zeros(slots.slab_count, dtype=np.int64)
        np.maximum.at(last_used, slab_of, table.touched[rows[owners]])
        open_to = np.zeros(slots.slab_count, dtype=np.bool_)
        open_to[slots.slabs_of_other_classes(length)] = True
        # A slab of which no page is known holds slots that somebody is about to use.
        open_to &= np.bincount(slab_of, minlength=slots.slab_count) != 0
        if len(ranked):
            open_to &= last_used < table.touched[ranked[0]]
        if not open_to.any():
            return NO_ROWS
        open_to[slab_of[self._blocked(reach)[rows[owners]]]] = False
        slabs = np.flatnonzero(open_to)
        if not len(slabs):
            return NO_ROWS
        coldest = slabs[np.argmin(last_used[slabs])]
        return self._with_dependants(np.unique(rows[owners[slab_of == coldest]]), reach)

    def _blocked(self, reach: _Reach) -> NDArray[np.bool_]:
        """For each row of the table whether its page can't leave this tier: somebody needs it, or
        a page that would have to go with it, or it is not here (yet: its places may be).
        """
        table = self._table
        here = table.live_rows()
        here = here[self._columns.mask[here] != 0]
        stuck = ~self._evictable(here)
        if reach in _DURABLE_FIRST:
            stuck |= table.queued[here]
        leaves = ~self._stays(here)
        if reach is not _Reach.CUTTING:
            stuck |= leaves & (self._columns.other_children[here] != 0)
        blocked = np.ones(table.high_water, dtype=np.bool_)
        blocked[here] = stuck
        if reach is _Reach.CUTTING:
            return blocked
        above = table.parent[here[stuck]]
        blocked_above = blocked.copy()
        blocked_above[above[above != NO_ROW]] = True
        # Only what leaves the node takes others along, and on a node with NVMe that is little.
        leaving = here[leaves]
        blocked[leaving] = with_ancestors(leaving, table.parent[leaving], blocked_above[leaving])
        return blocked

    def _with_dependants(self, rows: Rows, reach: _Reach) -> Rows:
        """``rows`` and the pages of this tier that would be cut off if these left the node. Where
        the reach allows to cut them off, those that somebody needs stay."""
        leaves = ~self._stays(rows)
        if not leaves.any():
            return rows
        table = self._table
        here = table.live_rows()
        here = here[self._columns.mask[here] != 0]
        flagged = with_descendants(
            here, table.parent[here], np.isin(here, rows), ~self._stays(here)
        )
        victims = np.asarray(here[flagged])
        return victims[self._evictable(victims)] if reach is _Reach.CUTTING else victims
