"""What the client swallowed: each failure that became a miss is counted here."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from octavo.breaker import BreakerState


@dataclass(frozen=True, slots=True)
class Health:
    """A snapshot. ``counters`` has one entry for each kind of event that happened."""

    breaker: BreakerState
    counters: dict[str, int] = field(default_factory=dict[str, int])
    last_failure: str = ""

    @property
    def swallowed_count(self) -> int:
        """Failures that were answered as misses."""
        return sum(
            count for name, count in self.counters.items() if name.startswith(("miss_", "skipped_"))
        )


class HealthRecorder:
    """Counts events. Names are fixed in the code, so the table is bounded. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._last_failure = ""

    def count(self, event: str, amount: int = 1) -> None:
        with self._lock:
            self._counters[event] += amount

    def failure(self, event: str, error: BaseException) -> None:
        """Counts ``event`` and remembers the message."""
        with self._lock:
            self._counters[event] += 1
            self._last_failure = f"{event}: {type(error).__name__}: {error}"

    def snapshot(self, breaker: BreakerState) -> Health:
        with self._lock:
            return Health(breaker, dict(self._counters), self._last_failure)
