"""Keeping one holder's entries in the index true.

What changes at the node is noted without waiting, gathered for a few milliseconds and applied in
batches, in order. When that is not enough (the queue overflows, the index lost something, a part
of it was away) a shard becomes **doubtful**: what the index has of this holder there is read,
compared with what the holder has, and the difference applied. That can be repeated at any time
and does no harm, and it is done for every shard once in a while, whatever happened.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo_server.index.backoff import Backoff
from octavo_server.index.changes import (
    BATCH_PAGES_MAX,
    NO_CHANGES,
    Changes,
    joined,
    latest,
)
from octavo_server.index.comparing import difference
from octavo_server.index.entries import SHARD_COUNT, shards_of
from octavo_server.index.errors import Trouble
from octavo_server.index.prefix_index import (
    Applied,
    Numbers,
    OwnEntries,
    PrefixIndex,
    ShardOutcome,
)

COMPARE_SHARDS_MAX: Final = 16
"""Shards compared at a time."""

RETRY_S: Final = 0.5
"""When to try a shard again whose part of the index is away."""


class HeldPages(Protocol):
    """The truth: what the holder has now."""

    def held(self, shard: int) -> Changes:
        """All pages of a shard that the holder has, with their units. No page twice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherConfig:
    """Bounds and times of a publisher."""

    gather_s: float = 0.004
    """How long changes wait for company. A get elsewhere that comes sooner is a miss."""
    queue_pages_max: int = 262_144
    """Changes waiting, 24 bytes each. Beyond, all shards become doubtful instead."""
    check_s: float = 1.0
    """How often the index is asked whether it still has what it confirmed: a Redis that came
    back empty, or with an old snapshot, has not."""
    compare_all_s: float = 3600.0
    """In this time every shard is compared once, one at a time."""
    full_pause_s: float = 5.0
    """After the index was full, nothing is added for this long; withdrawals go on."""


@dataclass(slots=True)
class PublisherCounters:
    """What a publisher has done."""

    published_pages: int = 0
    withdrawn_pages: int = 0
    crowded_pages: int = 0
    compared_shards: int = 0
    overflows: int = 0
    failed_batches: int = 0


