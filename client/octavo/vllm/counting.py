"""Counters of one half of the connector, drained into vLLM's statistics once a step."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

COUNTERS: Final[dict[str, str]] = {
    "matches": "Matches asked for.",
    "match_timeouts": "Matches that took longer than match_timeout_s: misses.",
    "match_refused": "Matches that the node refused: misses.",
    "loads_not_worth": "Hits that were left, since computing them was estimated to be faster.",
    "loaded_pages": "Pages loaded into the engine's blocks, counted by each worker.",
    "load_failed_pages": "Pages that a match had found and that did not come in time.",
    "loaded_bytes": "Bytes of loaded pages.",
    "saved_pages": "Pages stored on the node, counted by each worker.",
    "save_present_pages": "Pages that turned out to be on the node already.",
    "save_failed_pages": "Pages that the node did not take.",
    "save_dropped_pages": "Pages whose blocks were reused before there was room to copy them.",
    "saved_bytes": "Bytes put.",
    "unpinned_pages": "Pages that requests wished to be pinned and that are not.",
    "hints_lost": "Hints about sessions that no node heard.",
    "bad_params": "Requests that say what nobody understands: they go without.",
}


class Counters:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        assert name in COUNTERS, name
        if amount:
            with self._lock:
                self._counts[name] += amount

    def drain(self) -> dict[str, int]:
        """What was counted since the last call."""
        if not self._counts:
            return {}
        with self._lock:
            counts, self._counts = dict(self._counts), Counter()
        return counts
