"""Waiting for pages that are on their way: being read from NVMe or written by a session."""

from __future__ import annotations

import asyncio

import numpy as np

from octavo_server.cache.page_table import Rows


class Waiter:
    """One call that waits for some pages. Woken when any of them changed."""

    __slots__ = ("event", "failed")

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.failed: dict[int, int] = {}


class Arrivals:
    """Who waits for which row. Bounded by the sessions' bounds on calls and chain lengths."""

    def __init__(self) -> None:
        self._waiters: dict[int, list[Waiter]] = {}

    def subscribe(self, rows: Rows, waiter: Waiter) -> None:
        """``waiter`` is woken by changes of ``rows`` until it unsubscribes."""
        for row in rows.tolist():
            self._waiters.setdefault(row, []).append(waiter)

    def unsubscribe(self, rows: Rows, waiter: Waiter) -> None:
        """Ends the wait for ``rows``."""
        for row in rows.tolist():
            waiters = self._waiters.get(row)
            if waiters is None or waiter not in waiters:
                continue
            waiters.remove(waiter)
            if not waiters:
                del self._waiters[row]

    def changed(self, rows: Rows) -> None:
        """Something arrived for these rows: whoever waits looks again."""
        if not self._waiters:
            return
        for row in rows.tolist():
            for waiter in self._waiters.get(row, ()):
                waiter.event.set()

    def failed(self, rows: Rows, status: int) -> None:
        """These rows won't arrive."""
        for row in np.unique(rows).tolist():
            for waiter in self._waiters.get(row, ()):
                waiter.failed[row] = status
                waiter.event.set()
