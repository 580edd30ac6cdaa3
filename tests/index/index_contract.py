"""What holds for every prefix index. Subclasses say how a node opens one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from tests.index.pages import (
    TERMS,
    chain,
    holder,
    join,
    named,
    publish,
    run,
    until,
    withdraw,
)

from octavo_server.index.changes import Changes
from octavo_server.index.entries import VALUE_BYTES_MAX
from octavo_server.index.found import Answer
from octavo_server.index.holders import LeaseTerms, Renewal
from octavo_server.index.prefix_index import Numbers, OwnEntries, PrefixIndex, ShardOutcome
from octavo_server.index.sweeper import sweep

OpenIndex = Callable[[], PrefixIndex]
BRIEF = LeaseTerms(lease_s=0.3, keep_s=0.3)


class IndexContract:
    """Inherit, and define the fixture ``open_index``: each call is another node's index on the
    same entries, to be used in one event loop."""

    def test_published_page_is_found_by_another_node_with_its_holder(
        self, open_index: OpenIndex
    ) -> None:
        async def story() -> None:
            a, b = open_index(), open_index()
            keys = chain(1, 10)
            holder_id = await join(a, "a")
            await publish(a, holder_id, keys)
            found = await b.match(keys)
            assert found.answer is Answer.COMPLETE
            assert found.page_count == 10
            assert [(each.begin, each.end) for each in found.runs] == [(0, 10)]
            assert found.holders == {holder_id: holder("a")}
            assert (await b.match(chain(2, 10))).runs == ()
            await a.close()
            await b.close()

        run(story())

    def test_prefix_ends_at_the_first_page_that_nobody_holds(self, open_index: OpenIndex) -> None:
        async def story() -> None:
            index = open_index()
            keys = chain(3, 300)
            holder_id = await join(index, "a")
            for end in (0, 1, 31, 32, 33, 200, 299):
                await withdraw(index, holder_id, keys)
                await publish(index, holder_id, keys[:end])
                await publish(index, holder_id, keys[end + 1 :])
                assert (await index.match(keys, exact=True)).page_count == end
                await withdraw(index, holder_id, keys[end:])
                assert (await index.match(keys)).page_count == end
            assert (await index.match(keys[:0])).page_count == 0
            await index.close()

        run(story())

    def test_runs_change_exactly_where_holders_change(self, open_index: OpenIndex) -> None:
        async def story() -> None:
            index = open_index()
            keys = chain(4, 1000)
            ends = {"a": 1000, "b": 94, "c": 517}
            for node, end in ends.items():
                await publish(index, await join(index, node), keys[:end])
            found = await index.match(keys)
            assert [(each.begin, each.end) for each in found.runs] == [
                (0, 94),
                (94, 517),
                (517, 1000),
            ]
            assert named(found) == [
                {node for node, end in ends.items() if page < end} for page in range(1000)
            ]
            assert found == await index.match(keys, exact=True)
            await index.close()

        run(story())

    def test_some_units_of_a_page_are_told_from_all_of_it(self, open_index: OpenIndex) -> None:
        async def story() -> None:
            index = open_index()
            keys = chain(5, 4)
            a = await join(index, "a")
            b = await join(index, "b")
            await publish(index, a, keys, units=0b0011)
            await publish(index, b, keys[:2], units=0b1110)
            found = await index.match(keys)
            assert found.page_count == 4
            assert found.pages_with(0b1111) == 2
            assert found.pages_with(0b0001) == 4
            assert found.pages_with(1 << 63) == 0
            await publish(index, a, keys)  # now whole
            assert (await index.match(keys)).pages_with(2**64 - 1) == 4
            await publish(index, a, keys, units=0b0001)
            await withdraw(index, b, keys)
            assert (await index.match(keys)).pages_with(0b0010) == 0
            await index.close()

        run(story())

    def test_holder_changes_its_own_entries_only_and_repeating_does_no_harm(
        self, open_index: OpenIndex
    ) -> None:
        async def story() -> None:
            index = open_index()
            keys = chain(6, 50)
            a = await join(index, "a")
            b = await join(index, "b")
            for _ in range(2):
                await publish(index, a, keys)
                await publish(index, b, keys)
            for _ in range(2):
                await withdraw(index, a, keys[20:])
            assert named(await index.match(keys, exact=True)) == [{"a", "b"}] * 20 + [{"b"}] * 30
            await withdraw(index, b, keys)
            assert named(await index.match(keys, exact=True)) == [{"a"}] * 20
            await index.close()

        run(story())

    def test_lapsed_holder_is_not_named_until_it_renews(self, open_index: OpenIndex) -> None:
        async def story() -> None:
            index = open_index()
            keys = chain(7, 3)
            terms = LeaseTerms(lease_s=0.3, keep_s=60)
            a = await index.registry.register(holder("a"), terms)
            assert a is not None
            await publish(index, a, keys)
            assert (await index.match(keys)).page_count == 3
            await asyncio.sleep(0.35)
            assert (await index.match(keys)).page_count == 0
            await index.registry.retire_lapsed()  # it may still come back
            assert await index.registry.renew(a, holder("a"), terms) is Renewal.RENEWED

            async def is_named() -> bool:
                return (await index.match(keys)).page_count == 3

            await until(is_named, 1.0)
            await index.close()

        run(story())

    def test_holder_that_does_not_come_back_in_time_is_retired(self, open_index: OpenIndex) -> None:
        async def story() -> None:
            index = open_index()
            a = await index.registry.register(holder("a"), BRIEF)
            assert a is not None
            await index.registry.retire_lapsed()
            assert (await index.registry.view()).knows(a)
            await asyncio.sleep(0.7)
            await index.registry.retire_lapsed()
            assert not (await index.registry.view()).knows(a)
            assert await index.registry.renew(a, holder("a"), BRIEF) is Renewal.FORGOTTEN
            await index.close()

        run(story())

    def test_same_incarnation_gets_its_id_back_and_a_later_one_voids_it(
        self, open_index: OpenIndex
    ) -> None:
        async def story() -> None:
            index = open_index()
            keys = chain(8, 5)
            memory = await join(index, "a")
            store = holder("a", "nvme-1", "epoch-1", started_ms=10)
            first = await index.registry.register(store, TERMS)
            assert first is not None
            await publish(index, first, keys)
            restarted = replace(store, address="a:1", started_ms=20)
            assert await index.registry.register(restarted, TERMS) == first
            assert (await index.registry.view()).holders[first] == restarted
            assert (await index.match(keys)).page_count == 5
            emptied = replace(store, incarnation="epoch-2", started_ms=30)
            second = await index.registry.register(emptied, TERMS)
            assert second is not None
            assert second not in (first, memory)
            view = await index.registry.view()
            assert set(view.holders) == {memory, second}
            assert view.retired == {first}
            await asyncio.sleep(0.03)  # the age of what a node knows of the registry
            assert (await index.match(keys)).page_count == 0
            await index.close()

        run(story())

    def test_earlier_incarnation_cannot_come_back_while_a_later_one_lives(
        self, open_index: OpenIndex
    ) -> None:
        async def story() -> None:
            index = open_index()
            registry = index.registry
            paused = holder("a", incarnation="boot-1", started_ms=1)
            present = holder("a", incarnation="boot-2", started_ms=2)
            first = await registry.register(paused, TERMS)
            second = await registry.register(present, BRIEF)
            assert first is not None
            assert second is not None
            assert await registry.renew(first, paused, TERMS) is Renewal.SUPERSEDED
            assert await registry.register(paused, TERMS) is None
            assert set((await registry.view()).holders) == {second}
            # The later one is told to register again where an old snapshot has the earlier one.
            assert await registry.renew(4711, present, BRIEF) is Renewal.FORGOTTEN
            await asyncio.sleep(0.35)  # clocks that went backwards must not keep a name for ever
            assert await registry.register(paused, TERMS) is not None
            await index.close()

        run(story())

    def test_sweep_removes_all_entries_of_the_dead_and_then_frees_their_ids(
        self, open_index: OpenIndex
    ) -> None:
        async def story() -> None:
            index = open_index()
            keys = chain(9, 500)
            a = await join(index, "a")
            b = await join(index, "b")
            await publish(index, a, keys)
            await publish(index, b, keys[:300])
            await index.registry.retire(a)
            assert (await index.registry.view()).retired == {a}
            await sweep(index)
            assert (await index.registry.view()).retired == frozenset()
            assert not [shard for shard in range(256) if a in await met_in(index, shard)]
            assert not (await index.numbers_of(a)).any()
            assert named(await index.match(keys, exact=True)) == [{"b"}] * 300
            await index.close()

        run(story())

    def test_sweep_removes_entries_that_no_registered_holder_owns(
        self, open_index: OpenIndex
    ) -> None:
        async def story() -> None:
            index = open_index()
            keys = chain(10, 100)
            stranger = 4711
            await publish(index, stranger, keys)
            assert (await index.match(keys)).page_count == 0
            await sweep(index)
            for shard in range(256):
                assert not len((await own(index, stranger, shard)).fields)
            await index.close()

        run(story())

    def test_attempt_that_arrives_after_its_repetition_does_nothing(
        self, open_index: OpenIndex
    ) -> None:
        async def story() -> None:
            index = open_index()
            keys = chain(11, 20)
            a = await join(index, "a")
            numbers, delayed = Numbers(), Numbers()
            delayed.next()
            delayed_apply = index.apply(a, Changes.published(keys), delayed)  # the second attempt
            numbers.next()
            numbers.next()
            await index.apply(a, Changes.withdrawn(keys), numbers)  # the third
            late = await delayed_apply
            assert set(late.outcomes.values()) == {ShardOutcome.LATE}
            assert (await index.match(keys)).page_count == 0
            await index.close()

        run(story())

    def test_missing_changes_are_noticed(self, open_index: OpenIndex) -> None:
        async def story() -> None:
            index = open_index()
            keys = chain(12, 30)
            a = await join(index, "a")
            ahead = Numbers()
            for shard in range(256):
                ahead.confirm(shard, 5)  # as if the index had confirmed these and lost them
            applied = await index.apply(a, Changes.published(keys), ahead)
            assert set(applied.outcomes.values()) == {ShardOutcome.LOST}
            assert (await index.match(keys)).page_count == 30
            again = await index.apply(a, Changes.published(keys), ahead)
            assert set(again.outcomes.values()) == {ShardOutcome.APPLIED}
            found = await index.numbers_of(a)
            shards = sorted(applied.outcomes)
            assert set(found[shards].tolist()) == {7}
            assert int(found.sum()) == 7 * len(shards)
            await index.close()

        run(story())

    def test_own_entries_are_exactly_those_of_the_holder(self, open_index: OpenIndex) -> None:
        async def story() -> None:
            index = open_index()
            keys = chain(13, 3000)
            keys[:, 0] &= np.uint64(0xFFFF_FFFF_FFFF_FF03)  # four shards
            a = await join(index, "a")
            b = await join(index, "b")
            await publish(index, b, keys[1000:])
            await publish(index, a, keys[:2000])
            await publish(index, a, keys[:100], units=0b101)
            for shard in range(4):
                entries = await own(index, a, shard)
                mine = (keys[:2000, 0] & np.uint64(0xFF)) == shard
                expected = dict.fromkeys(keys[:2000][mine, 1].tolist(), 2**64 - 1)
                expected |= dict.fromkeys(keys[:100][mine[:100], 1].tolist(), 0b101)
                pairs = zip(entries.fields.tolist(), entries.units.tolist(), strict=True)
                assert dict(pairs) == expected
                assert entries.number == int((await index.numbers_of(a))[shard])
            await index.close()

        run(story())

    def test_page_with_too_many_holders_names_sixteen(self, open_index: OpenIndex) -> None:
        async def story() -> None:
            index = open_index()
            keys = chain(14, 3)
            ids = [await join(index, f"node-{number}") for number in range(17)]
            crowded = [(await publish(index, each, keys)).crowded_pages for each in ids]
            assert crowded == [0] * (VALUE_BYTES_MAX // 4) + [3]
            assert [len(each) for each in named(await index.match(keys))] == [16] * 3
            await withdraw(index, ids[3], keys)
            assert (await publish(index, ids[16], keys)).crowded_pages == 0
            assert named(await index.match(keys, exact=True))[0] == {
                f"node-{number}" for number in range(17) if number != 3
            }
            await index.close()

        run(story())

    def test_growing_and_shrinking_loses_no_page(self, open_index: OpenIndex) -> None:
        async def story() -> None:
            index = open_index()
            keys = chain(15, 12_000)
            keys[:, 0] &= np.uint64(0xFFFF_FFFF_FFFF_FF01)  # two shards, 150 buckets each
            a = await join(index, "a")
            await publish(index, a, keys)
            assert (await index.match(keys, exact=True)).page_count == 12_000
            for kept in (5000, 100, 1):
                await withdraw(index, a, keys[kept:])
                assert (await index.match(keys, exact=True)).page_count == kept
                assert sum([len((await own(index, a, s)).fields) for s in (0, 1)]) == kept
            await index.close()

        run(story())

    def test_registry_is_one_for_all_nodes(self, open_index: OpenIndex) -> None:
        async def story() -> None:
            a, b = open_index(), open_index()
            first = await join(a, "a")
            second = await join(b, "b")
            assert first != second
            assert set((await a.registry.view()).holders) == {first, second}
            await b.registry.retire(first)
            assert set((await a.registry.view()).holders) == {second}
            await a.close()
            await b.close()

        run(story())


async def met_in(index: PrefixIndex, shard: int) -> frozenset[int]:
    """Holders that are named anywhere in a shard."""
    return await index.remove_retired(shard, frozenset())


async def own(index: PrefixIndex, holder_id: int, shard: int) -> OwnEntries:
    """What the index says that a holder has in a shard."""
    entries = (await index.own_entries(holder_id, [shard]))[shard]
    assert isinstance(entries, OwnEntries)
    return entries
