"""Slots of equal size within slabs. Pure bookkeeping: it neither knows nor touches the bytes.

Room is cut into slabs. A slab belongs to no size class until one needs it, then holds slots
of that class's size, and comes back when its last slot is freed. The arena and the NVMe
bodies file both place units with it.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from typing import Final

import numpy as np
from numpy.typing import NDArray

SLOT_ALIGN_BYTES: Final = 4096
"""Slots start and end on this boundary: what O_DIRECT needs, and a page of memory."""

_NO_OFFSETS: Final[NDArray[np.int64]] = np.empty(0, dtype=np.int64)


def sizes_of_slots(lengths: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Bytes of the slots that units of these lengths lie in."""
    rounded: NDArray[np.int64] = -(-lengths.astype(np.int64) // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
    return rounded


class SlabAllocator:
    """Allocates slots in ``capacity_bytes`` of room cut into slabs of ``slab_bytes``.

    Room behind the last whole slab stays unused. Not safe for use by two threads at once.
    """

    def __init__(self, capacity_bytes: int, slab_bytes: int) -> None:
        if slab_bytes <= 0 or slab_bytes % SLOT_ALIGN_BYTES:
            raise ValueError(f"slab_bytes is {slab_bytes}, must be a multiple of 4096")
        self.slab_bytes: Final = slab_bytes
        self.slab_count: Final = capacity_bytes // slab_bytes
        self.capacity_bytes: Final = self.slab_count * slab_bytes
        self.used_bytes = 0
        self._slot_bytes = np.zeros(self.slab_count, dtype=np.int64)  # 0: belongs to no class
        self._free_count = np.zeros(self.slab_count, dtype=np.int64)
        self._taken: list[NDArray[np.bool_] | None] = [None] * self.slab_count
        self._empty = list(range(self.slab_count))  # sorted
        self._open: dict[int, list[int]] = {}  # class → its slabs with a free slot, sorted
        self.assigned_end_bytes = 0
        """Nothing behind this offset was ever in use."""
        self.grown: Final = asyncio.Event()
        """Set whenever ``assigned_end_bytes`` has grown."""

    def slot_bytes(self, length: int) -> int:
        """Bytes of the slots that units of ``length`` bytes lie in."""
        return -(-length // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES

    @property
    def unassigned_bytes(self) -> int:
        """Room in slabs that belong to no size class now."""
        return len(self._empty) * self.slab_bytes

    def allocate(self, length: int, count: int) -> NDArray[np.int64]:
        """At most ``count`` slots for units of ``length`` bytes: their offsets, lowest first.

        Fewer than ``count`` means that there is no more room for this size.
        """
        slot_bytes = self.slot_bytes(length)
        if not 0 < slot_bytes <= self.slab_bytes or count <= 0:
            return _NO_OFFSETS
        open_slabs = self._open.setdefault(slot_bytes, [])
        found: list[NDArray[np.int64]] = []
        missing = count
        while missing:
            if not open_slabs:
                if not self._empty:
                    break
                self._assign(self._empty.pop(0), slot_bytes)
            slab = open_slabs[0]
            taken = self._taken[slab]
            assert taken is not None
            slots = np.flatnonzero(~taken)[:missing]
            taken[slots] = True
            self._free_count[slab] -= len(slots)
            if not self._free_count[slab]:
                open_slabs.pop(0)
            found.append(slots * slot_bytes + slab * self.slab_bytes)
            missing -= len(slots)
        if not open_slabs:
            del self._open[slot_bytes]
        if not found:
            return _NO_OFFSETS
        self.used_bytes += (count - missing) * slot_bytes
        return found[0] if len(found) == 1 else np.concatenate(found)

    def free(self, offsets: NDArray[np.int64]) -> None:
        """Gives slots back. Each must have been allocated or adopted, and not freed since."""
        slabs = offsets // self.slab_bytes
        touched: list[int] = np.unique(slabs).tolist()
        for slab in touched:
            slot_bytes = int(self._slot_bytes[slab])
            taken = self._taken[slab]
            assert taken is not None, f"slab {slab} holds no slots"
            slots = (offsets[slabs == slab] - slab * self.slab_bytes) // slot_bytes
            assert taken[slots].all(), f"double free in slab {slab}"
            taken[slots] = False
            if not self._free_count[slab]:
                insort(self._open.setdefault(slot_bytes, []), slab)
            self._free_count[slab] += len(slots)
            self.used_bytes -= len(slots) * slot_bytes
            if not taken.any():
                self._unassign(slab, slot_bytes)

    def adopt(self, offsets: NDArray[np.int64], lengths: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Marks slots as taken that an earlier run had allocated.

        Returns for each row whether it could be adopted: False where it lies outside of the
        room, fits no slot, contradicts the class of its slab, or was adopted already. Of rows
        that contradict each other the first one in the order of offsets wins.
        """
        adopted = np.zeros(len(offsets), dtype=np.bool_)
        slot_sizes = sizes_of_slots(lengths)
        slabs = offsets // self.slab_bytes
        within = offsets - slabs * self.slab_bytes
        sound = (offsets >= 0) & (slot_sizes > 0) & (within + slot_sizes <= self.slab_bytes)
        sound &= (slabs < self.slab_count) & (within % np.maximum(slot_sizes, 1) == 0)
        rows = np.flatnonzero(sound)
        rows = rows[np.argsort(offsets[rows], kind="stable")]
        starts = np.flatnonzero(np.diff(slabs[rows], prepend=-1))
        for begin, end in zip(starts, np.append(starts, len(rows))[1:], strict=True):
            group = rows[begin:end]
            slab = int(slabs[group[0]])
            slot_bytes = int(self._slot_bytes[slab]) or int(slot_sizes[group[0]])
            if not self._slot_bytes[slab]:
                self._empty.pop(bisect_left(self._empty, slab))
                self._assign(slab, slot_bytes)
            taken = self._taken[slab]
            assert taken is not None
            group = group[slot_sizes[group] == slot_bytes]
            slots, first = np.unique(within[group] // slot_bytes, return_index=True)
            fresh = ~taken[slots]
            taken[slots[fresh]] = True
            adopted[group[first[fresh]]] = True
            count = int(fresh.sum())
            self.used_bytes += count * slot_bytes
            self._free_count[slab] -= count
            if count and not self._free_count[slab]:
                self._close(slab, slot_bytes)
        return adopted

    def slabs_of_other_classes(self, length: int) -> NDArray[np.int64]:
        """Slabs that hold slots of another size than units of ``length`` bytes need."""
        return np.flatnonzero(
            (self._slot_bytes != 0) & (self._slot_bytes != self.slot_bytes(length))
        )

    def _assign(self, slab: int, slot_bytes: int) -> None:
        slot_count = self.slab_bytes // slot_bytes
        self._slot_bytes[slab] = slot_bytes
        self._free_count[slab] = slot_count
        self._taken[slab] = np.zeros(slot_count, dtype=np.bool_)
        insort(self._open.setdefault(slot_bytes, []), slab)
        end_bytes = (slab + 1) * self.slab_bytes
        if end_bytes > self.assigned_end_bytes:
            self.assigned_end_bytes = end_bytes
            self.grown.set()

    def _unassign(self, slab: int, slot_bytes: int) -> None:
        self._close(slab, slot_bytes)
        self._slot_bytes[slab] = 0
        self._free_count[slab] = 0
        self._taken[slab] = None
        insort(self._empty, slab)

    def _close(self, slab: int, slot_bytes: int) -> None:
        open_slabs = self._open[slot_bytes]
        open_slabs.pop(bisect_left(open_slabs, slab))
        if not open_slabs:
            del self._open[slot_bytes]
