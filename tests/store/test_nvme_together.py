"""Units that lie one behind the other are moved with one call, and fail one by one."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import numpy as np
from tests.fakes.faulty_files import FaultyFiles, always
from tests.store.nvme_bench import get, opened

from octavo_server.store.nvme.records import BODY_ALIGN_BYTES
from octavo_server.store.nvme.transfers import (
    TOGETHER_BYTES_MAX,
    BodyToRead,
    BodyToWrite,
    UnitOutcome,
    adjacent_runs,
    runs_to_read,
)

OK, CORRUPT, FAILED = UnitOutcome.OK, UnitOutcome.CORRUPT, UnitOutcome.FAILED
KIB = 1024


def runs_of(places: list[tuple[int, int]]) -> list[list[int]]:
    units = [
        BodyToWrite(offset, length, memoryview(b""), row)
        for row, (offset, length) in enumerate(places)
    ]
    return [[unit.row for unit in run] for run in adjacent_runs(units)]


def test_runs_end_at_gaps_and_at_the_bound() -> None:
    assert runs_of([]) == []
    assert runs_of([(0, 5000), (8 * KIB, 4096), (16 * KIB, 1), (20 * KIB, 1)]) == [[0, 1], [2, 3]]
    assert runs_of([(8 * KIB, 4096), (4 * KIB, 4096)]) == [[0], [1]]
    size = 320 * KIB
    assert runs_of([(row * size, size) for row in range(7)]) == [[0, 1, 2], [3, 4, 5], [6]]
    assert runs_of([(0, 2 * TOGETHER_BYTES_MAX), (2 * TOGETHER_BYTES_MAX, 1)]) == [[0], [1]]


def reads_of(places: list[tuple[int, int]], idle_depth: int) -> list[list[int]]:
    units = [
        BodyToRead(offset=offset, length=length, view=memoryview(b""), seed=0, digest=0, tag=offset)
        for offset, length in places
    ]
    return [[unit.offset for unit in run] for run in runs_to_read(units, idle_depth)]


def test_reads_are_merged_only_beyond_the_depth_that_is_idle() -> None:
    size = 64 * KIB
    places = [(row * size, size) for row in range(32)]
    assert [len(run) for run in reads_of(places, 0)] == [16, 16]
    assert [len(run) for run in reads_of(places, 4)] == [8] * 4
    assert [len(run) for run in reads_of(places, 16)] == [2] * 16
    assert [len(run) for run in reads_of(places, 32)] == [1] * 32
    assert [len(run) for run in reads_of(places, 1000)] == [1] * 32
    assert reads_of([], 4) == []


def test_a_chain_that_lies_backwards_is_merged_and_its_head_comes_first() -> None:
    size = 320 * KIB
    places = [(row * size, size) for row in reversed(range(7))] + [(100 * size, size)]
    runs = [[offset // size for offset in run] for run in reads_of(places, 0)]
    assert runs == [[6], [3, 4, 5], [0, 1, 2], [100]]


def test_a_merged_read_has_no_more_buffers_than_a_call_takes() -> None:
    places = [(row * BODY_ALIGN_BYTES, 1) for row in range(3000)]
    longest = max(len(run) for run in reads_of(places, 0))
    assert longest == TOGETHER_BYTES_MAX // BODY_ALIGN_BYTES <= os.sysconf("SC_IOV_MAX")


def test_adjacent_units_take_one_call_and_come_back(tmp_path: Path) -> None:
    files = FaultyFiles()

    async def run() -> None:
        async with opened(tmp_path / "nvme", files) as bench:
            before = files.calls.get("pwritev", 0)
            records, stored = await bench.put(range(20), 5000)
            assert stored.all()
            assert files.calls["pwritev"] - before < 5  # bodies in one call, and the log
            assert await bench.get(records) == [OK] * 20

    asyncio.run(run())


def test_a_short_call_goes_on_unit_by_unit(tmp_path: Path) -> None:
    files = FaultyFiles()

    async def run() -> None:
        async with opened(tmp_path / "nvme", files) as bench:
            files.short_bytes = 4096
            records, stored = await bench.put(range(8), 9000)
            files.short_bytes = None
            assert stored.all()
            assert await bench.get(records) == [OK] * 8

    asyncio.run(run())


def test_a_failing_call_fails_each_unit_and_counts_each(tmp_path: Path) -> None:
    files = FaultyFiles()

    async def run() -> None:
        async with opened(tmp_path / "nvme", files) as bench:
            files.faults["pwritev"] = always(errno.EIO, "bodies.dat")
            _, stored = await bench.put(range(4), 5000)
            assert not np.any(stored)
            assert bench.store.counters.write_errors == 4

    asyncio.run(run())


def test_many_adjacent_units_are_read_with_few_calls(tmp_path: Path) -> None:
    files = FaultyFiles()

    async def run() -> None:
        async with opened(tmp_path / "nvme", files) as bench:
            records, _ = await bench.put(range(80), 5000)
            before = files.calls["preadv"]
            assert await bench.get(records) == [OK] * 80
            assert files.calls["preadv"] - before <= 6  # a depth of 4, and what slabs leave over
            assert bench.store.counters.units_read == 80
            assert bench.store.counters.bytes_read == 80 * 8192

    asyncio.run(run())


def test_a_bad_block_costs_its_unit_and_no_other(tmp_path: Path) -> None:
    files = FaultyFiles()

    async def run() -> None:
        async with opened(tmp_path / "nvme", files) as bench:
            records, _ = await bench.put(range(40), 9000)
            files.bad_offsets = {int(records["offset"][7]) + 4096, int(records["offset"][23])}
            expected = [FAILED if row in (7, 23) else OK for row in range(40)]
            assert await bench.get(records) == expected
            assert bench.store.counters.read_errors == 2
            assert bench.store.counters.units_read == 38
            assert not bench.store.problems()

    asyncio.run(run())


def test_a_flipped_bit_spoils_its_unit_in_a_merged_read_and_no_other(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path / "nvme") as bench:
            records, _ = await bench.put(range(40), 9000)
            records["digest"][11] ^= 1 << 17
            assert await bench.get(records) == [CORRUPT if row == 11 else OK for row in range(40)]
            assert bench.store.counters.corrupt_units == 1
            assert bench.store.counters.read_errors == 0

    asyncio.run(run())


def test_a_short_merged_read_goes_on_unit_by_unit(tmp_path: Path) -> None:
    files = FaultyFiles()

    async def run() -> None:
        async with opened(tmp_path / "nvme", files) as bench:
            records, _ = await bench.put(range(40), 9000)
            files.short_read_bytes = 4096
            assert await bench.get(records) == [OK] * 40
            assert bench.store.counters.read_errors == 0

    asyncio.run(run())


def test_a_merged_read_across_the_end_of_a_cut_file_keeps_what_is_left(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path / "nvme") as bench:
            records, _ = await bench.put(range(40), 9000)
            os.truncate(tmp_path / "nvme" / "bodies.dat", int(records["offset"][26]) + 4096)
            assert await bench.get(records) == [OK] * 26 + [CORRUPT] * 14

    asyncio.run(run())


def test_units_of_unlike_sizes_and_in_any_order_come_back(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path / "nvme") as bench:
            small, _ = await bench.put(range(30), 4096)
            large, _ = await bench.put(range(100, 130), 70_000)
            records = np.concatenate([small, large])
            records = records[np.random.default_rng(3).permutation(len(records))]
            assert await get(bench.store, records) == [OK] * 60

    asyncio.run(run())
