"""Bounds of this node, with what they protect."""

from __future__ import annotations

from dataclasses import dataclass

from octavo_proto import limits as protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """What one session may hold at a time, and for how long. Seconds and counts."""

    chain_pages_max: int = protocol.CHAIN_PAGES_MAX
    lease_s: float = 10.0
    hold_s: float = 30.0
    reservation_s: float = 30.0
    leases_max: int = 256
    holds_max: int = 256
    reservations_max: int = 256
    hold_share_max: float = 0.25
    """Part of the arena that one session's holds may keep from being evicted."""
    reserved_share_max: float = 0.5
    """Part of the arena that all reservations together may take before they are filled."""
    pin_share_max: float = 0.125
    """Part of the smaller tier that pages pinned by requests may take."""
