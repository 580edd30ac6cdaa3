"""Random histories of nodes that come, go and crash over an index that loses things.

Nodes publish and withdraw pages through their publishers, calls get lost or arrive late, Redis
is emptied wholly or in part, or set back to an old snapshot. Beside it a dict says who has what.
At the end of each history, after one sweep, the index must name exactly whom the dict names.
"""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from tests.index.faulty_index import FaultyIndex
from tests.index.pages import TERMS, chain, run
from tests.index.test_indexes import open_redis_index, settings_for

from octavo.bench.redis_servers import RedisServer
from octavo_server.index.changes import Changes
from octavo_server.index.entries import ALL_UNITS, Keys
from octavo_server.index.found import Answer
from octavo_server.index.holders import Holder, Renewal
from octavo_server.index.local_index import LocalIndex
from octavo_server.index.prefix_index import PrefixIndex
from octavo_server.index.publisher import Publisher, PublisherConfig
from octavo_server.index.sweeper import sweep

SEED = "OCTAVO_TEST_INDEX_SEED"
PAGES = 300
NODES = 4
STEPS = 60

Keyspace = dict[bytes, bytes]


@dataclass
class Node:
    """A node's truth, and its publisher. ``pages`` maps rows of the universe to unit masks."""

    name: str
    publisher: Publisher
    is_up: bool = True
    life: int = 1
    holder_id: int = 0
    pages: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def holder(self) -> Holder:
        return Holder(
            node_id=self.name,
            store="memory",
            incarnation=f"boot-{self.life}",
            address=self.name,
            started_ms=self.life,
        )


class History:
    """One seed's story. ``raw`` is a client of Redis for what happens to Redis itself."""

    def __init__(self, seed: int, index: PrefixIndex, raw: Any, prefix: str) -> None:
        self.random = random.Random(seed)
        self.index = FaultyIndex(index, self.random)
        self.raw = raw
        self.prefix = prefix
        self.clock_s = 0.0
        self.snapshot: Keyspace = {}
        self.done: list[str] = []
        keys = chain(seed, PAGES)
        keys[:, 0] &= np.uint64(0xFFFF_FFFF_FFFF_FF07)  # eight shards, so that much meets there
        self.keys: Keys = keys
        self.nodes = [Node(f"node-{number}", self.new_publisher(number)) for number in range(NODES)]

    def new_publisher(self, number: int) -> Publisher:
        return Publisher(
            cast("PrefixIndex", self.index),
            Truth(self, number),
            PublisherConfig(
                queue_pages_max=self.random.choice([150, 100_000]),
                compare_all_s=1e12,
                check_s=1e-6,
            ),
            now=self.tick,
        )

    def tick(self) -> float:
        """A clock on which every pause is over."""
        self.clock_s += 10.0
        return self.clock_s

    async def play(self) -> None:
        await self.beat()
        acts: list[Callable[[], Awaitable[None]]] = [self.publish] * 6
        acts += [self.withdraw] * 5 + [self.step] * 8 + [self.crash, self.restart] * 2
        acts += [self.look, self.late, self.beat, self.clear_up]
        if self.raw is not None:
            acts += [self.empty, self.empty_a_part, self.take_snapshot, self.set_back]
        for _ in range(STEPS):
            self.index.faults = self.random.choice([0, 0, 30])
            act = self.random.choice(acts)
            self.done.append(act.__name__)
            await act()
        await self.settle()

    def some_node(self, *, up: bool) -> Node | None:
        nodes = [each for each in self.nodes if each.is_up is up]
        return self.random.choice(nodes) if nodes else None

    def some_rows(self) -> list[int]:
        begin = self.random.randrange(PAGES)
        return list(range(begin, min(PAGES, begin + self.random.randrange(1, 80))))

    async def publish(self) -> None:
        node = self.some_node(up=True)
        if node:
            rows = self.some_rows()
            units = self.random.choice([ALL_UNITS, ALL_UNITS, 0b01, 0b10])
            node.pages |= dict.fromkeys(rows, units)
            column = np.full(len(rows), units, dtype=np.uint64)
            node.publisher.note(Changes.published(self.keys[rows], column))

    async def withdraw(self) -> None:
        node = self.some_node(up=True)
        if node:
            rows = self.some_rows()
            for row in rows:
                node.pages.pop(row, None)
            node.publisher.note(Changes.withdrawn(self.keys[rows]))

    async def step(self) -> None:
        node = self.some_node(up=True)
        if node:
            await node.publisher.step()

    async def crash(self) -> None:
        node = self.some_node(up=True)
        if node:
            node.is_up = False
            node.pages = {}

    async def restart(self) -> None:
        node = self.some_node(up=False)
        if node:
            node.is_up = True
            node.life += 1
            node.holder_id = 0
            node.publisher = self.new_publisher(self.nodes.index(node))
            await self.beat()

    async def beat(self) -> None:
        for node in self.nodes:
            if node.is_up:
                renewal = Renewal.FORGOTTEN
                if node.holder_id:
                    renewal = await self.index.registry.renew(node.holder_id, node.holder, TERMS)
                assert renewal is not Renewal.SUPERSEDED
                if renewal is Renewal.FORGOTTEN:
                    holder_id = await self.index.registry.register(node.holder, TERMS)
                    assert holder_id is not None
                    node.holder_id = holder_id
                    node.publisher.adopt(holder_id)

    async def look(self) -> None:
        for exact in (False, True):
            found = await self.index.match(self.keys, exact=exact)
            assert found.answer is Answer.COMPLETE
            live = set((await self.index.registry.view()).holders)
            assert set(found.holders) <= live

    async def late(self) -> None:
        await self.index.deliver_late()

    async def clear_up(self) -> None:
        await sweep(cast("PrefixIndex", self.index))

    async def empty(self) -> None:
        self.delete(lambda key: True)

    async def empty_a_part(self) -> None:
        shard = self.random.randrange(8)
        self.delete(lambda key: f"{{{shard:02x}}}".encode() in key)

    async def take_snapshot(self) -> None:
        self.snapshot = {key: self.raw.dump(key) for key in self.all_keys()}

    async def set_back(self) -> None:
        self.delete(lambda key: True)
        for key, dump in self.snapshot.items():
            self.raw.restore(key, 0, dump)

    def all_keys(self) -> list[bytes]:
        return list(self.raw.scan_iter(match=f"{self.prefix}:*", count=1000))

    def delete(self, chosen: Callable[[bytes], bool]) -> None:
        keys = [key for key in self.all_keys() if chosen(key)]
        if keys:
            self.raw.delete(*keys)

    async def settle(self) -> None:
        """Nothing goes wrong any more; those who crashed stay away until they are retired."""
        self.index.faults = 0
        await self.index.deliver_late()
        up = {each.name for each in self.nodes if each.is_up}
        for holder_id, holder in (await self.index.registry.view()).holders.items():
            if holder.node_id not in up:
                await self.index.registry.retire(holder_id)
        await self.beat()
        await self.catch_up()
        if self.raw is not None:
            # Nobody has anything to say any more, and still the loss has to be noticed.
            await self.empty_a_part()
            await self.catch_up()
        await sweep(cast("PrefixIndex", self.index))
        await self.compare()

    async def catch_up(self) -> None:
        for node in self.nodes:
            if node.is_up:
                await node.publisher.step()
                for _ in range(2000):
                    if node.publisher.is_idle:
                        break
                    await node.publisher.step()
                assert node.publisher.is_idle

    async def compare(self) -> None:
        for row in range(PAGES):
            found = await self.index.match(self.keys[row : row + 1], exact=True)
            holdings = found.runs[0].holdings if found.runs else ()
            named = {found.holders[each.holder_id].node_id: each.units for each in holdings}
            expected = {
                node.name: node.pages[row]
                for node in self.nodes
                if node.is_up and row in node.pages
            }
            assert named == expected, f"page {row} after {self.done}"


