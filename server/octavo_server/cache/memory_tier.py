"""Places in the arena: who has one, and who loses theirs when room is needed.

Victims are pages that nobody holds, in the policy's order, and only such whose resident
children go with them: chains lose their tail first and stay closed. Pages that still wait to
be written to NVMe go last.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo_server.cache.counters import Counters
from octavo_server.cache.page_table import NO_ROW, NOWHERE, PageTable, Rows
from octavo_server.eviction.policy import EvictionPolicy
from octavo_server.store.arena import Arena
from octavo_server.store.slabs import SLOT_ALIGN_BYTES

_RANKED_MIN: Final = 256
_RANKED_SHARE: Final = 16
"""A ranking orders 1/16 of the candidates, at least 256: the scan over all pages (about 10 ms
for a million) is then paid once for that many evictions."""

_NO_ROWS: Final[Rows] = np.empty(0, dtype=np.int32)


class MemoryTier:
    """Gives units places in the arena and takes them back."""

    def __init__(
        self, table: PageTable, arena: Arena, policy: EvictionPolicy, counters: Counters
    ) -> None:
        self.arena: Final = arena
        self._table: Final = table
        self._policy: Final = policy
        self._counters: Final = counters
        self._ranked: dict[int, Rows] = {}  # slot size → victims yet to be taken, in order

    @property
    def unit_bytes_max(self) -> int:
        """The largest unit that fits a slot."""
        return self.arena.slots.slab_bytes

    def place(self, lengths: NDArray[np.uint32]) -> NDArray[np.int64]:
        """A place for each unit, evicting others as needed; NOWHERE where there is no room."""
        slots = self.arena.slots
        offsets = np.full(len(lengths), NOWHERE, dtype=np.int64)
        for length in np.unique(lengths).tolist():
            wanted = np.flatnonzero(lengths == length)
            found = slots.allocate(length, len(wanted))
            while len(found) < len(wanted):
                if not self._make_room(length, len(wanted) - len(found)):
                    break
                found = np.concatenate([found, slots.allocate(length, len(wanted) - len(found))])
            offsets[wanted[: len(found)]] = found
        return offsets

    def drop(self, rows: Rows) -> None:
        """Takes the places of all units of these pages. Nobody may hold them."""
        table = self._table
        assert not table.pins[rows].any(), "a page in use was about to lose its memory"
        _, units = table.expanded(rows)
        offsets = table.units.memory_offset[units]
        units, offsets = units[offsets != NOWHERE], offsets[offsets != NOWHERE]
        table.set_memory_mask(rows, np.zeros(len(rows), dtype=np.uint64))
        table.generation[rows] += 1
        table.units.memory_offset[units] = NOWHERE
        self.arena.slots.free(offsets)

    def give_back(self, units: NDArray[np.int32]) -> None:
        """Takes the places of single units that were never readable (a put or load that ended)."""
        offsets = self._table.units.memory_offset[units]
        self._table.units.memory_offset[units] = NOWHERE
        self.arena.slots.free(offsets[offsets != NOWHERE])

    def evict(self, rows: Rows) -> None:
        """Drops pages from memory; those that are nowhere else leave the node."""
        table = self._table
        lost = table.nvme_mask[rows] != table.full_mask[rows]
        self._counters.add("memory_evicted_pages", len(rows))
        self._counters.add(
            "memory_evicted_before_durable_pages", int((lost & table.queued[rows]).sum())
        )
        self.drop(rows)
        table.drop_unused(rows)

    def _make_room(self, length: int, count: int) -> bool:
        """Evicts pages until up to ``count`` slots more may be free. False: nothing can go."""
        slot_bytes = self.arena.slots.slot_bytes(length)
        for attempt in range(2):
            ranked = self._ranked.get(slot_bytes, _NO_ROWS)
            if not len(ranked):
                ranked = self._rank(slot_bytes, everything=attempt > 0)
                if self._take_colder_slab(length, ranked):
                    return True
            # Enough pages for the slots wanted; some of them may not be free to go any more.
            batch, self._ranked[slot_bytes] = ranked[:count], ranked[count:]
            victims = self._free_to_go(batch)
            if len(victims):
                self.evict(victims)
                return True
            while len(self._ranked[slot_bytes]):
                ranked = self._ranked[slot_bytes]
                step = max(count, _RANKED_MIN)
                batch, self._ranked[slot_bytes] = ranked[:step], ranked[step:]
                victims = self._free_to_go(batch)
                if len(victims):
                    self.evict(victims)
                    return True
        return False

    def _evictable(self, rows: Rows) -> NDArray[np.bool_]:
        table = self._table
        return (
            (table.memory_mask[rows] != 0)
            & (table.pins[rows] == 0)
            & (table.reserved_mask[rows] == 0)
            & ~table.withdrawn[rows]
        )

    def _rank(self, slot_bytes: int, *, everything: bool) -> Rows:
        """Pages with a unit of this slot size that may go, in the policy's order."""
        table = self._table
        rows = table.live_rows()
        rows = rows[self._evictable(rows)]
        owners, units = table.expanded(rows)
        lengths = table.units.length[units].astype(np.int64)
        fits = (table.units.memory_offset[units] != NOWHERE) & (
            -(-lengths // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES == slot_bytes
        )
        of_size = np.zeros(len(rows), dtype=np.bool_)
        of_size[owners[fits]] = True
        rows = rows[of_size]
        waiting = table.queued[rows]
        if not everything:
            rows = rows[~waiting]
        count = len(rows) if everything else max(_RANKED_MIN, len(rows) // _RANKED_SHARE)
        return self._policy.first_victims(rows, count)

    def _free_to_go(self, batch: Rows) -> Rows:
        """Those of ``batch`` that may go now, given that all of these go together."""
        table = self._table
        batch = batch[(table.unit_count[batch] != 0) & self._evictable(batch)]
        while len(batch):
            going = np.zeros(table.high_water, dtype=np.int32)
            parents = table.parent[batch]
            np.add.at(going, parents[parents != NO_ROW], 1)
            on_nvme = table.nvme_mask[batch] == table.full_mask[batch]
            free = (table.memory_children[batch] == going[batch]) & (
                on_nvme | (table.nvme_children[batch] == 0)
            )
            if free.all():
                return batch
            batch = batch[free]
        return batch

    def _take_colder_slab(self, length: int, ranked: Rows) -> bool:
        """Empties the coldest slab of another size if it was used before all of ``ranked``."""
        slots = self.arena.slots
        slabs = slots.slabs_of_other_classes(length)
        if not len(slabs):
            return False
        table = self._table
        rows = table.live_rows()
        owners, units = table.expanded(rows)
        offsets = table.units.memory_offset[units]
        owners, offsets = owners[offsets != NOWHERE], offsets[offsets != NOWHERE]
        slab_of = offsets // slots.slab_bytes
        last_used = np.zeros(slots.slab_count, dtype=np.int64)
        np.maximum.at(last_used, slab_of, table.touched[rows[owners]])
        blocked = np.zeros(slots.slab_count, dtype=np.bool_)
        blocked[slab_of[~self._evictable(rows)[owners]]] = True
        slabs = slabs[~blocked[slabs]]
        if not len(slabs):
            return False
        coldest = int(slabs[np.argmin(last_used[slabs])])
        if len(ranked) and table.touched[ranked[0]] <= last_used[coldest]:
            return False
        victims = self._with_dependants(np.unique(rows[owners[slab_of == coldest]]))
        if not self._evictable(victims).all():
            return False
        self.evict(victims)
        return True

    def _with_dependants(self, rows: Rows) -> Rows:
        """``rows`` and the pages in memory that would be cut off if these left the node."""
        table = self._table
        in_memory = table.live_rows()
        in_memory = in_memory[table.memory_mask[in_memory] != 0]
        chosen = np.zeros(table.high_water + 1, dtype=np.bool_)  # the last one stands for NO_ROW
        frontier = rows
        chosen[rows] = True
        while len(frontier):
            leaving = np.zeros_like(chosen)
            leaving[frontier[table.nvme_mask[frontier] != table.full_mask[frontier]]] = True
            followers = in_memory[leaving[table.parent[in_memory]] & ~chosen[in_memory]]
            chosen[followers] = True
            frontier = followers
        return np.flatnonzero(chosen[:-1]).astype(np.int32)
