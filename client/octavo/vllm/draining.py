"""Waits for the saves of this process's workers: for tests, benchmarks and orderly ends."""

from __future__ import annotations

import atexit
import time
import weakref
from typing import Final, Protocol


class Drainable(Protocol):
    def drain(self, timeout_s: float) -> bool: ...


EXIT_DRAIN_S: Final = 5.0
"""What nobody closed before the process ends is put within this."""

_savers: Final[weakref.WeakSet[Drainable]] = weakref.WeakSet()


def register(saver: Drainable) -> None:
    """``drain_saves`` waits for it from now on, and so does the end of the process."""
    _savers.add(saver)


def forget(saver: Drainable) -> None:
    """It is closed: nothing will become of what it still has."""
    _savers.discard(saver)


def drain_saves(worker: object = None, timeout_s: float = 10.0) -> bool:
    """Waits until all blocks that this process's workers took are put, and visible to others.

    False: some were not within ``timeout_s``. ``worker`` is ignored: it is what vLLM's
    ``collective_rpc`` passes to a function that it runs in each worker.
    """
    deadline_s = time.monotonic() + timeout_s
    return all(saver.drain(max(0.0, deadline_s - time.monotonic())) for saver in list(_savers))


# vLLM 0.30 ends a process that is its own worker without shutting the connector down. The saving
# thread then died with what it had: once with 29 of the 102 pages of four prompts.
atexit.register(drain_saves, None, EXIT_DRAIN_S)
