"""``octavo bench local``: get, put and match between a worker and the node beside it.

The worker is this process; the node is a child with an arena of its own and no NVMe tier. The
unit of 320 KiB is a rank's share of a 70B model's page at 8 bits and TP 8. The ceiling is
torch's ``dst.copy_(src)`` of the same bytes on one thread, everything touched beforehand, taken
alternately with what is measured; ratios are medians over the pairs. Got pages go to rows in
random order, as in an engine's paged cache, and are compared with what was put.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Final

import numpy as np
import torch

from octavo.bench.measuring import median, median_ms, progress, seconds
from octavo.bench.overhead import overhead_bytes_per_page
from octavo.chain import Chain
from octavo.client import Client
from octavo.local_node import LocalNode
from octavo.sinks import BufferSink, BufferSource
from octavo.transfer import Rows, Transfer
from octavo_proto.keys import page_keys
from octavo_proto.layout import Layout

UNITS: Final = 640
LAYOUT: Final = Layout(
    name="bench", model="bench-70b-rank", layers=80, kv_heads=1, head_dim=128, dtype="uint8"
)
UNIT_BYTES: Final = LAYOUT.raw_page_bytes
TOTAL_BYTES: Final = UNITS * UNIT_BYTES

SMALL_LAYOUT: Final = Layout(
    name="bench-small", model="bench-small", layers=1, kv_heads=1, head_dim=128, dtype="uint8"
)
LONG_CHAIN_PAGES: Final = 8192
MATCH_REPEATS: Final = 30
TIMEOUT_S: Final = 30.0


class BenchmarkError(RuntimeError):
    """A result is not what it must be, so no figure of the run counts."""


def run(*, pairs: int) -> Mapping[str, object]:
    """All figures; names end in their units, ratios are of the ceiling's speed (1 is level)."""
    torch.set_num_threads(1)
    with LocalNode(memory_bytes="1GiB", staging_ring_bytes="256MiB") as node:
        node.start()
        with Client(
            node.address, layouts=[LAYOUT, SMALL_LAYOUT], transport="shm", timeout_s=TIMEOUT_S
        ) as client:
            worker = _Worker(client)
            puts = worker.puts(pairs)
            gets = worker.gets(pairs)
            latencies = worker.latencies()
        with Client(
            node.address, layouts=[LAYOUT], transport="grpc", timeout_s=TIMEOUT_S
        ) as client:
            inline_gbps = worker.inline_get_gbps(client)
    return {
        "unit_bytes": UNIT_BYTES,
        "units": UNITS,
        "pairs": pairs,
        **gets,
        **puts,
        **latencies,
        "inline_get_gbps": inline_gbps,
        "overhead_bytes_per_page": overhead_bytes_per_page(),
    }


