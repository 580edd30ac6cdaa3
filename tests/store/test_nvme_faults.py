"""A device that fails: misses and clear words, never a wrong byte."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.faulty_files import Fault, FaultyFiles, always
from tests.store.nvme_bench import opened

from octavo_server.store.nvme import NO_OFFSET, NvmeStore, Room, UnitOutcome, health

OK, CORRUPT, FAILED = UnitOutcome.OK, UnitOutcome.CORRUPT, UnitOutcome.FAILED

WRITE_FAILURES = [errno.EIO, errno.ENOSPC, errno.EROFS]


@pytest.mark.parametrize("code", WRITE_FAILURES)
def test_bodies_that_fail_are_told_counted_and_not_recovered(tmp_path: Path, code: int) -> None:
    files = FaultyFiles()

    async def run() -> None:
        async with opened(tmp_path / "nvme", files, abandon=True) as bench:
            before, _ = await bench.put(range(10))
            files.faults["pwritev"] = always(code, "bodies")
            records, stored = await bench.put(range(20, 24))
            assert not stored.any()
            assert bench.store.counters.write_errors >= 4
            bench.store.free(records["offset"].astype(np.int64))
            assert await bench.get(before) == [OK] * 10
        async with opened(tmp_path / "nvme") as bench:
            recovered = bench.store.take_recovered()
            assert sorted(recovered["key"][:, 0]) == list(range(10))

    asyncio.run(run())


@pytest.mark.parametrize("code", WRITE_FAILURES)
def test_a_log_that_fails_stores_nothing_and_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(health, "RETRY_S", 0.1)
    files = FaultyFiles()

    async def run() -> None:
        async with opened(tmp_path / "nvme", files, abandon=True) as bench:
            await bench.put(range(5))
            files.faults["pwritev"] = always(code, "log-")
            records, stored = await bench.put(range(10, 13))
            assert not stored.any()
            assert bench.store.counters.log_errors == 1
            bench.store.free(records["offset"].astype(np.int64))
            files.faults.clear()
            if bench.store.room is Room.PAUSED:  # one read-only error is enough for that
                await asyncio.sleep(health.RETRY_S + 0.01)
                _, stored = await bench.put([20])
            _, stored = await bench.put(range(20, 25))
            assert stored.all()
        async with opened(tmp_path / "nvme") as bench:
            recovered = bench.store.take_recovered()
            assert sorted(recovered["key"][:, 0]) == [*range(5), *range(20, 25)]
            assert bench.store.counters.frames_damaged == bench.store.counters.frames_torn == 0
            assert await bench.get(recovered) == [OK] * 10

    asyncio.run(run())


def test_a_frame_half_written_is_cut_off_before_the_next(tmp_path: Path) -> None:
    files = FaultyFiles()

    async def run() -> None:
        async with opened(tmp_path / "nvme", files, abandon=True) as bench:
            await bench.put(range(5))
            files.short_bytes = 70
            files.faults["pwritev"] = _failing_after(2, "log-")
            assert not await bench.store.forget(bench.records(range(50, 60), 100))
            files.faults.clear()
            files.short_bytes = None
            _, stored = await bench.put(range(20, 25))
            assert stored.all()
        async with opened(tmp_path / "nvme") as bench:
            recovered = bench.store.take_recovered()
            assert sorted(recovered["key"][:, 0]) == [*range(5), *range(20, 25)]
            assert bench.store.counters.frames_damaged == bench.store.counters.frames_torn == 0

    asyncio.run(run())


def test_a_kill_with_half_a_frame_in_the_log_loses_that_frame_only(tmp_path: Path) -> None:
    files = FaultyFiles()

    async def run() -> None:
        async with opened(tmp_path / "nvme", files, abandon=True) as bench:
            await bench.put(range(5))
            files.short_bytes = 70
            files.faults["pwritev"] = _failing_after(2, "log-")
            files.faults["truncate"] = always(errno.EIO, "log-")
            assert not await bench.store.forget(bench.records(range(50, 60), 100))
        async with opened(tmp_path / "nvme") as bench:
            assert sorted(bench.store.take_recovered()["key"][:, 0]) == list(range(5))
            assert bench.store.counters.frames_torn == 1
            await bench.put([9])
        async with opened(tmp_path / "nvme") as bench:
            assert sorted(bench.store.take_recovered()["key"][:, 0]) == [*range(5), 9]
            assert bench.store.counters.frames_torn == 0

    asyncio.run(run())


def test_a_forget_that_the_log_refused_is_logged_with_the_next_append(tmp_path: Path) -> None:
    files = FaultyFiles()

    async def run() -> None:
        async with opened(tmp_path / "nvme", files, abandon=True) as bench:
            records, _ = await bench.put(range(5))
            files.faults["pwritev"] = always(errno.EIO, "log-")
            assert not await bench.remove(records[:2], deleted=True)
            files.faults.clear()
            assert await bench.store.flush()
        async with opened(tmp_path / "nvme") as bench:
            assert sorted(bench.store.take_recovered()["key"][:, 0]) == [2, 3, 4]

    asyncio.run(run())


def test_short_writes_are_continued(tmp_path: Path) -> None:
    files = FaultyFiles()

    async def run() -> None:
        async with opened(tmp_path / "nvme", files) as bench:
            files.short_bytes = 1000
            records, stored = await bench.put(range(5), 20_000)
            assert stored.all()
            assert await bench.get(records) == [OK] * 5
        async with opened(tmp_path / "nvme") as bench:
            assert await bench.get(bench.store.take_recovered()) == [OK] * 5

    asyncio.run(run())


def test_writes_pause_after_errors_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "RETRY_S", 0.2)
    files = FaultyFiles()

    async def run() -> None:
        async with opened(tmp_path / "nvme", files) as bench:
            store = bench.store
            files.faults["pwritev"] = always(errno.EIO, "bodies")
            records, stored = await bench.put(range(health.WRITE_ERRORS_MAX))
            assert not stored.any()
            store.free(records["offset"].astype(np.int64))
            assert _room(store) is Room.PAUSED
            assert "paused" in store.problems()[0]
            assert store.allocate(np.array([5000], dtype=np.uint32)).tolist() == [NO_OFFSET]
            await asyncio.sleep(0.25)
            errors = store.counters.write_errors
            records, stored = await bench.put([1, 2, 3])  # let through as a probe, and fail
            assert store.counters.write_errors == errors + 3
            store.free(records["offset"].astype(np.int64))
            assert store.allocate(np.array([5000], dtype=np.uint32)).tolist() == [NO_OFFSET]
            files.faults.clear()
            await asyncio.sleep(0.25)
            _, stored = await bench.put([1, 2, 3])
            assert stored.all()
            assert _room(store) is Room.AVAILABLE
            assert not store.problems()
            _, stored = await bench.put([4, 5, 6])
            assert stored.all()

    asyncio.run(run())


def test_failed_reads_are_failed_counted_and_shown(tmp_path: Path) -> None:
    files = FaultyFiles()

    async def run() -> None:
        async with opened(tmp_path / "nvme", files) as bench:
            records, _ = await bench.put(range(health.READ_ERRORS_MAX))
            files.faults["preadv"] = always(errno.EIO, "bodies")
            assert set(await bench.get(records)) == {FAILED}
            assert bench.store.counters.read_errors == len(records)
            assert "reads" in bench.store.problems()[0]
            files.faults.clear()
            assert set(await bench.get(records)) == {OK}
            assert not bench.store.problems()

    asyncio.run(run())


def test_a_flipped_bit_in_a_body_is_a_corrupt_unit(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path / "nvme") as bench:
            records, _ = await bench.put(range(8), 10_000)
        for row, bit in enumerate(np.random.default_rng(5).integers(0, 80_000, 4).tolist()):
            _flip(tmp_path / "nvme" / "bodies.dat", int(records["offset"][row]) * 8 + bit)
        async with opened(tmp_path / "nvme") as bench:
            assert await bench.get(records) == [CORRUPT] * 4 + [OK] * 4
            assert bench.store.counters.corrupt_units == 4

    asyncio.run(run())


def test_a_unit_that_lies_in_another_units_place_is_corrupt(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path / "nvme") as bench:
            records, _ = await bench.put([1, 2])
            records["offset"] = records["offset"][::-1].copy()
            assert await bench.get(records) == [CORRUPT, CORRUPT]

    asyncio.run(run())


def test_a_flipped_bit_in_the_log_costs_its_frame_and_is_told(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path / "nvme") as bench:
            for seed in range(10):
                await bench.put([seed])
        log = tmp_path / "nvme" / "log-1.oct"
        _flip(log, 8 * (4 * (48 + 96) + 77))
        async with opened(tmp_path / "nvme") as bench:
            recovered = bench.store.take_recovered()
            assert sorted(recovered["key"][:, 0]) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
            assert bench.store.counters.frames_damaged == 1
            assert bench.store.counters.records_lost == 1
            assert "damaged" in bench.store.warnings()[0]
            assert await bench.get(recovered) == [OK] * 9
        async with opened(tmp_path / "nvme") as bench:
            assert len(bench.store.take_recovered()) == 9
            assert bench.store.counters.frames_damaged == 0

    asyncio.run(run())


def test_a_cut_bodies_file_loses_what_lay_behind_the_cut(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path / "nvme") as bench:
            records, _ = await bench.put(range(20), 100_000)
        cut = int(records["offset"][10])
        os.truncate(tmp_path / "nvme" / "bodies.dat", cut)
        async with opened(tmp_path / "nvme") as bench:
            recovered = bench.store.take_recovered()
            assert set(recovered["offset"]) == {o for o in records["offset"] if o < cut}
            assert set(await bench.get(recovered)) == {OK}
            os.truncate(tmp_path / "nvme" / "bodies.dat", 0)  # while it is in use
            assert set(await bench.get(recovered)) == {CORRUPT}

    asyncio.run(run())


@pytest.mark.parametrize("name", ["log-1.oct", "snapshot-9.oct", "log-9.oct"])
def test_a_foreign_file_in_the_place_of_ours_is_no_source_of_units(
    tmp_path: Path, name: str
) -> None:
    async def run() -> None:
        async with opened(tmp_path / "other") as bench:
            await bench.put(range(100, 105))
        async with opened(tmp_path / "nvme") as bench:
            await bench.put(range(5))
        foreign = (tmp_path / "other" / "log-1.oct").read_bytes()
        (tmp_path / "nvme" / name).write_bytes(foreign)
        async with opened(tmp_path / "nvme") as bench:
            recovered = bench.store.take_recovered()
            assert set(recovered["key"][:, 0]) <= set(range(5))
            assert set(await bench.get(recovered)) <= {OK}
            _, stored = await bench.put([50])
            assert stored.all()
        async with opened(tmp_path / "nvme") as bench:
            assert 50 in bench.store.take_recovered()["key"][:, 0]

    asyncio.run(run())


@pytest.mark.parametrize("refusal", ["refuse_direct_open", "refuse_direct_io"])
def test_without_direct_io_the_store_works_and_warns(tmp_path: Path, refusal: str) -> None:
    files = FaultyFiles()
    setattr(files, refusal, True)

    async def run() -> None:
        async with opened(tmp_path / "nvme", files) as bench:
            records, stored = await bench.put(range(5))
            assert stored.all()
            assert await bench.get(records) == [OK] * 5
            assert "O_DIRECT" in bench.store.warnings()[0]
            assert not bench.store.problems()
        async with opened(tmp_path / "nvme") as bench:
            assert await bench.get(bench.store.take_recovered()) == [OK] * 5
            assert not bench.store.warnings()

    asyncio.run(run())


def test_direct_io_refused_later_goes_through_the_page_cache(tmp_path: Path) -> None:
    files = FaultyFiles()

    async def run() -> None:
        async with opened(tmp_path / "nvme", files) as bench:
            files.refuse_direct_io = True
            records, stored = await bench.put(range(5))
            assert stored.all()
            assert await bench.get(records) == [OK] * 5
            await bench.put([9])
            assert bench.store.counters.direct_refused > 0

    asyncio.run(run())


def test_the_free_space_guard_stops_writes_before_the_disk_is_full(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path / "nvme", guard_bytes=2**60) as bench:
            assert bench.store.allocate(np.array([5000], dtype=np.uint32)).tolist() == [NO_OFFSET]
            assert bench.store.room is Room.GUARDED
            assert "nearly full" in bench.store.warnings()[-1]

    asyncio.run(run())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(place)], check=False
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_fills_up_keeps_what_it_has(small_disk: Path) -> None:
    async def run() -> None:
        async with opened(small_disk / "nvme", abandon=True) as bench:
            stored_seeds: list[int] = []
            (small_disk / "filler").write_bytes(bytes(2_500_000))  # faster than the next look
            for seed in range(0, 80, 4):
                records, stored = await bench.put(range(seed, seed + 4), 100_000)
                stored_seeds += records["key"][stored, 0].tolist()
                failed = records["offset"].astype(np.int64)[~stored]
                bench.store.free(failed[failed != NO_OFFSET])
            assert 5 <= len(stored_seeds) < 20
            assert bench.store.counters.write_errors > 0
            assert bench.store.problems()
        async with opened(small_disk / "nvme") as bench:
            recovered = bench.store.take_recovered()
            assert sorted(recovered["key"][:, 0]) == stored_seeds
            assert set(await bench.get(recovered)) == {OK}

    asyncio.run(run())


def _room(store: NvmeStore) -> Room:
    return store.room  # a property that changes, which type checkers do not expect


def _failing_after(allowed: int, name_contains: str) -> Fault:
    seen = 0

    def fault(name: str) -> int | None:
        nonlocal seen
        if name_contains not in name:
            return None
        seen += 1
        return errno.ENOSPC if seen > allowed else None

    return fault


def _flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
