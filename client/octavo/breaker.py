"""A circuit breaker: after a failure, calls are misses at once until a probe succeeds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Final

BACKOFF_FIRST_S: Final = 0.5
BACKOFF_MAX_S: Final = 5.0
"""A node that comes back is noticed within this; a dead one costs one deadline each time."""


class BreakerState(Enum):
    """``CLOSED``: calls pass. ``OPEN``: they miss. ``PROBING``: one passes, the others miss."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """Whether to try. ``admit`` must be followed by ``succeeded`` or ``failed``. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._failure_count = 0
        self._retry_at_s = 0.0

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def failure_count(self) -> int:
        """Failures since the last success."""
        return self._failure_count

    def admit(self) -> bool:
        """Whether the caller may try now. After a backoff exactly one caller may."""
        if self._failure_count == 0:  # closed, the common case: no lock
            return True
        with self._lock:
            if self._state is BreakerState.OPEN and self._clock() >= self._retry_at_s:
                self._state = BreakerState.PROBING
                return True
            return self._state is BreakerState.CLOSED

    def succeeded(self) -> None:
        """The node answered."""
        if self._failure_count == 0:
            return
        with self._lock:
            self._state = BreakerState.CLOSED
            self._failure_count = 0

    def failed(self) -> None:
        """The node did not answer. Doubles the backoff, once a round of concurrent calls."""
        with self._lock:
            if self._state is BreakerState.OPEN:
                return  # a call admitted before it opened: the same failure seen twice
            backoff_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(self._failure_count, 16))
            self._failure_count += 1
            self._state = BreakerState.OPEN
            self._retry_at_s = self._clock() + backoff_s
