"""Clearing up behind holders that are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from octavo_server.index.entries import SHARD_COUNT
from octavo_server.index.errors import IndexUnavailable
from octavo_server.index.prefix_index import PrefixIndex

SWEEP_INTERVAL_S: Final = 300.0
MET_INTERVAL_S: Final = 1.0
SHARD_PAUSE_S: Final = 0.01
"""Between two shards. A million pages take 3 s of which Redis works one."""


async def sweep(index: PrefixIndex, shard_pause_s: float = 0.0) -> None:
    """Retires holders whose time is over and removes all entries of those retired.

    Ids that no view knows are treated alike: a registry that lost its data knew them.

    Raises:
        IndexUnavailable: the sweep is not complete; another one does the rest.
    """
    await index.registry.retire_lapsed()
    view = await index.registry.view()
    retired = view.retired
    gone = set(retired)
    for shard in range(SHARD_COUNT):
        met = await index.remove_retired(shard, frozenset(gone))
        if any(not view.knows(each) for each in met):
            # The view is taken after the ids were met, so whoever registered before publishing
            # is in it. The others have been retired meanwhile, or were forgotten.
            view = await index.registry.view()
            unknown = {each for each in met if not view.knows(each)}
            if unknown:
                gone |= unknown
                await index.remove_retired(shard, frozenset(gone))
        await asyncio.sleep(shard_pause_s)
    await index.registry.bury(retired)


class Sweeper:
    """Removes what matches met every second, and sweeps every few minutes.

    Every node has one; ``is_my_turn`` says whether it shall sweep now, so that not all of them
    do at once. Two that sweep together do no harm.
    """

    def __init__(
        self,
        index: PrefixIndex,
        is_my_turn: Callable[[], bool] = lambda: True,
        interval_s: float = SWEEP_INTERVAL_S,
    ) -> None:
        self._index = index
        self._is_my_turn = is_my_turn
        self._interval_s = interval_s
        self.swept = 0
        self.failed = 0

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._interval_s
        while True:
            await asyncio.sleep(min(MET_INTERVAL_S, self._interval_s))
            await self._index.remove_met()
            if loop.time() < due_s:
                continue
            due_s = loop.time() + self._interval_s
            if not self._is_my_turn():
                continue
            try:
                await sweep(self._index, SHARD_PAUSE_S)
                self.swept += 1
            except IndexUnavailable:
                self.failed += 1
