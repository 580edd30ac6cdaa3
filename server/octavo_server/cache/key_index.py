"""From page keys to rows of the page table, a whole chain at a time.

An open-addressing hash table of row numbers. Looking up, inserting and removing take arrays,
so the cost per page is that of a few numpy operations rather than of Python objects: 8,192
keys take about half a millisecond and a page costs about ten bytes here. The keys themselves
lie in the page table's columns; this index only points at them.
"""

from __future__ import annotations

import secrets
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

_EMPTY: Final = -1
_REMOVED: Final = -2
_CAPACITY_MIN: Final = 1024
_LOAD_MAX: Final = 0.6
"""Live and removed entries over capacity. Linear probing stays short below it."""


class KeyColumns(Protocol):
    """Where the keys lie: row r has key ``key_low[r], key_high[r]`` in ``namespace[r]``."""

    key_low: NDArray[np.uint64]
    key_high: NDArray[np.uint64]
    namespace: NDArray[np.int32]


class KeyIndex:
    """Rows by (namespace, key). The hash is seeded at random, so that no client can choose
    keys that collide. Not safe for use by two threads at once.
    """

    def __init__(self, columns: KeyColumns) -> None:
        self._columns = columns
        self._seed = (
            np.uint64(secrets.randbits(64)),
            np.uint64(secrets.randbits(64)),
        )
        self._factors = (
            np.uint64(secrets.randbits(64) | 1),
            np.uint64(secrets.randbits(64) | 1),
        )
        self._live = 0
        self._used = 0  # live and removed
        self._set_capacity(_CAPACITY_MIN)

    def __len__(self) -> int:
        return self._live

    def find(self, keys: NDArray[np.uint64], namespace: int) -> NDArray[np.int32]:
        """Rows of ``keys`` (shape [n, 2]); -1 where there is none."""
        return self.find_columns(keys[:, 0], keys[:, 1], np.int32(namespace))

    def find_columns(
        self,
        low: NDArray[np.uint64],
        high: NDArray[np.uint64],
        namespace: NDArray[np.int32] | np.int32,
    ) -> NDArray[np.int32]:
        """As ``find``, with a namespace for all keys or one each."""
        rows = np.full(len(low), -1, dtype=np.int32)
        positions = self._home(low, high)
        waiting = np.arange(len(low))
        columns = self._columns
        namespaces = np.broadcast_to(namespace, len(low))
        while len(waiting):
            candidates = self._slots[positions]
            hit = (
                (candidates >= 0)
                & (columns.key_low[candidates] == low[waiting])
                & (columns.key_high[candidates] == high[waiting])
                & (columns.namespace[candidates] == namespaces[waiting])
            )
            rows[waiting[hit]] = candidates[hit]
            onward = ~hit & (candidates != _EMPTY)
            waiting = waiting[onward]
            positions = (positions[onward] + 1) & self._mask
        return rows

    def insert(self, rows: NDArray[np.int32]) -> None:
        """Adds rows whose keys are not in the index and differ from each other."""
        if self._used + len(rows) > _LOAD_MAX * len(self._slots):
            self._rebuild(self._live + len(rows))
        self._place(rows)

    def remove(self, rows: NDArray[np.int32]) -> None:
        """Takes rows out. Each must be in the index."""
        positions = self._home(self._columns.key_low[rows], self._columns.key_high[rows])
        waiting = rows
        while len(waiting):
            candidates = self._slots[positions]
            assert (candidates != _EMPTY).all(), "a row is not in the index"
            hit = candidates == waiting
            self._slots[positions[hit]] = _REMOVED
            waiting = waiting[~hit]
            positions = (positions[~hit] + 1) & self._mask
        self._live -= len(rows)

    def _home(self, low: NDArray[np.uint64], high: NDArray[np.uint64]) -> NDArray[np.int64]:
        mixed = (low ^ self._seed[0]) * self._factors[0] + (high ^ self._seed[1]) * self._factors[1]
        return (mixed >> self._shift).astype(np.int64)

    def _place(self, rows: NDArray[np.int32]) -> None:
        positions = self._home(self._columns.key_low[rows], self._columns.key_high[rows])
        waiting = rows
        self._live += len(rows)
        while len(waiting):
            occupants = self._slots[positions]
            free = occupants < 0
            self._slots[positions[free]] = waiting[free]  # of two at one place the last one wins
            placed = self._slots[positions] == waiting
            self._used += int((free & placed & (occupants == _EMPTY)).sum())
            waiting = waiting[~placed]
            positions = (positions[~placed] + 1) & self._mask

    def _rebuild(self, live: int) -> None:
        old = self._slots
        capacity = _CAPACITY_MIN
        while live > 0.7 * _LOAD_MAX * capacity:
            capacity *= 2
        self._set_capacity(capacity)
        self._live = self._used = 0
        self._place(old[old >= 0])

    def _set_capacity(self, capacity: int) -> None:
        self._slots = np.full(capacity, _EMPTY, dtype=np.int32)
        self._mask = capacity - 1
        self._shift = np.uint64(64 - (capacity.bit_length() - 1))
