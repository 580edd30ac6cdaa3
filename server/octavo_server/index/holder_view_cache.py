"""A node's view of the registry, read again when it must be and seldom otherwise."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from octavo_server.index.errors import IndexUnavailable
from octavo_server.index.holders import EMPTY_VIEW, HolderRegistry, HolderView

VIEW_AGE_MAX_S: Final = 2.0
"""A third of a lease: within it every living holder renews."""


class HolderViewCache:
    """The latest view. However many ask for a new one, one reads it."""

    def __init__(self, registry: HolderRegistry, now: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._now = now
        self._reading: asyncio.Task[None] | None = None
        self.latest: HolderView = EMPTY_VIEW

    async def at_most(self, age_s: float = VIEW_AGE_MAX_S) -> HolderView:
        """A view taken at most ``age_s`` ago; the latest there is if the registry is away.

        With ``age_s`` 0 the view is taken after this was called.
        """
        wanted_s = self._now() - age_s
        while self.latest.taken_s < wanted_s:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read())
            before = self.latest
            # Whoever stops waiting does not stop the others.
            await asyncio.shield(self._reading)
            if self.latest is before:
                break
        return self.latest

    async def _read(self) -> None:
        with suppress(IndexUnavailable):  # leases in the old view run out by themselves
            self.latest = await self._registry.view()
