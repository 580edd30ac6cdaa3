"""Keeping a node's leases, on a thread that shares nothing with its data path.

A node that is busy copying pages must not look dead, and one whose event loop hangs still holds
what it holds; whether its pages can be had is for the data path's breaker to say.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final

from octavo_server.index.errors import IndexUnavailable
from octavo_server.index.holders import Holder, HolderRegistry, LeaseTerms, Renewal

BEATS_PER_LEASE: Final = 3
RETRY_S: Final = 0.5
"""A beat that failed is repeated this soon: the rest of the lease is all there is."""

STOP_S: Final = 5.0

RegistryFactory = Callable[[], AbstractAsyncContextManager[HolderRegistry]]
"""Makes a registry for the thread's own event loop."""


@dataclass(slots=True)
class HeldLease:
    """One holder's lease; ``holder_id`` is None until it is registered."""

    holder: Holder
    terms: LeaseTerms
    holder_id: int | None = None
    is_superseded: bool = False


class Heartbeat:
    """Registers holders and renews their leases until it is stopped.

    ``on_id(holder, id)`` is called on the heartbeat's thread whenever a holder got an id that it
    did not have: its entries under any earlier id are void and everything must be announced.
    ``on_superseded(holder)``: a later incarnation goes by its name, and it is not renewed again.
    """

    def __init__(
        self,
        open_registry: RegistryFactory,
        leases: list[tuple[Holder, LeaseTerms]],
        on_id: Callable[[Holder, int], None],
        on_superseded: Callable[[Holder], None],
    ) -> None:
        self._open_registry = open_registry
        self._leases = [HeldLease(holder, terms) for holder, terms in leases]
        self._on_id = on_id
        self._on_superseded = on_superseded
        self._thread = threading.Thread(target=self._run, name="octavo-heartbeat", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._ready = threading.Event()
        self._leaves = False
        self.beats = 0
        self.failed_beats = 0

    def start(self) -> None:
        """Starts the thread. Does not wait for the registry."""
        self._thread.start()
        self._ready.wait()

    def stop(self, *, leave: bool) -> None:
        """Ends the thread; with ``leave`` the holders are retired first, if that can be done.

        Without it their leases run out, and an incarnation that goes on later finds its entries.
        """
        assert self._loop is not None
        assert self._stopping is not None
        self._leaves = leave
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(STOP_S)

    def _run(self) -> None:
        asyncio.run(self._beat_until_stopped())

    async def _beat_until_stopped(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._ready.set()
        interval_s = min(each.terms.lease_s for each in self._leases) / BEATS_PER_LEASE
        async with self._open_registry() as registry:
            while not self._stopping.is_set():
                wait_s = interval_s
                if not await self._beat(registry):
                    wait_s = min(RETRY_S, interval_s)
                try:
                    async with asyncio.timeout(wait_s):
                        await self._stopping.wait()
                except TimeoutError:
                    continue
            if self._leaves:
                await self._leave(registry)

    async def _beat(self, registry: HolderRegistry) -> bool:
        """Whether all leases run."""
        self.beats += 1
        try:
            for lease in self._leases:
                if not lease.is_superseded:
                    await self._keep(registry, lease)
        except IndexUnavailable:
            self.failed_beats += 1
            return False
        return True

    async def _keep(self, registry: HolderRegistry, lease: HeldLease) -> None:
        if lease.holder_id is not None:
            renewal = await registry.renew(lease.holder_id, lease.holder, lease.terms)
            if renewal is Renewal.RENEWED:
                return
            if renewal is Renewal.SUPERSEDED:
                self._give_up(lease)
                return
        lease.holder_id = await registry.register(lease.holder, lease.terms)
        if lease.holder_id is None:
            self._give_up(lease)
        else:
            self._on_id(lease.holder, lease.holder_id)

    def _give_up(self, lease: HeldLease) -> None:
        lease.is_superseded = True
        self._on_superseded(lease.holder)

    async def _leave(self, registry: HolderRegistry) -> None:
        try:
            for lease in self._leases:
                if lease.holder_id is not None and not lease.is_superseded:
                    await registry.retire(lease.holder_id)
        except IndexUnavailable:
            self.failed_beats += 1  # the leases run out instead
