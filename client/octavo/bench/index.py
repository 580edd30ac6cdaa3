"""The prefix index on a real Redis: bytes a page, pages published and looked up, their ceilings.

A million pages in 10,000 chains behind one shared prefix, a fifth of them with two holders. They
go through a node's own publisher on one connection. Each ceiling is a script that is sent the
same arguments and answers as much, and does nothing. The same is repeated on a cluster.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from octavo.bench.measuring import IdleShare, median, progress
from octavo.bench.redis_servers import RedisClusterServers, RedisServer, redis_server_program

if TYPE_CHECKING:
    from octavo_server.index.changes import Changes
    from octavo_server.index.entries import Keys
    from octavo_server.index.publisher import Publisher
    from octavo_server.index.redis_index import RedisIndex
    from octavo_server.index.redis_settings import RedisSettings

PREFIX_PAGES: Final = 94
TWO_HOLDERS_SHARE: Final = 0.2
MATCH_PAGES: Final = (640, 8192)
SEED: Final = 20_260

_APPLY_NOTHING: Final = """
local answers = {}
for i = 1, #KEYS do answers[i] = { 0, 0 } end
return answers
"""
# The holder's id stands in for what each page would answer.
_LOOK_AT_NOTHING: Final = """
local answers = {}
for i = 1, #KEYS do
  local values = {}
  for at = 1, #ARGV[i] / 8 do values[at] = 'HOLDER' end
  answers[i] = values
end
return answers
"""


def run(
    *,
    pages: int = 1_000_000,
    chains: int = 10_000,
    cluster_servers: int = 3,
    repeats: int = 60,
    redis_server: Path | None = None,
) -> dict[str, object]:
    """Figures on one server, and under ``cluster`` on several; 0 leaves the cluster out.

    Raises:
        NoRedisServerError: there is no redis-server.
        RuntimeError: the index does not name whom it must.
    """
    program = redis_server_program(redis_server)
    workload = Workload(pages, chains, repeats)
    idle = IdleShare()
    with RedisServer(program) as server:
        figures: dict[str, object] = dict(_measure(workload, server.address, [server]))
    if cluster_servers:
        with RedisClusterServers(program, cluster_servers) as cluster:
            figures["cluster"] = _measure(workload, cluster.address, cluster.servers)
    return {"pages": pages, "chains": chains, **figures, "idle_share": idle.since()}


class Workload:
    """Page keys of chains that share their first pages. Keys are random, as hashes are."""

    def __init__(self, pages: int, chains: int, repeats: int) -> None:
        self.repeats = repeats
        random = np.random.default_rng(SEED)
        self.keys: Keys = random.integers(0, 2**64, (pages, 2), dtype=np.uint64)
        self.prefix = self.keys[:PREFIX_PAGES]
        tails: list[Keys] = np.array_split(self.keys[PREFIX_PAGES:], chains)
        self.tails = tails
        self.twice = tails[: round(TWO_HOLDERS_SHARE * chains)]

    def chain(self, pages: int, number: int) -> Keys:
        """A chain of any length that is held whole: its first tenth by two, the rest by one."""
        two = pages // 10
        begin = number * pages % (len(self.keys) // 4)
        other = np.concatenate([self.prefix, *self.twice])
        of_two = np.roll(other, -(number * two), axis=0)[:two]
        of_one = self.keys[len(self.keys) // 2 :][begin : begin + pages - two]
        return np.concatenate([of_two, of_one])

    def missing(self, pages: int, number: int) -> Keys:
        """A chain that nobody holds."""
        random = np.random.default_rng((SEED, number + 1))
        return random.integers(0, 2**64, (pages, 2), dtype=np.uint64)


class Truth:
    """What a holder has, for its publisher's comparisons."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys

    def held(self, shard: int) -> Changes:
        """See ``HeldPages``."""
        from octavo_server.index.changes import Changes
        from octavo_server.index.entries import shards_of

        return Changes.published(self.keys[shards_of(self.keys) == shard])


def _measure(workload: Workload, address: str, servers: Sequence[RedisServer]) -> dict[str, float]:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_measured(workload, address, servers))
    return uvloop.run(_measured(workload, address, servers))


async def _measured(
    workload: Workload, address: str, servers: Sequence[RedisServer]
) -> dict[str, float]:
    from octavo_server.index.redis_settings import parse_redis_address

    settings = replace(
        parse_redis_address(address), match_timeout_s=30.0, write_timeout_s=60.0, calls_max=1
    )
    index = _open(settings)
    empty_bytes = _used_bytes(servers)
    cpu_s = time.process_time()
    redis_cpu_s = _used_cpu_s(servers)
    first, holder_id, first_s = await _publish(index, "first", workload, workload.keys)
    second_keys = np.concatenate([workload.prefix, *workload.twice])
    _, _, second_s = await _publish(index, "second", workload, second_keys)
    cpu_s = time.process_time() - cpu_s
    redis_cpu_s = _used_cpu_s(servers) - redis_cpu_s
    used_bytes = _used_bytes(servers) - empty_bytes
    published = len(workload.keys) + len(second_keys)
    figures = {
        "largest_hash_fields": _largest_hash(servers),
        "bytes_per_page": used_bytes / len(workload.keys),
        "publish_pages_per_s": published / (first_s + second_s),
        # Processor time tells on a busy machine what the clock does not.
        "publish_cpu_us_per_page": cpu_s / published * 1e6,
        "publish_redis_cpu_us_per_page": redis_cpu_s / published * 1e6,
        "publish_ceiling_pages_per_s": await _publish_ceiling(settings, workload),
    }
    idle_look = _LOOK_AT_NOTHING.replace(
        "HOLDER", "".join(f"\\{byte:03d}" for byte in holder_id.to_bytes(4, "big"))
    )
    for pages in MATCH_PAGES:
        figures |= await _match(index, _open(settings, instead=idle_look), workload, pages)
    figures["compare_all_s"] = await _compare_all(first)
    await index.close()
    return figures