class Publisher:
    """One holder's changes on their way to the index. For one event loop.

    Nothing here raises for what goes wrong at the index, and ``note`` never waits.
    """

    def __init__(
        self,
        index: PrefixIndex,
        pages: HeldPages,
        config: PublisherConfig | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._pages = pages
        self._config = config or PublisherConfig()
        self._now = now
        self._backoff = Backoff(now=now)
        self._holder_id: int | None = None
        self._numbers = Numbers()
        self._queue: deque[Changes] = deque()
        self._queued_pages = 0
        self._doubtful: NDArray[np.bool_] = np.zeros(SHARD_COUNT, dtype=np.bool_)
        self._not_before_s: NDArray[np.float64] = np.full(SHARD_COUNT, float("-inf"))
        self._full_until_s = float("-inf")
        self._next_compared = 0
        self._compare_due_s = now() + self._compare_interval_s
        self._check_due_s = now() + self._config.check_s
        self._wake = asyncio.Event()
        self.counters: Final = PublisherCounters()

    @property
    def queued_pages(self) -> int:
        """Changes that wait."""
        return self._queued_pages

    @property
    def doubtful_shards(self) -> int:
        """Shards to be compared."""
        return int(self._doubtful.sum())

    @property
    def is_idle(self) -> bool:
        """Whether the index has everything, as far as this publisher knows."""
        return not self._queued_pages and not self._doubtful.any()

    def adopt(self, holder_id: int) -> None:
        """Publishes under this id from now on, everything anew."""
        self._holder_id = holder_id
        self._numbers = Numbers()
        self.doubt_all()

    def note(self, changes: Changes) -> None:
        """The holder has more, less or nothing of some pages now. Call it after the fact: a page
        is published when it can be got, and withdrawn when it cannot any more.
        """
        if not len(changes):
            return
        if self._queued_pages + len(changes) > self._config.queue_pages_max:
            self.counters.overflows += 1
            self.doubt_all()
            return
        self._queue.append(changes)
        self._queued_pages += len(changes)
        self._wake.set()

    def doubt_all(self) -> None:
        """Compares every shard soon, and forgets the queue, which that makes up for."""
        self._queue.clear()
        self._queued_pages = 0
        self._doubtful[:] = True
        self._not_before_s[:] = float("-inf")
        self._wake.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            if self._holder_id is None or not (self._queue or self._due_shards()):
                self._wake.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._config.check_s):
                        await self._wake.wait()
            if self._holder_id is None:
                continue
            if self._queued_pages < BATCH_PAGES_MAX and not self._due_shards():
                await asyncio.sleep(self._config.gather_s)
            await asyncio.sleep(self._backoff.remaining_s)
            await self.step()

    async def step(self) -> None:
        """What is due: a check, a batch of changes, some doubtful shards. Needs an adopted id."""
        self._doubt_in_turn()
        if self._now() >= self._check_due_s:
            self._check_due_s = self._now() + self._config.check_s
            await self.check()
        if self._queue:
            await self._publish(self._take_batch())
        due = self._due_shards()
        if due and not self._backoff.remaining_s:
            await self._compare(due)

    async def check(self) -> None:
        """Doubts the shards of which the index has less than it confirmed."""
        assert self._holder_id is not None
        numbers = self._numbers
        found = await self._index.numbers_of(self._holder_id)
        if numbers is self._numbers:
            self._doubtful |= (found >= 0) & (found < numbers.confirmed)

    @property
    def _compare_interval_s(self) -> float:
        return self._config.compare_all_s / SHARD_COUNT

    def _doubt_in_turn(self) -> None:
        if self._now() >= self._compare_due_s:
            self._doubtful[self._next_compared] = True
            self._next_compared = (self._next_compared + 1) % SHARD_COUNT
            self._compare_due_s = self._now() + self._compare_interval_s

    def _take_batch(self) -> Changes:
        """The oldest changes, each page once."""
        parts: list[Changes] = []
        room = BATCH_PAGES_MAX
        while self._queue and room:
            part = self._queue.popleft()
            if len(part) > room:
                rest = Changes(part.keys[room:], part.units[room:])
                self._queue.appendleft(rest)
                part = Changes(part.keys[:room], part.units[:room])
            parts.append(part)
            room -= len(part)
        batch = joined(parts)
        self._queued_pages -= len(batch)
        return latest(batch)

    async def _publish(self, batch: Changes) -> None:
        batch = self._without_useless(batch)
        if not len(batch):
            return
        applied = await self._apply(batch)
        failed = _in_shards(batch, set(applied.failed))
        if not len(failed):
            return
        if Trouble.FULL in applied.failed.values():
            self._pause_additions()
            self._put_back(self._without_useless(failed))
        elif applied.outcomes:
            # Only a part of the index is away. What is for the rest must not wait for it.
            for shard in applied.failed:
                self._postpone(shard)
        else:
            self._put_back(failed)

    async def _compare(self, shards: list[int]) -> None:
        """Makes the index agree with the holder in some shards."""
        assert self._holder_id is not None
        numbers = self._numbers
        found = await self._index.own_entries(self._holder_id, shards)
        if numbers is not self._numbers:
            return  # another id was adopted meanwhile
        read: list[OwnEntries] = []
        for shard, entries in found.items():
            if isinstance(entries, Trouble):
                self._postpone(shard)
            else:
                numbers.confirm(shard, entries.number)
                read.append(entries)
        if not read:
            self._failed()
            return
        # From here to the snapshot nothing waits: changes noted later are queued behind it.
        wanted = joined([difference(each, self._pages.held(each.shard)) for each in read])
        for each in read:
            self._doubtful[each.shard] = False
        for batch in wanted.batches():
            applied = await self._apply(self._without_useless(batch))
            if Trouble.FULL in applied.failed.values():
                self._pause_additions()
            for shard in applied.failed:
                self._postpone(shard)
        self.counters.compared_shards += len(read)

    async def _apply(self, batch: Changes) -> Applied:
        assert self._holder_id is not None
        if not len(batch):
            return Applied()
        numbers = self._numbers
        applied = await self._index.apply(self._holder_id, batch, numbers)
        if numbers is not self._numbers:
            return Applied()  # another id was adopted meanwhile, and everything is doubtful
        troubled = [
            shard
            for shard, outcome in applied.outcomes.items()
            if outcome is not ShardOutcome.APPLIED
        ]
        self._doubtful[troubled] = True
        if applied.failed:
            self._failed()
        else:
            self._backoff.succeeded()
        taken = {
            shard for shard, outcome in applied.outcomes.items() if outcome is not ShardOutcome.LATE
        }
        done = _in_shards(batch, taken)
        additions = int(np.count_nonzero(done.units))
        self.counters.published_pages += additions - applied.crowded_pages
        self.counters.withdrawn_pages += len(done) - additions
        self.counters.crowded_pages += applied.crowded_pages
        return applied

    def _without_useless(self, batch: Changes) -> Changes:
        """Without additions in doubtful shards; without any while the index is full, and then
        their shards become doubtful. Withdrawals stay."""
        additions = batch.units != 0
        shards = shards_of(batch.keys)
        if self._now() < self._full_until_s:
            self._doubtful[shards[additions]] = True
            self._not_before_s[shards[additions]] = self._full_until_s
            return batch.where(~additions)
        return batch.where(~additions | ~self._doubtful[shards])

    def _due_shards(self) -> list[int]:
        """Doubtful shards to compare now, a few, each in its turn: one that cannot be reached
        does not keep others waiting."""
        due = np.flatnonzero(self._doubtful & (self._not_before_s <= self._now()))
        shards: list[int] = due[:COMPARE_SHARDS_MAX].tolist()
        return shards

    def _postpone(self, shard: int) -> None:
        """The shard is doubtful, and could not be read or changed just now."""
        self._doubtful[shard] = True
        self._not_before_s[shard] = self._now() + RETRY_S

    def _pause_additions(self) -> None:
        self._full_until_s = self._now() + self._config.full_pause_s

    def _put_back(self, batch: Changes) -> None:
        if len(batch):
            self._queue.appendleft(batch)
            self._queued_pages += len(batch)

    def _failed(self) -> None:
        self.counters.failed_batches += 1
        self._backoff.failed()


def _in_shards(batch: Changes, shards: set[int]) -> Changes:
    """The rows that lie in these shards."""
    if not shards:
        return NO_CHANGES
    return batch.where(np.isin(shards_of(batch.keys), list(shards)))
