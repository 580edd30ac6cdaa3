"""Many pages: what each costs in memory, and how long the node stands still for them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.cache.invariants import check_table
from tests.cache.world import KIB, MIB, ONE, World, chain_of

from octavo_server.cache.page_table import PageTable
from octavo_server.eviction.lru import Lru
from octavo_server.store.nvme.records import RECORD, Kind, Records

OVERHEAD_MAX_BYTES = 300

# In a process of its own: what others allocated and freed before would hide the growth.
MEASURE = """
import numpy as np
from octavo_server.cache.page_table import PageTable
from octavo_server.eviction.lru import Lru

def anonymous_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

table = PageTable()
policy = Lru(table)
random = np.random.default_rng(1)
count, step = 200_000, 64
before = anonymous_bytes()
for first in range(0, count, step):
    keys = random.integers(0, 2**64, (step, 2), dtype=np.uint64)
    rows = table.add(keys, 1, 1, 1, np.arange(step, dtype=np.uint32))
    table.link(rows[1:], rows[:-1])
    units = table.units
    units.memory_offset[units_of := table.unit_base[rows]] = rows
    units.length[units_of] = 4096
    table.set_memory_mask(rows, table.full_mask[rows])
    policy.touch(rows)
print((anonymous_bytes() - before) / count)
"""


def test_a_page_costs_little_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=60, check=True
    )
    per_page = float(done.stdout)
    assert 50 < per_page <= OVERHEAD_MAX_BYTES


def records_of_chains(chain_count: int, pages: int) -> Records:
    """As the log of a store has them after ``chain_count`` chains were put one by one."""
    count = chain_count * pages
    random = np.random.default_rng(7)
    records = np.zeros(count, dtype=RECORD)
    records["kind"] = Kind.PUT
    records["unit_count"] = 1
    records["variant"] = 1
    records["layout"] = 1
    records["namespace"] = 1
    records["position"] = np.tile(np.arange(pages), chain_count)
    records["key"] = random.integers(1, 2**63, (count, 2), dtype=np.uint64)
    parents = np.roll(records["key"], 1, axis=0)
    parents[records["position"] == 0] = 0
    records["parent"] = parents
    records["offset"] = np.arange(count) * 4096
    records["length"] = 4096
    records["sequence"] = np.arange(count) + 1
    return records


def test_recovering_100000_pages_links_them_and_keeps_the_order_of_use(tmp_path: Path) -> None:
    async def run() -> None:
        chains, pages = 1000, 100
        async with World(tmp_path / "nvme", nvme_bytes=512 * MIB, slab_bytes=MIB) as world:
            await world.session(ONE)  # layout 1 of namespace 1
            records = records_of_chains(chains, pages)
            assert world.store is not None
            assert len(world.store.allocate(records["length"].copy())) == len(records)
            shuffled = records[np.random.default_rng(3).permutation(len(records))]
            shuffled = shuffled[np.argsort(shuffled["sequence"] // 64, kind="stable")]
            from octavo_server.cache.recovering import recover_pages

            begin = time.perf_counter()
            recover_pages(world.cache, shuffled)
            took_s = time.perf_counter() - begin
            table = world.cache.table
            check_table(table)
            rows = table.find(records["key"], 1).reshape(chains, pages)
            assert (rows >= 0).all()
            assert (table.parent[rows[:, 1:]] == rows[:, :-1]).all()
            assert (table.parent[rows[:, 0]] == -1).all()
            touched = table.touched[rows]
            assert (touched[:, :-1] > touched[:, 1:]).all(), "a head would go before its tail"
            assert (touched[:-1, 0] < touched[1:, -1]).all(), "older chains must go first"
            assert world.cache.counters["recovered_pages"] == chains * pages
            assert took_s < 3.0  # about 0.15 s

    asyncio.run(run())


def test_a_deep_chain_in_a_slab_that_is_needed_costs_no_step_per_page() -> None:
    """Taking the head's slab takes the whole chain along, 8,000 pages deep."""

    async def run() -> None:
        async with World(None, memory_bytes=40 * MIB, slab_bytes=64 * KIB) as world:
            session = await world.session()
            for end in (4000, 8000):
                numbers = range(end - 4000, end)
                parent = None if end == 4000 else 3999
                await world.put(session, chain_of(session, numbers, parent=parent), numbers)
            filler = range(20_000, 22_240)
            await world.put(session, chain_of(session, filler), filler)
            assert world.arena.slots.unassigned_bytes == 0
            loop = asyncio.get_running_loop()
            begin = loop.time()
            reservation, statuses = world.reserve(
                session, chain_of(session, [99_999]), length=64 * KIB
            )
            took_s = loop.time() - begin
            assert reservation is not None
            assert statuses.shape == (1, 1)
            assert took_s < 0.3  # a few ms; a scan for each page took seconds

    asyncio.run(run())


@pytest.mark.long
def test_match_of_8192_pages_among_a_million_is_quick() -> None:
    table = PageTable()
    policy = Lru(table)
    random = np.random.default_rng(5)
    keys = random.integers(0, 2**64, (1_000_000, 2), dtype=np.uint64)
    for first in range(0, len(keys), 8192):
        part = keys[first : first + 8192]
        rows = table.add(part, 1, 1, 1, np.arange(len(part), dtype=np.uint32))
        policy.touch(rows)
    begin = time.perf_counter()
    for turn in range(20):
        first = turn * 40_000
        assert (table.find(keys[first : first + 8192], 1) >= 0).all()
    assert (time.perf_counter() - begin) / 20 < 0.02 * (1 + os.getloadavg()[0])
