"""Memory of the arena, given in the background before anything is put there."""

from __future__ import annotations

import functools
from typing import Final

from octavo_server.store.arena import Arena
from octavo_server.store.huge_pages import HUGE_BYTES
from octavo_server.store.io_pool import IoPool

AHEAD_BYTES: Final = 128 << 20
"""What has memory beyond the slabs in use: three times what is read from NVMe at a time. Memory is
given at 3.7 GB/s, which a long put into a new arena outruns by a little; then the pages that it
touches first are single ones until they are moved."""

STEP_BYTES: Final = 8 * HUGE_BYTES
"""Given with one call: 5 ms of a thread where memory is not fragmented."""


class ArenaAhead:
    """Keeps some of the arena ready beyond the slabs that were ever used; with ``everything``
    the whole of it.

    Slabs come into use lowest first, so what is ready is all that lies below one offset.
    """

    def __init__(self, arena: Arena, io: IoPool, *, everything: bool) -> None:
        self._arena: Final = arena
        self._io: Final = io
        self._everything: Final = everything
        self.ready_bytes = 0
        """All below this offset was given its memory, as far as the kernel had it."""

    async def run(self) -> None:
        """Gives memory until cancelled."""
        arena = self._arena
        while True:
            arena.slots.grown.clear()
            while self.ready_bytes < self._wanted_bytes():
                begin = self.ready_bytes
                end = min(begin + STEP_BYTES, arena.segment_end(begin))
                await self._io.run(functools.partial(arena.prefault, begin, end))
                self.ready_bytes = end
            await arena.slots.grown.wait()

    def _wanted_bytes(self) -> int:
        arena = self._arena
        if self._everything:
            return arena.capacity_bytes
        if not arena.makes_huge:
            return 0  # single pages are as good when they are touched
        return min(arena.slots.assigned_end_bytes + AHEAD_BYTES, arena.capacity_bytes)
