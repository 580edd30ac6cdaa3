"""Places in the arena: who has one, and who loses theirs when room is needed."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo_server.cache.counters import Counters
from octavo_server.cache.page_table import NOWHERE, PageTable, Rows
from octavo_server.cache.reclaim import Reclaimer, TierColumns
from octavo_server.eviction.policy import EvictionPolicy
from octavo_server.store.arena import Arena
from octavo_server.store.slabs import sizes_of_slots


class MemoryTier:
    """Gives units places in the arena and takes them back."""

    def __init__(
        self, table: PageTable, arena: Arena, policy: EvictionPolicy, counters: Counters
    ) -> None:
        self.arena: Final = arena
        self._table: Final = table
        self._counters: Final = counters
        columns = TierColumns(
            mask=table.memory_mask,
            children=table.memory_children,
            place=table.units.memory_offset,
            other_mask=table.nvme_mask,
            other_children=table.nvme_children,
        )
        self._reclaimer: Final = Reclaimer(table, columns, arena.slots, policy)

    @property
    def unit_bytes_max(self) -> int:
        """The largest unit that fits a slot."""
        return self.arena.slots.slab_bytes

    def place(self, lengths: NDArray[np.uint32]) -> NDArray[np.int64]:
        """A place for each unit, evicting others as needed; NOWHERE where there is no room."""
        slots = self.arena.slots
        offsets = np.full(len(lengths), NOWHERE, dtype=np.int64)
        sizes = sizes_of_slots(lengths)
        for length in np.unique(sizes).tolist():
            wanted = np.flatnonzero(sizes == length)
            found = slots.allocate(length, len(wanted))
            while len(found) < len(wanted):
                victims = self._reclaimer.victims(length, len(wanted) - len(found))
                if not len(victims):
                    break
                self.evict(victims)
                found = np.concatenate([found, slots.allocate(length, len(wanted) - len(found))])
            offsets[wanted[: len(found)]] = found
        return offsets

    def evict(self, rows: Rows) -> None:
        """Drops pages from memory; those that are nowhere else leave the node."""
        table = self._table
        assert not table.kept[rows].any(), "a pinned page was about to be evicted"
        lost = table.nvme_mask[rows] != table.full_mask[rows]
        self._counters.add("memory_evicted_pages", len(rows))
        self._counters.add(
            "memory_evicted_before_durable_pages", int((lost & table.queued[rows]).sum())
        )
        self.drop(rows)
        table.drop_unused(rows)

    def drop(self, rows: Rows) -> None:
        """Takes the places of all units of these pages. Nobody may hold them."""
        table = self._table
        assert not table.pins[rows].any(), "a page in use was about to lose its memory"
        _, units = table.expanded(rows)
        table.set_memory_mask(rows, np.zeros(len(rows), dtype=np.uint64))
        table.generation[rows] += np.uint32(1)
        table.queued[rows] = False
        self.give_back(units)

    def give_back(self, units: NDArray[np.int32]) -> None:
        """Takes the places of single units, of which none is readable (any more)."""
        offsets = self._table.units.memory_offset[units]
        self._table.units.memory_offset[units] = NOWHERE
        self.arena.slots.free(offsets[offsets != NOWHERE])
