"""A store whose process ends at any moment: what was acknowledged is there, and nothing wrong."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.faulty_files import FaultyFiles, always
from tests.store.kill_writer import CAPACITY_BYTES
from tests.store.nvme_bench import Bench, eventually, opened

from octavo_server.store.file_ops import FileOps
from octavo_server.store.nvme import RECORD, UnitOutcome, upkeep
from octavo_server.store.nvme.compaction import write_snapshot
from octavo_server.store.nvme.records import store_seed
from octavo_server.store.nvme.replay import LogEnd

ROOT = Path(__file__).parents[2]
KILL_ROUNDS = 4
KILL_ROUNDS_LONG = 25
RUN_S_MAX = 0.8

CRASH_POINTS = [
    ("open", "log-2"),  # the log was not switched yet
    ("open", "snapshot-2"),
    ("pwritev", "snapshot-2"),
    ("fdatasync", "snapshot-2"),
    ("rename", "snapshot-2"),
    ("unlink", "log-1"),
]


@pytest.mark.parametrize(("call", "name"), CRASH_POINTS)
def test_a_crash_during_compaction_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, name: str
) -> None:
    monkeypatch.setattr(upkeep, "COMPACTION_RECORDS_MIN", 100)
    files = FaultyFiles()

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(_ignored)
        async with opened(tmp_path / "nvme", files, abandon=True) as bench:
            kept, _ = await bench.put(range(1000, 1010))
            files.crash_at = (call, name)
            survivors = [kept]
            for seed in range(60):
                records, stored = await bench.put([seed * 10, seed * 10 + 1])
                if stored.all() and await bench.remove(records[:1]):
                    records = records[1:]
                if stored.all():
                    survivors.append(records)
                await asyncio.sleep(0.002)
            assert files.crashed
            # What a kill does not do: cut the log while its descriptors are closed.
            files.crashed, files.crash_at = False, None
            files.faults["truncate"] = always(errno.EIO)
        expected = np.concatenate(survivors)
        for _ in range(2):
            async with opened(tmp_path / "nvme") as bench:
                recovered = bench.store.take_recovered()
                assert sorted(recovered["key"][:, 0]) == sorted(expected["key"][:, 0])
                assert set(await bench.get(recovered)) == {UnitOutcome.OK}
                assert not list((tmp_path / "nvme").glob("*.tmp"))
                assert bench.store.counters.frames_damaged == 0
                assert bench.store.counters.records_lost == 0

    asyncio.run(run())


def test_a_failed_compaction_is_told_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "COMPACTION_RECORDS_MIN", 100)
    files = FaultyFiles()
    files.faults["rename"] = always(errno.ENOSPC, "snapshot")

    async def run() -> None:
        async with opened(tmp_path / "nvme", files, abandon=True) as bench:
            kept, _ = await bench.put(range(1000, 1010))
            for _ in range(60):
                records, _ = await bench.put([1, 2])
                await bench.remove(records)
            await eventually(lambda: bench.store.counters.compaction_errors > 0)
            assert "compacted" in bench.store.problems()[0]
        async with opened(tmp_path / "nvme") as bench:
            recovered = bench.store.take_recovered()
            assert sorted(recovered["key"][:, 0]) == sorted(kept["key"][:, 0])

    asyncio.run(run())


def _ignored(_loop: asyncio.AbstractEventLoop, _context: dict[str, Any]) -> None:
    """The crash ends a task that nobody waits for."""


def _kill_rounds(directory: Path, rounds: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    present: set[int] = set()
    maybe: set[int] = set()
    gone: set[int] = set()
    for number in range(rounds):
        writer = subprocess.Popen(
            [sys.executable, "-m", "tests.store.kill_writer", directory, str(number * 10**6)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        first = writer.stdout.readline()
        assert first, "the writer did not start"
        time.sleep(float(rng.uniform(0, RUN_S_MAX)))
        writer.kill()
        lines = [first, *writer.stdout]
        writer.wait(10)
        for line in lines:
            if not line.endswith("\n"):  # torn by the kill
                continue
            what, unit = line[0], int(line[2:])
            if what == "p":
                present.add(unit)
            elif what == "F":
                present.discard(unit)
                maybe.add(unit)
            else:
                maybe.discard(unit)
                gone.add(unit)
        asyncio.run(_check(directory, present, gone, f"round {number} of seed {seed}"))


async def _check(directory: Path, present: set[int], gone: set[int], where: str) -> None:
    async with opened(directory, abandon=True, capacity_bytes=CAPACITY_BYTES) as bench:
        recovered = bench.store.take_recovered()
        live = set(recovered["key"][:, 0].tolist())
        assert present <= live, f"{where}: stored units are missing: {sorted(present - live)[:5]}"
        assert not gone & live, f"{where}: forgotten units are back: {sorted(gone & live)[:5]}"
        outcomes = set(await bench.get(recovered))
        assert outcomes <= {UnitOutcome.OK}, f"{where}: {outcomes}"
        counters = bench.store.counters
        assert counters.frames_damaged == counters.records_lost == 0, where


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    _kill_rounds(tmp_path / "nvme", KILL_ROUNDS, seed=1)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_kill_9_over_and_over_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    _kill_rounds(tmp_path / "nvme", KILL_ROUNDS_LONG, seed=2)


@pytest.mark.long
def test_a_million_units_are_recovered_within_five_seconds(tmp_path: Path) -> None:
    count = 1_000_000
    directory = tmp_path / "nvme"

    def large() -> AbstractAsyncContextManager[Bench]:
        return opened(directory, capacity_bytes=5 << 30, slab_bytes=64 << 20)

    async def run() -> float:
        async with large() as bench:
            records = np.zeros(count, dtype=RECORD)
            records["kind"] = 1
            records["layout"] = bench.layout
            records["namespace"] = bench.namespace
            records["key"] = np.random.default_rng(1).integers(1, 2**63, (count, 2))
            records["offset"] = np.arange(count) * 4096
            records["length"] = 4000
            records["unit_count"] = 1
            seed, end = store_seed(bench.store.store_id), LogEnd(count + 1, 0)
        write_snapshot(directory, 1, records, end, seed=seed, files=FileOps())
        (directory / "log-1.oct").unlink(missing_ok=True)
        begun = time.monotonic()
        async with large() as bench:
            took_s = time.monotonic() - begun
            assert bench.store.unit_count == count
            assert len(bench.store.take_recovered()) == count
        return took_s

    assert asyncio.run(run()) < 5
