"""What matches found a moment ago.

The next turn of a conversation asks for the pages of this one, and at the same distances from
its beginning. Only what was there is kept: a page that is missing may be published any moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

ENTRIES_MAX: Final = 65_536
"""About 15 MB at most."""

AGE_S: Final = 1.0
"""A holder's page that goes is named this much longer, and costs a miss."""


class NearCache:
    """Values of fields by page key, for a short while. The oldest go first."""

    def __init__(
        self,
        entries_max: int = ENTRIES_MAX,
        age_s: float = AGE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._entries_max = entries_max
        self._age_s = age_s
        self._now = now
        # Insertion order is order of age: an entry is taken out before it is put again.
        self._entries: dict[bytes, tuple[bytes, float]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, keys: Iterable[bytes]) -> list[bytes | None]:
        """The values of ``keys``; None where it is not known."""
        oldest = self._now() - self._age_s
        found: list[bytes | None] = []
        for key in keys:
            entry = self._entries.get(key)
            found.append(entry[0] if entry is not None and entry[1] > oldest else None)
        return found

    def put(self, keys: Iterable[bytes], values: Iterable[bytes]) -> None:
        """Keeps what was read just now; empty values are not kept."""
        now = self._now()
        for key, value in zip(keys, values, strict=True):
            self._entries.pop(key, None)
            if value:
                self._entries[key] = (value, now)
        self._trim(now)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Somebody did not have what was named: look again next time."""
        for key in keys:
            self._entries.pop(key, None)

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()

    def _trim(self, now: float) -> None:
        while self._entries:
            key, (_, put_at) = next(iter(self._entries.items()))
            if len(self._entries) <= self._entries_max and put_at > now - self._age_s:
                return
            del self._entries[key]
