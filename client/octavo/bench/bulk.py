"""``octavo bench bulk``: get and put over bulk streams on loopback, beside plain sockets.

The worker is this process; the node is a child. The ceiling is another child that sends and takes
the same bytes over as many plain blocking sockets, ``sendmsg`` to ``recv_into``, with nothing
named and nothing checked, taken alternately with what is measured; ratios are medians over the
pairs. Got bytes are checked against their digests on the way, and compared afterwards. The same
through gRPC's messages stands beside it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

import numpy as np

from octavo.bench.local import LAYOUT, TIMEOUT_S, TOTAL_BYTES, UNIT_BYTES, UNITS, BenchmarkError
from octavo.bench.measuring import median, progress, seconds
from octavo.bench.plain_sockets import PlainPeer
from octavo.chain import Chain
from octavo.client import Client
from octavo.local_node import LocalNode
from octavo.sinks import BufferSink, BufferSource
from octavo.transport.bulk import STREAMS

INLINE_EVERY = 5
"""A pair in so many also goes through gRPC, which takes as long as several others."""


def run(*, pairs: int) -> Mapping[str, object]:
    """All figures; names end in their units, ratios are of the ceiling's speed (1 is level)."""
    share_bytes = -(-TOTAL_BYTES // STREAMS)
    with (
        LocalNode(
            memory_bytes="1GiB", listen_bulk="127.0.0.1:0", allow_unauthenticated_tcp="true"
        ) as node,
        PlainPeer(share_bytes, STREAMS) as plain,
    ):
        node.start()
        with (
            Client(node.address, layouts=[LAYOUT], transport="bulk", timeout_s=TIMEOUT_S) as bulk,
            Client(node.address, layouts=[LAYOUT], transport="grpc", timeout_s=TIMEOUT_S) as inline,
        ):
            worker = _Worker(bulk, inline, plain)
            puts = worker.puts(pairs)
            gets = worker.gets(pairs)
            if bulk.transport_name != "bulk" or "bulk_fell_back" in bulk.health.counters:
                raise BenchmarkError(f"not all bytes went over streams: {bulk.health}")
    return {
        "unit_bytes": UNIT_BYTES,
        "units": UNITS,
        "streams": STREAMS,
        "pairs": pairs,
        **gets,
        **puts,
    }


class _Worker:
    """This process as a worker without shared memory."""

    def __init__(self, bulk: Client, inline: Client, plain: PlainPeer) -> None:
        self._bulk = bulk
        self._inline = inline
        self._plain = plain
        generator = np.random.default_rng(11)
        self._source = generator.integers(0, 256, TOTAL_BYTES, dtype=np.uint8)
        self._target = np.ones_like(self._source)
        self._plain_target = np.ones_like(self._source)
        self._chain = self._new_chain(bulk)

    def puts(self, pairs: int) -> dict[str, float]:
        """Put beside the ceiling: until the node says that all is stored and visible."""
        figures = self._beside("put", pairs, self._put, self._plain_put_s)
        self._put(self._bulk)
        return figures

    def gets(self, pairs: int) -> dict[str, float]:
        """Get beside the ceiling: from the call to received, checked and released."""
        return self._beside("get", pairs, self._get, self._plain_get_s)

    def _beside(
        self, what: str, pairs: int, ours_s: Callable[[Client], float], plain_s: Callable[[], float]
    ) -> dict[str, float]:
        ours_s(self._bulk)  # warm: the arena's memory exists
        plain_s()
        ratios: list[float] = []
        ceilings: list[float] = []
        taken: list[float] = []
        inline: list[float] = []
        for pair in progress(range(pairs), what, pairs):
            ceilings.append(plain_s())
            taken.append(ours_s(self._bulk))
            ratios.append(ceilings[-1] / taken[-1])
            if pair % INLINE_EVERY == 0:
                inline.append(ours_s(self._inline))
        return {
            f"{what}_ratio": median(ratios),
            f"{what}_gbps": TOTAL_BYTES / median(taken) / 1e9,
            f"{what}_ceiling_gbps": TOTAL_BYTES / median(ceilings) / 1e9,
            f"grpc_{what}_gbps": TOTAL_BYTES / median(inline) / 1e9,
        }

    def _new_chain(self, client: Client) -> Chain:
        self._tokens = [random.randrange(2**17) for _ in range(UNITS * 16)]  # noqa: S311
        return client.chain(self._tokens)

    def _plain_put_s(self) -> float:
        return seconds(lambda: self._plain.put(self._source.data))

    def _plain_get_s(self) -> float:
        return seconds(lambda: self._plain.get(self._plain_target.data, UNIT_BYTES))

    def _put(self, client: Client) -> float:
        client.delete(self._chain)
        self._chain = self._new_chain(client)
        begin = time.perf_counter()
        put = client.put(self._chain, BufferSource(self._source, UNIT_BYTES))
        taken_s = time.perf_counter() - begin
        if put.stored_pages != UNITS:
            raise BenchmarkError(f"{put.counts} of {UNITS} units")
        return taken_s

    def _get(self, client: Client) -> float:
        self._target[:] = 0
        chain = client.chain(self._tokens)
        begin = time.perf_counter()
        got = client.get(chain, BufferSink(self._target, UNIT_BYTES))
        taken_s = time.perf_counter() - begin
        if got.page_count != UNITS or not np.array_equal(self._target, self._source):
            raise BenchmarkError("the bytes that came are not those that were put")
        return taken_s
