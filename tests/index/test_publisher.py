"""Entries follow what happens at the node, in order and within bounds."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
from tests.index.pages import chain, join, named, run, until

from octavo_server.index.changes import BATCH_PAGES_MAX, Changes
from octavo_server.index.entries import Keys, shards_of
from octavo_server.index.errors import Trouble
from octavo_server.index.local_index import LocalIndex
from octavo_server.index.prefix_index import Applied, Numbers, PrefixIndex
from octavo_server.index.publisher import Publisher, PublisherConfig


class Recorder:
    """An index that notes the batches it gets, and takes none while ``trouble`` is set."""

    def __init__(self) -> None:
        self.inner = LocalIndex()
        self.batches: list[Changes] = []
        self.trouble: Trouble | None = None
        self.is_full = False

    async def apply(self, holder_id: int, changes: Changes, numbers: Numbers) -> Applied:
        self.batches.append(changes)
        shards = set(shards_of(changes.keys).tolist())
        if self.trouble:
            return Applied(failed=dict.fromkeys(shards, self.trouble))
        if self.is_full and changes.units.any():
            return Applied(failed=dict.fromkeys(shards, Trouble.FULL))
        return await self.inner.apply(holder_id, changes, numbers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Truth:
    """Pages that a node holds whole."""

    def __init__(self) -> None:
        self.keys: Keys = chain(0, 0)

    def held(self, shard: int) -> Changes:
        return Changes.published(self.keys[shards_of(self.keys) == shard])


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """A publisher between a truth and a recorder, on a clock that stands still."""

    def __init__(self, config: PublisherConfig | None = None) -> None:
        self.index = Recorder()
        self.truth = Truth()
        self.clock = Clock()
        self.publisher = Publisher(
            cast("PrefixIndex", self.index), self.truth, config, now=self.clock
        )

    async def join(self) -> None:
        self.publisher.adopt(await join(cast("PrefixIndex", self.index), "a"))
        await self.settle()
        self.index.batches.clear()

    async def settle(self) -> None:
        for _ in range(100):
            if self.publisher.is_idle:
                return
            await self.publisher.step()
        raise AssertionError("it does not come to rest")

    async def held_by_index(self, keys: Keys) -> int:
        found = await asyncio.gather(
            *(self.index.match(keys[row : row + 1]) for row in range(len(keys)))
        )
        return sum(each.page_count for each in found)


def test_changes_of_a_page_arrive_as_the_last_one_says() -> None:
    async def story() -> None:
        bench = Bench()
        await bench.join()
        keys = chain(1, 10)
        bench.publisher.note(Changes.published(keys))
        bench.publisher.note(Changes.withdrawn(keys[5:]))
        bench.publisher.note(Changes.published(keys[7:8]))
        await bench.publisher.step()
        assert len(bench.index.batches) == 1
        assert len(bench.index.batches[0]) == 10
        held = [await bench.held_by_index(keys[row : row + 1]) for row in range(10)]
        assert held == [1, 1, 1, 1, 1, 0, 0, 1, 0, 0]
        assert bench.publisher.counters.published_pages == 6
        assert bench.publisher.counters.withdrawn_pages == 4

    run(story())


def test_batches_are_no_larger_than_an_index_takes() -> None:
    async def story() -> None:
        bench = Bench()
        await bench.join()
        bench.publisher.note(Changes.published(chain(2, 5000)))
        await bench.settle()
        assert [len(each) for each in bench.index.batches] == [
            BATCH_PAGES_MAX,
            BATCH_PAGES_MAX,
            5000 - 2 * BATCH_PAGES_MAX,
        ]

    run(story())


def test_overflow_compares_everything_instead_of_losing_changes() -> None:
    async def story() -> None:
        bench = Bench(PublisherConfig(queue_pages_max=1000))
        await bench.join()
        old, new = chain(3, 600), chain(4, 900)
        bench.truth.keys = old
        bench.publisher.note(Changes.published(old))
        await bench.settle()
        bench.truth.keys = new
        bench.publisher.note(Changes.withdrawn(old))
        bench.publisher.note(Changes.published(new))
        assert bench.publisher.counters.overflows == 1
        assert bench.publisher.queued_pages == 0
        assert bench.publisher.doubtful_shards == 256
        await bench.settle()
        assert await bench.held_by_index(old) == 0
        assert await bench.held_by_index(new) == 900

    run(story())


def test_comparison_says_only_what_differs() -> None:
    async def story() -> None:
        bench = Bench()
        await bench.join()
        keys = chain(5, 500)
        bench.truth.keys = keys
        bench.publisher.note(Changes.published(keys))
        await bench.settle()
        bench.index.batches.clear()
        bench.publisher.doubt_all()
        await bench.settle()
        assert bench.index.batches == []
        bench.truth.keys = keys[3:]  # three were withdrawn, and nobody was told
        bench.publisher.doubt_all()
        await bench.settle()
        assert sum(len(each) for each in bench.index.batches) == 3
        assert await bench.held_by_index(keys) == 497

    run(story())


def test_what_an_index_did_not_take_is_offered_again_in_order() -> None:
    async def story() -> None:
        bench = Bench()
        await bench.join()
        keys = chain(6, 50)
        bench.index.trouble = Trouble.TIMEOUT
        bench.publisher.note(Changes.published(keys))
        await bench.publisher.step()
        bench.publisher.note(Changes.withdrawn(keys[:20]))
        await bench.publisher.step()
        assert bench.publisher.queued_pages == 50
        bench.index.trouble = None
        await bench.settle()
        assert await bench.held_by_index(keys) == 30
        assert bench.publisher.counters.failed_batches == 2

    run(story())


def test_full_index_still_gets_withdrawals_and_later_the_rest() -> None:
    async def story() -> None:
        bench = Bench(PublisherConfig(full_pause_s=5))
        await bench.join()
        keys, more = chain(7, 400), chain(8, 300)
        bench.publisher.note(Changes.published(keys))
        await bench.settle()
        bench.truth.keys = np.concatenate((keys[100:], more))
        bench.index.is_full = True
        bench.publisher.note(Changes.published(more))
        bench.publisher.note(Changes.withdrawn(keys[:100]))
        for _ in range(5):
            await bench.publisher.step()
        assert await bench.held_by_index(keys) == 300
        assert await bench.held_by_index(more) == 0
        assert not bench.publisher.is_idle
        offered = len(bench.index.batches)
        bench.publisher.note(Changes.published(more[:10]))
        for _ in range(20):
            await bench.publisher.step()
        assert len(bench.index.batches) == offered  # nothing is offered before the pause is over
        bench.index.is_full = False
        bench.clock.now_s += 5.1
        await bench.settle()
        assert await bench.held_by_index(more) == 300

    run(story())


def test_running_publisher_needs_no_push() -> None:
    async def story() -> None:
        index = LocalIndex()
        truth = Truth()
        publisher = Publisher(index, truth, PublisherConfig(check_s=0.05))
        running = asyncio.create_task(publisher.run())
        publisher.note(Changes.published(chain(9, 5)))  # nobody has an id yet
        await asyncio.sleep(0.1)
        assert publisher.queued_pages == 5
        keys = truth.keys = chain(10, 3000)
        publisher.adopt(await join(index, "a"))

        async def is_told() -> bool:
            return (await index.match(keys)).page_count == 3000

        await until(is_told)
        publisher.note(Changes.withdrawn(keys[10:]))

        async def is_told_again() -> bool:
            return named(await index.match(keys)) == [{"a"}] * 10

        await until(is_told_again)
        running.cancel()

    run(story())


def test_index_that_lost_a_shard_is_noticed_without_any_change() -> None:
    async def story() -> None:
        bench = Bench(PublisherConfig(check_s=1))
        await bench.join()
        keys = bench.truth.keys = chain(11, 500)
        bench.publisher.note(Changes.published(keys))
        await bench.settle()
        shard = int(shards_of(keys)[0])
        lost = int((shards_of(keys) == shard).sum())
        bench.index.inner.lose(shard)
        assert await bench.held_by_index(keys) == 500 - lost
        await bench.publisher.step()
        assert bench.publisher.is_idle  # it is not time to look yet
        bench.clock.now_s += 1.1
        await bench.publisher.step()
        await bench.settle()
        assert await bench.held_by_index(keys) == 500

    run(story())


def test_store_that_comes_back_goes_on_where_its_numbers_were() -> None:
    async def story() -> None:
        bench = Bench()
        await bench.join()
        keys = bench.truth.keys = chain(12, 500)
        bench.publisher.note(Changes.published(keys))
        await bench.settle()
        (holder_id,) = (await bench.index.registry.view()).holders
        # While it was away two pages went, and one came.
        bench.truth.keys = np.concatenate((keys[2:], chain(13, 1)))
        bench.publisher = Publisher(cast("PrefixIndex", bench.index), bench.truth, now=bench.clock)
        bench.index.batches.clear()
        bench.publisher.adopt(holder_id)
        await bench.settle()
        assert sum(len(each) for each in bench.index.batches) == 3
        assert await bench.held_by_index(keys) == 498
        bench.publisher.note(Changes.withdrawn(keys))
        await bench.publisher.step()
        assert bench.publisher.is_idle  # nothing was too late, nothing was missing
        assert await bench.held_by_index(keys) == 0

    run(story())
