"""A node's state at one moment, as plain values.

The assembly builds one on demand; the HTTP port and the Admin service only render it.
Making a snapshot reads counters and scans the page table, and does not make a page look used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """One tier. ``used_bytes`` counts whole slots, ``page_bytes`` the content in them."""

    tier: str
    capacity_bytes: int
    used_bytes: int
    page_bytes: int
    page_count: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A node at one moment.

    ``counters`` only grow while the node lives and ``gauges`` may go both ways; their names
    are lower-case words joined by underscores, with the unit last (``put_bytes``), and carry
    neither the ``octavo_`` prefix nor the ``_total`` suffix that /metrics adds.

    ``problems`` are sentences that make the node unhealthy (a background task died, a device
    is out of service); ``warnings`` are sentences an operator should read, and nothing more.
    """

    node_id: str
    boot_id: str
    version: str
    uptime_s: float
    ready: bool
    draining: bool
    tiers: tuple[TierSnapshot, ...]
    counters: Mapping[str, int]
    gauges: Mapping[str, float]
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
