"""Deadlines, and the cancellation of what waits under them."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from octavo.errors import CallCancelled, NodeTimeout


class Cancellable(Protocol):
    """A gRPC call in progress."""

    def cancel(self) -> object:
        """Ends it; harmless when it has ended."""
        ...


class CallScope:
    """Every gRPC call made on behalf of one asyncio call, so that all can be cancelled."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self._lock = threading.Lock()
        self._calls: set[Cancellable] = set()
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """Cancels what runs now and whatever would be started later."""
        with self._lock:
            self._cancelled = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    @contextmanager
    def watching(self, call: Cancellable) -> Generator[None]:
        """``call`` is cancelled with the scope while the block runs.

        Raises:
            CallCancelled: the scope is cancelled already.
        """
        with self._lock:
            if not self._cancelled:
                self._calls.add(call)
        if self._cancelled:
            call.cancel()
            raise CallCancelled("cancelled")
        try:
            yield
        finally:
            with self._lock:
                self._calls.discard(call)


current_scope: contextvars.ContextVar[CallScope | None] = contextvars.ContextVar(
    "octavo_call_scope", default=None
)
"""The scope that calls made in this context belong to; None in synchronous use."""


class Deadline:
    """A moment until which an answer is of use. Time spent waiting for a thread counts."""

    def __init__(self, timeout_s: float) -> None:
        scope = current_scope.get()
        self._end_s = (time.monotonic() if scope is None else scope.started_s) + timeout_s

    def remaining_s(self) -> float:
        """Seconds left, 0 when it has passed."""
        return max(0.0, self._end_s - time.monotonic())

    def require_s(self) -> float:
        """Seconds left.

        Raises:
            NodeTimeout: none are.
            CallCancelled: the call was cancelled meanwhile.
        """
        scope = current_scope.get()
        if scope is not None and scope.cancelled:
            raise CallCancelled("cancelled")
        left_s = self.remaining_s()
        if left_s <= 0:
            raise NodeTimeout("the deadline passed")
        return left_s
