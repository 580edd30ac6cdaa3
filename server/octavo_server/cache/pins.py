"""Who needs a page to stay where it is: a count a page, and what happens when it reaches zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from octavo_server.cache.page_table import PageTable, Rows


class Pins:
    """Leases, holds and transfers pin pages; a pinned page keeps its places in every tier.

    A page of which nothing is wanted any more goes to ``on_last_unpin`` with its last pin.
    ``on_room`` is called whenever something may have become free: whoever waits for room in
    memory tries again.
    """

    def __init__(self, table: PageTable) -> None:
        self._table: Final = table
        self.on_last_unpin: Callable[[Rows], None] = lambda _rows: None
        self.on_room: Callable[[], None] = lambda: None

    def pin(self, rows: Rows) -> None:
        """One more reason for each of ``rows`` to stay (a row may occur more than once)."""
        np.add.at(self._table.pins, rows, 1)

    def unpin(self, rows: Rows) -> None:
        """One reason less for each of ``rows``."""
        if not len(rows):
            return
        np.subtract.at(self._table.pins, rows, 1)
        assert (self._table.pins[rows] >= 0).all(), "a page was unpinned more often than pinned"
        self.settle(rows)

    def settle(self, rows: Rows) -> None:
        """Lets those of ``rows`` go that were withdrawn, or are empty, and that nothing needs."""
        table = self._table
        idle = rows[(table.pins[rows] == 0) & (table.reserved_mask[rows] == 0)]
        gone = idle[
            table.withdrawn[idle] | ((table.memory_mask[idle] == 0) & (table.nvme_mask[idle] == 0))
        ]
        if len(gone):
            self.on_last_unpin(np.unique(gone))
        self.on_room()
