"""What matches see of holders that come and go, and how the dead are cleared away."""

from __future__ import annotations

import asyncio

from tests.index.pages import chain, join, named, publish, run, until
from tests.index.test_indexes import settings_for

from octavo.bench.redis_servers import RedisServer
from octavo_server.index.errors import IndexUnavailable, Trouble
from octavo_server.index.holders import HolderView
from octavo_server.index.local_index import LocalIndex
from octavo_server.index.near_cache import NearCache
from octavo_server.index.prefix_index import OwnEntries
from octavo_server.index.redis_index import RedisIndex
from octavo_server.index.sweeper import Sweeper


def reader(redis_server: RedisServer, prefix: str, *, near: bool = False) -> RedisIndex:
    """A node's index that reads the registry once a minute unless it must."""
    return RedisIndex(
        settings_for(redis_server.address, prefix),
        near=None if near else NearCache(entries_max=0),
        view_age_s=60,
    )


def test_holder_that_registered_a_moment_ago_is_named_at_once(
    redis_server: RedisServer, prefix: str
) -> None:
    async def story() -> None:
        here, there = reader(redis_server, prefix), reader(redis_server, prefix)
        keys = chain(1, 10)
        assert (await here.match(keys)).page_count == 0  # from now on it has a view
        for node in ("a", "b"):
            await publish(there, await join(there, node), keys)
            assert node in named(await here.match(keys))[9]
        await here.close()
        await there.close()

    run(story())


def test_strangers_do_not_make_every_match_read_the_registry(
    redis_server: RedisServer, prefix: str
) -> None:
    async def story() -> None:
        index = reader(redis_server, prefix)
        keys = chain(2, 10)
        await publish(index, 4711, keys)
        views: list[HolderView] = []
        for _ in range(5):
            assert (await index.match(keys)).page_count == 0
            views.append(index.views.latest)
        assert len({id(each) for each in views}) == 1
        await index.close()

    run(story())


def test_matches_note_retired_holders_and_their_entries_are_removed(
    redis_server: RedisServer, prefix: str
) -> None:
    async def story() -> None:
        index = reader(redis_server, prefix)
        keys = chain(3, 60)
        a, b = await join(index, "a"), await join(index, "b")
        await publish(index, a, keys)
        await publish(index, b, keys[:10])
        assert await index.remove_met() == 0
        await index.registry.retire(a)
        fresh = reader(redis_server, prefix)
        assert named(await fresh.match(keys)) == [{"b"}] * 10
        assert await fresh.remove_met() == 60
        assert await fresh.remove_met() == 0
        own = await fresh.own_entries(a, range(256))
        assert sum(len(each.fields) for each in own.values() if isinstance(each, OwnEntries)) == 0
        assert named(await fresh.match(keys, exact=True)) == [{"b"}] * 10
        await index.close()
        await fresh.close()

    run(story())


def test_near_cache_answers_the_next_turn_without_redis(
    redis_server: RedisServer, prefix: str
) -> None:
    async def story() -> None:
        index = reader(redis_server, prefix, near=True)
        keys = chain(4, 1000)
        a = await join(index, "a")
        await publish(index, a, keys)
        with redis_server.client() as raw:
            assert (await index.match(keys[:960])).page_count == 960
            before = raw.info("commandstats")["cmdstat_hget"]["calls"]
            assert (await index.match(keys[:960])).page_count == 960
            assert raw.info("commandstats")["cmdstat_hget"]["calls"] == before
            assert (await index.match(keys)).page_count == 1000
            assert raw.info("commandstats")["cmdstat_hget"]["calls"] - before < 20
        await index.close()

    run(story())


def test_sweeper_sweeps_in_its_turn_and_survives_an_index_that_is_away() -> None:
    class Away(LocalIndex):
        is_away = True

        async def remove_retired(self, shard: int, retired: frozenset[int]) -> frozenset[int]:
            if self.is_away:
                raise IndexUnavailable(Trouble.CONNECTION)
            return await super().remove_retired(shard, retired)

    async def story() -> None:
        index = Away()
        keys = chain(5, 20)
        a = await join(index, "a")
        await publish(index, a, keys)
        await index.registry.retire(a)
        turns: list[bool] = [False]
        sweeper = Sweeper(index, lambda: turns[-1], interval_s=0.02)
        running = asyncio.create_task(sweeper.run())
        await asyncio.sleep(0.2)
        assert (sweeper.swept, sweeper.failed) == (0, 0)
        turns.append(True)

        async def has_failed() -> bool:
            return sweeper.failed > 1

        await until(has_failed)
        assert (await index.registry.view()).retired == {a}
        index.is_away = False

        async def has_swept() -> bool:
            return sweeper.swept > 0

        await until(has_swept)
        assert not (await index.registry.view()).retired
        running.cancel()

    run(story())