def _open(settings: RedisSettings, *, instead: str | None = None) -> RedisIndex:
    """An index that asks Redis each time; runs the script ``instead``, if any."""
    from octavo_server.index.near_cache import NearCache
    from octavo_server.index.redis_index import RedisIndex
    from octavo_server.index.redis_link import RedisLink, ShardCall
    from octavo_server.index.scripts import Script

    class IdleLink(RedisLink):
        async def call_shards(
            self,
            script: Script,
            head: Sequence[bytes],
            calls: Sequence[ShardCall],
            timeout_s: float,
        ) -> list[Any]:
            idle = script if instead is None else Script.of(instead)
            return await super().call_shards(idle, head, calls, timeout_s)

    return RedisIndex(
        settings,
        near=NearCache(entries_max=0),
        view_age_s=60.0,
        link=IdleLink(settings),
    )


async def _publish(
    index: RedisIndex, node: str, workload: Workload, keys: Keys
) -> tuple[Publisher, int, float]:
    """A node's publisher takes all these pages, a chain at a time; its id, and the time taken."""
    from octavo_server.index.changes import Changes
    from octavo_server.index.holders import Holder, LeaseTerms
    from octavo_server.index.publisher import Publisher, PublisherConfig

    holder = Holder(
        node_id=node, store="memory", incarnation="1", address=f"{node}:9471", started_ms=1
    )
    holder_id = await index.registry.register(holder, LeaseTerms(lease_s=3600, keep_s=3600))
    assert holder_id is not None
    config = PublisherConfig(queue_pages_max=2 * len(keys), check_s=3600, compare_all_s=1e9)
    truth = Truth(keys[:0])
    publisher = Publisher(index, truth, config)
    publisher.adopt(holder_id)
    while not publisher.is_idle:  # nothing is held yet, so this is over at once
        await publisher.step()
    truth.keys = keys
    chain_pages = max(1, len(keys) // len(workload.tails))
    for begin in range(0, len(keys), chain_pages):
        publisher.note(Changes.published(keys[begin : begin + chain_pages]))
    began = time.perf_counter()
    while not publisher.is_idle:
        await publisher.step()
    taken_s = time.perf_counter() - began
    if publisher.counters.published_pages != len(keys) or publisher.counters.failed_batches:
        raise RuntimeError(f"not everything was published: {publisher.counters}")
    return publisher, holder_id, taken_s


async def _publish_ceiling(settings: RedisSettings, workload: Workload) -> float:
    """Pages a second that arrive at a script that does nothing with them."""
    from octavo_server.index.changes import BATCH_PAGES_MAX, Changes
    from octavo_server.index.prefix_index import Numbers

    index = _open(settings, instead=_APPLY_NOTHING)
    taken: list[float] = []
    numbers = Numbers()
    for batch in Changes.published(workload.keys[: 100 * BATCH_PAGES_MAX]).batches():
        began = time.perf_counter()
        await index.apply(1, batch, numbers)
        taken.append((time.perf_counter() - began) / len(batch))
    await index.close()
    return 1 / median(taken)


async def _match(
    index: RedisIndex, idle: RedisIndex, workload: Workload, pages: int
) -> dict[str, float]:
    """Median times of a match: as nodes ask, every page, its ceiling, and of one that misses."""

    async def median_ms(of: RedisIndex, *, exact: bool, held: bool) -> float:
        taken: list[float] = []
        for number in progress(range(workload.repeats), f"match {pages} pages", workload.repeats):
            keys = workload.chain(pages, number) if held else workload.missing(pages, number)
            began = time.perf_counter()
            found = await of.match(keys, exact=exact)
            taken.append(time.perf_counter() - began)
            if found.page_count != (pages if held else 0) or len(found.runs) > 2:
                raise RuntimeError(f"{found.page_count} of {pages} pages in {len(found.runs)} runs")
        return median(taken) * 1e3

    figures = {
        f"match_{pages}_ms": await median_ms(index, exact=False, held=True),
        f"match_{pages}_exact_ms": await median_ms(index, exact=True, held=True),
        f"match_{pages}_exact_ceiling_ms": await median_ms(idle, exact=True, held=True),
        f"match_{pages}_miss_ms": await median_ms(index, exact=False, held=False),
    }
    await idle.close()
    return figures


async def _compare_all(publisher: Publisher) -> float:
    """How long a holder needs to see that all its entries are right, as after a restart."""
    before = publisher.counters.published_pages
    publisher.doubt_all()
    began = time.perf_counter()
    while not publisher.is_idle:
        await publisher.step()
    if publisher.counters.published_pages != before:
        raise RuntimeError("a comparison found entries missing")
    return time.perf_counter() - began


def _used_bytes(servers: Sequence[RedisServer]) -> int:
    total = 0
    for server in servers:
        with server.client() as client:
            total += int(client.info("memory")["used_memory"])
    return total


def _used_cpu_s(servers: Sequence[RedisServer]) -> float:
    total = 0.0
    for server in servers:
        with server.client() as client:
            used: dict[str, float] = client.info("cpu")
            total += used["used_cpu_user"] + used["used_cpu_sys"]
    return total


def _largest_hash(servers: Sequence[RedisServer]) -> int:
    """Fields of the largest hash there is."""
    largest = 0
    for server in servers:
        with server.client() as client:
            names = list(client.scan_iter(count=10_000, _type="hash"))
            pipeline = client.pipeline(transaction=False)
            for name in names:
                pipeline.hlen(name)
            largest = max([largest, *pipeline.execute()])
    return largest
