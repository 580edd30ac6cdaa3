"""Who asks next: sessions take turns, a bounded number of requests at a time."""

from __future__ import annotations

import heapq


class ClosedLoop:
    """Sessions in the order in which they became due. Decides, and waits for nothing.

    A session is due again ``think_s`` after its answer. Without thinking time, and with more
    sessions than ``in_flight`` requests, every session waits for all others between two turns.
    """

    def __init__(self, sessions: int, turns: int, in_flight: int, think_s: float = 0.0) -> None:
        self._turns_left = [turns] * sessions
        self._free = in_flight
        self._think_s = think_s
        self._due = [(0.0, place, place) for place in range(sessions if turns else 0)]
        self._arrivals = sessions

    @property
    def is_done(self) -> bool:
        """Whether every turn was taken."""
        return not any(self._turns_left)

    def take(self, now_s: float) -> int | None:
        """The session whose next request is sent now; None if none is."""
        if not self._free or not self._due or self._due[0][0] > now_s:
            return None
        session = heapq.heappop(self._due)[2]
        self._free -= 1
        self._turns_left[session] -= 1
        return session

    def answered(self, session: int, now_s: float) -> None:
        """The session got its answer."""
        self._free += 1
        if self._turns_left[session]:
            self._arrivals += 1
            heapq.heappush(self._due, (now_s + self._think_s, self._arrivals, session))

    def wait_s(self, now_s: float) -> float | None:
        """Until a request is to be sent; None: not before an answer has come."""
        if not self._free or not self._due:
            return None
        return max(0.0, self._due[0][0] - now_s)