@dataclass
class Truth:
    """What a node has, as its publisher asks for it."""

    history: History
    number: int

    def held(self, shard: int) -> Changes:
        pages = self.history.nodes[self.number].pages
        rows = [row for row in pages if int(self.history.keys[row, 0]) & 0xFF == shard]
        units = np.array([pages[row] for row in rows], dtype=np.uint64)
        return Changes(self.history.keys[rows].reshape(-1, 2), units)


def seeds(count: int) -> list[int]:
    given = os.environ.get(SEED)
    return [int(given)] if given else list(range(count))


def play_on_redis(seed: int, server: RedisServer, prefix: str) -> None:
    print(f"{SEED}={seed}")

    async def story() -> None:
        index = open_redis_index(settings_for(server.address, prefix))
        with server.client() as raw:
            await History(seed, index, raw, prefix).play()
        await index.close()

    run(story())


@pytest.mark.parametrize("seed", seeds(6))
def test_index_on_redis_ends_with_the_truth(
    seed: int, redis_server: RedisServer, prefix: str
) -> None:
    play_on_redis(seed, redis_server, prefix)


@pytest.mark.long
@pytest.mark.parametrize("seed", [each + 1000 for each in seeds(100)])
def test_index_on_redis_ends_with_the_truth_many_times(
    seed: int, redis_server: RedisServer, prefix: str
) -> None:
    play_on_redis(seed, redis_server, prefix)


@pytest.mark.parametrize("seed", seeds(20))
def test_index_in_this_process_ends_with_the_truth(seed: int) -> None:
    print(f"{SEED}={seed}")
    run(History(seed, LocalIndex(), None, "").play())
