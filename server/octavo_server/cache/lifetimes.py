"""When pages expire: a column of moments, and a look now and then for those that have passed.

A page that has expired is not found from that moment on (``matching.is_present``); that it is
dropped follows within about a second. The moments are of the wall clock and go into the NVMe
records, so that a restart brings back nothing that was to be gone.

Of several wishes for one page the longest holds. A put that names no time wishes it for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo_server.cache.page_table import NEVER, PageTable, Rows

LOOK_INTERVAL_MS: Final = 1000
"""Between two looks over all pages: about 3 ms for a million of them."""


class Lifetimes:
    """Keeps the page table's ``expires_ms``. Costs nothing while no page has such a moment."""

    def __init__(self, table: PageTable, wall_s: Callable[[], float]) -> None:
        """``wall_s``: seconds since 1970."""
        self._table: Final = table
        self._wall_s = wall_s
        self.in_use = False
        """Whether any page may have a moment at which it expires."""
        self._look_at_ms = NEVER

    def now_ms(self) -> int:
        return int(self._wall_s() * 1000)

    def expired(self, rows: Rows) -> NDArray[np.bool_]:
        """Whether each page's moment has passed."""
        return np.asarray(self._table.expires_ms[rows] <= self.now_ms())

    def put(self, rows: Rows, ttl_s: float) -> Rows:
        """Pages are put, or offered to be; ``ttl_s`` of 0 is for ever.

        Returns those on NVMe whose records say something else now.
        """
        if not ttl_s and not self.in_use:
            return rows[:0]
        table = self._table
        until = self._after(ttl_s)
        longest = np.maximum(table.expires_ms[rows], until)
        return self._set(rows, np.where(table.is_begun(rows), longest, np.int64(until)))

    def prolong(self, rows: Rows, ttl_s: float) -> Rows:
        """Present pages are wanted for so much longer. As ``put``."""
        return self._set(rows, np.maximum(self._table.expires_ms[rows], self._after(ttl_s)))

    def recovered(self, rows: Rows, expires_ms: NDArray[np.int64]) -> None:
        """Rows came back from NVMe, and this is when they expire."""
        self._set(rows, expires_ms)

    def take_due(self) -> Rows:
        """Pages that have expired and are still here. For the caller to drop."""
        now_ms = self.now_ms()
        if now_ms < self._look_at_ms:
            return np.empty(0, dtype=np.int32)
        table = self._table
        rows = table.live_rows()
        # Withdrawn ones are found by nobody any more, and go when nobody needs them.
        rows = rows[(table.expires_ms[rows] != NEVER) & ~table.withdrawn[rows]]
        gone = table.expires_ms[rows] <= now_ms
        left = table.expires_ms[rows[~gone]]
        self.in_use = bool(len(left))
        self._look_at_ms = max(int(left.min()), now_ms + LOOK_INTERVAL_MS) if len(left) else NEVER
        due: Rows = rows[gone]
        return due

    def _after(self, ttl_s: float) -> int:
        return self.now_ms() + int(ttl_s * 1000) if ttl_s else NEVER

    def _set(self, rows: Rows, until: NDArray[np.int64]) -> Rows:
        table = self._table
        changed = until != table.expires_ms[rows]
        table.expires_ms[rows] = until
        if len(rows) and (earliest := int(until.min())) != NEVER:
            self.in_use = True
            self._look_at_ms = min(self._look_at_ms, earliest)
        elsewhere: Rows = rows[changed & (table.nvme_mask[rows] != 0)]
        return elsewhere


def moments_to_store(expires_ms: NDArray[np.int64]) -> NDArray[np.uint64]:
    """As records have them: 0 is never."""
    return np.where(expires_ms == NEVER, 0, expires_ms).astype(np.uint64)


def stored_moments(recorded: NDArray[np.uint64]) -> NDArray[np.int64]:
    """As the page table has them."""
    return np.where(recorded == 0, NEVER, recorded.astype(np.int64))
