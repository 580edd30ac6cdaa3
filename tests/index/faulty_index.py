"""An index whose changes get lost on the way, or arrive when nobody waits for them any more."""

from __future__ import annotations

import copy
import random
from collections.abc import Coroutine, Sequence
from typing import Any

from octavo_server.index.changes import Changes, by_shard
from octavo_server.index.errors import Trouble
from octavo_server.index.prefix_index import Applied, Numbers, OwnEntries, PrefixIndex


class FaultyIndex:
    """Stands before another index. ``faults`` is how many of a hundred calls go wrong."""

    def __init__(self, index: PrefixIndex, random_source: random.Random) -> None:
        self.inner = index
        self.registry = index.registry
        self.faults = 0
        self._random = random_source
        self._delayed: list[Coroutine[Any, Any, Applied]] = []

    async def apply(self, holder_id: int, changes: Changes, numbers: Numbers) -> Applied:
        if self._random.randrange(100) >= self.faults:
            return await self.inner.apply(holder_id, changes, numbers)
        as_it_was = copy.deepcopy(numbers)
        numbers.next()
        kind = self._random.choice(["never arrives", "answer is lost", "arrives late", "in part"])
        if kind == "answer is lost":
            await self.inner.apply(holder_id, changes, as_it_was)
        elif kind == "arrives late":
            self._delayed.append(self.inner.apply(holder_id, changes, as_it_was))
        elif kind == "in part":
            return await self._apply_some(holder_id, changes, numbers)
        return Applied(failed={each.shard: Trouble.TIMEOUT for each in by_shard(changes)})

    async def deliver_late(self) -> None:
        """What was delayed arrives now, in any order."""
        self._random.shuffle(self._delayed)
        while self._delayed:
            await self._delayed.pop()

    async def own_entries(
        self, holder_id: int, shards: Sequence[int]
    ) -> dict[int, OwnEntries | Trouble]:
        found = await self.inner.own_entries(holder_id, shards)
        for shard in shards:
            if self._random.randrange(100) < self.faults:
                found[shard] = Trouble.CONNECTION
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def _apply_some(self, holder_id: int, changes: Changes, numbers: Numbers) -> Applied:
        """As when one server of a cluster is away."""
        there = (changes.keys[:, 0] & 1) == 0
        applied = await self.inner.apply(holder_id, changes.where(there), numbers)
        for each in by_shard(changes.where(~there)):
            applied.failed[each.shard] = Trouble.CONNECTION
        return applied