class _Worker:
    """This process as an inference worker: buffers, and a chain at a time in the node."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._source = torch.randint(0, 256, (UNITS, UNIT_BYTES), dtype=torch.uint8)
        self._target = torch.zeros_like(self._source)
        self._ceiling_target = torch.zeros_like(self._source)
        self._rows = np.random.default_rng(7).permutation(UNITS)
        self._chain = self._new_chain()

    def puts(self, pairs: int) -> dict[str, float]:
        """Put beside the ceiling: until the worker's buffers are free, and until Match finds it."""
        self._put()  # warm: the ring's and the arena's pages exist
        worker_ratios: list[float] = []
        visible_ratios: list[float] = []
        for _ in progress(range(pairs), "put", pairs):
            self._client.delete(self._chain)
            self._chain = self._new_chain()
            ceiling_s = self._ceiling_s()
            worker_s, visible_s = self._put()
            worker_ratios.append(ceiling_s / worker_s)
            visible_ratios.append(ceiling_s / visible_s)
        return {
            "put_worker_ratio": median(worker_ratios),
            "put_visible_ratio": median(visible_ratios),
        }

    def gets(self, pairs: int) -> dict[str, float]:
        """Get beside the ceiling: from the call to copied, lease-checked and released."""
        self._get(self._rows)
        ratios: list[float] = []
        ordered_ratios: list[float] = []
        ceilings: list[float] = []
        taken: list[float] = []
        for _ in progress(range(pairs), "get", pairs):
            self._target.zero_()
            ceilings.append(self._ceiling_s())
            taken.append(self._get(self._rows))
            ratios.append(ceilings[-1] / taken[-1])
            if not torch.equal(self._target[torch.tensor(self._rows.tolist())], self._source):
                raise BenchmarkError("the bytes that came are not those that were put")
            ordered_ratios.append(self._ceiling_s() / self._get(None))
        return {
            "get_ratio": median(ratios),
            "get_in_order_ratio": median(ordered_ratios),
            "ceiling_gbps": TOTAL_BYTES / median(ceilings) / 1e9,
            "get_gbps": TOTAL_BYTES / median(taken) / 1e9,
        }

    def latencies(self) -> dict[str, float]:
        """Match, grants and hashing, without moving bytes."""
        tokens = [random.randrange(2**17) for _ in range(LONG_CHAIN_PAGES * 16)]  # noqa: S311
        long_chain = self._client.chain(tokens, layout=SMALL_LAYOUT.name)
        small = SMALL_LAYOUT.raw_page_bytes
        data = np.zeros((LONG_CHAIN_PAGES, small), dtype=np.uint8)
        put = self._client.put(long_chain, BufferSource(data, small))
        if put.stored_pages != LONG_CHAIN_PAGES:
            raise BenchmarkError(f"{put.stored_pages} of {LONG_CHAIN_PAGES} pages were stored")

        def match() -> None:
            found = self._client.match(long_chain).page_count
            if found != LONG_CHAIN_PAGES:
                raise BenchmarkError(f"match found {found} of {LONG_CHAIN_PAGES} pages")

        grants: list[float] = []
        for _ in range(MATCH_REPEATS):
            sink = _GrantClock()
            begin = time.perf_counter()
            got = self._client.get(self._chain, sink)
            grants.append(sink.last_s - begin)
            if got.page_count != UNITS:
                raise BenchmarkError(f"{got.page_count} of {UNITS} pages were granted")
        fingerprint = SMALL_LAYOUT.fingerprint()
        return {
            "match_8192_ms": median_ms(match, MATCH_REPEATS),
            "grant_640_ms": median(grants) * 1e3,
            "rpc_ms": median_ms(self._client.statistics, MATCH_REPEATS),
            "hash_8192_ms": median_ms(lambda: page_keys(bytes(32), fingerprint, 16, tokens), 9),
        }

    def inline_get_gbps(self, client: Client) -> float:
        """Get through gRPC messages, for workers without shared memory."""
        chain = client.chain(self._tokens)
        taken: list[float] = []
        for _ in range(5):
            begin = time.perf_counter()
            got = client.get(chain, BufferSink(self._target, UNIT_BYTES))
            taken.append(time.perf_counter() - begin)
            if got.page_count != UNITS or not torch.equal(self._target, self._source):
                raise BenchmarkError("the bytes that came inline are not those that were put")
        return TOTAL_BYTES / median(taken) / 1e9

    def _new_chain(self) -> Chain:
        self._tokens = [random.randrange(2**17) for _ in range(UNITS * 16)]  # noqa: S311
        chain = self._client.chain(self._tokens)
        if chain.page_count != UNITS:
            raise BenchmarkError("a chain has the wrong length")
        return chain

    def _ceiling_s(self) -> float:
        return seconds(lambda: self._ceiling_target.copy_(self._source))

    def _put(self) -> tuple[float, float]:
        begin = time.perf_counter()
        put = self._client.put(self._chain, BufferSource(self._source, UNIT_BYTES))
        found = self._client.match(self._chain)
        visible_s = time.perf_counter() - begin
        if put.stored_pages != UNITS or found.page_count != UNITS:
            raise BenchmarkError(f"{put.counts} of {UNITS} units, {found.page_count} pages found")
        return put.worker_s, visible_s

    def _get(self, rows: np.ndarray[tuple[int], np.dtype[np.int64]] | None) -> float:
        sink = BufferSink(self._target, UNIT_BYTES, rows)
        begin = time.perf_counter()
        got = self._client.get(self._chain, sink)
        taken_s = time.perf_counter() - begin
        if got.page_count != UNITS:
            raise BenchmarkError(f"{got.page_count} of {UNITS} pages came")
        return taken_s


class _GrantClock:
    """A sink that copies nothing and notes when the last grant came."""

    def __init__(self) -> None:
        self.last_s = 0.0

    def begin(self, transfer: Transfer) -> None:
        """Nothing to prepare."""

    def accept_rows(self, rows: Rows) -> None:
        """Notes the time."""
        self.last_s = time.perf_counter()
