"""A process that puts and forgets units, tells of it line by line, and waits to be killed.

Lines: ``p SEED`` once a unit is stored, ``F SEED`` before it is forgotten, ``f SEED`` after.
A unit is put once in all rounds, so that a line about it has one meaning.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
from tests.store.nvme_bench import Bench, opened

from octavo_server.store.nvme import upkeep
from octavo_server.store.nvme.records import Records

LENGTHS = (300, 5000, 40_000)
CAPACITY_BYTES = 128 << 20
KEPT_UNITS = 100
"""Of earlier rounds: the store must not fill up."""


async def main(directory: Path, first_seed: int) -> None:
    setattr(upkeep, "COMPACTION_RECORDS_MIN", 60)  # noqa: B010 - compact all the time
    async with opened(directory, capacity_bytes=CAPACITY_BYTES) as bench:
        old = bench.store.take_recovered()[:-KEPT_UNITS]
        await _remove(bench, old, deleted=False)
        await asyncio.gather(*(_writer(row, bench, first_seed) for row in range(len(LENGTHS))))


async def _writer(row: int, bench: Bench, first_seed: int) -> None:
    rng = np.random.default_rng(first_seed + row)
    seed = first_seed + row * 100_000
    while True:
        seeds = range(seed, seed + int(rng.integers(1, 8)))
        seed = seeds[-1] + 1
        records, stored = await bench.put(seeds, LENGTHS[row])
        assert stored.all()
        _tell("p", seeds)
        going = records[rng.random(len(records)) < 0.8]
        await _remove(bench, going, deleted=bool(rng.random() < 0.1))


async def _remove(bench: Bench, records: Records, *, deleted: bool) -> None:
    seeds = records["key"][:, 0].tolist()
    _tell("F", seeds)
    assert await bench.remove(records, deleted=deleted)
    _tell("f", seeds)


def _tell(what: str, seeds: range | list[int]) -> None:
    sys.stdout.write("".join(f"{what} {seed}\n" for seed in seeds))
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
