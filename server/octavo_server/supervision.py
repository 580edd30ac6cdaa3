"""Background tasks whose death somebody notices."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Final

_log = logging.getLogger(__name__)


class Supervisor:
    """Runs tasks that must live as long as the node. One that ends is a problem of the node."""

    def __init__(self, on_death: Callable[[], None]) -> None:
        self._on_death: Final = on_death
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._dead: dict[str, str] = {}
        self._stopping = False

    def start(self, name: str, work: Coroutine[None, None, None]) -> None:
        """Runs ``work`` as the background task ``name``."""
        task = asyncio.create_task(work, name=name)
        self._tasks[name] = task
        task.add_done_callback(self._ended)

    def problems(self) -> tuple[str, ...]:
        """A sentence for each task that died."""
        return tuple(f"background task {name} died: {why}" for name, why in self._dead.items())

    async def stop(self) -> None:
        """Cancels all tasks and waits for their end."""
        self._stopping = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._stopping:
            return
        error = None if task.cancelled() else task.exception()
        self._dead[task.get_name()] = repr(error) if error else "it ended"
        _log.critical("background task %s died", task.get_name(), exc_info=error)
        self._on_death()
