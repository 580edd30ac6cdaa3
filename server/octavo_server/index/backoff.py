"""Not asking again at once what failed a moment ago."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

FIRST_S: Final = 0.05
LAST_S: Final = 2.0
"""The longest a server that is back goes unnoticed."""


class Backoff:
    """Doubling pauses with jitter. While one lasts nobody asks; after it one caller may."""

    def __init__(
        self,
        first_s: float = FIRST_S,
        last_s: float = LAST_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self._now = now
        self._pause_s = 0.0
        self._until_s = float("-inf")

    @property
    def remaining_s(self) -> float:
        """How long nobody should ask; 0 if one may now."""
        return max(0.0, self._until_s - self._now())

    def may_ask(self) -> bool:
        """Whether to ask now. After a failure the one that is told yes asks for all others:
        they wait another pause for what it finds."""
        if self._pause_s == 0.0:
            return True
        if self.remaining_s > 0:
            return False
        self._until_s = self._now() + self._pause_s
        return True

    def succeeded(self) -> None:
        """Everybody may ask."""
        self._pause_s = 0.0
        self._until_s = float("-inf")

    def failed(self) -> None:
        """Nobody asks for a while, longer with each failure in a row."""
        self._pause_s = min(self._last_s, max(self._first_s, 2 * self._pause_s))
        # Nodes that lost the same Redis do not come back all at once.
        self._until_s = self._now() + self._pause_s * random.uniform(0.5, 1.0)  # noqa: S311
