"""Things that run out: leases, holds, reservations and idle sessions."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final


@dataclass(order=True, slots=True)
class _Entry:
    due: float
    number: int
    expire: Callable[[], None] = field(compare=False)


class Deadline:
    """A moment that may be moved. ``expire`` is called once, when it has passed."""

    __slots__ = ("_cancelled", "_deadlines", "_expire", "due")

    def __init__(self, deadlines: Deadlines, due: float, expire: Callable[[], None]) -> None:
        self.due = due
        self._deadlines = deadlines
        self._expire = expire
        self._cancelled = False

    def move(self, due: float) -> None:
        """Lets it run out at another moment."""
        earlier = due < self.due
        self.due = due
        if earlier:
            self._deadlines.push(due, self.check)

    def cancel(self) -> None:
        """It never runs out."""
        self._cancelled = True

    def check(self) -> None:
        """Expires it if it has run out, else waits on. For ``Deadlines``."""
        if self._cancelled:
            return
        if self.due > self._deadlines.now():
            self._deadlines.push(self.due, self.check)
            return
        self._cancelled = True
        self._expire()


class Deadlines:
    """A heap of deadlines on a monotonic clock. Moving one costs nothing until it comes up."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now: Final = now
        self._heap: list[_Entry] = []
        self._number = 0

    def after(self, delay_s: float, expire: Callable[[], None]) -> Deadline:
        """``expire`` is called when ``delay_s`` have passed, unless it is moved or cancelled."""
        deadline = Deadline(self, self.now() + delay_s, expire)
        self.push(deadline.due, deadline.check)
        return deadline

    def push(self, due: float, expire: Callable[[], None]) -> None:
        """Calls ``expire`` at ``due``."""
        self._number += 1
        heapq.heappush(self._heap, _Entry(due, self._number, expire))

    def run_due(self) -> None:
        """Expires what is due now. To be called a few times a second."""
        now = self.now()
        while self._heap and self._heap[0].due <= now:
            heapq.heappop(self._heap).expire()
