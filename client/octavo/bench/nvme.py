"""``octavo bench nvme``: the NVMe tier beside plain O_DIRECT I/O, and a restart with much in it.

The plain I/O moves pieces of the same size as units, with as many threads as the node uses,
through O_DIRECT, and syncs. Both sides overwrite blocks that exist. All is taken alternately,
and ratios are medians over the rounds.

Writes: four chains of 640 units of 320 KiB are put one after the other and flushed, beside as
many pieces written plainly; the time is from the first put until all of it is durable.
Reads: the node is restarted with memory for two of the chains, so that getting them in turn
reads each from the device. Got bytes are compared with what was put.
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
    def node_with(memory_bytes: int) -> LocalNode:
        return LocalNode(
            memory_bytes=memory_bytes,
            staging_ring_bytes="256MiB",
            nvme_dir=place / "nvme",
            nvme_bytes="2GiB",
            state_dir=place / "state",
        )

    room_for_all, room_for_two = (CHAINS + 2) * TOTAL_BYTES, 2 * TOTAL_BYTES + (48 << 20)
    with DirectFile(place / "plain.dat", UNIT_BYTES, CHAINS * UNITS) as plain:
        with node_with(room_for_all) as node:
            node.start()
            with _client(node) as client:
                device = _Device(client, plain)
                writes = device.writes(rounds)
            node.stop()
        with node_with(room_for_two) as node:
            node.start()
            with _client(node) as client:
                device.meet(client)
                reads = device.reads(rounds)
    return {**writes, **reads}


def _client(node: LocalNode) -> Client:
    return Client(node.address, layouts=[LAYOUT], transport="shm", timeout_s=TIMEOUT_S)


class _Device:
    """Chains on the node's device, and a plain file on the same one."""

    def __init__(self, client: Client, plain: DirectFile) -> None:
        self._client = client
        self._plain = plain
        random = np.random.default_rng(11)
        self._source = random.integers(0, 256, (UNITS, UNIT_BYTES), dtype=np.uint8)
        self._target = np.zeros_like(self._source)
        self._random = random
        self._tokens: list[list[int]] = []
        plain.fill(self._source)
        plain.write_all(WRITE_DEPTH)
        self._put_and_flush()  # blocks exist from now on

    def meet(self, client: Client) -> None:
        """Goes on with the node as another process."""
        self._client = client

    def writes(self, rounds: int) -> dict[str, float]:
        """Puts and a flush beside plain writes and a sync."""
        ratios: list[float] = []
        ceilings: list[float] = []
        for _ in progress(range(rounds), "write", rounds):
            for tokens in self._tokens:
                self._client.delete(self._client.chain(tokens))
            ceilings.append(seconds(lambda: self._plain.write_all(WRITE_DEPTH)))
            ratios.append(ceilings[-1] / self._put_and_flush())
        return {
            "write_ratio": median(ratios),
            "write_ceiling_gbps": CHAINS * TOTAL_BYTES / median(ceilings) / 1e9,
        }

    def reads(self, rounds: int) -> dict[str, float]:
        """NVMe to arena and NVMe to worker, beside plain reads and the copy alone."""
        names = ("plain", "to_arena", "to_worker", "copy")
        figures: dict[str, list[float]] = {name: [] for name in names}
        turn = itertools.cycle(range(CHAINS))
        for which in itertools.islice(turn, CHAINS):  # the order of use is the order of turns
            self._get(which, _NoCopy(), from_nvme=False)
        for _ in progress(range(rounds), "read", rounds):
            figures["plain"].append(seconds(lambda: self._plain.read_some(UNITS, READ_DEPTH)))
            figures["to_arena"].append(self._get(next(turn), _NoCopy()))
            self._target.fill(0)
            which, sink = next(turn), BufferSink(self._target, UNIT_BYTES)
            figures["to_worker"].append(self._get(which, sink))
            if not np.array_equal(self._target, self._source):
                raise BenchmarkError("the bytes that came are not those that were put")
            figures["copy"].append(self._get(which, sink, from_nvme=False))
        slower = [max(pair) for pair in zip(figures["to_arena"], figures["copy"], strict=True)]
        return {
            "read_ratio": _ratio(figures["plain"], figures["to_arena"]),
            "pipeline_ratio": _ratio(figures["to_worker"], slower),
            "read_ceiling_gbps": TOTAL_BYTES / median(figures["plain"]) / 1e9,
            "nvme_to_worker_gbps": TOTAL_BYTES / median(figures["to_worker"]) / 1e9,
        }

    def _put_and_flush(self) -> float:
        page_tokens = UNITS * LAYOUT.page_tokens
        self._tokens = [
            self._random.integers(0, 2**17, page_tokens).tolist() for _ in range(CHAINS)
        ]
        chains = [self._client.chain(tokens) for tokens in self._tokens]
        begin = time.perf_counter()
        for chain in chains:
            put = self._client.put(chain, BufferSource(self._source, UNIT_BYTES))
            if put.stored_pages != UNITS:
                raise BenchmarkError(f"a put ended with {put.counts}")
        flushed = self._client.flush(timeout_s=TIMEOUT_S)
        taken_s = time.perf_counter() - begin
        if flushed.volatile_pages:
            raise BenchmarkError(f"{flushed.volatile_pages} pages are not durable")
        return taken_s

    def _get(self, which: int, sink: BufferSink | _NoCopy, *, from_nvme: bool = True) -> float:
        chain = self._client.chain(self._tokens[which])
        before = self._client.statistics().counters["nvme_loaded_units"]
        begin = time.perf_counter()
        got = self._client.get(chain, sink, timeout_s=TIMEOUT_S)
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
