"""``octavo bench nvme``: the NVMe tier beside plain O_DIRECT I/O, and a restart with much in it.

The plain I/O moves pieces of the same size as units, with as many threads as the node uses,
through O_DIRECT, and syncs. Both sides overwrite blocks that exist. All is taken alternately,
and ratios are medians over the rounds. ``series_ms`` has every single time, in order.

Writes: five chains of 640 units of 320 KiB are put one after the other and flushed, beside as
many pieces written plainly; the time is from the first put until all of it is durable.
Reads: the node is restarted with memory for two of the chains, so that getting them in turn
reads each from the device. Got bytes are compared with what was put.

Each of ours stands between two plain ones and is held against both: a device that others use too
changes its pace within a run (ceilings of 1.1 to 2.4 GB/s were seen minutes apart on one), and
plain writes of the same blocks took 0.28 and 0.42 s in turn. What comes first would win or lose
by that.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from octavo.bench.direct_io import DirectFile
from octavo.bench.local import LAYOUT, TOTAL_BYTES, UNIT_BYTES, UNITS, BenchmarkError
from octavo.bench.measuring import median, progress, seconds
from octavo.bench.recovery import recover_seconds
from octavo.client import Client
from octavo.local_node import LocalNode
from octavo.sinks import BufferSink, BufferSource
from octavo.transfer import Rows, Transfer

T = TypeVar("T")

READ_DEPTH: Final = 16
WRITE_DEPTH: Final = 8
"""As the node's own (``octavo_server.store.nvme.config``)."""

READ_ROUNDS_PER_ROUND: Final = 3
"""A round of reads takes a tenth of the time that one of writes does, and varies more."""

CHAINS: Final = 5
"""An odd number: they are read in turn, and each lies elsewhere on the device. Of four, the reads
to the worker would always get two, and those to the arena that they are held against the others;
the ratio was then 1.0 in one run and 1.5 in the next."""

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


def _transfers(place: Path, rounds: int) -> dict[str, object]:
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
                device.writes(rounds)
            node.stop()
        with node_with(room_for_two) as node:
            node.start()
            with _client(node) as client:
                device.meet(client)
                device.reads(READ_ROUNDS_PER_ROUND * rounds)
                device.pipeline(rounds)
    return {**figures_of(device.series), "series_ms": in_ms(device.series)}


def figures_of(series: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Ratios and speeds from the times, in seconds, that ``series_ms`` lists."""
    write = beside(series["write_plain"], series["write_durable"])
    read = beside(series["read_plain"], series["read_to_arena"])
    wholes = list(zip(series["to_worker"], series["half_copy"], strict=True))
    whole = beside(series["half_to_arena"], wholes)
    return {
        "write_ratio": median([plain / durable for plain, durable in write]),
        "write_ceiling_gbps": CHAINS * TOTAL_BYTES / median(series["write_plain"]) / 1e9,
        "read_ratio": median([plain / arena for plain, arena in read]),
        "read_ceiling_gbps": TOTAL_BYTES / median(series["read_plain"]) / 1e9,
        "pipeline_ratio": median([both / max(arena, copy) for arena, (both, copy) in whole]),
        "nvme_to_worker_gbps": TOTAL_BYTES / median(series["to_worker"]) / 1e9,
    }


def beside(around: Sequence[float], taken: Sequence[T]) -> list[tuple[float, T]]:
    """Each of ``taken`` twice: with the time ``around`` it before, and with the one after.

    Their mean in one pair would be simpler, and wrong: times have a long tail upwards, so the
    median of means of two lies above that of single times, and the side that is averaged seems
    slower than it is (by up to 0.13 of the ratio on a machine that was busy).
    """
    pairs = zip(itertools.pairwise(around), taken, strict=True)
    return [(time_s, middle) for both, middle in pairs for time_s in both]


def in_ms(series: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """The times in milliseconds, to a hundredth."""
    return {name: [round(1e3 * time_s, 2) for time_s in times] for name, times in series.items()}


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
        self._turn = itertools.cycle(range(CHAINS))
        self.series: defaultdict[str, list[float]] = defaultdict(list)
        """Seconds of each measurement, by what was measured."""
        plain.fill(self._source)
        plain.write_all(WRITE_DEPTH)
        self._put_and_flush()  # blocks exist from now on

    def meet(self, client: Client) -> None:
        """Goes on with the node as another process."""
        self._client = client

    def writes(self, rounds: int) -> None:
        """Puts and a flush, each time between two plain writes and a sync."""
        series = self.series
        series["write_plain"].append(self._write_plainly())
        for _ in progress(range(rounds), "write", rounds):
            for tokens in self._tokens:
                self._client.delete(self._client.chain(tokens))
            series["write_durable"].append(self._put_and_flush())
            series["write_plain"].append(self._write_plainly())

    def reads(self, rounds: int) -> None:
        """NVMe to arena, each time between two plain reads."""
        series = self.series
        for which in itertools.islice(self._turn, CHAINS):  # the order of use is that of turns
            self._get(which, _NoCopy(), from_nvme=False)
        series["read_plain"].append(self._read_plainly())
        for _ in progress(range(rounds), "read", rounds):
            series["read_to_arena"].append(self._get(next(self._turn), _NoCopy()))
            series["read_plain"].append(self._read_plainly())

    def pipeline(self, rounds: int) -> None:
        """NVMe to worker, each time between two of NVMe to arena, and the copy alone."""
        series = self.series
        series["half_to_arena"].append(self._get(next(self._turn), _NoCopy()))
        for _ in progress(range(rounds), "pipeline", rounds):
            self._target.fill(0)
            which, sink = next(self._turn), BufferSink(self._target, UNIT_BYTES)
            series["to_worker"].append(self._get(which, sink))
            if not np.array_equal(self._target, self._source):
                raise BenchmarkError("the bytes that came are not those that were put")
            series["half_copy"].append(self._get(which, sink, from_nvme=False))
            series["half_to_arena"].append(self._get(next(self._turn), _NoCopy()))

    def _write_plainly(self) -> float:
        return seconds(lambda: self._plain.write_all(WRITE_DEPTH))

    def _read_plainly(self) -> float:
        return seconds(lambda: self._plain.read_some(UNITS, READ_DEPTH))

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
