"""Room in the staging ring: handed out in order, given back in any order, reused in order."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from octavo.deadline import Deadline
from octavo.errors import NodeTimeout, SessionLost

ALIGNMENT: Final = 64
"""A cache line: rows never share one, and every element type is aligned."""


class Span:
    """A contiguous part of the ring: ``[offset, offset + size_bytes)``, plus skipped room."""

    __slots__ = ("charged_bytes", "free", "offset", "size_bytes")

    def __init__(self, offset: int, size_bytes: int, charged_bytes: int) -> None:
        self.offset = offset
        self.size_bytes = size_bytes
        self.charged_bytes = charged_bytes
        self.free = False


class RingState:
    """The decisions, without locks: who gets what, and what is free.

    Live spans lie between tail and head, in the order in which they were handed out. A span
    that would cross the ring's end starts at 0 instead and is charged for the room it skips.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes: Final = size_bytes
        self._head = 0
        self._used_bytes = 0
        self._spans: deque[Span] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes that are not free, skipped room included."""
        return self._used_bytes

    def take(self, size_bytes: int) -> Span | None:
        """A span, or None while there is no room for it."""
        size_bytes = aligned(size_bytes)
        if not self._spans:
            self._head = 0  # empty: start over, so that a span of the whole ring fits
        wraps = self._head + size_bytes > self.size_bytes
        charged = size_bytes + (self.size_bytes - self._head if wraps else 0)
        if self._used_bytes + charged > self.size_bytes:
            return None
        offset = 0 if wraps else self._head
        self._head = offset + size_bytes
        self._used_bytes += charged
        span = Span(offset, size_bytes, charged)
        self._spans.append(span)
        return span

    def give_back(self, span: Span) -> None:
        """Frees a span; its room is reused once all older spans are free too."""
        span.free = True
        while self._spans and self._spans[0].free:
            self._used_bytes -= self._spans.popleft().charged_bytes


class Ring:
    """``RingState`` for several threads, with waiting.

    A span whose commit was never answered is not given back: the node may still be reading it,
    and bytes of another page written there would be stored under the wrong key. ``close`` ends
    the ring instead; the next session has a new one.
    """

    def __init__(self, size_bytes: int) -> None:
        self._state = RingState(size_bytes)
        self._condition = threading.Condition()
        self._closed = False

    @property
    def size_bytes(self) -> int:
        return self._state.size_bytes

    @property
    def used_bytes(self) -> int:
        return self._state.used_bytes

    def take(self, size_bytes: int, deadline: Deadline) -> Span:
        """Waits for room.

        Raises:
            NodeTimeout: none within the deadline.
            SessionLost: the ring was closed.
        """
        with self._condition:
            while True:
                if self._closed:
                    raise SessionLost("the staging ring was closed")
                span = self._state.take(size_bytes)
                if span is not None:
                    return span
                if not self._condition.wait(deadline.require_s()):
                    raise NodeTimeout("no room in the staging ring within the deadline")

    def give_back(self, span: Span) -> None:
        with self._condition:
            self._state.give_back(span)
            self._condition.notify_all()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()


def aligned(size_bytes: int) -> int:
    """``size_bytes`` rounded up to the alignment."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
