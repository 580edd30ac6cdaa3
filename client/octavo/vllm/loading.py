"""Loads: pages go from the node's memory straight into the engine's blocks, on threads.

Every load ends with a report, whatever happens, for its request waits for it. Pages that did
not come in time are reported as failed, and the engine computes them.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

from octavo.chain import Chain
from octavo.client import Client
from octavo.errors import OctavoError
from octavo.results import GetResult
from octavo.vllm.blocks import Blocks
from octavo.vllm.orders import LoadReport, PageOrder

THREADS: Final = 2
"""Copying holds no GIL, so that two share the memory's bandwidth while calls wait."""

logger = logging.getLogger("octavo.vllm")


@dataclass(frozen=True, slots=True)
class LoadJob:
    """A load and what it needs. It must have ended by ``deadline_s`` (monotonic)."""

    client: Client
    blocks: Blocks
    chain: Chain
    order: PageOrder
    deadline_s: float
    wait_pending: bool


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load that ended."""

    report: LoadReport
    failed_block_ids: tuple[int, ...]
    """Blocks that hold pages which did not come, in whole or in part."""


class Loader:
    """``submit`` returns at once; ``ended`` tells what ended since it was last asked."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[LoadJob | None] = SimpleQueue()
        self._ended: list[Loaded] = []
        self._open_count = 0
        self._condition = threading.Condition()
        self._complaint = ""
        self._threads = [
            threading.Thread(target=self._run, name=f"octavo-load-{place}", daemon=True)
            for place in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: LoadJob) -> None:
        """Begins a load."""
        self._open_count += 1
        self._jobs.put(job)

    def run(self, job: LoadJob) -> None:
        """Loads on the caller's thread, which waits."""
        self._open_count += 1
        self._end(self._load(job))

    def ended(self, wait_s: float = 0.0) -> list[Loaded]:
        """Loads that ended since the last call; waits for one if some are open."""
        with self._condition:
            if self._open_count and not self._ended and wait_s:
                self._condition.wait(wait_s)
            ended, self._ended = self._ended, []
            self._open_count -= len(ended)
        return ended

    def close(self) -> None:
        """Ends the threads once they are idle."""
        for _thread in self._threads:
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._end(self._load(job))

    def _end(self, loaded: Loaded) -> None:
        with self._condition:
            self._ended.append(loaded)
            self._condition.notify()

    def _load(self, job: LoadJob) -> Loaded:
        order, begin_s = job.order, time.monotonic()
        result: GetResult | None = None
        try:
            with job.blocks.transfers():
                result = self._get(job)
        except OctavoError as error:
            self._complain(str(error))
        except Exception:  # whatever it was: the request waits for a report, and computes then
            logger.exception("octavo: a load failed")
        pages = 0 if result is None else result.page_count
        size_bytes = 0 if result is None else result.bytes_copied
        report = LoadReport(
            order.request_id,
            order.first_page,
            order.page_end,
            order.first_page + pages,
            size_bytes,
            time.monotonic() - begin_s,
        )
        return Loaded(report, failed_blocks(order, report.loaded_end, job.blocks.pages_per_block))

    def _get(self, job: LoadJob) -> GetResult | None:
        timeout_s = job.deadline_s - time.monotonic()
        if timeout_s <= 0:
            return None
        order = job.order
        return job.client.get(
            job.chain,
            job.blocks.sink(order.block_ids, order.first_page),
            first_page=order.first_page,
            page_count=order.page_end - order.first_page,
            units=job.blocks.units,
            wait_pending=job.wait_pending,
            timeout_s=timeout_s,
        )

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            logger.error("octavo: loads fail: %s", text)


def failed_blocks(order: PageOrder, loaded_end: int, pages_per_block: int) -> tuple[int, ...]:
    """Blocks of an order that hold pages from ``loaded_end`` on."""
    if loaded_end >= order.page_end:
        return ()
    return order.block_ids[loaded_end // pages_per_block - order.first_page // pages_per_block :]
