"""What a resident page costs the node in memory of its own, beside its bytes in the arena."""

from __future__ import annotations

import random
from typing import Final

import numpy as np

from octavo.bench.measuring import progress
from octavo.client import Client
from octavo.local_node import LocalNode
from octavo.sinks import BufferSource
from octavo_proto.layout import Layout

PAGES: Final = 200_000
CHAIN_PAGES: Final = 2_000
WARM_CHAINS: Final = 5
"""Put before the first reading, so that what any put allocates once isn't counted."""

_LAYOUT: Final = Layout(
    name="bench-tiny", model="bench-tiny", layers=1, kv_heads=1, head_dim=128, dtype="uint8"
)
_UNIT_BYTES: Final = _LAYOUT.raw_page_bytes


def overhead_bytes_per_page() -> float:
    """Growth of the node's anonymous memory per page over 200,000 pages of 4 KiB."""
    with LocalNode(memory_bytes="1GiB", staging_ring_bytes="64MiB") as node:
        node.start()
        with Client(node.address, layouts=[_LAYOUT], timeout_s=30.0) as client:
            for _ in range(WARM_CHAINS):
                _put_chain(client)
            before = node.memory_bytes("RssAnon")
            chains = PAGES // CHAIN_PAGES
            for _ in progress(range(chains), "overhead", chains):
                _put_chain(client)
            grown = node.memory_bytes("RssAnon") - before
            resident = next(
                tier.page_count for tier in client.statistics().tiers if tier.tier == "memory"
            )
    expected = (chains + WARM_CHAINS) * CHAIN_PAGES
    if resident != expected:
        raise RuntimeError(f"{resident} pages are resident, expected {expected}")
    return grown / (chains * CHAIN_PAGES)


def _put_chain(client: Client) -> None:
    tokens = [random.randrange(2**17) for _ in range(CHAIN_PAGES * 16)]  # noqa: S311
    data = np.zeros((CHAIN_PAGES, _UNIT_BYTES), dtype=np.uint8)
    put = client.put(client.chain(tokens), BufferSource(data, _UNIT_BYTES))
    if put.stored_pages != CHAIN_PAGES:
        raise RuntimeError(f"{put.stored_pages} of {CHAIN_PAGES} pages were stored")
