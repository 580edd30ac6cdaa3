"""A store on a sound device: what goes in comes out, also after a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tests.store.nvme_bench import CAPACITY_BYTES, LAYOUT, SLAB_BYTES, eventually, get, opened

from octavo_proto.layout import Layout
from octavo_server.store.nvme import NO_OFFSET, UnitOutcome, upkeep
from octavo_server.store.nvme.records import BODY_ALIGN_BYTES

OK = UnitOutcome.OK


def test_units_come_back_as_they_were_put(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path / "nvme") as bench:
            for length in (1, 4096, 5000, 320 << 10):
                records, stored = await bench.put(range(10), length)
                assert stored.all()
                assert await bench.get(records) == [OK] * 10
                await bench.remove(records)
            assert bench.store.used_bytes == bench.store.unit_count == 0
            assert bench.store.counters.corrupt_units == 0
            assert not bench.store.problems()

    asyncio.run(run())


@pytest.mark.parametrize("killed", [False, True])
def test_a_restart_is_warm_and_its_usage_exact(tmp_path: Path, killed: bool) -> None:
    async def run() -> None:
        async with opened(tmp_path / "nvme", abandon=killed) as bench:
            small, _ = await bench.put(range(50), 5000)
            large, _ = await bench.put(range(100, 110), 100_000)
            await bench.remove(small[::2])
            used_bytes, unit_count = bench.store.used_bytes, bench.store.unit_count
        async with opened(tmp_path / "nvme") as bench:
            recovered = bench.store.take_recovered()
            kept = np.concatenate([small[1::2], large])
            assert sorted(recovered["key"][:, 0]) == sorted(kept["key"][:, 0])
            assert (bench.store.used_bytes, bench.store.unit_count) == (used_bytes, unit_count)
            assert await bench.get(recovered) == [OK] * len(kept)
            assert len(bench.store.take_recovered()) == 0
            more, stored = await bench.put(range(200, 225), 5000)
            assert stored.all()
            assert not set(more["offset"]) & set(kept["offset"])
            assert await bench.get(kept) == [OK] * len(kept)

    asyncio.run(run())


def test_no_room_is_answered_unit_by_unit_at_the_capacity(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path / "nvme") as bench:
            slots = CAPACITY_BYTES // (64 << 10)
            lengths = np.full(slots + 3, 64 << 10, dtype=np.uint32)
            offsets = bench.store.allocate(lengths)
            assert (offsets[:slots] != NO_OFFSET).all()
            assert (offsets[slots:] == NO_OFFSET).all()
            assert bench.store.used_bytes == bench.store.capacity_bytes == CAPACITY_BYTES
            bench.store.free(offsets[:slots])
            assert bench.store.used_bytes == 0

    asyncio.run(run())


def test_a_unit_written_again_lives_at_its_last_place(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path / "nvme", abandon=True) as bench:
            first, _ = await bench.put([7])
            second, _ = await bench.put([7])
            await bench.remove(first)
        async with opened(tmp_path / "nvme") as bench:
            recovered = bench.store.take_recovered()
            assert recovered["offset"].tolist() == second["offset"].tolist()

    asyncio.run(run())


def test_deleted_units_stay_away_wherever_they_lie(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path / "nvme", abandon=True) as bench:
            first, _ = await bench.put([7])
            await bench.put([7, 8])
            assert await bench.store.forget(first, deleted=True)
        async with opened(tmp_path / "nvme") as bench:
            assert bench.store.take_recovered()["key"][:, 0].tolist() == [8]

    asyncio.run(run())


def test_numbers_of_namespaces_and_layouts_are_durable_and_never_used_again(tmp_path: Path) -> None:
    other = Layout(name="other", model="m2", layers=2, kv_heads=1, head_dim=8)

    async def run() -> None:
        async with opened(tmp_path / "nvme", abandon=True) as bench:
            store = bench.store
            namespace = await store.register_namespace("second")
            assert await store.register_namespace("second") == namespace != bench.namespace
            number = await store.register_layout(namespace, other)
            assert await store.register_layout(namespace, other) == number
            elsewhere = await store.register_layout(bench.namespace, other)
            assert len({number, elsewhere, bench.layout}) == 3
            await store.drop_layout(elsewhere)
        async with opened(tmp_path / "nvme") as bench:
            store = bench.store
            assert store.namespaces == {bench.namespace: "tests", namespace: "second"}
            assert store.layouts == {bench.layout: LAYOUT, number: other}
            assert store.registry.layout_namespaces[number] == namespace
            assert await store.register_layout(bench.namespace, other) > elsewhere

    asyncio.run(run())


def test_units_of_a_dropped_layout_do_not_come_back(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path / "nvme", abandon=True) as bench:
            await bench.put(range(10))
            await bench.store.drop_layout(bench.layout)
        for dropped in (10, 0):  # the second time, not even a record is left of them
            async with opened(tmp_path / "nvme") as bench:
                assert len(bench.store.take_recovered()) == bench.store.used_bytes == 0
                assert bench.store.counters.records_dropped == dropped

    asyncio.run(run())


def test_a_smaller_capacity_drops_what_lies_beyond_it_for_good(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path / "nvme") as bench:
            records, stored = await bench.put(range(40), 200_000)
            assert stored.all()
        async with opened(tmp_path / "nvme", capacity_bytes=2 * SLAB_BYTES) as bench:
            kept = bench.store.take_recovered()
            assert set(kept["offset"]) == {o for o in records["offset"] if o < 2 * SLAB_BYTES}
            assert await bench.get(kept) == [OK] * len(kept)
            assert (tmp_path / "nvme" / "bodies.dat").stat().st_size == 2 * SLAB_BYTES
        async with opened(tmp_path / "nvme") as bench:
            assert len(bench.store.take_recovered()) == len(kept)

    asyncio.run(run())


@pytest.mark.parametrize("slab_bytes", [SLAB_BYTES // 2, SLAB_BYTES // 64, 3 * SLAB_BYTES])
def test_a_store_keeps_the_slabs_it_was_made_with(tmp_path: Path, slab_bytes: int) -> None:
    """The slabs follow from settings that change, and its units lie where they lie."""

    async def run() -> None:
        async with opened(tmp_path / "nvme") as bench:
            await bench.put(range(100), 5000)
            await bench.put(range(200, 220), 60_000)
        async with opened(tmp_path / "nvme", slab_bytes=slab_bytes) as bench:
            kept = bench.store.take_recovered()
            assert len(kept) == 120
            assert bench.store.slots.slab_bytes == SLAB_BYTES
            padded = -(-kept["length"].astype(np.int64) // BODY_ALIGN_BYTES) * BODY_ALIGN_BYTES
            assert bench.store.used_bytes == padded.sum()
            assert await bench.get(kept) == [OK] * len(kept)

    asyncio.run(run())


def test_the_log_is_compacted_and_nothing_is_lost_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "COMPACTION_RECORDS_MIN", 200)

    async def run() -> None:
        async with opened(tmp_path / "nvme") as bench:
            kept, _ = await bench.put(range(1000, 1020))
            for _ in range(40):
                records, _ = await bench.put(range(10))
                await bench.remove(records)
            await eventually(lambda: bench.store.counters.compactions > 0)
            assert bench.store.counters.compaction_errors == 0
        names = [path.name for path in (tmp_path / "nvme").iterdir()]
        assert len([name for name in names if name.startswith("snapshot-")]) == 1
        assert sum(p.stat().st_size for p in (tmp_path / "nvme").glob("log-*")) < 800 * 96
        async with opened(tmp_path / "nvme") as bench:
            recovered = bench.store.take_recovered()
            assert sorted(recovered["offset"]) == sorted(kept["offset"])
            assert await bench.get(recovered) == [OK] * 20

    asyncio.run(run())


def test_many_writers_share_the_log(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path / "nvme", abandon=True) as bench:
            results = await asyncio.gather(*(bench.put([seed], 100) for seed in range(200)))
            assert all(stored.all() for _, stored in results)
            assert await bench.store.flush()
        async with opened(tmp_path / "nvme") as bench:
            recovered = bench.store.take_recovered()
            assert sorted(recovered["key"][:, 0]) == list(range(200))
            sequences = recovered["sequence"]
            assert len(set(sequences)) == 200
            assert await get(bench.store, recovered) == [OK] * 200

    asyncio.run(run())


def test_a_cancelled_write_lets_go_of_its_memory_before_it_raises(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path / "nvme") as bench:
            task = asyncio.create_task(bench.put(range(20), 300_000))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert bench.store.counters.units_written == 20

    asyncio.run(run())
