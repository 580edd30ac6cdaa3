"""What the node counts. Names are those of ``/metrics`` without the ``octavo_`` prefix."""

from __future__ import annotations

from collections import Counter
from typing import Final

COUNTER_NAMES: Final = (
    "match_calls",
    "match_pages_asked",
    "match_pages_present",
    "get_calls",
    "get_pages_memory",
    "get_pages_nvme",
    "get_pages_missing",
    "get_pages_corrupt",
    "get_pages_unavailable",
    "get_bytes",
    "put_units_reserved",
    "put_units_present",
    "put_units_refused",
    "put_units_stored",
    "put_pages_stored",
    "put_bytes",
    "bulk_streams_opened",
    "bulk_streams_refused",
    "bulk_streams_stalled",
    "bulk_requests_refused",
    "bulk_sent_bytes",
    "bulk_received_bytes",
    "bulk_units_corrupt",
    "leases_granted",
    "leases_expired",
    "holds_granted",
    "holds_expired",
    "reservations_made",
    "reservations_expired",
    "memory_evicted_pages",
    "memory_evicted_before_durable_pages",
    "nvme_evicted_pages",
    "nvme_written_pages",
    "nvme_write_failed_pages",
    "nvme_loaded_units",
    "nvme_load_failed_units",
    "quarantined_pages",
    "recovered_pages",
    "recovered_dropped_pages",
    "deleted_pages",
    "expired_pages",
    "pin_granted_pages",
    "pin_refused_pages",
    "hints_ongoing",
    "hints_ended",
    "hints_pause",
    "hints_tool_call",
    "sessions_opened",
    "sessions_closed",
    "sessions_refused",
    "requests_refused",
)
"""Every counter there is; they all start at zero, so that a rate is never missing."""


class Counters(Counter[str]):
    """Monotonic counts by name. A name that is not in the list is a mistake of ours."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(COUNTER_NAMES, 0))

    def add(self, name: str, count: int = 1) -> None:
        """Adds to one counter."""
        assert name in self, f"unknown counter {name}"
        self[name] += count
