"""What a store does besides its callers' wishes: compacts its log, watches the free space."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from octavo_proto.layout import Layout
from octavo_server.store.file_ops import FileOps
from octavo_server.store.io_pool import IoPool
from octavo_server.store.nvme.bodies import Bodies
from octavo_server.store.nvme.compaction import compact
from octavo_server.store.nvme.health import SpaceGuard, StoreCounters
from octavo_server.store.nvme.log import GroupCommit
from octavo_server.store.nvme.replay import LogEnd

COMPACTION_RECORDS_MIN: Final = 65_536
"""6 MiB of log: replaying less is not worth a rewrite."""

COMPACTION_RATIO: Final = 2
"""Log records per live unit at which the log is rewritten: that writes a third of what the log
itself did, and a restart reads about three records per live unit at most."""

COMPACTION_RETRY_S: Final = 60.0
"""Pause after a failed compaction: each try reads the whole log."""

SPACE_LOOK_INTERVAL_S: Final = 1.0


class Upkeep:
    """Background work of one store. All methods run on the event loop."""

    def __init__(
        self,
        directory: Path,
        io: IoPool,
        files: FileOps,
        *,
        seed: int,
        bodies: Bodies,
        guard: SpaceGuard,
        counters: StoreCounters,
        layouts: Mapping[int, Layout],
    ) -> None:
        """``guard`` has had its first look."""
        self.compaction_error: str | None = None
        self._directory = directory
        self._io = io
        self._files = files
        self._seed = seed
        self._bodies = bodies
        self._guard = guard
        self._counters = counters
        self._layouts = layouts
        self._loop = asyncio.get_running_loop()
        self._compaction: asyncio.Task[None] | None = None
        self._compaction_after = 0.0
        self._looked_at = self._loop.time()
        self._look: asyncio.Task[None] | None = None

    def compaction_due(self, record_count: int, unit_count: int) -> bool:
        """Whether the log should be switched now, with so many records in it."""
        return (
            record_count > max(COMPACTION_RECORDS_MIN, COMPACTION_RATIO * unit_count)
            and self._compaction is None
            and self._loop.time() >= self._compaction_after
        )

    def compact(self, commit: GroupCommit, number: int, end: LogEnd) -> None:
        """Begins to replace what lies before log ``number``, which began at ``end``."""
        if self._compaction is None:
            self._compaction = self._loop.create_task(self._compact(commit, number, end))

    def look_at_space(self) -> None:
        """Has a thread look at the file system if the last look is too old."""
        if self._look is None and self._loop.time() - self._looked_at >= SPACE_LOOK_INTERVAL_S:
            self._look = self._loop.create_task(self._look_now())

    async def settle(self) -> None:
        """Waits for what is under way."""
        tasks: list[asyncio.Task[Any]] = [t for t in (self._compaction, self._look) if t]
        if tasks:
            await asyncio.wait(tasks)

    async def _compact(self, commit: GroupCommit, number: int, end: LogEnd) -> None:
        layouts = np.fromiter(self._layouts, dtype=np.uint16)
        try:
            replayed = await self._io.run(
                lambda: compact(
                    self._directory,
                    number,
                    end,
                    seed=self._seed,
                    files=self._files,
                    layouts=layouts,
                )
            )
        except Exception as error:  # noqa: BLE001 - the old files still count; health tells
            self._counters.compaction_errors += 1
            self.compaction_error = str(error) or repr(error)
            self._compaction_after = self._loop.time() + COMPACTION_RETRY_S
        else:
            self._counters.compactions += 1
            self.compaction_error = None
            commit.record_count -= replayed
        finally:
            self._compaction = None

    async def _look_now(self) -> None:
        try:
            self._guard.looked(*await self._io.run(self._bodies.space))
        except OSError:
            self._counters.read_errors += 1
        finally:
            self._looked_at = self._loop.time()
            self._look = None
