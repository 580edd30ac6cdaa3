"""Units that lie one behind the other are written with one call, and fail one by one."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import numpy as np
from tests.fakes.faulty_files import FaultyFiles, always
from tests.store.nvme_bench import opened

from octavo_server.store.nvme.bodies import (
    TOGETHER_BYTES_MAX,
    BodyToWrite,
    UnitOutcome,
    adjacent_runs,
)


def runs_of(places: list[tuple[int, int]]) -> list[list[int]]:
    units = [
        BodyToWrite(offset, length, memoryview(b""), row)
        for row, (offset, length) in enumerate(places)
    ]
    return [[unit.row for unit in run] for run in adjacent_runs(units)]


def test_runs_end_at_gaps_and_at_the_bound() -> None:
    kib = 1024
    assert runs_of([]) == []
    assert runs_of([(0, 5000), (8 * kib, 4096), (16 * kib, 1), (20 * kib, 1)]) == [[0, 1], [2, 3]]
    assert runs_of([(8 * kib, 4096), (4 * kib, 4096)]) == [[0], [1]]
    size = 320 * kib
    assert runs_of([(row * size, size) for row in range(7)]) == [[0, 1, 2], [3, 4, 5], [6]]
    assert runs_of([(0, 2 * TOGETHER_BYTES_MAX), (2 * TOGETHER_BYTES_MAX, 1)]) == [[0], [1]]


def test_adjacent_units_take_one_call_and_come_back(tmp_path: Path) -> None:
    files = FaultyFiles()

    async def run() -> None:
        async with opened(tmp_path / "nvme", files) as bench:
            before = files.calls.get("pwritev", 0)
            records, stored = await bench.put(range(20), 5000)
            assert stored.all()
            assert files.calls["pwritev"] - before < 5  # bodies in one call, and the log
            assert await bench.get(records) == [UnitOutcome.OK] * 20

    asyncio.run(run())


def test_a_short_call_goes_on_unit_by_unit(tmp_path: Path) -> None:
    files = FaultyFiles()

    async def run() -> None:
        async with opened(tmp_path / "nvme", files) as bench:
            files.short_bytes = 4096
            records, stored = await bench.put(range(8), 9000)
            files.short_bytes = None
            assert stored.all()
            assert await bench.get(records) == [UnitOutcome.OK] * 8

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
