"""Least recently used, tail before head."""

from __future__ import annotations

import numpy as np

from octavo_server.cache.page_table import PageTable, Rows
from octavo_server.eviction.policy import EvictionPolicy


class Lru(EvictionPolicy):
    """Keeps the time of last use in the page table's ``touched`` column.

    The clock counts touches. Within one touch the head of a chain gets the latest time, so
    order by time is order by chain from the tail.
    """

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._clock = 1

    def touch(self, rows: Rows) -> None:
        self._clock += len(rows)
        self._table.touched[rows] = self._clock - np.arange(len(rows))

    def first_victims(self, candidates: Rows, count: int) -> Rows:
        times = self._table.touched[candidates]
        if count < len(candidates):
            nearest = np.argpartition(times, count)[:count]
            candidates, times = candidates[nearest], times[nearest]
        return candidates[np.argsort(times, kind="stable")]
