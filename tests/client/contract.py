"""What the tests of the client on real nodes share: a layout, pages, clients."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

import octavo
from octavo.terms import TransportChoice

LAYOUT = octavo.Layout(
    name="main", model="m", layers=4, kv_heads=2, head_dim=32, dtype="float16", layer_parts=2
)
"""Pages of two units of 8 KiB."""

FOREIGN = octavo.foreign_layout("foreign", "lmcache")
UNIT = LAYOUT.raw_unit_bytes(0)
UNITS = LAYOUT.unit_count

Bytes = NDArray[np.uint8]


def client_of(
    address: str, transport: str, *, timeout_s: float = 10.0, layout: octavo.Layout = LAYOUT
) -> octavo.Client:
    return octavo.Client(
        address,
        layouts=[layout, FOREIGN],
        transport=cast("TransportChoice", transport),
        timeout_s=timeout_s,
    )


def transport_of(client: octavo.Client) -> TransportChoice:
    return cast("TransportChoice", client.transport_name)


def joined(*parts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate(parts)


def prompt(seed: int, page_count: int) -> NDArray[np.int64]:
    """Token ids of a prompt that no other seed shares."""
    return np.random.default_rng(seed).integers(0, 2**31, page_count * 16)


def content(seed: int, page_count: int) -> Bytes:
    """Bytes of all units of a prompt's pages."""
    size_bytes = page_count * UNITS * UNIT
    return np.random.default_rng(seed + 1).integers(0, 256, size_bytes, dtype=np.uint8)


def stored_prompt(client: octavo.Client, seed: int, page_count: int) -> tuple[octavo.Chain, Bytes]:
    """A prompt of which every page was put."""
    chain, data = client.chain(prompt(seed, page_count)), content(seed, page_count)
    result = client.put(chain, octavo.BufferSource(data, UNIT))
    assert result.counts == {octavo.Status.STORED: page_count * UNITS}
    return chain, data


def arena_mappings() -> int:
    """Mappings of a node's memory in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:octavo")


def buffer_for(page_count: int, units: int = UNITS) -> Bytes:
    return np.zeros(page_count * units * UNIT, dtype=np.uint8)


def sink_for(buffer: Bytes) -> octavo.BufferSink:
    return octavo.BufferSink(buffer, UNIT)
