"""``octavo bench nvme``: the NVMe tier beside plain O_DIRECT I/O, and a restart with much in it.

Four chains of 640 units of 320 KiB lie on NVMe, and memory has room for two: getting them in
turn reads each from the device and evicts the one that was used longest ago. The plain I/O
moves the same bytes in pieces of the same size, with as many threads as the node uses, through
O_DIRECT; both sides overwrite blocks that exist, and writes count when they were synced. All is
taken alternately, and ratios are medians over the rounds. Got bytes are compared with what was
put.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from octavo.bench.direct_io import DirectFile
from octavo.bench.local import LAYOUT, TOTAL_BYTES, UNIT_BYTES, UNITS, BenchmarkError
from octavo.bench.measuring import median, progress, seconds
from octavo.bench.recovery import recover_seconds
from octavo.chain import Chain
from octavo.client import Client
from octavo.local_node import LocalNode
from octavo.sinks import BufferSink, BufferSource
from octavo.transfer import Rows, Transfer

READ_DEPTH: Final = 16
WRITE_DEPTH: Final = 8
"""As the node's own (``octavo_server.store.nvme.config``)."""

CHAINS: Final = 4
TIMEOUT_S: Final = 120.0


def run(*, directory: Path | None = None, rounds: int = 9) -> Mapping[str, object]:
    """All figures; ratios are of the plain I/O's speed (1 is level), except ``pipeline_ratio``,
    which is the time from NVMe to the worker over that of its slower half alone."""
    with tempfile.TemporaryDirectory(prefix="octavo-bench-", dir=directory) as place:
        figures = _transfers(Path(place), rounds)
    with tempfile.TemporaryDirectory(prefix="octavo-bench-", dir=directory) as place:
        return {
            "unit_bytes": UNIT_BYTES,
            "units": UNITS,
            "rounds": rounds,
            **figures,
            "recover_1m_s": recover_seconds(Path(place)),
        }


def _transfers(place: Path, rounds: int) -> dict[str, float]:
    node_of_two_chains = LocalNode(
        memory_bytes=2 * TOTAL_BYTES + (48 << 20),
        staging_ring_bytes="256MiB",
        nvme_dir=place / "nvme",
        nvme_bytes="2GiB",
    )
    plain = DirectFile(place / "plain.dat", UNIT_BYTES, UNITS)
    with plain, node_of_two_chains as node:
        node.start()
        with Client(node.address, layouts=[LAYOUT], transport="shm", timeout_s=TIMEOUT_S) as client:
            device = _Device(client, plain)
            writes = device.writes(rounds)
            reads = device.reads(rounds)
    return {**writes, **reads}


class _Device:
    """Chains on the node's device, and a plain file on the same one."""

    def __init__(self, client: Client, plain: DirectFile) -> None:
        self._client = client
        self._plain = plain
        random = np.random.default_rng(11)
        self._sources = [
            random.integers(0, 256, (UNITS, UNIT_BYTES), dtype=np.uint8) for _ in range(CHAINS)
        ]
        self._chains = [self._new_chain(random) for _ in range(CHAINS)]
        self._target = np.zeros((UNITS, UNIT_BYTES), dtype=np.uint8)
        self._random = random
        for which in range(CHAINS):
            self._put_and_flush(which)
        plain.write_all(self._sources[0], WRITE_DEPTH)

    def writes(self, rounds: int) -> dict[str, float]:
        """Put and flush beside plain writes and a sync."""
        ratios: list[float] = []
        ceilings: list[float] = []
        for turn in progress(range(rounds), "write", rounds):
            which = turn % CHAINS
            self._client.delete(self._chains[which])
            self._chains[which] = self._new_chain(self._random)
            ceilings.append(seconds(lambda: self._plain.write_all(self._sources[0], WRITE_DEPTH)))
            ratios.append(ceilings[-1] / self._put_and_flush(which))
        return {
            "write_ratio": median(ratios),
            "write_ceiling_gbps": TOTAL_BYTES / median(ceilings) / 1e9,
        }

    def reads(self, rounds: int) -> dict[str, float]:
        """NVMe to arena and NVMe to worker, beside plain reads and the copy alone."""
        figures: dict[str, list[float]] = {
            name: [] for name in ("plain", "to_arena", "to_worker", "copy")
        }
        turn = itertools.cycle(range(CHAINS))
        for which in itertools.islice(turn, CHAINS):  # the order of use is the order of turns
            self._get(which, _NoCopy(), from_nvme=False)
        for _ in progress(range(rounds), "read", rounds):
            figures["plain"].append(seconds(lambda: self._plain.read_all(READ_DEPTH)))
            figures["to_arena"].append(self._get(next(turn), _NoCopy()))
            self._target.fill(0)
            which, sink = next(turn), BufferSink(self._target, UNIT_BYTES)
            figures["to_worker"].append(self._get(which, sink))
            if not np.array_equal(self._target, self._sources[which]):
                raise BenchmarkError("the bytes that came are not those that were put")
            figures["copy"].append(self._get(which, sink, from_nvme=False))
        slower = [max(pair) for pair in zip(figures["to_arena"], figures["copy"], strict=True)]
        return {
            "read_ratio": _ratio(figures["plain"], figures["to_arena"]),
            "pipeline_ratio": _ratio(figures["to_worker"], slower),
            "read_ceiling_gbps": TOTAL_BYTES / median(figures["plain"]) / 1e9,
            "nvme_to_worker_gbps": TOTAL_BYTES / median(figures["to_worker"]) / 1e9,
        }

    def _new_chain(self, random: np.random.Generator) -> Chain:
        return self._client.chain(random.integers(0, 2**17, UNITS * LAYOUT.page_tokens).tolist())

    def _put_and_flush(self, which: int) -> float:
        begin = time.perf_counter()
        put = self._client.put(self._chains[which], BufferSource(self._sources[which], UNIT_BYTES))
        flushed = self._client.flush(timeout_s=TIMEOUT_S)
        taken_s = time.perf_counter() - begin
        if put.stored_pages != UNITS or flushed.volatile_pages:
            raise BenchmarkError(f"{put.counts}; {flushed.volatile_pages} pages are not durable")
        return taken_s

    def _get(self, which: int, sink: BufferSink | _NoCopy, *, from_nvme: bool = True) -> float:
        before = self._client.statistics().counters["nvme_loaded_units"]
        begin = time.perf_counter()
        got = self._client.get(self._chains[which], sink, timeout_s=TIMEOUT_S)
        taken_s = time.perf_counter() - begin
        loaded = self._client.statistics().counters["nvme_loaded_units"] - before
        if got.page_count != UNITS:
            raise BenchmarkError(f"{got.page_count} of {UNITS} pages came: {got.counts}")
        if from_nvme and loaded < 0.8 * UNITS:
            raise BenchmarkError(f"only {loaded} of {UNITS} units came from NVMe")
        return taken_s


class _NoCopy:
    """A sink that leaves the bytes where they are."""

    def begin(self, transfer: Transfer) -> None:
        """Nothing to prepare."""

    def accept_rows(self, rows: Rows) -> None:
        """Nothing to copy."""


def _ratio(upper: list[float], lower: list[float]) -> float:
    return median([above / below for above, below in zip(upper, lower, strict=True)])
