"""Which pages requests have pinned for a time: they are not evicted, from no tier.

Not to be confused with ``pins.py``, which counts who needs a page's places at this moment. To
keep a page is a wish; what all of them may keep is bounded, or nothing else found room any more:
by bytes, and by slabs, since a slab with one kept page has no room for pages of another size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo_server.cache.page_table import NOWHERE, PageTable, Rows
from octavo_server.store.slabs import SlabAllocator, sizes_of_slots

SLAB_SHARE_MAX: Final = 0.5
"""Part of a tier's slabs in which pages may lie when they are pinned. One that is loaded later may
come to lie in another."""


@dataclass(frozen=True, slots=True)
class TierSlabs:
    """Where the units of a tier lie (a column of the page table), and in slabs of which size."""

    place: NDArray[np.int64]
    slots: SlabAllocator


class Keeping:
    """Keeps the page table's ``kept`` column, and until when each of its pages is kept."""

    def __init__(
        self,
        table: PageTable,
        tiers: Sequence[TierSlabs],
        share_max: float,
        now: Callable[[], float],
    ) -> None:
        """``share_max``: part of the smaller tier that kept pages may take."""
        self._table: Final = table
        self._tiers: Final = tiers
        self._now = now
        self.bytes_max: Final = int(share_max * min(tier.slots.capacity_bytes for tier in tiers))
        self._rows: Rows = np.empty(0, dtype=np.int32)
        self._until = np.empty(0, dtype=np.float64)
        self._next_due = np.inf

    @property
    def page_count(self) -> int:
        self._settle()
        return len(self._rows)

    @property
    def size_bytes(self) -> int:
        """What the kept pages may take, in slots of one tier."""
        self._settle()
        return int(self._slot_bytes(self._rows).sum())

    def keep(self, rows: Rows, duration_s: float) -> NDArray[np.bool_]:
        """Keeps pages (which differ) for so long from now, heads first, as far as there is room:
        which of them. What is kept already is kept for longer, if that is later."""
        taken_bytes = self.size_bytes
        table = self._table
        sizes = np.where(table.kept[rows], 0, self._slot_bytes(rows))
        granted: NDArray[np.bool_] = taken_bytes + np.cumsum(sizes) <= self.bytes_max
        for tier in self._tiers:
            granted &= self._slabs_suffice(tier, rows)
        granted |= table.kept[rows]
        kept = rows[granted]
        table.kept[kept] = True
        table.any_kept |= bool(len(kept))
        until = np.full(len(kept), self._now() + duration_s)
        everything = np.concatenate([self._rows, kept])
        self._rows, place = np.unique(everything, return_inverse=True)
        latest = np.zeros(len(self._rows))
        np.maximum.at(latest, place, np.concatenate([self._until, until]))
        self._until = latest
        self._next_due = float(latest.min()) if len(latest) else np.inf
        return granted

    def let_go(self, rows: Rows) -> None:
        """These are kept no longer, whoever asked for it."""
        if self._table.any_kept:
            self._table.kept[rows] = False
            self._settle()

    def run_due(self) -> None:
        """Ends what has run out. To be called a few times a second."""
        if self._next_due <= self._now():
            self._settle()

    def _settle(self) -> None:
        """Forgets pages whose time is over, and those that left: a row that was given to another
        page since is not marked any more."""
        table, rows = self._table, self._rows
        stays = table.kept[rows] & table.is_begun(rows) & ~table.withdrawn[rows]
        stays &= self._until > self._now()
        table.kept[rows[~stays]] = False
        self._rows, self._until = rows[stays], self._until[stays]
        self._next_due = float(self._until.min()) if len(self._until) else np.inf
        table.any_kept = bool(len(self._rows))

    def _slabs_suffice(self, tier: TierSlabs, rows: Rows) -> NDArray[np.bool_]:
        """For each of ``rows`` whether it, with those before it, lies in slabs that may be used."""
        slots = tier.slots
        used = np.zeros(slots.slab_count, dtype=np.bool_)
        used[self._slabs(tier, self._rows)[1]] = True
        owners, slabs = self._slabs(tier, rows)
        owners, slabs = owners[~used[slabs]], slabs[~used[slabs]]
        _, first = np.unique(slabs, return_index=True)
        added = np.cumsum(np.bincount(owners[first], minlength=len(rows)))
        return np.asarray(used.sum() + added <= SLAB_SHARE_MAX * slots.slab_count)

    def _slabs(self, tier: TierSlabs, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The slab of each unit of these pages that lies in the tier, and which page's it is."""
        owners, units = self._table.expanded(rows)
        places = tier.place[units]
        here = places != NOWHERE
        return owners[here], places[here] // tier.slots.slab_bytes

    def _slot_bytes(self, rows: Rows) -> NDArray[np.int64]:
        """Slots of each page. Of one that has not all of its units yet, the longest stands for
        those that are to come."""
        table = self._table
        owners, units = table.expanded(rows)
        longest = np.zeros(len(rows), dtype=np.uint32)
        np.maximum.at(longest, owners, table.units.length[units])
        return sizes_of_slots(longest).astype(np.int64) * table.unit_count[rows]
